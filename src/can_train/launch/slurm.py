"""Submits runs to SLURM, through submitit: one job for one run, one array for several. What a job asks for is written
by `sbatch`; what is checked before, by `checks`.
"""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Final

from submitit.core.utils import FailedJobError, FailedSubmissionError

from can_train.config.cluster import ClusterSettings
from can_train.errors import RunError
from can_train.launch.code import code_of
from can_train.launch.environment import job_environment
from can_train.launch.job import Entry, Job
from can_train.launch.sbatch import JobText, open_executor, parameters, resources, script
from can_train.launch.submission import Started, Submission, enter_job
from can_train.state.registry import JobRecord
from can_train.training.run_folder import RunFolder

EXECUTOR: Final = "slurm"


def submit_jobs(
    entry: Entry, folders: Sequence[RunFolder], cluster: ClusterSettings, submission: Submission
) -> list[JobRecord]:
    """Submits jobs as `start_jobs` does, and enters them into the registry.

    Returns:
        Their jobs, in the order of the folders.

    Raises:
        RunError: SLURM refused.
        ConfigError: A value cannot be written into a script.
        StateError: The registry cannot be written.
    """
    started = start_jobs(entry, folders, cluster, submission)
    return [enter_job(folder, job, submission) for folder, job in zip(folders, started, strict=True)]


def start_jobs(
    entry: Entry, folders: Sequence[RunFolder], cluster: ClusterSettings, submission: Submission
) -> list[Started]:
    """Submits one job for one run, or one array for several that ask for the same.

    Args:
        entry: Trains the run in a folder.
        folders: Of the runs, which have a snapshot of the code.
        cluster: What each job asks for.
        submission: What else is said of them.

    Returns:
        The jobs, in the order of the folders.

    Raises:
        RunError: SLURM refused.
        ConfigError: A value cannot be written into a script.
    """
    wanted = parameters(cluster, _text(submission, code_of(folders[0].path)))
    executor = open_executor(submission_folder(folders, submission.sweep), wanted)
    tasks = [Job(entry, str(folder.path)) for folder in folders]
    try:
        # submitit prints what sbatch says; it is in the error too.
        with job_environment(), redirect_stderr(io.StringIO()):
            jobs = executor.submit_array(tasks)
    except (FailedJobError, FailedSubmissionError) as error:
        raise RunError("SLURM refused the job", value=_said(error)) from error
    asked = resources(cluster)
    return [
        Started(executor=EXECUTOR, job_id=job.job_id, log_path=str(job.paths.stdout), resources=asked) for job in jobs
    ]


def script_text(folders: Sequence[RunFolder], cluster: ClusterSettings, submission: Submission, code: Path) -> str:
    """Writes the batch script that `submit_jobs` would send; nothing need be there.

    Args:
        folders: Of the runs.
        cluster: What each job asks for.
        submission: What else is said of them.
        code: Folder of the code's snapshot.

    Raises:
        ConfigError: A value cannot be written into a script.
    """
    folder = submission_folder(folders, submission.sweep)
    return script(folder, parameters(cluster, _text(submission, code)), len(folders))


def submission_folder(folders: Sequence[RunFolder], sweep: str) -> Path:
    """Names the folder where submitit keeps the files of jobs: the run's, or for an array one beside the runs."""
    if len(folders) == 1:
        return folders[0].path / "slurm"
    return folders[0].path.parent / "sweeps" / sweep


def _text(submission: Submission, code: Path) -> JobText:
    return JobText(name=submission.name, code=code, state_dir=submission.state_dir, dependency=submission.dependency)


def _said(error: Exception) -> str:
    """What sbatch said, without what Python says of it."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines if line.startswith("sbatch:")]
    return "; ".join(said) or next((line for line in reversed(lines) if line), "no reason given")
