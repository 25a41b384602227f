"""Which samples make the probes of the cost model: small batches at the extremes of what the data hold, so that the
coefficients of features that usually go together can still be told apart.

Shapes: R samples, F features.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

ROUNDS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Multiples of the first probes' size. Probes grow until two rounds agree: below that, memory that does not grow with
the batch (workspaces, gradients of weights) hides what does."""

LATER_ROUNDS: Final = (128, 256, 512, 1024)
"""The same where weights are so large, and samples so cheap, that gradients still hide the law: of a wide multilayer
perceptron hundreds of samples take less than its weights."""

SMALLEST_PROBE: Final = 4
"""Samples of a first probe; of fewer, one sample's shape would decide."""


def extreme_samples(counts: NDArray[np.float64], size: int) -> list[NDArray[np.int64]]:
    """Chooses the samples of one round's probes.

    Args:
        counts: [R, F] the samples' features.
        size: Samples of a probe.

    Returns:
        Positions [size] in `counts`, one array a probe: the largest and the smallest in each feature, the largest and
        smallest ratio of each pair of features, the first ones as they come, and twice as many from the end. Too few
        samples are repeated.
    """
    keys = [counts[:, f] for f in range(counts.shape[1]) if np.ptp(counts[:, f]) > 0]
    ratios = [a / np.maximum(b, 1.0) for i, a in enumerate(keys) for b in keys[:i]]
    chosen = [np.arange(len(counts))]
    for key in keys + ratios:
        order = np.argsort(key, kind="stable")
        chosen += [order[::-1], order]
    probes = [np.resize(order[:size], size) for order in chosen[1:]]
    # Samples that the features call alike, but others: only so a batch shows that the features do not say it all.
    others = chosen[0][::-1]
    return [*_distinct(probes), np.resize(chosen[0], size), np.resize(others, 2 * size)]


def _distinct(probes: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Drops probes that hold the same samples as an earlier one."""
    return list({tuple(sorted(probe.tolist())): probe for probe in reversed(probes)}.values())
