import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train.fit.probe import SMALLEST_PROBE, extreme_samples

rows = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 400)), min_size=1, max_size=60)
all_counts = rows.map(lambda found: np.array(found, dtype=np.float64))


def graphs(size: int = 1_000) -> NDArray[np.float64]:
    """Nodes and edges that mostly go together, as graphs of traffic do."""
    rng = np.random.default_rng(0)
    nodes = rng.integers(20, 60, size).astype(np.float64)
    return np.stack([nodes, np.round(nodes * rng.uniform(1.8, 2.2, size))], axis=1)


def totals(counts: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    return np.stack([counts[positions].sum(axis=0) for positions in extreme_samples(counts, size)])


@given(counts=all_counts, size=st.integers(1, 20))
def test_probes_are_of_the_size_asked_for_and_one_is_twice_as_large(counts: NDArray[np.float64], size: int) -> None:
    probes = extreme_samples(counts, size)
    assert [len(probe) for probe in probes] == [size] * (len(probes) - 1) + [2 * size]
    assert all(0 <= position < len(counts) for probe in probes for position in probe)


@given(counts=all_counts, size=st.integers(1, 20))
def test_the_extremes_of_every_feature_are_among_them(counts: NDArray[np.float64], size: int) -> None:
    probes = extreme_samples(counts, size)
    for feature in counts.T:
        found = [feature[probe].sum() for probe in probes[:-1]]
        ordered = np.sort(feature)
        assert max(found) == np.resize(ordered[::-1][:size], size).sum()
        assert min(found) == np.resize(ordered[:size], size).sum()


def test_features_that_go_together_can_be_told_apart_by_the_probes_but_hardly_by_ordinary_batches() -> None:
    counts = graphs()
    chosen = totals(counts, SMALLEST_PROBE)
    ordinary = counts.reshape(-1, SMALLEST_PROBE, 2)[: len(chosen)].sum(axis=1)
    sparse_and_dense = np.sort(counts[:, 1] / counts[:, 0])[[SMALLEST_PROBE - 1, -SMALLEST_PROBE]]
    assert min(chosen[:, 1] / chosen[:, 0]) <= sparse_and_dense[0]
    assert max(chosen[:, 1] / chosen[:, 0]) >= sparse_and_dense[1]
    assert np.ptp(ordinary[:, 1] / ordinary[:, 0]) < 0.2
    assert np.linalg.matrix_rank(np.column_stack([np.ones(len(chosen)), chosen])) == 3


def test_no_probe_is_run_twice() -> None:
    probes = extreme_samples(np.array([[1.0, 1.0], [2.0, 4.0], [3.0, 9.0]]), 3)
    assert [len(probe) for probe in probes] == [3, 3, 6]


def test_a_feature_that_is_the_same_everywhere_asks_for_no_probe() -> None:
    assert len(extreme_samples(np.full((50, 2), 7.0), 4)) == 2


def test_few_samples_come_again() -> None:
    assert [probe.tolist() for probe in extreme_samples(np.array([[5.0]]), 3)] == [[0] * 3, [0] * 6]
