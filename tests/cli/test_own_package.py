"""A package of one's own declares a task with presets beside it, options of `evaluate`, and a command: each works as
those that come with can-train.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from can_train.cli.main import main
from fakes.own_tasks import CLASSIFIER

SETTINGS = """
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from can_train.config.task_settings import DatasetSettings, TaskSettings


@dataclass(frozen=True, kw_only=True)
class Options:
    chance: Annotated[float, typer.Option(help="Accuracy of guessing.", metavar="SHARE")] = 0.5
    upside_down: bool = False

    def __post_init__(self):
        if not 0 <= self.chance <= 1:
            from can_train.errors import ConfigError

            raise ConfigError("--chance is a share", value=str(self.chance))


TASK = TaskSettings(task_class="own_points.task:MyTask", evaluation="own_points.settings:Options",
                    dataset=DatasetSettings, training={"lr": 0.01, "lr_batch_size": 32, "epochs": 1},
                    configs=str(Path(__file__).parent / "configs"))
"""
TASK = (
    CLASSIFIER.replace("from helpers import WIDTH", "WIDTH = 16").replace("self.settings.hidden", "8")
    + """
    def baselines(self, samples):
        chance = self.context.evaluation.chance
        return {"guessing": {"accuracy": 1 - chance if self.context.evaluation.upside_down else chance}}
"""
)
COMMAND = '''
from can_train.cli.output import print_text
from can_train.cli.run_locator import Run, RunLocator, RunsDir, StateDir


def weigh(run: Run, *, twice: bool = False, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Count the parameters of a finished run.

    They are counted with all of their copies.
    """
    from can_train.training.loading import load_finished

    weights = load_finished(RunLocator(runs_dir, state_dir).find(run).folder.path).weights
    print_text(f"{sum(value.numel() for value in weights.values()) * (2 if twice else 1)} parameters")
'''
PRESET = "# @package _global_\ndefaults: [schema@dataset, _self_]\ndataset: {name: small}\ntraining: {seed: 7}\n"
OPTIONS_IN_CLASS = """
    @dataclass(frozen=True, kw_only=True)
    class EvaluationSettings:
        chance: float = 0.5
        upside_down: bool = False
"""

Said = Callable[..., str]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Installs the package; returns a function that gives a line, and returns standard output or the error."""
    site = tmp_path / "site"
    files = {
        "own_points-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-points\nVersion: 1.0\n",
        "own_points-1.0.dist-info/entry_points.txt": "[can_train.tasks]\npoints = own_points.settings:TASK\n"
        "[can_train.commands]\nweigh = own_points.commands:weigh\nruns = own_points.commands:weigh\n"
        "vanish = own_points.gone:vanish\n",
        "own_points/__init__.py": "",
        "own_points/settings.py": SETTINGS,
        "own_points/task.py": TASK,
        "own_points/commands.py": COMMAND,
        "own_points/configs/dataset/small.yaml": PRESET,
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_points"]:
        monkeypatch.delitem(sys.modules, name)

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(words) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        return " ".join((captured.err if code else captured.out).split()) if "--json" not in words else captured.out

    return run


def guessed(document: str) -> float:
    return float(json.loads(document)["judgement"]["test"]["test"]["baselines"]["guessing"]["accuracy"])


def test_its_task_its_presets_its_options_and_its_command_are_used_as_the_builtin_ones(said: Said) -> None:
    result = json.loads(said("--task", "points", "--dataset", "small", "--device", "cpu", "--json"))
    assert result["state"] == "finished"
    (folder,) = Path("runs").iterdir()
    assert "seed: 7" in (folder / "config.yaml").read_text()
    assert guessed(said("evaluate", "last", "--json")) == 0.5
    assert guessed(said("evaluate", "--chance", "0.25", "--upside-down", "last", "--json")) == 0.75
    assert "--chance is a share: 2.0" in said("evaluate", "last", "--chance", "2", code=2)
    unknown = said("evaluate", "last", "--threshold", "1", code=2)
    assert unknown.startswith("error: Unknown flag: --threshold")
    text = said("evaluate", "last", "--help")
    assert "--chance SHARE Accuracy of guessing." in text
    assert "--calibrate" not in text
    assert said("complete-line", "zsh", "evaluate", "last", "--ch").startswith("--chance")
    assert said("weigh", "last") == "154 parameters"
    assert said("weigh", "last", "--twice") == "308 parameters"


def test_its_command_is_listed_and_completed_and_none_of_its_code_runs_for_that(said: Said) -> None:
    assert "weigh RUN count the parameters of a finished run -h is short" in said("--help")
    assert said("complete-line", "zsh", "wei").startswith("weigh")
    assert "own_points.commands" not in sys.modules
    assert "Nearest of " in (text := said("wiegh", "last", code=2))
    assert "weigh" in text
    assert "They are counted with all of their copies." in said("weigh", "--help")
    assert "Unknown flag: --twise. Nearest: --twice" in said("weigh", "last", "--twise", code=2)


def test_a_command_of_can_train_is_not_replaced_by_a_package(said: Said) -> None:
    assert said("runs", "--help").startswith("Usage: can-train runs [OPTIONS]")
    assert "by data set" in said("--help")


def test_a_command_whose_module_is_gone_leaves_help_as_it_is(said: Said) -> None:
    assert "vanish" in said("--help")
    with pytest.raises(ModuleNotFoundError, match=r"own_points\.gone"):
        main(("vanish",))


def test_the_class_of_a_task_in_a_file_may_bring_options_too(said: Said, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK + OPTIONS_IN_CLASS)
    line = ("--task", "mine.py:MyTask", "--device", "cpu", "--epochs", "1", "--json")
    assert json.loads(said(*line))["state"] == "finished"
    assert guessed(said("evaluate", "last", "--json")) == 0.5
    assert guessed(said("evaluate", "last", "--chance", "0.125", "--json")) == 0.125
    assert said("evaluate", "last", "--hold", "2/3", code=2).startswith("error: Unknown flag: --hold")
    assert "--chance" in said("evaluate", "last", "--help")


def test_an_option_of_a_task_has_a_name_that_no_other_option_has(said: Said, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text((TASK + OPTIONS_IN_CLASS).replace("upside_down", "device"))
    said("--task", "mine.py:MyTask", "--device", "cpu", "--epochs", "1", "--json")
    assert "redefines an option of every evaluation: device" in said("evaluate", "last", "--chance", "1", code=2)
