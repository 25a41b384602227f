"""How a task is found by its name, what its settings may be called, and what is said where its packages lack."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.errors import ConfigError
from fakes.own_tasks import CLASSIFIER

OWN = CLASSIFIER.replace("from helpers import WIDTH", "WIDTH = 16")
PLAN = ("--device", "cpu", "--dry-run", "--show-config", "--json")


def test_a_training_setting_may_mean_another_one_with_a_task() -> None:
    aliased = resolve(RunRequest(task="muon", dataset="synthetic", values={"training.gradient_accumulation_steps": 4}))
    by_set = resolve(
        RunRequest(task="muon", dataset="synthetic", sets=("training.gradient_accumulation_steps=4",)),
    )
    plain = resolve(RunRequest(task="muon", dataset="synthetic"))
    for run in (aliased, by_set):
        assert run.training.accumulation_splits == "4"
        assert run.training.gradient_accumulation_steps == plain.training.gradient_accumulation_steps
    other = resolve(RunRequest(task="tracknet", dataset="synthetic",
                               values={"training.gradient_accumulation_steps": 4}))  # fmt: skip
    assert other.training.gradient_accumulation_steps == 4


def test_both_names_of_a_setting_with_different_values_contradict_each_other() -> None:
    values = {"training.gradient_accumulation_steps": 4, "training.accumulation_splits": 2}
    with pytest.raises(ConfigError, match="gradient-accumulation-steps"):
        resolve(RunRequest(task="muon", dataset="synthetic", values=values))


def test_a_package_names_its_tasks_by_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = tmp_path / "site" / "own_single_point-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-single-point\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[can_train.tasks]\npoints = own_single_point:MyTask\n")
    (about.parent / "own_single_point.py").write_text(OWN)
    monkeypatch.syspath_prepend(about.parent)
    monkeypatch.chdir(tmp_path)
    assert main(("--task", "points", *PLAN)) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["task"], config["training"]["lr_batch_size"]) == ("points", 32)
    assert main(("--task", "pionts", *PLAN)) == 2
    assert "Nearest of 6: points" in " ".join(capsys.readouterr().err.split())


def test_a_module_is_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    (tmp_path / "own_package" / "inside.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(("--task", "own_package.inside:MyTask", *PLAN, "--set", "model.hidden=8")) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["settings"], config["paths"]["code_dir"]) == ({"hidden": 8}, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "package", "words"),
    [
        ("can", "polars", ("--model", "gat", "--dataset", "synthetic")),
        ("muon", "polars", ("--dataset", "synthetic")),
        ("tracknet", "PIL", ("--dataset", "synthetic")),
    ],
)
def test_a_package_that_a_task_lacks_is_named_with_its_extra(
    tmp_path: Path, task: str, package: str, words: tuple[str, ...]
) -> None:
    blocked = f"import sys; sys.modules[{package!r}] = None; from can_train.cli.main import main; "
    blocked += "sys.exit(main(sys.argv[1:]))"
    line = ("--task", task, *words, "--device", "cpu", "--state-dir", str(tmp_path / "state"))
    done = subprocess.run([sys.executable, "-c", blocked, *line], cwd=tmp_path, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"pip install 'can-train[{task}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
