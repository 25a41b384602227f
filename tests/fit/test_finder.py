import gc
import math
import weakref
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ArgumentError
from can_train.fit.search import SizeSearch, find_max_size

CAPACITY = 16 * 2**30

Trial = Callable[[int], object]
Law = Callable[[float], float]
"""Share of a limit → share of the capacity; 1 at 1."""


def spread_limits(count: int = 284, largest: int = 20_000) -> list[int]:
    """Exactly `count` distinct limits from 1 to `largest`, spread evenly on a logarithmic scale."""
    points = count
    while len(limits := sorted({round(largest ** (i / (points - 1))) for i in range(points)})) < count:
        points += 1
    return limits


def affine(base: float) -> Law:
    return lambda share: base + (1 - base) * share


def bending(base: float, bend: float) -> Law:
    return lambda share: base + (1 - base) * ((1 - bend) * share + bend * share**2)


ORDINARY = affine(0.2)


def device(limit: int, law: Law = ORDINARY) -> Trial:
    """A trial that fits up to `limit` and returns its peak in bytes."""

    def trial(size: int) -> int:
        if size > limit:
            raise MemoryError
        return int(CAPACITY * law(size / (limit + 0.5)))

    return trial


def without_readings(limit: int) -> Trial:
    trial = device(limit)
    return lambda size: trial(size) and None


def searched(law: Law) -> list[tuple[float, SizeSearch]]:
    """Every spread limit searched with readings: (share of the true maximum found, search)."""
    searches = [(limit, find_max_size(device(limit, law), capacity=CAPACITY)) for limit in spread_limits()]
    return [(search.size / limit, search) for limit, search in searches]


@pytest.mark.parametrize(
    "law",
    [affine(0.05), affine(0.2), affine(0.4), bending(0.05, 0.2), bending(0.3, 0.3)],
    ids=["base 5 %", "base 20 %", "base 40 %", "mild bend", "bend"],
)
def test_with_readings_the_search_jumps_to_the_limit(law: Law) -> None:
    results = searched(law)
    assert mean(share for share, _ in results) >= 0.97
    assert mean(search.trials for _, search in results) <= 6
    assert mean(search.ooms for _, search in results) <= 0.5


def test_an_exactly_affine_law_is_found_exactly() -> None:
    assert all(share == 1 for share, _ in searched(affine(0.2)))


def test_without_readings_the_search_is_cheaper_than_a_binary_search_to_the_end() -> None:
    searches = [(limit, find_max_size(without_readings(limit))) for limit in spread_limits()]
    assert mean(search.size / limit for limit, search in searches) >= 0.97
    assert mean(search.trials for _, search in searches) < 15.2
    assert mean(search.ooms for _, search in searches) < 3.6


@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["without readings", "with readings"])
@given(limit=st.integers(0, 30_000), start=st.integers(1, 40_000), upper=st.integers(1, 40_000))
def test_the_size_found_was_tried_and_fits(capacity: int | None, limit: int, start: int, upper: int) -> None:
    tried: list[int] = []
    run = device(limit)

    def trial(size: int) -> object:
        tried.append(size)
        return run(size)

    search = find_max_size(trial, start=start, upper=upper, capacity=capacity)
    assert search.size in [0, *tried]
    assert all(1 <= size <= upper for size in tried)
    assert (search.size, search.trials) == (max([0, *(s for s in tried if s <= limit)]), len(tried))
    assert search.ooms == sum(size > limit for size in tried)
    assert search.size >= 0.9 * min(limit, upper) - 1


@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["without readings", "with readings"])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 7, 8, 9, 4_097, 6_000, 8_191, 8_192, 8_193, 50_000])
def test_awkward_limits_are_found(limit: int, capacity: int | None) -> None:
    search = find_max_size(device(limit), capacity=capacity)
    assert 0.92 * limit <= search.size <= limit


@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["without readings", "with readings"])
def test_a_limit_beyond_the_upper_end_ends_at_the_upper_end(capacity: int | None) -> None:
    search = find_max_size(device(10**6), upper=777, capacity=capacity)
    assert (search.size, search.ooms) == (777, 0)


def test_a_start_above_the_upper_end_is_the_upper_end() -> None:
    assert find_max_size(device(100), start=64, upper=5) == SizeSearch(size=5, trials=1, ooms=0)


def test_nothing_fits_on_a_device_without_memory() -> None:
    assert find_max_size(device(0)) == SizeSearch(size=0, trials=3, ooms=3)


def test_a_start_far_above_the_limit_comes_down_in_few_trials() -> None:
    search = find_max_size(device(3), start=4_096, capacity=CAPACITY)
    assert search.size == 3
    assert search.ooms <= 7


@given(readings=st.lists(st.floats(allow_nan=True) | st.none() | st.text(), min_size=1), limit=st.integers(0, 2**20))
def test_the_search_ends_soon_whatever_the_readings(readings: list[object], limit: int) -> None:
    def trial(size: int) -> object:
        if size > limit:
            raise MemoryError
        return readings[size % len(readings)]

    search = find_max_size(trial, capacity=1.0)
    assert search.size <= limit
    assert search.trials <= 50


@pytest.mark.parametrize("hidden", [0.5, 0.9, 0.985], ids=lambda share: f"{share:.1%} hidden")
def test_memory_that_does_not_grow_at_first_does_not_stall_the_search(hidden: float) -> None:
    search = find_max_size(device(20_000, lambda share: max(hidden, affine(0.1)(share))), capacity=CAPACITY)
    assert search.size >= 0.9 * 20_000
    assert search.trials <= 20


def test_peaks_that_draw_near_the_capacity_without_reaching_it_do_not_stall_the_search() -> None:
    trials: list[int] = []

    def trial(size: int) -> float:
        trials.append(size)
        return CAPACITY * (1 - 0.5 ** len(trials))

    assert find_max_size(trial, capacity=CAPACITY).size == 2**20


def test_peaks_below_the_capacity_may_still_fail() -> None:
    fragmented = device(1_000, lambda share: 0.93 * affine(0.2)(share))
    search = find_max_size(fragmented, capacity=CAPACITY)
    assert 930 <= search.size <= 1_000
    assert search.ooms <= 3


def test_readings_are_ignored_without_a_capacity() -> None:
    assert find_max_size(device(5_000)) == find_max_size(without_readings(5_000))


def test_any_other_error_ends_the_search() -> None:
    def trial(size: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_max_size(trial)


class Tensor:
    """Something that a failed trial still holds."""


def test_what_a_failed_trial_held_is_free_before_the_next_trial() -> None:
    held: list[weakref.ref[Tensor]] = []

    def trial(size: int) -> None:
        assert all(reference() is None for reference in held)
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        if size > 10:
            raise MemoryError

    gc.disable()
    try:
        find_max_size(trial)
    finally:
        gc.enable()
    assert len(held) > 3


@pytest.mark.parametrize("bounds", [{"start": 0}, {"upper": 0}, {"capacity": 0}, {"capacity": math.nan}])
def test_bounds_that_leave_nothing_to_search_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=r"size of at least 1|positive number of bytes"):
        find_max_size(device(10), **bounds)  # type: ignore[arg-type]


def limited(limit: int, readings: Callable[[int, int], object]) -> Callable[[int], object]:
    """A trial that fits up to a limit, and returns something that depends on its size and on how many came before."""
    tried: list[int] = []

    def trial(size: int) -> object:
        tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return readings(size, len(tried))

    return trial


@pytest.mark.parametrize(
    "gives", [lambda n: n == 1, lambda n: n % 2 == 1, lambda n: n != 3, lambda n: False], ids=["1", "odd", "not 3", "-"]
)
@pytest.mark.parametrize("nothing", [None, math.nan, -1.0, 0, True, "1 GiB"])
def test_trials_without_a_reading_do_not_end_the_search(gives: Callable[[int], bool], nothing: object) -> None:
    limit = 18_648
    trial = limited(limit, lambda size, count: 7e6 + 1000 * size if gives(count) else nothing)
    assert find_max_size(trial, capacity=7e6 + 1000 * limit).size >= 0.93 * limit


def test_readings_may_be_numbers_of_numpy() -> None:
    trial = limited(18_648, lambda size, count: np.int64(7_000_000 + 1000 * size))
    found = find_max_size(trial, capacity=7e6 + 1000 * 18_648)
    assert (found.size, found.ooms) == (18_648, 0)
    assert found.trials <= 6


@pytest.mark.parametrize("arguments", [{"upper": 10.5}, {"upper": math.inf}, {"start": 2.5}, {"start": "8"}])
def test_sizes_are_whole_numbers(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="Sizes are whole numbers"):
        find_max_size(lambda size: None, **arguments)
