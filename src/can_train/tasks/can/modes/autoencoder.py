"""Unsupervised: an autoencoder learns to reconstruct benign windows; a window that it reconstructs badly is an anomaly.

Shapes: R rows (windows).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from can_train.errors import DataError
from can_train.tasks.can.losses import AutoencoderBatch
from can_train.tasks.can.modes.windows import WindowTask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from can_train.config.resolved import ResolvedRun
    from can_train.tasks.can.data.dataset import CanData
    from can_train.tasks.can.evaluation.judging import ModelScores, Score


class AutoencoderTask(WindowTask):
    """Benign windows.

    Raises:
        DataError: None of the windows is benign.
    """

    supervised = False

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
        """Prepares a logical batch with the noise of all its windows."""
        flat = self._data.flat
        counts = (flat.num_nodes[rows], flat.num_edges[rows])
        latent = self._run.model.latent if generator is not None else 0
        return AutoencoderBatch.draw(rows, self.gather_to(device, dtype), counts, latent, generator)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, 3] node, edge and latent errors."""
        return AutoencoderBatch.scores(model, self.gather_to(device, dtype)(rows))

    def _final_scores(self, score: Score, *role: str) -> ModelScores:
        from can_train.tasks.can.evaluation.judging import ModelScores
        from can_train.tasks.can.evaluation.metrics import anomaly_scores, error_units

        split = self._data.split
        validation = score(split.validation, *role)
        units = error_units(validation[~self._is_attack(split.validation)])
        return ModelScores(
            validation=anomaly_scores(validation, units),
            test={folder: anomaly_scores(score(rows, *role), units) for folder, rows in split.test.items()},
            error_units=units,
        )


def _benign(rows: NDArray[np.int64], is_attack: NDArray[np.bool_], part: str) -> NDArray[np.int64]:
    benign = rows[~is_attack[rows]]
    if not len(benign):
        raise DataError(f"The autoencoder learns from benign windows, and the {part} part has none",
                        remedy="Use a log with attack-free driving, or --model gat")  # fmt: skip
    return benign
