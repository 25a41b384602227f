"""The default policy: peak memory is a straight line in the share of the tuned limit that a run used, so a few runs
show which share leads to the target. It decides the next factor; which runs count is the factor store's decision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from can_train.policy.factors import FactorPoint

MEMORY_HALF_LIVES: Final = 8
"""Half-lives of the past that are looked at: what lies further back weighs less than half a per cent."""

FIT_ROUNDS: Final = 6
"""Times that noise and censored points are estimated anew from the line, and the line from them."""

BACK_OFF: Final = 0.99
"""Share of the factor that is kept in each step of the search for one whose risk is small enough."""


_LEAST_SLOPE: Final = 1e-6
"""Slope below which nothing that is used shows in the peak."""


class Line(NamedTuple):
    """`peak = base + slope · used`, with what is not known of it.

    Attributes:
        base: Peak of a run that uses nothing, as a share of capacity.
        slope: Peak that using the whole tuned limit adds.
        variances: Of base and of slope, and their covariance.
        noise: Standard deviation of a run's peak around the line.
    """

    base: float
    slope: float
    variances: tuple[float, float, float]
    noise: float

    def peak(self, used: float) -> float:
        """Returns the expected peak."""
        return self.base + self.slope * used

    def spread(self, used: float) -> float:
        """Returns the standard deviation of the next run's peak."""
        of_base, of_slope, together = self.variances
        return math.sqrt(max(of_base + 2 * used * together + used**2 * of_slope, 0.0) + self.noise**2)


@dataclass(frozen=True, kw_only=True)
class AffinePolicy:
    """Fits a straight line to what runs used and reached, and goes to where it meets the target, as far as the risk of
    running out of memory allows.

    With one run at 62 %, the line's base is still a guess, so the step stops short of the target:

    >>> policy = AffinePolicy()
    >>> first = policy.next_factor([FactorPoint(used=0.489, peak=0.62)], first=0.489)
    >>> 0.62 < first < 0.78
    True

    An out-of-memory is a point somewhere above the capacity:

    >>> policy.next_factor([FactorPoint(used=0.8, peak=None)], first=0.8) < 0.7
    True

    Attributes:
        target: Peak to reach, as a share of capacity.
        minimum: Smallest factor.
        maximum: Largest factor.
        half_life: Runs after which a run weighs half: memory laws drift with versions.
        base, base_sd: What is believed of the line's base before any run: weights and optimizer state are there.
        slope, slope_sd: Likewise of its slope; a tuned limit fills what the base leaves.
        noise, noise_runs: Likewise of the noise, and how many runs that belief is worth.
        z: Standard deviations between the expected peak and the capacity.
        step_up: Largest multiplier of what was used before.
        oom_share: Largest share of what ran out of memory that the next run may use.
    """

    target: float = 0.90
    minimum: float = 0.05
    maximum: float = 1.0
    half_life: float = 20.0
    base: float = 0.22
    base_sd: float = 0.12
    slope: float = 0.85
    slope_sd: float = 1.0
    noise: float = 0.02
    noise_runs: float = 3.0
    z: float = 2.33
    step_up: float = 1.6
    oom_share: float = 0.85

    def next_factor(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the factor of the next run, in [minimum, maximum].

        Args:
            history: What the runs taught, oldest first.
            first: The factor of the first run, in (0, 1].
        """
        recent = self._recent(history)
        if not recent:
            return self._bounded(first)
        line = self.fit(recent)
        factor = (self.target - line.base) / max(line.slope, _LEAST_SLOPE)
        highest = max([first, *(point.used for point in recent if point.peak is not None)])
        factor = min(factor, self.step_up * highest, self.maximum)
        if recent[-1].peak is None:
            factor = min(factor, self.oom_share * recent[-1].used)
        return self._bounded(self._risked(line, factor))

    def aim(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the target, or where runs scatter so much that it risks an out-of-memory, the peak that does not."""
        recent = self._recent(history)
        if not recent:
            return self.target
        line = self.fit(recent)
        reaches = (self.target - line.base) / max(line.slope, _LEAST_SLOPE)
        return min(self.target, line.peak(self._risked(line, reaches)))

    def interval(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the half-width of the factor's 95 % interval: what is not known of the line, over its slope."""
        line, factor = self.fit(self._recent(history)), self.next_factor(history, first=first)
        of_base, of_slope, together = line.variances
        variance = max(of_base + 2 * factor * together + factor**2 * of_slope, 0.0)
        return 1.96 * math.sqrt(variance) / max(line.slope, _LEAST_SLOPE)

    def _recent(self, history: Sequence[FactorPoint]) -> Sequence[FactorPoint]:
        return history[-round(MEMORY_HALF_LIVES * self.half_life) :]

    def _risked(self, line: Line, factor: float) -> float:
        """Goes back from a factor until an out-of-memory is unlikely enough."""
        while factor > self.minimum and line.peak(factor) + self.z * line.spread(factor) > 1:
            factor *= BACK_OFF
        return factor

    def fit(self, points: Sequence[FactorPoint]) -> Line:
        """Fits the line: Bayesian least squares with normal beliefs of base and slope, the noise from the residuals.

        Args:
            points: At least one, oldest first.
        """
        weights = [0.5 ** ((len(points) - 1 - i) / self.half_life) for i in range(len(points))]
        line = Line(self.base, self.slope, (self.base_sd**2, self.slope_sd**2, 0.0), self.noise)
        for _ in range(FIT_ROUNDS):
            line = self._refit(points, weights, line)
        return line

    def _refit(self, points: Sequence[FactorPoint], weights: Sequence[float], line: Line) -> Line:
        # Normal equations of (base, slope): precision matrix [[a, b], [b, c]] and right-hand side (d, e).
        a, b, c = 1 / self.base_sd**2, 0.0, 1 / self.slope_sd**2
        d, e = self.base * a, self.slope * c
        for point, weight in zip(points, weights, strict=True):
            # An out-of-memory says that the peak was above the capacity, not by how much.
            peak = max(line.peak(point.used), 1.0 + line.noise) if point.peak is None else point.peak
            precision = weight / line.noise**2
            a, b, c = a + precision, b + precision * point.used, c + precision * point.used**2
            d, e = d + precision * peak, e + precision * peak * point.used
        determinant = a * c - b * b
        # Neither can be negative: what a run uses adds to its peak, and so do its weights.
        base, slope = max((c * d - b * e) / determinant, 0.0), max((a * e - b * d) / determinant, 0.0)
        variances = (c / determinant, a / determinant, -b / determinant)
        return Line(base, slope, variances, self._noise(points, weights, (base, slope)))

    def _noise(self, points: Sequence[FactorPoint], weights: Sequence[float], line: tuple[float, float]) -> float:
        base, slope = line
        measured = [(p, w) for p, w in zip(points, weights, strict=True) if p.peak is not None]
        squares = sum(w * (p.peak - base - slope * p.used) ** 2 for p, w in measured if p.peak is not None)
        runs = sum(w for _, w in measured)
        # Two runs' worth of freedom went into the line, less where there is hardly more than that.
        freedom = self.noise_runs + runs - min(2, 0.8 * runs)
        return math.sqrt((self.noise_runs * self.noise**2 + squares) / freedom)

    def _bounded(self, factor: float) -> float:
        return min(max(factor, self.minimum), self.maximum)
