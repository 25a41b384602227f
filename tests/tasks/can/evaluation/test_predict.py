"""The predictions of a finished run for logs without labels are the scores of an evaluation of the logs with labels."""

import csv
import sys
from pathlib import Path

import polars as pl
import pytest

import can_train
from can_train.cli.main import main
from fakes.trained_runs import bus_log, finished_run, own_log

COLUMNS = ["log", "folder", "window", "first_frame", "start_time", "end_time", "score", "flagged"]


def without_labels(log: Path, copy: Path) -> Path:
    pl.read_csv(log, infer_schema=False).drop("attack").write_csv(copy)
    return copy


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def state(tmp_path: Path) -> tuple[str, ...]:
    return ("--state-dir", str(tmp_path / "state"), "--device", "cpu", "--quiet")


@pytest.mark.parametrize("model", ["gat", "vgae"])
def test_a_log_without_labels_is_scored_as_with_them(model: str, tmp_path: Path, state: tuple[str, ...]) -> None:
    run, labelled = finished_run(model), bus_log(tmp_path / "labelled.csv", seed=1)
    bare = without_labels(labelled, tmp_path / "bare.csv")
    assert main(["predict", str(run), "--dataset", str(bare), "--out", str(tmp_path / "out.csv"), *state]) == 0
    scores = tmp_path / "scores.csv"
    assert main(["evaluate", str(run), "--dataset", str(labelled), "--scores", str(scores), *state]) == 0
    predicted, judged = rows_of(tmp_path / "out.csv"), rows_of(scores)
    assert list(predicted[0]) == COLUMNS
    assert {row["label"] for row in judged} > {""} or len({row["label"] for row in judged}) > 1
    for name in COLUMNS[2:]:
        assert [row[name] for row in predicted] == [row[name] for row in judged]
    assert len(predicted) == 200


def test_all_windows_of_the_training_log_are_scored_if_it_is_named(tmp_path: Path, state: tuple[str, ...]) -> None:
    run, out = finished_run("gat"), tmp_path / "out.csv"
    line = ["predict", str(run), "--out", str(out), *state]
    assert main(line) == 0
    tested = rows_of(out)
    assert main([*line, "--dataset", str(own_log(run))]) == 0
    every = {row["first_frame"]: row["score"] for row in rows_of(out)}
    assert len(every) > len(tested) > 0
    assert {row["first_frame"] for row in tested} <= every.keys()


def test_standard_input_has_its_own_name_in_rows_and_errors(
    tmp_path: Path, state: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "out.csv", bus_log(tmp_path / "log.csv", seed=1)
    no_log = tmp_path / "none.csv"
    no_log.write_text("a,b\n")
    line = ["predict", str(finished_run("gat")), "--dataset", "-", "--out", str(out), *state]
    for path, code in ((log, 0), (no_log, 2)):
        with path.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert main(line) == code
    assert {row["log"] for row in rows_of(out)} == {"-"}
    assert "-:1: 'a,b'" in capsys.readouterr().err


def test_a_loaded_run_scores_a_log_by_its_path(tmp_path: Path, state: tuple[str, ...]) -> None:
    run, log = finished_run("gat"), bus_log(tmp_path / "log.csv", seed=1)
    model = can_train.load(run, device="cpu", state_dir=tmp_path / "state")
    windows = model.predict(log)
    assert main(["predict", str(run), "--dataset", str(log), "--out", str(tmp_path / "out.csv"), *state]) == 0
    assert [str(window["score"]) for window in windows] == [row["score"] for row in rows_of(tmp_path / "out.csv")]
    assert not model.module.training
