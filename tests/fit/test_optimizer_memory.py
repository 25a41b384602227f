import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from can_train.errors import DoesNotFitError
from can_train.fit.optimizer_memory import OptimizerMemory, measure_optimizer
from can_train.fit.rescue import OptimizerReserve
from can_train.memory.meters import SimulatedMeter
from can_train.memory.simulated.allocator import EXPANDABLE

MIB = 2**20
PIECES = (4 * MIB, 4 * MIB, 2 * MIB)
NEEDS = OptimizerMemory(parameter_bytes=10 * MIB, state_bytes=20 * MIB, transient_bytes=10 * MIB, tensor_bytes=PIECES)


@pytest.fixture
def meter() -> Any:
    meter = SimulatedMeter(60 * MIB, settings=EXPANDABLE)
    with meter.active():
        yield meter


def take(mebibytes: int) -> Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


def reserve(meter: SimulatedMeter, **changed: Any) -> OptimizerReserve:
    return OptimizerReserve(NEEDS, meter, **{"wait": lambda seconds: None, **changed})


def test_the_place_of_the_state_is_held_until_the_step(meter: SimulatedMeter) -> None:
    held = reserve(meter)
    assert (meter.allocated_bytes(), held.tensors) == (0, [])
    held.hold()
    kept = take(30)
    held.hold()
    del kept
    assert meter.allocated_bytes() == sum(tensor.nbytes for tensor in held.tensors) == 20 * MIB
    held.before_step()
    assert (meter.allocated_bytes(), held.tensors) == (0, [])


def test_what_is_held_is_not_there_for_a_batch(meter: SimulatedMeter) -> None:
    held = reserve(meter)
    held.hold()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        take(41)
    held.before_step()
    assert take(41).nbytes == 41 * MIB


def test_after_the_first_step_the_state_is_there_and_nothing_is_held(meter: SimulatedMeter) -> None:
    held = reserve(meter)
    held.hold()
    held.before_step()
    state = take(20)
    held.hold()
    assert meter.allocated_bytes() == state.nbytes
    meter.reset_peak()
    held.before_step()
    assert meter.peak_bytes() == 30 * MIB


def test_the_step_has_room_for_state_and_transients_together(meter: SimulatedMeter) -> None:
    kept = take(30)
    reserve(meter).before_step()
    more = take(1)
    with pytest.raises(DoesNotFitError, match=r"optimizer's step must fit .*: 30\.0 MiB cannot be had"):
        reserve(meter).before_step()
    del kept, more


def test_of_a_state_that_is_there_only_what_is_missing_is_held(meter: SimulatedMeter) -> None:
    resumed = reserve(meter, held_bytes=20 * MIB)
    resumed.hold()
    assert resumed.tensors == []
    resumed.expect(
        OptimizerMemory(parameter_bytes=0, state_bytes=25 * MIB, transient_bytes=0, tensor_bytes=PIECES),
        held_bytes=20 * MIB,
    )
    resumed.hold()
    assert meter.allocated_bytes() == 5 * MIB


class MomentsLater(torch.optim.SGD):
    """Keeps three averages of each gradient from its second step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", 0) + 1
            for number in range(3 * (state["steps"] > 1)):
                # The zeros are made in each step, and dropped in later ones.
                state.setdefault(f"average{number}", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)


def test_state_that_the_second_step_makes_is_measured_beside_the_transients_of_later_steps() -> None:
    needs = measure_optimizer([torch.zeros(MIB // 4)], MomentsLater)
    assert (needs.state_bytes, needs.later_bytes, needs.transient_bytes) == (3 * MIB, 3 * MIB, MIB)
    at_once = measure_optimizer([torch.zeros(MIB // 4)], partial(torch.optim.AdamW, foreach=False))
    assert (at_once.state_bytes > 2 * MIB, at_once.later_bytes) == (True, 0)


def test_the_second_step_has_room_for_the_state_that_it_makes(meter: SimulatedMeter) -> None:
    held = OptimizerReserve(replace(NEEDS, later_bytes=15 * MIB), meter, wait=lambda seconds: None)
    held.hold()
    held.before_step()
    assert held.missing_bytes == 15 * MIB
    kept = take(40)
    with pytest.raises(DoesNotFitError, match=r"25\.0 MiB cannot be had"):
        held.before_step()
    del kept
    held.before_step()
    assert held.missing_bytes == 0


def test_the_room_is_waited_for_and_taken_when_it_comes(meter: SimulatedMeter) -> None:
    waiting_notice: list[float] = []

    def wait(seconds: float) -> None:
        waiting_notice.append(seconds)
        if len(waiting_notice) == 2:
            meter.gpu.allocator.foreign_bytes = 0

    meter.gpu.allocator.foreign_bytes = 50 * MIB
    reserve(meter, wait=wait).before_step()
    assert waiting_notice == [0.1, 0.2]


def test_garbage_is_collected_before_anybody_waits(meter: SimulatedMeter) -> None:
    waiting_notice: list[float] = []
    gc.disable()
    try:
        cycle: list[object] = [take(50)]
        cycle.append(cycle)
        del cycle
        reserve(meter, wait=waiting_notice.append).before_step()
    finally:
        gc.enable()
    assert waiting_notice == []


def stepped(capacity_mib: float, *, guarded: bool) -> tuple[int, bool]:
    """Takes AdamW's first step on three small parameters and a large one: (how many changed, whether all went well)."""
    parameters = [nn.Parameter(torch.zeros(size, size)) for size in (256, 256, 256, 512)]
    make = partial(torch.optim.AdamW, foreach=False)
    optimizer, needs = make(parameters), measure_optimizer(parameters, make)
    meter = SimulatedMeter(int(capacity_mib * MIB), settings=EXPANDABLE)
    with meter.measuring(parameters):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        try:
            if guarded:
                OptimizerReserve(needs, meter, retries=0).before_step()
            optimizer.step()
        except (torch.OutOfMemoryError, DoesNotFitError):
            return sum(bool(parameter.any()) for parameter in parameters), False
    return sum(bool(parameter.any()) for parameter in parameters), True


@pytest.mark.parametrize("capacity_mib", range(4, 40, 4))
def test_a_step_is_taken_wholly_or_not_at_all(capacity_mib: int) -> None:
    assert stepped(capacity_mib, guarded=True) in [(0, False), (4, True)]


def test_a_step_with_room_is_taken_and_one_that_nothing_made_sure_of_stops_half_way() -> None:
    assert stepped(40, guarded=True) == (4, True)
    assert stepped(8, guarded=False) == (3, False)


def test_room_in_pieces_serves_an_optimizer_that_works_in_pieces(meter: SimulatedMeter) -> None:
    blocks = [take(4) for _ in range(15)]
    del blocks[::2]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        take(10)
    needs = replace(NEEDS, state_bytes=0)
    OptimizerReserve(needs, meter, wait=lambda seconds: None).before_step()
    whole = replace(needs, tensor_bytes=(10 * MIB,))
    with pytest.raises(DoesNotFitError, match=r"10\.0 MiB cannot be had"):
        OptimizerReserve(whole, meter, wait=lambda seconds: None).before_step()


def test_who_asked_what_is_held_does_not_keep_it(meter: SimulatedMeter) -> None:
    held = reserve(meter)
    held.hold()
    tensors = held.tensors
    held.before_step()
    assert meter.allocated_bytes() == 0
    assert tensors == []
