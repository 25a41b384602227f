"""Metrics equal their definitions, and the baselines find what is plain to see."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train_tasks.bendr import class_metrics


@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_the_area_under_the_roc_curve_is_the_share_of_pairs_in_order(seed: int, number: int) -> None:
    rng = np.random.default_rng(seed)
    positive = np.arange(number) < rng.integers(1, number)
    score = rng.integers(0, 6, number).astype(float)
    difference = score[positive][:, None] - score[~positive]
    assert class_metrics.area_under_roc(positive, score) == pytest.approx(
        ((difference > 0) + 0.5 * (difference == 0)).mean()
    )


@given(st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_two_classes_have_the_known_coefficient(counts: list[int]) -> None:
    true_negative, false_positive, false_negative, true_positive = counts
    product = float(np.prod([true_positive + false_positive, true_positive + false_negative,
                             true_negative + false_positive, true_negative + false_negative]))  # fmt: skip
    expected = (true_positive * true_negative - false_positive * false_negative) / product**0.5 if product else 0.0
    assert class_metrics.matthews(np.array(counts, float).reshape(2, 2)) == pytest.approx(expected)


def test_whoever_always_answers_the_same_gains_nothing() -> None:
    found = class_metrics.classification_metrics(np.array([0, 0, 0, 1]), np.tile([0.9, 0.1], (4, 1)))
    assert found == {"balanced_accuracy": 0.5, "mcc": 0.0, "auroc": 0.5}
    perfect = class_metrics.classification_metrics(np.array([0, 1, 2]), np.eye(3))
    assert perfect == {"balanced_accuracy": 1.0, "mcc": 1.0}


@pytest.mark.parametrize("hertz", [2.0, 6.0, 10.0, 20.0, 40.0])
def test_a_wave_has_its_power_in_its_band(hertz: float) -> None:
    time = np.arange(256) / 128
    powers = class_metrics.band_powers(np.sin(2 * np.pi * hertz * time)[None], 128.0)
    low, high = class_metrics.BANDS[int(powers.argmax())]
    assert low <= hertz < high


def test_logistic_regression_is_at_its_optimum() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 3))
    targets = (features @ [2.0, -1.0, 0.0] + rng.logistic(size=200) > 0.5).astype(int)
    weights = class_metrics.fit_logistic(features, targets, 2)
    inputs = np.column_stack([features, np.ones(200)])
    slope = inputs.T @ (class_metrics.logistic(features, weights) - np.eye(2)[targets])
    assert np.abs(slope[:-1] + weights[:-1]).max() < 0.05
    assert np.abs(slope[-1]).max() < 0.05
    assert (class_metrics.logistic(features, weights).argmax(1) == targets).mean() > 0.75
