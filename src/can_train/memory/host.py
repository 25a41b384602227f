"""What the host says of itself: how much memory it can still give a process (the capacity of the device `cpu`), and
which NVIDIA driver it runs.
"""

import os
import re
from pathlib import Path
from typing import Final

_CGROUP_FILES: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and usage of the control group, version 2 and version 1: a container or a job has less than the host."""


def available_bytes() -> int:
    """Returns the bytes that can be allocated without swapping: the least of host and control group."""
    found = [_meminfo_available(Path("/proc/meminfo"))]
    found += [_cgroup_room(Path(limit), Path(usage)) for limit, usage in _CGROUP_FILES]
    known = [value for value in found if value is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def total_bytes() -> int:
    """Returns the machine's physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def nvidia_driver_version() -> str:
    """Returns the NVIDIA kernel driver's version; empty where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found.group() if found else ""


def _meminfo_available(path: Path) -> int | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def _cgroup_room(limit: Path, usage: Path) -> int | None:
    try:
        room = int(limit.read_text()) - int(usage.read_text())
    except (OSError, ValueError):
        # No control group, or the limit reads "max".
        return None
    return max(room, 0)
