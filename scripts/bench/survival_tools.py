"""How somebody chooses batches by hand, and the sweep that the tools of `scripts/bench/survival` are compared with."""

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from bench.survival_world import (
    BASE_BYTES,
    CAPACITY_BYTES,
    EDGE_BYTES,
    NODE_BYTES,
    SEED,
    Choice,
    Graphs,
    Machine,
    ModelledMachine,
    Outcome,
    Rows,
    measure,
    replay,
    shuffled,
)

MEASURED_BATCHES: Final = 24
LARGEST_MEASURED: Final = 48
"""Batches that somebody who chooses a size by hand looks at, and the graphs of the largest."""
FIXED_SHARES: Final = tuple(np.arange(0.10, 1.01, 0.05).round(2).tolist())
"""Shares of that size which the sweep tries."""
SHARES: Final = tuple(np.arange(0.70, 1.0, 0.01).round(2).tolist())
"""Shares of the capacity that the sweep fills batches to."""


class ByHand(NamedTuple):
    """What was read of a few measured batches."""

    room_bytes: float  # What the share of the capacity leaves beside the base
    node_bytes: float
    edge_bytes: float

    def graphs(self, graphs: Graphs) -> int:
        """Returns how many average graphs fit."""
        each = self.node_bytes * graphs.nodes.mean() + self.edge_bytes * graphs.edges.mean()
        return int(self.room_bytes / each)

    def most(self, graphs: Graphs, mode: str) -> int:
        """Returns the nodes, or the edges, of the average graphs that fit."""
        return int(self.graphs(graphs) * (graphs.nodes if mode == "node" else graphs.edges).mean())


def look(machine: Machine, share: float) -> ByHand:
    """Measures small batches of random graphs, and fits a line to their peaks, to fill a share of the capacity."""
    rng = np.random.default_rng(SEED)
    sizes = np.linspace(1, LARGEST_MEASURED, MEASURED_BATCHES).astype(int)
    batches = [rng.choice(len(machine.graphs.nodes), size, replace=False) for size in sizes]
    rows = [[1.0, *machine.graphs.counts[batch].sum(axis=0)] for batch in batches]
    base, node_bytes, edge_bytes = np.linalg.lstsq(rows, [machine.compute(batch) for batch in batches])[0]
    return ByHand(share * machine.capacity_bytes - base, node_bytes, edge_bytes)


def fixed(machine: Machine, *, share: float) -> Choice:
    """Chooses the number of average graphs that fill a share of the capacity."""
    return of_size(machine, size=look(machine, share).graphs(machine.graphs))


def of_size(machine: Machine, *, size: int) -> Choice:
    """Trains with as many graphs in every batch."""
    return Choice(f"{size} graphs", partial(replay, machine, shuffled(machine.graphs, size)))


# The sweep


def sweep(graphs: Graphs, steps: int) -> dict[str, Outcome]:
    """Returns the fastest batches of those that never run out of memory: of a fixed size, and filled by the law itself,
    which no tool knows.
    """
    largest = look(ModelledMachine(graphs), 1.0).graphs(graphs)
    sizes = {int(largest * share) for share in FIXED_SHARES}
    ways = {
        "the best fixed size": [partial(of_size, size=size) for size in sorted(sizes)],
        "the best fill by the law": [partial(filled, share=share) for share in SHARES],
    }
    best = {}
    for name, choices in ways.items():
        outcomes = [measure(ModelledMachine(graphs), choose, steps) for choose in choices]
        best[name] = max((outcome for outcome in outcomes if not outcome.ooms), key=lambda outcome: outcome.rate)
    return best


def filled(machine: Machine, *, share: float) -> Choice:
    """Fills each batch up to a share of the capacity."""
    graphs = machine.graphs
    costs = NODE_BYTES * graphs.nodes + EDGE_BYTES * graphs.edges
    batches = next_fit(shuffled(graphs, len(costs)), costs, share * CAPACITY_BYTES - BASE_BYTES)
    return Choice(f"{share:.0%} of the capacity", partial(replay, machine, batches))


def next_fit(epochs: Iterator[Rows], costs: np.ndarray, limit: float) -> Iterator[Rows]:
    """Yields batches of the graphs that follow until the next one would cost more than the limit."""
    for order in epochs:
        sums, start = np.cumsum(costs[order]), 0
        while start < len(order):
            spent = sums[start - 1] if start else 0
            stop = max(int(np.searchsorted(sums, spent + limit, side="right")), start + 1)
            yield order[start:stop]
            start = stop
