"""Batches gathered from flat arrays, and reductions over groups, against torch_geometric's own."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric import utils
from torch_geometric.data import Batch, Data

from can_train_tasks.can.data.batches import Gatherer, GraphBatch, scatter
from can_train_tasks.can.data.graphs import FlatGraphs
from fakes.random_bus import cached_graphs, random_blocks

NUM_GRAPHS = 12


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> FlatGraphs:
    folder: Path = tmp_path_factory.mktemp("cache") / "key"
    return cached_graphs(folder, [random_blocks(5, seed=1), random_blocks(7, seed=2)])


def one_graph(flat: FlatGraphs, g: int) -> Data:
    nodes, edges = (slice(ptr[g], ptr[g + 1]) for ptr in (flat.node_ptr, flat.edge_ptr))
    return Data(
        x=torch.tensor(flat.node_features[nodes]),
        edge_index=torch.tensor(flat.edge_index[:, edges], dtype=torch.int64),
        edge_attr=torch.tensor(flat.edge_features[edges]),
        can_id=torch.tensor(flat.ids[flat.node_code[nodes]]),
        label=torch.tensor([int(flat.label[g])]),
    )


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, NUM_GRAPHS - 1), min_size=1, max_size=20))
def test_a_batch_equals_the_one_of_torch_geometric(rows: list[int], flat: FlatGraphs) -> None:
    batch = Gatherer(flat)(np.array(rows))
    expected = Batch.from_data_list([one_graph(flat, g) for g in rows])
    for name in ("x", "edge_index", "edge_attr", "can_id", "label", "batch"):
        got, wanted = getattr(batch, name), getattr(expected, name)
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name
    assert batch.num_graphs == expected.num_graphs


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(0, NUM_GRAPHS - 1), max_size=20), dtype=st.sampled_from([torch.float32, torch.float64])
)
def test_a_batch_gathered_on_the_device_has_the_bits_of_one_that_was_gathered_on_the_host(
    rows: list[int], dtype: torch.dtype, flat: FlatGraphs
) -> None:
    gather, wanted_rows = Gatherer(flat), np.array(rows, dtype=np.int64)
    expected = gather.to(wanted_rows, torch.device("cpu"), dtype)
    # Copies, so that the arrays on the host could be changed unseen.
    gather.on_device = {name: torch.from_numpy(array.copy()) for name, array in gather.arrays.items()}
    batch = gather.to(wanted_rows, torch.device("cpu"), dtype)
    for field in fields(GraphBatch):
        got, wanted = getattr(batch, field.name), getattr(expected, field.name)
        if wanted is None:
            assert got is None, field.name
            continue
        assert (got.dtype, got.is_contiguous()) == (wanted.dtype, wanted.is_contiguous()), field.name
        assert torch.equal(got.nan_to_num(nan=7.5), wanted.nan_to_num(nan=7.5)), field.name


@settings(deadline=None)
@given(
    group=st.lists(st.integers(0, 5), max_size=12),
    width=st.sampled_from([(), (3,), (2, 3)]),
    reduce=st.sampled_from(["sum", "mean", "max"]),
)
def test_a_reduction_over_groups_equals_the_one_of_torch_geometric(
    group: list[int], width: tuple[int, ...], reduce: str
) -> None:
    values = torch.randn(len(group), *width, generator=torch.Generator().manual_seed(len(group)))
    outcomes = []
    for reduced in (
        lambda each, index: scatter(each, index, 6, reduce),
        lambda each, index: utils.scatter(each, index, dim=0, dim_size=6, reduce=reduce),
    ):
        each = values.clone().requires_grad_()
        result = reduced(each, torch.tensor(group, dtype=torch.int64))
        result.square().sum().backward()
        outcomes.append((result, each.grad))
    (ours, our_gradient), (theirs, their_gradient) = outcomes
    assert torch.equal(ours, theirs)
    assert torch.equal(our_gradient, their_gradient)


def test_no_rows_make_an_empty_batch(flat: FlatGraphs) -> None:
    batch = Gatherer(flat)(np.empty(0, dtype=np.int64))
    assert batch.num_graphs == 0
    assert batch.edge_index.shape == (2, 0)


def test_a_batch_is_a_copy_of_the_graphs(flat: FlatGraphs) -> None:
    gather = Gatherer(flat)
    gather(np.arange(NUM_GRAPHS)).x.zero_()
    assert gather(np.arange(NUM_GRAPHS)).x.any()


def test_every_attack_kind_is_an_attack(flat: FlatGraphs) -> None:
    kinds = np.arange(NUM_GRAPHS, dtype=np.uint8) % 3
    batch = Gatherer(replace(flat, label=kinds))(np.arange(NUM_GRAPHS))
    assert batch.label.tolist() == kinds.tolist()
    assert batch.y.tolist() == [0, 1, 1] * 4


def test_moving_a_batch_changes_the_type_of_its_features_only(flat: FlatGraphs) -> None:
    batch = Gatherer(flat)(np.arange(3)).to("cpu", torch.float64)
    assert batch.x.dtype == batch.edge_attr.dtype == torch.float64
    assert {getattr(batch, name).dtype for name in ("edge_index", "can_id", "batch", "label")} == {torch.int64}


def test_batch_features_count_nodes_edges_without_self_loops_and_graphs(flat: FlatGraphs) -> None:
    rows = np.array([3, 0, 11, 3])
    graphs = [one_graph(flat, g) for g in rows]
    loops = [int((graph.edge_index[0] == graph.edge_index[1]).sum()) for graph in graphs]
    assert any(loops)
    expected = [[graph.num_nodes, graph.num_edges - n, 1] for graph, n in zip(graphs, loops, strict=True)]
    np.testing.assert_array_equal(Gatherer(flat).batch_features(rows), expected)
