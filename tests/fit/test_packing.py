import doctest
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train.errors import ArgumentError, CanTrainError
from can_train.fit import packing
from can_train.fit.packing import (
    ROUNDING,
    BatchCosts,
    MicroBatchLimit,
    SplitRules,
    cut,
    largest_typical_batch,
    optimizer_batches,
    share_out,
    solve_accumulation,
)
from can_train.task import Feature

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


@pytest.mark.parametrize(
    ("desired", "limit", "sizes"),
    [(2**61 - 1, 2**62, (2**61 - 1,)), (10**20, 10**20, (10**20,)), (6 * (2**61 - 1), 2**61, (2**61 - 1,) * 6)],
)
def test_the_divisors_of_huge_batches_are_found_without_a_search_up_to_their_root(
    desired: int, limit: int, sizes: tuple[int, ...]
) -> None:
    assert solve_accumulation(desired, limit, divisor=True) == sizes


def test_a_huge_batch_without_a_divisor_among_the_parts_allowed_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at most 10,000,000 micro-batches") as refused:
        solve_accumulation(2**61 - 1, 2**60, divisor=True)
    assert "has a larger divisor" in refused.value.remedy


def test_a_prime_batch_is_cut_unevenly_rather_than_one_by_one() -> None:
    assert solve_accumulation(127, 64) == (64, 63)
    assert solve_accumulation(127, 64, divisor=True) == (1,) * 127


@pytest.mark.parametrize(
    ("desired", "limit", "divisor", "remedy"),
    [
        (1_000_000_007, 10**6, True, "Give divisor=False, or a batch whose size has a larger divisor"),
        (1_000_000_007, 50, True, "Give divisor=False and limit=101 or more"),
        (10**7 + 1, 1, False, "Give limit=2 or more"),
        (10**30, 10, False, "Give limit=1"),
    ],
)
def test_a_batch_of_more_micro_batches_than_can_run_is_refused(
    desired: int, limit: int, divisor: bool, remedy: str
) -> None:
    with pytest.raises(ArgumentError, match="at most 10,000,000 micro-batches") as caught:
        solve_accumulation(desired, limit, divisor=divisor)
    assert caught.value.remedy.startswith(remedy)
    assert len(solve_accumulation(10**7, 1)) == 10**7


def test_a_batch_within_the_limit_is_left_whole() -> None:
    assert solve_accumulation(5, 5) == (5,)
    assert solve_accumulation(5, 10**12) == (5,)


@pytest.mark.parametrize(("desired", "limit"), [(0, 4), (-3, 4), (4, 0), (4, -1)])
def test_sizes_below_one_are_refused_as_user_errors_and_as_value_errors(desired: int, limit: int) -> None:
    with pytest.raises(ValueError, match="at least one sample") as caught:
        solve_accumulation(desired, limit)
    assert isinstance(caught.value, CanTrainError)


@pytest.mark.parametrize(("desired", "limit"), [(10, 3.5), (10.5, 3), ("10", 3), (10, math.inf), (math.nan, 3)])
@pytest.mark.parametrize("divisor", [False, True])
def test_numbers_of_samples_are_whole(desired: Any, limit: Any, divisor: bool) -> None:
    with pytest.raises(ArgumentError, match="Numbers of samples are whole"):
        solve_accumulation(desired, limit, divisor=divisor)


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
    MicroBatchLimit,
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
def test_every_sample_is_in_one_part_in_order(batch: BatchCosts, limit: MicroBatchLimit) -> None:
    sizes = cut(batch, limit)
    assert min(sizes) >= 1
    assert starts(sizes)[-1] == len(batch)
    assert max(sizes) <= (limit.samples or len(batch))


def test_parts_hold_no_more_samples_than_they_may() -> None:
    batch = BatchCosts.of_samples([1, 2, 1, 2, 1])
    assert cut(batch, MicroBatchLimit(samples=2)) == (2, 2, 1)
    assert cut(batch, MicroBatchLimit(samples=2, floor=4)) == (2, 2, 1)


@given(batch=batches, limit=st.integers(0, 20_000))
def test_no_part_is_over_the_limit_but_a_sample_that_is_so_alone(batch: BatchCosts, limit: int) -> None:
    sizes = cut(batch, MicroBatchLimit(cost=limit))
    costs = part_costs(batch, sizes)
    assert all(cost <= limit or size == 1 for cost, size in zip(costs, sizes, strict=True))
    equal = cut(batch, MicroBatchLimit(cost=limit, equal=True))
    assert equal[0] == 1 or max(part_costs(batch, equal)) <= limit


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=12), limit=st.integers(1, 30))
def test_no_cut_in_order_needs_fewer_parts(costs: list[int], limit: int) -> None:
    assert len(cut(BatchCosts.of_samples(costs), MicroBatchLimit(cost=limit))) == fewest_parts(costs, limit)


@given(batch=batches, limit=st.integers(0, 20_000), floor=st.integers(2, 20))
def test_parts_stay_at_the_floor_and_are_costly_only_there(batch: BatchCosts, limit: int, floor: int) -> None:
    sizes = cut(batch, MicroBatchLimit(cost=limit, floor=floor))
    assert all(size >= floor for size in sizes[:-1])
    costs = part_costs(batch, sizes)
    assert all(cost <= limit or size <= floor for cost, size in zip(costs, sizes, strict=True))


def test_equal_samples_are_rather_cut_unevenly_than_below_the_floor() -> None:
    batch = BatchCosts.uniform(6)
    assert cut(batch, MicroBatchLimit(cost=4)) == (3, 3)
    assert cut(batch, MicroBatchLimit(cost=1, floor=4)) == (4, 2)


def test_a_last_part_below_the_floor_is_given_what_the_one_before_can_spare() -> None:
    batch = BatchCosts.of_samples([1, 1, 1, 1, 1, 2])
    assert cut(batch, MicroBatchLimit(cost=5)) == (5, 1)
    assert cut(batch, MicroBatchLimit(cost=5, floor=3)) == (3, 3)
    assert cut(batch, MicroBatchLimit(cost=5, floor=4)) == (4, 2)


@given(size=st.integers(1, 300), limit=st.integers(1, 300), cost=st.integers(1, 9))
def test_samples_of_equal_cost_are_cut_into_the_fewest_nearly_equal_parts(size: int, limit: int, cost: int) -> None:
    sizes = cut(BatchCosts.of_samples([cost] * size), MicroBatchLimit(cost=limit * cost))
    assert len(sizes) == -(-size // limit)
    assert max(sizes) - min(sizes) <= 1


@given(batch=batches, limit=st.integers(0, 20_000), samples=st.integers(0, 50))
def test_equal_parts_are_the_largest_that_fit(batch: BatchCosts, limit: int, samples: int) -> None:
    sizes = cut(batch, MicroBatchLimit(cost=limit, samples=samples, equal=True))
    assert len(set(sizes)) == 1
    for larger in range(sizes[0] + 1, min(samples or len(batch), len(batch)) + 1):
        if len(batch) % larger == 0:
            assert max(part_costs(batch, (larger,) * (len(batch) // larger))) > limit


def test_equal_parts_keep_to_the_floor_where_none_fits() -> None:
    batch = BatchCosts.of_samples([1, 2] * 6)
    assert cut(batch, MicroBatchLimit(cost=3, equal=True)) == (2,) * 6
    assert cut(batch, MicroBatchLimit(cost=2, equal=True)) == (1,) * 12
    assert cut(batch, MicroBatchLimit(cost=2, floor=3, equal=True)) == (3,) * 4


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
    parts = sum(len(cut(BatchCosts.of_samples(batch), MicroBatchLimit(cost=limit))) for batch in batches)
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
    assert (batch.in_units().cost(0, 2), batch.in_units().cost(1, 2)) == (3.0, 2.0)
    assert batch.mean_counts() == (1.5, 6.0)
    assert not batch.is_uniform


def test_the_examples_in_the_docstring_hold() -> None:
    result = doctest.testmod(packing)
    assert (result.attempted, result.failed) == (12, 0)


TEN = BatchCosts.uniform(10)

sample_costs = st.lists(st.integers(1, 50), min_size=1, max_size=80)


def sizes(rules: SplitRules, batch: BatchCosts = TEN) -> tuple[int, ...]:
    return cut(batch, rules.limit_for(batch))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (SplitRules(), (10,)),
        (SplitRules(safe_limit=4), (4, 3, 3)),
        (SplitRules(safe_limit=4, equal=True), (2,) * 5),
        (SplitRules(samples=6), (5, 5)),
        (SplitRules(samples=6, safe_limit=4), (4, 3, 3)),
        (SplitRules(samples=3, safe_limit=6), (3, 3, 2, 2)),
        (SplitRules(safe_limit=2, floor=5), (5, 5)),
        (SplitRules(target=4), (4, 3, 3)),
        (SplitRules(target=6, safe_limit=4), (4, 3, 3)),
        (SplitRules(target=1), (3, 3, 2, 2)),
        (SplitRules(target=1, max_splits=2), (5, 5)),
        (SplitRules(target=1, equal=True), (5, 5)),
        (SplitRules(target=1, floor=5), (5, 5)),
    ],
)
def test_every_option_is_an_answer_to_what_a_part_may_hold(rules: SplitRules, expected: tuple[int, ...]) -> None:
    assert sizes(rules) == expected


@given(batch=batches, limit=st.integers(1, 20_000), gradients=st.integers(0, 20_000), share=st.sampled_from([0.5, 1.0]))
def test_a_batch_that_fits_without_earlier_gradients_is_whole_and_others_are_cut_beside_them(
    batch: BatchCosts, limit: int, gradients: int, share: float
) -> None:
    beside = SplitRules(safe_limit=share * limit, tuned_limit=limit)
    found = sizes(replace(beside, gradient_cost=gradients), batch)
    fits = batch.total <= share * (limit + gradients) * (1 + ROUNDING)
    assert found == ((len(batch),) if fits else sizes(beside, batch))


def test_a_size_that_was_given_or_is_faster_is_not_exceeded() -> None:
    rules = SplitRules(safe_limit=8, tuned_limit=8, gradient_cost=4)
    assert sizes(rules) == sizes(replace(rules, safe_limit=1, gradient_cost=math.inf)) == (10,)
    for chosen in (
        replace(rules, samples=5),
        replace(rules, fastest=5),
        replace(rules, splits=2),
        replace(rules, target=5),
    ):
        assert sizes(chosen) == (5, 5)


@pytest.mark.parametrize(
    ("size", "tuned_limit", "expected"), [(10, 12, (10,)), (10, 6, (5, 5)), (11, 12, (2, 2, 2, 2, 2, 1))]
)
def test_a_batch_up_to_the_threshold_is_whole_as_long_as_it_is_known_to_fit(
    size: int, tuned_limit: float, expected: tuple[int, ...]
) -> None:
    rules = SplitRules(threshold=10, safe_limit=4, tuned_limit=tuned_limit, samples=2, floor=1)
    assert sizes(rules, BatchCosts.uniform(size)) == expected


@pytest.mark.parametrize(("threshold", "expected"), [(12, (4,)), (11, (2, 2))])
def test_the_threshold_counts_the_main_feature_and_not_the_cost(threshold: float, expected: tuple[int, ...]) -> None:
    muons = BatchCosts(np.array([[3.0, 100.0]] * 4), (Feature("muons"), Feature("hits")), (0.0, 1.0))
    assert sizes(SplitRules(threshold=threshold, safe_limit=200), muons) == expected


@given(costs=sample_costs, target=st.integers(1, 400), cap=st.integers(1, 6))
def test_a_target_is_reached_within_the_cap_and_missed_by_no_more_than_it_takes(
    costs: list[int], target: int, cap: int
) -> None:
    batch = BatchCosts.of_samples(costs)
    limit = SplitRules(target=target, max_splits=cap).limit_for(batch)
    wanted = cut(batch, MicroBatchLimit(cost=target))
    if len(wanted) <= cap:
        assert cut(batch, limit) == wanted
        return
    assert len(cut(batch, limit)) <= cap
    assert len(cut(batch, MicroBatchLimit(cost=limit.cost * (1 - 1e-6)))) > cap


@given(costs=sample_costs, safe_limit=st.integers(50, 400), samples=st.integers(0, 10))
def test_the_cap_gives_way_to_what_fits(costs: list[int], safe_limit: int, samples: int) -> None:
    batch = BatchCosts.of_samples(costs)
    rules = SplitRules(safe_limit=safe_limit, samples=samples, target=1, max_splits=2)
    parts = sizes(rules, batch)
    stops = np.cumsum(parts)
    assert all(batch.cost(stop - size, stop) <= safe_limit for size, stop in zip(parts, stops.tolist(), strict=True))
    assert max(parts) <= (samples or len(batch))


@given(costs=sample_costs, threshold=st.integers(1, 300))
def test_preflight_splitting_makes_steps_up_to_the_threshold(costs: list[int], threshold: int) -> None:
    batch = BatchCosts.of_samples(costs)
    steps = optimizer_batches(batch, threshold)
    assert steps == tuple(_next_fit(costs, threshold))
    assert optimizer_batches(batch, math.inf) == (len(costs),)


def _next_fit(costs: list[int], limit: int) -> list[int]:
    """One sample after another, in a new part where the last has no room for it."""
    parts: list[list[int]] = []
    for cost in costs:
        if not parts or sum(parts[-1]) + cost > limit:
            parts.append([])
        parts[-1].append(cost)
    return [len(part) for part in parts]


def test_preflight_splitting_counts_the_main_feature_unpadded() -> None:
    clips = BatchCosts(np.array([[3.0], [1.0], [1.0], [4.0]]), (Feature("frames", padding=2),), (100.0,))
    assert optimizer_batches(clips, 5) == (3, 1)


features_of_batches = st.sampled_from(
    [(Feature("nodes"), Feature("edges")), (Feature("tokens", padding=1), Feature("attention", padding=2))]
)
ragged_batches = st.builds(
    lambda rows, features: BatchCosts(np.array(rows, dtype=np.float64), features, (1.0, 3.0)),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=60),
    features_of_batches,
)
splitting_rules = st.builds(
    SplitRules,
    safe_limit=st.just(math.inf) | st.floats(200.0, 20_000.0),
    samples=st.integers(0, 30),
    equal=st.booleans(),
    splits=st.integers(1, 12),
    target=st.just(math.inf) | st.floats(1.0, 20_000.0),
    max_splits=st.integers(1, 6),
)


def assert_fits(batch: BatchCosts, rules: SplitRules, parts: tuple[int, ...]) -> None:
    stops = np.cumsum(parts).tolist()
    for size, stop in zip(parts, stops, strict=True):
        assert size == 1 or batch.cost(stop - size, stop) <= rules.safe_limit * (1 + 1e-6)
    assert stops[-1] == len(batch)
    assert max(parts) <= (rules.samples or len(batch))


@given(batch=ragged_batches, rules=splitting_rules)
def test_splits_are_at_least_so_many_and_every_one_fits(batch: BatchCosts, rules: SplitRules) -> None:
    parts = sizes(rules, batch)
    assert_fits(batch, rules, parts)
    assert len(parts) >= min(rules.splits, len(batch))
    assert len(parts) >= len(sizes(replace(rules, splits=1), batch))
    assert not rules.equal or len(set(parts)) == 1


@given(size=st.integers(1, 200), splits=st.integers(2, 8))
def test_splits_of_equal_samples_are_as_equal_as_they_can_be(size: int, splits: int) -> None:
    parts = sizes(SplitRules(splits=splits), BatchCosts.uniform(size))
    assert max(parts) - min(parts) <= 1
    counts = {-(-size // width) for width in range(1, size + 1)}
    assert len(parts) == min((count for count in counts if count >= splits), default=size)


@given(batch=ragged_batches, splits=st.integers(1, 8))
def test_the_costliest_of_the_splits_is_as_cheap_as_so_many_shares_allow(batch: BatchCosts, splits: int) -> None:
    parts = sizes(SplitRules(splits=splits), batch)
    costliest = max(batch.part_costs(parts))
    assert costliest <= max(batch.part_costs(share_out(batch, splits))) * (1 + 1e-6)


@given(batch=ragged_batches, splits=st.integers(2, 8), floor=st.integers(2, 10))
def test_splits_keep_to_the_floor(batch: BatchCosts, splits: int, floor: int) -> None:
    parts = sizes(SplitRules(splits=splits, floor=floor), batch)
    assert all(size >= floor for size in parts[:-1])
    assert len(parts) >= min(splits, max(len(batch) // floor, 1))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (SplitRules(splits=2), (5, 5)),
        (SplitRules(splits=3), (4, 3, 3)),
        (SplitRules(splits=20), (1,) * 10),
        (SplitRules(splits=2, safe_limit=4), (4, 3, 3)),
        (SplitRules(splits=3, equal=True), (2,) * 5),
        (SplitRules(splits=2, samples=2), (2,) * 5),
        (SplitRules(splits=2, threshold=10), (10,)),
        (SplitRules(splits=2, threshold=9), (5, 5)),
        (SplitRules(splits=2, threshold=10, tuned_limit=5), (5, 5)),
        (SplitRules(splits=2, target=4), (4, 3, 3)),
        (SplitRules(splits=5, target=4, max_splits=2), (2,) * 5),
        (SplitRules(splits=2, floor=6), (6, 4)),
    ],
)
def test_splits_go_with_every_other_option(rules: SplitRules, expected: tuple[int, ...]) -> None:
    assert sizes(rules) == expected


def shared_batches(most: int) -> st.SearchStrategy[BatchCosts]:
    return st.builds(
        lambda rows, features: BatchCosts(np.array(rows, dtype=np.float64), features, (1.0, 3.0)),
        st.lists(pairs, min_size=1, max_size=most),
        st.sampled_from([SUMMED, PADDED]),
    )


def costliest(batch: BatchCosts, stops: tuple[int, ...]) -> float:
    return max(batch.cost(start, stop) for start, stop in pairwise((0, *stops)))


@given(shared_batches(200), st.integers(1, 9), st.integers(1, 8))
def test_shares_hold_every_sample_once_and_in_order(batch: BatchCosts, shares: int, floor: int) -> None:
    sizes = share_out(batch, shares, floor)
    assert len(sizes) == shares
    assert sum(sizes) == len(batch)
    # Of fewer samples than the floor there is one share.
    assert all(size >= min(floor, len(batch)) for size in sizes if size)
    assert [bool(size) for size in sizes] == sorted(map(bool, sizes), reverse=True)


@given(shared_batches(9), st.integers(1, 4), st.integers(1, 3))
def test_no_other_shares_have_a_cheaper_costliest_one(batch: BatchCosts, shares: int, floor: int) -> None:
    stops = tuple(np.cumsum(share_out(batch, shares, floor)).tolist())
    cuts = [(*cut, len(batch)) for cut in combinations_with_replacement(range(len(batch) + 1), shares - 1)]
    allowed = [
        cut for cut in cuts if {stop - start >= floor for start, stop in pairwise((0, *cut)) if stop > start} == {True}
    ]
    best = min(costliest(batch, cut) for cut in allowed or [(len(batch),)])
    assert costliest(batch, stops) == pytest.approx(best, rel=1e-8)


def test_a_batch_is_shared_out_among_millions_at_once() -> None:
    batch = BatchCosts.of_samples([3, 1, 1, 2])
    begin = time.process_time()
    assert share_out(batch, 10**6) == share_out(batch, 4) + (0,) * (10**6 - 4)
    order = BatchCosts.uniform(500)
    assert largest_typical_batch(order, 1, upper=500, shares=10**6) == 500
    assert time.process_time() - begin < 1


def test_shares_are_of_cost_and_not_of_count() -> None:
    assert share_out(BatchCosts.of_samples([9, 1, 1, 1, 1, 1, 1, 1, 1, 1]), 2) == (1, 9)


def test_there_may_be_more_shares_than_samples() -> None:
    assert share_out(BatchCosts.uniform(3), 5) == (1, 1, 1, 0, 0)


@given(shared_batches(60), st.integers(1, 5), st.integers(1, 20_000))
def test_the_largest_typical_batch_can_be_shared_out(batch: BatchCosts, shares: int, limit: int) -> None:
    size = largest_typical_batch(batch, limit, upper=len(batch), shares=shares)
    fit = []
    for start in range(0, len(batch) - size + 1, size):
        part = batch.part(start, start + size)
        stops = tuple(np.cumsum(share_out(part, shares)).tolist())
        fit.append(costliest(part, stops) <= limit * (1 + 1e-8))
    assert size == 1 or np.mean(fit) >= 0.95


def test_more_devices_hold_a_larger_batch() -> None:
    sizes = [largest_typical_batch(BatchCosts.uniform(100), 7, upper=100, shares=shares) for shares in (1, 2, 4)]
    assert sizes == [7, 14, 28]


@pytest.mark.parametrize("divisor", ["no", 1, None, object()])
def test_a_divisor_is_asked_for_by_a_flag(divisor: Any) -> None:
    with pytest.raises(ArgumentError, match="divisor is True or False"):
        solve_accumulation(10, 3, divisor=divisor)
