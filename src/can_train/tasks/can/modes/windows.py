"""What all modes of the CAN task have in common: windows with their counts, batches of them, and the judgement of the
alarms that scores make. What is learned from windows is left to the modes.

Shapes: R rows (windows).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.resolved import ResolvedRun
from can_train.task import Feature, Task
from can_train.tasks.can.data.batches import GRAPH_FEATURES, Gatherer, GraphBatch
from can_train.tasks.can.models.build import build_network
from can_train.tasks.can.models.inputs import InputEncoder, InputStatistics

if TYPE_CHECKING:
    from can_train.tasks.can.data.dataset import CanData
    from can_train.tasks.can.evaluation.judging import FolderTable, JudgingOptions, Score


class WindowTask(Task):
    """The part of a task that no mode changes.

    Args:
        run: The resolved run.
        data: The windows.
        train_rows: Those that are trained on.
        validation_rows: Those whose loss decides when to stop.

    Attributes:
        reference_roles: Roles of the reference models that the model is judged beside.
        sample_note: What the windows are a sample of, as a sentence; empty where they are all there are.
        estimated_train_rows: Training samples of the whole data set.
    """

    features: Sequence[Feature] = GRAPH_FEATURES
    reference_roles: Sequence[str] = ()

    def __init__(
        self, run: ResolvedRun, data: CanData, *, train_rows: NDArray[np.int64], validation_rows: NDArray[np.int64]
    ) -> None:
        self._run = run
        self._data = data
        self._gather = Gatherer(data.flat)
        self.validation_rows = validation_rows
        self.sample_note = "" if data.sample is None else data.sample.note
        self._train_on(train_rows)

    def data_digest(self) -> str:
        """Returns a digest of the logs that the windows are of: what they hold, in which role and order, wherever they lie."""
        logs = [(source.role, source.group, source.sha256) for source in self._data.flat.sources]
        return hashlib.sha256(json.dumps(logs).encode()).hexdigest()

    def build_model(self) -> nn.Module:
        """Makes the network; vocabulary and scale come from the training windows."""
        return build_network(self._run.model, self._inputs())

    def describe(self, row: int) -> str:
        """Names a window."""
        nodes, edges, _ = self._gather.batch_features(np.asarray([row]))[0]
        return f"window {row} ({nodes:.0f} nodes, {edges:.0f} edges)"

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self._gather.batch_features(rows)

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges each test folder by itself, beside the baselines; all that is decided comes from validation."""
        raise NotImplementedError

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[FolderTable]:
        """Writes a judgement as one table a test folder, and one of sizes and speeds where they are compared."""
        from can_train.tasks.can.evaluation.judging import tables_of

        return tables_of(judgement)

    def _train_on(self, rows: NDArray[np.int64]) -> None:
        """Decides which windows are trained on."""
        train_windows, sample = len(self._data.split.train), self._data.sample
        whole = train_windows if sample is None else sample.train_windows
        self.train_rows = rows
        self.estimated_train_rows = max(1, round(whole * len(rows) / train_windows))

    def _inputs(self) -> InputEncoder:
        statistics = InputStatistics.fit(self._data.flat, self._data.split.train)
        return InputEncoder(statistics, embedding=self._run.model.embedding, identity=self._run.dataset.identity)

    def _gatherer_to(self, device: torch.device, dtype: torch.dtype) -> Callable[[NDArray[np.int64]], GraphBatch]:
        return lambda rows: self._gather(rows).to(device, dtype)

    def _is_attack(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns [R], whether a window is an attack."""
        is_attack: NDArray[np.bool_] = self._data.flat.label[rows] > 0
        return is_attack

    def _options(self, *, supervised: bool) -> JudgingOptions:
        # Sees scikit-learn, which takes a second to import: only a run that ends pays.
        from can_train.tasks.can.evaluation.judging import JudgingOptions

        return JudgingOptions.of(self._run, supervised=supervised)
