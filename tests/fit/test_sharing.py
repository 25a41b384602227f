import doctest
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit import packing
from can_train.fit.packing import BatchCosts, largest_typical_batch, share_out
from can_train.task import Feature

SUMMED = (Feature("nodes"), Feature("edges"))
PADDED = (Feature("tokens", padding=1), Feature("attention", padding=2))

pairs = st.tuples(st.integers(0, 60), st.integers(0, 60))


def batches(most: int) -> st.SearchStrategy[BatchCosts]:
    return st.builds(
        lambda rows, features: BatchCosts(np.array(rows, dtype=np.float64), features, (1.0, 3.0)),
        st.lists(pairs, min_size=1, max_size=most),
        st.sampled_from([SUMMED, PADDED]),
    )


def costliest(batch: BatchCosts, stops: tuple[int, ...]) -> float:
    return max(batch.cost(start, stop) for start, stop in pairwise((0, *stops)))


@given(batches(200), st.integers(1, 9))
def test_shares_hold_every_sample_once_and_in_order(batch: BatchCosts, shares: int) -> None:
    sizes = share_out(batch, shares)
    assert len(sizes) == shares
    assert min(sizes) >= 0
    assert sum(sizes) == len(batch)


@given(batches(9), st.integers(1, 4))
def test_no_other_shares_have_a_cheaper_costliest_one(batch: BatchCosts, shares: int) -> None:
    stops = tuple(np.cumsum(share_out(batch, shares)).tolist())
    cuts = combinations_with_replacement(range(len(batch) + 1), shares - 1)
    best = min(costliest(batch, (*cut, len(batch))) for cut in cuts)
    assert costliest(batch, stops) == pytest.approx(best, rel=1e-8)


def test_shares_are_of_cost_and_not_of_count() -> None:
    assert share_out(BatchCosts.of_samples([9, 1, 1, 1, 1, 1, 1, 1, 1, 1]), 2) == (1, 9)


def test_there_may_be_more_shares_than_samples() -> None:
    assert share_out(BatchCosts.uniform(3), 5) == (1, 1, 1, 0, 0)


@given(batches(60), st.integers(1, 5), st.integers(1, 20_000))
def test_the_largest_typical_batch_can_be_shared_out(batch: BatchCosts, shares: int, limit: int) -> None:
    size = largest_typical_batch(batch, limit, upper=len(batch), shares=shares, fitting_share=1.0)
    for start in range(0, len(batch) - size + 1, size):
        part = batch.part(start, start + size)
        stops = tuple(np.cumsum(share_out(part, shares)).tolist())
        assert size == 1 or costliest(part, stops) <= limit * (1 + 1e-8)


def test_more_devices_hold_a_larger_batch() -> None:
    sizes = [largest_typical_batch(BatchCosts.uniform(100), 7, upper=100, shares=shares) for shares in (1, 2, 4)]
    assert sizes == [7, 14, 28]


def test_the_examples_are_true() -> None:
    assert doctest.testmod(packing).failed == 0
