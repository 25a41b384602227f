"""Supervised: a classifier learns from attack labels, with both classes of equal weight.

Shapes: R rows (windows).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor, nn

from can_train.errors import DataError
from can_train.tasks.can.data.layout import TEST
from can_train.tasks.can.losses import ClassifierBatch
from can_train.tasks.can.modes.windows import WindowTask

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.config.resolved import ResolvedRun
    from can_train.tasks.can.data.dataset import CanData
    from can_train.tasks.can.evaluation.judging import ModelScores, Score

# Logs that an error names.
MAX_NAMED_LOGS: Final = 3

_REMEDY: Final = "Use a labelled log, or train an autoencoder: --model vgae"


class ClassifierTask(WindowTask):
    """Labelled windows.

    Raises:
        DataError: There are no labels, or windows of one class only.
    """

    loss_weights: Mapping[str, float] = {"classification": 1.0}

    def __init__(self, run: ResolvedRun, data: CanData) -> None:
        super().__init__(run, data, train_rows=data.split.train, validation_rows=data.split.validation)
        is_attack = self._is_attack(self.train_rows)
        check_classes(data, is_attack)
        self._class_weights = class_weights(is_attack)

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> ClassifierBatch:
        """Prepares a logical batch."""
        return ClassifierBatch(rows, self.gather_to(device, dtype), self._weights(rows))

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 1] attack logit differences."""
        return ClassifierBatch.scores(model, self.gather_to(device, dtype)(rows))

    def _final_scores(self, score: Score, *role: str) -> ModelScores:
        from can_train.tasks.can.evaluation.judging import ModelScores

        split = self._data.split
        return ModelScores(
            validation=score(split.validation, *role)[:, 0],
            test={folder: score(rows, *role)[:, 0] for folder, rows in split.test.items()},
        )

    def _weights(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._class_weights[self._is_attack(rows).astype(np.int64)]


def check_classes(data: CanData, is_attack: NDArray[np.bool_]) -> None:
    """Checks that windows, of which [R] train, can train a supervised mode.

    Raises:
        DataError: There are no labels, or windows of one class only.
    """
    training = [source for source in data.flat.sources if source.role != TEST]
    # What a sample of the data lacks may be in the rest of them.
    if (data.sample is None or data.sample.every_log) and not any(source.labelled for source in training):
        raise DataError("A supervised mode learns from labels, and no training log has any",
                        value=", ".join(source.path for source in data.flat.sources[:MAX_NAMED_LOGS]),
                        remedy=_REMEDY)  # fmt: skip
    attacks = int(is_attack.sum())
    if data.sample is None and attacks in (0, len(is_attack)):
        missing = "no attack" if attacks == 0 else "no benign"
        raise DataError("A supervised mode learns from both classes, and the training part is one-sided",
                        value=f"{missing} window among {len(is_attack)}", remedy=_REMEDY)  # fmt: skip


def class_weights(is_attack: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns [2] weights with which both classes count the same, from [R] labels of the training windows."""
    counts = np.array([len(is_attack) - is_attack.sum(), is_attack.sum()])
    # A class without windows, as in a sample, gets a finite weight that no window uses.
    weights: NDArray[np.float64] = len(is_attack) / (2.0 * np.maximum(counts, 1))
    return weights
