"""Baselines: their fits, scores and thresholds, and the table of window features."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from can_train import simulated_gpu
from can_train.fit.packing import members
from can_train_tasks.can.data.graphs import NODE_FEATURES, Frames, GraphBuilder, Split
from can_train_tasks.can.evaluation import baselines as baselines_module
from can_train_tasks.can.evaluation.baselines import (
    FRAMES_PER_CHUNK,
    BaselineOptions,
    GapLookup,
    IdLookup,
    SilenceLookup,
    WindowTable,
    fit_baselines,
    fit_random_forest,
    sample_by_class,
)
from fakes.random_bus import cached_graphs
from fakes.windows_by_hand import windows_of

CLASSIC = WindowTable(None)
BENIGN_WINDOW = [1, 2, 3, 1, 2, 3]
FLOOD_WINDOW = [1, 0, 0, 0, 0, 2]


def mixed_traffic(benign=30, attacks=10):
    """Benign windows first, then floods with ID 0."""
    return windows_of([BENIGN_WINDOW] * benign + [FLOOD_WINDOW] * attacks, label=[0] * benign + [1] * attacks)


def fitted(flat, train, validation):
    split = Split(train=np.array(train), validation=np.array(validation), test={"all": np.arange(len(flat))})
    baselines = fit_baselines(flat, split, BaselineOptions(seed=0, fpr=0.01))
    return {baseline.name: baseline for baseline in baselines.fitted}, baselines.absent


def test_the_lookup_scores_a_window_by_its_id_with_the_largest_attack_share():
    flat = windows_of([[1, 2], [1, 2], [1, 3], [2, 2], [1, 3], [2, 4]], label=[0, 1, 1, 0, 0, 0])
    lookup = IdLookup.fit(flat, np.arange(4))
    assert lookup.id_score.tolist() == [2 / 3, 1 / 3, 1.0, 1.0]
    assert lookup.score(flat, np.array([3, 0, 4])).tolist() == [1 / 3, 2 / 3, 1.0]


def test_working_window_by_window_changes_no_lookup():
    flat = windows_of([[1, 2], [1, 2], [1, 3], [2, 2]], label=[0, 1, 1, 0])
    one_at_a_time = replace(flat, window=FRAMES_PER_CHUNK)
    lookup = IdLookup.fit(one_at_a_time, np.arange(4))
    assert lookup.id_score.tolist() == IdLookup.fit(flat, np.arange(4)).id_score.tolist()
    assert lookup.score(one_at_a_time, np.arange(4)).tolist() == lookup.score(flat, np.arange(4)).tolist()


def test_without_attacks_in_training_the_lookup_finds_unseen_ids():
    flat = windows_of([[1, 2], [1, 2], [2, 9], [1, 2]])
    lookup = IdLookup.fit(flat, np.arange(2))
    assert lookup.score(flat, np.arange(4)).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_with_attacks_of_both_classes_in_training_the_baselines_are_the_usual_ones():
    flat = mixed_traffic()
    baselines, absent = fitted(flat, range(0, 40, 2), range(1, 40, 2))
    assert list(baselines) == ["flag_everything", "flag_nothing", "id_lookup", "gap_lookup", "silence", "random_forest"]
    assert absent == {}
    assert baselines["random_forest"].threshold.rule == "max F1 on validation"


@pytest.mark.parametrize("name", ["id_lookup", "random_forest"])
def test_a_flood_with_an_id_of_its_own_is_found_by_baselines_that_learn(name):
    flat = mixed_traffic()
    baseline = fitted(flat, range(0, 40, 2), range(1, 40, 2))[0][name]
    flagged = baseline.score(flat, np.arange(40)) > baseline.threshold.value
    assert flagged.tolist() == (flat.label > 0).tolist()


@pytest.mark.parametrize(("name", "flags"), [("flag_everything", True), ("flag_nothing", False)])
def test_the_constant_baselines_do_what_their_names_say(name, flags):
    flat = mixed_traffic()
    baseline = fitted(flat, range(0, 40, 2), range(1, 40, 2))[0][name]
    assert (baseline.score(flat, np.arange(40)) > baseline.threshold.value).tolist() == [flags] * 40


def test_without_attacks_in_training_an_isolation_forest_stands_in_for_the_random_forest():
    benign = np.random.default_rng(0).integers(1, 5, (30, 6)).tolist()
    flat = windows_of([*benign, FLOOD_WINDOW], label=[0] * 30 + [1])
    baselines, absent = fitted(flat, range(20), range(20, 31))
    assert absent == {"random_forest": "the training windows hold no attacks; isolation_forest stands in"}
    assert baselines["isolation_forest"].threshold.rule.endswith("too few for 1 %, on validation")
    score = baselines["isolation_forest"].score(flat, np.arange(31))
    assert score[30] > np.median(score[:20])


def test_a_training_of_attacks_only_has_no_forest_and_says_why():
    baselines, absent = fitted(mixed_traffic(), range(30, 40), range(20))
    assert list(baselines) == ["flag_everything", "flag_nothing", "id_lookup", "gap_lookup", "silence"]
    assert absent == {"random_forest": "the training windows hold attacks only"}


def test_thresholds_of_the_baselines_come_from_validation_only():
    flat = windows_of([[1, 2]] * 4 + [[1, 9]] * 4, label=[0, 0, 1, 1, 0, 0, 1, 1])
    unseen_is_an_attack = fitted(flat, [0, 2], [1, 6])[0]["id_lookup"].threshold
    unseen_is_benign = fitted(flat, [0, 2], [3, 4])[0]["id_lookup"].threshold
    assert (unseen_is_an_attack.value, unseen_is_benign.value < 0.5) == (0.75, True)


def test_the_same_seed_gives_the_same_forest():
    flat = random_traffic()
    first, again, other = (
        fit_random_forest(CLASSIC, flat, np.arange(50), seed)(CLASSIC.rows(flat, np.arange(60))) for seed in (3, 3, 4)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def random_traffic(seed=1):
    rng = np.random.default_rng(seed)
    return windows_of(rng.integers(0, 5, (60, 6)).tolist(), label=rng.integers(0, 2, 60).tolist())


SPLIT = Split(train=np.arange(30), validation=np.arange(30, 45), test={"a": np.arange(45, 52), "b": np.arange(48, 60)})


def forest_scores(flat, options, split=SPLIT):
    """The scores of every forest for each part of a split."""
    forests = [each for each in fit_baselines(flat, split, options).fitted if each.name.endswith("_forest")]
    return [
        forest.score(flat, rows).tolist() for forest in forests for rows in (split.validation, *split.test.values())
    ]


@pytest.fixture
def seeds(monkeypatch):
    """The seeds of the forests that are fitted; the forests are small."""
    fitted_seeds = []

    def counted(fit):
        def count_and_fit(table, flat, rows, seed):
            fitted_seeds.append(seed)
            return fit(table, flat, rows, seed)

        return count_and_fit

    monkeypatch.setattr(baselines_module, "FOREST_TREES", 5)
    for name in ("fit_random_forest", "fit_isolation_forest"):
        monkeypatch.setattr(baselines_module, name, counted(getattr(baselines_module, name)))
    return fitted_seeds


@pytest.mark.parametrize("attacks", [True, False])
def test_forests_are_fitted_once_for_prepared_data(attacks, tmp_path, seeds):
    flat = random_traffic()
    flat = flat if attacks else replace(flat, label=np.zeros_like(flat.label))
    options = BaselineOptions(seed=0, fpr=0.01)
    plain, fits = forest_scores(flat, options), len(seeds)
    first, again = (forest_scores(flat, replace(options, prepared=tmp_path)) for _ in range(2))
    assert (plain == first == again, fits, len(seeds)) == (True, 3 if attacks else 1, 2 * fits)


def test_kept_scores_belong_to_data_rows_seed_features_and_version(tmp_path, seeds, monkeypatch):
    flat = random_traffic()
    options = BaselineOptions(seed=0, fpr=0.01, prepared=tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    forest_scores(flat, options)
    changes = [
        (replace(options, seed=7), SPLIT),
        (replace(options, features="classic"), SPLIT),
        (replace(options, prepared=tmp_path / "other"), SPLIT),
        (options, replace(SPLIT, train=np.arange(29))),
        (options, replace(SPLIT, validation=np.arange(29, 44))),
    ]
    for changed, split in changes:
        seeds.clear()
        assert forest_scores(flat, changed, split) == forest_scores(flat, replace(changed, prepared=None), split)
        assert len(seeds) == 6, changed
    seeds.clear()
    monkeypatch.setattr(baselines_module, "version", lambda package: "99")
    forest_scores(flat, options)
    assert len(seeds) == 3


def test_damaged_scores_are_computed_again(tmp_path, seeds):
    flat = random_traffic()
    options = BaselineOptions(seed=0, fpr=0.01, prepared=tmp_path)
    whole = forest_scores(flat, options)
    (file,) = tmp_path.glob("*/scores.npy")
    content = file.read_bytes()
    for damaged in (b"", content[:-8], content[:-1] + bytes([content[-1] ^ 1]), b"\x80\x04."):
        file.write_bytes(damaged)
        seeds.clear()
        assert [forest_scores(flat, options), forest_scores(flat, options)] == [whole] * 2
        assert (len(seeds), file.read_bytes()) == (3, content)


def test_where_scores_cannot_be_kept_nothing_is_kept(tmp_path):
    flat, gone = random_traffic(), tmp_path / "gone"
    options = BaselineOptions(seed=0, fpr=0.01, prepared=gone)
    assert forest_scores(flat, options) == forest_scores(flat, replace(options, prepared=None))
    assert not gone.exists()
    file = tmp_path / "file"
    file.touch()
    assert forest_scores(flat, replace(options, prepared=file)) == forest_scores(flat, replace(options, prepared=None))


def test_forests_know_the_windows_of_the_split_alone():
    flat = random_traffic()
    forest = fit_baselines(flat, SPLIT, BaselineOptions(seed=0, fpr=0.01)).fitted[-1]
    with pytest.raises(ValueError, match="outside validation and test"):
        forest.score(flat, np.array([3, 40]))


@pytest.mark.parametrize("name", ["flag_everything", "id_lookup", "random_forest"])
def test_a_folder_without_windows_gets_no_scores(name):
    flat = mixed_traffic()
    baseline = fitted(flat, range(0, 40, 2), range(1, 40, 2))[0][name]
    assert baseline.score(flat, np.empty(0, np.int64)).shape == (0,)


@pytest.mark.parametrize(
    ("benign", "attacks", "kept"), [(30, 10, (10, 10)), (38, 2, (18, 2)), (2, 38, (2, 18)), (5, 5, (5, 5))]
)
def test_a_sample_keeps_the_rarer_class_up_to_half(benign, attacks, kept):
    flat = mixed_traffic(benign, attacks)
    rows = sample_by_class(flat, np.arange(len(flat)), most=20, seed=0)
    assert len(set(rows.tolist())) == len(rows)
    assert rows.tolist() == sorted(rows.tolist())
    assert (np.count_nonzero(flat.label[rows] == 0), np.count_nonzero(flat.label[rows])) == kept


def test_a_sample_is_drawn_by_its_seed_from_the_given_windows_only():
    flat, rows = mixed_traffic(), np.arange(0, 40, 2)
    first, again, other = (sample_by_class(flat, rows, most=10, seed=seed).tolist() for seed in (5, 5, 6))
    assert first == again != other
    assert set(first) <= set(rows.tolist())


FLAT = windows_of([[1, 2, 1, 1], [5, 5, 5, 5], [1, 2, 3, 4], [2, 3, 2, 3]])


def test_members_are_the_nodes_of_the_chosen_windows_in_their_order():
    found = members(FLAT.node_ptr, np.array([2, 0]))
    assert found.positions.tolist() == [3, 4, 5, 6, 0, 1]
    assert found.starts.tolist() == [0, 4]
    assert found.sizes.tolist() == [4, 2]


def test_each_window_is_summarised_from_its_own_nodes():
    F, count = len(NODE_FEATURES), NODE_FEATURES.index("count")
    table = CLASSIC.rows(FLAT, np.array([2, 0]))
    assert table[:, [count + part * F for part in range(4)]].tolist() == [[1, 0, 1, 1], [2, 1, 1, 3]]


def test_the_last_columns_are_nodes_edges_and_seconds():
    table = CLASSIC.rows(FLAT, np.array([0, 1, 2]))
    assert table[:, -3:].tolist() == [[2, 3, 1], [1, 1, 1], [4, 3, 1]]


def test_the_edges_are_summarised_like_the_nodes():
    FLAT_EDGES = windows_of([[1, 2, 1, 1]])
    FLAT_EDGES.edge_features[:, -1] = [1, 2, 6]
    F = FLAT_EDGES.edge_features.shape[1]
    node_columns = 4 * len(NODE_FEATURES)
    last = CLASSIC.rows(FLAT_EDGES, np.array([0]))[0, [node_columns + (part + 1) * F - 1 for part in range(4)]]
    assert last == pytest.approx([3, np.std([1, 2, 6]), 1, 6])


def test_a_shift_in_time_changes_nothing():
    later = windows_of([[1, 2, 1, 1]], start_time=[1e9])
    assert CLASSIC.rows(later, np.array([0])).tolist() == CLASSIC.rows(FLAT, np.array([0])).tolist()


def test_working_window_by_window_changes_nothing():
    rows = np.array([3, 1, 2, 0])
    one_at_a_time = replace(FLAT, window=FRAMES_PER_CHUNK)
    assert np.array_equal(CLASSIC.rows(one_at_a_time, rows), CLASSIC.rows(FLAT, rows))


def test_no_windows_make_an_empty_table():
    assert CLASSIC.rows(FLAT, np.empty(0, np.int64)).shape == (0, 4 * (10 + 11) + 3)


def rhythm(periods_s, seconds, silent=None):
    """A bus of punctual IDs, some of which are silent between two times."""
    spans = silent or {}
    times = [(t, can_id) for can_id, period in periods_s.items() for t in np.arange(can_id * 1e-5, seconds, period)]
    times = sorted((t, i) for t, i in times if not (i in spans and spans[i][0] <= t < spans[i][1]))
    time, can_id = (np.array(column) for column in zip(*times, strict=True))
    nothing = np.zeros(len(time), np.uint8)
    return Frames(time, can_id.astype(np.uint32), nothing + 8, np.zeros((len(time), 8), np.uint8), nothing)


def graphs_of(folder, frames):
    return cached_graphs(folder, [list(GraphBuilder(20, 20).feed(frames))])


PERIODS = {1: 0.01, 2: 0.02, 3: 0.05}


def test_the_gap_lookup_finds_an_id_that_comes_too_soon(tmp_path):
    extra = rhythm({2: 0.02}, 2.0)
    mixed = Frames.concatenate([rhythm(PERIODS, 20.0), replace(extra, timestamp=extra.timestamp + 15.005)])
    order = np.argsort(mixed.timestamp, kind="stable")
    flat = graphs_of(tmp_path / "graphs", Frames(**{name: column[order] for name, column in vars(mixed).items()}))
    score = GapLookup.fit(flat, np.flatnonzero(flat.end_time < 10)).score(flat, np.arange(len(flat)))
    attacked = (flat.start_time > 15.05) & (flat.end_time < 17)
    assert score[attacked].min() > 1  # the gaps are 5 and 15 ms where 20 ms are usual
    assert score[flat.end_time < 14.9].max() < 0.1


def test_the_silence_lookup_finds_an_id_that_does_not_come_if_its_history_agrees(tmp_path):
    flat = graphs_of(tmp_path / "graphs", rhythm(PERIODS, 20.0, {2: (15.0, 16.0)}))
    lookup = SilenceLookup.fit(flat, np.flatnonzero(flat.end_time < 10))
    score = lookup.score(flat, np.arange(len(flat)))
    silent = (flat.start_time > 15.2) & (flat.end_time < 16)
    assert score[silent].min() > 2  # silent for more than 0.2 s, where 0.02 s are usual
    assert score[(flat.start_time > 2) & (flat.end_time < 14.9)].max() < 1
    # In another vehicle the ID has another period.
    other = graphs_of(tmp_path / "other", rhythm({1: 0.01, 2: 0.1, 3: 0.05}, 20.0))
    assert lookup.score(other, np.arange(len(other))).max() < 1


def test_working_with_few_windows_at_a_time_changes_no_silence(tmp_path, monkeypatch):
    flat = graphs_of(tmp_path / "graphs", rhythm(PERIODS, 10.0, {2: (5.0, 6.0)}))
    rows = np.arange(len(flat))
    whole = SilenceLookup.fit(flat, rows[:40]).score(flat, rows)
    monkeypatch.setattr("can_train_tasks.can.evaluation.baselines.TABLE_ENTRIES", 1)
    assert np.array_equal(SilenceLookup.fit(flat, rows[:40]).score(flat, rows), whole)


def test_a_simulated_gpu_does_not_count_what_the_baselines_take(tmp_path):
    flat = graphs_of(tmp_path / "graphs", rhythm(PERIODS, 200.0))
    table = WindowTable.fit(flat, np.arange(len(flat)), "behaviour")
    with simulated_gpu("20MiB", torch.nn.Linear(1, 1)) as gpu:
        gpu.reset_peak()
        table.rows(flat, np.arange(len(flat)))
        assert gpu.peak_bytes() < 2**16
