"""What a job of the scheduler does: trains one run, and has itself put back into the queue when its time is up."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from can_train.training.attempts import scheduler_job

_WARNED: Final = 128 + 12
"""Exit status of a training that saved itself for SIGUSR2."""


@dataclass(frozen=True)
class Job:
    """A job, as submitit keeps it.

    Args:
        entry: Trains the run in a folder.
        run_path: The folder.
    """

    entry: Callable[[str], None]
    run_path: str

    def __call__(self) -> None:
        """Trains."""
        try:
            self.entry(self.run_path)
        except SystemExit as stop:
            if stop.code != _WARNED:
                raise
            subprocess.run(["scontrol", "requeue", scheduler_job(os.environ)], check=True)
