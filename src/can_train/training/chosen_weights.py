"""Which weights a run ends with: the average of the weights over the steps, and the choice by a validation.

Shapes: P weights, the floating-point parameters and buffers of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from can_train.errors import ConfigError, unknown_name
from can_train.fit.precision import is_inexact
from can_train.memory.sharded_tensors import shard_like, shard_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from can_train.config.settings import TrainingSettings

LOSS: Final = "loss"
TRAINED: Final = "trained"  # the weights as the optimizer left them
AVERAGED: Final = "averaged"

_Average = Callable[[Sequence["Tensor"], Sequence["Tensor"], "Tensor | int"], None]


class AveragedWeights:
    """The average of a model's weights over the optimizer steps, on the model's device.

    Floating-point buffers, as those of BatchNorm, are averaged too; other buffers are the model's.

    Args:
        model: The model in training.
        decay: Decay of an exponential moving average; 1: all steps count alike.

    Attributes:
        first_step: Steps before the average begins.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._model, self.first_step = model, 0
        self._add: _Average = get_swa_multi_avg_fn() if decay == 1.0 else get_ema_multi_avg_fn(decay)
        self.count = 0
        """Steps that the average has."""
        self.tensors = [weight.detach().clone() for weight in self._weights()]
        """[P] the average."""

    def _weights(self) -> list[Tensor]:
        every = (*self._model.parameters(), *self._model.buffers())
        return [weight.detach() for weight in every if is_inexact(weight)]

    def begins_before(self, step: int) -> bool:
        """Tells whether the average has weights after `step` optimizer steps."""
        return step > self.first_step

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Adds the model's weights after `step` optimizer steps."""
        if not self.begins_before(step):
            return
        tensors, weights = [*map(shard_of, self.tensors)], [*map(shard_of, self._weights())]
        if self.count:
            self._add(tensors, weights, self.count)
        else:
            torch._foreach_copy_(tensors, weights)
        self.count += 1

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Opens a block in which the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # One by one, in place: no second copy of the model, and compiled code finds its weights where they were.
        for average, weight in zip(self.tensors, self._weights(), strict=True):
            trained = weight.clone()
            weight.copy_(average)
            average.copy_(trained)

    def state_dict(self) -> dict[str, Any]:
        """Returns the average, for a checkpoint."""
        return {"count": self.count, "tensors": self.tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`."""
        self.count = int(state["count"])
        for average, saved in zip(self.tensors, state["tensors"], strict=True):
            average.copy_(shard_like(saved, average))


def averaged_weights(model: nn.Module, training: TrainingSettings) -> AveragedWeights | None:
    """Returns the average of a model's weights that the settings ask for; None where they ask for none."""
    return None if training.averaging is None else AveragedWeights(model, decay=training.averaging)


def average_tensors(model: nn.Module, training: TrainingSettings) -> list[Tensor]:
    """Returns tensors as large as the average's, for a plan; none where there is no average."""
    averaged = averaged_weights(model, training)
    return [] if averaged is None else averaged.tensors


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The figures of one validation.

    Attributes:
        losses: Loss by validation set.
        metrics: Metrics, of one set as `SET/METRIC` where there are several sets.
    """

    losses: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, losses: Mapping[str, float], metrics: Mapping[str, Mapping[str, float]]) -> Validation:
        """Makes it of the losses and the metrics of each set."""
        named = {f"{key}/{name}" if len(losses) > 1 else name: value
                 for key, of_set in metrics.items() for name, value in of_set.items()}  # fmt: skip
        return cls(losses=losses, metrics=named)

    @property
    def loss(self) -> float:
        """The mean of the losses of all sets."""
        return sum(self.losses.values()) / len(self.losses)

    def figure(self, name: str) -> float | None:
        """Returns a figure by its name: `loss` or a metric, as the mean of all sets, or `SET/METRIC`; None: there is
        no such figure.
        """
        if name == LOSS:
            return self.loss
        by_set = {f"{key}/{LOSS}": loss for key, loss in self.losses.items()}
        if name in by_set or name in self.metrics:
            return by_set[name] if name in by_set else self.metrics[name]
        parts = [self.metrics[f"{key}/{name}"] for key in self.losses if f"{key}/{name}" in self.metrics]
        return sum(parts) / len(parts) if parts else None

    def shown(self, name: str) -> tuple[str, float] | None:
        """Returns the metric to be shown beside the loss: the metric `name`, else the first; None: there is none."""
        name = next(iter(self.metrics), "") if name.endswith(LOSS) else name
        figure = self.figure(name)
        return None if figure is None else (name, figure)

    def record(self, kind: str = "validation") -> dict[str, float]:
        """Returns the figures for the log of metrics, but for the loss of trained weights, which has a name there."""
        several = {f"{kind}/{key}/{LOSS}": loss for key, loss in self.losses.items()} if len(self.losses) > 1 else {}
        loss = {} if kind == "validation" else {f"{kind}/{LOSS}": self.loss}
        return {**loss, **several, **{f"{kind}/{name}": value for name, value in self.metrics.items()}}

    def not_finite(self) -> dict[str, float]:
        """Returns the metrics that are no finite numbers."""
        return {name: value for name, value in self.metrics.items() if not math.isfinite(value)}

    def names(self) -> list[str]:
        """Returns the names of all figures."""
        several = [f"{key}/{LOSS}" for key in self.losses] if len(self.losses) > 1 else []
        means = dict.fromkeys(name.rpartition("/")[2] for name in self.metrics if name.partition("/")[0] in self.losses)
        return [LOSS, *several, *self.metrics, *(name for name in means if name not in self.metrics)]


@dataclass(frozen=True)
class Criterion:
    """The figure that chooses the best weights.

    Attributes:
        name: `loss`, or a metric.
        is_higher_better: Whether higher values are better.
    """

    name: str
    is_higher_better: bool

    def check(self, validate: Callable[[], Validation]) -> None:
        """Checks that a validation has the figure; raises ConfigError as `value` does."""
        if self.name != LOSS:
            self.value(validate())

    def figure(self, best: BestWeights) -> float | None:
        """Returns the figure of the best weights as the task computed it; None: there is none, or it is not finite."""
        if best.value is None or best.value == -math.inf:
            return None
        return best.value if self.is_higher_better else -best.value

    def value(self, validation: Validation) -> float:
        """Returns the figure, as a number where higher is better; minus infinity where it is not a finite number: no
        weights are the best by it.

        Raises:
            ConfigError: The validation has no such figure.
        """
        figure = validation.figure(self.name)
        if figure is None:
            unknown = unknown_name("figure of the validation", self.name, validation.names())
            raise ConfigError(unknown.rule, value=f"training.best_by={self.name}", remedy=unknown.remedy)
        if not math.isfinite(figure):
            return -math.inf
        return figure if self.is_higher_better else -figure


@dataclass(kw_only=True)
class BestWeights:
    """The weights of one kind that a validation judged best so far, on the host.

    Attributes:
        value: Value of the criterion, higher is better; None: there was no validation.
        loss: Validation loss.
        epoch: Epoch, counted from 1.
        weights: State of the model by name; empty on all ranks but the first.
    """

    value: float | None = None
    loss: float = math.inf
    epoch: int = 0
    weights: dict[str, Any] = field(default_factory=dict)


def choose(bests: Mapping[str, BestWeights]) -> str:
    """Returns the kind whose best weights have the best value; of equals the kind that had it first."""
    judged = {kind: (best.value, -best.epoch) for kind, best in bests.items() if best.value is not None}
    return max(judged, key=lambda kind: judged[kind], default=TRAINED)
