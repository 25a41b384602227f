"""Stops a run: its jobs of SLURM through scancel, a process of this machine by SIGTERM, after which it saves itself. A
process is only sent a signal if it is still the one that was written down.
"""

import socket
from collections.abc import Callable, Sequence

from can_train.errors import RunError
from can_train.launch.judge import slurm_jobs
from can_train.launch.processes import terminate
from can_train.launch.slurm_query import AT_WORK, WAITING, cancel_jobs
from can_train.launch.states import Evidence


def stop(
    evidence: Evidence,
    cancelling: Callable[[Sequence[str]], str] = cancel_jobs,
    terminating: Callable[[int, str], bool] = terminate,
) -> bool:
    """Asks everything that works on a run to end.

    Args:
        evidence: What is known of the run.
        cancelling: Cancels jobs of SLURM; returns what went wrong.
        terminating: Sends SIGTERM to a process that was there at a time; returns whether there was one.

    Returns:
        Whether anything was asked.

    Raises:
        RunError: It is another machine's, another user's, or SLURM's that refuses or does not answer.
    """
    jobs = slurm_jobs(evidence)
    queue = evidence.answer.queue
    if jobs and queue is None:
        raise RunError(
            "SLURM does not answer here", value=f"job {jobs[-1]}", remedy="Cancel the run where squeue works"
        )
    live = [row.job_id for row in queue or () if row.state in WAITING | AT_WORK]
    if live:
        refused = cancelling(live)
        if refused:
            raise RunError("SLURM refuses to cancel the job", value=refused)
        return True
    found = _process(evidence)
    if found is None:
        return False
    host, pid, noted = found
    if host != socket.gethostname():
        raise RunError("The run is a process of another machine", value=f"process {pid} of {host}",
                       remedy=f"Cancel it there: can-train cancel {evidence.run.run_id}")  # fmt: skip
    try:
        return terminating(pid, noted)
    except PermissionError as error:
        raise RunError("The run is another user's process", value=f"process {pid}") from error


def _process(evidence: Evidence) -> tuple[str, int, str] | None:
    """Finds the process that trains, else the one that is about to: its machine, its number, and when it was noted."""
    job = evidence.jobs[-1] if evidence.jobs else None
    last = evidence.attempts[-1] if evidence.attempts else None
    if last is not None and last.ended is None and not last.began.job_id:
        return last.began.host, last.began.pid, last.began.time
    newer = job is not None and (last is None or last.began.time < job.time)
    if job is not None and newer and job.executor != "slurm" and job.job_id.isdecimal():
        return job.host, int(job.job_id), job.time
    return None
