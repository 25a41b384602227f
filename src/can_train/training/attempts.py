"""The attempts of a run, as its processes record them, and the signals that end an attempt."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from can_train.errors import CanTrainError, DoesNotFitError
from can_train.io.atomic import json_text, write_json_atomic, write_new_atomic
from can_train.io.processes import AttemptStart, this_host
from can_train.io.records import utc_now
from can_train.memory.out_of_memory import is_host_memory, is_out_of_memory

_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

WARNED: Final = 128 + signal.SIGUSR2
"""Exit status of a process that left because its time is nearly up: SIGUSR2 is submitit's warning."""

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a process that was asked to leave."""

ENDING_BY_STATUS: Final[Mapping[int, str]] = {
    TERMINATED: "terminated",
    128 + signal.SIGINT: "interrupted",
    WARNED: "time_limit",
}
"""What an exit status of 128 + a signal means."""

_BY_SIGNIFICANCE: Final = (
    "host_oom", "gpu_oom", "killed", "failed", "time_limit", "interrupted", "terminated", "finished",
)  # fmt: skip
"""Endings, the most informative first: a rank that runs out of memory takes the others with it, which are then
terminated, or fail because it is gone."""

RESTARTED: Final = ("time_limit", "killed")
"""Endings after which can-train requeues a job."""

_MESSAGE_LENGTH: Final = 500
"""Characters of an error that are kept; some of torch's fill pages."""


class StopRequests:
    """Turns signals into `SystemExit(128 + signal)`: 143 for SIGTERM, 130 for SIGINT, 140 for SIGUSR2.

    Attributes:
        received: The first signal; None: none yet.
        terminated: Whether SIGTERM arrived, first or later.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.terminated = False
        self._deferring = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handles the signals inside the block, and restores the previous handlers after it."""
        previous: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in _HANDLED}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only notes a signal inside the block, and raises `SystemExit` for it at the end of the block."""
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
        raise SystemExit(128 + (self.received or 0))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        if first:
            self.received = number
        self.terminated |= number == signal.SIGTERM
        if first and not self._deferring:
            self.exit()
        # SLURM sends SIGTERM twice, and again after its warning. The second one must not cut short what the first one
        # made the process save; SLURM kills a process that takes too long. Only a person sends SIGINT, and means it.
        if not first and number == signal.SIGINT:
            raise SystemExit(128 + number)


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        attempt: Its number.
        ending: finished, failed, gpu_oom, host_oom, time_limit (it was warned and saved its state), terminated (by
            SIGTERM, and saved its state), interrupted (by SIGINT, and saved its state), or killed, which only others
            can find out.
        message: The error, in one line; empty where there is none.
        details: The fields of `OutOfMemoryDetails` after an out-of-memory.
        time: When.
        rank: Which of the run's processes recorded this; None: it was found out after the job.
        host: Machine, by the scheduler's name where it has one.
    """

    attempt: int
    ending: str
    message: str
    details: Mapping[str, Any]
    time: str
    rank: int | None = 0
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class SlurmContext:
    """Which SLURM job and rank a process is; outside a job its id is empty."""

    job_id: str = ""
    restarts: int = 0
    rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "SlurmContext":
        """Reads SLURM's variables."""
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        return cls(
            # Inside an array SLURM_JOB_ID is a number of its own, by which squeue and sacct list no element.
            job_id=f"{array}_{task}" if array else environment.get("SLURM_JOB_ID", ""),
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            rank=int(environment.get("SLURM_PROCID", "0")),
        )


class Attempts:
    """The attempts of the run in a folder, as seen from a job and rank: by default those of the environment."""

    def __init__(self, run_path: Path, context: SlurmContext | None = None) -> None:
        self._folder = run_path / "attempts"
        self._context = context or SlurmContext.from_environment()
        self._current: int | None = None
        self._is_recorded = False

    def starts(self) -> list[AttemptStart]:
        """Reads the starts of all attempts, the first one first."""
        return [AttemptStart(**_read(path)) for path in sorted(self._folder.glob("*-began.json"))]

    def end(self, attempt: int) -> AttemptEnd | None:
        """Reads how an attempt ended; of several records the most informative, None where there is none."""
        records = [AttemptEnd(**_read(path)) for path in self._folder.glob(f"{attempt:04d}-ended*.json")]
        return min(records, key=_significance, default=None)

    def end_in(self, context: SlurmContext) -> AttemptEnd | None:
        """Reads how the last attempt of a job ended; None where none began or no record was written."""
        attempt = self._last_in(context)
        return None if attempt is None else self.end(attempt)

    def count_restarts(self, job_id: str) -> int:
        """Counts how often can-train requeued a job; a requeue by SLURM or by a person does not count."""
        attempts = [start.attempt for start in self.starts() if start.job_id == job_id]
        ends = [self.end(attempt) for attempt in attempts[:-1]]
        return sum(end is not None and end.ending in RESTARTED for end in ends)

    @property
    def current(self) -> int:
        """The number of this process's attempt; the first access begins it."""
        if self._current is None:
            self._current = self._begin()
        return self._current

    @contextmanager
    def recorded(self, stops: StopRequests, *, rank: int | None = None) -> Iterator[None]:
        """Records the block as an attempt, whatever ends it; a nested block records nothing.

        Args:
            stops: Signals of the process, deferred while a record is written.
            rank: Of the process; None: as the environment says.
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
                # The other ranks take part in the attempt that the first one begins.
                if self._context.rank == 0:
                    self._current = self._begin()
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            with stops.deferred():
                self._write_end(_ending(error), _message(error), _details(error), rank=self._context.rank)

    def record_end(self, ending: str, message: str, details: Mapping[str, Any]) -> None:
        """Records how the attempt of this job ended, as was found out after it."""
        self._write_end(ending, message, details, rank=None)

    def _write_end(self, ending: str, message: str, details: Mapping[str, Any], *, rank: int | None) -> None:
        # A process may end before it has begun an attempt: it was killed while it imported torch.
        attempt = self._current or self._last_in(self._context) or self._begin()
        end = AttemptEnd(attempt=attempt, ending=ending, message=message, details=details, time=utc_now(), rank=rank,
                         host=slurm_node_name())  # fmt: skip
        writer = "-job" if rank is None else f"-rank{rank}" if rank else ""
        write_json_atomic(self._folder / f"{attempt:04d}-ended{writer}.json", asdict(end))

    def _last_in(self, context: SlurmContext) -> int | None:
        job = (context.job_id, context.restarts)
        attempts = [start.attempt for start in self.starts() if (start.job_id, start.restarts) == job]
        return max(attempts, default=None)

    def _begin(self) -> int:
        self._folder.mkdir(exist_ok=True)
        while True:
            attempt = len(list(self._folder.glob("*-began.json"))) + 1
            start = AttemptStart(attempt=attempt, start_time=utc_now(), host=this_host(), pid=os.getpid(),
                                 job_id=self._context.job_id, restarts=self._context.restarts)  # fmt: skip
            try:
                write_new_atomic(self._folder / f"{attempt:04d}-began.json", json_text(asdict(start)).encode())
            except FileExistsError:
                # Another process of the same run took this number in the meantime.
                continue
            return attempt


def slurm_node_name() -> str:
    """Returns this machine's name as SLURM has it, else its own: `exclude` of the next job must name the node."""
    return os.environ.get("SLURMD_NODENAME") or this_host()


def _significance(end: AttemptEnd) -> tuple[int, bool, str]:
    # What was found out after the job counts before what one of its ranks recorded.
    return _BY_SIGNIFICANCE.index(end.ending), end.rank is not None, end.time


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) and error.code in ENDING_BY_STATUS:
            return ENDING_BY_STATUS[error.code]
        # A job turns an error that it has printed into an exit status, and keeps it as the cause.
        return _ending(error.__cause__) if error.__cause__ else "failed"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, DoesNotFitError):
        return "host_oom" if error.details.of_host else "gpu_oom"
    if is_out_of_memory(error):
        return "host_oom" if is_host_memory(error) else "gpu_oom"
    return "failed"


def _details(error: BaseException | None) -> dict[str, Any]:
    if isinstance(error, SystemExit):
        error = error.__cause__
    return asdict(error.details) if isinstance(error, DoesNotFitError) else {}


def _message(error: BaseException | None) -> str:
    """Writes an error in one line, with its type unless its text is written for users."""
    if isinstance(error, SystemExit):
        error = error.__cause__
    if error is None or isinstance(error, KeyboardInterrupt):
        return ""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if not isinstance(error, CanTrainError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]} …"
