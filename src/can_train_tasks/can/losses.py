"""The losses of a logical batch of windows, as sums with denominators of the whole batch.

Shapes: R windows of the logical batch, B windows of a micro-batch, N nodes, E edges, Z latent width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.memory.meters import send
from can_train.task import Outputs
from can_train_tasks.can.data.batches import Batch, GraphBatch, scatter
from can_train_tasks.can.data.graphs import Bools, Floats, Ints
from can_train_tasks.can.inputs import InputEncoder
from can_train_tasks.can.models import MISSING_ID, Reconstruction, worst_nodes

# Makes a batch from the numbers of its windows.
Gather = Callable[[Ints], Batch]

# Sum and denominator of each term.
Losses = dict[str, tuple[Tensor, float]]


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """Makes a numpy generator with a seed from a torch generator; its arrays take no device memory."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))


def _with_hidden(batch: Batch, hidden: Bools | None, start: int, stop: int) -> Batch:
    if hidden is None:
        return batch
    return replace(batch, hidden=send(torch.from_numpy(hidden[start:stop]), batch.device))


@dataclass(frozen=True, eq=False)
class ClassifierBatch:
    """Class-weighted cross-entropy; its denominator is the sum of the windows' class weights."""

    rows: Ints  # [R] the windows
    gather: Gather  # makes a batch of some of the windows
    weights: Floats  # [R] each window's class weight
    benign_offset: float = field(default=0.0, kw_only=True)  # added to the benign logit
    hidden: Bools | None = field(default=None, kw_only=True)  # [R] see `hide_ids`
    # In validation: which of the windows whose losses were computed are called attacks, part by part.
    called: list[Tensor] | None = field(default=None, kw_only=True)

    @property
    def denominators(self) -> dict[str, float]:
        """The sum of the class weights of the whole batch."""
        return {"classification": float(self.weights.sum())}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the weighted sum over windows `start:stop`."""
        batch = self._batch(start, stop)
        return self._classification(model(batch), batch, start, stop)

    def _batch(self, start: int, stop: int) -> Batch:
        return _with_hidden(self.gather(self.rows[start:stop]), self.hidden, start, stop)

    def _classification(self, logits: Tensor, batch: Batch, start: int, stop: int) -> Losses:
        if self.called is not None:
            self.called.append(logits.argmax(dim=1) > 0)
        weights = send(torch.from_numpy(self.weights[start:stop]), batch.device, batch.dtype)
        # Half precision would round the offset.
        precise = torch.promote_types(logits.dtype, torch.float32)
        offset = torch.tensor([self.benign_offset, 0.0], dtype=precise, device=logits.device)
        each = F.cross_entropy(logits + offset, batch.y, reduction="none")
        return {"classification": ((each * weights).sum(), float(self.weights[start:stop].sum()))}

    @staticmethod
    def scores(model: nn.Module, batch: GraphBatch) -> Tensor:
        """Returns the scores [B, 1]: attack logit minus benign logit, plus `MISSING_ID` for each overdue ID."""
        logits: Tensor = model(batch).float()
        inputs = cast(InputEncoder, model.inputs)
        overdue = scatter(inputs.overdue(batch).float(), batch.absent_batch, batch.num_graphs)
        score: Tensor = logits[:, 1] - logits[:, 0] + MISSING_ID * overdue
        return score.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class DistilledClassifierBatch(ClassifierBatch):
    """Cross-entropy, and the KL divergence of the softened probabilities from a teacher's; its denominator is R."""

    teacher: Outputs
    temperature: float

    @property
    def denominators(self) -> dict[str, float]:
        """The sum of the class weights of the whole batch, and its number of windows."""
        return {**super().denominators, "distillation": float(len(self.rows))}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the sums of both terms over windows `start:stop`."""
        # The teacher comes first: its activations are freed before the student's are allocated.
        target = self.teacher(self.rows[start:stop])["logits"]
        batch = self._batch(start, stop)
        logits = model(batch)
        either = (logits, target.to(logits.dtype))
        student, teacher = (F.log_softmax(one / self.temperature, dim=1) for one in either)
        distance = F.kl_div(student, teacher, reduction="sum", log_target=True)
        return self._classification(logits, batch, start, stop) | {"distillation": (distance, float(stop - start))}


@dataclass(frozen=True, kw_only=True, eq=False)
class AutoencoderBatch:
    """The autoencoder's terms for nodes, edges, CAN IDs and KL; their denominators are numbers of nodes and edges."""

    rows: Ints  # [R] the windows
    gather: Gather  # makes a batch of some of the windows
    node_ptr: Ints  # [R + 1] offsets of the windows' nodes in the logical batch
    edge_ptr: Ints  # [R + 1] offsets of the windows' edges in the logical batch
    # [N, Z] noise of the latent for all nodes, on the host, where it takes no device memory; None: the mean is decoded.
    noise: NDArray[np.float32] | None
    hidden: Bools | None = None  # [R] see `hide_ids`

    @classmethod
    def draw(
        cls, rows: Ints, gather: Gather, counts: tuple[Ints, Ints], latent: int, generator: torch.Generator | None
    ) -> Self:
        """Draws the noise of the whole logical batch, so that a split does not change it.

        Without a generator there is no noise. `counts` are the numbers of nodes [R] and of edges [R] of the windows,
        `latent` is Z.
        """
        node_ptr, edge_ptr = (np.concatenate([[0], np.cumsum(count)]) for count in counts)
        noise = None
        if generator is not None:
            noise = numpy_generator(generator).standard_normal((int(node_ptr[-1]), latent), dtype=np.float32)
        return cls(rows=rows, gather=gather, node_ptr=node_ptr, edge_ptr=edge_ptr, noise=noise)

    @property
    def denominators(self) -> dict[str, float]:
        """Nodes and edges of the whole batch."""
        nodes, edges = self._counts(0, len(self.rows))
        return {"node": nodes, "edge": edges, "can_id": nodes, "kl": nodes}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the sum of each term over windows `start:stop`."""
        batch = self._batch(start, stop)
        return self._sums(model(batch, self._noise_of(batch, start, stop)), start, stop)

    def _batch(self, start: int, stop: int) -> Batch:
        return _with_hidden(self.gather(self.rows[start:stop]), self.hidden, start, stop)

    def _sums(self, errors: Reconstruction, start: int, stop: int) -> Losses:
        num_nodes, num_edges = self._counts(start, stop)
        node, edge, kl = errors.node.sum(), errors.edge.sum(), errors.kl.sum()
        terms = {"node": (node, num_nodes), "edge": (edge, num_edges), "kl": (kl, num_nodes)}
        return terms if errors.can_id is None else terms | {"can_id": (errors.can_id.sum(), num_nodes)}

    def _counts(self, start: int, stop: int) -> tuple[float, float]:
        """Returns the numbers of nodes and edges of windows `start:stop`."""
        return (float(self.node_ptr[stop] - self.node_ptr[start]), float(self.edge_ptr[stop] - self.edge_ptr[start]))

    def _noise_of(self, batch: Batch, start: int, stop: int) -> Tensor | None:
        nodes = slice(self.node_ptr[start], self.node_ptr[stop])
        return None if self.noise is None else send(torch.from_numpy(self.noise[nodes]), batch.device, batch.dtype)

    @staticmethod
    def scores(model: nn.Module, batch: GraphBatch) -> Tensor:
        """Returns the `ERROR_TERMS` [B, 5] of each window."""
        errors: Reconstruction = model(batch, None)
        edge_graph = batch.batch[batch.edge_index[0]]
        worst = worst_nodes(errors.node, batch.batch)
        means = ((errors.node, batch.batch), (errors.edge, edge_graph), (errors.kl, batch.batch),
                 (errors.node[worst], batch.batch[worst]))  # fmt: skip
        per_graph = [scatter(error.float(), graph, batch.num_graphs, "mean") for error, graph in means]
        inputs = cast(InputEncoder, model.inputs)
        ids = torch.cat([inputs.strangeness(batch, inputs.id_index(batch)), inputs.overdue(batch)]).float()
        graph = torch.cat([batch.batch, batch.absent_batch])
        per_graph.append(scatter(ids, graph, batch.num_graphs))
        return torch.stack(per_graph, dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistilledAutoencoderBatch(AutoencoderBatch):
    """The autoencoder's terms, and its mean squared distances from a teacher: of projected latents, reconstructions."""

    teacher: Outputs  # the teacher's latents and reconstructions

    @property
    def denominators(self) -> dict[str, float]:
        """Nodes and edges of the whole batch."""
        nodes, edges = self._counts(0, len(self.rows))
        return {**super().denominators, "teacher_latent": nodes, "teacher_node": nodes, "teacher_edge": edges}

    def losses(self, model: nn.Module, start: int, stop: int) -> Losses:
        """Returns the sum of each term over windows `start:stop`."""
        # The teacher comes first: its activations are freed before the student's are allocated.
        targets = self.teacher(self.rows[start:stop])
        batch = model.prepared(self._batch(start, stop))  # type: ignore[operator]
        decoded = model.decode(batch, self._noise_of(batch, start, stop))  # type: ignore[operator]
        errors = model.errors(batch, decoded)  # type: ignore[operator]
        student = {"latent": model.projection(decoded.mean), "node": decoded.node, "edge": decoded.edge}  # type: ignore[operator]
        num_nodes, num_edges = self._counts(start, stop)
        counts = {"latent": num_nodes, "node": num_nodes, "edge": num_edges}
        distances = {
            f"teacher_{name}": ((part - targets[name].to(part.dtype)).square().mean(dim=1).sum(), counts[name])
            for name, part in student.items()
        }
        return self._sums(errors, start, stop) | distances
