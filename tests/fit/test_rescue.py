"""What is done about an out-of-memory: split, wait, give up with a clear error, grow back."""

import gc
import math
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit.cost_model import CostModel, DeviceLimits, SearchResult
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.packing import BatchCosts, MicroBatchLimit, SplitRules
from can_train.fit.rescue import (
    QUIET_STEPS,
    Backoff,
    PartDoesNotFitError,
    Rescue,
    RescueSettings,
    allocate_ballast,
    describe_out_of_memory,
)
from can_train.memory.meters import CpuMeter, SimulatedMeter
from can_train.memory.simulated import gpu as simulated_gpu
from can_train.memory.simulated.allocator import EXPANDABLE
from can_train.task import Feature
from fakes.costly import Costly

MIB = 2**20
GIB = 2**30
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 1.00 GiB."


def phase(base_bytes: int, tuned_limit: float = 0.0) -> SearchResult:
    """What a search would have found where a unit of cost is a byte."""
    model = CostModel(
        features=(Feature("bytes"),),
        coefficients=(1.0,),
        base_bytes=base_bytes,
        sigma_bytes=512,
        covariance=((0.0, 0.0), (0.0, 0.0)),
        relative_residual=0.0,
    )
    return SearchResult(
        model=model, tuned_limit=tuned_limit, capped=False, trials=1, ooms=0, measured_ratio=1.0, mean_totals=(1.0,)
    )


class Noted:
    """Stands ready before each attempt, and notes what became of it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __enter__(self) -> None:
        """Nothing is set aside."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.events.append("kept" if kind is None else "undone")


def run_all(
    rescue: Rescue, batch: BatchCosts, limit: MicroBatchLimit, attempt: Callable[[int, int], Any], noted: Noted
) -> list[tuple[int, int, Any]]:
    """Runs a batch; returns each part (start, stop, what the attempt returned) that succeeded."""
    parts = []
    for part in rescue.tries(batch, limit):
        with part, noted, rescue.record_foreign_memory():
            parts.append((part.start, part.stop, attempt(part.start, part.stop)))
    return parts


class Device:
    """Attempts that fail above some cost; waits change nothing but what `after_wait` does."""

    def __init__(self, batch: BatchCosts, fits: float, after_wait: Callable[["Device"], None] = lambda device: None):
        self.batch, self.fits, self.after_wait = batch, fits, after_wait
        self.waits: list[float] = []
        self.noted = Noted()
        self.meter = SimulatedMeter(64 * MIB, settings=EXPANDABLE)

    def attempt(self, start: int, stop: int) -> tuple[int, int]:
        if self.batch.cost(start, stop) > self.fits:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return start, stop

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.after_wait(self)

    def run(
        self, settings: RescueSettings | None = None, limit: MicroBatchLimit | None = None, tuned_limit: float = 0.0
    ) -> list[tuple[int, int, Any]]:
        found = phase(60 * MIB, tuned_limit)
        self.rescue = Rescue(self.meter, settings or RescueSettings(), phase=found, wait=self.wait)
        return run_all(self.rescue, self.batch, limit or MicroBatchLimit(), self.attempt, self.noted)


def sizes(parts: list[tuple[int, int, Any]]) -> list[int]:
    return [stop - start for start, stop, _ in parts]


def test_a_part_that_does_not_fit_is_halved_until_it_does() -> None:
    device = Device(BatchCosts.uniform(64), fits=10)
    assert sizes(device.run()) == [8] * 8
    assert device.rescue.ooms == 3
    assert device.noted.events == ["undone"] * 3 + ["kept"] * 8


def test_the_backoff_factor_divides_the_limit() -> None:
    device = Device(BatchCosts.uniform(64), fits=20)
    assert sizes(device.run(RescueSettings(factor=4.0))) == [16] * 4
    assert device.rescue.ooms == 1


@given(
    costs=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=60),
    fits=st.floats(101.0, 300.0),
    factor=st.floats(1.5, 8.0),
)
def test_every_sample_is_run_once_in_order(costs: list[float], fits: float, factor: float) -> None:
    device = Device(BatchCosts.of_samples(costs), fits)
    parts = device.run(RescueSettings(factor=factor))
    assert [start for start, _, _ in parts] == [0, *(stop for _, stop, _ in parts[:-1])]
    assert parts[-1][1] == len(costs)
    assert all(result == (start, stop) for start, stop, result in parts)


def test_what_has_been_run_before_memory_ran_out_is_not_run_again() -> None:
    device = Device(BatchCosts.of_samples([1, 1, 1, 1, 9, 9]), fits=10)
    assert [result for _, _, result in device.run(limit=MicroBatchLimit(samples=2))] == [(0, 2), (2, 4), (4, 5), (5, 6)]


def test_nothing_is_split_below_the_floor() -> None:
    device = Device(BatchCosts.uniform(16), fits=2)
    with pytest.raises(PartDoesNotFitError, match="samples 0 to 3 of the batch") as caught:
        device.run(RescueSettings(floor=4, retries=0))
    assert caught.value.part == (0, 4)


def test_attempts_at_the_floor_wait_ever_longer() -> None:
    device = Device(BatchCosts.uniform(4), fits=0)
    with pytest.raises(DoesNotFitError, match="Memory ran out 4 times in a row"):
        device.run(RescueSettings(retries=3))
    assert device.waits == [0.1, 0.2, 0.4]
    assert device.rescue.ooms == 3 + 3


def test_splitting_is_not_a_retry() -> None:
    device = Device(BatchCosts.uniform(2**12), fits=1)
    assert sizes(device.run(RescueSettings(retries=0))) == [1] * 2**12


def test_memory_that_another_process_gives_back_ends_the_wait() -> None:
    def give_back(device: Device) -> None:
        device.fits = 10 if len(device.waits) == 2 else 0

    device = Device(BatchCosts.uniform(4), fits=0, after_wait=give_back)
    assert sizes(device.run()) == [1] * 4


def test_without_rescue_the_first_out_of_memory_is_an_error() -> None:
    device = Device(BatchCosts.uniform(4), fits=2)
    with pytest.raises(DoesNotFitError, match=r"training.adaptive_micro_batch is off.*\n?.*smaller --micro-batch-size"):
        device.run(RescueSettings(adaptive=False))
    assert device.waits == []


@pytest.mark.parametrize(("foreign_mib", "one_sample"), [(0, True), (40, False)])
@pytest.mark.parametrize("adaptive", [True, False])
def test_an_error_knows_whether_another_device_would_help(foreign_mib: int, one_sample: bool, adaptive: bool) -> None:
    device = Device(BatchCosts.uniform(1), fits=0)
    device.meter.gpu.allocator.foreign_bytes = foreign_mib * MIB
    rescue = Rescue(device.meter, RescueSettings(adaptive=adaptive, retries=0))
    with pytest.raises(PartDoesNotFitError) as caught:
        run_all(rescue, device.batch, MicroBatchLimit(), device.attempt, Noted())
    details = caught.value.details
    assert (details.one_sample, details.should_fit) == (one_sample, not one_sample)
    assert (details.foreign_bytes, details.capacity_bytes) == (foreign_mib * MIB, 64 * MIB)


def test_a_sample_that_does_not_fit_is_named_with_need_capacity_and_cards() -> None:
    device = Device(BatchCosts.of_samples([1, 40 * 2**30, 1]), fits=2**20)
    with pytest.raises(DoesNotFitError, match="Memory ran out for samples that may not be split further") as caught:
        device.run(RescueSettings(retries=0), tuned_limit=10 * GIB)
    message = str(caught.value)
    assert "sample 1 of the batch" in message
    assert "40.06 GiB are needed, 64.0 MiB are there" in message
    assert "48gb" in message


def test_a_need_far_beyond_all_measured_sizes_is_not_printed_and_chooses_no_cards() -> None:
    device = Device(BatchCosts.of_samples([1, 40 * GIB, 1]), fits=2**20)
    with pytest.raises(DoesNotFitError) as caught:
        device.run(RescueSettings(retries=0), tuned_limit=2 * MIB)
    message = str(caught.value)
    assert "sample 1 of the batch" in message
    assert "Take a device of more than 64.0 MiB (rtx-3070-8gb" in message
    assert "are needed" not in message
    assert caught.value.details.need_bytes is None
    assert "48gb" not in caught.value.details.cards


def test_other_errors_pass() -> None:
    def attempt(start: int, stop: int) -> None:
        raise ValueError("shapes differ")

    rescue = Rescue(SimulatedMeter(MIB, settings=EXPANDABLE), RescueSettings())
    with pytest.raises(ValueError, match="shapes differ"):
        run_all(rescue, BatchCosts.uniform(4), MicroBatchLimit(), attempt, Noted())


def test_nothing_of_a_failed_attempt_is_held_when_the_next_one_starts() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    kept: list[BaseException] = []

    def attempt(start: int, stop: int) -> None:
        assert all(reference() is None for reference in held)
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        if stop - start > 2:
            try:
                raise MemoryError("inner")
            except MemoryError as error:
                outer = torch.OutOfMemoryError(OUT_OF_MEMORY)
                kept.append(outer)
                raise outer from error

    rescue = Rescue(SimulatedMeter(MIB, settings=EXPANDABLE), RescueSettings())
    gc.disable()
    try:
        assert len(run_all(rescue, BatchCosts.uniform(16), MicroBatchLimit(), attempt, Noted())) == 8
    finally:
        gc.enable()


class Wide(nn.Module):
    """Takes 3 MiB a sample, and as much again on the way back; the next pass takes `more_bytes` once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.second = nn.Parameter(torch.ones(1))
        self.more_bytes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more, self.more_bytes = self.more_bytes, 0
        hidden: torch.Tensor = Costly.apply(x * self.weight * self.second, 3 * len(x) * MIB + more)
        return hidden


class SmallGpu:
    """A model on a simulated GPU and its engine."""

    def __init__(self, capacity_mib: int, **settings: Any) -> None:
        self.meter = SimulatedMeter(capacity_mib * MIB, settings=EXPANDABLE)
        with self.meter.active():
            self.model = Wide()
        self.batcher = MicroBatcher(self.model, meter=self.meter, rescue=RescueSettings(**settings))
        self.cost = BatchCosts.uniform(16)

    def step(self) -> tuple[int, ...]:
        def losses_of(start: int, stop: int) -> Losses:
            return {"loss": (self.model(torch.ones(stop - start)).sum(), float(stop - start))}

        with self.meter.active():
            result = self.batcher.run(losses_of, self.cost)
            self.model.zero_grad()
        self.batcher.stepped()
        return result.micro_batches

    def others_take(self, mib: int) -> None:
        self.meter.gpu.allocator.foreign_bytes = mib * MIB


def test_the_size_that_worked_is_kept_for_the_next_steps() -> None:
    gpu = SmallGpu(64)
    first = gpu.step()
    assert len(first) > 1
    ooms = gpu.batcher.ooms_rescued
    assert gpu.step() == first
    assert gpu.batcher.ooms_rescued == ooms


@pytest.mark.parametrize("regrow", [True, False])
def test_micro_batches_grow_back_after_a_quiet_stretch_where_they_may(regrow: bool) -> None:
    gpu = SmallGpu(200, regrow=regrow)
    gpu.others_take(150)
    assert len(gpu.step()) > 1
    gpu.others_take(0)
    parts = [len(gpu.step()) for _ in range(8 * QUIET_STEPS)]
    assert (parts[-1] == 1) is regrow


def test_growth_that_fails_waits_longer_and_loses_nothing() -> None:
    gpu = SmallGpu(64)
    for _ in range(12 * QUIET_STEPS):
        gpu.step()
    assert gpu.batcher.ooms_rescued <= 12


def test_freezing_or_thawing_parameters_forgets_what_was_learned_of_memory() -> None:
    gpu = SmallGpu(64)
    split = gpu.step()
    gpu.model.weight.requires_grad_(False)
    ooms = gpu.batcher.ooms_rescued
    gpu.step()
    gpu.model.weight.requires_grad_(True)
    assert gpu.step() == split
    assert gpu.batcher.ooms_rescued > ooms


def test_evaluation_is_split_and_rescued_by_itself() -> None:
    gpu = SmallGpu(64)

    def total(start: int, stop: int) -> float:
        with torch.inference_mode():
            return float(gpu.model(torch.ones(stop - start)).sum())

    with gpu.meter.active():
        parts = gpu.batcher.evaluate(total, 100)
    assert len(parts) > 1
    assert sum(parts) == pytest.approx(100)
    assert gpu.step() == SmallGpu(64).step()


def test_an_evaluations_limit_holds_from_the_start() -> None:
    gpu = SmallGpu(400)
    parts = gpu.batcher.evaluate(lambda start, stop: stop - start, 10, MicroBatchLimit(cost=4))
    assert parts == [4, 3, 3]
    assert gpu.batcher.ooms_rescued == 0


class CountedRetries(SimulatedMeter):
    """An allocator that releases its cache in some steps."""

    def __init__(self, full_steps: set[int]) -> None:
        super().__init__(2**30, EXPANDABLE)
        self.step = 0
        self.full_steps = full_steps

    def retries(self) -> int:
        return sum(step <= self.step for step in self.full_steps)


@pytest.mark.parametrize(
    ("full_steps", "gradients", "smaller"),
    [({1, 2}, 0, True), ({1, 3}, 0, False), ({2}, 0, False), ({1, 2}, 10, False), ({1, 2}, math.inf, False)],
)
def test_two_steps_in_a_row_in_which_the_allocator_was_too_full_make_micro_batches_smaller_if_that_takes_less(
    full_steps: set[int], gradients: float, smaller: bool
) -> None:
    meter = CountedRetries(full_steps)
    model = nn.Linear(1, 1)
    batcher = MicroBatcher(model, meter=meter)
    batcher.rules = SplitRules(gradient_cost=gradients)
    for step in range(1, 5):
        result = batcher.run(lambda start, stop: {"loss": (model(torch.ones(stop - start, 1)).sum(), stop - start)}, 20)
        meter.step = step
        batcher.stepped()
    assert (result.micro_batches != (20,)) is smaller


def test_the_limit_in_force_is_in_the_state() -> None:
    gpu = SmallGpu(64)
    split = gpu.step()
    resumed = SmallGpu(64)
    resumed.batcher.load_state_dict(gpu.batcher.state_dict())
    assert resumed.step() == split
    assert resumed.batcher.ooms_rescued == gpu.batcher.ooms_rescued


def test_the_limit_in_force_is_that_of_the_parameters_that_were_trained_whatever_the_model_began_with() -> None:
    gpu = SmallGpu(64)
    gpu.model.second.requires_grad_(False)
    split = gpu.step()
    resumed = SmallGpu(64)  # All of its parameters are trained when the batcher is made
    resumed.model.second.requires_grad_(False)
    resumed.batcher.load_state_dict(gpu.batcher.state_dict())
    assert resumed.step() == split
    assert resumed.batcher.ooms_rescued == gpu.batcher.ooms_rescued


def test_a_neighbour_that_has_left_before_anything_is_undone_is_to_blame_all_the_same() -> None:
    gpu = tuned_gpu()
    visits = iter([150])
    whole = gpu.step()
    gpu.meter.release()  # The neighbour can take what is cached only once it is given back

    def losses_of(start: int, stop: int) -> Losses:
        gpu.others_take(next(visits, 0))
        try:
            loss = gpu.model(torch.ones(stop - start)).sum()
        finally:
            gpu.others_take(0)
        return {"loss": (loss, float(stop - start))}

    with gpu.meter.active():
        split = gpu.batcher.run(losses_of, gpu.cost).micro_batches
        gpu.model.zero_grad()
    assert len(split) > len(whole)
    assert gpu.batcher.ooms_rescued == 1
    assert gpu.batcher.oom_cost is None, "booked as its own out-of-memory"
    assert gpu.batcher.foreign_bytes == pytest.approx(150 * MIB, abs=MIB)
    assert gpu.step() == whole


def test_a_plan_is_rescued_beyond_its_number_of_splits() -> None:
    gpu = SmallGpu(64)
    gpu.batcher.rules = SplitRules(target=8.0, max_splits=2)
    gpu.cost = BatchCosts.uniform(32)
    assert len(gpu.step()) > 2


def tuned_gpu(**settings: Any) -> SmallGpu:
    """200 MiB, of which a search found 180 to be fillable; a sample costs 6."""
    gpu = SmallGpu(200, **settings)
    training = phase(0, tuned_limit=180 * MIB)
    limits = DeviceLimits(
        device_key="sim", capacity_bytes=200 * MIB, training=training, evaluation=training, optimizer_peak_bytes=0
    )
    gpu.batcher.set_limits(SplitRules(safe_limit=180 * MIB, tuned_limit=180 * MIB), limits)
    gpu.cost = BatchCosts.of_samples([6 * MIB] * 60)
    return gpu


def test_parts_keep_to_what_others_leave_for_as_long_as_they_are_there() -> None:
    gpu = tuned_gpu()
    assert gpu.step() == (30, 30)
    gpu.meter.release()
    gpu.others_take(100)
    crowded = gpu.step()
    ooms = gpu.batcher.ooms_rescued
    assert ooms > 0
    assert max(crowded) * 6 <= 100
    assert gpu.step() == gpu.step()
    assert gpu.batcher.ooms_rescued == ooms
    gpu.others_take(0)
    assert gpu.step() == (30, 30)


def test_a_batch_that_did_not_fit_at_once_is_computed_in_parts_until_a_quiet_stretch_has_passed() -> None:
    gpu = tuned_gpu()
    gpu.batcher.rules = SplitRules(safe_limit=150 * MIB, tuned_limit=150 * MIB, gradient_cost=20 * MIB)
    gpu.cost = BatchCosts.of_samples([6 * MIB] * 28)
    assert gpu.step() == (28,)
    gpu.model.more_bytes = 40 * MIB
    assert gpu.step() == (14, 14)
    # It takes as much memory as a micro-batch of the safe limit beside gradients.
    assert gpu.batcher.oom_cost == 150 * MIB
    assert gpu.step() == (14, 14)
    assert [gpu.step() for _ in range(4 * QUIET_STEPS)][-1] == (28,)
    assert gpu.batcher.ooms_rescued == 1


def test_a_surprise_at_a_cost_that_did_fit_makes_later_parts_a_little_smaller() -> None:
    gpu = tuned_gpu()
    gpu.model.more_bytes = 40 * MIB
    assert gpu.step() == (15, 23, 22)
    assert gpu.batcher.ooms_rescued == 1


def test_the_smallest_cost_that_ran_out_within_the_plan_is_known() -> None:
    device = Device(BatchCosts.uniform(64), fits=10)
    device.run(limit=MicroBatchLimit(cost=40))
    assert device.rescue.oom_cost == 16
    device.rescue.backoff, device.fits = Backoff(), 30
    run_all(device.rescue, device.batch, MicroBatchLimit(cost=32), device.attempt, Noted())
    assert device.rescue.oom_cost == 16


def test_where_nothing_is_rescued_the_cost_that_ran_out_is_known_too() -> None:
    device = Device(BatchCosts.uniform(4), fits=2)
    with pytest.raises(DoesNotFitError, match="adaptive_micro_batch is off"):
        device.run(RescueSettings(adaptive=False))
    assert device.rescue.oom_cost == 4


def test_a_sample_beyond_the_plan_says_nothing_of_the_plan() -> None:
    device = Device(BatchCosts.of_samples([1, 30]), fits=20)
    with pytest.raises(DoesNotFitError, match="sample 1 of the batch"):
        device.run(RescueSettings(retries=0), limit=MicroBatchLimit(cost=10))
    assert device.rescue.oom_cost == math.inf


def test_memory_that_others_took_says_nothing_of_the_plan() -> None:
    gpu = tuned_gpu()
    gpu.others_take(100)
    gpu.step()
    assert gpu.batcher.ooms_rescued > 0
    assert gpu.batcher.oom_cost is None


def test_where_nothing_is_rescued_others_memory_is_an_error_too() -> None:
    gpu = tuned_gpu(adaptive=False)
    gpu.others_take(100)
    with pytest.raises(DoesNotFitError, match="adaptive_micro_batch is off"):
        gpu.step()


def test_who_watches_is_called_when_memory_is_free_again() -> None:
    gpu = tuned_gpu()
    gpu.model.more_bytes = 40 * MIB
    held: list[int] = []
    gpu.batcher.watch(lambda: held.append(gpu.meter.gpu.allocator.reserved_bytes))
    gpu.step()
    assert len(held) == gpu.batcher.ooms_rescued == 1
    assert held[0] < 5 * MIB
    assert gpu.batcher.oom_cost == 180 * MIB


def test_what_ran_before_memory_ran_out_is_not_settled() -> None:
    model = nn.Linear(1, 1)
    batcher = MicroBatcher(model, meter=SimulatedMeter(GIB, settings=EXPANDABLE), rules=SplitRules(safe_limit=10))
    fails = iter([False, True])

    def losses_of(start: int, stop: int) -> Losses:
        if next(fails, False):
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return {"loss": (model(torch.ones(stop - start, 1)).sum(), float(stop - start))}

    result = batcher.run(losses_of, [9, 1, 4, 5, 2, 2])
    assert result.micro_batches == (2, 1, 1, 2)
    assert (result.largest_cost, result.cost_after_rescue, batcher.oom_cost) == (10, 5, 9)
    result = batcher.run(losses_of, [3, 1])
    assert result.cost_after_rescue == result.largest_cost == 4


def gpu(*, at_start: int = 0, later: int = 0) -> SimulatedMeter:
    """A GPU of 100 MiB with others on it."""
    meter = SimulatedMeter(100 * MIB, settings=EXPANDABLE, contention=lambda: at_start * MIB)
    meter.gpu.allocator.foreign_bytes = (at_start + later) * MIB
    return meter


@pytest.mark.parametrize(
    ("at_start", "later", "need_mib", "one_sample"),
    [
        (0, 0, 120, True),
        (0, 0, 80, False),
        (0, 0, None, True),  # it had the device to itself, and failed
        (30, 0, None, False),
        (0, 30, None, False),
        (30, 0, 90, False),  # it would have fit before they came
        (30, 30, 120, True),  # nor does it fit when they have left
    ],
)
def test_what_does_not_fit_alone_is_told_from_what_others_leave_no_room_for(
    at_start: int, later: int, need_mib: int | None, one_sample: bool
) -> None:
    found = describe_out_of_memory(gpu(at_start=at_start, later=later), None if need_mib is None else need_mib * MIB)
    assert (found.one_sample, found.should_fit) == (one_sample, not one_sample)
    assert found.foreign_bytes == (at_start + later) * MIB
    assert bool(found.cards) == one_sample
    assert not found.of_host


def test_what_should_fit_by_what_is_known_still_does() -> None:
    found = describe_out_of_memory(gpu(), None, known=OutOfMemoryDetails(should_fit=True))
    assert (found.one_sample, found.should_fit, found.capacity_bytes) == (False, True, 100 * MIB)


def test_on_the_cpu_it_is_the_hosts_memory() -> None:
    assert describe_out_of_memory(CpuMeter(), None).of_host


def test_from_an_out_of_memory_to_the_retry_at_most_8_files_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated GPU aside, which stands for the device."""
    gpu = tuned_gpu()
    gpu.model.more_bytes = 40 * MIB
    message, forward = simulated_gpu._out_of_memory, gpu.model.forward
    opened: set[str] = set()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and "can_train" in path.parts:
            opened.add(f"{path.parent.name}/{path.stem}")

    def begin(*arguments: Any) -> str:
        sys.setprofile(trace)
        return message(*arguments)

    def end(x: torch.Tensor) -> torch.Tensor:
        sys.setprofile(None)
        return forward(x)

    monkeypatch.setattr(simulated_gpu, "_out_of_memory", begin)
    monkeypatch.setattr(gpu.model, "forward", end)
    assert gpu.step() == (15, 23, 22)
    opened -= {"simulated/gpu", "simulated/allocator", "memory/sharded_tensors"}
    assert {"fit/rescue", "fit/micro_batcher", "memory/out_of_memory"} <= opened
    assert len(opened) <= 8, sorted(opened)


def test_parameters_without_elements_take_no_part_of_the_room_for_an_optimizer() -> None:
    assert [each.nbytes for each in allocate_ballast(1000, [0, 0], torch.device("cpu"), stays=True) or []] == [1000]
    assert [each.nbytes for each in allocate_ballast(1024, [0, 512], torch.device("cpu"), stays=True) or []] == [
        512,
        512,
    ]
