"""Fits the cost model to tiny real runs."""

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

ROUNDS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Multiples of the first probes' size. Probes grow until two rounds agree: below that, memory that does not grow with
the batch (workspaces, gradients of weights) hides what does."""


LATER_ROUNDS: Final = (128, 256, 512, 1024)
"""The same where weights are so large, and samples so cheap, that gradients still hide the law: of a wide multilayer
perceptron hundreds of samples take less than its weights."""


SMALLEST_PROBE: Final = 4
"""Samples of a first probe; of fewer, one sample's shape would decide."""


def extreme_samples(counts: NDArray[np.float64], size: int) -> list[NDArray[np.int64]]:
    """Chooses the samples of one round's probes.

    Args:
        counts: [R, F] the samples' features.
        size: Samples of a probe.

    Returns:
        Positions [size] in `counts`, one array a probe: the largest and the smallest in each feature, the largest and
        smallest ratio of each pair of features, the first ones as they come, and twice as many from the end. Too few
        samples are repeated.
    """
    keys = [counts[:, f] for f in range(counts.shape[1]) if np.ptp(counts[:, f]) > 0]
    ratios = [a / np.maximum(b, 1.0) for i, a in enumerate(keys) for b in keys[:i]]
    chosen = [np.arange(len(counts))]
    for key in keys + ratios:
        order = np.argsort(key, kind="stable")
        chosen += [order[::-1], order]
    probes = [np.resize(order[:size], size) for order in chosen[1:]]
    # Samples that the features call alike, but others: only so a batch shows that the features do not say it all.
    others = chosen[0][::-1]
    return [*_distinct(probes), np.resize(chosen[0], size), np.resize(others, 2 * size)]


def _distinct(probes: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Drops probes that hold the same samples as an earlier one."""
    return list({tuple(sorted(probe.tolist())): probe for probe in reversed(probes)}.values())


AGREED: Final = 0.005
"""Relative residual of the probes' costs at which they end: the law shows."""


BEYOND_GRADIENTS: Final = 4.0
"""Cost of the largest probe in units of the gradients' size: a law that holds below bends where activations outgrow
them, later the less it bends."""


WORTH_GROWING: Final = 8 * BEYOND_GRADIENTS
"""The same up to which probes without a law grow beyond `ROUNDS`: a bend at `BEYOND_GRADIENTS` shows in three sizes of
batches after it."""


PROBE_SHARE: Final = 0.5
"""Share of the capacity that probes stay below: they are to be tiny."""


_DROPPED: Final = (0.0, 0.25, 0.5, 0.7)
"""Shares of the readings, smallest first, that are left out to find a law."""


_Reading = tuple[NDArray[np.float64], float]
"""(batch totals [F], peak in bytes)."""


def fit_by_probes(
    measure: Callable[[NDArray[np.int64]], int],
    features: Sequence[Feature],
    counts: NDArray[np.float64],
    *,
    capacity_bytes: float,
    gradient_bytes: float = 0.0,
) -> "Probed":
    """Runs small batches at the extremes of the data, larger ones until two sizes agree on a law, and fits it.

    Args:
        measure: Runs the samples at some positions of `counts` as one batch; returns its peak in bytes.
        features: F of them.
        counts: [R, F] of every sample.
        capacity_bytes: Of the device.
        gradient_bytes: What the gradients of the weights take: beside batches that cost less, it is they that decide
            the peak, at the end of a backward pass, and the law of what fills a device does not show.

    Returns:
        The cost model, whose `explains` tells whether the features account for what was seen; and the largest probe.

    Raises:
        DoesNotFitError: Not even the smallest probe fits.
    """
    readings: list[_Reading] = []
    for multiple in ROUNDS + LATER_ROUNDS:
        before = len(readings)
        complete = _round(measure, features, counts, SMALLEST_PROBE * multiple, readings)
        if not readings:
            _round(measure, features, counts, 1, readings)
            if not readings:
                raise _nothing_fits(capacity_bytes)
        model = _fit(features, readings)
        smallest, largest = min(peak for _, peak in readings), max(peak for _, peak in readings)
        # Peaks that do not grow at all agree on nothing: what does grow is still hidden.
        agreed = before > 0 and largest > smallest and model.relative_residual <= AGREED
        largest_cost = max(largest - model.base_bytes, 0.0)
        agreed = agreed and largest_cost >= BEYOND_GRADIENTS * gradient_bytes
        if not complete or agreed or (before > 0 and largest > PROBE_SHARE * capacity_bytes):
            break
        if multiple >= ROUNDS[-1] and largest_cost >= WORTH_GROWING * gradient_bytes:
            break
    totals, peak = max(readings, key=lambda reading: reading[1])
    return Probed(model=model, largest_cost=float(totals @ np.asarray(model.coefficients)), largest_peak=peak)


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What the probes showed.

    Attributes:
        model: The cost model.
        largest_cost: Cost of the probe with the largest peak.
        largest_peak: That peak, in bytes.
    """

    model: CostModel
    largest_cost: float
    largest_peak: float


def _round(
    measure: Callable[[NDArray[np.int64]], int],
    features: Sequence[Feature],
    counts: NDArray[np.float64],
    size: int,
    readings: list[_Reading],
) -> bool:
    """Runs the probes of one size and adds to the readings; False where one runs out of memory, which ends it: only
    single samples are all tried, since one of them may be huge.
    """
    complete = True
    for positions in extreme_samples(counts, size):
        peak = _attempt(measure, positions)
        if peak is not None:
            readings.append((batch_totals(features, counts[positions]), float(peak)))
            continue
        complete = False
        if size > 1:
            break
    return complete


def _attempt(measure: Callable[[NDArray[np.int64]], int], positions: NDArray[np.int64]) -> int | None:
    with CatchOutOfMemory():
        return measure(positions)
    return None


def _fit(features: Sequence[Feature], readings: list[_Reading]) -> CostModel:
    """Fits a law to the readings, without the smallest ones where it is that which makes it hold.

    Below some size the peak is another moment's (the gradients of the weights, at the end of a backward pass), which
    does not grow with the batch. The larger moment of several straight lines bends upwards, so it is the small probes
    that lie off, above the law.
    """
    ordered = sorted(readings, key=lambda reading: reading[1])
    needed = len(features) + 2
    models = []
    for share in _DROPPED:
        dropped, kept = ordered[: int(share * len(ordered))], ordered[int(share * len(ordered)) :]
        if share and len({tuple(totals) for totals, _ in kept}) < needed:
            break
        model = fit_cost_model(features, np.stack([totals for totals, _ in kept]), np.array([peak for _, peak in kept]))
        if any(_lies_below(model, reading) for reading in dropped):
            continue
        model = replace(model, below=_below(model, [*dropped, kept[0]])) if dropped else model
        models.append(model)
        if model.relative_residual <= AGREED:
            return model
    return min(models, key=lambda model: model.relative_residual)


def _below(model: CostModel, readings: list[_Reading]) -> tuple[tuple[float, float], ...]:
    """Returns (cost, peak) of readings in order of cost; a larger batch never takes less."""
    costs = np.array([totals @ np.asarray(model.coefficients) for totals, _ in readings])
    order = np.argsort(costs, kind="stable")
    peaks = np.maximum.accumulate(np.array([peak for _, peak in readings])[order])
    return tuple(zip(costs[order].tolist(), peaks.tolist(), strict=True))


def _lies_below(model: CostModel, reading: _Reading) -> bool:
    """Tells whether a reading is less than the law says: nothing larger hides the law there, it does not hold."""
    totals, peak = reading
    cost = float(totals @ np.asarray(model.coefficients))
    return peak < model.base_bytes + cost - EXPLAINED * max(cost, ALLOCATION_QUANTUM)


def _nothing_fits(capacity_bytes: float) -> DoesNotFitError:
    return DoesNotFitError(
        "At least one training sample must fit on the device",
        value=f"a batch of one sample needs more than the {capacity_bytes / 2**20:.1f} MiB that are there",
        remedy=f"Choose a smaller model (--size student), or a larger device ({cards_that_hold(capacity_bytes)})",
    )
