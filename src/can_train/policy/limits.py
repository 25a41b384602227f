"""What one micro-batch of a given logical batch may hold: every accumulation option is an answer to that one question,
and cutting at the answer is one mechanism for all of them.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from can_train.policy.packing import BatchCosts, PartLimit, cut

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
