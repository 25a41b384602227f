import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import f1_score

from can_train.errors import DataError
from can_train.tasks.can.evaluation.metrics import choose_threshold, threshold_at_fpr, threshold_max_f1

FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)
SCORES = arrays(np.float64, st.integers(1, 60), elements=FINITE | st.integers(-3, 3).map(float))
RATES = st.floats(0.0, 1.0)


def labels_for(score):
    return arrays(np.bool_, len(score))


@given(SCORES, RATES)
def test_the_false_positive_rate_never_exceeds_its_target(score, fpr):
    assert np.mean(score > threshold_at_fpr(score, fpr)) <= fpr


@given(SCORES, RATES)
def test_the_next_lower_threshold_would_exceed_the_false_positive_rate(score, fpr):
    threshold = threshold_at_fpr(score, fpr)
    assume(threshold > score.min())
    lower = score[score < threshold].max()
    assert np.mean(score > lower) > fpr


def test_one_percent_of_a_hundred_distinct_scores_is_one():
    score = np.arange(100.0)
    assert np.flatnonzero(score > threshold_at_fpr(score, 0.01)).tolist() == [99]


def test_equal_scores_are_not_flagged_when_together_they_exceed_the_rate():
    assert threshold_at_fpr(np.array([0.0] * 98 + [5.0, 5.0]), 0.01) == 5.0


@given(st.data())
def test_no_threshold_has_a_better_f1_than_the_chosen_one(data):
    score = data.draw(SCORES)
    is_attack = data.draw(labels_for(score))
    assume(is_attack.any())
    chosen = f1_score(is_attack, score > threshold_max_f1(is_attack, score))
    best = max(2 * np.sum(is_attack & (score >= cut)) / np.sum(is_attack * 1 + (score >= cut)) for cut in score)
    assert chosen == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("shift", [0.0, 1.7e308, -1.7e308, 5e-324, -5e-324])
def test_neighbouring_numbers_are_still_separated(shift):
    low, high = shift, np.nextafter(shift, np.inf)
    threshold = threshold_max_f1(np.array([False, True]), np.array([low, high]))
    assert low <= threshold < high


def test_the_threshold_lies_midway_between_the_classes():
    assert threshold_max_f1(np.array([True, False, False]), np.array([8.0, 2.0, 1.0])) == 5.0


def test_of_equally_good_thresholds_the_one_that_flags_fewest_is_taken():
    is_attack = np.array([True, False, False, True])
    score = np.array([4.0, 3.0, 2.0, 1.0])
    assert np.count_nonzero(score > threshold_max_f1(is_attack, score)) == 1


def test_scores_that_say_nothing_flag_everything():
    score = np.zeros(3)
    assert (score > threshold_max_f1(np.array([True, False, False]), score)).all()


def test_a_detector_that_learned_from_attacks_gets_the_best_f1():
    threshold = choose_threshold(np.array([True, False]), np.array([1.0, 0.0]), supervised=True, fpr=0.5)
    assert (threshold.value, threshold.rule) == (0.5, "max F1 on validation")


def test_an_anomaly_detector_gets_a_false_positive_rate_on_benign_windows_only():
    is_attack = np.array([True, True, False, False])
    threshold = choose_threshold(is_attack, np.array([9.0, 8.0, 2.0, 1.0]), supervised=False, fpr=0.01)
    assert (threshold.value, threshold.rule) == (2.0, "at most 1 % of benign windows flagged on validation")


def test_without_attacks_in_validation_a_supervised_detector_gets_a_false_positive_rate_and_the_rule_says_why():
    threshold = choose_threshold(np.array([False, False]), np.array([2.0, 1.0]), supervised=True, fpr=0.025)
    assert threshold.value == 2.0
    assert threshold.rule == "at most 2.5 % of benign windows flagged on validation (which holds no attacks)"


def test_a_validation_of_attacks_only_is_said_in_the_rule():
    threshold = choose_threshold(np.array([True, True]), np.array([2.0, 1.0]), supervised=True, fpr=0.01)
    assert threshold.value < 1.0
    assert threshold.rule == "max F1 on validation (which holds attacks only)"


@pytest.mark.parametrize(("windows", "supervised"), [(0, True), (0, False), (2, False)])
def test_a_validation_that_allows_no_threshold_is_refused(windows, supervised):
    with pytest.raises(DataError, match="needs benign windows in the validation part"):
        choose_threshold(np.ones(windows, bool), np.zeros(windows), supervised=supervised, fpr=0.01)
