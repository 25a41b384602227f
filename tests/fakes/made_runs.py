"""Runs as they lie on disk, without a training: folders, registry entries, attempts."""

import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from can_train.io.records import AttemptStart, JobId
from can_train.runs.attempts import AttemptEnd
from can_train.runs.registry import JobRecord, Registry, RunRecord
from can_train.runs.scheduler import SchedulerAnswer
from can_train.runs.status import KnownRun, RunStatus, known_runs, run_statuses
from can_train.slurm.client import logs_into
from fakes.run_facts import CLUSTER

KEY = "synthetic_gat_student_normal"
CONFIG = "task: can\ntraining:\n  epochs: 4\n"
RESULT = {"status": "finished", "epochs": 4, "steps": 40, "best_epoch": 2, "best_validation_loss": 0.5,
          "peak_memory_pct": 0.62, "plan": {"plan": {"safety_factor": 0.7}}}  # fmt: skip


@dataclass(frozen=True)
class FakeScheduler:
    """A scheduler with one answer to every question; `asked` collects the jobs of each question."""

    answer: SchedulerAnswer = field(default_factory=SchedulerAnswer)
    asked: list[list[JobId]] = field(default_factory=list)

    def query_jobs(self, jobs: Iterable[JobId]) -> SchedulerAnswer:
        self.asked.append(sorted(jobs, key=str))
        return self.answer

    def logs_into(self, job: JobId, folder: Path) -> bool:
        return logs_into(job, folder)


class Runs:
    """A folder of runs and a state folder.

    Args:
        folder: Where both are.
    """

    def __init__(self, folder: Path) -> None:
        self.runs_dir = folder / "runs"
        self.state_dir = folder / "state"
        self.registry = Registry(self.state_dir)
        self.flags = ("--runs-dir", str(self.runs_dir), "--state-dir", str(self.state_dir))

    def add(self, number: int, result: dict[str, Any] | None = None, *, entered: bool = True, **fields: Any) -> Path:
        """Makes a run; those of higher number are newer."""
        run_id = f"20260101-0000{number:02d}-{KEY}-{number:04x}"
        path = self.runs_dir / run_id
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(CONFIG)
        if result is not None:
            (path / "result.json").write_text(json.dumps(result))
        if entered:
            self.registry.add(RunRecord(run_id=run_id, path=str(path), key=KEY, time=at(number), **fields))
        return path

    def submit(self, path: Path, job_id: str, executor: str = "slurm", **values: Any) -> JobRecord:
        facts = {"time": at(int(path.name[9:15])), "host": socket.gethostname(), "log_path": str(path / "log.out"),
                 "cluster": CLUSTER if executor == "slurm" else ""}  # fmt: skip
        record = JobRecord(run_id=path.name, executor=executor, job_id=job_id, **{**facts, **values})
        self.registry.add(record)
        return record

    def known(self) -> list[KnownRun]:
        return known_runs(self.registry, self.runs_dir)

    def look(self, answer: SchedulerAnswer | None = None) -> list[RunStatus]:
        """Finds out about all of them; without an answer SLURM knows none of their jobs."""
        return run_statuses(self.known(), self.registry, FakeScheduler(answer or SchedulerAnswer()))


def close(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Closes a folder as `chmod 700` closes it to other people. For root, too, whom no mode keeps out."""

    def closing(call: Callable[..., Any], *, itself: bool) -> Callable[..., Any]:
        def refusing(path: Any = ".", *args: Any, **named: Any) -> Any:
            place = None if isinstance(path, int) else Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
            if place is not None and (folder in place.parents or (itself and place == folder)):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **named)

        return refusing

    for name, itself in (("stat", False), ("lstat", False), ("open", True), ("listdir", True), ("scandir", True)):
        patch.setattr(os, name, closing(getattr(os, name), itself=itself))


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second % 60:02d}+00:00"


def begin(path: Path, number: int = 1, **values: Any) -> None:
    """Writes that an attempt began: by default of this very process, before it started to test."""
    facts = {"attempt": number, "job_id": "", "restarts": 0, "host": socket.gethostname(), "pid": os.getpid(),
             "start_time": at(30), "cluster": CLUSTER if values.get("job_id") else ""}  # fmt: skip
    write(path, f"{number:04d}-began.json", asdict(AttemptStart(**{**facts, **values})))


def end(path: Path, ending: str, number: int = 1, message: str = "", details: Mapping[str, Any] | None = None) -> None:
    record = AttemptEnd(attempt=number, ending=ending, message=message, details=details or {}, time=at(40))
    write(path, f"{number:04d}-ended.json", asdict(record))


def write(path: Path, name: str, values: dict[str, Any]) -> None:
    (path / "attempts").mkdir(exist_ok=True)
    (path / "attempts" / name).write_text(json.dumps(values))
