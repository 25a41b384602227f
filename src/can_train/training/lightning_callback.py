"""A Lightning callback that measures peak memory; can-train itself needs neither `lightning` nor
`pytorch_lightning`.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Final

from torch import Tensor

from can_train.errors import CanTrainError
from can_train.memory.meters import INTERVAL, WARMUP, MemoryMonitor

# Two names of Lightning, whose classes are not interchangeable.
_LIGHTNINGS: Final = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> type:
    """Finds the `Callback` of the Lightning that is imported already, else of one that is installed, else `object`."""
    for name in sorted(_LIGHTNINGS, key=lambda name: name not in sys.modules):
        try:
            found: type = import_module(name).Callback
        except ModuleNotFoundError as error:
            # An installed Lightning that lacks a module of its own must not pass for a missing one.
            if error.name not in (name, name.partition(".")[0]):
                raise
        else:
            return found
    return object


_Callback: Final[Any] = _callback_class()


class MemoryMonitorCallback(_Callback):  # type: ignore[misc]  # depends on what is installed
    """Measures peak memory in a Lightning training: `Trainer(callbacks=[MemoryMonitorCallback()])`.

    After each measured batch and at the end it logs `peak_memory_pct`, the largest peak so far as a share of the
    capacity, and `batch_size_safety_factor` where one is given. On a GPU validation between batches counts too.

    Args:
        interval: Batches from one measured batch to the next.
        warmup: Batches before the first measured one; in a shorter training the last one is measured.
        device: `auto` (the trainer's), `cpu`, `cuda[:i]` or `sim:<size>`.
        safety_factor: The share of the limit that batches were chosen by.

    Attributes:
        monitor: Has the peaks, during training and after it; None before.

    Raises:
        CanTrainError: Lightning is not installed.
    """

    def __init__(
        self, interval: int = INTERVAL, warmup: int = WARMUP, device: str = "auto", safety_factor: float | None = None
    ) -> None:
        if _Callback is object:
            found = "neither lightning nor pytorch_lightning is installed"
            remedy = "pip install lightning; in a loop of your own MemoryMonitor does the same"
            raise CanTrainError("MemoryMonitorCallback needs Lightning", value=found, remedy=remedy)
        super().__init__()
        self.monitor: MemoryMonitor | None = None
        self._interval, self._warmup = interval, warmup
        self._device, self._safety_factor = device, safety_factor
        self._batch = ExitStack()
        self._due = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the monitor, unless this is a second training."""
        if self.monitor is None:
            # At most as many as batches; Lightning may not know them.
            steps = trainer.estimated_stepping_batches
            self.monitor = MemoryMonitor(
                pl_module.device if self._device == "auto" else self._device,
                interval=self._interval,
                warmup=self._warmup,
                total_steps=None if math.isinf(steps) else int(steps) - trainer.global_step,
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Opens a step."""
        # Lightning does not call on_train_batch_end for a batch that the module skipped.
        self._batch.close()
        assert self.monitor is not None, "training starts before its batches"
        self._due = self.monitor.due
        self._batch.enter_context(self.monitor.step(pl_module, *trainer.optimizers, _tensors(batch)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Closes the step, and logs the peak where it was a measured one."""
        self._batch.close()
        if self._due:
            self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes the last reading and logs it."""
        self._batch.close()
        if self.monitor is not None:
            self.monitor.pause()
            self._log(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Takes the last reading of a training that failed."""
        self.on_train_end(trainer, pl_module)

    def _log(self, trainer: Any) -> None:
        assert self.monitor is not None, "there is something to log"
        if (share := self.monitor.peak_share) is None:
            return
        metrics = {"peak_memory_pct": share}
        if self._safety_factor is not None:
            metrics["batch_size_safety_factor"] = self._safety_factor
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a collated batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)
