import numpy as np

from can_train.tasks.can.evaluation.judging import COLUMNS, judgement_tables
from can_train.tasks.can.evaluation.metrics import detector_metrics


def judgement_with(model, baselines, **parts):
    folder = {"model": model, "references": {}, "baselines": baselines, "recall_by_kind": {}, "remarks": [], **parts}
    return {
        "threshold": 0.5,
        "threshold_rule": "",
        "validation": model,
        "test": {"test_01": folder},
        "absent": {},
    }


def figures(is_attack, flagged, benign_hours=1.0):
    score = np.array(flagged, float)
    return detector_metrics(np.array(is_attack, bool), score, score > 0, benign_hours=benign_hours)


def test_a_folder_becomes_a_table_with_the_model_first():
    model, baseline = figures([1, 1, 0, 0], [1, 0, 0, 0]), figures([1, 1, 0, 0], [1, 1, 1, 1], benign_hours=0.001)
    (table,) = judgement_tables(judgement_with(model, {"flag_everything": baseline}))
    assert table.title == "test_01: 4 windows, 2 attacks"
    assert table.rows == (
        ("model", "0.667", "1.000", "0.500", "0.577", "0.750", "0.750", "0.500", "0.0"),
        ("flag_everything", "0.667", "0.500", "1.000", "0.000", "0.500", "0.500", "0.000", "2,000"),
    )


def test_what_the_model_is_seen_beside_stands_between_it_and_the_baselines():
    told = figures([1, 0], [1, 0])
    (table,) = judgement_tables(judgement_with(told, {"flag_nothing": told}, references={"teacher": told}))
    assert [row[0] for row in table.rows] == ["model", "teacher", "flag_nothing"]


def test_what_is_undefined_is_a_dash():
    (table,) = judgement_tables(judgement_with(figures([0, 0], [1, 0]), {}))
    assert table.rows == (("model", *"-------", "1.0"),)


def test_kinds_and_remarks_stand_below_the_table():
    parts = {"recall_by_kind": {"DoS": {"recall": 0.5, "windows": 1200}}, "remarks": ["flags nothing"]}
    (table,) = judgement_tables(judgement_with(figures([1], [1]), {}, **parts))
    assert table.notes == ("recall by kind: DoS 0.500 of 1,200", "flags nothing")


def test_the_widest_row_fits_eighty_columns():
    widest = figures([1, 0], [0, 1]) | {"false_alarms_per_hour": 360_000.0}
    (table,) = judgement_tables(judgement_with(widest, {"isolation_forest": widest}))
    widths = [max(map(len, column)) for column in zip(COLUMNS, *table.rows, strict=True)]
    assert sum(widths) + 2 * (len(widths) - 1) <= 80
