"""The networks of the CAN task: what they see of a window, the classifier and the autoencoder.

CAN IDs become vocabulary indices and embeddings, counts and times are standardised. Vocabulary and scale are fitted on
training windows and saved with the weights: a checkpoint scores any log by itself.

Shapes: B graphs, N nodes, E edges, V known CAN IDs, H embedding width, Z latent width.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, JumpingKnowledge, global_mean_pool
from torch_geometric.utils import scatter

from can_train.tasks.can.data.batches import GraphBatch
from can_train.tasks.can.data.graphs import EDGE_FEATURES, NODE_FEATURES, FlatGraphs, Floats, Ints
from can_train.tasks.can.settings import GatSettings, VgaeSettings

UNKNOWN_ID: Final = 0  # vocabulary index of an ID that training did not see
MIN_VARIANCE: Final = 1e-12  # below which a column counts as constant
WINDOWS_AT_A_TIME: Final = 4096  # whose features are summed, which bounds the memory of the float64 copy
MAX_LOG_STD: Final = 5.0  # log standard deviations are clipped to ± this: their exp() stays finite in half precision


class InputStatistics(NamedTuple):
    """Vocabulary and scale of the training windows."""

    # [V] CAN IDs of benign training windows, ascending. An ID that occurs in attacks only is no part of the vehicle: it
    # is unknown, in training too, so that the embedding of the unknown ID is learned.
    vocabulary: Ints
    node_mean: Floats  # [10]
    node_std: Floats  # [10]
    edge_mean: Floats  # [11]
    edge_std: Floats  # [11]

    @classmethod
    def fit(cls, flat: FlatGraphs, rows: Ints) -> Self:
        """Fits vocabulary and scale on the windows `rows`."""
        node = _mean_and_std(flat.node_features, flat.node_ptr, rows)
        edge = _mean_and_std(flat.edge_features, flat.edge_ptr, rows)
        return cls(known_ids(flat, rows), *node, *edge)

    @classmethod
    def empty(cls, vocabulary_size: int) -> Self:
        """Returns statistics of the right shapes, which a checkpoint overwrites."""
        node, edge = len(NODE_FEATURES), len(EDGE_FEATURES)
        return cls(np.arange(vocabulary_size), np.zeros(node), np.ones(node), np.zeros(edge), np.ones(edge))


def known_ids(flat: FlatGraphs, rows: Ints) -> Ints:
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


def _mean_and_std(features: NDArray[np.float32], ptr: Ints, rows: Ints) -> tuple[Floats, Floats]:
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


def _contiguous(rows: Ints) -> list[tuple[int, int]]:
    """Cuts rows into half-open runs of adjacent ones, each of at most `WINDOWS_AT_A_TIME`."""
    ordered = np.sort(rows)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    return [
        (int(part[0]), int(part[-1]) + 1)
        for run in np.split(ordered, breaks)
        for part in np.split(run, range(WINDOWS_AT_A_TIME, len(run), WINDOWS_AT_A_TIME))
        if len(part)
    ]


class GatClassifier(nn.Module):
    r"""Graph attention over a window's ID graph; the outputs of all layers are joined, mean-pooled and classified.

    Each layer is :math:`h_i' = \Vert_k \mathrm{ELU}\left(\sum_{j \in N(i) \cup i} \alpha^k_{ij} W^k h_j\right)`, whose
    attention :math:`\alpha` sees edge features (GAT: Veličković et al., 2018; jumping knowledge: Xu et al., 2018).

    Shapes:
        batch of N nodes and E edges in B graphs → logits [B, 2] (benign, attack).
    """

    def __init__(self, settings: GatSettings, inputs: InputEncoder) -> None:
        super().__init__()
        self.inputs = inputs
        self.dropout = settings.dropout
        width = settings.hidden * settings.heads
        self.layers = nn.ModuleList(
            GATConv(wide, settings.hidden, heads=settings.heads, dropout=settings.dropout, edge_dim=len(EDGE_FEATURES))
            for wide in [inputs.width] + [width] * (settings.layers - 1)
        )
        self.jump = JumpingKnowledge("cat")
        width *= settings.layers
        head: list[nn.Module] = []
        for _ in range(settings.head_layers - 1):
            head += [nn.Linear(width, width), nn.ELU(), nn.Dropout(settings.dropout)]
        self.head = nn.Sequential(*head, nn.Linear(width, 2))

    def forward(self, batch: GraphBatch) -> Tensor:
        """Returns logits [B, 2]."""
        return self.classify(self.inputs(batch), batch)

    def classify(self, inputs: tuple[Tensor, Tensor], batch: GraphBatch) -> Tensor:
        """Returns logits [B, 2] of node inputs [N, width] and edge inputs [E, 11]."""
        x, edge_attr = inputs
        outputs = []
        for layer in self.layers:
            x = F.elu(layer(x, batch.edge_index, edge_attr=edge_attr))
            x = F.dropout(x, self.dropout, self.training)
            outputs.append(x)
        pooled = global_mean_pool(self.jump(outputs), batch.batch, batch.num_graphs)
        logits: Tensor = self.head(pooled)
        return logits


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Errors of a reconstruction, of each node or edge."""

    node: Tensor  # [N] mean squared error of the standardised node features
    edge: Tensor  # [E] mean squared error of the standardised edge features
    can_id: Tensor | None  # [N] cross-entropy of the node's own ID; None where identity is off
    kl: Tensor  # [N] KL divergence of the latent from a standard normal, in nats


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The latent of a batch, and its reconstruction."""

    mean: Tensor  # [N, Z] of the latent
    log_std: Tensor  # [N, Z] of the latent
    node: Tensor  # [N, 10] standardised node features
    edge: Tensor  # [E, 11] standardised edge features
    id_logits: Tensor | None  # [N, V + 1] of the node's own ID; None where identity is off


class Vgae(nn.Module):
    r"""Attention encoder to a normal latent per node; decoders for node features, edge features and the node's CAN ID.

    :math:`z = \mu + \varepsilon \cdot \sigma`; edges are decoded from :math:`(z_\mathrm{source},
    z_\mathrm{destination})` (VGAE: Kipf and Welling, 2016).

    Args:
        settings: Widths.
        inputs: Encoder of IDs and features.
        projected: Width of the teacher's latent, to which it projects its own; 0: no teacher.

    Shapes:
        batch of N nodes and E edges, noise ε [N, Z] (None: the mean is decoded) → `Reconstruction`.
    """

    def __init__(self, settings: VgaeSettings, inputs: InputEncoder, *, projected: int = 0) -> None:
        super().__init__()
        self.inputs = inputs
        self.dropout = settings.dropout
        widths = [inputs.width, *settings.hidden]
        heads, dropout = settings.heads, settings.dropout
        self.layers = nn.ModuleList(
            GATConv(wide, out // heads, heads=heads, dropout=dropout, edge_dim=len(EDGE_FEATURES))
            for wide, out in pairwise(widths)
        )
        self.mean = nn.Linear(widths[-1], settings.latent)
        self.log_std = nn.Linear(widths[-1], settings.latent)
        mirrored = [settings.latent, *reversed(settings.hidden)]
        self.decoder = _mlp(mirrored)
        self.node_head = nn.Linear(mirrored[-1], len(NODE_FEATURES))
        self.id_head = nn.Linear(mirrored[-1], len(inputs.vocabulary) + 1) if inputs.identity else None
        pair = _mlp([2 * settings.latent, mirrored[1]])
        self.edge_decoder = nn.Sequential(pair, nn.Linear(mirrored[1], len(EDGE_FEATURES)))
        self.projection = nn.Linear(settings.latent, projected) if projected else None

    def encode(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Returns mean and log standard deviation of the latent, [N, Z] each."""
        # A function of its own: what it computes on the way is freed before the decoder begins.
        x, edge_attr = self.inputs(batch)
        for layer in self.layers:
            x = F.elu(layer(x, batch.edge_index, edge_attr=edge_attr))
            x = F.dropout(x, self.dropout, self.training)
        return self.mean(x), self.log_std(x).clamp(-MAX_LOG_STD, MAX_LOG_STD)

    def decode(self, batch: GraphBatch, noise: Tensor | None) -> Decoded:
        """Encodes a batch and reconstructs it."""
        mean, log_std = self.encode(batch)
        latent = mean if noise is None else mean + noise.to(mean.dtype) * log_std.exp()
        hidden = self.decoder(latent)
        source, destination = batch.edge_index
        return Decoded(
            mean=mean,
            log_std=log_std,
            node=self.node_head(hidden),
            edge=self.edge_decoder(torch.cat([latent[source], latent[destination]], dim=1)),
            id_logits=None if self.id_head is None else self.id_head(hidden),
        )

    def errors(self, batch: GraphBatch, decoded: Decoded) -> Reconstruction:
        """Compares a reconstruction with its batch."""
        node, edge = self.inputs.scaled(batch)
        mean, log_std = decoded.mean, decoded.log_std
        can_id = None
        if decoded.id_logits is not None:
            can_id = F.cross_entropy(decoded.id_logits, self.inputs.id_index(batch.can_id), reduction="none")
        return Reconstruction(
            node=(decoded.node - node).square().mean(dim=1),
            edge=(decoded.edge - edge).square().mean(dim=1),
            can_id=can_id,
            kl=0.5 * (mean.square() + (2 * log_std).exp() - 2 * log_std - 1).sum(dim=1),
        )

    def forward(self, batch: GraphBatch, noise: Tensor | None) -> Reconstruction:
        """Reconstructs a batch and returns the errors."""
        return self.errors(batch, self.decode(batch, noise))


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, out in pairwise(widths):
        layers += [nn.Linear(wide, out), nn.ELU()]
    return nn.Sequential(*layers)


def build_network(settings: Any, inputs: InputEncoder, *, projected: int = 0) -> nn.Module:
    """Makes a classifier or an autoencoder, which projects its latent to a teacher's width if it learns from one."""
    if isinstance(settings, GatSettings):
        return GatClassifier(settings, inputs)
    return Vgae(settings, inputs, projected=projected)
