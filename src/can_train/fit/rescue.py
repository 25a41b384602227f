"""Runs the parts of a batch; one that runs out of memory is undone, split further and run again."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit.packing import ROUNDING, BatchCosts, PartLimit, cut
from can_train.io.units import size_text
from can_train.memory.catalogue import cards_that_hold
from can_train.memory.meters import CpuMeter, Meter
from can_train.memory.out_of_memory import headline, is_out_of_memory

if TYPE_CHECKING:
    from can_train.fit.cost_model import PhaseLimit


def describe_out_of_memory(
    meter: Meter, need_bytes: float | None, *, known: OutOfMemoryDetails | None = None
) -> OutOfMemoryDetails:
    """Looks at a device on which something did not fit.

    Args:
        meter: Of the device.
        need_bytes: What is needed; None: unknown. Then failing is taken for proof, unless others held memory.
        known: What was known already and stays; None: nothing.
    """
    foreign = meter.taken_bytes + meter.foreign_bytes()
    alone = meter.capacity_bytes + meter.taken_bytes
    hopeless = not foreign if need_bytes is None else need_bytes > alone
    if known is not None and known.should_fit:
        hopeless = False
    return replace(
        known or OutOfMemoryDetails(),
        one_sample=hopeless,
        should_fit=not hopeless,
        of_host=isinstance(meter, CpuMeter),
        need_bytes=None if need_bytes is None else round(need_bytes),
        capacity_bytes=meter.capacity_bytes,
        foreign_bytes=foreign,
        cards=cards_that_hold(max(need_bytes or 0, alone)) if hopeless else "",
    )


QUIET_STEPS: Final = 20
"""Optimizer steps without an out-of-memory after which a larger micro-batch is tried."""


MAX_QUIET_STEPS: Final = 2000
"""Longest wait: it doubles with each attempt to grow that failed."""


CLOSE: Final = 0.05
"""Relative distance between what fits and what failed below which growing between them is not worth a failure."""


RETREAT: Final = 0.9
"""Share of the limit that is kept when the allocator is too full (it only just managed, twice in a row), or when memory
runs out at a cost that did fit."""


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """What out-of-memories have taught since the run began; costs in bytes above base.

    Attributes:
        limit: What one micro-batch may cost for now; infinite: whatever was planned.
        failed: Smallest cost that ran out; infinite: none in force.
        held: Limit that lasted a whole quiet stretch; 0: none has.
        quiet: Optimizer steps since the last out-of-memory or growth.
        patience: Quiet steps that the next growth waits for.
        surprises: Out-of-memories in a row, without a growth between, of what should have fitted.
    """

    limit: float = math.inf
    failed: float = math.inf
    held: float = 0.0
    quiet: int = 0
    patience: int = QUIET_STEPS
    surprises: int = 0

    def after_oom(self, cost: float, *, factor: float, proven: float = 0.0) -> Backoff:
        """A micro-batch ran out of memory.

        What has never been seen to fit is divided by the factor. Where something as costly did fit, the failure says
        little of the others: a sample took more than it should, or the memory is in pieces. Those to come are then only
        a little smaller, and less little each time.

        Args:
            cost: Of that micro-batch.
            factor: Divisor of the limit.
            proven: Largest cost that was seen to fit; 0 where nobody searched.
        """
        held = self.held if self.held < cost else 0.0
        if cost > proven * (1 + ROUNDING):
            limit, surprises = max(cost / factor, held), self.surprises
        else:
            limit, surprises = cost * max(1 - (1 - RETREAT) * 2**self.surprises, 1 / factor), self.surprises + 1
        return replace(
            self, limit=min(self.limit, limit), failed=min(cost, self.failed), held=held, quiet=0, surprises=surprises
        )

    def after_step(self, *, planned: float, factor: float) -> Backoff:
        """An optimizer step went well; after enough of them the limit grows.

        Args:
            planned: The largest cost that plans ask for: growth ends there.
            factor: What a limit grows by where nothing is known of the sizes above it.
        """
        if self.limit == math.inf:
            return self
        if self.quiet + 1 < self.patience:
            return replace(self, quiet=self.quiet + 1)
        if self.failed > self.limit * (1 + CLOSE):
            limit = min((self.limit + self.failed) / 2, factor * self.limit)
            # Where nothing has failed since the last growth, that one went well: there is no reason left to wait.
            patience = QUIET_STEPS if self.failed == math.inf else self.patience
            grown = replace(self, limit=limit, held=self.limit, quiet=0, patience=patience, surprises=0)
        else:
            # What failed then may fit now: the memory may have been another process's. Trying it costs a rescue, so
            # the wait for the next such try doubles.
            patience = min(self.patience * 2, MAX_QUIET_STEPS)
            grown = Backoff(limit=self.limit * factor, held=self.limit, patience=patience)
        return grown if grown.limit < planned else Backoff(held=grown.held, patience=grown.patience)

    def after_pressure(self, cost: float) -> Backoff:
        """The allocator had to release its cache in two steps in a row: the next micro-batches are a little smaller."""
        return replace(self, limit=min(self.limit, cost) * RETREAT, failed=min(self.failed, cost), held=0.0, quiet=0)


FIRST_WAIT_S: Final = 0.1
"""Pause before what cannot be split is run again, doubling each time. Another process may give memory back."""


ROOM_SHARES: Final = (0.97, 0.85, 0.7, 0.5)
"""Shares of what others have left that parts take, the next one after each out-of-memory: the allocator holds more than
what is in use, and the more so the less room it has.
"""


_WHY: Final = {
    True: "Memory ran out{times} for samples that may not be split further",
    False: "A micro-batch ran out of memory, and training.adaptive_micro_batch is off",
}


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RescueSettings:
    """What may be done about an out-of-memory.

    Attributes:
        adaptive: Whether anything may be: off, the first one is an error.
        factor: What a part that failed is divided by.
        floor: Samples that are never split further.
        retries: Attempts at that floor, after the first.
        regrow: Whether micro-batches grow back after a quiet stretch.
    """

    adaptive: bool = True
    factor: float = 2.0
    floor: int = 1
    retries: int = 3
    regrow: bool = True


class Undoable(Protocol):
    """What stands ready to take a part's attempt back, or to keep it."""

    def keep(self) -> None:
        """The attempt went well."""

    def undo(self) -> None:
        """The attempt failed: everything is again as it was before it."""


@dataclass(frozen=True, kw_only=True)
class Part(Generic[T]):
    """A part that was run.

    Attributes:
        start, stop: Its samples in the batch.
        result: What running it returned.
    """

    start: int
    stop: int
    result: T


class PartDoesNotFitError(DoesNotFitError):
    """Samples that cannot be split further do not fit.

    Args:
        rule: As for every error.
        value: Likewise.
        remedy: Likewise.
        details: Likewise.
        part: (start, stop) of the samples in their batch.
    """

    def __init__(
        self,
        rule: str,
        *,
        details: OutOfMemoryDetails,
        value: str = "",
        remedy: str = "",
        part: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(rule, value=value, remedy=remedy, details=details)
        self.part = part


class Rescue:
    """Runs batches in parts that fit.

    Args:
        meter: Of the device.
        settings: What may be done.
        phase: What is known of batches on the device; None: nothing.
        wait: Sleeps some seconds.

    Attributes:
        phase: As given; may be set anew.
        backoff: How large parts may be for now.
        ooms: Out-of-memories survived so far.
        oom_cost: Smallest cost that ran out though it was within the plan and nobody else took the memory; infinite:
            none did.
        on_oom: Called after each out-of-memory, once what failed is undone and its memory released.
    """

    def __init__(
        self,
        meter: Meter,
        settings: RescueSettings,
        *,
        phase: PhaseLimit | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._meter = meter
        self._settings = settings
        self.phase = phase
        self._wait = wait
        self.backoff = Backoff()
        self._crowded = 0
        self.ooms = 0
        self.oom_cost = math.inf
        self.on_oom: Callable[[], object] = lambda: None

    def run(
        self, batch: BatchCosts, limit: PartLimit, attempt: Callable[[int, int], T], prepare: Callable[[], Undoable]
    ) -> Iterator[Part[T]]:
        """Runs a batch in order; yields each part once it has succeeded.

        Args:
            batch: What the samples cost.
            limit: What a part may hold.
            attempt: Runs samples `start:stop`.
            prepare: Called before each attempt.

        Raises:
            DoesNotFitError: A part that cannot be split further does not fit, or nothing may be split.
        """
        floor = replace(limit, floor=max(limit.floor, self._settings.floor))
        start, retries = 0, 0
        self._welcome(floor)
        sizes = self._cut(batch, 0, floor)
        while sizes:
            stop = start + sizes[0]
            result = _attempt(attempt, prepare, start, stop)
            if not isinstance(result, _OutOfMemory):
                yield Part(start=start, stop=stop, result=result)
                start, retries = stop, 0
                sizes = self._cut(batch, start, floor) if self._welcome(floor) else sizes[1:]
                continue
            self._meter.release()
            self.on_oom()
            finer = self._after_oom(batch, start, stop, floor)
            if finer[0] == stop - start:
                retries += 1
                self._retry(batch, start, stop, retries, result)
            sizes = finer

    def _cut(self, batch: BatchCosts, start: int, limit: PartLimit) -> tuple[int, ...]:
        """Cuts what is left of a batch from a sample on."""
        rest = batch.part(start, len(batch))
        return cut(rest, self._in_force(limit)) if len(rest) else ()

    def _in_force(self, limit: PartLimit) -> PartLimit:
        """What a part may hold by now."""
        cost = self._planned(limit)
        if self._crowded:
            cost = min(cost, ROOM_SHARES[self._crowded - 1] * self._left())
        return replace(limit, cost=cost)

    def _planned(self, limit: PartLimit) -> float:
        return min(limit.cost, self.backoff.limit)

    def _after_oom(self, batch: BatchCosts, start: int, stop: int, limit: PartLimit) -> tuple[int, ...]:
        """Decides how what failed and all that is left to do is cut from now on."""
        self.ooms += 1
        limit = replace(limit, equal=False)
        cost = batch.cost(start, stop)
        if self._settings.adaptive and self._crowds(cost, self._planned(limit)):
            return self._cut(batch, start, limit)
        if cost <= limit.cost * (1 + ROUNDING):
            self.oom_cost = min(self.oom_cost, cost)
        if not self._settings.adaptive:
            return (stop - start,)
        proven = 0.0 if self.phase is None else self.phase.tuned_limit
        self.backoff = self.backoff.after_oom(cost, factor=self._settings.factor, proven=proven)
        narrow = replace(limit, cost=min(limit.cost, cost / self._settings.factor))
        first, *_ = self._cut(batch.part(0, stop), start, narrow)
        return (first, *self._cut(batch, start + first, limit))

    def _crowds(self, cost: float, planned: float) -> bool:
        """Decides whether a failure is others' doing: they hold memory that was there before. Parts then keep to what
        is left for as long as that lasts, which says nothing of what fits without them.
        """
        left = self._left()
        if left <= 0 or left >= max(cost, planned):
            return False
        while self._crowded < len(ROOM_SHARES):
            self._crowded += 1
            if ROOM_SHARES[self._crowded - 1] * left < cost:
                return True
        return False

    def _welcome(self, limit: PartLimit) -> bool:
        """Sees whether others have left; tells whether they were there, so that what is left may have changed."""
        was_crowded = bool(self._crowded)
        if was_crowded and self._left() >= self._planned(limit):
            self._crowded = 0
        return was_crowded

    def _left(self) -> float:
        """Cost that others leave room for; infinite where nothing is known of costs."""
        return math.inf if self.phase is None else self.phase.cost_within(self._meter.available_bytes())

    def _retry(self, batch: BatchCosts, start: int, stop: int, retries: int, failure: _OutOfMemory) -> None:
        """Waits for memory that may be another process's; gives up after a few times."""
        if not self._settings.adaptive or retries > self._settings.retries:
            raise self._does_not_fit(batch, start, stop, failure)
        self._wait(FIRST_WAIT_S * 2 ** (retries - 1))
        self._meter.release()

    def _does_not_fit(self, batch: BatchCosts, start: int, stop: int, failure: _OutOfMemory) -> DoesNotFitError:
        need_bytes = None if self.phase is None else self.phase.peak_bytes(batch.cost(start, stop))
        details = describe_out_of_memory(self._meter, need_bytes)
        if not (self._settings.adaptive or details.foreign_bytes):
            # It was forbidden to try, and will be again.
            details = replace(details, should_fit=False)
        return PartDoesNotFitError(
            _WHY[self._settings.adaptive].format(times=_times(self._settings.retries + 1)),
            value=f"{_samples(start, stop)}; the device said: {failure.message}",
            remedy=self._remedy(need_bytes, stop - start),
            part=(start, stop),
            details=details,
        )

    def _remedy(self, need_bytes: float | None, samples: int) -> str:
        if not self._settings.adaptive:
            return "Turn it on, or choose a smaller --micro-batch-size"
        smaller = "choose a smaller model or smaller samples"
        if samples > 1:
            return (
                f"Lower --min-micro-batch-size, which forbids fewer than {self._settings.floor} samples, or {smaller}"
            )
        capacity = self._meter.capacity_bytes
        if self._meter.foreign_bytes() > 0:
            return f"Another process holds memory (nvidia-smi): try again, or {smaller}"
        if need_bytes is None or need_bytes <= capacity:
            return f"Take a device of more than {size_text(capacity)} ({cards_that_hold(capacity)}), or {smaller}"
        need = f"{size_text(need_bytes)} are needed, {size_text(capacity)} are there"
        return f"{need}: take a larger card ({cards_that_hold(need_bytes)}), or {smaller}"


@dataclass(frozen=True)
class _OutOfMemory:
    message: str


def _attempt(
    attempt: Callable[[int, int], T], prepare: Callable[[], Undoable], start: int, stop: int
) -> T | _OutOfMemory:
    """Runs a part, and undoes it where it fails, for whatever reason. An out-of-memory comes back as a value, so that
    nobody handles the next attempt inside `except`, where the error, its traceback and with it every tensor of the
    failed pass would stay alive.
    """
    undoable: Undoable | None = None
    try:
        undoable = prepare()
        result = attempt(start, stop)
        undoable.keep()
        return result
    except BaseException as error:
        if undoable is not None:
            undoable.undo()
        if not is_out_of_memory(error):
            raise
        message = headline(error)
        _let_go(error)
    return _OutOfMemory(message)


def _let_go(error: BaseException) -> None:
    """Frees what the frames of an error and of its causes hold: somebody may keep the error itself."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def _times(attempts: int) -> str:
    return f" {attempts} times in a row" if attempts > 1 else ""


def _samples(start: int, stop: int) -> str:
    return f"sample {start} of the batch" if stop == start + 1 else f"samples {start} to {stop - 1} of the batch"
