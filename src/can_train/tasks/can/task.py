"""The CAN task: window graphs of a log, a classifier or an autoencoder of them, and the judgement of its alarms.

Shapes: B graphs of a batch, R rows (windows), N nodes, Z latent width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import ResolvedRun
from can_train.errors import DataError
from can_train.policy.features import Feature
from can_train.reporter import Reporter
from can_train.tasks.can.dataset import CanData, prepare
from can_train.tasks.can.gather import Gatherer
from can_train.tasks.can.layout import TEST, find_logs
from can_train.tasks.can.losses import AutoencoderBatch, ClassifierBatch
from can_train.tasks.can.models.inputs import InputEncoder, InputStatistics
from can_train.tasks.can.sampling import sample_data
from can_train.tasks.can.settings import CanDatasetSettings, GatSettings
from can_train.tasks.can.synthetic.writing import is_synthetic, synthetic_folder

if TYPE_CHECKING:
    from can_train.tasks.can.judgement_table import FolderTable

SUPERVISED: Final = "normal"
"""The mode that learns from attack labels."""


def make_task(run: ResolvedRun, data_root: Path, cache: Path, reporter: Reporter) -> "CanTask":
    """Makes the task with all of its data.

    Args:
        run: The resolved run.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data.
        reporter: Where progress and notices go.

    Raises:
        DataError: The log cannot be read, is too short, or lacks the labels that the mode learns from.
    """
    return CanTask(run, _load(run.dataset, data_root, cache, reporter))


def sample_task(run: ResolvedRun, data_root: Path, cache: Path, reporter: Reporter) -> "CanTask":
    """Makes the task with what can be known of its data in a few seconds and without writing anything.

    Args:
        run: The resolved run.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data, looked into.
        reporter: Where progress and notices go.

    Raises:
        DataError: A log that was looked at cannot be read, or all that is there lacks the labels that the mode learns
            from.
    """
    return CanTask(run, sample_data(run.dataset, data_root, cache, reporter))


class CanTask:
    """Everything training needs to know about CAN windows.

    Args:
        run: The resolved run.
        data: The windows.

    Raises:
        DataError: They lack the labels that the mode learns from.

    Attributes:
        sample_note: What the windows are a sample of, as a sentence; empty where they are all there are.
        estimated_train_rows: Training samples of the whole data set.
    """

    features: Sequence[Feature] = (Feature("nodes"), Feature("edges"), Feature("graphs"))

    def __init__(self, run: ResolvedRun, data: CanData) -> None:
        self._run = run
        self._data = data
        self._gather = Gatherer(data.flat)
        self._supervised = run.mode.name == SUPERVISED
        split, is_attack = data.split, data.flat.label > 0
        if self._supervised:
            self.train_rows, self.validation_rows = split.train, split.validation
            _check_classes(data, is_attack[self.train_rows])
            self._class_weights = _class_weights(is_attack[self.train_rows])
            self.loss_weights: Mapping[str, float] = {"classification": 1.0}
        else:
            self.train_rows = _benign(split.train, is_attack, "training")
            self.validation_rows = _benign(split.validation, is_attack, "validation")
            self.loss_weights = {"node": 1.0, "edge": 1.0, "can_id": run.mode.can_id_weight, "kl": run.mode.kl_weight}
        self.sample_note = "" if data.sample is None else data.sample.note
        train_windows = len(split.train) if data.sample is None else data.sample.train_windows
        self.estimated_train_rows = max(1, round(train_windows * len(self.train_rows) / len(split.train)))

    def build_model(self) -> nn.Module:
        """Makes the network; vocabulary and scale come from the training windows."""
        statistics = InputStatistics.fit(self._data.flat, self._data.split.train)
        settings = self._run.model
        inputs = InputEncoder(statistics, embedding=settings.embedding, identity=self._run.dataset.identity)
        # A GAT sees torch_geometric, which takes seconds to import: only a run that trains pays.
        if isinstance(settings, GatSettings):
            from can_train.tasks.can.models.gat import GatClassifier

            return GatClassifier(settings, inputs)
        from can_train.tasks.can.models.vgae import Vgae

        return Vgae(settings, inputs)

    def describe(self, row: int) -> str:
        """Names a window."""
        nodes, edges, _ = self._gather.batch_features(np.asarray([row]))[0]
        return f"window {row} ({nodes:.0f} nodes, {edges:.0f} edges)"

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self._gather.batch_features(rows)

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> ClassifierBatch | AutoencoderBatch:
        """Prepares a logical batch; the autoencoder's noise is drawn for all of it."""
        gather = self._gatherer_to(device, dtype)
        if self._supervised:
            return ClassifierBatch(
                rows, gather, self._class_weights[(self._data.flat.label[rows] > 0).astype(np.int64)]
            )
        flat = self._data.flat
        counts = (flat.num_nodes[rows], flat.num_edges[rows])
        latent = self._run.model.latent if generator is not None else 0
        return AutoencoderBatch.draw(rows, gather, counts, latent, generator)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 1] attack logit differences, or [R, 3] node, edge and latent errors."""
        batch = self._gatherer_to(device, dtype)(rows)
        return ClassifierBatch.scores(model, batch) if self._supervised else AutoencoderBatch.scores(model, batch)

    def judge(self, score: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> Mapping[str, Any]:
        """Judges each test folder by itself, beside the floors; thresholds come from validation."""
        # Sees scikit-learn, which takes a second to import: only a run that ends pays.
        from can_train.tasks.can.judging import JudgingOptions, ModelScores, judge

        split, mode = self._data.split, self._run.mode
        validation = score(split.validation)
        combine = (
            _first_column if self._supervised else _anomaly(validation[self._data.flat.label[split.validation] == 0])
        )
        scores = ModelScores(
            validation=combine(validation), test={group: combine(score(rows)) for group, rows in split.test.items()}
        )
        options = JudgingOptions(
            supervised=self._supervised,
            validation_fpr=mode.validation_fpr,
            floors=mode.floors,
            seed=self._run.training.seed,
        )
        return dict(judge(self._data.flat, split, scores, options))

    def tables(self, judgement: Mapping[str, Any]) -> Sequence["FolderTable"]:
        """Writes a judgement as one table a test folder."""
        from can_train.tasks.can.judgement_table import judgement_table

        return judgement_table(judgement)  # type: ignore[arg-type]

    def _gatherer_to(self, device: torch.device, dtype: torch.dtype) -> Callable[[NDArray[np.int64]], Any]:
        return lambda rows: self._gather(rows).to(device, dtype)


MAX_NAMED_LOGS: Final = 3
"""Logs that an error names before it stops."""

NODE_WEIGHT: Final = 0.40
EDGE_WEIGHT: Final = 0.35
LATENT_WEIGHT: Final = 0.25
"""Shares of the autoencoder's error terms in the anomaly score, each term in units of its mean over benign
validation."""


def _anomaly(benign: NDArray[np.float64]) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Makes the anomaly score out of [R, 3] error terms."""
    unit = np.maximum(benign.mean(axis=0), np.finfo(np.float64).tiny)
    weights = np.array([NODE_WEIGHT, EDGE_WEIGHT, LATENT_WEIGHT]) / unit
    return lambda errors: errors @ weights


def _first_column(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return scores[:, 0]


def _load(dataset: CanDatasetSettings, data_root: Path, cache: Path, reporter: Reporter) -> CanData:
    if is_synthetic(dataset):
        folder = synthetic_folder(cache, dataset.synthetic, reporter)
        logs = find_logs(replace(dataset, path=str(folder)), data_root)
    else:
        logs = find_logs(dataset, data_root)
    return prepare(dataset, logs, cache, reporter)


def _benign(rows: NDArray[np.int64], is_attack: NDArray[np.bool_], part: str) -> NDArray[np.int64]:
    benign = rows[~is_attack[rows]]
    if not len(benign):
        raise DataError(f"The autoencoder learns from benign windows, and the {part} part has none",
                        remedy="Use a log with attack-free driving, or --model gat")  # fmt: skip
    return benign


def _check_classes(data: CanData, is_attack: NDArray[np.bool_]) -> None:
    """Refuses data without labels, or with windows of one class only; what a sample lacks may be in the rest.

    Raises:
        DataError: They cannot train a supervised mode.
    """
    remedy = "Use a labelled log, or train an autoencoder: --model vgae"
    training = [source for source in data.flat.sources if source.role != TEST]
    if (data.sample is None or data.sample.every_log) and not any(source.labelled for source in training):
        raise DataError("A supervised mode learns from labels, and no training log has any",
                        value=", ".join(source.path for source in data.flat.sources[:MAX_NAMED_LOGS]),
                        remedy=remedy)  # fmt: skip
    attacks = int(is_attack.sum())
    if data.sample is None and attacks in (0, len(is_attack)):
        missing = "no attack" if attacks == 0 else "no benign"
        raise DataError("A supervised mode learns from both classes, and the training part is one-sided",
                        value=f"{missing} window among {len(is_attack)}",
                        remedy=remedy)  # fmt: skip


def _class_weights(is_attack: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns [2] weights that make both classes count the same in the training data; a class without windows gets one
    that is never used.
    """
    counts = np.array([len(is_attack) - is_attack.sum(), is_attack.sum()])
    weights: NDArray[np.float64] = len(is_attack) / (2.0 * np.maximum(counts, 1))
    return weights
