"""The tasks that gpu-check trains: can-train's own on the synthetic bus, and four from other fields on random data.
These have only the parts that the search for limits and training use; they cannot be evaluated.

Shapes: R samples of the task or of a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.config.compose import RunRequest, resolve
from can_train.reporter import SilentReporter
from can_train.task import BatchTask, Feature
from can_train.training.loading import load_task
from gpu.networks import WORDS, Critic, SequenceModel, Transformer, UNet

SAMPLES: Final = 2048
"""R, the samples of a task with random data. Larger batches repeat them."""

SEED: Final = 20
"""Seed of the random data."""

Placement = tuple[torch.device, torch.dtype]
"""Device and type of the computation."""

LossSum = Callable[[nn.Module, NDArray[np.int64], Placement], Tensor]
"""Computes the sum of a model's losses over some rows."""


@dataclass(frozen=True, kw_only=True)
class TensorTask:
    """A task with one feature and one loss.

    Attributes:
        feature: The feature that memory grows with.
        counts: [R] The feature's value for each sample.
        terms: [R] The share of each sample in the loss's denominator.
        build_model: Makes the model, on the CPU.
        compute: Computes the sum of the losses.
    """

    feature: Feature
    counts: NDArray[np.float64]
    terms: NDArray[np.float64]
    build_model: Callable[[], nn.Module]
    compute: LossSum

    @property
    def memory_features(self) -> tuple[Feature]:
        """A single entry."""
        return (self.feature,)

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """A single entry."""
        return {"loss": 1.0}

    @property
    def train_rows(self) -> NDArray[np.int64]:
        """Every sample."""
        return np.arange(len(self.counts))

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [len(rows), 1]."""
        return self.counts[rows, None]

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> "TensorBatch":
        """Returns a logical batch. The generator is not used, because no randomness is shared by samples."""
        return TensorBatch(self, rows, (device, dtype))


class TensorBatch:
    """A logical batch of a TensorTask."""

    def __init__(self, task: TensorTask, rows: NDArray[np.int64], placement: Placement) -> None:
        self._task, self._rows, self._placement = task, rows, placement
        self.denominators = {"loss": float(task.terms[rows].sum())}

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        """Returns the sum and the denominator of the loss over a part of the batch."""
        rows = self._rows[start:stop]
        return {"loss": (self._task.compute(model, rows, self._placement), float(self._task.terms[rows].sum()))}


def make_task(name: str, *, small: bool) -> BatchTask:
    """Makes the task of a model. A small one has a model that is narrow enough for a CPU."""
    if name in OTHER_FIELDS:
        # It is only a part of a BatchTask: see the module's docstring.
        return cast(BatchTask, OTHER_FIELDS[name](small))
    request = RunRequest(model=name, dataset="synthetic", size="student" if small else "teacher")
    return load_task(resolve(request), SilentReporter())


def _unet(small: bool) -> TensorTask:
    side, width = (16, 4) if small else (64, 32)
    images = np.random.default_rng(SEED).random((SAMPLES, 3, side, side), dtype=np.float32)

    def compute(model: nn.Module, rows: NDArray[np.int64], placement: Placement) -> Tensor:
        part = torch.from_numpy(images[rows]).to(*placement)
        wanted = (part.mean(dim=1, keepdim=True) > 0.5).to(part)
        return F.binary_cross_entropy_with_logits(model(part), wanted, reduction="sum")

    return TensorTask(
        feature=Feature("images"),
        counts=np.ones(SAMPLES),
        terms=np.full(SAMPLES, float(side**2)),
        build_model=lambda: UNet(width),
        compute=compute,
    )


def _lstm(small: bool) -> TensorTask:
    return _language(lambda: SequenceModel(16 if small else 512), longest=12 if small else 64)


def _transformer(small: bool) -> TensorTask:
    width, layers = (16, 2) if small else (256, 4)
    return _language(lambda: Transformer(width, layers), longest=16 if small else 256)


def _language(build: Callable[[], nn.Module], *, longest: int) -> TensorTask:
    """Makes a task of next-token prediction on random tokens. A batch is padded to its longest sequence."""
    rng = np.random.default_rng(SEED)
    words = rng.integers(0, WORDS, (SAMPLES, longest + 1))
    lengths = rng.integers(longest // 4, longest + 1, SAMPLES)

    def compute(model: nn.Module, rows: NDArray[np.int64], placement: Placement) -> Tensor:
        device, _ = placement
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
        build_model=build,
        compute=compute,
    )


def _critic(small: bool) -> TensorTask:
    points, coordinates, width = (16, 4, 16) if small else (256, 4, 128)
    rng = np.random.default_rng(SEED)
    real, made = (rng.standard_normal((SAMPLES, points, coordinates), dtype=np.float32) for _ in range(2))
    mixed = rng.random((SAMPLES, 1, 1), dtype=np.float32)

    def compute(model: nn.Module, rows: NDArray[np.int64], placement: Placement) -> Tensor:
        own, other, share = (torch.from_numpy(part[rows]).to(*placement) for part in (real, made, mixed))
        if not torch.is_grad_enabled():  # in an evaluation
            return cast(Tensor, model(other).sum() - model(own).sum())
        between = (share * own + (1 - share) * other).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().sum()
        return cast(Tensor, model(other).sum() - model(own).sum() + 10 * penalty)

    return TensorTask(
        feature=Feature("point sets"),
        counts=np.ones(SAMPLES),
        terms=np.ones(SAMPLES),
        build_model=lambda: Critic(coordinates, width),
        compute=compute,
    )


OTHER_FIELDS: Final[Mapping[str, Callable[[bool], TensorTask]]] = {
    "unet": _unet,
    "lstm": _lstm,
    "transformer": _transformer,
    "critic": _critic,
}
"""Makes each task with random data; the argument is `small` of make_task."""
