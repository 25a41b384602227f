"""Whether a process of this machine is still the one that was written down: numbers of processes are used again."""

import os
import signal
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from can_train.launch.programs import output_of

_CLOCK_SLACK_S: Final = 2.0
"""Seconds by which a process may seem to have started after its own note: the kernel counts from a boot time that is
rounded, and moves with corrections of the clock."""

_PS_TIMEOUT_S: Final = 5.0


def is_alive(pid: int, noted: str) -> bool:
    """Tells whether a process is there that had started when its number was noted.

    Args:
        pid: Its number.
        noted: When, in ISO 8601 with a time zone.
    """
    age_s = _age_s(pid)
    if age_s is None:
        return False
    started = datetime.now().astimezone() - timedelta(seconds=age_s)
    return started <= datetime.fromisoformat(noted) + timedelta(seconds=_CLOCK_SLACK_S)


def terminate(pid: int, noted: str) -> bool:
    """Sends SIGTERM to a process that had started when its number was noted, if it runs Python.

    Returns:
        Whether there was one.

    Raises:
        PermissionError: It is another user's.
    """
    if not is_alive(pid, noted) or "python" not in command_line(pid).lower():
        return False
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True


def command_line(pid: int) -> str:
    """Returns what a process was started with; empty: it is not there."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return _ps(pid, "command")


def _age_s(pid: int) -> float | None:
    """Returns for how many seconds a process has been there; None: it is not, or only its exit status is left."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return _elapsed_s(_ps(pid, "etime"))
    # The second field is the program's name in brackets, and may hold anything.
    fields = stat.rpartition(")")[2].split()
    state, started_ticks = fields[0], float(fields[19])
    return None if state in "ZX" else uptime_s - started_ticks / os.sysconf("SC_CLK_TCK")


def _elapsed_s(text: str) -> float | None:
    """Reads what `ps` writes of elapsed time, [[days-]hours:]minutes:seconds."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, days or "0"]):
        return None
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return float(seconds + 86400 * int(days or 0))


def _ps(pid: int, field: str) -> str:
    """Asks `ps`, where there is no /proc."""
    return (output_of(["ps", "-p", str(pid), "-o", f"{field}="], seconds=_PS_TIMEOUT_S) or "").strip()
