"""The factor of a configuration that a device has not run yet, from what it was just found to hold: the share of the
tuned limit whose predicted peak meets the target. What earlier runs taught is the factor policies' matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from can_train.fit.cost_model import DeviceLimits

_TINY: Final = 1.0
"""Bytes that a tuned limit counts as at least: dividing by it needs no case of its own."""


@dataclass(frozen=True)
class Aim:
    """The peak that a run goes for.

    Attributes:
        share: Of the capacity.
        why: Why it is less than what was wanted, in words; empty where it is not.
    """

    share: float
    why: str = ""


ANY_PEAK: Final = Aim(1.0)
"""Where nobody aims: the factor is as it is."""


def aim_within(limits: DeviceLimits, wanted: Aim, *, margin: float = 0.0) -> Aim:
    """Lowers an aim to what was seen to fit: on a small or fragmented device memory runs out well below its capacity.

    Args:
        limits: What the device was found to hold.
        wanted: The aim so far; `ANY_PEAK` stays.
        margin: Share of the capacity to stay below what was seen.
    """
    training = limits.training
    # A search that stopped where memory decides nothing has not seen how much fits.
    fits = 1.0 if training.capped else training.peak_bytes(training.tuned_limit) / limits.capacity_bytes
    highest = max(fits - margin, 0.0)
    if wanted == ANY_PEAK or highest >= wanted.share:
        return wanted
    return Aim(highest, "no more was seen to fit" if training.trials else "no more is predicted to fit")


def interval_share(limits: DeviceLimits) -> float:
    """Returns the half-width of the predicted peak at the tuned limit, as a share of the capacity."""
    return limits.training.half_width(limits.training.tuned_limit) / limits.capacity_bytes


def closed_form_factor(limits: DeviceLimits, aim: float, *, ratio: float = 1.0) -> float:
    """Solves `ratio · (base + factor · tuned limit) = aim · capacity` for the factor, which may be any number.

    Args:
        limits: What the device was found to hold.
        aim: Peak to reach, as a share of the capacity.
        ratio: Measured ÷ predicted peaks of the configuration, where they are known from another device.
    """
    training = limits.training
    return training.cost_within(aim / ratio * limits.capacity_bytes) / max(training.tuned_limit, _TINY)


def closed_form_words(limits: DeviceLimits, aim: float, factor: float, *, ratio: float = 1.0) -> str:
    """Says how a factor of the closed form came about, in shares of the capacity.

    Args:
        limits: As of `closed_form_factor`.
        aim: Likewise.
        factor: The factor, within its bounds.
        ratio: As of `closed_form_factor`.
    """
    training, capacity = limits.training, limits.capacity_bytes
    base, tuned = training.model.base_bytes / capacity, training.measured_ratio * training.tuned_limit / capacity
    goal = f"{aim:.1%}" if ratio == 1.0 else f"{aim:.1%} ÷ {ratio:.3f}"
    bounded = "" if abs(factor - closed_form_factor(limits, aim, ratio=ratio)) < 1e-9 else ", within its bounds"
    return f"({goal} − {base:.1%} of weights and state) ÷ {tuned:.1%} of tuned limit{bounded}"


@dataclass(frozen=True)
class FactorChoice:
    """The factor of the next run.

    Attributes:
        factor: Share of the tuned limit, in (0, 1].
        reason: Where it comes from, in words.
    """

    factor: float
    reason: str


@dataclass(frozen=True)
class Elsewhere:
    """What another kind of device taught of a configuration.

    Attributes:
        ratio: Measured ÷ predicted peak, in bytes.
        runs: Runs that say so.
        device: Where they ran.
    """

    ratio: float
    runs: int
    device: str


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
