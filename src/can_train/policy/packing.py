"""How a logical batch is cut into micro-batches by cost: contiguous, at sample boundaries, next-fit. What a micro-batch
may cost is decided elsewhere.

Shapes: R samples, F features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.policy.accumulation import solve_accumulation
from can_train.policy.features import Feature, growing_totals

ROUNDING: Final = 1e-9
"""Relative excess of a cost over a limit that is round-off."""

_FIRST_LOOK: Final = 64
"""Samples that a search for the end of a part looks at first; it doubles from there."""


class BatchCosts:
    """What the contiguous parts of one ordered batch cost.

    Args:
        counts: [R, F] the samples' own counts, none negative.
        features: F of them.
        coefficients: [F] bytes a unit, none negative.
    """

    def __init__(
        self,
        counts: NDArray[np.float64],
        features: Sequence[Feature],
        coefficients: Sequence[float] | NDArray[np.float64],
    ) -> None:
        self._counts = counts
        self._features = tuple(features)
        self._coefficients = np.asarray(coefficients, dtype=np.float64)
        self._sums = None if any(f.padding for f in self._features) else self._prefix_sums()

    @classmethod
    def of_samples(cls, costs: Sequence[float] | NDArray[np.float64]) -> "BatchCosts":
        """Costs that simply add up."""
        return cls(np.asarray(costs, dtype=np.float64).reshape(-1, 1), (Feature("cost"),), (1.0,))

    @classmethod
    def uniform(cls, size: int) -> "BatchCosts":
        """`size` samples that cost 1 each."""
        return cls.of_samples(np.ones(size))

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def is_uniform(self) -> bool:
        """Whether every sample costs the same, wherever it stands."""
        return bool((self._counts == self._counts[:1]).all())

    def part(self, start: int, stop: int) -> "BatchCosts":
        """The batch that holds samples `start:stop` only."""
        return BatchCosts(self._counts[start:stop], self._features, self._coefficients)

    def chosen(self, positions: NDArray[np.int64]) -> "BatchCosts":
        """The batch that holds the samples at `positions`, in that order."""
        return BatchCosts(self._counts[positions], self._features, self._coefficients)

    def mean_counts(self) -> NDArray[np.float64]:
        """Returns [F] the mean sample's counts."""
        mean: NDArray[np.float64] = self._counts.mean(axis=0)
        return mean

    def main_feature(self, start: int, stop: int) -> float:
        """Returns the sum of the first feature over samples `start:stop`, unpadded."""
        return float(self._counts[start:stop, 0].sum())

    def cost(self, start: int, stop: int) -> float:
        """Returns what samples `start:stop` cost as one part."""
        if stop <= start:
            return 0.0
        if self._sums is not None:
            return float(self._sums[stop] - self._sums[start])
        return float(self._growing(start, stop)[-1])

    def each(self) -> NDArray[np.float64]:
        """Returns [R] what each sample costs alone."""
        powers = [max(feature.padding, 1) for feature in self._features]
        costs: NDArray[np.float64] = self._counts ** np.asarray(powers) @ self._coefficients
        return costs

    def reach(self, start: int, limit: float) -> int:
        """Returns the largest `stop` for which samples `start:stop` cost at most `limit`; `start` where none do."""
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
        return growing_totals(self._features, self._counts[start:stop]) @ self._coefficients

    def _prefix_sums(self) -> NDArray[np.float64]:
        return np.concatenate([[0.0], (self._counts @ self._coefficients).cumsum()])


@dataclass(frozen=True, kw_only=True)
class PartLimit:
    """What one micro-batch may hold.

    Attributes:
        cost: Bytes above base.
        samples: Largest number of samples; 0: any.
        floor: Smallest number of samples that a batch is cut into, costly or not.
        equal: Micro-batches of equal size, the largest divisor that fits.
    """

    cost: float = math.inf
    samples: int = 0
    floor: int = 1
    equal: bool = False


def cut(batch: BatchCosts, limit: PartLimit) -> tuple[int, ...]:
    """Cuts a batch into micro-batches.

    Uniform cost is solved for the fewest parts of nearly equal size, where that keeps to the floor; else each part
    takes the samples that follow until the next one would not fit (next-fit). A sample that alone costs more than the
    limit is a part by itself.

    >>> cut(BatchCosts.of_samples([5, 1, 1, 6, 2]), PartLimit(cost=7))
    (3, 1, 1)
    >>> cut(BatchCosts.uniform(10), PartLimit(cost=4))
    (4, 3, 3)

    Returns:
        Sizes in samples, in order; their sum is the batch's.
    """
    size = len(batch)
    most = min(limit.samples or size, size)
    if limit.equal:
        return _equal(batch, limit, most)
    if batch.is_uniform:
        fitting = batch.reach(0, limit.cost)
        even = solve_accumulation(size, max(1, min(most, max(fitting, limit.floor))))
        if even[-1] >= min(limit.floor, most):
            return even
    sizes: list[int] = []
    start = 0
    while start < size:
        stop = min(max(batch.reach(start, limit.cost), start + max(limit.floor, 1)), start + most, size)
        sizes.append(stop - start)
        start = stop
    return _with_floor(sizes, limit.floor)


def _with_floor(sizes: list[int], floor: int) -> tuple[int, ...]:
    """Evens the last two parts out where the last is below the floor and the one before can spare samples."""
    if len(sizes) > 1 and sizes[-1] < floor:
        missing = min(floor - sizes[-1], max(sizes[-2] - floor, 0))
        sizes[-2:] = [sizes[-2] - missing, sizes[-1] + missing]
    return tuple(sizes)


def _equal(batch: BatchCosts, limit: PartLimit, most: int) -> tuple[int, ...]:
    """The largest divisor of the batch for which every part fits; `floor` or 1 where none does."""
    size = len(batch)
    divisors = [n for n in range(min(most, size), 0, -1) if size % n == 0 and (n >= limit.floor or n == size)]
    for width in divisors or [1]:
        if all(batch.cost(start, start + width) <= limit.cost * (1 + ROUNDING) for start in range(0, size, width)):
            return (width,) * (size // width)
    width = divisors[-1] if divisors else 1
    return (width,) * (size // width)


def largest_typical_batch(
    order: BatchCosts, limit: float, *, upper: int, shares: int = 1, fitting_share: float = 0.95
) -> int:
    """Returns the largest batch of which all but a few fit whole, or in as many shares as there are.

    Args:
        order: The samples of an epoch, in its order.
        limit: What one micro-batch may cost.
        upper: Largest batch to consider, in samples.
        shares: Contiguous parts of a batch that run at the same time, on a device each.
        fitting_share: Share of the epoch's batches that must fit; the others run in more parts.

    Returns:
        Samples; at least 1.
    """

    def is_over(start: int, stop: int) -> bool:
        if shares == 1:
            return order.cost(start, stop) > limit * (1 + ROUNDING)
        for _ in range(shares):
            start = order.reach(start, limit)
        return start < stop

    def fits(size: int) -> bool:
        stops = range(size, len(order) + 1, size)
        over = sum(is_over(stop - size, stop) for stop in stops)
        return over <= (1 - fitting_share) * len(stops)

    low, high = 1, upper + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
