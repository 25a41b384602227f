"""Where the members of chosen samples are, in arrays that hold all members one sample after another.

Shapes: G samples in all, R chosen ones, S members of those.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Members(NamedTuple):
    """The members (nodes, say) of chosen samples, sample after sample.

    Attributes:
        positions: [S] where they are in the flat arrays.
        starts: [R] where each sample's begin among them.
        sizes: [R] how many each sample has.
    """

    positions: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


def members(ptr: NDArray[np.int64], rows: NDArray[np.int64]) -> Members:
    """Finds the members of samples, in any order and with repetitions.

    >>> members(np.array([0, 2, 2, 5]), np.array([2, 0])).positions.tolist()
    [2, 3, 4, 0, 1]

    Args:
        ptr: [G + 1] bounds of every sample's members.
        rows: [R] the samples.
    """
    first = ptr[rows]
    sizes = ptr[rows + 1] - first
    starts = sizes.cumsum() - sizes
    return Members(np.arange(sizes.sum()) + np.repeat(first - starts, sizes), starts, sizes)
