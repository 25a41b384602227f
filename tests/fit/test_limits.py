import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.packing import BatchCosts, PartLimit, SplitRules, cut, optimizer_batches, share_out
from can_train.task import Feature

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
    wanted = cut(batch, PartLimit(cost=target))
    if len(wanted) <= cap:
        assert cut(batch, limit) == wanted
        return
    assert len(cut(batch, limit)) <= cap
    assert len(cut(batch, PartLimit(cost=limit.cost * (1 - 1e-6)))) > cap


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
