"""Which process began an attempt of a run, and whether that process still runs."""

import os
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from can_train.errors import RunError

if TYPE_CHECKING:
    import psutil

_CLOCK_SLACK_S: Final = 2.0
"""Seconds by which a process may seem to start after the record of it: the kernel counts from a boot time that is
rounded to a second and moves when the clock is corrected."""


@dataclass(frozen=True, kw_only=True)
class AttemptStart:
    """The record that a process began an attempt of a run.

    Attributes:
        attempt: Its number in the run, from 1.
        start_time: In ISO 8601 with a time zone.
        pid: 0: not known.
        job_id: Scheduler's job around the process (123, or 123_4 in an array); empty: none.
        restarts: How often that job had been requeued before.
    """

    attempt: int
    start_time: str
    host: str = ""
    pid: int = 0
    rank: int = 0
    job_id: str = ""
    restarts: int = 0

    def is_running(self, host: str | None = None) -> bool | None:
        """Returns whether the process still runs; None where this machine (`host`, if given) cannot know."""
        if self.pid < 1 or self.host != (this_host() if host is None else host):
            return None
        return is_running(self.pid, self.start_time)


def this_host() -> str:
    """Returns this machine's name, as records have it."""
    # What socket.gethostname() returns too, without an import that would be a tenth of the command line's start.
    return os.uname().nodename


def is_running(pid: int, recorded_at: str) -> bool:
    """Returns whether the process that had an id at a time (ISO 8601 with a time zone) still runs."""
    return _find(pid, recorded_at) is not None


def terminate(pid: int, recorded_at: str) -> bool:
    """Sends SIGTERM to the process that had an id at a time, if it runs Python; returns whether there was one.

    Raises:
        RunError: It belongs to another user.
    """
    import psutil

    try:
        process = _find(pid, recorded_at)
        if process is None or "python" not in " ".join(process.cmdline()).lower():
            return False
        process.terminate()
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied as error:
        raise RunError("The run is another user's process", value=f"process {pid}") from error
    return True


def _find(pid: int, recorded_at: str) -> "psutil.Process | None":
    # Imported here: records are written and compared more often than processes are looked for.
    import psutil

    try:
        process = psutil.Process(pid)
        # The id alone proves nothing: the system gives it to a new process once the old one has ended. A process that
        # started after the record was written is such a new one.
        is_same = process.create_time() <= datetime.fromisoformat(recorded_at).timestamp() + _CLOCK_SLACK_S
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None
