"""The figures of an epoch: losses of training and validation that can be compared, the first metric, the best mark."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from can_train import Task
from can_train.reporter import EpochFigures
from can_train.training.train import make_session, train
from fakes.line_fit import LineTask, Notices, fixed, line_parts
from fakes.sample_tasks import Losses, Words

STILL = {"lr": 1e-30, "weight_decay": 0.0, "warmup_share": 0.0}
"""The weights stay as they are."""


@dataclass(eq=False)
class Epochs(Notices):
    """Keeps the figures of epochs."""

    def __post_init__(self) -> None:
        super().__init__()
        self.epochs: list[EpochFigures] = []

    def epoch(self, figures: EpochFigures) -> None:
        self.epochs.append(figures)


class Dropped(Words):
    """Its training has dropout and another loss than its validation, which sees the same samples."""

    def datasets(self) -> Mapping[str, Sequence[Any]]:
        samples = super().datasets()["train"]
        return {"train": samples, "validation": samples}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        return {"error": (10 * self.validation_loss(model, batch)["error"][0], batch[1].sum())}

    def validation_loss(self, model: nn.Module, batch: Any) -> Losses:
        return super().loss(model, batch)


def trained(folder: Path, task: Task | LineTask, **training: Any) -> tuple[Epochs, list[dict[str, Any]]]:
    """Trains a task; returns the figures that were shown and the records of metrics.jsonl."""
    settings = {"precision": "fp64", "batch_size": 16, "find_batch_size": "off", "micro_batch_size": 16, **training}
    parts = line_parts(folder, task, **settings)  # type: ignore[arg-type]
    parts.reporter = reporter = Epochs()
    train(make_session(parts, fixed(0.5)))
    return reporter, [json.loads(line) for line in parts.folder.metrics_path.read_text().splitlines()]


def test_an_epochs_loss_is_the_mean_over_all_of_its_positions(tmp_path: Path) -> None:
    task = Words()
    _, (record, _) = trained(tmp_path, task, epochs=1, **STILL)
    torch.manual_seed(42)
    samples = [task.sample(int(row)) for row in task.train_rows]
    # The batches have 16, 16 and 8 samples, and different numbers of positions.
    total, count = task.loss(task.build_model().double(), task.collate(samples))["error"]
    assert record["train"]["error"] == pytest.approx(float(total.detach()) / float(count), rel=1e-9)


def test_training_and_validation_loss_of_the_same_samples_are_the_same(tmp_path: Path) -> None:
    reporter, records = trained(tmp_path, Dropped(), epochs=2)
    for figures in reporter.epochs:
        assert figures.training_loss == figures.validation_loss
    assert [record["training_loss"] for record in records if "training_loss" in record] == [
        figures.training_loss for figures in reporter.epochs
    ]


def test_the_first_metric_is_taken_over_all_validation_samples(tmp_path: Path) -> None:
    reporter, _ = trained(tmp_path, Words(), epochs=1)
    task = Words()
    lengths = [len(task.sample(int(row))) for row in task.validation_rows]
    # `values` has the denominator 1 in each part, and validation has one part.
    assert reporter.epochs[0].metric == ("values", sum(lengths))


def test_each_epoch_has_its_line_and_the_lowest_loss_so_far_is_marked(tmp_path: Path) -> None:
    reporter, _ = trained(tmp_path, LineTask(), epochs=6, val_interval=2, lr=0.3)
    losses = [figures.validation_loss for figures in reporter.epochs]
    validated = [loss for loss in losses if loss is not None]
    assert [loss is None for loss in losses] == [True, False] * 3
    best = [loss is not None and loss == min(validated[: validated.index(loss) + 1]) for loss in losses]
    assert [figures.is_best for figures in reporter.epochs] == best
    assert reporter.epochs[-1].seconds_left == 0
    assert all(figures.seconds_left > 0 for figures in reporter.epochs[:-1])
