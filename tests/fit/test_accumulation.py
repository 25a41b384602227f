import doctest
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import ArgumentError, CanTrainError
from can_train.fit import packing
from can_train.fit.packing import solve_accumulation

EXHAUSTIVE = 300
EXHAUSTIVE_SIZES = 2_000


def assert_fewest_and_even(desired: int, limit: int) -> None:
    sizes = solve_accumulation(desired, limit)
    assert len(sizes) == -(-desired // limit)
    assert sum(sizes) == desired
    assert sizes[0] <= limit
    assert sizes[0] - sizes[-1] <= 1
    assert all(a >= b for a, b in pairwise(sizes))


def assert_largest_divisor(desired: int, limit: int) -> None:
    sizes = solve_accumulation(desired, limit, divisor=True)
    assert set(sizes) == {max(size for size in range(1, min(desired, limit) + 1) if desired % size == 0)}
    assert sum(sizes) == desired


def test_every_small_batch_is_cut_into_the_fewest_micro_batches() -> None:
    for desired in range(1, EXHAUSTIVE + 1):
        for limit in range(1, desired + 2):
            assert_fewest_and_even(desired, limit)


def test_every_small_batch_has_its_largest_divisor_found() -> None:
    for desired in range(1, EXHAUSTIVE + 1, 3):
        for limit in range(1, desired + 2, 2):
            assert_largest_divisor(desired, limit)


def test_every_batch_up_to_2000_is_cut_exactly() -> None:
    for desired in range(EXHAUSTIVE + 1, EXHAUSTIVE_SIZES + 1):
        for limit in range(1, desired + 1):
            sizes = solve_accumulation(desired, limit)
            # Sorted, so first and last bound the rest; the exhaustive test above proves the order.
            assert len(sizes) == -(-desired // limit)
            assert sizes[0] <= limit
            assert sizes[0] - sizes[-1] <= 1
            assert sum(sizes) == desired


@given(desired=st.integers(1, 10**9), parts=st.integers(1, 5_000))
def test_large_batches_are_cut_into_the_fewest_micro_batches(desired: int, parts: int) -> None:
    assert_fewest_and_even(desired, -(-desired // parts))


@given(divisors=st.tuples(st.integers(1, 300), st.integers(1, 300)), limit=st.integers(1, 10**5))
def test_large_batches_have_their_largest_divisor_found(divisors: tuple[int, int], limit: int) -> None:
    assert_largest_divisor(divisors[0] * divisors[1], limit)


def test_a_prime_batch_is_cut_unevenly_rather_than_one_by_one() -> None:
    assert solve_accumulation(127, 64) == (64, 63)
    assert solve_accumulation(127, 64, divisor=True) == (1,) * 127


def test_a_batch_within_the_limit_is_left_whole() -> None:
    assert solve_accumulation(5, 5) == (5,)
    assert solve_accumulation(5, 10**12) == (5,)


@pytest.mark.parametrize(("desired", "limit"), [(0, 4), (-3, 4), (4, 0), (4, -1)])
def test_sizes_below_one_are_refused_as_user_errors_and_as_value_errors(desired: int, limit: int) -> None:
    with pytest.raises(ValueError, match="at least one sample") as caught:
        solve_accumulation(desired, limit)
    assert isinstance(caught.value, CanTrainError)


def test_the_examples_in_the_docstring_hold() -> None:
    result = doctest.testmod(packing)
    assert (result.attempted, result.failed) == (6, 0)


@pytest.mark.parametrize(("desired", "limit"), [(10, 3.5), (10.5, 3), ("10", 3), (10, math.inf), (math.nan, 3)])
@pytest.mark.parametrize("divisor", [False, True])
def test_numbers_of_samples_are_whole(desired: Any, limit: Any, divisor: bool) -> None:
    with pytest.raises(ArgumentError, match="Numbers of samples are whole"):
        solve_accumulation(desired, limit, divisor=divisor)
