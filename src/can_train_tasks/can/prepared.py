"""Inputs of the networks, prepared with the graphs: all that the graphs and the statistics of an `InputEncoder` decide
is computed once for each window, and gathered in each step.

Shapes: G graphs of the data set, P prepared graphs with N nodes and E edges, B graphs of a batch; C input columns of a
node without the embedding of its ID, T columns of a node that an autoencoder reconstructs.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from can_train.fit.packing import members
from can_train.memory.meters import send_positions
from can_train_tasks.can.data.batches import Gatherer, PreparedBatch, Reconstructed
from can_train_tasks.can.data.behaviour import BEHAVIOUR
from can_train_tasks.can.data.graphs import EDGE_FEATURES, FlatGraphs, Ints
from can_train_tasks.can.inputs import InputEncoder

_WINDOWS_AT_A_TIME: Final = 1024  # Windows that are prepared at a time, to bound the memory of intermediate values

Values = NDArray[np.float32]


class _Positions(NamedTuple):
    """Positions in the flat arrays of `PreparedGraphs` of the values of a batch with N nodes and E edges."""

    place: Ints  # [B]
    node: Ints  # [N]
    edge: Ints  # [E]
    first_node: Ints  # [E] position in the batch of the first node of the edge's window
    graph: Ints  # [N] the graph of each node
    between: Ints  # [E'] which of the E edges are no self-loops
    message: Ints  # [E' + N] in `edge`


@dataclass(kw_only=True, eq=False)
class PreparedGraphs:
    """The inputs of chosen windows of a data set in flat arrays, and their gatherer.

    The edges are those between different nodes for a classifier, and all edges for an autoencoder.
    """

    place: Ints  # [G] the number of a window among the prepared windows; -1 for other windows
    node_ptr: Ints  # [P + 1] the nodes of window p are node_ptr[p]:node_ptr[p + 1]
    edge_ptr: Ints  # [P + 1] the edges of window p are edge_ptr[p]:edge_ptr[p + 1]
    label: NDArray[np.uint8]  # [P]
    index: NDArray[np.int32]  # [N]
    node: Values  # [N, C]
    past: Values | None  # [N, 7]
    ends: NDArray[np.int32]  # [E, 2] source and destination as node positions inside the window
    edge: Values  # [E + N, 11] of the edges, then of the self-loops
    reconstructed: Values | None  # [N, T]
    on_device: Mapping[str, Tensor] = field(default_factory=dict)  # the `arrays` on a device; empty: on the host alone

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that batches are gathered from."""
        names = ("label", "index", "node", "past", "ends", "edge", "reconstructed")
        return {name: array for name in names if (array := getattr(self, name)) is not None}

    def __call__(self, rows: Ints) -> PreparedBatch:
        """Gathers the windows `rows` [B], in that order; a batch is a copy."""
        at, arrays = self._positions(rows), self.arrays

        def taken(name: str, positions: Ints) -> Tensor:
            return torch.from_numpy(arrays[name].take(positions, axis=0))

        ends = np.empty((2, len(at.edge)), dtype=np.int64)
        np.add(self.ends.take(at.edge, axis=0).T, at.first_node, out=ends)
        between = ends if self.reconstructed is None else ends[:, at.between]
        loops = np.broadcast_to(np.arange(len(at.node)), (2, len(at.node)))
        reconstructed = None
        if self.reconstructed is not None:
            of_node, of_edge = taken("reconstructed", at.node), taken("edge", at.edge)
            reconstructed = Reconstructed(node=of_node, edge=of_edge, ends=torch.from_numpy(ends))
        return PreparedBatch(
            index=taken("index", at.node).long(),
            node=taken("node", at.node),
            past=None if self.past is None else taken("past", at.node),
            ends=torch.from_numpy(np.concatenate([between, loops], axis=1)),
            edge=taken("edge", at.message),
            batch=torch.from_numpy(at.graph),
            label=taken("label", at.place).long(),
            reconstructed=reconstructed,
        )

    def to(self, rows: Ints, device: torch.device, dtype: torch.dtype) -> PreparedBatch:
        """Gathers windows `rows` [B] to a device, their inputs as `dtype`."""
        if not self.on_device or self.on_device["label"].device != device:
            return self(rows).to(device, dtype)
        return self._gather_on_device(self._positions(rows), device).to(device, dtype)

    def _gather_on_device(self, positions: _Positions, device: torch.device) -> PreparedBatch:
        data, (place, node, edge, first_node, graph, between, message) = (
            self.on_device, send_positions(positions, device),
        )  # fmt: skip
        ends = torch.empty((2, len(edge)), dtype=torch.int64, device=device)
        torch.add(data["ends"].index_select(0, edge).t(), first_node, out=ends)
        proper = ends if self.reconstructed is None else ends.index_select(1, between)
        loops = torch.arange(len(node), device=device).expand(2, -1)
        reconstructed = None
        if self.reconstructed is not None:
            of_node, of_edge = data["reconstructed"].index_select(0, node), data["edge"].index_select(0, edge)
            reconstructed = Reconstructed(node=of_node, edge=of_edge, ends=ends)
        return PreparedBatch(
            index=data["index"].index_select(0, node).long(),
            node=data["node"].index_select(0, node),
            past=None if self.past is None else data["past"].index_select(0, node),
            ends=torch.cat([proper, loops], dim=1),
            edge=data["edge"].index_select(0, message),
            batch=graph.long(),
            label=data["label"].index_select(0, place).long(),
            reconstructed=reconstructed,
        )

    def _positions(self, rows: Ints) -> _Positions:
        place = self.place[rows]
        if (place < 0).any():
            raise ValueError("inputs of windows that were not prepared were asked for")
        nodes, edges = members(self.node_ptr, place), members(self.edge_ptr, place)
        between, message = np.empty(0, dtype=np.int64), edges.positions
        if self.reconstructed is not None:
            source, target = self.ends.take(edges.positions, axis=0).T
            between = np.flatnonzero(source != target)
            message = edges.positions[between]
        return _Positions(
            place=place,
            node=nodes.positions,
            edge=edges.positions,
            first_node=np.repeat(nodes.starts, edges.sizes),
            graph=np.repeat(np.arange(len(rows)), nodes.sizes),
            between=between,
            message=np.concatenate([message, len(self.ends) + nodes.positions]),
        )


def prepare_graphs(
    flat: FlatGraphs, rows: Ints, encoder: InputEncoder, *, hides: bool, reconstructs: bool
) -> PreparedGraphs:
    """Prepares the windows `rows` [P], which are distinct, with the statistics of an encoder on the CPU.

    `hides` tells whether the IDs of some windows will be hidden, `reconstructs` whether the model is an autoencoder.
    """
    gather = Gatherer(flat)
    prepared = _blank(flat, rows, encoder, hides=hides, reconstructs=reconstructs)
    # In another thread: a simulated GPU counts the allocations of its thread, and these are the host's.
    with ThreadPoolExecutor(max_workers=1) as host:
        for first in range(0, len(rows), _WINDOWS_AT_A_TIME):
            host.submit(_fill, prepared, gather, rows[first : first + _WINDOWS_AT_A_TIME], encoder).result()
    return prepared


def prepared_bytes(flat: FlatGraphs, rows: Ints, encoder: InputEncoder, *, hides: bool, reconstructs: bool) -> int:
    """Returns about as many bytes as the inputs of the windows `rows` take, and never fewer."""
    columns = 1 + len(encoder.of_id) + len(EDGE_FEATURES) + len(BEHAVIOUR) * hides
    columns += len(encoder.target_weights) * reconstructs
    nodes, edges = int(flat.num_nodes[rows].sum()), int(flat.num_edges[rows].sum())
    return 4 * (nodes * columns + edges * (2 + len(EDGE_FEATURES))) + 8 * (len(flat) + 3 * (len(rows) + 1))


def _blank(flat: FlatGraphs, rows: Ints, encoder: InputEncoder, *, hides: bool, reconstructs: bool) -> PreparedGraphs:
    """Makes arrays of the right shapes, whose values are still to be written."""
    place = np.full(len(flat), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    proper_edges = Gatherer(flat).batch_features(rows)[:, 1].astype(np.int64)
    sizes = (flat.num_nodes[rows], flat.num_edges[rows] if reconstructs else proper_edges)
    node_ptr, edge_ptr = (np.concatenate([[0], np.cumsum(size)]) for size in sizes)
    nodes, edges = int(node_ptr[-1]), int(edge_ptr[-1])
    return PreparedGraphs(
        place=place,
        node_ptr=node_ptr,
        edge_ptr=edge_ptr,
        label=flat.label[rows],
        index=np.empty(nodes, np.int32),
        node=np.empty((nodes, len(encoder.of_id)), np.float32),
        past=np.empty((nodes, len(BEHAVIOUR)), np.float32) if hides and encoder.behaviour else None,
        ends=np.empty((edges, 2), np.int32),
        edge=np.empty((edges + nodes, len(EDGE_FEATURES)), np.float32),
        reconstructed=np.empty((nodes, len(encoder.target_weights)), np.float32) if reconstructs else None,
    )


@torch.no_grad()
def _fill(graphs: PreparedGraphs, gather: Gatherer, rows: Ints, encoder: InputEncoder) -> None:
    """Writes the values of the windows `rows`, which are prepared one after another."""
    batch = gather(rows)
    if graphs.past is not None:
        batch = replace(batch, hidden=torch.zeros(len(rows), dtype=torch.bool))
    part = encoder.prepared(batch, reconstructs=graphs.reconstructed is not None)
    first, last = graphs.place[rows[0]], graphs.place[rows[-1]] + 1
    nodes, edges = (slice(ptr[first], ptr[last]) for ptr in (graphs.node_ptr, graphs.edge_ptr))
    num_nodes = nodes.stop - nodes.start
    ends, edge = part.ends[:, :-num_nodes], part.edge[:-num_nodes]
    graphs.index[nodes], graphs.node[nodes] = part.index.numpy(), part.node.numpy()
    if graphs.past is not None and part.past is not None:
        graphs.past[nodes] = part.past.numpy()
    if graphs.reconstructed is not None:
        features = part.features
        graphs.reconstructed[nodes], ends, edge = features.node.numpy(), features.ends, features.edge
    # Positions inside the window
    starts = graphs.node_ptr[first:last] - nodes.start
    graphs.ends[edges] = (ends.T - torch.from_numpy(starts)[part.batch[ends[0]]][:, None]).numpy()
    graphs.edge[edges] = edge.numpy()
    loops = slice(len(graphs.ends) + nodes.start, len(graphs.ends) + nodes.stop)
    graphs.edge[loops] = part.edge[-num_nodes:].numpy()
