"""The methods of a task that docs/tasks.md shows by themselves, each in a training."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.task import BatchTask
from can_train.training.loading import Checkpoints
from can_train.training.train import make_session, train
from can_train_tasks.seq2seq.pair_tables import Pair
from can_train_tasks.seq2seq.scoring import score
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
    bases = dict.fromkeys((name, "Digits"))
    mixed = f"\n\nfrom digits import Digits\n\n\nclass Trained({', '.join(bases)}):\n    pass\n"
    file = folder / f"trained_{name.lower()}.py"  # A file that was imported is not imported again
    file.write_text(snippet(name) + mixed)
    assert main(("--task", f"{file.name}:Trained", "--device", "cpu", "--epochs", "2", "--json", *words)) == 0
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


def test_noise_is_the_same_however_the_batch_is_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trained(folder, "Digits", capsys, "--batch-size", "100")
    losses = [trained(folder, "Denoised", capsys, "--batch-size", "100", *words)["best_validation_loss"]
              for words in ((), ("--accumulation-splits", "4"))]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != pytest.approx(plain["best_validation_loss"], rel=1e-4)


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


def test_a_network_on_the_data_of_a_built_in_task_is_trained_scored_and_predicts(folder: Path) -> None:
    (folder / "my_gru.py").write_text(snippet("GRU"))
    line = ("--task", "my_gru.py:GRU", "--dataset", "synthetic", "--set", "dataset.synthetic.words=200",
            "--set", "model.hidden=24", "--set", "task.beam_width=3", "--epochs", "4", "--lr", "0.01",
            "--batch-size", "8", "--device", "cpu")  # fmt: skip
    assert main((*line, "--quiet")) == 0
    (judged,) = folder.glob("runs/*/result.json")
    scores = json.loads(judged.read_text())["judgement"]["test"]["test"]
    assert {*scores["baselines"]} == {"copy of the source", "most frequent suffix rule"}
    assert scores["model"]["character_error_rate"] < 0.9
    (table,) = (folder / "state").rglob("synthetic.test.tsv")
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    (folder / "bare.tsv").write_text("".join(f"{source}\t{features}\n" for source, _, features in rows))
    words = ("--set", "task.n_best=2", "--out", "written.csv", "--device", "cpu", "--quiet")
    assert main(("predict", "last", "--dataset", "./bare.tsv", *words)) == 0
    written = list(csv.DictReader((folder / "written.csv").read_text().splitlines()))
    assert [row["rank"] for row in written] == ["1", "2"] * len(rows)
    truth = [Pair(source=(), target=tuple(target)) for _, target, _ in rows]
    scored = score(truth, [tuple(row["prediction"]) for row in written[::2]])
    assert scored == {name: scores["model"][name] for name in scored}
    assert main(("export", "last", "gru.pt2")) == 0


def test_a_class_has_what_the_built_in_task_has_that_it_derives_from(folder: Path) -> None:
    (folder / "my_gru.py").write_text(snippet("GRU"))
    run = resolve(RunRequest(task="my_gru.py:GRU", dataset="cmudict"))
    plain = resolve(RunRequest(task="seq2seq", dataset="cmudict"))
    assert (run.training, run.dataset, run.settings) == (plain.training, plain.dataset, plain.settings)
    assert (run.model_name, run.model.hidden) == ("gru", 128)
    described, built_in = run.task_settings, plain.task_settings
    for name in ("inputs", "inherited", "files", "digest"):
        assert getattr(described, name) == getattr(built_in, name)
