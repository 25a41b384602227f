"""What the host says of itself: how much memory it can still give a process (the capacity of the device `cpu`), and
which NVIDIA driver it runs.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Hierarchy:
    """Where a version of control groups has its figures.

    Attributes:
        controllers: What /proc/self/cgroup names it by.
        root: Folder of the topmost group.
        limit, usage: Files of a group.
        reclaimable: Line of its memory.stat: of the usage, cached files that give way to allocations.
    """

    controllers: str
    root: Path
    limit: str
    usage: str
    reclaimable: str


_HIERARCHIES: Final = (
    _Hierarchy("", _CGROUP_ROOT, "memory.max", "memory.current", "inactive_file"),
    _Hierarchy(
        "memory", _CGROUP_ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
)
"""Version 2 and version 1."""


def available_bytes() -> int:
    """Returns the bytes that can be allocated without swapping: the least of host and control groups, which a container
    or a job has less than the host by.
    """
    found = [_meminfo_available(Path("/proc/meminfo"))]
    found += [_cgroup_room(group, kind) for kind in _HIERARCHIES for group in _own_groups(kind)]
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


def _own_groups(kind: _Hierarchy, membership: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Lists the control groups that this process is in, from its own up to the topmost: each may set a limit."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    own = [kind.root / path.lstrip("/") for _, controllers, path in lines if controllers == kind.controllers]
    # A container sees its own group as the topmost, under whatever path the host has given it.
    above = [group for group in (own[0], *own[0].parents) if group.is_relative_to(kind.root)] if own else []
    return above or [kind.root]


def _cgroup_room(group: Path, kind: _Hierarchy) -> int | None:
    try:
        limit, usage = int((group / kind.limit).read_text()), int((group / kind.usage).read_text())
    except (OSError, ValueError):
        # No control group, or the limit reads "max".
        return None
    return max(limit - usage + _reclaimable(group, kind), 0)


def _reclaimable(group: Path, kind: _Hierarchy) -> int:
    try:
        text = (group / "memory.stat").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{kind.reclaimable} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
