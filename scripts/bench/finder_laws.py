"""What `scripts/bench/finder` asks of every search for a batch size: limits, laws of memory, and trials that obey them
and keep count. The peers' environment imports this too, so it needs nothing but torch.
"""

import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn

import torch

LIMITS: Final = 284
LARGEST_LIMIT: Final = 20_000

DATA_SET: Final = 2**20
"""Samples of the data set, where it is not to matter: more than any search asks for."""

MAX_TRIALS: Final = 300
"""Trials after which a search counts as hanging. The longest that ends needs 70: from 8192 to 0 by tenths."""

PATIENCE_S: Final = 60
"""Seconds after which it does so too."""

CAPACITY: Final = 1.0
"""Unit of the readings."""

BASES: Final = (0.05, 0.4)
"""Least and largest share of the capacity that is taken before the first sample."""


class Case(NamedTuple):
    """One search to be done.

    Attributes:
        limit: Largest batch that fits.
        data_set: Samples that there are; a larger batch is one of them all.
        start: First size to try; None for what the tool has been set to.
    """

    limit: int
    data_set: int = DATA_SET
    start: int | None = None

    @property
    def largest(self) -> int:
        """The right answer."""
        return min(self.limit, self.data_set)


class Outcome(NamedTuple):
    """What a search did.

    Attributes:
        size: Batch that it returned; None where it ended with an error or not at all.
        trials: Batches tried.
        ooms: Trials that ran out of memory.
        fitted: Largest batch that was tried and fitted.
        error: What it said instead of returning a size.
        hung: Whether it had to be stopped.
    """

    size: int | None
    trials: int
    ooms: int
    fitted: int
    error: str = ""
    hung: bool = False


class Results(NamedTuple):
    """What a tool did with the spread limits, in their order, how long that took, and with the edge cases."""

    seconds: float
    spread: list[Outcome]
    edges: list[Outcome]


@dataclass(frozen=True)
class Law:
    """How the peak grows with the batch: a straight line above a base.

    Attributes:
        bend: Share of what grows that does so with the batch's square.
        noise: Relative standard deviation of a reading.
    """

    bend: float = 0.0
    noise: float = 0.0


@dataclass
class Trial:
    """Runs a batch: fails above the case's limit, and otherwise returns the peak. Counts."""

    case: Case
    law: Law
    trials: int = 0
    ooms: int = 0
    fitted: int = 0
    chance: random.Random = field(init=False)
    base: float = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.case.limit)  # every tool meets the same base
        self.base = self.chance.uniform(*BASES)

    def __call__(self, size: int) -> float:
        """Runs a batch of `size`, or of the whole data set where that is smaller.

        Raises:
            torch.OutOfMemoryError: It does not fit.
            HangError: There have been too many.
        """
        size = min(size, self.case.data_set)
        self.trials += 1
        if self.trials > MAX_TRIALS:
            raise HangError
        if size > self.case.limit:
            self.ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self.fitted = max(self.fitted, size)
        share = size / (self.case.limit + 0.5)  # the limit just fits, and one more just does not
        peak = self.base + (1 - self.base) * ((1 - self.law.bend) * share + self.law.bend * share**2)
        return min(CAPACITY, peak * (1 + self.chance.gauss(0, self.law.noise)))


class HangError(BaseException):
    """Ends a search that does not end by itself. No `Exception`, so that no tool takes it for an answer."""


Search = Callable[[Trial, Case], int]
"""One tool, set up in one way."""


def spread_cases() -> list[Case]:
    """Makes `LIMITS` different limits up to the largest, spread evenly on a logarithmic scale."""
    points = LIMITS
    while len(limits := sorted({round(LARGEST_LIMIT ** (i / (points - 1))) for i in range(points)})) < LIMITS:
        points += 1
    return [Case(limit) for limit in limits]


def edge_cases() -> dict[str, Case]:
    """Makes the limits at which searches go wrong, by what is odd about them."""
    limits = (0, 1, 4_097, 6_000, 8_191, 8_192, 12_000, 50_000)
    return {
        **{f"limit {limit:,}": Case(limit) for limit in limits},
        "limit 5,000, data set of 777": Case(5_000, data_set=777),
        "limit 80, data set of 100": Case(80, data_set=100),
        "limit 100, start at 4,096": Case(100, start=4_096),
    }


def measure(search: Search, law: Law) -> Results:
    """Puts every case to a tool.

    Raises:
        RuntimeError: It failed at a limit that is not odd, so it is not set up as it should be.
    """
    begin = time.perf_counter()
    spread = outcomes(search, spread_cases(), law)
    seconds = time.perf_counter() - begin
    errors = [outcome.error for outcome in spread if outcome.error]
    if errors:
        raise RuntimeError(f"A search failed {len(errors)} times, first with {errors[0]}")
    return Results(seconds, spread, outcomes(search, edge_cases().values(), law))


def outcomes(search: Search, cases: Iterable[Case], law: Law) -> list[Outcome]:
    """Puts cases to a tool, one by one."""
    signal.signal(signal.SIGALRM, _stop)
    return [outcome(search, case, law) for case in cases]


def outcome(search: Search, case: Case, law: Law) -> Outcome:
    """Puts one case to a tool, and stops it where it does not end."""
    trial = Trial(case, law)
    size, error, hung = None, "", False
    signal.alarm(PATIENCE_S)
    try:
        size = search(trial, case)
    except HangError:
        hung = True
    except Exception as raised:  # noqa: BLE001  (whatever a tool raises is its answer)
        error = f"{type(raised).__name__}: {raised}"
    finally:
        signal.alarm(0)
    return Outcome(size, trial.trials, trial.ooms, trial.fitted, error, hung)


def _stop(*_: object) -> NoReturn:
    raise HangError
