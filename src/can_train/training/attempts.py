"""What the processes of a run leave about themselves in its folder: that an attempt began, and how it ended, as far as
the process itself can know. Whether a scheduler ended it, and why, others ask the scheduler.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from can_train.errors import DoesNotFitError
from can_train.memory.out_of_memory import is_out_of_memory
from can_train.state.atomic import json_text, write_json_atomic, write_new_atomic
from can_train.state.documents import utc_now

_FOLDER: Final = "attempts"

_SIGNALS: Final[Mapping[int, str]] = {128 + 15: "terminated", 128 + 2: "interrupted", 128 + 12: "time_limit"}
"""What an exit status of 128 + a signal says: SIGTERM, SIGINT, and SIGUSR2, the scheduler's warning."""


@dataclass(frozen=True, kw_only=True)
class Began:
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
class Ended:
    """How it ended, where it could still say so.

    Attributes:
        attempt: Its number.
        ending: finished, failed, gpu_oom, time_limit (it was warned, and saved), terminated (SIGTERM; saved) or
            interrupted.
        message: The error, in one line; empty where there is none.
        details: What else is known: of an out-of-memory `one_sample` (it would not fit alone), `need_bytes`, `foreign`.
        time: When.
    """

    attempt: int
    ending: str
    message: str
    details: Mapping[str, Any]
    time: str


class Attempts:
    """The attempts of a run.

    Args:
        run_path: The run's folder.
    """

    def __init__(self, run_path: Path) -> None:
        self._folder = run_path / _FOLDER

    def began(self) -> list[Began]:
        """Reads the attempts, the first one first."""
        return [Began(**_read(path)) for path in sorted(self._folder.glob("*-began.json"))]

    def ended(self, attempt: int) -> Ended | None:
        """Reads how an attempt ended; None where it did not say."""
        path = self._folder / f"{attempt:04d}-ended.json"
        return Ended(**_read(path)) if path.is_file() else None

    @contextmanager
    def recorded(self) -> Iterator[int]:
        """Records the attempt that the block is; yields its number."""
        attempt = self._begin()
        try:
            yield attempt
        except BaseException as error:
            self._end(attempt, error)
            raise
        self._end(attempt, None)

    def _begin(self) -> int:
        self._folder.mkdir(exist_ok=True)
        while True:
            attempt = len(list(self._folder.glob("*-began.json"))) + 1
            record = Began(
                attempt=attempt,
                job_id=scheduler_job(os.environ),
                restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
                host=socket.gethostname(),
                pid=os.getpid(),
                time=utc_now(),
            )
            try:
                write_new_atomic(self._folder / f"{attempt:04d}-began.json", json_text(asdict(record)).encode())
            except FileExistsError:
                continue
            return attempt

    def _end(self, attempt: int, error: BaseException | None) -> None:
        record = Ended(attempt=attempt, ending=_ending(error), message=_message(error), details={}, time=utc_now())
        write_json_atomic(self._folder / f"{attempt:04d}-ended.json", asdict(record))


def scheduler_job(environment: Mapping[str, str]) -> str:
    """Names the scheduler's job that a process runs in; empty: none."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment.get("SLURM_JOB_ID", "")


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, SystemExit):
        return _SIGNALS.get(error.code if isinstance(error.code, int) else 0, "failed")
    return "gpu_oom" if isinstance(error, DoesNotFitError) or is_out_of_memory(error) else "failed"


def _message(error: BaseException | None) -> str:
    if error is None or isinstance(error, SystemExit):
        return ""
    text = str(error).strip().splitlines()
    return text[-1] if text else type(error).__name__
