"""A model of PyTorch's caching allocator for one CUDA device: blocks, pools and segments.

Source: c10/cuda/CUDACachingAllocator.cpp; the constants are those of c10/core/AllocatorConfig.h.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

# Every size is rounded up to this (`kMinBlockSize`).
MIN_BLOCK_BYTES: Final = 512

# Largest allocation of the small pool (`kSmallSize`).
SMALL_BYTES: Final = 2**20

# A segment of the small pool, or a page of its expandable segment (`kSmallBuffer`).
SMALL_PAGE_BYTES: Final = 2 * 2**20

# A segment for middling allocations, or a page of the large pool's expandable segment (`kLargeBuffer`).
LARGE_PAGE_BYTES: Final = 20 * 2**20

# From here on an allocation gets a segment of its own size (`kMinLargeAlloc`).
_MIN_OWN_SEGMENT_BYTES: Final = 10 * 2**20

# Such a segment's size is rounded up to this (`kRoundLarge`).
_SEGMENT_ROUNDING_BYTES: Final = 2 * 2**20


class Block:
    """A piece of a segment: allocated, free, or (in an expandable segment) addresses without memory behind them.

    Args:
        pool: Pool of its segment.
        address: Where it starts.
        size: Bytes.
        mapped: Whether there is memory behind its addresses.
    """

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: "Pool", address: int, size: int, *, mapped: bool) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.allocated = False
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        """Whether its segment consists of it alone."""
        return self.previous is None and self.next is None

    @property
    def size_with_room(self) -> int:
        """Bytes that it could have once the addresses behind it are mapped."""
        following = self.next
        return self.size + (following.size if following is not None and not following.mapped else 0)

    def cut(self, size: int) -> "Block":
        """Shortens it to `size` bytes and returns the rest as a block of its own, in no pool yet."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        self.size = size
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        return rest

    def merge_adjacent(self) -> None:
        """Merges the unallocated blocks beside it that are mapped alike into it, and takes them out of the pool.

        The block itself must be in no pool.
        """
        for other in (self.previous, self.next):
            if other is None or other.allocated or other.mapped != self.mapped:
                continue
            self.pool.remove(other)
            self.size += other.size
            if other is self.previous:
                self.address, self.previous = other.address, other.previous
                if self.previous is not None:
                    self.previous.next = self
            else:
                self.next = other.next
                if self.next is not None:
                    self.next.previous = self


class Pool:
    """The unallocated blocks of one class of sizes.

    Args:
        page_bytes: Unit in which its expandable segment grows.

    Attributes:
        free: (size, address) of the mapped blocks, in order of best fit.
        unmapped: Addresses of the other blocks: the lowest is mapped first.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Adds a block as free or as unmapped."""
        self._blocks[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def remove(self, block: Block) -> None:
        """Removes a block, whose size and address must be those that it was added with."""
        del self._blocks[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]

    def free_blocks(self) -> list[Block]:
        """Lists the free blocks, the smallest first."""
        return [self._blocks[address] for _, address in self.free]

    def unmapped_blocks(self) -> list[Block]:
        """Lists the unmapped blocks, the lowest address first."""
        return [self._blocks[address] for address in self.unmapped]

    def best_fit(self, size: int) -> Block | None:
        """Returns the smallest free block of at least `size` bytes, and of equal ones the lowest.

        As in PyTorch, a block counts together with the unmapped addresses behind it: room to grow is used last.
        """
        index = bisect_left(self.free, (size, 0))
        if index == len(self.free):
            return None
        best = self._blocks[self.free[index][1]]
        while (index := index + 1) < len(self.free):
            larger = self._blocks[self.free[index][1]]
            if larger.size_with_room >= best.size_with_room:
                break
            best = larger
        return best


def no_contention() -> int:
    """Returns the bytes that other processes hold of a device where there are none."""
    return 0


def block_bytes(size: int) -> int:
    """Returns the bytes of a segment that an allocation of `size` bytes takes."""
    return max(MIN_BLOCK_BYTES, _round_up(size, MIN_BLOCK_BYTES))


def segment_bytes(size: int) -> int:
    """Returns the bytes that the allocator asks the device for when no free block holds `size` bytes."""
    rounded = block_bytes(size)
    if rounded <= SMALL_BYTES:
        return SMALL_PAGE_BYTES
    return LARGE_PAGE_BYTES if rounded < _MIN_OWN_SEGMENT_BYTES else _round_up(rounded, _SEGMENT_ROUNDING_BYTES)


class CachingAllocator:
    """Replays allocations as they happen; all figures are bytes.

    Args:
        capacity_bytes: Memory of the device that can be reserved.
        expandable: Whether segments expand (`expandable_segments:True`).
        contention: Returns the bytes that other processes hold of the capacity.

    Attributes:
        allocated_bytes: Sum of the blocks in use.
        reserved_bytes: Sum of the segments, or of their mapped pages.
        num_alloc_retries: How often the cache was released because an allocation did not fit.
    """

    def __init__(self, capacity_bytes: int, *, expandable: bool, contention: Callable[[], int] = no_contention) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable = expandable
        self._contention = contention
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
        return self._contention()

    @foreign_bytes.setter
    def foreign_bytes(self, held_bytes: int) -> None:
        self._contention = lambda: held_bytes

    @property
    def free_bytes(self) -> int:
        """What the device could still give to any process."""
        return max(0, self.capacity_bytes - self.foreign_bytes - self.reserved_bytes)

    @property
    def available_bytes(self) -> int:
        """What this process could have in use: all that it has reserved, and what is free."""
        return self.reserved_bytes + self.free_bytes

    def malloc(self, size: int) -> Block | None:
        """Allocates `size` bytes, at least 1; returns None where they do not fit even after the cache was released."""
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
        # The rest becomes a block of its own unless it is so small that nothing would fit (`should_split`).
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES if is_small or self.expandable else rest > SMALL_BYTES:
            pool.add(block.cut(size))
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Returns an allocated block to the cache."""
        self.allocated_bytes -= block.size
        block.allocated = False
        block.merge_adjacent()
        block.pool.add(block)

    def release_cached(self) -> None:
        """Returns every segment, or mapped page, that is free as a whole to the device."""
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
        if self.expandable:
            return self._expand(pool, size)
        size = segment_bytes(size)
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
        """Maps pages at the lowest addresses that have room: into a hole, or behind the last block in use."""
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
        """Finds the first free or unmapped block from which on `size` bytes of addresses are unallocated."""
        for unmapped in pool.unmapped_blocks():
            before = unmapped.previous
            start = before if before is not None and not before.allocated else unmapped
            if _unallocated_from(start, size) >= size:
                return start
        # PyTorch reserves an eighth more addresses than memory, so that pages can move to the end past holes.
        addresses = _round_up(self.capacity_bytes + self.capacity_bytes // 8, pool.page_bytes)
        block = self._new_block(pool, addresses, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Maps the pages that hold the first `size` bytes of an unmapped block; returns False where they do not fit."""
        mapped_bytes = _round_up(size, block.pool.page_bytes)
        if mapped_bytes > self.free_bytes:
            return False
        pool = block.pool
        pool.remove(block)
        if mapped_bytes < block.size:
            pool.add(block.cut(mapped_bytes))
        block.mapped = True
        block.merge_adjacent()
        pool.add(block)
        self._reserve(mapped_bytes)
        return True

    def _unmap(self, block: Block) -> None:
        """Returns the memory behind the whole pages of a free block to the device."""
        # A page is shared with an allocated block beside this one where the block does not begin or end with it.
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
        block.merge_adjacent()
        if not block.is_whole_segment:
            pool.add(block)


def _unallocated_from(block: Block | None, enough: int) -> int:
    """Counts the bytes of addresses from a block on at which nothing is allocated; stops at `enough`."""
    size = 0
    while block is not None and not block.allocated and size < enough:
        size += block.size
        block = block.next
    return size


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
