"""The attempts of a run: the signals that end one, and the records of their starts and ends."""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Timer, get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any, Final, TypeVar

import msgspec

from can_train.errors import (
    CanTrainError,
    DivergedError,
    DoesNotFitError,
    EarlierAttemptError,
    RankGoneError,
    Stopped,
    without_positions,
)
from can_train.io import records
from can_train.io.records import AttemptStart, JobId
from can_train.io.units import count_of
from can_train.memory.out_of_memory import is_host_memory, is_out_of_memory

WARNED: Final = 128 + signal.SIGUSR2
"""Exit status of a process that left because its time is nearly up: SIGUSR2 is submitit's warning."""

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a process that was asked to leave."""

ENDING_BY_STATUS: Final = {TERMINATED: "terminated", 128 + signal.SIGINT: "interrupted", WARNED: "time_limit"}
"""Ending by exit status (128 + number of the signal)."""

RESTARTED: Final = ("time_limit", "killed", "in_use")
"""Endings after which can-train requeues a job."""
REPEATED: Final = (*RESTARTED, "terminated")
"""Endings after which a job that is back from the queue trains its run again. Of such a job, SIGTERM was no wish of a
person: SLURM preempted it."""

CHECKPOINTS: Final = "checkpoints"
"""Folder of a run."""
_UNSAVED: Final = {
    "time_limit": "warned before a checkpoint", "terminated": "by SIGTERM, before a checkpoint",
    "interrupted": "interrupted (Ctrl-C), before a checkpoint",
}  # fmt: skip
"""Message by the ending of a run that was stopped without a checkpoint."""

_POSTPONED_S: Final = 0.05  # until a signal that arrives where an exception would be lost is looked at again
_MAX_POSTPONED: Final = 60  # times: 3 s, before SLURM kills the process
# Functions below which an exception is lost. Extension modules that are initialized turn it into an ImportError or drop
# it; Python ignores it in a destructor, and in the callback that frees the lock of an imported module.
_LOSING_EXCEPTIONS: Final = re.compile(r"ExtensionFileLoader\..*|_get_module_lock\.<locals>\.cb|(?:.*\.)?__del__")

# Endings, the most informative first: a rank that runs out of memory takes the others with it, which are then
# terminated, or fail because it is gone.
_BY_SIGNIFICANCE: Final = (
    "host_oom", "gpu_oom", "killed", "in_use", "failed", "rank_gone", "time_limit", "interrupted", "terminated",
    "finished",
)  # fmt: skip


_MESSAGE_LENGTH: Final = 500  # characters of an error that are kept; some of torch's fill pages


T = TypeVar("T")


class StopRequests:
    """Turns signals into `SystemExit(128 + signal)`: 143 for SIGTERM, 130 for SIGINT, 140 for SIGUSR2.

    A signal that arrives while an extension module is initialized is handled after the initialization.

    Attributes:
        received: Number of the first signal; None: no signal yet. Until it raises its `SystemExit`, SIGUSR2 counts
            before SIGTERM.
        terminated: Whether SIGTERM arrived, first or later.
        has_interrupted: Whether a signal has raised its `SystemExit` in the middle of other code.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.terminated = False
        self._deferring = False
        self.has_interrupted = False
        self._postponed: list[Timer] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handles the signals inside the block, and restores the previous handlers after it."""
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
        previous: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for timer in self._postponed:
                timer.cancel()
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Delays the `SystemExit` of a signal until the end of the block."""
        before, outer = self.received, self._deferring
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = outer
        if self.received != before and not outer:
            self.exit()

    def exit(self) -> None:
        """Raises `SystemExit` with 128 + the number of the signal received."""
        raise Stopped(128 + (self.received or 0))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        callers = [each.f_code.co_qualname for each, _ in walk_stack(frame)] if frame else []
        would_be_lost = any(_LOSING_EXCEPTIONS.fullmatch(name) for name in callers)
        if not self._deferring and len(self._postponed) < _MAX_POSTPONED and would_be_lost:
            timer = Timer(_POSTPONED_S, signal.pthread_kill, (get_ident(), number))
            timer.daemon = True
            timer.start()
            self._postponed.append(timer)
            return
        first = self.received is None
        # Signals that arrive together are handled in any order. A warned job asks SLURM why SIGTERM came.
        is_warned = number == signal.SIGUSR2 and self.received == signal.SIGTERM and not self.has_interrupted
        self.received = number if is_warned else self.received or number
        self.terminated |= number == signal.SIGTERM
        if first and not self._deferring:
            self.has_interrupted = True
            self.exit()
        # SLURM sends SIGTERM twice, and again after its warning. The second signal must not interrupt the saving that
        # the first signal began; SLURM kills a process that takes too long. Only a person sends SIGINT, and means it.
        if not first and number == signal.SIGINT:
            raise Stopped(128 + number)


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """The end of an attempt. Endings: finished, failed, gpu_oom, host_oom, time_limit (warned, state saved), terminated
    (SIGTERM, state saved), interrupted (SIGINT, state saved), rank_gone (another process of the run ended without a
    report), in_use (the process of an earlier attempt still trains), or killed, which only another process can record.
    """

    attempt: int
    ending: str
    message: str  # the error, in one line; empty where there is none
    # The fields of `OutOfMemoryDetails` after an out-of-memory, `lower_lr` of a `DivergedError`.
    details: Mapping[str, Any]
    time: str
    rank: int | None = 0  # of the process that recorded this; None: recorded after the job
    host: str = ""  # name of the machine; the scheduler's name if it has one

    @property
    def has_saved(self) -> bool:
        """Whether a signal ended the attempt after a checkpoint: the process saves before it leaves."""
        return self.ending in _UNSAVED and not self.unsaved

    @property
    def unsaved(self) -> str:
        """The message if a signal ended the attempt before a checkpoint; else empty."""
        return next((message for message in _UNSAVED.values() if self.message.startswith(message)), "")


@dataclass(frozen=True, kw_only=True)
class SlurmContext:
    """SLURM job and rank of a process; outside of jobs the job is None."""

    job: JobId | None = None
    restarts: int = 0
    rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "SlurmContext":
        """Reads SLURM's variables."""
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        # Inside an array SLURM_JOB_ID is another number, under which squeue and sacct list no job.
        number = f"{array}_{task}" if array else environment.get("SLURM_JOB_ID", "")
        return cls(
            job=JobId(number=number, cluster=environment.get("SLURM_CLUSTER_NAME", "")) if number else None,
            restarts=count_of(environment, "SLURM_RESTART_COUNT", 0),
            rank=count_of(environment, "SLURM_PROCID", 0),
        )


class Attempts:
    """The attempts of the run in a folder.

    Args:
        run_path: Folder of the run.
        context: Job and rank of this process; None: from the environment.
    """

    def __init__(self, run_path: Path, context: SlurmContext | None = None) -> None:
        self._folder = run_path / "attempts"
        self._context = context or SlurmContext.from_environment()
        self._current: int | None = None
        self._is_recorded = False

    def starts(self, *, after: int = 0) -> list[AttemptStart]:
        """Reads the starts of the attempts above a number, in order. Damaged records are left out."""
        paths = [path for path in sorted(self._folder.glob("*-began.json")) if path.name > f"{after:04d}-began.json"]
        starts = [read_record(path, AttemptStart) for path in paths]
        return [start for start in starts if start is not None and _is_time(start.start_time)]

    def end(self, attempt: int) -> AttemptEnd | None:
        """Reads the end of an attempt: the most informative record; None if there is none."""
        paths = self._folder.glob(f"{attempt:04d}-ended*.json")
        ends = [read_record(path, AttemptEnd) for path in paths]
        valid = [end for end in ends if end is not None and end.ending in _BY_SIGNIFICANCE and _is_time(end.time)]
        # A record made after the job counts before the record of a rank.
        return min(valid, key=lambda end: (_BY_SIGNIFICANCE.index(end.ending), end.rank is not None, end.time),
                   default=None)  # fmt: skip

    def end_in(self, context: SlurmContext) -> AttemptEnd | None:
        """Reads the end of the last attempt of a job; None if no attempt began or no record was written."""
        return None if (attempt := self._last_in(context)) is None else self.end(attempt)

    def count_restarts(self, job: JobId | None) -> int:
        """Counts the requeues of a job by can-train; a requeue by SLURM or by a person does not count."""
        attempts = [start.attempt for start in self.starts() if start.slurm_job == job]
        ends = [self.end(attempt) for attempt in attempts[:-1]]
        return sum(end is not None and end.ending in RESTARTED for end in ends)

    def is_superseded(self, *, since: str = "") -> bool:
        """Returns whether a later job has the run: this process must stop training.

        Args:
            since: Time of the submission of this job, which may have begun no attempt: attempts of other jobs before
                that time are earlier ones.
        """
        current = self._current or self._last_in(self._context)
        if current is not None:
            return any(self._is_in_other_job(start) for start in self.starts(after=current))
        return any(self._is_in_other_job(start) and self._is_later(start, since) for start in self.starts())

    def _is_later(self, start: AttemptStart, since: str) -> bool:
        if start.slurm_job == self._context.job:
            return start.restarts > self._context.restarts
        return start.start_time > since

    def supersedes(self, earlier: AttemptStart) -> bool:
        """Returns whether this attempt takes the run from an earlier attempt: this one is in a job, and the earlier one
        was in another job or in the same job before a restart. An attempt outside of jobs is a person's, and stays.
        """
        return earlier.attempt < (self._current or 0) and self._is_in_other_job(earlier)

    def _is_in_other_job(self, start: AttemptStart) -> bool:
        this_job = (self._context.job, self._context.restarts)
        return bool(self._context.job and start.slurm_job) and (start.slurm_job, start.restarts) != this_job

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Records the reason why this attempt waits in the block."""
        path = self._folder / f"{self.current:04d}-waits.txt"
        records.write_text_atomic(path, reason)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def waits_for(self, attempt: int) -> str:
        """Reads the reason why an attempt waits; empty: it does not wait."""
        return records.text_or_nothing(self._folder / f"{attempt:04d}-waits.txt")

    @property
    def current(self) -> int:
        """Number of this process's attempt; the first access begins the attempt."""
        if self._current is None:
            self._current = self._begin()
        return self._current

    @contextmanager
    def recorded(self, stops: StopRequests, *, rank: int | None = None) -> Iterator[None]:
        """Records the start and the end of the block as an attempt; a nested block records nothing.

        Args:
            stops: Signals of the process, deferred while a record is written.
            rank: Rank of the process; None: from the environment.
        """
        if self._is_recorded:
            yield
            return
        if rank is not None:
            self._context = replace(self._context, rank=rank)
        self._is_recorded = True
        error: BaseException | None = None
        try:
            with stops.deferred():
                # The other ranks take part in the attempt that rank 0 begins.
                if self._context.rank == 0:
                    self._current = self._begin()
            yield
        except BaseException as raised:
            error = raised
            if stops.has_interrupted and isinstance(raised, Exception):
                # Code that a signal interrupts may fail as it cleans up.
                error = SystemExit(128 + (stops.received or 0))
                raise error from None
            raise
        finally:
            # Where the attempt could not begin, the last one is an earlier process's.
            if self._current is not None or self._context.rank:
                with stops.deferred():
                    self._record(error)

    def _record(self, error: BaseException | None) -> None:
        ending, message, details = _describe_end(error)
        if not any((self._folder.parent / CHECKPOINTS).glob("*.pt")):
            message = message or _UNSAVED.get(ending, "")
        # On a full disk, or in a folder that is gone, the error that ended the attempt must not be hidden.
        with nullcontext() if error is None else suppress(OSError):
            self.record_end(ending, message, details, rank=self._context.rank)

    def record_end(self, ending: str, message: str, details: Mapping[str, Any], *, rank: int | None = None) -> None:
        """Records the end of this job's attempt. `rank` is None for a record that is made after the job."""
        # A process may end before it has begun an attempt: it was killed while it imported torch.
        attempt = self._current or self._last_in(self._context) or self._begin()
        end = AttemptEnd(attempt=attempt, ending=ending, message=message, details=details, time=records.utc_now(),
                         rank=rank, host=slurm_node_name())  # fmt: skip
        writer = "-job" if rank is None else f"-rank{rank}" if rank else ""
        records.write_json_atomic(self._folder / f"{attempt:04d}-ended{writer}.json", asdict(end))

    def forget(self, attempt: int) -> None:
        """Removes the records of the last attempt, which was refused before it trained."""
        # The start last: without it the number is free for another attempt.
        for path in sorted(self._folder.glob(f"{attempt:04d}-*.json"), reverse=True):
            path.unlink()

    def _last_in(self, context: SlurmContext) -> int | None:
        job_and_restarts = (context.job, context.restarts)
        attempts = [start.attempt for start in self.starts() if (start.slurm_job, start.restarts) == job_and_restarts]
        return max(attempts, default=None)

    def this_process(self, attempt: int | None = None) -> AttemptStart:
        """Describes this process; the attempt's number is 0 before the attempt begins."""
        job = self._context.job
        return AttemptStart(attempt=attempt or self._current or 0, start_time=records.utc_now(), pid=os.getpid(),
                            host=records.this_host(), job_id=job.number if job else "",
                            restarts=self._context.restarts, cluster=job.cluster if job else "")  # fmt: skip

    def _begin(self) -> int:
        self._folder.mkdir(exist_ok=True)
        while True:
            attempt = len(list(self._folder.glob("*-began.json"))) + 1
            try:
                data = records.json_text(asdict(self.this_process(attempt))).encode()
                records.write_new_atomic(self._folder / f"{attempt:04d}-began.json", data)
            except FileExistsError:
                # Another process of the same run took this number in the meantime.
                continue
            return attempt


def slurm_node_name() -> str:
    """Returns the name that SLURM gives this machine, else the host name: `exclude` of the next job must name it."""
    return os.environ.get("SLURMD_NODENAME") or records.this_host()


def read_record(path: Path, kind: type[T]) -> T | None:
    """Reads a dataclass; None where the file is damaged. Raises OSError where it cannot be read."""
    with suppress(ValueError, RecursionError):
        return msgspec.json.decode(records.read_bytes(path), type=kind)
    return None


def _is_time(text: str) -> bool:
    try:
        records.check_time("time", text)
    except ValueError:
        return False
    return True


def _describe_end(error: BaseException | None) -> tuple[str, str, dict[str, Any]]:
    """Returns the ending of an attempt that an error stops, a message in one line, and details of an out-of-memory."""
    if error is None:
        return "finished", "", {}
    if isinstance(error, SystemExit):
        # A job turns an error that it has printed into an exit status; the error is the cause of the SystemExit.
        by_signal = ENDING_BY_STATUS.get(error.code) if isinstance(error.code, int) else None
        if error.__cause__ is None:
            return by_signal or "failed", "" if by_signal else f"The code called sys.exit({error.code})", {}
        ending, message, details = _describe_end(error.__cause__)
        return by_signal or ending, message, details
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "", {}
    ending, details = "failed", {}
    if isinstance(error, DoesNotFitError):
        ending, details = "host_oom" if error.details.of_host else "gpu_oom", asdict(error.details)
    elif isinstance(error, DivergedError):
        details = {"lower_lr": error.lower_lr}
    elif isinstance(error, RankGoneError):
        ending = "rank_gone"
    elif isinstance(error, EarlierAttemptError):
        ending = "in_use"
    elif is_out_of_memory(error):
        ending = "host_oom" if is_host_memory(error) else "gpu_oom"
    text = error.in_short if isinstance(error, CanTrainError) else without_positions(str(error))
    text = " ".join(line.strip() for line in text.splitlines() if line.strip())
    # The text of a CanTrainError is written for users; other errors need their type.
    if not isinstance(error, CanTrainError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ending, text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]} …", details
