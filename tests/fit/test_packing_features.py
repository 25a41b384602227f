from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train.fit.packing import BatchCosts, MicroBatchLimit, batch_totals, cut, growing_totals
from can_train.task import Feature

THREE = (Feature("nodes"), Feature("tokens", padding=1), Feature("attention", padding=2))
rows = st.tuples(st.integers(0, 1_000), st.integers(0, 1_000), st.integers(0, 1_000))
counts = st.lists(rows, min_size=1, max_size=40).map(lambda found: np.array(found, dtype=np.float64))


@given(counts)
def test_a_feature_is_summed_or_padded_to_the_largest_sample(counts: NDArray[np.float64]) -> None:
    size, (_, tokens, attention) = len(counts), counts.max(axis=0)
    expected = [counts[:, 0].sum(), size * tokens, size * attention**2]
    assert batch_totals(THREE, counts).tolist() == expected


@given(counts)
def test_growing_totals_are_those_of_the_batches_so_far_and_never_fall(counts: NDArray[np.float64]) -> None:
    growing = growing_totals(THREE, counts)
    assert growing.tolist() == [batch_totals(THREE, counts[: stop + 1]).tolist() for stop in range(len(counts))]
    assert all((before <= after).all() for before, after in pairwise(growing))


@given(counts)
def test_the_order_of_samples_does_not_matter(counts: NDArray[np.float64]) -> None:
    shuffled = np.random.default_rng(0).permutation(counts)
    assert batch_totals(THREE, shuffled).tolist() == batch_totals(THREE, counts).tolist()


def test_an_empty_batch_has_nothing() -> None:
    assert batch_totals(THREE, np.empty((0, 3))).tolist() == [0, 0, 0]


def test_counts_that_do_not_belong_to_the_features_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        growing_totals(THREE, np.ones((4, 2)))


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30)
SOURCE, TARGET = Feature("source", padding=1), Feature("target", padding=1)
CROSS = Feature("source × target", padding=1, factors=("source", "target"))


def counts_of(lengths: list[tuple[int, int]]) -> NDArray[np.float64]:
    return np.array([(source, target, source * target) for source, target in lengths], dtype=np.float64)


@given(LENGTHS)
def test_a_product_of_features_counts_the_largest_of_each_though_no_sample_has_both(
    lengths: list[tuple[int, int]],
) -> None:
    found = batch_totals((SOURCE, TARGET, CROSS), counts_of(lengths))[-1]
    assert found == len(lengths) * max(source for source, _ in lengths) * max(target for _, target in lengths)


@given(LENGTHS, st.floats(0.1, 3.0))
def test_a_batch_in_packing_order_is_cut_into_parts_that_cost_no_more_in_all(
    lengths: list[tuple[int, int]], share: float
) -> None:
    batch = BatchCosts(counts_of(lengths)[:, :1], (SOURCE,), (1.0,))
    limit = MicroBatchLimit(cost=max(share * batch.total, batch.each().max()))
    packed = batch.packed()
    assert sorted(packed.each()) == sorted(batch.each())
    assert len(cut(packed, limit)) <= len(cut(batch, limit))


def test_samples_that_are_not_padded_keep_their_order() -> None:
    batch = BatchCosts.of_samples([3.0, 9.0, 1.0])
    assert batch.packed() is batch
