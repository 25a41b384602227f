"""What the memory of a batch grows with: counts of its samples, summed or padded. Which counts those are is each task's
own statement; what a unit of them costs is fitted elsewhere.

Shapes: R samples, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Feature:
    """One count.

    Attributes:
        name: What is counted, in the plural: `nodes`, `tokens`.
        padding: 0: a batch has the sum over its samples. p ≥ 1: every sample is padded to the largest, and memory grows
            with (number of samples) · (largest count)^p; 1 for padded tokens, 2 for their attention matrix.
    """

    name: str
    padding: int = 0


def batch_totals(features: Sequence[Feature], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Combines samples to a batch.

    >>> batch_totals([Feature("nodes"), Feature("tokens", padding=1)], np.array([[2.0, 5.0], [4.0, 7.0]])).tolist()
    [6.0, 14.0]

    Args:
        features: F of them.
        counts: [R, F], each sample's own.

    Returns:
        [F] what the batch's memory grows with.
    """
    return growing_totals(features, counts)[-1] if len(counts) else np.zeros(len(features))


def growing_totals(features: Sequence[Feature], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [R, F]: the totals of the batches that hold the first 1, 2, … R samples. No column ever falls."""
    sizes = np.arange(1, len(counts) + 1)
    columns = [
        sizes * np.maximum.accumulate(column) ** feature.padding if feature.padding else column.cumsum()
        for feature, column in zip(features, counts.T, strict=True)
    ]
    return np.stack(columns, axis=1)
