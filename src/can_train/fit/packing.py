"""How a logical batch is cut into micro-batches, by count or by cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import ArgumentError
from can_train.fit.features import growing_totals
from can_train.task import Feature


def solve_accumulation(desired: int, limit: int, *, divisor: bool = False) -> tuple[int, ...]:
    """Cuts a logical batch into the fewest micro-batches that fit, or into the fewest equal ones.

    >>> solve_accumulation(127, 64)
    (64, 63)
    >>> solve_accumulation(100, 30, divisor=True)
    (25, 25, 25, 25)

    Args:
        desired: Samples in the logical batch.
        limit: Samples that one micro-batch may hold.
        divisor: All micro-batches equal, their size the largest divisor of `desired` that is ≤ `limit`. A prime number
            of samples above the limit then runs one by one.

    Returns:
        The sizes in samples, largest first: each ≤ `limit`, their sum is `desired`, and no two differ by more than 1.

    Raises:
        ArgumentError: `desired` or `limit` is below 1, or no whole number.
    """
    if not isinstance(desired, Integral) or not isinstance(limit, Integral):
        raise ArgumentError("Numbers of samples are whole", value=f"desired {desired!r}, limit {limit!r}")
    desired, limit = int(desired), int(limit)
    if desired < 1:
        raise ArgumentError("A logical batch has at least one sample", value=f"{desired}")
    if limit < 1:
        raise ArgumentError("A micro-batch must be allowed at least one sample", value=f"limit {limit}")
    count = _smallest_divisor(desired, at_least=-(-desired // limit)) if divisor else -(-desired // limit)
    size, larger = divmod(desired, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def _smallest_divisor(number: int, *, at_least: int) -> int:
    """The smallest divisor of `number` that is ≥ `at_least`, found among the pairs up to its square root."""
    pairs = ((low, number // low) for low in range(1, math.isqrt(number) + 1) if number % low == 0)
    return min(divisor for pair in pairs for divisor in pair if divisor >= at_least)


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


_SHARE_BISECTIONS: Final = 50
"""Halvings of the search for the smallest limit that a share can keep to: to 1e-15 of the whole."""


def share_out(batch: BatchCosts, shares: int) -> tuple[int, ...]:
    """Cuts a batch into contiguous shares so that the costliest one costs as little as can be.

    >>> share_out(BatchCosts.of_samples([5, 1, 1, 6, 2]), 2)
    (3, 2)
    >>> share_out(BatchCosts.uniform(2), 3)
    (1, 1, 0)

    Args:
        batch: R samples.
        shares: How many, at least 1.

    Returns:
        Sizes in samples, in order; their sum is R. The last ones may be empty.
    """
    if shares == 1:
        return (len(batch),)
    low, high = 0.0, batch.cost(0, len(batch))
    for _ in range(_SHARE_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _within(batch, shares, middle) else (middle, high)
    sizes = _within(batch, shares, high)
    assert sizes is not None, "one share can keep to the whole's cost"
    return sizes


def _within(batch: BatchCosts, shares: int, limit: float) -> tuple[int, ...] | None:
    """Gives each share as many samples as it can have; None where some are left over."""
    sizes, start = [], 0
    for _ in range(shares):
        stop = batch.reach(start, limit) if start < len(batch) else start
        sizes.append(stop - start)
        start = stop
    return tuple(sizes) if start == len(batch) else None


_BISECTIONS: Final = 40
"""Halvings of the search for the smallest limit that keeps a cap on the number of parts: to 1e-12 of the cost."""


@dataclass(frozen=True, kw_only=True)
class SplitRules:
    """How logical batches are cut.

    Attributes:
        safe_limit: Cost that one micro-batch may have; infinite where nobody searched.
        tuned_limit: Cost that was tried and fits; infinite where nobody searched.
        samples: Largest micro-batch in samples (a fixed one, or a loader batch); 0: any.
        floor: Smallest micro-batch in samples.
        equal: Micro-batches of equal size.
        threshold: Units of the main feature up to which a batch is not cut, as long as it is known to fit.
        target: Cost that micro-batches should come down to; infinite: none.
        max_splits: Most parts that are planned for the sake of `target`; a rescue may make more.
    """

    safe_limit: float = math.inf
    tuned_limit: float = math.inf
    samples: int = 0
    floor: int = 1
    equal: bool = False
    threshold: float = 0.0
    target: float = math.inf
    max_splits: int = 4

    def limit_for(self, batch: BatchCosts) -> PartLimit:
        """Decides what one micro-batch of this logical batch may hold."""
        if self.threshold and batch.main_feature(0, len(batch)) <= self.threshold:
            return PartLimit(cost=self.tuned_limit, floor=self.floor, equal=self.equal)
        limit = PartLimit(cost=self.safe_limit, samples=self.samples, floor=self.floor, equal=self.equal)
        if self.target == math.inf:
            return limit
        wanted = replace(limit, cost=min(self.safe_limit, self.target))
        if len(cut(batch, wanted)) > self.max_splits:
            # What is known not to fit is cut nevertheless.
            wanted = replace(limit, cost=min(self.safe_limit, self._capped(batch, limit)))
        return wanted

    def _capped(self, batch: BatchCosts, limit: PartLimit) -> float:
        """The smallest cost limit that cuts the batch into no more than `max_splits` parts, where there is one."""
        low, high = 0.0, batch.cost(0, len(batch))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            parts = len(cut(batch, replace(limit, cost=middle)))
            low, high = (middle, high) if parts > self.max_splits else (low, middle)
        return high


def optimizer_batches(batch: BatchCosts, threshold: float) -> tuple[int, ...]:
    """Cuts what was meant as one logical batch into several, each an optimizer step of its own (preflight splitting).

    Args:
        batch: Its first feature is what the threshold counts.
        threshold: Units of the main feature that one optimizer step may see; infinite: any.

    Returns:
        Sizes in samples. A sample above the threshold is a step by itself.
    """
    if threshold == math.inf:
        return (len(batch),)
    sizes: list[int] = []
    start = 0
    while start < len(batch):
        stop = start + 1
        while stop < len(batch) and batch.main_feature(start, stop + 1) <= threshold:
            stop += 1
        sizes.append(stop - start)
        start = stop
    return tuple(sizes)
