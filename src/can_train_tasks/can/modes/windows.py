"""The modes that learn from windows alone; other modes build on them.

A classifier learns from attack labels, with equal weight for both classes. An autoencoder learns from benign windows; a
window that it reconstructs badly is an anomaly.

Shapes: R rows (windows), S columns of raw scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DataError
from can_train.memory.host import room_bytes
from can_train.reporter import TextTable
from can_train.task import BatchTask, Feature, LogicalBatch, Predictions
from can_train_tasks.can.data.batches import GRAPH_FEATURES, Gatherer
from can_train_tasks.can.data.graphs import Bools, FlatGraphs, Floats, Ints
from can_train_tasks.can.data.layout import TEST, digest_of_logs
from can_train_tasks.can.inputs import InputEncoder, InputStatistics
from can_train_tasks.can.losses import AutoencoderBatch, ClassifierBatch, numpy_generator
from can_train_tasks.can.models import build_network
from can_train_tasks.can.prepared import PreparedGraphs, prepare_graphs, prepared_bytes

if TYPE_CHECKING:
    from can_train.config.resolved import ResolvedRun
    from can_train_tasks.can.data.dataset import CanData
    from can_train_tasks.can.evaluation.judging import ModelScores, Score
    from can_train_tasks.can.losses import Gather

_PREPARED_SHARE: Final = 0.25  # Of the available host memory, for inputs that are prepared
_MAX_NAMED_LOGS: Final = 3  # logs that an error names
_REMEDY: Final = "Use a log with labelled attacks, or train an autoencoder: --model vgae"
_LABEL_REMEDY: Final = (
    "If a CSV column has labels, name it: `--set dataset.columns.label=NAME`. Else use a log with labelled attacks, or "
    "train an autoencoder: --model vgae"
)
_BENIGN_REMEDY: Final = (
    "Use a log that also has attack-free driving, before and after the attacks; if its labels have another word for no "
    "attack, name the word: `--set 'dataset.benign_values=[\"WORD\"]'`"
)


class WindowTask(BatchTask):
    """A task on the windows of a CAN data set.

    Attributes:
        supervised: Whether the mode learns from attacks.
        reference_roles: Roles of the reference models that the trained model is compared with.
    """

    memory_features: Sequence[Feature] = GRAPH_FEATURES
    supervised = True
    reference_roles: Sequence[str] = ()
    _prepared: PreparedGraphs | None = None  # inputs of the windows that are trained and validated on

    def __init__(self, run: ResolvedRun, data: CanData, train_rows: Ints, validation_rows: Ints) -> None:
        self._run = run
        self._data = data
        self._gather = Gatherer(data.flat)
        self.validation_rows = validation_rows
        self._windows = np.unique(np.concatenate([train_rows, validation_rows]))
        self.sample_note = "" if data.sample is None else data.sample.note
        self._train_on(train_rows)

    def data_digest(self) -> str:
        """Returns a digest of the logs: their contents, roles and order; their paths do not enter."""
        return digest_of_logs((source.role, source.group, source.sha256) for source in self._data.flat.sources)

    def build_model(self) -> nn.Module:
        """Makes the network; vocabulary and scale come from the training windows."""
        inputs = self._inputs()
        self.prepare(inputs)
        return build_network(self._run.model, inputs)

    def prepare(self, encoder: InputEncoder) -> None:
        """Prepares the inputs of all windows to train or validate on, where the host has room for them."""
        dataset, flat, rows = self._run.dataset, self._data.flat, self._windows
        hides, reconstructs = dataset.identity and dataset.id_dropout > 0, not self.supervised
        room = room_bytes(_PREPARED_SHARE)
        # In double precision the step computes the inputs, too.
        if (
            self._run.training.precision != "fp64"
            and prepared_bytes(flat, rows, encoder, hides=hides, reconstructs=reconstructs) <= room
        ):
            self._prepared = prepare_graphs(flat, rows, encoder, hides=hides, reconstructs=reconstructs)

    def describe(self, row: int) -> str:
        """Names a window in a message."""
        nodes, edges, _ = self._gather.batch_features(np.asarray([row]))[0]
        return f"window {row} ({nodes:.0f} nodes, {edges:.0f} edges)"

    def batch_features(self, rows: Ints) -> Floats:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self._gather.batch_features(rows)

    def gather_to(self, device: torch.device, dtype: torch.dtype) -> Gather:
        """Returns a function that makes a batch on a device from the numbers [R] of windows to train or validate on."""
        source = self._source if dtype == torch.float32 else self._gather
        return lambda rows: source.to(rows, device, dtype)

    @property
    def _source(self) -> Gatherer | PreparedGraphs:
        return self._gather if self._prepared is None else self._prepared

    def resident_data(self) -> Mapping[str, NDArray[Any]]:
        """Returns the arrays that windows are gathered from."""
        return self._source.arrays

    def bind_data(self, data: Mapping[str, Tensor]) -> None:
        """Receives these arrays on the device."""
        self._source.on_device = data

    def hidden_ids(self, rows: Ints, generator: torch.Generator | None) -> Bools | None:
        """Draws the windows of a logical batch [R] whose IDs are hidden; None: no IDs are hidden.

        All IDs of a window are hidden together, as on the bus of another vehicle. A single unknown ID on a known bus
        must remain a sign of an attack.
        """
        dataset = self._run.dataset
        if generator is None or not dataset.identity or not dataset.id_dropout:
            return None
        hidden: Bools = numpy_generator(generator).random(len(rows)) < dataset.id_dropout
        return hidden

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges each test folder separately, together with the reference models and the baselines."""
        # Imported late: scikit-learn takes a second to import, and only the end of a run needs it.
        from can_train_tasks.can.evaluation.judging import JudgingOptions, judge

        references = {role: self._final_scores(score, role) for role in self.reference_roles}
        options = JudgingOptions.of(self._run, self._data, supervised=self.supervised)
        return judge(self._data.flat, self._data.split, self._final_scores(score), options, references)

    def validation_metrics(self, rows: Ints, score: Score) -> Mapping[str, float]:
        """Judges the validation windows of both classes, by the threshold that they choose themselves.

        The network is judged alone: the rules beside it are equal after all epochs.
        """
        from can_train_tasks.can.evaluation.judging import JudgingOptions, judge

        alone = copy(self)
        alone._data = replace(self._data, split=replace(self._data.split, test={}))
        options = JudgingOptions.of(self._run, self._data, supervised=self.supervised)
        options = replace(options, rules=False, baselines=False)
        judged = judge(alone._data.flat, alone._data.split, alone._final_scores(score), options, {})["validation"]
        return {name: math.nan if value is None else float(value) for name, value in judged.items()}  # type: ignore[arg-type]

    def predictions(self, judgement: Mapping[str, Any], score: Score) -> Mapping[str, Predictions]:
        """Returns the predictions for each test folder; the times of its logs follow one another (see `elapsed_s`)."""
        from can_train_tasks.can.evaluation.rules import RaisedScores

        flat, scores = self._data.flat, self._final_scores(score).test
        raised = RaisedScores.from_judgement(judgement)
        if raised is not None:
            test = self._data.split.test
            scores = {folder: raised(flat, test[folder], network) for folder, network in scores.items()}
        return {
            folder: Predictions(
                score=scores[folder],
                positive=flat.label[rows] > 0,
                flagged=scores[folder] > judgement["threshold"],
                time_s=elapsed_s(flat, rows),
                words=("window", "attack", "benign"),
            )
            for folder, rows in self._data.split.test.items()
        }

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[TextTable]:
        """Writes each test folder as a table of all detectors."""
        from can_train_tasks.can.evaluation.judging import judgement_tables

        return judgement_tables(judgement)

    def summary_tables(self, judgement: Mapping[str, Any]) -> Sequence[TextTable]:
        """Writes a judgement as one table, a row for each test folder."""
        from can_train_tasks.can.evaluation.judging import summary_tables

        return summary_tables(judgement)

    def _final_scores(self, score: Score, *role: str) -> ModelScores:
        """Scores the validation and test windows with the trained model, or with the reference model of `role`."""
        from can_train_tasks.can.evaluation.judging import ModelScores

        split = self._data.split
        test = {folder: score(rows, *role)[:, 0] for folder, rows in split.test.items()}
        return ModelScores(validation=score(split.validation, *role)[:, 0], test=test)

    def _train_on(self, rows: Ints) -> None:
        train_windows, sample = len(self._data.split.train), self._data.sample
        whole = train_windows if sample is None else sample.train_windows
        self.train_rows = rows
        self.estimated_train_rows = max(1, round(whole * len(rows) / train_windows))

    def _inputs(self) -> InputEncoder:
        statistics = InputStatistics.fit(self._data.flat, self._data.split.train)
        return InputEncoder(statistics, embedding=self._run.model.embedding, dataset=self._run.dataset)


def elapsed_s(flat: FlatGraphs, rows: Ints) -> Floats:
    """Returns the beginnings [R] of windows in seconds, as if each log began at the end of the previous log."""
    seconds, before = np.zeros(len(rows)), 0.0
    for source in np.unique(flat.source[rows]):
        of_log = flat.source[rows] == source
        begins = float(flat.start_time[rows][of_log].min())
        seconds[of_log] = before + flat.start_time[rows][of_log] - begins
        before += float(flat.end_time[rows][of_log].max()) - begins
    return seconds


class ClassifierTask(WindowTask):
    """A classifier learns from labelled windows.

    Raises:
        DataError: There are no labels, or windows of one class only.
    """

    loss_weights: Mapping[str, float] = {"classification": 1.0}

    def __init__(self, run: ResolvedRun, data: CanData) -> None:
        super().__init__(run, data, data.split.train, data.split.validation)
        is_attack = data.flat.label[self.train_rows] > 0
        check_classes(data, is_attack)
        # A class without windows, as in a sample, gets a finite weight that no window uses.
        counts = np.array([len(is_attack) - is_attack.sum(), is_attack.sum()])
        self._class_weights: Floats = len(is_attack) / (2.0 * np.maximum(counts, 1))
        are_attacks = data.flat.label[self.validation_rows] > 0
        # Windows of both classes count alike in the mean of their recalls, however many there are.
        self._shares: Floats = 1.0 / np.maximum([len(are_attacks) - are_attacks.sum(), are_attacks.sum()], 1)

    def logical_batch(
        self, rows: Ints, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> ClassifierBatch:
        """Prepares a logical batch."""
        hidden = self.hidden_ids(rows, generator)
        called: list[Tensor] | None = [] if generator is None else None
        return ClassifierBatch(rows, self.gather_to(device, dtype), self._weights(rows), hidden=hidden, called=called)

    def metric_sums(self, model: nn.Module, batch: LogicalBatch, size: int) -> Mapping[str, tuple[float, float]]:
        """Computes the mean of the recalls of attack and of benign windows, at equal odds of both."""
        assert isinstance(batch, ClassifierBatch)
        called = torch.cat(batch.called or []).cpu().numpy()
        is_attack = self._data.flat.label[batch.rows] > 0
        shares = self._shares[is_attack.astype(np.int64)]
        return {"mean recall": (float(shares[called == is_attack].sum()), float(shares.sum()))}

    def scores(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the scores [R, 1] of `ClassifierBatch.scores`."""
        return ClassifierBatch.scores(model, self._gather(rows).to(device, dtype))

    def _weights(self, rows: Ints) -> Floats:
        return self._class_weights[(self._data.flat.label[rows] > 0).astype(np.int64)]


def check_classes(data: CanData, is_attack: Bools) -> None:
    """Checks that the training windows can train a supervised mode; `is_attack` [R] has their labels.

    Raises:
        DataError: There are no labels, or windows of one class only.
    """
    training = [source for source in data.flat.sources if source.role != TEST]
    # Labels that a sample of the data lacks may be in the rest of the data.
    if (data.sample is None or data.sample.every_log) and not any(source.labelled for source in training):
        raise DataError("A supervised mode learns from labels, and no training log has any",
                        value=", ".join(source.path for source in data.flat.sources[:_MAX_NAMED_LOGS]),
                        remedy=_LABEL_REMEDY)  # fmt: skip
    attacks = int(is_attack.sum())
    if data.sample is None and attacks in (0, len(is_attack)):
        missing, remedy = ("no attack", _REMEDY) if attacks == 0 else ("no benign", _BENIGN_REMEDY)
        raise DataError("A supervised mode learns from both classes, and the training part is one-sided",
                        value=f"{missing} window among {len(is_attack)}", remedy=remedy)  # fmt: skip


class AutoencoderTask(WindowTask):
    """An autoencoder learns from benign windows.

    Raises:
        DataError: No training window, or no validation window, is benign.
    """

    supervised = False

    def __init__(self, run: ResolvedRun, data: CanData) -> None:
        is_attack = data.flat.label > 0
        train, validation = (rows[~is_attack[rows]] for rows in (data.split.train, data.split.validation))
        for part, rows in (("training", train), ("validation", validation)):
            if not len(rows):
                raise DataError(f"The autoencoder learns from benign windows, and the {part} part has none",
                                remedy=_BENIGN_REMEDY)  # fmt: skip
        super().__init__(run, data, train, validation)
        self.loss_weights: Mapping[str, float] = {
            "node": 1.0, "edge": 1.0, "can_id": run.mode.can_id_weight, "kl": run.mode.kl_weight,
        }  # fmt: skip

    def logical_batch(
        self, rows: Ints, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> AutoencoderBatch:
        """Prepares a logical batch, with noise for all of its nodes."""
        flat = self._data.flat
        counts = (flat.num_nodes[rows], flat.num_edges[rows])
        latent = self._run.model.latent if generator is not None else 0
        batch = AutoencoderBatch.draw(rows, self.gather_to(device, dtype), counts, latent, generator)
        return replace(batch, hidden=self.hidden_ids(rows, generator))

    def scores(self, model: nn.Module, rows: Ints, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the `ERROR_TERMS` [R, 5]."""
        return AutoencoderBatch.scores(model, self._gather(rows).to(device, dtype))

    def _final_scores(self, score: Score, *role: str) -> ModelScores:
        from can_train_tasks.can.evaluation.judging import ModelScores
        from can_train_tasks.can.evaluation.metrics import anomaly_scores, error_units

        split = self._data.split
        validation = score(split.validation, *role)
        units = error_units(validation[self._data.flat.label[split.validation] == 0])
        test = {folder: anomaly_scores(score(rows, *role), units) for folder, rows in split.test.items()}
        return ModelScores(validation=anomaly_scores(validation, units), test=test, error_units=units)
