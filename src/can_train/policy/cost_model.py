"""The cost model: a batch's peak memory as a straight line in its features, fitted to probes. It decides what the
coefficients are and how far they can be trusted; running the probes is left to others.

Shapes: P probes, F features, R samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.policy.features import Feature, batch_totals

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
