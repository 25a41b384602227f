"""The cases of `scripts/bench/finder`, and the trials that count the calls of a search. This module is also imported in
the environment of the other tools, so it needs nothing but torch.
"""

import math
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final, NamedTuple, NoReturn

import torch

LIMITS: Final = 284
LARGEST_LIMIT: Final = 20_000

DATA_SET: Final = 2**20
"""Default size of the data set: more samples than any search asks for."""

MAX_TRIALS: Final = 300
"""After this many trials a search counts as hanging. The longest that ends needs 70: from 8192 to 0 by tenths."""

PATIENCE_S: Final = 60
"""After this time a search counts as hanging, too."""

CAPACITY: Final = 1.0
"""The capacity, in the unit of the measured peaks."""

BASES: Final = (0.05, 0.4)
"""Range of the memory that is taken before the first sample, as a share of the capacity."""


class Case(NamedTuple):
    """One search.

    Attributes:
        limit: The largest batch that fits.
        data_set: The number of samples. A larger batch contains all of them.
        start: The first size to try; None for the tool's setting.
    """

    limit: int
    data_set: int = DATA_SET
    start: int | None = None

    @property
    def largest(self) -> int:
        """The correct result."""
        return min(self.limit, self.data_set)


class Outcome(NamedTuple):
    """The outcome of a search.

    Attributes:
        size: The batch size that it returned; None if it failed or hung.
        trials: Number of batches tried.
        ooms: Number of trials that ran out of memory.
        fitted: The largest batch that was tried and fitted.
        error: The error that it raised.
        hung: Whether it had to be stopped.
    """

    size: int | None
    trials: int
    ooms: int
    fitted: int
    error: str = ""
    hung: bool = False


class Results(NamedTuple):
    """A tool's outcomes for the spread cases and for the edge cases, in order, the seconds of the spread cases, and its
    outcomes for the scattering cases under each of `SCATTERING`.
    """

    seconds: float
    spread: list[Outcome]
    edges: list[Outcome]
    scattering: dict[str, list[Outcome]]


@dataclass(frozen=True)
class Law:
    """How peak memory grows with the batch: a constant, and a linear and a quadratic term.

    Attributes:
        bend: Share of the quadratic term in the growth.
        noise: Relative standard deviation of a measured peak.
        scatter: Relative standard deviation of the peak itself, so that a size may fit once and fail later.
        steps: Steps up to the capacity in which the peak rises; 0: evenly.
    """

    bend: float = 0.0
    noise: float = 0.0
    scatter: float = 0.0
    steps: int = 0

    def peak(self, base: float, size: int, limit: int) -> float:
        """Returns the mean peak of a size, as a share of the capacity."""
        share = size / (limit + 0.5)  # the limit just fits, and one more just does not
        peak = base + (1 - base) * ((1 - self.bend) * share + self.bend * share**2)
        return math.ceil(peak * self.steps) / self.steps if self.steps else peak

    def failing_share(self, base: float, size: int, limit: int) -> float:
        """Returns the share of runs of a size that run out of memory."""
        peak = self.peak(base, size, limit)
        if not self.scatter:
            return float(peak > CAPACITY)
        return 1 - NormalDist().cdf((CAPACITY / peak - 1) / self.scatter)


SCATTERING: Final = {
    "2 %": Law(scatter=0.02),
    "5 %": Law(scatter=0.05),
    "8 %": Law(scatter=0.08),
    "32 steps": Law(steps=32),
    "32 steps, 5 %": Law(scatter=0.05, steps=32),
}
SMALLEST_SCATTERING: Final = 20
"""Smallest limit of the scattering cases: in smaller ones, 5 % are less than a sample."""


@dataclass
class Trial:
    """Simulates running a batch: raises above the case's limit, otherwise returns the peak. Counts its calls."""

    case: Case
    law: Law
    trials: int = 0
    ooms: int = 0
    fitted: int = 0
    chance: random.Random = field(init=False)
    base: float = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.case.limit)
        self.base = self.chance.uniform(*BASES)  # the same for every tool

    def __call__(self, size: int) -> float:
        """Runs a batch of `size`, or of the whole data set if that is smaller.

        Raises:
            torch.OutOfMemoryError: The batch does not fit.
            HangError: There have been too many trials.
        """
        size = min(size, self.case.data_set)
        self.trials += 1
        if self.trials > MAX_TRIALS:
            raise HangError
        peak = self.law.peak(self.base, size, self.case.limit)
        peak *= 1 + (self.chance.gauss(0, self.law.scatter) if self.law.scatter else 0)
        if peak > CAPACITY:
            self.ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self.fitted = max(self.fitted, size)
        return min(CAPACITY, peak * (1 + self.chance.gauss(0, self.law.noise)))


class HangError(BaseException):
    """Ends a search that hangs. It is not an `Exception`, so that no tool catches it."""


Search = Callable[[Trial, Case], int]
"""A tool with its settings."""


def spread_cases() -> list[Case]:
    """Returns LIMITS different limits up to the largest, spread evenly on a logarithmic scale."""
    points = LIMITS
    while len(limits := sorted({round(LARGEST_LIMIT ** (i / (points - 1))) for i in range(points)})) < LIMITS:
        points += 1
    return [Case(limit) for limit in limits]


def scattering_cases() -> list[Case]:
    """Returns the spread cases whose limit is so large that 5 % of it are a sample or more."""
    return [case for case in spread_cases() if case.limit >= SMALLEST_SCATTERING]


def edge_cases() -> dict[str, Case]:
    """Returns cases in which searches go wrong, by name."""
    limits = (0, 1, 4_097, 6_000, 8_191, 8_192, 12_000, 50_000)
    return {
        **{f"limit {limit:,}": Case(limit) for limit in limits},
        "limit 5,000, data set of 777": Case(5_000, data_set=777),
        "limit 80, data set of 100": Case(80, data_set=100),
        "limit 100, start at 4,096": Case(100, start=4_096),
    }


def measure(search: Search, law: Law) -> Results:
    """Runs a tool on every case.

    Raises:
        RuntimeError: It failed on an ordinary limit, so its settings are wrong.
    """
    begin = time.perf_counter()
    spread = outcomes(search, spread_cases(), law)
    seconds = time.perf_counter() - begin
    errors = [outcome.error for outcome in spread if outcome.error]
    if errors:
        raise RuntimeError(f"A search failed {len(errors)} times, first with {errors[0]}")
    scattering = {name: outcomes(search, scattering_cases(), scattered) for name, scattered in SCATTERING.items()}
    return Results(seconds, spread, outcomes(search, edge_cases().values(), law), scattering)


def outcomes(search: Search, cases: Iterable[Case], law: Law) -> list[Outcome]:
    """Runs a tool on cases, one by one."""
    signal.signal(signal.SIGALRM, _stop)
    return [outcome(search, case, law) for case in cases]


def outcome(search: Search, case: Case, law: Law) -> Outcome:
    """Runs a tool on a case, and stops it if it hangs."""
    trial = Trial(case, law)
    size, error, hung = None, "", False
    signal.alarm(PATIENCE_S)
    try:
        size = search(trial, case)
    except HangError:
        hung = True
    except Exception as raised:  # noqa: BLE001 - any error is a tool's outcome
        error = f"{type(raised).__name__}: {raised}"
    finally:
        signal.alarm(0)
    return Outcome(size, trial.trials, trial.ooms, trial.fitted, error, hung)


def _stop(*_: object) -> NoReturn:
    raise HangError
