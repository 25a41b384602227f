"""Compares, on a run's own model and data, the gradient of a whole batch with the gradient in micro-batches.

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
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.pass_state import Snapshot
from can_train.fit.precision import Precision
from can_train.fit.random_state import step_generator
from can_train.fit.rescue import RescueSettings
from can_train.memory.meters import Meter, is_simulated, open_meter
from can_train.reporter import Reporter
from can_train.task import BatchTask, LogicalBatch
from can_train.training.loading import fresh_model, sample_task
from can_train.training.reference_models import ComputedOutputs

MOST_SAMPLES: Final = 256  # of the batch: more take longer, and show nothing else
# Largest relative L2 error that is rounding: 1e-16 per operation, and gradients add up thousands.
ROUNDING: Final = 1e-12


@dataclass(frozen=True)
class Difference:
    """How far a batch that was computed in parts lies from the same batch computed whole."""

    gradient: float  # relative L2 error
    loss: float  # absolute


@dataclass(frozen=True, kw_only=True)
class GradientComparison:
    """How far gradients and losses of the same batch lie from each other, by the sizes of the micro-batches."""

    key: str  # of the configuration
    device: str  # where they were computed
    samples: int  # of the batch
    batch_size: int  # of the configuration
    parameters: int  # numbers in a gradient
    errors: Mapping[tuple[int, ...], Difference]
    averaged: Mapping[tuple[int, ...], Difference]  # where each micro-batch's mean counts alike, as in many loops
    drops: bool  # whether the model has dropout, which was off
    reasons: Sequence[str] = ()  # why they differ, as sentences; empty where they do not, or nobody knows

    @property
    def equal(self) -> bool:
        """Whether all errors are rounding."""
        return max(one.gradient for one in self.errors.values()) <= ROUNDING


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
    for one in task.reference_models():
        if one.placements:
            task.bind_outputs(one.role, ComputedOutputs(one, meter, Precision.named("fp64")))
    rows = _rows(task, run, min(batch_size, MOST_SAMPLES))
    task.before_step(model, rows, 0.0, step_generator(seed=seed, step=0, before=True))
    epoch, generator = task.in_epoch(0, training.epochs), step_generator(seed=seed, step=0)
    batch = epoch.logical_batch(rows, meter.device, torch.float64, generator)
    with NoDropout(model) as no_dropout:
        denominators = batch.denominators
        if denominators is None:
            denominators = {term: float(own) for term, (_, own) in batch.losses(model, 0, len(rows)).items()}
        work = _Batch(model, batch, task.loss_weights, meter, denominators)
        whole = work.accumulate((len(rows),))
        ways = splits(len(rows), training.gradient_accumulation_steps)
        errors = {sizes: _difference(work.accumulate(sizes), whole) for sizes in ways}
        averaged = {sizes: _difference(work.accumulate(sizes, averages=True), whole) for sizes in ways}
    comparison = GradientComparison(key=run.key, device=meter.name, samples=len(rows), batch_size=batch_size,
                                    parameters=whole[1].numel(), errors=errors, averaged=averaged,
                                    drops=no_dropout.seen)  # fmt: skip
    if comparison.equal:
        return comparison
    explorer = Explorer(task=task, model=model, training=run.training, meter=meter, rows=rows)
    return replace(comparison, reasons=explorer.batch_dependence().sentences(split=False))


def splits(samples: int, accumulated: int = 1) -> list[tuple[int, ...]]:
    """Returns the sizes of micro-batches to try: the loader batches that are accumulated, where they are; two unequal
    ones, ever larger ones, and single samples.

    Equal parts alone would hide a mean that is taken over each part.

    >>> splits(8, 4)
    [(2, 2, 2, 2), (3, 5), (1, 2, 5), (1, 1, 1, 1, 1, 1, 1, 1)]
    """
    first = max(1, 3 * samples // 8)
    growing: list[int] = []
    while (rest := samples - sum(growing)) > 0:
        size = 2 ** len(growing)
        # The last one takes a rest that would be smaller than the one before it.
        growing.append(size if rest >= 3 * size else rest)
    each = -(-samples // accumulated)
    loaded = tuple(min(each, samples - start) for start in range(0, samples, each))
    found = [loaded if each > 1 else (), (first, samples - first), tuple(growing), (1,) * samples]
    # A pair cannot be split in different ways.
    return list(dict.fromkeys(sizes for sizes in found if len(sizes) > 1))


def _rows(task: BatchTask, run: ResolvedRun, size: int) -> NDArray[np.int64]:
    rows = task.in_epoch(0, run.training.epochs).train_rows
    if len(rows) < 2 or size < 2:
        raise ConfigError("A batch of one sample cannot be split", value=f"batch size {size}, {len(rows)} samples",
                          remedy="Give --batch-size 64, or more data")  # fmt: skip
    drawn = np.random.default_rng(run.training.seed).choice(rows, min(size, len(rows)), replace=False)
    return np.sort(drawn)


@dataclass(frozen=True)
class _Batch:
    """One logical batch, with the model and the device that compute its gradient."""

    model: nn.Module
    batch: LogicalBatch
    weights: Mapping[str, float]
    meter: Meter
    denominators: Mapping[str, float]

    def accumulate(self, sizes: tuple[int, ...], *, averages: bool = False) -> tuple[float, Tensor]:
        """Returns the loss, and the gradient as training accumulates it, in micro-batches of these sizes; or the means
        of the micro-batches' own losses and gradients, each with its own denominators.
        """
        known = self.denominators
        denominators = dict.fromkeys(known, float(len(sizes))) if averages else dict(known)

        def losses_of(start: int, stop: int) -> Losses:
            losses = self.batch.losses(self.model, start, stop)
            for term in losses:
                # The whole batch may lack a term that a part has.
                denominators.setdefault(term, float(len(sizes)) if averages else 0.0)
            if not averages:
                return losses
            return {term: (total / (own or 1.0), 1.0) for term, (total, own) in losses.items()}

        batcher = MicroBatcher(self.model, meter=self.meter, limits=lambda _: sizes, fit="split",
                               rescue=RescueSettings(adaptive=False))  # fmt: skip
        snapshot = Snapshot(self.model, self.meter.device)
        self.model.zero_grad()
        result = batcher.add_share(losses_of, sum(sizes), denominators=denominators, weights=self.weights or None)
        snapshot.restore()
        gradient = torch.cat([one.grad.flatten() for one in self.model.parameters() if one.grad is not None])
        return sum(self.weights.get(term, 1.0) * mean for term, mean in result.means.items()), gradient


def _difference(one: tuple[float, Tensor], whole: tuple[float, Tensor]) -> Difference:
    length = whole[1].norm().clamp_min(torch.finfo(whole[1].dtype).tiny)
    return Difference(float((one[1] - whole[1]).norm() / length), abs(one[0] - whole[0]))


def comparison_lines(comparison: GradientComparison) -> list[str]:
    """Writes a comparison: its batch, a line for each split, and a sentence about its meaning."""
    dropout = "dropout off" if comparison.drops else "no dropout"
    of = f" (of the {comparison.batch_size:,} that a step has)" if comparison.samples < comparison.batch_size else ""
    lines = [
        f"{comparison.key}: one batch of {comparison.samples:,} samples{of}",
        f"on {comparison.device}, in float64, {dropout}; {comparison.parameters:,} parameters",
        "",
        "                                 as trained here       mean of their means",
        "  micro-batches                  gradient      loss     gradient      loss",
    ]
    for sizes, error in comparison.errors.items():
        mean = comparison.averaged[sizes]
        lines.append(f"  {_sizes_text(sizes):<31}{error.gradient:>8.1e}{error.loss:>10.1e}"
                     f"{mean.gradient:>13.1e}{mean.loss:>10.1e}")  # fmt: skip
    lines += ["", "Gradients: relative L2 error; losses: difference; both from the whole batch.", ""]
    largest = max(error.gradient for error in comparison.errors.values())
    if comparison.equal:
        averaged = max(error.gradient for error in comparison.averaged.values())
        return [*lines, "Split gradients equal the gradient of the whole batch: the largest difference,",
                f"{largest:.0e} of its length, is rounding. A loop that averages the micro-batches'",
                f"means would be off by up to {averaged:.1%} of it."]  # fmt: skip
    return [*lines, "Split gradients do not equal the gradient of the whole batch: they are off by",
            f"up to {largest:.1%} of its length.", *(f"{reason}." for reason in comparison.reasons)]  # fmt: skip


def comparison_json(comparison: GradientComparison) -> dict[str, Any]:
    """Writes a comparison as plain values."""
    errors = [{"micro_batches": list(sizes), "relative_error": error.gradient, "loss_difference": error.loss,
               "averaged_relative_error": comparison.averaged[sizes].gradient,
               "averaged_loss_difference": comparison.averaged[sizes].loss}
              for sizes, error in comparison.errors.items()]  # fmt: skip
    plain = {name: value for name, value in asdict(replace(comparison, errors={}, averaged={})).items()
             if name != "averaged"}  # fmt: skip
    return {**plain, "errors": errors, "equal": comparison.equal}


def _sizes_text(sizes: tuple[int, ...]) -> str:
    if set(sizes) == {1}:
        return f"{len(sizes)} of one sample"
    if len(set(sizes)) == 1:
        return f"{len(sizes)} of {sizes[0]}"
    listed = ", ".join(map(str, sizes))
    return f"{len(sizes)}, of {listed}"
