import doctest
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train.fit import packing
from can_train.fit.packing import BatchCosts, PartLimit, cut, largest_typical_batch
from can_train.task import Feature

SUMMED = (Feature("nodes"), Feature("edges"))
PADDED = (Feature("tokens", padding=1), Feature("attention", padding=2))
MIXED = (Feature("nodes"), Feature("attention", padding=2))

# Whole numbers, so that sums are exact whatever their order.
pairs = st.tuples(st.integers(0, 60), st.integers(0, 60))
batches = st.builds(
    lambda rows, features: BatchCosts(np.array(rows, dtype=np.float64), features, (1.0, 3.0)),
    st.lists(pairs, min_size=1, max_size=200),
    st.sampled_from([SUMMED, PADDED, MIXED]),
)
limits = st.builds(
    PartLimit,
    cost=st.integers(0, 20_000).map(float),
    samples=st.integers(0, 50),
    floor=st.integers(1, 10),
    equal=st.booleans(),
)


def starts(sizes: tuple[int, ...]) -> list[int]:
    return [0, *np.cumsum(sizes).tolist()]


def part_costs(batch: BatchCosts, sizes: tuple[int, ...]) -> list[float]:
    return [batch.cost(start, stop) for start, stop in pairwise(starts(sizes))]


def fewest_parts(costs: list[int], limit: int) -> int:
    """By trying every last part of every beginning."""
    fewest = [0] + [10**9] * len(costs)
    for stop in range(1, len(costs) + 1):
        for start in range(stop):
            if sum(costs[start:stop]) <= limit or stop - start == 1:
                fewest[stop] = min(fewest[stop], fewest[start] + 1)
    return fewest[-1]


@given(batches, st.integers(0, 200), st.integers(0, 200))
def test_a_part_costs_what_it_would_cost_as_a_batch(batch: BatchCosts, one: int, other: int) -> None:
    start, stop = sorted((min(one, len(batch)), min(other, len(batch))))
    part, chosen = batch.part(start, stop), batch.chosen(np.arange(start, stop))
    assert batch.cost(start, stop) == part.cost(0, stop - start) == chosen.cost(0, stop - start)
    assert len(part) == len(chosen) == stop - start


@given(batches)
def test_each_sample_costs_what_it_does_alone(batch: BatchCosts) -> None:
    assert batch.each().tolist() == [batch.cost(at, at + 1) for at in range(len(batch))]


@given(batch=batches, start=st.integers(0, 199), limit=st.integers(0, 40_000))
def test_the_end_of_a_part_is_the_one_that_a_plain_search_finds(batch: BatchCosts, start: int, limit: int) -> None:
    start = min(start, len(batch))
    stop = start
    while stop < len(batch) and batch.cost(start, stop + 1) <= limit:
        stop += 1
    assert batch.reach(start, limit) == stop


@pytest.mark.parametrize("features", [SUMMED, PADDED])
@pytest.mark.parametrize("stop", [63, 64, 65, 127, 128, 129, 1_000])
def test_long_parts_are_found_too(features: tuple[Feature, ...], stop: int) -> None:
    batch = BatchCosts(np.ones((1_000, 2)), features, (1.0, 1.0))
    assert batch.reach(0, batch.cost(0, stop)) == stop
    assert batch.reach(0, math.inf) == 1_000


def test_round_off_does_not_end_a_part() -> None:
    batch = BatchCosts.of_samples([0.1] * 10)
    assert batch.reach(0, 0.3) == 3
    assert batch.reach(0, 0.3 * (1 - 1e-6)) == 2


@pytest.mark.parametrize("features", [SUMMED, PADDED])
def test_samples_that_cost_nothing_fit_anywhere(features: tuple[Feature, ...]) -> None:
    assert BatchCosts(np.zeros((5, 2)), features, (1.0, 1.0)).reach(0, 0) == 5


@given(batch=batches, limit=limits)
def test_every_sample_is_in_one_part_in_order(batch: BatchCosts, limit: PartLimit) -> None:
    sizes = cut(batch, limit)
    assert min(sizes) >= 1
    assert starts(sizes)[-1] == len(batch)
    assert max(sizes) <= (limit.samples or len(batch))


def test_parts_hold_no_more_samples_than_they_may() -> None:
    batch = BatchCosts.of_samples([1, 2, 1, 2, 1])
    assert cut(batch, PartLimit(samples=2)) == (2, 2, 1)
    assert cut(batch, PartLimit(samples=2, floor=4)) == (2, 2, 1)


@given(batch=batches, limit=st.integers(0, 20_000))
def test_no_part_is_over_the_limit_but_a_sample_that_is_so_alone(batch: BatchCosts, limit: int) -> None:
    sizes = cut(batch, PartLimit(cost=limit))
    costs = part_costs(batch, sizes)
    assert all(cost <= limit or size == 1 for cost, size in zip(costs, sizes, strict=True))
    equal = cut(batch, PartLimit(cost=limit, equal=True))
    assert equal[0] == 1 or max(part_costs(batch, equal)) <= limit


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=12), limit=st.integers(1, 30))
def test_no_cut_in_order_needs_fewer_parts(costs: list[int], limit: int) -> None:
    assert len(cut(BatchCosts.of_samples(costs), PartLimit(cost=limit))) == fewest_parts(costs, limit)


@given(batch=batches, limit=st.integers(0, 20_000), floor=st.integers(2, 20))
def test_parts_stay_at_the_floor_and_are_costly_only_there(batch: BatchCosts, limit: int, floor: int) -> None:
    sizes = cut(batch, PartLimit(cost=limit, floor=floor))
    assert all(size >= floor for size in sizes[:-1])
    costs = part_costs(batch, sizes)
    assert all(cost <= limit or size <= floor for cost, size in zip(costs, sizes, strict=True))


def test_equal_samples_are_rather_cut_unevenly_than_below_the_floor() -> None:
    batch = BatchCosts.uniform(6)
    assert cut(batch, PartLimit(cost=4)) == (3, 3)
    assert cut(batch, PartLimit(cost=1, floor=4)) == (4, 2)


def test_a_last_part_below_the_floor_is_given_what_the_one_before_can_spare() -> None:
    batch = BatchCosts.of_samples([1, 1, 1, 1, 1, 2])
    assert cut(batch, PartLimit(cost=5)) == (5, 1)
    assert cut(batch, PartLimit(cost=5, floor=3)) == (3, 3)
    assert cut(batch, PartLimit(cost=5, floor=4)) == (4, 2)


@given(size=st.integers(1, 300), limit=st.integers(1, 300), cost=st.integers(1, 9))
def test_samples_of_equal_cost_are_cut_into_the_fewest_nearly_equal_parts(size: int, limit: int, cost: int) -> None:
    sizes = cut(BatchCosts.of_samples([cost] * size), PartLimit(cost=limit * cost))
    assert len(sizes) == -(-size // limit)
    assert max(sizes) - min(sizes) <= 1


@given(batch=batches, limit=st.integers(0, 20_000), samples=st.integers(0, 50))
def test_equal_parts_are_the_largest_that_fit(batch: BatchCosts, limit: int, samples: int) -> None:
    sizes = cut(batch, PartLimit(cost=limit, samples=samples, equal=True))
    assert len(set(sizes)) == 1
    for larger in range(sizes[0] + 1, min(samples or len(batch), len(batch)) + 1):
        if len(batch) % larger == 0:
            assert max(part_costs(batch, (larger,) * (len(batch) // larger))) > limit


def test_equal_parts_keep_to_the_floor_where_none_fits() -> None:
    batch = BatchCosts.of_samples([1, 2] * 6)
    assert cut(batch, PartLimit(cost=3, equal=True)) == (2,) * 6
    assert cut(batch, PartLimit(cost=2, equal=True)) == (1,) * 12
    assert cut(batch, PartLimit(cost=2, floor=3, equal=True)) == (3,) * 4


def heavy_tailed(draw: Callable[[np.random.Generator], NDArray[np.float64]]) -> tuple[NDArray[np.float64], float]:
    """20 batches of 512 samples, and a limit that would hold a 20th of one; no sample is above a fifth of it."""
    costs, limit = draw(np.random.default_rng(0)), 0.0
    while costs.max() > limit / 5:
        costs = np.minimum(costs, limit / 5.001 or math.inf)
        limit = costs.mean() * 512 / 20
    return costs.reshape(20, 512), limit


def equal_count(batches: NDArray[np.float64], limit: float) -> int:
    """The largest number of samples of which no part of any batch is over the limit."""
    size = batches.shape[1]
    fits = (np.add.reduceat(batches, range(0, size, count), axis=1).max() <= limit for count in range(1, size + 1))
    return max(count for count, all_fit in enumerate(fits, start=1) if all_fit)


@pytest.mark.parametrize(
    "draw",
    [lambda rng: 1 + rng.pareto(1.1, 20 * 512), lambda rng: rng.lognormal(0, 2, 20 * 512)],
    ids=["pareto", "lognormal"],
)
def test_heavy_tails_need_hardly_more_parts_than_their_cost_where_equal_counts_need_many(
    draw: Callable[[np.random.Generator], NDArray[np.float64]],
) -> None:
    batches, limit = heavy_tailed(draw)
    ideal = sum(math.ceil(batch.sum() / limit) for batch in batches)
    parts = sum(len(cut(BatchCosts.of_samples(batch), PartLimit(cost=limit))) for batch in batches)
    assert parts <= 1.1 * ideal
    assert len(batches) * math.ceil(512 / equal_count(batches, limit)) >= 2 * ideal


def test_the_largest_typical_batch_fits_whole_but_for_a_few() -> None:
    order = BatchCosts.of_samples(np.random.default_rng(0).lognormal(0, 1, 10_000))
    size = largest_typical_batch(order, 200.0, upper=10_000)
    costs = [order.cost(stop - size, stop) for stop in range(size, 10_001, size)]
    assert 0.9 <= np.mean([cost <= 200 for cost in costs]) < 1
    assert np.mean(costs) >= 0.75 * 200


@pytest.mark.parametrize(("limit", "upper", "size"), [(7.0, 100, 7), (7.0, 5, 5), (0.5, 100, 1)])
def test_a_typical_batch_of_equal_samples_is_what_fits(limit: float, upper: int, size: int) -> None:
    assert largest_typical_batch(BatchCosts.uniform(1_000), limit, upper=upper) == size


def test_a_batch_knows_its_main_feature_and_mean_sample() -> None:
    batch = BatchCosts(np.array([[1.0, 4.0], [2.0, 8.0]]), PADDED, (10.0, 10.0))
    assert (batch.main_feature(0, 2), batch.main_feature(1, 2)) == (3.0, 2.0)
    assert batch.mean_counts().tolist() == [1.5, 6.0]
    assert not batch.is_uniform


def test_the_examples_in_the_docstring_hold() -> None:
    result = doctest.testmod(packing)
    assert (result.attempted, result.failed) == (6, 0)
