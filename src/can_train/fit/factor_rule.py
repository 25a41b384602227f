"""The factor of a configuration that a device has not run yet, from the limits that were just found on it: the share
of the tuned limit whose predicted peak meets the target. The factor policies learn from earlier runs; the
limits that they found come along, for a plan to confirm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from can_train.fit.cost_model import DeviceLimits
    from can_train.fit.step_time import Times

# Least share that a plan works towards of the memory beside weights and state in which a batch was tried, however wide
# the prediction's interval is: where memory does not follow the features, the interval would leave the device empty. A
# batch that runs out of memory is rescued, and the next run knows.
_LEAST_TRIED: Final = 0.5
_NEARLY: Final = 0.02  # share of the capacity between an aim and the memory seen to fit that takes no words
_UNCERTAIN: Final = "the prediction is not certain enough"
_LEAST_LIMIT_BYTES: Final = 1.0  # Least divisor in place of a tuned limit: dividing by it needs no case of its own


@dataclass(frozen=True)
class Aim:
    """The peak memory that a plan works towards."""

    share: float  # of the capacity
    reason: str = ""  # why it is less than the target; empty where it is not


NO_AIM: Final = Aim(1.0)  # The aim of a factor that a person has fixed: it holds whatever peak it leads to


def lower_aim(limits: DeviceLimits, aim: Aim, *, margin: float = 0.0) -> Aim:
    """Lowers an aim to the largest peak that was seen to fit, less a margin (share of the capacity); `NO_AIM` stays. A
    small or fragmented device runs out of memory well below its capacity. Where a batch was tried, the margin is at
    most half of its peak above weights and state.
    """
    training = limits.training
    # A search that stopped where memory decides nothing has not seen how much fits.
    fits = 1.0 if training.capped else training.peak_bytes(training.tuned_limit) / limits.capacity_bytes
    highest = max(fits - margin, _least_aim(limits, fits))
    if aim == NO_AIM or highest >= aim.share:
        return aim
    if not training.trials:
        return Aim(highest, "no more is predicted to fit")
    if fits - highest > _NEARLY:
        fact = "" if training.capped else f"{fits:.1%} was seen to fit, and "
        return Aim(highest, f"{fact}{_UNCERTAIN}")
    return Aim(highest, "no more was seen to fit")


def _least_aim(limits: DeviceLimits, fits: float) -> float:
    """Returns the least share of the capacity to work towards where batches were tried, the largest up to `fits`."""
    if not limits.training.trials:
        return 0.0
    state = min(limits.training.model.base_bytes / limits.capacity_bytes, fits)
    return state + _LEAST_TRIED * (fits - state)


def predicted_half_width(limits: DeviceLimits) -> float:
    """Returns the half-width of the predicted peak at the tuned limit, as a share of the capacity."""
    return limits.training.half_width(limits.training.tuned_limit) / limits.capacity_bytes


def closed_form_factor(limits: DeviceLimits, aim: float, *, ratio: float = 1.0) -> float:
    """Solves `ratio · (base + factor · tuned limit) = aim · capacity` for the factor, which may be any number; `ratio`
    is measured ÷ predicted peaks of the configuration, where they are known from another device.
    """
    training = limits.training
    return training.cost_within(aim / ratio * limits.capacity_bytes) / max(training.tuned_limit, _LEAST_LIMIT_BYTES)


def describe_closed_form(limits: DeviceLimits, aim: float, factor: float, *, ratio: float = 1.0) -> str:
    """Writes the arithmetic behind a factor of `closed_form_factor`, in shares of the capacity."""
    training, capacity = limits.training, limits.capacity_bytes
    base, tuned = training.model.base_bytes / capacity, training.measured_ratio * training.tuned_limit / capacity
    goal = f"{aim:.1%}" if ratio == 1.0 else f"{aim:.1%} ÷ {ratio:.3f}"
    bounded = "" if abs(factor - closed_form_factor(limits, aim, ratio=ratio)) < 1e-9 else ", within its bounds"
    return f"({goal} − {base:.1%} of weights and state) ÷ {tuned:.1%} of tuned limit{bounded}"


@dataclass(frozen=True)
class SafetyFactor:
    """The decision on a run's safety factor."""

    value: float  # share of the tuned limit that the run may use, in (0, 1]
    reason: str
    aim: Aim = NO_AIM  # the peak that it leads to


@dataclass(frozen=True)
class OtherDevice:
    """Measurements of the configuration's runs on another kind of device."""

    ratio: float  # measured ÷ predicted peak
    runs: int
    device: str


# Factor that a search assumes before there is one: it looks for the batch's cost ÷ this. With 0.5, a limit below
# that is memory's, wherever weights and state leave half of the device free.
PROVISIONAL: Final = 0.5
_SAME_CAPACITY: Final = 0.01  # Largest relative difference of two capacities that count as the same
# Bounds of `OtherDevice.ratio`: beyond them it was not measured in the same training.
_LEAST_RATIO: Final = 0.5
_LARGEST_RATIO: Final = 2.0
STATIC: Final = "static, nothing is learned"  # the reason of a factor that learning is switched off for
UNUSED: Final = SafetyFactor(1.0, "not in use: nothing was searched for")


@dataclass(frozen=True, kw_only=True)
class RememberedLimit:
    """A tuned limit that an earlier run found, and the line that its batch's peak lies on."""

    tuned_limit: float  # cost in bytes
    capped: bool  # whether more did not matter to that run
    base_bytes: float
    measured_ratio: float  # measured ÷ predicted cost

    def peak_bytes(self, cost: float) -> float:
        """Returns the peak that the run measured, or would have measured of a smaller batch."""
        return self.base_bytes + self.measured_ratio * cost


@dataclass(frozen=True, kw_only=True)
class RememberedLimits:
    """The limits that an earlier run found for one phase."""

    training: RememberedLimit
    evaluation: RememberedLimit
    recompute: tuple[str, ...] = ()  # Modules that the backward pass computed again
    offload: bool = False  # Whether saved tensors waited on the host
    offload_optimizer: bool = False  # Whether the optimizer's state did
    ranks: int = 1  # That weights and optimizer state were sharded over
    # Whether a step ran out of memory on the rung of the limits, so that the next run begins on this one, without them.
    climbed: bool = False


@dataclass(frozen=True, kw_only=True)
class EarlierSearch:
    """The limits that the last run of a configuration found on a kind of device."""

    run_id: str
    capacity_bytes: int
    torch_version: str
    phases: Mapping[str, RememberedLimits]  # by their names

    def is_of(self, capacity_bytes: int, torch_version: str) -> bool:
        """Tells whether the run had a device's memory, and a version of PyTorch."""
        apart = abs(capacity_bytes - self.capacity_bytes)
        return self.torch_version == torch_version and apart <= _SAME_CAPACITY * self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class FactorRule:
    """Decides the factor of a run."""

    # The factor that is pinned, learned or static, whatever the device holds; None: it follows from the limits.
    decided: SafetyFactor | None
    aim: Aim  # the peak to work towards, as far as it is known before the limits are
    aim_is_learned: bool = False  # whether runs have shown that the aim fits; else the limits lower it
    minimum: float = 0.05  # bounds of a factor that follows from the limits
    maximum: float = 1.0
    other_device: OtherDevice | None = None  # measurements of the configuration on another device
    after_oom: bool = False  # whether the last attempt died of an out-of-memory: its plan gives way to `decided`
    earlier: EarlierSearch | None = None  # whose limits a plan may confirm instead of searching; None: there are none
    # times of micro-batches that earlier attempts measured, by the phases' names; None: nothing is learned of them
    times: Sequence[Mapping[str, Times]] | None = None

    @property
    def provisional(self) -> float:
        """The factor that a search assumes."""
        return PROVISIONAL if self.decided is None else self.decided.value

    def decide(self, limits: DeviceLimits | None, *, is_uniform: bool = False) -> SafetyFactor:
        """Decides the factor from the device's limits, which are None where nothing was searched for.

        Args:
            limits: The limits.
            is_uniform: Whether all samples are of one size, so that batches of as many samples take the same memory.
        """
        if limits is None:
            return replace(self.decided or UNUSED, aim=self.aim)
        if self.decided is not None:
            return replace(self.decided, aim=self.aim if self.aim_is_learned else lower_aim(limits, self.aim))
        # The prediction's interval must not reach beyond the capacity.
        width = predicted_half_width(limits)
        certain = max(1.0 - width, _least_aim(limits, 1.0))
        aim = self.aim if certain >= self.aim.share else Aim(certain, _UNCERTAIN)
        # A margin below a batch that was tried would take a whole sample away.
        was_tried = is_uniform and limits.training.trials > 0
        aim = lower_aim(limits, aim, margin=0.0 if was_tried else width)
        ratio, source = 1.0, "from the probes"
        if self.other_device is not None:
            ratio = min(max(self.other_device.ratio, _LEAST_RATIO), _LARGEST_RATIO)
            runs = f"{self.other_device.runs} run{'s' if self.other_device.runs > 1 else ''}"
            source = f"from the probes and {runs} on {self.other_device.device}"
        factor = min(max(closed_form_factor(limits, aim.share, ratio=ratio), self.minimum), self.maximum)
        reason = f"{source}: {describe_closed_form(limits, aim.share, factor, ratio=ratio)}"
        return SafetyFactor(factor, reason, aim)
