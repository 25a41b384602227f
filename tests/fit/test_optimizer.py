import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from can_train.config.settings import TrainingSettings
from can_train.fit.optimizer import Optimization, make_optimization
from can_train.fit.optimizer_memory import OptimizerMemory, measure_optimizer
from can_train.fit.rescue import allocate_ballast
from can_train.memory.meters import open_meter

CPU = torch.device("cpu")


def optimization(**training: Any) -> tuple[nn.Linear, Optimization]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    settings = TrainingSettings(**{"epochs": 2, "scheduler": "constant", "warmup_share": 0.0} | training)
    return model, make_optimization(model, settings, lr=0.1, total_steps=20)


def rates(optimizer: Optimization, ticks: int) -> list[float]:
    found = []
    for _ in range(ticks):
        found.append(optimizer.lr)
        optimizer.optimizer.step()
        optimizer.scheduler.step()
    return found


def test_the_schedule_is_as_long_as_the_optimizer_steps() -> None:
    _, optimizer = optimization(scheduler="cosine")
    found = rates(optimizer, 20)
    assert found[0] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)
    assert optimizer.lr == pytest.approx(0.0)


def test_a_schedule_by_epoch_has_as_many_ticks_as_epochs() -> None:
    _, optimizer = optimization(scheduler="cosine", scheduler_interval="epoch")
    assert rates(optimizer, 3) == pytest.approx([0.1, 0.05, 0.0])


def test_the_warm_up_rises_to_the_full_rate() -> None:
    _, optimizer = optimization(warmup_share=0.2)
    assert rates(optimizer, 6) == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])


def test_a_gradient_is_clipped_to_its_norm_once_after_unscaling() -> None:
    model, optimizer = optimization(optimizer="sgd", weight_decay=0.0, grad_clip_norm=0.5, precision="fp16")
    before = model.weight.detach().clone()
    loss = (model.weight * torch.tensor([3.0, 4.0, 0.0])).sum()
    optimizer.scaler.scale(loss).backward()
    assert optimizer.step()
    assert (before - model.weight.detach()).tolist()[0] == pytest.approx([0.03, 0.04, 0.0], abs=1e-6)
    assert model.weight.grad is None


def test_a_step_whose_gradients_overflowed_is_skipped_and_said() -> None:
    model, optimizer = optimization(precision="fp16")
    before = model.weight.detach().clone()
    optimizer.scaler.scale(model.weight.sum() * float("inf")).backward()
    assert not optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_restored_optimization_goes_on_as_it_would_have(name: str) -> None:
    model, optimizer = optimization(optimizer=name, scheduler="cosine")
    other_model, other = optimization(optimizer=name, scheduler="cosine")

    def step(one: nn.Linear, by: Optimization) -> None:
        one(torch.ones(2, 3)).square().sum().backward()
        by.step()
        by.scheduler.step()

    step(model, optimizer)
    other_model.load_state_dict(model.state_dict())
    # Torch's optimizers keep the very tensors they are given.
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    step(other_model, other)
    assert torch.equal(model.weight, other_model.weight)
    assert optimizer.lr == other.lr


LAYERS = 8
LAYER_BYTES = 256 * 256 * 4
WEIGHTS = LAYERS * LAYER_BYTES


def layers() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(256, 256)) for _ in range(LAYERS)]


def measured(optimizer: Any, **settings: Any) -> OptimizerMemory:
    return measure_optimizer(layers(), partial(optimizer, lr=0.1, **settings))


@pytest.mark.parametrize(
    ("optimizer", "settings", "state", "total"),
    [
        (torch.optim.AdamW, {"foreach": True}, 2.0, 5.0),
        (torch.optim.AdamW, {"foreach": False}, 2.0, 4 + 3 / LAYERS),
        (torch.optim.AdamW, {"fused": True}, 2.0, 4.0),
        (torch.optim.SGD, {"momentum": 0.9}, 1.0, 3.0),
        (torch.optim.SGD, {"momentum": 0.0, "foreach": False}, 0.0, 2.0),
        (torch.optim.Adam, {"amsgrad": True, "foreach": False}, 3.0, 5 + 3 / LAYERS),
    ],
    ids=["adamw foreach", "adamw for-loop", "adamw fused", "sgd momentum", "sgd", "amsgrad"],
)
def test_an_optimizer_takes_what_is_known_of_it(
    optimizer: Any, settings: dict[str, Any], state: float, total: float
) -> None:
    memory = measured(optimizer, **settings)
    assert memory.parameter_bytes == WEIGHTS
    assert memory.state_bytes / WEIGHTS == pytest.approx(state, abs=0.01)
    needed = 2 * memory.parameter_bytes + memory.state_bytes + memory.transient_bytes
    assert needed / WEIGHTS == pytest.approx(total, rel=0.03)


def test_the_parameters_themselves_are_neither_stepped_nor_given_gradients() -> None:
    parameters = layers()
    before = [parameter.detach().clone() for parameter in parameters]
    handed: list[nn.Parameter] = []

    def make(shadows: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        handed.extend(shadows)
        return torch.optim.AdamW(shadows, lr=0.1)

    measure_optimizer(parameters, make)
    assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(now, then) for now, then in zip(parameters, before, strict=True))
    assert not {id(shadow) for shadow in handed} & {id(parameter) for parameter in parameters}


def test_half_precision_weights_have_half_precision_state() -> None:
    halves = [nn.Parameter(torch.zeros(256, 256, dtype=torch.bfloat16))]
    memory = measure_optimizer(halves, partial(torch.optim.AdamW, foreach=False))
    assert memory.parameter_bytes == LAYER_BYTES / 2
    assert memory.state_bytes == pytest.approx(LAYER_BYTES, rel=0.01)


class Later(torch.optim.SGD):
    """Needs 1 MiB for a moment in one of its steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, hungry: int) -> None:
        super().__init__(parameters, lr=0.1)
        self._left = hungry

    def step(self, closure: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            torch.empty(2**20, dtype=torch.uint8)
        return super().step(closure)


@pytest.mark.parametrize("hungry", [1, 2])
def test_what_only_the_first_or_only_a_later_step_needs_counts(hungry: int) -> None:
    memory = measure_optimizer(layers(), partial(Later, hungry=hungry))
    assert (memory.state_bytes, memory.transient_bytes) == (0, 2**20)


def test_state_in_small_tensors_fits_where_a_single_tensor_of_its_size_does_not() -> None:
    meter, need, small = open_meter("sim:8MiB"), 3 * 2**20, (64 * 2**10,)
    with meter.measuring([]):
        held = allocate_ballast(need, small, meter.device)
        assert held is not None
        assert sum(tensor.nbytes for tensor in held) == need
        del held
        assert allocate_ballast(need, (need,), meter.device) is None
