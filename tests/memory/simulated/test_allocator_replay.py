"""What the allocator does under each setting, by the rules of c10/cuda/CUDACachingAllocator.cpp, named at each test."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.memory.simulated.allocator import (
    PLAIN,
    AllocatorSettings,
    Block,
    CachingAllocator,
    block_bytes,
    segment_bytes,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30


def made(capacity_mib: int, **settings: Any) -> CachingAllocator:
    return CachingAllocator(capacity_mib * MIB, settings=AllocatorSettings(**settings))


def taken(allocator: CachingAllocator, mebibytes: float) -> Block:
    block = allocator.malloc(int(mebibytes * MIB))
    assert block is not None
    return block


def cached(allocator: CachingAllocator, *mebibytes: float) -> list[Block]:
    """Allocates blocks side by side, then frees them."""
    blocks = [taken(allocator, size) for size in mebibytes]
    for block in blocks:
        allocator.free(block)
    return blocks


# roundup_power2_divisions: round_size and roundup_power2_next_division


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200 * KIB, 4, 1280 * KIB),  # the example in the source: 1024, 1280, 1536, 1792
        (1280 * KIB, 4, 1280 * KIB),
        (1793 * KIB, 4, 2048 * KIB),
        (1200 * KIB, 2, 1536 * KIB),
        (1200 * KIB, 1, 1200 * KIB),
        (1200 * KIB, 0, 1200 * KIB),
        (2048, 4, 2048),  # `size > kMinBlockSize * divisions`, else blocks of 512 bytes
        (2049, 4, 2560),
        (4097, 4, 5120),
        (1, 4, 512),
        (33 * MIB, 16, 34 * MIB),
    ],
)
def test_sizes_are_rounded_to_the_next_division_of_their_power_of_two(size: int, divisions: int, rounded: int) -> None:
    assert block_bytes(size, AllocatorSettings(divisions=(divisions,) * 16)) == rounded


def test_each_power_of_two_has_its_own_divisions() -> None:
    settings = AllocatorSettings(divisions=(0,) * 8 + (1, 2, *(4,) * 6))
    assert [block_bytes(size * MIB, settings) // MIB for size in (200, 300, 600, 1100)] == [200, 300, 768, 1280]


def test_rounded_sizes_are_what_is_allocated_and_asked_for() -> None:
    allocator = made(100, divisions=(2,) * 16)
    assert (taken(allocator, 17).size, allocator.reserved_bytes) == (24 * MIB, 24 * MIB)
    assert segment_bytes(17 * MIB, allocator.settings) == 24 * MIB
    # The size after rounding decides the pool.
    assert block_bytes(1023 * KIB, allocator.settings) == MIB
    assert segment_bytes(1025 * KIB, allocator.settings) == 20 * MIB


# large_segment_size_mb: get_allocation_size and find_expandable_block


@pytest.mark.parametrize("page_mib", [11, 20, 64])
def test_middling_allocations_share_a_segment_of_the_page_size(page_mib: int) -> None:
    allocator = made(400, large_page_bytes=page_mib * MIB)
    taken(allocator, 2)
    assert allocator.reserved_bytes == page_mib * MIB
    taken(allocator, page_mib - 2)
    assert allocator.reserved_bytes == page_mib * MIB
    taken(allocator, 10)
    assert allocator.reserved_bytes == (page_mib + 10) * MIB
    taken(allocator, 0.5)
    assert allocator.reserved_bytes == (page_mib + 12) * MIB


@pytest.mark.parametrize("page_mib", [11, 20, 64])
def test_expandable_segments_grow_and_shrink_by_the_page_size(page_mib: int) -> None:
    allocator = made(400, large_page_bytes=page_mib * MIB, expandable_segments=True)
    first, second = taken(allocator, 30), taken(allocator, 2 * page_mib)
    assert allocator.reserved_bytes == math.ceil((30 + 2 * page_mib) / page_mib) * page_mib * MIB
    allocator.free(second)
    allocator.release_cached()
    assert allocator.reserved_bytes == math.ceil(30 / page_mib) * page_mib * MIB
    allocator.free(first)
    taken(allocator, 0.5)
    allocator.release_cached()
    assert allocator.reserved_bytes == 2 * MIB


# max_split_size_mb: should_split, get_free_block and release_available_cached_blocks


def test_blocks_of_the_limit_and_more_are_never_split() -> None:
    allocator = made(400, max_split_bytes=40 * MIB)
    cached(allocator, 59)
    assert taken(allocator, 45).size == 60 * MIB
    assert allocator.allocated_bytes == allocator.reserved_bytes == 60 * MIB


def test_a_smaller_allocation_is_not_served_from_a_block_of_the_limit() -> None:
    allocator = made(400, max_split_bytes=40 * MIB)
    cached(allocator, 40)
    taken(allocator, 39)
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (80 * MIB, 0)
    plain = made(400)
    cached(plain, 40)
    taken(plain, 39)
    assert plain.reserved_bytes == 40 * MIB


def test_an_allocation_of_the_limit_takes_a_block_of_it() -> None:
    allocator = made(400, max_split_bytes=30 * MIB)
    cached(allocator, 36)
    assert taken(allocator, 30).size == allocator.reserved_bytes == 36 * MIB


@pytest.mark.parametrize(("asked", "reserved"), [(41, 60), (40, 100)])
@pytest.mark.parametrize("more_mib", [0, 10])
def test_a_large_allocation_takes_a_block_that_is_larger_by_less_than_the_rounding(
    asked: int, reserved: int, more_mib: int
) -> None:
    allocator = made(400, max_split_bytes=30 * MIB, max_rounding_bytes=(20 + more_mib) * MIB)
    cached(allocator, 60 + more_mib)
    taken(allocator, asked)
    assert allocator.reserved_bytes == (reserved + more_mib) * MIB


def test_before_the_cache_is_released_the_smallest_large_block_makes_room() -> None:
    allocator = made(200, max_split_bytes=30 * MIB)
    cached(allocator, 80, 60, 20, 10)
    taken(allocator, 35)
    # The block of 60 was released, those of 80, 20 and 10 were not, and nothing was retried.
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (146 * MIB, 0)


def test_where_no_block_is_large_enough_the_largest_ones_make_room() -> None:
    allocator = made(200, max_split_bytes=30 * MIB)
    cached(allocator, 60, 50, 40, 20, 10)
    taken(allocator, 90)
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (160 * MIB, 0)


def test_where_large_blocks_are_too_little_everything_is_released() -> None:
    allocator = made(100, max_split_bytes=30 * MIB)
    cached(allocator, 40, 20, 10)
    taken(allocator, 50)
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (50 * MIB, 1)


def test_a_small_limit_keeps_a_whole_page_from_being_used_again() -> None:
    """`get_free_block` refuses a page that is free as a whole: it is as large as the limit."""
    allocator = made(400, max_split_bytes=20 * MIB)
    cached(allocator, 5)
    taken(allocator, 5)
    assert allocator.reserved_bytes == 40 * MIB


def test_expandable_segments_are_split_whatever_the_limit() -> None:
    allocator = made(400, max_split_bytes=40 * MIB, expandable_segments=True)
    cached(allocator, 100)
    assert taken(allocator, 45).size == 45 * MIB
    assert allocator.reserved_bytes == 100 * MIB


def test_nothing_but_whole_pages_of_expandable_segments_is_released_whatever_the_limit() -> None:
    allocator = made(100, max_split_bytes=40 * MIB, expandable_segments=True)
    first, second = taken(allocator, 50), taken(allocator, 50)
    allocator.free(first)
    assert allocator.malloc(70 * MIB) is None
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (60 * MIB, 1)
    allocator.free(second)
    assert taken(allocator, 100).size == 100 * MIB


# garbage_collection_threshold: garbage_collect_cached_blocks, where a memory fraction is set


def aged(threshold: float, *mebibytes: int) -> tuple[CachingAllocator, list[Block]]:
    """Reserves 180 MiB at most; has free segments of three sizes, the first free for longest, and 96 MiB of segments in
    use, the first of them in part.
    """
    allocator = made(200, collection_threshold=threshold, memory_fraction=0.9)
    taken(allocator, 5)
    blocks = [taken(allocator, size) for size in mebibytes]
    for block, then in zip(blocks[:2], (36, 40), strict=True):
        allocator.free(block)
        taken(allocator, then)
    allocator.free(blocks[2])
    return allocator, blocks


def test_the_longest_free_segments_are_released_above_the_threshold() -> None:
    allocator, (_, _, young) = aged(0.75, 30, 24, 20)
    # 135 may be reserved before anything is released. The first two are of mean age or more: both are released, though
    # one would do.
    assert allocator.reserved_bytes == 170 * MIB
    taken(allocator, 34)
    assert allocator.reserved_bytes == (170 - 30 - 24 + 34) * MIB
    assert taken(allocator, 20).address == young.address


def test_collection_goes_on_with_younger_segments_until_enough_is_released() -> None:
    allocator, _ = aged(0.67, 16, 18, 30)
    assert allocator.reserved_bytes == 160 * MIB
    taken(allocator, 34)
    # 34 MiB of the older ones are not the 39 above the threshold.
    assert allocator.reserved_bytes == (160 - 16 - 18 - 30 + 34) * MIB
    assert allocator.num_alloc_retries == 0


@pytest.mark.parametrize(
    ("threshold", "fraction", "expandable", "reserved"),
    [(0.1, 1.0, False, 620), (0.1, 0.9, True, 320), (0.9, 0.9, False, 620), (0.1, 0.9, False, 320)],
)
def test_nothing_is_collected_without_a_fraction_or_from_expandable_segments_or_below_the_threshold(
    threshold: float, fraction: float, expandable: bool, reserved: int
) -> None:
    allocator = made(1000, collection_threshold=threshold, memory_fraction=fraction, expandable_segments=expandable)
    cached(allocator, 200, 100)
    taken(allocator, 320)
    assert allocator.reserved_bytes == reserved * MIB


# per_process_memory_fraction: alloc_block


@pytest.mark.parametrize("expandable", [False, True])
def test_no_more_than_the_fraction_is_reserved(*, expandable: bool) -> None:
    allocator = made(200, memory_fraction=0.5, expandable_segments=expandable)
    assert allocator.available_bytes == 100 * MIB
    block = taken(allocator, 60)
    assert allocator.malloc(50 * MIB) is None
    assert (allocator.num_alloc_retries, allocator.free_bytes) == (1, 140 * MIB)
    assert allocator.available_bytes == 100 * MIB
    allocator.free(block)
    assert taken(allocator, 100).size == 100 * MIB


# Properties of all of them together

SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
POWERS = st.sampled_from([0, 1, 2, 4, 8, 16])
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    large_page_bytes=st.sampled_from([11 * MIB, 20 * MIB, 32 * MIB]),
    max_split_bytes=st.sampled_from([math.inf, 32 * MIB, 48 * MIB]),
    max_rounding_bytes=st.sampled_from([32 * MIB, 64 * MIB]),
    divisions=st.lists(POWERS, min_size=16, max_size=16).map(tuple),
    collection_threshold=st.sampled_from([0.0, 0.2, 0.8]),
    memory_fraction=st.sampled_from([1.0, 0.5, 0.9]),
)


@given(
    settings=SETTINGS,
    capacity_mib=st.integers(1, 400),
    steps=st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 9)), max_size=60),
)
def test_books_agree_under_every_setting(
    settings: AllocatorSettings, capacity_mib: int, steps: list[tuple[int, bool, int]]
) -> None:
    allocator = CachingAllocator(capacity_mib * MIB, settings=settings)
    # A page of an expandable segment may pass the fraction, as in PyTorch: the sizes are compared before rounding.
    slack = settings.large_page_bytes if settings.expandable_segments else 0
    allowed = min(allocator.capacity_bytes, settings.memory_fraction * allocator.capacity_bytes + slack)
    live: list[Block] = []
    for size, frees, index in steps:
        block = allocator.malloc(size)
        if block is not None:
            assert block.size >= block_bytes(size, settings) >= size
            live.append(block)
        if frees and live:
            allocator.free(live.pop(index % len(live)))
        assert sum(one.size for one in live) == allocator.allocated_bytes <= allocator.reserved_bytes <= allowed
        ranges = sorted((one.address, one.address + one.size) for one in live)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
    for block in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@given(size=st.integers(1, 2**37), fewer=POWERS.filter(lambda number: number > 1), times=st.sampled_from([1, 2, 4]))
def test_a_coarser_rounding_never_takes_less(size: int, fewer: int, times: int) -> None:
    coarse, fine = (replace(PLAIN, divisions=(number,) * 16) for number in (fewer, fewer * times))
    assert block_bytes(size, coarse) >= block_bytes(size, fine) >= block_bytes(size) >= size
    assert block_bytes(size, coarse) <= 2 * max(size, 512)


@given(sizes=st.lists(SIZES, max_size=30), divisions=POWERS)
def test_a_coarser_rounding_never_allocates_less(sizes: list[int], divisions: int) -> None:
    fine, coarse = (
        CachingAllocator(64 * GIB, settings=AllocatorSettings(expandable_segments=True, divisions=(number,) * 16))
        for number in (0, divisions)
    )
    for size in sizes:
        assert fine.malloc(size) is not None
        assert coarse.malloc(size) is not None
        assert coarse.allocated_bytes >= fine.allocated_bytes
