"""The base class of tasks: what a subclass that defines only what it must is by default."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from can_train.fit.epochs import epochs_differ
from can_train.task import BatchTask, LogicalBatch
from can_train.training.train import make_session, train
from can_train_tasks.can.modes.windows import WindowTask
from fakes.line_fit import LineBatch, fixed, line_parts

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


class Minimal(BatchTask):
    """A line through points, and nothing beyond what every task defines."""

    def __init__(self) -> None:
        self.train_rows, self.validation_rows = np.arange(30), np.arange(30, 40)
        self.loss_weights = {"error": 1.0}

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def logical_batch(
        self, rows: np.ndarray, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LogicalBatch:
        return LineBatch(X[rows].to(device, dtype), 10**9)


def test_a_minimal_task_trains(tmp_path: Path) -> None:
    session = make_session(line_parts(tmp_path, Minimal(), epochs=2), fixed(0.5))
    train(session)
    assert session.progress.epoch == 2
    assert session.progress.best_epoch == 2


def test_every_optional_method_has_a_default() -> None:
    task = Minimal()
    assert (task.notices(), task.reference_models(), task.data_digest()) == ((), (), "")
    assert (task.judge(lambda rows: rows), task.tables({}), task.summary_tables({})) == ({}, (), ())
    assert task.predictions({}, lambda rows: rows) == {}
    assert task.describe(3) == "sample 3"
    assert task.batch_features(task.train_rows).tolist() == [[1.0]] * 30
    assert not epochs_differ(task, 5)
    with pytest.raises(NotImplementedError, match="Minimal"):
        task.scores(nn.Linear(4, 1), task.train_rows, torch.device("cpu"), torch.float32)


def test_what_has_no_default_must_be_defined() -> None:
    assert BatchTask.__abstractmethods__ == {"build_model", "logical_batch"}
    assert inspect.isabstract(BatchTask)


def test_the_can_task_is_a_subclass() -> None:
    assert issubclass(WindowTask, BatchTask)
