"""What computing a logical batch gives beside its gradient, as a whole or put together of shares."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from can_train.errors import ArgumentError

_DENOMINATOR_TOLERANCE: Final = 1e-6
"""Relative difference of the parts' denominators from the whole batch's that is round-off."""


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What computing a logical batch, or a share of one, gave beside its gradient.

    Attributes:
        means: Each term's sum ÷ the whole logical batch's denominator: its mean, or the share's contribution to it.
        denominators: Each term's own denominator.
        micro_batches: Sizes in samples, in order, as they were run in the end.
        largest_cost: Cost of the costliest of them.
        settled_cost: Cost of the costliest of those that were run after the last out-of-memory.
        ooms: Out-of-memories that were survived.
    """

    means: dict[str, float] = field(default_factory=dict)
    denominators: dict[str, float] = field(default_factory=dict)
    micro_batches: tuple[int, ...] = ()
    largest_cost: float = 0.0
    settled_cost: float = 0.0
    ooms: int = 0

    @property
    def loss(self) -> float:
        """Sum of the means, unweighted: the loss, where there is one term."""
        return sum(self.means.values())


def whole(shares: Sequence[BatchResult]) -> BatchResult:
    """Puts a logical batch's shares together, in order."""
    return BatchResult(
        means=added([share.means for share in shares]),
        denominators=added([share.denominators for share in shares]),
        micro_batches=tuple(size for share in shares for size in share.micro_batches),
        largest_cost=max(share.largest_cost for share in shares),
        settled_cost=max(share.settled_cost for share in shares),
        ooms=sum(share.ooms for share in shares),
    )


def added(terms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Adds numbers up by term, in the order given: the same bits wherever it is done."""
    totals: dict[str, float] = {}
    for one in terms:
        for term, number in one.items():
            totals[term] = totals[term] + number if term in totals else number
    return totals


def check_denominators(result: BatchResult, denominators: Mapping[str, float] | None, *, size: int) -> None:
    """Checks that the parts' denominators are the whole batch's.

    Args:
        result: Of the whole batch.
        denominators: Per term, of the whole batch; None: its size, for every term.
        size: Samples of the batch.

    Raises:
        ArgumentError: They do not add up to it.
    """
    for term, own in result.denominators.items():
        needed = float(size) if denominators is None else denominators[term]
        if not math.isclose(own, needed, rel_tol=_DENOMINATOR_TOLERANCE, abs_tol=_DENOMINATOR_TOLERANCE):
            raise ArgumentError(
                f"The parts' denominators of {term!r} must add up to the whole batch's",
                value=f"{own:g} against {needed:g}",
                remedy="Compute denominators on the logical batch, before it is split",
            )


class Sums:
    """Adds up the terms of some samples on the device: reading a number from it would make the host wait.

    Args:
        denominators: Per term, of the whole logical batch; None: `size`, for every term.
        size: Samples of the logical batch.

    Attributes:
        own: Per term, the denominators of what was added.
    """

    def __init__(self, denominators: Mapping[str, float] | None, size: int) -> None:
        self._given = denominators
        self._size = float(size)
        self._means: dict[str, Tensor] = {}
        self.own: dict[str, float] = {}

    def denominator(self, term: str) -> float:
        """A term whose denominator is zero has nothing in this batch: its sum is zero too."""
        if self._given is None:
            return self._size
        if term not in self._given:
            raise ArgumentError("Every term has a denominator", value=f"{term!r} is not in {sorted(self._given)}")
        return self._given[term] or 1.0

    def add(self, means: Mapping[str, Tensor], own: Mapping[str, float]) -> None:
        """Adds a part: its sums ÷ the whole's denominators, and its own denominators."""
        for term, mean in means.items():
            self._means[term] = self._means[term] + mean if term in self._means else mean
            self.own[term] = self.own.get(term, 0.0) + own[term]

    def means(self) -> dict[str, float]:
        """Reads what was added up."""
        return {term: float(mean) for term, mean in self._means.items()}
