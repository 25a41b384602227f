"""The lock of a run, with the name of the process that has it. An attempt in a job waits for the lock while the process
of an earlier attempt still trains although SLURM has given up its job: the slurmd of the node has died, or the network,
but not the node.
"""

import fcntl
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO

import msgspec

from can_train.errors import EarlierAttemptError
from can_train.io.records import AttemptStart, find_process, json_text, read_bytes, this_host
from can_train.reporter import Reporter

WAIT_S: Final = 900.0
"""Longest wait for an earlier attempt, which ends at its next checkpoint; meanwhile the job's nodes do nothing."""
SAVE_S: Final = 120.0
"""Time for a process that was asked to end; a job is warned as long before its time limit."""
_LOOK_INTERVAL_S: Final = 1.0


def try_lock(file: TextIO) -> bool:
    """Locks a file without waiting; returns whether this process has the lock."""
    try:
        # The kernel's lock, not the existence of the file: a killed process leaves no lock behind. Not filelock: its
        # releases up to 3.24 empty the file as they open it, even without getting the lock, and the holder's name is
        # lost.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_holder(file: TextIO, holder: AttemptStart) -> None:
    """Writes the process that has a lock into the lock file."""
    file.truncate(0)
    file.write(json_text(asdict(holder)))
    file.flush()


def read_holder(path: Path) -> AttemptStart | None:
    """Reads the process that has a lock or had it last; None if the file is empty or damaged."""
    try:
        return msgspec.json.decode(read_bytes(path), type=AttemptStart)
    except (OSError, ValueError, RecursionError):
        return None


def holder_in_words(holder: AttemptStart) -> str:
    """Names the process that has a lock."""
    job = f" (job {holder.slurm_job})" if holder.slurm_job else ""
    return f"process {holder.pid} of {holder.host}{job}"


def wait_for_lock(
    file: TextIO, holder: AttemptStart, reporter: Reporter, *, wait_s: float = WAIT_S, save_s: float = SAVE_S
) -> None:
    """Locks a file after the process of an earlier attempt has released it. A process on this machine gets SIGTERM, and
    later SIGKILL; a process on another machine ends by itself (`Attempts.is_superseded`).

    Args:
        file: The open lock file.
        holder: The process that has the lock.
        reporter: Gets a notice about the wait.
        wait_s: Longest wait in seconds.
        save_s: Seconds after which a process of this machine is killed.

    Raises:
        EarlierAttemptError: The process still has the lock after `wait_s`.
    """
    who, began, is_asked = holder_in_words(holder), time.monotonic(), _send(signal.SIGTERM, holder, file)
    ends = "it was asked to save and to end" if is_asked else "it ends at its next checkpoint"
    reporter.notice(f"An earlier attempt, {who}, still trains this run, whose job was started again: {ends}")
    while not try_lock(file):
        waited_s = time.monotonic() - began
        if waited_s > wait_s:
            raise EarlierAttemptError("An earlier attempt still trains the run",
                                      value=f"{who} did not end within {wait_s / 60:.0f} min",
                                      remedy="End it where it runs, or wait until it has saved")  # fmt: skip
        if is_asked and waited_s > save_s:
            is_asked = False
            if _send(signal.SIGKILL, holder, file):
                reporter.notice(f"It did not within {save_s:.0f} s, and was killed")
        time.sleep(_LOOK_INTERVAL_S)


def _send(number: int, holder: AttemptStart, file: TextIO) -> bool:
    """Sends a signal to the holder of a lock if that process is on this machine and has the lock file open."""
    # Imported here: few commands look for processes.
    import psutil

    if holder.host != this_host():
        return False
    try:
        process = find_process(holder.pid, holder.start_time)
        # Machines may share a name, and a process id may be reused: the holder of the lock has the lock file open.
        has_file = process and str(Path(file.name).resolve()) in {opened.path for opened in process.open_files()}
        if process is None or not has_file:
            return False
        process.send_signal(number)
    except psutil.Error:
        return False
    return True
