"""Bursts, alarms that hold, and the interval around a difference."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train_tasks.can.evaluation.bursts import (
    EACH_WINDOW,
    LEAST_BLOCKS,
    Blocks,
    Timeline,
    burst_figures,
    held_scores,
)
from can_train_tasks.can.evaluation.options import Hold
from fakes.windows_by_hand import source_file, windows_of

WINDOW = [1, 2, 3]


def timeline(label, *, seconds=2.0, source=None):
    """Windows that last a second each, one every `seconds`."""
    start = np.arange(len(label)) * seconds
    logs = tuple(source_file(str(number)) for number in range(3))
    flat = windows_of([WINDOW] * len(label), label=label, start_time=start, source=source, sources=logs)
    return Timeline.of(flat, np.arange(len(label)))


def flags(text):
    return np.array([int(each) for each in text], float)


def test_attack_windows_in_a_row_are_a_burst_and_a_second_without_attack_ends_it():
    assert timeline([0, 1, 1, 0, 1], seconds=1.0).bursts().tolist() == [-1, 0, 0, -1, 1]
    assert timeline([0, 1, 0, 1, 1, 0], seconds=0.1).bursts().tolist() == [-1, 0, 0, 0, 0, -1]


def test_no_burst_reaches_from_one_log_into_the_next():
    assert timeline([1, 1, 1], seconds=1.0, source=[0, 0, 1]).bursts().tolist() == [0, 0, 1]


@pytest.mark.parametrize("shift_s", [86_400.0, 1.6e9, -100.0], ids=["a pause", "a clock that is set", "a restart"])
def test_a_pause_ends_a_burst_and_adds_no_time(shift_s):
    label = [0, 1, 1, 0, 0, 0, 1, 0]
    start = np.arange(8.0)
    start[4:] += shift_s
    flat = windows_of([WINDOW] * 8, label=label, start_time=start, drive=[0] * 4 + [1] * 4)
    jumped, usual = Timeline.of(flat, np.arange(8)), timeline(label, seconds=1.0)
    assert jumped.segment.tolist() == [0] * 4 + [1] * 4
    assert jumped.bursts().tolist() == usual.bursts().tolist()
    assert jumped.benign_s.sum() == pytest.approx(usual.benign_s.sum(), abs=1.0)
    assert (jumped.end_s - jumped.start_s).tolist() == [1.0] * 8
    alarms = flags("10000001")
    before, after = (burst_figures(each, alarms, 0.5, EACH_WINDOW) for each in (usual, jumped))
    assert after["false_events"] == before["false_events"] == 1
    assert after["latency_s"] == before["latency_s"]


@pytest.mark.parametrize("frames", [3, 4, 5])
def test_a_pause_is_no_gap_of_the_stride(frames):
    """Of windows of three frames with a stride of six, the last one before a pause may have fewer frames behind it."""
    flat = windows_of([WINDOW] * 6, drive=[0, 0, 0, 1, 1, 1])
    flat.first_frame[:] = [0, 6, 12, 12 + frames, 18 + frames, 24 + frames]
    assert Timeline.of(flat, np.arange(6)).segment.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_clock_that_is_set_back_ends_a_burst_and_a_window_no_earlier_than_it_begins():
    start = np.array([0.0, 1.0, 2.0, -2.0, -1.0])
    flat = windows_of([WINDOW] * 5, start_time=start, end_time=[1.0, 2.0, -2.0, -1.0, 0.0])
    found = Timeline.of(flat, np.arange(5))
    assert found.segment.tolist() == [0, 0, 0, 1, 1]
    assert (found.end_s - found.start_s).tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_a_silence_of_seconds_is_time_of_the_bus():
    start = np.array([0.0, 1.0, 2.0, 11.0, 12.0])
    flat = windows_of([WINDOW] * 5, start_time=start)
    silent = Timeline.of(flat, np.arange(5))
    assert (silent.segment.max(), silent.benign_s.sum()) == (0, 13.0)


@pytest.mark.parametrize(
    ("hold", "raised"),
    [
        (EACH_WINDOW, "0110100"),
        (Hold(2, 3), "0011100"),
        (Hold(3, 3), "0000000"),
        (Hold(1, 3), "0111111"),
        (Hold(3, 4), "0000100"),
    ],
)
def test_an_alarm_is_raised_when_enough_of_the_last_windows_are_flagged(hold, raised):
    held = held_scores(flags("0110100"), np.zeros(7, np.int64), hold)
    assert "".join(str(int(one)) for one in held > 0.5) == raised


def test_an_alarm_does_not_hold_into_another_log():
    segment = np.array([0, 0, 1, 1])
    assert (held_scores(flags("0111"), segment, Hold(2, 2)) > 0.5).tolist() == [False, False, False, True]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 5), st.floats(-5, 5))
def test_held_scores_exceed_a_threshold_where_counting_flags_raises_the_alarm(scores, one, other, threshold):
    hold, score = Hold(min(one, other), max(one, other)), np.array(scores)
    flagged = score > threshold
    counted = [flagged[max(0, end - hold.of + 1) : end + 1].sum() >= hold.needed for end in range(len(score))]
    held = held_scores(score, np.zeros(len(score), np.int64), hold)
    assert (held > threshold).tolist() == counted


def test_latency_is_from_the_start_of_the_first_attack_window_to_the_end_of_the_one_that_raises_the_alarm():
    found = burst_figures(timeline([0, 1, 1, 1, 0, 0], seconds=1.0), flags("001100"), 0.5, EACH_WINDOW)
    assert (found["bursts"], found["bursts_found"], found["latency_s"]) == (1, 1, 2.0)
    held = burst_figures(timeline([0, 1, 1, 1, 0, 0], seconds=1.0), flags("001100"), 0.5, Hold(2, 3))
    assert (held["hold"], held["latency_s"]) == ("2/3", 3.0)


def test_what_holds_from_a_burst_is_no_false_event_and_what_begins_outside_is_one():
    windows = timeline([0, 0, 1, 1, 0, 0, 0, 0], seconds=2.0)
    held = burst_figures(windows, flags("00110000"), 0.5, Hold(2, 3))
    assert (held["bursts_found"], held["false_events"]) == (1, 0)
    each = burst_figures(windows, flags("10111001"), 0.5, EACH_WINDOW)
    assert each["false_events"] == 3
    assert each["false_events_per_hour"] == pytest.approx(3 / (12 / 3600), rel=0.1)


def test_an_alarm_less_than_a_second_after_a_burst_finds_it_and_is_no_false_event():
    windows = timeline([0, 1, 0, 0, 0, 0, 0, 0], seconds=1.5)
    soon, late = (burst_figures(windows, flags(text), 0.5, EACH_WINDOW) for text in ("00100000", "00010000"))
    assert (soon["bursts_found"], soon["false_events"], soon["latency_s"]) == (1, 0, 2.5)
    assert (late["bursts_found"], late["false_events"]) == (0, 1)
    logs = timeline([0, 1, 0], seconds=1.0, source=[0, 0, 1])
    assert burst_figures(logs, flags("001"), 0.5, EACH_WINDOW)["bursts_found"] == 0


def test_alarms_less_than_a_second_apart_are_one_event():
    assert burst_figures(timeline([0] * 6, seconds=0.5), flags("101001"), 0.5, EACH_WINDOW)["false_events"] == 1
    assert burst_figures(timeline([0] * 6, seconds=2.0), flags("101001"), 0.5, EACH_WINDOW)["false_events"] == 3


def test_an_alarm_that_never_ends_is_one_event_of_all_the_time():
    found = burst_figures(timeline([0] * 8, seconds=1.0), np.ones(8), 0.5, EACH_WINDOW)
    assert (found["false_events"], found["false_alarm_share"]) == (1, 1.0)
    half = burst_figures(timeline([0] * 8, seconds=1.0), flags("11110000"), 0.5, EACH_WINDOW)
    assert half["false_alarm_share"] == 0.5


def test_figures_that_the_windows_do_not_define_are_absent():
    benign = burst_figures(timeline([0, 0]), flags("00"), 0.5, Hold(2, 3))
    assert (benign["bursts"], benign["latency_s"], benign["false_events_per_hour"]) == (0, None, 0.0)
    attacks = burst_figures(timeline([1, 1]), flags("11"), 0.5, EACH_WINDOW)
    assert (attacks["bursts_found"], attacks["false_events_per_hour"]) == (2, None)


def bursts(count, seed=0):
    """As many bursts as benign stretches, and a truth that a detector meets in 80 of 100 windows, another in 60."""
    label = np.repeat(np.arange(2 * count) % 2, 10)
    rng = np.random.default_rng(seed)
    return label, *(np.where(rng.random(len(label)) < right, label, 1 - label) > 0 for right in (0.8, 0.6))


def differences(label, model, **others):
    return Blocks(timeline(label, seconds=1.0), seed=0).differences(
        model, {name: [one] for name, one in others.items()}
    )


def test_an_interval_tells_a_better_detector_from_a_worse_one_and_is_the_same_each_time():
    label, good, poor = bursts(20)
    found = differences(label, good, poor=poor, same=good)
    assert found["poor"]["low"] > 0.1
    assert found["poor"]["low"] < found["poor"]["mcc"] < found["poor"]["high"]
    assert found["same"] == {"mcc": 0.0, "low": 0.0, "high": 0.0}
    assert differences(label, poor, good=good)["good"]["high"] < -0.1
    assert differences(label, good, poor=poor, same=good) == found
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_whole_bursts_that_are_missed_widen_the_interval_more_than_scattered_windows():
    label = np.repeat(np.arange(40) % 2, 10)
    burst = np.cumsum(np.diff(label, prepend=0) > 0)
    scattered = (label > 0) & (np.arange(400) % 10 != 0)
    whole = (label > 0) & (burst % 10 != 0)
    nothing = np.zeros(400, bool)

    def width(model):
        one = differences(label, model, nothing=nothing)["nothing"]
        return one["high"] - one["low"]

    assert scattered.sum() == whole.sum()
    assert width(whole) > 3 * width(scattered)


def test_too_few_bursts_have_no_interval_and_one_class_has_no_difference():
    label, good, poor = bursts(LEAST_BLOCKS - 1)
    assert differences(label, good, poor=poor)["poor"]["low"] is None
    assert differences(np.zeros(9, int), np.ones(9, bool), other=np.zeros(9, bool)) == {}


def test_several_fits_of_one_baseline_count_by_their_mean():
    label, good, poor = bursts(20)
    blocks = Blocks(timeline(label, seconds=1.0), seed=0)
    found = blocks.differences(good, {"forest": [good, poor], "poor": [poor]})
    assert found["forest"]["mcc"] == pytest.approx(found["poor"]["mcc"] / 2)
    assert found["forest"]["low"] == pytest.approx(found["poor"]["low"] / 2)
