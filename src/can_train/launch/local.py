"""Runs a job in the background of this machine, through submitit's local executor."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import submitit

from can_train.config.cluster import ClusterSettings
from can_train.errors import RunError

_TIMEOUT_MIN: Final = 7 * 24 * 60
"""Longest run; submitit wants a limit."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that has been started.

    Attributes:
        job_id: The process that controls it.
        log_path: What it prints.
    """

    job_id: str
    log_path: Path


def submit(entry: Callable[[str], None], run_path: Path, cluster: ClusterSettings) -> Submitted:
    """Starts `entry(run_path)` in a process that outlives this one and its terminal.

    Raises:
        RunError: The job could not be started.
    """
    folder = run_path.resolve() / "submitit"
    reading, writing = os.pipe()
    # submitit starts its controller in our session, where closing the terminal would end it: a child that has left the
    # session starts it instead.
    child = os.fork()
    if child == 0:
        os.close(reading)
        _submit_detached(entry, run_path, folder, cluster, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        job_id = pipe.read()
    os.waitpid(child, 0)
    if not job_id:
        raise RunError(
            "The job could not be started", value=str(folder), remedy="Train in the foreground: leave out --submit"
        )
    return Submitted(job_id=job_id, log_path=folder / f"{job_id}_0_log.out")


def _submit_detached(
    entry: Callable[[str], None], run_path: Path, folder: Path, cluster: ClusterSettings, writing: int
) -> None:
    """Runs in the child: leaves the session, submits, reports the job id through the pipe, and ends."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard_stream in (0, 1):
            os.dup2(null, standard_stream)
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(
            timeout_min=_TIMEOUT_MIN, stderr_to_stdout=True, gpus_per_node=len(_gpus()), visible_gpus=_gpus()
        )
        job = executor.submit(entry, str(run_path.resolve()))
        os.write(writing, job.job_id.encode())
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
