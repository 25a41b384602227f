"""Replays graphs of very different sizes with batches as can-train, Lightning, accelerate, transformers,
torch_geometric and people choose them: how often runs end, and how well the memory is used. Those tools are installed
into an environment of their own on first use.
"""

from collections.abc import Mapping
from typing import Final

from bench.harness import Benchmark, markdown, run_peers
from bench.survival_world import Outcome

BENCHMARK: Final = Benchmark(__name__, quick="fewer steps")
STEPS: Final = (10_000, 100)
QUICK_STEPS: Final = (500, 5)
"""Steps of the modelled part and of the part on a simulated GPU."""

OWN: Final = "can-train"
"""Prefix of can-train's rows."""
BY_COST: Final = "can-train, as its command line does"
FASTEST: Final = 0.9
"""Goal: can-train's command line computes at least this share of the samples a second of the fastest of the sweep."""

COLUMNS: Final = (
    "tool", "graphs of a batch", "as asked", "search: passes/OOMs", "runs that end", "restarts (steps again)", "OOMs",
    "fill",
)  # fmt: skip
MODELLED_COLUMNS: Final = (*COLUMNS, "speed", "search, s")


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md; exit status 1 if can-train misses a goal."""
    options = BENCHMARK.parser().parse_args()
    answer = run_peers("survival_peers", *map(str, QUICK_STEPS if options.quick else STEPS))
    modelled, swept, simulated = ({name: Outcome(*fields) for name, fields in answer[part].items()}
                                  for part in ("modelled", "swept", "simulated"))  # fmt: skip
    table = markdown([COLUMNS, *([name, *cells(outcome)] for name, outcome in simulated.items())])
    BENCHMARK.finish(options, missed_goals(modelled, swept, simulated), versions=answer["versions"],
                     modelled=modelled_table(modelled, swept), simulated=table)  # fmt: skip


def modelled_table(modelled: Mapping[str, Outcome], swept: Mapping[str, Outcome]) -> str:
    """Returns the table of the modelled part."""
    best = fastest(swept)
    rows = [
        [name, *cells(outcome), f"{outcome.rate / best:.1%}", f"{outcome.search_s:.1f}"]
        for name, outcome in {**modelled, **swept}.items()
    ]
    return markdown([MODELLED_COLUMNS, *rows])


def cells(outcome: Outcome) -> list[str]:
    """Returns the cells that both tables have of an outcome."""
    ends = f"{outcome.ends:,} (step {outcome.first_end:,})" if outcome.ends else "0"
    restarts = f"{outcome.restarts} ({outcome.repeated:,})" if outcome.restarts else "0"
    return [
        outcome.size,
        "yes" if outcome.keeps_batch else "no",
        f"{outcome.trials}/{outcome.trial_ooms}",
        ends,
        restarts,
        f"{outcome.ooms:,}",
        f"{outcome.fill:.1%}",
    ]


def fastest(swept: Mapping[str, Outcome]) -> float:
    """Returns the graphs a second of the fastest batches of the sweep."""
    return max(outcome.rate for outcome in swept.values())


def missed_goals(
    modelled: Mapping[str, Outcome], swept: Mapping[str, Outcome], simulated: Mapping[str, Outcome]
) -> list[str]:
    """Returns the goals that can-train misses: no run of it ends or restarts, and it is fast."""
    missed = []
    for name, outcome in [*modelled.items(), *simulated.items()]:
        if name.startswith(OWN) and (outcome.ends or outcome.restarts or not outcome.keeps_batch):
            missed.append(f"{name}: {outcome.ends} runs end, {outcome.restarts} restarts")
    share = modelled[BY_COST].rate / fastest(swept)
    if share < FASTEST:
        missed.append(f"{BY_COST}: {share:.1%} of the fastest, less than {FASTEST:.0%}")
    return missed
