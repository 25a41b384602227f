"""The folder of one run, and the registry of all runs."""

import fcntl
import json
import os
import platform
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar

from can_train.config.resolved import ResolvedRun, plain_from_yaml, plain_to_yaml, state_dir
from can_train.errors import RunError, StateError
from can_train.io.atomic import is_file, write_json_atomic, write_text_atomic
from can_train.io.records import (
    DOCUMENT_SUFFIX,
    check_time,
    list_names,
    read_documents,
    time_stamp,
    utc_now,
    write_document,
)
from can_train.reporter import Reporter
from can_train.training.attempts import Attempts

_MAX_ENTRY_BYTES: Final = 2**20
"""Largest file that is read as an entry of the registry."""

CONFIG: Final = "config.yaml"
"""The file that makes a folder a run's."""

_LIBRARIES: Final = ("can-train", "torch", "torch_geometric", "numpy", "polars", "scikit-learn", "hydra-core")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run in the registry.

    Attributes:
        path: Absolute path of its folder, whose name is the run id.
        key: Its configuration's key in the factor store.
        identity: Digest of resolved configuration, code and data, equal for runs that would do the same.
        after: Ids of the runs that it waits for, separated by commas.
        sweep: Name that the runs of one sweep share; empty: it belongs to none.
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
    """A job that was started for a run: a scheduler's, or a process of a machine.

    Attributes:
        executor: slurm, local or debug.
        job_id: As the executor names it: 123, 123_4 for an element of an array, or a process id.
        host: Machine that it was submitted from.
        reason: Why, in words, unless it is the first: "host out-of-memory: 600M instead of 400M".
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
    """When a person asked to cancel a run."""

    run_id: str
    time: str

    def __post_init__(self) -> None:
        check_time("time", self.time)


_Record = TypeVar("_Record", RunRecord, JobRecord, CancelRecord)


class Registry:
    """The runs of a state folder, which need not exist: one immutable file an entry, so that nothing needs a lock."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "runs"

    def add(self, record: RunRecord | JobRecord | CancelRecord) -> None:
        """Writes an entry.

        Raises:
            StateError: It cannot be written.
        """
        name = "run"
        if not isinstance(record, RunRecord):
            kind = "job" if isinstance(record, JobRecord) else "cancel"
            # Two machines may write in the same microsecond, and process ids repeat between machines.
            name = f"{kind}-{time_stamp(record.time)}-{os.getpid()}-{secrets.token_hex(2)}"
        write_document(self._folder / record.run_id / f"{name}{DOCUMENT_SUFFIX}", record)

    def runs(self) -> list[RunRecord]:
        """Reads all runs, the oldest first."""
        records = [record for run_id in list_names(self._folder) for record in self._read(run_id, "run", RunRecord)]
        return sorted(records, key=lambda record: (record.time, record.run_id))

    def jobs(self, run_id: str) -> list[JobRecord]:
        """Reads the jobs of a run, the first one first."""
        return sorted(self._read(run_id, "job-", JobRecord), key=lambda record: record.time)

    def cancels(self, run_id: str) -> list[CancelRecord]:
        """Reads when persons asked to cancel a run, the first time first."""
        return sorted(self._read(run_id, "cancel-", CancelRecord), key=lambda record: record.time)

    def _read(self, run_id: str, prefix: str, kind: type[_Record]) -> list[_Record]:
        folder = self._folder / run_id
        if not folder.is_dir():
            return []
        names = [name for name in list_names(folder) if name.startswith(prefix) and name.endswith(DOCUMENT_SUFFIX)]
        # A damaged entry hides nothing but itself.
        return read_documents(folder, names, kind, [], most_bytes=_MAX_ENTRY_BYTES)


class RunFolder:
    """Paths and files of one run, whose id is the folder's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints_path = path / "checkpoints"
        self.result_path = path / "result.json"
        self.plan_path = path / "plan.json"
        self.reference_models_path = path / "reference_models.json"
        self.attempts = Attempts(path)

    @classmethod
    def create(cls, runs_dir: Path, key: str, config: Mapping[str, Any]) -> "RunFolder":
        """Creates the folder of a new run (see `make`)."""
        folder = cls(runs_dir / new_run_id(key))
        folder.make(config)
        return folder

    def make(self, config: Mapping[str, Any]) -> None:
        """Creates the folder and writes the run's configuration and environment.

        Raises:
            RunError: It cannot be written.
        """
        try:
            self.path.mkdir(parents=True)
            write_text_atomic(self.path / CONFIG, plain_to_yaml(config))
            write_json_atomic(self.path / "environment.json", _environment())
        except OSError as error:
            raise RunError("The run folder cannot be written", value=f"{self.path}: {error.strerror}",
                           remedy="Give another place with --runs-dir") from error  # fmt: skip

    def config(self) -> dict[str, Any]:
        """Reads the resolved configuration.

        Raises:
            RunError: It cannot be read.
        """
        try:
            return plain_from_yaml((self.path / CONFIG).read_text())
        except (OSError, ValueError) as error:
            raise _unreadable("configuration", self.path / CONFIG, error) from error

    def result(self) -> dict[str, Any] | None:
        """Reads the result; None where the run has not finished.

        Raises:
            RunError: It cannot be read.
        """
        try:
            result = json.loads(self.result_path.read_text())
            # Written whole or not at all; but a person may have copied or edited it.
            if not isinstance(result, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreadable("result", self.result_path, error) from error
        return result

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second process out of the run.

        Raises:
            RunError: Another process is training this run.
        """
        with (self.path / "lock").open("w") as handle:
            try:
                # The kernel's lock, not the file's existence: a killed process leaves no lock behind.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError("The run is being trained by another process", value=self.run_id) from error
            yield


def new_run_id(key: str) -> str:
    """Makes the id of a new run: time, key, and four digits that distinguish it from others of the same second."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{key}-{secrets.token_hex(2)}"


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = 0

    def append(self, **record: Any) -> None:
        """Adds a line."""
        with self._path.open("a") as handle:
            handle.write(json.dumps(record) + "\n")
        self.lines += 1

    def rewind(self, lines: int) -> None:
        """Keeps the first `lines` lines: steps after the last checkpoint are trained, and logged, once more."""
        kept = self._path.read_text().splitlines(keepends=True)[:lines] if self._path.exists() else []
        write_text_atomic(self._path, "".join(kept))
        self.lines = len(kept)


def _unreadable(what: str, path: Path, error: OSError | ValueError) -> RunError:
    why = f": {error.strerror}" if isinstance(error, OSError) else ""
    return RunError(f"The run's {what} cannot be read", value=f"{path}{why}",
                    remedy="Mend its permissions, copy the run once more, or train anew")  # fmt: skip


def _environment() -> dict[str, Any]:
    libraries = {}
    for name in _LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            libraries[name] = ""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "libraries": libraries,
        "command": sys.argv,
    }


def make_run(run: ResolvedRun, reporter: Reporter) -> RunFolder:
    """Creates the folder of a run that trains here and now, and registers it; without a registry, with a notice.

    Raises:
        RunError: The folder cannot be written.
    """
    folder = RunFolder.create(run.runs_dir, run.key, run.config)
    try:
        register_run(run, folder)
    except StateError as error:
        reporter.notice(f"This run is not listed by `can-train runs`. {error}")
    return folder


def register_run(run: ResolvedRun, folder: RunFolder, *, identity: str = "", after: str = "", sweep: str = "") -> None:
    """Enters a run into the registry.

    Raises:
        StateError: The registry cannot be written.
    """
    path = str(folder.path.resolve())
    record = RunRecord(run_id=folder.run_id, path=path, key=run.key, time=utc_now(), identity=identity, after=after,
                       sweep=sweep)  # fmt: skip
    Registry(state_dir(run.paths)).add(record)


def relocate_prerequisites(run: ResolvedRun, folder: Path) -> ResolvedRun:
    """Looks for prerequisites that are no longer where they were beside the folder where the run is now."""
    moved = {}
    for needed in run.prerequisites:
        path = Path(getattr(run.mode, needed.role))
        # Who copies a folder of runs to another machine brings them along.
        beside = folder.resolve().parent / path.name
        if path.name and not is_file(path / CONFIG) and is_file(beside / CONFIG):
            moved[needed.role] = str(beside)
    return replace(run, mode=replace(run.mode, **moved)) if moved else run


def without_missing_prerequisites(run: ResolvedRun) -> tuple[ResolvedRun, list[str]]:
    """Drops the optional prerequisites of a run that are gone; returns also notices that say so."""
    optional = {needed.role: getattr(run.mode, needed.role) for needed in run.prerequisites if not needed.required}
    gone = {role: name for role, name in optional.items() if name and not is_file(Path(name) / CONFIG)}
    notices = [f"{role.replace('_', ' ')}: {name} is gone, so the run goes on without" for role, name in gone.items()]
    return replace(run, mode=replace(run.mode, **dict.fromkeys(gone, ""))) if gone else run, notices
