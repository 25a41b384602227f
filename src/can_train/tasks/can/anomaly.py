"""The anomaly score of a window: the autoencoder's error terms, each in units of its mean over benign validation
windows, so that terms of different size weigh as they should.

Shapes: R windows.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

NODE_WEIGHT: Final = 0.40
EDGE_WEIGHT: Final = 0.35
LATENT_WEIGHT: Final = 0.25
"""Shares of the autoencoder's error terms in the anomaly score."""


def error_units(benign_errors: NDArray[np.float64]) -> list[float]:
    """Returns the [3] units of the error terms, from [R, 3] errors of benign validation windows."""
    units: list[float] = np.maximum(benign_errors.mean(axis=0), np.finfo(np.float64).tiny).tolist()
    return units


def anomaly_scores(errors: NDArray[np.float64], units: Sequence[float]) -> NDArray[np.float64]:
    """Returns [R] scores: 1 is as erroneous as the mean benign window of validation.

    Args:
        errors: [R, 3] node, edge and latent errors.
        units: [3] of the error terms.
    """
    weights = np.array([NODE_WEIGHT, EDGE_WEIGHT, LATENT_WEIGHT])
    scores: NDArray[np.float64] = errors @ (weights / np.asarray(units))
    return scores
