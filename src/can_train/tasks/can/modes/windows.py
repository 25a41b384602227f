"""The base class of the CAN modes: windows and their counts, batches of them, and the judgement of their scores.

What a mode learns from the windows is in its subclass.

Shapes: R rows (windows), S columns of raw scores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from can_train.task import Feature, Task
from can_train.tasks.can.data.batches import GRAPH_FEATURES, Gatherer
from can_train.tasks.can.models import build_network
from can_train.tasks.can.models.inputs import InputEncoder, InputStatistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.config.resolved import ResolvedRun
    from can_train.tasks.can.data.dataset import CanData
    from can_train.tasks.can.evaluation.judging import JudgementTable, JudgingOptions, ModelScores, Score
    from can_train.tasks.can.losses import Gather


class WindowTask(Task):
    """A task on the windows of a CAN data set.

    Attributes:
        supervised: Whether the mode learns from attacks.
        reference_roles: Roles of the reference models that the trained model is compared with.
    """

    features: Sequence[Feature] = GRAPH_FEATURES
    supervised = True
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
        """Returns a digest of the logs: their contents, roles and order, wherever they are."""
        logs = [(source.role, source.group, source.sha256) for source in self._data.flat.sources]
        return hashlib.sha256(json.dumps(logs).encode()).hexdigest()

    def build_model(self) -> nn.Module:
        """Makes the network; vocabulary and scale come from the training windows."""
        return build_network(self._run.model, self._inputs())

    def describe(self, row: int) -> str:
        """Names a window in a message."""
        nodes, edges, _ = self._gather.batch_features(np.asarray([row]))[0]
        return f"window {row} ({nodes:.0f} nodes, {edges:.0f} edges)"

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self._gather.batch_features(rows)

    def gather_to(self, device: torch.device, dtype: torch.dtype) -> Gather:
        """Returns a function that makes a batch of [R] windows on a device."""
        return lambda rows: self._gather(rows).to(device, dtype)

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges each test folder by itself, together with the reference models and the baselines."""
        # scikit-learn takes a second to import, which only a run that has come to its end needs.
        from can_train.tasks.can.evaluation.judging import judge

        references = {role: self._final_scores(score, role) for role in self.reference_roles}
        options = self._judging_options()
        return judge(self._data.flat, self._data.split, self._final_scores(score), options, references)

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[JudgementTable]:
        """Writes a judgement as tables of text."""
        from can_train.tasks.can.evaluation.judging import judgement_tables

        return judgement_tables(judgement)

    def _final_scores(self, score: Score, *role: str) -> ModelScores:
        """Scores the validation and test windows with the trained model, or with the reference model of a role."""
        raise NotImplementedError

    def _judging_options(self) -> JudgingOptions:
        from can_train.tasks.can.evaluation.judging import JudgingOptions

        return JudgingOptions.of(self._run, supervised=self.supervised)

    def _train_on(self, rows: NDArray[np.int64]) -> None:
        train_windows, sample = len(self._data.split.train), self._data.sample
        whole = train_windows if sample is None else sample.train_windows
        self.train_rows = rows
        self.estimated_train_rows = max(1, round(whole * len(rows) / train_windows))

    def _inputs(self) -> InputEncoder:
        statistics = InputStatistics.fit(self._data.flat, self._data.split.train)
        return InputEncoder(statistics, embedding=self._run.model.embedding, identity=self._run.dataset.identity)

    def _is_attack(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns [R], whether a window is an attack."""
        is_attack: NDArray[np.bool_] = self._data.flat.label[rows] > 0
        return is_attack
