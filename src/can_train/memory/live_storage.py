"""Counts the bytes of live tensor storages while it is active: the CPU's stand-in for an allocator's peak counter."""

from collections.abc import Iterable

import torch
from torch import Tensor

from can_train.memory.storages import StorageWatch


class LiveStorage(StorageWatch):
    """Tracks live and peak bytes of every storage that operations make, and refuses to go over a limit.

    Args:
        limit_bytes: Largest live bytes; an operation that exceeds it raises `torch.OutOfMemoryError`.
        resident: Tensors alive before the mode is entered (parameters, gradients, optimizer state); they may exceed it.
    """

    def __init__(self, limit_bytes: int, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.limit_bytes = 2**62
        self.live_bytes = 0
        self.peak_bytes = 0
        self.see(resident)
        self.limit_bytes = limit_bytes

    def _allocated(self, key: int, size: int) -> None:
        if self.live_bytes + size > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"CPU out of memory. Tried to allocate {size / 2**20:.2f} MiB; "
                f"{(self.live_bytes + size) / 2**20:.2f} MiB would be live, {self.limit_bytes / 2**20:.2f} MiB is the "
                "limit."
            )
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int, size: int) -> None:
        self.live_bytes -= size
