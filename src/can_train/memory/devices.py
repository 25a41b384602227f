"""Decides which device `--device` means, and what the host offers."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from can_train.errors import ConfigError, DeviceError, nearest_first
from can_train.io.units import parse_size

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


_ALLOCATED: Final = (("SLURM_JOB_GPUS", ("",)), ("SLURM_STEP_GPUS", ("",)), ("SLURM_GPUS_ON_NODE", ("", "0")))
"""Variables in which a scheduler says which GPUs it gave a job, and their values that mean none: the first two list
indices, and GPU 0 is one; the last counts."""


_FORMS: Final = ("auto", "cpu", "cuda", "cuda:1", "sim:2GiB")
"""What `--device` may read, an example of each kind."""


def resolve_device(text: str, *, environment: Mapping[str, str] = os.environ) -> torch.device:
    """Turns `auto`, `cpu`, `cuda[:i]` or `sim:<size>` into a torch device: tensors of a simulated GPU are the CPU's.

    Raises:
        DeviceError: There is no such device, or a GPU is there and torch cannot use it.
    """
    if text == "cpu" or is_simulated(text):
        return torch.device("cpu")
    if text == "auto":
        return _automatic(environment)
    if not re.fullmatch(r"cuda(:\d+)?", text):
        raise DeviceError("Unknown device", value=repr(text), remedy=f"Valid: {', '.join(nearest_first(text, _FORMS))}")
    if not torch.cuda.is_available():
        raise DeviceError("torch sees no CUDA GPU", value=f"--device {text}", remedy=_cuda_remedy())
    device = torch.device(text)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise DeviceError("There is no such GPU", value=text, remedy=f"torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", device.index or 0)


def is_simulated(text: str) -> bool:
    """Tells whether a device is a simulated GPU, `sim:<size>`.

    Raises:
        DeviceError: It is one without a size that can be read.
    """
    return text.partition(":")[0] == "sim" and simulated_bytes(text) > 0


def simulated_bytes(text: str) -> int:
    """Reads the memory of a simulated GPU, in bytes.

    Raises:
        DeviceError: It has none that can be read.
    """
    try:
        return parse_size(text.removeprefix("sim:"))
    except ConfigError:
        raise DeviceError(
            "A simulated GPU is written sim:<size>", value=repr(text), remedy="Give it memory: sim:512MiB, sim:2GiB"
        ) from None


def _automatic(environment: Mapping[str, str]) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    promised = _promised_gpu(environment)
    if promised:
        raise DeviceError("A GPU is here but torch cannot use it", value=promised, remedy=_cuda_remedy())
    return torch.device("cpu")


def _promised_gpu(environment: Mapping[str, str]) -> str:
    """Says what shows that a GPU was given to this process; empty where nothing does."""
    for name, none in _ALLOCATED:
        if environment.get(name, "") not in none:
            return f"{name}={environment[name]}"
    if environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return ""
    gpus = Path("/proc/driver/nvidia/gpus")
    return (
        f"the NVIDIA driver lists {len(list(gpus.iterdir()))} GPU(s)" if gpus.is_dir() and any(gpus.iterdir()) else ""
    )


def _cuda_remedy() -> str:
    if torch.version.cuda is None:
        return (
            "This torch was built without CUDA: install a CUDA build, or set CAN_TRAIN_PYTHON to an environment that "
            "has one; --device cpu trains without a GPU"
        )
    built = f"torch was built for CUDA {torch.version.cuda}"
    return f"{built}: check the driver (nvidia-smi); --device cpu trains without a GPU"
