"""The variational graph autoencoder of benign windows.

Shapes: B graphs, N nodes, E edges, V known CAN IDs, Z latent width.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv

from can_train.tasks.can.data.batches import GraphBatch
from can_train.tasks.can.data.graphs import EDGE_FEATURES, NODE_FEATURES
from can_train.tasks.can.models.inputs import InputEncoder
from can_train.tasks.can.settings import VgaeSettings

# Log standard deviations are clipped to ± this, so that exp() in the KL term stays finite in half precision.
MAX_LOG_STD: Final = 5.0


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
        self.layers = nn.ModuleList(
            GATConv(
                wide, out // settings.heads, heads=settings.heads, dropout=settings.dropout, edge_dim=len(EDGE_FEATURES)
            )
            for wide, out in pairwise(widths)
        )
        self.mean = nn.Linear(widths[-1], settings.latent)
        self.log_std = nn.Linear(widths[-1], settings.latent)
        mirrored = [settings.latent, *reversed(settings.hidden)]
        self.decoder = _mlp(mirrored)
        self.node_head = nn.Linear(mirrored[-1], len(NODE_FEATURES))
        self.id_head = nn.Linear(mirrored[-1], len(inputs.vocabulary) + 1) if inputs.identity else None
        self.edge_decoder = nn.Sequential(
            _mlp([2 * settings.latent, mirrored[1]]), nn.Linear(mirrored[1], len(EDGE_FEATURES))
        )
        self.projection = nn.Linear(settings.latent, projected) if projected else None

    def encode(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Returns mean and log standard deviation of the latent, [N, Z] each."""
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
