"""How observations become the next safety factor: a regression of peaks on used shares of the tuned limit, and the
policies that use the regression.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Final, Literal, NamedTuple, Self

from can_train.errors import ArgumentError, check_kinds, shown

# Largest share of the tuned limit, or of the capacity, that is believed. A sample that cannot be split may exceed the
# limit many times; squares of larger shares lose their meaning in the regression.
MOST_SHARE: Final = 1e6


class _Range(NamedTuple):
    """The values that a number may have."""

    low: float
    high: float
    above: bool = False  # whether `low` itself is too low

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.low:g} and at most {self.high:,.10g}"

    def check(self, remedy: str, **numbers: Any) -> None:
        """Raises ArgumentError unless each number is in the range. NaN is in none."""
        for name, number in numbers.items():
            if not self.low <= number <= self.high or (self.above and number == self.low):
                raise ArgumentError(f"{name} is {self}", value=shown(number), remedy=remedy)


_SHARE: Final = _Range(0, MOST_SHARE)
_FACTOR: Final = _Range(0, 1, above=True)
_POSITIVE: Final = _Range(0, 1e9, above=True)
_DEVIATION: Final = _Range(1e-4, 100)  # of a prior: beyond it, the normal equations lose their digits

# --- The regression: peak = base + slope · used. Peaks are shares of the capacity, `used` is a share of the tuned
# limit.

# Rounds of re-estimating the noise and the unknown peaks of out-of-memories from the line, then the line from them.
_FIT_ROUNDS: Final = 6
_NORMAL_95: Final = 1.96  # standard deviations to either side that hold 95 % of a normal distribution
# The prior on a run that uses the whole tuned limit has Student's heavy tails: a tuned limit that the data set ended,
# not memory, may be far off, and readings must be able to overrule the prior.
_PRIOR_DEGREES_OF_FREEDOM: Final = 4
# At smaller slopes the used share does not show in the peak; a divisor of at least this needs no special case.
_LEAST_SLOPE: Final = 1e-6


class Reading(NamedTuple):
    """One measured peak, or an out-of-memory."""

    used: float  # cost of the largest micro-batch ÷ tuned limit
    peak: float | None  # peak memory ÷ capacity; None for an out-of-memory
    weight: float = 1.0  # 1 for the latest run, less for earlier ones
    reserved: float | None = None  # peak memory that the allocator had reserved ÷ capacity


class PeakRegression(NamedTuple):
    """The fitted line `peak = base + slope · used` and its uncertainty."""

    base: float
    slope: float
    variances: tuple[float, float, float]  # of base, of slope, and their covariance
    noise: float  # standard deviation of a run's peak around the line
    noise_runs: float  # degrees of freedom of the noise, at least as many as its prior has

    def peak(self, used: float) -> float:
        """Returns the expected peak of a run that uses a share of the tuned limit."""
        return self.base + self.slope * used

    def uncertainty(self, used: float) -> float:
        """Returns the standard deviation of the expected peak; more runs lower it."""
        of_base, of_slope, covariance = self.variances
        return math.sqrt(max(of_base + 2 * used * covariance + used**2 * of_slope, 0.0))

    def spread(self, used: float) -> float:
        """Returns the standard deviation of the next run's peak."""
        return math.hypot(self.uncertainty(used), self.noise)

    def margin(self, used: float, z: float) -> float:
        """Returns how far above the expected peak the next one lies with the risk of `z` normal standard deviations.

        Few runs may all have been alike, and noise has heavier tails than a normal distribution, so an estimated noise
        is given Student's: as many of its standard deviations as `z` of a normal one are, for the same risk.

        Source: Gaver and Kafadar, A Retrievable Recipe for Inverse t, The American Statistician 38 (1984).
        """
        degrees = self.noise_runs
        deviations = math.sqrt(degrees * math.expm1(z**2 * (degrees - 1.5) / (degrees - 1) ** 2))
        return math.hypot(z * self.uncertainty(used), deviations * self.noise)

    def used_for(self, peak: float) -> float:
        """Returns the share whose expected peak is `peak`; below 0 where the base alone is above it."""
        return (peak - self.base) / max(self.slope, _LEAST_SLOPE)

    def half_width(self, used: float) -> float:
        """Returns the half-width of the 95 % interval of the share that leads to the peak expected at `used`, at most
        1.

        With `u = (peak - base) / slope`, `∂u/∂base = -1/slope` and `∂u/∂slope = -u/slope`, the delta method gives
        `var(u) = (var(base) + 2·u·cov + u²·var(slope)) / slope²`.
        """
        return min(_NORMAL_95 * self.uncertainty(used) / max(self.slope, _LEAST_SLOPE), 1.0)


@dataclass(frozen=True, kw_only=True)
class RegressionPrior:
    """The prior of the regression: means, and standard deviations (`_sd`), as shares of the capacity."""

    base: float = 0.22  # a run that uses nothing still holds weights and optimizer state
    base_sd: float = 0.12
    full: float = 1.0  # a run that uses the whole tuned limit fills about the capacity
    full_sd: float = 0.15
    noise: float = 0.017
    noise_runs: float = 3.0  # runs that the prior of the noise is worth, at least 2

    def __post_init__(self) -> None:
        remedy = "Give RegressionPrior(base=0.22, base_sd=0.12, full=1.0), or leave it out"
        check_kinds("a number", Real, remedy, **{one.name: getattr(self, one.name) for one in fields(self)})
        _Range(-MOST_SHARE, MOST_SHARE).check(remedy, base=self.base, full=self.full)
        _DEVIATION.check(remedy, base_sd=self.base_sd, full_sd=self.full_sd, noise=self.noise)
        _Range(2, 1e9).check(remedy, noise_runs=self.noise_runs)

    def fit(
        self, readings: Sequence[Reading], *, start: PeakRegression | None = None, ceiling: float = 1.0
    ) -> PeakRegression:
        """Fits the line by Bayesian least squares with normal priors; the noise follows from the residuals.

        Args:
            readings: In any order.
            start: Line that first says how far above the ceiling an out-of-memory was; None: the prior's.
            ceiling: Largest peak that fits, as a share of the capacity.

        Source: conjugate Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning, 3.3); censored
        readings as in a Tobit model; Student's prior by iterative reweighting.
        """
        of_base, of_full = self.base_sd**2, self.full_sd**2
        variances = (of_base, of_base + of_full, -of_base)
        line = start or PeakRegression(self.base, self.full - self.base, variances, self.noise, self.noise_runs)
        for _ in range(_FIT_ROUNDS if readings else 0):
            line = self._fit_once(readings, line, ceiling)
        return line

    def _fit_once(self, readings: Sequence[Reading], line: PeakRegression, ceiling: float) -> PeakRegression:
        # Normal equations of (base, slope): precision matrix [[a, b], [b, c]] and right-hand side (d, e).
        # The priors act as readings at 0 and at 1.
        surprise = (line.peak(1.0) - self.full) / self.full_sd
        b = c = (_PRIOR_DEGREES_OF_FREEDOM + 1) / (_PRIOR_DEGREES_OF_FREEDOM + surprise**2) / self.full_sd**2
        a = b + 1 / self.base_sd**2
        e = self.full * c
        d = e + self.base / self.base_sd**2
        for used, measured, weight, _ in readings:
            # An out-of-memory says that the peak was above the ceiling, not by how much.
            peak = max(line.peak(used), ceiling + line.noise) if measured is None else measured
            precision = weight / line.noise**2
            a, b, c = a + precision, b + precision * used, c + precision * used**2
            d, e = d + precision * peak, e + precision * peak * used
        determinant = a * c - b * b
        base, slope = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        # Peaks do not fall as the used share rises. Readings that fall scatter around a level line.
        if slope < 0:
            base, slope = max(d / a, 0.0), 0.0
        squares = sum(w * (peak - base - slope * used) ** 2 for used, peak, w, _ in readings if peak is not None)
        runs = sum(reading.weight for reading in readings if reading.peak is not None)
        # The line takes two degrees of freedom, less where there are hardly more runs than that.
        noise_runs = self.noise_runs + runs - min(2, 0.8 * runs)
        noise = math.sqrt((self.noise_runs * self.noise**2 + squares) / noise_runs)
        # Nor is the base negative. A line held at 0 misses low readings on one side; counted as noise, that would make
        # a run that peaked lower than expected lower the factor.
        if base < 0:
            base, slope = 0.0, max(e / c, 0.0)
        variances = c / determinant, a / determinant, -b / determinant
        return PeakRegression(base, slope, variances, noise, noise_runs)


DEFAULT_PRIOR: Final = RegressionPrior()  # the prior of a configuration without a prediction

# --- Changes: a new version of a library may move every peak at once.

_LEAST_RUNS: Final = 3  # runs on either side of a change: fewer may all be outliers
# Shift of the peak, as a share of the capacity, below which the weights' forgetting is soon enough.
_LEAST_CHANGE: Final = 0.03
# Standard errors of the shift. High, since every place in a long history is tried, and chance has many tries.
_CERTAIN: Final = 5.0
# Standard deviation assumed of residuals, worth as many runs as `_LEAST_RUNS`: a few may agree by chance.
_LEAST_NOISE: Final = 0.01


def since_change(readings: Sequence[Reading], line: PeakRegression) -> Sequence[Reading]:
    """Returns the readings since how memory grows has changed; all of them where it has not.

    A change shows as residuals from one line through all readings that have one mean before it and another after it:
    the split with the largest two-sample t statistic.

    Args:
        readings: Oldest first.
        line: Fitted to all of them.
    """
    residuals = [(i, r.peak - line.peak(r.used)) for i, r in enumerate(readings) if r.peak is not None]
    total, squares = sum(x for _, x in residuals), sum(x * x for _, x in residuals)
    start, certainty, sum_before = 0, _CERTAIN, 0.0
    for before, (index, residual) in enumerate(residuals):
        after, sum_after = len(residuals) - before, total - sum_before
        if min(before, after) >= _LEAST_RUNS:
            shift = abs(sum_after / after - sum_before / before)
            within = max(squares - sum_before**2 / before - sum_after**2 / after, 0.0)
            variance = (within + _LEAST_RUNS * _LEAST_NOISE**2) / (len(residuals) + 1)
            t_statistic = shift / math.sqrt(variance * (1 / before + 1 / after))
            if shift > _LEAST_CHANGE and t_statistic > certainty:
                start, certainty = index, t_statistic
        sum_before += residual
    return readings[start:]


# --- The ceiling: memory runs out above this peak. It is below the capacity where memory is fragmented.
#
# Out-of-memories show the ceiling, and, before any, the bytes that the allocator had reserved for a peak that fitted.
# On a device of exactly the reserved bytes, that peak would have filled the device: allocated ÷ reserved is the run's
# ceiling or less, since the allocator releases its cache before memory runs out. Only on a device of few pages of
# 20 MiB may the ratio be above the ceiling: the last page does not fit.

# Ceilings that are tried, as shares of the capacity; of equally likely ones the first wins.
_CEILINGS: Final = tuple(percent / 100 for percent in range(100, 49, -1))
_CEILING_STEP: Final = 0.01
# Log-likelihood (nats) that a ceiling loses per unit of capacity that it lies below the capacity.
_CEILING_LOG_ODDS: Final = 12.0
_CEILING_SD: Final = 0.01  # standard deviation of the ceiling from run to run: memory is never fragmented twice alike
_SURE: Final = 5.0  # peaks that fitted further below the ceiling, in its standard deviations, say nothing of it
_STRAY_OOMS: Final = 0.005  # share of runs that run out of memory below the ceiling, for reasons that do not come back
# Share of runs that fit above the ceiling. The smaller, the longer old successes outweigh a ceiling that is new.
_FITS_ABOVE: Final = 0.2
# Noise explains an out-of-memory whose expected peak is at most this many standard deviations below the ceiling.
_EXPLAINED_WITHIN: Final = 3.0


# Standard deviation of allocated ÷ reserved around the ceiling at a peak that fills the capacity, and the part that is
# added per unit of capacity that the peak is lower, as a share of the capacity. Measured at 47 peaks of four networks
# on an H100 and an H200 (`scripts/bench/gpu-check-*.json`), whose ceilings are 98.7 to 99.6 %: 6 points at a fill of
# 87 %, 12 at a half. Nearly all ratios are too low.
_RESERVED_SD: Final = 0.06
_RESERVED_SD_BELOW: Final = 0.2


class Fit(NamedTuple):
    """The line and the ceiling, fitted to the runs since the last change."""

    line: PeakRegression
    ceiling: float  # as a share of the capacity
    ran_out_below: bool  # whether out-of-memories alone put the ceiling below the capacity


def fit_with_ceiling(readings: Sequence[Reading], prior: RegressionPrior) -> Fit:
    """Fits the line to the readings since the last change, and the ceiling.

    The ceiling is the capacity unless memory ran out where noise does not explain it, or less was in use than was
    reserved. Then it is the level that makes the outcomes and the reserved bytes of all runs most likely: about where
    memory ran out, but not below the peaks of many runs. Weights fall with age, so a lone out-of-memory is forgotten
    after some tens of runs, and several support each other for longer. Reserved bytes do not change the line.

    Args:
        readings: Oldest first.
        prior: Prior of the line, before any readings.
    """
    line = prior.fit([reading for reading in readings if reading.peak is not None])
    recent = since_change(readings, line)
    measured = [reading for reading in recent if reading.peak is not None]
    if len(recent) < len(readings):
        line = prior.fit(measured)
    shown = _ceiling_of_reserved(measured)
    ran_out = len(measured) < len(recent)
    if shown is None and not ran_out:
        return Fit(line, 1.0, False)
    ratio, sd = shown or (1.0, math.inf)
    # Only an out-of-memory puts the ceiling below the ratio of the reserved bytes.
    lowest = 1.0 if not measured else 0.0 if ran_out else ratio - _CEILING_STEP
    likelihoods = {level: _log_likelihood(level, recent, line) for level in _CEILINGS if level >= lowest}
    by_fates = max(likelihoods, key=lambda level: likelihoods[level]) if ran_out else 1.0
    ceiling = max(likelihoods, key=lambda level: likelihoods[level] - 0.5 * ((level - ratio) / sd) ** 2)
    # A stray out-of-memory far below the ceiling would only raise the line.
    explained = [
        r for r in recent
        if r.peak is not None or line.peak(r.used) + _EXPLAINED_WITHIN * line.spread(r.used) >= by_fates
    ]  # fmt: skip
    if len(explained) > len(measured):
        line = prior.fit(explained, start=line, ceiling=by_fates)
    return Fit(line, ceiling, by_fates < 1)


def _ceiling_of_reserved(readings: Sequence[Reading]) -> tuple[float, float] | None:
    """Returns the ceiling that reserved memory shows, and its standard deviation; None where nothing was reserved.

    Peaks near the capacity count most: far below it the allocator has no reason to release its cache. More runs do not
    lower the standard deviation: a configuration's ratio is too low for the same reason in all runs.
    """
    total = weights = 0.0
    least_sd = math.inf
    for _, peak, weight, reserved in readings:
        if peak and reserved:
            sd = math.hypot(_RESERVED_SD, _RESERVED_SD_BELOW * max(1 - peak, 0.0))
            total += weight / sd**2 * peak / max(reserved, peak)
            weights += weight / sd**2
            least_sd = min(least_sd, sd)
    return (total / weights, least_sd) if weights else None


def _log_likelihood(ceiling: float, readings: Sequence[Reading], line: PeakRegression) -> float:
    total = _CEILING_LOG_ODDS * (ceiling - 1)
    for used, peak, weight, _ in readings:
        if peak is None:
            deviations, otherwise = (line.peak(used) - ceiling) / line.spread(used), _STRAY_OOMS
        else:
            # The capacity itself does not vary: every measured peak did fit below it.
            deviations, otherwise = (ceiling - peak) / _CEILING_SD if ceiling < 1 else math.inf, _FITS_ABOVE
            if deviations > _SURE:
                continue
        normal = 0.5 * math.erfc(-deviations / math.sqrt(2))
        total += weight * math.log(otherwise + (1 - otherwise) * normal)
    return total


# --- The policies.

HALF_LIFE: Final = 30.0  # runs after which a run weighs half: how memory grows drifts with versions of libraries
# Half-lives of the history that are used: an older run would weigh less than half a per cent.
_MEMORY_HALF_LIVES: Final = 8


@dataclass(frozen=True)
class FactorPoint:
    """The point that one run adds to the history of its configuration."""

    used: float  # cost of the largest micro-batch that was run ÷ tuned limit
    peak: float | None  # peak memory ÷ capacity; None for an out-of-memory
    after_rescue: tuple[float, float] | None = None  # (used, peak) after a rescued out-of-memory
    reserved: float | None = None  # peak of reserved memory ÷ capacity; None where it says nothing of fragmentation

    def __post_init__(self) -> None:
        example = "Give FactorPoint(used=0.5, peak=0.62)"
        optional = {name: getattr(self, name) for name in ("peak", "reserved") if getattr(self, name) is not None}
        check_kinds("a share", Real, example, used=self.used, **optional)
        _SHARE.check(f"{example}, or peak=None for an out-of-memory", used=self.used, **optional)
        if self.after_rescue is not None:
            self._check_rescue(f"{example}, or after_rescue=(0.4, 0.6)")

    def _check_rescue(self, remedy: str) -> None:
        check_kinds("a pair of shares", (tuple, list), remedy, after_rescue=self.after_rescue)
        pair: Sequence[Any] = self.after_rescue or ()
        if len(pair) != 2:
            raise ArgumentError("after_rescue is a pair of shares", value=shown(pair), remedy=remedy)
        for share in pair:
            check_kinds("a pair of shares", Real, remedy, after_rescue=share)
            _SHARE.check(remedy, after_rescue=share)


AimLimit = Literal["target", "noise", "ceiling", "reserved", "maximum"]


@dataclass(frozen=True)
class Decision:
    """The conclusion of a policy from the history."""

    factor: float  # of the next run
    aim: float  # expected peak that the policy works towards, ÷ capacity; it may take several runs to get there
    # The reason why the aim is no higher: it is the `target`; the next peak is too uncertain (`noise`); memory ran out
    # below the capacity (`ceiling`), or would, since some is reserved and not in use (`reserved`); or the largest
    # factor leads no further (`maximum`).
    limited_by: AimLimit
    interval: float  # half-width of the 95 % interval of the factor that leads to the aim


# The ranges of the options of policies, by their names.
_OPTIONS: Final[Mapping[str, _Range]] = {
    "target": _FACTOR,
    "minimum": _FACTOR,
    "maximum": _FACTOR,
    "momentum": _Range(0, 1),
    "oom_cut": _Range(0, 1),
    "learns_from": _Range(0, 1),
    "half_life": _POSITIVE,
    # The margin of so many deviations is a number; at 38 it is none.
    "z": _Range(0, 10),
    "step_up": _Range(1, MOST_SHARE),
    "oom_share": _FACTOR,
}


@dataclass(frozen=True, kw_only=True)
class FactorPolicy(ABC):
    """A pure function of the history, which is oldest first; `first` is the factor of the first run, in (0, 1]."""

    target: float = 0.90  # peak to reach ÷ capacity
    minimum: float = 0.05  # bounds of the factor
    maximum: float = 1.0

    def __post_init__(self) -> None:
        example = f"Give a number, or leave it out: {type(self).__name__}(target=0.9)"
        numbers = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "prior"}
        check_kinds("a number", Real, example, **numbers)
        for name, number in numbers.items():
            if name in _OPTIONS:
                _OPTIONS[name].check(example, **{name: number})
        if self.minimum > self.maximum:
            raise ArgumentError("The smallest factor is at most the largest", remedy="Give a larger maximum",
                                value=f"minimum {shown(self.minimum)}, maximum {shown(self.maximum)}")  # fmt: skip

    @abstractmethod
    def decide(self, history: Sequence[FactorPoint], *, first: float) -> Decision:
        """Returns the factor of the next run, in [minimum, maximum], and the peak that the policy works towards."""

    def with_prior(self, base: float, full: float) -> Self:
        """Returns the policy with a cost model's predictions as its prior.

        Args:
            base: Predicted peak ÷ capacity of a run that uses nothing.
            full: Predicted peak ÷ capacity of a run that uses the whole tuned limit.
        """
        return self

    def next_factor(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the factor of the next run; raises ArgumentError where an argument has the wrong type or value."""
        _check_history(history, first)
        return self.decide(history, first=first).factor

    def _bounded(self, factor: float) -> float:
        return min(max(factor, self.minimum), self.maximum)


def _check_history(history: object, first: object) -> None:
    check_kinds("a list of FactorPoint", Sequence, "Give history=[FactorPoint(used=0.5, peak=0.62)]", history=history)
    for point in history:  # type: ignore[attr-defined]  # a sequence
        check_kinds(
            "a list of FactorPoint", FactorPoint, "Give history=[FactorPoint(used=0.5, peak=0.62)]", history=point
        )
    _check_first(first)


def _check_first(first: object) -> None:
    check_kinds("a factor", Real, "Give first=0.5", first=first)
    _FACTOR.check("Give first=0.5", first=first)


def recent_history(history: Sequence[FactorPoint], half_life: float = HALF_LIFE) -> Sequence[FactorPoint]:
    """Returns the runs that still count."""
    return history[-max(round(_MEMORY_HALF_LIVES * half_life), 1) :]


def readings_of(history: Sequence[FactorPoint], half_life: float = HALF_LIFE) -> list[Reading]:
    """Returns the readings of the runs that still count, weighted by age; steps after a rescue give another reading."""
    recent, readings = recent_history(history, half_life), []
    for age, point in zip(range(len(recent) - 1, -1, -1), recent, strict=True):
        weight = 0.5 ** (age / half_life)
        readings.append(Reading(point.used, point.peak, weight, point.reserved))
        if point.after_rescue is not None:
            readings.append(Reading(*point.after_rescue, weight))
    return readings


# (upper bound of the peak, gain): far from the target the factor moves in large steps, near it in small ones.
_GAINS: Final = ((0.50, 0.5), (0.70, 0.3), (0.85, 0.1), (0.95, 0.2))
# Gain for a peak above the last bound: a run that close to an out-of-memory calls for a large step back.
_GAIN_ABOVE: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class MomentumPolicy(FactorPolicy):
    """Moves the factor a share of the way towards the target after every run: `factor += momentum · gain · (target -
    peak)`, where the gain depends on the peak; an out-of-memory subtracts `oom_cut`.

    Source: the rule of the CAN-bus training launcher that this package continues.

    A peak of 62 % against a target of 90 % lies below 70 %, where the gain is 0.3: 0.3 × 0.3 × 0.28 = 0.0252.

    >>> policy = MomentumPolicy()
    >>> round(policy.next_factor([FactorPoint(used=0.489, peak=0.62)], first=0.489), 4)
    0.5142

    Every band of peaks has its gain:

    >>> for peak in (0.40, 0.62, 0.80, 0.88, 0.92, 0.96):
    ...     print(peak, round(policy.next_factor([FactorPoint(used=0.5, peak=peak)], first=0.5), 4))
    0.4 0.575
    0.62 0.5252
    0.8 0.503
    0.88 0.5012
    0.92 0.4988
    0.96 0.491

    The cut after an out-of-memory is not scaled by the momentum, and steps after a rescue do not change it:

    >>> round(policy.next_factor([FactorPoint(used=0.427, peak=None)], first=0.427), 4)
    0.277

    The factor stays in its bounds:

    >>> policy.next_factor([FactorPoint(used=0.1, peak=None)], first=0.1)
    0.05
    >>> policy.next_factor([FactorPoint(used=1.0, peak=0.6)], first=1.0)
    1.0

    A run that used far less than it was allowed does not show the factor's peak:

    >>> policy.next_factor([FactorPoint(used=0.1, peak=0.3)], first=0.6)
    0.6
    """

    momentum: float = 0.3  # share of an adjustment that is applied
    oom_cut: float = 0.15  # taken off the factor after an out-of-memory
    learns_from: float = 0.9  # share of the factor that a run must have used to count

    def next_factor(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Replays the history from the first run's factor; the result is in [minimum, maximum]. Raises ArgumentError
        where an argument has the wrong type or value.
        """
        _check_history(history, first)
        factor = self._bounded(first)
        for point in history:
            if point.peak is None:
                factor = self._bounded(factor - self.oom_cut)
            elif point.used >= self.learns_from * factor:
                gain = next((gain for below, gain in _GAINS if point.peak < below), _GAIN_ABOVE)
                factor = self._bounded(factor + self.momentum * gain * (self.target - point.peak))
        return factor

    def decide(self, history: Sequence[FactorPoint], *, first: float) -> Decision:
        """Returns the factor of the next run. The regression gives only its interval and aim."""
        factor = self.next_factor(history, first=first)
        line = fit_with_ceiling(readings_of(history), DEFAULT_PRIOR).line
        needed = self._bounded(line.used_for(self.target))
        aim = min(self.target, line.peak(needed)) if history and needed == self.maximum else self.target
        return Decision(factor, aim, "target" if aim == self.target else "maximum", line.half_width(needed))


_BACK_OFF: Final = 0.99  # ratio of one factor to the next in the search for one whose risk is small enough
_LEAST_FACTOR: Final = 1e-6  # the search ends here: the steps to a smaller one would be no steps in floating point
# Standard deviation of a measured peak around a cost model's prediction, as a share of the capacity. Predictions from
# probes lie within a few thousandths; this allows for memory that no probe sees (another library's tensors, a
# workspace).
_PREDICTED_SD: Final = 0.06
_OOMS_IN_A_ROW: Final = 20  # out-of-memories in a row whose earlier decisions are compared, each with a fit of its own


@dataclass(frozen=True, kw_only=True)
class AffinePolicy(FactorPolicy):
    """Fits `peak = base + slope · used` to the history and uses the share whose expected peak is the target,
    `(target - base) / slope`, or less where the next peak might exceed the ceiling, above which memory runs out.

    Under the simulated laws of `scripts/bench/policy`, 1 run in 200 ran out of memory, the first runs of a law
    included; most often, 1 in 75, where memory is fragmented and peaks scatter by 5 %.

    With one run at 62 %, the base is still a guess, so the step stops short of the target:

    >>> policy = AffinePolicy()
    >>> decision = policy.decide([FactorPoint(used=0.489, peak=0.62)], first=0.489)
    >>> round(decision.factor, 2), round(decision.aim, 2), decision.limited_by
    (0.77, 0.84, 'noise')

    An out-of-memory is a point somewhere above the capacity:

    >>> policy.next_factor([FactorPoint(used=0.8, peak=None)], first=0.8) < 0.7
    True

    A measurement after a rescue counts like any other run:

    >>> rescued = FactorPoint(used=0.87, peak=None, after_rescue=(0.72, 0.89))
    >>> round(policy.next_factor([rescued], first=0.87), 2)
    0.73

    Where memory ran out at a peak that ought to have fitted, that peak is a ceiling:

    >>> fitted = [FactorPoint(used, 0.1 + used) for used in (0.5, 0.7, 0.75, 0.76)]
    >>> policy.decide([*fitted, FactorPoint(used=0.8, peak=None)], first=0.5).limited_by
    'ceiling'

    Where more is reserved than is in use, memory will run out below the capacity, and nobody needs to try:

    >>> fragmented = [FactorPoint(used, 0.1 + used, reserved=(0.1 + used) / 0.84) for used in (0.5, 0.7, 0.72)]
    >>> decision = policy.decide(fragmented, first=0.5)
    >>> round(decision.aim, 2), decision.limited_by
    (0.81, 'reserved')
    """

    half_life: float = HALF_LIFE  # runs
    prior: RegressionPrior = DEFAULT_PRIOR
    # Normal standard deviations between expected peak and ceiling: a risk of 1 run in 200 where noise is the limit.
    # A law's first runs and heavy tails, which no history shows in time, bring that to 1 in 150. `scripts/bench/policy`
    # compares other values: fewer out-of-memories cost fill, and runs until the target is reached.
    z: float = 2.58
    step_up: float = 2.0  # next used share ÷ largest used share so far, at most
    oom_share: float = 0.85  # next used share ÷ share that ran out of memory, at most, unless more was seen to fit

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kinds("a prior of the regression", RegressionPrior, "Leave the prior out", prior=self.prior)

    def with_prior(self, base: float, full: float) -> Self:
        """Returns the policy with a cost model's predictions as its prior."""
        prior = replace(self.prior, base=base, base_sd=_PREDICTED_SD, full=full, full_sd=_PREDICTED_SD)
        return replace(self, prior=prior)

    def decide(self, history: Sequence[FactorPoint], *, first: float) -> Decision:
        """Decides from the fit, which an out-of-memory never raises."""
        _check_first(first)
        history = recent_history(history, self.half_life)
        decision = self._decide_from_fit(history, first)
        # A refit with an out-of-memory in it can come out higher; only a rescue that was measured may raise the factor.
        for end in range(len(history) - 1, max(len(history) - _OOMS_IN_A_ROW, 0) - 1, -1):
            if history[end].peak is not None or history[end].after_rescue is not None:
                break
            earlier = self._decide_from_fit(history[:end], first).factor
            decision = replace(decision, factor=min(decision.factor, earlier))
        return decision

    def _decide_from_fit(self, history: Sequence[FactorPoint], first: float) -> Decision:
        readings = readings_of(history, self.half_life)
        line, ceiling, ran_out_below = fit_with_ceiling(readings, self.prior)
        needed = self._bounded(line.used_for(self.target))
        if not history:
            return Decision(self._bounded(first), self.target, "target", line.half_width(needed))

        def margin(used: float) -> float:
            return math.hypot(line.margin(used, self.z), self.z * _CEILING_SD if ceiling < 1 else 0.0)

        safe = needed
        while safe > max(self.minimum, _LEAST_FACTOR) and line.peak(safe) + margin(safe) > ceiling:
            safe *= _BACK_OFF
        aim = self.target if safe == needed < self.maximum else min(self.target, line.peak(safe))
        below: AimLimit = "ceiling" if ran_out_below else "reserved"
        reason: AimLimit = "maximum" if safe == needed else "noise" if margin(safe) > 1 - ceiling else below
        highest = max([first, *(reading.used for reading in readings if reading.peak is not None)])
        factor, last = min(safe, self.step_up * highest), history[-1]
        if last.peak is None:
            # Where the run went on and was measured, half-way back to the share that failed is not too far.
            halfway = (last.after_rescue[0] + last.used) / 2 if last.after_rescue else 0.0
            factor = min(factor, max(self.oom_share * last.used, halfway))
        return Decision(self._bounded(factor), aim, reason if aim < self.target else "target", line.half_width(safe))


POLICIES: Final[Mapping[str, type[FactorPolicy]]] = {
    "affine": AffinePolicy,
    "momentum": MomentumPolicy,
}


def make_policy(name: str, options: Mapping[str, Any]) -> FactorPolicy:
    """Makes the policy of a name in `POLICIES`; options of another policy are ignored.

    >>> make_policy("momentum", {"target": 0.8, "half_life": 5.0}).target
    0.8
    """
    kind = POLICIES[name]
    names = {field.name for field in fields(kind)}
    return kind(**{option: value for option, value in options.items() if option in names})
