"""A sweep is named where a run is: its states, failures by cause and node, its logs, and its runs one and all."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.resolved import ResolvedRun
from can_train.runs.attempts import AttemptEnd
from can_train.runs.sweep_runs import describe_sweep, failures_by_cause, failures_by_node
from fakes.finished_runs import Shelf
from fakes.made_runs import RESULT, Runs, at, begin, close, end, write

SWEEP = "sweep-lr-0001"


def said(capsys: pytest.CaptureFixture[str], *line: str, code: int = 0) -> str:
    assert main(line) == code
    captured = capsys.readouterr()
    return captured.out + captured.err if code == 0 else captured.err


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Six runs of a sweep: one finished on n2, four failed on n1 of two causes, one was cancelled."""
    monkeypatch.setenv("PATH", str(tmp_path))
    runs = Runs(tmp_path)
    for number in range(6):
        path = runs.add(number, RESULT if number == 0 else None, sweep=SWEEP, label=f"lr=0.{number}")
        begin(path, host="n2" if number == 0 else "n1")
        message = f"CUDA error: uncorrectable ECC error at 0x{number}" if number < 4 else "No space left on device"
        if number == 5:
            end(path, "interrupted")
        elif number:
            end_on(path, "failed", "n1", message)
        (path / "log.txt").write_text(f"line of {number}\n\x1b]0;x\x07{message}\n")
    return runs


def trained_lines(monkeypatch: pytest.MonkeyPatch, statuses: Sequence[int]) -> list[list[str]]:
    """The lines that `resume` trains in child processes, which end with these statuses; 130: a person stops them."""
    lines, left = list[list[str]](), [*statuses]

    def train(line: list[str], _output: object) -> tuple[int, bool]:
        lines.append(line)
        status = left.pop(0)
        return status, status == 130

    monkeypatch.setattr("can_train.slurm.submit.run_line", train)
    return lines


def end_on(path: Path, ending: str, host: str, message: str) -> None:
    record = AttemptEnd(attempt=1, ending=ending, message=message, details={}, time=at(40), host=host)
    write(path, "0001-ended.json", vars(record))


def test_the_status_of_a_sweep_has_its_failures_by_cause_and_by_node_and_the_line_that_goes_on(
    sweep: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(capsys, "status", SWEEP, *sweep.flags)
    assert "6 runs: 4 failed, 1 finished, 1 cancelled" in shown
    assert "uncorrectable ECC error" in shown
    assert f"can-train resume {SWEEP} --all-failed" in shown
    assert max(map(len, shown.splitlines())) <= 80
    found = json.loads(said(capsys, "status", "lr-0001", "--json", *sweep.flags))
    assert [(len(cause["run_ids"]), cause["nodes"]) for cause in found["failures"]] == [(3, {"n1": 3}), (1, {"n1": 1})]
    assert found["nodes"] == [{"node": "n1", "failed": 4, "finished": 0}]


def test_errors_that_differ_in_numbers_and_paths_are_one_cause(sweep: Runs) -> None:
    statuses = sweep.look()
    assert [len(cause.runs) for cause in failures_by_cause(statuses)] == [3, 1]
    assert failures_by_node(statuses)[0].failed == 4


def test_each_command_takes_a_sweep(sweep: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "logs", SWEEP, *sweep.flags)
    assert "lr=0.4: failed: No space left on device" in shown
    assert shown.count("line of") == 6
    assert "\x1b]0" not in shown
    assert "goes with a single run" in said(capsys, "logs", SWEEP, "-f", *sweep.flags, code=2)
    assert "the best first" in said(capsys, "show", SWEEP, *sweep.flags)
    assert "goes with a single run" in said(capsys, "show", SWEEP, "--config", *sweep.flags, code=2)
    assert said(capsys, "cancel", SWEEP, *sweep.flags).count("has ended already") == 6
    assert SWEEP in said(capsys, "status", "0001-0001", *sweep.flags)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("resume", SWEEP, "--epochs", "9"), "--epochs goes with a single run"),
        (("resume",), "RUN is missing"),
        (("resume", "0000-0000", "000000"), "can go on"),
        (("status", "sweep-lr-0002"), "There is no such run"),
    ],
)
def test_a_wrong_line_about_a_sweep_is_answered(
    sweep: Runs, capsys: pytest.CaptureFixture[str], line: tuple[str, ...], message: str
) -> None:
    assert message in said(capsys, *line, *sweep.flags, code=2)


@pytest.mark.parametrize(("statuses", "code", "trained"), [((0, 3, 0, 0), 3, 4), ((0, 130), 130, 2)])
def test_runs_without_a_job_go_on_here_one_after_another(
    sweep: Runs,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    statuses: tuple[int, ...],
    code: int,
    trained: int,
) -> None:
    lines = trained_lines(monkeypatch, statuses)
    assert main(("resume", SWEEP, "--all-failed", *sweep.flags)) == code
    assert "Run 1 of 4: 20260101-000001-synthetic_gat_student_normal-0001 lr=0.1\n" in capsys.readouterr().err
    assert [Path(line[1]).name[-1] for line in lines] == [*"1234"][:trained]
    assert lines[0][2:] == ["--here", *sweep.flags]


@pytest.mark.parametrize(("diverged", "code", "trained"), [((1, 2), 0, "34"), ((1, 2, 3, 4), 2, "")])
def test_runs_that_diverged_are_left_out_since_they_would_again(
    sweep: Runs,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    diverged: tuple[int, ...],
    code: int,
    trained: str,
) -> None:
    for number in diverged:
        path = next(sweep.runs_dir.glob(f"*-{number:04}"))
        record = AttemptEnd(attempt=1, ending="failed", message="The loss is not finite any more",
                            details={"lower_lr": 0.001}, time=at(40), host="n1")  # fmt: skip
        write(path, "0001-ended.json", vars(record))
    lines = trained_lines(monkeypatch, [0] * 4)
    shown = said(capsys, "status", SWEEP, *sweep.flags)
    assert (f"can-train resume {SWEEP} --all-failed" in shown) is bool(trained)
    remedy = f"can-train resubmit {next(sweep.runs_dir.glob('*-0001'))} --lr 0.001"
    assert remedy in shown
    assert main(("resume", SWEEP, "--all-failed", *sweep.flags)) == code
    assert remedy in capsys.readouterr().err
    assert [Path(line[1]).name[-1] for line in lines] == [*trained]


def test_a_run_that_another_person_has_closed_is_left_out_and_the_others_go_on(
    sweep: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = trained_lines(monkeypatch, [0] * 4)
    closed = next(sweep.runs_dir.glob("*-0001"))
    close(closed, monkeypatch)
    assert main(("resume", SWEEP, "--all-failed", *sweep.flags)) == 0
    assert [Path(line[1]).name[-1] for line in lines] == [*"234"]
    assert f"resume {closed}" not in said(capsys, "status", closed.name, *sweep.flags)


def test_a_sweep_is_named_by_what_varies_and_its_runs_by_their_values(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    runs = [shelf.resolved("gat", "normal", sets=(f"training.lr={lr}", f"training.seed={seed}"))
            for lr in ("0.1", "0.01") for seed in (0, 1)]  # fmt: skip
    places = describe_sweep([run.config for run in runs])
    assert {place.name[:-5] for place in places} == {"sweep-lr-seed"}
    assert [place.label for place in places] == ["lr=0.1 seed=0", "lr=0.1 seed=1", "lr=0.01 seed=0", "lr=0.01 seed=1"]
    models = [shelf.resolved("gat", "normal"), shelf.resolved("vgae", "autoencoder")]
    assert describe_sweep([run.config for run in models])[1].label.startswith("model=vgae mode=autoencoder")
    assert describe_sweep([runs[0].config] * 2)[0].name.startswith("sweep-repeats-")


def test_a_sweep_is_resubmitted_with_a_change_as_a_new_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shelf = Shelf(tmp_path)
    for number, rate in enumerate(("0.1", "0.01")):
        run = shelf.put(number, shelf.resolved("gat", "normal", sets=(f"training.lr={rate}",)))
        entry = tmp_path / "state" / "runs" / run.run_id / "run.json"
        entry.write_text(json.dumps({**json.loads(entry.read_text()), "sweep": SWEEP}))
    monkeypatch.setattr("can_train.cli.train.start_runs", lambda runs, flags, after: started.extend(runs))
    started: list[ResolvedRun] = []
    assert main(["resubmit", SWEEP, "--epochs", "9", *shelf.flags]) == 0
    assert [(run.training.lr, run.training.epochs) for run in started] == [(0.1, 9), (0.01, 9)]
