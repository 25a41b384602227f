"""How a logical batch of uniform cost is cut into micro-batches. What one micro-batch may hold is decided elsewhere,
and batches whose samples differ in cost are cut by cost, not by this solver.
"""

import math
from numbers import Integral

from can_train.errors import ArgumentError


def solve_accumulation(desired: int, limit: int, *, divisor: bool = False) -> tuple[int, ...]:
    """Cuts a logical batch into the fewest micro-batches that fit, or into the fewest equal ones.

    >>> solve_accumulation(127, 64)
    (64, 63)
    >>> solve_accumulation(100, 30, divisor=True)
    (25, 25, 25, 25)

    Args:
        desired: Samples in the logical batch.
        limit: Samples that one micro-batch may hold.
        divisor: All micro-batches equal, their size the largest divisor of `desired` that is ≤ `limit`. A prime number
            of samples above the limit then runs one by one.

    Returns:
        The sizes in samples, largest first: each ≤ `limit`, their sum is `desired`, and no two differ by more than 1.

    Raises:
        ArgumentError: `desired` or `limit` is below 1, or no whole number.
    """
    if not isinstance(desired, Integral) or not isinstance(limit, Integral):
        raise ArgumentError("Numbers of samples are whole", value=f"desired {desired!r}, limit {limit!r}")
    desired, limit = int(desired), int(limit)
    if desired < 1:
        raise ArgumentError("A logical batch has at least one sample", value=f"{desired}")
    if limit < 1:
        raise ArgumentError("A micro-batch must be allowed at least one sample", value=f"limit {limit}")
    count = _smallest_divisor(desired, at_least=-(-desired // limit)) if divisor else -(-desired // limit)
    size, larger = divmod(desired, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def _smallest_divisor(number: int, *, at_least: int) -> int:
    """The smallest divisor of `number` that is ≥ `at_least`, found among the pairs up to its square root."""
    pairs = ((low, number // low) for low in range(1, math.isqrt(number) + 1) if number % low == 0)
    return min(divisor for pair in pairs for divisor in pair if divisor >= at_least)
