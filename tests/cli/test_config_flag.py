"""`can-train show RUN --config` and `can-train --config FILE`: a run as a file, which flags change."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.runs.run_folder import RunFolder
from fakes.own_tasks import write_task

Printed = Callable[..., str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of one's own and a finished run of it."""
    folder = tmp_path_factory.mktemp("file")
    task = write_task(folder)
    line = ["--task", f"{task}:MyTask", "--device", "cpu", "--epochs", "1", "--set", "task.hidden=8", "--quiet",
            "--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]  # fmt: skip
    assert main(line) == 0
    return folder


@pytest.fixture
def printed(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Printed:
    """Runs a line in the folder; returns its output, or the text of its error."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(place / "state"))

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(words) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return err if code else out

    return run


def newest(place: Path) -> RunFolder:
    return RunFolder(max((place / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns))


def test_a_run_of_a_file_has_the_same_settings_and_weights(printed: Printed, place: Path) -> None:
    first = newest(place)
    (place / "run.yaml").write_text(printed("show", first.run_id, "--config"))
    printed("--config", "run.yaml", "-q")
    second = newest(place)
    assert second.run_id != first.run_id
    assert second.config() == first.config()
    results = [run.result() or {} for run in (first, second)]
    assert results[0]["best_validation_loss"] == results[1]["best_validation_loss"]
    assert printed("show", second.run_id, "--config") == (place / "run.yaml").read_text()
    assert json.loads(printed("show", second.run_id, "--config", "--json")) == second.config()


def test_flags_change_the_run_of_a_file_and_sweep_it(printed: Printed, place: Path) -> None:
    (place / "run.yaml").write_text(printed("show", "last", "--config"))
    line = ("--config", "run.yaml", "--seed", "7", "--dry-run", "--json")
    config = json.loads(printed(*line))["config"]
    before = newest(place).config()
    assert config["training"]["seed"] == 7
    assert {**config, "training": {**config["training"], "seed": before["training"]["seed"]}} == before
    swept = json.loads(printed(*line, "--set", "task.hidden=4,16", "--device", "sim:64MiB"))
    assert [plan["config"]["settings"]["hidden"] for plan in swept] == [4, 16]
    assert {plan["config"]["device"] for plan in swept} == {"sim:64MiB"}


def test_a_persons_own_defaults_stay_out(
    printed: Printed, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text("runs_dir: elsewhere\ndata_root: elsewhere\n")
    (place / "run.yaml").write_text(printed("show", "last", "--config"))
    expected = newest(place).config()
    monkeypatch.setenv("CAN_TRAIN_CONFIG", str(tmp_path / "own.yaml"))
    assert json.loads(printed("--config", "run.yaml", "--dry-run", "--json"))["config"] == expected


def test_standard_input_is_a_file_too(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed("show", "last", "--config")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert json.loads(printed("--config", "-", "--dry-run", "--json"))["config"]["settings"]["hidden"] == 8
    monkeypatch.setattr("sys.stdin", io.StringIO(text.replace("  hidden:", "  hiden:")))
    assert "standard input line 6: Unknown setting: 'task.hiden'.\nNearest: task.hidden" in printed(
        "--config", "-", "--dry-run", code=2
    )


def test_a_file_that_is_not_there_is_named(printed: Printed) -> None:
    assert "The file of --config cannot be read: none.yaml: No such file" in printed("--config", "none.yaml", code=2)


def test_the_options_are_those_of_the_task_in_the_file(printed: Printed, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("task: bendr\ndataset:\n  name: synthetic\nmode:\n  name: classify\n")
    assert "--pretrained" in printed("--config", str(tmp_path / "run.yaml"), "--help-all")
    assert "no such run" in printed("--config", str(tmp_path / "run.yaml"), "--pretrained", "none", code=2).lower()


def test_explain_takes_the_device_of_a_file_unless_a_flag_names_another(place: Path, printed: Printed) -> None:
    text = printed("show", newest(place).run_id, "--config").replace("device: cpu", "device: sim:64MiB")
    (place / "small.yaml").write_text(text)
    line = ("explain", "--config", "small.yaml", "--no-changes", "--json", "-q")
    devices = [json.loads(printed(*line, *words))["device"] for words in ((), ("--device", "sim:1GiB"))]
    assert devices == ["sim-64mib", "sim-1gib"]
