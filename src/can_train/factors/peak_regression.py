"""Peak memory as a straight line in the share of the tuned limit that a run used: its fit to what runs measured, and
how well they determine it. What to make of the line is the policies' decision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

FIT_ROUNDS: Final = 6
"""Times that noise and censored readings are estimated anew from the line, and the line from them."""


NORMAL_95: Final = 1.96
"""Standard deviations to either side that hold 95 % of a normal distribution."""


_DEGREES: Final = 4
"""Degrees of freedom of what is believed of a whole tuned limit: one that data, not memory, ended may be far off."""


_LEAST_SLOPE: Final = 1e-6
"""Slope below which nothing that is used shows in the peak."""


class Reading(NamedTuple):
    """What was measured once.

    Attributes:
        used: Cost of the largest micro-batch ÷ tuned limit.
        peak: Peak memory ÷ capacity; None for an out-of-memory.
        weight: 1 for the latest run, less for earlier ones.
    """

    used: float
    peak: float | None
    weight: float = 1.0


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

    def uncertainty(self, used: float) -> float:
        """Returns the standard deviation of the expected peak, which more runs lower."""
        of_base, of_slope, gather = self.variances
        return math.sqrt(max(of_base + 2 * used * gather + used**2 * of_slope, 0.0))

    def spread(self, used: float) -> float:
        """Returns the standard deviation of the next run's peak."""
        return math.hypot(self.uncertainty(used), self.noise)

    def reaching(self, peak: float) -> float:
        """Returns what must be used for an expected peak; below 0 where the base alone is above it."""
        return (peak - self.base) / max(self.slope, _LEAST_SLOPE)

    def interval(self, used: float) -> float:
        """Returns the half-width of the 95 % interval of the share that leads to the peak expected at `used`.

        That share is `u = (peak - base) / slope`. With `∂u/∂base = -1/slope` and `∂u/∂slope = -u/slope`, the delta
        method gives `var(u) = (var(base) + 2·u·cov + u²·var(slope)) / slope²`: the uncertainty of the expected peak,
        divided by the slope. Of a share, more than 1 says no more than 1 does.
        """
        return min(NORMAL_95 * self.uncertainty(used) / max(self.slope, _LEAST_SLOPE), 1.0)


@dataclass(frozen=True, kw_only=True)
class LinePrior:
    """What is believed of a line before any run.

    Attributes:
        base, base_sd: Its base and how sure that is: weights and optimizer state are there.
        full, full_sd: Likewise the peak of a run that uses the whole tuned limit: about the capacity.
        noise, noise_runs: Likewise the noise, and how many runs that belief is worth.
    """

    base: float = 0.22
    base_sd: float = 0.12
    full: float = 1.0
    full_sd: float = 0.15
    noise: float = 0.015
    noise_runs: float = 3.0

    def line(self) -> Line:
        """Returns the line as it is believed to be."""
        of_base, of_full = self.base_sd**2, self.full_sd**2
        return Line(self.base, self.full - self.base, (of_base, of_base + of_full, -of_base), self.noise)

    def fit(self, readings: Sequence[Reading]) -> Line:
        """Fits the line: Bayesian least squares with normal beliefs, the noise from the residuals."""
        return self.refit(self.line(), readings)

    def refit(self, line: Line, readings: Sequence[Reading], *, ceiling: float = 1.0) -> Line:
        """Fits the line, starting from another.

        Args:
            line: Through some of the readings: it says how far above the ceiling an out-of-memory was.
            readings: What was measured.
            ceiling: Where memory runs out, as a share of capacity.
        """
        for _ in range(FIT_ROUNDS if readings else 0):
            line = self._refit(readings, line, ceiling)
        return line

    def _refit(self, readings: Sequence[Reading], line: Line, ceiling: float) -> Line:
        # Normal equations of (base, slope): precision matrix [[a, b], [b, c]] and right-hand side (d, e).
        # Beliefs are as good as readings at 0 and at 1. The one at 1 has the tails of Student's distribution.
        surprise = (line.peak(1.0) - self.full) / self.full_sd
        b = c = (_DEGREES + 1) / (_DEGREES + surprise**2) / self.full_sd**2
        a = b + 1 / self.base_sd**2
        e = self.full * c
        d = e + self.base / self.base_sd**2
        for used, measured, weight in readings:
            # An out-of-memory says that the peak was above the ceiling, not by how much.
            peak = max(line.peak(used), ceiling + line.noise) if measured is None else measured
            precision = weight / line.noise**2
            a, b, c = a + precision, b + precision * used, c + precision * used**2
            d, e = d + precision * peak, e + precision * peak * used
        determinant = a * c - b * b
        base, slope = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        # Neither can be negative: what a run uses adds to its peak, and so do its weights.
        if slope < 0:
            base, slope = max(d / a, 0.0), 0.0
        elif base < 0:
            base, slope = 0.0, max(e / c, 0.0)
        variances = (c / determinant, a / determinant, -b / determinant)
        return Line(base, slope, variances, self._noise(readings, base, slope))

    def _noise(self, readings: Sequence[Reading], base: float, slope: float) -> float:
        squares = sum(w * (peak - base - slope * used) ** 2 for used, peak, w in readings if peak is not None)
        runs = sum(reading.weight for reading in readings if reading.peak is not None)
        # Two runs' worth of freedom went into the line, less where there is hardly more than that.
        freedom = self.noise_runs + runs - min(2, 0.8 * runs)
        return math.sqrt((self.noise_runs * self.noise**2 + squares) / freedom)


DEFAULT_PRIOR: Final = LinePrior()
"""What is believed of a configuration of which nothing is known."""


_LEAST_RUNS: Final = 3
"""Runs on either side of a change: fewer may all be outliers."""


_LEAST_CHANGE: Final = 0.03
"""Shift of the peak, as a share of capacity, below which the fit's own forgetting is soon enough."""


_CERTAIN: Final = 5.0
"""Standard errors of the shift: every place in a long history is looked at, so chance has many tries."""


_LEAST_NOISE: Final = 0.01
"""Standard deviation believed of residuals, worth as many runs as `_LEAST_RUNS`: a few may agree by chance."""


def since_change(readings: Sequence[Reading], line: Line) -> Sequence[Reading]:
    """Returns the readings since the law changed; all of them where it did not.

    A change shows as residuals from one line through all that are of one size before it and of another after.

    Args:
        readings: Oldest first.
        line: Fitted to all of them.
    """
    residuals = [(i, r.peak - line.peak(r.used)) for i, r in enumerate(readings) if r.peak is not None]
    total, squares = sum(x for _, x in residuals), sum(x * x for _, x in residuals)
    start, certainty = 0, _CERTAIN
    sum_before = 0.0
    for before, (index, residual) in enumerate(residuals):
        after = len(residuals) - before
        if min(before, after) >= _LEAST_RUNS:
            sum_after = total - sum_before
            shift = abs(sum_after / after - sum_before / before)
            within = max(squares - sum_before**2 / before - sum_after**2 / after, 0.0)
            variance = (within + _LEAST_RUNS * _LEAST_NOISE**2) / (len(residuals) + 1)
            errors = shift / math.sqrt(variance * (1 / before + 1 / after))
            if shift > _LEAST_CHANGE and errors > certainty:
                start, certainty = index, errors
        sum_before += residual
    return readings[start:]
