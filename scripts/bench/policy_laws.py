"""Random laws of peak memory, the runs that a factor policy leads to under them, one after another, and an oracle that
knows the law.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from can_train.factors.policies import FactorPoint

Array = NDArray[np.float64]

TABLE: Final = (0.34, 0.38, 0.45, 0.489, 0.55, 0.65)
"""First factors, as in tables of experience."""

UNCHANGED_RUNS: Final = 20
"""Runs before a law that changes does so."""

FOREIGN_RUNS: Final = 0.1
"""Share of runs with another process that holds memory."""

TARGET: Final = 0.90

ORACLE_DRAWS: Final = 8192
"""Draws of a run's noise and ceiling, for the oracle's risk."""


ORACLE_FACTORS: Final = 1024
"""Number of factors that the oracle chooses among."""


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
        noise: Relative scale of a run's peak around the law; its standard deviation where the noise is normal.
        first: Factor of the first run.
        hidden: Peak that predictions do not include.
        ceiling: Memory runs out at this share of the capacity; less than 1 if it is fragmented.
        rescued: Whether a run that runs out of memory goes on with half as much.
        change: Shift of every peak after `UNCHANGED_RUNS` runs, as a share of the capacity.
        tails: Degrees of freedom of the noise, which is Student's; infinite for normal noise.
        drift: Shift of every peak from each run to the next, as a share of the capacity.
        other: Distance between the peaks of the key's two populations, as a share of the capacity.
        other_share: Share of runs in the upper population.
        foreign: Most that another process holds, unseen, in `FOREIGN_RUNS` of the runs; a share of the capacity.
        batch: Logical batch ÷ tuned limit, if it is cut into equal micro-batches; 0 if the factor is used exactly.
        ceiling_sd: Standard deviation of the ceiling from run to run.
        overstated: Relative distance of a fitting run's allocated ÷ reserved below the ceiling. Segments that
            expand hold pages that could be released.
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
    tails: float = math.inf
    drift: float = 0.0
    other: float = 0.0
    other_share: float = 0.0
    foreign: float = 0.0
    batch: float = 0.0
    ceiling_sd: float = 0.0
    overstated: float = 0.0

    def peak(self, used: float) -> float:
        """Returns the noise-free peak before any change, the mean over both populations."""
        return self.base + self.hidden + (1 - self.base) * self.fill * ((1 - self.bend) * used + self.bend * used**2)

    def used(self, factor: float) -> float:
        """Returns the share that a run with a factor uses: the fewest equal parts of the logical batch decide."""
        return self.batch / math.ceil(self.batch / factor) if self.batch else factor

    def shift(self, run: int) -> float:
        """Returns the distance of the peaks of a run, counted from 0, above the first run's peaks."""
        return self.drift * run + self.change * (run >= UNCHANGED_RUNS)

    def draw(self, runs: int, seed: int) -> "Draws":
        """Draws the values that differ from run to run."""
        draw = np.random.default_rng(seed)
        noise = draw.normal(0, self.noise, runs)
        if not math.isinf(self.tails):
            noise = noise / np.sqrt(draw.chisquare(self.tails, runs) / self.tails)
        is_other = (draw.random(runs) < self.other_share).astype(np.float64)
        held = np.where(draw.random(runs) < FOREIGN_RUNS, draw.uniform(0, 1, runs) * self.foreign, 0.0)
        ceiling = np.minimum(self.ceiling + draw.normal(0, 1, runs) * self.ceiling_sd, 1.0)
        return Draws(1 + noise, self.other * (is_other - self.other_share), ceiling, held)


@dataclass(frozen=True)
class Draws:
    """Values that differ from run to run: factors of the noise, populations' shifts, ceilings, and foreign memory."""

    noise: Array
    shift: Array
    ceiling: Array
    foreign: Array

    @property
    def limits(self) -> Array:
        """The largest noise-free peak with which each run does not run out of memory."""
        return (self.ceiling - self.foreign) / np.maximum(self.noise, 1e-3) - self.shift


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


def varied(laws: Sequence[Law], *, seed: int = 0, **ranges: tuple[float, float]) -> list[Law]:
    """Returns the laws with attributes drawn between two values each; a seed always draws equal values."""
    draw = np.random.default_rng(seed)
    drawn: list[dict[str, Any]] = [{name: float(draw.uniform(*ends)) for name, ends in ranges.items()} for _ in laws]
    return [replace(law, **values) for law, values in zip(laws, drawn, strict=True)]


def fragmented(laws: Sequence[Law], *, ceilings: tuple[float, float], seed: int = 0) -> list[Law]:
    """Returns the laws with ceilings between two shares of the capacity."""
    return varied(laws, ceiling=ceilings, seed=seed)


def with_hidden(laws: Sequence[Law], *, hidden: float, target: float = TARGET) -> list[Law]:
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
    drawn, peaks = law.draw(runs, seed), []
    limits = drawn.limits
    history: list[FactorPoint] = []
    for run in range(runs):
        used = law.used(policy.next_factor(history, first=law.first))
        shift, noise = law.shift(run), float(drawn.noise[run])
        peaks.append(law.peak(used) + shift)
        if peaks[-1] <= limits[run]:
            peak = (peaks[-1] + float(drawn.shift[run])) * noise
            reserved = peak / (float(drawn.ceiling[run]) * (1 - law.overstated))
            history.append(FactorPoint(used, peak, None, min(reserved, 1.0)))
        elif law.rescued:
            history.append(FactorPoint(used, None, (used / 2, (law.peak(used / 2) + shift) * noise)))
        else:
            history.append(FactorPoint(used, None))
    return SimulatedRuns(tuple(peaks), sum(point.peak is None for point in history))


def simulate_all(policy: NextFactor, laws: Sequence[Law], *, runs: int = 60, seed: int = 0) -> list[SimulatedRuns]:
    """Runs one configuration for each law. Another seed draws other noise."""
    return [simulate(policy, law, runs=runs, seed=seed * ORACLE_DRAWS + index) for index, law in enumerate(laws)]


@dataclass(frozen=True)
class Oracle:
    """Knows the laws: lines, noise, ceilings and changes, but no run's draws. Its used share
    brings the noise-free peak to the target, or less if more than a share `risk` of the runs would run out of memory.
    """

    laws: Sequence[Law]
    runs: int

    @cached_property
    def _limits(self) -> Array:  # [laws, draws], sorted
        drawn = [law.draw(ORACLE_DRAWS, seed=ORACLE_DRAWS + index).limits for index, law in enumerate(self.laws)]
        return np.sort(drawn, axis=1)

    @cached_property
    def _shifts(self) -> Array:  # [laws, runs]
        return np.array([[law.shift(run) for run in range(self.runs)] for law in self.laws])

    @cached_property
    def _levels(self) -> list[Array]:
        """Peaks that each law's factors lead to."""
        factors = np.linspace(0.05, 1.0, ORACLE_FACTORS).tolist()
        return [np.unique([law.peak(law.used(factor)) for factor in factors]) for law in self.laws]

    def peaks(self, risk: float) -> Array:
        """Returns the noise-free peak [laws, runs] of each run."""
        index = risk * (ORACLE_DRAWS - 2)
        low = int(index)
        limits = self._limits[:, low] + (index - low) * (self._limits[:, low + 1] - self._limits[:, low])
        aims = np.minimum(TARGET, limits[:, None]) - self._shifts
        chosen = [
            levels[np.maximum(np.searchsorted(levels, own, side="right") - 1, 0)]
            for levels, own in zip(self._levels, aims, strict=True)
        ]
        return np.array(chosen) + self._shifts

    def ooms(self, peaks: Array) -> float:
        """Returns the out-of-memories of a configuration's runs that are to be expected at those peaks."""
        failing = [np.searchsorted(limits, own) for limits, own in zip(self._limits, peaks, strict=True)]
        return float(np.sum(failing)) / ORACLE_DRAWS / len(self.laws)

    def risk_of(self, ooms: float) -> float:
        """Returns the oracle's risk whose out-of-memories are nearest to a number."""
        low, high = 0.0, 0.3
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if self.ooms(self.peaks(middle)) < ooms else (low, middle)
        return high
