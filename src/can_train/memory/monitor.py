"""Measures peak memory during training and notices leaks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from can_train.errors import ArgumentError
from can_train.memory.meters import Meter, open_meter

INTERVAL: Final = 50
"""Steps from one measured step to the next: on the CPU one costs about a fifth more."""


WARMUP: Final = 20
"""Steps before the first measured one: what is made lazily (the optimizer's state, say) is there by then."""


Held = nn.Module | Optimizer | Iterable[Tensor]
"""What has tensors on the device between steps."""


class MemoryMonitor:
    """Measures peaks through a run.

    In a loop of your own:

    >>> model = nn.Linear(256, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> monitor = MemoryMonitor("cpu", total_steps=4)
    >>> for _ in range(4):
    ...     with monitor.step(model, optimizer):
    ...         model(torch.ones(4096, 256)).mean().backward()
    ...         optimizer.step()
    >>> f"{monitor.peak_bytes / 2**20:.1f} MiB"
    '4.0 MiB'

    A GPU counts all that runs from the first step on, which is then in the peak; the monitor looks in time, and before
    each reset of its own. On the CPU measured steps alone count: the first after the warm-up, and from there one in
    `interval`.

    Args:
        device: As `--device` has it: `auto`, `cpu`, `cuda[:i]`, `sim:<size>`.
        meter: Of the device, in place of one that is opened.
        interval: Steps from one measured step to the next.
        warmup: Steps before the first measured one.
        total_steps: Steps to come, where that is known: of no more than the warm-up the last one is measured.

    Attributes:
        meter: What is read.

    Raises:
        ArgumentError: An interval below 1, or a warm-up below 0.
        DeviceError: There is no such device, or it cannot be used.
    """

    def __init__(
        self,
        device: str | torch.device = "auto",
        *,
        meter: Meter | None = None,
        interval: int = INTERVAL,
        warmup: int = WARMUP,
        total_steps: int | None = None,
    ) -> None:
        if interval < 1:
            raise ArgumentError("interval must be at least 1 step", value=f"{interval}")
        if warmup < 0:
            raise ArgumentError("warmup must be at least 0 steps", value=f"{warmup}")
        self.meter = meter or open_meter(str(device))
        self._interval = interval
        self._first = warmup if total_steps is None else max(min(warmup, total_steps - 1), 0)
        self._steps = 0
        self._counts = False
        self._peak_bytes = 0
        self._peak_reserved_bytes = 0
        self._settled_peak_bytes = 0

    @contextmanager
    def step(self, *held: Held) -> Iterator[bool]:
        """Opens a training step, measured where it is its turn.

        Args:
            held: Models, optimizers and lists of tensors that are on the device already; on the CPU they are what the
                step's own memory is added to.

        Yields:
            Whether the step's memory is counted.
        """
        measured = self.due
        counted = measured or self.meter.counts_always
        self._steps += 1
        begins = not self._counts
        if begins:
            # What ran before is not training's: probes, say, or another loop.
            self.meter.reset_peak()
            self._counts = True
        # A device that counts always is told what is held at first, and now and then: telling it takes time.
        told = counted and (begins or measured)
        try:
            with self.meter.measuring(_tensors(held)) if told else self.meter.active():
                yield counted
        finally:
            if measured:
                self.read()

    def read(self) -> None:
        """Takes the meter's peaks into the largest; to be called before anybody else resets them."""
        if not self._counts:
            return
        self._settled_peak_bytes = max(self._settled_peak_bytes, self.meter.peak_bytes())
        self._peak_bytes = max(self._peak_bytes, self._settled_peak_bytes)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self.meter.peak_reserved_bytes())

    def rescued(self) -> None:
        """Says that memory ran out and was made free again (`MicroBatcher.watch`). The peak from here on is known apart
        too: `peak_bytes_after_rescue`.
        """
        self.read()
        self._settled_peak_bytes = 0
        if self._counts:
            self.meter.reset_peak()

    def pause(self) -> None:
        """Says that what runs until the next step does not count; it may reset the meter too."""
        self.read()
        self._counts = False

    @property
    def due(self) -> bool:
        """Whether the next step is a measured one."""
        return self._steps >= self._first and (self._steps - self._first) % self._interval == 0

    @property
    def peak_bytes(self) -> int:
        """Largest allocated bytes so far; 0 before anything was measured."""
        self.read()
        return self._peak_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest bytes that the allocator held so far; 0 where nothing is reserved."""
        self.read()
        return self._peak_reserved_bytes

    @property
    def peak_bytes_after_rescue(self) -> int:
        """Largest allocated bytes since the last rescue, or since the first step where there was none."""
        self.read()
        return self._settled_peak_bytes

    @property
    def peak_share(self) -> float | None:
        """Largest allocated bytes so far ÷ capacity; None before anything was measured."""
        peak = self.peak_bytes
        return peak / self.meter.capacity_bytes if peak else None


def _tensors(held: Iterable[Held]) -> Iterator[Tensor]:
    """Goes through what is held; lazily, since no GPU needs to be told."""
    for holder in held:
        if isinstance(holder, nn.Module):
            yield from holder.parameters()
            yield from holder.buffers()
            yield from (parameter.grad for parameter in holder.parameters() if parameter.grad is not None)
        elif isinstance(holder, Optimizer):
            for state in holder.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
        else:
            yield from holder


WINDOW_STEPS: Final = 50
"""Steps whose smallest reading counts: single steps go up and down with their batches."""


RISES: Final = 5
"""Windows in a row that must each lie above the one before."""


LEAST_BYTES: Final = 2**20
"""Total rise that is worth a word."""


@dataclass
class LeakWatch:
    """Watches the floor of the memory in use.

    Attributes:
        floors: Smallest reading of each full window of the current rise.
        current: Readings of the window that is not full yet.
    """

    floors: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    told: bool = False

    def after_step(self, allocated_bytes: int) -> int:
        """Takes the reading after a step.

        Returns:
            Bytes that the floor has risen by, the first time that this counts as a leak; else 0.
        """
        if self.told:
            return 0
        self.current.append(allocated_bytes)
        if len(self.current) < WINDOW_STEPS:
            return 0
        floor = min(self.current)
        self.current.clear()
        if self.floors and floor <= self.floors[-1]:
            self.floors.clear()
        self.floors.append(floor)
        rise = floor - self.floors[0]
        self.told = len(self.floors) > RISES and rise >= LEAST_BYTES
        return rise if self.told else 0
