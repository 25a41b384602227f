"""From stored features to what a network sees: CAN IDs become vocabulary indices and embeddings, counts and times are
standardised. Vocabulary and scale are fitted on training windows and travel with the weights, so that a checkpoint
scores any log by itself.

Shapes: N nodes, E edges, V known CAN IDs, H embedding width.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.utils import scatter

from can_train.tasks.can.data.batches import GraphBatch
from can_train.tasks.can.data.graphs import EDGE_FEATURES, NODE_FEATURES, FlatGraphs

UNKNOWN_ID: Final = 0
"""Vocabulary index of an ID that training did not see."""


@dataclass(frozen=True, kw_only=True)
class InputStatistics:
    """What training windows say about the inputs.

    Attributes:
        vocabulary: [V] int64, CAN IDs seen in benign training windows, ascending. An ID that occurs in attacks only is
            no part of the vehicle: it is unknown, in training too, so that the unknown ID is learned.
        node_mean, node_std: [10] float64, per node feature.
        edge_mean, edge_std: [11] float64, per edge feature.
    """

    vocabulary: NDArray[np.int64]
    node_mean: NDArray[np.float64]
    node_std: NDArray[np.float64]
    edge_mean: NDArray[np.float64]
    edge_std: NDArray[np.float64]

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: NDArray[np.int64]) -> "InputStatistics":
        """Fits vocabulary and scale on the windows `rows`, a block of windows at a time."""
        nodes, edges = _Moments(len(NODE_FEATURES)), _Moments(len(EDGE_FEATURES))
        for start, stop in _contiguous(rows):
            node_part = slice(flat.node_ptr[start], flat.node_ptr[stop])
            edge_part = slice(flat.edge_ptr[start], flat.edge_ptr[stop])
            nodes.add(flat.node_features[node_part])
            edges.add(flat.edge_features[edge_part])
        return cls(vocabulary=known_ids(flat, rows), node_mean=nodes.mean, node_std=nodes.std,
                   edge_mean=edges.mean, edge_std=edges.std)  # fmt: skip

    @classmethod
    def empty(cls, vocabulary_size: int) -> "InputStatistics":
        """Statistics of the right shapes, to be overwritten by a checkpoint's."""
        node, edge = len(NODE_FEATURES), len(EDGE_FEATURES)
        return cls(vocabulary=np.arange(vocabulary_size), node_mean=np.zeros(node), node_std=np.ones(node),
                   edge_mean=np.zeros(edge), edge_std=np.ones(edge))  # fmt: skip


def known_ids(flat: FlatGraphs, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [V] the vocabulary that the windows `rows` make (see `InputStatistics`)."""
    seen = np.zeros(len(flat.ids), dtype=bool)
    for start, stop in _contiguous(rows[flat.label[rows] == 0]):
        seen[flat.node_code[flat.node_ptr[start] : flat.node_ptr[stop]]] = True
    return flat.ids[seen]


class InputEncoder(nn.Module):
    """Embeds IDs and standardises features; a node also sees the mean of the edges that enter and that leave it, since
    attention layers use an edge's features to weigh its messages and never as their content.

    Args:
        statistics: Vocabulary and scale.
        embedding: Width of the ID embedding.
        identity: Whether the ID is part of the input at all.
    """

    vocabulary: Tensor
    node_mean: Tensor
    node_std: Tensor
    edge_mean: Tensor
    edge_std: Tensor

    def __init__(self, statistics: InputStatistics, *, embedding: int, identity: bool) -> None:
        super().__init__()
        self.identity = identity
        self.register_buffer("vocabulary", torch.from_numpy(statistics.vocabulary.copy()))
        for name in ("node_mean", "node_std", "edge_mean", "edge_std"):
            self.register_buffer(name, torch.from_numpy(getattr(statistics, name)).float())
        # One row more than IDs: index 0 is the unknown ID.
        self.embedding = nn.Embedding(len(statistics.vocabulary) + 1, embedding) if identity else None
        self.width = len(NODE_FEATURES) + 2 * len(EDGE_FEATURES) + (embedding if identity else 0)

    def id_index(self, can_id: Tensor) -> Tensor:
        """Looks up [N] raw IDs: 1 + position in the vocabulary, or `UNKNOWN_ID`."""
        position = torch.searchsorted(self.vocabulary, can_id).clamp(max=len(self.vocabulary) - 1)
        known = self.vocabulary[position] == can_id
        return torch.where(known, position + 1, UNKNOWN_ID)

    def scaled(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Standardises [N, 10] node and [E, 11] edge features.

        A flooded bus is hundreds of deviations out; asinh is the identity near zero and a logarithm out there, so that
        such a value neither swamps a gradient nor is clipped to look like any other.
        """
        node = (batch.x - self.node_mean) / self.node_std
        edge = (batch.edge_attr - self.edge_mean) / self.edge_std
        return torch.asinh(node), torch.asinh(edge)

    def forward(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Returns node inputs [N, width] and edge inputs [E, 11]."""
        node, edge = self.scaled(batch)
        leaving, entering = (scatter(edge, end, dim_size=len(node), reduce="mean") for end in batch.edge_index)
        parts = [node, entering, leaving]
        if self.embedding is not None:
            parts.insert(0, self.embedding(self.id_index(batch.can_id)).to(node.dtype))
        return torch.cat(parts, dim=1), edge


class _Moments:
    """Running sums for a mean and a standard deviation, in float64."""

    def __init__(self, columns: int) -> None:
        self._count = 0
        self._sum = np.zeros(columns)
        self._squares = np.zeros(columns)

    def add(self, values: NDArray[np.float32]) -> None:
        wide = values.astype(np.float64)
        self._count += len(wide)
        self._sum += wide.sum(axis=0)
        self._squares += np.square(wide).sum(axis=0)

    @property
    def mean(self) -> NDArray[np.float64]:
        mean: NDArray[np.float64] = self._sum / max(self._count, 1)
        return mean

    @property
    def std(self) -> NDArray[np.float64]:
        variance = self._squares / max(self._count, 1) - self.mean**2
        # A constant column has no scale: leave it as it is.
        return np.where(variance > 1e-12, np.sqrt(np.maximum(variance, 1e-12)), 1.0)


def _contiguous(rows: NDArray[np.int64], largest: int = 4096) -> list[tuple[int, int]]:
    """Cuts ascending rows into half-open runs of neighbours, each at most `largest` long."""
    ordered = np.sort(rows)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    runs = []
    for run in np.split(ordered, breaks):
        for start in range(0, len(run), largest):
            part = run[start : start + largest]
            runs.append((int(part[0]), int(part[-1]) + 1))
    return runs
