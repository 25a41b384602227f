from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from can_train.memory.simulated.allocator import (
    EXPANDABLE,
    AllocatorSettings,
    Block,
    CachingAllocator,
    block_bytes,
    segment_bytes,
)

KIB = 2**10
MIB = 2**20
GIB = 2**30
SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB
EITHER = pytest.mark.parametrize("expandable", [False, True])


def plain(capacity: int = 8 * GIB) -> CachingAllocator:
    return CachingAllocator(capacity)


def expandable(capacity: int = 8 * GIB) -> CachingAllocator:
    return CachingAllocator(capacity, settings=EXPANDABLE)


def taken(allocator: CachingAllocator, size: int) -> Block:
    block = allocator.malloc(size)
    assert block is not None
    return block


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_a_block_is_a_multiple_of_512_bytes(size: int, block: int) -> None:
    assert block_bytes(size) == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_device_is_asked_for_segments_of_three_kinds(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment
    allocator = plain()
    taken(allocator, size)
    assert allocator.reserved_bytes == segment


def test_small_and_large_allocations_have_pools_of_their_own() -> None:
    allocator = plain()
    taken(allocator, 5 * MIB)
    taken(allocator, 512)
    assert allocator.reserved_bytes == 22 * MIB
    taken(allocator, 15 * MIB)
    taken(allocator, MIB)
    assert allocator.reserved_bytes == 22 * MIB
    taken(allocator, MIB + 1)
    assert allocator.reserved_bytes == 42 * MIB


def test_a_small_block_is_split_to_the_last_512_bytes() -> None:
    allocator = plain()
    taken(allocator, 2 * MIB - 512 - MIB)
    taken(allocator, MIB)
    taken(allocator, 512)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 2 * MIB)


def test_a_large_block_keeps_a_rest_of_a_mebibyte() -> None:
    allocator = plain()
    block = taken(allocator, 11 * MIB)
    assert (block.size, allocator.allocated_bytes) == (12 * MIB, 12 * MIB)
    allocator.free(block)
    assert taken(allocator, 11 * MIB - 512).size == 11 * MIB - 512
    assert allocator.reserved_bytes == 12 * MIB


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() -> None:
    allocator = plain()
    blocks = [taken(allocator, size * MIB) for size in (40, 30, 30, 50)]
    for block in blocks:
        allocator.free(block)
    assert taken(allocator, 29 * MIB).address == blocks[1].address
    assert taken(allocator, 29 * MIB).address == blocks[2].address
    assert taken(allocator, 45 * MIB).address == blocks[3].address


@EITHER
def test_neighbours_that_are_free_become_one_block(*, expandable: bool) -> None:
    allocator = CachingAllocator(20 * MIB, settings=AllocatorSettings(expandable_segments=expandable))
    blocks = [taken(allocator, 5 * MIB) for _ in range(4)]
    for index in (0, 2, 1, 3):
        allocator.free(blocks[index])
    assert taken(allocator, 20 * MIB).address == blocks[0].address
    assert allocator.num_alloc_retries == 0


def test_the_cache_is_released_before_memory_runs_out_and_that_is_counted() -> None:
    allocator = plain(60 * MIB)
    allocator.free(taken(allocator, 30 * MIB))
    allocator.free(taken(allocator, 29 * MIB))
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (30 * MIB, 0)
    taken(allocator, 40 * MIB)
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (40 * MIB, 1)
    assert allocator.malloc(21 * MIB) is None
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (40 * MIB, 2)


def test_a_segment_that_is_in_use_in_part_cannot_be_released() -> None:
    allocator = plain(40 * MIB)
    small = taken(allocator, 2 * MIB)
    large = taken(allocator, 17 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(large)
    assert allocator.malloc(21 * MIB) is None
    allocator.free(small)
    assert taken(allocator, 40 * MIB).size == 40 * MIB


def test_fixed_segments_leave_slivers_and_expandable_ones_do_not() -> None:
    def retries_after_growth(allocator: CachingAllocator) -> int:
        for block in [taken(allocator, 20 * MIB) for _ in range(3)]:
            allocator.free(block)
        taken(allocator, 30 * MIB)
        taken(allocator, 30 * MIB)
        return allocator.num_alloc_retries

    assert retries_after_growth(plain(60 * MIB)) == 1
    assert retries_after_growth(expandable(60 * MIB)) == 0


def test_an_expandable_segment_grows_by_the_pages_of_its_pool() -> None:
    allocator = expandable()
    taken(allocator, 512)
    assert allocator.reserved_bytes == SMALL_PAGE
    taken(allocator, 2 * MIB)
    assert allocator.reserved_bytes == SMALL_PAGE + LARGE_PAGE
    taken(allocator, 30 * MIB)
    assert allocator.reserved_bytes == SMALL_PAGE + 2 * LARGE_PAGE
    taken(allocator, 8 * MIB + 512)
    assert allocator.reserved_bytes == SMALL_PAGE + 3 * LARGE_PAGE
    assert allocator.allocated_bytes == 512 + 40 * MIB + 512


def test_an_allocation_begins_in_the_free_end_of_an_expandable_segment() -> None:
    allocator = expandable(60 * MIB)
    taken(allocator, 5 * MIB)
    assert taken(allocator, 55 * MIB).address % LARGE_PAGE == 5 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_room_to_grow_is_used_after_every_hole_that_fits() -> None:
    allocator = expandable()
    hole = taken(allocator, 15 * MIB)
    taken(allocator, 15 * MIB)
    allocator.free(hole)
    assert allocator.reserved_bytes == 40 * MIB
    # Ten free mebibytes at the end would fit more tightly than the hole of fifteen.
    assert taken(allocator, 9 * MIB).address == hole.address
    assert allocator.reserved_bytes == 40 * MIB


def test_only_pages_that_are_free_as_a_whole_are_unmapped() -> None:
    allocator = expandable()
    first, middle, last = (taken(allocator, size * MIB) for size in (5, 50, 5))
    allocator.free(middle)
    allocator.release_cached()
    assert allocator.reserved_bytes == 2 * LARGE_PAGE
    allocator.free(first)
    allocator.free(last)
    allocator.release_cached()
    assert allocator.reserved_bytes == 0


def test_a_hole_of_unmapped_pages_is_mapped_again_before_the_end_grows() -> None:
    allocator = expandable()
    blocks = [taken(allocator, LARGE_PAGE) for _ in range(4)]
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    allocator.release_cached()
    assert allocator.reserved_bytes == 2 * LARGE_PAGE
    assert taken(allocator, 25 * MIB).address == blocks[1].address
    assert allocator.reserved_bytes == 4 * LARGE_PAGE
    assert taken(allocator, 41 * MIB).address == blocks[3].address + LARGE_PAGE


def test_pages_move_to_the_end_when_no_hole_is_large_enough() -> None:
    allocator = expandable(16 * LARGE_PAGE)
    blocks = [taken(allocator, LARGE_PAGE) for _ in range(16)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    assert taken(allocator, 2 * LARGE_PAGE).address == blocks[15].address + LARGE_PAGE
    assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (1, 16 * LARGE_PAGE)


def test_a_second_range_of_addresses_begins_where_the_first_has_run_out() -> None:
    allocator = expandable(4 * LARGE_PAGE)
    blocks = [taken(allocator, LARGE_PAGE) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    # The first has an eighth more than the memory: five pages, of which the last is too little.
    second = taken(allocator, 2 * LARGE_PAGE)
    assert second.address == 5 * LARGE_PAGE
    for block in (blocks[1], blocks[3], second):
        allocator.free(block)
    allocator.release_cached()
    assert allocator.reserved_bytes == 0


@EITHER
def test_what_others_hold_cannot_be_reserved(*, expandable: bool) -> None:
    allocator = CachingAllocator(100 * MIB, settings=AllocatorSettings(expandable_segments=expandable))
    held = taken(allocator, 20 * MIB)
    allocator.foreign_bytes = 50 * MIB
    assert (allocator.free_bytes, allocator.available_bytes) == (30 * MIB, 50 * MIB)
    assert allocator.malloc(40 * MIB) is None
    allocator.foreign_bytes = 0
    assert allocator.malloc(40 * MIB) is not None
    allocator.foreign_bytes = 90 * MIB
    assert (allocator.free_bytes, allocator.available_bytes) == (0, allocator.reserved_bytes)
    allocator.free(held)
    assert taken(allocator, 20 * MIB).address == held.address


@EITHER
def test_peaks_stay_until_they_are_reset(*, expandable: bool) -> None:
    allocator = CachingAllocator(GIB, settings=AllocatorSettings(expandable_segments=expandable))
    allocator.free(taken(allocator, 40 * MIB))
    allocator.release_cached()
    kept = taken(allocator, 20 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (40 * MIB, 40 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (kept.size, 20 * MIB)


@EITHER
def test_more_than_the_capacity_never_fits_and_changes_nothing(*, expandable: bool) -> None:
    allocator = CachingAllocator(30 * MIB, settings=AllocatorSettings(expandable_segments=expandable))
    for _ in range(3):
        assert allocator.malloc(10 * GIB) is None
    assert allocator.malloc(20 * MIB) is not None
    assert allocator.malloc(20 * MIB) is None


SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))


class Workload(RuleBasedStateMachine):
    """Any allocations and frees on a device that is often full."""

    @initialize(expandable=st.booleans(), mebibytes=st.integers(1, 300))
    def begin(self, *, expandable: bool, mebibytes: int) -> None:
        self.allocator = CachingAllocator(mebibytes * MIB, settings=AllocatorSettings(expandable_segments=expandable))
        self.live: list[tuple[int, Block]] = []

    @rule(size=SIZES)
    def allocate(self, size: int) -> None:
        block = self.allocator.malloc(size)
        if block is not None:
            self.live.append((size, block))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 10**6))
    def release_one(self, index: int) -> None:
        _, block = self.live.pop(index % len(self.live))
        self.allocator.free(block)

    @rule()
    def release_cached(self) -> None:
        self.allocator.release_cached()

    @rule(share=st.floats(0, 1))
    def others_come_and_go(self, share: float) -> None:
        self.allocator.foreign_bytes = int(share * self.allocator.capacity_bytes)

    @invariant()
    def books_agree(self) -> None:
        allocator = self.allocator
        assert allocator.allocated_bytes == sum(block.size for _, block in self.live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.capacity_bytes
        assert allocator.peak_reserved_bytes >= allocator.peak_allocated_bytes >= allocator.allocated_bytes
        assert allocator.reserved_bytes == mapped_bytes(allocator, [block for _, block in self.live])

    @invariant()
    def a_block_is_as_large_as_its_allocation(self) -> None:
        for size, block in self.live:
            slack = 0 if self.allocator.expandable or size <= MIB else MIB
            assert block_bytes(size) <= block.size <= block_bytes(size) + slack

    @invariant()
    def blocks_do_not_overlap(self) -> None:
        ranges = sorted((block.address, block.size) for _, block in self.live)
        for (start, size), (following, _) in pairwise(ranges):
            assert start + size <= following

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        for _, block in self.live:
            allocator.free(block)
        allocator.release_cached()
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
        allocator.foreign_bytes = 0
        unit = LARGE_PAGE if allocator.expandable else SMALL_PAGE
        largest = allocator.capacity_bytes // unit * unit
        if largest >= LARGE_PAGE:
            assert allocator.malloc(largest) is not None
        assert allocator.malloc(allocator.capacity_bytes + 1) is None


def mapped_bytes(allocator: CachingAllocator, live: list[Block]) -> int:
    """Sums the mapped blocks of every segment in which something is live or free, each chain checked on the way."""
    known = {id(block): block for block in live}
    for pool in allocator._pools:
        known |= {id(block): block for *_, block in [*pool.free, *pool.unmapped]}
    for block in known.values():
        following = block.next
        if following is None:
            continue
        assert id(following) in known
        assert following.previous is block
        assert following.address == block.address + block.size
        same = following.mapped == block.mapped
        assert not (same and not following.allocated and not block.allocated), "two free neighbours were not merged"
    return sum(block.size for block in known.values() if block.mapped)


Workload.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWorkload = Workload.TestCase


@given(sizes=st.lists(SIZES, max_size=30), expandable=st.booleans())
@settings(deadline=None)
def test_what_ran_once_runs_in_the_memory_that_it_had_reserved(*, sizes: list[int], expandable: bool) -> None:
    def replay(capacity: int) -> CachingAllocator | None:
        allocator = CachingAllocator(capacity, settings=AllocatorSettings(expandable_segments=expandable))
        live = []
        for index, size in enumerate(sizes):
            block = allocator.malloc(size)
            if block is None:
                return None
            live.append(block)
            if index % 3 == 2:
                allocator.free(live.pop(index // 3))
        return allocator

    roomy = replay(4 * GIB)
    assert roomy is not None
    tight = replay(roomy.peak_reserved_bytes)
    assert tight is not None
    assert tight.num_alloc_retries == 0
