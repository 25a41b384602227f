"""The losses of a logical batch of windows, as sums with the denominators of the whole batch.

Shapes: R windows of the logical batch, B of a micro-batch, N nodes, E edges, Z latent width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.utils import scatter

from can_train.tasks.can.gather import GraphBatch

Gather = Callable[[NDArray[np.int64]], GraphBatch]
Losses = dict[str, tuple[Tensor, float]]


class ClassifierBatch:
    """Class-weighted cross-entropy; its denominator is the sum of the windows' class weights.

    Args:
        rows: [R] the windows.
        gather: Makes a batch of some of them.
        weights: [R] each window's class weight.
    """

    def __init__(self, rows: NDArray[np.int64], gather: Gather, weights: NDArray[np.float64]) -> None:
        self._rows = rows
        self._gather = gather
        self._weights = weights
        self.denominators = {"classification": float(weights.sum())}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the weighted sum over windows `start:stop`."""
        batch = self._gather(self._rows[start:stop])
        weights = torch.from_numpy(self._weights[start:stop]).to(batch.x)
        each = F.cross_entropy(model(batch), batch.y, reduction="none")
        return {"classification": ((each * weights).sum(), float(self._weights[start:stop].sum()))}

    @staticmethod
    def scores(model: nn.Module, batch: GraphBatch) -> Tensor:
        """Returns [B, 1]: the attack logit minus the benign one, a monotone stand-in for p(attack)."""
        logits: Tensor = model(batch).float()
        return (logits[:, 1] - logits[:, 0]).unsqueeze(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class AutoencoderBatch:
    """The autoencoder's terms: nodes, edges, CAN IDs and KL, each with the count it is a mean over.

    Attributes:
        rows: [R] the windows.
        gather: Makes a batch of some of them.
        node_ptr: [R + 1] offsets of the windows' nodes in the logical batch.
        edge_ptr: [R + 1] offsets of their edges.
        noise: [N, Z] the latent's noise for all nodes, on the host, where it costs no device memory; None decodes the
            mean.
    """

    rows: NDArray[np.int64]
    gather: Gather
    node_ptr: NDArray[np.int64]
    edge_ptr: NDArray[np.int64]
    noise: NDArray[np.float32] | None

    @classmethod
    def draw(
        cls,
        rows: NDArray[np.int64],
        gather: Gather,
        counts: tuple[NDArray[np.int64], NDArray[np.int64]],
        latent: int,
        generator: torch.Generator | None,
    ) -> "AutoencoderBatch":
        """Draws the noise of the whole logical batch, so that its split cannot change it.

        Args:
            rows: [R] the windows.
            gather: Makes a batch of some of them.
            counts: [R] nodes and [R] edges of each.
            latent: Width Z.
            generator: Where noise comes from; None: no noise.
        """
        node_ptr, edge_ptr = (np.concatenate([[0], np.cumsum(count)]) for count in counts)
        noise = None if generator is None else _normal(int(node_ptr[-1]), latent, generator)
        return cls(rows=rows, gather=gather, node_ptr=node_ptr, edge_ptr=edge_ptr, noise=noise)

    @property
    def denominators(self) -> dict[str, float]:
        """Nodes and edges of the whole batch."""
        nodes, edges = float(self.node_ptr[-1]), float(self.edge_ptr[-1])
        return {"node": nodes, "edge": edges, "can_id": nodes, "kl": nodes}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns each term's sum over windows `start:stop`."""
        nodes = slice(self.node_ptr[start], self.node_ptr[stop])
        batch = self.gather(self.rows[start:stop])
        noise = None if self.noise is None else torch.from_numpy(self.noise[nodes]).to(batch.x)
        errors = model(batch, noise)
        num_nodes = float(self.node_ptr[stop] - self.node_ptr[start])
        num_edges = float(self.edge_ptr[stop] - self.edge_ptr[start])
        terms = {
            "node": (errors.node.sum(), num_nodes),
            "edge": (errors.edge.sum(), num_edges),
            "kl": (errors.kl.sum(), num_nodes),
        }
        return terms if errors.can_id is None else terms | {"can_id": (errors.can_id.sum(), num_nodes)}

    @staticmethod
    def scores(model: nn.Module, batch: GraphBatch) -> Tensor:
        """Returns [B, 3]: each window's mean node error, edge error and KL divergence."""
        errors = model(batch, None)
        edge_graph = batch.batch[batch.edge_index[0]]
        per_graph = [
            scatter(error.float(), graph, dim=0, dim_size=batch.num_graphs, reduce="mean")
            for error, graph in ((errors.node, batch.batch), (errors.edge, edge_graph), (errors.kl, batch.batch))
        ]
        return torch.stack(per_graph, dim=1)


def _normal(rows: int, columns: int, generator: torch.Generator) -> NDArray[np.float32]:
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
