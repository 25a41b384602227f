"""Which steps are measured, and that no peak is lost or taken for another's."""

import doctest
from collections.abc import Iterator
from dataclasses import asdict
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from can_train.config.settings import MonitorSettings
from can_train.errors import ArgumentError
from can_train.memory import meters
from can_train.memory.meters import CpuMeter, Meter, SimulatedMeter
from can_train.memory.monitor import LEAST_BYTES, RISES, WINDOW_STEPS, LeakWatch, MemoryMonitor
from can_train.memory.simulated.allocator import EXPANDABLE

MIB = 2**20
CPU = CpuMeter()


def take(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def steps(monitor: MemoryMonitor, *mebibytes: int) -> list[bool]:
    """Takes one step for each; returns which were counted."""
    told = []
    for mib in mebibytes:
        with monitor.step() as counted:
            take(mib)
        told.append(counted)
    return told


@pytest.mark.parametrize("name", ["interval", "warmup", "total_steps"])
@pytest.mark.parametrize("steps", ["8", 2.5, True, [8]])
def test_steps_are_counted_in_whole_numbers(name: str, steps: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name} is a number of steps"):
        MemoryMonitor("cpu", **{name: steps})


@pytest.fixture
def gpu() -> SimulatedMeter:
    return SimulatedMeter(100 * MIB, settings=EXPANDABLE)


def test_the_example_is_true() -> None:
    result = doctest.testmod(meters)
    assert result.attempted > 0
    assert result.failed == 0


def test_each_step_has_a_peak_of_its_own_and_the_run_keeps_the_largest(gpu: SimulatedMeter) -> None:
    monitor, peaks = MemoryMonitor(meter=gpu), []
    for mib in (40, 10, 20):
        steps(monitor, mib)
        peaks.append(monitor.last_step[0] // MIB)
    assert peaks == [40, 10, 20]
    assert monitor.peak_bytes == 40 * MIB


def test_what_runs_between_steps_is_the_runs_peak_and_no_steps(gpu: SimulatedMeter) -> None:
    monitor = MemoryMonitor(meter=gpu)
    with gpu.active():
        steps(monitor, 10)
        take(50)
        steps(monitor, 20)
    assert monitor.last_step[0] == 20 * MIB
    assert monitor.peak_bytes == 50 * MIB


def test_a_step_keeps_the_peak_before_its_rescue(gpu: SimulatedMeter) -> None:
    monitor = MemoryMonitor(meter=gpu)
    with monitor.step():
        take(60)
        monitor.rescued()
        take(30)
    assert monitor.last_step[0] == 60 * MIB
    assert monitor.peak_bytes_after_rescue == 30 * MIB


def test_a_step_that_is_not_measured_has_no_peak() -> None:
    monitor = MemoryMonitor(meter=CPU, interval=2, warmup=0)
    peaks = []
    for _ in range(3):
        steps(monitor, 10)
        peaks.append(monitor.last_step[0] // MIB)
    assert peaks == [10, 0, 10]


@given(interval=st.integers(1, 60), warmup=st.integers(0, 40), total=st.integers(1, 120), known=st.booleans())
def test_steps_are_measured_from_the_warm_up_on_at_the_interval(
    interval: int, warmup: int, total: int, known: bool
) -> None:
    monitor = MemoryMonitor(meter=CPU, interval=interval, warmup=warmup, total_steps=total if known else None)
    told = steps(monitor, *[0] * total)
    first = min(warmup, total - 1) if known else warmup
    assert [step for step, counted in enumerate(told) if counted] == list(range(first, total, interval))


def test_the_utilisation_of_a_run_is_the_mean_of_its_measured_steps() -> None:
    class Sampled(CpuMeter):
        shares: Iterator[float | None] = iter([0.5, None, 0.9])

        def utilisation(self) -> float | None:
            return next(self.shares)

    monitor = MemoryMonitor(meter=Sampled(), interval=10, warmup=0)
    assert monitor.utilisation is None
    steps(monitor, *[0] * 30)
    assert monitor.utilisation == pytest.approx(0.7)


def test_a_run_without_steps_may_be_announced() -> None:
    assert MemoryMonitor(meter=CPU, total_steps=0).peak_share is None


def test_a_peak_between_two_measured_steps_is_not_lost_where_the_device_counts_always(gpu: SimulatedMeter) -> None:
    monitor = MemoryMonitor(meter=gpu, interval=5, warmup=2)
    assert steps(monitor, 10, 10, 10, 40, 10, 10) == [True] * 6
    assert monitor.peak_bytes == 40 * MIB
    assert monitor.peak_share == 0.4
    assert monitor.peak_reserved_bytes == 40 * MIB


def test_on_the_cpu_only_measured_steps_count() -> None:
    monitor = MemoryMonitor("cpu", interval=3, warmup=1)
    assert steps(monitor, 40) == [False]
    assert monitor.peak_share is None
    assert steps(monitor, 10, 40, 40, 20) == [True, False, False, True]
    assert monitor.peak_bytes == 20 * MIB


@pytest.mark.parametrize("meter", [CpuMeter(), SimulatedMeter(100 * MIB, settings=EXPANDABLE)])
def test_a_reset_elsewhere_does_not_lose_what_was_measured(meter: Meter) -> None:
    monitor = MemoryMonitor(meter=meter, interval=1, warmup=0)
    steps(monitor, 40)
    meter.reset_peak()
    steps(monitor, 10)
    assert monitor.peak_bytes == 40 * MIB


def test_a_reading_saves_a_peak_from_a_reset_at_any_time(gpu: SimulatedMeter) -> None:
    monitor = MemoryMonitor(meter=gpu, interval=50, warmup=20)
    steps(monitor, 40)
    monitor.read()
    gpu.reset_peak()
    assert monitor.peak_bytes == 40 * MIB


def test_what_runs_before_the_first_step_and_in_a_pause_does_not_count(gpu: SimulatedMeter) -> None:
    monitor = MemoryMonitor(meter=gpu)
    with gpu.active():
        take(60)
        steps(monitor, 20)
        monitor.pause()
        take(70)
        assert monitor.peak_bytes == 20 * MIB
        gpu.reset_peak()
        take(80)
        steps(monitor, 10)
    assert monitor.peak_bytes == 20 * MIB


@pytest.mark.parametrize("meter", [CpuMeter(), SimulatedMeter(100 * MIB, settings=EXPANDABLE)])
def test_a_rescue_keeps_the_peak_and_tells_what_follows_apart(meter: Meter) -> None:
    monitor = MemoryMonitor(meter=meter, interval=1, warmup=0)
    steps(monitor, 20)
    with monitor.step():
        kept = take(5)
        take(40)
        monitor.rescued()
        take(10)
    assert (monitor.peak_bytes, monitor.peak_bytes_after_rescue) == (45 * MIB, 15 * MIB)
    del kept
    steps(monitor, 30, 20)
    assert (monitor.peak_bytes, monitor.peak_bytes_after_rescue) == (45 * MIB, 30 * MIB)


def test_without_a_rescue_everything_is_settled(gpu: SimulatedMeter) -> None:
    monitor = MemoryMonitor(meter=gpu)
    steps(monitor, 20, 10)
    assert monitor.peak_bytes_after_rescue == monitor.peak_bytes == 20 * MIB


def test_a_rescue_outside_of_training_leaves_the_meter_alone(gpu: SimulatedMeter) -> None:
    monitor = MemoryMonitor(meter=gpu)
    with gpu.active():
        take(30)
        monitor.rescued()
    assert gpu.peak_bytes() == 30 * MIB
    assert monitor.peak_share is None


def test_the_peak_of_a_step_that_failed_counts() -> None:
    monitor = MemoryMonitor("cpu", warmup=0)

    def fail() -> None:
        with monitor.step():
            take(10)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert monitor.peak_bytes == 10 * MIB


@pytest.mark.parametrize(
    ("device", "warmup"), [("cpu", 0), (torch.device("cpu"), 0), ("sim:1GiB", 0), ("sim:1GiB", 20)]
)
def test_what_is_held_is_part_of_the_peak(device: str | torch.device, warmup: int) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    model.register_buffer("more", torch.zeros(1024, 1024))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    beside = [take(1)]
    monitor = MemoryMonitor(device, warmup=warmup)
    with monitor.step(model, optimizer, beside):
        take(16)
    # Weight, buffer, gradient, two moments, Adam's count of steps, and what was taken beside.
    assert monitor.peak_bytes == (5 * 4 + 1 + 16) * MIB + 512


@pytest.mark.parametrize(
    ("given", "rule"),
    [({"interval": 0}, "interval must be at least 1 step: 0"), ({"warmup": -1}, "warmup must be at least 0 steps: -1")],
)
def test_a_rhythm_that_makes_no_sense_is_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ArgumentError, match=rule):
        MemoryMonitor("cpu", **given)


def test_settings_and_monitor_have_the_same_defaults() -> None:
    parameters = signature(MemoryMonitor).parameters
    assert asdict(MonitorSettings()) == {name: parameters[name].default for name in ("interval", "warmup")}


def told(readings: list[int]) -> list[tuple[int, int]]:
    """What the watch said: (step, bytes)."""
    watch = LeakWatch()
    risen = [watch.after_step(reading) for reading in readings]
    return [(step, rise) for step, rise in enumerate(risen, start=1) if rise]


def floors(*floors_bytes: int) -> list[int]:
    """Readings with a window for each floor: all but one step of it lie far above."""
    return [reading for floor in floors_bytes for reading in [floor + 100 * MIB] * (WINDOW_STEPS - 1) + [floor]]


def test_a_floor_that_rises_and_rises_is_told_once() -> None:
    readings = floors(*(window * MIB for window in range(1, 3 * RISES)))
    assert told(readings) == [(WINDOW_STEPS * (RISES + 1), RISES * MIB)]


def test_a_little_more_with_every_step_is_told() -> None:
    assert [rise for _, rise in told([step * MIB for step in range(1_000)])] == [RISES * WINDOW_STEPS * MIB]


@pytest.mark.parametrize("dip", [0, 1], ids=["stays", "falls"])
def test_a_floor_that_pauses_begins_anew(dip: int) -> None:
    rising = [window * MIB for window in range(10, 10 + RISES)]
    assert told(floors(*rising, rising[-1] - dip * MIB, *(floor + MIB for floor in rising))) == []


def test_peaks_that_rise_over_an_even_floor_are_no_leak() -> None:
    assert told([step * MIB if step % 10 else 0 for step in range(1_000)]) == []


def test_a_rise_of_a_few_bytes_is_told_only_when_it_is_worth_a_word() -> None:
    step = LEAST_BYTES // 10
    assert told(floors(*range(0, 10 * step, step))) == []
    assert told(floors(*range(0, 11 * step, step), 2 * LEAST_BYTES)) == [(12 * WINDOW_STEPS, 2 * LEAST_BYTES)]


def risen(readings: list[int]) -> tuple[int, int]:
    """The rise up to the last reading: (bytes, steps)."""
    watch = LeakWatch()
    for reading in readings:
        watch.after_step(reading)
    return watch.rise()


def test_a_rise_up_to_the_end_is_known_long_before_it_is_told() -> None:
    assert risen([step * MIB for step in range(13)]) == (10 * MIB, 13)
    assert risen([50 * MIB] * 30 + [(50 + step) * MIB for step in range(20)]) == (18 * MIB, 20)
    assert risen([step * MIB + (step % 3) * 100 * MIB for step in range(100)])[0] > 50 * MIB


def test_readings_that_rise_and_fall_are_no_rise() -> None:
    assert risen([(step % 7) * MIB for step in range(1_000)]) == (0, 0)
    assert risen([step * MIB for step in range(100)] + [0] * 100) == (0, 0)
    assert risen([10 * MIB] * 50 + [90 * MIB] * 50) == (0, 0)
    assert risen([step * MIB for step in range(11)]) == (0, 0)


def test_the_watch_itself_does_not_leak() -> None:
    watch = LeakWatch()
    for step in range(10_000):
        watch.after_step(step * MIB)
    rise, steps = watch.rise()
    assert len(watch.spans) < 128
    assert (steps, rise > 9_700 * MIB) == (10_000, True)
    assert len(watch.current) < WINDOW_STEPS
    assert len(watch.floors) <= RISES + 1
