"""Starts jobs without a scheduler: in the background of this machine through submitit's local executor, or in this
process, to be looked at.
"""

import os
from pathlib import Path
from typing import Final

import submitit

from can_train.errors import RunError
from can_train.launch.code import code_of
from can_train.launch.environment import job_environment
from can_train.launch.job import Entry, Job
from can_train.launch.submission import Started, Submission, enter_job
from can_train.state.registry import JobRecord
from can_train.training.run_folder import RunFolder

BACKGROUND: Final = "local"
FOREGROUND: Final = "debug"

_TIMEOUT_MIN: Final = 7 * 24 * 60
"""Longest run; submitit wants a limit."""


def start_process(entry: Entry, run: RunFolder) -> Started:
    """Starts a process for a run that outlives this one and its terminal.

    Args:
        entry: Trains the run in a folder.
        run: The folder, which has a snapshot of the code.

    Raises:
        RunError: It could not be started.
    """
    folder = run.path / "submitit"
    source = code_of(run.path) / "src"
    reading, writing = os.pipe()
    # submitit starts its controller in our session, where closing the terminal would end it: a child that has left the
    # session starts it instead.
    child = os.fork()
    if child == 0:
        os.close(reading)
        with job_environment(source):
            _start_detached(Job(entry, str(run.path)), folder, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        job_id = pipe.read()
    os.waitpid(child, 0)
    if not job_id:
        raise RunError(
            "The job could not be started", value=str(folder), remedy="Train in the foreground: leave out --submit"
        )
    return Started(executor=BACKGROUND, job_id=job_id, log_path=str(folder / f"{job_id}_0_log.out"))


def run_here(entry: Entry, folder: RunFolder, submission: Submission) -> JobRecord:
    """Does in this process what a job does; enters it into the registry first.

    Raises:
        SystemExit: As in a job.
        StateError: The registry cannot be written.
    """
    job = enter_job(folder, Started(executor=FOREGROUND, job_id=str(os.getpid()), log_path=""), submission)
    Job(entry, str(folder.path))()
    return job


def _start_detached(job: Job, folder: Path, writing: int) -> None:
    """Runs in the child: leaves the session, submits, reports the job id through the pipe, and ends."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        # Also the errors: whoever reads them through a pipe would wait for the run's end.
        for standard_stream in (0, 1, 2):
            os.dup2(null, standard_stream)
        executor = submitit.LocalExecutor(folder)
        gpus = _gpus()
        executor.update_parameters(
            timeout_min=_TIMEOUT_MIN, stderr_to_stdout=True, gpus_per_node=len(gpus), visible_gpus=gpus
        )
        os.write(writing, executor.submit(job).job_id.encode())
    finally:
        # Not sys.exit: the parent's cleanup must not run twice.
        os._exit(0)


def _gpus() -> tuple[int, ...]:
    """Numbers the GPUs that a job may see: those that this process may."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(int(number) for number in visible.split(",") if number.strip().isdigit())
    gpus = Path("/proc/driver/nvidia/gpus")
    return tuple(range(len(list(gpus.iterdir())))) if gpus.is_dir() else ()
