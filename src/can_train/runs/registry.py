"""The registry of all runs in a state folder: its entries, and the files that they are in."""

import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from can_train.errors import StateError
from can_train.io import records
from can_train.io.index import INDEX_FROM, Kind, index_folder, read_folder
from can_train.io.records import JobId, SetAside

_LONGEST_NAME: Final = 255  # characters of a file's name, on most file systems
_RUNS: Final = "runs"  # folder of the registry in the state folder, and name of its index
_LABELS: Final = "labels"  # folder of tags and notes in the state folder, and name of its index
_MAX_ENTRY_BYTES: Final = 2**20  # larger files are no entries of the registry


@dataclass(frozen=True, kw_only=True)
class _Entry:
    run_id: str
    time: str

    def __post_init__(self) -> None:
        if self.run_id in ("", ".", "..") or "/" in self.run_id or len(self.run_id) > _LONGEST_NAME:
            raise ValueError("run_id is no name of a folder")
        records.check_time("time", self.time)


@dataclass(frozen=True, kw_only=True)
class RunRecord(_Entry):
    """A run in the registry."""

    path: str  # absolute path of its folder, whose name is the run id
    key: str  # key of the configuration in the factor store
    identity: str = ""  # digest of configuration, code and data; equal for equal runs
    after: str = ""  # ids of the runs that the run waits for, separated by commas
    sweep: str = ""  # name of the run's sweep; empty: no sweep
    label: str = ""  # the run's values of the settings that vary in its sweep: lr=0.01 seed=2


@dataclass(frozen=True, kw_only=True)
class JobRecord(_Entry):
    """A job that was started for a run: a scheduler's, or a process of a machine."""

    executor: str  # slurm, local or debug
    job_id: str  # 123, 123_4 for an element of an array, or a process id
    host: str  # machine of the submission
    log_path: str
    reason: str = ""  # of a later submission, in words: "host out-of-memory: 600M instead of 400M"
    resources: dict[str, Any] = field(default_factory=dict)  # requested resources, by sbatch's names
    cluster: str = ""  # SLURM cluster of the job; empty: a process, or not recorded
    packed_with: int = 1  # runs that the job trains beside each other, this one included

    @property
    def slurm_job(self) -> JobId | None:
        """The job in SLURM; None if the job is a process."""
        return JobId(number=self.job_id, cluster=self.cluster) if self.executor == "slurm" else None


@dataclass(frozen=True, kw_only=True)
class CancelRecord(_Entry):
    """A person's request to cancel a run."""


@dataclass(frozen=True, kw_only=True)
class RetryRecord(_Entry):
    """A new job for a run after its job failed. There is one for each job, whichever process starts it."""

    job_id: str


@dataclass(frozen=True, kw_only=True)
class LabelRecord(_Entry):
    """A person's change to the tags or the note of a run."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    note: str | None = None  # None: unchanged; empty: none any longer


@dataclass(frozen=True, kw_only=True)
class RunLabels:
    """The tags and the note of a run."""

    tags: tuple[str, ...] = ()
    note: str = ""


_Record = TypeVar("_Record", bound=_Entry)
_RUN_KIND: Final = Kind(RunRecord, group=lambda record: "", latest=lambda record: datetime.fromisoformat(record.time))
_LABEL_KIND: Final = Kind(
    LabelRecord, group=lambda record: "", latest=lambda record: datetime.fromisoformat(record.time)
)


class Registry:
    """The registry in a state folder, which need not exist. Entries are immutable files, so that no lock is needed.

    Attributes:
        set_aside: What the last `runs` could not read: several people may share the folder, and a person may have
            closed an entry to the others.
    """

    def __init__(self, state_dir: Path) -> None:
        self.set_aside: list[SetAside] = []
        self.folder = state_dir / _RUNS
        self._index = index_folder(state_dir) / _RUNS
        self._label_folder, self._label_index = state_dir / _LABELS, index_folder(state_dir) / _LABELS

    def add(self, record: _Entry) -> Path:
        """Writes an entry, and returns its path.

        Raises:
            StateError: It cannot be written, or the run has a new job already (`RetryRecord`).
        """
        # Two machines may write in the same microsecond, and process ids repeat between machines.
        unique = f"{records.time_stamp(record.time)}-{os.getpid()}-{secrets.token_hex(2)}"
        if isinstance(record, LabelRecord):
            # All in one folder: a list of thousands of runs reads them at once.
            path = self._label_folder / unique
        elif isinstance(record, RunRecord):
            path = self.folder / record.run_id / "run"
        elif isinstance(record, RetryRecord):
            path = self.folder / record.run_id / f"retry-{record.job_id}"
        else:
            path = self.folder / record.run_id / f"{'job' if isinstance(record, JobRecord) else 'cancel'}-{unique}"
        path = path.with_name(f"{path.name}{records.DOCUMENT_SUFFIX}")
        records.write_document(path, record)
        return path

    def entry(self, run_id: str) -> Path:
        """Returns the path of the entry of a run."""
        return self.folder / run_id / f"run{records.DOCUMENT_SUFFIX}"

    def run(self, run_id: str) -> RunRecord | None:
        """Reads the entry of a run; None if it is missing or damaged."""
        return next((record for record in self._read(run_id, "run", RunRecord, []) if record.run_id == run_id), None)

    def runs(self, *, index_from: int = INDEX_FROM) -> list[RunRecord]:
        """Reads all runs, the oldest first. At least `index_from` runs outside the index are added to the index."""
        self.set_aside = []
        try:
            index, names = read_folder(self.folder, self._index, _RUN_KIND)
        except StateError as error:
            # Another person has closed the whole registry: runs are known by their folders alone.
            if not isinstance(error.__cause__, PermissionError):
                raise
            self.set_aside.append(SetAside(self.folder, str(error.__cause__.strerror)))
            return []
        certain, doubtful = dict[str, RunRecord](), list[RunRecord]()
        for run_id in names:
            aside: list[SetAside] = []
            for record in self._read(run_id, "run", RunRecord, aside):
                if aside or run_id in certain:
                    doubtful.append(record)
                else:
                    certain[run_id] = record
            self.set_aside += [each for each in aside if not each.is_read]
        if index.is_worth_extending(len(certain), index_from):
            index.extend(certain)
        every_record = [*index.records(index.groups).values(), *certain.values(), *doubtful]
        return sorted(every_record, key=lambda record: (record.time, record.run_id))

    def jobs(self, run_id: str) -> list[JobRecord]:
        """Reads the jobs of a run, in order."""
        return sorted(self._read(run_id, "job-", JobRecord, []), key=lambda record: record.time)

    def cancels(self, run_id: str) -> list[CancelRecord]:
        """Reads the requests to cancel a run, in order."""
        return sorted(self._read(run_id, "cancel-", CancelRecord, []), key=lambda record: record.time)

    def labels(self) -> dict[str, RunLabels]:
        """Reads the tags and notes of all runs that have some, by run id; none where they cannot be read."""
        try:
            index, names = read_folder(self._label_folder, self._label_index, _LABEL_KIND)
        except StateError:
            # Another person's folder. Whoever changes a label is told.
            return {}
        new = records.read_documents(self._label_folder, names, LabelRecord, [], most_bytes=_MAX_ENTRY_BYTES)
        if index.is_worth_extending(len(new), INDEX_FROM):
            index.extend(new)
        labels: dict[str, RunLabels] = {}
        # The names begin with the times.
        for _, record in sorted({**index.records(index.groups), **new}.items()):
            before = labels.get(record.run_id, RunLabels())
            tags = [tag for tag in dict.fromkeys((*before.tags, *record.added)) if tag not in record.removed]
            note = before.note if record.note is None else record.note
            labels[record.run_id] = RunLabels(tags=tuple(tags), note=note)
        return labels

    def _read(self, run_id: str, prefix: str, kind: type[_Record], aside: list[SetAside]) -> list[_Record]:
        folder, end = self.folder / run_id, records.DOCUMENT_SUFFIX
        try:
            listed = sorted(os.listdir(folder))  # noqa: PTH208 - ten thousand paths cost more than their content
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            aside.append(SetAside(folder, error.strerror or str(error)))
            return []
        names = [name for name in listed if name.startswith(prefix) and name.endswith(end)]
        # Damaged entries are left out.
        return list(records.read_documents(folder, names, kind, aside, most_bytes=_MAX_ENTRY_BYTES).values())
