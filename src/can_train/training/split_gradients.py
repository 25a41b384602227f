"""Compares, on a run's own model and data, the gradient of a whole batch with that of the same batch in micro-batches.

In double precision, where rounding is too small to hide an error, and without dropout, whose masks depend on the split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import ResolvedRun
from can_train.errors import ConfigError
from can_train.fit.batch_dependence import NoDropout
from can_train.fit.explore import Explorer
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.optimizer import Precision, Snapshot, step_generator
from can_train.fit.packing import BatchCosts, SplitRules
from can_train.fit.rescue import RescueSettings
from can_train.memory.meters import Meter, is_simulated, open_meter
from can_train.reporter import Reporter
from can_train.task import LogicalBatch, Task
from can_train.training.loading import fresh_model, sample_task
from can_train.training.reference_models import ComputedOutputs

MOST_SAMPLES: Final = 256  # of the batch: more take longer, and show nothing else
# Relative L2 error up to which a difference is rounding: 1e-16 per operation, and gradients add up thousands.
ROUNDING: Final = 1e-12


@dataclass(frozen=True, kw_only=True)
class GradientComparison:
    """How far gradients of the same batch lie from each other, as relative L2 errors."""

    key: str  # of the configuration
    device: str  # where they were computed
    samples: int  # of the batch
    batch_size: int  # of the configuration
    parameters: int  # numbers in a gradient
    errors: Mapping[tuple[int, ...], float]  # by the sizes of the micro-batches
    averaged_error: float  # where each micro-batch's mean counts alike, as in many training loops
    drops: bool  # whether the model has dropout, which was off
    reasons: Sequence[str] = ()  # why they differ, as sentences; empty where they do not, or nobody knows

    @property
    def equal(self) -> bool:
        """Whether all errors are rounding."""
        return max(self.errors.values()) <= ROUNDING


def compare_gradients(run: ResolvedRun, reporter: Reporter) -> GradientComparison:
    """Computes the gradient of one batch of a run whole and in micro-batches; writes nothing.

    Raises:
        ConfigError: There is no second sample.
        CanTrainError: The data cannot be read, or the batch does not fit on the device.
    """
    training, seed = run.training, run.training.seed
    batch_size = (training.batch_size or training.lr_batch_size) * training.gradient_accumulation_steps
    run = replace(run, training=replace(run.training, precision="fp64"))
    # A simulated GPU computes on the CPU, and would only be too small for the whole batch.
    meter = open_meter("cpu" if is_simulated(run.device) else run.device)
    task = sample_task(run, reporter)
    model = fresh_model(run, task, meter).train()
    _consult_reference_models(task, meter)
    rows = _rows(task, run, min(batch_size, MOST_SAMPLES))
    task.before_step(model, rows, 0.0, step_generator(seed=seed, step=0, before=True))
    epoch, generator = task.in_epoch(0, training.epochs), step_generator(seed=seed, step=0)
    batch = epoch.logical_batch(rows, meter.device, torch.float64, generator)
    work = _Batch(model, batch, task.loss_weights, meter)
    with NoDropout() as no_dropout:
        whole = work.gradient((len(rows),))
        errors = {sizes: _relative_error(work.gradient(sizes), whole) for sizes in splits(len(rows))}
        averaged = _relative_error(work.averaged_gradient(next(iter(errors))), whole)
    comparison = GradientComparison(key=run.key, device=meter.name, samples=len(rows), batch_size=batch_size,
                                    parameters=whole.numel(), errors=errors, averaged_error=averaged,
                                    drops=no_dropout.seen)  # fmt: skip
    if comparison.equal:
        return comparison
    explorer = Explorer(task=task, model=model, training=run.training, meter=meter, rows=rows)
    return replace(comparison, reasons=explorer.batch_dependence().sentences(split=False))


def splits(samples: int) -> list[tuple[int, ...]]:
    """Returns the sizes of micro-batches to try: two unequal ones, ever larger ones, and single samples.

    Equal parts would hide a mean that is taken over each part.

    >>> splits(8)
    [(3, 5), (1, 2, 5), (1, 1, 1, 1, 1, 1, 1, 1)]
    """
    first = max(1, 3 * samples // 8)
    growing: list[int] = []
    while (rest := samples - sum(growing)) > 0:
        size = 2 ** len(growing)
        # The last one takes what would be smaller than the one before it.
        growing.append(size if rest >= 3 * size else rest)
    found = [(first, samples - first), tuple(growing), (1,) * samples]
    # A pair cannot be split in different ways.
    return list(dict.fromkeys(sizes for sizes in found if len(sizes) > 1))


def _consult_reference_models(task: Task, meter: Meter) -> None:
    for one in task.reference_models():
        if one.placements:
            task.bind_outputs(one.role, ComputedOutputs(one, meter, Precision.named("fp64")))


def _rows(task: Task, run: ResolvedRun, size: int) -> NDArray[np.int64]:
    rows = task.in_epoch(0, run.training.epochs).train_rows
    if len(rows) < 2 or size < 2:
        raise ConfigError("A batch of one sample cannot be split", value=f"batch size {size}, {len(rows)} samples",
                          remedy="Give --batch-size 64, or more data")  # fmt: skip
    drawn = np.random.default_rng(run.training.seed).choice(rows, min(size, len(rows)), replace=False)
    return np.sort(drawn)


@dataclass(frozen=True)
class _Batch:
    """One logical batch, with what computes its gradient."""

    model: nn.Module
    batch: LogicalBatch
    weights: Mapping[str, float]
    meter: Meter

    def gradient(self, sizes: tuple[int, ...]) -> Tensor:
        """Returns the gradient as training accumulates it in micro-batches of these sizes."""
        # Every micro-batch costs 1 and may cost no more, so that the batch is cut between them.
        costs = BatchCosts.of_samples([1 / size for size in sizes for _ in range(size)])
        batcher = MicroBatcher(self.model, meter=self.meter, rules=SplitRules(safe_limit=1.0),
                               rescue=RescueSettings(adaptive=False))  # fmt: skip
        snapshot = Snapshot(self.model, self.meter.device)
        self.model.zero_grad()
        batcher.run(lambda start, stop: self.batch.losses(self.model, start, stop), costs,
                    denominators=self.batch.denominators, weights=self.weights)  # fmt: skip
        snapshot.restore()
        return self._flat()

    def averaged_gradient(self, sizes: tuple[int, ...]) -> Tensor:
        """Returns the mean of the micro-batches' own gradients, each with its own denominators."""
        snapshot, start = Snapshot(self.model, self.meter.device), 0
        self.model.zero_grad()
        for size in sizes:
            losses = self.batch.losses(self.model, start, start + size)
            means = [self.weights[term] * total / (own or 1.0) for term, (total, own) in losses.items()]
            (torch.stack(means).sum() / len(sizes)).backward()
            start += size
        snapshot.restore()
        return self._flat()

    def _flat(self) -> Tensor:
        return torch.cat([one.grad.flatten() for one in self.model.parameters() if one.grad is not None])


def _relative_error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(torch.finfo(other.dtype).tiny))


def comparison_lines(comparison: GradientComparison) -> list[str]:
    """Writes a comparison: what was computed, a line for each split, and a sentence that says what it means."""
    dropout = "dropout off" if comparison.drops else "no dropout"
    of = f" (of the {comparison.batch_size:,} that a step has)" if comparison.samples < comparison.batch_size else ""
    lines = [
        f"{comparison.key}: one batch of {comparison.samples:,} samples{of}",
        f"on {comparison.device}, in float64, {dropout}; {comparison.parameters:,} parameters",
        "",
        "  micro-batches                      relative L2 error of the gradient",
    ]
    lines += [f"  {_sizes_text(sizes):<35}{error:.1e}" for sizes, error in comparison.errors.items()]
    largest = max(comparison.errors.values())
    if comparison.equal:
        averaged = f"{comparison.averaged_error:.1%}"
        return [*lines, "", "Split gradients equal the gradient of the whole batch: the largest difference,",
                f"{largest:.0e} of its length, is rounding. A loop that averages the micro-batches'",
                f"means would be off by {averaged} of it."]  # fmt: skip
    return [*lines, "", "Split gradients do not equal the gradient of the whole batch: they are off by",
            f"up to {largest:.1%} of its length.", *(f"{reason}." for reason in comparison.reasons)]  # fmt: skip


def comparison_json(comparison: GradientComparison) -> dict[str, Any]:
    """Writes a comparison as plain values."""
    errors = [{"micro_batches": list(sizes), "relative_error": error} for sizes, error in comparison.errors.items()]
    return {**asdict(comparison), "errors": errors, "equal": comparison.equal}


def _sizes_text(sizes: tuple[int, ...]) -> str:
    if set(sizes) == {1}:
        return f"{len(sizes)} of one sample"
    listed = ", ".join(map(str, sizes))
    return f"{len(sizes)}, of {listed}"
