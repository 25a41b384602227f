"""`predict_peak`: the peak that a step on a batch would have on a GPU, predicted without one from tiny batches.

Shapes: R samples, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from can_train.config.settings import TrainingSettings
from can_train.errors import ArgumentError
from can_train.fit.cost_model import EXPLAINED, DeviceLimits, PeakPrediction, PhaseLimit
from can_train.fit.explore import Explorer, Workload, bytes_of_others, left_as_it_was, probe
from can_train.fit.optimizer import measure_optimizer
from can_train.fit.packing import BatchCosts, batch_totals, counts_of, growing_totals
from can_train.fit.phases import phase_training
from can_train.memory.meters import CpuMeter
from can_train.memory.out_of_memory import CatchOutOfMemory, is_out_of_memory
from can_train.task import BatchTask, Feature

# Samples of a uniform batch that probes choose from: they are all alike, and a batch may be larger than the data.
_PROBED: Final = 256
_CHECKED: Final = 4  # Costs of the largest probe: of a batch unlike the probes that tells whether the line holds for it
LossOf = Callable[[NDArray[np.int64]], Tensor]
"""Computes the loss of the samples at some positions."""


def predict_peak(
    task_or_model: BatchTask | nn.Module,
    batch: int | Sequence[float] | NDArray[Any] | Mapping[str | Feature, Sequence[float] | NDArray[Any]],
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
            (nodes and edges, tokens); or such counts [R] by feature, where samples are padded: `{Feature("tokens",
            padding=1): lengths}`. For a task: number of samples, of which the costliest are taken; or [R] rows.
        loss_of: For a model: computes the loss of the samples at some positions of `batch`.
        optimizer: For a model: makes its optimizer; None: AdamW. It is measured as it runs on a GPU, where most
            optimizers update many parameters at once (`foreach`).
        training: For a task: precision and optimizer; None: the defaults.

    Raises:
        ArgumentError: An argument has the wrong type or shape.
        DoesNotFitError: Not even the probes fit on this machine.
    """
    if not isinstance(task_or_model, nn.Module):
        return _of_task(task_or_model, batch, training or TrainingSettings())
    if loss_of is None:
        raise ArgumentError("A model's peak needs loss_of(rows), which computes the loss of some samples", value="None")
    return _of_model(task_or_model, _counted(batch), loss_of, optimizer or torch.optim.AdamW)


def _of_task(task: BatchTask, batch: Any, training: TrainingSettings) -> PeakPrediction:
    model, meter = task.build_model(), CpuMeter(as_cuda=True)
    explorers = [
        Explorer(task=task.in_phase(phase), model=model, training=phase_training(training, phase), meter=meter,
                 rows=task.train_rows, verify=False, phase=phase)
        for phase in task.phases()
    ]  # fmt: skip
    for explorer, others in zip(explorers, bytes_of_others(explorers), strict=True):
        explorer.others_state_bytes = others
    return max((_of_phase(explorer, batch) for explorer in explorers), key=lambda found: found.peak_bytes)


def _of_phase(explorer: Explorer, batch: Any) -> PeakPrediction:
    task = explorer.task
    limits = _of_any_size(explorer.explore(lambda costs: float(costs.each().sum())))
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
        limits=limits,
    )


def _of_any_size(limits: DeviceLimits) -> DeviceLimits:
    """Returns the limits of a device that any batch fits."""
    unlimited = [replace(phase, tuned_limit=math.inf, capped=True) for phase in (limits.training, limits.evaluation)]
    return replace(limits, training=unlimited[0], evaluation=unlimited[1])


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The batch that is predicted."""

    counts: NDArray[np.float64]  # [R, F] of samples that probes choose from; the last feature counts samples
    features: Sequence[Feature]
    totals: NDArray[np.float64]  # [F] of the whole batch

    def unlike_probes(self, cost_of: NDArray[np.float64], cost: float) -> NDArray[np.int64]:
        """Returns positions of samples that cost about as much: the smallest and the largest in turn, as no probe has
        them, each of which holds samples alike or in order.
        """
        ranked = np.argsort(self.counts[:, 0], kind="stable")
        mixed = np.stack([ranked, ranked[::-1]], axis=1).ravel()[: len(ranked)]
        within = growing_totals(self.features, self.counts[mixed]) @ cost_of <= cost
        return mixed[: max(int(within.sum()), 1)]


def _of_model(
    model: nn.Module, batch: _Batch, loss_of: LossOf, make: Callable[[Sequence[nn.Parameter]], Optimizer]
) -> PeakPrediction:
    meter = CpuMeter(as_cuda=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        optimizer = measure_optimizer(trained, _as_on_a_gpu(make))
    except (TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        # LBFGS steps with a closure, SparseAdam on sparse gradients.
        raise ArgumentError(
            "An optimizer is measured in steps on dense gradients, without a closure", value=f"{error}",
            remedy="Give optimizer=torch.optim.SGD, and add what its state takes",
        ) from error  # fmt: skip

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
        rows=np.arange(len(batch.counts)),
        counts=batch.counts,
        features=batch.features,
        # As in the middle of a run: the optimizer's state is there.
        resident=[*resident, torch.empty(optimizer.state_bytes, dtype=torch.uint8)],
        gradient_bytes=optimizer.parameter_bytes,
    )
    explains = False
    with left_as_it_was(model, meter):
        fit = probe(work, meter)
        cost_of = np.asarray(fit.model.coefficients)
        cost = float(batch.totals @ cost_of)
        peak = fit.model.base_bytes + cost
        if cost <= fit.largest_cost:
            # Gradients decide the peak of a batch no larger than the probes, which no line tells: it is run. The last
            # feature counts samples.
            positions = np.arange(round(batch.totals[-1]))
            with CatchOutOfMemory():
                peak = float(replace(work, rows=positions).peak(meter, positions).allocated)
                explains = fit.model.explains
        else:
            positions = batch.unlike_probes(cost_of, min(_CHECKED * fit.largest_cost, cost))
            checked = float(batch_totals(batch.features, batch.counts[positions]) @ cost_of)
            with CatchOutOfMemory():
                found = work.peak(meter, positions).allocated - fit.model.base_bytes
                agrees = abs(found - checked) <= EXPLAINED * max(found, checked)
                explains = fit.model.explains and (agrees or checked <= fit.largest_cost)
    optimizer_step = resident_bytes + optimizer.parameter_bytes + optimizer.state_bytes + optimizer.transient_bytes
    means = tuple(batch.counts.mean(axis=0).tolist())
    phase = PhaseLimit(model=fit.model, tuned_limit=math.inf, capped=True, mean_totals=means)
    return PeakPrediction(
        peak_bytes=max(peak, float(optimizer_step)),
        half_width_bytes=fit.model.half_width(batch.totals),
        base_bytes=fit.model.base_bytes,
        explains=explains,
        limits=DeviceLimits(
            device_key=meter.key, capacity_bytes=meter.capacity_bytes, training=phase, evaluation=phase,
            optimizer_peak_bytes=optimizer_step, gradient_bytes=optimizer.parameter_bytes,
        ),
    )  # fmt: skip


def _as_on_a_gpu(make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    def made(parameters: Sequence[nn.Parameter]) -> Optimizer:
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            # PyTorch's own default for parameters on a GPU; on a CPU it is a loop, which takes less.
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
        return optimizer

    return made


def _counted(batch: Any) -> _Batch:
    if np.ndim(batch) == 0 and not isinstance(batch, Mapping):
        size = _size(batch)
        features, counts = counts_of(min(size, _PROBED))
        return _Batch(counts=counts, features=features, totals=np.array([float(size)]))
    features, counts = counts_of(batch)
    if not len(counts):
        raise ArgumentError("A batch has at least one sample", value=f"{batch!r:.80}")
    return _Batch(counts=counts, features=features, totals=batch_totals(features, counts))


def _size(batch: Any) -> int:
    if not isinstance(batch, int | np.integer) or isinstance(batch, bool) or batch < 1:
        raise ArgumentError("A batch is a number of samples, or counts for each of them", value=f"{batch!r:.80}")
    return int(batch)
