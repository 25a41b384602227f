"""`can-train doctor --prune`: what it finds, and what it never touches."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import typer

from can_train.cli.main import main
from can_train.cli.prune import Places, find_prunable
from can_train.factors.observations import Event, read_records, write_record
from fakes.made_runs import RESULT, Runs, close
from fakes.samples import at, observation, started

DAY_S = 86400.0
NOW = time.time()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def put(path: Path, days: float, content: str = "12345") -> Path:
    """A file that was last read and written so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return aged(path, days)


def aged(path: Path, days: float) -> Path:
    for one in (*path.rglob("*"), path):
        os.utime(one, (NOW - days * DAY_S, NOW - days * DAY_S))
    return path


def found(runs: Runs, days: float = 90) -> dict[str, set[str]]:
    """The names of what may be deleted, by kind."""
    kinds: dict[str, set[str]] = {}
    places = Places(state=runs.state_dir, cache=runs.state_dir / "cache", runs=runs.runs_dir)
    for one in find_prunable(places, older_s=days * DAY_S, now=NOW):
        kinds.setdefault(one.kind, set()).add(one.path.name)
    return kinds


def years_old(runs: Runs) -> None:
    """Fills both folders with one of everything."""
    path = runs.add(1, RESULT)
    (path / "checkpoints").mkdir()
    put(path / "checkpoints" / "weights.pt", 999)
    write_record(runs.state_dir, started(1))
    write_record(runs.state_dir, observation(1))
    write_record(runs.state_dir, started(2))
    write_record(runs.state_dir, Event(kind="reset", time=at(3)))
    put(runs.state_dir / "batch_size_factors.json", 0, "{}")
    put(runs.state_dir / "cache" / "prepared" / "ids.npy", 0)
    put(runs.state_dir / "cache" / "outputs" / "model" / "array.npy", 0)
    put(runs.state_dir / "cache" / ".synthetic-1.abc" / "log.csv", 0)
    put(runs.state_dir / "code" / "unused" / "src" / "a.py", 0)
    put(runs.state_dir / "code" / "used" / "src" / "a.py", 0)
    (path / "code.json").write_text(json.dumps({"folder": str(runs.state_dir / "code" / "used")}))
    put(runs.state_dir / "index" / "runs-12345678", 0)
    put(runs.state_dir / "observations" / ".0123456789abcdef.tmp", 0)
    put(path / ".0123456789abcdef.tmp", 0)
    put(path / "notes.tmp", 0)
    # A folder that was being deleted.
    put(runs.runs_dir / ".fedcba9876543210.tmp" / "config.yaml", 0)
    aged(runs.state_dir, 999)
    aged(runs.runs_dir, 999)


EVERYTHING = {
    "prepared data": {"prepared"},
    "outputs of reference models": {"model"},
    "copies of code": {"unused"},
    "what is remembered of records": {"runs-12345678"},
    "repeated starts": {"20260101001000000000-run-1-1.started.json"},
    "unfinished files": {".0123456789abcdef.tmp", ".fedcba9876543210.tmp", ".synthetic-1.abc"},
}


def test_what_can_be_made_again_is_found_and_nothing_else(runs: Runs) -> None:
    years_old(runs)
    assert found(runs) == EVERYTHING
    assert found(runs, days=1000) == {}


def test_what_was_used_lately_stays(runs: Runs) -> None:
    prepared = runs.state_dir / "cache" / "prepared"
    put(prepared / "old.npy", 200)
    read = put(prepared / "read.npy", 200)
    aged(prepared, 200)
    assert found(runs) == {"prepared data": {"prepared"}}
    os.utime(read, (NOW - 10 * DAY_S, NOW - 200 * DAY_S))
    assert found(runs) == {}
    assert found(runs, days=5) == {"prepared data": {"prepared"}}


def test_a_file_that_may_still_be_written_stays_whatever_age_is_asked_for(runs: Runs) -> None:
    put(runs.state_dir / "runs" / ".0123456789abcdef.tmp", 0.5)
    assert found(runs, days=0.1) == {}
    aged(runs.state_dir / "runs" / ".0123456789abcdef.tmp", 2)
    assert found(runs, days=0.1) == {"unfinished files": {".0123456789abcdef.tmp"}}


def test_of_a_folder_that_is_named_for_prepared_data_only_those_are_deleted(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = tmp_path / "scratch"
    thesis = put(scratch / "thesis.txt", 0)
    prepared = put(scratch / "can-train-cache" / "prepared" / "ids.npy", 0)
    in_state = put(runs.state_dir / "cache" / "prepared" / "ids.npy", 0)
    aged(tmp_path, 999)
    assert main(["doctor", "--prune", "--yes", "--json", "--cache", str(scratch), *runs.flags]) == 0
    deleted = json.loads(capsys.readouterr().out)["deleted"]
    assert [one["path"] for one in deleted] == [str(prepared.parent)]
    assert (thesis.exists(), prepared.exists(), in_state.exists()) == (True, False, True)


def test_without_a_terminal_nothing_is_deleted_and_that_is_said(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    years_old(runs)
    assert main(["doctor", "--prune", *runs.flags]) == 2
    out, err = capsys.readouterr()
    assert "prepared data" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "Nothing was deleted" in err
    assert "--yes" in err
    assert found(runs) == EVERYTHING


@pytest.mark.parametrize("answer", [True, False])
def test_a_person_is_asked(runs: Runs, monkeypatch: pytest.MonkeyPatch, *, answer: bool) -> None:
    years_old(runs)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: answer)
    assert main(["doctor", "--prune", *runs.flags]) == 0
    assert found(runs) == ({} if answer else EVERYTHING)


def test_with_yes_all_of_it_goes_and_the_rest_stays_as_it_was(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    years_old(runs)
    before = read_records(runs.state_dir)
    assert main(["doctor", "--prune", "--yes", "--json", *runs.flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {one["kind"] for one in document["deleted"]} == set(EVERYTHING)
    assert document["left"] == []
    assert found(runs) == {}
    after = read_records(runs.state_dir)
    assert (after.finished, after.unfinished, after.events) == (before.finished, before.unfinished, before.events)
    left = {path.name for folder in (runs.state_dir, runs.runs_dir) for path in folder.rglob("*") if path.is_file()}
    assert {"weights.pt", "result.json", "config.yaml", "run.json", "notes.tmp", "batch_size_factors.json"} <= left
    assert (runs.state_dir / "code" / "used" / "src" / "a.py").exists()
    assert main(["doctor", "--prune", *runs.flags]) == 0
    assert "Nothing in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--yes"], "--yes has no effect without --prune"),
        (["--older-than", "3d"], "--older-than has no effect without --prune"),
        (["--prune", "--gradients"], "--prune and --gradients cannot be combined"),
        (["--prune", "--target-gpu", "t4"], "--prune and --target-gpu cannot be combined"),
        (["--prune", "--older-than", "90"], "90d or 12h"),
        (["--prune", "--older-than", "-1d"], "90d or 12h"),
        (["--prune", "--model", "gat"], "--model has no effect without --gradients"),
    ],
)
def test_what_does_not_go_together_is_refused(
    runs: Runs, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(["doctor", *flags, *runs.flags]) == 2
    assert said in capsys.readouterr().err


def test_what_cannot_be_deleted_is_named(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    years_old(runs)

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    assert main(["doctor", "--prune", "--yes", *runs.flags]) == 2
    assert "could not be deleted" in capsys.readouterr().err
    assert "prepared data" in found(runs)


def test_no_copy_of_code_goes_while_a_run_cannot_be_read(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    years_old(runs)
    path = runs.add(2)
    assert "copies of code" in found(runs)
    close(runs.state_dir / "runs" / path.name, monkeypatch)
    assert "copies of code" not in found(runs)
