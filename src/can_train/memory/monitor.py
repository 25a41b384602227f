"""The memory monitor, which measures peaks through a training, and the watch for leaks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Final

import torch

from can_train.errors import ArgumentError, check_kinds
from can_train.memory.meters import Meter, Resident, meter_of, tensors_of

INTERVAL: Final = 50  # steps from one measured step to the next; on the CPU, a measured step takes a fifth longer
# Steps before the first measured step. Lazily made tensors, such as the optimizer's state, exist by then.
WARMUP: Final = 20
WINDOW_STEPS: Final = 50  # steps whose smallest reading counts: readings of single steps vary with their batches
RISES: Final = 5  # windows in a row that must each lie above the one before
LEAST_BYTES: Final = 2**20  # smallest total rise that is reported
_SPAN_STEPS: Final = 2  # steps whose smallest reading is remembered, at first
_MOST_SPANS: Final = 128  # that are remembered; where there are more, each two become one


def check_steps(interval: object, warmup: object) -> None:
    """Raises ArgumentError unless steps are measured at an interval, after a warm-up."""
    check_kinds("a number of steps", Integral, f"Give interval={INTERVAL} and warmup={WARMUP}, or leave them out",
                interval=interval, warmup=warmup)  # fmt: skip
    for name, steps, least in (("interval", interval, 1), ("warmup", warmup, 0)):
        if steps < least:  # type: ignore[operator]  # whole numbers
            raise ArgumentError(f"{name} must be at least {least} step{'s' * (not least)}", value=f"{steps}",
                                remedy=f"Give interval={INTERVAL} and warmup={WARMUP}, or leave them out")  # fmt: skip


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

    On a GPU, everything from the first step on counts. On the CPU, only measured steps do: the first step after the
    warm-up, and every `interval` steps from there.

    Args:
        device: As in `--device`: `auto`, `cpu`, `cuda[:i]`, `sim:<size>`; or a `torch.device`.
        meter: Meter of the device, or the device; None opens the meter of `device`.
        interval: Steps from one measured step to the next.
        warmup: Steps before the first measured step.
        total_steps: Steps to come; None where unknown. If they are no more than the warm-up, the last step is measured.
    """

    def __init__(
        self,
        device: str | torch.device = "auto",
        *,
        meter: Meter | str | torch.device | None = None,
        interval: int = INTERVAL,
        warmup: int = WARMUP,
        total_steps: int | None = None,
    ) -> None:
        check_steps(interval, warmup)
        if total_steps is not None:
            check_kinds("a number of steps", Integral, "Give their number, or leave it out", total_steps=total_steps)
        self.meter = meter_of(meter, device)
        self._interval = interval
        self._first = warmup if total_steps is None else max(min(warmup, total_steps - 1), 0)
        self._steps = 0
        # Whether the meter's peaks are of training: not before the first step, nor after `pause`.
        self._counts = False
        # Largest (allocated, reserved) bytes: of the run, since the last rescue, and since the last step began; 0 where
        # nothing was measured.
        self._run = self._since_rescue = self.last_step = (0, 0)
        self._utilisations: list[float] = []

    @contextmanager
    def step(self, *resident: Resident) -> Iterator[bool]:
        """Opens a training step, measures it where it is due, and yields whether its memory is counted. `resident`
        models, optimizers and tensors are on the device already; on the CPU, the step's own memory is added to theirs.
        """
        measured, begins = self.due, not self._counts
        counted = measured or self.meter.counts_always
        self._steps += 1
        if begins:
            # Peaks of earlier work, such as a probe or another loop, are not part of the training.
            self.meter.reset_peak()
            self._counts = True
        elif self.meter.counts_always:
            # A validation since the last step counts for the run and not for this step.
            self.read()
            self.meter.reset_peak()
        self.last_step = (0, 0)
        # A device that counts always needs the resident tensors only now and then, and walking them takes time.
        walks = counted and (begins or measured)
        try:
            with self.meter.measuring(tensors_of(resident)) if walks else self.meter.active():
                yield counted
        finally:
            if counted:
                self.read()
            if measured and (share := self.meter.utilisation()) is not None:
                self._utilisations.append(share)

    def read(self) -> None:
        """Adds the meter's peaks to the largest so far; to be called before other code resets the meter."""
        if self._counts:
            allocated, reserved = self.meter.peak_bytes(), self.meter.peak_reserved_bytes()
            self._run, self._since_rescue, self.last_step = (
                (max(peak[0], allocated), max(peak[1], reserved))
                for peak in (self._run, self._since_rescue, self.last_step)
            )

    def rescued(self) -> None:
        """Starts `peak_bytes_after_rescue` again: an out-of-memory was undone and its memory released."""
        self.read()
        self._since_rescue = (0, 0)
        if self._counts:
            self.meter.reset_peak()

    def pause(self) -> None:
        """Leaves out all work until the next step; that work may reset the meter."""
        self.read()
        self._counts = False

    @property
    def due(self) -> bool:
        """Whether the next step is a measured one."""
        return self._steps >= self._first and (self._steps - self._first) % self._interval == 0

    @property
    def last_known_peak_bytes(self) -> int:
        """Largest allocated bytes at the last reading: the allocator, which may take long to answer, is not asked."""
        return self._run[0]

    @property
    def peak_bytes(self) -> int:
        """Largest allocated bytes so far; 0 before anything was measured."""
        self.read()
        return self._run[0]

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest reserved bytes so far; 0 where nothing is reserved."""
        self.read()
        return self._run[1]

    @property
    def peak_bytes_after_rescue(self) -> int:
        """Largest allocated bytes since the last rescue, or since the first step where there was none."""
        self.read()
        return self._since_rescue[0]

    @property
    def utilisation(self) -> float | None:
        """Mean share of the time in which kernels ran, sampled in measured steps; None where nobody samples it."""
        return sum(self._utilisations) / len(self._utilisations) if self._utilisations else None

    @property
    def peak_share(self) -> float | None:
        """Largest allocated bytes so far ÷ capacity; None before anything was measured."""
        return self.peak_bytes / self.meter.capacity_bytes if self.peak_bytes else None


@dataclass
class LeakWatch:
    """Watches the floor of the memory in use: the smallest reading of each window of steps."""

    # The floors of the current rise, and the readings of the window that is not full yet.
    floors: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    reported: bool = False
    # The smallest reading of each span of so many steps since the first step, and of the span that has not ended.
    spans: list[int] = field(default_factory=list)
    span_steps: int = _SPAN_STEPS
    in_span: list[int] = field(default_factory=list)

    def after_step(self, allocated_bytes: int) -> int:
        """Takes the reading after a step; returns the rise of the floor in bytes when it first shows a leak, else 0."""
        self._remember(allocated_bytes)
        if self.reported:
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
        self.reported = len(self.floors) > RISES and rise >= LEAST_BYTES
        return rise if self.reported else 0

    def rise(self) -> tuple[int, int]:
        """Returns by how many bytes the memory in use has risen up to now, in RISES spans of any length in a row at
        least, and the number of steps that it has risen for; 0 and 0 where it has not. A run that dies need not have
        lived for as many windows as a report waits for.
        """
        floors, steps, largest = self.spans, self.span_steps, (0, 0)
        while len(floors) > RISES:
            start = len(floors) - 1
            while start and floors[start - 1] < floors[start]:
                start -= 1
            if len(floors) - 1 - start >= RISES:
                largest = max(largest, (floors[-1] - floors[start], (len(floors) - start) * steps + len(self.in_span)))
            floors, steps = _in_pairs(floors), 2 * steps
        return largest

    def _remember(self, allocated_bytes: int) -> None:
        self.in_span.append(allocated_bytes)
        if len(self.in_span) == self.span_steps:
            self.spans.append(min(self.in_span))
            self.in_span.clear()
        if len(self.spans) == _MOST_SPANS:
            self.spans, self.span_steps = _in_pairs(self.spans), 2 * self.span_steps


def _in_pairs(floors: list[int]) -> list[int]:
    """Returns the smaller floor of each two, up to the last one."""
    ends = floors[len(floors) % 2 :]
    return [min(pair) for pair in zip(ends[::2], ends[1::2], strict=True)]
