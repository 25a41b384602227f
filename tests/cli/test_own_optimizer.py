"""An optimizer of one's own, in a file: named on the command line, trained, submitted, resumed, trusted; and arguments
of any optimizer.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, from_plain, resolve, with_changes
from can_train.config.resolved import plain_from_yaml
from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError
from can_train.factors.store import memory_fingerprint
from can_train.runs.run_folder import RunFolder
from can_train.slurm.snapshot import code_of_runs, with_code
from fakes.own_tasks import write_task

SLOW = """
import torch
import rates


class Slow(torch.optim.SGD):
    def __init__(self, params, lr, share=rates.SHARE):
        super().__init__(params, lr * share)
"""
BUS = ("--model", "gat", "--dataset", "synthetic")
QUICK = ("--device", "cpu", "--epochs", "1", "--quiet")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a task and of an optimizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    folder = write_task(tmp_path / "mine").parent
    (folder / "my_slow.py").write_text(SLOW)
    (folder / "rates.py").write_text("SHARE = 0.5\n")
    return folder


def only_run(folder: Path) -> RunFolder:
    (run,) = (folder / "runs").iterdir()
    return RunFolder(run)


def resolved(**values: Any) -> Any:
    return resolve(RunRequest(model="gat", dataset="synthetic", values=values))


def test_a_class_beside_the_task_trains_and_a_run_of_it_goes_on(code: Path, tmp_path: Path, capsys: Any) -> None:
    line = ("--task", "mine/my_file.py:MyTask", "--optimizer", "mine/my_slow.py:Slow", *QUICK)
    assert main((*line, "--optimizer-args", "share=0.25")) == 0, capsys.readouterr().err
    config = only_run(tmp_path).config()
    assert config["training"]["optimizer"] == "my_slow.py:Slow"
    assert config["training"]["optimizer_args"] == {"share": 0.25}
    assert config["paths"]["code_dir"] == str(code)
    assert main(("resume", "last", "--epochs", "2")) == 0, capsys.readouterr().err
    (code / "my_slow.py").unlink()
    assert main(("resume", "last", "--epochs", "3")) == 2
    assert "There is no such file beside the task: 'my_slow.py'" in capsys.readouterr().err


def test_it_trains_an_installed_task_and_its_folder_travels_with_a_job(code: Path, tmp_path: Path) -> None:
    plain, run = resolved(), resolved(**{"training.optimizer": "mine/my_slow.py:Slow"})
    assert (run.training.optimizer, run.paths.code_dir) == ("my_slow.py:Slow", str(code))
    snapshot = code_of_runs([plain, run])
    assert {"task/my_slow.py", "task/rates.py"} <= snapshot.files.keys()
    in_job = from_plain(with_code(run, snapshot, tmp_path / "state").config)
    assert in_job.training.optimizer == "my_slow.py:Slow"
    assert in_job.paths.code_dir == str(snapshot.folder(tmp_path / "state") / "task")
    # A run like it has the file in the same place, and one of an installed optimizer needs no folder.
    assert with_changes(run.config, (), {"training.optimizer": "my_slow.py:Slow"}).paths.code_dir == str(code)
    assert with_changes(run.config, (), {"training.optimizer": "sgd"}).paths.code_dir == ""
    assert code_of_runs([plain]).digest != snapshot.digest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--optimizer", "mine/my_slwo.py:Slow"), "There is no such file: "),
        (("--task", "mine/my_file.py:MyTask", "--optimizer", "other/my_slow.py:Slow"), "lie in one folder"),
        (("--set", "training.optimizer=mine/my_slow.py:Slow,other/my_slow.py:Slow"), "have their code from one folder"),
        (("--optimizer", "mine/my_slow.py:Slwo"), "Unknown class of my_slow.py: 'Slwo'"),
        (("--optimizer", "rmsprob"), "Unknown value of --optimizer: 'rmsprob'"),
        (("--optimizer", "LBFGS"), "--optimizer cannot be LBFGS: it computes the loss several times"),
        (("--optimizer-args", "momentum"), "cannot be read"),
        (("--optimizer-args", "momentun=0.5", "--optimizer", "sgd"), "Unknown argument of SGD: 'momentun'"),
        (("--scheduler", "sinus"), "Unknown value of"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_anything_is_written(
    code: Path, tmp_path: Path, capsys: Any, words: tuple[str, ...], message: str
) -> None:
    shutil.copytree(code, tmp_path / "other")
    base = () if "--task" in words else BUS
    assert main((*base, *words, "--device", "cpu", "--dry-run")) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("optimizer", ["my_slow.py:Slow", "rates.Slow"])
def test_the_code_of_strangers_does_not_run_unasked(
    code: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    assert main((*BUS, "--set", "dataset.synthetic.seconds=5", *QUICK, "--set", "mode.baselines=false")) == 0
    folder = only_run(tmp_path)
    (code / "rates.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'MARK')!r}).touch()\n")
    config = folder.config()
    config["training"]["optimizer"] = optimizer
    config["paths"]["code_dir"] = str(code) if ".py" in optimizer else ""
    (folder.path / "config.yaml").write_text(json.dumps(config))
    # In the list of runs of another user it is unknown.
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "other"))
    capsys.readouterr()
    assert main(("resume", str(folder.path), "--epochs", "2", "--here")) == 2
    assert f"it names {optimizer}" in " ".join(capsys.readouterr().err.split())
    assert main(("show", str(folder.path))) == 0
    assert not (tmp_path / "MARK").exists()


def test_arguments_come_from_flags_settings_and_presets(tmp_path: Path) -> None:
    def of(*sets: str, **values: Any) -> dict[str, Any]:
        request = RunRequest(model="gat", dataset="synthetic", sets=sets, values=values, memory="mine",
                             config_dir=str(tmp_path))  # fmt: skip
        run = resolve(request)
        assert from_plain(plain_from_yaml(json.dumps(run.config))).config == run.config
        return dict(run.training.optimizer_args)

    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "mine.yaml").write_text("optimizer: sgd\noptimizer_args: {momentum: 0.5}\n")
    assert of() == {"momentum": 0.5}
    assert of("training.optimizer_args.nesterov=true") == {"momentum": 0.5, "nesterov": True}
    assert of("training.optimizer_args={momentum:0.25,dampening:0}") == {"momentum": 0.25, "dampening": 0}
    assert of(**{"training.optimizer_args": "momentum=0.75,nesterov=true"}) == {"momentum": 0.75, "nesterov": True}
    with pytest.raises(ConfigError, match="optimizer_args must be settings"):
        of("training.optimizer_args=5")


def test_runs_with_other_arguments_learn_apart_and_runs_without_learn_as_before() -> None:
    plain, other = resolved(), resolved(**{"training.optimizer_args": "amsgrad=true"})
    assert "optimizer_args" not in memory_fingerprint(plain)
    assert memory_fingerprint(other) == {**memory_fingerprint(plain), "optimizer_args": {"amsgrad": True}}
    assert TrainingSettings(optimizer="RMSprop").optimizer == TrainingSettings(optimizer="rmsprop").optimizer
