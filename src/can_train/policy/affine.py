"""The default policy: peak memory is a straight line in the share of the tuned limit that a run used, so a few runs
show which share leads to the target. It decides the next factor; which runs count is the factor store's decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from can_train.policy.ceiling import learn
from can_train.policy.factors import HALF_LIFE, Decision, FactorPoint, FactorPolicy, Holds, readings_of, remembered
from can_train.policy.line import BELIEFS, Line, LinePrior

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
    prior: LinePrior = BELIEFS
    z: float = 2.6
    step_up: float = 2.0
    oom_share: float = 0.85

    def believing(self, base: float, full: float) -> "AffinePolicy":
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
