"""The graphs, machines and replays of `scripts/bench/survival`: sizes with a heavy tail, a machine whose memory and
time are modelled, and a small graph network on a simulated GPU, which measures each peak. Also imported in the
environment of the other tools.

Shapes: G graphs, R rows (the graphs of a pass), N their nodes, E their edges, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from can_train import simulated_gpu
from can_train.fit.packing import members
from can_train.memory.meters import SimulatedMeter

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
    """The passes that a machine has computed."""

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
        """Starts counting anew; returns the counts so far."""
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
"""Standard deviation of the memory of a pass above the base, as a share of that memory."""

PASS_S: Final = 0.03
NODE_S: Final = 1e-6
EDGE_S: Final = 0.3e-6
"""Modelled time: of a pass with the optimizer's step, and of each node and edge."""
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
        """Raises where the pass does not fit; the loss itself comes from a model of one weight."""
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
    """The outcome of a tool.

    Attributes:
        size: The choice of the tool, in words.
        keeps_batch: Whether the optimizer sees the batch that was asked for.
        trials: Passes of its search.
        trial_ooms: Passes of its search that ran out of memory.
        search_s: Modelled time of the search.
        ends: How often a run ended with an out-of-memory error.
        first_end: The step of the first such end; 0 if there was none.
        restarts: How often the tool started the training anew by itself.
        repeated: Steps that were thereby computed for nothing.
        ooms: Out-of-memories in training.
        fill: Mean peak over capacity of the passes.
        rate: Graphs a modelled second, of the steps that count; 0 if no time is modelled.
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
    """The decision of a tool before the first step."""

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


# Real steps

MEMORY: Final = "128MiB"
FEATURES: Final = 8
HIDDEN: Final = 32
LAYERS: Final = 2


class Net(nn.Module):
    """Sends messages along edges, sums them up, and classifies each graph by the sum of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.messages = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.classes = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, ends: Tensor, owner: Tensor, graphs: int) -> Tensor:
        """Classifies graphs: nodes [N, FEATURES], edges' ends [2, E], each node's graph [N] → [R, 2]."""
        hidden = torch.relu(self.first(x))
        for layer in self.messages:
            message = torch.relu(layer(torch.cat([hidden.index_select(0, end) for end in ends], dim=1)))
            hidden = hidden + torch.zeros_like(hidden).index_add(0, ends[1], message)
        logits: Tensor = self.classes(hidden.new_zeros(graphs, HIDDEN).index_add(0, owner, hidden))
        return logits


class SimulatedMachine(Machine):
    """Computes on a simulated GPU."""

    def __init__(
        self, graphs: Graphs, meter: SimulatedMeter, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__()
        self.graphs, self.meter, self.model, self.optimizer = graphs, meter, model, optimizer
        self.capacity_bytes = meter.capacity_bytes
        rng = np.random.default_rng(SEED)
        with meter.host():
            self._x = torch.from_numpy(rng.standard_normal((int(graphs.nodes.sum()), FEATURES), dtype=np.float32))
            ends = rng.random((2, int(graphs.edges.sum()))) * np.repeat(graphs.nodes, graphs.edges)
            self._ends = torch.from_numpy(ends.astype(np.int64))
        self._node_ptr, self._edge_ptr = (np.concatenate([[0], np.cumsum(sizes)]) for sizes in graphs)
        self._pending = 0  # Graphs of the pass that is under way

    def loss(self, rows: Rows) -> Tensor:
        """Begins a pass, whose peak is read once the next one begins."""
        self.close()
        self._pending = len(rows)
        try:
            return self.bare_loss(rows)
        except torch.OutOfMemoryError:
            self.failed()
            raise

    def new_tally(self) -> Tally:
        """Ends the pass that is under way before."""
        self.close()
        return super().new_tally()

    def bare_loss(self, rows: Rows) -> Tensor:
        """Computes the sum of the losses of graphs."""
        nodes, edges = members(self._node_ptr, rows), members(self._edge_ptr, rows)
        x = self._x[torch.from_numpy(nodes.positions)]
        shift = torch.from_numpy(np.repeat(nodes.starts, edges.sizes))
        ends = self._ends[:, torch.from_numpy(edges.positions)] + shift
        owner = torch.from_numpy(np.repeat(np.arange(len(rows)), nodes.sizes))
        labels = torch.from_numpy(rows % 2)
        return F.cross_entropy(self.model(x, ends, owner, len(rows)), labels, reduction="sum")

    def compute(self, rows: Rows) -> float:
        """Computes forward, backward and the optimizer's step."""
        try:
            (self.loss(rows) / len(rows)).backward()
            self.step()
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad()
            self.failed()
            raise
        return self.close()

    def close(self) -> float:
        """Ends the pass that is under way; returns the peak since the one before."""
        peak = self.meter.peak_bytes()
        if self._pending:
            self.tally.fills.append(peak / self.capacity_bytes)
            self.tally.graphs += self._pending
        self._pending = 0
        self.meter.reset_peak()
        return peak

    def failed(self) -> None:
        """Counts the out-of-memory of the pass that is under way, once, and forgets the pass."""
        self.tally.ooms += bool(self._pending)
        self._pending = 0


@contextmanager
def simulated(graphs: Graphs) -> Iterator[SimulatedMachine]:
    """Opens a simulated GPU with a model and an optimizer on it."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with simulated_gpu(MEMORY, model, optimizer) as meter:
        yield SimulatedMachine(graphs, meter, model, optimizer)
