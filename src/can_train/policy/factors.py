"""How the runs of one configuration on one kind of device become its next safety factor: a pure function of the past.
Which runs belong to that past, and in which order, is the factor store's decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from can_train.policy.ceiling import learn
from can_train.policy.line import BELIEFS, Reading

HALF_LIFE: Final = 20.0
"""Runs after which a run weighs half: memory laws drift with versions."""

MEMORY_HALF_LIVES: Final = 8
"""Half-lives of the past that are looked at: what lies further back weighs less than half a per cent."""

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


Holds = Literal["target", "noise", "ceiling", "maximum"]


@dataclass(frozen=True)
class Decision:
    """What a policy makes of the past.

    Attributes:
        factor: Of the next run.
        aim: Expected peak that the policy goes for, as a share of capacity; runs may need several steps to it.
        holds: What the aim is: the `target`; or less, because the next peak is not known well enough (`noise`), because
            memory ran out below the capacity (`ceiling`), or because the largest factor leads no further (`maximum`).
        interval: Half-width of the 95 % interval of the factor that leads to the aim.
    """

    factor: float
    aim: float
    holds: Holds
    interval: float


class FactorPolicy(Protocol):
    """What every policy answers, from the past alone: the history is what the runs taught, oldest first, and `first`
    the factor of the first run, in (0, 1].
    """

    @property
    def target(self) -> float:
        """Peak to reach, as a share of capacity."""

    def decide(self, history: Sequence[FactorPoint], *, first: float) -> Decision:
        """Returns the factor of the next run, and what it goes for."""

    def believing(self, base: float, full: float) -> "FactorPolicy":
        """Returns the policy with what a cost model predicts: the peak of a run that uses nothing, and of one that uses
        the whole tuned limit, as shares of capacity. A policy that has no beliefs is as before.
        """
        return self

    def next_factor(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the factor of the next run."""
        return self.decide(history, first=first).factor

    def aim(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the expected peak that the policy goes for: the target, or less where that cannot or must not be."""
        return self.decide(history, first=first).aim

    def interval(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the half-width of the 95 % interval of the factor that leads to the aim (`Line.interval`)."""
        return self.decide(history, first=first).interval


def remembered(history: Sequence[FactorPoint], half_life: float = HALF_LIFE) -> Sequence[FactorPoint]:
    """Returns the runs that still count."""
    return history[-round(MEMORY_HALF_LIVES * half_life) :]


def readings_of(history: Sequence[FactorPoint], half_life: float = HALF_LIFE) -> list[Reading]:
    """Returns all that was measured by the runs that still count: after an out-of-memory, what ran on is one more.

    Args:
        history: What the runs taught, oldest first.
        half_life: Runs after which a run weighs half.
    """
    recent, readings = remembered(history, half_life), []
    for age, point in zip(range(len(recent) - 1, -1, -1), recent, strict=True):
        weight = 0.5 ** (age / half_life)
        readings.append(Reading(point.used, point.peak, weight))
        if point.settled is not None:
            readings.append(Reading(*point.settled, weight))
    return readings


@dataclass(frozen=True, kw_only=True)
class MomentumPolicy(FactorPolicy):
    """Moves the factor a share of the way towards the target after every run, and cuts it after an out-of-memory.

    A peak of 62 % against a target of 90 % lies below 70 %: the adjustment is 0.3 × 0.28 = 0.084, and 0.3 of it counts.

    >>> policy = MomentumPolicy()
    >>> round(policy.next_factor([FactorPoint(used=0.489, peak=0.62)], first=0.489), 4)
    0.5142

    Every band of peaks has its share of the way: half below 50 %, where 0.3 × 0.5 × 0.50 = 0.075; then 0.3, 0.1 and
    0.2; half again from 95 % on, where 0.3 × 0.5 × -0.06 = -0.009.

    >>> for peak in (0.40, 0.62, 0.80, 0.88, 0.92, 0.96):
    ...     print(peak, round(policy.next_factor([FactorPoint(used=0.5, peak=peak)], first=0.5), 4))
    0.4 0.575
    0.62 0.5252
    0.8 0.503
    0.88 0.5012
    0.92 0.4988
    0.96 0.491

    An out-of-memory takes the whole cut, whatever the momentum, and whatever ran on after it:

    >>> round(policy.next_factor([FactorPoint(used=0.427, peak=None)], first=0.427), 4)
    0.277

    The factor stays in its bounds:

    >>> policy.next_factor([FactorPoint(used=0.1, peak=None)], first=0.1)
    0.05
    >>> policy.next_factor([FactorPoint(used=1.0, peak=0.6)], first=1.0)
    1.0

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

    def decide(self, history: Sequence[FactorPoint], *, first: float) -> Decision:
        """Returns the factor of the next run, and what it goes for: the target, or less where the largest factor leads
        no further. This policy does not weigh risks, and fits a line only to say how well the factor is known.
        """
        factor = self.next_factor(history, first=first)
        line, _ = learn(readings_of(history), BELIEFS)
        reaches = self._bounded(line.reaching(self.target))
        aim = min(self.target, line.peak(reaches)) if history and reaches == self.maximum else self.target
        return Decision(factor, aim, "target" if aim == self.target else "maximum", line.interval(reaches))

    def _step(self, point: FactorPoint, factor: float) -> float:
        if point.peak is None:
            return -self.oom_cut
        if point.used < self.learns_from * factor:
            return 0.0
        gain = next((gain for below, gain in _GAINS if point.peak < below), _GAIN_ABOVE)
        return self.momentum * gain * (self.target - point.peak)

    def _bounded(self, factor: float) -> float:
        return min(max(factor, self.minimum), self.maximum)
