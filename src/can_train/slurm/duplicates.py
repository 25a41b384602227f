"""What makes two runs the same."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from can_train.config.resolved import ResolvedRun, data_root
from can_train.config.task_settings import load_object, load_task_settings
from can_train.errors import RunError
from can_train.slurm.client import ANSWER_S, output_of
from can_train.training.run_folder import Registry, RunFolder, RunRecord

_ELSEWHERE: Final = ("paths", "cluster")
"""Groups of settings that say where a run happens, not what it does."""


_DIGITS: Final = 32
"""Hexadecimal digits of an identity."""


FINISHED: Final = "finished"


RUNNING: Final = "running"


QUEUED: Final = "queued"


ENDED: Final = "ended without finishing"


_WAITING: Final = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
"""SLURM's words for a job that has not started, or not again."""


@dataclass(frozen=True, kw_only=True)
class DuplicateRun:
    """A run that is the same.

    Attributes:
        run: The run.
        state: `FINISHED`, `RUNNING` or `QUEUED`.
    """

    run: RunRecord
    state: str


def data_files(run: ResolvedRun) -> list[Path]:
    """Lists the files of a run's data set.

    Raises:
        MissingDataError: They are not there.
    """
    files: list[Path] = load_object(load_task_settings(run.task).files)(run.dataset, data_root(run.paths))
    return files


def identity(run: ResolvedRun, code: str, files: Sequence[Path]) -> str:
    """Makes the digest that runs share which would do the same.

    Args:
        run: Its settings.
        code: Digest of the code.
        files: Of its data set.
    """
    config = what_it_does(run.config, [needed.role for needed in run.prerequisites])
    common = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    data = [(file.relative_to(common).as_posix(), *_stamp(file)) for file in files]
    text = json.dumps([config, code, data], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]


def what_it_does(config: Mapping[str, Any], roles: Iterable[str]) -> dict[str, Any]:
    """Leaves out of a configuration where a run happens; the runs that it builds on are named, wherever they lie.

    Args:
        config: Plain values.
        roles: Settings of the mode that hold the folders of such runs.
    """
    mode = dict(config.get("mode") or {})
    named = {role: _run_named(Path(mode[role])) for role in roles if mode.get(role)}
    return {name: value for name, value in config.items() if name not in _ELSEWHERE} | {"mode": {**mode, **named}}


def find_duplicate_run(
    digest: str, runs: Sequence[RunRecord], state_of: Callable[[RunRecord], str]
) -> DuplicateRun | None:
    """Finds the newest run of an identity that is queued, running or finished."""
    for run in reversed(runs):
        if run.identity == digest and (state := state_of(run)) != ENDED:
            return DuplicateRun(run=run, state=state)
    return None


class RunStates:
    """Tells how runs stand, as far as a submission needs to know; asks SLURM once, and only if it must.

    Args:
        registry: Where their jobs are.
        read_queue: Reads the user's jobs.
    """

    def __init__(self, registry: Registry, read_queue: Callable[[], Mapping[str, str]] | None = None) -> None:
        self._registry = registry
        self._read_queue = read_queue or read_queue_states
        self._queue: Mapping[str, str] | None = None

    def __call__(self, run: RunRecord) -> str:
        """Returns `FINISHED`, `RUNNING`, `QUEUED` or `ENDED`."""
        path = Path(run.path)
        if (path / "result.json").is_file():
            return FINISHED
        if _is_locked(path / "lock"):
            return RUNNING
        job = self.live_job(run.run_id)
        if not job:
            return ENDED
        return QUEUED if self._read()[job] in _WAITING else RUNNING

    def live_job(self, run_id: str) -> str:
        """Names the job of a run that SLURM has in its queue, waiting or running; empty: none."""
        jobs = [job.job_id for job in self._registry.jobs(run_id) if job.executor == "slurm"]
        live = [job for job in jobs if job in self._read()] if jobs else []
        return live[-1] if live else ""

    def _read(self) -> Mapping[str, str]:
        if self._queue is None:
            self._queue = self._read_queue()
        return self._queue


def read_queue_states() -> dict[str, str]:
    """Reads the states of this user's jobs, 123 or 123_4 to SLURM's word; none where nobody answers."""
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i|%T"]
    text = output_of(command, seconds=ANSWER_S) or ""
    lines = [line.strip().partition("|") for line in text.splitlines()]
    return {job: state for job, _, state in lines}


def _run_named(path: Path) -> str:
    """Names the run in a folder: as its result says, since a copy's folder may be called anything."""
    try:
        result = RunFolder(path).result()
    except (RunError, OSError):
        result = None
    return str(result["run_id"]) if isinstance(result, dict) and "run_id" in result else path.name


def _stamp(file: Path) -> tuple[Any, ...]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _is_locked(lock: Path) -> bool:
    """Tells whether a process is training the run."""
    try:
        with lock.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
