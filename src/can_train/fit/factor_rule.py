"""The factor of a configuration that a device has not run yet, from what the device was just found to hold: the share
of the tuned limit whose predicted peak meets the target. What earlier runs taught is the factor policies' subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from can_train.fit.cost_model import DeviceLimits

# Least divisor in place of a tuned limit: dividing by it needs no case of its own.
_LEAST_LIMIT_BYTES: Final = 1.0


@dataclass(frozen=True)
class Aim:
    """The peak memory that a plan works towards."""

    share: float  # of the capacity
    reason: str = ""  # why it is less than the target; empty where it is not


# The aim of a factor that a person has fixed: it holds whatever peak it leads to.
NO_AIM: Final = Aim(1.0)


def lower_aim(limits: DeviceLimits, aim: Aim, *, margin: float = 0.0) -> Aim:
    """Lowers an aim to what was seen to fit: a small or fragmented device runs out of memory well below its capacity.

    Args:
        limits: What the device was found to hold.
        aim: The aim so far; `NO_AIM` stays.
        margin: Share of the capacity to stay below what was seen.
    """
    training = limits.training
    # A search that stopped where memory decides nothing has not seen how much fits.
    fits = 1.0 if training.capped else training.peak_bytes(training.tuned_limit) / limits.capacity_bytes
    highest = max(fits - margin, 0.0)
    if aim == NO_AIM or highest >= aim.share:
        return aim
    return Aim(highest, "no more was seen to fit" if training.trials else "no more is predicted to fit")


def predicted_half_width(limits: DeviceLimits) -> float:
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
    return training.cost_within(aim / ratio * limits.capacity_bytes) / max(training.tuned_limit, _LEAST_LIMIT_BYTES)


def describe_closed_form(limits: DeviceLimits, aim: float, factor: float, *, ratio: float = 1.0) -> str:
    """Writes the arithmetic behind a factor of `closed_form_factor`, in shares of the capacity.

    Args:
        limits: What the device was found to hold.
        aim: Peak to reach, as a share of the capacity.
        factor: The factor, within its bounds.
        ratio: Measured ÷ predicted peaks.
    """
    training, capacity = limits.training, limits.capacity_bytes
    base, tuned = training.model.base_bytes / capacity, training.measured_ratio * training.tuned_limit / capacity
    goal = f"{aim:.1%}" if ratio == 1.0 else f"{aim:.1%} ÷ {ratio:.3f}"
    bounded = "" if abs(factor - closed_form_factor(limits, aim, ratio=ratio)) < 1e-9 else ", within its bounds"
    return f"({goal} − {base:.1%} of weights and state) ÷ {tuned:.1%} of tuned limit{bounded}"


@dataclass(frozen=True)
class FactorChoice:
    """The factor of the next run."""

    factor: float  # share of the tuned limit, in (0, 1]
    reason: str


@dataclass(frozen=True)
class OtherDevice:
    """What runs of the configuration have measured on another kind of device."""

    ratio: float  # measured ÷ predicted peak
    runs: int
    device: str


# The search looks for what the batch needs ÷ this factor. With 0.5, a limit below that is memory's, wherever weights
# and
# state leave half of the device free.
# Factor that a search assumes before there is one.
PROVISIONAL: Final = 0.5

_LEAST_RATIO: Final = 0.5
# Bounds of `OtherDevice.ratio`: beyond them it was not measured in the same training.
_LARGEST_RATIO: Final = 2.0

UNUSED: Final = FactorChoice(1.0, "not in use: nothing was searched for")


@dataclass(frozen=True)
class FactorDecision:
    """A run's factor, and the peak that it works towards."""

    choice: FactorChoice
    aim: Aim


@dataclass(frozen=True, kw_only=True)
class FactorRule:
    """Decides the factor of a run.

    Attributes:
        known: The factor, where it is known before the device is looked at; None means that it follows from the limits.
        aim: The peak to work towards, as far as it is known before.
        aim_is_learned: Whether runs have shown that the aim fits; else what the limits show lowers it.
        minimum, maximum: Bounds of a factor that follows from the limits.
        other_device: What another device has shown of the configuration.
        after_oom: Whether the run's last attempt died of an out-of-memory, so that its plan gives way to `known`.
    """

    known: FactorChoice | None
    aim: Aim
    aim_is_learned: bool = False
    minimum: float = 0.05
    maximum: float = 1.0
    other_device: OtherDevice | None = None
    after_oom: bool = False

    @property
    def provisional(self) -> float:
        """The factor that a search assumes."""
        return PROVISIONAL if self.known is None else self.known.factor

    def decide(self, limits: DeviceLimits | None) -> FactorDecision:
        """Decides the factor from what the device was found to hold; None where nothing was searched for."""
        if limits is None:
            return FactorDecision(self.known or UNUSED, self.aim)
        if self.known is not None:
            return FactorDecision(self.known, self.aim if self.aim_is_learned else lower_aim(limits, self.aim))
        # The prediction's interval must not reach beyond the capacity.
        width = predicted_half_width(limits)
        certain = max(1.0 - width, 0.0)
        aim = self.aim if certain >= self.aim.share else Aim(certain, "the prediction is not certain enough")
        aim = lower_aim(limits, aim, margin=width)
        return FactorDecision(self._closed_form(limits, aim.share), aim)

    def _closed_form(self, limits: DeviceLimits, aim: float) -> FactorChoice:
        ratio, source = 1.0, "from the probes"
        if self.other_device is not None:
            ratio = min(max(self.other_device.ratio, _LEAST_RATIO), _LARGEST_RATIO)
            runs = f"{self.other_device.runs} run{'s' if self.other_device.runs > 1 else ''}"
            source = f"from the probes and {runs} on {self.other_device.device}"
        factor = min(max(closed_form_factor(limits, aim, ratio=ratio), self.minimum), self.maximum)
        return FactorChoice(factor, f"{source}: {describe_closed_form(limits, aim, factor, ratio=ratio)}")
