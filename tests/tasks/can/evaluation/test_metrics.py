"""Thresholds and figures: those of scikit-learn, whatever the scores are."""

import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    matthews_corrcoef,
    precision_score,
    recall_score,
    roc_auc_score,
    roc_curve,
)

from can_train.errors import DataError
from can_train_tasks.can.evaluation.metrics import (
    SHORT_DRIVE_MARGIN,
    choose_threshold,
    detector_metrics,
    recall_at_fpr,
    recall_by_kind,
    threshold_at_fpr,
    threshold_max_f1,
)


@st.composite
def judged_windows(draw):
    """Truth, scores with many ties, flags."""
    size = draw(st.integers(0, 60))
    score = draw(arrays(np.int64, size, elements=st.integers(-20, 20))).astype(np.float64)
    return draw(arrays(np.bool_, size)), score, draw(arrays(np.bool_, size))


@given(judged_windows())
def test_the_figures_are_scikit_learns(windows):
    is_attack, score, flagged = windows
    assume(is_attack.any() and not is_attack.all())
    found = detector_metrics(is_attack, score, flagged, benign_hours=1.0)
    assert found["f1"] == pytest.approx(f1_score(is_attack, flagged, zero_division=0))
    assert found["precision"] == pytest.approx(precision_score(is_attack, flagged, zero_division=0))
    assert found["recall"] == pytest.approx(recall_score(is_attack, flagged))
    assert found["mcc"] == pytest.approx(matthews_corrcoef(is_attack, flagged), abs=1e-12)
    assert found["false_positive_rate"] == pytest.approx(flagged[~is_attack].mean())
    assert found["flagged_share"] == pytest.approx(flagged.mean())
    assert found["pr_auc"] == pytest.approx(average_precision_score(is_attack, score))
    assert found["roc_auc"] == pytest.approx(roc_auc_score(is_attack, score))


@given(judged_windows(), st.floats(0.0, 0.99))
def test_recall_at_a_rate_is_the_best_point_of_the_roc_curve_within_it(windows, fpr):
    is_attack, score, _ = windows
    assume(is_attack.any() and not is_attack.all())
    rates, recalls, _ = roc_curve(is_attack, score, drop_intermediate=False)
    assert recall_at_fpr(is_attack, score, fpr) == pytest.approx(recalls[rates <= fpr].max())


def test_the_fixed_rate_is_one_percent():
    is_attack = np.array([False] * 100 + [True] * 2)
    score = np.array([*range(100), 98.5, 97.5])
    found = detector_metrics(is_attack, score, score > 0, benign_hours=1.0)
    assert found["recall_at_fpr_1pct"] == 0.5


@given(judged_windows())
def test_a_monotone_change_of_the_scores_leaves_what_ranks_them_unchanged(windows):
    is_attack, score, flagged = windows
    before = detector_metrics(is_attack, score, flagged, benign_hours=1.0)
    assert detector_metrics(is_attack, score**3 - 7, flagged, benign_hours=1.0) == before


@given(judged_windows())
def test_reversed_scores_mirror_the_area_under_the_roc_curve(windows):
    is_attack, score, flagged = windows
    assume(is_attack.any() and not is_attack.all())
    there = detector_metrics(is_attack, score, flagged, benign_hours=1.0)["roc_auc"]
    back = detector_metrics(is_attack, -score, flagged, benign_hours=1.0)["roc_auc"]
    assert there + back == pytest.approx(1.0)


@given(judged_windows(), st.sampled_from([0.0, 0.5]))
def test_the_figures_are_strict_json_whatever_the_windows(windows, benign_hours):
    found = detector_metrics(*windows, benign_hours=benign_hours)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_worked_example():
    is_attack = np.array([True, True, False, False, False])
    score = np.array([4.0, 1.0, 3.0, 2.0, 0.0])
    found = detector_metrics(is_attack, score, score > 2.5, benign_hours=0.25)
    assert found == {
        "f1": 0.5,
        "precision": 0.5,
        "recall": 0.5,
        "mcc": pytest.approx(1 / 6),
        "pr_auc": pytest.approx(0.75),
        "roc_auc": pytest.approx(4 / 6),
        "recall_at_fpr_1pct": 0.5,
        "false_positive_rate": pytest.approx(1 / 3),
        "false_alarms_per_hour": 4.0,
        "flagged_share": 0.4,
        "windows": 5,
        "attack_windows": 2,
    }


def test_without_attacks_only_false_alarm_figures_are_defined():
    found = detector_metrics(np.zeros(4, bool), np.arange(4.0), np.arange(4) > 2, benign_hours=2.0)
    assert {name for name, value in found.items() if value is not None} == {
        "false_positive_rate",
        "false_alarms_per_hour",
        "flagged_share",
        "windows",
        "attack_windows",
    }
    assert found["false_alarms_per_hour"] == 0.5


def test_without_benign_windows_false_alarm_figures_are_undefined():
    found = detector_metrics(np.ones(2, bool), np.arange(2.0), np.array([True, False]), benign_hours=0.0)
    undefined = {name for name, value in found.items() if value is None}
    assert undefined == {"mcc", "roc_auc", "recall_at_fpr_1pct", "false_positive_rate", "false_alarms_per_hour"}
    assert found["recall"] == 0.5


@pytest.mark.parametrize("flags", [False, True])
def test_a_detector_that_treats_all_windows_alike_has_no_correlation(flags):
    found = detector_metrics(np.array([True, False, False]), np.zeros(3), np.full(3, flags), benign_hours=1.0)
    assert found["mcc"] == 0.0
    assert found["recall"] == float(flags)
    assert found["f1"] == (0.5 if flags else 0.0)


def test_the_correlation_of_millions_of_windows_does_not_overflow():
    is_attack = np.arange(1_000_000) % 2 == 0
    assert detector_metrics(is_attack, is_attack.astype(float), is_attack, benign_hours=1.0)["mcc"] == 1.0


def test_recall_is_told_by_attack_kind_for_the_kinds_that_occur():
    label = np.array([0, 1, 1, 3, 0], np.uint8)
    flagged = np.array([True, True, False, True, False])
    assert recall_by_kind(label, flagged, ("benign", "DoS", "fuzzing", "replay")) == {
        "DoS": {"recall": 0.5, "windows": 2},
        "replay": {"recall": 1.0, "windows": 1},
    }


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
    threshold = choose_threshold(is_attack, np.array([9.0, 8.0, 2.0, 1.0]), supervised=False, fpr=0.5)
    assert (threshold.value, threshold.rule) == (1.0, "at most 50 % of benign windows flagged on validation")


def test_where_validation_is_too_short_for_the_rate_the_threshold_lies_above_all_of_it():
    benign = np.array([1.0, 1.2, 1.4, 1.6, 1.8])
    threshold = choose_threshold(np.zeros(5, bool), benign, supervised=False, fpr=0.01)
    # The highest of 5 is as far as log2(5 / 2) medians of the tail, 1 in 100 as far as log2(50).
    margin = SHORT_DRIVE_MARGIN * np.log(50) / np.log(2.5)
    assert threshold.value == pytest.approx(1.4 + margin * 0.4)
    assert threshold.rule == (
        "7.5 times as far above the median as the highest of 5 benign windows, too few for 1 %, on validation"
    )


def test_a_window_far_above_the_others_does_not_decide_the_threshold():
    benign = np.array([1.0, 1.2, 1.4, 1.6, 1.8, 90.0])
    threshold = choose_threshold(np.zeros(6, bool), benign, supervised=False, fpr=0.01)
    assert threshold.value == pytest.approx(1.5 + SHORT_DRIVE_MARGIN * np.log(50) / np.log(3) * 0.3)
    assert threshold.rule.endswith(
        " of 6 benign windows, without 1 far above the others, too few for 1 %, on validation"
    )


def test_without_attacks_in_validation_a_supervised_detector_gets_a_false_positive_rate_and_the_rule_says_why():
    threshold = choose_threshold(np.zeros(40, bool), np.arange(40.0), supervised=True, fpr=0.025)
    assert threshold.value == 38.0
    assert threshold.rule == "at most 2.5 % of benign windows flagged on validation (which holds no attacks)"


def test_a_validation_of_attacks_only_is_said_in_the_rule():
    threshold = choose_threshold(np.array([True, True]), np.array([2.0, 1.0]), supervised=True, fpr=0.01)
    assert threshold.value < 1.0
    assert threshold.rule == "max F1 on validation (which holds attacks only)"


@pytest.mark.parametrize(("windows", "supervised"), [(0, True), (0, False), (2, False)])
def test_a_validation_that_allows_no_threshold_is_refused(windows, supervised):
    with pytest.raises(DataError, match="validation windows is benign"):
        choose_threshold(np.ones(windows, bool), np.zeros(windows), supervised=supervised, fpr=0.01)
