"""Baselines learn from the run's training data, also where other data are evaluated."""

import json
from pathlib import Path

import pytest

from can_train.cli.main import main

MEAN = """
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import can_train


class Mean(can_train.Task):
    training = {"epochs": 1, "lr_batch_size": 4}

    @dataclass(frozen=True, kw_only=True)
    class DatasetSettings(can_train.Task.DatasetSettings):
        pass

    def datasets(self):
        numbers = [float(line) for line in Path(self.dataset.path).read_text().split()]
        return {"train": [torch.tensor([number]) for number in numbers]}

    def model(self):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        return {"error": ((model(batch) - batch).square().sum(), len(batch))}

    def baselines(self, samples):
        mean = sum(float(sample) for sample in self.sets["train"]) / len(self.sets["train"])
        return {"mean": {"mae": sum(abs(float(sample) - mean) for sample in samples) / len(samples)}}
"""


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    (tmp_path / "mean.py").write_text(MEAN)
    for name, numbers in {"near": range(10), "far": range(100, 110)}.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(map(str, numbers)))
    assert main(("--task", "mean.py:Mean", "--dataset", "near.txt", "--device", "cpu")) == 0
    return tmp_path


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main(("evaluate", "last", *words, "--json")) == 0
    (judged,) = json.loads(capsys.readouterr().out)["judgement"]["test"].values()
    return judged["baselines"]


def test_a_baseline_does_not_learn_from_the_data_that_are_evaluated(line: Path, capsys) -> None:
    # The mean of the numbers from 100 to 109 would be 2.5 away from them.
    distance = evaluated(capsys, "--dataset", "far.txt")["mean"]["mae"]
    assert distance == pytest.approx(100, abs=1)


def test_baselines_are_left_out_where_the_training_data_are_gone(line: Path, capsys) -> None:
    (line / "near.txt").unlink()
    capsys.readouterr()
    assert main(("evaluate", "last", "--dataset", "far.txt", "--json")) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["judgement"]["test"]["all"]["baselines"] == {}
    assert "The baselines are left out, since the run's training data cannot be read" in " ".join(printed.err.split())
