"""A reference model as small as a reference model can be: it says of each sample as many numbers as the sample is
large.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.task import Feature, ReferenceModel
from fakes.line_fit import SAMPLES, LineBatch, LineTask

WIDTH = 3
HUNGER = 2**14
"""Numbers that asking about one row of an answer takes for a moment."""


class Oracle(ReferenceModel):
    """A frozen layer.

    Attributes:
        asked: Samples that it was asked about, in all.
    """

    name = "20260101-000000-oracle-0000"
    features = (Feature("rows"), Feature("samples"))

    def __init__(self, role: str = "oracle", placements: Sequence[str] = ("cache",), hunger: int = HUNGER) -> None:
        self.role = role
        self.placements = tuple(placements)
        self.rows = np.arange(0, SAMPLES + 10)
        self.model = nn.Linear(1, WIDTH).requires_grad_(False).eval()
        self.hunger = hunger
        self.asked = 0

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
        self.asked += len(rows)
        each = torch.from_numpy(np.repeat(rows, rows % 4)).to(device, dtype)
        wide = each[:, None].expand(-1, self.hunger) + 0
        return {"word": model(wide[:, :1])}

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        scores: Tensor = model(torch.from_numpy(rows).to(device, dtype)[:, None])
        return scores

    def truth(self, rows: NDArray[np.int64]) -> Tensor:
        return self.model(torch.from_numpy(np.repeat(rows, rows % 4)).float()[:, None])


class AskingTask(LineTask):
    """Points on a line, of which a reference model has something to say that counts for nothing."""

    def __init__(self, *reference_models: Oracle) -> None:
        super().__init__()
        self.oracles = reference_models
        self.told: dict[str, Any] = {}

    def reference_models(self) -> Sequence[Oracle]:
        return self.oracles

    def bind_outputs(self, role: str, answers: Any) -> None:
        self.told[role] = answers

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> "AskingBatch":
        points = super().logical_batch(rows, device, dtype, generator)
        return AskingBatch(points, rows, self.told)


class AskingBatch(LineBatch):
    """Points that ask."""

    def __init__(self, points: LineBatch, rows: NDArray[np.int64], told: Mapping[str, Any]) -> None:
        super().__init__(points._x, points._fail_above)
        self._rows = rows
        self._told = told

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        for answers in self._told.values():
            answers(self._rows[start:stop])
        return super().losses(model, start, stop)
