"""The checks of live detection about its input tell each fault once, and nothing about a sound input."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train_tasks.can.data.graphs import GraphBuilder
from can_train_tasks.can.evaluation.self_check import (
    ClockCheck,
    IdCheck,
    LineCheck,
    LoadCheck,
    StepCheck,
    clock_step_us,
    coarse_clock_notes,
    highest_load,
)
from fakes.random_bus import cached_graphs, injected_frames

KNOWN = np.arange(0x200, 0x20A)


def clock(arrivals: Sequence[tuple[float, Sequence[float]]]) -> list[Any]:
    check = ClockCheck()
    found = [each for arrived_s, times in arrivals for each in check.see(np.array(times, float), arrived_s)]
    return [each.record for each in found]


def at_pace(seconds: int, start_s: float = 0.0, arrived_s: float = 100.0) -> list[tuple[float, Sequence[float]]]:
    return [(arrived_s + second, (start_s + second - 0.5, start_s + second)) for second in range(seconds)]


def test_a_clock_that_runs_with_the_arrival_is_no_fault() -> None:
    assert clock(at_pace(60)) == []
    # A pause of the bus, and frames that waited in a pipe.
    assert clock([*at_pace(10), *at_pace(10, 40.0, 140.0)]) == []
    assert clock([*at_pace(10), (140.0, range(10, 40)), *at_pace(5, 41.0, 141.0)]) == []


def test_a_log_that_is_replayed_at_once_may_have_pauses() -> None:
    assert clock([(100.0, [0, 1, 2, 60, 61]), (100.1, [500, 501])]) == []
    assert clock([(100.0 + second, [100.0 * second, 100.0 * second + 1]) for second in range(20)]) == []


def test_a_jump_of_the_clock_is_told_once_with_its_size() -> None:
    forward = clock([*at_pace(10), *at_pace(10, 3_610.5, 110.0)])
    assert forward == [{"event": "clock_jump", "time": 3_610.0, "jump_s": 3_601.0}]
    back = clock([*at_pace(10, 1_000.0), *at_pace(10, 0.5, 110.0)])
    assert back == [{"event": "clock_jump", "time": 0.0, "jump_s": -1_009.0}]


def test_two_clocks_that_take_turns_are_one_event_a_second() -> None:
    turns = [(100 + number / 100, [number % 2 * 1_000.0]) for number in range(300)]
    assert len(clock(turns)) == 3


def test_lines_that_cannot_be_read_are_told_once_until_they_can_be_read() -> None:
    check, found = LineCheck(), []
    for frames, unreadable in [(1_000, 5), (1_100, 105), (1_200, 205), (3_000, 210), (3_000, 450)]:
        found += [(each.record["lines"], each.record["share"]) for each in check.see(frames, unreadable)]
    assert found == [(200, 0.5), (240, 1.0)]


def test_a_bus_without_a_known_id_is_told_once_until_one_comes() -> None:
    frames = injected_frames(12_000)
    strange = replace(frames, can_id=frames.can_id + np.uint32(0x300))
    check, counts = IdCheck(KNOWN), []
    for number, drive in enumerate((frames, strange, strange, frames, strange)):
        later = replace(drive, timestamp=drive.timestamp + 10 * number)
        parts = [later[begin : begin + 700] for begin in range(0, 12_000, 700)]
        counts.append(sum(len(list(check.see(part))) for part in parts))
    assert counts == [0, 1, 0, 0, 1]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 250), st.floats(-30, 30)), min_size=1, max_size=8),
       st.lists(st.integers(1, 1_500), max_size=6))  # fmt: skip
def test_unknown_ids_are_told_at_the_same_frame_however_frames_arrive(
    stretches: list[tuple[bool, int, float]], cuts: list[int]
) -> None:
    ids = np.concatenate([np.full(count, 0x200 if known else 0x700) for known, count, _ in stretches])
    steps = np.concatenate([np.r_[pause, np.full(count - 1, 0.015)] for _, count, pause in stretches])
    frames = replace(injected_frames(12_000)[: len(ids)], can_id=ids.astype(np.uint32), timestamp=np.cumsum(steps))
    at_once = [each.record for each in IdCheck(KNOWN).see(frames)]
    check, bounds = IdCheck(KNOWN), sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    parts = [frames[begin:end] for begin, end in itertools.pairwise(bounds)]
    assert [each.record for part in parts for each in check.see(part)] == at_once
    one_by_one = IdCheck(KNOWN)
    assert [each.record for place in range(len(ids)) for each in one_by_one.see(frames[place : place + 1])] == at_once


def test_a_load_above_the_benign_drives_is_told_once_in_pieces_of_any_size() -> None:
    calm, busy = np.arange(0, 10, 0.001), np.arange(10, 20, 0.0005)
    times = np.concatenate([calm, busy, calm + 20, busy + 20])
    for piece in (1, 333, len(times)):
        check = LoadCheck(1_000.0)
        found = [each for begin in range(0, len(times), piece) for each in check.see(times[begin : begin + piece])]
        assert [round(each.record["time"]) for each in found] == [11, 31]
        assert found[0].record["frames_per_s"] == 2_000.0
    assert list(LoadCheck(None).see(times)) == []


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("back_s", [0.3, 2.5, 86_400.0])
def test_a_clock_that_is_set_back_adds_no_load(size: int, back_s: float) -> None:
    drive = np.arange(0.0, 5.0, 0.001)
    times = np.concatenate([drive, drive + 5.0 - back_s])
    check = LoadCheck(1_000.0)
    assert [told for start in range(0, len(times), size) for told in check.see(times[start : start + size])] == []


def test_the_highest_load_of_training_is_over_a_second_of_a_benign_drive(tmp_path: Path) -> None:
    frames = injected_frames(6_000)
    slow = replace(frames, label=np.zeros(6_000, np.uint8))
    flat = cached_graphs(tmp_path, [list(GraphBuilder(20, 20).feed(slow))])
    assert 1_900 < (highest_load(flat, np.arange(len(flat))) or 0.0) < 2_100
    assert highest_load(flat, np.delete(np.arange(len(flat)), np.arange(0, len(flat), 80))) is None
    short = cached_graphs(tmp_path / "short", [list(GraphBuilder(20, 20).feed(slow[:400]))])
    assert highest_load(short, np.arange(len(short))) is None


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(("digits", "usual_us", "told"), [(3, 1, 1), (3, 100, 1), (4, 1, 0), (6, 1, 0), (3, 1_000, 0)])
def test_a_clock_of_coarser_steps_than_in_training_is_told_once(
    size: int, digits: int, usual_us: int, told: int
) -> None:
    times = np.round(1.7e9 + injected_frames(4_000).timestamp, digits)
    check = StepCheck(usual_us)
    found = [each for start in range(0, len(times), size) for each in check.see(times[start : start + size])]
    assert len(found) == told
    assert all("The clock has steps of 1 ms, and in the training logs of" in each.text for each in found)
    assert list(StepCheck(None).see(times)) == []


def test_the_steps_of_a_clock_are_known_from_the_windows_of_a_log(tmp_path: Path) -> None:
    frames = injected_frames(4_000)
    fine, coarse = (replace(frames, timestamp=np.round(1.7e9 + frames.timestamp, digits)) for digits in (6, 3))
    flat = cached_graphs(tmp_path, [list(GraphBuilder(20, 20).feed(log)) for log in (fine, coarse)])
    rows = np.arange(len(flat))
    assert (clock_step_us(flat, rows[:200]), clock_step_us(flat, rows)) == (1, 1_000)
    (note,) = coarse_clock_notes(flat, rows, 1)
    assert note.startswith("1.log: the clock has steps of 1 ms, and in the training logs of 1 µs: ")
    assert coarse_clock_notes(flat, rows, None) == coarse_clock_notes(flat, rows, 1_000) == []
