"""`BatchTask`: the base class of every task, with the methods that training, planning and evaluation call. A task that
is described by its samples derives from `Task` (training/sample_task.py), which implements them all.

Shapes: R samples that a call names by their rows, i.e. their indices in the task's data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import check_kinds

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from can_train.reporter import TextTable


@dataclass(frozen=True)
class Feature:
    """One count that the memory of a batch grows with.

    Attributes:
        name: The counted things, in the plural: `nodes`, `tokens`.
        padding: 0: a batch has the sum over its samples. p ≥ 1: every sample is padded to the largest, and memory grows
            with (number of samples) · (largest count)^p; 1 for padded tokens, 2 for their attention matrix.
        factors: Names of features of the same samples, for memory that grows with (number of samples) · (largest count
            of the first) · (largest count of the second): attention between the tokens of two texts. The
            feature's own padding is then 1, and a sample's own count the product of its counts.
    """

    name: str
    padding: int = 0
    factors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_kinds("the counted things", str, 'Give Feature("tokens", padding=1)', name=self.name)
        check_kinds("a power of the padded length", Integral, 'Give Feature("tokens", padding=1)', padding=self.padding)
        check_kinds("the names of features", tuple, 'Give factors=("words", "images")', factors=self.factors)


SAMPLES: Final = Feature("samples")
"""Each sample counts as one."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One of the optimizations that train a model in turn: the critic's or the generator's, say.

    Each has an optimizer, a schedule and a gradient scaler of its own, and is planned, split and rescued by its own
    cost. While it is computed, the other phases' parameters are frozen.

    Attributes:
        name: In messages, plans and checkpoints; empty where a task has one phase.
        parameters: Names of the model's modules or parameters that it trains, or patterns of them (`critic`, `*.bias`);
            empty: all.
        loss: Computes its loss terms, as `Task.loss` does; None: `Task.loss`.
        steps: Optimizer steps that it takes for each logical batch.
        training: Training settings that it has otherwise than the run, by name: `{"lr": 1e-4, "betas": (0.0, 0.9)}`.
    """

    name: str = ""
    parameters: Sequence[str] = ()
    loss: Callable[[nn.Module, Any], Mapping[str, tuple[Tensor, float | Tensor]]] | None = None
    steps: int = 1
    training: Mapping[str, Any] = field(default_factory=dict)


class LogicalBatch(Protocol):
    """The samples of one optimizer step."""

    @property
    def denominators(self) -> Mapping[str, float] | None:
        """Denominator of each loss term over the whole batch; None: only computing the losses tells them."""

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float | Tensor]]:
        """Computes the sum and the denominator of each loss term over samples `start:stop` of the batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """Scores of a trained model for the samples of one test set, which are positive or negative, or have no classes.

    Attributes:
        score: [R] the higher, the likelier a sample is positive.
        positive: [R] whether it is; empty: the samples have no classes.
        flagged: [R] whether the model calls it positive, by its threshold; empty: the samples have no classes.
        time_s: [R] seconds from the set's beginning to each sample's, for samples that are parts of a recording; empty:
            they are not.
        words: Nouns for a sample, a positive one and a negative one.
        confusion: Of a classifier of several classes: the number of samples of each class, by row, and predicted class.
            `score` is then the probability of the predicted class, and `positive` whether it is right.
        score_name: Word for the score.
    """

    score: NDArray[np.floating[Any]]
    positive: NDArray[np.bool_]
    flagged: NDArray[np.bool_]
    time_s: NDArray[np.floating[Any]]
    words: tuple[str, str, str] = ("sample", "positive", "negative")
    confusion: Sequence[Sequence[int]] = ()
    score_name: str = "score"

    @property
    def has_classes(self) -> bool:
        """Whether the samples are positive or negative."""
        return len(self.positive) == len(self.score)


Outputs = Callable[[NDArray[np.int64]], Mapping[str, Tensor]]
"""Returns the outputs of a reference model for some rows, by name of the output."""


class ReferenceModel(ABC):
    """A finished model that a task consults and does not train, for example a teacher.

    Attributes:
        role: Its role in the task: `teacher`.
        name: Id of the run that trained it.
        features: Counts that the memory of computing its outputs grows with.
        model: The model, frozen and in evaluation mode, on the CPU.
        rows: Samples whose outputs training and validation need, ascending.
        placements: Where its outputs may come from: `device`, `cache`, `offload`. The first wins among equally good
            ones; a model without any is used for scores alone.
    """

    role: str
    name: str
    features: Sequence[Feature] = (SAMPLES,)
    model: nn.Module
    rows: NDArray[np.int64]
    placements: Sequence[str] = ("device", "cache", "offload")

    @property
    @abstractmethod
    def digest(self) -> str:
        """Digest of its weights and of its rows: the same digest means the same outputs."""

    @property
    @abstractmethod
    def widths(self) -> Mapping[str, int]:
        """Columns of each output."""

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, len(features)]: each sample's count of each feature."""
        return np.ones((len(rows), len(self.features)))

    def lengths(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]]:
        """Returns, for each output, [R] how many lines of it each sample has: one, or one for each of its nodes."""
        return {name: np.ones(len(rows), dtype=np.int64) for name in self.widths}

    @abstractmethod
    def outputs(
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        """Computes the outputs with `model`, which is this one or its copy on a device, without mixed precision."""

    @abstractmethod
    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Computes [R, …] scores, which the task's judgement uses."""


@dataclass(frozen=True, kw_only=True)
class UpcomingBatch:
    """A logical batch that will be computed, so that its samples can be read ahead.

    Attributes:
        rows: [R] its samples.
        share: Those that this process computes.
        generator: The generator that `logical_batch` will be given; None in validation.
    """

    rows: NDArray[np.int64]
    share: slice = field(default_factory=lambda: slice(None))
    generator: torch.Generator | None = None


class TaskInEpoch(Protocol):
    """A task during one epoch, as training calls it."""

    @property
    def train_rows(self) -> NDArray[np.int64]:
        """Rows that the epoch trains on, ascending."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LogicalBatch:
        """Prepares a logical batch of the epoch."""


class BatchTask(ABC):
    """A task that prepares its logical batches itself. A subclass overrides the methods whose defaults do not suit it.

    Attributes:
        train_rows: Rows of the training samples.
        validation_rows: Rows whose loss decides when to stop and which weights are the best.
        loss_weights: Weight of each loss term; empty: 1 each.
        memory_features: Counts that the memory of a batch grows with, the main feature first.
        sample_note: Which part of the data this task holds, as a sentence; empty: all of it.
        estimated_train_rows: Training samples of all the data, where this task holds only a part of it.
        in_order: Whether training samples have to be read in their order: features are counted as they are read.
    """

    train_rows: NDArray[np.int64]
    validation_rows: NDArray[np.int64]
    loss_weights: Mapping[str, float] = {}
    memory_features: Sequence[Feature] = (SAMPLES,)
    sample_note: str = ""
    estimated_train_rows: int = 0
    in_order: bool = False

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Makes the model with fresh weights, on the CPU."""

    @abstractmethod
    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LogicalBatch:
        """Prepares a logical batch.

        Args:
            rows: [R] its samples.
            device: Where its losses are computed.
            dtype: Number format of its inputs.
            generator: Draws, once for the whole batch, the randomness that couples its samples; None in validation.
        """

    def read_ahead(self, batches: Iterable[UpcomingBatch]) -> AbstractContextManager[None]:
        """Opens a span in which samples may be read before they are needed; the default reads none.

        Args:
            batches: The batches of the span, in their order; asked for as they are read.
        """
        return nullcontext()

    def resident_data(self) -> Mapping[str, NDArray[Any]]:
        """Returns the arrays of all samples, by name, so that batches can be gathered from a copy of these arrays on
        the device. The default is none: batches are made on the host.
        """
        return {}

    def resident_bytes(self) -> int:
        """Returns the bytes of `resident_data`; an override need not make the arrays."""
        return sum(array.nbytes for array in self.resident_data().values())

    def bind_data(self, data: Mapping[str, "Tensor"]) -> None:  # noqa: B027 - optional
        """Receives the arrays of `resident_data` as tensors on the device, from which batches are gathered from then
        on; an empty mapping: batches are made on the host again. A batch has the same bits in both cases.

        Copies of the task for phases share the tensors.
        """

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, len(memory_features)]: each sample's own count of each, which a batch sums or pads."""
        return np.ones((len(rows), len(self.memory_features)))

    def phases(self) -> Sequence[Phase]:
        """Returns the phases that train the model in turn; the default is one, which trains all of it."""
        return (Phase(),)

    def in_phase(self, phase: Phase) -> "BatchTask":
        """Returns the task as it is in a phase: its logical batches have the phase's losses."""
        return self

    def describe(self, row: int) -> str:
        """Names a sample in a message."""
        return f"sample {row}"

    def data_digest(self) -> str:
        """Returns a digest of the data. A resumed run refuses data of another digest; an empty one is not checked."""
        return ""

    def notices(self) -> Sequence[str]:
        """Returns sentences that are printed with the plan."""
        return ()

    def state(self) -> Mapping[str, Any]:
        """Returns the figures of the training data that the model depends on: a vocabulary, statistics.

        Lists, numbers and text. It is saved with the weights, and an evaluation on other data gets it back.
        """
        return {}

    def reference_models(self) -> Sequence[ReferenceModel]:
        """Returns the reference models that the task consults."""
        return ()

    def bind_outputs(self, role: str, outputs: Outputs) -> None:  # noqa: B027 - optional
        """Receives the source of a reference model's outputs, before the first logical batch and perhaps repeatedly."""

    def in_epoch(self, epoch: int, epochs: int) -> TaskInEpoch:
        """Returns the task as it is in an epoch; the default is the task itself, the same in every epoch.

        Args:
            epoch: Counted from 0.
            epochs: Epochs of the whole run. The rows of each are among `train_rows`; the last one has all of them.
        """
        return self

    def objects_of_loss(self) -> tuple[Iterable[Any], Iterable[Any]]:
        """Returns the functions and objects that a loss uses, whose state is put back after a trial of it, and objects
        with samples, which are left as they are. The default: a loss changes none.
        """
        return (), ()

    def schedule(self, optimizer: "Optimizer", steps: int) -> "LRScheduler | Callable[[int], float] | None":
        """Returns the schedule of the learning rate: a scheduler of the optimizer, or a function of the step whose
        result is the factor of the learning rate. None, the default: the settings decide. Each phase calls it once.

        Args:
            optimizer: With the learning rates of the run.
            steps: Optimizer steps of the run, or its epochs with `training.scheduler_interval=epoch`.
        """
        return None

    def epoch_order(self, rows: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Returns the training samples of an epoch in the order in which they are trained; the default shuffles them.

        Args:
            rows: [R] samples of the epoch, ascending.
            seed: The run's.
            epoch: Counted from 0. Seed and epoch alone decide the order, so that a position in it can be resumed.
        """
        return rows[np.random.default_rng([seed, epoch]).permutation(len(rows))]

    def epoch_size(self, rows: NDArray[np.int64]) -> int | None:
        """Returns the number of samples that `epoch_order` has in every epoch; None: epochs may have different numbers.

        Args:
            rows: [R] samples of the epoch, ascending.
        """
        return len(rows) if type(self).epoch_order is BatchTask.epoch_order else None

    def planned_order(self, rows: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Returns the training samples of an epoch for a plan, in their order; has the arguments of `epoch_order`."""
        return self.epoch_order(rows, seed=seed, epoch=epoch)

    def reading_state(self) -> Mapping[str, Any]:
        """Returns the place up to which the task has read its data, for a checkpoint; the default needs none."""
        return {}

    def restore_reading(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Goes on from the place in a checkpoint."""

    def before_step(  # noqa: B027 - optional
        self, model: nn.Module, rows: NDArray[np.int64], progress: float, generator: torch.Generator
    ) -> None:
        """Is called before each optimizer step, alike on all ranks; it may freeze and thaw parameters.

        Args:
            model: The model in training.
            rows: [R] samples of the step.
            progress: Share of the training that is done, in [0, 1).
            generator: Randomness that depends on seed and step alone.
        """

    def metric_sums(self, model: nn.Module, batch: LogicalBatch, size: int) -> Mapping[str, tuple[float, float]]:
        """Computes (sum, denominator) of metrics, which add up over batches, for the line of an epoch: it shows the
        first one.

        Args:
            model: In evaluation mode.
            batch: A batch of validation samples, whose losses have been computed.
            size: Its samples.
        """
        return {}

    @property
    def tested_rows(self) -> NDArray[np.int64]:
        """Rows of samples that `judge` scores beside `validation_rows`: whether each fits on the device by itself is
        known before training. The default names none.
        """
        return np.arange(0)

    @property
    def validation_sets(self) -> Mapping[str, NDArray[np.int64]]:
        """Rows of each validation set, by name; the default is one set, `validation_rows`."""
        return {"validation": self.validation_rows}

    def validation_metrics(
        self, rows: NDArray[np.int64], score: Callable[..., NDArray[np.float64]]
    ) -> Mapping[str, float]:
        """Computes metrics of a validation set, of which `training.best_by` may name one: the higher or the lower its
        value, the better are the weights. An undefined metric is not-a-number.

        Args:
            rows: [R] the samples of the set.
            score: As in `judge`.
        """
        return {}

    def check_outputs(  # noqa: B027 - optional
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Computes whatever a judgement needs of a few samples, and raises DataError where it has a wrong form; is
        called before the first step.
        """

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Computes [R, …] scores, which `judge` uses."""
        raise NotImplementedError(f"{type(self).__name__}.judge uses scores, so it must define `scores`")

    def judge(self, score: Callable[..., NDArray[np.float64]]) -> Mapping[str, Any]:
        """Judges the trained model by its scores; returns strict JSON, which becomes part of the result.

        Args:
            score: `score(rows)` returns the model's scores, `score(rows, role)` the scores of a reference model.
        """
        return {}

    def predictions(
        self, judgement: Mapping[str, Any], score: Callable[..., NDArray[np.float64]]
    ) -> Mapping[str, Predictions]:
        """Returns, by test set, the model's scores of single samples, for the charts of a report.

        Args:
            judgement: The value of `judge`.
            score: As in `judge`; scores that it asked for are not computed again.
        """
        return {}

    def tables(self, judgement: Mapping[str, Any]) -> "Sequence[TextTable]":
        """Writes all of a judgement as tables of text, which `-v` prints before the summary."""
        return ()

    def summary_tables(self, judgement: Mapping[str, Any]) -> "Sequence[TextTable]":
        """Writes the tables of a judgement that are printed by default; without an override, all of them."""
        return self.tables(judgement)
