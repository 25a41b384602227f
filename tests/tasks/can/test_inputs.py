"""What the networks see of an ID: the comparison with training, with its own past, and nothing where it is hidden."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from can_train_tasks.can.data.batches import Gatherer, GraphBatch
from can_train_tasks.can.data.behaviour import BEHAVIOUR
from can_train_tasks.can.data.graphs import FlatGraphs, Frames, GraphBuilder
from can_train_tasks.can.inputs import (
    ENDLESS,
    LEAST_STD,
    PUNCTUAL_LOGS,
    UNKNOWN_ID,
    InputEncoder,
    InputStatistics,
    new_id_gaps,
    new_id_notes,
    rare_ids,
)
from can_train_tasks.can.settings import CanDatasetSettings
from fakes.random_bus import cached_graphs, random_blocks
from fakes.silenced_bus import BUS, SILENCED, silenced_graphs

WINDOWS = 60


@pytest.fixture
def flat(tmp_path: Path) -> FlatGraphs:
    return cached_graphs(tmp_path / "graphs", [random_blocks(WINDOWS)])


def encoder(flat: FlatGraphs, **settings: object) -> InputEncoder:
    statistics = InputStatistics.fit(flat, np.arange(len(flat)))
    return InputEncoder(statistics, embedding=4, dataset=CanDatasetSettings(**settings))  # type: ignore[arg-type]


def hidden(batch: GraphBatch, *rows: int) -> GraphBatch:
    mask = torch.zeros(batch.num_graphs, dtype=torch.bool)
    mask[list(rows)] = True
    return replace(batch, hidden=mask)


def test_what_is_usual_of_an_id_is_its_mean_and_spread_in_benign_windows(flat: FlatGraphs) -> None:
    label = (np.arange(WINDOWS) % 3 == 0).astype(np.uint8)
    statistics = InputStatistics.fit(replace(flat, label=label), np.arange(WINDOWS))
    benign = np.repeat(label == 0, flat.num_nodes) & ~np.isnan(flat.behaviour[:, 0])
    # The ID that most of the windows have.
    code = np.bincount(flat.node_code[benign]).argmax()
    index = 1 + list(statistics.vocabulary).index(flat.ids[code])
    own = flat.behaviour[benign & (flat.node_code == code)].astype(np.float64)
    assert statistics.id_mean[index] == pytest.approx(own.mean(axis=0))
    assert (statistics.id_std >= LEAST_STD).all()
    assert (statistics.past_std >= LEAST_STD).all()


def test_the_ids_of_hidden_windows_are_unknown_and_no_others(flat: FlatGraphs) -> None:
    inputs, batch = encoder(flat), Gatherer(flat)(np.arange(5))
    assert inputs.embedding is not None
    seen, unseen = (inputs(inputs.prepared(each))[:, :4] for each in (batch, hidden(batch, 1, 3)))
    is_hidden = torch.isin(batch.batch, torch.tensor([1, 3]))
    assert (unseen[is_hidden] == inputs.embedding.weight[UNKNOWN_ID]).all()
    assert torch.equal(unseen[~is_hidden], seen[~is_hidden])
    assert torch.equal(seen, inputs.embedding(inputs.id_index(batch)))


def test_an_id_that_is_hidden_is_compared_with_its_own_past_alone(flat: FlatGraphs) -> None:
    inputs, batch = encoder(flat), Gatherer(flat)(np.arange(WINDOWS - 5, WINDOWS))
    columns, first = len(BEHAVIOUR), inputs.width - inputs.num_deviations
    seen, unseen = (inputs(inputs.prepared(each))[:, first:] for each in (batch, hidden(batch, *range(5))))
    assert (unseen[:, :columns] == 0).all()
    assert torch.equal(seen[:, columns:], unseen[:, columns:])
    assert (seen[:, :columns] != 0).any()


def test_a_single_unknown_id_is_a_stranger_and_a_whole_unknown_bus_is_not(flat: FlatGraphs) -> None:
    inputs, batch = encoder(flat), Gatherer(flat)(np.arange(2))
    age = 1 + batch.past_windows[batch.batch == 0]
    index = inputs.id_index(batch)
    index[0] = UNKNOWN_ID
    strangeness = inputs.strangeness(batch, index)
    assert strangeness[0] == pytest.approx(1 - 2 * float(age[0] / age.sum()))
    assert (strangeness[1:] == 0).all()
    assert (inputs.strangeness(batch, torch.zeros_like(index)) == 0).all()
    # Its past is the attack's own.
    assert (inputs.deviations(batch, index)[0, : 2 * len(BEHAVIOUR)].abs() < 1).all()


def test_numbers_that_another_vehicle_happens_to_share_are_unknown_there(flat: FlatGraphs) -> None:
    inputs, batch = encoder(flat), Gatherer(flat)(np.arange(WINDOWS - 3, WINDOWS))
    others = batch.can_id + 1
    others[0] = batch.can_id[0]
    assert (inputs.id_index(replace(batch, can_id=others))[batch.batch == 0] == UNKNOWN_ID).all()


def test_made_up_ids_are_strangers_however_many_there_are(flat: FlatGraphs) -> None:
    inputs, batch = encoder(flat), Gatherer(flat)(np.arange(WINDOWS - 3, WINDOWS))
    made_up = torch.arange(len(batch.can_id)) % 3 != 0
    can_id = torch.where(made_up, batch.can_id + 1, batch.can_id)
    young = replace(batch, can_id=can_id, past_windows=torch.where(made_up, 0.0, batch.past_windows))
    index = inputs.id_index(young)
    assert torch.equal(index == UNKNOWN_ID, made_up)
    assert (inputs.strangeness(young, index)[made_up] > 0.5).all()


def test_an_edge_of_all_of_a_windows_ids_says_nothing_of_one(flat: FlatGraphs) -> None:
    inputs, batch = encoder(flat), Gatherer(flat)(np.arange(5))
    node = inputs(inputs.prepared(batch))
    entering = node[:, 4 + 10 : 4 + 10 + 11]
    assert torch.stack([entering[batch.batch == row].mean(dim=0) for row in range(5)]).abs().max() < 1e-5


def test_classic_features_see_neither_rhythm_nor_change(flat: FlatGraphs) -> None:
    inputs, batch = encoder(flat, features="classic"), Gatherer(flat)(np.arange(4))
    torch.manual_seed(0)
    other = replace(batch, behaviour=torch.randn_like(batch.behaviour), past=torch.randn_like(batch.past))
    node = inputs(inputs.prepared(batch))
    assert torch.equal(node, inputs(inputs.prepared(other)))
    assert node.shape[1] == inputs.width == 4 + 10 + 22
    assert inputs.target_weights.tolist() == pytest.approx([0.1] * 10)


def test_what_an_autoencoder_reconstructs_does_not_depend_on_what_is_hidden(flat: FlatGraphs) -> None:
    inputs, batch = encoder(flat), Gatherer(flat)(np.arange(4))
    all_hidden = hidden(batch, 0, 1, 2, 3)
    seen, unseen = (inputs.prepared(each, reconstructs=True).features for each in (batch, all_hidden))
    assert seen.node.shape[1] == len(inputs.target_weights) == 10 + len(BEHAVIOUR)
    assert torch.equal(seen.node, unseen.node)
    assert torch.equal(seen.edge, unseen.edge)


def test_a_punctual_id_is_overdue_once_it_is_silent_for_longer_than_ever(tmp_path: Path) -> None:
    flat, last = silenced_graphs(tmp_path / "graphs")
    statistics = InputStatistics.fit(flat, np.flatnonzero(flat.source < last))
    inputs = InputEncoder(statistics, embedding=4, dataset=CanDatasetSettings())
    batch = Gatherer(flat)(np.flatnonzero(flat.source == last))
    overdue = inputs.overdue(batch)
    assert set(batch.absent_id[overdue > 0].tolist()) == {SILENCED}
    assert (overdue[batch.absent_id == SILENCED] == 1).all()
    longest = statistics.id_silence[1 + BUS.index(SILENCED)]
    for longer, expected in ((1.0, 0.0), (1.25, 0.5), (1.5, 1.0)):
        silent = replace(batch, absent_silence=torch.full_like(batch.absent_silence, longest + longer))
        assert inputs.overdue(silent)[batch.absent_id == SILENCED].tolist() == pytest.approx([expected] * 3)
    # On another bus, or where no ID may be seen, none is missed.
    assert (inputs.overdue(replace(batch, can_id=batch.can_id + 1)) == 0).all()
    for settings in ({"identity": False}, {"features": "classic"}):
        blind = InputEncoder(statistics, embedding=4, dataset=CanDatasetSettings(**settings))  # type: ignore[arg-type]
        assert (blind.overdue(batch) == 0).all()


def test_an_id_that_may_be_silent_is_not_missed(tmp_path: Path) -> None:
    flat, last = silenced_graphs(tmp_path / "graphs")
    few = InputStatistics.fit(flat, np.flatnonzero(flat.source < PUNCTUAL_LOGS - 1))
    assert (few.id_silence == ENDLESS).all()
    # It was silent for as long in a benign drive.
    irregular = InputStatistics.fit(flat, np.arange(len(flat)))
    assert [can_id for can_id, longest in zip(BUS, irregular.id_silence[1:], strict=True) if longest == ENDLESS] == [
        SILENCED
    ]
    # An attack is no benign drive.
    label = np.where(flat.source == last, 1, 0).astype(np.uint8)
    assert ENDLESS not in InputStatistics.fit(replace(flat, label=label), np.arange(len(flat))).id_silence[1:]


def test_the_longest_silence_of_an_id_may_end_in_a_later_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("can_train_tasks.can.inputs.PUNCTUAL", 99.0)
    flat, _ = silenced_graphs(tmp_path / "graphs")
    statistics = InputStatistics.fit(flat, np.arange(len(flat)))
    absent = flat.absent_silence[flat.ids[flat.absent_code] == SILENCED]
    assert statistics.id_silence[1 + BUS.index(SILENCED)] == pytest.approx(absent.max())


def slow_bus(seconds: float, periods_s: Mapping[int, float]) -> Frames:
    """A regular bus, and messages with long periods, by their IDs; each first comes after a fifth of its period."""
    times = {0x100: np.arange(0, seconds, 0.01), 0x110: np.arange(0.003, seconds, 0.01)}
    times |= {can_id: np.arange(period / 5, seconds, period) for can_id, period in periods_s.items()}
    time, can_id = np.concatenate([*times.values()]), np.repeat([*times], [len(own) for own in times.values()])
    order = np.argsort(time, kind="stable")
    size = len(time)
    return Frames(
        timestamp=time[order],
        can_id=can_id[order].astype(np.uint32),
        length=np.full(size, 8, np.uint8),
        payload=np.zeros((size, 8), np.uint8),
        label=np.zeros(size, np.uint8),
    )


def graphs_of(folder: Path, *logs: Frames, stride: int = 20) -> FlatGraphs:
    return cached_graphs(folder, [list(GraphBuilder(20, stride).feed(log)) for log in logs])


@pytest.mark.parametrize("stride", [20, 7])
def test_ids_with_too_few_frames_to_tell_their_timing_are_named(stride: int, tmp_path: Path) -> None:
    flat = graphs_of(
        tmp_path / "g", slow_bus(30, {0x6F1: 60, 0x500: 9, 0x400: 5}), slow_bus(20, {0x500: 9}), stride=stride
    )
    rare = rare_ids(flat, np.arange(len(flat)))
    # 500 has four frames in the first log and three in the second, so five gaps.
    assert rare["frames"] == {str(0x6F1): 1}
    assert rare["log_s"] == pytest.approx(30, abs=0.1)
    alone = rare_ids(flat, np.flatnonzero(flat.source == 1))
    assert alone["frames"] == {str(0x500): 3}


def test_a_gap_that_training_was_too_short_to_see_is_nothing_odd(tmp_path: Path) -> None:
    flat = graphs_of(tmp_path / "g", slow_bus(30, {0x6F1: 60, 0x500: 12}), slow_bus(300, {0x6F1: 60, 0x500: 70}))
    statistics = InputStatistics.fit(flat, np.flatnonzero(flat.source == 0))
    inputs = InputEncoder(statistics, embedding=4, dataset=CanDatasetSettings())
    batch = Gatherer(flat)(np.flatnonzero(flat.source == 1))
    own = inputs.deviations(batch, inputs.id_index(batch))[:, : len(BEHAVIOUR)]
    rare = torch.isin(batch.can_id, torch.tensor([0x6F1, 0x500])) & ~torch.isnan(batch.behaviour[:, 0])
    assert rare.sum() == 8
    timing = [BEHAVIOUR.index(name) for name in ("gap_min", "gap_mean", "gap_spread")]
    assert (own[rare][:, timing] == 0).all()
    assert (own[rare][:, BEHAVIOUR.index("silence")] <= 0).all()
    assert all(value.isfinite().all() for value in inputs.state_dict().values())


def test_a_new_id_that_comes_less_often_than_training_is_long_is_no_stranger(tmp_path: Path) -> None:
    flat = graphs_of(tmp_path / "g", slow_bus(30, {}), slow_bus(300, {0x7DF: 45, 0x123: 2}))
    statistics = InputStatistics.fit(flat, np.flatnonzero(flat.source == 0))
    inputs = InputEncoder(statistics, embedding=4, dataset=CanDatasetSettings())
    batch = Gatherer(flat)(np.flatnonzero(flat.source == 1))
    strange = inputs.strangeness(batch, inputs.id_index(batch))
    again = ~torch.isnan(batch.behaviour[:, 0])
    assert (strange[(batch.can_id == 0x7DF) & again] == 0).all()
    # When it first comes, nobody knows how often it will.
    assert (strange[(batch.can_id == 0x7DF) & ~again] > 0.5).all()
    assert (strange[batch.can_id == 0x123] > 0.5).all()
    gaps = new_id_gaps(flat, np.flatnonzero(flat.source == 1), statistics.vocabulary)
    (told,) = new_id_notes({"rare_ids": {"log_s": 30.0}}, gaps)
    assert told == (
        "New, but expected to be, since they come less often than once in the 30 s of the longest benign training log"
        ": 7DF"
    )


def test_a_new_id_that_came_once_is_not_said_to_be_expected(tmp_path: Path) -> None:
    flat = graphs_of(tmp_path / "g", slow_bus(30, {}), slow_bus(40, {0x7DF: 39}))
    gaps = new_id_gaps(
        flat, np.flatnonzero(flat.source == 1), InputStatistics.fit(flat, np.flatnonzero(flat.source == 0)).vocabulary
    )
    assert gaps == {0x7DF: np.inf}
    (told,) = new_id_notes({"rare_ids": {"log_s": 30.0}}, gaps)
    assert told == (
        "New, and came once, which does not tell whether the 30 s of the longest benign training log were too short to "
        "see them: 7DF"
    )
