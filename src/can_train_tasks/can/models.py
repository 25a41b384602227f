"""The networks of the CAN task: the classifier and the autoencoder.

Shapes: B graphs, N nodes, E edges, D deviations of a node (see `InputEncoder.deviations`), Z latent width.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train_tasks.can.data.batches import Batch, PreparedBatch, scatter
from can_train_tasks.can.data.behaviour import BEHAVIOUR
from can_train_tasks.can.data.graphs import EDGE_FEATURES
from can_train_tasks.can.inputs import InputEncoder
from can_train_tasks.can.settings import GatSettings, VgaeSettings

WORST_NODES: Final = 3  # nodes of a window with the largest errors, whose mean is a term of the score
# Attack logits of an untrained classifier: for a shortest gap with a deviation of -1, and for one unknown ID on a known
# bus. Training cannot teach the logit of unknown IDs: by definition, benign training windows have no unknown IDs.
CLOSE_FRAMES: Final = 2.0
STRANGE_ID: Final = 8.0
# Addition to a classifier's score for one overdue ID. It is not part of the loss: by definition, benign training
# windows have no overdue IDs, so the model could not learn it.
MISSING_ID: Final = 8.0
NEGATIVE_SLOPE: Final = 0.2  # slope of the attention's leaky ReLU for negative inputs, as in GATConv
LEAST_TOTAL: Final = 1e-16  # is added to the denominator of a softmax, as in GATConv
MAX_LOG_STD: Final = 5.0  # log standard deviations are clipped to ± this: their exp() stays finite in half precision


class EdgeAttention(nn.Module):
    r"""Graph attention like torch_geometric's `GATConv`, on edges with features that include the self-loops.

    `with_self_loops` adds the self-loops. Weights, their names and outputs equal `GATConv`'s. The layer takes less
    memory: a head's attention takes :math:`a_e^\top W_e e_{ij}` from an edge, and :math:`W_e^\top a_e` is computed
    first. So E edges are multiplied by [features, heads], and not by [features, heads · channels], which takes as much
    memory as the messages.

    Source: Veličković et al., 2018.

    Shapes:
        x [N, wide], ends [2, E] and features [E, 11] of the edges → [N, heads · channels].
    """

    # Not a subclass of MessagePassing: torch_geometric writes a module into the temporary folder for each subclass.
    def __init__(self, wide: int, channels: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.channels, self.dropout = heads, channels, dropout
        self.lin = nn.Linear(wide, heads * channels, bias=False)
        self.lin_edge = nn.Linear(len(EDGE_FEATURES), heads * channels, bias=False)
        self.att_src, self.att_dst, self.att_edge = (nn.Parameter(torch.empty(1, heads, channels)) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(heads * channels))
        for weight in (self.lin.weight, self.lin_edge.weight, self.att_src, self.att_dst, self.att_edge):
            bound = math.sqrt(6.0 / (weight.shape[-2] + weight.shape[-1]))  # Glorot and Bengio, 2010
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, ends: Tensor, edge: Tensor) -> Tensor:
        """Returns, for each node, the sum of its entering messages, weighted by attention."""
        source, target = ends
        message = self.lin(x).view(-1, self.heads, self.channels)
        folded = (self.lin_edge.weight.view(self.heads, self.channels, -1) * self.att_edge[0, :, :, None]).sum(1)
        of_source, of_target = ((message * weight).sum(-1) for weight in (self.att_src, self.att_dst))
        alpha = of_source.index_select(0, source) + of_target.index_select(0, target) + F.linear(edge, folded)
        alpha = softmax_of_groups(F.leaky_relu(alpha, NEGATIVE_SLOPE), target, x.shape[0])
        alpha = F.dropout(alpha, self.dropout, self.training)
        entering = alpha[:, :, None] * message.index_select(0, source)
        return scatter(entering, target, x.shape[0]).flatten(1) + self.bias


def softmax_of_groups(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Returns the softmax of values [M, …] over the rows of each group; `group` [M] is as for `scatter`."""
    highest = scatter(values.detach(), group, num_groups, "max").index_select(0, group)
    powers = (values - highest).exp()
    total = scatter(powers, group, num_groups) + LEAST_TOTAL
    return powers / total.index_select(0, group)


class GatClassifier(nn.Module):
    r"""Graph attention over a window's ID graph; the outputs of all layers are joined, mean-pooled and classified.

    The classifier also sees the largest and the smallest value of each deviation in the window: a mean over all IDs
    would hide a single ID that is out of step. Its first weights encode two facts about injected frames: they come too
    close to an ID's other frames, or have an ID that is not on the bus.

    Each layer is :math:`h_i' = \Vert_k \mathrm{ELU}\left(\sum_{j \in N(i) \cup i} \alpha^k_{ij} W^k h_j\right)`, whose
    attention :math:`\alpha` sees edge features (GAT: Veličković et al., 2018; jumping knowledge: Xu et al., 2018).

    Shapes:
        batch of N nodes and E edges in B graphs → logits [B, 2] (benign, attack).
    """

    def __init__(self, settings: GatSettings, inputs: InputEncoder) -> None:
        super().__init__()
        self.inputs = inputs
        self.dropout = settings.dropout
        self.graph_dropout = 1 - (1 - settings.dropout) ** 2
        width = settings.hidden * settings.heads
        self.layers = nn.ModuleList(
            EdgeAttention(wide, settings.hidden, heads=settings.heads, dropout=settings.dropout)
            for wide in [inputs.width] + [width] * (settings.layers - 1)
        )
        width *= settings.layers
        head: list[nn.Module] = []
        for _ in range(settings.head_layers - 1):
            head += [nn.Linear(width, width), nn.ELU(), nn.Dropout(settings.dropout)]
        self.head = nn.Sequential(*head)
        self.output = nn.Linear(width + 2 * inputs.num_deviations, 2)
        if inputs.num_deviations:
            # The weights of the shortest gap and of the strangest ID expect an injection.
            sides = torch.tensor([-0.5, 0.5])  # benign, attack
            smallest = width + inputs.num_deviations  # first column of the smallest deviations
            with torch.no_grad():
                self.output.weight[:, smallest + BEHAVIOUR.index("gap_min")] = -CLOSE_FRAMES * sides
                self.output.weight[:, smallest - 1] = STRANGE_ID * sides

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, 2]."""
        prepared = self.inputs.prepared(batch)
        return self.classify(self.inputs(prepared), prepared)

    def classify(self, x: Tensor, batch: PreparedBatch) -> Tensor:
        """Returns logits [B, 2] of node inputs [N, width] and the edges of a batch."""
        deviations = x[:, x.shape[1] - self.inputs.num_deviations :]
        extremes = (sign * scatter(sign * deviations, batch.batch, batch.num_graphs, "max") for sign in (1, -1))
        outputs = []
        for layer in self.layers:
            x = F.elu(layer(x, batch.ends, batch.edge))
            x = F.dropout(x, self.dropout, self.training)
            outputs.append(x)
        pooled = self.head(scatter(torch.cat(outputs, dim=1), batch.batch, batch.num_graphs, "mean"))
        if self.inputs.num_deviations:
            # For some windows the pooled graph is dropped. Otherwise it explains the few attacks of training alone,
            # and the weights of the extremes, which hold for other attacks too, are not learned.
            pooled = pooled * F.dropout(pooled.new_ones(pooled.shape[0], 1), self.graph_dropout, self.training)
        logits: Tensor = self.output(torch.cat([pooled, *extremes], dim=1))
        return logits


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Errors of a reconstruction for each node or edge."""

    node: Tensor  # [N] weighted mean squared error of the node's features, see `InputEncoder.prepared`
    edge: Tensor  # [E] mean squared error of the standardised edge features
    can_id: Tensor | None  # [N] cross-entropy of the node's CAN ID; None where identity is off
    kl: Tensor  # [N] KL divergence of the latent from a standard normal, in nats


def worst_nodes(error: Tensor, graph: Tensor) -> Tensor:
    """Returns the positions of the `WORST_NODES` largest errors [N] of each graph; a smaller graph gives all nodes."""
    order = torch.argsort(error, descending=True, stable=True)
    order = order[torch.argsort(graph[order], stable=True)]
    first = torch.searchsorted(graph[order], graph[order])
    return order[torch.arange(len(order), device=order.device) - first < WORST_NODES]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The latent of a batch, and its reconstruction."""

    mean: Tensor  # [N, Z] mean of the latent
    log_std: Tensor  # [N, Z] log standard deviation of the latent
    node: Tensor  # [N, T] features of the node, see `InputEncoder.prepared`
    edge: Tensor  # [E, 11] standardised edge features
    id_logits: Tensor | None  # [N, V + 1] logits of the node's CAN ID; None where identity is off


class Vgae(nn.Module):
    r"""Attention encoder to a normal latent per node; decoders for node features, edge features and the node's CAN ID.

    :math:`z = \mu + \varepsilon \cdot \sigma`; edges are decoded from :math:`(z_\mathrm{source},
    z_\mathrm{destination})` (VGAE: Kipf and Welling, 2016).

    Args:
        settings: Widths.
        inputs: Encoder of IDs and features.
        projected: Width of the teacher's latent, for a projection to it; 0: no teacher.

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
            EdgeAttention(wide, out // heads, heads=heads, dropout=dropout) for wide, out in pairwise(widths)
        )
        self.mean = nn.Linear(widths[-1], settings.latent)
        self.log_std = nn.Linear(widths[-1], settings.latent)
        mirrored = [settings.latent, *reversed(settings.hidden)]
        self.decoder = _mlp(mirrored)
        self.node_head = nn.Linear(mirrored[-1], len(inputs.target_weights))
        self.id_head = nn.Linear(mirrored[-1], len(inputs.vocabulary) + 1) if inputs.identity else None
        pair = _mlp([2 * settings.latent, mirrored[1]])
        self.edge_decoder = nn.Sequential(pair, nn.Linear(mirrored[1], len(EDGE_FEATURES)))
        self.projection = nn.Linear(settings.latent, projected) if projected else None

    def encode(self, batch: PreparedBatch) -> tuple[Tensor, Tensor]:
        """Returns mean and log standard deviation of the latent, [N, Z] each."""
        # A separate function, so that its intermediate tensors are freed before the decoder begins.
        x = self.inputs(batch)
        for layer in self.layers:
            x = F.elu(layer(x, batch.ends, batch.edge))
            x = F.dropout(x, self.dropout, self.training)
        return self.mean(x), self.log_std(x).clamp(-MAX_LOG_STD, MAX_LOG_STD)

    def prepared(self, batch: Batch) -> PreparedBatch:
        """Computes the inputs of a batch; a batch that has them stays as it is."""
        return self.inputs.prepared(batch, reconstructs=True)

    def decode(self, batch: PreparedBatch, noise: Tensor | None) -> Decoded:
        """Encodes a batch and reconstructs it."""
        mean, log_std = self.encode(batch)
        latent = mean if noise is None else mean + noise.to(mean.dtype) * log_std.exp()
        hidden = self.decoder(latent)
        source, destination = batch.features.ends
        return Decoded(
            mean=mean,
            log_std=log_std,
            node=self.node_head(hidden),
            edge=self.edge_decoder(torch.cat([latent[source], latent[destination]], dim=1)),
            id_logits=None if self.id_head is None else self.id_head(hidden),
        )

    def errors(self, batch: PreparedBatch, decoded: Decoded) -> Reconstruction:
        """Compares a reconstruction with its batch."""
        features, mean, log_std = batch.features, decoded.mean, decoded.log_std
        can_id = None
        if decoded.id_logits is not None:
            can_id = F.cross_entropy(decoded.id_logits, batch.index, reduction="none")
        return Reconstruction(
            node=(decoded.node - features.node).square() @ self.inputs.target_weights.to(features.node.dtype),
            edge=(decoded.edge - features.edge).square().mean(dim=1),
            can_id=can_id,
            kl=0.5 * (mean.square() + (2 * log_std).exp() - 2 * log_std - 1).sum(dim=1),
        )

    def forward(self, batch: Batch, noise: Tensor | None) -> Reconstruction:
        """Reconstructs a batch and returns the errors."""
        prepared = self.prepared(batch)
        return self.errors(prepared, self.decode(prepared, noise))


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, out in pairwise(widths):
        layers += [nn.Linear(wide, out), nn.ELU()]
    return nn.Sequential(*layers)


def build_network(settings: Any, inputs: InputEncoder, *, projected: int = 0) -> nn.Module:
    """Makes a classifier or an autoencoder; `projected` is the latent width of the latter's teacher, 0: no teacher."""
    if isinstance(settings, GatSettings):
        return GatClassifier(settings, inputs)
    return Vgae(settings, inputs, projected=projected)
