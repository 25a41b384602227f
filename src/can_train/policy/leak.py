"""Notices a leak: memory in use between steps that rises and rises. What is in use is measured elsewhere."""

from dataclasses import dataclass, field
from typing import Final

WINDOW_STEPS: Final = 50
"""Steps whose smallest reading counts: single steps go up and down with their batches."""

RISES: Final = 5
"""Windows in a row that must each lie above the one before."""

LEAST_BYTES: Final = 2**20
"""Total rise that is worth a word."""


@dataclass
class LeakWatch:
    """Watches the floor of the memory in use.

    Attributes:
        floors: Smallest reading of each full window of the current rise.
        current: Readings of the window that is not full yet.
    """

    floors: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    told: bool = False

    def after_step(self, allocated_bytes: int) -> int:
        """Takes the reading after a step.

        Returns:
            Bytes that the floor has risen by, the first time that this counts as a leak; else 0.
        """
        if self.told:
            return 0
        self.current.append(allocated_bytes)
        if len(self.current) < WINDOW_STEPS:
            return 0
        floor = min(self.current)
        self.current.clear()
        if self.floors and floor <= self.floors[-1]:
            self.floors.clear()
        self.floors.append(floor)
        rise = floor - self.floors[0]
        self.told = len(self.floors) > RISES and rise >= LEAST_BYTES
        return rise if self.told else 0
