"""Random laws of peak memory, and the runs that a factor policy leads to under them, one after another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from can_train.factors.policies import FactorPoint

TABLE = (0.34, 0.38, 0.45, 0.489, 0.55, 0.65)
"""First factors, as in tables of experience."""


UNCHANGED_RUNS = 20
"""Runs before a law that changes does so."""


class NextFactor(Protocol):
    """The interface of a policy."""

    def next_factor(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the factor of the next run."""


@dataclass(frozen=True)
class Law:
    """`peak = base + hidden + (1 - base) · fill · ((1 - bend) · used + bend · used²)`, with noise.

    Attributes:
        base: Peak of a run whose micro-batches are empty.
        fill: Share of the rest of the capacity that micro-batches at the tuned limit take.
        bend: Curvature.
        noise: Relative standard deviation of a run's peak.
        first: Factor of the first run.
        hidden: Peak that predictions do not include.
        ceiling: Share of the capacity at which memory runs out; less than 1 if it is fragmented.
        rescued: Whether a run that runs out of memory goes on with half as much.
        change: Share of the capacity by which every peak shifts after `UNCHANGED_RUNS` runs.
    """

    base: float
    fill: float
    bend: float
    noise: float
    first: float
    hidden: float = 0.0
    ceiling: float = 1.0
    rescued: bool = False
    change: float = 0.0

    def peak(self, used: float) -> float:
        """Returns the noise-free peak."""
        return self.base + self.hidden + (1 - self.base) * self.fill * ((1 - self.bend) * used + self.bend * used**2)


def draw_laws(count: int, *, noise: float, bend: float, seed: int = 0) -> list[Law]:
    """Draws random laws with curvatures between `-bend` and `bend`."""
    draw = np.random.default_rng(seed)
    return [
        Law(
            base=float(draw.uniform(0.05, 0.4)),
            fill=float(draw.uniform(0.9, 1.1)),
            bend=float(draw.uniform(-bend, bend)),
            noise=noise,
            first=float(draw.choice(TABLE)),
        )
        for _ in range(count)
    ]


def changed(laws: Sequence[Law], *, change: float) -> list[Law]:
    """Shifts every peak by a share of the capacity, as a new version of a library may, after `UNCHANGED_RUNS` runs."""
    return [replace(law, change=change) for law in laws]


def fragmented(laws: Sequence[Law], *, ceilings: tuple[float, float], seed: int = 0) -> list[Law]:
    """Returns the laws with ceilings between two shares of the capacity."""
    draw = np.random.default_rng(seed)
    return [replace(law, ceiling=float(draw.uniform(*ceilings))) for law in laws]


def with_hidden(laws: Sequence[Law], *, hidden: float, target: float = 0.90) -> list[Law]:
    """Returns the laws with a hidden allocation and with rescue. First factors would meet the target without it."""
    return [replace(law, first=_meets(law, target), hidden=hidden, rescued=True) for law in laws]


def _meets(law: Law, target: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if law.peak(middle) < target else (low, middle)
    return high


@dataclass(frozen=True)
class SimulatedRuns:
    """The runs of a configuration.

    Attributes:
        peaks: Noise-free peak of each run.
        ooms: Number of runs that ran out of memory.
    """

    peaks: tuple[float, ...]
    ooms: int

    def runs_to_target(self, target: float, *, within: float = 0.02, stays: float = 0.05) -> int | None:
        """Returns the first run, counted from 1, whose peak is within `within` of the target, if all later ones stay
        within `stays`.
        """
        near = [abs(peak - target) <= within for peak in self.peaks]
        for index, is_near in enumerate(near):
            if is_near and all(abs(peak - target) <= stays for peak in self.peaks[index:]):
                return index + 1
        return None


def simulate(policy: NextFactor, law: Law, *, runs: int = 60, seed: int = 0) -> SimulatedRuns:
    """Runs a configuration many times. The policy chooses each run's factor from the history of those before it."""
    draw, peaks = np.random.default_rng(seed), []
    history: list[FactorPoint] = []
    for run in range(runs):
        if run == UNCHANGED_RUNS:
            law = replace(law, hidden=law.hidden + law.change)
        used = policy.next_factor(history, first=law.first)
        peaks.append(law.peak(used))
        noise = 1 + draw.normal(0, law.noise)
        if peaks[-1] * noise <= law.ceiling:
            history.append(FactorPoint(used, peaks[-1] * noise))
        elif law.rescued:
            history.append(FactorPoint(used, None, (used / 2, law.peak(used / 2) * noise)))
        else:
            history.append(FactorPoint(used, None))
    return SimulatedRuns(tuple(peaks), sum(point.peak is None for point in history))


def simulate_all(policy: NextFactor, laws: Sequence[Law]) -> list[SimulatedRuns]:
    """Runs one configuration for each law."""
    return [simulate(policy, law, seed=index) for index, law in enumerate(laws)]
