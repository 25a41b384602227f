"""A model of PyTorch's caching allocator for one CUDA device: blocks, pools and segments.

Source: c10/cuda/CUDACachingAllocator.cpp; the constants are from c10/core/AllocatorConfig.h.
"""

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

MIN_BLOCK_BYTES: Final = 512  # every size is rounded up to this (`kMinBlockSize`)
SMALL_BYTES: Final = 2**20  # largest allocation of the small pool (`kSmallSize`)
SMALL_PAGE_BYTES: Final = 2 * 2**20  # a segment of the small pool, or a page of its expandable segment (`kSmallBuffer`)
# A segment for middling allocations, or a page of the large pool's expandable segment, by default.
LARGE_PAGE_BYTES: Final = 20 * 2**20
# From here on an allocation gets a segment of its own size (`kMinLargeAlloc`).
_MIN_OWN_SEGMENT_BYTES: Final = 10 * 2**20
_SEGMENT_ROUNDING_BYTES: Final = 2 * 2**20  # such a segment's size is rounded up to this (`kRoundLarge`)
# Sizes have a number of divisions for each power of two from 1 MiB up (`kRoundUpPowerOfTwoIntervals`).
INTERVALS: Final = 16
_LEAST_ROUNDED: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The allocator's rules for sizes, segments and blocks; the defaults are PyTorch's."""

    expandable_segments: bool = False
    large_page_bytes: int = LARGE_PAGE_BYTES
    # Blocks of this size and more are never split: they serve allocations of this size and more, if these are smaller
    # by less than `max_rounding_bytes`.
    max_split_bytes: float = math.inf
    max_rounding_bytes: int = LARGE_PAGE_BYTES
    # By power of two, from 1 MiB up: in how many equal steps the sizes up to the next one are rounded up; 0 or 1: sizes
    # are rounded up to the smallest block only.
    divisions: tuple[int, ...] = (0,) * INTERVALS
    # Share of the memory fraction that is reserved before free segments are released, the longest free ones first; 0:
    # none are before memory runs out. Without a fraction below 1 it has no effect.
    collection_threshold: float = 0.0
    memory_fraction: float = 1.0  # share of the device that may be reserved
    ignored: tuple[str, ...] = ()  # other settings, as they are written; they may change the reserved bytes

    def divisions_of(self, size: int) -> int:
        """Returns the divisions of the power of two that a size in bytes lies above."""
        return self.divisions[min(max(size.bit_length() - _LEAST_ROUNDED.bit_length(), 0), INTERVALS - 1)]


PLAIN: Final = AllocatorSettings()  # PyTorch's defaults
EXPANDABLE: Final = AllocatorSettings(expandable_segments=True)


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment: allocated, free, or (in an expandable segment) addresses without memory behind them."""

    pool: "Pool"  # of its segment
    address: int  # where it starts
    size: int  # bytes
    mapped: bool  # whether there is memory behind its addresses
    allocated: bool = False
    cached_at: int = 0  # searches of its pool when it was added to it last
    previous: "Block | None" = None
    next: "Block | None" = None

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
        rest = Block(self.pool, self.address + size, self.size - size, self.mapped)
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
        for neighbour in (self.previous, self.next):
            if neighbour is None or neighbour.allocated or neighbour.mapped != self.mapped:
                continue
            self.pool.remove(neighbour)
            self.size += neighbour.size
            if neighbour is self.previous:
                self.address, self.previous = neighbour.address, neighbour.previous
                if self.previous is not None:
                    self.previous.next = self
            else:
                self.next = neighbour.next
                if self.next is not None:
                    self.next.previous = self


@dataclass(eq=False)
class Pool:
    """The unallocated blocks of one class of sizes."""

    page_bytes: int  # its expandable segment grows by this unit
    # Tuples sort without a call of Python for each comparison; no two blocks have an address in common.
    free: list[tuple[int, int, Block]] = field(default_factory=list)  # (size, address, block): the best fit first
    unmapped: list[tuple[int, Block]] = field(default_factory=list)  # (address, block): the lowest is mapped first
    searches: int = 0  # for a free block, so far: the age of a block is counted in searches

    def add(self, block: Block) -> None:
        """Adds a block as free or as unmapped."""
        block.cached_at = self.searches
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Removes a block, whose size and address must be those that it was added with."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def best_fit(self, size: int, settings: AllocatorSettings) -> Block | None:
        """Returns the smallest free block of at least `size` bytes, and of equal ones the lowest.

        As in PyTorch, a block counts together with the unmapped addresses behind it: room to grow is used last. One
        that may not be split is refused where too much of it would be left.
        """
        self.searches += 1
        best = None
        for index in range(bisect_left(self.free, (size, 0)), len(self.free)):
            block = self.free[index][2]
            if best is not None and block.size_with_room >= best.size_with_room:
                break
            best = block
        if best is None or best.size < settings.max_split_bytes:
            return best
        may_have_it = size >= settings.max_split_bytes and best.size < size + settings.max_rounding_bytes
        return best if may_have_it else None


def no_contention() -> int:
    """Returns the bytes that other processes hold of a device where there are none."""
    return 0


def block_bytes(size: int, settings: AllocatorSettings = PLAIN) -> int:
    """Returns the bytes of a segment that an allocation of `size` bytes takes."""
    divisions = settings.divisions_of(size)
    # No step is smaller than the smallest block.
    is_coarse = divisions > 1 and size > MIN_BLOCK_BYTES * divisions
    step = 2 ** (size.bit_length() - 1) // divisions if is_coarse else MIN_BLOCK_BYTES
    return max(MIN_BLOCK_BYTES, _round_up(size, step))


def segment_bytes(size: int, settings: AllocatorSettings = PLAIN) -> int:
    """Returns the bytes that the allocator asks the device for when no free block holds `size` bytes."""
    rounded = block_bytes(size, settings)
    if rounded <= SMALL_BYTES:
        return SMALL_PAGE_BYTES
    if rounded < _MIN_OWN_SEGMENT_BYTES:
        return settings.large_page_bytes
    return _round_up(rounded, _SEGMENT_ROUNDING_BYTES)


class CachingAllocator:
    """Replays allocations as they happen on a device with `capacity_bytes` to reserve; `contention` returns the bytes
    that other processes hold.
    """

    def __init__(
        self, capacity_bytes: int, settings: AllocatorSettings = PLAIN, contention: Callable[[], int] = no_contention
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._contention = contention
        self.allocated_bytes = 0  # sum of the blocks in use
        self.reserved_bytes = 0  # sum of the segments, or of their mapped pages
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0  # how often the cache was released because an allocation did not fit
        self._next_address = 0
        self.settings = settings
        self.expandable = settings.expandable_segments
        self._pools = (Pool(SMALL_PAGE_BYTES), Pool(settings.large_page_bytes))
        # Every segment begins at a page, whichever pool it is of.
        self._alignment = math.lcm(SMALL_PAGE_BYTES, settings.large_page_bytes)
        self.allowed_bytes = int(settings.memory_fraction * self.capacity_bytes)  # the most that may be reserved

    @property
    def foreign_bytes(self) -> int:
        """Bytes of the capacity that other processes hold; may be set at any time."""
        return self._contention()

    @foreign_bytes.setter
    def foreign_bytes(self, held_bytes: int) -> None:
        self._contention = lambda: held_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the device could still give to any process."""
        return max(0, self.capacity_bytes - self.foreign_bytes - self.reserved_bytes)

    @property
    def available_bytes(self) -> int:
        """Bytes that this process could have in use: its reserved bytes and free bytes, at most its fraction."""
        return min(self.reserved_bytes + self.free_bytes, max(self.allowed_bytes, self.reserved_bytes))

    def malloc(self, size: int) -> Block | None:
        """Allocates `size` bytes, at least 1; returns None where they do not fit even after the cache was released."""
        size = block_bytes(size, self.settings)
        pool = self._pools[0 if size <= SMALL_BYTES else 1]
        block = pool.best_fit(size, self.settings)
        if block is None:
            self._collect_garbage()
            block = self._grow(pool, size)
        if block is None and self._release_unsplittable(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.release_cached()
            self.num_alloc_retries += 1
            block = self._grow(pool, size)
        if block is None:
            return None
        pool.remove(block)
        # The rest of a block becomes one of its own (`should_split`), but for so little that nothing would fit in it.
        rest = block.size - size
        if size <= SMALL_BYTES or self.expandable:
            leaves_a_block = rest >= MIN_BLOCK_BYTES
        else:
            leaves_a_block = size < self.settings.max_split_bytes and rest > SMALL_BYTES
        if leaves_a_block:
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
            for *_, block in pool.free.copy():
                if self.expandable:
                    self._unmap(block)
                elif block.is_whole_segment:
                    self._release(block)

    def _release(self, segment: Block) -> None:
        segment.pool.remove(segment)
        self.reserved_bytes -= segment.size

    def _collect_garbage(self) -> None:
        """Releases free segments while too much is reserved, segments of more than average age first
        (`garbage_collect_cached_blocks`).
        """
        settings, pool = self.settings, self._pools[1]
        excess = self.reserved_bytes - int(settings.collection_threshold * self.allowed_bytes)
        if not settings.collection_threshold or settings.memory_fraction == 1:
            return
        free = [block for *_, block in pool.free if block.is_whole_segment]
        while free and excess > 0:
            mean = sum(pool.searches - block.cached_at for block in free) / len(free)
            # All of them, even where one would be enough: else the next allocation would search again.
            for block in [block for block in free if pool.searches - block.cached_at >= mean]:
                self._release(block)
                free.remove(block)
                excess -= block.size

    def _release_unsplittable(self, pool: Pool, size: int) -> bool:
        """Releases the smallest block that is never split and would be large enough, or else the largest ones; returns
        whether that is enough (`release_available_cached_blocks`).
        """
        least = self.settings.max_split_bytes
        if least == math.inf or self.expandable:
            return False
        # Of those that are smaller, `best_fit` has found none that is large enough.
        if (index := bisect_left(pool.free, (size, 0))) < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < size and pool.free and pool.free[-1][2].size >= least:
            released += pool.free[-1][2].size
            self._release(pool.free[-1][2])
        return released >= size

    def reset_peaks(self) -> None:
        """Forgets both peaks."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Returns a free block of at least `size` bytes with new memory in it; None where the device has no more."""
        segment = segment_bytes(size, self.settings)
        if self.reserved_bytes + segment > self.allowed_bytes and self.settings.memory_fraction < 1:
            return None
        if self.expandable:
            return self._expand(pool, size)
        if segment > self.free_bytes:
            return None
        self._reserve(segment)
        return self._new_block(pool, segment, mapped=True)

    def _new_block(self, pool: Pool, size: int, *, mapped: bool) -> Block:
        block = Block(pool, self._next_address, size, mapped)
        self._next_address += _round_up(size, self._alignment)
        pool.add(block)
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
        """Finds the first free or unmapped block that begins `size` bytes of unallocated addresses."""
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            start = before if before is not None and not before.allocated else unmapped
            unallocated, following = start.size, start.next
            while unallocated < size and following is not None and not following.allocated:
                unallocated, following = unallocated + following.size, following.next
            if unallocated >= size:
                return start
        # PyTorch reserves an eighth more addresses than memory, so that pages can move to the end past holes.
        addresses = _round_up(self.capacity_bytes + self.capacity_bytes // 8, pool.page_bytes)
        return self._new_block(pool, addresses, mapped=False)

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


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def reserved_for(sizes: Iterable[int], settings: AllocatorSettings = PLAIN) -> int:
    """Returns the bytes that the allocator reserves on an empty device for tensors of some sizes.

    >>> reserved_for([1000, 3 * 2**20]) == SMALL_PAGE_BYTES + 20 * 2**20
    True
    """
    allocator = CachingAllocator(sys.maxsize, settings)
    for size in sizes:
        if size:
            allocator.malloc(size)
    return allocator.reserved_bytes
