import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train_tasks.can.contributions import PROPERTIES
from can_train_tasks.can.data.behaviour import WORDS
from can_train_tasks.can.data.graphs import Frames, GraphBuilder, Split
from can_train_tasks.can.evaluation.context import Context, _sources
from can_train_tasks.can.evaluation.rules import CONTEXT, FLAGGED, JUMP, RULES, RaisedScores, Rules, RuleScale
from can_train_tasks.can.reference_models import _RULE_COLUMNS
from fakes.random_bus import cached_graphs
from fakes.silenced_bus import WINDOW

SPEED, WHEELS, ENGINE, OTHER = 0x100, 0x110, 0x120, 0x130
DRIVE_S = 15.0
FORGED_S = (6.0, 9.0)


def drive(seed, forged=False, ratio=0.5, labelled=False, per_level=0):
    """Frames of four IDs each 10 ms, whose values sway.

    The speed, 16 bits, follows from the wheels, 16 bits in another order. The engine's value is half of it and half a
    course of its own; the last ID has a course of its own, and a level that hardly moves in a drive. The speed rises by
    `per_level` with the level. A forged speed leaves the true one slowly, and returns slowly, so that it never jumps.
    """
    rng = np.random.default_rng(seed)
    count = round(DRIVE_S / 0.01)
    times = np.arange(count) * 0.01
    speed, own, other = (
        sum(np.sin(times * rate + 6 * rng.random()) for rate in rates) / len(rates)
        for rates in ((0.9, 0.53, 0.31), (0.7, 0.41), (0.8, 0.37))
    )
    values = np.zeros((4, count, 8), np.uint8)
    wheels = np.round(20_000 + 9_000 * speed).astype("<u2")
    level = rng.integers(20, 80) + times // 1.5 % 2
    told = np.round(ratio * wheels + 1_000 + per_level * level + rng.integers(-2, 3, count))
    if forged:
        inside = (times - FORGED_S[0]) / (FORGED_S[1] - FORGED_S[0])
        told += 1_500 * (1 - np.cos(2 * np.pi * np.clip(inside, 0, 1)))
    values[0, :, :2] = told.astype(">u2").view(np.uint8).reshape(-1, 2)
    values[1, :, 2:4] = wheels.view(np.uint8).reshape(-1, 2)
    values[2, :, 0] = np.round(100 + 40 * speed + 40 * own)
    values[3, :, 1], values[3, :, 5] = np.round(100 + 80 * other), level
    attacked = labelled & (times >= FORGED_S[0]) & (times < FORGED_S[1])
    return Frames(
        timestamp=(times[:, None] + np.arange(4) * 0.002).ravel(),
        can_id=np.tile(np.uint32([SPEED, WHEELS, ENGINE, OTHER]), count),
        length=np.full(4 * count, 8, np.uint8),
        payload=values.transpose(1, 0, 2).reshape(-1, 8),
        label=np.repeat(attacked, 4).astype(np.uint8),
    )


def graphs_of(folder, *drives):
    return cached_graphs(folder, [list(GraphBuilder(WINDOW, WINDOW).feed(each)) for each in drives], WINDOW)


def rules_of(folder, *drives):
    """The rules of drives, with the last fifth of each for validation."""
    flat = graphs_of(folder, *drives)
    logs = [np.flatnonzero(flat.source == log) for log in range(len(drives))]
    later = np.concatenate([rows[-len(rows) // 5 :] for rows in logs])
    rules = Rules.fit(flat, Split(train=np.setdiff1d(np.arange(len(flat)), later), validation=later, test={}))
    assert rules is not None
    return rules


def lines_of(rules):
    """The targets of the lines with their sources, as ID and word."""
    lines = rules.lines
    names = [(can_id, WORDS[word]) for can_id, word in zip(lines.can_id.tolist(), lines.word.tolist(), strict=True)]
    sources = ({names[each] for each in own} for own in lines.source.tolist())
    return dict(zip([names[target] for target in lines.target.tolist()], sources, strict=True))


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    return rules_of(tmp_path_factory.mktemp("drives") / "train", *map(drive, range(6)))


def test_a_value_follows_from_the_value_of_another_id(rules):
    assert lines_of(rules) == {(SPEED, "1-2"): {(WHEELS, "4-3")}, (WHEELS, "4-3"): {(SPEED, "1-2")}}


def test_a_level_that_hardly_moves_in_a_drive_is_no_source_though_it_explains_the_drives(tmp_path):
    lines = lines_of(rules_of(tmp_path / "train", *(drive(seed, per_level=5) for seed in range(6))))
    assert lines == {(SPEED, "1-2"): {(WHEELS, "4-3")}, (WHEELS, "4-3"): {(SPEED, "1-2")}}


def test_a_forged_value_that_never_jumps_disagrees_for_the_whole_attack_and_is_told_with_its_true_value(
    rules, tmp_path
):
    flat = graphs_of(tmp_path / "graphs", drive(7, forged=True))
    every = np.arange(len(flat))
    flags = rules.window_rarities(flat, every) >= FLAGGED
    assert not flags[:, RULES.index(JUMP)].any()
    disagrees = flags[:, RULES.index(CONTEXT)]
    begins, ends = FORGED_S
    middle = (flat.start_time > begins + 0.3) & (flat.end_time < ends - 0.3)
    assert disagrees[middle].all()
    assert not disagrees[(flat.end_time < begins) | (flat.start_time > ends)].any()
    (row,) = np.flatnonzero((flat.start_time <= 7.5) & (flat.end_time >= 7.5))[:1]
    codes = flat.node_code[flat.node_ptr[row] : flat.node_ptr[row + 1]]
    node = int(np.flatnonzero(flat.ids[codes] == SPEED)[0])
    expected = rules.lines.expected(flat, row)[node, WORDS.index("1-2")]
    told = int.from_bytes(int(flat.payload[flat.node_ptr[row] + node]).to_bytes(8, "little", signed=True)[:2])
    assert told - expected == pytest.approx(3_000, abs=150)
    raised = RaisedScores(rules=rules, scale=RuleScale(threshold=1.0, decade=0.5))
    named = np.flatnonzero(raised.contributions(flat, np.array([row]))[node])
    assert [PROPERTIES[_RULE_COLUMNS[column]] for column in named] == ["context_1-2"]


def test_benign_drives_agree_and_so_does_a_bus_with_other_periods(rules, tmp_path):
    for seed in range(10, 13):
        flat = graphs_of(tmp_path / str(seed), drive(seed))
        assert not (rules.window_rarities(flat, np.arange(len(flat)))[:, RULES.index(CONTEXT)] >= FLAGGED).any()
    frames = drive(7, ratio=0.9)
    slow = graphs_of(tmp_path / "slow", replace(frames, timestamp=frames.timestamp * 2))
    assert not rules.window_rarities(slow, np.arange(len(slow)))[:, RULES.index(CONTEXT)].any()


def test_windows_together_and_one_by_one_deviate_equally_and_a_result_file_keeps_the_lines(
    rules, tmp_path, monkeypatch
):
    monkeypatch.setattr("can_train_tasks.can.evaluation.context._WINDOWS_AT_A_TIME", 7)
    flat = graphs_of(tmp_path / "graphs", drive(7, forged=True))
    deviation, word = rules.lines.of_nodes(flat, np.arange(len(flat)))
    assert np.isfinite(deviation).sum() > len(flat)
    kept = Context.from_plain(json.loads(json.dumps(rules.lines.plain(), allow_nan=False)))
    alone = [kept.of_nodes(flat, np.array([row])) for row in range(len(flat))]
    assert np.array_equal(np.concatenate([each for each, _ in alone]), deviation)
    assert np.array_equal(np.concatenate([each for _, each in alone]), word)
    nothing = Context.from_plain(json.loads(json.dumps(Context.none().plain())))
    assert not np.isfinite(nothing.of_nodes(flat, np.arange(len(flat)))[0]).any()


def test_a_labelled_attack_in_training_leaves_the_lines_as_they_are(rules, tmp_path):
    attacked = rules_of(tmp_path / "train", *map(drive, range(5)), drive(5, forged=True, labelled=True))
    assert lines_of(attacked) == lines_of(rules)
    assert attacked.lines.largest == pytest.approx(rules.lines.largest, rel=0.5)


def test_a_line_that_validation_contradicts_is_none(tmp_path):
    whole, other = drive(5), drive(5, ratio=0.52)
    last = whole.timestamp >= 0.8 * DRIVE_S
    broken = replace(whole, payload=np.where(last[:, None], other.payload, whole.payload))
    assert lines_of(rules_of(tmp_path / "train", *map(drive, range(5)), broken)) == {}


def test_two_drives_are_enough_and_fewer_than_two_hundred_windows_are_not(tmp_path):
    assert (SPEED, "1-2") in lines_of(rules_of(tmp_path / "few", *map(drive, range(2))))
    for share, num_lines in ((8, 0), (6, 2)):
        flat = graphs_of(tmp_path / str(share), *(each[: len(each) // share] for each in map(drive, range(5))))
        values = np.array([SPEED, WHEELS]), np.array([WORDS.index("1-2"), WORDS.index("4-3")])
        assert len(Context.fit(flat, np.arange(len(flat)), flat.source.astype(np.int64), values)) == num_lines


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([-2.0, -0.7, 0.5, 1.0]), min_size=1, max_size=3))
def test_the_sources_of_an_exact_sum_are_found_and_no_others(seed, weights):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(500, 8))
    table[:, 7] = 1.0
    table[:, 0] = table[:, 1 : 1 + len(weights)] @ weights + 3.0
    sources = _sources(table.T @ table, 0, np.arange(1, 7), len(table))
    assert sorted(sources) == [*range(1, 1 + len(weights))]
