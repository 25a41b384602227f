"""What a job does: trains one run, records how that ended, and, where its scheduler warned it that its time is up, has
itself put back into the queue.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from can_train.config.cluster import ClusterSettings
from can_train.errors import RunError
from can_train.launch.slurm_job import left_in_time, put_back
from can_train.policy.restarts import Aftermath, Leave, Limits, decide
from can_train.training.attempts import Place
from can_train.training.run_folder import RunFolder
from can_train.training.signals import WARNED, StopRequests

Entry = Callable[[RunFolder, StopRequests], None]
"""Trains the run in a folder. What takes long to import it imports when it is called: by then signals are handled."""


@dataclass(frozen=True)
class Job:
    """A job, as submitit keeps it.

    Args:
        entry: Trains the run in a folder.
        run_path: The folder.
    """

    entry: Entry
    run_path: str

    def __call__(self) -> None:
        """Trains.

        Raises:
            SystemExit: A signal ended it, or an error that the log tells.
        """
        folder, stops = RunFolder(Path(self.run_path)), StopRequests()
        try:
            with stops.installed(), folder.attempts.recorded(stops):
                self._train(folder, stops)
        except SystemExit as stop:
            # Only now: what is put back is killed where it stands.
            if stop.code == WARNED and not stop.__cause__:
                _again(stops)
            raise

    def _train(self, folder: RunFolder, stops: StopRequests) -> None:
        try:
            self.entry(folder, stops)
        except SystemExit as stop:
            if stop.code == WARNED:
                _check_restarts(folder)
            raise


def cluster_of(folder: RunFolder) -> ClusterSettings:
    """Reads what a run asks of its cluster.

    Raises:
        RunError: Its configuration cannot be read.
    """
    return ClusterSettings(**folder.config().get("cluster", {}))


def limits_of(folder: RunFolder) -> Limits:
    """Reads how often a run may be started again."""
    cluster = cluster_of(folder)
    return Limits(max_restarts=cluster.max_restarts, oom_resubmits=cluster.oom_resubmits)


def _check_restarts(folder: RunFolder) -> None:
    """Sees whether the job may go back into the queue.

    Raises:
        SystemExit: Not any more; its cause says so.
    """
    restarts = folder.attempts.restarts_of(Place.here().job_id)
    decision = decide(Aftermath(ending="time_limit", restarts=restarts), limits_of(folder))
    if isinstance(decision, Leave):
        raise SystemExit(WARNED) from RunError(
            "The job's time is up", value=decision.reason, remedy=f"Go on: can-train resume {folder.run_id}"
        )


def _again(stops: StopRequests) -> None:
    """Puts the job back into the queue, unless it is leaving for good."""
    place = Place.here()
    if place.rank != 0 or os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return
    if not stops.terminated or left_in_time(place.job_id):
        put_back(place.job_id)
