from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import utils
from torch_geometric.nn import GATConv

from can_train_tasks.can.contributions import PROPERTIES, SILENCE, autoencoder_contributions, classifier_contributions
from can_train_tasks.can.data.batches import Gatherer
from can_train_tasks.can.data.behaviour import BEHAVIOUR
from can_train_tasks.can.data.graphs import FlatGraphs
from can_train_tasks.can.evaluation.metrics import ERROR_TERMS
from can_train_tasks.can.inputs import UNKNOWN_ID, InputEncoder, InputStatistics, with_self_loops
from can_train_tasks.can.losses import AutoencoderBatch, ClassifierBatch
from can_train_tasks.can.models import (
    CLOSE_FRAMES,
    MISSING_ID,
    STRANGE_ID,
    EdgeAttention,
    GatClassifier,
    Vgae,
    softmax_of_groups,
    worst_nodes,
)
from can_train_tasks.can.settings import CanDatasetSettings, GatSettings, VgaeSettings
from fakes.random_bus import cached_graphs, random_blocks
from fakes.silenced_bus import silenced_graphs

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
    inputs, batch = encoder(flat), Gatherer(flat)(np.arange(5))
    index = inputs.id_index(batch)
    assert torch.equal(inputs.vocabulary[index - 1], batch.can_id)
    strangers = batch.can_id.clone()
    strangers[[0, -1]] = torch.tensor([0, 2**29 - 1])
    expected = index.clone()
    expected[[0, -1]] = UNKNOWN_ID
    assert torch.equal(inputs.id_index(replace(batch, can_id=strangers)), expected)


def test_without_identity_the_input_does_not_depend_on_ids(flat: FlatGraphs) -> None:
    inputs = encoder(flat, identity=False)
    batch = Gatherer(flat)(np.arange(5))
    node = inputs(inputs.prepared(batch))
    other = inputs(inputs.prepared(replace(batch, can_id=batch.can_id * 0)))
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


def test_before_any_training_a_classifier_suspects_strangers_and_frames_that_come_too_early(flat: FlatGraphs) -> None:
    torch.manual_seed(0)
    model, batch = GatClassifier(STUDENT, encoder(flat)).eval(), Gatherer(flat)(np.arange(5))
    prepared = model.inputs.prepared(batch)
    prepared = replace(prepared, edge=torch.zeros_like(prepared.edge))
    usual = torch.zeros(len(batch.can_id), model.inputs.width)
    first = model.inputs.width - model.inputs.num_deviations
    early, strange = usual.clone(), usual.clone()
    early[0, first + BEHAVIOUR.index("gap_min")] = -3
    strange[0, -1] = 1

    def suspicion(nodes: Tensor) -> float:
        benign, attack = model.classify(nodes, prepared)[0].tolist()
        return float(attack - benign)

    assert suspicion(early) - suspicion(usual) == pytest.approx(3 * CLOSE_FRAMES, abs=1)
    assert suspicion(strange) - suspicion(usual) == pytest.approx(STRANGE_ID, abs=1)


def test_an_id_that_is_overdue_raises_the_score_of_either_network(tmp_path: Path) -> None:
    flat, last = silenced_graphs(tmp_path / "silenced")
    inputs = InputEncoder(
        InputStatistics.fit(flat, np.flatnonzero(flat.source < last)), embedding=4, dataset=CanDatasetSettings()
    )
    batch = Gatherer(flat)(np.flatnonzero(flat.source == last))
    empty = torch.empty(0)
    complete = replace(batch, absent_id=empty.long(), absent_silence=empty, absent_batch=empty.long())
    overdue = inputs.overdue(batch)
    missing = torch.zeros(batch.num_graphs).index_add(0, batch.absent_batch, overdue)
    assert missing.max() == 1
    torch.manual_seed(0)
    classifier, autoencoder = GatClassifier(STUDENT, inputs).eval(), Vgae(VgaeSettings(), inputs).eval()
    with torch.no_grad():
        difference = ClassifierBatch.scores(classifier, batch) - ClassifierBatch.scores(classifier, complete)
        terms = AutoencoderBatch.scores(autoencoder, batch) - AutoencoderBatch.scores(autoencoder, complete)
        of_classifier = classifier_contributions(classifier, batch)
        of_autoencoder = autoencoder_contributions(autoencoder, batch, [1.0] * len(ERROR_TERMS))
    assert torch.allclose(difference[:, 0], MISSING_ID * missing, atol=1e-5)
    assert torch.equal(terms[:, ERROR_TERMS.index("ids")], missing)
    assert (terms[:, : ERROR_TERMS.index("ids")] == 0).all()
    # What they say of it is in the order of the windows' IDs.
    window = np.repeat(np.arange(batch.num_graphs), flat.num_ids[flat.source == last])
    node = np.concatenate([np.arange(n) < m for n, m in zip(flat.num_ids, flat.num_nodes, strict=True)])
    absent = ~node[np.repeat(flat.source, flat.num_ids) == last]
    for found, weight in ((of_classifier, MISSING_ID), (of_autoencoder, 1.0)):
        silence = found[:, PROPERTIES.index(SILENCE)].numpy()
        assert np.bincount(window[absent], silence[absent], batch.num_graphs) == pytest.approx(weight * missing.numpy())


def test_a_classifier_learns_from_extremes_alone_in_some_windows(flat: FlatGraphs) -> None:
    torch.manual_seed(0)
    model = GatClassifier(replace(STUDENT, dropout=0.0), encoder(flat)).train()
    model.graph_dropout = 0.5
    batch = Gatherer(flat)(np.arange(30))
    with torch.no_grad():
        changed = (model(batch) != model(batch)).any(dim=1)
    assert changed.any()
    assert not changed.all()


def test_self_loops_equal_the_ones_of_torch_geometric(flat: FlatGraphs) -> None:
    batch = Gatherer(flat)(np.arange(6))
    assert (batch.edge_index[0] == batch.edge_index[1]).any()
    ends, edge = utils.remove_self_loops(batch.edge_index, batch.edge_attr)
    expected = utils.add_self_loops(ends, edge, fill_value="mean", num_nodes=len(batch.x))
    for ours, theirs in zip(with_self_loops(batch, batch.edge_attr), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_softmax_of_groups_equals_the_one_of_torch_geometric() -> None:
    values, group = torch.randn(20, 4) * 30, torch.arange(20) % 7
    assert torch.equal(softmax_of_groups(values, group, 9), utils.softmax(values, group, num_nodes=9))


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
