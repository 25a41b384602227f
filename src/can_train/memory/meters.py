"""Meters: what a device can hold and how much a span of work took at its peak. One per kind of device, all of one
shape; what the figures mean for a batch is decided elsewhere.
"""

import gc
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

import torch
from torch import Tensor

from can_train.memory import host
from can_train.memory.devices import SIMULATED, resolve_device, simulated_size
from can_train.memory.live_storage import LiveStorage
from can_train.memory.simulated_gpu import SimulatedGpu

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where a user says how CUDA's allocator works; torch from 2.9 also knows the second name."""

_EXPANDABLE: Final = "expandable_segments:True"


class Meter(Protocol):
    """Reads one device.

    Attributes:
        device: The torch device.
        name: What the driver calls it.
        key: Kind of device in the factor store, `h100-80gb`.
        total_bytes: Its whole memory.
        capacity_bytes: What PyTorch's allocator may use of it.
        driver: Version of the driver; empty where there is none.
    """

    device: torch.device
    name: str
    key: str
    total_bytes: int
    capacity_bytes: int
    driver: str

    def active(self) -> AbstractContextManager[None]:
        """Opens an attempt: everything computed inside is on the device."""

    def host(self) -> AbstractContextManager[None]:
        """Opens a span whose new tensors are on the host."""

    def measuring(self, resident: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Opens a span whose peak counts; `resident` tensors are already on the device."""

    def reset_peak(self) -> None:
        """Forgets the peaks; only probes, finder and monitor may call it."""

    def peak_bytes(self) -> int:
        """Returns the largest allocated bytes since the last reset."""

    def peak_reserved_bytes(self) -> int:
        """Returns the largest bytes that the allocator held since the last reset; 0 where there is none."""

    def allocated_bytes(self) -> int:
        """Returns the bytes allocated now; 0 where nobody counts."""

    def retries(self) -> int:
        """Returns how often the allocator had to release its cache to serve a request, since the process began."""

    def available_bytes(self) -> int:
        """Returns what this process could have of the device now: what it holds, and what is free."""

    def foreign_bytes(self) -> int:
        """Returns what others have taken of the capacity since it was read."""

    def release(self, *, collect: bool = True) -> None:
        """Returns cached memory to the device; `collect` looks for garbage in cycles first, which takes longer."""


class CpuMeter:
    """Counts live storages on measured spans only, against the host memory available at the start."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "cpu"
        self.driver = ""
        self.total_bytes = host.total_bytes()
        self.capacity_bytes = host.available_bytes()
        self.key = f"cpu-{_gigabytes(self.total_bytes)}gb"
        self._peak_bytes = 0

    def active(self) -> AbstractContextManager[None]:
        """Opens nothing."""
        return nullcontext()

    def host(self) -> AbstractContextManager[None]:
        """Opens nothing: the device is the host."""
        return nullcontext()

    @contextmanager
    def measuring(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """Counts storages inside the block; more than the capacity raises `torch.OutOfMemoryError`."""
        tracker = LiveStorage(self.capacity_bytes, resident)
        try:
            with tracker:
                yield
        finally:
            self._peak_bytes = max(self._peak_bytes, tracker.peak_bytes)

    def reset_peak(self) -> None:
        """Forgets the peak."""
        self._peak_bytes = 0

    def peak_bytes(self) -> int:
        """Returns the largest live bytes of the measured spans since the last reset."""
        return self._peak_bytes

    def peak_reserved_bytes(self) -> int:
        """Returns 0: nothing is held back."""
        return 0

    def allocated_bytes(self) -> int:
        """Returns 0: only measured spans are counted."""
        return 0

    def retries(self) -> int:
        """Returns 0: there is no cache."""
        return 0

    def available_bytes(self) -> int:
        """Returns the capacity."""
        return self.capacity_bytes

    def foreign_bytes(self) -> int:
        """Returns 0: others' use is part of what was available at the start."""
        return 0

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage: the CPU's allocator caches nothing."""
        if collect:
            gc.collect()


class SimulatedMeter:
    """Reads a simulated GPU.

    Args:
        capacity_bytes: Its size, all of which the allocator may use.

    Attributes:
        gpu: The GPU itself.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.gpu = SimulatedGpu(capacity_bytes, expandable=not allocator_settings())
        self.device = torch.device("cpu")
        self.name = "simulated GPU"
        self.driver = ""
        self.total_bytes = self.capacity_bytes = capacity_bytes
        self.key = f"sim-{_exact_size(capacity_bytes)}"

    def active(self) -> AbstractContextManager[None]:
        """Opens the GPU."""
        return self._entered()

    def host(self) -> AbstractContextManager[None]:
        """Opens a span whose new tensors count nothing."""
        return self.gpu.host()

    @contextmanager
    def measuring(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """Does nothing: an active GPU counts always."""
        yield

    def reset_peak(self) -> None:
        """Starts the peaks anew."""
        self.gpu.allocator.reset_peaks()

    def peak_bytes(self) -> int:
        """Returns the largest allocated bytes since the last reset."""
        return self.gpu.allocator.peak_allocated_bytes

    def peak_reserved_bytes(self) -> int:
        """Returns the largest reserved bytes since the last reset."""
        return self.gpu.allocator.peak_reserved_bytes

    def allocated_bytes(self) -> int:
        """Returns the bytes allocated now."""
        return self.gpu.allocator.allocated_bytes

    def retries(self) -> int:
        """Returns how often the cache was released to serve a request."""
        return self.gpu.allocator.retries

    def available_bytes(self) -> int:
        """Returns the capacity less what others hold."""
        return self.gpu.allocator.reserved_bytes + self.gpu.allocator.free_bytes

    def foreign_bytes(self) -> int:
        """Returns what others hold."""
        return self.gpu.allocator.foreign_bytes

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage, then empties the cache."""
        if collect:
            gc.collect()
        self.gpu.allocator.release_cache()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self.gpu:
            yield


class CudaMeter:
    """Reads PyTorch's caching allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        _expand_segments()
        properties = torch.cuda.get_device_properties(device)
        free_bytes, self.total_bytes = torch.cuda.mem_get_info(device)
        self.device = device
        self.name = properties.name
        self.driver = host.nvidia_driver_version()
        # What this process has reserved already counts as free to it.
        self.capacity_bytes = min(free_bytes + torch.cuda.memory_reserved(device), self._allowed_bytes())
        self.key = gpu_key(properties.name, self.total_bytes)

    def active(self) -> AbstractContextManager[None]:
        """Opens nothing."""
        return nullcontext()

    def host(self) -> AbstractContextManager[None]:
        """Opens nothing: tensors are where they say."""
        return nullcontext()

    @contextmanager
    def measuring(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """Does nothing: the allocator counts always."""
        yield

    def reset_peak(self) -> None:
        """Resets the allocator's peak counters."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Returns the allocator's largest allocated bytes since the last reset."""
        return torch.cuda.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int:
        """Returns the allocator's largest reserved bytes since the last reset."""
        return torch.cuda.max_memory_reserved(self.device)

    def allocated_bytes(self) -> int:
        """Returns the bytes allocated now."""
        return torch.cuda.memory_allocated(self.device)

    def retries(self) -> int:
        """Returns how often the allocator released its cache to serve a request."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def available_bytes(self) -> int:
        """Returns what is reserved and what the driver calls free, at most the capacity."""
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        return min(free_bytes + torch.cuda.memory_reserved(self.device), self.capacity_bytes)

    def foreign_bytes(self) -> int:
        """Returns what others have taken of the capacity since it was read."""
        return self.capacity_bytes - self.available_bytes()

    def release(self, *, collect: bool = True) -> None:
        """Collects garbage, then empties the allocator's cache."""
        if collect:
            gc.collect()
        torch.cuda.empty_cache()

    def _allowed_bytes(self) -> int:
        """What `set_per_process_memory_fraction` allows; torch before 2.7 does not tell."""
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return int(self.total_bytes * (fraction(self.device) if fraction is not None else 1.0))


def open_meter(text: str) -> Meter:
    """Makes the meter of what `--device` names.

    Raises:
        DeviceError: There is no such device, or it cannot be used.
    """
    if text.lower().startswith(SIMULATED):
        return SimulatedMeter(simulated_size(text))
    device = resolve_device(text)
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def allocator_settings() -> str:
    """Returns what the user set of PyTorch's CUDA allocator; empty where nothing."""
    return next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")


def _expand_segments() -> None:
    """Has the allocator's segments grow page by page, which fragments least, unless the user chose otherwise.

    It must be set before CUDA's first allocation. The variable reaches child processes, the call this one, where torch
    may have read the variables already.
    """
    if allocator_settings() or torch.cuda.is_initialized():
        return
    os.environ[_ALLOCATOR_VARIABLES[0]] = _EXPANDABLE
    set_settings = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if set_settings is not None:
        set_settings(_EXPANDABLE)


def gpu_key(name: str, total_bytes: int) -> str:
    """Names a kind of GPU: `h100-80gb`.

    The size is the one in the driver's name where it has one: what can be used of 80 GB reads 79.1 or 79.6 GiB, by
    driver, and a learned factor must survive a new driver. A MIG slice's own size stands last in its name.
    """
    sizes = re.findall(r"(\d+)gb\b", name.lower())
    return f"{_slug(name)}-{int(sizes[-1]) if sizes else _gigabytes(total_bytes)}gb"


def _gigabytes(size: int) -> int:
    return max(1, round(size / 2**30))


def _slug(name: str) -> str:
    plain = re.sub(r"\b(nvidia|geforce|tesla|pcie|sxm\d*|hbm\d*e?|\d+gb)\b", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9]+", plain)) or "gpu"


def _exact_size(size: int) -> str:
    """Writes a size in the largest unit that needs no fraction: `2gib`, `1536mib`."""
    units = ((2**40, "tib"), (2**30, "gib"), (2**20, "mib"), (2**10, "kib"), (1, "b"))
    unit, name = next((unit, name) for unit, name in units if size % unit == 0)
    return f"{size // unit}{name}"
