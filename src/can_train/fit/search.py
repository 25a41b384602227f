"""Searches for the largest size that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from can_train.errors import ArgumentError
from can_train.fit.cost_model import PhaseLimit, typical_totals
from can_train.fit.packing import ROUNDING, BatchCosts
from can_train.memory.out_of_memory import CatchOutOfMemory

if TYPE_CHECKING:
    from can_train.fit.probe import Probed

_RETREAT: Final = 4
"""Divisor of the size while nothing has fitted yet: an out-of-memory costs more than a trial that fits."""


_GROWTH: Final = 2
"""Multiplier of the size while everything has fitted, without readings of the peak."""


_MAX_READINGS: Final = 16
"""Readings after which the law is given up: peaks that follow none would have the search creep."""


_JUMP: Final = 32
"""Largest multiplier of a jump: how far a straight line through readings is believed beyond the last of them."""


_LONG_JUMP: Final = 1.5
"""Multiplier of the size from which a jump counts as long."""


_AIM: Final = 0.7
"""Share of the memory left that a long jump aims to fill: a law that bends up by up to 30 % then still fits."""


_WORTHWHILE: Final = 0.01
"""Relative gain that is worth another trial."""


_APART: Final = 1.05
"""Ratio of two sizes from which their readings give a slope: between closer ones, round-off and noise do."""


_GENTLEST: Final = 0.5
"""Smallest slope that is believed, in units of that of the line from zero, where that is known to be the law's."""


_CLOSE: Final = 0.07
"""Relative distance of the smallest failure at which the search by halves ends; half of it is lost on average."""


_Reading = tuple[int, float]
"""(size, peak)."""


@dataclass(frozen=True)
class SizeSearch:
    """What a search found.

    Attributes:
        size: Largest size that was tried and fits; 0 where nothing fits.
        trials: Sizes tried.
        ooms: Trials that ran out of memory.
    """

    size: int
    trials: int
    ooms: int


def find_max_size(
    trial: Callable[[int], object], *, start: int = 8, upper: int = 2**20, capacity: float | None = None
) -> SizeSearch:
    """Searches for the largest size that fits.

    Without readings the size doubles until it fails and is then searched by halves. With readings, a law is fitted to
    them and the search jumps. The search ends within a few per cent of the largest size, not at it, where another
    out-of-memory would buy no more than that.

    Args:
        trial: Runs one size; raises an out-of-memory error where it does not fit, and may return its peak in bytes.
            Any other error ends the search.
        start: First size to try; `upper` where it is larger.
        upper: Largest size to try.
        capacity: Bytes that fit, in the unit of the readings; None ignores readings.

    Raises:
        ArgumentError: `start`, `upper` or `capacity` is too small to search.
    """
    _check(start, upper, capacity)
    start, upper = int(start), int(upper)
    return search(trial, Seen(fails=upper + 1), start=min(start, upper), capacity=capacity)


def search(trial: Callable[[int], object], seen: Seen, *, start: int, capacity: float | None) -> SizeSearch:
    """Searches from what has been seen already; see `find_max_size`."""
    size = start
    while size:
        fits, reading = _attempt(trial, size)
        seen.record(size, fits=fits, reading=reading if capacity is not None else None)
        size = _next_size(seen, capacity)
    return SizeSearch(size=seen.fits, trials=seen.trials, ooms=seen.ooms)


@dataclass
class Seen:
    """What the trials so far have shown. Every further size lies between `fits` and `fails`, so the search ends.

    Attributes:
        fails: Smallest size that is ruled out.
        fits: Largest size that fits.
        readings: (size, peak), by size.
        from_zero: Whether size 0 is known to read 0: a slope that is much below that of the line from there then shows
            that readings have stopped to say how much is needed (an allocator's cache has filled the device).
    """

    fails: int
    fits: int = 0
    trials: int = 0
    ooms: int = 0
    readings: list[_Reading] = field(default_factory=list)
    from_zero: bool = False

    def record(self, size: int, *, fits: bool, reading: float | None) -> None:
        """Adds what a trial showed."""
        self.trials += 1
        if not fits:
            self.ooms += 1
            self.fails = size
            return
        self.fits = size
        if reading is not None:
            self.readings.append((size, reading))


def _check(start: int, upper: int, capacity: float | None) -> None:
    if not isinstance(start, Integral) or not isinstance(upper, Integral):
        raise ArgumentError("Sizes are whole numbers", value=f"start {start!r}, upper {upper!r}")
    if start < 1 or upper < 1:
        raise ArgumentError("A search starts and ends at a size of at least 1", value=f"start {start}, upper {upper}")
    if capacity is not None and not capacity > 0:
        raise ArgumentError("A capacity is a positive number of bytes", value=f"{capacity}")


def _attempt(trial: Callable[[int], object], size: int) -> tuple[bool, float | None]:
    """Runs a trial. Returns whether it fits, and its reading if it gave one."""
    with CatchOutOfMemory():
        return True, _reading(trial(size))
    return False, None


def _reading(result: object) -> float | None:
    """The peak that a trial returned; None where it returned something else."""
    if not isinstance(result, Real) or isinstance(result, bool):
        return None
    peak = float(result)
    return peak if 0 < peak < math.inf else None


def _next_size(seen: Seen, capacity: float | None) -> int:
    """The size to try next, strictly between what fits and what does not; 0 ends the search."""
    if seen.fails - seen.fits <= 1:
        return 0
    if seen.fits == 0:
        return max(1, seen.fails // _RETREAT)
    # A trial that gave no reading leaves the law behind: from there on the search goes without.
    has_law = bool(seen.readings) and seen.readings[-1][0] == seen.fits and len(seen.readings) <= _MAX_READINGS
    if capacity is not None and has_law:
        size = _jump(seen, capacity)
        if size <= seen.fits:
            return 0
        if not seen.ooms:
            return min(size, seen.fails - 1)
        if size < seen.fails * (1 - _CLOSE):
            return size
        # The law leads to where memory ran out: it is a little off there, and a little less may fit.
        return _a_little_less(seen)
    if not seen.ooms:
        return min(seen.fits * _GROWTH, seen.fails - 1)
    if seen.fails - seen.fits <= _CLOSE * seen.fits:
        return 0
    return (seen.fits + seen.fails) // 2


def _a_little_less(seen: Seen) -> int:
    """The size next below a failure, further below with each one; 0 where the largest that fits is close enough."""
    if seen.fails - seen.fits <= _CLOSE * seen.fits:
        return 0
    size = int(seen.fails * (1 - _CLOSE * 2 ** (seen.ooms - 1)))
    return size if size > seen.fits else (seen.fits + seen.fails) // 2


def _jump(seen: Seen, capacity: float) -> int:
    """The size that the readings lead to; that of the last reading where nothing is left to gain."""
    size, peak = seen.readings[-1]
    gentlest = _GENTLEST * peak / size if seen.from_zero else 0.0
    predicted = _reach(seen.readings, capacity, gentlest)
    if predicted - size < max(1.0, _WORTHWHILE * size):
        return size
    if predicted > _LONG_JUMP * size:
        predicted = _reach(seen.readings, peak + _AIM * (capacity - peak), gentlest)
    return int(min(predicted, size * _JUMP))


def _reach(readings: list[_Reading], peak_bytes: float, gentlest: float) -> float:
    """The size at which the law through the last readings reaches a peak; that of the last where it is reached."""
    size, peak = readings[-1]
    room = peak_bytes - peak
    if room <= 0:
        return size
    readings = _apart(readings)
    slopes = [max((b[1] - a[1]) / (b[0] - a[0]), gentlest) for a, b in pairwise(readings)]
    # Through the origin: the steepest law that has no negative base, so a safe size rather than the largest.
    safe = max(size * peak_bytes / peak, size + 1.0)
    if not slopes:
        return safe
    if slopes[-1] <= 0:
        # The optimizer's memory hides that of the batch, which says nothing of how far it is from showing.
        return max(safe, size * _GROWTH)
    if len(slopes) == 1 or slopes[1] <= slopes[0]:
        return size + room / slopes[-1]
    # Where the readings bend up, the parabola through them (Newton's form), solved for the step beyond the last.
    (first, _), (second, _), _ = readings
    bend = (slopes[1] - slopes[0]) / (size - first)
    slope = slopes[1] + bend * (size - second)
    return size + 2 * room / (slope + math.sqrt(slope**2 + 4 * bend * room))


def _apart(readings: list[_Reading]) -> list[_Reading]:
    """The last reading and up to two before it, each far enough from the next to give a slope."""
    kept = readings[-1:]
    for reading in reversed(readings[:-1]):
        if len(kept) < 3 and reading[0] * _APART <= kept[0][0]:
            kept.insert(0, reading)
    return kept


UNITS: Final = 2**20
"""Steps of the search up to the largest cost worth trying: finer than any sample matters."""


_FILLED: Final = 16
"""Samples that a packed batch is filled up with at most."""


CAUTION: Final = 0.97
"""Share of the predicted room that the first trial takes: gaps between blocks grow with the batch, and a trial that
fits is worth more than one that does not, since it can be read."""


CEILING: Final = 0.99
"""Share of the room that the search aims to have held; beyond it, another out-of-memory buys next to nothing."""


_MOST_COPIES: Final = 64
"""Times that the whole data set is repeated at most to make a trial's batch."""


class Peak(NamedTuple):
    """What a trial took at most.

    Attributes:
        allocated: Bytes in use.
        reserved: Bytes that the allocator held for them; 0 where there is no such thing.
    """

    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where batches have to fit.

    Attributes:
        capacity_bytes: What the allocator may hold.
        slack_bytes: What it is expected to hold beyond what is in use.
    """

    capacity_bytes: float
    slack_bytes: float


Measure = Callable[[NDArray[np.int64]], Peak]
"""Runs the samples at some positions as one micro-batch."""


def find_phase_limit(probed: Probed, measure: Measure, order: BatchCosts, *, upper: float, room: Room) -> PhaseLimit:
    """Searches for the largest cost that fits.

    Args:
        probed: What the probes of the phase showed: they have fitted, and are the first reading.
        measure: Runs one trial.
        order: The samples that batches are made of.
        upper: Cost beyond which memory decides nothing.
        room: Where the batches have to fit.

    Returns:
        The limit; its tuned limit is the cost of the largest batch that was run and fits.
    """
    model, mean_totals = probed.model, tuple(order.mean_counts().tolist())
    free = room.capacity_bytes - model.base_bytes
    likely = CAUTION * (free - room.slack_bytes)
    # What the probes leave open may be more than what they have shown to fit: half-way up is then worth a trial.
    predicted = max(
        likely - model.half_width(typical_totals(model, mean_totals, free)), (likely + probed.largest_cost) / 2
    )
    unit = upper / UNITS
    trial = _Trial(probed, measure, order, unit)
    # The probes have shown that their cost fits, and are the first reading of the search.
    fits = min(int(probed.largest_cost / unit), UNITS - 1)
    seen = Seen(fails=UNITS + 1, fits=fits, readings=[(fits, fits * unit)] if fits else [], from_zero=True)
    start = min(UNITS, max(fits + 1, int(predicted / unit)))
    found = search(trial, seen, start=start, capacity=max(CEILING * free, 1.0))
    cost, peak = trial.largest
    return PhaseLimit(
        model=model,
        tuned_limit=cost,
        capped=found.size >= UNITS,
        trials=found.trials,
        ooms=found.ooms,
        measured_ratio=max(peak - model.base_bytes, 1.0) / cost if cost else 1.0,
        mean_totals=mean_totals,
    )


def predict_phase_limit(probed: Probed, order: BatchCosts, *, upper: float, room_bytes: float) -> PhaseLimit:
    """Predicts the largest cost that fits, without a trial: for a device that is not at hand.

    Args:
        probed: What the probes of the phase showed.
        order: The samples that batches are made of.
        upper: Cost beyond which memory decides nothing.
        room_bytes: Where the batches would have to fit.
    """
    return PhaseLimit(
        model=probed.model,
        tuned_limit=upper,
        capped=True,
        trials=0,
        ooms=0,
        measured_ratio=1.0,
        mean_totals=tuple(order.mean_counts().tolist()),
    ).predicted_within(room_bytes)


class _Trial:
    """Runs worst-case batches of some cost.

    Attributes:
        largest: (cost, peak in bytes) of the costliest batch that fits.
    """

    def __init__(self, probed: Probed, measure: Measure, order: BatchCosts, unit: float) -> None:
        self._model = probed.model
        self._measure = measure
        self._order = order
        self.largest = (probed.largest_cost, probed.largest_peak)
        self._unit = unit

    def __call__(self, units: int) -> float | None:
        positions = pack_worst_case(self._order, units * self._unit)
        if len(positions) == 0:
            # Less than the smallest sample: nothing would run, and that fits.
            return None
        cost = self._order.chosen(positions).cost(0, len(positions))
        peak = self._measure(positions)
        self.largest = max(self.largest, (cost, float(peak.allocated)))
        # What is held decides whether more fits; carried over to the whole of the units, as packing leaves a remainder.
        return (max(peak) - self._model.base_bytes) * units * self._unit / cost


def pack_worst_case(order: BatchCosts, limit: float) -> NDArray[np.int64]:
    """Packs the costliest samples that there are up to a cost.

    Args:
        order: The samples; they come again where a batch needs more than there are.
        limit: Cost of the batch.

    Returns:
        Positions in `order`; empty where no sample costs so little.
    """
    each = order.each()
    ranked = np.argsort(-each, kind="stable")
    ranked = ranked[each[ranked] <= limit * (1 + ROUNDING)]
    if len(ranked) == 0:
        return ranked
    whole = order.chosen(ranked).cost(0, len(ranked))
    copies = min(int(limit / whole) + 1 if whole > 0 else 1, _MOST_COPIES)
    packed = np.tile(ranked, copies)
    packed = packed[: order.chosen(packed).reach(0, limit)]
    return _filled(order, packed, ranked, limit)


def _filled(order: BatchCosts, packed: NDArray[np.int64], ranked: NDArray[np.int64], limit: float) -> NDArray[np.int64]:
    """Adds the largest samples that still fit: a remainder of almost a sample is much where few fit at all."""
    each = order.each()[ranked]
    room = limit - order.chosen(packed).cost(0, len(packed))
    for _ in range(_FILLED):
        fitting = int(np.searchsorted(-each, -room))
        if fitting == len(ranked):
            break
        longer = np.append(packed, ranked[fitting])
        cost = order.chosen(longer).cost(0, len(longer))
        if cost > limit * (1 + ROUNDING) or limit - cost >= room:
            break
        packed, room = longer, limit - cost
    return packed
