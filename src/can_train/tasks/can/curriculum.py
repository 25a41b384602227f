"""What a curriculum shows when: the schedule of benign windows for each attack, and which windows an epoch has by it.
How hard a window is, others find out.

Shapes: R training windows, H benign ones among them.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

TICK: Final = 1e-3
"""Share of the training after which the smoothed ratio moves on. Smoothed by epochs, ten of them would not reach the
end: with a momentum of 0.9 the ratio would lag nine epochs behind."""

_ATTACK: Final = -1
"""Place of every attack: before the hardest benign window."""


@dataclass(frozen=True, kw_only=True)
class RatioSchedule:
    """Benign windows for each attack: level at first, then a ramp, smoothed by a moving average.

    Attributes:
        start: The ratio at first.
        end: The ratio in the last epoch.
        warmup: Share of the training before it begins to rise, in [0, 1).
        smoothing: Momentum of the moving average, in [0, 1); a tick is `TICK` of the training.
    """

    start: float
    end: float
    warmup: float
    smoothing: float

    def ratio(self, epoch: int, epochs: int) -> float:
        """Returns the ratio of an epoch: a pure function, so that it can be come back to.

        >>> schedule = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=0.9)
        >>> [round(schedule.ratio(epoch, 11), 2) for epoch in (0, 1, 6, 10)]
        [1.0, 1.0, 5.96, 10.0]

        Args:
            epoch: Counted from 0.
            epochs: Of the training; where there is one only, it is the last.
        """
        progress = epoch / (epochs - 1) if epochs > 1 else 1.0
        risen = self._smoothed(progress) / self._smoothed(1.0)
        return self.start + (self.end - self.start) * risen

    def _smoothed(self, progress: float) -> float:
        """Returns the average at a point of the training of a ramp that rises by 1 a tick.

        a(k) = m·a(k − 1) + (1 − m)·k from a(0) = 0 is k − m·(1 − mᵏ)/(1 − m), which holds between ticks too. It ends
        m/(1 − m) ticks short of the ramp: the caller divides by where it ends.
        """
        ticks = max(progress - self.warmup, 0.0) / TICK
        lag = self.smoothing / (1 - self.smoothing)
        return ticks - lag * (1.0 - math.pow(self.smoothing, ticks))


@dataclass(frozen=True, kw_only=True, eq=False)
class Composition:
    """The windows of an epoch.

    Attributes:
        rows: Its windows, ascending.
        benign: How many of them are benign.
        attacks: How many are attacks.
    """

    rows: NDArray[np.int64]
    benign: int
    attacks: int

    @property
    def log_prior(self) -> float:
        """Logarithm of benign ÷ attack windows; a class without windows counts as one."""
        return math.log(max(self.benign, 1) / max(self.attacks, 1))


class Curriculum:
    """Training windows in the order in which they come in: all attacks, then the benign ones, the hardest first.

    Args:
        rows: [R] the windows, ascending.
        is_attack: [R].
        difficulty: [H] of the benign windows, in the order of `rows`; of equally hard ones the first comes first.
    """

    def __init__(self, rows: NDArray[np.int64], is_attack: NDArray[np.bool_], difficulty: NDArray[np.float64]) -> None:
        self._rows = rows
        self._place = np.full(len(rows), _ATTACK, dtype=np.int64)
        hardest_first = np.argsort(-difficulty, kind="stable")
        self._place[np.flatnonzero(~is_attack)[hardest_first]] = np.arange(len(difficulty))
        self.benign = len(difficulty)
        self.attacks = len(rows) - len(difficulty)

    def with_ratio(self, ratio: float) -> Composition:
        """Returns every attack once, and so many of the hardest benign windows for each; at most all there are.

        Where there is no attack, as there may be none in a sample of the data, all benign windows are there.
        """
        wanted = round(ratio * self.attacks) if self.attacks else self.benign
        benign = min(max(wanted, 1), self.benign)
        return Composition(rows=self._rows[self._place < benign], benign=benign, attacks=self.attacks)
