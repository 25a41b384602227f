"""How a run comes to its safety factor: known before the device was looked at (static, pinned, learned, of the table),
or following from what the device is found to hold.
"""

from dataclasses import dataclass
from typing import Final

from can_train.policy.device_limits import DeviceLimits
from can_train.policy.first_factor import Aim, aim_within, closed_form_factor, closed_form_words, interval_share
from can_train.state.factor_store import Elsewhere, FactorChoice

PROVISIONAL: Final = 0.5
"""Factor that a search reckons with before there is one: it looks for twice what the batch needs, so that a limit it
ends below is memory's, wherever weights and state leave half of the device free."""

_LEAST_RATIO: Final = 0.5
_LARGEST_RATIO: Final = 2.0
"""Bounds of what another device may have taught: beyond them it is no measurement of the same training."""

UNUSED: Final = FactorChoice(1.0, "not in use: nothing was searched for")


@dataclass(frozen=True)
class Decided:
    """A run's factor.

    Attributes:
        choice: The factor and where it comes from.
        aim: The peak that it goes for.
    """

    choice: FactorChoice
    aim: Aim


@dataclass(frozen=True, kw_only=True)
class FactorRule:
    """Decides the factor of a run.

    Attributes:
        known: The factor, where it is known before the device is looked at; None: it follows from the limits.
        aim: The peak to go for, as far as it is known before.
        aim_is_learned: Whether runs have shown that the aim fits; else what the limits show lowers it.
        minimum, maximum: Bounds of a factor that follows from the limits.
        elsewhere: What another device taught of the configuration; None: nothing.
        after_oom: Whether the run's last attempt died of an out-of-memory, so that its plan gives way to `known`.
    """

    known: FactorChoice | None
    aim: Aim
    aim_is_learned: bool = False
    minimum: float = 0.05
    maximum: float = 1.0
    elsewhere: Elsewhere | None = None
    after_oom: bool = False

    @property
    def provisional(self) -> float:
        """The factor that a search reckons with."""
        return PROVISIONAL if self.known is None else self.known.factor

    def decide(self, limits: DeviceLimits | None) -> Decided:
        """Decides the factor, given what the device was found to hold; None where nobody searched."""
        if limits is None:
            return Decided(self.known or UNUSED, self.aim)
        if self.known is not None:
            return Decided(self.known, self.aim if self.aim_is_learned else aim_within(limits, self.aim))
        width = interval_share(limits)
        aim = aim_within(limits, self._certain(width), margin=width)
        return Decided(self._closed_form(limits, aim.share), aim)

    def _certain(self, width: float) -> Aim:
        """The target, or less where the prediction's interval would reach beyond the capacity."""
        highest = max(1.0 - width, 0.0)
        return self.aim if highest >= self.aim.share else Aim(highest, "the prediction is not certain enough")

    def _closed_form(self, limits: DeviceLimits, aim: float) -> FactorChoice:
        ratio, source = 1.0, "from the probes"
        if self.elsewhere is not None:
            ratio = min(max(self.elsewhere.ratio, _LEAST_RATIO), _LARGEST_RATIO)
            runs = f"{self.elsewhere.runs} run{'s' if self.elsewhere.runs > 1 else ''}"
            source = f"from the probes and {runs} on {self.elsewhere.device}"
        factor = min(max(closed_form_factor(limits, aim, ratio=ratio), self.minimum), self.maximum)
        return FactorChoice(factor, f"{source}: {closed_form_words(limits, aim, factor, ratio=ratio)}")
