"""Replays graphs of very different sizes with batches as can-train, Lightning, accelerate, transformers,
torch_geometric and people choose them: how often runs end, and how well the memory is used. Those tools are installed
into an environment of their own on first use.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any, Final

from bench.peers import run_peers
from bench.results_file import environment, markdown, write_section
from bench.survival_world import Outcome

STEPS: Final = (10_000, 100)
QUICK_STEPS: Final = (500, 5)
"""Steps of the modelled part and of that on a simulated GPU."""

OWN: Final = "can-train"
"""What the names of can-train's rows begin with."""
BY_COST: Final = "can-train, as its command line does"
FASTEST: Final = 0.9
"""Goal: can-train's command line computes at least this share of the samples a second of the fastest of the sweep."""

COLUMNS: Final = (
    "tool", "graphs of a batch", "as asked", "search: passes/OOMs", "runs that end", "restarts (steps again)", "OOMs",
    "fill",
)  # fmt: skip
MODELLED_COLUMNS: Final = (*COLUMNS, "speed", "search, s")

MODELLED_NOTES: Final = """\
10,000 steps over 20,000 graphs with 60 to 12,000 nodes, half of them below 100, from a Pareto law with exponent 1.4,
and 1.5 to 10 edges a node. Modelled: a GPU of 8 GiB, of which 1 GiB is taken; 64 KiB a node and 24 KiB an edge; 2 % of
normal noise on each pass; 30 ms a pass, 1 µs a node, 0.3 µs an edge; 0.1 s more for an out-of-memory. Asked for: 512
graphs a batch. *As asked*: whether the optimizer sees that. *Search*: passes before the first step; their modelled time
is in the last column. *Runs that end*: with an error, and the step at which the first did; each is started again by
hand at once, with the batch that follows, which costs nothing here. *Restarts*: by the tool itself, from the first
step. *OOMs*: in training; can-train rescues them. *Fill*: mean peak of the passes that fit, over the capacity. *Speed*:
graphs a second of the steps that count, over those of the last row. The last two rows are the fastest of a sweep that
never ran out of memory: one size for all batches, and batches filled by the law itself, which no tool knows."""

SIMULATED_NOTES: Final = """\
100 steps each of a small graph network on a simulated GPU of 128 MiB, with real allocations and peaks, on 4,000 smaller
graphs; 768 asked for. Memory is fragmented on so small a GPU, and runs out below the capacity.

Lightning's tuner, accelerate's decorator, transformers' Trainer and torch_geometric's `DynamicBatchSampler` ran
themselves, with their defaults; the Trainer has an order of graphs of its own. The sampler's limits, and the sizes by
hand, come from 24 measured batches of 1 to 48 graphs: an average batch fills 90 % with the sampler's in the first
table, and 70 % in the second. The batch of a tool that does not keep the one asked for may be made up of several by
gradient accumulation, whose gradients `scripts/bench/equivalence` compares.

What can-train loses: its parts aim at 90 % of the capacity, and the last part of each batch holds what is left, so its
fill is below that of a sampler that knows what decides the memory; where runs may end now and then, that one is faster.
Its search runs out of memory, too. With `find_max_size` it knows no costs and splits by number: fill and speed are far
below those of parts that are cut by cost. After an out-of-memory, parts are smaller for a while."""


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md; exit status 1 if can-train misses a goal."""
    parser = argparse.ArgumentParser(prog="scripts/bench/survival", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps; leaves RESULTS.md as it is")
    options = parser.parse_args()
    found = run_peers("survival_peers", *map(str, QUICK_STEPS if options.quick else STEPS))
    modelled, swept, simulated = (read(found[part]) for part in ("modelled", "swept", "simulated"))
    tables = modelled_table(modelled, swept), simulated_table(simulated)
    text = "\n\n".join([environment(found["versions"]), tables[0], MODELLED_NOTES, tables[1], SIMULATED_NOTES])
    print(text)
    if not options.quick:
        write_section("survival", "Graphs of very different sizes (`scripts/bench/survival`)", text)
    if missed := missed_goals(modelled, swept, simulated):
        sys.exit("scripts/bench/survival: can-train misses:\n  " + "\n  ".join(missed))


def read(outcomes: Mapping[str, Any]) -> dict[str, Outcome]:
    """Converts outcomes from JSON."""
    return {name: Outcome(*fields) for name, fields in outcomes.items()}


def modelled_table(modelled: Mapping[str, Outcome], swept: Mapping[str, Outcome]) -> str:
    """Returns the table of the modelled part."""
    best = fastest(swept)
    rows = [
        [name, *cells(outcome), f"{outcome.rate / best:.1%}", f"{outcome.search_s:.1f}"]
        for name, outcome in {**modelled, **swept}.items()
    ]
    return markdown([MODELLED_COLUMNS, *rows])


def simulated_table(simulated: Mapping[str, Outcome]) -> str:
    """Returns the table of the real steps."""
    return markdown([COLUMNS, *([name, *cells(outcome)] for name, outcome in simulated.items())])


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


if __name__ == "__main__":
    main()
