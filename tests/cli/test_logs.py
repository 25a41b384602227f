"""Logs that grow, of several jobs and ranks."""

from pathlib import Path

import pytest

from can_train.cli.logs import GrowingLog, log_paths
from can_train.cli.main import main
from can_train.errors import RunError
from can_train.runs.status import run_logs
from fakes.made_runs import RESULT, Runs, at, begin


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_log_is_read_on_from_where_it_was_left_also_within_a_character(tmp_path: Path) -> None:
    log = GrowingLog(tmp_path / "log")
    assert log.new_text() == ""
    whole = "a × b".encode()
    log.path.write_bytes(whole[:3])
    first = log.new_text()
    log.path.write_bytes(whole)
    assert first + log.new_text() == "a × b"
    assert log.new_text() == ""


@pytest.mark.parametrize("size", [1, 7, 60, 1000])
def test_lines_of_submitit_are_left_out_wherever_a_read_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("can_train.cli.logs._READ_BYTES", size)
    log = GrowingLog(tmp_path / "log")
    line = "submitit INFO (2025-01-01 00:00:00,001) - Starting with JobEnvironment(job_id=7)\n"
    log.path.write_text(f"{line}one\n{line}two\nsubmit")
    assert "".join(iter(log.new_text, "")) == "one\ntwo\nsubmit"


def test_each_rank_has_a_log_beside_the_first(runs: Runs) -> None:
    path = runs.add(1)
    runs.submit(path, "7_3", log_path=str(path / "slurm" / "7_3_0_log.out"))
    (path / "slurm").mkdir()
    for name in ("7_3_0_log.out", "7_3_1_log.out", "7_30_0_log.out", "7_3_0_result.pkl"):
        (path / "slurm" / name).touch()
    (found,) = runs.look()
    assert log_paths(found.facts, found.known, 1) == [path / "slurm" / "7_3_1_log.out"]
    with pytest.raises(RunError, match=r"has written no log yet(.|\n)*0, 1"):
        log_paths(found.facts, found.known, 2)


def logs_of(runs: Runs) -> list[str]:
    (found,) = runs.look()
    return [path.name for path in run_logs(found.facts, found.known)]


def test_the_log_of_a_run_that_no_job_trained_is_in_its_folder(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs.add(1, RESULT)
    assert main(("logs", "last", *runs.flags)) == 0
    assert "There is no log of this run" in capsys.readouterr().err
    (path / "log.txt").write_text("what it said\n")
    for more in ((), ("-f",)):
        assert main(("logs", "last", *runs.flags, *more)) == 0
        assert capsys.readouterr().out == "what it said\n"


def test_a_log_is_followed_to_the_lines_that_come_after_the_result(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = runs.add(1, RESULT) / "log.txt"
    log.write_text("training\n")
    lines = ["judged\n", "Result: here\n"]

    def write_a_line(seconds: float) -> None:
        with log.open("a") as file:
            file.write(lines.pop(0) if lines else "")

    monkeypatch.setattr("can_train.cli.logs.time.sleep", write_a_line)
    assert main(("logs", "last", *runs.flags, "-f")) == 0
    assert capsys.readouterr().out == "training\njudged\nResult: here\n"


@pytest.mark.parametrize("executor", ["slurm", "local"])
def test_the_newest_log_is_that_of_the_job_until_the_run_goes_on_in_a_terminal(runs: Runs, executor: str) -> None:
    path = runs.add(1)
    runs.submit(path, "7", executor, time=at(20))
    assert logs_of(runs) == ["log.out"]
    begin(path, 1, job_id="7" if executor == "slurm" else "", start_time=at(30))
    assert logs_of(runs) == ["log.out"]
    begin(path, 2, start_time=at(40))
    assert logs_of(runs) == ["log.out", "log.txt"]
    runs.submit(path, "8", executor, time=at(50))
    assert logs_of(runs) == ["log.out", "log.out"]
