"""Whether the law behind a history changed on the way (another driver, another kernel), and since when. What came
before teaches nothing of the runs to come.
"""

import math
from collections.abc import Sequence
from typing import Final

from can_train.policy.line import Line, Reading

_LEAST_RUNS: Final = 3
"""Runs on either side of a change: fewer may all be outliers."""

_LEAST_CHANGE: Final = 0.03
"""Shift of the peak, as a share of capacity, below which the fit's own forgetting is soon enough."""

_CERTAIN: Final = 5.0
"""Standard errors of the shift: every place in a long history is looked at, so chance has many tries."""

_LEAST_NOISE: Final = 0.01
"""Standard deviation believed of residuals, worth as many runs as `_LEAST_RUNS`: a few may agree by chance."""


def since_change(readings: Sequence[Reading], line: Line) -> Sequence[Reading]:
    """Returns the readings since the law changed; all of them where it did not.

    A change shows as residuals from one line through all that are of one size before it and of another after.

    Args:
        readings: Oldest first.
        line: Fitted to all of them.
    """
    residuals = [(i, r.peak - line.peak(r.used)) for i, r in enumerate(readings) if r.peak is not None]
    total, squares = sum(x for _, x in residuals), sum(x * x for _, x in residuals)
    start, certainty = 0, _CERTAIN
    sum_before = 0.0
    for before, (index, residual) in enumerate(residuals):
        after = len(residuals) - before
        if min(before, after) >= _LEAST_RUNS:
            sum_after = total - sum_before
            shift = abs(sum_after / after - sum_before / before)
            within = max(squares - sum_before**2 / before - sum_after**2 / after, 0.0)
            variance = (within + _LEAST_RUNS * _LEAST_NOISE**2) / (len(residuals) + 1)
            errors = shift / math.sqrt(variance * (1 / before + 1 / after))
            if shift > _LEAST_CHANGE and errors > certainty:
                start, certainty = index, errors
        sum_before += residual
    return readings[start:]
