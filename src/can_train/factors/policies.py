"""How observations become the next safety factor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, Protocol

from can_train.factors.peak_regression import DEFAULT_PRIOR, Line, LinePrior, Reading, since_change

_LEVELS: Final = tuple(level / 100 for level in range(100, 49, -1))
"""Ceilings that are considered, as shares of capacity, the one believed in without evidence first."""


_ODDS: Final = 12.0
"""How much less likely a ceiling far below the capacity is, in nats a unit of capacity."""


_SOFTNESS: Final = 0.01
"""Standard deviation of the ceiling from run to run: memory is never fragmented twice alike."""


_UNKNOWN_CAUSES: Final = 0.005
"""Share of runs that run out of memory below the ceiling, for reasons that do not come back."""


_LUCK: Final = 0.2
"""Share of runs that fit above the ceiling. The less, the longer old successes outweigh a ceiling that is new."""


_UNEXPLAINED: Final = 3.0
"""Standard deviations below the ceiling from which on an out-of-memory says nothing of the line."""


def learn(readings: Sequence[Reading], prior: LinePrior) -> tuple[Line, float]:
    """Returns the line through the readings since the law last changed, and the ceiling as a share of capacity.

    An out-of-memory is a reading somewhere above the ceiling. The ceiling is the capacity, unless memory ran out where
    the line through measured peaks lies too far below it for noise to explain that. Then it is the level that makes the
    fates of all runs most likely: about where memory ran out, but not below what many runs reached. Weights fall with
    age, so that a lone out-of-memory is forgotten after some tens of runs, and several back each other for longer.

    Args:
        readings: Oldest first.
        prior: What is believed of the line before any of them.
    """
    line = prior.fit(_measured(readings))
    recent = since_change(readings, line)
    measured = _measured(recent)
    if len(recent) < len(readings):
        line = prior.fit(measured)
    if len(measured) == len(recent):
        return line, 1.0
    ceiling = max(_LEVELS, key=lambda level: _evidence(level, recent, line)) if measured else 1.0
    telling = [r for r in recent if r.peak is not None or _explains(line, r.used, ceiling)]
    return prior.refit(line, telling, ceiling=ceiling), ceiling


def _measured(readings: Sequence[Reading]) -> list[Reading]:
    return [reading for reading in readings if reading.peak is not None]


def _explains(line: Line, used: float, ceiling: float) -> bool:
    return line.peak(used) + _UNEXPLAINED * line.spread(used) >= ceiling


def _evidence(ceiling: float, readings: Sequence[Reading], line: Line) -> float:
    """Returns the logarithm of how likely a ceiling makes the fates of the runs, by their weights, and is itself."""
    evidence = _ODDS * (ceiling - 1)
    for used, peak, weight in readings:
        if peak is None:
            beyond, otherwise = (line.peak(used) - ceiling) / line.spread(used), _UNKNOWN_CAUSES
        else:
            # The capacity itself is not soft: what was measured did fit below it.
            beyond, otherwise = (ceiling - peak) / _SOFTNESS if ceiling < 1 else math.inf, _LUCK
        evidence += weight * math.log(otherwise + (1 - otherwise) * _normal(beyond))
    return evidence


def _normal(deviations: float) -> float:
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


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

    def with_prior(self, base: float, full: float) -> "FactorPolicy":
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
        line, _ = learn(readings_of(history), DEFAULT_PRIOR)
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


BACK_OFF: Final = 0.99
"""Share of the factor that is kept in each step of the search for one whose risk is small enough."""


PREDICTED_SD: Final = 0.06
"""Standard deviation of a measured peak around what a cost model predicts, as a share of capacity. Predictions from
probes lie within a few thousandths; this is for what no probe sees (another library's tensors, a workspace)."""


_IN_A_ROW: Final = 20
"""Out-of-memories in a row that are gone back over, one fit each."""


@dataclass(frozen=True, kw_only=True)
class AffinePolicy(FactorPolicy):
    """Fits a straight line to what runs used and reached, and goes to where it meets the target, as far as the risk of
    running out of memory allows.

    With one run at 62 %, the line's base is still a guess, so the step stops short of the target:

    >>> policy = AffinePolicy()
    >>> decision = policy.decide([FactorPoint(used=0.489, peak=0.62)], first=0.489)
    >>> round(decision.factor, 2), round(decision.aim, 2), decision.holds
    (0.78, 0.85, 'noise')

    An out-of-memory is a point somewhere above the capacity:

    >>> policy.next_factor([FactorPoint(used=0.8, peak=None)], first=0.8) < 0.7
    True

    What was measured after a rescue counts like any other run:

    >>> rescued = FactorPoint(used=0.87, peak=None, settled=(0.72, 0.89))
    >>> round(policy.next_factor([rescued], first=0.87), 2)
    0.73

    Where memory ran out at a peak that ought to have fitted, that peak is a ceiling:

    >>> fitted = [FactorPoint(used, 0.1 + used) for used in (0.5, 0.7, 0.75, 0.76)]
    >>> policy.decide([*fitted, FactorPoint(used=0.8, peak=None)], first=0.5).holds
    'ceiling'

    Attributes:
        target: Peak to reach, as a share of capacity.
        minimum: Smallest factor.
        maximum: Largest factor.
        half_life: Runs after which a run weighs half.
        prior: What is believed of the line before any run.
        z: Standard deviations of the next peak between its expectation and where memory runs out: 1 run in 200 fails.
        step_up: Largest multiplier of what was used before.
        oom_share: Largest share of what ran out of memory that the next run may use, unless more was seen to fit.
    """

    target: float = 0.90
    minimum: float = 0.05
    maximum: float = 1.0
    half_life: float = HALF_LIFE
    prior: LinePrior = DEFAULT_PRIOR
    z: float = 2.6
    step_up: float = 2.0
    oom_share: float = 0.85

    def with_prior(self, base: float, full: float) -> "AffinePolicy":
        """Returns the policy with a line that a cost model predicts as its belief."""
        return replace(
            self, prior=replace(self.prior, base=base, base_sd=PREDICTED_SD, full=full, full_sd=PREDICTED_SD)
        )

    def decide(self, history: Sequence[FactorPoint], *, first: float) -> Decision:
        """Returns the factor of the next run, in [minimum, maximum], and what it goes for."""
        history = remembered(history, self.half_life)
        decision = self._weighed(history, first)
        # However the fit takes it, an out-of-memory never raises the factor, unless it was seen what fits instead.
        for end in range(len(history) - 1, max(len(history) - _IN_A_ROW, 0) - 1, -1):
            if history[end].peak is not None or history[end].settled is not None:
                break
            decision = replace(decision, factor=min(decision.factor, self._weighed(history[:end], first).factor))
        return decision

    def _weighed(self, history: Sequence[FactorPoint], first: float) -> Decision:
        readings = readings_of(history, self.half_life)
        line, ceiling = learn(readings, self.prior)
        reaches = self._bounded(line.reaching(self.target))
        if not history:
            return Decision(self._bounded(first), self.target, "target", line.interval(reaches))
        goal = self._risked(line, ceiling, reaches)
        aim = self.target if goal == reaches < self.maximum else min(self.target, line.peak(goal))
        lowered: Holds = "maximum" if goal == reaches else "noise" if ceiling == 1 else "ceiling"
        highest = max([first, *(reading.used for reading in readings if reading.peak is not None)])
        factor = min(goal, self.step_up * highest, self._after(history[-1]))
        return Decision(self._bounded(factor), aim, lowered if aim < self.target else "target", line.interval(goal))

    def _after(self, last: FactorPoint) -> float:
        """Returns the most that the run after the last may use."""
        if last.peak is not None:
            return self.maximum
        # Where the run went on and was measured, half-way back to what failed is not too far.
        halfway = (last.settled[0] + last.used) / 2 if last.settled else 0.0
        return max(self.oom_share * last.used, halfway)

    def _risked(self, line: Line, ceiling: float, factor: float) -> float:
        """Goes back from a factor until an out-of-memory is unlikely enough."""
        while factor > self.minimum and line.peak(factor) + self.z * line.spread(factor) > ceiling:
            factor *= BACK_OFF
        return factor

    def _bounded(self, factor: float) -> float:
        return min(max(factor, self.minimum), self.maximum)


POLICIES: Final[Mapping[str, type[AffinePolicy] | type[MomentumPolicy]]] = {
    "affine": AffinePolicy,
    "momentum": MomentumPolicy,
}


def make_policy(name: str, options: Mapping[str, Any]) -> FactorPolicy:
    """Makes a policy; options that it does not have are another one's, and are passed over.

    >>> make_policy("momentum", {"target": 0.8, "half_life": 5.0}).target
    0.8

    Args:
        name: A key of `POLICIES`.
        options: Values of its attributes.
    """
    kind = POLICIES[name]
    known = {item.name for item in fields(kind)}
    return kind(**{option: value for option, value in options.items() if option in known})
