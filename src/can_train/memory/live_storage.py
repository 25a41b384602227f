"""Counts the bytes of live tensor storages while it is active: the CPU's stand-in for an allocator's peak counter."""

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from can_train.memory.storage_mode import StorageMode

ALLOCATION_QUANTUM: Final = 512
"""Bytes that an allocation is rounded up to, as CUDA's caching allocator does: figures then compare across devices."""


class LiveStorage(StorageMode[int]):
    """Tracks live and peak bytes of every storage that operations make, and refuses to go over a limit.

    Args:
        limit_bytes: Largest live bytes; an operation that exceeds it raises `torch.OutOfMemoryError`.
        resident: Tensors alive before the mode is entered (parameters, gradients, optimizer state).

    Attributes:
        peak_bytes: The most that was live or asked for at once.
    """

    def __init__(self, limit_bytes: int, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._live_bytes = 0
        self.seed_resident(resident)

    @property
    def live_bytes(self) -> int:
        """Bytes that are live now."""
        self._settle()
        return self._live_bytes

    def forget_peak(self) -> None:
        """Starts the peak anew, from what is live."""
        self.peak_bytes = self.live_bytes

    def _take(self, size: int) -> int:
        rounded = -(-size // ALLOCATION_QUANTUM) * ALLOCATION_QUANTUM
        wanted = self._live_bytes + rounded
        self.peak_bytes = max(self.peak_bytes, wanted)
        if wanted > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"CPU out of memory. Tried to allocate {rounded / 2**20:.2f} MiB; "
                f"{wanted / 2**20:.2f} MiB would be live, {self.limit_bytes / 2**20:.2f} MiB is the limit."
            )
        self._live_bytes = wanted
        return rounded

    def _give(self, lease: int) -> None:
        self._live_bytes -= lease
