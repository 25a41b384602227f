"""`predict_peak`: what a step on a batch would take of a GPU, predicted on a machine without one from tiny batches.

Shapes: R samples, F features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from can_train.config.settings import TrainingSettings
from can_train.errors import ArgumentError
from can_train.fit.explore import Explorer
from can_train.fit.features import batch_totals
from can_train.fit.optimizer import OptimizerMemory, measure_optimizer
from can_train.fit.probe import Probed, fit_by_probes
from can_train.fit.random_state import Snapshot
from can_train.memory.meters import CpuMeter
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.memory.simulated_gpu import LiveStorageTracker
from can_train.task import Feature, Task

_PROBED: Final = 256
"""Samples of a uniform batch that probes choose from: they are all alike, and a batch may be larger than the data."""


_CPU: Final = torch.device("cpu")


LossOf = Callable[[NDArray[np.int64]], Tensor]
"""Computes the loss of the samples at some positions."""


@dataclass(frozen=True, kw_only=True)
class PeakPrediction:
    """The predicted peak of a training step that takes a batch in one piece.

    Attributes:
        peak_bytes: The peak: forward and backward, or the optimizer's step where that takes more.
        half_width_bytes: Half-width of the interval around it.
        base_bytes: What weights, gradients and optimizer state take of it.
        explains: Whether the features explain what the probes showed; the interval means little where they do not.
    """

    peak_bytes: float
    half_width_bytes: float
    base_bytes: float
    explains: bool

    def fits(self, capacity_bytes: float) -> bool:
        """Tells whether the whole interval lies within a capacity."""
        return self.peak_bytes + self.half_width_bytes <= capacity_bytes


def predict_peak(
    task_or_model: Task | nn.Module,
    batch: int | Sequence[float] | NDArray[Any],
    *,
    loss_of: LossOf | None = None,
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer] | None = None,
    training: TrainingSettings | None = None,
) -> PeakPrediction:
    """Predicts the peak of a training step from small ones, without a GPU.

    A model's batch that is itself no larger than those is run: gradients decide its peak, and no law holds yet.

    A model of your own, here with a batch far larger than the data at hand:

    >>> model, x = nn.Linear(100, 100), torch.zeros(64, 100)
    >>> found = predict_peak(model, 100_000, loss_of=lambda rows: model(x[rows % 64]).square().sum())
    >>> round(found.peak_bytes / 1e6)
    200

    Args:
        task_or_model: A model on the CPU, which is left as it was; or a task, whose model is made.
        batch: Number of samples; or, for samples that differ, [R] or [R, F] counts of what their memory grows with
            (nodes and edges, tokens). For a task: number of samples, the costliest there are; or [R] their rows.
        loss_of: Of a model: computes the loss of the samples at some positions of `batch`.
        optimizer: Of a model: makes its optimizer; None: AdamW.
        training: Of a task: precision and optimizer; None: the defaults.

    Raises:
        ArgumentError: Something given is not of the shape that is asked for.
        DoesNotFitError: Not even the probes fit on this machine.
    """
    if not isinstance(task_or_model, nn.Module):
        return _of_task(task_or_model, batch, training or TrainingSettings())
    if loss_of is None:
        raise ArgumentError("A model's peak needs loss_of(rows), which computes the loss of some samples", value="None")
    counts, totals = _counted(batch)
    return _of_model(task_or_model, counts, totals, loss_of, optimizer or torch.optim.AdamW)


def _of_task(task: Task, batch: Any, training: TrainingSettings) -> PeakPrediction:
    explorer = Explorer(
        task=task, model=task.build_model(), training=training, meter=CpuMeter(), rows=task.train_rows,
        tried=lambda cost: None, verify=False,
    )  # fmt: skip
    limits = explorer.explore(lambda costs: float(costs.each().sum()))
    phase = limits.training
    if np.ndim(batch) == 0:
        each = phase.costs(task.batch_features(task.train_rows)).each()
        rows = np.resize(task.train_rows[np.argsort(-each, kind="stable")], _size(batch))
    else:
        rows = np.asarray(batch, dtype=np.int64)
    cost = phase.model.cost(task.batch_features(rows))
    return PeakPrediction(
        peak_bytes=limits.step_peak_bytes(cost, 0.0),
        half_width_bytes=phase.half_width(cost),
        base_bytes=phase.model.base_bytes,
        explains=phase.model.explains,
    )


def _of_model(
    model: nn.Module,
    counts: NDArray[np.float64],
    totals: Callable[[Sequence[Feature]], NDArray[np.float64]],
    loss_of: LossOf,
    make: Callable[[Sequence[nn.Parameter]], Optimizer],
) -> PeakPrediction:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = measure_optimizer(parameters, make)
    features = [Feature(f"feature {i}") for i in range(counts.shape[1])]
    step = _Step(model, parameters, optimizer, loss_of)
    batch = totals(features)
    with step.left_as_it_was():
        probed = step.probed(features, counts)
        fitted = probed.model
        cost = float(batch @ np.asarray(fitted.coefficients))
        # Each sample counts as one in the last feature.
        run = step.ran(round(batch[-1])) if cost <= probed.largest_cost else None
    resident = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    optimizer_step = resident + optimizer.parameter_bytes + optimizer.state_bytes + optimizer.transient_bytes
    return PeakPrediction(
        peak_bytes=max(fitted.base_bytes + cost if run is None else run, float(optimizer_step)),
        half_width_bytes=fitted.half_width(batch),
        base_bytes=fitted.base_bytes,
        explains=fitted.explains,
    )


@dataclass(frozen=True)
class _Step:
    """Forward and backward of a model, in the middle of a run: its optimizer's state is there."""

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    optimizer: OptimizerMemory
    loss_of: LossOf

    @contextmanager
    def left_as_it_was(self) -> Iterator[None]:
        """Leaves model and gradients, after the block, as they were."""
        snapshot, gradients = Snapshot(self.model, _CPU), [parameter.grad for parameter in self.parameters]
        try:
            yield
        finally:
            snapshot.restore()
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient

    def probed(self, features: Sequence[Feature], counts: NDArray[np.float64]) -> Probed:
        """Fits the cost model to tiny batches."""
        capacity_bytes = CpuMeter().capacity_bytes
        return fit_by_probes(
            lambda positions: self._peak(positions, capacity_bytes),
            features,
            counts,
            capacity_bytes=capacity_bytes,
            gradient_bytes=self.optimizer.parameter_bytes,
        )

    def ran(self, num_samples: int) -> float | None:
        """Returns the peak of the batch's first samples; None where they need more than this machine has."""
        with CatchOutOfMemory():
            return float(self._peak(np.arange(num_samples), CpuMeter().capacity_bytes))
        return None

    def _peak(self, positions: NDArray[np.int64], limit_bytes: int) -> int:
        for parameter in self.parameters:
            parameter.grad = None
        state = torch.empty(self.optimizer.state_bytes, dtype=torch.uint8)
        tracker = LiveStorageTracker(limit_bytes, [*self.model.parameters(), *self.model.buffers(), state])
        with tracker:
            self.loss_of(positions).backward()
        return tracker.peak_bytes


def _counted(batch: Any) -> tuple[NDArray[np.float64], Callable[[Sequence[Feature]], NDArray[np.float64]]]:
    """Returns counts [R, F] for the probes to choose from, and what the whole batch's totals are."""
    if np.ndim(batch) == 0:
        size = _size(batch)
        return np.ones((min(size, _PROBED), 1)), lambda features: np.array([float(size)])
    given = np.asarray(batch, dtype=np.float64)
    if given.ndim > 2 or given.size == 0 or not (np.isfinite(given) & (given >= 0)).all():
        raise ArgumentError("Counts of samples are finite, not negative, and one row a sample", value=f"{batch!r:.80}")
    counts = np.column_stack([given, np.ones(len(given))])
    return counts, lambda features: batch_totals(features, counts)


def _size(batch: Any) -> int:
    if not isinstance(batch, int | np.integer) or isinstance(batch, bool) or batch < 1:
        raise ArgumentError("A batch is a number of samples, or counts for each of them", value=f"{batch!r:.80}")
    return int(batch)
