"""What a job does: it trains a run, and goes back into the queue when its time is nearly up."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from can_train.errors import RunError
from can_train.slurm.client import left_at_time_limit, node_names, requeue_job
from can_train.slurm.restart import JobOutcome, NoRestart, cluster_settings, decide_restart
from can_train.training.attempts import WARNED, SlurmContext, StopRequests
from can_train.training.run_folder import RunFolder

if TYPE_CHECKING:
    from can_train.training.distributed import RankPlace

FIRST_PORT: Final = 15_000

PORTS: Final = 17_000
"""Ports for rank 0, by job id: above those of services, below 32,768, where Linux's ephemeral ports begin."""

Entry = Callable[[RunFolder, StopRequests], None]
"""Trains the run in a folder. It imports what takes long when it is called: by then signals are handled."""


@dataclass(frozen=True)
class Job:
    """A job, as submitit pickles it: what trains, and the folder of the run."""

    entry: Entry
    run_path: str

    def __call__(self) -> None:
        """Trains.

        Raises:
            SystemExit: A signal ended it, or an error that the log shows.
        """
        folder, stops = RunFolder(Path(self.run_path)), StopRequests()
        try:
            with stops.installed(), folder.attempts.recorded(stops):
                self._train(folder, stops)
        except SystemExit as stop:
            # Only after the attempt is recorded: a requeue kills this process where it stands.
            if stop.code == WARNED and not stop.__cause__:
                _requeue_unless_leaving(stops)
            raise

    def _train(self, folder: RunFolder, stops: StopRequests) -> None:
        try:
            self.entry(folder, stops)
        except SystemExit as stop:
            if stop.code == WARNED:
                _check_restarts(folder)
            raise


def _check_restarts(folder: RunFolder) -> None:
    """Raises `SystemExit`, with the reason as its cause, unless the job may go back into the queue."""
    restarts = folder.attempts.count_restarts(SlurmContext.from_environment().job_id)
    decision = decide_restart(JobOutcome(ending="time_limit", restarts=restarts), cluster_settings(folder))
    if isinstance(decision, NoRestart):
        raise SystemExit(WARNED) from RunError(
            "The job's time is up", value=decision.reason, remedy=f"Go on: can-train resume {folder.run_id}"
        )


def _requeue_unless_leaving(stops: StopRequests) -> None:
    context = SlurmContext.from_environment()
    # One rank requeues for all; submitit's local executor has no queue.
    if context.rank != 0 or os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return
    # SIGTERM after the warning may be the limit itself, or a person's scancel.
    if not stops.terminated or left_at_time_limit(context.job_id):
        requeue_job(context.job_id)


def rank_place(environment: Mapping[str, str]) -> "RankPlace | None":
    """Reads this process's place among the ranks of its job step; None where it is the only one.

    MASTER_ADDR and MASTER_PORT decide where rank 0 listens. Without them it is the step's first node, and a port that
    follows from the job id.
    """
    # SLURM_NTASKS is set in the shell of a job of several tasks, too, with a SLURM_PROCID of 0: a process there would
    # wait for ranks that nobody starts.
    size = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if size == 1:
        return None
    # It imports torch, for which a submission does not wait.
    from can_train.training.distributed import RankPlace

    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    return RankPlace(
        rank=int(environment["SLURM_PROCID"]),
        size=size,
        local_rank=int(environment["SLURM_LOCALID"]),
        address=environment.get("MASTER_ADDR") or node_names(nodes)[0],
        port=int(environment.get("MASTER_PORT") or FIRST_PORT + int(environment["SLURM_JOB_ID"]) % PORTS),
    )
