"""Unsupervised: an autoencoder learns to reconstruct benign windows; what it reconstructs badly is an anomaly.

Shapes: R rows (windows).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import ResolvedRun
from can_train.errors import DataError
from can_train.tasks.can.data.dataset import CanData
from can_train.tasks.can.evaluation.judging import Score
from can_train.tasks.can.evaluation.metrics import anomaly_scores, error_units
from can_train.tasks.can.losses import AutoencoderBatch
from can_train.tasks.can.modes.windows import WindowTask

if TYPE_CHECKING:
    from can_train.tasks.can.evaluation.judging import ModelScores


class AutoencoderTask(WindowTask):
    """Benign windows.

    Args:
        run: The resolved run.
        data: The windows.

    Raises:
        DataError: None of them is benign.
    """

    def __init__(self, run: ResolvedRun, data: CanData) -> None:
        is_attack = data.flat.label > 0
        super().__init__(
            run,
            data,
            train_rows=_benign(data.split.train, is_attack, "training"),
            validation_rows=_benign(data.split.validation, is_attack, "validation"),
        )
        self.loss_weights: Mapping[str, float] = {
            "node": 1.0, "edge": 1.0, "can_id": run.mode.can_id_weight, "kl": run.mode.kl_weight,
        }  # fmt: skip

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> AutoencoderBatch:
        """Prepares a logical batch; the noise is drawn for all of it."""
        flat = self._data.flat
        counts = (flat.num_nodes[rows], flat.num_edges[rows])
        latent = self._run.model.latent if generator is not None else 0
        return AutoencoderBatch.draw(rows, self._gatherer_to(device, dtype), counts, latent, generator)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 3] node, edge and latent errors."""
        return AutoencoderBatch.scores(model, self._gatherer_to(device, dtype)(rows))

    def judge(self, score: Score) -> Mapping[str, Any]:
        """Judges each test folder by itself, beside the baselines; units and threshold come from validation."""
        from can_train.tasks.can.evaluation.judging import judge

        (own, units), options = self._final_scores(score), self._options(supervised=False)
        others = {role: self._final_scores(score, role) for role in self.reference_roles}
        references = {role: scores for role, (scores, _) in others.items()}
        judgement = judge(self._data.flat, self._data.split, own, options, references)
        for role, (_, its_units) in others.items():
            judgement["references"][role]["error_units"] = its_units
        return {**judgement, "error_units": units}

    def _final_scores(self, score: Score, *role: str) -> tuple["ModelScores", list[float]]:
        """Scores validation and test windows with the model, or a reference model; returns its units, too."""
        from can_train.tasks.can.evaluation.judging import ModelScores

        split = self._data.split
        validation = score(split.validation, *role)
        units = error_units(validation[~self._is_attack(split.validation)])
        scores = ModelScores(
            validation=anomaly_scores(validation, units),
            test={group: anomaly_scores(score(rows, *role), units) for group, rows in split.test.items()},
        )
        return scores, units


def _benign(rows: NDArray[np.int64], is_attack: NDArray[np.bool_], part: str) -> NDArray[np.int64]:
    benign = rows[~is_attack[rows]]
    if not len(benign):
        raise DataError(f"The autoencoder learns from benign windows, and the {part} part has none",
                        remedy="Use a log with attack-free driving, or --model gat")  # fmt: skip
    return benign
