"""Scores the windows of logs, which need no labels, with a finished run, for `can-train predict` and `can_train.load`.

Shapes: R rows (windows) of a portion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from can_train.config.compose import prediction_run
from can_train.config.resolved import EvaluationData, FinishedModel, data_root, with_folders_of
from can_train.errors import CheckpointError, ConfigError
from can_train.training.loading import finished_model, with_cache
from can_train.training.predict import LoadedModel, LoadOptions, computing, open_inference
from can_train.training.prediction_files import Columns, Watcher
from can_train_tasks.can.data.dataset import CanData
from can_train_tasks.can.data.graphs import Floats, Ints, no_graphs
from can_train_tasks.can.evaluation.scored_windows import log_ranks, window_columns, windows_of
from can_train_tasks.can.fusion.agent import FinishedFusion
from can_train_tasks.can.reference_models import AUTOENCODER, CLASSIFIER, FinishedNetwork, WindowModel
from can_train_tasks.can.settings import FusionAgentSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Windows of logs, in the order of the logs' paths.

    Attributes:
        data: The logs.
        rows: The windows.
        folders: Position of each window's test folder among the folders.
    """

    data: CanData
    rows: Ints
    folders: Ints

    @property
    def total(self) -> int:
        """The number of windows."""
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class WindowDetector(LoadedModel):
    """A finished model that scores windows of logs, and flags them by the threshold that validation chose."""

    counted = "windows"

    def __init__(self, finished: FinishedModel, options: LoadOptions) -> None:
        judgement = finished.result.get("judgement", {})
        if "threshold" not in judgement:
            raise CheckpointError(f"The result of {finished.run_id} has no threshold", remedy="Train anew")
        self._finished, self._options, self._threshold = finished, options, float(judgement["threshold"])
        run = finished.run
        self.run_id, self.task = finished.run_id, run.task_settings
        nothing = no_graphs(run.dataset.window)
        self._model: WindowModel
        if isinstance(run.model, FusionAgentSettings):
            mixed = {role: finished_model(run, role) for role in (AUTOENCODER, CLASSIFIER)}
            self._model = FinishedFusion(finished, nothing, mixed)
        else:
            self._model = FinishedNetwork(finished, nothing)
        self._inference = open_inference(self._model.model, run, options)
        self.module = self._inference.model

    def read(self, dataset: str | None = None, sets: Sequence[str] = ()) -> Windows:
        """Returns all windows of a log or a folder of logs; without one, the run's own test windows."""
        run, options = self._finished.run, self._options
        paths = with_folders_of(run, options.paths)
        settings = prediction_run(run, dataset, sets).dataset

        def of_data(cache: Path) -> CanData:
            request = EvaluationData(dataset=settings, own=dataset is None, data_root=data_root(paths), cache=cache,
                                     reporter=options.reporter)  # fmt: skip
            return windows_of(self._finished, request, splits_own=False)[0]

        data: CanData = with_cache(paths, options.reporter, of_data)
        tested = data.split.test.values()
        rows, folder = np.concatenate([*tested]), np.repeat(np.arange(len(tested)), [*map(len, tested)])
        order = np.lexsort((folder, data.flat.first_frame[rows], log_ranks(data.flat)[data.flat.source[rows]]))
        return Windows(data=data, rows=rows[order], folders=folder[order])

    def predict(self, samples: Any) -> list[dict[str, Any]]:
        """Returns a row for each window: its place in its log, its score and whether it is flagged.

        Args:
            samples: The value of `read`, or the path of a log or a folder of logs.
        """
        if isinstance(samples, str | Path):
            samples = self.read(str(samples))
        if not isinstance(samples, Windows):
            raise ConfigError("This task predicts the windows of logs", value=type(samples).__name__,
                              remedy="Give the path of a log: model.predict('path/to/log.csv')")  # fmt: skip
        return [dict(zip(columns, cells, strict=True)) for _, columns in self.tables(samples)
                for cells in zip(*map(_listed, columns.values()), strict=True)]  # fmt: skip

    def tables(self, samples: Windows, *watchers: Watcher) -> Iterator[tuple[int, Columns]]:
        """Yields, portion by portion, the number of windows and the columns of `evaluate --scores` without labels."""
        flat, names, size = samples.data.flat, [*samples.data.split.test], self._options.batch_size
        model = self._model.on(flat)
        inference = replace(self._inference, describe=model.describe)
        for start in range(0, len(samples), size):
            rows = samples.rows[start : start + size]
            with computing(self._finished.run, inference.device):
                scores: Floats = model.combine(inference.scores(model, rows), rows)
            folders = [names[index] for index in samples.folders[start : start + size]]
            yield len(rows), window_columns(flat, rows, folders, scores, self._threshold)


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
