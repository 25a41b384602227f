"""Finished models on the windows of a data set: judged alone, or consulted by a mode as reference models.

A checkpoint includes vocabulary and scale, so it scores any log. A reference model must also suit the model that is
trained with it; this module checks that.

Shapes: R rows (windows), N nodes, E edges, I IDs and P properties (see `contributions`), Z latent width, S columns of
raw scores.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import TYPE_CHECKING, Final, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from can_train.config.resolved import FinishedModel
from can_train.errors import CheckpointError, RunError
from can_train.task import ReferenceModel
from can_train_tasks.can.contributions import (
    CHECKSUM,
    CONTEXTS,
    COUNTER,
    IDENTITY,
    JUMPS,
    PERIOD,
    PROPERTIES,
    SILENCE,
    autoencoder_contributions,
    classifier_contributions,
    with_rule_columns,
)
from can_train_tasks.can.data.batches import GRAPH_FEATURES, Gatherer
from can_train_tasks.can.data.graphs import EDGE_FEATURES, NODE_FEATURES, FlatGraphs, Floats, Ints
from can_train_tasks.can.evaluation.metrics import ERROR_TERMS, anomaly_scores
from can_train_tasks.can.evaluation.rules import RaisedScores, RuleScale
from can_train_tasks.can.inputs import InputEncoder, InputStatistics, known_ids, target_weights
from can_train_tasks.can.losses import AutoencoderBatch, ClassifierBatch
from can_train_tasks.can.models import GatClassifier, Vgae, build_network
from can_train_tasks.can.prepared import PreparedGraphs
from can_train_tasks.can.settings import GatSettings

if TYPE_CHECKING:
    from can_train_tasks.can.data.dataset import CanData

# Roles of reference models.
AUTOENCODER: Final = "autoencoder"
CLASSIFIER: Final = "classifier"

# Columns of contributions that the rules add to, in the order of `Rules.rarities_by_word`.
_RULE_COLUMNS: Final = [
    PROPERTIES.index(name) for name in (SILENCE, PERIOD, IDENTITY, COUNTER, CHECKSUM, *JUMPS, *CONTEXTS)
]


class WindowModel(ABC):
    """A finished model on the windows of a data set.

    Attributes:
        finished: The model with its run and its result.
        model: The network, frozen and in evaluation mode, on the CPU.
        error_units: Units of an autoencoder's error terms; None for other models.
        raised: The rules that raise the model's scores; None for a model without rules.
        vocabulary: CAN IDs of benign training windows.
    """

    error_units: list[float] | None = None
    raised: RaisedScores | None
    vocabulary: Ints

    def __init__(self, finished: FinishedModel, flat: FlatGraphs, model: nn.Module) -> None:
        self.finished = finished
        self.model = model.eval().requires_grad_(False)
        self._flat = flat
        self.raised = RaisedScores.from_judgement(finished.result.get("judgement", {}))

    @property
    def trained(self) -> nn.Module:
        """The network that the run trained, without those that it builds on."""
        return self.model

    @abstractmethod
    def scores(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns raw scores [R, S]; `model` is the network of this object, or its copy on a device."""

    @abstractmethod
    def contributions(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the contributions [I, P] of the properties of each CAN ID to the final scores of windows."""

    def raised_scores(self, score: Floats, rows: Ints) -> Floats:
        """Returns the model's scores [R] of the windows `rows`, raised by the rules."""
        return score if self.raised is None else self.raised(self._flat, rows, score)

    def with_rules(self, contributions: Tensor, rows: Ints) -> Tensor:
        """Adds what the rules contribute to the contributions [I, P] of networks, on the CPU."""
        contributions = with_rule_columns(contributions)
        if self.raised is not None:
            added = torch.from_numpy(self.raised.contributions(self._flat, rows)).to(contributions)
            contributions[:, _RULE_COLUMNS] += added
        return contributions

    def expected(self, row: int) -> Mapping[tuple[int, str], float]:
        """Returns the values of a window that follow from other IDs, by the place of their ID and by property."""
        if self.raised is None:
            return {}
        values = self.raised.rules.lines.expected(self._flat, row)
        return {(node, CONTEXTS[word]): value for (node, word), value in values.items()}

    @property
    def rule_scale(self) -> RuleScale | None:
        """The place of the rules on the scale of the final scores; None for a model without rules."""
        return None if self.raised is None else self.raised.scale

    @abstractmethod
    def combine(self, scores: Floats, rows: Ints) -> Floats:
        """Returns final scores [R], higher is more attack-like, from raw scores [R, S] of the windows `rows`."""

    def on(self, flat: FlatGraphs) -> Self:
        """Returns the same model, with the same network, on other windows."""
        other = copy(self)
        other._flat = flat
        return other

    def describe(self, row: int) -> str:
        """Names a window in a message."""
        flat = self._flat
        return f"the window at frame {flat.first_frame[row]:,} of {flat.sources[flat.source[row]].path}"


class FinishedNetwork(WindowModel):
    """A finished classifier or autoencoder on the windows of a data set.

    With `full_precision`, the model scores without mixed precision. A run that consults it then gets equal scores in
    every precision of the run.

    Raises:
        CheckpointError: The weights do not fit the run's settings.
    """

    def __init__(self, finished: FinishedModel, flat: FlatGraphs, *, full_precision: bool = False) -> None:
        run, weights = finished.run, finished.weights
        try:
            statistics = InputStatistics.empty(len(weights["inputs.vocabulary"]))
            inputs = InputEncoder(statistics, embedding=run.model.embedding, dataset=run.dataset)
            # An autoencoder that learned from a teacher has also the weights [teacher's Z, Z] of its projection.
            model = build_network(run.model, inputs, projected=len(weights.get("projection.weight", ())))
            # Weights of a run in double precision would lose digits in a network of single precision.
            model.to(weights["inputs.node_mean"].dtype).load_state_dict(dict(weights))
        except (KeyError, RuntimeError) as error:
            # PyTorch lists the differences line by line, under a headline.
            fields = [line.strip().rstrip(".") for line in str(error).splitlines()]
            raise CheckpointError("The weights of a run fit the model of its settings",
                                  value=f"{finished.run_id}: {'; '.join(fields[1:] or fields)}",
                                  remedy="Copy the run once more from where it was trained, or train it anew"
                                  ) from error  # fmt: skip
        super().__init__(finished, flat, model)
        self._supervised = isinstance(run.model, GatSettings)
        self._full_precision = full_precision
        self._gather = Gatherer(flat)
        self.vocabulary = np.asarray(weights["inputs.vocabulary"])
        if not self._supervised:
            self.error_units = finished.result.get("judgement", {}).get("error_units")

    def on(self, flat: FlatGraphs) -> Self:
        """Returns the same model, with the same network, on other windows."""
        other = super().on(flat)
        other._gather = Gatherer(flat)
        return other

    @property
    def threshold(self) -> float:
        """The network's own threshold, which flags windows with higher scores where no rule raises these."""
        if self.raised is not None:
            return self.raised.scale.threshold
        return float(self.finished.result["judgement"]["threshold"])

    def scores(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns attack logit differences [R, 1] of a classifier, or `ERROR_TERMS` [R, 5] of an autoencoder."""
        batch = self._gather(rows).to(device, dtype)
        kind = ClassifierBatch if self._supervised else AutoencoderBatch
        with torch.autocast(device.type, enabled=False) if self._full_precision else nullcontext():
            return kind.scores(model, batch)

    def contributions(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the contributions [I, P] of the network and of the rules to the final score, on the CPU."""
        return self.with_rules(self.network_contributions(model, rows, device, dtype).cpu(), rows)

    def network_contributions(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns contributions [I, P] to the logit difference or the anomaly score, without mixed precision.

        The columns are `NETWORK_PROPERTIES`.
        """
        batch = self._gather(rows).to(device, dtype)
        with torch.autocast(device.type, enabled=False):
            if isinstance(model, GatClassifier):
                return classifier_contributions(model, batch)
            assert isinstance(model, Vgae)
            assert self.error_units is not None
            return autoencoder_contributions(model, batch, self.error_units)

    def combine(self, scores: Floats, rows: Ints) -> Floats:
        """Returns the network's scores [R], raised by the rules."""
        return self.raised_scores(self.network_scores(scores), rows)

    def network_scores(self, scores: Floats) -> Floats:
        """Returns logit differences or anomaly scores, [R]."""
        if self._supervised:
            return scores[:, 0]
        assert self.error_units is not None, "the result of an autoencoder has the units of its errors"
        return anomaly_scores(scores, self.error_units)

    def check_finite(self, scores: Floats) -> None:
        """Checks scores [R] or [R, S] of this model.

        Raises:
            RunError: A score is not a finite number.
        """
        broken = int(np.count_nonzero(~np.isfinite(scores).reshape(len(scores), -1).all(axis=1)))
        if broken:
            raise RunError(
                f"Every score of the {CLASSIFIER if self._supervised else AUTOENCODER} must be a finite number",
                value=f"{broken} of {len(scores)} are not, by {self.finished.run_id}",
                remedy="It has diverged: train it anew with a lower learning rate, or in fp32",
            )


class WindowReferenceModel(FinishedNetwork, ReferenceModel):
    """A finished model that a mode consults about the windows `rows` [R].

    `output` is `logits` or `score` for a classifier, `errors` or `reconstruction` for an autoencoder.

    Raises:
        CheckpointError: The weights do not fit the run's settings, or the model does not fit the windows.
    """

    features = GRAPH_FEATURES
    # Outputs are computed once, before training, unless a mode offers other ways.
    placements: Sequence[str] = ("cache",)
    _prepared: PreparedGraphs | None = None  # inputs of the windows, where they are those of the model that learns

    def __init__(self, role: str, finished: FinishedModel, data: CanData, rows: Ints, *, output: str) -> None:
        super().__init__(finished, data.flat, full_precision=True)
        _check_fit(role, finished, data)
        self.role = role
        self.name = finished.run_id
        self.rows = rows
        self.output = output

    @property
    def digest(self) -> str:
        """Digest of the weights, the windows and the kind of output."""
        flat, rows = self._flat, self.rows
        digest = hashlib.sha256(f"{self.output} {self.finished.sha256} {flat.window}".encode())
        digest.update(" ".join(source.sha256 for source in flat.sources).encode())
        for array in (rows, flat.source[rows], flat.first_frame[rows], flat.num_nodes[rows], flat.num_edges[rows]):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @property
    def widths(self) -> Mapping[str, int]:
        """Columns of each output."""
        if self.output == "reconstruction":
            latent = self.finished.run.model.latent
            return {
                "latent": latent,
                "node": len(target_weights(self.finished.run.dataset)),
                "edge": len(EDGE_FEATURES),
            }
        return {self.output: {"logits": 2, "score": 1, "errors": len(ERROR_TERMS)}[self.output]}

    def batch_features(self, rows: Ints) -> Floats:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self._gather.batch_features(rows)

    def lengths(self, rows: Ints) -> Mapping[str, Ints]:
        """Returns the number of lines [R] that each window has in each output."""
        if self.output != "reconstruction":
            return super().lengths(rows)
        nodes, edges = self._flat.num_nodes[rows], self._flat.num_edges[rows]
        return {"latent": nodes, "node": nodes, "edge": edges}

    def share(self, prepared: PreparedGraphs, encoder: InputEncoder) -> None:
        """Takes the inputs of windows that another model's encoder has prepared, if the encoder of this model would
        prepare the same inputs.
        """
        if encoder.prepares_as(cast(InputEncoder, self.model.inputs)):
            self._prepared = prepared

    def outputs(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Computes the outputs for windows.

        Returns:
            `logits` [R, 2], `score` [R, 1], `errors` [R, 5]; or `latent` [N, Z], `node` [N, T] and `edge` [E, 11].
        """
        if self.output in ("errors", "score"):
            return {self.output: self.scores(model, rows, device, dtype)}
        prepared = self._prepared if dtype == torch.float32 else None
        batch = self._gather(rows).to(device, dtype) if prepared is None else prepared.to(rows, device, dtype)
        if self.output == "logits":
            return {"logits": model(batch)}
        decoded = model.decode(model.prepared(batch), None)  # type: ignore[operator]
        return {"latent": decoded.mean, "node": decoded.node, "edge": decoded.edge}


def _check_fit(role: str, finished: FinishedModel, data: CanData) -> None:
    weights = finished.weights
    differences = [
        f"{part} features: {len(weights[f'inputs.{part}_mean'])}, not {len(features)}"
        for part, features in (("node", NODE_FEATURES), ("edge", EDGE_FEATURES))
        if len(weights[f"inputs.{part}_mean"]) != len(features)
    ]
    here = set(known_ids(data.flat, data.split.train).tolist())
    there = set(np.asarray(weights["inputs.vocabulary"]).tolist())
    # A sample of the data may lack IDs of the whole data.
    if data.sample is None and here != there:
        unknown = f"({len(there - here)} only it knows, {len(here - there)} it does not know)"
        differences.append(f"vocabulary: {len(there)} CAN IDs, not {len(here)} {unknown}")
    if differences:
        raise CheckpointError(
            f"The {role.replace('_', ' ')} must have been trained on the same features and vehicle",
            value=f"{finished.run_id}: {'; '.join(differences)}",
            remedy=f"Train one on this data set, or name another with --{role.replace('_', '-')}",
        )
