"""Compares can-train's search for the largest batch with Lightning's and accelerate's, on equal cases. Those tools are
installed into an environment of their own on first use, where this module is imported, too.
"""

import math
import random
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist, mean
from typing import Any, Final, NamedTuple, NoReturn

import torch

from bench.harness import Benchmark, markdown, run_peers, say
from can_train.fit.search import find_max_size

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
        steps: The peak rises in so many steps up to the capacity; 0: evenly.
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
        self.base = self.chance.uniform(*BASES)  # equal for every tool

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
    """Returns cases that make searches go wrong, by name."""
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


BENCHMARK: Final = Benchmark(__name__, packages=("Python", "torch"), quick="can-train alone")
READINGS: Final = "can-train, with readings"
BENT_READINGS: Final = "can-train, readings that bend up by 30 %"
NOISY_READINGS: Final = "can-train, readings with 1.5 % noise"
NO_READINGS: Final = "can-train, without readings"
ONCE: Final = ", `confirm=1`"
"""Suffix of a name: the first size is taken, which was the only behaviour before scatter was recognised."""
BINARY_SEARCH: Final = "Lightning, binsearch"

LEAST_SECONDS: Final = 0.1
"""Shorter times are shown as `< 0.1`."""

SHARE: Final = 0.97
NOISY_SHARE: Final = 0.93
"""Goal: at least this mean share of the largest batch; with noisy readings, which look as if the peaks scattered, 5 %
less, since a search leaves that much room.
"""
TRIALS: Final = 4.5
OOMS: Final = 0.5
"""Goal, with readings: at most so many trials and out-of-memory errors on average."""
CLOSE: Final = 0.07
"""Relative distance at which a search without readings ends."""
BINARY_TRIALS: Final = 15.2
BINARY_OOMS: Final = 3.6
"""Goal, without readings: fewer than Lightning's binary search needed when the goal was set, and than it needs now."""

MOSTLY_FAIL: Final = 1 / 24
"""Goal: at most this share of sizes fail in more than half of later runs, as with Lightning's margin of 5 %."""
KINDS_TRIALS: Final = 7.5
"""Goal: at most so many trials on average with readings, over the eight kinds of laws: three of the first table, five
that scatter. Half a trial of it goes on to the end of stairs: 2.5 more where peaks rise in 32 steps, 6 % more samples.
"""
MORE_TRIALS: Final = 2
"""Goal: trials that do not scatter cost at most so many more than with `confirm=1`."""
ALLOWED: Final = (0.5, 0.05)
"""Shares of later runs that may fail; the returned size is compared with the largest size for each."""

COLUMNS: Final = (
    "tool", "mean share", "worst share", "trials", "OOMs", "over the limit", "not seen to fit", "hangs", "seconds",
)  # fmt: skip


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md; exit status 1 if can-train misses a goal."""
    options = BENCHMARK.parser().parse_args()
    peers: dict[str, Results] = {}
    versions: Mapping[str, str] | None = None
    if not options.quick:
        answer = run_peers("finder_peers")
        versions = answer["versions"]
        peers = {name: read_results(*fields) for name, fields in answer["results"].items()}
    say("can-train")
    measured = measure_own() | peers
    spread = markdown([COLUMNS, *([name, *summary(results)] for name, results in measured.items())])
    BENCHMARK.finish(options, missed_goals(measured), versions=versions, spread=spread, edges=edge_table(measured),
                     scattering=scattering_table(measured), kinds_trials=f"{kinds_trials(measured):.1f}",
                     bits=f"{blind_bits():.1f}")  # fmt: skip


def kinds_trials(measured: Mapping[str, Results]) -> float:
    """Returns the mean number of trials with readings over the kinds of laws, each with equal weight."""
    kinds = [means(measured[name])[0] for name in (READINGS, BENT_READINGS, NOISY_READINGS)]
    kinds += [mean(outcome.trials for outcome in outcomes) for outcomes in measured[READINGS].scattering.values()]
    return mean(kinds)


def blind_bits() -> float:
    """Returns the least mean number of trials that tell only whether a size fits, for the limits of the first table and
    a size within CLOSE of each: the answers are that many bits. Limits are even on a logarithmic scale, and small ones
    are told apart one by one.
    """
    sizes = [1]
    while sizes[-1] < LARGEST_LIMIT:
        sizes.append(max(sizes[-1] + 1, int(sizes[-1] * (1 + CLOSE))))
    total = math.log(sizes[-1] + 1)
    shares = [
        math.log((after or sizes[-1] + 1) / size) / total for size, after in zip(sizes, [*sizes[1:], 0], strict=True)
    ]
    return -sum(share * math.log2(share) for share in shares)


def measure_own() -> dict[str, Results]:
    """Runs can-train's search on the cases, with readings of several laws and without."""
    with_readings = partial(search, capacity=CAPACITY)
    return {
        READINGS: measure(with_readings, Law()),
        BENT_READINGS: measure(with_readings, Law(bend=0.3)),
        NOISY_READINGS: measure(with_readings, Law(noise=0.015)),
        NO_READINGS: measure(partial(search, capacity=None), Law()),
        READINGS + ONCE: measure(partial(with_readings, confirm=1), Law()),
        NO_READINGS + ONCE: measure(partial(search, capacity=None, confirm=1), Law()),
    }


def search(trial: Trial, case: Case, *, capacity: float | None, confirm: int | None = None) -> int:
    """Calls can-train's search through its public function."""
    options = {} if case.start is None else {"start": case.start}
    return find_max_size(trial, upper=case.data_set, capacity=capacity, confirm=confirm, **options).size


def read_results(seconds: float, spread: list[Any], edges: list[Any], scattering: dict[str, list[Any]]) -> Results:
    """Converts results from JSON."""

    def read(outcomes: list[Any]) -> list[Outcome]:
        return [Outcome(*fields) for fields in outcomes]

    return Results(seconds, read(spread), read(edges), {law: read(outcomes) for law, outcomes in scattering.items()})


# Tables


def summary(results: Results) -> list[str]:
    """Returns the cells of a tool's row, without its name."""
    pairs = list(zip(spread_cases(), results.spread, strict=True))
    shares = [share(*pair) for pair in pairs]
    return [
        f"{mean(shares):.3f}",
        f"{min(shares):.3f}",
        f"{mean(outcome.trials for outcome in results.spread):.1f}",
        f"{mean(outcome.ooms for outcome in results.spread):.1f}",
        str(sum(over(*pair) for pair in pairs)),
        str(sum(unseen(*pair) for pair in pairs)),
        str(sum(outcome.hung for outcome in results.spread)),
        f"{results.seconds:.1f}" if results.seconds >= LEAST_SECONDS else f"< {LEAST_SECONDS}",
    ]


def edge_table(measured: Mapping[str, Results]) -> str:
    """Returns the table of each tool's outcome for each edge case."""
    names = [name for name in measured if name not in (BENT_READINGS, NOISY_READINGS) and not name.endswith(ONCE)]
    rows = [
        [title, *(edge_cell(case, measured[name].edges[index]) for name in names)]
        for index, (title, case) in enumerate(edge_cases().items())
    ]
    return markdown([["edge case", *names], *rows])


def edge_cell(case: Case, outcome: Outcome) -> str:
    """Returns the cell of an outcome."""
    counts = f"({outcome.trials}/{outcome.ooms})"
    if outcome.hung:
        return "**hangs**"
    if outcome.size is None:
        return f"{outcome.error.partition(':')[0]} {counts}"
    if over(case, outcome):
        return f"**{outcome.size:,} does not fit** {counts}"
    return f"{outcome.size:,} {counts}"


def scattering_table(measured: Mapping[str, Results]) -> str:
    """Returns the table of how often the returned sizes fail later, for each law and tool."""
    names = [name for name in measured if name not in (BENT_READINGS, NOISY_READINGS)]
    head = ("peaks", "tool", "mostly fail", "half", "1 in 20", "trials/OOMs")
    rows = [[law, name, *scattering_cells(law, measured[name].scattering[law])] for law in SCATTERING for name in names]
    return markdown([head, *rows])


def scattering_cells(law: str, outcomes: list[Outcome]) -> list[str]:
    """Returns the cells of a tool's row for a law, without their names."""
    pairs = list(zip(scattering_cases(), outcomes, strict=True))
    shares = (mean(batch(*pair) / largest(law, pair[0], allowed) for pair in pairs) for allowed in ALLOWED)
    trials, ooms = (mean(getattr(outcome, name) for outcome in outcomes) for name in ("trials", "ooms"))
    return [f"{mostly_failing(law, outcomes):.1%}", *(f"{share:.3f}" for share in shares), f"{trials:.1f}/{ooms:.1f}"]


def mostly_failing(law: str, outcomes: list[Outcome]) -> float:
    """Returns the share of the returned sizes that fail in more than half of later runs."""
    pairs = zip(scattering_cases(), outcomes, strict=True)
    return mean(failing_share(law, case, batch(case, outcome)) > 1 / 2 for case, outcome in pairs)


def failing_share(law: str, case: Case, size: int) -> float:
    """Returns the share of runs of a size that run out of memory."""
    return SCATTERING[law].failing_share(Trial(case, SCATTERING[law]).base, size, case.limit)


def largest(law: str, case: Case, allowed: float) -> int:
    """Returns the largest size that fails in at most an allowed share of runs."""
    sizes = range(1, case.limit + 1)
    return max(bisect_right(sizes, allowed, key=lambda size: failing_share(law, case, size)), 1)


# Goals


def batch(case: Case, outcome: Outcome) -> int:
    """Returns the batch of a size, which has at most the samples of the data set."""
    return min(outcome.size or 0, case.data_set)


def over(case: Case, outcome: Outcome) -> bool:
    """Whether the returned batch does not fit."""
    return batch(case, outcome) > case.limit


def unseen(case: Case, outcome: Outcome) -> bool:
    """Whether the returned batch is larger than every batch that was tried and fitted."""
    return batch(case, outcome) > outcome.fitted


def share(case: Case, outcome: Outcome) -> float:
    """Returns the returned batch over the largest that fits."""
    return 0.0 if over(case, outcome) else batch(case, outcome) / case.largest


def missed_goals(measured: Mapping[str, Results]) -> list[str]:
    """Returns the goals that can-train missed."""
    goals: list[tuple[str, bool]] = []
    for name in (READINGS, BENT_READINGS, NOISY_READINGS, NO_READINGS):
        cases = [*spread_cases(), *edge_cases().values()]
        pairs = list(zip(cases, measured[name].spread + measured[name].edges, strict=True))
        least = NOISY_SHARE if name == NOISY_READINGS else SHARE
        goals += [
            (f"{name}: a batch that does not fit, or was not seen to", not any(over(*p) or unseen(*p) for p in pairs)),
            (f"{name}: a search that hangs or fails", all(outcome.size is not None for _, outcome in pairs)),
            (f"{name}: a mean share of {least}", mean(share(*pair) for pair in pairs if pair[0].largest) >= least),
        ]
    for name in (READINGS, BENT_READINGS):
        # Not with noisy readings, which cannot tell a size that is just too large from one that fits.
        trials, ooms = means(measured[name])
        goals.append((f"{name}: at most {TRIALS} trials and {OOMS} OOMs", trials <= TRIALS and ooms <= OOMS))
    for name in (READINGS, NO_READINGS):
        outcomes = measured[name].scattering
        seldom = all(mostly_failing(law, outcomes[law]) <= MOSTLY_FAIL for law in SCATTERING)
        goals.append((f"{name}: sizes that mostly fail", seldom))
        more = means(measured[name])[0] - means(measured[name + ONCE])[0]
        goals.append((f"{name}: at most {MORE_TRIALS} more trials than with confirm=1", more <= MORE_TRIALS))
    goals.append((f"at most {KINDS_TRIALS} trials over the kinds of laws", kinds_trials(measured) <= KINDS_TRIALS))
    trials, ooms = means(measured[NO_READINGS])
    binary = [(BINARY_TRIALS, BINARY_OOMS), *(means(measured[name]) for name in measured if name == BINARY_SEARCH)]
    binary_trials, binary_ooms = map(min, zip(*binary, strict=True))
    goals.append((f"{NO_READINGS}: fewer trials than {BINARY_SEARCH}", trials < binary_trials))
    goals.append((f"{NO_READINGS}: fewer OOMs than {BINARY_SEARCH}", ooms < binary_ooms))
    return [goal for goal, reached in goals if not reached]


def means(results: Results) -> tuple[float, float]:
    """Returns the mean numbers of trials and of out-of-memory errors over the spread limits."""
    return mean(outcome.trials for outcome in results.spread), mean(outcome.ooms for outcome in results.spread)
