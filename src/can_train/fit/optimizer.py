"""The optimizer, its schedule, mixed precision, and the memory it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings

SGD_MOMENTUM: Final = 0.9

_AUTOCAST: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}

_UNLIMITED: Final = 2**62


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes that an optimizer takes of the device."""

    parameter_bytes: int  # Size of the trained parameters; their gradients take as much
    state_bytes: int  # State that the optimizer keeps from its first step on
    transient_bytes: int  # Temporary memory of a step
    # Size of each trained parameter that is not empty: the pieces that an optimizer works in.
    tensor_bytes: tuple[int, ...]


def measure_optimizer(
    parameters: Iterable[Tensor], make: Callable[[Sequence[nn.Parameter]], Optimizer]
) -> OptimizerMemory:
    """Measures two steps of the optimizer that `make` returns, on zeros of the trained parameters' shapes."""
    # Only planning measures: whoever evaluates a finished run needs this module's precision, and no simulated GPU.
    from can_train.memory.simulated_gpu import LiveStorageTracker

    with LiveStorageTracker(_UNLIMITED) as tracker:
        shadows = [nn.Parameter(torch.zeros_like(parameter, device="cpu")) for parameter in parameters]
        parameter_bytes = tracker.live_bytes
        for shadow in shadows:
            shadow.grad = torch.zeros_like(shadow)
        optimizer = make(shadows)
        before = tracker.live_bytes
        optimizer.step()
        state_bytes = tracker.live_bytes - before
        # State is made in the first step, so only the second has the temporary memory of all later ones.
        optimizer.step()
        transient_bytes = tracker.peak_bytes - tracker.live_bytes
    return OptimizerMemory(
        parameter_bytes=parameter_bytes,
        state_bytes=max(state_bytes, 0),
        transient_bytes=max(transient_bytes, 0),
        tensor_bytes=tuple(shadow.nbytes for shadow in shadows if shadow.nbytes),
    )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats of a run: of weights and inputs, and of matrix products where precision is mixed."""

    dtype: torch.dtype
    autocast: torch.dtype | None

    @classmethod
    def named(cls, name: str) -> Precision:
        """Returns the precision that `training.precision` names."""
        return cls(dtype=torch.float64 if name == "fp64" else torch.float32, autocast=_AUTOCAST.get(name))

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Opens the span of a forward pass."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


@dataclass(kw_only=True)
class Optimization:
    """Optimizer, schedule and gradient scaler, which step together."""

    optimizer: Optimizer
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler  # Scales losses under fp16; otherwise disabled
    clip_norm: float  # Largest gradient norm; 0: gradients are not clipped
    # Of the model. A frozen one has no gradient, so the optimizer passes over it until it is thawed.
    parameters: list[nn.Parameter]

    def step(self) -> bool:
        """Unscales and clips the gradients, steps, and clears them; the caller moves the schedule.

        Returns:
            Whether the weights moved: under fp16 the scaler skips a step whose gradients overflowed.
        """
        scale = self.scaler.get_scale()
        if self.clip_norm > 0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self.scaler.get_scale() >= scale

    @property
    def trainable(self) -> tuple[bool, ...]:
        """For each parameter, whether it is trained now."""
        return tuple(parameter.requires_grad for parameter in self.parameters)

    def set_trainable(self, trainable: Iterable[bool]) -> None:
        """Freezes and thaws the parameters, in the order of `trainable`."""
        for parameter, is_trained in zip(self.parameters, trainable, strict=True):
            parameter.requires_grad_(is_trained)

    def drop_stale_state(self) -> None:
        """Drops the moments of frozen parameters: once thawed, they would push into an old direction."""
        for parameter in [p for p in self.optimizer.state if not p.requires_grad]:
            del self.optimizer.state[parameter]

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        states = self.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def lr(self) -> float:
        """The current learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs to continue bit by bit."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])


def make_optimization(
    model: nn.Module, training: TrainingSettings, *, lr: float, total_steps: int, device: torch.device
) -> Optimization:
    """Makes optimizer, schedule and scaler.

    Args:
        model: Its parameters are optimised, also those that are frozen now and thawed later.
        training: Settings of the run.
        lr: Learning rate at the plan's logical batch.
        total_steps: Optimizer steps, not micro-batches, of the whole run.
        device: Device of the model.
    """
    # Integers can never be trained, and the fused optimizers refuse them.
    parameters = [
        parameter for parameter in model.parameters() if parameter.is_floating_point() or parameter.is_complex()
    ]
    optimizer = make_optimizer(parameters, training, lr, device)
    ticks = total_steps if training.scheduler_interval == "step" else training.epochs
    shape = _schedule(training.scheduler, ticks, training.warmup_share)
    return Optimization(
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, shape),
        scaler=torch.amp.GradScaler(device.type, enabled=training.precision == "fp16"),
        clip_norm=training.grad_clip_norm,
        parameters=parameters,
    )


def make_optimizer(
    parameters: list[nn.Parameter], training: TrainingSettings, lr: float, device: torch.device
) -> Optimizer:
    """Makes the optimizer alone."""
    # The default on a GPU (foreach) copies the parameters for a moment in every step, which the batch could have used.
    fused = True if device.type == "cuda" else None
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=lr, weight_decay=training.weight_decay, momentum=SGD_MOMENTUM, fused=fused
        )
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=lr, weight_decay=training.weight_decay, fused=fused)


def _schedule(name: str, ticks: int, warmup_share: float) -> Callable[[int], float]:
    """Returns the share of the learning rate at each tick: a linear rise, then level or half a cosine down to zero."""
    warmup = round(ticks * warmup_share)

    def share(tick: int) -> float:
        if tick < warmup:
            return (tick + 1) / (warmup + 1)
        if name == "constant":
            return 1.0
        # Past the end, where a run is continued for longer, the rate stays at zero rather than rising again.
        return 0.5 * (1 + math.cos(math.pi * min((tick - warmup) / max(ticks - warmup, 1), 1.0)))

    return share
