"""The inputs of a network: CAN IDs become vocabulary indices and embeddings, counts and times are standardised.

Vocabulary and scale are fitted on training windows and saved with the weights: a checkpoint scores any log by itself.

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

# Vocabulary index of an ID that training did not see.
UNKNOWN_ID: Final = 0

# Variance below which a column counts as constant.
MIN_VARIANCE: Final = 1e-12

# Windows whose features are summed at a time, which bounds the memory of the float64 copy.
WINDOWS_AT_A_TIME: Final = 4096


@dataclass(frozen=True, kw_only=True)
class InputStatistics:
    """Vocabulary and scale of the training windows."""

    # [V] CAN IDs of benign training windows, ascending. An ID that occurs in attacks only is no part of the vehicle: it
    # is unknown, in training too, so that the embedding of the unknown ID is learned.
    vocabulary: NDArray[np.int64]
    node_mean: NDArray[np.float64]  # [10]
    node_std: NDArray[np.float64]  # [10]
    edge_mean: NDArray[np.float64]  # [11]
    edge_std: NDArray[np.float64]  # [11]

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: NDArray[np.int64]) -> "InputStatistics":
        """Fits vocabulary and scale on the windows `rows`."""
        node_mean, node_std = _mean_and_std(flat.node_features, flat.node_ptr, rows)
        edge_mean, edge_std = _mean_and_std(flat.edge_features, flat.edge_ptr, rows)
        return cls(vocabulary=known_ids(flat, rows), node_mean=node_mean, node_std=node_std,
                   edge_mean=edge_mean, edge_std=edge_std)  # fmt: skip

    @classmethod
    def empty(cls, vocabulary_size: int) -> "InputStatistics":
        """Returns statistics of the right shapes, which a checkpoint overwrites."""
        node, edge = len(NODE_FEATURES), len(EDGE_FEATURES)
        return cls(vocabulary=np.arange(vocabulary_size), node_mean=np.zeros(node), node_std=np.ones(node),
                   edge_mean=np.zeros(edge), edge_std=np.ones(edge))  # fmt: skip


def known_ids(flat: FlatGraphs, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [V] the vocabulary of the windows `rows` (see `InputStatistics`)."""
    known = np.zeros(len(flat.ids), dtype=bool)
    for start, stop in _contiguous(rows[flat.label[rows] == 0]):
        known[flat.node_code[flat.node_ptr[start] : flat.node_ptr[stop]]] = True
    return flat.ids[known]


class InputEncoder(nn.Module):
    """Embeds IDs, if `identity` is on, and standardises features."""

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
        """Standardises [N, 10] node and [E, 11] edge features, and compresses large values."""
        # A flooded bus is hundreds of deviations from the mean. asinh is the identity near zero and a logarithm far
        # from it, so that such a value neither dominates a gradient nor is clipped to look like any other.
        node = (batch.x - self.node_mean) / self.node_std
        edge = (batch.edge_attr - self.edge_mean) / self.edge_std
        return torch.asinh(node), torch.asinh(edge)

    def forward(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Returns node inputs [N, width] and edge inputs [E, 11]."""
        node, edge = self.scaled(batch)
        # A node also sees the mean of the edges that enter and that leave it: attention layers use an edge's features
        # to weigh messages, and never as their content.
        leaving, entering = (scatter(edge, end, dim_size=len(node), reduce="mean") for end in batch.edge_index)
        parts = [node, entering, leaving]
        if self.embedding is not None:
            parts.insert(0, self.embedding(self.id_index(batch.can_id)).to(node.dtype))
        return torch.cat(parts, dim=1), edge


def _mean_and_std(
    features: NDArray[np.float32], ptr: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns mean and standard deviation of each column over the members of the windows `rows`."""
    count, total, squares = 0, np.zeros(features.shape[1]), np.zeros(features.shape[1])
    for start, stop in _contiguous(rows):
        values = features[ptr[start] : ptr[stop]].astype(np.float64)
        count += len(values)
        total += values.sum(axis=0)
        squares += np.square(values).sum(axis=0)
    mean = total / max(count, 1)
    variance = squares / max(count, 1) - mean**2
    # A constant column has no scale: it stays as it is.
    return mean, np.where(variance > MIN_VARIANCE, np.sqrt(np.maximum(variance, MIN_VARIANCE)), 1.0)


def _contiguous(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cuts rows into half-open runs of adjacent ones, each of at most `WINDOWS_AT_A_TIME`."""
    ordered = np.sort(rows)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    return [
        (int(part[0]), int(part[-1]) + 1)
        for run in np.split(ordered, breaks)
        for part in np.split(run, range(WINDOWS_AT_A_TIME, len(run), WINDOWS_AT_A_TIME))
        if len(part)
    ]
