"""Rescue from an out-of-memory: the micro-batch is undone, its memory is freed, it is split and run again. The step of
an optimizer cannot be undone: its memory is reserved.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, pairwise
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit.cost_model import ALLOCATION_QUANTUM
from can_train.fit.packing import ROUNDING, BatchCosts, MicroBatchLimit, cut
from can_train.fit.pass_state import Snapshot, leaves_of
from can_train.io.units import size_text
from can_train.memory.catalogue import cards_that_hold
from can_train.memory.out_of_memory import (
    FIRST_WAIT_S,
    CatchOutOfMemory,
    is_out_of_memory,
    obtainable_bytes,
    without_others,
)

if TYPE_CHECKING:
    from can_train.fit.cost_model import SearchResult
    from can_train.fit.optimizer_memory import OptimizerMemory
    from can_train.fit.rungs import Rung
    from can_train.memory.meters import Meter

QUIET_STEPS: Final = 20  # Optimizer steps without an out-of-memory after which a larger micro-batch is tried
MAX_QUIET_STEPS: Final = 2000  # Longest such wait: it doubles with each growth that ran out of memory
# Relative distance between the limit and the cost that failed; growing closer is not worth a failure.
CLOSE: Final = 0.05
# Share of the limit that is kept when the allocator is too full (it had to release its cache twice in a row), or when
# memory runs out at a cost that did fit before.
RETREAT: Final = 0.9
_STRIDED: Final = torch.strided  # Here, since looking it up in `torch` takes longer than the comparison
# Shares of the memory beside other processes that micro-batches use, the next share after each out-of-memory. The
# allocator reserves more than is in use, and the more so the less room it has.
ROOM_SHARES: Final = (0.97, 0.85, 0.7, 0.5)


@dataclass(frozen=True, kw_only=True)
class RescueSettings:
    """The measures that are allowed after an out-of-memory."""

    adaptive: bool = True  # Whether micro-batches may be split; if not, the first out-of-memory is an error
    factor: float = 2.0  # Divisor of the cost that failed
    floor: int = 1  # Number of samples that is never split further
    retries: int = 3  # Attempts at that floor, after the first
    regrow: bool = True  # Whether micro-batches grow back after a quiet stretch


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Limits that out-of-memories have shown since the run began; costs in bytes above base."""

    limit: float = math.inf  # Largest cost of a micro-batch for now; infinite: the plan's limit
    failed: float = math.inf  # Smallest cost that ran out of memory since the limit last grew beyond it; infinite: none
    held: float = 0.0  # Limit that lasted for a whole quiet stretch; 0: none has
    quiet: int = 0  # Optimizer steps since the last out-of-memory or growth
    patience: int = QUIET_STEPS  # Quiet steps that the next growth waits for
    surprises: int = 0  # Out-of-memories in a row, without a growth in between, at costs that had fitted before

    def after_oom(self, cost: float, *, factor: float, proven: float = 0.0) -> Backoff:
        """Lowers the limit, by a factor, after a micro-batch of a cost ran out of memory; `proven` is the largest cost
        that was seen to fit, 0 where nobody searched.
        """
        held = self.held if self.held < cost else 0.0
        if cost > proven * (1 + ROUNDING):
            limit, surprises = max(cost / factor, held), self.surprises
        else:
            # As much did fit before, so this failure says little of other micro-batches: a sample took more than
            # predicted, or the memory is fragmented. The limit falls by a tenth only, and by more each time.
            limit, surprises = cost * max(1 - (1 - RETREAT) * 2**self.surprises, 1 / factor), self.surprises + 1
        return replace(
            self, limit=min(self.limit, limit), failed=min(cost, self.failed), held=held, quiet=0, surprises=surprises
        )

    def after_step(self, *, planned: float, factor: float) -> Backoff:
        """Counts an optimizer step without an out-of-memory; after enough of them the limit grows, up to `planned`."""
        if self.limit == math.inf:
            return self
        if self.quiet + 1 < self.patience:
            return replace(self, quiet=self.quiet + 1)
        if self.failed > self.limit * (1 + CLOSE):
            # Half-way to the cost that failed; by the factor where no larger size has failed.
            limit = min((self.limit + self.failed) / 2, factor * self.limit)
            # Nothing has failed since the last growth, so there is no reason left to wait longer.
            patience = QUIET_STEPS if self.failed == math.inf else self.patience
            grown = replace(self, limit=limit, held=self.limit, quiet=0, patience=patience, surprises=0)
        else:
            # The cost that failed may fit now: another process may have held the memory. Trying it costs a rescue, so
            # the wait for the next such try doubles.
            patience = min(self.patience * 2, MAX_QUIET_STEPS)
            grown = Backoff(limit=self.limit * factor, held=self.limit, patience=patience)
        return grown if grown.limit < planned else Backoff(held=grown.held, patience=grown.patience)

    def after_pressure(self, cost: float) -> Backoff:
        """Lowers the limit a little after the allocator had to release its cache in two steps in a row."""
        return replace(self, limit=min(self.limit, cost) * RETREAT, failed=min(self.failed, cost), held=0.0, quiet=0)


@dataclass
class Ladder:
    """The rungs that a step may be computed on, the plan's first, and the one in force.

    Attributes:
        quiet: Optimizer steps since it last climbed, or went back.
        patience: Quiet steps before it goes back to the rung below; it doubles each time it has to climb again.
    """

    rungs: tuple[Rung, ...]
    level: int = 0
    quiet: int = 0
    patience: int = QUIET_STEPS

    @property
    def rung(self) -> Rung:
        """The rung in force."""
        return self.rungs[self.level]

    def climb(self) -> bool:
        """Goes on to the next rung; tells whether there is one."""
        if self.level + 1 == len(self.rungs):
            return False
        self.level, self.quiet = self.level + 1, 0
        return True

    def go_to(self, level: int) -> bool:
        """Climbs to a rung that another rank has climbed to; tells whether this rank was below it."""
        level = min(level, len(self.rungs) - 1)
        if level <= self.level:
            return False
        self.level, self.quiet = level, 0
        return True

    def leave_state(self) -> bool:
        """Climbs to the next rung whose optimizer state waits on the host; tells whether there is one."""
        with_state = (level for level in range(self.level, len(self.rungs)) if self.rungs[level].offload_optimizer)
        return self.go_to(next(with_state, self.level))

    def without_recomputation(self) -> None:
        """Leaves the rungs out that compute modules again, for a model that cannot be; goes on to the next one."""
        self.rungs = without_recomputation(self.rungs)
        self.level = min(1, len(self.rungs) - 1)

    def after_step(self) -> bool:
        """Counts an optimizer step; after a quiet stretch goes back to the rung below, and returns True."""
        if self.level == 0:
            return False
        self.quiet += 1
        if self.quiet < self.patience:
            return False
        self.level, self.quiet, self.patience = self.level - 1, 0, min(2 * self.patience, MAX_QUIET_STEPS)
        return True

    def on(self, rung: Rung) -> Ladder:
        """Returns the ladder of a plan: the plan's rung, and rungs that go further, in order."""
        rungs = [rung]
        for one in self.rungs:
            if one.goes_further(rungs[-1]):
                rungs.append(one)
        return Ladder(tuple(rungs))

    def state_dict(self) -> dict[str, int]:
        """Returns the rung in force and its history, for a checkpoint."""
        return {"level": self.level, "quiet": self.quiet, "patience": self.patience}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores a state of `state_dict`, of a ladder of the same rungs."""
        self.level = min(state["level"], len(self.rungs) - 1)
        self.quiet, self.patience = state["quiet"], state["patience"]


def without_recomputation(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """Returns rungs for a model whose modules cannot be computed again."""
    return tuple(dict.fromkeys(replace(rung, recompute=()) for rung in rungs))


class PartDoesNotFitError(DoesNotFitError):
    """Samples `part`, (start, stop), of a batch do not fit and cannot be split further."""

    part: tuple[int, int]


class RepeatedError(Exception):
    """A pass failed on another rank of a sharded model, and is to be repeated here, too."""


class Try(CatchOutOfMemory):
    """One execution of samples start:stop of a batch, as a block. An out-of-memory error ends the block, and `message`
    has the device's words afterwards. A compiler that fails ends it, too, and the same samples are to be run `again`.

    Compute in a function that the block calls: the frames of functions that have ended are cleared, and with them the
    failed pass's tensors, but not the frame of the block itself.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop, self.again = start, stop, False

    @property
    def is_done(self) -> bool:
        """Whether the samples were computed."""
        return not self.message and not self.again


@dataclass
class Rescue:
    """Cuts batches into micro-batches, and cuts them again after an out-of-memory."""

    meter: Meter
    settings: RescueSettings
    phase: SearchResult | None = None  # Result of the search on the device; None without a search
    wait: Callable[[float], object] = time.sleep
    backoff: Backoff = Backoff()  # How large parts may be for now
    ooms: int = 0  # Out-of-memories so far, those that ended in an error included
    ooms_rescued: int = 0  # Out-of-memories of batches that were computed in the end
    # Smallest cost that ran out of memory although it was within the plan and no other process took the memory;
    # infinite where none did.
    oom_cost: float = math.inf
    # Called after each out-of-memory, once the part is undone and its memory released.
    on_oom: Callable[[], object] = lambda: None
    # Computes parts so that they take less memory from now on; tells whether it could.
    climb: Callable[[], bool] = lambda: False
    # Most memory that other processes held when this one ran out of it, though they may have left since.
    foreign_bytes: int = 0
    # Bytes that this process could have in use when memory ran out last.
    _obtainable_bytes: float = math.inf
    # Number of ROOM_SHARES tried since other processes were noticed; 0: there are none, as far as is known.
    contention_level: int = 0

    def tries(self, batch: BatchCosts, limit: MicroBatchLimit) -> Iterator[Try]:
        """Yields micro-batches of a batch in order, until all samples are computed. One that ran out of memory is
        followed by smaller ones of the same samples.

        Args:
            batch: Costs of the samples.
            limit: The plan's limit of a micro-batch.

        Raises:
            PartDoesNotFitError: Samples that may not be split further ran out of memory too often.
        """
        limit = replace(limit, floor=max(limit.floor, self.settings.floor))
        start, retries, ooms_before = 0, 0, self.ooms
        self._recheck_contention(limit)
        sizes = self.cut(batch, 0, limit)
        while sizes:
            part = Try(start, start + sizes[0])
            yield part
            if part.again:
                continue
            if part.is_done:
                start, retries = part.stop, 0
                sizes = self.cut(batch, start, limit) if self._recheck_contention(limit) else sizes[1:]
                continue
            self.meter.release()
            self.on_oom()
            sizes = self._split_after_oom(batch, start, part.stop, limit)
            if sizes[0] == part.stop - start:
                if self.settings.adaptive and self.climb():
                    continue
                retries += 1
                if not self.settings.adaptive or retries > self.settings.retries:
                    raise self._does_not_fit(batch, start, part.stop, part.message)
                self.wait(FIRST_WAIT_S * 2 ** (retries - 1))
                self.meter.release()
        self.ooms_rescued += self.ooms - ooms_before

    def record_failure(self, batch: BatchCosts, limit: MicroBatchLimit) -> None:
        """Records that memory ran out for a whole batch, which was undone."""
        self.meter.release()
        self.on_oom()
        self._split_after_oom(batch, 0, len(batch), limit)

    @contextmanager
    def record_foreign_memory(self) -> Iterator[None]:
        """Reads how much other processes hold when memory runs out in the block: a process may leave before the try
        is undone, and is to blame, too.
        """
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self._obtainable_bytes = min(obtainable_bytes(error), self.meter.available_bytes())
                foreign = self.meter.capacity_bytes - self._obtainable_bytes
                self.foreign_bytes = max(self.foreign_bytes, round(foreign))
            raise

    def cut(self, batch: BatchCosts, start: int, limit: MicroBatchLimit) -> tuple[int, ...]:
        """Cuts the samples from `start` on into parts within the limits in force."""
        if start == len(batch):
            return ()
        cost = min(limit.cost, self.backoff.limit)
        if self.contention_level:
            cost = min(cost, ROOM_SHARES[self.contention_level - 1] * self._room())
        # Of parts of a batch, all but the first have gradients beside them.
        alone = 0.0 if start or self.backoff.limit < math.inf else limit.alone
        limit = replace(limit, cost=cost, alone=alone)
        if limit.planned:
            stops = [min(stop, len(batch)) for stop in accumulate(limit.planned) if stop > start]
            parts = [batch.part(*bounds) for bounds in pairwise([start, *stops])]
            return tuple(size for part in parts if len(part) for size in cut(part, limit))
        return cut(batch.part(start, len(batch)) if start else batch, limit)

    def _split_after_oom(self, batch: BatchCosts, start: int, stop: int, limit: MicroBatchLimit) -> tuple[int, ...]:
        """Decides how the part that failed, and all that is left to do, is cut from now on."""
        self.ooms += 1
        cost = limit.charged(batch.cost(start, stop))
        # The samples that are left need not have a divisor that fits, and gradients are beside them.
        limit = replace(limit, equal=False, alone=0.0)
        if self.settings.adaptive and (room := self._contended_room(cost, limit)):
            # Other processes may have ended already: this part is cut by the room beside them.
            first, *_ = self.cut(batch.part(0, stop), start, replace(limit, cost=min(limit.cost, room)))
            return (first, *self.cut(batch, start + first, limit))
        if cost <= limit.cost * (1 + ROUNDING):
            self.oom_cost = min(self.oom_cost, cost)
        if not self.settings.adaptive:
            return (stop - start,)
        proven = 0.0 if self.phase is None else self.phase.tuned_limit
        self.backoff = self.backoff.after_oom(cost, factor=self.settings.factor, proven=proven)
        # The part that failed is split in any case, also where the limit would allow it again.
        narrow = replace(limit, cost=min(limit.cost, batch.cost(start, stop) / self.settings.factor))
        first, *_ = self.cut(batch.part(0, stop), start, narrow)
        return (first, *self.cut(batch, start + first, limit))

    def _contended_room(self, cost: float, limit: MicroBatchLimit) -> float:
        """Returns the largest cost of a part beside other processes' memory; 0 where that memory is not why the part
        failed.
        """
        # Parts keep to the room beside other processes for as long as these run. The backoff must not learn from it: it
        # does not show how much fits without contention.
        room = 0.0 if self.phase is None else self.phase.cost_within(self._obtainable_bytes)
        if room <= 0 or room >= max(cost, min(limit.cost, self.backoff.limit)):
            return 0.0
        while self.contention_level < len(ROOM_SHARES):
            self.contention_level += 1
            if (share := ROOM_SHARES[self.contention_level - 1] * room) < cost:
                return share
        return 0.0

    def _recheck_contention(self, limit: MicroBatchLimit) -> bool:
        """Ends the contention once others have left; tells whether there was any, so that the room may have changed."""
        was_contended = bool(self.contention_level)
        if was_contended and self._room() >= min(limit.cost, self.backoff.limit):
            self.contention_level = 0
        return was_contended

    def _room(self) -> float:
        """Returns the cost that other processes leave room for; infinite where costs are not in bytes."""
        return math.inf if self.phase is None else self.phase.cost_within(self.meter.available_bytes())

    def _does_not_fit(self, batch: BatchCosts, start: int, stop: int, message: str) -> PartDoesNotFitError:
        settings, samples = self.settings, stop - start
        need_bytes, cost = None, batch.cost(start, stop)
        if self.phase is not None and not self.phase.is_far(cost):
            need_bytes = self.phase.peak_bytes(cost)
        details = describe_out_of_memory(self.meter, need_bytes, available_bytes=self._obtainable_bytes)
        if settings.adaptive:
            times = f" {settings.retries + 1} times in a row" if settings.retries else ""
            rule = f"Memory ran out{times} for samples that may not be split further"
        else:
            rule = "A micro-batch ran out of memory, and training.adaptive_micro_batch is off"
            if not details.foreign_bytes:
                # Another attempt with the same settings would fail at the same place.
                details = replace(details, should_fit=False)
        named = f"sample {start} of the batch" if samples == 1 else f"samples {start} to {stop - 1} of the batch"
        error = PartDoesNotFitError(rule, value=f"{named}; the device said: {message}",
                                    remedy=self._remedy(need_bytes, samples), details=details)  # fmt: skip
        error.part = start, stop
        return error

    def _remedy(self, need_bytes: float | None, samples: int) -> str:
        capacity, smaller = self.meter.capacity_bytes, "choose a smaller model or smaller samples"
        if not self.settings.adaptive:
            return "Turn it on, or choose a smaller --micro-batch-size"
        if samples > 1:
            floor = f"which forbids fewer than {self.settings.floor} samples"
            return f"Lower --min-micro-batch-size, {floor}, or {smaller}"
        foreign_bytes = round(capacity - min(self._obtainable_bytes, self.meter.available_bytes()))
        if foreign_bytes > 0:
            return without_others(foreign_bytes, smaller)
        if need_bytes is None or need_bytes <= capacity:
            return f"Take a device of more than {size_text(capacity)} ({cards_that_hold(capacity)}), or {smaller}"
        need = f"{size_text(need_bytes)} are needed, {size_text(capacity)} are there"
        return f"{need}: take a larger card ({cards_that_hold(need_bytes)}), or {smaller}"


@contextmanager
def fatal_out_of_memory(make_error: Callable[[BaseException], DoesNotFitError | None]) -> Iterator[None]:
    """Turns an out-of-memory error in the block into the error that `make_error` returns: nothing undoes the block. The
    error stays as it is where `make_error` returns None.
    """
    try:
        yield
    except Exception as error:
        failed = make_error(error) if is_out_of_memory(error) else None
        if failed is None:
            raise
        raise failed from error


class Undo:
    """Undoes passes over the parts of one batch that fail: generators, buffers and gradients are as they were before.
    The gradients of earlier parts, of `parameters` and of the tensors that `outside` refers to, are set aside
    meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: Meter,
        parameters: Sequence[Tensor] = (),
        outside: Sequence[weakref.ref[Tensor]] = (),
    ) -> None:
        self._model, self._meter, self._outside = model, meter, outside
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._snapshot: Snapshot | None = None
        self._aside: list[tuple[Tensor, Tensor | None]] = []
        self._loss: weakref.ref[Tensor] | None = None  # Of the try that is under way

    def will_run_backward(self, loss: Tensor) -> None:
        """Is told of the loss of the try that is under way, before its backward pass."""
        self._loss = weakref.ref(loss)

    def protect(self, leaf: Tensor) -> None:
        """Sets the gradient of one more tensor aside for the attempt that is under way."""
        self._aside.append((leaf, leaf.grad))
        leaf.grad = None

    def merge(self) -> None:
        """Adds the gradients that were set aside to the try's gradients; the try cannot be undone from then on."""
        add_to_gradients(self._aside)
        self._aside, self._loss = [], None

    @contextmanager
    def undo_scope(self) -> Iterator[None]:
        """Opens the span of a try, which is undone where it fails, for any reason."""
        # A backward that fails half-way has added to some of the gradients: where that stayed, weights were 23 to 95 %
        # off.
        self._snapshot = Snapshot(self._model, self._meter.device, since=self._snapshot)
        leaves = [*self._trained, *(leaf for one in self._outside if (leaf := one()) is not None)]
        self._aside = [(leaf, leaf.grad) for leaf in leaves]
        for leaf, earlier in self._aside:
            if earlier is not None:
                leaf.grad = None
        try:
            yield
            self.merge()
        except BaseException:
            self._drop_unknown()
            for leaf, earlier in self._aside:
                leaf.grad = earlier
            self._snapshot.restore()
            raise
        finally:
            # Else the copies would stay on the device until the next try makes its own.
            self._aside, self._loss = [], None
            self._snapshot.release()

    def _drop_unknown(self) -> None:
        """Drops gradients of leaves that no earlier part has trained: a failed pass made them."""
        loss = None if self._loss is None else self._loss()
        known = {id(leaf) for leaf, _ in self._aside}
        for leaf in () if loss is None else leaves_of(loss):
            if id(leaf) not in known:
                leaf.grad = None


@contextmanager
def gradients_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Sets gradients aside for the block, as each part of a batch has its own until it is known to fit, and adds them
    to the block's after it.
    """
    aside = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in aside:
        leaf.grad = None
    yield
    add_to_gradients(aside)


def add_to_gradients(aside: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Adds gradients that were set aside to the gradients of their leaves, as autograd accumulates: dense ones in
    place, with the same bits, and without memory beside the two; sparse ones coalesced.

    Raises:
        torch.OutOfMemoryError: A sum of sparse gradients does not fit; nothing has been added.
    """
    # In one loop: in a small model, most of the time that a part takes beside its passes is spent here.
    plain, gradients, others, sparse = [], [], [], []
    for leaf, earlier in aside:
        if earlier is None:
            continue
        if (more := leaf.grad) is None:
            leaf.grad = earlier
        elif more.layout is earlier.layout is _STRIDED:
            if type(more) is Tensor and earlier.dtype is more.dtype:
                plain.append((leaf, earlier))
                gradients.append(more)
            else:
                others.append((leaf, earlier, more))
        else:
            sparse.append((leaf, earlier, more))
    # First the sums that take memory of their own.
    totals = [_sparse_sum(earlier, more) for _, earlier, more in sparse]
    for (leaf, *_), total in zip(sparse, totals, strict=True):
        leaf.grad = total
    if plain:
        torch._foreach_add_([earlier for _, earlier in plain], gradients)
    for leaf, earlier in plain:
        leaf.grad = earlier
    for leaf, earlier, more in others:
        leaf.grad = earlier.add_(more)


def _sparse_sum(earlier: Tensor, more: Tensor) -> Tensor:
    """Adds two gradients of which one or both are sparse."""
    # A sum holds the rows of both: without coalescing, parts would add up to as many rows as the batch has words.
    one, other = (gradient.coalesce() if gradient.is_sparse else gradient for gradient in (earlier, more))
    total = one + other
    return total.coalesce() if total.is_sparse else total


class OptimizerReserve:
    """Reserves the memory of the optimizer's step on one device. Of its state, `held_bytes` are there already (all of
    it, once resumed).

    The optimizer makes its state in the first step, or in the first two, and a step that runs out of memory half-way
    cannot be undone: retrying it made a silent error of 4 to 5 %. So its memory is held as ballast until then, and
    checked before every step.

    Attributes:
        tensors: The ballast, in a list that is emptied once it is freed.
        remedy: The end of the sentence that an error gives as its remedy.
    """

    remedy = "take smaller micro-batches, --optimizer sgd, which needs less, or a larger device"

    def __init__(
        self,
        needs: OptimizerMemory,
        meter: Meter,
        *,
        held_bytes: int = 0,
        retries: int = 3,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._meter = meter
        self._retries = retries
        self._wait = wait
        self.tensors: list[Tensor] = []
        self.expect(needs, held_bytes=held_bytes)

    @property
    def missing_bytes(self) -> int:
        """Bytes of state that the optimizer is yet to make."""
        return self._missing_bytes

    def expect(self, needs: OptimizerMemory, *, held_bytes: int) -> None:
        """Replaces the memory that the optimizer will take: other parameters may be trained than before."""
        self._tensor_bytes = needs.tensor_bytes
        self._transient_bytes = needs.transient_bytes
        self._missing_bytes = max(needs.state_bytes - held_bytes, 0)
        self._later_bytes = needs.later_bytes if held_bytes < needs.state_bytes - needs.later_bytes else 0

    def hold(self) -> None:
        """Allocates ballast in place of the state that the next step will make, or raises `DoesNotFitError`."""
        if self._missing_bytes and not self.tensors:
            self.tensors = self._allocate(self._missing_bytes, stays=True)

    def before_step(self) -> None:
        """Frees the ballast and checks that the step's memory can be allocated.

        Raises:
            DoesNotFitError: It cannot; nothing has been stepped.
        """
        # Emptied rather than replaced: whoever has asked for `tensors` must not keep them.
        self.tensors.clear()
        self._allocate(self._transient_bytes + self._missing_bytes)
        # Not held meanwhile: the plan counts all of the state, so that a batch leaves room for it.
        self._missing_bytes, self._later_bytes = self._later_bytes, 0

    def _allocate(self, need: int, *, stays: bool = False) -> list[Tensor]:
        for retry in range(self._retries + 1):
            if (held := allocate_ballast(need, self._tensor_bytes, self._meter.device, stays=stays)) is not None:
                return held
            self._meter.release()
            # After the first failure, the released cache may be enough.
            if retry:
                self._wait(FIRST_WAIT_S * 2 ** (retry - 1))
        raise DoesNotFitError(
            "The optimizer's step must fit beside weights and gradients",
            value=f"{size_text(need)} cannot be had",
            remedy=without_others(self._meter.foreign_bytes_at_start + self._meter.foreign_bytes(), self.remedy),
            # Smaller micro-batches leave room for it when the run is resumed.
            details=OutOfMemoryDetails(should_fit=True),
        )


def allocate_ballast(
    need: int, tensor_bytes: Sequence[int], device: torch.device, *, stays: bool = False
) -> list[Tensor] | None:
    """Allocates as many bytes as an optimizer's state and step need, for parameters of `tensor_bytes` each; returns
    None where the device has no room for them. `stays` tells whether they stand for the state while batches are
    computed.
    """
    pieces = [*_pieces(need, tensor_bytes)]
    # One piece is quick, but takes a page of its own where the pieces that the optimizer will ask for share one. Where
    # memory is fragmented, these still fit.
    for sizes in [pieces] if stays else [[need], pieces]:
        with CatchOutOfMemory():
            return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    return None


def _pieces(need: int, tensor_bytes: Sequence[int]) -> Iterator[int]:
    """Yields the sizes of the parameters, over and over until they add up to `need` as an allocator counts them."""
    # Parameters without elements would never add up.
    for size in cycle([size for size in tensor_bytes if size] or [need]):
        if need <= 0:
            break
        taken = -(-size // ALLOCATION_QUANTUM) * ALLOCATION_QUANTUM
        yield min(taken, need)
        need -= taken


def describe_out_of_memory(
    meter: Meter,
    need_bytes: float | None,
    *,
    known: OutOfMemoryDetails | None = None,
    available_bytes: float = math.inf,
) -> OutOfMemoryDetails:
    """Reads from a device why something that needs so many bytes (None: unknown) did not fit; completes `known`. When
    memory ran out `available_bytes` were there: other processes may have left since.
    """
    known = known or OutOfMemoryDetails()
    if known.of_host:
        # The device has nothing to do with it.
        return known
    available = min(available_bytes, meter.available_bytes())
    foreign = max(known.foreign_bytes, meter.foreign_bytes_at_start + round(meter.capacity_bytes - available))
    alone = meter.capacity_bytes + meter.foreign_bytes_at_start
    # A failure without other processes on the device proves that more is needed than it has.
    never_fits = not known.should_fit and (not foreign if need_bytes is None else need_bytes > alone)
    return replace(
        known,
        one_sample=never_fits,
        should_fit=not never_fits,
        of_host=meter.is_host,
        need_bytes=None if need_bytes is None else round(need_bytes),
        capacity_bytes=meter.capacity_bytes,
        foreign_bytes=foreign,
        cards=cards_that_hold(max(need_bytes or 0, alone)) if never_fits else "",
    )
