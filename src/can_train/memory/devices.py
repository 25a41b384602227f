"""Decides which device `--device` means, and says why where it cannot be used."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from can_train.errors import ConfigError, DeviceError, nearest_first
from can_train.policy.sizes import parse_size

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
