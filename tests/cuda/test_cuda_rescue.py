"""What was rescued from an out-of-memory is bit by bit what the same splits give. Everything runs on the simulated GPU
too, so that the tests themselves are known to work where there is no other.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.config.settings import TrainingSettings
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.optimizer import Optimization, make_optimization
from can_train.fit.precision import Precision
from can_train.memory.meters import Meter
from gpu.trainer import limited_device

pytestmark = pytest.mark.filterwarnings("ignore:Samples depend on the rest of their batch")

MIB = 2**20
CAPACITIES = {"cuda": 1024 * MIB, "sim": 160 * MIB}
SAMPLES = 32
FITTING = 9.5
"""Samples whose appetite is the whole capacity."""

NOT_HUNGRY = -1
FORWARD, BACKWARD, DOUBLE_BACKWARD = 0, 1, 2
PAGES = 64 * MIB
"""What the allocator may hold of pages that are partly in use."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")


class Eating(torch.autograd.Function):
    """The identity; takes memory for a moment in its forward (0), its backward (1) or that one's backward (2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, order: int) -> Tensor:
        ctx.size, ctx.order = size, order
        if order == FORWARD:
            torch.empty(size, dtype=torch.uint8, device=x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Eating.apply(gradient, ctx.size, ctx.order - 1), None, None


class Net(nn.Module):
    """Has all that a failed pass could leave changed: dropout's generator, BatchNorm's buffers, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)
        self.bytes_per_sample = 0
        self.order = NOT_HUNGRY

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.norm(self.enter(x))), 0.2, self.training)
        return self.leave(Eating.apply(hidden, self.bytes_per_sample * len(x), self.order)).squeeze(1)


@pytest.fixture(params=[pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda]), "sim"], name="meter")
def limited_meter(request: pytest.FixtureRequest) -> Iterator[Meter]:
    torch.use_deterministic_algorithms(True)
    with limited_device(request.param, CAPACITIES[request.param]) as meter:
        yield meter
    torch.use_deterministic_algorithms(False)
    gc.collect()
    if request.param == "cuda":
        torch.cuda.empty_cache()


def made(meter: Meter, dtype: torch.dtype = torch.float32) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().to(meter.device, dtype), torch.randn(SAMPLES, 16, device=meter.device, dtype=dtype)


def hungry(model: Net, meter: Meter, order: int) -> Net:
    model.bytes_per_sample, model.order = int(meter.capacity_bytes / FITTING), order
    return model


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def penalised_loss(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.sum() + 10 * (slope.norm(dim=1) - 1).square().sum()


def losses_on(model: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[int, int], Losses]:
    return lambda start, stop: {"loss": (loss(model, x[start:stop]), float(stop - start))}


def by_planned_parts(
    model: nn.Module, x: Tensor, sizes: tuple[int, ...], loss: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    start = 0
    for size in sizes:
        (loss(model, x[start : start + size]) / SAMPLES).backward()
        start += size


def state_of(model: nn.Module, meter: Meter) -> Mapping[str, Tensor]:
    """Everything that a batch changes: gradients, buffers, generators."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    generators = {"host": torch.get_rng_state()}
    if meter.device.type == "cuda":
        generators["device"] = torch.cuda.get_rng_state(meter.device)
    return {**gradients, **dict(model.named_buffers()), **generators}


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("order", "loss"),
    [(FORWARD, plain_loss), (BACKWARD, plain_loss), (DOUBLE_BACKWARD, penalised_loss)],
    ids=["forward", "backward", "double backward"],
)
def test_a_rescued_batch_has_the_bits_of_the_planned_splits(
    meter: Meter, order: int, loss: Callable[[nn.Module, Tensor], Tensor], dtype: torch.dtype
) -> None:
    model, x = made(meter, dtype)
    planned = deepcopy(model)
    hungry(model, meter, order)
    torch.manual_seed(1)
    result = MicroBatcher(model, meter=meter).run(losses_on(model, x, loss), SAMPLES)
    assert result.ooms_rescued >= 1
    assert len(result.micro_batches) > 1
    rescued = state_of(model, meter)
    torch.manual_seed(1)
    by_planned_parts(planned, x, result.micro_batches, loss)
    assert_same_bits(rescued, state_of(planned, meter))


def test_other_splits_have_other_bits(meter: Meter) -> None:
    model, x = made(meter)
    planned = deepcopy(model)
    torch.manual_seed(1)
    result = MicroBatcher(hungry(model, meter, BACKWARD), meter=meter).run(losses_on(model, x, plain_loss), SAMPLES)
    rescued = state_of(model, meter)
    torch.manual_seed(1)
    by_planned_parts(planned, x, (SAMPLES - result.micro_batches[0], result.micro_batches[0]), plain_loss)
    with pytest.raises(AssertionError, match=r"enter\.weight"):
        assert_same_bits(rescued, state_of(planned, meter))


def test_a_rescued_evaluation_has_the_bits_of_the_planned_splits(meter: Meter) -> None:
    model, x = made(meter)
    model.eval()

    @torch.inference_mode()
    def compute(start: int, stop: int) -> Tensor:
        return model(x[start:stop])

    batcher = MicroBatcher(hungry(model, meter, FORWARD), meter=meter)
    parts = batcher.evaluate(compute, SAMPLES)
    assert batcher.ooms_rescued >= 1
    model.order = NOT_HUNGRY
    starts = [sum(len(part) for part in parts[:index]) for index in range(len(parts))]
    planned = [compute(start, start + len(part)) for start, part in zip(starts, parts, strict=True)]
    assert torch.equal(torch.cat(parts), torch.cat(planned))


def test_activations_that_do_not_fit_are_rescued(meter: Meter) -> None:
    torch.manual_seed(0)
    width, float_bytes = 256, 4
    layers = [nn.Linear(width, width), nn.GELU()] * 3
    model = nn.Sequential(*layers, nn.Linear(width, 1)).to(meter.device)
    # Six activations a row are kept for backward: half as much again as there is.
    rows = meter.capacity_bytes // (4 * width * float_bytes)
    x = torch.randn(rows // 16, width, device=meter.device)

    def losses_of(start: int, stop: int) -> Losses:
        chosen = torch.arange(start, stop, device=meter.device) % len(x)
        return {"loss": (model(x[chosen]).square().sum(), float(stop - start))}

    result = MicroBatcher(model, meter=meter).run(losses_of, rows)
    assert result.ooms_rescued >= 1
    assert sum(result.micro_batches) == rows
    rescued = state_of(model, meter)
    planned = deepcopy(model)
    planned.zero_grad(set_to_none=True)
    start = 0
    for size in result.micro_batches:
        chosen = torch.arange(start, start + size, device=meter.device) % len(x)
        (planned(x[chosen]).square().sum() / rows).backward()
        start += size
    assert_same_bits(rescued, state_of(planned, meter))


def test_the_memory_of_a_failed_attempt_is_given_back(meter: Meter) -> None:
    model, x = made(meter)
    batcher = MicroBatcher(model, meter=meter)
    # Once through without hunger: libraries keep workspaces from their first use on.
    batcher.run(losses_on(model, x, plain_loss), SAMPLES)
    model.zero_grad(set_to_none=True)
    meter.release()
    before = meter.allocated_bytes()
    hungry(model, meter, BACKWARD)
    assert batcher.run(losses_on(model, x, plain_loss), SAMPLES).ooms_rescued >= 1
    model.zero_grad(set_to_none=True)
    assert meter.allocated_bytes() == before
    meter.release()
    meter.reset_peak()
    assert meter.peak_reserved_bytes() <= before + PAGES
    if meter.device.type == "cuda":
        torch.empty(meter.capacity_bytes - before - 2 * PAGES, dtype=torch.uint8, device=meter.device)


STEPS = 4


def half_precision(model: nn.Module, meter: Meter) -> Optimization:
    settings = TrainingSettings(precision="fp16", grad_clip_norm=0.5)
    return make_optimization(model, settings, lr=1e-2, total_steps=STEPS)


def half_loss(device: torch.device) -> Callable[[nn.Module, Tensor], Tensor]:
    context = Precision.named("fp16").context

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with context(device):
            return model(x).float().square().sum()

    return loss


def test_rescued_steps_in_fp16_with_scaling_and_clipping_have_the_bits_of_the_planned_ones(meter: Meter) -> None:
    model, x = made(meter)
    planned, loss = deepcopy(model), half_loss(meter.device)
    optimization, reference = half_precision(model, meter), half_precision(planned, meter)
    batcher = MicroBatcher(hungry(model, meter, BACKWARD), meter=meter)
    torch.manual_seed(1)
    sizes = []
    for _ in range(STEPS):
        result = batcher.run(losses_on(model, x, loss), SAMPLES, scale=optimization.scaler.scale)
        sizes.append(result.micro_batches)
        optimization.step()
        batcher.stepped()
    assert batcher.ooms_rescued >= 1
    torch.manual_seed(1)
    for parts in sizes:
        start = 0
        for size in parts:
            reference.scaler.scale(loss(planned, x[start : start + size]) / SAMPLES).backward()
            start += size
        reference.step()
    assert_same_bits(model.state_dict(), planned.state_dict())
    assert optimization.scaler.get_scale() == reference.scaler.get_scale()


def test_a_gradient_that_overflows_moves_no_weight_and_lowers_the_scale(meter: Meter) -> None:
    model, x = made(meter)
    optimization = half_precision(model, meter)
    loss = half_loss(meter.device)
    before, scale = deepcopy(dict(model.named_parameters())), optimization.scaler.get_scale()
    batcher = MicroBatcher(model, meter=meter)
    batcher.run(losses_on(model, x, lambda m, part: loss(m, part) * 1e38), SAMPLES, scale=optimization.scaler.scale)
    assert not optimization.step()
    assert optimization.scaler.get_scale() < scale
    assert_same_bits(before, dict(model.named_parameters()))
