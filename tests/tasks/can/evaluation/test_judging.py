"""Judgements of test folders, their remarks, and their tables."""

import json

import numpy as np
import pytest

from can_train.cli.output import Verbosity, print_judgement
from can_train.errors import DataError, RunError
from can_train_tasks.can.data.graphs import Split
from can_train_tasks.can.evaluation.bursts import MccDifference
from can_train_tasks.can.evaluation.judging import (
    COLUMNS,
    SUMMARY_COLUMNS,
    JudgingOptions,
    ModelScores,
    benign_hours,
    burst_summary,
    judge,
    judgement_tables,
    remarks,
    summary_tables,
)
from can_train_tasks.can.evaluation.metrics import detector_metrics
from fakes.windows_by_hand import source_file, windows_of

BASELINES = ["flag_everything", "flag_nothing", "id_lookup", "gap_lookup", "silence", "random_forest"]
OPTIONS = JudgingOptions(supervised=True, validation_fpr=0.01, rules=False, baselines=True, seed=0)
NO_BASELINES = JudgingOptions(supervised=True, validation_fpr=0.01, rules=False, baselines=False, seed=0)

BENIGN_WINDOW = [1, 2, 3, 1, 2, 3]
FLOOD_WINDOW = [1, 0, 0, 0, 0, 2]
LABEL = np.array([0, 0, 1, 2] * 10)
TEST = {"test_01": np.arange(16, 28), "test_02": np.arange(28, 40)}

FEW = ", with too few bursts for an interval"


def traffic(label=LABEL):
    return windows_of([FLOOD_WINDOW if code else BENIGN_WINDOW for code in label], label=label)


def judged(score, *, flat=None, test=None, options=NO_BASELINES, references=None):
    """Judges scores given for all windows: 8 windows to train on, 8 for validation, the rest for testing."""
    flat, test = flat or traffic(), TEST if test is None else test
    split = Split(train=np.arange(8), validation=np.arange(8, 16), test=test)

    def parts(score):
        return ModelScores(validation=score[8:16], test={folder: score[rows] for folder, rows in test.items()})

    return judge(flat, split, parts(score), options, {name: parts(other) for name, other in (references or {}).items()})


def figures(is_attack, flagged):
    return detector_metrics(
        np.array(is_attack, bool), np.zeros(len(flagged)), np.array(flagged, bool), benign_hours=1.0
    )


def test_each_test_folder_is_judged_alone():
    score = (LABEL > 0).astype(float)
    score[28:] = 0.0
    judgement = judged(score)
    assert {folder: told["model"]["f1"] for folder, told in judgement["test"].items()} == {
        "test_01": 1.0,
        "test_02": 0.0,
    }
    assert [told["model"]["windows"] for told in judgement["test"].values()] == [12, 12]


def test_the_threshold_comes_from_validation_whatever_the_test_scores_are():
    score = np.where(LABEL > 0, 3.0, 1.0)
    score[16:] += 10.0
    judgement = judged(score)
    assert (judgement["threshold"], judgement["threshold_rule"]) == (2.0, "max F1 on validation")
    assert judgement["validation"]["f1"] == 1.0
    assert judgement["test"]["test_01"]["model"]["flagged_share"] == 1.0


def test_an_anomaly_detector_is_judged_at_the_chosen_false_positive_rate():
    anomaly = JudgingOptions(supervised=False, validation_fpr=0.25, rules=False, baselines=False, seed=0)
    score = np.arange(40.0)
    judgement = judged(score, options=anomaly)
    assert judgement["threshold_rule"] == "at most 25 % of benign windows flagged on validation"
    assert judgement["threshold"] == 12.0


def test_the_recall_of_each_attack_kind_is_told():
    told = judged((LABEL == 1).astype(float))["test"]["test_01"]
    assert told["recall_by_kind"] == {"DoS": {"recall": 1.0, "windows": 3}, "fuzzing": {"recall": 0.0, "windows": 3}}


def test_the_baselines_are_compared_with_the_model_and_named_where_it_does_not_beat_them():
    told = judged((LABEL == 1).astype(float), options=OPTIONS)["test"]["test_01"]
    assert list(told["baselines"]) == BASELINES
    assert told["baselines"]["random_forest"]["mcc"] == 1.0
    assert told["remarks"] == ["does not surely beat id_lookup (1.000), random_forest (1.000) on MCC (0.577)" + FEW]


def test_a_forest_is_judged_by_the_mean_over_its_seeds_with_the_range_beside():
    rng = np.random.default_rng(0)
    label = np.arange(400) % 2
    flat = windows_of([rng.choice(9, 6).tolist() for _ in label], label=label)
    flat.node_features[:] = rng.random(flat.node_features.shape)
    split = Split(train=np.arange(200), validation=np.arange(200, 300), test={"test_01": np.arange(300, 400)})
    scores = ModelScores(validation=label[200:300].astype(float), test={"test_01": label[300:].astype(float)})
    judgement = judge(flat, split, scores, OPTIONS, {})
    told = judgement["test"]["test_01"]
    low, high = told["ranges"]["random_forest"]["mcc"]
    assert low < told["baselines"]["random_forest"]["mcc"] < high
    assert set(told["ranges"]) == {"random_forest"}
    table = judgement_tables(judgement)[0]
    assert f"random_forest: the mean of 3 seeds, MCC {low:.3f} to {high:.3f}" in table.notes


def test_bursts_of_each_detector_stand_in_a_table_of_their_own_and_those_of_the_model_in_the_summary():
    label = np.repeat(np.arange(40) % 2, 4)
    flat = traffic(label)
    split = Split(train=np.arange(8), validation=np.arange(8, 16), test={"test_01": np.arange(16, 160)})
    score = np.where(np.arange(160) % 4 == 0, 0.0, label)
    judgement = judge(flat, split, ModelScores(validation=score[8:16], test={"test_01": score[16:]}), OPTIONS, {})
    told = judgement["test"]["test_01"]
    assert told["bursts"]["model"] == {
        "hold": "2/3", "bursts": 18, "bursts_found": 18, "latency_s": 3.0, "false_events": 0,
        "false_events_per_hour": 0.0, "false_alarm_share": 0.0,
    }  # fmt: skip
    _, table = judgement_tables(judgement)
    assert table.rows[0] == ("model", "18 of 18", "3", "0.0", "0.0%", "-", "-")
    low, high = told["differences"]["flag_nothing"]["low"], told["differences"]["flag_nothing"]["high"]
    assert {row[0]: row[-1] for row in table.rows}["flag_nothing"] == f"{low:+.3f} to {high:+.3f}"
    assert burst_summary(judgement).rows == (("test_01", "18 of 18", "3", "0.0", "0.0%"),)
    assert "Bursts of attacks in which an alarm is raised: test_01 18 of 18." in summary_tables(judgement)[0].notes


def test_another_detector_is_compared_with_the_model_with_a_threshold_of_its_own():
    references = {"rival": np.where(LABEL > 0, 30.0, 10.0), "stranger": np.where(LABEL > 0, -5.0, -6.0)}
    told = judged((LABEL == 1).astype(float), options=OPTIONS, references=references)["test"]["test_01"]
    assert {name: figures["mcc"] for name, figures in told["references"].items()} == {"rival": 1.0, "stranger": 1.0}
    assert list(told["baselines"]) == BASELINES
    unbeaten = "rival (1.000), stranger (1.000), id_lookup (1.000), random_forest (1.000)"
    assert told["remarks"] == [f"does not surely beat {unbeaten} on MCC (0.577){FEW}"]


def test_a_detector_beside_the_model_has_finite_scores_too():
    broken = np.full(40, np.nan)
    with pytest.raises(RunError, match="8 of 8 scores in validation are not finite"):
        judged((LABEL > 0).astype(float), references={"rival": broken})


def test_without_baselines_none_is_computed():
    judgement = judged((LABEL > 0).astype(float))
    assert judgement["absent"] == {}
    assert judgement["test"]["test_01"]["baselines"] == {}


def test_a_floor_that_cannot_be_computed_is_absent_with_its_reason():
    label = LABEL.copy()
    label[:8] = 0
    judgement = judged((LABEL > 0).astype(float), flat=traffic(label), options=OPTIONS)
    assert list(judgement["absent"]) == ["random_forest"]
    assert "isolation_forest" in judgement["test"]["test_01"]["baselines"]


def test_a_judgement_is_strict_json():
    judgement = judged((LABEL > 0).astype(float), options=OPTIONS)
    assert json.loads(json.dumps(judgement, allow_nan=False)) == judgement


def test_an_unlabelled_log_is_presumed_benign_and_said_to_be():
    flat = windows_of([BENIGN_WINDOW] * 40, sources=(source_file(labelled=False),))
    told = judged(16.0 ** np.arange(40), flat=flat)["test"]["test_01"]
    assert told["model"]["f1"] is None
    assert told["model"]["false_positive_rate"] == 1.0
    assert told["remarks"] == [
        "labels absent: all windows are presumed benign, only false-alarm figures are defined",
        "flags everything: every alarm is a false one",
    ]


def test_windows_without_labels_among_others_are_counted():
    sources = (source_file("labelled"), source_file("free", labelled=False))
    flat = windows_of([BENIGN_WINDOW] * 40, label=LABEL, source=[0] * 20 + [1] * 20, sources=sources)
    told = judged((LABEL > 0).astype(float), flat=flat)["test"]["test_01"]
    assert told["remarks"] == ["8 of 12 windows have no labels and are presumed benign"]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("row", "where"), [(9, "1 of 8 scores in validation"), (30, "1 of 12 scores in test_02")])
def test_scores_that_are_not_finite_are_refused(broken, row, where):
    score = np.zeros(40)
    score[row] = broken
    with pytest.raises(RunError, match=f"{where} are not finite"):
        judged(score)


def test_a_validation_without_windows_is_refused():
    split = Split(train=np.arange(8), validation=np.empty(0, np.int64), test={})
    with pytest.raises(DataError, match="validation windows is benign"):
        judge(traffic(), split, ModelScores(validation=np.empty(0), test={}), NO_BASELINES, {})


@pytest.mark.parametrize(
    ("is_attack", "flagged", "remark"),
    [
        ([1, 1, 0, 0], [1, 1, 1, 1], ["flags everything (recall 1.0 says nothing; accuracy = attack share)"]),
        (
            [0, 0],
            [1, 1],
            ["no attacks: only false-alarm figures are defined", "flags everything: every alarm is a false one"],
        ),
        ([1, 0], [0, 0], ["flags nothing: every attack is missed"]),
        ([0, 0], [0, 0], ["no attacks: only false-alarm figures are defined"]),
        ([1, 1], [1, 0], ["all windows are attacks: false-alarm figures are not defined"]),
        ([1] * 199 + [0], [1] * 199 + [0], []),
        ([1] + [0] * 99, [0] + [1] * 99, ["flags everything (recall 1.0 says nothing; accuracy = attack share)"]),
        ([1] + [0] * 99, [0] * 2 + [1] * 98, []),
    ],
)
def test_what_the_figures_hide_is_said(is_attack, flagged, remark):
    assert remarks(figures(is_attack, flagged), {}, {}, unlabelled_windows=0) == remark


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.1, 0.3), []),
        ((0.0, 0.3), ["does not surely beat rival (0.577) on MCC (1.000)"]),
        ((-0.2, -0.1), ["does not surely beat rival (0.577) on MCC (1.000)"]),
    ],
)
def test_a_rival_is_beaten_where_the_interval_of_the_difference_says_so(interval, said):
    weak, strong = figures([1, 1, 0, 0], [1, 0, 0, 0]), figures([1, 1, 0, 0], [1, 1, 0, 0])
    difference = MccDifference(mcc=0.2, low=interval[0], high=interval[1])
    assert remarks(strong, {"rival": weak}, {"rival": difference}, unlabelled_windows=0) == said


def test_without_an_interval_only_a_larger_correlation_beats_and_that_is_said():
    weak, strong = figures([1, 1, 0, 0], [1, 0, 0, 0]), figures([1, 1, 0, 0], [1, 1, 0, 0])
    ahead, even = MccDifference(mcc=0.4, low=None, high=None), MccDifference(mcc=0.0, low=None, high=None)
    assert remarks(strong, {"weak": weak}, {"weak": ahead}, unlabelled_windows=0) == []
    told = remarks(weak, {"weak": weak}, {"weak": even}, unlabelled_windows=0)
    assert told == ["does not surely beat weak (0.577) on MCC (0.577)" + FEW]


def test_overlapping_windows_do_not_lengthen_the_observed_time():
    apart = windows_of([BENIGN_WINDOW] * 4, start_time=[0, 1, 2, 3])
    overlapping = windows_of([BENIGN_WINDOW] * 7, start_time=[0, 0.5, 1, 1.5, 2, 2.5, 3])
    assert benign_hours(apart, np.arange(4)) == benign_hours(overlapping, np.arange(7)) == 4 / 3600


def test_the_time_between_the_frames_of_two_windows_is_observed():
    flat = windows_of([BENIGN_WINDOW] * 2, start_time=[0, 1.5])
    assert benign_hours(flat, np.arange(2)) == 2.5 / 3600


def test_the_time_between_chosen_parts_of_a_log_is_not_observed():
    flat = windows_of([BENIGN_WINDOW] * 5)
    assert benign_hours(flat, np.array([0, 1, 4])) == 3 / 3600


def test_hours_are_counted_file_by_file_and_for_benign_windows_only():
    sources = (source_file("a"), source_file("b"))
    start = [0, 1, 2, 3, 1_000_000, 1_000_001]
    flat = windows_of(
        [BENIGN_WINDOW] * 6, label=[0, 1, 1, 0, 0, 0], source=[0] * 4 + [1] * 2, start_time=start, sources=sources
    )
    assert benign_hours(flat, np.arange(6)) == 4 / 3600
    assert benign_hours(flat, np.array([1, 2])) == 0.0


def test_a_step_back_in_time_takes_no_observed_time_away():
    flat = windows_of([BENIGN_WINDOW] * 3, start_time=[5, 6, 0])
    assert benign_hours(flat, np.arange(3)) == 2 / 3600


def judgement_with(model, baselines, **parts):
    folder = {"model": model, "references": {}, "baselines": baselines, "recall_by_kind": {}, "remarks": [], **parts}
    return {
        "threshold": 0.5,
        "threshold_rule": "",
        "validation": model,
        "test": {"test_01": folder},
        "absent": {},
    }


def scored_figures(is_attack, flagged, benign_hours=1.0):
    score = np.array(flagged, float)
    return detector_metrics(np.array(is_attack, bool), score, score > 0, benign_hours=benign_hours)


def test_a_folder_becomes_a_table_with_the_model_first():
    model, baseline = (
        scored_figures([1, 1, 0, 0], [1, 0, 0, 0]),
        scored_figures([1, 1, 0, 0], [1, 1, 1, 1], benign_hours=0.001),
    )
    (table,) = judgement_tables(judgement_with(model, {"flag_everything": baseline}))
    assert table.title == "test_01: 4 windows, 2 attacks"
    assert table.rows == (
        ("model", "0.667", "1.000", "0.500", "0.577", "0.750", "0.750", "0.500", "0.0"),
        ("flag_everything", "0.667", "0.500", "1.000", "0.000", "0.500", "0.500", "0.000", "2,000"),
    )


def test_what_the_model_is_seen_beside_stands_between_it_and_the_baselines():
    told = scored_figures([1, 0], [1, 0])
    (table,) = judgement_tables(judgement_with(told, {"flag_nothing": told}, references={"teacher": told}))
    assert [row[0] for row in table.rows] == ["model", "teacher", "flag_nothing"]


def test_what_is_undefined_is_a_dash():
    (table,) = judgement_tables(judgement_with(scored_figures([0, 0], [1, 0]), {}))
    assert table.rows == (("model", *"-------", "1.0"),)


def test_kinds_and_remarks_stand_below_the_table():
    parts = {"recall_by_kind": {"DoS": {"recall": 0.5, "windows": 1200}}, "remarks": ["flags nothing"]}
    (table,) = judgement_tables(judgement_with(scored_figures([1], [1]), {}, **parts))
    assert table.notes == ("recall by kind: DoS 0.500 of 1,200", "flags nothing")


def judged_folder(model, ends=(0.1, 0.2), **baselines):
    differences = {name: {"mcc": 0.1, "low": ends[0], "high": ends[1]} for name in baselines}
    return {"model": model, "references": {}, "baselines": baselines, "recall_by_kind": {}, "remarks": [],
            "differences": differences}  # fmt: skip


def test_the_summary_has_a_row_for_each_folder_with_the_best_baseline_and_whether_it_is_beaten():
    perfect, good = scored_figures([1, 1, 0, 0], [1, 1, 0, 0]), scored_figures([1, 1, 0, 0], [1, 0, 0, 0])
    nothing = scored_figures([1, 1, 0, 0], [0, 0, 0, 0])
    undefined = scored_figures([0, 0], [1, 0])
    judgement = judgement_with(good, {})
    judgement["test"] = {
        "test_01_known": judged_folder(good, (-0.2, -0.1), flag_nothing=nothing, id_lookup=perfect),
        "test_02_same": judged_folder(good, (-0.1, 0.1), forest=good, flag_nothing=nothing),
        "test_03_new": judged_folder(good, flag_nothing=nothing),
        "test_04_benign": judged_folder(undefined, flag_nothing=undefined),
        "test_05_alone": judged_folder(good),
    }
    [table] = summary_tables(judgement)
    figures = ("0.577", "0.750", "0.500", "0.0")
    assert table.columns == SUMMARY_COLUMNS
    assert table.rows == (
        ("test_01", *figures, "id_lookup", "1.000", "NO"),
        ("test_02", *figures, "forest", "0.577", "open"),
        ("test_03", *figures, "flag_nothing", "0.000", "yes"),
        ("test_04", "-", "-", "-", "1.0", "-", "-", "-"),
        ("test_05", *figures, "-", "-", "-"),
    )
    assert table.notes[0] == "The model beats the best baseline in 1 of 3 test folders."
    assert table.notes[-1] == "test_01_known, test_02_same, test_03_new, test_04_benign, test_05_alone"


def test_a_summary_without_baselines_claims_no_comparison_and_has_each_remark_once():
    good = scored_figures([1, 0], [1, 0])
    judgement = judgement_with(good, {})
    folder = judged_folder(good) | {
        "remarks": ["flags everything", "does not surely beat id_lookup (1.000) on MCC (1.000)"]
    }
    judgement["test"] = {"one": folder, "two": folder, "three": judged_folder(good)}
    assert summary_tables(judgement)[0].notes[0] == "one, two: flags everything."


def test_the_summary_fits_eighty_columns():
    widest = scored_figures([1, 0], [0, 1]) | {"false_alarms_per_hour": 360_000.0}
    judgement = judgement_with(widest, {})
    names = ("test_01_known_vehicle", "test_02_unknown_vehicle")
    judgement["test"] = {name: judged_folder(widest, isolation_forest=widest) for name in names}
    [table] = summary_tables(judgement)
    widths = [max(map(len, column)) for column in zip(SUMMARY_COLUMNS, *table.rows, strict=True)]
    # A terminal draws two spaces between columns.
    assert sum(widths) + 2 * (len(widths) - 1) <= 80


@pytest.mark.parametrize(
    "names", [["labelled_drive_of_a_truck.csv"], ["drives-of-a-truck-1.csv", "drives-of-a-truck-2.csv"]]
)
def test_the_summary_of_logs_with_long_names_stays_a_table(names, capsys):
    worst = scored_figures([1, 0], [0, 1]) | {"false_alarms_per_hour": 360_000.0}
    judgement = judgement_with(worst, {})
    judgement["test"] = {name: judged_folder(worst, isolation_forest=worst) for name in names}
    print_judgement(summary_tables(judgement), [], Verbosity.NORMAL)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if "isolation_forest" in line]
    assert [(len(row), row[0][-9:]) for row in rows] == [(8, name[-9:]) for name in names]
    assert len({row[0] for row in rows}) == len(names)
    assert all(name in " ".join(lines) for name in names)


def test_the_widest_row_fits_eighty_columns():
    widest = scored_figures([1, 0], [0, 1]) | {"false_alarms_per_hour": 360_000.0}
    (table,) = judgement_tables(judgement_with(widest, {"isolation_forest": widest}))
    widths = [max(map(len, column)) for column in zip(COLUMNS, *table.rows, strict=True)]
    assert sum(widths) + 2 * (len(widths) - 1) <= 80
