"""A GPU that is not there: tensors live on the CPU, and what they would take of a CUDA device is replayed in a model of
its allocator, which decides when it is full. Work on it fails in the way, and with the words, that CUDA's does.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from can_train.memory.blocks import Block
from can_train.memory.caching_allocator import CachingAllocator, segment_bytes
from can_train.memory.neighbours import nobody
from can_train.memory.storage_mode import StorageMode


class SimulatedGpu(StorageMode[Block]):
    """Counts what operations make while it is active as memory of a GPU; may be entered once for a whole run.

    What an operation takes inside (a library's workspace, temporaries of a fused kernel) does not show, nor what
    scratch memory a CUDA kernel would need that the CPU's does not.

    Args:
        capacity_bytes: Memory of the GPU that PyTorch's allocator may have.
        expandable: Whether the allocator's segments expand (`expandable_segments:True`).
        resident: Tensors that are on it from the start.
        others: Tells what other processes hold of it.

    Raises:
        torch.OutOfMemoryError: `resident` does not fit.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        expandable: bool = True,
        resident: Iterable[Tensor] = (),
        others: Callable[[], int] = nobody,
    ) -> None:
        super().__init__()
        self._allocator = CachingAllocator(capacity_bytes, expandable=expandable, others=others)
        self.seed_resident(resident)

    @property
    def allocator(self) -> CachingAllocator:
        """The allocator, all that has died until now given back to it."""
        self._settle()
        return self._allocator

    def _take(self, size: int) -> Block:
        block = self._allocator.malloc(size)
        if block is None:
            raise torch.OutOfMemoryError(_out_of_memory(self._allocator, segment_bytes(size)))
        return block

    def _give(self, lease: Block) -> None:
        self._allocator.free(lease)


def _out_of_memory(allocator: CachingAllocator, tried_bytes: int) -> str:
    """Words the error as c10/cuda/CUDACachingAllocator.cpp does: people and their tools search for its text."""
    unallocated = allocator.reserved_bytes - allocator.allocated_bytes
    return (
        f"CUDA out of memory. Tried to allocate {_format_size(tried_bytes)}. GPU 0 has a total capacity of "
        f"{_format_size(allocator.capacity_bytes)} of which {_format_size(allocator.free_bytes)} is free. "
        f"{_processes(allocator)}Of the allocated memory {_format_size(allocator.allocated_bytes)} is allocated by "
        f"PyTorch, and {_format_size(unallocated)} is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _processes(allocator: CachingAllocator) -> str:
    others = f"Process 0 has {_format_size(allocator.foreign_bytes)} memory in use. " if allocator.foreign_bytes else ""
    own = _format_size(allocator.reserved_bytes)
    return f"{others}Including non-PyTorch memory, this process has {own} memory in use. "


def _format_size(size: int) -> str:
    """Writes a size as c10's `format_size` does."""
    if size <= 1024:
        return f"{size} bytes"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if size <= 1024 ** (power + 1):
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size / 1024**3:.2f} GiB"
