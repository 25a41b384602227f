from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.nn import GATConv

from can_train.tasks.can.data.batches import Gatherer
from can_train.tasks.can.data.graphs import FlatGraphs
from can_train.tasks.can.inputs import UNKNOWN_ID, InputEncoder, InputStatistics
from can_train.tasks.can.models import EdgeAttention, GatClassifier, Vgae, with_self_loops, worst_nodes
from can_train.tasks.can.settings import CanDatasetSettings, GatSettings, VgaeSettings
from fakes.random_bus import cached_graphs, random_blocks

STUDENT = GatSettings(hidden=24, layers=2, heads=4, embedding=8, dropout=0.1, head_layers=2)


@pytest.fixture
def flat(tmp_path: Path) -> FlatGraphs:
    return cached_graphs(tmp_path / "graphs", [random_blocks(30)])


def encoder(flat: FlatGraphs, *, embedding: int = 8, identity: bool = True) -> InputEncoder:
    statistics = InputStatistics.fit(flat, np.arange(len(flat)))
    return InputEncoder(statistics, embedding=embedding, dataset=CanDatasetSettings(identity=identity))


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_teacher_and_the_student_have_their_published_sizes(flat: FlatGraphs) -> None:
    assert parameters(GatClassifier(GatSettings(), encoder(flat, embedding=32))) == pytest.approx(1.1e6, rel=0.1)
    assert parameters(GatClassifier(STUDENT, encoder(flat))) == pytest.approx(55e3, rel=0.1)


def test_statistics_are_those_of_the_chosen_windows(flat: FlatGraphs) -> None:
    rows = np.array([3, 4, 5, 9, 20])
    nodes = np.concatenate([flat.node_features[flat.node_ptr[row] : flat.node_ptr[row + 1]] for row in rows])
    statistics = InputStatistics.fit(flat, rows)
    assert statistics.node_mean == pytest.approx(nodes.astype(np.float64).mean(axis=0))
    assert statistics.node_std == pytest.approx(nodes.astype(np.float64).std(axis=0))


def test_an_id_that_only_attacks_use_is_no_part_of_the_vocabulary(flat: FlatGraphs) -> None:
    label = np.zeros(len(flat), np.uint8)
    first = flat.node_code[: flat.node_ptr[1]]
    elsewhere = flat.node_code[flat.node_ptr[1] :]
    label[0] = 1
    statistics = InputStatistics.fit(replace(flat, label=label), np.arange(len(flat)))
    assert set(statistics.vocabulary) == set(flat.ids[np.unique(elsewhere)])
    assert set(flat.ids[first]) - set(flat.ids[elsewhere]) == set(flat.ids) - set(statistics.vocabulary)


def test_known_ids_have_their_own_index_and_unknown_ones_share_one(flat: FlatGraphs) -> None:
    inputs = encoder(flat)
    known = torch.from_numpy(flat.ids)
    assert inputs.id_index(known).tolist() == list(range(1, len(known) + 1))
    assert inputs.id_index(known + 1)[-1] == UNKNOWN_ID
    assert inputs.id_index(torch.tensor([0, 2**29 - 1])).tolist() == [UNKNOWN_ID, UNKNOWN_ID]


def test_without_identity_the_input_does_not_depend_on_ids(flat: FlatGraphs) -> None:
    inputs = encoder(flat, identity=False)
    batch = Gatherer(flat)(np.arange(5))
    node, _ = inputs(batch)
    other, _ = inputs(replace(batch, can_id=batch.can_id * 0))
    assert node.shape[1] == inputs.width
    assert torch.equal(node, other)


def test_a_flood_stays_finite_and_ordered(flat: FlatGraphs) -> None:
    inputs = encoder(flat)
    batch = Gatherer(flat)(np.arange(2))
    huge = replace(batch, x=batch.x * 0 + torch.arange(1.0, len(batch.x) + 1)[:, None] * 1e6)
    node, _ = inputs.scaled(huge)
    assert node.max() < 100
    assert (node[1:, 0] > node[:-1, 0]).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda inputs: GatClassifier(STUDENT, inputs),
        lambda inputs: Vgae(VgaeSettings(hidden=[16, 8], latent=4, heads=2), inputs),
    ],
)
def test_a_checkpoint_alone_scores_a_log(flat: FlatGraphs, make: Callable[[InputEncoder], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    trained = make(encoder(flat)).eval()
    empty = make(
        InputEncoder(InputStatistics.empty(len(flat.ids)), embedding=8, dataset=CanDatasetSettings(identity=True))
    ).eval()
    empty.load_state_dict(trained.state_dict())
    batch = Gatherer(flat)(np.arange(4))
    arguments = (batch,) if isinstance(trained, GatClassifier) else (batch, None)
    one, other = trained(*arguments), empty(*arguments)
    assert torch.equal(getattr(one, "node", one), getattr(other, "node", other))


def test_attention_with_folded_edges_is_that_of_the_layer_it_replaces(flat: FlatGraphs) -> None:
    torch.manual_seed(0)
    usual, folded = GATConv(16, 6, heads=4, edge_dim=11), EdgeAttention(16, 6, heads=4, dropout=0.0)
    folded.load_state_dict(usual.state_dict())
    batch = Gatherer(flat)(np.arange(12))
    x, edge = torch.randn(len(batch.can_id), 16), torch.randn(batch.edge_index.shape[1], 11)
    ends, with_loops = with_self_loops(batch, edge)
    expected = usual(x, batch.edge_index, edge_attr=edge)
    torch.testing.assert_close(folded(x, ends, with_loops), expected, rtol=1e-5, atol=1e-6)


def test_the_worst_nodes_are_those_with_the_largest_errors_of_each_window() -> None:
    error = torch.tensor([5.0, 1.0, 4.0, 3.0, 2.0, 7.0, 6.0])
    graph = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    assert sorted(worst_nodes(error, graph).tolist()) == [0, 2, 3, 5, 6]
