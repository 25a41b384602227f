"""`can-train evaluate` as a person gives it: what it prints, and how it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train_tasks.can.evaluation.alarms import MOST_ALARMS
from fakes.trained_runs import bus_log, finished_run

Line = Callable[..., str]


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Line:
    """Gives the command; returns standard output, or what an error says."""

    def said(*arguments: str | Path, code: int = 0) -> str:
        assert main(["evaluate", *map(str, arguments), "--state-dir", str(tmp_path / "state")]) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured.err if code else captured.out

    return said


def test_another_log_is_judged_and_its_windows_are_kept(line: Line, tmp_path: Path) -> None:
    other, scores = bus_log(tmp_path / "other.csv", seed=1), tmp_path / "scores.parquet"
    out = line(finished_run("gat"), "--dataset", other, "--scores", scores, "--device", "cpu")
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    out = " ".join(out.split())
    assert "other.csv: 200 windows" in out
    assert "max F1 on validation, in drive." in out
    assert "Missing from the tables: gap_lookup, silence, random_forest" in out
    assert f"Scores: {scores}" in out
    assert scores.stat().st_size > 0


def test_json_is_all_that_stands_on_standard_output(line: Line, tmp_path: Path) -> None:
    run = finished_run("gat")
    other = bus_log(tmp_path / "other.csv", seed=1)
    document = json.loads(line(run, "--dataset", other, "--threshold", "-2.5", "--json"))
    assert document["run_id"] == run.name
    assert (document["threshold"], document["threshold_rule"]) == (-2.5, "as given")
    assert (document["windows"], document["frames"]) == (200, 4_000)
    assert set(document["seconds"]) == {"reading", "scoring"}
    assert document["judgement"]["test"]["other.csv"]["model"]["windows"] == 200


def test_alarms_are_listed_with_their_lines_and_reasons_in_eighty_columns(line: Line, tmp_path: Path) -> None:
    other = bus_log(tmp_path / "other.csv", seed=1)
    out = line(finished_run("gat"), "--dataset", other, "--threshold", "-1e9", "--flagged-only", "--device", "cpu")
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "MCC" not in out
    out = " ".join(out.split())
    assert f"{other} lines 2-4,001, " in out
    assert " 200 windows, score " in out
    assert " (> -1e+09), attack ID " in out
    assert " frames in 0." in out


def test_the_highest_of_many_alarms_are_printed_and_verbose_prints_all(line: Line, tmp_path: Path) -> None:
    for number in range(MOST_ALARMS + 3):
        bus_log(tmp_path / "logs" / f"{number:02}.csv", seed=number, frames=100)
    asked = (finished_run("gat"), "--dataset", tmp_path / "logs", "--threshold", "-1e9", "--flagged-only")
    out = line(*asked)
    assert out.count("lines 2-101, ") == MOST_ALARMS
    assert f"These are the {MOST_ALARMS} highest of {MOST_ALARMS + 3} alarms" in out
    whole = line(*asked, "-v")
    assert whole.count("lines 2-101, ") == MOST_ALARMS + 3
    assert "MCC" in whole
    assert len(json.loads(line(*asked, "--json"))["alarms"]) == MOST_ALARMS + 3


def test_explain_lists_alarms_below_the_table_and_a_hold_only_those_that_it_raises(line: Line, tmp_path: Path) -> None:
    other = bus_log(tmp_path / "other.csv", seed=1)
    asked = (finished_run("gat"), "--dataset", other, "--device", "cpu", "--explain")
    asked += ("--threshold", "-1e9")
    out = line(*asked, "--hold", "3/3")
    assert "MCC" in out
    assert "An alarm is raised when 3 of the last 3 windows are flagged (--hold 3/3)" in out
    assert " 200 windows, score " in " ".join(out.split())
    each, held = (json.loads(line(*asked, "--json", *more)) for more in ((), ("--hold", "201/201")))
    assert each["alarms"]
    assert held["alarms"] == []
    assert held["judgement"]["test"]["other.csv"]["bursts"]["model"]["hold"] == "201/201"


def test_a_calibration_is_said_and_its_windows_are_not_judged(line: Line, tmp_path: Path) -> None:
    other, scores = bus_log(tmp_path / "other.csv", seed=1), tmp_path / "scores.csv"
    asked = (finished_run("vgae"), "--dataset", other, "--device", "cpu", "--calibrate", "0.5s", "--scores", scores)
    document = json.loads(line(*asked, "--json"))
    taken = 200 - document["windows"]
    assert 40 < taken < 60
    assert f"The first 0.5 s of each log are taken for benign: {taken} windows" in document["notes"][0]
    assert document["judgement"]["test"]["other.csv"]["model"]["windows"] == document["windows"]
    assert len(scores.read_text().splitlines()) == 1 + document["windows"]


def test_alarms_an_hour_choose_the_threshold_and_say_from_what(line: Line, tmp_path: Path) -> None:
    other = bus_log(tmp_path / "other.csv", seed=1)
    few, many = (
        json.loads(line(finished_run("vgae"), "--dataset", other, "--alarms-per-hour", count, "--json"))
        for count in ("1", "100000")
    )
    assert few["threshold"] > many["threshold"]
    assert "1 false events an hour expected with --hold 2/3, by " in few["threshold_rule"]
    assert "extrapolated" in few["threshold_rule"]


def test_that_nothing_was_flagged_is_said(line: Line, tmp_path: Path) -> None:
    scores = tmp_path / "none.csv"
    out = line(finished_run("gat"), "--threshold", "1e9", "--flagged-only", "--scores", scores, "--device", "cpu")
    assert "Nothing was flagged." in out
    assert ", of which only the run's own test part is judged: " in " ".join(out.split())
    assert len(scores.read_text().splitlines()) == 1


def test_a_run_is_found_by_the_beginning_of_its_name(line: Line) -> None:
    run = finished_run("gat")
    out = line(run.name[:20], "--runs-dir", run.parent, "--threshold", "0", "--device", "cpu")
    assert f"Run {run.name} on" in " ".join(out.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--threshold", "nan"), "--threshold is not a finite number"),
        (("--treshold", "3"), "--threshold"),
        (("--dataset", ""), "--dataset is empty"),
        (("--channel", "can7"), "Leave out dataset.channel"),
        (("--dataset", "hcrl_chh"), "Nearest of 12: hcrl_ch"),
        (("--dataset", "/no/such.csv"), "names no file or folder that exists"),
        (("--scores", "scores.xlsx"), "CSV or Parquet"),
        (("--device", "quantum"), "Unknown device"),
        (("--calibrate", "soon"), "Write it like --calibrate 10s"),
        (("--calibrate", "0s"), "--calibrate is not more than 0"),
        (("--calibrate", "9s"), "no window to judge follows"),
        (("--hold", "2"), "Write it like --hold 2/3"),
        (("--hold", "3/2"), "with M ≤ N"),
        (("--alarms-per-hour", "nan"), "--alarms-per-hour is not more than 0"),
        (("--alarms-per-hour", "6", "--threshold", "1"), "both choose the threshold"),
        (("--alarms-per-hour", "6", "--hold", "3/9"), "Use --hold 2/3"),
        (("--flagged",), "--flagged-only"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_in_a_sentence(line: Line, flags: tuple[str, ...], said: str) -> None:
    assert said in line(finished_run("gat"), *flags, code=2)


def test_an_empty_log_is_refused(line: Line, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    assert "The log is empty" in line(finished_run("gat"), "--dataset", tmp_path / "empty.csv", code=2)
