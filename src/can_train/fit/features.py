"""What the memory of a batch grows with: the counts of its samples, summed or padded.

Shapes: R samples, F features, G samples of the whole data set, S members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from can_train.task import Feature


def batch_totals(features: Sequence[Feature], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [F], the feature totals of the batch that holds samples with counts [R, F].

    >>> from can_train.task import Feature
    >>> batch_totals([Feature("nodes"), Feature("tokens", padding=1)], np.array([[2.0, 5.0], [4.0, 7.0]])).tolist()
    [6.0, 14.0]
    """
    return growing_totals(features, counts)[-1] if len(counts) else np.zeros(len(features))


def growing_totals(features: Sequence[Feature], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [R, F], the totals of the batches that hold the first 1, 2, … R samples. No column ever falls."""
    sizes = np.arange(1, len(counts) + 1)
    columns = [
        sizes * np.maximum.accumulate(column) ** feature.padding if feature.padding else column.cumsum()
        for feature, column in zip(features, counts.T, strict=True)
    ]
    return np.stack(columns, axis=1)


class Members(NamedTuple):
    """The members (nodes, for example) of chosen samples, sample after sample."""

    positions: NDArray[np.int64]  # [S] indices into the flat arrays
    starts: NDArray[np.int64]  # [R] index of each sample's first member among `positions`
    sizes: NDArray[np.int64]  # [R] number of members of each sample


def members(ptr: NDArray[np.int64], rows: NDArray[np.int64]) -> Members:
    """Finds the members of samples `rows`, in any order and with repetitions.

    >>> members(np.array([0, 2, 2, 5]), np.array([2, 0])).positions.tolist()
    [2, 3, 4, 0, 1]

    Args:
        ptr: [G + 1] bounds of every sample's members in the flat arrays.
        rows: [R] the samples.
    """
    first = ptr[rows]
    sizes = ptr[rows + 1] - first
    starts = sizes.cumsum() - sizes
    return Members(np.arange(sizes.sum()) + np.repeat(first - starts, sizes), starts, sizes)
