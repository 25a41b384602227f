"""The optimizer's first step has its room, on CUDA as on the simulated GPU."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from can_train.config.settings import CHOICES, TrainingSettings
from can_train.errors import DoesNotFitError
from can_train.fit.optimizer import make_optimizer
from can_train.fit.optimizer_memory import OptimizerMemory, measure_optimizer
from can_train.fit.rescue import OptimizerReserve
from can_train.memory.meters import Meter
from gpu.trainer import limited_device

MIB = 2**20
CAPACITIES = {"cuda": 1024 * MIB, "sim": 256 * MIB}
WIDTH = 2048
"""Of a layer whose weights take 16 MiB."""

CHUNK = 8 * MIB
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")


@pytest.fixture(params=[pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda]), "sim"], name="meter")
def limited_meter(request: pytest.FixtureRequest) -> Iterator[Meter]:
    gc.collect()
    if request.param == "cuda":
        torch.cuda.empty_cache()
    with limited_device(request.param, CAPACITIES[request.param]) as meter:
        yield meter


def with_gradients(meter: Meter) -> nn.Module:
    model = nn.Linear(WIDTH, WIDTH).to(meter.device)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def needs_of(model: nn.Module, meter: Meter) -> OptimizerMemory:
    with meter.host():
        return measure_optimizer(model.parameters(), lambda shadows: AdamW(shadows, fused=True))


def everything_else(meter: Meter) -> list[Tensor]:
    """Takes what can be had, as a batch that grew would."""
    taken = []
    while True:
        try:
            taken.append(torch.empty(CHUNK, dtype=torch.uint8, device=meter.device))
        except torch.OutOfMemoryError:
            return taken


def test_the_state_of_a_real_step_takes_what_was_measured_on_the_host(meter: Meter) -> None:
    model = with_gradients(meter)
    needs = needs_of(model, meter)
    optimizer = AdamW(model.parameters(), fused=True)
    before = meter.allocated_bytes()
    meter.reset_peak()
    optimizer.step()
    assert meter.allocated_bytes() - before == needs.state_bytes
    assert meter.peak_bytes() - before <= needs.state_bytes + needs.transient_bytes


@pytest.mark.parametrize("name", CHOICES["optimizer"])
def test_a_step_of_each_optimizer_takes_what_was_measured_on_the_host(meter: Meter, name: str) -> None:
    model, settings = with_gradients(meter), TrainingSettings(optimizer=name)
    with meter.host():
        needs = measure_optimizer(
            model.parameters(), lambda shadows: make_optimizer(list(shadows), settings, 1e-3, meter.device)
        )
    before = meter.allocated_bytes()
    optimizer = make_optimizer(list(model.parameters()), settings, 1e-3, meter.device)
    optimizer.step()
    assert meter.allocated_bytes() - before == pytest.approx(needs.state_bytes, abs=MIB)
    meter.reset_peak()
    held_bytes = meter.allocated_bytes()
    optimizer.step()
    assert meter.peak_bytes() - held_bytes <= needs.transient_bytes + MIB


def test_ballast_keeps_room_for_the_first_step(meter: Meter) -> None:
    model = with_gradients(meter)
    optimizer = AdamW(model.parameters(), fused=True)
    reserve = OptimizerReserve(needs_of(model, meter), meter, retries=0)
    reserve.hold()
    taken = everything_else(meter)
    assert taken
    reserve.before_step()
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))


def test_without_ballast_the_step_is_refused_before_it_begins(meter: Meter) -> None:
    model = with_gradients(meter)
    optimizer = AdamW(model.parameters(), fused=True)
    before = model.weight.detach().sum()
    reserve = OptimizerReserve(needs_of(model, meter), meter, retries=0)
    taken = everything_else(meter)
    assert taken
    with pytest.raises(DoesNotFitError, match="optimizer's step must fit"):
        reserve.before_step()
    assert not optimizer.state
    del taken
    assert torch.equal(model.weight.detach().sum(), before)
