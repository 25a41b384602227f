"""The blocks that CUDA's caching allocator cuts device memory into, and the pools that keep the free ones in order.
Which block serves a request, and where new memory comes from, is decided by the allocator.
"""

from bisect import bisect_left, insort
from typing import Final

MIN_BLOCK_BYTES: Final = 512
"""Every size is rounded up to this (`kMinBlockSize` in c10/core/AllocatorConfig.h, as the constants below)."""

SMALL_BYTES: Final = 2**20
"""Largest allocation of the small pool (`kSmallSize`)."""

SMALL_PAGE_BYTES: Final = 2 * 2**20
"""A segment of the small pool, or a page of its expandable segment (`kSmallBuffer`)."""

LARGE_PAGE_BYTES: Final = 20 * 2**20
"""A segment for middling allocations, or a page of the large pool's expandable segment (`kLargeBuffer`)."""


class Block:
    """A piece of a segment: allocated, free, or (in an expandable segment) addresses that nothing is mapped to.

    Args:
        pool: The pool that it returns to.
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
        """Whether nothing of its segment lies outside it."""
        return self.previous is None and self.next is None

    def cut(self, size: int) -> "Block":
        """Shortens it to `size` bytes and returns the rest as a block of its own, in no pool yet."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        self.size = size
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        return rest

    def absorb_neighbours(self) -> None:
        """Merges it, in no pool itself, with the unallocated neighbours of its kind, which leave theirs."""
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
        page_bytes: What an expandable segment of it grows by.

    Attributes:
        free: (size, address) of the mapped ones: in order of best fit.
        unmapped: Addresses of the others: the lowest is mapped first.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Takes a block in, as free or as unmapped."""
        self._blocks[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def remove(self, block: Block) -> None:
        """Takes a block out; its size and address are those that it came in with."""
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
        """Returns the smallest free block of at least `size` bytes, of equal ones that of the lowest address.

        A block counts with the unmapped addresses behind it, if there are any: room to grow is used last.
        """
        index = bisect_left(self.free, (size, 0))
        if index == len(self.free):
            return None
        best = self._blocks[self.free[index][1]]
        while (index := index + 1) < len(self.free):
            larger = self._blocks[self.free[index][1]]
            if _room(larger) >= _room(best):
                break
            best = larger
        return best


def _room(block: Block) -> int:
    """Bytes that a free block could have once what follows it is mapped."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
