"""A GPU of a given size on the CPU: every storage that operations make is served by a model of CUDA's caching
allocator, and what does not fit raises what CUDA raises. The test backend, and the way to try everything on a laptop.
"""

from typing import Final

import torch

from can_train.memory.caching_allocator import AllocationError, CachingAllocator
from can_train.memory.storages import StorageWatch

_UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class SimulatedGpu(StorageWatch):
    """Counts and limits the memory of everything computed while it is active, on whichever thread entered it.

    Args:
        capacity_bytes: What the allocator may use.
        expandable: Whether its segments grow page by page, as is the default on CUDA here.

    Attributes:
        allocator: Its books.
    """

    def __init__(self, capacity_bytes: int, *, expandable: bool = True) -> None:
        super().__init__()
        self.allocator = CachingAllocator(capacity_bytes, expandable=expandable)
        self._addresses: dict[int, int] = {}

    def _allocated(self, key: int, size: int) -> None:
        try:
            self._addresses[key] = self.allocator.allocate(size)
        except AllocationError:
            message = self._message(size)
        else:
            return
        # Raised out of the handler, so that nothing hangs on to the allocator's own error.
        raise torch.OutOfMemoryError(message)

    def _freed(self, key: int, size: int) -> None:
        self.allocator.free(self._addresses.pop(key))

    def _message(self, size: int) -> str:
        """The wording of CUDACachingAllocator.cpp."""
        books = self.allocator
        unallocated = books.reserved_bytes - books.allocated_bytes
        return (
            f"CUDA out of memory. Tried to allocate {size_text(size)}. GPU 0 has a total capacity of "
            f"{size_text(books.capacity_bytes)} of which {size_text(books.free_bytes)} is free. Including non-PyTorch "
            f"memory, this process has {size_text(books.reserved_bytes)} memory in use. Of the allocated memory "
            f"{size_text(books.allocated_bytes)} is allocated by PyTorch, and {size_text(unallocated)} is reserved by "
            "PyTorch but unallocated. (simulated GPU)"
        )


def size_text(size: int) -> str:
    """Writes a size as the allocator's messages do."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
