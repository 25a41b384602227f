"""What every way of starting jobs is told beside what is asked for, and the record it leaves of each job."""

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from can_train.state.documents import utc_now
from can_train.state.registry import JobRecord, Registry
from can_train.training.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What is said of jobs that are started together.

    Attributes:
        name: Of the jobs.
        state_dir: State folder, absolute.
        dependency: What they wait for, as sbatch writes it; empty: nothing.
        reason: Why, in words, where these are not the runs' first jobs.
        sweep: Name of the array; empty for one job.
    """

    name: str
    state_dir: Path
    dependency: str = ""
    reason: str = ""
    sweep: str = ""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A job that has been started.

    Attributes:
        executor: slurm, local or debug.
        job_id: As the executor names it.
        log_path: What it prints; empty where that is this terminal.
        resources: What was asked for, by sbatch's names.
    """

    executor: str
    job_id: str
    log_path: str
    resources: dict[str, Any] = field(default_factory=dict)


def enter_job(folder: RunFolder, started: Started, submission: Submission) -> JobRecord:
    """Enters a job into the registry.

    Raises:
        StateError: The registry cannot be written.
    """
    record = JobRecord(
        run_id=folder.run_id,
        executor=started.executor,
        job_id=started.job_id,
        time=utc_now(),
        host=socket.gethostname(),
        log_path=started.log_path,
        reason=submission.reason,
        resources=started.resources,
    )
    Registry(submission.state_dir).add(record)
    return record
