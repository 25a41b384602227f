"""Searches for the largest size that fits: `find_max_size` for any trial, `find_phase_limit` for batches of samples.

Shapes: F features, R samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from can_train.errors import ArgumentError
from can_train.fit.cost_model import PhaseLimit, typical_totals
from can_train.fit.packing import ROUNDING, BatchCosts
from can_train.memory.out_of_memory import CatchOutOfMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.fit.cost_model import ProbeFit

# Divisor of the size while nothing has fitted yet: an out-of-memory costs more than a trial that fits.
_RETREAT: Final = 4
_GROWTH: Final = 2  # Multiplier of the size while everything has fitted and there are no readings of the peak
# Readings after which the search ignores them: where peaks follow no line or parabola, it would creep.
_MAX_READINGS: Final = 16
# Largest multiplier of a jump: a line through readings is not trusted further than this beyond the last of them.
_JUMP: Final = 32
_LONG_JUMP: Final = 1.5  # Multiplier of the size from which a jump counts as long
# Share of the memory left that a long jump fills: peaks that bend up by up to 30 % then still fit.
_LONG_JUMP_SHARE: Final = 0.7
_WORTHWHILE: Final = 0.01  # Relative gain that is worth another trial
_APART: Final = 1.05  # Ratio of two sizes from which their readings give a slope; closer ones give round-off and noise
# Smallest slope that is believed, as a share of the slope from zero, where size 0 is known to read 0.
_GENTLEST: Final = 0.5
# Relative distance below the smallest failure at which a search by halves ends; half of it is lost on average.
_CLOSE: Final = 0.07
_Reading = tuple[int, float]  # (size, peak)
_UNITS: Final = 2**20  # Steps of the search up to the largest cost worth trying: finer than any sample matters
_MOST_FILLED: Final = 16  # Samples that a packed batch is filled up with at most
# Share of the predicted room that the first trial takes: fragmentation grows with the batch, and a trial that fits is
# worth more than one that does not, since its peak can be read.
_CAUTION: Final = 0.97
_CEILING: Final = 0.99  # Share of the room that the search fills; beyond it, another out-of-memory buys next to nothing
_MOST_COPIES: Final = 64  # Times that the whole data set is repeated at most to make a trial's batch


@dataclass(frozen=True)
class SizeSearch:
    """Result of a search."""

    size: int  # Largest size that was tried and fits; 0 where nothing fits
    trials: int  # Sizes tried
    ooms: int  # Trials that ran out of memory


def find_max_size(
    trial: Callable[[int], object], *, start: int = 8, upper: int = 2**20, capacity: float | None = None
) -> SizeSearch:
    """Searches for the largest size that fits.

    Without readings the size doubles until it fails, and the rest is searched by halves. With readings, a line or a
    parabola is fitted to them and the search jumps. The search ends within a few per cent of the largest size, not at
    it, where another out-of-memory would buy no more than that.

    Args:
        trial: Runs one size; raises an out-of-memory error where it does not fit, and may return its peak in bytes.
            Any other error ends the search.
        start: First size to try; `upper` where it is larger.
        upper: Largest size to try.
        capacity: Bytes that fit, in the unit of the readings; None ignores readings.

    Raises:
        ArgumentError: `start`, `upper` or `capacity` is too small to search.
    """
    if not isinstance(start, Integral) or not isinstance(upper, Integral):
        raise ArgumentError("Sizes are whole numbers", value=f"start {start!r}, upper {upper!r}")
    if start < 1 or upper < 1:
        raise ArgumentError("A search starts and ends at a size of at least 1", value=f"start {start}, upper {upper}")
    if capacity is not None and not capacity > 0:
        raise ArgumentError("A capacity is a positive number of bytes", value=f"{capacity}")
    return _search(trial, _Progress(fails=int(upper) + 1), start=min(int(start), int(upper)), capacity=capacity)


@dataclass
class _Progress:
    """What the trials so far have shown. Every further size lies between `fits` and `fails`, so the search ends."""

    fails: int  # Smallest size that is ruled out
    fits: int = 0  # Largest size that fits
    trials: int = 0
    ooms: int = 0
    readings: list[_Reading] = field(default_factory=list)  # (size, peak), sorted by size
    # Whether size 0 is known to read 0. A slope far below the one from there then shows that readings no longer tell
    # how much is needed: an allocator's cache has filled the device.
    from_zero: bool = False


def _search(trial: Callable[[int], object], progress: _Progress, *, start: int, capacity: float | None) -> SizeSearch:
    size = start
    while size:
        progress.trials += 1
        result: Any = None
        with CatchOutOfMemory() as caught:
            result = trial(size)
        if caught.message:
            progress.ooms += 1
            progress.fails = size
        else:
            progress.fits = size
        is_number = isinstance(result, Real) and not isinstance(result, bool)
        if capacity is not None and is_number and 0 < float(result) < math.inf:
            progress.readings.append((size, float(result)))
        size = _next_size(progress, capacity)
    return SizeSearch(size=progress.fits, trials=progress.trials, ooms=progress.ooms)


def _next_size(progress: _Progress, capacity: float | None) -> int:
    """Returns the size to try next, strictly between what fits and what does not; 0 ends the search."""
    fits, fails, readings = progress.fits, progress.fails, progress.readings
    if fails - fits <= 1:
        return 0
    if fits == 0:
        return max(1, fails // _RETREAT)
    is_close = fails - fits <= _CLOSE * fits
    # A trial that returned no reading leaves the line behind: from there on the search goes without.
    if capacity is not None and readings and readings[-1][0] == fits and len(readings) <= _MAX_READINGS:
        size = _jump(progress, capacity)
        if size <= fits:
            return 0
        if not progress.ooms:
            return min(size, fails - 1)
        if size < fails * (1 - _CLOSE):
            return size
        # The line leads to where memory ran out, so it is a little off there. A little less may fit, and less still
        # with each failure.
        size = int(fails * (1 - _CLOSE * 2 ** (progress.ooms - 1)))
        if size > fits and not is_close:
            return size
    elif not progress.ooms:
        return min(fits * _GROWTH, fails - 1)
    return 0 if is_close else (fits + fails) // 2


def _jump(progress: _Progress, capacity: float) -> int:
    """Returns the size that the readings lead to; that of the last reading where nothing is left to gain."""
    size, peak = progress.readings[-1]
    gentlest = _GENTLEST * peak / size if progress.from_zero else 0.0
    predicted = _extrapolate(progress.readings, capacity, gentlest)
    if predicted - size < max(1.0, _WORTHWHILE * size):
        return size
    if predicted > _LONG_JUMP * size:
        predicted = _extrapolate(progress.readings, peak + _LONG_JUMP_SHARE * (capacity - peak), gentlest)
    return int(min(predicted, size * _JUMP))


def _extrapolate(readings: list[_Reading], peak_bytes: float, gentlest: float) -> float:
    """Returns the size at which the curve through the last readings reaches a peak."""
    size, peak = readings[-1]
    room = peak_bytes - peak
    if room <= 0:
        return size
    # The last reading and up to two before it, each far enough from the next to give a slope.
    apart = readings[-1:]
    for reading in reversed(readings[:-1]):
        if len(apart) < 3 and reading[0] * _APART <= apart[0][0]:
            apart.insert(0, reading)
    slopes = [max((b[1] - a[1]) / (b[0] - a[0]), gentlest) for a, b in pairwise(apart)]
    # Through the origin: the steepest line that has no negative base, so a safe size rather than the largest.
    safe = max(size * peak_bytes / peak, size + 1.0)
    if not slopes:
        return safe
    if slopes[-1] <= 0:
        # The optimizer's memory hides that of the batch, which does not say how far it is from showing.
        return max(safe, size * _GROWTH)
    if len(slopes) == 1 or slopes[1] <= slopes[0]:
        return size + room / slopes[-1]
    # Where the readings bend up, the parabola through them (Newton's form), solved for the step beyond the last.
    (first, _), (second, _), _ = apart
    bend = (slopes[1] - slopes[0]) / (size - first)
    slope = slopes[1] + bend * (size - second)
    return size + 2 * room / (slope + math.sqrt(slope**2 + 4 * bend * room))


class Peak(NamedTuple):
    """Peak bytes of a trial."""

    allocated: int  # In use
    reserved: int  # Held by the allocator for them; 0 where there is no caching allocator


Measure = Callable[["NDArray[np.int64]"], Peak]  # Runs the samples at some positions as one micro-batch


def find_phase_limit(
    probes: ProbeFit, measure: Measure, order: BatchCosts, *, upper: float, capacity_bytes: float
) -> PhaseLimit:
    """Searches for the largest cost that fits, up to `upper`, beyond which memory does not matter. The probes' cost
    fits, and is the first reading; batches are made of the samples of `order`. The tuned limit is the cost of the
    largest batch that was run and fits.
    """
    model, mean_totals, unit = probes.model, order.mean_counts(), upper / _UNITS
    largest = (probes.largest_cost, probes.largest_peak)

    def trial(units: int) -> float | None:
        nonlocal largest
        positions = pack_worst_case(order, units * unit)
        if len(positions) == 0:
            # Less than the smallest sample: nothing would run, and that fits.
            return None
        cost, peak = order.chosen(positions).total, measure(positions)
        largest = max(largest, (cost, float(peak.allocated)))
        # Reserved memory decides whether more fits. Packing leaves a remainder, so the reading is scaled to the units.
        return (max(peak) - model.base_bytes) * units * unit / cost

    free = capacity_bytes - model.base_bytes
    likely = _CAUTION * (free - probes.slack_bytes)
    # Where the interval leaves less than the probes have shown to fit, half-way up is worth a trial.
    predicted = max(
        likely - model.half_width(typical_totals(model, mean_totals, free)), (likely + probes.largest_cost) / 2
    )
    fits = min(int(probes.largest_cost / unit), _UNITS - 1)
    found = _search(
        trial,
        _Progress(fails=_UNITS + 1, fits=fits, readings=[(fits, fits * unit)] if fits else [], from_zero=True),
        start=min(_UNITS, max(fits + 1, int(predicted / unit))),
        capacity=max(_CEILING * free, 1.0),
    )
    cost, peak = largest
    return PhaseLimit(
        model=model,
        tuned_limit=cost,
        capped=found.size >= _UNITS,
        trials=found.trials,
        ooms=found.ooms,
        measured_ratio=max(peak - model.base_bytes, 1.0) / cost if cost else 1.0,
        mean_totals=mean_totals,
    )


def pack_worst_case(order: BatchCosts, limit: float) -> NDArray[np.int64]:
    """Packs the costliest samples, repeated where there are too few, into a batch of at most some cost.

    Returns:
        Positions in `order`; empty where every sample costs more.
    """
    each = order.each()
    ranked = np.argsort(-each, kind="stable")
    ranked = ranked[each[ranked] <= limit * (1 + ROUNDING)]
    if len(ranked) == 0:
        return ranked
    once = order.chosen(ranked).total
    packed = np.tile(ranked, min(int(limit / once) + 1 if once > 0 else 1, _MOST_COPIES))
    packed = packed[: order.chosen(packed).reach(0, limit)]
    room = limit - order.chosen(packed).total
    # The largest samples that still fit fill the batch up: where few fit at all, the remainder is a lot.
    for _ in range(_MOST_FILLED):
        fitting = int(np.searchsorted(-each[ranked], -room))
        if fitting == len(ranked):
            break
        longer = np.append(packed, ranked[fitting])
        cost = order.chosen(longer).total
        if cost > limit * (1 + ROUNDING) or limit - cost >= room:
            break
        packed, room = longer, limit - cost
    return packed
