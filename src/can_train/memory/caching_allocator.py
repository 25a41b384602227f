"""A model of PyTorch's caching allocator for one CUDA device and one stream, default settings: it decides where each
allocation goes, what is reserved for it, and when the device is full. It holds no memory.

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.6 to 2.13); names of its constants are given in blocks.py.
"""

from collections.abc import Callable
from typing import Final

from can_train.memory.blocks import LARGE_PAGE_BYTES, MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_PAGE_BYTES, Block, Pool
from can_train.memory.neighbours import nobody

_MIN_OWN_SEGMENT_BYTES: Final = 10 * 2**20
"""From here on an allocation gets a segment of its own size (`kMinLargeAlloc`)."""

_SEGMENT_ROUNDING_BYTES: Final = 2 * 2**20
"""Such a segment's size is rounded up to this (`kRoundLarge`)."""


def block_bytes(size: int) -> int:
    """Returns what an allocation of `size` bytes takes of a segment."""
    return max(MIN_BLOCK_BYTES, _round_up(size, MIN_BLOCK_BYTES))


def segment_bytes(size: int) -> int:
    """Returns what the allocator asks the device for when no free block holds `size` bytes."""
    rounded = block_bytes(size)
    if rounded <= SMALL_BYTES:
        return SMALL_PAGE_BYTES
    return LARGE_PAGE_BYTES if rounded < _MIN_OWN_SEGMENT_BYTES else _round_up(rounded, _SEGMENT_ROUNDING_BYTES)


class CachingAllocator:
    """Replays allocations as they happen; all figures are bytes.

    Args:
        capacity_bytes: Memory of the device that can be reserved.
        expandable: Whether segments expand (`expandable_segments:True`).
        others: Tells what other processes hold of the capacity.

    Attributes:
        allocated_bytes: Sum of the blocks in use.
        reserved_bytes: Sum of the segments, or of their mapped pages.
        num_alloc_retries: How often the cache was released because an allocation did not fit.
    """

    def __init__(self, capacity_bytes: int, *, expandable: bool, others: Callable[[], int] = nobody) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable = expandable
        self._others = others
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        self._pools = (Pool(SMALL_PAGE_BYTES), Pool(LARGE_PAGE_BYTES))
        self._next_address = 0

    @property
    def foreign_bytes(self) -> int:
        """What other processes hold of the capacity; may be set at any time."""
        return self._others()

    @foreign_bytes.setter
    def foreign_bytes(self, held_bytes: int) -> None:
        self._others = lambda: held_bytes

    @property
    def free_bytes(self) -> int:
        """What the device could still give to anybody."""
        return max(0, self.capacity_bytes - self.foreign_bytes - self.reserved_bytes)

    @property
    def available_bytes(self) -> int:
        """What this process could have in use: all that it has reserved, and what is free."""
        return self.reserved_bytes + self.free_bytes

    def malloc(self, size: int) -> Block | None:
        """Allocates `size` bytes (at least 1); None where they do not fit even after the cache was released."""
        size = block_bytes(size)
        is_small = size <= SMALL_BYTES
        pool = self._pools[0 if is_small else 1]
        block = pool.best_fit(size) or self._grow(pool, size)
        if block is None:
            self.release_cached()
            self.num_alloc_retries += 1
            block = self._grow(pool, size)
        if block is None:
            return None
        pool.remove(block)
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES if is_small or self.expandable else rest > SMALL_BYTES:
            pool.add(block.cut(size))
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Takes an allocated block back into the cache."""
        self.allocated_bytes -= block.size
        block.allocated = False
        block.absorb_neighbours()
        block.pool.add(block)

    def release_cached(self) -> None:
        """Gives the device back every segment, or mapped page, that is free as a whole."""
        for pool in self._pools:
            for block in pool.free_blocks():
                if self.expandable:
                    self._unmap(block)
                elif block.is_whole_segment:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def reset_peaks(self) -> None:
        """Forgets both peaks."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Returns a free block of at least `size` bytes with new memory in it; None where the device has no more."""
        return self._expand(pool, size) if self.expandable else self._new_segment(pool, segment_bytes(size))

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        if size > self.free_bytes:
            return None
        block = self._new_block(pool, size, mapped=True)
        self._reserve(size)
        pool.add(block)
        return block

    def _new_block(self, pool: Pool, size: int, *, mapped: bool) -> Block:
        block = Block(pool, self._next_address, size, mapped=mapped)
        # Every segment begins at a page of its pool, whichever that is: the large page is a multiple of the small one.
        self._next_address += _round_up(size, LARGE_PAGE_BYTES)
        return block

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Maps pages where the lowest addresses have room: into a hole, or behind the last block in use."""
        if size > self.capacity_bytes:
            return None
        block = self._expandable_block(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None, "_expandable_block promised enough addresses"
            if not self._map(following, min(following.size, size - block.size)):
                return None
            block = following
        return block

    def _expandable_block(self, pool: Pool, size: int) -> Block:
        """Finds the first free or unmapped block that begins `size` unallocated bytes of addresses."""
        for unmapped in pool.unmapped_blocks():
            before = unmapped.previous
            start = before if before is not None and not before.allocated else unmapped
            if _unallocated_from(start, size) >= size:
                return start
        # An eighth more addresses than memory, so that pages can move to the end when holes are in the way.
        addresses = _round_up(self.capacity_bytes + self.capacity_bytes // 8, pool.page_bytes)
        block = self._new_block(pool, addresses, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Maps the pages that hold the first `size` bytes of an unmapped block; false where they do not all fit."""
        mapped_bytes = _round_up(size, block.pool.page_bytes)
        if mapped_bytes > self.free_bytes:
            return False
        pool = block.pool
        pool.remove(block)
        if mapped_bytes < block.size:
            pool.add(block.cut(mapped_bytes))
        block.mapped = True
        block.absorb_neighbours()
        pool.add(block)
        self._reserve(mapped_bytes)
        return True

    def _unmap(self, block: Block) -> None:
        """Takes the memory from behind the whole pages of a free block."""
        pool, page = block.pool, block.pool.page_bytes
        start = _round_up(block.address, page)
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.remove(block)
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        if start > block.address:
            whole = block.cut(start - block.address)
            pool.add(block)
            block = whole
        block.mapped = False
        self.reserved_bytes -= block.size
        block.absorb_neighbours()
        if not block.is_whole_segment:
            pool.add(block)


def _unallocated_from(block: Block | None, enough: int) -> int:
    """Bytes of addresses from a block on that nothing is allocated at; counting stops at `enough`."""
    size = 0
    while block is not None and not block.allocated and size < enough:
        size += block.size
        block = block.next
    return size


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
