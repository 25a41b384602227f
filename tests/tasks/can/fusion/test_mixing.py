"""Scores between 0 and 1 with thresholds in the middle, their mixture, and which window follows which."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train_tasks.can.fusion.mixing import (
    NO_WINDOW,
    STATE_WIDTH,
    WindowScores,
    attack_probability,
    bounded_anomaly,
    bounded_errors,
    confidence,
    log_odds,
    logistic,
    mixing_weights,
    next_windows,
)

SHARES = st.floats(0, 1)
POSITIVE = st.floats(1e-6, 1e6)


@given(POSITIVE, POSITIVE, POSITIVE)
def test_an_anomaly_score_keeps_its_order_within_bounds(one: float, other: float, threshold: float) -> None:
    low, high = bounded_anomaly(np.sort([one, other]), threshold)
    assert 0 <= low <= high <= 1


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4), st.floats(-1e3, 1e3))
def test_an_attack_probability_keeps_its_order_within_bounds(one: float, other: float, threshold: float) -> None:
    low, high = attack_probability(np.sort([one, other]), threshold)
    assert 0 <= low <= high <= 1


@given(POSITIVE)
def test_both_scores_have_their_threshold_in_the_middle(threshold: float) -> None:
    around = threshold * np.array([0.9, 1.0, 1.1])
    for scores in (bounded_anomaly(around, threshold), attack_probability(around, threshold)):
        assert scores[1] == 0.5
        assert scores[0] < 0.5 < scores[2]


def test_without_a_shift_the_probability_is_the_softmax_of_the_logits() -> None:
    difference = np.linspace(-30, 30, 61)
    np.testing.assert_allclose(attack_probability(difference, 0.0), 1 / (1 + np.exp(-difference)), atol=1e-15)


@given(st.floats(0, 1), st.floats(0, 1))
def test_log_odds_are_finite_and_keep_the_order(one: float, other: float) -> None:
    low, high = log_odds(np.sort(np.array([one, other])))
    assert np.isfinite([low, high]).all()
    assert low <= high
    assert logistic(np.array([low]))[0] == pytest.approx(min(one, other), abs=1e-12)


def test_a_threshold_of_zero_flags_whatever_is_above_it() -> None:
    assert bounded_anomaly(np.array([0.0, 1e-3]), 0.0).tolist() == [0.0, 1.0]


def test_an_error_term_in_its_unit_is_in_the_middle() -> None:
    np.testing.assert_array_equal(bounded_errors(np.array([[1.0, 20.0, 0.0]]), [1.0, 20.0, 3.0]), [[0.5, 0.5, 0.0]])


@given(SHARES, SHARES, st.integers(0, 20))
def test_a_mixture_lies_between_its_scores(anomaly: float, attack: float, action: int) -> None:
    table = WindowScores(anomaly=np.array([anomaly]), attack=np.array([attack]), errors=np.zeros((1, 3)))
    weight = mixing_weights(21)[action]
    (fused,) = table.fused(np.array([0]), np.array([weight]))
    assert min(anomaly, attack) - 1e-12 <= fused <= max(anomaly, attack) + 1e-12
    assert fused == pytest.approx(anomaly + weight * (attack - anomaly))


def test_the_outermost_weights_are_each_score_alone() -> None:
    table = WindowScores(anomaly=np.array([0.2, 0.7]), attack=np.array([0.9, 0.1]), errors=np.zeros((2, 3)))
    rows, weights = np.array([1, 0]), mixing_weights(21)
    assert len(weights) == 21
    assert table.fused(rows, weights[0]).tolist() == [0.7, 0.2]
    assert table.fused(rows, weights[-1]).tolist() == [0.1, 0.9]


def test_a_state_is_seven_numbers_between_0_and_1() -> None:
    table = WindowScores(
        anomaly=np.array([0.25, 0.5]), attack=np.array([1.0, 0.0]), errors=np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    )
    states = table.states(np.array([1, 0]))
    assert states.shape == (2, STATE_WIDTH)
    np.testing.assert_allclose(states, [[0.5, 0.0, 0.0, 1.0, 0.4, 0.5, 0.6], [0.25, 1.0, 0.5, 1.0, 0.1, 0.2, 0.3]])


@given(SHARES)
def test_confidence_is_the_same_on_both_sides(score: float) -> None:
    either = confidence(np.array([score, 1 - score]))
    assert either[0] == pytest.approx(either[1])
    assert 0 <= either[0] <= 1


def followed_one_by_one(rows: NDArray[np.int64], source: NDArray[np.int32]) -> list[int]:
    part = set(rows.tolist())
    return [
        row + 1 if row in part and row + 1 in part and source[row] == source[row + 1] else NO_WINDOW
        for row in range(len(source))
    ]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_what_follows_is_the_next_window_of_the_same_log_and_part(lengths: list[int], data: st.DataObject) -> None:
    source = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    kept = data.draw(st.lists(st.booleans(), min_size=len(source), max_size=len(source)))
    rows = np.flatnonzero(kept)
    assert next_windows(rows, source).tolist() == followed_one_by_one(rows, source)


def test_the_last_window_of_a_log_and_of_a_part_is_followed_by_none() -> None:
    source = np.array([0, 0, 0, 1, 1, 1], dtype=np.int32)
    assert next_windows(np.array([0, 1, 2, 3, 4]), source).tolist() == [1, 2, -1, 4, -1, -1]
