"""An online model of CUDA's caching allocator, one stream: what is allocated, what is reserved for it, and when that
does not fit. It knows addresses and sizes only; which tensors they belong to is the caller's.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11, names and constants alike.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MIN_BLOCK: Final = 512
"""Bytes that sizes are rounded up to (kMinBlockSize)."""

SMALL: Final = 2**20
"""Largest allocation of the small pool (kSmallSize)."""

SMALL_SEGMENT: Final = 2 * 2**20
"""Segment, or page of an expandable segment, of the small pool (kSmallBuffer)."""

LARGE_SEGMENT: Final = 20 * 2**20
"""Segment of allocations below `LARGE`, or page of an expandable segment (kLargeBuffer)."""

LARGE: Final = 10 * 2**20
"""Smallest allocation with a segment of its own (kMinLargeAlloc)."""

LARGE_ROUNDING: Final = 2 * 2**20
"""What a segment of its own is rounded up to (kRoundLarge)."""

ENDLESS: Final = 2**60
"""Address space of an expandable segment."""


class AllocationError(Exception):
    """An allocation failed, after the cache had been released."""


@dataclass(eq=False)
class _Block:
    """A range of a segment: in use, free, or (expandable segments) not mapped to memory."""

    address: int
    size: int
    pool: "_Pool"
    state: str = "free"
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def end(self) -> int:
        return self.address + self.size


class _Pool:
    """Blocks of one size class, those that are free by size, those that are not mapped by address."""

    def __init__(self, *, small: bool) -> None:
        self.is_small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._free: list[tuple[int, int]] = []
        self._gaps: list[int] = []
        self._blocks: dict[int, _Block] = {}

    def add(self, block: _Block) -> None:
        self._blocks[block.address] = block
        if block.state == "free":
            insort(self._free, (block.size, block.address))
        elif block.state == "gap":
            insort(self._gaps, block.address)

    def remove(self, block: _Block) -> None:
        del self._blocks[block.address]
        if block.state == "free":
            del self._free[bisect_left(self._free, (block.size, block.address))]
        elif block.state == "gap":
            del self._gaps[bisect_left(self._gaps, block.address)]

    def best_fit(self, size: int) -> _Block | None:
        position = bisect_left(self._free, (size, 0))
        return self._blocks[self._free[position][1]] if position < len(self._free) else None

    def gaps(self) -> list[_Block]:
        return [self._blocks[address] for address in self._gaps]

    def free_blocks(self) -> list[_Block]:
        return [self._blocks[address] for _, address in self._free]

    def blocks(self) -> Iterator[_Block]:
        return iter(self._blocks.values())


class CachingAllocator:
    """Serves allocations out of a capacity as PyTorch does.

    Args:
        capacity_bytes: What may be reserved.
        expandable: Whether segments grow page by page (`expandable_segments:True`) rather than being of fixed size.

    Attributes:
        foreign_bytes: What others hold of the capacity.
        allocated_bytes, reserved_bytes: In use, and held for use.
        peak_allocated_bytes, peak_reserved_bytes: Largest of both since the last reset.
        retries: Allocations that were served only after the cache had been released (num_alloc_retries).
    """

    def __init__(self, capacity_bytes: int, *, expandable: bool) -> None:
        self.capacity_bytes = capacity_bytes
        self.foreign_bytes = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self._expandable = expandable
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._used: dict[int, _Block] = {}
        self._top = ENDLESS
        if expandable:
            for pool in (self._small, self._large):
                pool.add(_Block(self._new_range(ENDLESS), ENDLESS, pool, "gap"))

    @property
    def free_bytes(self) -> int:
        """What could still be reserved, as `mem_get_info` says."""
        return max(self.capacity_bytes - self.foreign_bytes - self.reserved_bytes, 0)

    def reset_peaks(self) -> None:
        """Starts both peaks anew from what is in use."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def allocate(self, size: int) -> int:
        """Returns the address of `size` bytes, at least 1.

        Raises:
            AllocationError: They cannot be had, not even with the cache released.
        """
        size = -(-size // MIN_BLOCK) * MIN_BLOCK
        pool = self._small if size <= SMALL else self._large
        block = pool.best_fit(size) or self._reserve(pool, size)
        if block is None:
            self.release_cache()
            # What is released goes back to the device; nothing cached is left to fit into.
            block = pool.best_fit(size) or self._reserve(pool, size)
            if block is None:
                raise AllocationError(size)
            self.retries += 1
        return self._take(block, size)

    def free(self, address: int) -> None:
        """Gives an allocation back to the cache."""
        block = self._used.pop(address)
        self.allocated_bytes -= block.size
        block.pool.remove(block)
        block.state = "free"
        block.pool.add(self._merged(block))

    def release_cache(self) -> None:
        """Gives memory that no allocation touches back to the device: segments, or pages of expandable ones."""
        for pool in (self._small, self._large):
            for block in pool.free_blocks():
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def check(self) -> None:
        """Asserts that books and blocks agree; for tests."""
        blocks = [block for pool in (self._small, self._large) for block in pool.blocks()]
        used = [block for block in blocks if block.state == "used"]
        assert sum(block.size for block in used) == self.allocated_bytes
        assert sum(block.size for block in blocks if block.state != "gap") == self.reserved_bytes
        assert {block.address for block in used} == set(self._used)
        for block in blocks:
            assert block.after is None or (block.after.address == block.end and block.after.before is block)
            assert block.after is None or not block.state == block.after.state == "free"

    def _take(self, block: _Block, size: int) -> int:
        pool = block.pool
        pool.remove(block)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.is_small or self._expandable else rest > SMALL:
            self._split(block, size)
        block.state = "used"
        pool.add(block)
        self._used[block.address] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.address

    def _split(self, block: _Block, size: int) -> None:
        """Cuts a block that is in no list; the rest goes into its pool in the same state."""
        rest = _Block(block.address + size, block.size - size, block.pool, block.state, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        block.pool.add(rest)

    def _merged(self, block: _Block) -> _Block:
        """Joins a block that is in no list with its neighbours in the same state."""
        if block.after is not None and block.after.state == block.state:
            block.pool.remove(block.after)
            self._join(block, block.after)
        if block.before is not None and block.before.state == block.state:
            first = block.before
            block.pool.remove(first)
            self._join(first, block)
            return first
        return block

    @staticmethod
    def _join(first: _Block, second: _Block) -> None:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first

    def _reserve(self, pool: _Pool, size: int) -> _Block | None:
        """Gets more memory from the device; a free block of at least `size`, or None."""
        if self._expandable:
            return self._map(pool, size)
        segment = _segment_size(size)
        if segment > self.free_bytes:
            return None
        block = _Block(self._new_range(segment), segment, pool)
        pool.add(block)
        self._grow(segment)
        return block

    def _map(self, pool: _Pool, size: int) -> _Block | None:
        """Maps pages at the lowest address where what is unmapped and the free blocks around it are enough."""
        for gap in pool.gaps():
            start = gap.before if gap.before is not None and gap.before.state == "free" else gap
            if _run_size(start) >= size:
                return self._map_run(start, size)
        return None

    def _map_run(self, start: _Block, size: int) -> _Block | None:
        block = start if start.state == "free" else None
        have = block.size if block is not None else 0
        gap = start if block is None else start.after
        while have < size:
            assert gap is not None, "the run was measured"
            if gap.state == "gap":
                wanted = min(-(-(size - have) // gap.pool.page) * gap.pool.page, gap.size)
                if wanted > self.free_bytes:
                    return None
                gap = self._mapped(gap, wanted)
            # Mapping joins the neighbours, so that the run is one block by now.
            block = gap
            have, gap = block.size, block.after
        return block

    def _mapped(self, gap: _Block, size: int) -> _Block:
        gap.pool.remove(gap)
        if gap.size > size:
            self._split(gap, size)
        gap.state = "free"
        merged = self._merged(gap)
        merged.pool.add(merged)
        self._grow(size)
        return merged

    def _unmap(self, block: _Block) -> None:
        pool = block.pool
        first = -(-block.address // pool.page) * pool.page
        last = block.end // pool.page * pool.page
        if first >= last:
            return
        pool.remove(block)
        if last < block.end:
            self._split(block, last - block.address)
        if first > block.address:
            whole, block = block, self._cut_front(block, first - block.address)
            pool.add(whole)
        self.reserved_bytes -= block.size
        block.state = "gap"
        pool.add(self._merged(block))

    def _cut_front(self, block: _Block, size: int) -> _Block:
        """Cuts a block that is in no list; returns the rest, in no list either."""
        self._split(block, size)
        rest = block.after
        assert rest is not None, "it was just made"
        block.pool.remove(rest)
        return rest

    def _grow(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_range(self, size: int) -> int:
        """Returns an address from which `size` bytes are nobody's, a multiple of every page size."""
        address = self._top
        step = 2 * LARGE_SEGMENT
        self._top += (-(-size // step) + 1) * step
        return address // LARGE_SEGMENT * LARGE_SEGMENT


def _segment_size(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else -(-size // LARGE_ROUNDING) * LARGE_ROUNDING


def _run_size(block: _Block | None) -> int:
    size = 0
    while block is not None and block.state != "used":
        size += block.size
        block = block.after
    return size
