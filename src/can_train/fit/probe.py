"""Fits the cost model to tiny real runs (probes).

Shapes: F features, R samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import DoesNotFitError
from can_train.fit.cost_model import ALLOCATION_QUANTUM, EXPLAINED, CostModel, fit_cost_model
from can_train.fit.features import batch_totals
from can_train.memory.catalogue import cards_that_hold
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.task import Feature

# Multiples of the first probes' size. Probes grow until two rounds agree: in smaller ones, memory that does not grow
# with the batch (workspaces, gradients of weights) hides the memory that does.
ROUNDS: Final = (1, 2, 4, 8, 16, 32, 64)

# More multiples, for weights so large and samples so cheap that gradients still hide the line: hundreds of samples of a
# wide multilayer perceptron take less memory than its weights.
LATER_ROUNDS: Final = (128, 256, 512, 1024)

# Samples of a first probe; with fewer, the shape of one sample would decide.
SMALLEST_PROBE: Final = 4

# Relative residual of the probes at which they end.
AGREED: Final = 0.005

# Cost of the largest probe in units of the gradients' size: a line fitted below that bends where activations outgrow
# the gradients, later the less it bends.
BEYOND_GRADIENTS: Final = 4.0

# Cost, in the same unit, up to which probes without a line grow beyond `ROUNDS`: a bend at `BEYOND_GRADIENTS` shows in
# three sizes of batches after it.
WORTH_GROWING: Final = 8 * BEYOND_GRADIENTS

# Share of the capacity that probes stay below: they should be tiny.
PROBE_SHARE: Final = 0.5

# Shares of the readings, smallest first, that are left out in turn to find a line.
_DROPPED: Final = (0.0, 0.25, 0.5, 0.7)

MeasurePeak = Callable[[NDArray[np.int64]], int]
"""Runs the samples at some positions as one batch; returns its peak in bytes."""

_Reading = tuple[NDArray[np.float64], float]
"""(batch totals [F], peak in bytes)."""


@dataclass(frozen=True, kw_only=True)
class ProbeFit:
    """The cost model that probes lead to."""

    model: CostModel  # Its `explains` tells whether the features account for the measured peaks
    largest_cost: float  # Cost of the probe with the largest peak
    largest_peak: float  # That peak, in bytes
    slack_bytes: float = 0.0  # Bytes that the allocator reserved beyond the allocated ones; 0 where it reserves none


def fit_by_probes(
    measure: MeasurePeak,
    features: Sequence[Feature],
    counts: NDArray[np.float64],
    *,
    capacity_bytes: float,
    gradient_bytes: float = 0.0,
) -> ProbeFit:
    """Runs small batches at the extremes of the data, larger ones until two sizes agree on a line, and fits it.

    Args:
        measure: Runs one batch of samples, given by their positions in `counts`.
        features: F of them.
        counts: [R, F] of every sample.
        capacity_bytes: Capacity of the device.
        gradient_bytes: Size of the weights' gradients. They decide the peak of batches that cost less, at the end of a
            backward pass, and hide the line that holds for batches that fill a device.

    Raises:
        DoesNotFitError: Not even a single sample fits.
    """
    readings: list[_Reading] = []
    for multiple in ROUNDS + LATER_ROUNDS:
        is_first = not readings
        complete = _run_round(measure, features, counts, SMALLEST_PROBE * multiple, readings)
        if not readings:
            _run_round(measure, features, counts, 1, readings)
        if not readings:
            raise DoesNotFitError(
                "At least one training sample must fit on the device",
                value=f"a batch of one sample needs more than the {capacity_bytes / 2**20:.1f} MiB of the device",
                remedy=(
                    f"Choose a smaller model (--size student), or a larger device ({cards_that_hold(capacity_bytes)})"
                ),
            )
        model = _fit(features, readings)
        smallest, largest = min(peak for _, peak in readings), max(peak for _, peak in readings)
        cost = max(largest - model.base_bytes, 0.0)
        # Peaks that do not grow at all agree on nothing: the memory that grows is still hidden.
        agreed = largest > smallest and model.relative_residual <= AGREED and cost >= BEYOND_GRADIENTS * gradient_bytes
        if not complete or (not is_first and (agreed or largest > PROBE_SHARE * capacity_bytes)):
            break
        if multiple >= ROUNDS[-1] and cost >= WORTH_GROWING * gradient_bytes:
            break
    totals, peak = max(readings, key=lambda reading: reading[1])
    return ProbeFit(model=model, largest_cost=float(totals @ np.asarray(model.coefficients)), largest_peak=peak)


def _run_round(
    measure: MeasurePeak,
    features: Sequence[Feature],
    counts: NDArray[np.float64],
    size: int,
    readings: list[_Reading],
) -> bool:
    """Runs the probes of one size and adds to the readings; returns whether all of them fitted."""
    complete = True
    for positions in extreme_samples(counts, size):
        peak = None
        with CatchOutOfMemory():
            peak = measure(positions)
        if peak is not None:
            readings.append((batch_totals(features, counts[positions]), float(peak)))
            continue
        complete = False
        # Single samples are all tried, since one of them may be huge.
        if size > 1:
            break
    return complete


def extreme_samples(counts: NDArray[np.float64], size: int) -> list[NDArray[np.int64]]:
    """Chooses the samples of one round's probes.

    Returns:
        Positions [size] in counts [R, F], one array a probe: the largest and the smallest in each feature, the largest
        and smallest ratio of each pair of features, the first ones in order, and twice as many from the end. Too few
        samples are repeated.
    """
    keys = [counts[:, f] for f in range(counts.shape[1]) if np.ptp(counts[:, f]) > 0]
    # Extreme ratios tell features apart that grow together in ordinary batches (nodes and edges).
    ratios = [a / np.maximum(b, 1.0) for i, a in enumerate(keys) for b in keys[:i]]
    probes: dict[tuple[int, ...], NDArray[np.int64]] = {}
    # The largest come last: where one runs out of memory, the others of its round have been read.
    for key in reversed(keys + ratios):
        order = np.argsort(key, kind="stable")
        for ranked in (order, order[::-1]):
            probe = np.resize(ranked[:size], size)
            # Two keys may choose the same samples.
            probes.setdefault(tuple(sorted(probe.tolist())), probe)
    everything = np.arange(len(counts))
    # Other samples with the same features: only they show whether the features explain everything.
    return [*probes.values(), np.resize(everything, size), np.resize(everything[::-1], 2 * size)]


def _fit(features: Sequence[Feature], readings: list[_Reading]) -> CostModel:
    """Fits a line to the readings, without the smallest ones where only then it holds.

    The peak of a small batch may be another moment's (the gradients of the weights, at the end of a backward pass),
    which does not grow with the batch. The maximum of several straight lines bends upwards, so it is the small probes
    that lie above the line.
    """
    ordered = sorted(readings, key=lambda reading: reading[1])
    models = []
    for share in _DROPPED:
        dropped, kept = ordered[: int(share * len(ordered))], ordered[int(share * len(ordered)) :]
        if share and len({tuple(totals) for totals, _ in kept}) < len(features) + 2:
            break
        model = fit_cost_model(features, np.stack([totals for totals, _ in kept]), np.array([peak for _, peak in kept]))
        if any(_lies_below(model, reading) for reading in dropped):
            continue
        model = replace(model, below=_sorted_by_cost(model, [*dropped, kept[0]])) if dropped else model
        models.append(model)
        if model.relative_residual <= AGREED:
            return model
    return min(models, key=lambda model: model.relative_residual)


def _sorted_by_cost(model: CostModel, readings: list[_Reading]) -> tuple[tuple[float, float], ...]:
    costs = np.array([totals @ np.asarray(model.coefficients) for totals, _ in readings])
    order = np.argsort(costs, kind="stable")
    # A larger batch never takes less.
    peaks = np.maximum.accumulate(np.array([peak for _, peak in readings])[order])
    return tuple(zip(costs[order].tolist(), peaks.tolist(), strict=True))


def _lies_below(model: CostModel, reading: _Reading) -> bool:
    """Tells whether a dropped reading is less than the line says: nothing hides the line there, it does not hold."""
    totals, peak = reading
    cost = float(totals @ np.asarray(model.coefficients))
    return peak < model.base_bytes + cost - EXPLAINED * max(cost, ALLOCATION_QUANTUM)
