"""The cost model: peak memory as a linear function of features, and the limits found with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.fit.features import batch_totals
from can_train.fit.packing import BatchCosts
from can_train.task import Feature

ALLOCATION_QUANTUM: Final = 512
"""Bytes that allocators round up to: peaks cannot be known more finely."""


COVERAGE: Final = 3.0
"""Half-width of the interval of a prediction, in standard errors: about 99 % where residuals are normal, and small
samples have heavier tails."""


UNSEEN: Final = 0.01
"""Share of a predicted cost that the interval always includes; on the simulated GPU predictions lie within it."""


EXPLAINED: Final = 0.02
"""Relative residual of the probes' costs above which the features are said not to explain them; probes that do lie
within 0.1 %."""


ROUND_OFF: Final = 1e-9
"""Share of the largest peak below which what a feature adds is round-off of zero."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """`peak_bytes = base + Σ coefficient · feature`, of forward and backward.

    Attributes:
        features: What the coefficients belong to.
        coefficients: [F] bytes a unit, none negative: a larger batch never costs less.
        base_bytes: Peak of an empty batch: weights, gradients, optimizer state.
        sigma_bytes: Standard deviation of the probes' residuals.
        covariance: [F + 1, F + 1] of (base, coefficients), in units of sigma²: uncertainty grows with extrapolation.
        relative_residual: Largest residual ÷ cost over the probes.
        below: (cost, peak) in bytes, in order of cost, of probes that are too small for the law, and of the first that
            it holds for: where the gradients of the weights decide a peak, it is above the line.
    """

    features: tuple[Feature, ...]
    coefficients: tuple[float, ...]
    base_bytes: float
    sigma_bytes: float
    covariance: tuple[tuple[float, ...], ...]
    relative_residual: float
    below: tuple[tuple[float, float], ...] = ()

    @property
    def explains(self) -> bool:
        """Whether the features explain what the probes showed."""
        return self.relative_residual <= EXPLAINED

    def cost(self, counts: NDArray[np.float64]) -> float:
        """Returns the predicted bytes above base of a batch of samples with counts [R, F]."""
        return float(batch_totals(self.features, counts) @ np.asarray(self.coefficients))

    def peak_bytes(self, cost: float, *, ratio: float = 1.0) -> float:
        """Returns the peak of a batch: by the law, or between the probes that were too small for it.

        Args:
            cost: Predicted bytes above base.
            ratio: Measured ÷ predicted cost of large batches.

        Example:
            >>> law = CostModel(features=(Feature("rows"),), coefficients=(1.0,), base_bytes=100.0, sigma_bytes=0.0,
            ...                 covariance=(), relative_residual=0.0, below=((10.0, 130.0), (50.0, 150.0)))
            >>> law.peak_bytes(5.0), law.peak_bytes(30.0), law.peak_bytes(60.0)
            (130.0, 140.0, 160.0)
        """
        law = self.base_bytes + ratio * cost
        if not self.below or cost >= self.below[-1][0]:
            return law
        return max(law, float(np.interp(cost, *np.transpose(self.below))))

    def half_width(self, totals: NDArray[np.float64]) -> float:
        """Returns the half-width in bytes of the interval around a prediction: what the probes' residuals leave open,
        and a share of the cost for what probes cannot show (workspaces that grow in steps).

        Args:
            totals: [F] the batch's, as of `batch_totals`.

        Source: prediction interval of linear least squares, σ·√(1 + xᵀCx).
        """
        x = np.concatenate([[1.0], totals])
        leverage = max(float(x @ np.asarray(self.covariance) @ x), 0.0)
        unseen = UNSEEN * float(totals @ np.asarray(self.coefficients))
        return COVERAGE * self.sigma_bytes * math.sqrt(1 + leverage) + unseen

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "CostModel":
        """Reads what `dataclasses.asdict` made, also after JSON."""
        return cls(
            **{
                **plain,
                "features": tuple(Feature(**feature) for feature in plain["features"]),
                "coefficients": tuple(plain["coefficients"]),
                "covariance": tuple(tuple(row) for row in plain["covariance"]),
                # Runs that began when nothing was kept of small probes do not say these.
                "below": tuple((cost, peak) for cost, peak in plain.get("below", ())),
            }
        )


def fit_cost_model(features: Sequence[Feature], totals: NDArray[np.float64], peaks: NDArray[np.float64]) -> CostModel:
    """Fits base and coefficients by least squares, none of them negative.

    Of all subsets of them whose least-squares solution is not negative, the one that fits best is the solution with
    bounds; features are few, so all are tried. Features that the probes cannot tell apart share their coefficient.

    Args:
        features: F of them.
        totals: [P, F] of the probes' batches.
        peaks: [P] bytes.
    """
    scale = np.maximum(totals.max(axis=0), 1.0)
    rows = np.column_stack([np.ones(len(peaks)), totals / scale])
    solution = min(
        (_least_squares(rows, peaks, subset) for subset in _subsets(rows.shape[1])),
        key=lambda found: (found[1], -np.count_nonzero(found[0])),
    )[0]
    residuals = peaks - rows @ solution
    rank = int(np.linalg.matrix_rank(rows))
    freedom = max(len(peaks) - rank, 1)
    if not solution[1:].any():
        # Nothing that was seen grows with the batch. A byte a unit changes no prediction and keeps batches comparable.
        solution[1:] = scale
    costs = np.maximum(rows[:, 1:] @ solution[1:], ALLOCATION_QUANTUM)
    unscale = np.concatenate([[1.0], 1 / scale])
    covariance = np.linalg.pinv(rows.T @ rows) * np.outer(unscale, unscale)
    return CostModel(
        features=tuple(features),
        coefficients=tuple((solution[1:] / scale).tolist()),
        base_bytes=float(solution[0]),
        sigma_bytes=max(math.sqrt(float(residuals @ residuals) / freedom), float(ALLOCATION_QUANTUM)),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        relative_residual=float(np.max(np.abs(residuals) / costs)),
    )


def _subsets(columns: int) -> list[tuple[int, ...]]:
    return [subset for size in range(columns, 0, -1) for subset in combinations(range(columns), size)]


def _least_squares(
    rows: NDArray[np.float64], peaks: NDArray[np.float64], columns: tuple[int, ...]
) -> tuple[NDArray[np.float64], float]:
    """Returns the solution with only `columns` in use, none of them negative, and its squared error."""
    part, *_ = np.linalg.lstsq(rows[:, columns], peaks, rcond=None)
    solution = np.zeros(rows.shape[1])
    solution[list(columns)] = part
    # Cut off, a solution with something negative fits worse than the one without that feature, which is tried as well.
    # Round-off makes tiny numbers, of either sign, of coefficients that are zero.
    solution[solution < ROUND_OFF * peaks.max()] = 0.0
    error = float(np.square(peaks - rows @ solution).sum())
    return solution, round(error / float(np.square(peaks).sum()), 18)


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
