"""Finished models at work on the windows of a data set: as they are scored, and as other modes ask them. A checkpoint
brings its own vocabulary and scale, so it works on any log; whether it fits what is trained beside it is checked here.

Shapes: R rows (windows), N nodes, E edges, Z latent width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import FinishedModel
from can_train.errors import CheckpointError
from can_train.task import ReferenceModel
from can_train.tasks.can.data.batches import GRAPH_FEATURES, Gatherer, GraphBatch
from can_train.tasks.can.data.graphs import EDGE_FEATURES, NODE_FEATURES, FlatGraphs
from can_train.tasks.can.evaluation.metrics import anomaly_scores
from can_train.tasks.can.losses import AutoencoderBatch, ClassifierBatch
from can_train.tasks.can.models.build import build_network
from can_train.tasks.can.models.inputs import InputEncoder, InputStatistics, known_ids
from can_train.tasks.can.settings import GatSettings

if TYPE_CHECKING:
    from can_train.tasks.can.data.dataset import CanData

AUTOENCODER: Final = "autoencoder"


CLASSIFIER: Final = "classifier"
"""Roles of models that modes build on."""


ASKED_ONCE: Final[tuple[str, ...]] = ("cache",)
"""Placements of a reference model that is asked before training, and not during it."""


_PROJECTION: Final = "projection.weight"
"""Weights that an autoencoder has beside its own where it learned from a teacher: [teacher's Z, Z]."""


class FinishedNetwork:
    """A finished model on the windows of a data set.

    Args:
        finished: The model.
        flat: The windows.

    Attributes:
        model: The network, frozen and in evaluation mode, on the CPU.
        supervised: Whether it is a classifier; else it is an autoencoder.

    Raises:
        CheckpointError: The weights are not those of the run's settings.
    """

    def __init__(self, finished: FinishedModel, flat: FlatGraphs) -> None:
        self.finished = finished
        self.supervised = isinstance(finished.run.model, GatSettings)
        self.model = _network(finished)
        self._gather = Gatherer(flat)

    def batch(self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> GraphBatch:
        """Gathers windows."""
        return self._gather(rows).to(device, dtype)

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self._gather.batch_features(rows)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 1] attack logit differences, or [R, 3] node, edge and latent errors.

        Args:
            model: The network, or a copy of it on the device.
            rows: [R] the windows.
            device: Where to compute.
            dtype: Type of the features.
        """
        batch = self.batch(rows, device, dtype)
        return ClassifierBatch.scores(model, batch) if self.supervised else AutoencoderBatch.scores(model, batch)

    def combine(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [R] final scores, higher is more attack-like: logit differences, or anomaly scores.

        Raises:
            CheckpointError: The run's result does not say in which units its errors are.
        """
        return scores[:, 0] if self.supervised else anomaly_scores(scores, self.error_units)

    @property
    def error_units(self) -> list[float]:
        """Units of the autoencoder's error terms.

        Raises:
            CheckpointError: The run's result does not say them.
        """
        try:
            units: list[float] = self.finished.result["judgement"]["error_units"]
        except KeyError as error:
            raise CheckpointError(
                "The run's result lacks the units of its errors: an older version made it",
                value=self.finished.run_id,
                remedy="Train the autoencoder anew",
            ) from error
        return units


class AskedNetwork(FinishedNetwork):
    """A finished model that another run asks: it scores in full precision, whatever that one computes in, so that its
    scores are the same wherever they are wanted.
    """

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Scores windows (see `FinishedNetwork.scores`)."""
        with torch.autocast(device.type, enabled=False):
            return super().scores(model, rows, device, dtype)


def _network(finished: FinishedModel) -> nn.Module:
    weights = finished.weights
    try:
        statistics = InputStatistics.empty(len(weights["inputs.vocabulary"]))
        run = finished.run
        inputs = InputEncoder(statistics, embedding=run.model.embedding, identity=run.dataset.identity)
        projected = len(weights[_PROJECTION]) if _PROJECTION in weights else 0
        model = build_network(run.model, inputs, projected=projected)
        # Weights of a run in double precision would lose their digits in a network of single precision.
        model.to(weights["inputs.node_mean"].dtype).load_state_dict(dict(weights))
    except (KeyError, RuntimeError) as error:
        # PyTorch says it field by field, under a headline.
        fields = [line.strip().rstrip(".") for line in str(error).splitlines()]
        raise CheckpointError(
            "A run's weights are those of its settings",
            value=f"{finished.run_id}: {'; '.join(fields[1:] or fields)}",
            remedy="Copy the run once more from where it was trained, or train it anew",
        ) from error
    return model.eval().requires_grad_(False)


class WindowReferenceModel(ReferenceModel):
    """A finished model that a mode asks about windows.

    Args:
        role: What it is to the mode.
        network: The model on the data set.
        rows: [R] windows that it is asked about in training and validation.

    Attributes:
        placements: Where its answers may come from.
    """

    output = ""
    """Name of what it answers, in digests."""

    features = GRAPH_FEATURES

    def __init__(self, role: str, network: FinishedNetwork, data: CanData, rows: NDArray[np.int64]) -> None:
        self.role = role
        self.network = network
        self.name = network.finished.run_id
        self.model = network.model
        self.rows = rows
        self.placements = ASKED_ONCE
        self._flat = data.flat

    @property
    def digest(self) -> str:
        """Of the weights, the windows and what is asked about them."""
        flat, rows = self._flat, self.rows
        digest = hashlib.sha256(f"{self.output} {self.network.finished.sha256} {flat.window}".encode())
        digest.update(" ".join(source.sha256 for source in flat.sources).encode())
        for array in (rows, flat.source[rows], flat.first_frame[rows], flat.num_nodes[rows], flat.num_edges[rows]):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self.network.batch_features(rows)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Computes what judging needs of each window (see `FinishedNetwork.scores`)."""
        return self.network.scores(model, rows, device, dtype)


class LogitsReferenceModel(WindowReferenceModel):
    """A classifier, asked for its logits."""

    output = "logits"

    @property
    def widths(self) -> Mapping[str, int]:
        """Columns of each output."""
        return {"logits": 2}

    def outputs(
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        """Returns [R, 2] logits (benign, attack)."""
        return {"logits": model(self.network.batch(rows, device, dtype))}


class ErrorsReferenceModel(WindowReferenceModel):
    """An autoencoder, asked how badly it reconstructs each window."""

    output = "errors"

    @property
    def widths(self) -> Mapping[str, int]:
        """Columns of each output."""
        return {"errors": 3}

    def outputs(
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        """Returns [R, 3] node, edge and latent errors."""
        return {"errors": self.network.scores(model, rows, device, dtype)}


class ReconstructionReferenceModel(WindowReferenceModel):
    """An autoencoder, asked for its latents and reconstructions."""

    output = "reconstruction"

    @property
    def widths(self) -> Mapping[str, int]:
        """Columns of each output."""
        latent = self.network.finished.run.model.latent
        return {"latent": latent, "node": len(NODE_FEATURES), "edge": len(EDGE_FEATURES)}

    def lengths(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]]:
        """Returns how many rows of each output each window has: its nodes and edges."""
        nodes, edges = self._flat.num_nodes[rows], self._flat.num_edges[rows]
        return {"latent": nodes, "node": nodes, "edge": edges}

    def outputs(
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        """Returns [N, Z] means of the latent, [N, 10] node and [E, 11] edge features as decoded from them."""
        decoded = model.decode(self.network.batch(rows, device, dtype), None)  # type: ignore[operator]
        return {"latent": decoded.mean, "node": decoded.node, "edge": decoded.edge}


_KINDS: Final[Mapping[str, type[WindowReferenceModel]]] = {
    kind.output: kind for kind in (LogitsReferenceModel, ErrorsReferenceModel, ReconstructionReferenceModel)
}


def reference_model_of(
    role: str, finished: FinishedModel, data: CanData, rows: NDArray[np.int64], *, output: str
) -> WindowReferenceModel:
    """Makes the reference model that a finished model becomes.

    Args:
        role: What it is to the mode.
        finished: The model.
        data: The windows.
        rows: [R] those that it is asked about in training and validation.
        output: What it is asked for: `logits`, `errors` or `reconstruction`.

    Raises:
        CheckpointError: It does not fit the windows; said field by field.
    """
    network = AskedNetwork(finished, data.flat)
    check_fit(role, network, data)
    return _KINDS[output](role, network, data, rows)


def check_fit(role: str, network: FinishedNetwork, data: CanData) -> None:
    """Checks that a finished model knows the vehicle that it is asked about, and sees the features that are there.

    What only a part of was read is not held against it.

    Raises:
        CheckpointError: It does not; said field by field.
    """
    differences = _shape_differences(network.finished.weights) + (
        _vocabulary_differences(network.finished.weights, data) if data.sample is None else []
    )
    if differences:
        raise CheckpointError(
            f"The {role.replace('_', ' ')} must have been trained on the same features and vehicle",
            value=f"{network.finished.run_id}: {'; '.join(differences)}",
            remedy=f"Train one on this data set, or name another with --{role.replace('_', '-')}",
        )


def _shape_differences(weights: Mapping[str, Any]) -> list[str]:
    expected = {"inputs.node_mean": len(NODE_FEATURES), "inputs.edge_mean": len(EDGE_FEATURES)}
    return [
        f"{name.removeprefix('inputs.').removesuffix('_mean')} features: {len(weights[name])}, not {count}"
        for name, count in expected.items()
        if len(weights[name]) != count
    ]


def _vocabulary_differences(weights: Mapping[str, Any], data: CanData) -> list[str]:
    mine = set(known_ids(data.flat, data.split.train).tolist())
    its = set(np.asarray(weights["inputs.vocabulary"]).tolist())
    if mine == its:
        return []
    only_its, only_mine = len(its - mine), len(mine - its)
    return [f"vocabulary: {len(its)} CAN IDs, not {len(mine)} ({only_its} only it knows, {only_mine} it does not know)"]
