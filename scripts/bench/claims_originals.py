"""The described systems' own algorithms, where they are simple, beside which can-train is measured."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class FinderResult(NamedTuple):
    """The result of a search for a batch size."""

    size: int
    trials: int


def doubling_finder(fits: Callable[[int], bool], *, upper: int) -> FinderResult:
    """Doubles from 2 until memory runs out or the data end; returns the last size that fitted, 0 if none did.

    >>> doubling_finder(lambda size: size <= 100, upper=1000)
    FinderResult(size=64, trials=7)
    """
    size, last, trials = 2, 0, 0
    while size <= upper:
        trials += 1
        if not fits(size):
            break
        last, size = size, 2 * size
    return FinderResult(last, trials)


def described_divisor(batch: int, largest: int) -> tuple[int, int]:
    """Returns the size of a part and their number: the largest divisor up to, and by its off-by-one, one above.

    >>> [described_divisor(batch, 64) for batch in (128, 127, 130)]
    [(64, 2), (1, 127), (65, 2)]
    """
    size = next(size for size in range(min(largest + 1, batch), 0, -1) if batch % size == 0)
    return size, batch // size


def remainder_weight(samples: int, loaded: int, accumulated: int) -> float:
    """Returns the weight of an epoch's last step if each of its micro-batches is divided by their usual number; 1 is
    right.

    >>> remainder_weight(80, 8, 4)
    0.5
    """
    batches = -(-samples // loaded)
    return (batches % accumulated or accumulated) / accumulated


def batches_to_oom(peaks: NDArray[np.float64], limit: float) -> float:
    """Returns the mean number of random batches until one needs more than a limit; infinite if no batch does.

    >>> batches_to_oom(np.array([1.0, 2.0, 3.0, 4.0]), 3.5)
    4.0
    """
    share = float((peaks > limit).mean())
    return 1 / share if share else float("inf")


def lost_share(batches: Sequence[tuple[int, bool]]) -> float:
    """Returns the share of samples in batches that do not fit, from each batch's size and whether it fits.

    >>> lost_share([(30, True), (10, False)])
    0.25
    """
    return sum(size for size, fits in batches if not fits) / sum(size for size, _ in batches)


def mean_or_dash(values: Sequence[float], form: str) -> str:
    """Writes the mean of some values; a dash for no values."""
    return format(fmean(values), form) if values else "–"
