"""The factor of a configuration that a device has not run yet, from what it was just found to hold: the share of the
tuned limit whose predicted peak meets the target. What earlier runs taught is the factor policies' matter.
"""

from dataclasses import dataclass
from typing import Final

from can_train.policy.device_limits import DeviceLimits

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
