"""Gathers batches of graphs from the flat arrays, without one object per graph; reduces values over groups of nodes.

Shapes: B graphs of the batch, N nodes, E directed edges, E' edges without self-loops, A absences, R requested rows;
G graphs of the data set; M rows of values in C groups. A node has D input columns without the embedding of its ID, and
T columns that an autoencoder reconstructs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from can_train.fit.packing import members
from can_train.memory.meters import send, send_positions
from can_train.task import Feature

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Bools, FlatGraphs, Floats, Ints

GRAPH_FEATURES: Final = (Feature("nodes"), Feature("edges"), Feature("graphs"))
# Graphs whose self-loops are counted at a time, so that the comparison needs little memory besides the mapped edges.
_COUNTED_GRAPHS: Final = 2**16
_COMPARED_EDGES: Final = 2**20  # edges whose ends are compared at a time
_Sent = TypeVar("_Sent", "GraphBatch", "PreparedBatch", "Reconstructed")


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphBatch:
    """Several graphs as one disconnected graph, as torch_geometric's layers expect it.

    Attributes:
        x: [N, 10] float32, columns `NODE_FEATURES`, unscaled.
        behaviour: [N, 7] float32, columns `BEHAVIOUR`; NaN where no frame of the ID has an earlier frame.
        past: [N, 7] float32, means of `behaviour` over the ID's earlier windows in the log.
        past_windows: [N] float32, number of the ID's earlier windows in the log.
        edge_index: [2, E] int64, source and destination as node positions inside the batch.
        edge_attr: [E, 11] float32, columns `EDGE_FEATURES`, unscaled.
        between: [E'] int64, the edges that are no self-loops, ascending. Known on the host: to find them on the device,
            the host would wait for it.
        can_id: [N] int64, CAN ID of each node.
        batch: [N] int64, the graph of each node.
        absent_id: [A] int64, CAN IDs that are regular in the log and missing in a graph.
        absent_silence: [A] float32, binary logarithm of the seconds since the ID's last frame.
        absent_batch: [A] int64, the graph in question.
        label: [B] int64, attack kind codes, 0 for benign.
        hidden: [B] bool, windows whose IDs a model must not see; None: a model may see all IDs.
    """

    x: Tensor
    behaviour: Tensor
    past: Tensor
    past_windows: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    between: Tensor
    can_id: Tensor
    batch: Tensor
    absent_id: Tensor
    absent_silence: Tensor
    absent_batch: Tensor
    label: Tensor
    hidden: Tensor | None = None

    @property
    def num_graphs(self) -> int:
        """B."""
        # Not its len(), which would fix the number when a network is exported.
        return self.label.shape[0]

    @property
    def y(self) -> Tensor:
        """[B] int64, 1 for an attack, 0 for benign."""
        return (self.label > 0).long()

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the features."""
        return self.x.dtype

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> GraphBatch:
        """Returns the batch on another device, its features as `dtype`; indices keep their type."""
        return _sent(self, torch.device(device), dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstructed:
    """The features of a batch that an autoencoder reconstructs; no ID is hidden.

    Attributes:
        node: [N, T].
        edge: [E, 11] of the edges with the graphs' self-loops.
        ends: [2, E] int64, source and destination of these edges as node positions inside the batch.
    """

    node: Tensor
    edge: Tensor
    ends: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedBatch:
    """Several graphs with the inputs of a network.

    Attributes:
        index: [N] int64, the index of each node's ID (see `InputEncoder.id_index`).
        node: [N, D] inputs of each node, without the embedding of its ID.
        past: [N, 7] the deviation from its past of an ID that is hidden; None: no ID is hidden, or no such column is.
        ends: [2, E' + N] int64, source and destination of the attention layers' edges: E' edges, then N self-loops.
        edge: [E' + N, 11] inputs of these edges.
        batch: [N] int64, the graph of each node.
        label: [B] int64, attack kind codes, 0 for benign.
        reconstructed: The features that an autoencoder reconstructs; None for a classifier.
        hidden: [B] bool, windows whose IDs a model must not see; None: a model may see all IDs.
    """

    index: Tensor
    node: Tensor
    past: Tensor | None
    ends: Tensor
    edge: Tensor
    batch: Tensor
    label: Tensor
    reconstructed: Reconstructed | None = None
    hidden: Tensor | None = None

    @property
    def features(self) -> Reconstructed:
        """The features that an autoencoder reconstructs."""
        assert self.reconstructed is not None, "the batch was prepared for a classifier"
        return self.reconstructed

    @property
    def num_graphs(self) -> int:
        """B."""
        return self.label.shape[0]

    @property
    def y(self) -> Tensor:
        """[B] int64, 1 for an attack, 0 for benign."""
        return (self.label > 0).long()

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.node.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the inputs."""
        return self.node.dtype

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PreparedBatch:
        """Returns the batch on another device, its inputs as `dtype`; indices keep their type."""
        return _sent(self, torch.device(device), dtype)


def _sent(batch: _Sent, device: torch.device, dtype: torch.dtype | None) -> _Sent:
    moved: dict[str, Any] = {
        name: send(part, device, dtype if part.is_floating_point() else None)
        if isinstance(part, Tensor)
        else _sent(part, device, dtype)
        for name, part in vars(batch).items()
        if part is not None
    }
    return replace(batch, **moved)


Batch = GraphBatch | PreparedBatch


# Like torch_geometric's `scatter`, whose package takes two seconds to import: with it, data sets and optional packages.
def scatter(values: Tensor, group: Tensor, num_groups: int, reduce: str = "sum") -> Tensor:
    """Reduces values [M, …] over the rows of each group.

    Args:
        values: The values.
        group: [M] int64, the group of each row.
        num_groups: C.
        reduce: sum, mean or max; a group without rows gets zeros.

    Returns:
        [C, …], in the type of the values.
    """
    trailing = [1] * (values.dim() - 1)
    index = group.view(-1, *trailing).expand_as(values)
    if reduce == "max":
        blank = values.new_zeros(num_groups, *values.shape[1:])
        return blank.scatter_reduce_(0, index, values, reduce="amax", include_self=False)
    if reduce == "sum":
        return values.new_zeros(num_groups, *values.shape[1:]).scatter_add_(0, index, values)
    count = values.new_zeros(num_groups).scatter_add_(0, group, values.new_ones(values.shape[0])).clamp(min=1)
    total = values.new_zeros(num_groups, *values.shape[1:]).scatter_add_(0, index, values)
    return total / count.view(-1, *trailing).expand_as(total)


class Gatherer:
    """Makes a batch from the row numbers of its graphs, in any order and with repetitions. A batch is a copy."""

    # In numpy: torch spreads small copies over threads that wait for each other, which takes twice as long on an idle
    # machine and fifty times as long on a busy machine. PyG's collate takes 118 µs for a graph, this class 5 µs.
    def __init__(self, flat: FlatGraphs) -> None:
        self._flat = flat
        self._edge_ends = flat.edge_index.T  # [E, 2], with both ends of an edge adjacent, as in the cache
        self.on_device: Mapping[str, Tensor] = {}  # the `arrays` on a device; empty: they are on the host alone

    def __call__(self, rows: Ints | Tensor) -> GraphBatch:
        """Gathers the graphs `rows` [B], in that order."""
        flat, rows = self._flat, np.asarray(rows)
        nodes, edges, absences = (members(ptr, rows) for ptr in (flat.node_ptr, flat.edge_ptr, flat.absent_ptr))
        first_node = np.repeat(nodes.starts, edges.sizes)  # [E]
        edge_index = np.empty((2, len(first_node)), dtype=np.int64)
        np.add(self._edge_ends.take(edges.positions, axis=0).T, first_node, out=edge_index)
        return GraphBatch(
            x=torch.from_numpy(flat.node_features.take(nodes.positions, axis=0)),
            behaviour=torch.from_numpy(flat.behaviour.take(nodes.positions, axis=0)),
            past=torch.from_numpy(flat.past.take(nodes.positions, axis=0)),
            past_windows=torch.from_numpy(flat.past_windows.take(nodes.positions).astype(np.float32)),
            edge_index=torch.from_numpy(edge_index),
            edge_attr=torch.from_numpy(flat.edge_features.take(edges.positions, axis=0)),
            between=torch.from_numpy(np.flatnonzero(edge_index[0] != edge_index[1])),
            can_id=torch.from_numpy(flat.ids.take(flat.node_code.take(nodes.positions))),
            batch=torch.from_numpy(np.repeat(np.arange(len(rows)), nodes.sizes)),
            absent_id=torch.from_numpy(flat.ids.take(flat.absent_code.take(absences.positions))),
            absent_silence=torch.from_numpy(flat.absent_silence.take(absences.positions)),
            absent_batch=torch.from_numpy(np.repeat(np.arange(len(rows)), absences.sizes)),
            label=torch.from_numpy(flat.label[rows].astype(np.int64)),
        )

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that batches are gathered from."""
        flat = self._flat
        names = ("node_features", "behaviour", "past", "past_windows", "node_code", "edge_features", "absent_code",
                 "absent_silence", "label", "ids")  # fmt: skip
        return {name: getattr(flat, name) for name in names} | {"edge_ends": self._edge_ends}

    def to(self, rows: Ints, device: torch.device, dtype: torch.dtype) -> GraphBatch:
        """Gathers graphs `rows` [B] to a device, their features as `dtype`."""
        if not self.on_device or self.on_device["label"].device != device:
            return self(rows).to(device, dtype)
        return self._gather_on_device(rows, device, dtype)

    def _gather_on_device(self, rows: Ints, device: torch.device, dtype: torch.dtype) -> GraphBatch:
        flat, data = self._flat, self.on_device
        nodes, edges, absences = (members(ptr, rows) for ptr in (flat.node_ptr, flat.edge_ptr, flat.absent_ptr))
        graph = np.arange(len(rows))
        # Positions are 32-bit numbers: those that the batch keeps become copies, so that the others are freed.
        row, node, edge, absence, first_node, of_node, of_absence, between = send_positions(
            (rows, nodes.positions, edges.positions, absences.positions, np.repeat(nodes.starts, edges.sizes),
             np.repeat(graph, nodes.sizes), np.repeat(graph, absences.sizes),
             np.flatnonzero(self._is_between.take(edges.positions))), device,
        )  # fmt: skip
        edge_index = torch.empty((2, len(edge)), dtype=torch.int64, device=device)
        torch.add(data["edge_ends"].index_select(0, edge).t(), first_node, out=edge_index)

        def features(name: str, positions: Tensor) -> Tensor:
            return data[name].index_select(0, positions).to(torch.float32).to(dtype)

        return GraphBatch(
            x=features("node_features", node),
            behaviour=features("behaviour", node),
            past=features("past", node),
            past_windows=features("past_windows", node),
            edge_index=edge_index,
            edge_attr=features("edge_features", edge),
            between=between.long(),
            can_id=data["ids"].index_select(0, data["node_code"].index_select(0, node)),
            batch=of_node.long(),
            absent_id=data["ids"].index_select(0, data["absent_code"].index_select(0, absence)),
            absent_silence=features("absent_silence", absence),
            absent_batch=of_absence.long(),
            label=data["label"].index_select(0, row).long(),
        )

    @cached_property
    def _is_between(self) -> Bools:
        # [E], in parts: the comparison reads all ends of edges from the disk.
        ends, size = self._edge_ends, _COMPARED_EDGES
        parts = [ends[begin : begin + size] for begin in range(0, len(ends), size)]
        return np.concatenate([np.empty(0, dtype=np.bool_), *(part[:, 0] != part[:, 1] for part in parts)])

    def batch_features(self, rows: Ints) -> Floats:
        """Returns `GRAPH_FEATURES` [R, 3]: nodes, edges without self-loops, and 1."""
        # The attention layers give each node one self-loop, so the self-loops of the data add nothing to their memory.
        features = (self._flat.num_nodes[rows], self._proper_edges[rows], np.ones(len(rows)))
        return np.stack(features, axis=1).astype(np.float64)

    @cached_property
    def _proper_edges(self) -> Ints:
        # [G]. Every window has an edge, so no graph gets its neighbour's sum (a flaw of reduceat on empty parts).
        counts = [np.empty(0, dtype=np.int64)]
        for begin in range(0, len(self._flat), _COUNTED_GRAPHS):
            ptr = self._flat.edge_ptr[begin : begin + _COUNTED_GRAPHS + 1]
            source, target = self._flat.edge_index[:, ptr[0] : ptr[-1]]
            counts.append(np.add.reduceat(source != target, ptr[:-1] - ptr[0], dtype=np.int64))
        return np.concatenate(counts)
