"""Batches as can-train and as a person choose them, and the sweep that `scripts/bench/survival` compares tools with."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    Replay,
    Rows,
    SimulatedMachine,
    measure,
    replay,
    shuffled,
)
from can_train import Feature, MicroBatcher, find_max_size, predict_peak
from can_train.errors import DoesNotFitError
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.explore import ProbeBounds, fit_by_probes
from can_train.fit.factor_rule import PROVISIONAL, Aim, FactorRule
from can_train.fit.packing import BatchCosts, SplitRules
from can_train.fit.plan import costliest
from can_train.fit.search import Peak, SearchBounds, find_phase_limit
from can_train.memory.meters import Meter

AIM: Final = 0.9
"""can-train's default of `factor.target`."""


class ModelledMeter(Meter):
    """The device of a modelled machine, which nobody else uses."""

    device = torch.device("cpu")
    name = key = "modelled"

    def __init__(self, capacity_bytes: int) -> None:
        self.total_bytes = self.capacity_bytes = capacity_bytes

    def reset_peak(self) -> None:
        """The machine counts."""

    def peak_bytes(self) -> int:
        """The machine counts."""
        return 0

    def free_bytes(self) -> int:
        """Returns the capacity."""
        return self.capacity_bytes

    def release(self, *, collect: bool = True) -> None:
        """Nothing is held."""


def by_plan(machine: Machine, *, logical: int) -> Choice:
    """Probes and searches as the command line does in a configuration's first run, and cuts batches by cost."""
    features, counts = (Feature("nodes"), Feature("edges")), machine.graphs.counts
    within = ProbeBounds(capacity_bytes=machine.capacity_bytes)
    fit = fit_by_probes(lambda rows: int(machine.compute(rows)), features, counts, within)
    order = BatchCosts.priced(fit.model, counts)
    upper = costliest(order, logical) / PROVISIONAL + float(order.each().max())
    bounds = SearchBounds(upper=upper, capacity_bytes=machine.capacity_bytes)
    limit = find_phase_limit(fit, lambda rows: Peak(int(machine.compute(rows)), 0), order, bounds)
    limits = DeviceLimits(
        device_key="modelled",
        capacity_bytes=machine.capacity_bytes,
        training=limit,
        evaluation=limit,
        optimizer_peak_bytes=0,
    )
    factor = FactorRule(decided=None, aim=Aim(AIM)).decide(limits).value
    rules = SplitRules(safe_limit=factor * limit.tuned_limit, tuned_limit=limit.tuned_limit)
    batcher = MicroBatcher(machine.model, meter=ModelledMeter(machine.capacity_bytes), limits=limits, rules=rules)
    return own_choice(machine, batcher, logical, lambda rows: BatchCosts.priced(fit.model, counts[rows]))


def by_prediction(machine: Machine, *, logical: int) -> Choice:
    """Predicts the peak on the CPU, and cuts batches by cost, as in docs/python.md."""
    assert isinstance(machine, SimulatedMachine)
    counts = machine.graphs.counts
    with machine.meter.host():
        predicted = predict_peak(machine.model, counts, loss_of=machine.bare_loss)
    batcher = MicroBatcher(machine.model, meter=machine.meter, limits=predicted)
    return own_choice(machine, batcher, logical, lambda rows: counts[rows])


def by_search(machine: Machine, *, logical: int) -> Choice:
    """Searches for the number of graphs that fit, and rescues batches that do not fit."""
    rng = np.random.default_rng(SEED)
    search = find_max_size(
        lambda size: machine.compute(rng.permutation(len(machine.graphs.nodes))[:size]),
        upper=logical,
        capacity=machine.capacity_bytes,
    )
    meter = machine.meter if isinstance(machine, SimulatedMachine) else ModelledMeter(machine.capacity_bytes)
    return own_choice(machine, MicroBatcher(machine.model, meter=meter, limits=search), logical, len)


def own_choice(machine: Machine, batcher: MicroBatcher, logical: int, batch_of: Callable[[Rows], Any]) -> Choice:
    """Trains on batches of `logical` graphs; `batch_of` returns the batcher's argument for them."""

    def train(steps: int) -> Replay:
        batches, ends, first_end = shuffled(machine.graphs, logical), 0, 0
        for step in range(1, steps + 1):
            rows = next(batches)
            try:
                batcher.run(partial(losses_of, machine, rows), batch_of(rows))
            except DoesNotFitError:
                ends, first_end = ends + 1, first_end or step
            machine.step()
            batcher.stepped()
        return Replay(ends, first_end)

    batcher.watch(machine.failed)
    return Choice(f"{logical} graphs in parts", train, keeps_batch=True)


def losses_of(machine: Machine, rows: Rows, start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
    """Computes graphs `start:stop` of a batch."""
    return {"loss": (machine.loss(rows[start:stop]), stop - start)}


MEASURED_BATCHES: Final = 24
LARGEST_MEASURED: Final = 48
"""Batches that somebody who chooses a size by hand looks at, and the graphs of the largest."""
FIXED_SHARES: Final = tuple(np.arange(0.10, 1.01, 0.05).round(2).tolist())
"""Shares of that size which the sweep tries."""
SHARES: Final = tuple(np.arange(0.70, 1.0, 0.01).round(2).tolist())
"""Shares of the capacity that the sweep fills batches to."""


class ByHand(NamedTuple):
    """Figures from a few measured batches."""

    room_bytes: float  # A share of the capacity less the base
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
