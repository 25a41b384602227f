"""What a curriculum shows when: the ratio's schedule, and the windows of an epoch."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.tasks.can.modes.curriculum import Curriculum, RatioSchedule

DEFAULT = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=0.9)

schedules = st.builds(
    lambda start, rise, warmup, smoothing: RatioSchedule(
        start=start, end=start + rise, warmup=warmup, smoothing=smoothing
    ),
    start=st.floats(0.01, 100),
    rise=st.floats(0, 1000),
    warmup=st.floats(0, 0.9),
    smoothing=st.floats(0, 0.99),
)


@given(schedule=schedules, epochs=st.integers(1, 120))
def test_the_ratio_never_falls_and_ends_where_it_should(schedule: RatioSchedule, epochs: int) -> None:
    ratios = [schedule.ratio(epoch, epochs) for epoch in range(epochs)]
    assert all(one <= next_ + 1e-9 * schedule.end for one, next_ in pairwise(ratios))
    assert schedule.start <= min(ratios)
    assert ratios[-1] == pytest.approx(schedule.end, rel=1e-12)


@given(schedule=schedules, epochs=st.integers(2, 120))
def test_the_ratio_does_not_rise_during_the_warm_up(schedule: RatioSchedule, epochs: int) -> None:
    warm = [epoch for epoch in range(epochs) if epoch / (epochs - 1) <= schedule.warmup]
    assert {schedule.ratio(epoch, epochs) for epoch in warm} == {schedule.start}


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.9, 0.99])
def test_the_ratio_is_a_moving_average_tick_by_tick(smoothing: float) -> None:
    schedule = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=smoothing)
    average, averages = 0.0, [0.0] * 101
    for tick in range(1, 901):
        average = smoothing * average + (1 - smoothing) * tick
        averages.append(average)
    expected = [1 + 9 * value / averages[-1] for value in averages]
    assert [schedule.ratio(tick, 1001) for tick in range(1001)] == pytest.approx(expected, rel=1e-9)


def test_smoothing_delays_the_ratio_by_about_a_hundredth_of_the_training() -> None:
    plain = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=0.0)
    behind = [plain.ratio(epoch, 101) - DEFAULT.ratio(epoch, 101) for epoch in range(101)]
    assert 0.03 < max(behind) < 0.1


@pytest.mark.parametrize("epochs", [1, 2, 3, 10])
def test_few_epochs_reach_the_end_too(epochs: int) -> None:
    assert DEFAULT.ratio(epochs - 1, epochs) == 10.0


def curriculum(difficulty: list[float], is_attack: list[bool]) -> Curriculum:
    return Curriculum(np.arange(100, 100 + len(is_attack)), np.array(is_attack), np.array(difficulty))


def test_every_attack_is_there_and_the_hardest_benign_windows_beside_it() -> None:
    windows = curriculum([0.1, 5.0, 2.0, 7.0, 0.0], [False, True, False, False, True, False, False])
    shown = [windows.with_ratio(ratio).rows.tolist() for ratio in (0.5, 1.0, 1.5)]
    assert shown == [[101, 104, 105], [101, 102, 104, 105], [101, 102, 103, 104, 105]]
    assert windows.with_ratio(10.0).rows.tolist() == list(range(100, 107))


def test_of_equally_hard_windows_the_first_come_first() -> None:
    windows = curriculum([1.0, 2.0, 1.0, 2.0, 1.0], [False] * 5 + [True] * 3)
    assert windows.with_ratio(1.0).rows.tolist() == [100, 101, 103, 105, 106, 107]


data = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=60)


@given(data=data, ratios=st.tuples(st.floats(0.01, 30), st.floats(0.01, 30)))
def test_a_higher_ratio_adds_windows_and_takes_none_away(
    data: list[tuple[bool, int]], ratios: tuple[float, float]
) -> None:
    is_attack = np.array([attack for attack, _ in data])
    difficulty = np.array([float(hard) for attack, hard in data if not attack])
    windows = Curriculum(np.arange(len(data)), is_attack, difficulty)
    fewer, more = (windows.with_ratio(ratio) for ratio in sorted(ratios))
    assert set(fewer.rows) <= set(more.rows)
    assert set(np.flatnonzero(is_attack)) <= set(fewer.rows)
    for shown in (fewer, more):
        assert (shown.benign, shown.attacks) == (int((~is_attack[shown.rows]).sum()), int(is_attack.sum()))
        assert len(shown.rows) == len(set(shown.rows)) == shown.benign + shown.attacks
    left_out = np.setdiff1d(np.flatnonzero(~is_attack), more.rows)
    hard = dict(zip(np.flatnonzero(~is_attack), difficulty, strict=True))
    there = [hard[row] for row in more.rows if not is_attack[row]]
    assert not len(left_out) or max(hard[row] for row in left_out) <= min(there)


def test_the_prior_is_that_of_the_windows_shown() -> None:
    windows = curriculum([float(i) for i in range(9)], [True] * 3 + [False] * 9)
    assert windows.with_ratio(1.0).log_prior == 0.0
    assert windows.with_ratio(2.0).log_prior == pytest.approx(math.log(2))
    assert windows.with_ratio(10.0).log_prior == pytest.approx(math.log(3))


def test_a_sample_without_attacks_shows_all_that_is_benign() -> None:
    assert len(curriculum([1.0, 2.0, 3.0], [False] * 3).with_ratio(1.0).rows) == 3
