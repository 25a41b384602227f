"""Runs are copied by rsync, listed where they were copied to as where they were trained, and archived."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from can_train.cli.main import main
from can_train.runs.registry import LabelRecord
from fakes.made_runs import RESULT, Runs, at, begin, end

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """A finished run, and a run of a sweep that failed, in a job whose cluster does not answer."""
    (tmp_path / "bin").mkdir()
    rsync = shutil.which("rsync")
    assert rsync is not None
    (tmp_path / "bin" / "rsync").symlink_to(rsync)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    runs = Runs(tmp_path)
    runs.add(1, RESULT)
    path = runs.add(2, sweep="sweep-lr-0001", label="lr=0.1")
    begin(path)
    end(path, "failed", message="no \x1b[31mdata")
    runs.registry.add(LabelRecord(run_id=path.name, time=at(50), added=["paper"], note="of figure 3"))
    return runs


def said(capsys: pytest.CaptureFixture[str], *line: str, code: int = 0) -> str:
    assert main(line) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def there(tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    flags = (*flags, "--runs-dir", str(tmp_path / "copies"), "--state-dir", str(tmp_path / "other"))
    return json.loads(said(capsys, "runs", "--columns", "id,state,sweep,label,tags,note,made", *flags, "--json"))


def test_a_copied_run_is_listed_as_where_it_was_trained(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = json.loads(said(capsys, "runs", "--columns", "id,state,sweep,label,tags,note,made", "--json", *runs.flags))
    copied = said(capsys, "sync", "sweep-lr-0001", "0001", str(tmp_path / "copies"), *runs.flags)
    assert "Copied 2 runs" in copied
    where = f"--runs-dir {tmp_path / 'copies'}"
    words = " ".join(copied.split())
    assert re.search(
        rf"Look there: can-train status \S+ {where} List all there: can-train runs --limit 0 {where}$", words
    )
    assert there(tmp_path, capsys) == here
    assert [row["state"] for row in there(tmp_path, capsys, "--sweep", "sweep-lr-0001", "--tag", "paper")] == ["failed"]
    flags = ("--runs-dir", str(tmp_path / "copies"), "--state-dir", str(tmp_path / "other"))
    shown = said(capsys, "status", "0002", *flags)
    assert r"no \x1b[31mdata; as of" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("place", "typed"), [("a place/größe", "'a place/größe'"), ("me@there:~/a place", "~/'a place'")]
)  # fmt: skip
def test_the_lines_to_look_at_copies_can_be_typed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    place: str, typed: str,
) -> None:  # fmt: skip
    machine(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a place").mkdir()
    copied = said(capsys, "sync", "0001", "0002", place, *runs.flags)
    for line in ("can-train status ", "can-train runs --limit 0 "):
        (line,) = (printed for printed in copied.splitlines() if line in printed)
        assert line.endswith(f" --runs-dir {typed}")


def machine(tmp_path: Path) -> None:
    """Another machine, which is this one; `gone` is none."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(f"""#!/bin/bash
if [ "$1" = gone ]; then echo "ssh: Could not resolve hostname gone: Name or service not known" >&2; exit 255; fi
until [ "$1" = rsync ]; do shift; done
HOME={tmp_path}
cd; exec "$@"
""")
    ssh.chmod(0o755)


@pytest.mark.parametrize("home", ["~", "~/", "~//", "."])
def test_the_home_directory_of_another_machine_is_a_place(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], home: str
) -> None:
    machine(tmp_path)
    copied = said(capsys, "sync", "0001", f"me@there:{home}", *runs.flags)
    assert [*tmp_path.glob("*-0001/copied.json")]
    assert copied.splitlines()[-1].endswith(" --runs-dir ." if home == "." else " --runs-dir ~")


def test_the_home_directory_of_another_person_is_given_as_a_path(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "me@host:/home/them/runs" in said(capsys, "sync", "0001", "me@there:~them/runs", *runs.flags, code=2)


@pytest.mark.parametrize(
    ("place", "words"),
    [("gr ö/b c/d", "mkdir -p 'gr ö/b c'"), ("me@there:a/b c/d", """ssh me@there 'mkdir -p '"'"'a/b c'"'"''"""),
     ("gone:x", "can log in there: ssh gone")],
)  # fmt: skip
def test_a_missing_folder_or_machine_is_named_with_the_line_that_helps(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    place: str, words: str,
) -> None:  # fmt: skip
    machine(tmp_path)
    monkeypatch.chdir(tmp_path)
    line = ("archive", "0001", place, "--yes", *runs.flags)
    message = said(capsys, *line, code=2)
    assert words in message
    if "mkdir" in words:
        (making,) = (each for each in message.splitlines() if "mkdir" in each)
        subprocess.run(making.replace("ssh me@there", "sh -c"), shell=True, check=True, env={"PATH": "/usr/bin:/bin"})
        assert "Deleted 1 run" in said(capsys, *line)


def test_a_damaged_record_of_a_copy_tells_nothing(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "sync", "0002", str(tmp_path / "copies"), *runs.flags)
    (record,) = (tmp_path / "copies").glob("*/copied.json")
    for change in ({"state": "\x1b[2J"}, {"run_id": "another"}, {"made": "soon"}, {"tags": 3}):
        plain = json.loads(record.read_text())
        record.write_text(json.dumps({**plain, **change}))
        assert there(tmp_path, capsys)[0]["sweep"] == ""
        record.write_text(json.dumps(plain))


def test_an_archived_run_is_only_there(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Older than the copy and closed to others, as runs of yesterday are.
    (run,) = (tmp_path / "runs").glob("*-0002")
    run.chmod(0o700)
    for path in (*run.rglob("*"), run):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    line = ("archive", "0002", str(tmp_path / "copies"), *runs.flags)
    refused = said(capsys, *line, code=2)
    assert "since archive asks first" in refused
    assert "Add --yes" in refused
    assert "Deleted 1 run here" in said(capsys, *line, "--yes")
    assert len(there(tmp_path, capsys)) == 1
    assert len(json.loads(said(capsys, "runs", "--json", *runs.flags))) == 1


def test_a_copied_run_is_archived_again_and_back(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [tmp_path / name for name in ("first", "second")]
    said(capsys, "archive", "0002", str(places[0]), "--yes", *runs.flags)
    for source, place in ((places[0], places[1]), (places[1], runs.runs_dir)):
        (run,) = source.glob("*-0002")
        assert "Deleted 1 run here" in said(capsys, "archive", str(run), str(place), "--yes", *runs.flags)
        assert not run.exists()
    (row,) = json.loads(said(capsys, "runs", "--columns", "id,note", "--json", *runs.flags, "--tag", "paper"))
    assert row["note"] == "of figure 3"


def test_a_copy_that_differs_is_named_and_nothing_is_deleted(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = runs.runs_dir.glob("*-0001")
    said(capsys, "sync", "0001", str(tmp_path / "copies"), *runs.flags)
    copy = tmp_path / "copies" / run.name / "result.json"
    facts = copy.stat()
    copy.write_text(copy.read_text().replace("finished", "FINISHED"))
    # As a disk that fails leaves it: rsync copies no file of the same size and time.
    os.utime(copy, (facts.st_atime, facts.st_mtime))
    message = said(capsys, "archive", "0001", str(tmp_path / "copies"), "--yes", *runs.flags, code=2)
    assert f"nothing was deleted here: {run.name}/result.json." in message
    assert run.is_dir()
    assert "Move its copy away" in message
    copy.unlink()
    assert "Deleted 1 run here" in said(capsys, "archive", "0001", str(tmp_path / "copies"), "--yes", *runs.flags)


@pytest.mark.parametrize(
    ("place", "message"),
    [("-e sh", "A place is a folder"), ("--rsh=x:y", "A place is a folder"), ("RUNS", "onto itself"),
     ("/dev/null/x", "could not be copied")],
)  # fmt: skip
def test_a_place_that_cannot_be_copied_to_is_refused_and_nothing_is_deleted(
    runs: Runs, capsys: pytest.CaptureFixture[str], place: str, message: str
) -> None:
    place = str(runs.runs_dir) if place == "RUNS" else place
    assert message in said(capsys, "archive", "--yes", *runs.flags, "--", "0001", place, code=2)
    assert len(json.loads(said(capsys, "runs", "--json", *runs.flags))) == 2
    assert "PLACE is missing" in said(capsys, "sync", "0001", *runs.flags, code=2)
