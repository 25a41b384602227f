"""Every optimizer and schedule trains a task, and a run that is stopped goes on bit by bit."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from can_train.config.settings import CHOICES, TrainingSettings
from can_train.errors import ConfigError
from can_train.fit import optimizer as optimizers
from can_train.fit.schedules import Plateau
from can_train.training.session import Session
from fakes.line_fit import LineTask, StoppedTask, train_line

NAMES = [name for name in CHOICES["optimizer"] if name not in ("adamw", "adam", "sgd")]
SETTINGS = {"batch_size": 20, "micro_batch_size": 10, "epochs": 4, "precision": "fp64"}


def weights(session: Session) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()])


def whole_and_cut(folder: Path, step: int, **settings: Any) -> tuple[Session, Session]:
    """Trains a run in one go, and another that is stopped at a step and goes on."""
    whole = train_line(folder / "whole", **{**SETTINGS, **settings})
    with pytest.raises(SystemExit):
        train_line(folder / "cut", StoppedTask(after=step), **{**SETTINGS, **settings})
    return whole, train_line(folder / "cut", **{**SETTINGS, **settings})


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_trains_and_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    whole, cut = whole_and_cut(tmp_path, 5, optimizer=name, lr=0.02)
    assert torch.equal(weights(cut), weights(whole))
    assert whole.progress.best_epoch > 1


def test_a_state_whose_types_are_not_restored_goes_on_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers.Optimization, "load_state_dict", _by_torch_alone)
    whole, cut = whole_and_cut(tmp_path, 5, optimizer="nadam", lr=0.02)
    assert not torch.equal(weights(cut), weights(whole))


def _by_torch_alone(self: optimizers.Optimization, state: dict[str, Any]) -> None:
    for name, part in self._parts.items():
        part.load_state_dict(state[name])


@pytest.mark.parametrize("interval", CHOICES["scheduler_interval"])
@pytest.mark.parametrize("name", ["linear", "one-cycle", "step", "plateau", "wsd"])
def test_a_schedule_goes_on_bit_by_bit(tmp_path: Path, name: str, interval: str) -> None:
    # So high a rate that the loss does not fall: the plateau lowers it.
    settings = {"scheduler": name, "scheduler_interval": interval, "warmup_share": 0.1, "schedule_patience": 1,
                "lr": 3.0, "grad_clip_value": 1.0, "schedule_epochs": 1}  # fmt: skip
    whole, cut = whole_and_cut(tmp_path, 8, **settings)
    assert torch.equal(weights(cut), weights(whole))
    assert cut.engine.optimization.lr == whole.engine.optimization.lr < 3.0


def test_a_plateau_that_forgets_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget: Callable[..., None] = lambda self, state: None  # noqa: E731
    monkeypatch.setattr(Plateau, "load_state_dict", forget)
    whole, cut = whole_and_cut(tmp_path, 11, scheduler="plateau", schedule_patience=1, lr=3.0)
    assert whole.engine.optimization.lr < 3.0
    assert not torch.equal(weights(cut), weights(whole))


def test_arguments_and_a_clipped_value_change_the_training(tmp_path: Path) -> None:
    base = {**SETTINGS, "optimizer": "rmsprop", "epochs": 1}
    plain = weights(train_line(tmp_path / "plain", **base))
    with_momentum = weights(train_line(tmp_path / "momentum", **base, optimizer_args={"momentum": 0.9}))
    clipped = weights(train_line(tmp_path / "clipped", **base, grad_clip_value=1e-3))
    assert not torch.equal(plain, with_momentum)
    assert not torch.equal(plain, clipped)


SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "function": lambda optimizer, steps: lambda step: np.cos(step / steps),
    "one cycle": lambda optimizer, steps: OneCycleLR(optimizer, 0.5, total_steps=steps + 1),
    "exponential": lambda optimizer, steps: ExponentialLR(optimizer, 0.9),
    "in turn": lambda optimizer, steps: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, steps)], [4]
    ),
    "plateau": lambda optimizer, steps: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


class Scheduled(StoppedTask):
    """Has a schedule of its own."""

    def __init__(self, name: str, after: int = 10**9) -> None:
        super().__init__(after=after)
        self._name = name

    def schedule(self, optimizer: Any, steps: int) -> Any:
        return SCHEDULERS[self._name](optimizer, steps)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_tasks_own_schedule_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    settings = {**SETTINGS, "lr": 0.5, "grad_clip_value": 1.0}
    whole = train_line(tmp_path / "whole", Scheduled(name), **settings)
    with pytest.raises(SystemExit):
        train_line(tmp_path / "cut", Scheduled(name, after=7), **settings)
    cut = train_line(tmp_path / "cut", Scheduled(name), **settings)
    assert torch.equal(weights(cut), weights(whole))
    assert cut.engine.optimization.lr == whole.engine.optimization.lr != 0.5


def test_a_schedule_whose_state_is_not_saved_goes_on_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers.Optimization, "_restore_own_schedule", lambda self, state, fresh: None)
    settings = {**SETTINGS, "lr": 0.5, "grad_clip_value": 1.0}
    whole = train_line(tmp_path / "whole", Scheduled("one cycle"), **settings)
    with pytest.raises(SystemExit):
        train_line(tmp_path / "cut", Scheduled("one cycle", after=7), **settings)
    cut = train_line(tmp_path / "cut", Scheduled("one cycle"), **settings)
    assert not torch.equal(weights(cut), weights(whole))


NOISY = {"grad_noise": 0.3, "optimizer": "sgd", "lr": 1e-3, "epochs": 2}


def test_the_noise_of_a_gradient_goes_on_bit_by_bit_and_changes_the_training(tmp_path: Path) -> None:
    whole, cut = whole_and_cut(tmp_path, 5, **NOISY)
    assert torch.equal(weights(cut), weights(whole))
    plain = train_line(tmp_path / "plain", **{**SETTINGS, **NOISY, "grad_noise": 0.0})
    assert not torch.equal(weights(plain), weights(whole))


def noise_of_a_split(folder: Path) -> float:
    """Returns the largest difference of the weights by a split and a rescue, in a training with noise."""
    settings = {**SETTINGS, **NOISY}
    whole = train_line(folder / "whole", **{**settings, "micro_batch_size": 20})
    split = train_line(folder / "split", **{**settings, "micro_batch_size": 7})
    rescued = train_line(folder / "rescued", LineTask(fail_above=12), **{**settings, "micro_batch_size": 20})
    return float(max((weights(other) - weights(whole)).abs().max() for other in (split, rescued)))


def test_the_noise_of_a_gradient_is_the_same_for_a_batch_that_is_split_or_rescued(tmp_path: Path) -> None:
    assert noise_of_a_split(tmp_path) < 1e-12


def test_noise_of_the_global_generator_after_each_part_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generators = iter(range(10**6))
    monkeypatch.setattr(optimizers, "step_generator", lambda **key: torch.Generator().manual_seed(next(generators)))
    assert noise_of_a_split(tmp_path) > 1e-6


def test_noise_follows_clipping_with_the_deviation_of_its_step() -> None:
    layer = torch.nn.Linear(300, 300, bias=False)
    settings = TrainingSettings(grad_noise=0.2, grad_clip_value=1e-9, optimizer="sgd", optimizer_args={"momentum": 0.0})
    for number, expected in ((0, 0.2), (99, 0.2 / 100**0.275)):
        made = optimizers.make_optimization(layer, settings, lr=1.0, total_steps=200)
        layer.weight.grad = torch.ones_like(layer.weight)
        before = layer.weight.detach().clone()
        made.optimizer.param_groups[0]["lr"], made.optimizer.param_groups[0]["weight_decay"] = 1.0, 0.0
        made.step(number)
        assert float((layer.weight.detach() - before).std()) == pytest.approx(expected, rel=0.02)


def test_a_sparse_gradient_is_refused_noise() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    made = optimizers.make_optimization(table, TrainingSettings(grad_noise=0.2), lr=1.0, total_steps=2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="one of the model is sparse"):
        made.step()


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, False),
        ({"optimizer": "sgd"}, False),
        ({"optimizer": "sgd", "weight_decay": 0.0}, True),
        ({"optimizer": "adagrad", "weight_decay": 0.0}, True),
        ({"optimizer": "adagrad"}, False),
        ({"optimizer": "adagrad", "weight_decay": 0.0, "grad_clip_norm": 1.0}, False),
        ({"optimizer": "sgd", "weight_decay": 0.0, "grad_clip_value": 1.0}, False),
    ],
)
# PyTorch's own warning.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_refused_where_the_optimizer_would_fail(changes: dict[str, Any], takes: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1))
    settings = TrainingSettings(**changes)
    made = optimizers.make_optimization(model, settings, lr=1.0, total_steps=2)
    model(torch.tensor([1])).sum().backward()
    with nullcontext() if takes else pytest.raises(RuntimeError, match=r"[Ss]parse"):
        made.step()
    with (
        nullcontext() if takes else pytest.raises(ConfigError, match=r"takes dense gradients alone.*0 has sparse=True")
    ):
        optimizers.check_sparse(model, settings)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_train_as_dense_ones_and_their_momentum_has_the_rows_of_the_table() -> None:
    settings = TrainingSettings(optimizer="sgd", weight_decay=0.0)
    tables, states = [], []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(5, 2, sparse=sparse)
        made = optimizers.make_optimization(table, settings, lr=1.0, total_steps=9)
        for _ in range(9):
            # Most rows come several times.
            (0.01 * table(torch.randint(0, 5, (20,))).square().sum()).backward()
            made.step()
        tables.append(table.weight.detach())
        states.append(made.optimizer.state[table.weight]["momentum_buffer"])
    assert torch.allclose(*tables, rtol=0, atol=1e-6)
    assert states[1]._nnz() == 5


def test_a_sparse_gradient_is_found_in_the_model() -> None:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(5, 2, sparse=True), torch.nn.Linear(2, 1))
    assert [*optimizers.sparse_weights(model)] == ["0"]
    assert not optimizers.sparse_weights(model.requires_grad_(False))


def test_a_frozen_sparse_embedding_is_left_alone() -> None:
    optimizers.check_sparse(torch.nn.Embedding(5, 2, sparse=True).requires_grad_(False), TrainingSettings())
