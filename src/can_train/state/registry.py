"""Which runs there are, where their folders lie, and which jobs were started for them: one folder a run in the state
folder, one immutable file a fact. What became of the jobs is asked elsewhere.
"""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from can_train.state.documents import (
    DOCUMENT_SUFFIX,
    SetAside,
    check_time,
    list_names,
    read_documents,
    time_stamp,
    write_document,
)

_RUNS: Final = "runs"
_MOST_BYTES: Final = 2**20
"""Largest file that is taken for an entry."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run.

    Attributes:
        run_id: Its name, also that of its folder.
        path: Absolute path of the folder.
        key: Its configuration's name in the factor store.
        time: When it was made.
        identity: Digest of resolved configuration, code and data: equal for runs that would do the same.
        after: Runs that it waits for, by comma; empty: none.
        sweep: Name that the runs of one sweep share; empty: it is not of one.
    """

    run_id: str
    path: str
    key: str
    time: str
    identity: str = ""
    after: str = ""
    sweep: str = ""

    def __post_init__(self) -> None:
        check_time("time", self.time)


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job that was started for a run: of a scheduler, or a process of a machine.

    Attributes:
        run_id: The run.
        executor: slurm, local or debug.
        job_id: As the executor names it: 123, 123_4 for an element of an array, or a process number.
        time: When it was submitted.
        host: Machine that it was submitted from.
        log_path: What it prints.
        reason: Why, in words, where it is not the first: "host out-of-memory: 600M instead of 400M".
        resources: What was asked for, by sbatch's names.
    """

    run_id: str
    executor: str
    job_id: str
    time: str
    host: str
    log_path: str
    reason: str = ""
    resources: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_time("time", self.time)


@dataclass(frozen=True, kw_only=True)
class CancelRecord:
    """That a person asked for a run to be cancelled.

    Attributes:
        run_id: The run.
        time: When.
    """

    run_id: str
    time: str

    def __post_init__(self) -> None:
        check_time("time", self.time)


_Record = TypeVar("_Record", RunRecord, JobRecord, CancelRecord)


class Registry:
    """The runs that a state folder knows.

    Args:
        state_dir: The state folder; it need not exist.

    Attributes:
        set_aside: Files that could not be read.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / _RUNS
        self.set_aside: list[SetAside] = []

    def add(self, record: RunRecord | JobRecord | CancelRecord) -> None:
        """Writes an entry down.

        Raises:
            StateError: It cannot be written.
        """
        write_document(self._folder / record.run_id / _file_name(record), record)

    def runs(self) -> list[RunRecord]:
        """Reads all runs, the oldest first."""
        found = [record for run_id in list_names(self._folder) for record in self._read(run_id, "run", RunRecord)]
        return sorted(found, key=lambda record: (record.time, record.run_id))

    def jobs(self, run_id: str) -> list[JobRecord]:
        """Reads the jobs of a run, the first one first."""
        return sorted(self._read(run_id, "job-", JobRecord), key=lambda record: record.time)

    def cancels(self, run_id: str) -> list[CancelRecord]:
        """Reads when a run was asked to be cancelled."""
        return sorted(self._read(run_id, "cancel-", CancelRecord), key=lambda record: record.time)

    def _read(self, run_id: str, beginning: str, kind: type[_Record]) -> list[_Record]:
        folder = self._folder / run_id
        if not folder.is_dir():
            return []
        names = [n for n in list_names(folder) if n.startswith(beginning) and n.endswith(DOCUMENT_SUFFIX)]
        return read_documents(folder, names, kind, self.set_aside, most_bytes=_MOST_BYTES)


def _file_name(record: RunRecord | JobRecord | CancelRecord) -> str:
    if isinstance(record, RunRecord):
        return f"run{DOCUMENT_SUFFIX}"
    kind = "job" if isinstance(record, JobRecord) else "cancel"
    # Of two machines in the same moment neither may lose.
    return f"{kind}-{time_stamp(record.time)}-{os.getpid()}-{secrets.token_hex(2)}{DOCUMENT_SUFFIX}"
