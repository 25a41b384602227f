"""`top`: the cells of runs that train or wait, the keys, and lines in a pipe."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from can_train.cli.main import main
from can_train.cli.top import _Keys, _View, make_row
from can_train.io.records import utc_now
from can_train.runs.run_state import LIVE
from can_train.runs.scheduler import QueueRow, SchedulerAnswer
from fakes.made_runs import RESULT, Runs, begin
from fakes.run_facts import CLUSTER


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """A run that trains in this process, one that waits in SLURM, and one that has finished."""
    runs = Runs(tmp_path)
    begin(path := runs.add(1, label="lr=0.1", sweep="s"), start_time=utc_now())
    (path / "metrics.jsonl").write_text('{"step": 10, "epoch": 1, "peak_memory_pct": 0.5}\n')
    (path / "plan.json").write_text('{"plan": {"steps_per_epoch": 10}}')
    (path / "steps.jsonl").write_text('{"from_step": 1}\n{"step": 10, "loss": 0.25}\n')
    runs.submit(runs.add(2, label="lr=\x1b]0;x\x07"), "7")
    runs.add(3, RESULT)
    return runs


def looked(runs: Runs) -> _View:
    job = runs.registry.jobs(runs.known()[1].run_id)[0].slurm_job
    assert job is not None
    answer = SchedulerAnswer(queue=[QueueRow(job=job, state="PENDING", reason="Resources")], local=CLUSTER)
    return _View([status for status in runs.look(answer) if status.state.live])


def test_a_row_has_progress_speed_loss_memory_and_the_reason_of_a_wait(runs: Runs) -> None:
    waiting, training = map(make_row, looked(runs).statuses)
    assert (waiting[1], waiting[-1][:15]) == ("queued", "Resources: lr=\x1b")
    assert training[1:3] == ("running", "10/40")
    assert training[4:6] == ("0.25", "50%")
    assert float(training[3]) > 0
    assert training[-1] == "lr=0.1"


def test_keys_choose_a_run_open_it_and_end_the_view(runs: Runs) -> None:
    view = looked(runs)
    for key, place, is_open in [("down", 1, False), ("down", 1, False), ("open", 1, True), ("back", 1, False),
                                ("up", 0, False), ("", 0, False)]:  # fmt: skip
        assert view.press(key)
        assert (view.place, view.is_open) == (place, is_open)
    view.statuses = view.statuses[:1]  # the chosen run may end
    assert view.press("open")
    assert not view.press("quit")
    assert not _View().press("back")
    assert _View().press("open")


def test_the_view_fits_80_columns_and_shows_control_characters_as_text(runs: Runs) -> None:
    view = looked(runs)
    for is_open in (False, True):
        view.is_open = is_open
        console = Console(width=80, height=20, force_terminal=True, color_system=None)
        with console.capture() as capture:
            console.print(view.draw(20))
        assert max(map(len, capture.get().splitlines())) <= 80
        assert "\x1b]0" not in capture.get()


def test_more_runs_than_lines_are_shown_around_the_chosen_one(runs: Runs) -> None:
    view = looked(runs)
    view.statuses = [*view.statuses] * 20
    console = Console(width=80)
    with console.capture() as capture:
        console.print(view.draw(10))
    assert len(capture.get().splitlines()) <= 10
    assert "(34 more)" in capture.get()


def test_arrows_and_a_lone_escape_are_told_apart() -> None:
    reading, writing = os.pipe()
    for data, keys in [(b"\x1b[A", ["up"]), (b"\x1b", ["back"]), (b"jx\r", ["down", "", "open"])]:
        os.write(writing, data)
        assert _Keys(reading).wait(1.0) == keys
    os.close(writing)
    assert "quit" in _Keys(reading).wait(1.0)
    os.close(reading)


def test_a_pipe_gets_a_line_for_each_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["top", *runs.flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("10/40" in line and "lr=0.1" in line for line in lines)
    assert all("\x1b" not in line for line in lines)


def test_runs_are_listed_as_json_as_by_runs(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["top", "--json", *runs.flags]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert main(["runs", "--json", *runs.flags]) == 0
    newest = json.loads(capsys.readouterr().out)
    assert [run.keys() for run in listed] == [run.keys() for run in newest if run["state"] in LIVE]
    assert [run["run_id"] for run in listed] == [run["run_id"] for run in newest if run["state"] in LIVE]
    assert len(listed) == 2
