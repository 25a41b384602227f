"""Compares can-train's search for the largest batch with Lightning's and accelerate's, on the same cases. Lightning
and accelerate are installed into an environment of their own on first use.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from statistics import mean
from typing import Any, Final

from bench.finder_laws import (
    CAPACITY,
    LARGEST_LIMIT,  # noqa: F401 - the section names it
    LIMITS,  # noqa: F401
    SCATTERING,
    Case,
    Law,
    Outcome,
    Results,
    Trial,
    edge_cases,
    measure,
    scattering_cases,
    spread_cases,
)
from bench.harness import Benchmark, markdown, run_peers, say
from can_train.fit.search import find_max_size

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
TRIALS: Final = 6.0
OOMS: Final = 0.5
"""Goal, with readings: at most so many trials and out-of-memory errors on average."""
BINARY_TRIALS: Final = 15.2
BINARY_OOMS: Final = 3.6
"""Goal, without readings: fewer than Lightning's binary search needed when the goal was set, and than it needs now."""

MOSTLY_FAIL: Final = 1 / 24
"""Goal: at most this share of sizes fail in more than half of later runs, as with Lightning's margin of 5 %."""
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
    peers, versions = {}, None
    if not options.quick:
        answer = run_peers("finder_peers")
        versions = answer["versions"]
        peers = {name: read_results(*fields) for name, fields in answer["results"].items()}
    say("can-train")
    measured = measure_own() | peers
    spread = markdown([COLUMNS, *([name, *summary(results)] for name, results in measured.items())])
    BENCHMARK.finish(options, missed_goals(measured), versions=versions, spread=spread, edges=edge_table(measured),
                     scattering=scattering_table(measured))  # fmt: skip


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
    trials, ooms = means(measured[NO_READINGS])
    binary = [(BINARY_TRIALS, BINARY_OOMS), *(means(measured[name]) for name in measured if name == BINARY_SEARCH)]
    binary_trials, binary_ooms = map(min, zip(*binary, strict=True))
    goals.append((f"{NO_READINGS}: fewer trials than {BINARY_SEARCH}", trials < binary_trials))
    goals.append((f"{NO_READINGS}: fewer OOMs than {BINARY_SEARCH}", ooms < binary_ooms))
    return [goal for goal, reached in goals if not reached]


def means(results: Results) -> tuple[float, float]:
    """Returns the mean numbers of trials and of out-of-memory errors over the spread limits."""
    return mean(outcome.trials for outcome in results.spread), mean(outcome.ooms for outcome in results.spread)
