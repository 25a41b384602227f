"""Counts that a batch's memory grows with, and the cut of a logical batch into micro-batches, by count or by cost.

Shapes: R samples, F features, G samples of the whole data set, S members.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from can_train.errors import ArgumentError, check_flags, shown
from can_train.task import SAMPLES, Feature

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.fit.cost_model import CostModel

ROUNDING: Final = 1e-9  # Relative excess of a cost over a limit that is round-off
_COST: Final = Feature("cost")
_FIRST_LOOK: Final = 64  # Samples that the search for the end of a part looks at first; the number doubles from there
# Share of an epoch's batches that fit whole, for a batch to be typical: ragged data have a few costly ones.
_FITTING_SHARE: Final = 0.95
_BISECTIONS: Final = 50  # Halvings of a search for a limit: to 1e-15 of the whole
# Micro-batches of one logical batch at most: a tuple of so many takes 80 MB, and no step has time to run them.
_MOST_PARTS: Final = 10**7


def solve_accumulation(desired: int, limit: int, *, divisor: bool = False) -> tuple[int, ...]:
    """Cuts a logical batch into the fewest micro-batches that fit, or into the fewest equal ones.

    >>> solve_accumulation(127, 64)
    (64, 63)
    >>> solve_accumulation(100, 30, divisor=True)
    (25, 25, 25, 25)

    Args:
        desired: Samples in the logical batch.
        limit: Samples that one micro-batch may hold.
        divisor: All micro-batches are equal, their size the largest divisor of `desired` that is ≤ `limit`. A prime
            number of samples above the limit then runs one by one.

    Returns:
        The sizes in samples, largest first: each ≤ `limit`, their sum is `desired`, and no two differ by more than 1.

    Raises:
        ArgumentError: `desired` or `limit` is below 1, or not a whole number, or there would be more than ten million
            micro-batches.
    """
    if not isinstance(desired, Integral) or not isinstance(limit, Integral):
        raise ArgumentError("Numbers of samples are whole", value=f"desired {shown(desired)}, limit {shown(limit)}",
                            remedy="Give whole numbers: solve_accumulation(127, 64)")  # fmt: skip
    if not isinstance(divisor, bool):
        check_flags(divisor=divisor)
    desired, limit = int(desired), int(limit)
    if desired < 1:
        raise ArgumentError("A logical batch has at least one sample", value=f"{desired}",
                            remedy="Leave empty batches out")  # fmt: skip
    if limit < 1:
        raise ArgumentError("A micro-batch must be allowed at least one sample", value=f"limit {limit}",
                            remedy="Give limit=1 or more")  # fmt: skip
    count = -(-desired // limit)
    if divisor:
        count = _equal_parts(desired, count)
    _check_parts(desired, limit, count, divisor=divisor)
    size, larger = divmod(desired, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def _equal_parts(desired: int, least: int) -> int:
    """Returns the smallest divisor of `desired` from `least` on; any number above `_MOST_PARTS` where it is above."""
    root = math.isqrt(desired)
    if least == 1 or root > _MOST_PARTS:
        return next((count for count in range(least, _MOST_PARTS + 1) if desired % count == 0), desired)
    # Divisors come in pairs, the smaller one at most the square root: a billion samples are solved at once.
    pairs = ((low, desired // low) for low in range(1, root + 1) if desired % low == 0)
    return min(divisor for pair in pairs for divisor in pair if divisor >= least)


def _check_parts(desired: int, limit: int, count: int, *, divisor: bool) -> None:
    """Raises ArgumentError where a logical batch would be cut into too many micro-batches."""
    if count <= _MOST_PARTS:
        return
    if -(-desired // limit) > _MOST_PARTS:
        remedy = f"Give {'divisor=False and ' * divisor}limit={-(-desired // _MOST_PARTS)} or more, or a smaller batch"
    else:
        remedy = "Give divisor=False, or a batch whose size has a larger divisor"
    raise ArgumentError(f"A batch is cut into at most {_MOST_PARTS:,} micro-batches", remedy=remedy,
                        value=f"desired {desired}, limit {limit}")  # fmt: skip


def batch_totals(features: Sequence[Feature], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [F], the feature totals of the batch that holds samples with counts [R, F].

    >>> batch_totals([Feature("nodes"), Feature("tokens", padding=1)], np.array([[2.0, 5.0], [4.0, 7.0]])).tolist()
    [6.0, 14.0]
    """
    return growing_totals(features, counts)[-1] if len(counts) else np.zeros(len(features))


def growing_totals(features: Sequence[Feature], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [R, F], the totals of the batches that hold the first 1, 2, … R samples. No column ever falls."""
    sizes = np.arange(1, len(counts) + 1)
    columns = [column.cumsum() if not feature.padding else sizes * np.maximum.accumulate(column) ** feature.padding
               for feature, column in zip(features, counts.T, strict=True)]  # fmt: skip
    names = [feature.name for feature in features]
    for position, feature in enumerate(features):
        if feature.factors:
            largest = [np.maximum.accumulate(counts[:, names.index(name)]) for name in feature.factors]
            columns[position] = sizes * np.prod(largest, axis=0)
    return np.stack(columns, axis=1)


def counts_of(batch: Any) -> tuple[list[Feature], NDArray[np.float64]]:
    """Reads the batch of somebody else's loop: a number of samples; or [R] or [R, F] counts that their
    memory grows with; or such counts [R] by feature, or by its name. Raises ArgumentError for anything else.

    Returns:
        The features, the last one counting samples, and the counts [R, F + 1].

    >>> features, counts = counts_of({Feature("tokens", padding=1): [2, 5]})
    >>> [feature.name for feature in features], counts.tolist()
    (['tokens', 'samples'], [[2.0, 1.0], [5.0, 1.0]])
    """
    named, given = [], np.empty(0)
    # Of anything that is no table of numbers.
    with suppress(TypeError, ValueError):
        if isinstance(batch, Mapping):
            named = [name if isinstance(name, Feature) else Feature(name) for name in batch]
            columns = [_numbers(column).ravel() for column in batch.values()]
            given = np.stack(columns, axis=1) if len({len(column) for column in columns}) == 1 else given
        elif getattr(batch, "ndim", None) == 0 or np.ndim(batch) == 0:
            given = np.empty((max(operator.index(batch), 0), 0))
        elif not isinstance(batch, str):
            given = _numbers(batch)
            given = given[:, None] if given.ndim == 1 else given
            named = [Feature(f"feature {column}") for column in range(given.shape[-1])] if given.ndim == 2 else []
    if given.ndim != 2 or not (np.isfinite(given) & (given >= 0)).all():
        rule = "A batch is a number of samples, or what each of them counts, finite and not negative"
        raise ArgumentError(rule, value=shown(batch), remedy="Give len(x), or the counts of each sample")
    return [*named, SAMPLES], np.column_stack([given, np.ones(len(given))])


def _numbers(counts: Any) -> NDArray[np.float64]:
    """Returns counts as an array; they may be a tensor on a GPU, or one that belongs to a graph."""
    return np.asarray(counts.detach().cpu() if hasattr(counts, "detach") else counts, dtype=np.float64)


def packing_order(features: Sequence[Feature], counts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the positions of samples with counts [R, F] in the order that a batch is cut in.

    Where samples are padded, the longest come first: parts then hold samples of like lengths, and the costliest part is
    computed while there are no gradients yet. The gradient of a batch does not depend on the order of its samples.

    >>> packing_order([Feature("tokens", padding=1)], np.array([[2.0], [5.0], [3.0]])).tolist()
    [1, 2, 0]
    >>> packing_order([Feature("nodes")], np.array([[2.0], [5.0], [3.0]])).tolist()
    [0, 1, 2]
    """
    padded = [position for position, feature in enumerate(features) if feature.padding == 1 and not feature.factors]
    return np.argsort(-counts[:, padded].sum(axis=1), kind="stable")


class Members(NamedTuple):
    """The members (nodes, for example) of chosen samples, sample after sample."""

    positions: NDArray[np.int64]  # [S] indices into the flat arrays
    starts: NDArray[np.int64]  # [R] index of each sample's first member among `positions`
    sizes: NDArray[np.int64]  # [R] number of members of each sample


def members(ptr: NDArray[np.int64], rows: NDArray[np.int64]) -> Members:
    """Finds the members of samples `rows` [R], in any order and with repetitions; `ptr` has [G + 1] bounds of every
    sample's members in the flat arrays.

    >>> members(np.array([0, 2, 2, 5]), np.array([2, 0])).positions.tolist()
    [2, 3, 4, 0, 1]
    """
    first = ptr[rows]
    sizes = ptr[rows + 1] - first
    starts = sizes.cumsum() - sizes
    return Members(np.arange(sizes.sum()) + np.repeat(first - starts, sizes), starts, sizes)


class BatchCosts:
    """Costs of the contiguous parts of one ordered batch of samples with counts [R, F], at [F] bytes a unit."""

    def __init__(
        self,
        counts: NDArray[np.float64],
        features: Sequence[Feature],
        coefficients: Sequence[float] | NDArray[np.float64],
    ) -> None:
        self._counts = counts
        self._features = tuple(features)
        self._coefficients = np.asarray(coefficients, dtype=np.float64)
        # Padded costs do not add up, so only summed ones have prefix sums.
        is_summed = not any(feature.padding for feature in self._features)
        self._sums = np.concatenate([[0.0], self.each().cumsum()]) if is_summed else None

    @classmethod
    def priced(cls, model: CostModel, counts: NDArray[np.float64]) -> BatchCosts:
        """Prices samples with counts [R, F] by a cost model."""
        return cls(counts, model.features, model.coefficients)

    @classmethod
    def of_samples(cls, costs: Sequence[float] | NDArray[np.float64]) -> BatchCosts:
        """Makes a batch whose samples' costs [R] simply add up."""
        return cls(np.asarray(costs, dtype=np.float64).reshape(-1, 1), (_COST,), (1.0,))

    @classmethod
    def uniform(cls, size: int) -> BatchCosts:
        """Makes a batch of `size` samples that cost 1 each."""
        return cls.of_samples(np.ones(size))

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def is_uniform(self) -> bool:
        """Whether every sample costs the same, wherever it stands."""
        return bool((self._counts == self._counts[:1]).all())

    def part(self, start: int, stop: int) -> BatchCosts:
        """Returns the batch that holds samples `start:stop` only."""
        return BatchCosts(self._counts[start:stop], self._features, self._coefficients)

    def parts(self, sizes: Sequence[int]) -> list[BatchCosts]:
        """Returns the batches that hold the first `sizes[0]` samples, the next `sizes[1]`, and so on."""
        return [self.part(start, stop) for start, stop in pairwise(np.cumsum([0, *sizes]).tolist())]

    def chosen(self, positions: NDArray[np.int64]) -> BatchCosts:
        """Returns the batch that holds the samples at `positions`, in that order."""
        return BatchCosts(self._counts[positions], self._features, self._coefficients)

    def packing(self) -> NDArray[np.int64]:
        """Returns the positions of the samples in the order that the batch is cut in."""
        return np.arange(len(self)) if self._sums is not None else packing_order(self._features, self._counts)

    def packed(self) -> BatchCosts:
        """Returns the batch in the order that it is cut in."""
        return self if self._sums is not None else self.chosen(self.packing())

    def mean_counts(self) -> tuple[float, ...]:
        """Returns [F], the mean sample's counts."""
        return tuple(self._counts.mean(axis=0).tolist())

    def in_units(self) -> BatchCosts:
        """Returns the batch whose samples cost their units of the main feature, which is the first one, unpadded."""
        return BatchCosts.of_samples(self._counts[:, 0])

    def cost(self, start: int, stop: int) -> float:
        """Returns the cost of samples `start:stop` as one part."""
        if stop <= start:
            return 0.0
        if self._sums is not None:
            return float(self._sums[stop] - self._sums[start])
        return float(self._growing(start, stop)[-1])

    @property
    def total(self) -> float:
        """The cost of the whole batch as one part."""
        return self.cost(0, len(self))

    def part_costs(self, sizes: Sequence[int]) -> list[float]:
        """Returns the costs of the first `sizes[0]` samples as one part, of the next `sizes[1]`, and so on."""
        return [self.cost(start, stop) for start, stop in pairwise(np.cumsum([0, *sizes]).tolist())]

    def each(self) -> NDArray[np.float64]:
        """Returns [R], the cost of each sample alone."""
        powers = [max(feature.padding, 1) for feature in self._features]
        costs: NDArray[np.float64] = np.maximum(self._counts ** np.asarray(powers) @ self._coefficients, 0.0)
        return costs

    def reach(self, start: int, limit: float) -> int:
        """Returns the largest `stop` such that samples `start:stop` cost at most `limit`; `start` where none do."""
        limit *= 1 + ROUNDING
        if self._sums is not None:
            return min(int(np.searchsorted(self._sums, self._sums[start] + limit, side="right")) - 1, len(self))
        look = _FIRST_LOOK
        while True:
            stop = min(start + look, len(self))
            growing = self._growing(start, stop)
            if stop == len(self) or growing[-1] > limit:
                return start + int(np.searchsorted(growing, limit, side="right"))
            look *= 2

    def _growing(self, start: int, stop: int) -> NDArray[np.float64]:
        return np.maximum(growing_totals(self._features, self._counts[start:stop]) @ self._coefficients, 0.0)


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimit:
    """The limit of one micro-batch."""

    cost: float = math.inf  # Bytes above base
    # What the only micro-batch of a batch may cost more: there are no gradients of earlier ones beside it
    alone: float = 0.0
    samples: int = 0  # Largest number of samples; 0: any
    floor: int = 1  # Smallest number of samples that a batch is cut into, costly or not
    equal: bool = False  # Micro-batches of equal size, the largest divisor that fits
    planned: tuple[int, ...] = ()  # Sizes of the whole batch's parts in samples, which are cut further where they must

    def charged(self, cost: float) -> float:
        """Returns the cost of a micro-batch beside gradients that takes as much memory, at most, as one of `cost`."""
        return min(cost, self.cost) if cost <= (self.cost + self.alone) * (1 + ROUNDING) else cost


def cut(batch: BatchCosts, limit: MicroBatchLimit) -> tuple[int, ...]:
    """Cuts a batch into micro-batches; returns their sizes in samples, in order.

    Samples of uniform cost are solved for the fewest parts of nearly equal size, where that keeps to the floor.
    Otherwise each part takes the samples that follow until the next one would not fit (next-fit). A sample that alone
    costs more than the limit is a part by itself.

    >>> cut(BatchCosts.of_samples([5, 1, 1, 6, 2]), MicroBatchLimit(cost=7))
    (3, 1, 1)
    >>> cut(BatchCosts.uniform(10), MicroBatchLimit(cost=4))
    (4, 3, 3)
    """
    size = len(batch)
    if limit.alone and batch.total <= (limit.cost + limit.alone) * (1 + ROUNDING):
        return (size,) if size else ()
    most = min(limit.samples or size, size)
    if limit.equal:
        # The largest divisor of the batch whose parts all fit; the floor or 1 where none does.
        divisors = [n for n in range(most, 0, -1) if size % n == 0 and (n >= limit.floor or n == size)] or [1]
        for width in divisors:
            if all(batch.cost(start, start + width) <= limit.cost * (1 + ROUNDING) for start in range(0, size, width)):
                break
        return (width,) * (size // width)
    if batch.is_uniform:
        fitting = batch.reach(0, limit.cost)
        even = solve_accumulation(size, max(1, min(most, max(fitting, limit.floor))))
        if even[-1] >= min(limit.floor, most):
            return even
    sizes = _next_fit(size, lambda start: min(max(batch.reach(start, limit.cost), start + limit.floor), start + most))
    if len(sizes) > 1 and sizes[-1] < limit.floor:
        # The part before the last gives the samples that it can spare.
        missing = min(limit.floor - sizes[-1], max(sizes[-2] - limit.floor, 0))
        sizes[-2:] = [sizes[-2] - missing, sizes[-1] + missing]
    return tuple(sizes)


def _next_fit(size: int, reach: Callable[[int], int]) -> list[int]:
    """Returns the sizes of the parts of a batch, each up to where `reach` says for its start, of 1 sample at least."""
    sizes: list[int] = []
    start = 0
    while start < size:
        sizes.append(min(max(reach(start), start + 1), size) - start)
        start += sizes[-1]
    return sizes


def largest_typical_batch(order: BatchCosts, limit: float, *, upper: int, shares: int = 1) -> int:
    """Returns the largest batch, of 1 to `upper` samples, that fits whole, or in one contiguous share per device, in
    95 % of an epoch's batches; the rest run in more parts. One micro-batch costs at most `limit`.
    """

    def is_over(start: int, stop: int) -> bool:
        if shares == 1:
            return order.cost(start, stop) > limit * (1 + ROUNDING)
        # More shares than samples would be empty.
        for _ in range(min(shares, stop - start)):
            start = order.reach(start, limit)
            if start >= stop:
                return False
        return True

    low, high = 1, upper + 1
    while high - low > 1:
        middle = (low + high) // 2
        stops = range(middle, len(order) + 1, middle)
        over = sum(is_over(stop - middle, stop) for stop in stops)
        low, high = (middle, high) if over <= (1 - _FITTING_SHARE) * len(stops) else (low, middle)
    return low


def share_out(batch: BatchCosts, shares: int, floor: int = 1) -> tuple[int, ...]:
    """Cuts a batch into contiguous shares whose costliest one costs as little as possible. None has fewer samples than
    `floor`, but for the last ones, which may be empty; a batch below it is one share.

    >>> share_out(BatchCosts.of_samples([5, 1, 1, 6, 2]), 2)
    (3, 2)
    >>> share_out(BatchCosts.uniform(2), 3), share_out(BatchCosts.uniform(5), 3, 2)
    ((1, 1, 0), (3, 2, 0))
    """
    if shares == 1:
        return (len(batch),)
    most = max(len(batch) // floor, 1)
    if shares > most > 0:
        # Not one step of the search for each empty share: a plan for thousands of GPUs is asked for by hand.
        return share_out(batch, most, floor) + (0,) * (shares - most)
    low, high = 0.0, batch.total
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_filled(batch, shares, middle, floor)) == len(batch) else (middle, high)
    return _filled(batch, shares, high, floor)


def _filled(batch: BatchCosts, shares: int, limit: float, floor: int) -> tuple[int, ...]:
    """Gives each share in turn as many samples as the limit allows, at least `floor`; some samples may be left over."""
    sizes, start = [], 0
    for left in reversed(range(shares)):
        stop = batch.reach(start, limit) if start < len(batch) else start
        if floor > 1:
            # Those after it get as many, too.
            stop = min(max(stop, start + floor), len(batch) - left * floor)
        sizes.append(stop - start)
        start = stop
    return tuple(sizes)


@dataclass(frozen=True, kw_only=True)
class SplitRules:
    """How logical batches are cut."""

    safe_limit: float = math.inf  # Largest cost of one micro-batch; infinite without a search
    tuned_limit: float = math.inf  # Cost that was tried and fits; infinite without a search
    # Gradients of a step's earlier micro-batches, beside which the limits hold, as the cost that takes as much;
    # infinite: no micro-batch fits beside the gradients of another one
    gradient_cost: float = 0.0
    fastest: float = math.inf  # Largest cost of a micro-batch where smaller ones are faster; infinite: they are not
    samples: int = 0  # Largest micro-batch in samples (a fixed one, or a loader batch); 0: any
    floor: int = 1  # Smallest micro-batch in samples
    equal: bool = False  # Micro-batches of equal size
    # A batch of at most so many units of the main feature is not cut, as long as it is known to fit
    threshold: float = 0.0
    splits: int = 1  # Parts that a batch above the threshold is cut into at least, as far as samples and floor allow
    target: float = math.inf  # Cost that micro-batches should come down to; infinite: none
    max_splits: int = 4  # Most parts that are planned to reach `target`; `splits` and a rescue may exceed it

    def limit_for(self, batch: BatchCosts) -> MicroBatchLimit:
        """Decides the limit of a micro-batch of this logical batch."""
        if self.threshold and batch.in_units().total <= self.threshold:
            return MicroBatchLimit(cost=self.tuned_limit, floor=self.floor, equal=self.equal)
        if self.is_alone(batch):
            return MicroBatchLimit(cost=self.safe_limit, alone=self.safe_alone, floor=self.floor)
        cost = min(self.safe_limit, self.fastest)
        limit = MicroBatchLimit(cost=cost, samples=self.samples, floor=self.floor, equal=self.equal)
        if self.target < self.safe_limit:
            wanted = replace(limit, cost=self.target)
            if len(cut(batch, wanted)) > self.max_splits:
                # A batch that is known not to fit is cut into more parts nevertheless.
                wanted = replace(limit, cost=min(self.safe_limit, _cost_around(batch, limit, self.max_splits)[1]))
            limit = wanted
        if self.splits == 1 or len(cut(batch, limit)) >= self.splits:
            return limit
        # Lowered until the batch is cut into at least `splits` parts.
        smallest = replace(limit, samples=max(self.floor, 1))
        if len(cut(batch, smallest)) <= self.splits:
            return smallest
        more, fewer = _cost_around(batch, limit, self.splits)
        even = replace(limit, cost=fewer)
        return even if len(cut(batch, even)) == self.splits else replace(limit, cost=more)

    @property
    def safe_alone(self) -> float:
        """The cost that the only micro-batch of a step may have beyond the safe limit."""
        share = min(self.safe_limit / max(self.tuned_limit, 1.0), 1.0)
        return self.gradient_cost * share if share > 0 else 0.0

    def is_alone(self, batch: BatchCosts) -> bool:
        """Whether a batch that exceeds the safe limit fits at once, since no gradients are there before it."""
        # The user's own options decide how batches are cut, and a size that is faster does.
        is_free = self.splits == 1 and not self.samples and self.target == self.fastest == math.inf
        most = (self.safe_limit + self.safe_alone) * (1 + ROUNDING)
        return is_free and self.gradient_cost > 0 and self.safe_limit * (1 + ROUNDING) < batch.total <= most


def _cost_around(batch: BatchCosts, limit: MicroBatchLimit, parts: int) -> tuple[float, float]:
    """Returns two adjacent cost limits: the first cuts a batch into more than `parts` parts, the second does not."""
    low, high = 0.0, batch.total
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_above = len(cut(batch, replace(limit, cost=middle))) > parts
        low, high = (middle, high) if is_above else (low, middle)
    return low, high


def optimizer_batches(batch: BatchCosts, threshold: float) -> tuple[int, ...]:
    """Cuts one logical batch into several, each an optimizer step of its own (preflight splitting). Each sees at most
    `threshold` units of the main feature, but for a sample that has more by itself.
    """
    units = batch.in_units()
    return tuple(_next_fit(len(batch), lambda start: units.reach(start, threshold)))
