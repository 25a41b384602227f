"""Limits that are recorded before anything runs on the device, and confirmed by one trial."""

import gc
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from can_train.config.settings import TrainingSettings
from can_train.fit.cost_model import CostModel, DeviceLimits, SearchResult
from can_train.fit.explore import Explorer
from can_train.fit.packing import BatchCosts
from can_train.fit.recorded_limits import record_phase
from can_train.fit.search import (
    Peak,
    RecordedLine,
    RecordedPhase,
    SearchBounds,
    confirm_recorded,
    confirms,
    room_for_trial,
)
from can_train.memory.catalogue import UsableMemory, recordable
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library
from can_train.memory.meters import AbsentGpuMeter, SimulatedMeter
from can_train.memory.simulated.allocator import EXPANDABLE
from can_train.task import Feature
from fakes.line_fit import LineTask

MIB = 2**20
CAPACITY = 128 * MIB
SIZES = st.floats(1e3, 1e12)


class WideTask(LineTask):
    """Points that take 64 KiB each in a wide layer."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16_384), nn.Tanh(), nn.Linear(16_384, 1))


def explorer(meter: Any) -> Explorer:
    task = WideTask()
    return Explorer(task=task, model=task.build_model(), training=TrainingSettings(), meter=meter, rows=task.train_rows)


@pytest.fixture(scope="module")
def recorded() -> RecordedPhase:
    target = UsableMemory(key="sim", name="simulated", total_bytes=CAPACITY, subtracted=(), source="")
    return record_phase(explorer(AbsentGpuMeter(target)), 100_000)


def explored(recorded: RecordedPhase | None, reasons: list[str]) -> DeviceLimits:
    meter = SimulatedMeter(CAPACITY, settings=EXPANDABLE, computes=False)
    # Collections between trials would take longer than the trials.
    gc.freeze()
    with meter.active():
        exploring = explorer(meter)
        meter.gpu.seed_resident(exploring.model.parameters())
        exploring.on_refused = reasons.append
        return exploring.explore(lambda costs: 2.0 * CAPACITY, recorded=recorded)


@pytest.fixture(scope="module")
def by_probes() -> DeviceLimits:
    return explored(None, [])


def wrong(line: RecordedLine, factor: float) -> RecordedLine:
    coefficients = tuple(factor * each for each in line.model.coefficients)
    return replace(line, model=replace(line.model, coefficients=coefficients))


def test_a_recorded_line_is_confirmed_by_one_trial_that_fills_the_device(
    recorded: RecordedPhase, by_probes: DeviceLimits
) -> None:
    reasons: list[str] = []
    limits = explored(recorded, reasons)
    assert not reasons
    for found, searched in ((limits.training, by_probes.training), (limits.evaluation, by_probes.evaluation)):
        assert (found.trials, found.ooms) == (1, 0)
        assert found.recorded_share == pytest.approx(1, abs=0.002)
        # Samples are counted, for the lines' coefficients differ where features are alike.
        samples, most = (each.tuned_limit / each.model.cost(np.array([[30.0, 1.0]])) for each in (found, searched))
        assert samples >= 0.97 * most
    assert by_probes.training.recorded_share == 0


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_line_that_the_trial_does_not_confirm_gives_way_to_probes(
    recorded: RecordedPhase, by_probes: DeviceLimits, factor: float
) -> None:
    reasons: list[str] = []
    lines = RecordedPhase(training=wrong(recorded.training, factor), evaluation=wrong(recorded.evaluation, factor))
    assert explored(lines, reasons).training == by_probes.training
    assert len(reasons) == 2
    assert all(reason.startswith("a trial ") for reason in reasons)


def test_a_line_of_other_features_is_not_tried(recorded: RecordedPhase) -> None:
    reasons: list[str] = []
    other = replace(recorded.training, model=replace(recorded.training.model, features=(Feature("a"), Feature("b"))))
    assert explored(replace(recorded, training=other), reasons).evaluation.recorded_share
    assert reasons == ["it was recorded of other features"]


def test_memory_beside_the_recorded_one_takes_room_from_the_trial(recorded: RecordedPhase) -> None:
    line = recorded.training
    beside = line.on_device(line.resident_bytes + 8 * MIB)
    assert beside.base_bytes == line.model.base_bytes + 8 * MIB
    less = room_for_trial(line, line.model, (30.0, 1.0), CAPACITY) - room_for_trial(line, beside, (30.0, 1.0), CAPACITY)
    assert less == pytest.approx(8 * MIB, rel=0.02)


@given(st.floats(0, 1e12), SIZES, st.floats(0.5, 1.0), SIZES)
def test_the_trial_of_a_line_is_predicted_to_fit(base: float, slope: float, share: float, capacity: float) -> None:
    model = line_of(base, slope)
    line = RecordedLine(model=model, resident_bytes=0, room_share=share)
    cost = room_for_trial(line, model, (1.0,), capacity)
    assert cost >= 0
    assert cost == 0 or model.peak_bytes(cost) < share * capacity


@given(SIZES, st.floats(0, 1e12), SIZES, SIZES)
def test_a_peak_is_confirmed_in_its_interval_and_below_the_capacity_alone(
    predicted: float, width: float, peak: float, capacity: float
) -> None:
    in_interval = predicted - width <= peak <= predicted + width
    assume(abs(abs(peak - predicted) - width) > 1e-6 * max(peak, predicted))
    assert confirms(predicted, width, peak, capacity) == (in_interval and peak < capacity)


def line_of(base: float, slope: float) -> CostModel:
    return CostModel(features=(Feature("rows"),), coefficients=(slope,), base_bytes=base, sigma_bytes=0.0,
                     covariance=((0.0, 0.0), (0.0, 0.0)), relative_residual=0.0)  # fmt: skip


@dataclass
class FakeTrials:
    """Runs batches under a law: some bytes in any case, and a multiple of the predicted cost."""

    order: BatchCosts
    resident: int
    ratio: float
    has_patience: bool = True
    tried: list[int] = field(default_factory=list)

    def warm_up(self, positions: NDArray[np.int64]) -> None:
        assert not self.tried

    def resident_bytes(self) -> int:
        return self.resident

    def has_time(self, cost: float) -> bool:
        return self.has_patience

    def run(self, positions: NDArray[np.int64]) -> Peak:
        self.tried.append(len(positions))
        return Peak(int(self.resident + self.ratio * self.order.chosen(positions).total), 0)


def confirmed(ratio: float, *, upper: float = 1e12, patience: bool = True) -> tuple[SearchResult | str, FakeTrials]:
    model = line_of(10e6, 10_000.0)
    order = BatchCosts.priced(model, np.ones((500, 1)))
    trials = FakeTrials(order, resident=30_000_000, ratio=ratio, has_patience=patience)
    line = RecordedLine(model=model, resident_bytes=10_000_000, room_share=0.98)
    bounds = SearchBounds(upper=upper, capacity_bytes=200e6)
    return confirm_recorded(line, trials, order, bounds), trials


@given(st.floats(0.9, 1.1))
def test_a_limit_is_the_batch_that_was_tried_and_its_peak_is_the_measured_one(ratio: float) -> None:
    found, trials = confirmed(ratio)
    assert len(trials.tried) == 1
    if isinstance(found, str):
        assert abs(ratio - 1) > 0.01
        assert "of the recorded memory" in found
    else:
        assert abs(ratio - 1) < 0.02
        assert found.tuned_limit == 10_000 * trials.tried[0]
        assert found.peak_bytes(found.tuned_limit) == pytest.approx(30e6 + ratio * found.tuned_limit, abs=1)
        assert found.recorded_share == pytest.approx(1, abs=0.02)


def test_no_more_is_tried_than_is_wanted_nor_for_longer_than_there_is_time() -> None:
    found, trials = confirmed(1.0, upper=1_005_000.0)
    assert isinstance(found, SearchResult)
    assert (found.capped, trials.tried) == (True, [100])
    found, trials = confirmed(1.0, patience=False)
    assert (found, trials.tried) == ("a trial of the recorded size takes too long", [])


def test_lines_of_a_card_follow_its_kernels(recorded: RecordedPhase) -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")
    target = recordable("h100-80gb", 80 * 2**30)
    assert target is not None
    line = record_phase(explorer(AbsentGpuMeter(target)), 4000).training
    assert line.model.explains
    assert line.model.coefficients == pytest.approx(recorded.training.model.coefficients, rel=0.02, abs=200)
    assert 0.5 < line.room_share <= 1


def test_a_gpu_that_the_catalogue_does_not_have_is_not_recorded() -> None:
    assert recordable("some-gpu-7gb", 7 * 2**30) is None
    assert torch.device("cpu") == SimulatedMeter(CAPACITY).device
    assert SimulatedMeter(CAPACITY).recordable is None
