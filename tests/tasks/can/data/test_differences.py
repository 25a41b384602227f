"""Whether times are differences from line to line, or those of a clock."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import DataError
from can_train_tasks.can.data.clocks import are_differences
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.evaluation.live_input import BusFrames, open_input
from can_train_tasks.can.settings import CanDatasetSettings
from fakes.candump import candump
from fakes.random_bus import random_frames


def bus_times(rows: int, frames_per_s: float, seed: int) -> np.ndarray:
    """Times of a bus with bursts: most frames follow at once, some after a pause."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0, rows) * np.where(rng.random(rows) < 0.7, 0.3, 2.6)
    return np.cumsum(np.maximum(gaps / frames_per_s, 0.00006)).round(6)


def decided(times: np.ndarray) -> tuple[bool, int]:
    """Returns the answer, and the number of rows that it took, if rows come one by one."""
    for rows in range(1, len(times) + 1):
        answer = are_differences(times[:rows])
        if answer is not None:
            return answer, rows
    return bool(are_differences(times, final=True)), len(times)


RATES = st.sampled_from([5.0, 50.0, 1000.0, 4000.0, 12000.0])
SEEDS = st.integers(0, 2**32 - 1)


@given(RATES, SEEDS)
def test_gaps_of_a_bus_are_differences(frames_per_s: float, seed: int) -> None:
    gaps = np.diff(bus_times(1500, frames_per_s, seed), prepend=0.0).round(6)
    answer, rows = decided(gaps)
    assert answer
    assert rows <= 1000
    assert are_differences(gaps, final=True)


@given(RATES, SEEDS, st.sampled_from([0.0, 0.001, 0.005, 0.010]), st.floats(0.1, 0.6))
def test_a_clock_that_jitters_is_none(frames_per_s: float, seed: int, late_s: float, share: float) -> None:
    arrived = bus_times(1500, frames_per_s, seed)
    # The rows of one interface come late, in the order of their arrival.
    late = np.random.default_rng(seed).random(len(arrived)) < share
    clock = arrived - np.where(late, late_s, 0.0) + late_s
    assert not decided(clock)[0]
    assert not are_differences(clock, final=True)


def test_equal_gaps_and_clocks_that_stand_still_or_step_back_once() -> None:
    rng = np.random.default_rng(0)
    assert decided(0.01 + rng.integers(-2, 3, 300) / 1e6)[0]
    assert not decided(np.repeat(np.arange(10.0), 100))[0]
    assert not decided(np.concatenate([np.arange(500) / 100, np.arange(500) / 100]))[0]
    assert not decided(np.arange(1000, 0, -1) / 100)[0]
    assert not decided(1.7e9 + rng.random(300))[0]


def test_a_file_of_differences_is_refused_and_a_live_input_adds_them_up(tmp_path: Path) -> None:
    frames = random_frames(300, seed=3)
    log = tmp_path / "differences.log"
    log.write_text(candump(frames, "-td"))
    said = re.escape("differences from line to line, as `candump -t d` prints")
    with pytest.raises(DataError, match=said):
        list(LogReader(log, CanDatasetSettings()).blocks())
    source = open_input(str(log), CanDatasetSettings())
    times = np.concatenate([batch.frames.timestamp for batch in source.batches() if isinstance(batch, BusFrames)])
    np.testing.assert_allclose(np.diff(times), np.diff(frames.timestamp), atol=2e-4)
    source.close()


def test_times_that_a_format_says_are_absolute_are_not_added_up(tmp_path: Path) -> None:
    log = tmp_path / "late.asc"
    times = [number / 1000 - 0.005 * (number % 2) + 0.005 for number in range(60)]
    rows = [f"{at:.6f} {1 + number % 2}  1A0  Rx   d 2 00 FF" for number, at in enumerate(times)]
    log.write_text("\n".join(["base hex  timestamps absolute", *rows, ""]))
    source = open_input(str(log), CanDatasetSettings())
    read = np.concatenate([batch.frames.timestamp for batch in source.batches() if isinstance(batch, BusFrames)])
    assert sorted(read.tolist()) == pytest.approx(sorted(times))
    source.close()
