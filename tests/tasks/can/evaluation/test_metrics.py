import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import f1_score, matthews_corrcoef, precision_score, recall_score, roc_curve

from can_train.tasks.can.evaluation.metrics import detector_metrics, recall_at_fpr, recall_by_kind


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
