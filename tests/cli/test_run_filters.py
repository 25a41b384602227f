"""Runs are found by state, data set, age, sweep, tags, settings and scores, and are tagged and deleted."""

import csv
import io
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.cli.main import main
from can_train.errors import ConfigError
from can_train.io.records import write_text_atomic
from can_train.report.run_list import Condition, RunFilter, RunList, data_set_of, parse_since
from can_train.runs.registry import Registry, RunRecord
from can_train.runs.scheduler import AccountRow, SchedulerAnswer
from can_train.runs.status import KnownRun, known_runs
from fakes.finished_runs import Shelf
from fakes.made_runs import RESULT, FakeScheduler, Runs, begin, end
from fakes.run_facts import CLUSTER

SCORES = {"judgement": {"test": {"a": {"model": {"mcc": 0.5}}, "b": {"model": {"mcc": 0.7}}}}}


def said(capsys: pytest.CaptureFixture[str], *line: str, code: int = 0) -> str:
    assert main(line) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Three runs: lr 0.5 finished, lr 0.05 of a sweep failed, lr 0.005 on another data set never started."""
    monkeypatch.setenv("PATH", str(tmp_path))
    shelf = Shelf(tmp_path)
    shelf.put(1, shelf.resolved("gat", "normal", sets=("training.lr=0.5",)), SCORES)
    second = shelf.put(2, shelf.resolved("vgae", "autoencoder", sets=("training.lr=0.05",)), None)
    begin(second.path)
    end(second.path, "failed", message="no \x1b[31mdata")
    entry = shelf.folder / "state" / "runs" / second.run_id / "run.json"
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "sweep": "sweep-lr-0001"}))
    shelf.put(3, shelf.resolved("gat", "normal", dataset="synthetic_large", sets=("training.lr=0.005",)), None)
    return shelf


def listed(shelf: Shelf, capsys: pytest.CaptureFixture[str], *flags: str) -> list[int]:
    rows = json.loads(said(capsys, "runs", *flags, "--columns", "id", "--format", "json", *shelf.flags))
    return [int(row["id"][-4:], 16) for row in rows]


def test_data_sets_of_two_tasks_with_one_name_are_two() -> None:
    sets = [{"task": task, "dataset": {"name": "synthetic"}} for task in ("can", "seq2seq")]
    assert [*map(data_set_of, sets)] == [("synthetic", "can"), ("synthetic", "seq2seq")]
    assert data_set_of({"task": "can", "dataset": {"name": "a", "path": "/logs/a.csv"}}) == ("a", "/logs/a.csv")


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (("--state", "failed"), [3, 2]),
        (("--state", "finished,error"), [2, 1]),
        (("--dataset", "synthetic"), [2, 1]),
        (("--since", "2026-01-01T00:00:02+00:00"), [3, 2]),
        (("--since", "1min"), []),
        (("--sweep", "sweep-lr-0001"), [2]),
        (("--sweep", "lr-0"), [2]),
        (("--sweep", "lr-0", "--since", "1min"), []),
        (("--where", "lr>0.01"), [2, 1]),
        (("--where", "lr>0.01", "--where", "training.lr != 0.5"), [2]),
        (("--where", "model=gat"), [3, 1]),
        (("--where", "mcc>=0.6"), [1]),
        (("--where", "a.mcc>=0.6"), []),
        (("--where", "lr<0.01", "--where", "mcc>=0.6"), []),
        (("--where", "deterministic=false"), [3, 2, 1]),
    ],
)
def test_each_filter_keeps_the_runs_that_meet_it(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], numbers: list[int]
) -> None:
    assert listed(shelf, capsys, *flags) == numbers
    assert listed(shelf, capsys, *flags) == numbers  # from the index


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--state", "fialed"), "failed"),
        (("--dataset", "synthetik"), "synthetic"),
        (("--sweep", "lr-0002"), "The nearest names:\n  sweep-lr-0001"),
        (("--since", "soon"), "7d"),
        (("--since", "999999w"), "7d"),
        (("--where", "lr"), "lr>0.01"),
        (("--where", "lr>large"), "number"),
        (("--where", "lrr>1"), " lr"),
        (("--where", "name=gat"), "dataset.name, mode.name"),
        (("--columns", "run,lrr"), " lr"),
        (("--columns", "run,,"), "names nothing"),
        (("--format", "xml"), "csv"),
        (("--best", "mcc", "--columns", "run"), "--columns run,mcc"),
        (("--watch", "--format", "csv"), "cannot be combined"),
    ],
)
def test_a_wrong_filter_is_answered_with_the_right_one(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert message in said(capsys, "runs", *flags, *shelf.flags, code=2)


TOP2 = [{"judgement": {"test": {"a": {"model": {"top2": value}}}}} for value in (0.3, 0.8)]


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Two runs with a metric whose name tells no direction; the newest has not finished."""
    monkeypatch.setenv("PATH", str(tmp_path))
    shelf = Shelf(tmp_path)
    for number, (result, best_by) in enumerate(zip((*TOP2, None), ("top2:max", "loss", "loss"), strict=True), start=1):
        shelf.put(number, shelf.resolved("gat", "normal", sets=(f"training.best_by={best_by}",)), result)
    return shelf


def best(shelf: Shelf, capsys: pytest.CaptureFixture[str], metric: str) -> list[int]:
    rows = json.loads(said(capsys, "runs", "--best", metric, "--json", *shelf.flags))
    assert {row["metric"] for row in rows} == {"top2"}
    return [int(row["run_id"][-4:], 16) for row in rows]


def test_a_metric_whose_name_tells_no_direction_is_ranked_listed_and_compared(
    named: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    # One of the runs says the direction.
    assert [best(named, capsys, metric) for metric in ("top2", "top2:max", "top2:min")] == [[2, 1], [2, 1], [1, 2]]
    assert "higher is better" in said(capsys, "runs", "--best", "top2", *named.flags)
    assert listed(named, capsys, "--where", "top2>0.5") == [2]
    rows = said(capsys, "runs", "--columns", "label,top2", "--format", "csv", "--limit", "2", *named.flags).split()
    assert rows == ["label,top2", ",", ",0.8"]
    # The newest run has no such metric, and is all that is listed.
    table = said(capsys, "runs", "--columns", "label,top2", "--limit", "1", *named.flags)
    assert table.split()[:2] == ["1", "run"]
    assert said(capsys, "runs", "--columns", "label,top2", "--format", "csv", "--limit", "1", *named.flags) == (
        "label,top2\n,\n"
    )


@pytest.mark.parametrize("others", ["loss", "top2:min"])
def test_a_direction_that_the_runs_do_not_agree_on_is_asked_for(
    named: Shelf, capsys: pytest.CaptureFixture[str], others: str
) -> None:
    first = "loss" if others == "loss" else "top2:max"
    for number, (result, best_by) in enumerate(zip(TOP2, (first, others), strict=True), start=4):
        named.put(number, named.resolved("gat", "normal", sets=(f"training.best_by={best_by}",)), result)
    flags = ("--where", f"best_by={others}") if others == "loss" else ()
    assert "--best top2:max, or :min" in said(capsys, "runs", "--best", "top2", *flags, *named.flags, code=2)


def test_columns_are_settings_metrics_and_facts(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "runs", "--columns", "run,state,lr,mcc,why", "--format", "csv", *shelf.flags)
    assert [*csv.reader(io.StringIO(text))] == [
        ["run", "state", "lr", "mcc", "why"],
        ["0101-000003-0003", "never started", "0.005", "", "no job was started for it"],
        ["0101-000002-0002", "failed", "0.05", "", "no \\x1b[31mdata"],
        ["0101-000001-0001", "finished", "0.5", "0.6", ""],
    ]
    assert "state,made" in said(capsys, "runs", "--format", "csv", *shelf.flags).splitlines()[0]
    assert "lr=0.05" in said(capsys, "runs", "--state", "error", *shelf.flags)
    assert "No run meets these conditions" in said(capsys, "runs", "--tag", "x", *shelf.flags)


def test_a_finished_run_is_listed_with_its_best_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    runs = Runs(tmp_path)
    runs.add(1, RESULT)
    # The second list is read from the index.
    for _ in range(2):
        text = said(capsys, "runs", "--columns", "state,why", "--format", "csv", *runs.flags)
        assert text.splitlines()[1] == "finished,best validation loss 0.5 after epoch 2"


@given(text=st.text(max_size=40))
def test_a_condition_is_read_and_never_evaluated(text: str) -> None:
    try:
        condition = Condition.parse(text)
    except ConfigError:
        return
    for value in (1, 0.5, True, "x", None, [1, 2]):
        assert condition.holds(value) in (True, False)


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [("a>1", 2, True), ("a<=1", 1.0, True), ("a=1e-3", 0.001, True), ("a=true", True, True), ("a!=x", "y", True),
     ("a=[1,2]", [1, 2], True), ("a>1", "x", False), ("a=none", "", True), ("a=1", True, False)],
)  # fmt: skip
def test_a_condition_compares_numbers_as_numbers_and_all_else_as_text(text: str, value: Any, holds: bool) -> None:
    assert Condition.parse(text).holds(value) == holds


def test_an_age_is_counted_back_from_now() -> None:
    now = datetime(2026, 1, 10, tzinfo=UTC)
    assert parse_since("7d", now) == "2026-01-03T00:00:00.000000+00:00"
    assert parse_since("2026-01-02T00:00:00+00:00", now) == "2026-01-02T00:00:00.000000+00:00"


def test_slurm_is_asked_once_about_a_run_that_ended_and_again_where_it_was_silent(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    path = runs.add(1)
    runs.submit(path, "7")
    begin(path, job_id="7")
    row = AccountRow(job=runs.registry.jobs(path.name)[0].slurm_job, state="NODE_FAIL", nodes="n1")  # type: ignore[arg-type]
    answering = FakeScheduler(SchedulerAnswer(accounts=[row], local=CLUSTER))
    silent = FakeScheduler(SchedulerAnswer(silent={CLUSTER: "down"}))

    def state(scheduler: FakeScheduler) -> str:
        chosen = RunList(known_runs(runs.registry, runs.runs_dir), runs.state_dir, scheduler)
        return chosen.select(RunFilter()).state(chosen.runs[0])

    assert state(silent) == "running"
    assert [state(answering) for _ in range(3)] == ["node failure"] * 3
    assert len(answering.asked) == 1
    runs.submit(path, "8", time="2026-01-02T00:00:00+00:00")
    state(answering)
    assert len(answering.asked) == 2


def test_the_end_of_a_run_is_looked_for_once_in_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, looked = Runs(tmp_path), list[str]()
    for number in range(3):
        begin(runs.add(number))

    def look(self: RunList, run: KnownRun) -> int:
        looked.append(run.run_id)
        return identify(self, run)

    identify = RunList._identify_end
    monkeypatch.setattr(RunList, "_identify_end", look)
    chosen = RunList(known_runs(runs.registry, runs.runs_dir), runs.state_dir, FakeScheduler()).select(RunFilter())
    for run in chosen.runs:
        assert (chosen.state(run), chosen.figures(run).device) == ("failed", "")
    assert sorted(looked) == sorted(run.run_id for run in chosen.runs)


def test_a_replaced_or_missing_file_is_noticed_in_a_folder_that_was_settled(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("can_train.report.run_list.SETTLED_S", -10.0)
    assert listed(shelf, capsys, "--where", "mcc>=0.6") == [1]
    (path,) = (shelf.folder / "runs").glob("*-0001")
    text = (path / "config.yaml").read_text()
    write_text_atomic(path / "config.yaml", text.replace("lr: 0.5", "lr: 0.7"))
    assert listed(shelf, capsys, "--where", "lr=0.7") == [1]
    # As `resume --epochs` does.
    (path / "result.json").rename(path / "result-at-step-9.json")
    assert listed(shelf, capsys, "--state", "finished") == []
    write_text_atomic(
        path / "result.json", json.dumps({**SCORES, "judgement": {"test": {"a": {"model": {"mcc": 0.1}}}}})
    )
    assert listed(shelf, capsys, "--where", "mcc<0.2") == [1]
    assert listed(shelf, capsys, "--where", "mcc<0.2") == [1]


def test_tags_and_notes_are_shown_and_taken_away(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tags good v1" in said(capsys, "tag", "0001", "good", "v1", *shelf.flags)
    said(capsys, "tag", "sweep-lr-0001", "good", *shelf.flags)
    said(capsys, "note", "0001", "learns \x1b[31mfast", *shelf.flags)
    assert listed(shelf, capsys, "--tag", "good") == [2, 1]
    shown = said(capsys, "note", "0001", *shelf.flags)
    assert r"good v1; note: learns \x1b[31mfast" in shown
    said(capsys, "tag", "0001", "--remove", "good", *shelf.flags)
    said(capsys, "note", "0001", "--clear", *shelf.flags)
    assert json.loads(said(capsys, "tag", "0001", "--json", *shelf.flags))[0]["tags"] == ["v1"]
    assert listed(shelf, capsys, "--tag", "good") == [2]
    for line in (("tag", "0001", "a b"), ("tag", "0001", "a", "--remove", "a"), ("note", "0001", "x", "--clear")):
        said(capsys, *line, *shelf.flags, code=2)


def test_a_run_is_deleted_when_nobody_builds_on_it(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, _ = sorted((shelf.folder / "runs").iterdir())
    config = (second / "config.yaml").read_text()
    (second / "config.yaml").write_text(config.replace("start_from: ''", f"start_from: {first}"))
    message = said(capsys, "delete", "0001", "--yes", *shelf.flags, code=2)
    assert "builds on" in message
    assert second.name in message
    assert "Add --yes" in said(capsys, "delete", "0001", "0002", *shelf.flags, code=2)
    assert first.is_dir()
    assert "Deleted 2 runs" in said(capsys, "delete", "0001", "0002", "--yes", *shelf.flags)
    assert listed(shelf, capsys) == [3]
    assert Registry(shelf.folder / "state").run(first.name) is None


def test_a_run_that_trains_or_is_a_link_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    runs = Runs(tmp_path)
    begin(path := runs.add(1), start_time=datetime.now(UTC).isoformat())
    assert "has not ended" in said(capsys, "delete", path.name, "--yes", *runs.flags, code=2)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    end(elsewhere, "failed")
    path.symlink_to(elsewhere)
    assert "not the folder of a run" in said(capsys, "delete", path.name, "--yes", *runs.flags, code=2)
    assert (elsewhere / "config.yaml").is_file()


def test_nothing_changes_where_one_of_the_runs_cannot_be_deleted(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = sorted((shelf.folder / "runs").iterdir())

    def belongs_to_others(path: Path, mode: int, **options: bool) -> bool:
        return Path(path) != second

    line = ("delete", "0001", "0002", "--yes", *shelf.flags)
    for user, remedy in ((os.geteuid(), f"chmod -R u+w {second}"), (os.geteuid() + 1, "Ask the owner of the folder")):
        with monkeypatch.context() as patched:
            patched.setattr(os, "access", belongs_to_others)
            patched.setattr(os, "geteuid", lambda user=user: user)
            message = " ".join(said(capsys, *line, code=2).split())
        assert f"cannot be deleted: {second}: Permission denied" in message
        assert remedy in message
    assert listed(shelf, capsys) == [3, 2, 1]
    assert (first / "config.yaml").is_file()
    assert "Deleted 2 runs" in said(capsys, *line)


def test_a_part_of_the_name_of_a_sweep_finds_its_runs_where_no_run_has_it(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    Registry(shelf.folder / "state").add(
        RunRecord(run_id="x", path="/x", key="k", time="2026-01-01T00:00:09+00:00", sweep="sweep-lr-0002")
    )
    assert "2 sweeps match" in said(capsys, "tag", "sweep-lr", *shelf.flags, code=2)
    assert said(capsys, "tag", "lr-0001", "a", *shelf.flags).startswith("0101-000002-0002")
    assert "There is no such run" in said(capsys, "tag", "lr-0003", "a", *shelf.flags, code=2)


def test_usage_counts_the_gpu_of_a_job_once_that_several_runs_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    runs = Runs(tmp_path)
    for number in range(4):
        path = runs.add(number, RESULT)
        runs.submit(path, "7", packed_with=4, resources={"gpus-per-node": "a100:1"})
        begin(path)
        end(path, "finished")
    (figures,) = json.loads(said(capsys, "runs", "--usage", "--json", *runs.flags))["all"].values()
    # Four times ten seconds, beside each other.
    assert (figures["hours"], figures["gpu_hours"]) == (pytest.approx(40 / 3600), pytest.approx(10 / 3600))


def test_usage_counts_the_hours_of_gpus_and_the_share_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    runs = Runs(tmp_path)
    for number in range(5):
        has_failed = number in (0, 4)
        # The kernels of every other run were sampled.
        sampled = RESULT | ({"gpu_utilisation": number / 10} if number % 2 else {})
        path = runs.add(number, None if has_failed else sampled)
        # Ten seconds on two GPUs, the last one on a processor.
        runs.submit(path, str(number), executor="local", resources={"gpus-per-node": "a100:2"} if number < 4 else {})
        begin(path)
        end(path, "failed" if has_failed else "finished")
    found = json.loads(said(capsys, "runs", "--usage", "--json", *runs.flags))
    assert found["all"]["all runs"] == {
        "runs": 5, "hours": pytest.approx(50 / 3600), "gpu_hours": pytest.approx(80 / 3600),
        "lost_share": pytest.approx(30 / 90), "peak_share": pytest.approx(0.62), "utilisation": pytest.approx(0.2),
    }  # fmt: skip
    assert list(found["week"]) == ["2026-W01"]
    shown = said(capsys, "runs", "--usage", "--state", "failed", *runs.flags)
    assert "100%" in shown
    assert "busy" not in shown
    together = said(capsys, "runs", "--usage", *runs.flags).partition("Together")[2].splitlines()
    assert [line.split() for line in together[1:3]] == [
        ["all", "runs", "hours", "GPU-hours", "lost", "peak", "busy"],
        ["all", "runs", "5", "0.0", "0.0", "33%", "62%", "20%"],
    ]
    assert max(map(len, shown.splitlines())) <= 80
    for flag in (("--best", "mcc"), ("--limit", "2"), ("--limit", "0")):
        assert "in tables of its own" in said(capsys, "runs", "--usage", *flag, *runs.flags, code=2)
