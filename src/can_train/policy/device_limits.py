"""What a device was found to hold: cost models and tuned limits of training and evaluation. Plain numbers, frozen with
the plan; finding them is left to the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from can_train.policy.cost_model import CostModel
from can_train.policy.packing import BatchCosts


@dataclass(frozen=True, kw_only=True)
class PhaseLimit:
    """One phase (training: forward and backward; evaluation: forward) on one device.

    Attributes:
        model: What its batches cost.
        tuned_limit: Largest cost in bytes that was tried and fits; 0 where nothing does.
        capped: Whether the search stopped where memory no longer mattered.
        trials: Batches tried beside the probes.
        ooms: Those of them that ran out of memory.
        measured_ratio: Measured ÷ predicted cost of the largest batch that fits; 1 where none was tried.
        mean_totals: [F] features of the mean sample: what batches are made of, and so where predictions are wanted.
    """

    model: CostModel
    tuned_limit: float
    capped: bool
    trials: int
    ooms: int
    measured_ratio: float
    mean_totals: tuple[float, ...]

    def peak_bytes(self, cost: float) -> float:
        """Returns the predicted peak of a micro-batch, corrected by what the trials measured."""
        return self.model.peak_bytes(cost, ratio=self.measured_ratio)

    def cost_within(self, num_bytes: float) -> float:
        """Returns the cost whose peak by the law is `num_bytes`; negative where not even an empty batch fits."""
        return (num_bytes - self.model.base_bytes) / self.measured_ratio

    def half_width(self, cost: float) -> float:
        """Returns the half-width in bytes of the interval around that peak."""
        return self.model.half_width(typical_totals(self.model, self.mean_totals, cost))

    def costs(self, counts: NDArray[np.float64]) -> BatchCosts:
        """Prices the samples of a batch, [R, F] in its order."""
        return BatchCosts(counts, self.model.features, self.model.coefficients)

    def predicted_within(self, room_bytes: float) -> "PhaseLimit":
        """Returns the limit that is predicted where no more room is than `room_bytes`.

        The limit so far is one that nobody has tried; what it stops short of stays unknown.
        """
        fits = max(self.cost_within(room_bytes), 0.0)
        return self if fits >= self.tuned_limit else replace(self, tuned_limit=fits, capped=False)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "PhaseLimit":
        """Reads what `dataclasses.asdict` made, also after JSON."""
        model, mean_totals = CostModel.from_plain(plain["model"]), tuple(plain["mean_totals"])
        return cls(**{**plain, "model": model, "mean_totals": mean_totals})


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """Both phases and the optimizer on one device.

    Attributes:
        device_key: Kind of device.
        capacity_bytes: What PyTorch's allocator could use of it.
        training: Forward and backward.
        evaluation: Forward alone.
        optimizer_peak_bytes: Peak of an optimizer step.
        gradient_bytes: What the gradients of a step's earlier micro-batches take: `training` reckons with them.
    """

    device_key: str
    capacity_bytes: int
    training: PhaseLimit
    evaluation: PhaseLimit
    optimizer_peak_bytes: int
    gradient_bytes: int = 0

    def predicted_on(self, device_key: str, capacity_bytes: int, room_bytes: float) -> "DeviceLimits":
        """Returns what is predicted of a device that has no more memory than the one of these predictions.

        Args:
            device_key: Its kind.
            capacity_bytes: What PyTorch's allocator could use of it.
            room_bytes: What of that is predicted to hold tensors.
        """
        phases = {name: getattr(self, name).predicted_within(room_bytes) for name in ("training", "evaluation")}
        return replace(self, device_key=device_key, capacity_bytes=capacity_bytes, **phases)

    def step_peak_bytes(self, largest_cost: float, largest_later_cost: float) -> float:
        """Returns the predicted peak of a step.

        Args:
            largest_cost: Cost of the costliest micro-batch.
            largest_later_cost: Likewise of those that are not the first of their step; 0 where there are none.
        """
        first = self.training.peak_bytes(largest_cost) - self.gradient_bytes
        later = self.training.peak_bytes(largest_later_cost) if largest_later_cost else 0.0
        return max(first, later, self.optimizer_peak_bytes)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "DeviceLimits":
        """Reads what `dataclasses.asdict` made, also after JSON."""
        phases = {name: PhaseLimit.from_plain(plain[name]) for name in ("training", "evaluation")}
        return cls(**{**plain, **phases})


def typical_totals(model: CostModel, mean_totals: Sequence[float], cost: float) -> NDArray[np.float64]:
    """Returns [F], the feature totals of a batch of mean samples that has some cost."""
    mean = np.asarray(mean_totals)
    mean_cost = float(mean @ np.asarray(model.coefficients))
    totals: NDArray[np.float64] = mean * (max(cost, 0.0) / mean_cost if mean_cost > 0 else 1.0)
    return totals
