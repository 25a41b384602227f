"""Meters: what a device can hold and how much a span of work took at its peak. One per kind of device, all of one
shape; what the figures mean for a batch is decided elsewhere.
"""

import gc
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from can_train.memory import host
from can_train.memory.live_storage import LiveStorage


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

    def measuring(self, resident: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Opens a span whose peak counts; `resident` tensors are already on the device."""

    def reset_peak(self) -> None:
        """Forgets the peak; only probes, finder and monitor may call it."""

    def peak_bytes(self) -> int:
        """Returns the largest allocated bytes since the last reset."""

    def release(self) -> None:
        """Returns cached memory to the device."""


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

    def release(self) -> None:
        """Collects garbage: the CPU's allocator caches nothing."""
        gc.collect()


class CudaMeter:
    """Reads PyTorch's caching allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        free_bytes, self.total_bytes = torch.cuda.mem_get_info(device)
        self.device = device
        self.name = properties.name
        self.driver = host.nvidia_driver_version()
        # What this process has reserved already counts as free to it.
        self.capacity_bytes = free_bytes + torch.cuda.memory_reserved(device)
        self.key = gpu_key(properties.name, self.total_bytes)

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

    def release(self) -> None:
        """Collects garbage, then empties the allocator's cache."""
        gc.collect()
        torch.cuda.empty_cache()


def meter_for(device: torch.device) -> Meter:
    """Makes the meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


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
