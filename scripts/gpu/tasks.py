"""Tasks that the checks train: can-train's own on its simulated bus, and three of other fields on random tensors, which
are what exploring and training ask of a task and no more.

Shapes: R samples of the task or of a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.config.compose import RunRequest, resolve
from can_train.reporter import SilentReporter
from can_train.task import Feature, Task
from can_train.training.loading import load_task
from gpu.networks import WORDS, SequenceModel, Transformer, UNet

SAMPLES: Final = 2048
"""R, samples of a task of random tensors. Trials repeat them, so more would only take longer to make."""

SEED: Final = 20
"""Of the random samples."""

Place = tuple[torch.device, torch.dtype]
Compute = Callable[[nn.Module, NDArray[np.int64], Place], Tensor]
"""From a model, and the rows of a part and where it is computed, to the sum of their losses."""


@dataclass(kw_only=True)
class TensorTask(Task):
    """A task with one feature and one loss.

    Attributes:
        feature: What memory grows with.
        counts: [R] of it.
        terms: [R] what each sample adds to the loss's denominator.
        network: Makes the model, on the CPU.
        compute: Sums losses.
    """

    feature: Feature
    counts: NDArray[np.float64]
    terms: NDArray[np.float64]
    network: Callable[[], nn.Module]
    compute: Compute

    def __post_init__(self) -> None:
        self.features = (self.feature,)
        self.loss_weights = {"loss": 1.0}
        self.train_rows = np.arange(len(self.counts))

    def build_model(self) -> nn.Module:
        """Makes the model, on the CPU."""
        return self.network()

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [len(rows), 1]."""
        return self.counts[rows, None]

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> "TensorBatch":
        """Prepares a logical batch; nothing random couples its samples."""
        return TensorBatch(self, rows, (device, dtype))


class TensorBatch:
    """A logical batch of samples that are rows of arrays."""

    def __init__(self, task: TensorTask, rows: NDArray[np.int64], place: Place) -> None:
        self._task, self._rows, self._place = task, rows, place
        self.denominators = {"loss": float(task.terms[rows].sum())}

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        """Returns the loss's sum and own denominator."""
        rows = self._rows[start:stop]
        return {"loss": (self._task.compute(model, rows, self._place), float(self._task.terms[rows].sum()))}


def make_task(name: str, *, small: bool) -> Task:
    """Makes a task by the name of its model; small: narrow enough for a CPU."""
    if name in OTHER_FIELDS:
        return OTHER_FIELDS[name](small)
    request = RunRequest(model=name, dataset="synthetic", size="student" if small else "teacher")
    return load_task(resolve(request), SilentReporter())


def _unet(small: bool) -> TensorTask:
    side, width = (16, 4) if small else (64, 32)
    images = np.random.default_rng(SEED).random((SAMPLES, 3, side, side), dtype=np.float32)

    def compute(model: nn.Module, rows: NDArray[np.int64], place: Place) -> Tensor:
        part = torch.from_numpy(images[rows]).to(*place)
        wanted = (part.mean(dim=1, keepdim=True) > 0.5).to(part)
        return F.binary_cross_entropy_with_logits(model(part), wanted, reduction="sum")

    return TensorTask(
        feature=Feature("images"),
        counts=np.ones(SAMPLES),
        terms=np.full(SAMPLES, float(side**2)),
        network=lambda: UNet(width),
        compute=compute,
    )


def _lstm(small: bool) -> TensorTask:
    return _language(lambda: SequenceModel(16 if small else 512), longest=12 if small else 64)


def _transformer(small: bool) -> TensorTask:
    width, layers = (16, 2) if small else (256, 4)
    return _language(lambda: Transformer(width, layers), longest=16 if small else 256)


def _language(build: Callable[[], nn.Module], *, longest: int) -> TensorTask:
    """Next-token prediction of random words; a batch is padded to its longest sequence."""
    rng = np.random.default_rng(SEED)
    words = rng.integers(0, WORDS, (SAMPLES, longest + 1))
    lengths = rng.integers(longest // 4, longest + 1, SAMPLES)

    def compute(model: nn.Module, rows: NDArray[np.int64], place: Place) -> Tensor:
        device, _ = place
        own = torch.from_numpy(lengths[rows]).to(device)
        length = int(lengths[rows].max())
        part = torch.from_numpy(words[rows, : length + 1]).to(device)
        counted = torch.arange(length, device=device) < own.unsqueeze(1)
        wanted = torch.where(counted, part[:, 1:], -1).flatten()
        return F.cross_entropy(model(part[:, :-1]).flatten(0, 1), wanted, ignore_index=-1, reduction="sum")

    return TensorTask(
        feature=Feature("tokens", padding=1),
        counts=lengths.astype(np.float64),
        terms=lengths.astype(np.float64),
        network=build,
        compute=compute,
    )


OTHER_FIELDS: Final[Mapping[str, Callable[[bool], TensorTask]]] = {
    "unet": _unet,
    "lstm": _lstm,
    "transformer": _transformer,
}
"""How each task is made, by name; the argument tells whether it is to be small."""
