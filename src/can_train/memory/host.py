"""The memory of the host, as far as control groups leave it to this process; and the end of child processes."""

import ctypes
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import psutil

# Of the memory that the host has left, the share that tensors which have left a device may take; and the share that may
# be pinned: the operating system can give pinned memory to nothing else.
HOST_SHARE: Final = 0.8
PINNED_SHARE: Final = 0.5
# Variables in which launchers tell a process how many of them they have started on its machine.
_LOCAL_SIZES: Final = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
)  # fmt: skip
PACKED: Final = "CAN_TRAIN_PACKED"  # variable with the number of runs that share the GPU of this process
_PARENT_DIES: Final = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """The files of a memory control group in one version of the kernel's interface."""

    controllers: str  # names the hierarchy in /proc/self/cgroup
    root: Path  # folder of the topmost group
    limit: str  # file with bytes, or "max" for no limit
    usage: str  # file with bytes
    reclaimable: str  # line of memory.stat: cached file pages, which count as used but give way to allocations
    events: str  # file that counts the processes that the kernel has killed


# Version 2 and version 1.
_VERSIONS: Final = (
    _Files("", _CGROUP_ROOT, "memory.max", "memory.current", "inactive_file", "memory.events"),
    _Files("memory", _CGROUP_ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
           "total_inactive_file", "memory.oom_control"),
)  # fmt: skip


@dataclass(frozen=True)
class ControlGroup:
    """A memory control group."""

    path: Path
    files: _Files

    def available_bytes(self) -> int | None:
        """Returns the bytes that the group may still allocate; None where it has no limit."""
        try:
            limit, usage = int(self._read(self.files.limit)), int(self._read(self.files.usage))
        except ValueError:
            return None
        reclaimable = re.search(rf"^{self.files.reclaimable} (\d+)$", self._read("memory.stat"), re.MULTILINE)
        return max(limit - usage + (int(reclaimable[1]) if reclaimable else 0), 0)

    def has_killed(self) -> bool:
        """Tells whether the kernel has killed a process of the group because its memory ran out."""
        return re.search(r"^oom_kill [1-9]", self._read(self.files.events), re.MULTILINE) is not None

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except OSError:
            return ""


def control_groups(membership: Path = Path("/proc/self/cgroup")) -> Iterator[ControlGroup]:
    """Lists the memory control groups of this process, of both versions, each from its own up to the topmost one.
    `membership` is the file with the process's groups, as the kernel lists them: `hierarchy:controllers:path`.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    for files in _VERSIONS:
        groups = [files.root / path.lstrip("/") for _, controllers, path in lines if controllers == files.controllers]
        paths = [path for path in (groups[0], *groups[0].parents) if path.is_relative_to(files.root)] if groups else []
        # A container sees its own group as the topmost one, under any path that the host has given it.
        for path in paths or [files.root]:
            yield ControlGroup(path, files)


def available_bytes() -> int:
    """Returns the bytes that can be allocated without swapping; a container or a job may have less than the host."""
    # Every group up to the topmost may set a limit, and the least of them binds.
    limits = [group.available_bytes() for group in control_groups()]
    return min([psutil.virtual_memory().available, *(limit for limit in limits if limit is not None)])


def room_bytes(share: float) -> float:
    """Returns the bytes that this process may take of a share of the available memory, which it divides evenly with the
    other processes that a launcher has started on the machine.
    """
    return share * available_bytes() / processes_here()


def processes_here(environment: Mapping[str, str] = os.environ) -> int:
    """Counts the processes that a launcher has started on this machine, this one included.

    >>> processes_here({"LOCAL_WORLD_SIZE": "4"}), processes_here({})
    (4, 1)
    >>> processes_here({"SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1"})
    4
    """
    if environment.get(PACKED, "").isdecimal():
        return max(1, int(environment[PACKED]))
    # The innermost launcher first: torchrun may be started by mpirun, and mpirun by srun.
    counts = [environment[name] for name in _LOCAL_SIZES if environment.get(name, "").isdecimal()][:1]
    if not counts and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        # A shell of a job has no tasks of a step. Nodes may have different numbers of them: the largest is safe.
        counts = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max([1, *map(int, counts)])


def die_with_parent() -> None:
    """Has the kernel kill this process when the process that started it ends, also where that one is killed. Only Linux
    can; elsewhere the call does nothing.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DIES, int(signal.SIGKILL))
