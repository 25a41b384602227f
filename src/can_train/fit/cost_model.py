"""The cost model: peak memory as a linear function of features, fitted to the readings of tiny real runs (probes), and
the limits that were found with it. Arithmetic only: `explore.py` runs the probes.

Shapes: F features, P probes, R samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from can_train.errors import ArgumentError
from can_train.fit.packing import BatchCosts, batch_totals, counts_of
from can_train.io.units import size_text
from can_train.memory.catalogue import predicted_room
from can_train.task import SAMPLES, Feature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from can_train.fit.packing import SplitRules

ALLOCATION_QUANTUM: Final = 512  # Bytes that allocators round up to: peaks cannot be known more finely
# Half-width of a prediction interval in standard errors. It covers about 99 % where residuals are normal; small samples
# have heavier tails.
COVERAGE: Final = 3.0
# Share of a predicted cost that the interval always includes. On the simulated GPU predictions lie within it.
UNSEEN: Final = 0.01
# Largest relative residual of probes that the features explain; probes that follow their features lie
# within 0.1 %.
EXPLAINED: Final = 0.02
# Cost ÷ largest measured cost above which no need is printed: probes of samples of similar lengths do not tell whether
# memory grows with the length or with its square, and twice the length is four times the square.
_FAR: Final = 4
AGREED: Final = 0.005  # Relative residual that ends the probes
# Multiple of the residual without it that a negative coefficient of samples must reach at most.
_LESS_HELPS: Final = 0.5
# Share of a probe's cost that such a coefficient leaves at least: other samples may be shorter than those of a probe.
_LEAST_LEFT: Final = 0.25
# Reasons, as clauses, why probes ended before they showed the line that holds for large batches.
UNWANTED: Final = "no larger batch is wanted"
OUT_OF_TIME: Final = "there was no time for larger batches"
OUT_OF_ROOM: Final = "the device has no room for larger batches"
ROUND_OFF: Final = 1e-9  # Share of the largest peak below which a fitted coefficient is round-off of zero


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """`peak_bytes = base + Σ coefficient · feature`, for forward and backward."""

    features: tuple[Feature, ...]
    # [F] bytes a unit, none negative but that of `SAMPLES`, where no sample's cost is: a larger batch never costs less.
    coefficients: tuple[float, ...]
    base_bytes: float  # Peak of an empty batch: weights, gradients, optimizer state
    sigma_bytes: float  # Standard deviation of the probes' residuals
    # [F + 1, F + 1] of (base, coefficients) in units of sigma²: uncertainty grows with extrapolation.
    covariance: tuple[tuple[float, ...], ...]
    relative_residual: float  # Largest residual ÷ cost over the probes
    # (cost, peak) in bytes, sorted by cost, of the probes too small for the line and of the first that follows it.
    # Where the gradients of the weights decide a peak, it lies above the line.
    below: tuple[tuple[float, float], ...] = ()
    grows: bool = True  # Whether memory grew with the batch; otherwise a byte a unit stands for a coefficient
    # Why probes ended before the line showed that holds for large batches; empty where it did
    hidden: str = ""

    @property
    def explains(self) -> bool:
        """Whether the features explain the memory of all batches that are wanted."""
        return self.relative_residual <= EXPLAINED and self.hidden in ("", UNWANTED)

    def cost(self, counts: NDArray[np.float64]) -> float:
        """Returns the predicted bytes above base of the batch of samples with counts [R, F]."""
        return float(batch_totals(self.features, counts) @ np.asarray(self.coefficients))

    def peak_bytes(self, cost: float, *, ratio: float = 1.0) -> float:
        """Returns the predicted peak of a batch of some cost; `ratio` is measured ÷ predicted cost of large batches.

        >>> model = CostModel(features=(Feature("rows"),), coefficients=(1.0,), base_bytes=100.0, sigma_bytes=0.0,
        ...                   covariance=(), relative_residual=0.0, below=((10.0, 130.0), (50.0, 150.0)))
        >>> model.peak_bytes(5.0), model.peak_bytes(30.0), model.peak_bytes(60.0)
        (130.0, 140.0, 160.0)
        """
        on_line = self.base_bytes + ratio * cost
        if not self.below or cost >= self.below[-1][0]:
            return on_line
        return max(on_line, float(np.interp(cost, *np.transpose(self.below))))

    def with_small_batches_less(self, num_bytes: float) -> CostModel:
        """Returns the model where the peaks of batches too small for the line are `num_bytes` less, or on the line."""
        return replace(self, below=tuple((cost, peak - num_bytes) for cost, peak in self.below))

    def half_width(self, totals: NDArray[np.float64]) -> float:
        """Returns the half-width in bytes of the prediction interval of a batch with feature totals [F].

        Source: prediction interval of linear least squares, σ·√(1 + xᵀCx).
        """
        x = np.concatenate([[1.0], totals])
        leverage = max(float(x @ np.asarray(self.covariance) @ x), 0.0)
        # Probes cannot show workspaces that grow in steps, hence the share of the cost.
        unseen = UNSEEN * float(totals @ np.asarray(self.coefficients))
        return COVERAGE * self.sigma_bytes * math.sqrt(1 + leverage) + unseen


def fit_cost_model(features: Sequence[Feature], totals: NDArray[np.float64], peaks: NDArray[np.float64]) -> CostModel:
    """Fits base and coefficients to probes, with feature totals [P, F] and peaks [P] in bytes, by least squares with no
    negative solution. Features that the probes cannot tell apart share their coefficient.

    Where such a line does not hold, samples may take less than their features: of sentences whose next words are
    predicted, each is one word shorter than its feature.
    """
    scale = np.maximum(totals.max(axis=0), 1.0)
    rows = np.column_stack([np.ones(len(peaks)), totals / scale])
    solution = _nonnegative_solution(rows, peaks)
    if SAMPLES in features and _largest_residual(rows, peaks, solution) > AGREED:
        shorter = _solution_with_less(rows, peaks, 1 + [*features].index(SAMPLES))
        if _largest_residual(rows, peaks, shorter) < _LESS_HELPS * _largest_residual(rows, peaks, solution):
            solution = shorter
    residuals, relative = peaks - rows @ solution, _largest_residual(rows, peaks, solution)
    freedom = max(len(peaks) - int(np.linalg.matrix_rank(rows)), 1)
    grows = bool(solution[1:].any())
    if not grows:
        # Nothing grows with the batch. A byte a unit changes no prediction and keeps batches comparable.
        solution[1:] = scale
    unscale = np.concatenate([[1.0], 1 / scale])
    covariance = np.linalg.pinv(rows.T @ rows) * np.outer(unscale, unscale)
    return CostModel(
        features=tuple(features),
        coefficients=tuple((solution[1:] / scale).tolist()),
        base_bytes=float(solution[0]),
        sigma_bytes=max(math.sqrt(float(residuals @ residuals) / freedom), float(ALLOCATION_QUANTUM)),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        relative_residual=relative,
        grows=grows,
    )


def _nonnegative_solution(rows: NDArray[np.float64], peaks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns base and coefficients [N] in bytes for scaled features [P, N], of which the first is 1."""
    # The fit would give all of the weight to one of several equal columns: which one is arbitrary, and a batch whose
    # features are mixed otherwise than in the probes would be far off.
    distinct, group = np.unique(rows, axis=1, return_inverse=True)
    # In units of the largest peak: the fit stops at an absolute tolerance.
    largest = float(peaks.max())
    shares = nonnegative_least_squares(distinct, peaks / largest)
    shares[shares < ROUND_OFF] = 0.0
    solution: NDArray[np.float64] = (largest * shares / np.bincount(group))[group]
    return solution


def _solution_with_less(rows: NDArray[np.float64], peaks: NDArray[np.float64], samples: int) -> NDArray[np.float64]:
    """Returns base and coefficients where that of the column `samples` may be negative; without such a coefficient
    where batches of one size alone were probed, or where a probe would cost next to nothing.
    """
    solution = _nonnegative_solution(np.column_stack([rows, -rows[:, samples]]), peaks)
    solution, less = solution[:-1], float(solution[-1])
    costs = rows[:, 1:] @ solution[1:]
    if np.ptp(rows[:, samples]) > 0 and (costs - less * rows[:, samples] >= _LEAST_LEFT * costs).all():
        solution[samples] -= less
        return solution
    return _nonnegative_solution(rows, peaks)


def _largest_residual(rows: NDArray[np.float64], peaks: NDArray[np.float64], solution: NDArray[np.float64]) -> float:
    """Returns the largest residual ÷ cost over the probes."""
    costs = np.maximum(rows[:, 1:] @ solution[1:], ALLOCATION_QUANTUM)
    return float(np.max(np.abs(peaks - rows @ solution) / costs))


# As scipy.optimize's `nnls`, whose import takes half a second of each training.
def nonnegative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the solution [N] without negative values that minimises |matrix @ solution − target|.

    Source: the active-set method of Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.
    """
    count = matrix.shape[1]
    solution, free = np.zeros(count), np.zeros(count, dtype=np.bool_)
    tolerance = 10 * max(matrix.shape) * np.finfo(np.float64).eps * float(np.abs(matrix).sum(axis=0).max(initial=0.0))
    for _ in range(3 * count):
        gradient = np.where(free, -np.inf, matrix.T @ (target - matrix @ solution))
        if gradient.max(initial=-np.inf) <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            # As far towards the trial as no value becomes negative; a value that reaches 0 is held there.
            distance = np.maximum(solution[below] - trial[below], np.finfo(np.float64).tiny)
            solution += float((solution[below] / distance).min()) * (trial - solution)
            free &= solution > np.finfo(np.float64).eps
        solution = trial
    return solution


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """One phase (training: forward and backward; evaluation: forward) on one device."""

    model: CostModel
    tuned_limit: float  # Largest cost in bytes that was tried and fits; 0 where nothing does
    # Whether the search ended before memory did: where more no longer matters, or for lack of time.
    capped: bool
    trials: int = 0  # Batches that were tried after the probes
    ooms: int = 0  # Trials that ran out of memory
    measured_ratio: float = 1.0  # Measured ÷ predicted cost of the largest batch that fits
    # [F] features of the mean sample: predictions are wanted for batches of such samples.
    mean_totals: tuple[float, ...]
    untried: float = 0.0  # Largest cost that there was no time to try; 0 where the search came to its end
    confirmed: bool = False  # Whether it is an earlier run's limit, confirmed by one trial
    # Measured ÷ recorded peak of the one trial that confirmed it; 0 where nothing was recorded.
    recorded_share: float = 0.0

    def peak_bytes(self, cost: float) -> float:
        """Returns the predicted peak of a micro-batch, corrected by the ratio that the trials measured."""
        return self.model.peak_bytes(cost, ratio=self.measured_ratio)

    def is_far(self, cost: float) -> bool:
        """Tells whether a cost lies so far above all measured ones that its predicted peak may be much too high."""
        return cost > _FAR * self.tuned_limit

    def text(self, cost: float) -> str:
        """Writes what a batch of some cost takes; its whole peak where none was seen to grow with the batch."""
        return size_text(cost) if self.model.grows else f"{size_text(self.peak_bytes(cost))} with the model"

    def cost_within(self, num_bytes: float) -> float:
        """Returns the cost whose peak on the line is `num_bytes`; negative where not even an empty batch fits."""
        return (num_bytes - self.model.base_bytes) / self.measured_ratio

    def half_width(self, cost: float) -> float:
        """Returns the half-width in bytes of the interval around the predicted peak."""
        return self.model.half_width(typical_totals(self.model, self.mean_totals, cost))

    def apart_bytes(self, cost: float) -> float:
        """Returns the peak of small batches' line less the predicted one, where the largest batch lies off that line:
        nobody knows how memory bends between them, as where samples are compared with each other.
        """
        is_between = cost < (1 - EXPLAINED) * self.tuned_limit and abs(self.measured_ratio - 1) > EXPLAINED
        return (1 - self.measured_ratio) * cost if is_between else 0.0

    @property
    def mean_shares(self) -> list[float]:
        """The bytes [F] that each feature adds to the cost of the mean sample."""
        terms = zip(self.model.features, self.model.coefficients, self.mean_totals, strict=True)
        return [coefficient * mean ** max(feature.padding, 1) for feature, coefficient, mean in terms]

    def predicted_within(self, room_bytes: float) -> SearchResult:
        """Returns the limit that is predicted where tensors may take `room_bytes`, no more than was searched here."""
        fits = max(self.cost_within(room_bytes), 0.0)
        return self if fits >= self.tuned_limit else replace(self, tuned_limit=fits, capped=False)

    def beside(self, num_bytes: float, room_bytes: float) -> SearchResult:
        """Returns the limit beside other tensors of `num_bytes`; negative: without them. A search that memory did not
        end keeps its limit as far as all fits into `room_bytes`, which are predicted to hold tensors.
        """
        below = tuple((cost, peak + num_bytes) for cost, peak in self.model.below)
        model = replace(self.model, base_bytes=self.model.base_bytes + num_bytes, below=below)
        beside = replace(self, model=model)
        fits = self.tuned_limit - num_bytes / self.measured_ratio
        if self.capped:
            fits = min(max(fits, beside.cost_within(room_bytes)), self.tuned_limit)
        return replace(beside, tuned_limit=max(fits, 0.0), capped=self.capped and fits == self.tuned_limit)


# Added to a peak before the share of a spread is taken: segments of the allocator decide the peaks of small networks.
_ANY_NETWORK_BYTES: Final = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The interval around a predicted peak that holds 95 of 100 measured peaks, as shares of the prediction."""

    less: float = 0.0
    more: float = 0.0

    def unit(self, num_bytes: float) -> float:
        """Returns the bytes that the shares are of."""
        return num_bytes + _ANY_NETWORK_BYTES

    def around(self, num_bytes: float) -> tuple[float, float]:
        """Returns the ends of the interval, relative to the predicted bytes."""
        return -self.less * self.unit(num_bytes), self.more * self.unit(num_bytes)


@dataclass(frozen=True, kw_only=True)
class ShardedWeights:
    """Sizes in bytes of a model whose weights, gradients and optimizer state are shards on the ranks of a run."""

    ranks: int
    weight_bytes: int  # Of the whole model
    weight_shard_bytes: int  # Of one rank; a weight that cannot be divided evenly is filled up
    trained_bytes: int  # Of the weights that are trained, as large as their gradients
    trained_shard_bytes: int
    root_bytes: int  # Of the weights outside of blocks, which are gathered for a whole pass
    block_bytes: tuple[int, ...]  # Of each block, in order

    @property
    def saved_gradient_bytes(self) -> int:
        """How much less gradients take on one rank."""
        return self.trained_bytes - self.trained_shard_bytes

    @property
    def saved_bytes(self) -> int:
        """How much less weights and gradients take on one rank."""
        return self.weight_bytes - self.weight_shard_bytes + self.saved_gradient_bytes

    def gathered_bytes(self, sample_cost: float) -> int:
        """Returns the most that a pass takes for gathered weights, and for gradients that are not added up yet, beside
        activations; a sample costs `sample_cost` bytes.
        """
        # The backward pass begins with the weights of the root and a copy of them, and goes on with the weights
        # of a block and of the next block.
        pair = max((one + other for one, other in pairwise([*self.block_bytes, 0])), default=0)
        least = self.root_bytes + max(self.root_bytes, pair)
        # At the end of a block there are its gradients, a copy of them, a copy of the last block's, and the weights of
        # the next block; but its activations are gone, which are less than these for small micro-batches.
        return least + round(max(pair - sample_cost / max(len(self.block_bytes), 1), 0.0))


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """Both phases and the optimizer on one device."""

    device_key: str
    capacity_bytes: int  # Bytes of it that PyTorch's allocator could use
    training: SearchResult  # Forward and backward
    evaluation: SearchResult  # Forward alone
    optimizer_peak_bytes: int  # Peak of an optimizer step
    gradient_bytes: int = 0  # Gradients of a step's earlier micro-batches, which `training` includes
    is_alone: bool = False  # Whether a step is a single micro-batch, beside whose gradients no other one fits
    earlier_run: str = ""  # Run whose limits are those that are `confirmed`
    recorded: bool = False  # Whether batches that were recorded as CUDA would run them have corrected the prediction
    not_recorded_because: str = ""  # The reason why none could be recorded, as a clause
    spread: Spread = Spread()  # Of peaks on a GPU that was not at hand
    samples_of_sizes: int = 0  # Of the batch on the CPU whose sizes recorded batches have, where these depend on values
    saved_share: float = 0.0  # Largest share of a peak that compiled steps take less, since probes are not compiled

    def priced(self, batch: Any) -> BatchCosts:
        """Prices a batch of somebody else's loop, as `counts_of` reads it; raises ArgumentError where it has counts of
        other features.
        """
        model = self.training.model
        features, counts = counts_of(batch)
        if len(features) == len(model.features) + 1:
            features, counts = features[:-1], counts[:, :-1]
        names = [feature.name for feature in model.features]
        is_named_otherwise = isinstance(batch, Mapping) and [feature.name for feature in features] != names
        if len(features) != len(names) or is_named_otherwise:
            raise ArgumentError("A batch needs counts of the features of the limits", value=f"{batch!r:.80}",
                                remedy=f"Give each sample's {', '.join(names)}")  # fmt: skip
        return BatchCosts.priced(model, counts)

    def predicted_on(self, device_key: str, capacity_bytes: int, room_bytes: float) -> DeviceLimits:
        """Returns the limits that are predicted of a device with no more memory than this one; `room_bytes` is the part
        of its capacity that is predicted to hold tensors.
        """
        return replace(
            self,
            device_key=device_key,
            capacity_bytes=capacity_bytes,
            training=self.training.predicted_within(room_bytes),
            evaluation=self.evaluation.predicted_within(room_bytes),
        )

    def beside(self, num_bytes: int) -> DeviceLimits:
        """Returns the limits beside other tensors of `num_bytes`, which are on the device all the time; negative:
        without them.
        """
        room_bytes = predicted_room(self.capacity_bytes)
        return replace(
            self,
            training=self.training.beside(num_bytes, room_bytes),
            evaluation=self.evaluation.beside(num_bytes, room_bytes),
            optimizer_peak_bytes=self.optimizer_peak_bytes + num_bytes,
        )

    def on_shards(self, weights: ShardedWeights, *, saved_state_bytes: int, saved_step_bytes: int) -> DeviceLimits:
        """Returns the limits that are predicted where ranks share the model: a pure function, which allocates nothing.

        Args:
            weights: Sizes of the model.
            saved_state_bytes: How much less the optimizers' state takes on one rank.
            saved_step_bytes: How much less the optimizer's step takes beside its state.
        """
        sample_cost = float(np.asarray(self.training.mean_totals) @ np.asarray(self.training.model.coefficients))
        saved = weights.saved_bytes + saved_state_bytes
        gradients = weights.saved_gradient_bytes
        gathered, room_bytes = weights.gathered_bytes(sample_cost), predicted_room(self.capacity_bytes)
        training = self.training.beside(gathered - saved, room_bytes)
        return replace(
            self,
            # The gradients of the pass itself, which decide the peaks of small batches, are shards too.
            training=replace(training, model=training.model.with_small_batches_less(gradients)),
            evaluation=self.evaluation.beside(gathered + gradients - saved, room_bytes),
            optimizer_peak_bytes=self.optimizer_peak_bytes - saved - saved_step_bytes,
            gradient_bytes=weights.trained_shard_bytes,
        )

    def beside_gradients(self, rules: SplitRules) -> SplitRules:
        """Returns rules for these limits, which hold beside the gradients of a step's earlier micro-batches."""
        cost = math.inf if self.is_alone else self.gradient_bytes / self.training.measured_ratio
        return replace(rules, gradient_cost=cost)

    def alone(self) -> DeviceLimits:
        """Returns the limits of steps that are a single micro-batch, so that no gradients are there before it."""
        training = self.training.beside(-self.gradient_bytes, predicted_room(self.capacity_bytes))
        return replace(self, training=training, gradient_bytes=0, is_alone=True)

    def peak_interval(self, peak_bytes: float, cost: float) -> tuple[float, float]:
        """Returns the interval around a predicted peak, of steps whose costliest micro-batch has some cost."""
        width, apart = self.training.half_width(cost), self.training.apart_bytes(cost)
        less, more = self.spread.around(peak_bytes)
        least = (1 - self.saved_share) * peak_bytes + min(less, -width) + min(apart, 0.0)
        return max(least, 0.0), peak_bytes + max(more, width) + max(apart, 0.0)

    def step_peak_bytes(self, largest_cost: float, largest_later_cost: float) -> float:
        """Returns the predicted peak of a step from the cost of its costliest micro-batch, and of the costliest that is
        not its first, or 0 where there are none.
        """
        # Before the first micro-batch of a step there are no gradients yet.
        first = self.training.peak_bytes(largest_cost) - self.gradient_bytes
        later = self.training.peak_bytes(largest_later_cost) if largest_later_cost else 0.0
        return max(first, later, self.optimizer_peak_bytes)


def typical_totals(model: CostModel, mean_totals: Sequence[float], cost: float) -> NDArray[np.float64]:
    """Returns [F], the feature totals of a batch of mean samples that has some cost."""
    mean = np.asarray(mean_totals)
    mean_cost = float(mean @ np.asarray(model.coefficients))
    totals: NDArray[np.float64] = mean * (max(cost, 0.0) / mean_cost if mean_cost > 0 else 1.0)
    return totals


# Shares of the readings, smallest first, that are left out in turn to find a line.
_DROPPED: Final = (0.0, 0.25, 0.5, 0.7, 0.8)
ProbeReading = tuple["NDArray[np.float64]", float]  # Of a probe: batch totals [F], and peak in bytes


@dataclass(frozen=True, kw_only=True)
class ProbeFit:
    """The cost model that probes lead to."""

    model: CostModel  # Its `explains` tells whether the features account for the measured peaks
    largest_cost: float  # Cost of the probe with the largest peak
    largest_peak: float  # That peak, in bytes
    largest_seconds: float = 0.0  # Seconds of that probe
    slack_bytes: float = 0.0  # Bytes that the allocator reserved beyond the allocated ones; 0 where it reserves none


def fit_to_probes(
    features: Sequence[Feature], readings: Sequence[ProbeReading], kernel_bytes: float = 0.0
) -> CostModel:
    """Fits a line to the readings, without the smallest ones where only then it holds.

    The peak of a small batch may be another moment's (the gradients of the weights, at the end of a backward pass),
    which does not grow with the batch. The maximum of several straight lines bends upwards, so it is the small probes
    that lie above the line; or below it by `kernel_bytes` at most, where kernels take less for them than for others.
    """
    ordered = sorted(readings, key=lambda reading: reading[1])
    totals, peaks = np.stack([totals for totals, _ in ordered]), np.array([peak for _, peak in ordered])
    models = []
    for share in _DROPPED:
        first = int(share * len(ordered))
        if share and len(np.unique(totals[first:], axis=0)) < len(features) + 2:
            break
        model = fit_cost_model(features, totals[first:], peaks[first:])
        if first:
            costs = totals[: first + 1] @ np.asarray(model.coefficients)
            line = model.base_bytes + costs - EXPLAINED * np.maximum(costs, ALLOCATION_QUANTUM)
            # Where a dropped reading is less than the line says, nothing hides the line: it does not hold.
            if (peaks[:first] < line[:first] - kernel_bytes).any():
                continue
            order = np.argsort(costs, kind="stable")
            # A larger batch never takes less.
            rising = np.maximum.accumulate(peaks[: first + 1][order])
            model = replace(model, below=tuple(zip(costs[order].tolist(), rising.tolist(), strict=True)))
        models.append(model)
        if model.relative_residual <= AGREED:
            return model
    return min(models, key=lambda model: model.relative_residual)
