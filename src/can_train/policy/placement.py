"""Decides where a companion's answers come from: the fastest way that fits, by what was measured of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ALIKE: Final = 0.05
"""Relative difference of two times that says nothing: they were measured on a machine that does other things too."""


@dataclass(frozen=True, kw_only=True)
class PlacementCost:
    """What one way of getting a companion's answers costs.

    Attributes:
        placement: `device`, `cache` or `offload`.
        base_bytes: What is on the device beside a batch: weights, gradients, optimizer state, and the companion.
        sample_bytes: What the mean sample of a micro-batch adds.
        largest_bytes: What the largest sample adds.
        step_seconds: Of a step, for one sample.
        once_seconds: Of what is done once, before training.
        disk_bytes: What is kept on disk.
    """

    placement: str
    base_bytes: float
    sample_bytes: float
    largest_bytes: float
    step_seconds: float
    once_seconds: float = 0.0
    disk_bytes: int = 0

    def seconds(self, samples: int) -> float:
        """Returns how long a training takes in which so many samples are seen, repetitions counted."""
        return self.once_seconds + self.step_seconds * samples

    def fits(self, capacity_bytes: float) -> bool:
        """Tells whether the largest sample fits by itself."""
        return self.base_bytes + self.largest_bytes <= capacity_bytes


def choose_placement(costs: Sequence[PlacementCost], *, capacity_bytes: float, samples: int) -> PlacementCost:
    """Chooses the fastest placement that fits; of those that are about as fast, the first; where none fits, the one
    that needs least.

    >>> near = PlacementCost(placement="device", base_bytes=80, sample_bytes=1, largest_bytes=9, step_seconds=1.0)
    >>> disk = PlacementCost(placement="cache", base_bytes=8, sample_bytes=1, largest_bytes=2, step_seconds=0.5,
    ...                      once_seconds=40.0)
    >>> [choose_placement([near, disk], capacity_bytes=100, samples=n).placement for n in (10, 1000)]
    ['device', 'cache']
    >>> choose_placement([near, disk], capacity_bytes=20, samples=10).placement
    'cache'

    Args:
        costs: At least one.
        capacity_bytes: Of the device.
        samples: That the training sees, repetitions counted.
    """
    fitting = [cost for cost in costs if cost.fits(capacity_bytes)]
    if not fitting:
        return min(costs, key=lambda cost: cost.base_bytes + cost.largest_bytes)
    quickest = min(cost.seconds(samples) for cost in fitting)
    return next(cost for cost in fitting if cost.seconds(samples) <= quickest * (1 + ALIKE))
