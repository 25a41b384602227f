"""What training asks of a task. Tasks implement it by shape; they import nothing from here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class Feature:
    """One count.

    Attributes:
        name: What is counted, in the plural: `nodes`, `tokens`.
        padding: 0: a batch has the sum over its samples. p ≥ 1: every sample is padded to the largest, and memory grows
            with (number of samples) · (largest count)^p; 1 for padded tokens, 2 for their attention matrix.
    """

    name: str
    padding: int = 0


class LogicalBatch(Protocol):
    """What one optimizer step sees.

    Attributes:
        denominators: Per loss term, of the whole batch.
    """

    denominators: Mapping[str, float]

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        """Computes each term's sum and own denominator over samples `start:stop` of the batch."""


class Table(Protocol):
    """One table of a result, as text."""

    @property
    def title(self) -> str:
        """What the table is about."""

    @property
    def columns(self) -> Sequence[str]:
        """Headings."""

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        """Cells under the headings."""

    @property
    def notes(self) -> Sequence[str]:
        """Sentences below it."""


Answers = Callable[[NDArray[np.int64]], Mapping[str, Tensor]]
"""Returns what a reference model says of some samples, by name of the output; an output's first dimension is as long as those
samples have rows of it (one each, or one for each of their nodes)."""


class ReferenceModel(Protocol):
    """A finished model that a task asks and does not train: a teacher, say.

    Attributes:
        role: What it is to the task.
        name: The run that trained it.
        features: What the memory of asking it grows with.
        model: Frozen and in evaluation mode, on the CPU.
        rows: Samples that it is asked about in training and validation, ascending.
        placements: Where its answers may come from, of `device`, `cache` and `offload`; of equally good ones the first
            is taken.
    """

    role: str
    name: str
    features: Sequence[Feature]
    model: nn.Module
    rows: NDArray[np.int64]
    placements: Sequence[str]

    @property
    def digest(self) -> str:
        """Of its weights and of what it is asked: the same digest, the same answers."""

    @property
    def widths(self) -> Mapping[str, int]:
        """Columns of each output."""

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [len(rows), len(features)]: what each sample has of them."""

    def lengths(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]]:
        """Returns, for each output, how many rows of it each sample has."""

    def answer(
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        """Asks the model, or its copy on a device, about some samples, without mixed precision."""

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Computes what judging needs of each sample."""


class TaskInEpoch(Protocol):
    """What training asks of a task as it is in one epoch."""

    @property
    def train_rows(self) -> NDArray[np.int64]:
        """Indices of the samples that are trained on in it, ascending."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LogicalBatch:
        """Prepares a logical batch of that epoch."""


class Task(Protocol):
    """One task, with its data at hand.

    A task may have more than what is asked here: `reference_models`, finished models that it asks, and `listen(role,
    answers)`, which is called before training with each one's answers; `in_epoch(epoch, epochs)`, which returns what it
    is in an epoch, counted from 0 (a `TaskInEpoch`, whose samples are among `train_rows`, in the last epoch all of
    them); `before_step(model, rows, progress, generator)`, which is called before each optimizer step with the share of
    the training that is done; `notices`, sentences about what it will do, which are said with the plan; `data_digest`,
    which is the same for the same data: a run that goes on makes sure of it.

    Attributes:
        train_rows: Indices of the samples that are trained on.
        validation_rows: Indices of the samples whose loss decides when to stop.
        loss_weights: Weight of each loss term.
        features: What the memory of a batch grows with, the main feature first.
    """

    train_rows: NDArray[np.int64]
    validation_rows: NDArray[np.int64]
    loss_weights: Mapping[str, float]
    features: Sequence[Feature]

    def build_model(self) -> nn.Module:
        """Makes the model with fresh weights, on the CPU."""

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [len(rows), len(features)]: each sample's own count of each feature, which batches add up or pad."""

    def describe(self, row: int) -> str:
        """Names a sample in a message."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LogicalBatch:
        """Prepares a logical batch; randomness that couples its samples is drawn here, once (None: none is wanted)."""

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Computes what judging needs of each sample."""

    def judge(self, score: Callable[..., NDArray[np.float64]]) -> Mapping[str, Any]:
        """Judges a model by its scores; returns strict JSON.

        Args:
            score: Scores samples, `score(rows)`; `score(rows, role)` asks the reference model of that role.
        """

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[Table]:
        """Writes a judgement as tables of text."""


class SampledTask(Task, Protocol):
    """A task that has read as much of its data as a plan needs.

    Attributes:
        sample_note: Says which part that is; empty where it is all of it.
        estimated_train_rows: Training samples of the whole data set.
    """

    sample_note: str
    estimated_train_rows: int
