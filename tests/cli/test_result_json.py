"""`--json` on a line that trains: standard output has the result and nothing else, however the run ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from can_train.cli.main import main
from can_train.cli.output import Verbosity
from can_train.cli.train import RunPrinter
from can_train.errors import CanTrainError
from can_train.runs.run_folder import RunFolder
from fakes.finished_runs import Shelf
from fakes.trained_runs import bus_log

TRAIN = ("--model", "gat", "--size", "student", "--model-args", "hidden=4,layers=1,heads=1", "--epochs", "1",
         "--batch-size", "32", "--set", "dataset.window=20", "--device", "sim:64MiB", "--json")  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *line: str, code: int = 0) -> tuple[Any, str]:
    """Gives a line; returns what it prints on standard output, as JSON, and on standard error."""
    assert main(line) == code
    output = capsys.readouterr()
    return json.loads(output.out), output.err


@pytest.mark.slow
def test_the_result_of_a_training_is_an_object_and_of_a_sweep_a_list(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (*TRAIN, "--dataset", str(bus_log(here / "drive.csv")))
    run, err = printed(capsys, *line)
    assert "How well the model finds attacks" in err
    assert [run[name] for name in ("state", "dataset", "device", "size")] == [
        "finished", "drive", "sim-64mib", "student",
    ]  # fmt: skip
    assert Path(run["path"], "result.json").is_file()
    assert run["seconds"] > 0
    assert run["score"]["value"] == run["scores"]["test"]["drive.csv"]["model"]["mcc"]
    assert run["plan"]["plan"]["logical_batch"] == 32
    assert 0 < run["memory"]["peak_bytes"] <= 64 * 2**20
    assert run["memory"]["predicted_peak_bytes"] > 0
    assert run["safety_factor"] == run["plan"]["plan"]["safety_factor"]
    shown, _ = printed(capsys, "show", run["run_id"], "--json")
    assert shown == run
    again, _ = printed(capsys, "resume", run["run_id"], "--json", "-q")
    assert again == run
    runs, err = printed(capsys, *line, "-q", "--set", "training.lr=0.01,1e30", code=3)
    assert [one["state"] for one in runs] == ["finished", "failed"]
    assert runs[1]["error"]["exit_code"] == 3
    assert runs[1]["error"]["rule"] == "The loss is no longer finite"
    assert "error: The loss is no longer finite" in err


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (
            (*TRAIN, "--dataset", "nowhere/x.csv"),
            "--dataset names no file or folder that exists",
        ),
        ((*TRAIN, "--dataset", "synthetic", "--epochs", "0"), "--epochs must be at least 1"),
        (("show", "nothing", "--json"), "There is no such run"),
        (("runs", "--json", "--limt", "3"), "Unknown flag"),
    ],
)
def test_what_is_refused_is_an_error_in_json_too(
    here: Path, capsys: pytest.CaptureFixture[str], line: tuple[str, ...], rule: str
) -> None:
    found, err = printed(capsys, *line, code=2)
    assert found["error"].keys() == {"rule", "value", "remedy", "exit_code"}
    assert (found["error"]["rule"], found["error"]["exit_code"]) == (rule, 2)
    assert err.startswith(f"error: {rule}")


def stopped(error: BaseException) -> Callable[[], None]:
    def attempt() -> None:
        raise error

    return attempt


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    shelf = Shelf(tmp_path)
    return shelf.put(1, shelf.resolved("gat", "normal"), None)


def test_a_quiet_training_that_is_stopped_says_how_it_goes_on(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = RunPrinter(Verbosity.QUIET, as_json=False)
    with pytest.raises(SystemExit), printer:
        printer.print(stopped(SystemExit(130)), folder)
    output = capsys.readouterr()
    assert output.out == ""
    assert f"can-train resume {folder.path}\n" in output.err


@pytest.mark.parametrize("error", [SystemExit(130), CanTrainError("a rule", remedy="")])
def test_a_training_that_ends_early_prints_its_object_once(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    printer = RunPrinter(Verbosity.NORMAL, as_json=True)
    with pytest.raises(type(error)), printer:
        printer.print(stopped(error), folder)
    found = json.loads(capsys.readouterr().out)
    assert found["run_id"] == folder.run_id
    assert found.get("error") == (error.to_plain() if isinstance(error, CanTrainError) else None)
    assert getattr(error, "in_json", True)
