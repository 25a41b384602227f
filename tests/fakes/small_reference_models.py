"""A small reference model with outputs of different lengths, and a task that requests its outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.task import Feature, ReferenceModel
from fakes.line_fit import SAMPLES, LineBatch, LineTask

WIDTH = 3
VALUES_PER_ROW = 2**14
"""Float values that computing one output row allocates for a moment."""


class SmallReferenceModel(ReferenceModel):
    """A frozen layer. Sample i has i % 4 output rows.

    Attributes:
        num_requested: Samples whose outputs were computed, in all.
    """

    name = "20260101-000000-oracle-0000"
    features = (Feature("rows"), Feature("samples"))

    def __init__(
        self, role: str = "oracle", placements: Sequence[str] = ("cache",), values_per_row: int = VALUES_PER_ROW
    ) -> None:
        self.role = role
        self.placements = tuple(placements)
        self.rows = np.arange(0, SAMPLES + 10)
        self.model = nn.Linear(1, WIDTH).requires_grad_(False).eval()
        self.values_per_row = values_per_row
        self.num_requested = 0

    @property
    def digest(self) -> str:
        return f"oracle-{float(self.model.weight.sum()):.8f}"

    @property
    def widths(self) -> Mapping[str, int]:
        return {"word": WIDTH}

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.stack([self.lengths(rows)["word"], np.ones(len(rows))], axis=1).astype(np.float64)

    def lengths(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]]:
        return {"word": rows % 4}

    def outputs(
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        self.num_requested += len(rows)
        each = torch.from_numpy(np.repeat(rows, rows % 4)).to(device, dtype)
        wide = each[:, None].expand(-1, self.values_per_row) + 0
        return {"word": model(wide[:, :1])}

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        scores: Tensor = model(torch.from_numpy(rows).to(device, dtype)[:, None])
        return scores

    def truth(self, rows: NDArray[np.int64]) -> Tensor:
        return self.model(torch.from_numpy(np.repeat(rows, rows % 4)).float()[:, None])


class ReferenceLineTask(LineTask):
    """Points on a line; outputs of reference models are requested for each batch, and change no loss."""

    def __init__(self, *reference_models: SmallReferenceModel) -> None:
        super().__init__()
        self.models = reference_models
        self.outputs_of_role: dict[str, Any] = {}

    def reference_models(self) -> Sequence[SmallReferenceModel]:
        return self.models

    def bind_outputs(self, role: str, answers: Any) -> None:
        self.outputs_of_role[role] = answers

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> "ReferenceLineBatch":
        points = super().logical_batch(rows, device, dtype, generator)
        return ReferenceLineBatch(points, rows, self.outputs_of_role)


class ReferenceLineBatch(LineBatch):
    """Points whose losses request the outputs of each reference model first."""

    def __init__(self, points: LineBatch, rows: NDArray[np.int64], outputs_of_role: Mapping[str, Any]) -> None:
        super().__init__(points._x, points._fail_above)
        self._rows = rows
        self._outputs_of_role = outputs_of_role

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        for answers in self._outputs_of_role.values():
            answers(self._rows[start:stop])
        return super().losses(model, start, stop)
