"""`runs` and `status` on made runs: tables that fit, JSON that any parser takes, the best run, and what is wrong."""

import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from can_train.cli.main import main
from can_train.io.index import recall, remember
from can_train.io.records import utc_now
from can_train.report.run_list import _Remembered
from can_train.runs.run_folder import RunFolder, name_to_type
from fakes.finished_runs import Shelf
from fakes.made_runs import KEY, RESULT, Runs, begin, close, end


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    # No SLURM, whichever this machine may have.
    monkeypatch.setenv("PATH", str(tmp_path))
    return Runs(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *line: str, code: int = 0) -> str:
    assert main(line) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if code == 0 else captured.err


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_without_runs_it_says_how_to_start_one(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert "can-train --help" in said(capsys, "runs", *runs.flags)
    assert strictly(said(capsys, "runs", "--json", *runs.flags)) == []


@pytest.mark.parametrize("number", ["", "none"])
def test_runs_are_listed_where_variables_of_slurm_hold_no_numbers(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    begin(path := runs.add(1))
    monkeypatch.setenv("SLURM_PROCID", number)
    monkeypatch.setenv("SLURM_RESTART_COUNT", number)
    assert path.name in said(capsys, "runs", *runs.flags, "--json")
    assert path.name in said(capsys, "show", path.name, *runs.flags)


def test_runs_are_listed_the_newest_first_with_state_progress_and_loss(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(path := runs.add(1, RESULT))
    end(path, "finished")
    begin(path := runs.add(2))
    end(path, "failed", message="no such data")
    rows = said(capsys, "runs", *runs.flags).splitlines()[3:5]
    assert [row.split() for row in rows] == [
        ["0101-000002-0002", "failed", "10", "s", KEY],
        ["0101-000001-0001", "finished", "10", "s", "0.500", KEY],
    ]


def test_a_loss_of_zero_is_shown(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.add(1, RESULT | {"best_validation_loss": 0.0})
    assert "0 at best in validation" in said(capsys, "status", "last", *runs.flags)


def test_runs_of_each_data_set_are_a_table_with_score_device_and_what_was_set_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shelf = Shelf(tmp_path)
    sets = ("training.lr=0.5", "dataset.window=50", "model.hidden=[8]")
    result = {
        "device": "sim-64mib",
        "judgement": {"test": {"a": {"model": {"mcc": 0.5}}, "b": {"model": {"mcc": 0.2}}}},
    }
    shelf.put(1, shelf.resolved("gat", "normal", device="cpu"), None)
    shelf.put(2, shelf.resolved("vgae", "autoencoder", "student", sets=sets), result)
    large = shelf.resolved("gat", "normal", dataset="synthetic_large", sets=("training.epochs=20",))
    shelf.put(3, large, {"best_validation_loss": 0.25})
    shown = said(capsys, "runs", *shelf.flags)
    assert max(map(len, shown.splitlines())) <= 80
    first, second = shown.split("\nsynthetic\n")
    assert [line.split() for line in first.splitlines()[3:]] == [
        ["0101-000003-0003", "finished", "auto", "0.250", "gat", "teacher", "normal"],
        ["epochs=20"],
        ["best_validation_loss:", "lower", "is", "better"],
    ]
    assert [line.split() for line in second.splitlines()[1:]] == [
        ["0101-000002-0002", "finished", "sim-64mib", "0.350", "vgae", "student", "autoencoder"],
        ["window=50", "hidden=[8]", "lr=0.5"],
        ["0101-000001-0001", "never", "started", "cpu", "gat", "teacher", "normal"],
        ["mcc,", "the", "mean", "over", "the", "test", "sets:", "higher", "is", "better"],
    ]
    found = strictly(said(capsys, "runs", "--json", *shelf.flags))[1]
    assert [found[name] for name in ("dataset", "model", "size", "mode", "device")] == [
        "synthetic", "vgae", "student", "autoencoder", "sim-64mib",
    ]  # fmt: skip
    assert found["score"] == {"metric": "mcc", "value": 0.35}
    assert found["changed_settings"]["training.lr"] == {"value": 0.5, "default": 0.001}


def test_the_best_are_those_of_each_data_set_in_the_direction_of_the_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shelf = Shelf(tmp_path)
    for number, (name, loss) in enumerate([("synthetic", 0.5), ("synthetic_large", 0.1), ("synthetic", 0.3)]):
        run = shelf.resolved("gat", "normal", dataset=name)
        shelf.put(number, run, {"best_validation_loss": loss, "judgement": {"validation": {"mcc": 1 - loss}}})
    shown = said(capsys, "runs", "--best", "best_validation_loss", *shelf.flags)
    tables = shown.split(": best by best_validation_loss\n")
    assert [re.findall(r"^0101\S+ +(\S+)", table, re.MULTILINE) for table in tables] == [[], ["0.3", "0.5"], ["0.1"]]
    assert shown.count("best_validation_loss: lower is better") == 2
    found = strictly(said(capsys, "runs", "--best", "validation.mcc", "--json", *shelf.flags))
    assert [(one["dataset"], one["rank"], one["value"], one["higher_is_better"]) for one in found] == [
        ("synthetic", 1, 0.7, True), ("synthetic", 2, 0.5, True), ("synthetic_large", 1, 0.9, True),
    ]  # fmt: skip


def test_a_limit_leaves_out_older_ones_and_says_so(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        runs.add(number, RESULT)
    shown = said(capsys, "runs", "--limit", "2", *runs.flags)
    assert shown.count("finished") == 2
    assert "3 older: can-train runs --limit 5" in shown
    assert said(capsys, "runs", "--limit", "0", *runs.flags).count("finished") == 5


def test_json_has_everything_and_no_figure_that_is_none(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs.add(1, {**RESULT, "best_validation_loss": float("nan")})
    runs.submit(path, "12", resources={"mem": "1G"})
    begin(path, job_id="12", restarts=2)
    (shown,) = strictly(said(capsys, "runs", "--json", *runs.flags))
    assert (shown["run_id"], shown["state"], shown["key"]) == (path.name, "finished", KEY)
    assert (shown["best_validation_loss"], shown["restarts"], shown["step"]) == (None, 2, 40)
    assert shown["jobs"][0]["resources"] == {"mem": "1G"}
    assert shown.pop("changed_settings") is None
    assert shown == strictly(said(capsys, "status", path.name, "--json", *runs.flags))


def test_the_best_comes_first(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for number, loss in enumerate((0.5, 0.25, 0.75)):
        runs.add(number, {**RESULT, "best_validation_loss": loss})
    line = ("runs", "--best", "best_validation_loss", *runs.flags)
    rows = said(capsys, *line).splitlines()[3:6]
    assert [row.split()[1] for row in rows] == ["0.25", "0.5", "0.75"]
    assert [shown["value"] for shown in strictly(said(capsys, *line, "--json"))] == [0.25, 0.5, 0.75]


def test_the_figure_of_a_run_without_test_sets_is_told_to_be_of_its_validation(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.add(1, {**RESULT, "accuracy": 0.5})
    line = ("runs", "--best", "accuracy", *runs.flags)
    of_validation = "of the validation that chose the weights"
    assert f"accuracy, {of_validation}: higher is better" in said(capsys, *line)
    runs.add(2, {**RESULT, "judgement": {"test": {"a": {"model": {"accuracy": 0.7}}}}})
    mixed = f"accuracy, the mean over the test sets, or {of_validation} where a run has none: higher"
    assert mixed in " ".join(said(capsys, *line).split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("runs", "--best", "best_loss"), "best_validation_loss"),
        (("runs", "--watch", "--json"), "--watch and --json cannot be combined"),
        (("runs", "--limit", "-1"), "--limit"),
        (("runs", "--state-dir", ""), "--state-dir is empty"),
        (("status", "20270101"), "The newest:\n  20260101-0000"),
        (("status",), "RUN"),
        (("resubmit", "20260101", "--set", "training.lrr=1"), "configuration cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    runs: Runs, capsys: pytest.CaptureFixture[str], line: tuple[str, ...], message: str
) -> None:
    (runs.add(1, RESULT) / "config.yaml").write_text("[")
    flags = runs.flags[:2] if "--state-dir" in line else runs.flags
    assert message in said(capsys, *line, *flags, code=2)


def test_nothing_is_best_before_a_run_has_finished(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.add(1)
    assert "No run has finished yet" in said(capsys, "runs", "--best", "mcc", *runs.flags, code=2)


def test_status_tells_why_a_run_ended_what_it_tried_and_how_it_goes_on(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    begin(path)
    end(path, "failed", message="no more disk")
    shown = said(capsys, "status", path.name, *runs.flags)
    assert re.search(r"^state +failed: no more disk$", shown, re.MULTILINE)
    assert f"can-train resume {path}\n" in shown
    assert re.search(r"^1 +process \d+ .* 10 s failed: no more disk", shown, re.MULTILINE)


def test_a_run_that_diverged_is_not_to_be_resumed_but_trained_anew(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    begin(path)
    end(path, "failed", message="The loss is no longer finite", details={"lower_lr": 5e-05})
    shown = said(capsys, "status", path.name, *runs.flags)
    assert f"can-train resubmit {path} --lr 5e-05\n" in shown
    assert "can-train resume" not in shown
    assert f"can-train resubmit {path} --lr 5e-05" in said(capsys, "show", path.name, *runs.flags)


def test_the_time_of_a_run_is_that_of_its_attempts_not_of_the_pause_between_them(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    begin(path, start_time="2026-01-01T00:00:38+00:00")
    end(path, "failed")
    begin(path, 2, start_time="2026-01-01T00:00:37+00:00")
    end(path, "failed", 2)
    assert re.search(r"^time +5 s$", said(capsys, "status", path.name, *runs.flags), re.MULTILINE)


def test_a_damaged_result_is_answered_with_the_line_that_makes_it_again(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    (path / "result.json").write_text("{")
    assert "finished: but its result.json is damaged" in said(capsys, "status", path.name, *runs.flags)
    message = said(capsys, "evaluate", path.name, *runs.flags, code=2)
    assert f"\n  rm {path}/result.json; can-train resume {path}\n" in message


@pytest.mark.parametrize("run_id", ["x" * 5000, "../1"])
def test_a_registered_run_whose_id_is_no_name_keeps_no_other_from_being_listed(
    run_id: str, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = runs.add(1), runs.add(2)
    record = runs.state_dir / "runs" / first.name / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "run_id": run_id}))
    assert second.name in said(capsys, "runs", "--json", *runs.flags)


@pytest.mark.parametrize("words", [("evaluate", "RUN"), ("predict", "RUN"), ("export", "RUN", "model.pt")])
def test_a_run_that_trains_is_not_used_but_waited_for(
    words: tuple[str, ...], runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.add(1)
    begin(path, start_time=utc_now())
    message = said(capsys, *(path.name if word == "RUN" else word for word in words), *runs.flags, code=2)
    assert f"Wait for its end: can-train logs {path.name} -f" in message


def test_a_run_whose_folder_is_gone_is_still_listed(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(runs.add(1))
    assert "failed?" in said(capsys, "runs", *runs.flags)
    assert "is gone" in said(capsys, "status", "0101-000001-0001", *runs.flags)
    assert "is gone" in said(capsys, "resume", "0101-000001-0001", *runs.flags, code=2)


def test_a_run_that_has_ended_is_not_cancelled(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs.add(1, RESULT)
    assert "has ended already: finished" in said(capsys, "cancel", path.name, *runs.flags)
    assert runs.registry.cancels(path.name) == []


def test_a_run_of_another_machine_is_cancelled_there(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    begin(path := runs.add(1), host="another")
    assert "a process of another machine: process" in said(capsys, "cancel", path.name, *runs.flags, code=2)


def read_all(leader: int) -> bytes:
    """Reads what a terminal gets, until the program at its other end has gone."""
    shown = b""
    try:
        while data := os.read(leader, 2**16):
            shown += data
    except OSError:  # how Linux says so
        os.close(leader)
    return shown


@pytest.mark.slow
def test_the_table_fits_a_terminal_of_80_columns(runs: Runs) -> None:
    for number in range(3):
        begin(path := runs.add(number, RESULT))
        end(path, "finished")
    leader, follower = pty.openpty()
    line = [sys.executable, "-m", "can_train", "runs", *runs.flags]
    variables = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    with subprocess.Popen(line, stdout=follower, env=variables) as process:
        os.close(follower)
        text = re.sub(r"\x1b\[[0-9;]*m", "", read_all(leader).decode())
    assert process.returncode == 0
    rows = [row for row in text.splitlines() if row.lstrip().startswith("0101-")]
    assert [row.split()[-1] for row in rows] == [KEY] * 3
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("columns", ["40", "300"])
@pytest.mark.parametrize("text", ["[/x]", "[bold]", "[link=x]", "[/__w/x]"])
def test_text_like_markup_is_shown_as_it_is_by_every_command_about_runs(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, columns: str
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", columns)
    begin(path := runs.add(1, after=text, sweep=text), host=text)
    end(path, "failed", message=f"It broke: {text}")
    (path / "config.yaml").write_text(f"task: can\nmodel_name: '{text}'\ndataset: {{name: '{text}'}}\n")
    job = runs.submit(path, "7", executor=text, reason=text, resources={"partition": text})
    Path(job.log_path).write_text(f"error: {text}\n")
    for command in ("runs", "status", "show", "logs"):
        assert text in said(capsys, command, *(["last"] if command != "runs" else []), *runs.flags)
    # The name of a sweep, and of nothing.
    assert text in said(capsys, "status", text, *runs.flags)
    assert text in said(capsys, "status", f"{text}?", *runs.flags, code=2)


@pytest.mark.parametrize("columns", ["40", "300"])
def test_no_command_about_runs_lets_a_text_of_theirs_change_what_a_terminal_shows(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    text = "\x1b]0;x\x07"
    begin(path := runs.add(1, after=text, sweep=text), host=text)
    end(path, "failed", message=f"It broke: {text}")
    (path / "config.yaml").write_text('task: can\nmodel_name: "\\e]0;x\\a"\ndataset: {name: "\\e]0;x\\a"}\n')
    renamed = path.with_name(f"renamed{text}")
    for command in ("runs", "status", "show"):
        # A folder with such a name is not listed.
        if command == "status":
            path.rename(renamed)
        shown = said(capsys, command, *([str(renamed)] if command != "runs" else []), *runs.flags)
        assert r"\x1b]0;x\x07" in shown
        assert not re.search(r"[\x00-\x08\x0b-\x1f]", re.sub(r"\x1b\[\d*m", "", shown))


DEEP = "[" * 100_000
BEGAN = '{"attempt": 1, "start_time": "2026-01-01T00:00:30+00:00", "pid": 7'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, text) for name in ("attempts/0001-began.json", "attempts/0001-ended.json", "result.json", "plan.json",
                                    "metrics.jsonl", "steps.jsonl", "changes.json", "config.yaml")
          for text in ("", DEEP, "[1]", '{"a": 1}', "\udcff")),
        ("attempts/0001-began.json", BEGAN + ', "restarts": []}'),
        ("attempts/0001-began.json", BEGAN.replace("7", "9" * 30) + "}"),
        ("attempts/0001-began.json", '{"attempt": 1, "start_time": 1e308, "pid": 7}'),
        ("attempts/0001-began.json", '{"attempt": 1, "start_time": "soon", "pid": 7}'),
        ("metrics.jsonl", '{"step": 1e999, "validation_loss": NaN, "epoch": ' + "9" * 400 + "}"),
        ("plan.json", '{"plan": {"mean_steps_per_epoch": 1e308}}'),
        ("config.yaml", "task: can\nmodel_name: 3\nmode: 4\ndataset: 1.5\n"),
        ("config.yaml", "a: &a [*a]\n"),
        ("config.yaml", "- " * 50_000),
        ("config.yaml", "? " * 50_000),
        ("changes.json", '{"changes": 5}'),
    ],
)  # fmt: skip
def test_a_file_of_wrong_content_hides_no_run_and_breaks_no_command(
    runs: Runs, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    begin(path := runs.add(1, RESULT))
    end(path, "finished")
    (path / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "validation_loss": 0.5}\n')
    (path / name).write_bytes(text.encode(errors="surrogateescape"))
    for line in (["runs"], ["runs", "--json"], ["status", "last", "--json"], ["show", "last"], ["report", "last"]):
        assert main([*line, *runs.flags]) in (0, 2)
        captured = capsys.readouterr()
        assert path.name[9:15] in captured.out + captured.err


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "steps.jsonl", "plan.json", "result.json", "changes.json", "config.yaml", "log.txt", "log.out",
     "attempts/0001-began.json", "attempts/0001-ended.json", "attempts/0001-waits.txt", "checkpoints/manifest.json",
     "lock", "../../state/index/changes", "../../state/index/listed"],
)  # fmt: skip
def test_a_pipe_in_place_of_a_file_of_a_run_blocks_no_command_about_runs(
    runs: Runs, capsys: pytest.CaptureFixture[str], name: str, is_finished: bool
) -> None:
    begin(path := runs.add(1, RESULT if is_finished else None))
    runs.submit(path, "7", executor="local")
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    for line in (["runs"], ["runs", "--best", "best_validation_loss"], ["status", "last"], ["show", "last"],
                 ["report", "last"], ["logs", "last"]):  # fmt: skip
        assert main([*line, *runs.flags]) in (0, 2)
    shown = capsys.readouterr()
    assert path.name[9:15] in shown.out + shown.err
    assert main(["show", "last", *runs.flags]) == (2 if name == "config.yaml" else 0)
    assert ("not a regular file" in capsys.readouterr().err) == (name == "config.yaml")


def test_what_was_changed_is_read_from_the_run_whatever_the_presets_are_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shelf = Shelf(tmp_path)
    path = shelf.put(1, shelf.resolved("gat", "normal", sets=("training.lr=0.5",)), {}).path / "changed_settings.json"
    assert json.loads(path.read_text()) == {"training.lr": {"value": 0.5, "default": 0.001}}
    for text, expected in [('{"training.lr": {"value": 7, "default": 8}}', {"training.lr": {"value": 7, "default": 8}}),
                           ("{", None), ('{"training.lr": 7}', None), ('{"training.lr": {}}', None), ("null", None),
                           ('{"training.lr": {"value": NaN, "default": 1}}',
                            {"training.lr": {"value": None, "default": 1}})]:  # fmt: skip
        path.write_text(text)
        assert strictly(said(capsys, "runs", "--json", *shelf.flags))[0]["changed_settings"] == expected
        said(capsys, "runs", *shelf.flags)
        said(capsys, "show", "last", *shelf.flags)


def best_by_loss(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, float]]:
    found = strictly(said(capsys, "runs", "--best", "best_validation_loss", "--json", *shelf.flags))
    return [(one["dataset"], one["value"]) for one in found]


@pytest.fixture
def ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shelf:
    """Two finished runs that were ranked before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    shelf = Shelf(tmp_path)
    for number, loss in enumerate((0.5, 0.25)):
        shelf.put(number, shelf.resolved("gat", "normal"), {"best_validation_loss": loss})
    assert best_by_loss(shelf, capsys) == [("synthetic", 0.25), ("synthetic", 0.5)]
    return shelf


def test_a_ranking_reads_no_run_again_that_has_not_changed(ranked: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    memory = ranked.folder / "state" / "index" / "listed"
    found = recall(memory, _Remembered)
    assert found is not None
    for entry in found.runs.values():
        entry.scores = msgspec.Raw(bytes(entry.scores).replace(struct.pack(">d", 0.5), struct.pack(">d", 1.5)))
    remember(memory, found)
    assert best_by_loss(ranked, capsys) == [("synthetic", 0.25), ("synthetic", 1.5)]
    found.scored_by = "another version"
    remember(memory, found)
    assert best_by_loss(ranked, capsys) == [("synthetic", 0.25), ("synthetic", 0.5)]


def test_a_ranking_sees_what_has_changed(ranked: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = sorted((ranked.folder / "runs").iterdir())
    (older / "result.json").write_text(json.dumps({"best_validation_loss": 0.1}))
    assert best_by_loss(ranked, capsys) == [("synthetic", 0.1), ("synthetic", 0.25)]
    config = (newer / "config.yaml").read_text()
    (newer / "config.yaml").write_text(config.replace("name: synthetic\n", "name: another\n"))
    assert best_by_loss(ranked, capsys) == [("another", 0.25), ("synthetic", 0.1)]
    (newer / "result.json").write_text("damaged")
    assert best_by_loss(ranked, capsys) == [("synthetic", 0.1)]
    shutil.rmtree(older)
    assert "No run has finished yet" in said(capsys, "runs", "--best", "mcc", *ranked.flags, code=2)


def test_an_entry_that_another_person_has_closed_is_set_aside_and_ends_no_command(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, newer = runs.add(1, RESULT), runs.add(2, RESULT)
    shutil.rmtree(closed)
    entry = runs.state_dir / "runs" / closed.name
    close(entry, monkeypatch)
    assert main(["runs", *runs.flags]) == 0
    printed = capsys.readouterr()
    assert "0002" in printed.out
    assert printed.err.split() == ["note:", "set", "aside:", f"{entry}:", "Permission", "denied"]
    for command in (("show",), ("status",), ("tag",), ("note",), ("logs",)):
        words = ["best"] if command == ("tag",) else []
        assert main([*command, newer.name, *words, *runs.flags]) == 0
    runs.add(3)
    close(runs.state_dir / "runs" / runs.add(4).name, monkeypatch)
    assert main(["runs", "--json", *runs.flags]) == 0
    assert "; and 1 more" in capsys.readouterr().err


def test_tags_that_another_person_has_closed_end_no_list(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runs.add(1, RESULT)
    said(capsys, "tag", path.name, "best", *runs.flags)
    close(runs.state_dir / "labels", monkeypatch)
    assert "0001" in said(capsys, "runs", "--columns", "run,tags", *runs.flags)


def test_runs_are_known_by_their_folders_where_another_person_has_closed_the_registry(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runs.add(1, RESULT)
    close(runs.state_dir / "runs", monkeypatch)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(runs.state_dir))
    assert name_to_type(RunFolder(path)) == str(path)
    assert main(["runs", *runs.flags]) == 0
    printed = capsys.readouterr()
    assert "0001" in printed.out
    assert f"set aside: {runs.state_dir / 'runs'}: Permission denied" in " ".join(printed.err.split())
    assert "0001" in said(capsys, "show", str(path), "--json", *runs.flags)


@pytest.mark.parametrize("name", ["0001-0001", "20260101-000001", "FULL"])
def test_a_run_that_another_person_has_closed_is_told_by_the_list_and_by_its_name(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    closed = runs.add(1, RESULT, entered=False)
    runs.add(2, RESULT, sweep="sweep-lr-0001")
    (runs.runs_dir / "lost+found").mkdir()
    close(closed, monkeypatch)
    close(runs.runs_dir / "lost+found", monkeypatch)
    assert main(["runs", *runs.flags]) == 0
    assert capsys.readouterr().err.split() == ["note:", "set", "aside:", f"{closed}:", "Permission", "denied"]
    for command in ("show", "status", "resume"):
        message = said(capsys, command, closed.name if name == "FULL" else name, *runs.flags, code=2)
        assert f"error: The run cannot be read: {closed}: Permission denied." in message
    assert "0002" in said(capsys, "show", "last", *runs.flags)


def test_how_a_listed_run_ended_that_another_person_has_closed_is_not_known(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runs.add(1, RESULT)
    close(path.parent, monkeypatch)
    (run,) = json.loads(said(capsys, "runs", "--json", *runs.flags))
    assert (run["state"], run["certain"]) == ("failed", False)
    assert f"{path}/result.json cannot be read" in " ".join(said(capsys, "status", path.name, *runs.flags).split())


def test_a_folder_of_runs_that_another_person_has_closed_is_told(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.add(1, entered=False)
    close(runs.runs_dir, monkeypatch)
    assert main(["runs", *runs.flags]) == 0
    assert f"set aside: {runs.runs_dir}: Permission denied" in " ".join(capsys.readouterr().err.split())
