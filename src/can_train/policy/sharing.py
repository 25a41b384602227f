"""How a logical batch is shared out among processes: by cost, not by count. How each cuts its share, others decide.

Shapes: R samples.
"""

from typing import Final

from can_train.policy.packing import BatchCosts

_BISECTIONS: Final = 50
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
    for _ in range(_BISECTIONS):
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
