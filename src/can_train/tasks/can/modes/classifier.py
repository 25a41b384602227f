"""Supervised: a classifier learns from attack labels, both classes weighing the same.

Shapes: R rows (windows).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import ResolvedRun
from can_train.errors import DataError
from can_train.tasks.can.data.dataset import CanData, Split
from can_train.tasks.can.data.layout import TEST
from can_train.tasks.can.evaluation.judging import Score
from can_train.tasks.can.losses import ClassifierBatch
from can_train.tasks.can.modes.windows import WindowTask

if TYPE_CHECKING:
    from can_train.tasks.can.evaluation.judging import ModelScores

MAX_NAMED_LOGS: Final = 3
"""Logs that an error names before it stops."""


class ClassifierTask(WindowTask):
    """Windows with labels.

    Args:
        run: The resolved run.
        data: The windows.

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
        return ClassifierBatch(rows, self._gatherer_to(device, dtype), self._weights(rows))

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 1] attack logit differences."""
        return ClassifierBatch.scores(model, self._gatherer_to(device, dtype)(rows))

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges each test folder by itself, beside the baselines; the threshold comes from validation."""
        from can_train.tasks.can.evaluation.judging import judge

        own, options = final_scores(score, self._data.split), self._options(supervised=True)
        references = {role: final_scores(score, self._data.split, role) for role in self.reference_roles}
        return judge(self._data.flat, self._data.split, own, options, references)

    def _weights(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._class_weights[self._is_attack(rows).astype(np.int64)]


def final_scores(score: Score, split: Split, *role: str) -> "ModelScores":
    """Scores validation and test windows with the model, or with the reference model of a role."""
    from can_train.tasks.can.evaluation.judging import ModelScores

    return ModelScores(
        validation=score(split.validation, *role)[:, 0],
        test={group: score(rows, *role)[:, 0] for group, rows in split.test.items()},
    )


def check_classes(data: CanData, is_attack: NDArray[np.bool_]) -> None:
    """Refuses data without labels, or with windows of one class only; what a sample lacks may be in the rest.

    Args:
        data: The windows.
        is_attack: [R] of the training windows.

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


def class_weights(is_attack: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns [2] weights that make both classes count the same in the training data; a class without windows gets one
    that is never used.
    """
    counts = np.array([len(is_attack) - is_attack.sum(), is_attack.sum()])
    weights: NDArray[np.float64] = len(is_attack) / (2.0 * np.maximum(counts, 1))
    return weights
