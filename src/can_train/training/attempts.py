"""What the processes of a run leave about themselves, and the signals that end them."""

import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from can_train.errors import CanTrainError, DoesNotFitError
from can_train.io.atomic import json_text, write_json_atomic, write_new_atomic
from can_train.io.records import utc_now
from can_train.memory.out_of_memory import is_host_memory, is_out_of_memory

_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


WARNED: Final = 128 + signal.SIGUSR2
"""Exit status of a process that left because its time is nearly up."""


TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a process that was asked to leave."""


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
        """Handles the signals inside the block; the handlers of before come back after it."""
        previous: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in _HANDLED}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a signal is only noted in `received`; it ends the process at the block's end.

        Raises:
            SystemExit: A signal arrived that the block left unanswered.
        """
        before, outer = self.received, self._deferring
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = outer
        if self.received != before and not outer:
            self.exit()

    def exit(self) -> None:
        """Leaves the process for the signal received.

        Raises:
            SystemExit: Always, with 128 + the signal's number.
        """
        raise SystemExit(128 + (self.received or 0))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        if first:
            self.received = number
        self.terminated |= number == signal.SIGTERM
        if first and not self._deferring:
            self.exit()
        # A scheduler sends SIGTERM twice, and again after its warning: what is being saved for the first must not be
        # cut short. If it is in earnest it kills. Nobody but a person sends SIGINT.
        if not first and number == signal.SIGINT:
            raise SystemExit(128 + number)


_FOLDER: Final = "attempts"


_INTERRUPTED: Final = 128 + 2


_LEFT: Final[Mapping[int, str]] = {TERMINATED: "terminated", _INTERRUPTED: "interrupted", WARNED: "time_limit"}
"""What an exit status of 128 + a signal says."""


_TELLING: Final = (
    "host_oom", "gpu_oom", "killed", "failed", "time_limit", "interrupted", "terminated", "finished",
)  # fmt: skip
"""Endings, the one first that says most: a rank that ran out of memory takes the others with it, which then are
terminated, or fail for want of it."""


RESTARTED: Final = ("time_limit", "killed")
"""Endings after which can-train puts a job back into the queue."""


_LONGEST: Final = 500
"""Characters of an error that are kept in one line."""


@dataclass(frozen=True, kw_only=True)
class AttemptStart:
    """That one process began to work on a run.

    Attributes:
        attempt: Its number in the run, from 1.
        job_id: Job of the scheduler that it runs in (123, or 123_4 in an array); empty: none.
        restarts: Times that the job had been put back into the queue before.
        host: Machine.
        pid: Process.
        time: When.
    """

    attempt: int
    job_id: str
    restarts: int
    host: str
    pid: int
    time: str


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How it ended.

    Attributes:
        attempt: Its number.
        ending: finished, failed, gpu_oom, host_oom, time_limit (it was warned, and saved what it had), terminated
            (SIGTERM; likewise), interrupted (SIGINT; likewise), or killed, which others found out.
        message: The error, in one line; empty where there is none.
        details: Of an out-of-memory, what is known of it (see `OutOfMemoryDetails`).
        time: When.
        rank: Which of the run's processes says so; None: none, it was found out after the job.
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
    """Where a process of a run stands.

    Attributes:
        job_id: Job of the scheduler; empty: none.
        restarts: Times that it had been put back into the queue before.
        rank: Of the processes that train the run together; the first one's word counts.
    """

    job_id: str = ""
    restarts: int = 0
    rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "SlurmContext":
        """Reads it off SLURM's variables."""
        return cls(
            job_id=scheduler_job(environment),
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            rank=int(environment.get("SLURM_PROCID", "0")),
        )


class Attempts:
    """The attempts of a run.

    Args:
        run_path: The run's folder.
        place: Where this process stands; None: what its environment says.
    """

    def __init__(self, run_path: Path, place: SlurmContext | None = None) -> None:
        self._folder = run_path / _FOLDER
        self._place = place or SlurmContext.from_environment()
        self._current: int | None = None
        self._is_recorded = False

    def began(self) -> list[AttemptStart]:
        """Reads the attempts, the first one first."""
        return [AttemptStart(**_read(path)) for path in sorted(self._folder.glob("*-began.json"))]

    def ended(self, attempt: int) -> AttemptEnd | None:
        """Reads how an attempt ended, of several ranks the one whose ending says most; None where none did say."""
        found = [AttemptEnd(**_read(path)) for path in self._folder.glob(f"{attempt:04d}-ended*.json")]
        return min(found, key=_little_said, default=None)

    def ended_of_job(self, place: SlurmContext) -> AttemptEnd | None:
        """Reads how the attempt in a place ended; None where it did not say, or did not come to begin."""
        attempt = self._of(place)
        return None if attempt is None else self.ended(attempt)

    def restarts_of(self, job_id: str) -> int:
        """Counts the attempts of a job, but for the last, that it was put back into the queue after by can-train."""
        attempts = [record.attempt for record in self.began() if record.job_id == job_id]
        endings = [self.ended(attempt) for attempt in attempts[:-1]]
        return sum(ended is not None and ended.ending in RESTARTED for ended in endings)

    @property
    def current(self) -> int:
        """Number of this process's attempt, which begins where it has not yet."""
        if self._current is None:
            self._current = self._begin()
        return self._current

    @contextmanager
    def recorded(self, stops: StopRequests, *, rank: int | None = None) -> Iterator[None]:
        """Records the attempt that the block is, whatever ends it; within such a block another changes nothing.

        Args:
            stops: Of the process, whose signals do not keep an ending from being written.
            rank: Of the process; None: what its environment says.
        """
        if self._is_recorded:
            yield
            return
        if rank is not None:
            self._place = replace(self._place, rank=rank)
        self._is_recorded = True
        try:
            with stops.deferred():
                self._join()
            yield
        except BaseException as error:
            with stops.deferred():
                self._end(error)
            raise
        with stops.deferred():
            self._end(None)

    def witness(self, ending: str, message: str, details: Mapping[str, Any]) -> None:
        """Writes down how the attempt in this place ended, as others have found out."""
        attempt = self._number()
        self._write("-job", AttemptEnd(
            attempt=attempt, ending=ending, message=message, details=details, time=utc_now(), rank=None,
            host=this_machine(),
        ))  # fmt: skip

    def _end(self, error: BaseException | None) -> None:
        rank = self._place.rank
        self._write(f"-rank{rank}" if rank else "", AttemptEnd(
            attempt=self._number(), ending=_ending(error), message=_message(error), details=_details(error),
            time=utc_now(), rank=rank, host=this_machine(),
        ))  # fmt: skip

    def _write(self, who: str, record: AttemptEnd) -> None:
        write_json_atomic(self._folder / f"{record.attempt:04d}-ended{who}.json", asdict(record))

    def _join(self) -> None:
        """Begins an attempt; ranks but the first take part in that one's."""
        if self._place.rank == 0:
            self._current = self._begin()

    def _number(self) -> int:
        """The attempt that an ending is of; it begins now, where its process did not come to that."""
        if self._current is not None:
            return self._current
        return self._of(self._place) or self._begin()

    def _of(self, place: SlurmContext) -> int | None:
        """Finds the last attempt that began in a place, on whichever rank."""
        where = (place.job_id, place.restarts)
        return max(
            (record.attempt for record in self.began() if (record.job_id, record.restarts) == where), default=None
        )

    def _begin(self) -> int:
        self._folder.mkdir(exist_ok=True)
        while True:
            attempt = len(list(self._folder.glob("*-began.json"))) + 1
            record = AttemptStart(
                attempt=attempt,
                job_id=self._place.job_id,
                restarts=self._place.restarts,
                host=socket.gethostname(),
                pid=os.getpid(),
                time=utc_now(),
            )
            try:
                write_new_atomic(self._folder / f"{attempt:04d}-began.json", json_text(asdict(record)).encode())
            except FileExistsError:
                continue
            return attempt


def scheduler_job(environment: Mapping[str, str]) -> str:
    """Names the scheduler's job that a process runs in; empty: none."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment.get("SLURM_JOB_ID", "")


def this_machine() -> str:
    """Names this machine as the scheduler does, where there is one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _little_said(record: AttemptEnd) -> tuple[int, bool, str]:
    """Orders endings: first the one that says most; what was found out after the job says more than its ranks."""
    return _TELLING.index(record.ending), record.rank is not None, record.time


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) and error.code in _LEFT:
            return _LEFT[error.code]
        # The command line leaves with a status for what it has said already.
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
    """Says an error in one line; with its type, where that is not in the text for people anyway."""
    if isinstance(error, SystemExit) and error.__cause__ is not None:
        error = error.__cause__
    if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
        return ""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if not isinstance(error, CanTrainError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
