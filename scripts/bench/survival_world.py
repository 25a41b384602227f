"""What `scripts/bench/survival` replays: graphs whose sizes have a heavy tail, a machine that computes them, and what a
run of a tool led to. Modelled here: a memory that grows with nodes and edges, with noise, and a time a pass. Also
imported in the environment of the other tools.

Shapes: G graphs, R rows (the graphs of a pass).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

SEED: Final = 0
TAIL: Final = 1.4
"""Exponent of the Pareto law of the graphs' nodes: below 2, so that a few graphs decide a batch."""

Rows = NDArray[np.int64]
"""[R] positions of graphs."""


class Graphs(NamedTuple):
    """The sizes of a data set's graphs."""

    nodes: NDArray[np.int64]  # [G]
    edges: NDArray[np.int64]  # [G]

    @property
    def counts(self) -> NDArray[np.float64]:
        """[G, 2] nodes and edges of each graph."""
        return np.stack(self, axis=1).astype(np.float64)


def draw_graphs(graphs: int, *, median_nodes: int, most_nodes: int) -> Graphs:
    """Draws sizes: nodes from a Pareto law that is cut off, edges at 1.5 to 10 a node."""
    rng = np.random.default_rng(SEED)
    drawn = median_nodes / 2 ** (1 / TAIL) * (1 + rng.pareto(TAIL, graphs))
    nodes = np.minimum(drawn, most_nodes).astype(np.int64)
    ratio = np.clip(rng.lognormal(np.log(4.0), 0.5, graphs), 1.5, 10.0)
    return Graphs(nodes, (nodes * ratio).astype(np.int64))


def shuffled(graphs: Graphs, size: int) -> Iterator[Rows]:
    """Yields batches of `size` graphs, epoch after epoch in another order, without an epoch's incomplete last batch."""
    rng = np.random.default_rng(SEED)
    while True:
        order = rng.permutation(len(graphs.nodes))
        for start in range(0, max(len(order) - size, 0) + 1, size):
            yield order[start : start + size]


@dataclass
class Tally:
    """What a machine has computed."""

    fills: list[float] = field(default_factory=list)  # Peak over capacity of each pass that fitted
    graphs: int = 0  # Graphs of those passes
    ooms: int = 0
    seconds: float = 0.0  # Modelled; 0 where none are


class Machine(ABC):
    """Computes passes over graphs."""

    graphs: Graphs
    model: nn.Module
    optimizer: torch.optim.Optimizer
    capacity_bytes: int

    def __init__(self) -> None:
        self.tally = Tally()

    def new_tally(self) -> Tally:
        """Starts counting anew; returns what was counted so far."""
        counted, self.tally = self.tally, Tally()
        return counted

    @abstractmethod
    def loss(self, rows: Rows) -> Tensor:
        """Computes the sum of the losses of graphs, whose gradient somebody else computes. May run out of memory."""

    @abstractmethod
    def compute(self, rows: Rows) -> float:
        """Computes a whole training step; returns its peak in bytes, or raises `torch.OutOfMemoryError`."""

    @abstractmethod
    def failed(self) -> None:
        """Counts an out-of-memory of a gradient that somebody else has computed."""

    def step(self) -> None:
        """Steps the optimizer, where somebody else has computed the gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()


CAPACITY_BYTES: Final = 8 * 2**30
BASE_BYTES: Final = 2**30
NODE_BYTES: Final = 64 * 2**10
EDGE_BYTES: Final = 24 * 2**10
NOISE: Final = 0.02
"""Standard deviation of what a pass takes above the base, as a share of it."""

PASS_S: Final = 0.03
NODE_S: Final = 1e-6
EDGE_S: Final = 0.3e-6
"""Modelled time: of a pass, of which the optimizer's step is part, and of each node and edge."""
RELEASE_S: Final = 0.1
"""Modelled time that an out-of-memory costs beside the pass that failed."""


class ModelledMachine(Machine):
    """A machine whose peaks and times follow a law."""

    capacity_bytes = CAPACITY_BYTES

    def __init__(self, graphs: Graphs) -> None:
        super().__init__()
        self.graphs = graphs
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self._chance = np.random.default_rng(SEED + 1)

    def loss(self, rows: Rows) -> Tensor:
        """Raises where the pass does not fit; the loss itself is that of a model of one weight."""
        self.compute(rows)
        return cast("Tensor", self.model.weight).sum() * 0

    def failed(self) -> None:
        """Has been counted: only losses run out of memory here."""

    def compute(self, rows: Rows) -> float:
        """Counts the pass, or raises."""
        nodes, edges = int(self.graphs.nodes[rows].sum()), int(self.graphs.edges[rows].sum())
        noise = 1 + NOISE * self._chance.standard_normal()
        peak = BASE_BYTES + noise * (NODE_BYTES * nodes + EDGE_BYTES * edges)
        self.tally.seconds += PASS_S + NODE_S * nodes + EDGE_S * edges
        if peak > self.capacity_bytes:
            self.tally.ooms += 1
            self.tally.seconds += RELEASE_S
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self.tally.fills.append(peak / self.capacity_bytes)
        self.tally.graphs += len(rows)
        return peak


class Outcome(NamedTuple):
    """What a tool led to.

    Attributes:
        size: What the tool chose, in words.
        keeps_batch: Whether the optimizer sees the batch that was asked for.
        trials: Passes of its search.
        trial_ooms: Those that ran out of memory.
        search_s: Modelled time of the search.
        ends: How often a run ended with an out-of-memory error.
        first_end: The step at which that happened first; 0 where it did not.
        restarts: How often the tool started the training anew by itself.
        repeated: Steps that were thereby computed for nothing.
        ooms: Out-of-memories in training.
        fill: Mean peak over capacity of the passes.
        rate: Graphs a modelled second, those of the steps that count; 0 where no time is modelled.
    """

    size: str
    keeps_batch: bool
    trials: int
    trial_ooms: int
    search_s: float
    ends: int
    first_end: int
    restarts: int
    repeated: int
    ooms: int
    fill: float
    rate: float


class Replay(NamedTuple):
    """How the steps of a training went."""

    ends: int = 0
    first_end: int = 0
    restarts: int = 0
    repeated: int = 0
    wasted: int = 0  # Graphs of the steps that were computed for nothing
    size: str = ""  # Where it changed on the way


@dataclass(frozen=True)
class Choice:
    """What a tool decided on before the first step."""

    size: str
    train: Callable[[int], Replay]  # Computes so many steps
    keeps_batch: bool = False


def measure(machine: Machine, choose: Callable[[Machine], Choice], steps: int) -> Outcome:
    """Lets a tool choose, and computes its steps."""
    machine.new_tally()
    choice = choose(machine)
    search = machine.new_tally()
    went = choice.train(steps)
    training = machine.new_tally()
    return Outcome(
        size=went.size or choice.size,
        keeps_batch=choice.keeps_batch,
        trials=len(search.fills) + search.ooms,
        trial_ooms=search.ooms,
        search_s=search.seconds,
        ends=went.ends,
        first_end=went.first_end,
        restarts=went.restarts,
        repeated=went.repeated,
        ooms=training.ooms,
        fill=fmean(training.fills) if training.fills else 0.0,
        rate=(training.graphs - went.wasted) / training.seconds if training.seconds else 0.0,
    )


def replay(machine: Machine, batches: Iterator[Rows], steps: int) -> Replay:
    """Computes steps. A run that ends is started again, with the batch that follows, by somebody who is there at once
    and loses nothing.
    """
    ends, first_end = 0, 0
    for step in range(1, steps + 1):
        try:
            machine.compute(next(batches))
        except torch.OutOfMemoryError:
            ends, first_end = ends + 1, first_end or step
    return Replay(ends, first_end)
