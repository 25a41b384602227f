"""Searches for the largest size that fits: `find_max_size` for any trial, `find_phase_limit` for batches of samples,
`confirm_recorded` for batches whose memory was recorded.

Shapes: F features, R samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from can_train.errors import ArgumentError, ConfigError, check_functions, shown
from can_train.fit.cost_model import EXPLAINED, CostModel, SearchResult, typical_totals
from can_train.fit.packing import ROUNDING, BatchCosts
from can_train.io.units import parse_size
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.out_of_memory import CatchOutOfMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.fit.cost_model import ProbeFit
    from can_train.fit.factor_rule import RememberedLimit

# Divisor of the size while nothing has fitted yet: an out-of-memory costs more than a trial that fits.
_RETREAT: Final = 4
_GROWTH: Final = 2  # Multiplier of the size while everything has fitted and there are no readings of the peak
# Readings after which the search ignores them: where peaks follow no line or parabola, it would creep.
_MAX_READINGS: Final = 16
# Largest multiplier of a jump: a line through readings is not trusted further than this beyond the last of them.
_JUMP: Final = 32
_LONG_JUMP: Final = 1.5  # A jump to more than this multiple of the size counts as long
# Share of the memory left that a long jump fills: peaks that bend up by up to 30 % then still fit.
_LONG_JUMP_SHARE: Final = 0.7
_WORTHWHILE: Final = 0.01  # Relative gain that is worth another trial
# Relative difference of the last reading and the curve through those before it, above which the curve does not tell
# where memory ends: where sizes are padded, a larger one may peak no higher.
_STAIR: Final = 0.02
_MIN_SIZE_RATIO: Final = (
    1.05  # Smallest ratio of two sizes whose readings give a slope; closer ones give round-off and noise
)
_SCATTERED_RATIO: Final = 1.5  # Smallest such ratio where readings scatter
# Smallest slope that is believed, as a share of the slope from zero, where size 0 is known to read 0.
_MIN_SLOPE_SHARE: Final = 0.5
# A search by halves ends at this relative distance below the smallest failure; half of it is lost on average.
_CLOSE: Final = 0.07
_CLOSE_ON_STAIRS: Final = 0.03  # Where peaks rise in stairs, a trial buys more than its distance: the rest of a stair
# Trials in a row that the size found must fit in: with readings, a second one that differs shows scatter; without, only
# a failure does, and of sizes that fail as often as not one repetition would pass half.
_REPEATED: Final = 2
_REPEATED_BLIND: Final = 3
_CONFIRMED: Final = 2  # Trials in a row that a size must fit in where trials scatter; one more after an out-of-memory
_STEADY: Final = 0.001  # Largest relative difference of two readings of a size that count as the same
# Share of the size that is left free where trials scatter; twice as much after each further failure, up to half.
_ROOM: Final = 0.05
_MOST_ROOM: Final = 0.5
_MOST_SHOWN: Final = 0.08  # Most of it that a single reading off the curve asks for
_Reading = tuple[int, float]  # (size, peak)
_UNITS: Final = 2**20  # Steps of the search up to the largest cost worth trying: finer than any sample matters
# Time that a search may take: this share of the first epoch, or so many seconds where that is more.
SEARCH_SHARE: Final = 0.1
SEARCH_SECONDS: Final = 30.0
_MOST_FILLED: Final = 16  # Samples that a packed batch is filled up with at most
# Share of the predicted room that the first trial takes: fragmentation grows with the batch, and a trial that fits is
# worth more than one that does not, since its peak can be read.
_CAUTION: Final = 0.97
CEILING: Final = 0.99  # Share of the room that the search fills; beyond it, another out-of-memory buys next to nothing
_MOST_COPIES: Final = 64  # Times that the whole data set is repeated at most to make a trial's batch
# Relative error of a recorded peak that a trial may have at least: six models lay within −1.3…+0.1 % on an H100.
_RECORDED_ERROR: Final = 0.015
# Cost of the batch that warms the device up, as a share of the trial's: it shows how long the trial will take.
_WARM_SHARE: Final = 1 / 16
# Smallest size of a trial, in units of the largest that fits, that is worth its time though a larger one was wanted;
# and largest size that leaves a limit as good as found, though there was no time for more.
_WORTH_A_TRIAL: Final = 1.25
_NEARLY: Final = 1.1
# Share of the device that a batch may take which there was no time to try: it fits though the line bends up.
_UNTRIED_SHARE: Final = 0.5


@dataclass(frozen=True)
class SizeSearch:
    """Result of a search."""

    size: int  # Largest size that was tried and fits; 0 where nothing fits
    trials: int  # Sizes tried
    ooms: int  # Trials that ran out of memory


def find_max_size(
    trial: Callable[[int], object],
    *,
    start: int = 8,
    upper: int = 2**20,
    capacity: float | str | None = None,
    confirm: int | None = None,
) -> SizeSearch:
    """Searches for the largest size that fits.

    Without readings the size doubles until it fails, and the rest is searched by halves. With readings, a line or a
    parabola is fitted to them and the search jumps. The search ends within 7 % of the largest size, not at it, where
    another out-of-memory would buy no more than that. In the end the size found is tried again: twice without readings;
    once with them, unless its peak was the one that the earlier readings foretell.

    Where peaks rise in stairs, as where sizes are padded, a curve ends too early: the size is tried again, and where
    the peak is the same, larger sizes follow until one fails.

    Where a repeated trial fails, or reads another peak near the capacity, or readings lie on both sides of the curve,
    trials scatter: a size that fitted once may fail later. A size at least 5 % smaller is then taken, which has fitted
    twice in a row, or three times where memory ran out before.

    Args:
        trial: Runs one size; raises an out-of-memory error where it does not fit, and may return its peak in bytes, a
            number of any library. Any other error ends the search.
        start: First size to try; `upper` where it is larger.
        upper: Largest size to try.
        capacity: Bytes that fit, in the unit of the readings, or a size, `8GiB`; None ignores readings.
        confirm: Trials in a row that the size returned has fitted in, whatever they read. It costs `confirm` - 1 more
            trials, and up to `confirm` for each smaller size that is tried because a larger one failed. 1 takes the
            first size found; None recognises scatter as above.

    Raises:
        ArgumentError: An argument has the wrong type, or is too small to search.
    """
    check_functions("find_max_size(lambda size: train_step(size))", trial=trial)
    if not isinstance(start, Integral) or not isinstance(upper, Integral):
        raise ArgumentError("Sizes are whole numbers", value=f"start {shown(start)}, upper {shown(upper)}",
                            remedy="Give start=8, upper=4096, or leave them out")  # fmt: skip
    if start < 1 or upper < 1:
        raise ArgumentError("A search starts and ends at a size of at least 1", value=f"start {start}, upper {upper}",
                            remedy="Give start=1 and a larger upper, or leave them out")  # fmt: skip
    if confirm is not None and (not isinstance(confirm, Integral) or confirm < 1):
        remedy = "Give the trials in a row that a size must fit in: 1 takes the first size found"
        raise ArgumentError("A size is confirmed by at least 1 trial", value=f"confirm {confirm!r}", remedy=remedy)
    capacity_bytes = None if capacity is None else _bytes_of(capacity)
    search = _Search(trial, capacity_bytes, fails=int(upper) + 1, sees_scatter=confirm is None,
                     sees_stairs=True)  # fmt: skip
    search.run(min(int(start), int(upper)))
    return SizeSearch(search.confirmed(confirm), search.trials, search.ooms)


def _bytes_of(capacity: object) -> float:
    """Reads a capacity: a number of bytes, or a size as text."""
    with suppress(ConfigError):
        number = _number(parse_size(capacity) if isinstance(capacity, str) else capacity)
        if number is not None and 0 < number < math.inf:
            return number
    raise ArgumentError("A capacity is a positive number of bytes, or a size", value=shown(capacity),
                        remedy='Give capacity=8 * 2**30 or capacity="8GiB", or leave it out')  # fmt: skip


def _number(value: Any) -> float | None:
    """Returns a number of Python, NumPy or PyTorch; None where it is none, infinite where a float cannot hold it."""
    if getattr(value, "ndim", None) == 0:
        # An array or a tensor that holds a single number.
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


@dataclass
class _Search:
    """A search and its outcomes so far. Every further size lies between `fits` and `fails`, so the search ends."""

    trial: Callable[[int], object]
    capacity: float | None  # Bytes that fit; None ignores readings
    fails: int  # Smallest size that is ruled out
    fits: int = 0  # Largest size that fits
    trials: int = 0
    ooms: int = 0
    readings: list[_Reading] = field(default_factory=list)  # (size, peak), sorted by size
    # Whether size 0 is known to read 0. A slope far below the one from there then shows that readings no longer tell
    # how much is needed: an allocator's cache has filled the device.
    from_zero: bool = False
    sees_scatter: bool = False  # Whether readings off the curve leave room
    room: float = 0.0  # Share of the capacity that is left free since readings scatter
    sides: set[bool] = field(default_factory=set)  # Whether readings lay above the curve, or below
    repeated: dict[int, tuple[bool, float | None]] = field(default_factory=dict)  # Outcomes of second trials, by size
    follows: bool = False  # Whether the last reading lies on the curve through those before it
    sees_stairs: bool = False  # Whether sizes are tried beyond the end of a curve that the last reading is off
    is_steady: bool | None = None  # Whether a repeated trial read the same; None: not tried
    has_levels: bool = False  # Whether two sizes have read the same
    is_off: bool = True  # Whether the last reading is off the curve by a stair
    stretch: float = _CLOSE  # Relative step beyond the end of a curve; twice as large after each that fits
    # A size to try in place of another, larger than the one that fits; 0 ends the search. It must not hold the search:
    # in a reference cycle, gradients of the measured work would stay until the next garbage collection.
    affordable: Callable[[int, int], int] = lambda size, fits: size

    def run(self, start: int) -> None:
        """Tries sizes from `start` until no further trial is worthwhile."""
        size = self.affordable(start, self.fits)
        while size:
            fitted, peak = self._try(size)
            if fitted:
                self.fits = size
            else:
                self.fails = size
            self._compare(size, peak, fitted=fitted)
            if peak is not None:
                self.readings.append((size, peak))
            size = self._next_size() or (self._next_size() if self._is_on_stairs() else 0)
            size = self.affordable(size, self.fits) if size else 0

    def _try(self, size: int) -> tuple[bool, float | None]:
        """Runs a size; returns whether it fitted, and its reading if there is one."""
        self.trials += 1
        peak: float | None = None
        with CatchOutOfMemory() as caught:
            result = self.trial(size)
            peak = None if self.capacity is None else _number(result)
        if caught.message:
            self.ooms += 1
            return False, None
        return True, peak if peak is not None and 0 < peak < math.inf else None

    def _is_on_stairs(self) -> bool:
        """Tells whether peaks rise in stairs, which a curve does not follow, where the search would end: unlike those
        that scatter, they read the same again. Then no room is left.
        """
        if self.is_steady is not None or not self.sees_stairs or not self.readings:
            return False
        size, peak = self.readings[-1]
        may_grow = self.is_off and self.fails - size > max(1, _CLOSE * size)
        if size != self.fits or not (self.room or may_grow):
            return False
        self.repeated[size] = _, again = self._try(size)
        self.is_steady = again is not None and abs(again - peak) <= _STEADY * peak
        if self.is_steady:
            self.sees_scatter, self.room = False, 0.0
        return self.is_steady

    def _close(self) -> float:
        """Returns the relative distance below the smallest failure at which the search ends."""
        shows_stairs = self.has_levels or len(self.sides) > 1
        return _CLOSE_ON_STAIRS if self.is_steady and self.is_off and shows_stairs else _CLOSE

    def confirmed(self, confirm: int | None) -> int:
        """Tries the size found again, and smaller ones where that fails, until one has fitted often enough."""
        size, fitted_in_a_row, room = self.fits, 1, _ROOM
        readings = [peak for at, peak in self.readings[-1:] if at == size]
        scatters = bool(self.room)
        if scatters:
            needed = _CONFIRMED + bool(self.ooms)
        elif readings and self.follows:
            # A reading that was foretold is as good as a second one that is the same.
            needed = confirm or 1
        else:
            needed = confirm or (_REPEATED if readings else _REPEATED_BLIND)
        if not self.repeated.get(size, (True, None))[0]:
            needed = max(needed, _CONFIRMED)
        while size and fitted_in_a_row < needed:
            fitted, peak = self.repeated.pop(size) if size in self.repeated else self._try(size)
            fitted_in_a_row += 1
            readings += [] if peak is None else [peak]
            makes_room = not fitted
            differ = bool(readings) and max(readings) * (1 - _STEADY) > min(readings)
            # Readings make room once at most: later sizes must fit as often, or make room by failing.
            if confirm is None and not scatters and (not fitted or differ):
                scatters, needed = True, _CONFIRMED + bool(self.ooms)
                makes_room = not fitted or max(readings) > (1 - _ROOM) * (self.capacity or math.inf)
            if makes_room:
                size = max(int(size * (1 - room)), int(fitted))
                fitted_in_a_row, room, readings = 0, min(2 * room, _MOST_ROOM), []
        return size

    def _next_size(self) -> int:
        """Returns the size to try next, strictly between the sizes that fit and fail; 0 ends the search."""
        fits, fails, readings = self.fits, self.fails, self.readings
        if fails - fits <= 1:
            return 0
        if fits == 0:
            return max(1, fails // _RETREAT)
        is_close = fails - fits <= self._close() * fits
        # A trial that returned no reading leaves the line behind: from there on the search goes without.
        if readings and readings[-1][0] == fits and len(readings) <= _MAX_READINGS:
            size = self._jump(self.capacity or math.inf)
            if size <= fits and not (self.is_steady and self.is_off):
                return 0
            if size <= fits:
                size = 0 if is_close else self._beyond()
                return size if size < fails or is_close else (fits + fails) // 2
            if not self.ooms:
                return min(size, fails - 1)
            if size < fails * (1 - _CLOSE):
                return size
            # The line leads to where memory ran out, so it is a little off there. A little less may fit, and less still
            # with each failure.
            size = int(fails * (1 - _CLOSE * 2 ** (self.ooms - 1)))
            if size > fits and not is_close:
                return size
        elif not self.ooms:
            return min(fits * _GROWTH, fails - 1)
        return 0 if is_close else (fits + fails) // 2

    def _jump(self, capacity: float) -> int:
        """Returns the size that the readings lead to; the last reading's where nothing is left to gain."""
        size, peak = self.readings[-1]
        capacity *= 1 - self.room
        if peak >= capacity:
            return size
        curve = self._curve()
        # One reading leads as far as through the origin.
        predicted = curve.size_for(capacity) if curve else max(size * capacity / peak, size + 1.0)
        if predicted - size < max(1.0, (self.room or _WORTHWHILE) * size):
            return size
        if curve and predicted > _LONG_JUMP * size and not self.follows:
            predicted = curve.size_for(peak + _LONG_JUMP_SHARE * (capacity - peak))
        return int(min(predicted, size * _JUMP))

    def _beyond(self) -> int:
        """Returns a size beyond the end of the curve: twice as large where the last two readings are equal."""
        is_level = len(self.readings) > 1 and self.readings[-1][1] <= self.readings[-2][1] * (1 + _STEADY)
        stretch = max(self.stretch, float(is_level))
        self.stretch *= 2
        return max(int(self.fits * (1 + stretch)), self.fits + 1)

    def _curve(self) -> _Curve | None:
        if not self.readings:
            return None
        size, peak = self.readings[-1]
        least_slope = _MIN_SLOPE_SHARE * peak / size if self.from_zero else 0.0
        return _Curve.through(self.readings, _SCATTERED_RATIO if self.room else _MIN_SIZE_RATIO, least_slope)

    def _compare(self, size: int, peak: float | None, *, fitted: bool) -> None:
        """Notes whether a trial's outcome lies on the curve through the readings before it."""
        curve = self._curve()
        expected = curve.peak_at(size) if curve else 0.0
        # An out-of-memory shows only that the peak was above the capacity.
        shown = peak or (0.0 if fitted else self.capacity or 0.0)
        self.follows = peak is not None and abs(peak - expected) <= _STEADY * peak
        if peak is not None:
            self._look_for_stairs(size, peak, curve)
        if not curve or not shown or self.follows or (peak is None and expected >= shown):
            return
        # Peaks may bend up, and peaks of a full allocator bend down: only readings that are off to both sides scatter.
        self.sides.add(shown > expected)
        if self.sees_scatter and len(self.sides) > 1:
            self.room = max(self.room, _ROOM, min(abs(shown - expected) / shown, _MOST_SHOWN))

    def _look_for_stairs(self, size: int, peak: float, curve: _Curve | None) -> None:
        """Notes whether a reading is off the curve through those before it, or off the line from the origin through a
        single one.
        """
        expected = curve.peak_at(size) if curve else sum(p * size / s for s, p in self.readings[-1:])
        tolerance = _STAIR if len(self.sides) < 2 else _STEADY
        # A stair may end where the curve does by chance: where two sizes have read the same, no curve counts.
        self.has_levels |= curve is not None and curve.slope <= 0
        self.is_off = self.has_levels or abs(peak - expected) > tolerance * peak


class _Curve(NamedTuple):
    """The line or parabola through the last readings, `peak + slope · d + bend · d²` at `d` above the last size."""

    size: int
    peak: float
    slope: float
    bend: float = 0.0

    @classmethod
    def through(cls, readings: list[_Reading], size_ratio: float, least_slope: float = 0.0) -> _Curve | None:
        """Returns the curve; None where fewer than two readings are far enough apart to give a slope."""
        # The last reading and up to two before it, each far enough from the next.
        apart = readings[-1:]
        for reading in reversed(readings[:-1]):
            if len(apart) < 3 and reading[0] * size_ratio <= apart[0][0]:
                apart.insert(0, reading)
        slopes = [max((b[1] - a[1]) / (b[0] - a[0]), least_slope) for a, b in pairwise(apart)]
        if not slopes:
            return None
        size, peak = apart[-1]
        if len(slopes) == 1 or slopes[1] <= slopes[0]:
            return cls(size, peak, slopes[-1])
        # Where the readings bend up, the parabola through them (Newton's form).
        bend = (slopes[1] - slopes[0]) / (size - apart[0][0])
        return cls(size, peak, slopes[1] + bend * (size - apart[1][0]), bend)

    def peak_at(self, size: int) -> float:
        """Returns the peak of a size."""
        beyond = size - self.size
        return self.peak + self.slope * beyond + self.bend * beyond**2

    def size_for(self, peak_bytes: float) -> float:
        """Returns the size whose peak, not below the last reading's, is `peak_bytes`."""
        room = peak_bytes - self.peak
        # The safe step is through the origin: the steepest line that has no negative base.
        safe = max(self.size * peak_bytes / self.peak, self.size + 1.0)
        if self.slope <= 0:
            # The optimizer's memory hides the batch's, and nothing tells how much larger a batch must be to show.
            return max(safe, self.size * _GROWTH)
        return self.size + 2 * room / (self.slope + math.sqrt(self.slope**2 + 4 * self.bend * room))


class Peak(NamedTuple):
    """Peak bytes of a trial."""

    allocated: int  # In use
    reserved: int  # Held by the allocator for them; 0 where there is no caching allocator


Measure = Callable[["NDArray[np.int64]"], Peak]  # Runs the samples at some positions as one micro-batch


@dataclass(frozen=True, kw_only=True)
class SearchBounds:
    """The bounds of a search of batches."""

    upper: float  # Largest cost worth trying: beyond it memory does not matter
    capacity_bytes: float
    has_time: Callable[[float], bool] = lambda cost: True  # Whether there is time to try a batch of some cost


def find_phase_limit(probes: ProbeFit, measure: Measure, order: BatchCosts, bounds: SearchBounds) -> SearchResult:
    """Searches for the largest cost that fits. The probes' cost fits, and is the first reading; batches are made of the
    samples of `order`. The tuned limit is the cost of the largest batch that was run and fits.
    """
    model, mean_totals, unit = probes.model, order.mean_counts(), bounds.upper / _UNITS
    largest, untried = (probes.largest_cost, probes.largest_peak), 0.0

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

    free = bounds.capacity_bytes - model.base_bytes
    likely = _CAUTION * (free - probes.slack_bytes)
    # Where the interval leaves less than the probes have shown to fit, half-way up is worth a trial.
    predicted = max(
        likely - model.half_width(typical_totals(model, mean_totals, free)), (likely + probes.largest_cost) / 2
    )
    fits = min(int(probes.largest_cost / unit), _UNITS - 1)
    readings = [(fits, float(fits * unit))] if fits else []

    def affordable(units: int, fitted: int) -> int:
        """Halves a size until there is time to try it."""
        nonlocal untried
        if bounds.has_time(units * unit):
            return units
        untried = units * unit
        while (units := units // 2) > _WORTH_A_TRIAL * fitted:
            if bounds.has_time(units * unit):
                return units
        return 0

    search = _Search(trial, max(CEILING * free, 1.0), fails=_UNITS + 1, fits=fits, readings=readings, from_zero=True,
                     affordable=affordable)  # fmt: skip
    search.run(min(_UNITS, max(fits + 1, int(predicted / unit))))
    cost, peak = largest
    # Where there was no time for a trial, a probe may have shown that all that is wanted fits.
    is_enough = search.fits >= _UNITS or probes.largest_cost >= bounds.upper
    if untried > cost and model.explains and not search.ooms:
        ratio = _measured_ratio(model, cost, peak)
        predicted = min((_UNTRIED_SHARE * bounds.capacity_bytes - model.base_bytes) / ratio, bounds.upper)
        if predicted > _NEARLY * cost:
            return SearchResult(model=model, tuned_limit=predicted, capped=True, measured_ratio=ratio,
                                untried=untried if untried > predicted else 0.0, mean_totals=mean_totals)  # fmt: skip
    return SearchResult(
        model=model,
        tuned_limit=cost,
        capped=is_enough or untried > _NEARLY * cost,
        untried=untried if untried > cost else 0.0,
        trials=search.trials,
        ooms=search.ooms,
        measured_ratio=_measured_ratio(model, cost, peak),
        mean_totals=mean_totals,
    )


def _measured_ratio(model: CostModel, cost: float, peak_bytes: float) -> float:
    """Returns measured ÷ predicted cost; 1, as the probes predict, where a peak does not show what the batch takes: it
    lies below the peak that is predicted of no batch.
    """
    above_base = peak_bytes - model.base_bytes
    return above_base / cost if above_base > 0 and cost else 1.0


def confirm_limit(
    probes: ProbeFit, measure: Measure, order: BatchCosts, remembered: RememberedLimit, *, upper: float
) -> SearchResult | None:
    """Tries the limit of an earlier run by one batch, of `upper` at most. Returns None where that run did not search so
    far, and where the batch does not fit or peaks elsewhere than it did then: model or data are others now.
    """
    # Of a search that memory did not end, the limit is less than was wanted then by the remainder of packing.
    wanted = upper if remembered.capped else min(remembered.tuned_limit * (1 + ROUNDING), upper)
    positions, model = pack_worst_case(order, wanted), probes.model
    cost = order.chosen(positions).total if len(positions) else 0.0
    if not probes.largest_cost < cost <= (1 + _WORTHWHILE) * remembered.tuned_limit:
        return None
    with CatchOutOfMemory():
        peak = float(measure(positions).allocated)
        if abs(peak - remembered.peak_bytes(cost)) > EXPLAINED * peak:
            return None
        return SearchResult(
            model=model,
            tuned_limit=cost,
            capped=remembered.capped or wanted < remembered.tuned_limit,
            trials=1,
            confirmed=True,
            measured_ratio=_measured_ratio(model, cost, peak),
            mean_totals=order.mean_counts(),
        )
    return None


# --- Limits that are recorded before anything runs on the device, and confirmed by one trial. The recorder of CUDA's
# dispatch predicts the peaks of large batches, which small probes on a card do not show: kernels take workspaces that
# stop growing once a card is full. `recorded_limits.py` records the lines.


@dataclass(frozen=True, kw_only=True)
class RecordedLine:
    """The memory of some work as the recorder predicts it."""

    model: CostModel
    resident_bytes: int  # The part of the line's base that is on the device whatever runs: weights, gradients, state
    room_share: float  # The share of a capacity that tensors have when memory runs out, as the allocator fragments it

    def on_device(self, resident_bytes: int) -> CostModel:
        """Returns the line beside the memory that is measured on a device while nothing runs: libraries keep more there
        than is recorded.
        """
        more = resident_bytes - self.resident_bytes
        below = tuple((cost, peak + more) for cost, peak in self.model.below)
        return replace(self.model, base_bytes=self.model.base_bytes + more, below=below)


@dataclass(frozen=True, kw_only=True)
class RecordedPhase:
    """The lines of one phase of a task."""

    training: RecordedLine
    evaluation: RecordedLine


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Everything that was recorded of a task before it trains."""

    phases: Mapping[str, RecordedPhase] = field(default_factory=dict)  # by their names
    seconds: float = 0.0  # of the processor
    reason: str = ""  # why nothing was recorded, as a clause; empty where it was


NO_RECORDING: Final = Recording()


class Trials(Protocol):
    """Runs batches on the device."""

    def warm_up(self, positions: NDArray[np.int64]) -> None:
        """Runs a small batch, which shows how long larger ones take."""

    def resident_bytes(self) -> int:
        """Returns the bytes that are on the device while nothing runs."""

    def has_time(self, cost: float) -> bool:
        """Tells whether there is time to try a batch of some cost."""

    def run(self, positions: NDArray[np.int64]) -> Peak:
        """Tries a batch; raises where memory runs out."""


def room_for_trial(
    line: RecordedLine, model: CostModel, mean_totals: tuple[float, ...], capacity_bytes: float
) -> float:
    """Returns the largest cost whose predicted peak, with its interval, fits into the share that tensors have of the
    allocator's pages in a capacity.
    """
    page_bytes = read_allocator_settings().large_page_bytes
    room = min(line.room_share, CEILING) * (capacity_bytes // page_bytes * page_bytes) - model.base_bytes
    return max(room - _half_width(model, mean_totals, room), 0.0)


def confirms(predicted_bytes: float, half_width_bytes: float, peak_bytes: float, capacity_bytes: float) -> bool:
    """Tells whether a trial's peak confirms a prediction: it lies in its interval and below the capacity."""
    return abs(peak_bytes - predicted_bytes) <= half_width_bytes and peak_bytes < capacity_bytes


def confirm_recorded(line: RecordedLine, trials: Trials, order: BatchCosts, bounds: SearchBounds) -> SearchResult | str:
    """Tries the largest batch that is predicted to fit.

    Returns:
        The limit, corrected by the ratio of measured and predicted cost; or the reason, as a clause, why the trial does
        not confirm the line.
    """
    mean_totals = order.mean_counts()
    highest = min(room_for_trial(line, line.model, mean_totals, bounds.capacity_bytes), bounds.upper)
    trials.warm_up(pack_worst_case(order, _WARM_SHARE * highest))
    model = line.on_device(trials.resident_bytes())
    wanted = min(room_for_trial(line, model, mean_totals, bounds.capacity_bytes), bounds.upper)
    positions = pack_worst_case(order, wanted)
    cost = order.chosen(positions).total if len(positions) else 0.0
    if cost <= 0:
        return "no sample is predicted to fit"
    if not trials.has_time(cost):
        return "a trial of the recorded size takes too long"
    peak_bytes, predicted_bytes = trials.run(positions).allocated, model.peak_bytes(cost)
    if not confirms(predicted_bytes, _half_width(model, mean_totals, cost), peak_bytes, bounds.capacity_bytes):
        return f"a trial took {peak_bytes / predicted_bytes:.1%} of the recorded memory"
    return SearchResult(
        model=model,
        tuned_limit=cost,
        capped=wanted >= bounds.upper,
        trials=1,
        measured_ratio=_measured_ratio(model, cost, peak_bytes),
        mean_totals=mean_totals,
        recorded_share=peak_bytes / predicted_bytes,
    )


def _half_width(model: CostModel, mean_totals: tuple[float, ...], cost: float) -> float:
    """Returns the half-width in bytes of the interval of a recorded peak."""
    width = model.half_width(typical_totals(model, mean_totals, cost))
    return max(width, _RECORDED_ERROR * model.peak_bytes(max(cost, 0.0)))


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
