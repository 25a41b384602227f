"""How the runs of one configuration on one kind of device become its next safety factor: a pure function of the past.
Which runs belong to that past, and in which order, is the factor store's decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_GAINS: Final = ((0.50, 0.5), (0.70, 0.3), (0.85, 0.1), (0.95, 0.2))
"""(peak, gain): a peak below the first figure is corrected by the second; far off boldly, near the target gently."""

_GAIN_ABOVE: Final = 0.5
"""Gain from the last peak of `_GAINS` on: a run that close to out-of-memory is backed away from boldly."""


@dataclass(frozen=True)
class FactorPoint:
    """What one run taught.

    Attributes:
        used: Cost of the largest micro-batch actually run ÷ tuned limit.
        peak: Peak memory ÷ capacity; None for an out-of-memory.
        settled: After an out-of-memory that was rescued: (used, peak) of what ran from then on; None where nothing did.
    """

    used: float
    peak: float | None
    settled: tuple[float, float] | None = None


class FactorPolicy(Protocol):
    """What every policy answers, from the past alone."""

    @property
    def target(self) -> float:
        """Peak to reach, as a share of capacity."""

    def next_factor(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the factor of the next run."""

    def aim(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the peak that the policy goes for: the target, or less where that is too great a risk."""

    def interval(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the half-width of the factor's 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class MomentumPolicy:
    """Moves the factor a share of the way towards the target after every run, and cuts it after an out-of-memory.

    A peak of 62 % against a target of 90 % lies below 70 %: the adjustment is 0.3 × 0.28 = 0.084, and 0.3 of it counts.

    >>> policy = MomentumPolicy()
    >>> round(policy.next_factor([FactorPoint(used=0.489, peak=0.62)], first=0.489), 4)
    0.5142

    An out-of-memory takes the whole cut, whatever the momentum:

    >>> round(policy.next_factor([FactorPoint(used=0.427, peak=None)], first=0.427), 4)
    0.277

    A run that used far less than it was allowed says nothing of what the factor leads to:

    >>> policy.next_factor([FactorPoint(used=0.1, peak=0.3)], first=0.6)
    0.6

    Attributes:
        target: Peak to reach, as a share of capacity.
        momentum: Share of an adjustment that is applied.
        oom_cut: What an out-of-memory takes off the factor.
        minimum: Smallest factor.
        maximum: Largest factor.
        learns_from: Share of the factor that a run must have used to count.
    """

    target: float = 0.90
    momentum: float = 0.3
    oom_cut: float = 0.15
    minimum: float = 0.05
    maximum: float = 1.0
    learns_from: float = 0.9

    def next_factor(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Replays the history from the first run's factor.

        Args:
            history: What the runs taught, oldest first.
            first: The factor of the first run, in (0, 1].

        Returns:
            The factor of the next run, in [minimum, maximum].
        """
        factor = self._bounded(first)
        for point in history:
            factor = self._bounded(factor + self._step(point, factor))
        return factor

    def aim(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the target: this policy does not weigh risks."""
        return self.target

    def interval(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns twice the last step: the policy knows no spread, and steps of this size are what is left to make."""
        before = self.next_factor(history[:-1], first=first)
        return 2 * abs(self.next_factor(history, first=first) - before)

    def _step(self, point: FactorPoint, factor: float) -> float:
        if point.peak is None:
            return -self.oom_cut
        if point.used < self.learns_from * factor:
            return 0.0
        gain = next((gain for below, gain in _GAINS if point.peak < below), _GAIN_ABOVE)
        return self.momentum * gain * (self.target - point.peak)

    def _bounded(self, factor: float) -> float:
        return min(max(factor, self.minimum), self.maximum)
