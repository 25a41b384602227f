"""The methods of a task that docs/tasks.md shows by themselves, each in a training."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.cli.main import main
from can_train.task import BatchTask
from can_train.training.loading import Checkpoints
from can_train.training.train import make_session, train
from fakes.line_fit import fixed, line_parts
from fakes.sample_tasks import TwoPhases

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def snippet(name: str) -> str:
    """Returns the code that shows a class or a file."""
    (code,) = [code for code in SNIPPETS if f"class {name}(" in code]
    return code


def trained(folder: Path, name: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Trains the digits of the page with the methods of a class; returns the result."""
    (folder / "digits.py").write_text(snippet("Digits"))
    mixed = f"\n\nfrom digits import Digits\n\n\nclass Trained({name}, Digits):\n    pass\n"
    (folder / "trained.py").write_text(snippet(name) + mixed)
    assert main(("--task", "trained.py:Trained", "--device", "cpu", "--epochs", "2", "--json", *words)) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    return tmp_path


def state_of(folder: Path) -> dict[str, Any]:
    (checkpoints,) = folder.glob("runs/*/checkpoints")
    state = Checkpoints(checkpoints).newest()
    assert state is not None
    return state


def test_a_running_mean_of_the_weights_lags_behind_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(folder, "Smoothed", capsys)
    (judged,) = folder.glob("runs/*/result.json")
    weights = state_of(folder)["model"]
    mean, weight = weights["mean_0_weight"], weights["model.0.weight"]
    start = (mean - weight).norm() / weight.norm()
    assert 0.01 < float(start) < 1.0
    assert json.loads(judged.read_text())["judgement"]["test"]["test"]["model"]["accuracy"] > 0.5


def test_the_running_mean_is_what_is_evaluated() -> None:
    names: dict[str, Any] = {}
    exec(snippet("Smoothed"), names)
    layer = torch.nn.Linear(3, 2)
    model, x = names["Averaged"](layer, decay=0.5), torch.ones(1, 3)
    at_first = layer(x)
    with torch.no_grad():
        layer.weight.add_(1.0)
        layer.bias.add_(1.0)
    model.update()
    torch.testing.assert_close(model.eval()(x), at_first + 2.0)
    torch.testing.assert_close(model.train()(x), at_first + 4.0)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_curriculum_has_more_samples_in_each_epoch(
    folder: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    result = trained(folder, "Curriculum", capsys, "--batch-size", "100", "--num-workers", workers)
    assert result["steps"] == 900 // 100 + 1200 // 100


def test_a_schedule_in_waves_is_trained_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(folder, "Waves", capsys, "--lr", "0.01", "--batch-size", "100")
    scheduler = state_of(folder)["optimization"][0]["scheduler"]
    assert scheduler["last_epoch"] == 24
    assert scheduler["_last_lr"] == pytest.approx([0.01])


def test_phases_are_trained_as_they_are_shown(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(snippet("Adversarial"), names)
    task: BatchTask = type("Trained", (names["Adversarial"], TwoPhases), {})()
    parts = line_parts(tmp_path, task, batch_size=16, find_batch_size="off")  # type: ignore[arg-type]
    session = make_session(parts, fixed(0.5))
    train(session)
    assert [engine.optimization.scheduler.last_epoch for engine in session.engines] == [18, 6]
