"""The real steps of `scripts/bench/survival`: a small graph network on a simulated GPU, which measures each peak.

Shapes: R graphs of a pass, N their nodes, E their edges, H hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.survival_world import SEED, Graphs, Machine, Rows, Tally
from can_train import simulated_gpu
from can_train.fit.packing import members
from can_train.memory.meters import SimulatedMeter

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
