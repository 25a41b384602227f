"""Optimizers by name: the class that a name makes, its arguments, and its memory."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from can_train.config.settings import CHOICES, TrainingSettings
from can_train.config.task_settings import import_from
from can_train.errors import CanTrainError, ConfigError
from can_train.fit.optimizer import make_optimizer, state_bytes
from can_train.fit.optimizer_memory import measure_optimizer
from can_train.memory.sharded_tensors import load_sharded_optimizer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = CHOICES["optimizer"]
CLASSES = {key.lower(): kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}

LION = """
import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in [parameters for parameters in group["params"] if parameters.grad is not None]:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                first, second = group["betas"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((moment * first + parameter.grad * (1 - first)).sign(), alpha=-group["lr"])
                moment.mul_(second).add_(parameter.grad, alpha=1 - second)


class Twice(Lion):
    def step(self, closure):
        return super().step()


class Moody(Lion):
    def eval(self):
        pass


class Nothing:
    pass
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def made(device: torch.device = CPU, **training: Any) -> torch.optim.Optimizer:
    settings = TrainingSettings(**training)
    return make_optimizer(list(model().parameters()), settings, 0.01, device)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        optimizer.zero_grad()
        (net(inputs) - inputs[:, :1]).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("adamw", lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)),
        ("adam", lambda parameters: torch.optim.Adam(parameters, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)),
        ("sgd", lambda parameters: torch.optim.SGD(parameters, 0.01, 0.9, weight_decay=0.1)),
    ],
)
def test_the_names_of_version_0_1_make_bit_by_bit_what_they_made(name: str, theirs: Any) -> None:
    settings = TrainingSettings(optimizer=name, betas=[0.8, 0.95], weight_decay=0.1)
    mine, other, third = model(), model(), model()
    steps = trained(mine, make_optimizer(list(mine.parameters()), settings, 0.01, CPU))
    assert all(map(torch.equal, steps, trained(other, theirs(other.parameters()))))
    # A momentum or betas that are not passed on would show.
    assert not all(map(torch.equal, steps, trained(third, CLASSES[name](third.parameters(), lr=0.01))))


def test_every_optimizer_of_torch_has_its_name_or_a_reason() -> None:
    kinds = {name for name, kind in CLASSES.items() if issubclass(kind, torch.optim.Optimizer)} - {"optimizer"}
    # Muon takes matrices alone, and has the name of a task: it is named by its path.
    assert kinds - {"lbfgs", "sparseadam", "muon"} == set(CHOICES["optimizer"])
    for name, reason in (("LBFGS", "computes the loss several times"), ("SparseAdam", "sparse gradients")):
        for spelling in (name, f"torch.optim.{name}"):
            with pytest.raises(ConfigError, match=f"cannot be {name}: .*{reason}"):
                TrainingSettings(optimizer=spelling)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_any_case_makes_the_class_with_what_it_takes_of_the_settings(name: str) -> None:
    kind = CLASSES[name]
    optimizer = made(optimizer=kind.__name__, weight_decay=0.25, betas=[0.5, 0.75])
    assert type(optimizer) is kind
    expected = {"lr": 0.01, "weight_decay": 0.25, "betas": (0.5, 0.75)}
    assert {key: value for key, value in optimizer.defaults.items() if key in expected} == {
        key: value for key, value in expected.items() if key in optimizer.defaults
    }
    assert TrainingSettings(optimizer=f"torch.optim.{kind.__name__}").optimizer == name


@pytest.mark.parametrize("name", NAMES)
def test_the_planned_memory_is_what_its_state_takes(name: str) -> None:
    net, settings = nn.Linear(6, 20_000), TrainingSettings(optimizer=name)
    optimizer = make_optimizer(list(net.parameters()), settings, 0.01, CPU)
    trained(net, optimizer)
    planned = measure_optimizer(
        net.parameters(), lambda parameters: make_optimizer(list(parameters), settings, 0.01, CPU)
    )
    assert planned.state_bytes == pytest.approx(state_bytes(optimizer), abs=4096)
    assert planned.state_bytes > 20_000


@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_a_step_is_measured_as_it_is_taken(name: str) -> None:
    groups = made(CUDA, optimizer=name).param_groups
    fused = name in ("adamw", "adam", "sgd")
    assert all(bool(group.get("fused")) == fused and bool(group["foreach"]) == (not fused) for group in groups)
    given = made(CUDA, optimizer=name, optimizer_args={"foreach": False}).param_groups
    assert not any(group.get("fused") or group["foreach"] for group in given)


def test_further_arguments_are_passed_on_and_unknown_ones_are_named() -> None:
    defaults = made(optimizer="sgd", optimizer_args={"momentum": 0.5, "nesterov": True}).defaults
    assert (defaults["momentum"], defaults["nesterov"]) == (0.5, True)
    assert made(optimizer="adafactor", optimizer_args={"eps": [None, 0.01]}).defaults["eps"] == (None, 0.01)
    with pytest.raises(ConfigError, match=r"Unknown argument of RMSprop: 'momentun'\.\sNearest of 10: momentum"):
        made(optimizer="rmsprop", optimizer_args={"momentun": 0.5})
    with pytest.raises(ConfigError, match=r"SGD cannot be made: Nesterov momentum requires"):
        made(optimizer="sgd", optimizer_args={"momentum": 0.0, "nesterov": True})
    with pytest.raises(ConfigError, match=r"optimizer_args cannot have lr, .*: lr\.\sGive --lr"):
        TrainingSettings(optimizer_args={"lr": 1.0})
    with pytest.raises(ConfigError, match=r"Unknown value of training.optimizer: 'rmsprob'\.\sNearest of 12: rmsprop"):
        TrainingSettings(optimizer="rmsprob")


@pytest.fixture
def lion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_lion.py").write_text(LION)
    import_from(str(tmp_path))
    return "my_lion.py"


def test_a_class_of_a_file_or_of_a_package_keeps_its_own_betas(lion: str) -> None:
    for name in (f"{lion}:Lion", "my_lion.Lion", "my_lion:Lion"):
        optimizer = made(optimizer=name, weight_decay=0.5)
        assert type(optimizer).__name__ == "Lion"
        assert optimizer.defaults == {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.5}
    assert made(optimizer="my_lion.Lion", betas=[0.5, 0.75]).defaults["betas"] == (0.5, 0.75)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("my_lion.py:Twice", "cannot be my_lion.py:Twice: it computes the loss several times"),
        ("my_lion.Moody", "cannot be my_lion.Moody: its weights differ in training and evaluation"),
        ("my_lion.Nothing", "my_lion.Nothing does not derive from torch.optim.Optimizer"),
        ("my_lion.Loin", "Unknown class of my_lion: 'Loin'.\nValid, nearest first: Lion"),
        ("no_such_package.Lion", "needs a package that is not installed: no_such_package"),
        ("no_such_file.py:Lion", "There is no such file beside the task: 'no_such_file.py'"),
        ("../my_lion.py:Lion", "There is no such file beside the task: '../my_lion.py'"),
    ],
)
def test_a_class_that_cannot_train_is_refused_with_the_reason(lion: str, optimizer: str, message: str) -> None:
    with pytest.raises(CanTrainError, match=re.escape(message)):
        made(optimizer=optimizer)


def test_an_optimizer_for_matrices_alone_says_so() -> None:
    with pytest.raises(ConfigError, match="Muon cannot be made: Muon only supports 2D"):
        made(optimizer="torch.optim.Muon")


@pytest.mark.parametrize("norm", [0.0, 0.01])
def test_each_entry_of_a_gradient_is_clipped_once_after_unscaling_and_before_the_norm(norm: float) -> None:
    from can_train.fit.optimizer import make_optimization

    layer = nn.Linear(3, 1, bias=False)
    settings = TrainingSettings(optimizer="sgd", weight_decay=0.0, grad_clip_value=0.5, grad_clip_norm=norm,
                                precision="fp16", scheduler="constant", warmup_share=0.0)  # fmt: skip
    optimization = make_optimization(layer, settings, lr=0.1, total_steps=20)
    before = layer.weight.detach().clone()
    optimization.scaler.scale((layer.weight * torch.tensor([3.0, -4.0, 0.25])).sum()).backward()
    assert optimization.step()
    clipped = torch.tensor([0.5, -0.5, 0.25])
    expected = clipped * 0.1 * (norm / clipped.norm() if norm else 1.0)
    assert (before - layer.weight.detach())[0].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_a_state_that_an_optimizer_keeps_beside_those_of_parameters_is_loaded_as_it_is() -> None:
    makes = [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9) for _ in range(2)]
    before, after = makes
    before.state["whole run"] = {"calls": 3}  # type: ignore[index]
    load_sharded_optimizer(after, before.state_dict())
    assert after.state["whole run"] == {"calls": 3}  # type: ignore[index]
