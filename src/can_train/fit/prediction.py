"""`predict_peak`: the peak that a step on a batch would have on a GPU, predicted without one from tiny batches.

Shapes: R samples, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from can_train.config.settings import TrainingSettings
from can_train.errors import ArgumentError
from can_train.fit.explore import Explorer, Workload, left_as_it_was, probe
from can_train.fit.optimizer import measure_optimizer
from can_train.fit.packing import BatchCosts, batch_totals
from can_train.fit.phases import phase_training
from can_train.memory.meters import CpuMeter
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.task import BatchTask, Feature

# Samples of a uniform batch that probes choose from: they are all alike, and a batch may be larger than the data.
_PROBED: Final = 256
LossOf = Callable[[NDArray[np.int64]], Tensor]
"""Computes the loss of the samples at some positions."""


@dataclass(frozen=True, kw_only=True)
class PeakPrediction:
    """The predicted peak of a training step on a batch that is not split."""

    peak_bytes: float  # Peak of forward and backward, or of the optimizer's step where that is higher
    half_width_bytes: float  # Half-width of the interval around it
    base_bytes: float  # Weights, gradients and optimizer state
    explains: bool  # Whether the features explain the memory of the probes; if not, the interval means little

    def fits(self, capacity_bytes: float) -> bool:
        """Tells whether the upper end of the interval fits."""
        return self.peak_bytes + self.half_width_bytes <= capacity_bytes


def predict_peak(
    task_or_model: BatchTask | nn.Module,
    batch: int | Sequence[float] | NDArray[Any],
    *,
    loss_of: LossOf | None = None,
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer] | None = None,
    training: TrainingSettings | None = None,
) -> PeakPrediction:
    """Predicts the peak of a training step from small ones, without a GPU.

    For a model of your own, here with a batch far larger than the data at hand:

    >>> model, x = nn.Linear(100, 100), torch.zeros(64, 100)
    >>> found = predict_peak(model, 100_000, loss_of=lambda rows: model(x[rows % 64]).square().sum())
    >>> round(found.peak_bytes / 1e6)
    200

    Args:
        task_or_model: A model on the CPU, which is left as it was; or a task, whose model is made. Of a task with
            several phases, the one with the highest peak is predicted.
        batch: Number of samples; or, for samples that differ, [R] or [R, F] counts of what their memory grows with
            (nodes and edges, tokens). For a task: number of samples, of which the costliest are taken; or [R] rows.
        loss_of: For a model: computes the loss of the samples at some positions of `batch`.
        optimizer: For a model: makes its optimizer; None: AdamW.
        training: For a task: precision and optimizer; None: the defaults.

    Raises:
        ArgumentError: An argument has the wrong type or shape.
        DoesNotFitError: Not even the probes fit on this machine.
    """
    if not isinstance(task_or_model, nn.Module):
        return _of_task(task_or_model, batch, training or TrainingSettings())
    if loss_of is None:
        raise ArgumentError("A model's peak needs loss_of(rows), which computes the loss of some samples", value="None")
    return _of_model(task_or_model, batch, loss_of, optimizer or torch.optim.AdamW)


def _of_task(task: BatchTask, batch: Any, training: TrainingSettings) -> PeakPrediction:
    model, meter = task.build_model(), CpuMeter()
    explorers = [
        Explorer(task=task.in_phase(phase), model=model, training=phase_training(training, phase), meter=meter,
                 rows=task.train_rows, verify=False, phase=phase)
        for phase in task.phases()
    ]  # fmt: skip
    states = [explorer.optimizer_memory().state_bytes for explorer in explorers]
    for explorer, own in zip(explorers, states, strict=True):
        explorer.others_state_bytes = sum(states) - own
    return max((_of_phase(explorer, batch) for explorer in explorers), key=lambda found: found.peak_bytes)


def _of_phase(explorer: Explorer, batch: Any) -> PeakPrediction:
    task = explorer.task
    limits = explorer.explore(lambda costs: float(costs.each().sum()))
    phase = limits.training
    if np.ndim(batch) == 0:
        each = BatchCosts.priced(phase.model, task.batch_features(task.train_rows)).each()
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
    model: nn.Module, batch: Any, loss_of: LossOf, make: Callable[[Sequence[nn.Parameter]], Optimizer]
) -> PeakPrediction:
    counts, totals_for = _counted(batch)
    features = [Feature(f"feature {i}") for i in range(counts.shape[1])]
    totals, meter = totals_for(features), CpuMeter()
    optimizer = measure_optimizer([one for one in model.parameters() if one.requires_grad], make)

    def step(rows: NDArray[np.int64]) -> None:
        try:
            loss_of(rows).backward()
        finally:
            for parameter in model.parameters():
                parameter.grad = None

    resident = [*model.parameters(), *model.buffers()]
    resident_bytes = sum(tensor.nbytes for tensor in resident)
    work = Workload(
        run=step,
        rows=np.arange(len(counts)),
        counts=counts,
        features=features,
        # As in the middle of a run: the optimizer's state is there.
        resident=[*resident, torch.empty(optimizer.state_bytes, dtype=torch.uint8)],
        gradient_bytes=optimizer.parameter_bytes,
    )
    with left_as_it_was(model, meter):
        fit = probe(work, meter)
        cost = float(totals @ np.asarray(fit.model.coefficients))
        peak = fit.model.base_bytes + cost
        if cost <= fit.largest_cost:
            # Gradients decide the peak of a batch no larger than the probes, which no line tells: it is run. The last
            # feature counts samples.
            positions = np.arange(round(totals[-1]))
            with CatchOutOfMemory():
                peak = float(replace(work, rows=positions).peak(meter, positions).allocated)
    optimizer_step = resident_bytes + optimizer.parameter_bytes + optimizer.state_bytes + optimizer.transient_bytes
    return PeakPrediction(
        peak_bytes=max(peak, float(optimizer_step)),
        half_width_bytes=fit.model.half_width(totals),
        base_bytes=fit.model.base_bytes,
        explains=fit.model.explains,
    )


def _counted(batch: Any) -> tuple[NDArray[np.float64], Callable[[Sequence[Feature]], NDArray[np.float64]]]:
    """Returns counts [R, F] for the probes to choose from, and a function that returns the whole batch's totals [F]."""
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
