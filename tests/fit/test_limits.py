import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.packing import BatchCosts, PartLimit, SplitRules, cut, optimizer_batches
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
