"""Schedules of the learning rate, by the settings or by a task."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from can_train.errors import CanTrainError, DataError, TaskError

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings


def task_schedule(compute: Callable[[Optimizer, int], object], optimizer: Optimizer, ticks: int) -> LRScheduler | None:
    """Returns the scheduler that a task makes for a run of some moves; None where it leaves the settings alone.

    Raises:
        DataError: It returned something else, or a scheduler that no checkpoint can hold.
        TaskError: Its code failed.
    """
    where = getattr(compute, "__qualname__", "schedule")
    try:
        made = compute(optimizer, ticks)
        if callable(made) and not isinstance(made, LRScheduler | type):
            made = LambdaLR(optimizer, _factor_of(made, where))
    except CanTrainError:
        raise
    except Exception as error:
        raise TaskError(f"{where} failed", error) from error
    if made is None:
        return None
    remedy = "Return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, steps), or lambda step: 1 - step / steps"
    if not isinstance(made, LRScheduler):
        raise DataError(f"{where} returned neither a scheduler of PyTorch nor a function of the step",
                        value=f"{made!r:.60}", remedy=remedy)  # fmt: skip
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise DataError(f"{where} returned a scheduler of another optimizer than it was given",
                        value=type(made).__name__, remedy=remedy)  # fmt: skip
    for name, value in as_plain(made.state_dict()).items():
        if (kind := _not_plain(value)) is not None:
            raise DataError(f"{where} returned a scheduler whose state no checkpoint can hold",
                            value=f"{name} has a {kind} in it",
                            remedy=f"Leave {name} out of {type(made).__name__}.state_dict()")  # fmt: skip
    return made


def _factor_of(compute: Callable[[int], Any], where: str) -> Callable[[int], float]:
    """Returns a task's function of the step, with its results checked."""

    def factor(step: int) -> float:
        value = compute(step)
        with suppress(TypeError, ValueError):
            if 0 <= (number := float(value)) < math.inf:
                return number
        raise DataError(f"The function that {where} returned gives no factor of the learning rate",
                        value=f"{value!r:.60} at step {step}", remedy="Return a number of at least 0")  # fmt: skip

    return factor


def as_plain(value: Any) -> Any:
    """Returns a value with Python's numbers in the place of numpy's."""
    if isinstance(value, dict):
        return {name: as_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(as_plain, value)) if type(value) in (list, tuple) else value
    return value.item() if isinstance(value, np.generic) else value


def _not_plain(value: Any) -> str | None:
    """Returns the type of a value, or of a part of it, that a checkpoint cannot hold; None where there is none."""
    if isinstance(value, dict):
        return next(filter(None, (_not_plain(part) for part in value.values())), None)
    if type(value) in (list, tuple):
        return next(filter(None, map(_not_plain, value)), None)
    is_plain = value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str)
    return None if is_plain else type(value).__name__


@dataclass(kw_only=True)
class Plateau:
    """The state of the schedule `plateau`: it multiplies the learning rate by `factor` after `patience` validations in
    a row without a better loss.
    """

    factor: float
    patience: int
    share: float = 1.0
    best_loss: float = math.inf
    waited: int = 0  # Validations since the last better one, or since the rate was lowered

    def validated(self, loss: float) -> None:
        """Counts a validation."""
        if loss < self.best_loss:
            self.best_loss, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.share, self.waited = self.share * self.factor, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, without the settings."""
        return {"share": self.share, "best_loss": self.best_loss, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self.share, self.best_loss, self.waited = state["share"], state["best_loss"], state["waited"]


def schedule(training: TrainingSettings, ticks: int, plateau: Plateau | None = None) -> Callable[[int], float]:
    """Returns the share of the learning rate at each tick t: a linear rise over the first w = warmup_share · n of the
    n ticks, up to the first share of the schedule and then the schedule. With x = (t - w) / (n - w) it is

        constant    1
        cosine      (1 + cos πx) / 2
        linear      1 - x
        one-cycle   as `torch.optim.lr_scheduler.OneCycleLR` has it: half a cosine from 1 / start_divisor to 1 over
                    rise_share · (n - w) - 1 ticks, and half a cosine down to 1 / (start_divisor · end_divisor) at the
                    last tick
        step        factor^⌊e / schedule_epochs⌋ in epoch e, counted from 0, of n / epochs ticks
        wsd         1, and over the last decay_share · n ticks a line down to 0 at t = n
        plateau     the factor to the power of the times that the validation loss has stopped to fall (`Plateau`)

    Past the end the share stays as it was there.

    Args:
        training: The name of the schedule, and its settings.
        ticks: Its length n: the moves of the schedule, by step or by epoch.
        plateau: The state of the schedule `plateau`.
    """
    warmup, last = round(ticks * training.warmup_share), max(ticks - 1, 0)
    length, decay = max(ticks - warmup, 1), max(round(ticks * training.schedule_decay_share), 1)
    top = training.schedule_rise_share * length - 1
    start = 1 / training.schedule_start_divisor
    end = start / training.schedule_end_divisor

    def one_cycle(tick: int) -> float:
        since = min(tick, last) - warmup
        if since <= top:
            return _half_cosine(start, 1.0, since / top if top > 0 else 1.0)
        return _half_cosine(1.0, end, (since - top) / max(length - 1 - top, 1e-9))

    bodies: dict[str, Callable[[int], float]] = {
        "constant": lambda tick: 1.0,
        "cosine": lambda tick: 0.5 * (1 + math.cos(math.pi * min((tick - warmup) / length, 1.0))),
        "linear": lambda tick: 1.0 - min((tick - warmup) / length, 1.0),
        "one-cycle": one_cycle,
        "step": lambda tick: (
            training.schedule_factor ** (min(tick, last) * training.epochs // max(ticks, 1) // training.schedule_epochs)
        ),
        "wsd": lambda tick: min(1.0, max(ticks - tick, 0) / decay),
        "plateau": lambda tick: 1.0 if plateau is None else plateau.share,
    }
    body = bodies[training.scheduler]

    def share(tick: int) -> float:
        if tick < warmup:
            return (tick + 1) / (warmup + 1) * body(warmup)
        return body(tick)

    return share


def _half_cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) / 2 * (1 + math.cos(math.pi * min(done, 1.0)))
