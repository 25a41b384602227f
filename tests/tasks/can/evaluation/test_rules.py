import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from can_train.errors import CheckpointError
from can_train_tasks.can.contributions import (
    CHECKSUM,
    CONTEXTS,
    COUNTER,
    IDENTITY,
    JUMPS,
    PERIOD,
    PROPERTIES,
    SILENCE,
)
from can_train_tasks.can.data.behaviour import WORDS
from can_train_tasks.can.data.graphs import LEAST_VALIDATION, FlatGraphs, Frames, GraphBuilder, Split
from can_train_tasks.can.data.payload_fields import CHECKS, CHECKSUM_BITS, crc8
from can_train_tasks.can.evaluation.rules import (
    FLAGGED,
    JUMP,
    RULES,
    TOLD,
    RaisedScores,
    RareWindows,
    Rules,
    RuleScale,
    Tail,
    learned,
    learned_notes,
)
from can_train_tasks.can.reference_models import _RULE_COLUMNS
from fakes.random_bus import cached_graphs
from fakes.silenced_bus import SILENCED, SILENT_S, WINDOW, bus_frames, silenced_graphs

FOREIGN = 0x1000


@pytest.fixture(scope="module")
def bus(tmp_path_factory):
    """The graphs of drives, the rules of all drives but the last, and the windows of the last drive."""
    flat, last = silenced_graphs(tmp_path_factory.mktemp("bus") / "graphs")
    benign, rows = (np.flatnonzero(part) for part in (flat.source < last, flat.source == last))
    rules = Rules.fit(flat, Split(train=benign, validation=benign, test={"last": rows}))
    assert rules is not None
    return flat, rules, rows


def graphs_of(folder, frames):
    return cached_graphs(folder, [list(GraphBuilder(WINDOW, WINDOW).feed(frames))], WINDOW)


def with_frames(frames, can_id, times):
    times = np.asarray(times)
    nothing = np.zeros(len(times), np.uint8)
    new = Frames(
        times, np.full(len(times), can_id, np.uint32), nothing + 8, np.zeros((len(times), 8), np.uint8), nothing
    )
    whole = Frames.concatenate([frames, new])
    order = np.argsort(whole.timestamp, kind="stable")
    return Frames(**{name: column[order] for name, column in vars(whole).items()})


def test_windows_without_a_punctual_id_are_rare_and_no_others_are(bus):
    flat, rules, rows = bus
    rare = rules.windows(flat, rows).rarity >= FLAGGED
    begins, ends = SILENT_S
    # A silence shows when it is longer than one that was seen: after two periods at the latest.
    inside = (flat.end_time[rows] > begins + 0.05) & (flat.start_time[rows] < ends)
    outside = (flat.end_time[rows] < begins) | (flat.start_time[rows] > ends + 0.02)
    assert rare[inside].all()
    assert not rare[outside].any()


def test_the_id_that_is_silent_is_named(bus):
    flat, rules, rows = bus
    (row,) = rows[(flat.start_time[rows] < 2.3) & (flat.end_time[rows] > 2.3)][:1]
    nodes = slice(flat.node_ptr[row], flat.node_ptr[row + 1])
    absences = slice(flat.absent_ptr[row], flat.absent_ptr[row + 1])
    ids = flat.ids[np.concatenate([flat.node_code[nodes], flat.absent_code[absences]])]
    rarities = rules.rarities(flat, np.array([row]))
    assert ids[rarities.max(axis=1) >= FLAGGED].tolist() == [SILENCED]
    raised = RaisedScores(rules=rules, scale=RuleScale(threshold=1.0, decade=0.5))
    added = raised.contributions(flat, np.array([row]))
    assert np.flatnonzero(added.any(axis=1)).tolist() == np.flatnonzero(ids == SILENCED).tolist()
    assert [PROPERTIES[column] for column in _RULE_COLUMNS] == [
        SILENCE, PERIOD, IDENTITY, COUNTER, CHECKSUM, *JUMPS, *CONTEXTS
    ]  # fmt: skip


def test_windows_together_and_one_by_one_have_equal_rarities(bus):
    flat, rules, rows = bus
    alone = np.concatenate([rules.windows(flat, rows[place : place + 1]).rarity for place in range(len(rows))])
    assert np.array_equal(rules.windows(flat, rows).rarity, alone)
    assert rules.windows(flat, rows[:0]).rarity.shape == (0,)


def test_another_vehicle_breaks_no_rule(bus, tmp_path):
    _, rules, _ = bus
    frames = bus_frames(silenced=True)
    other = graphs_of(tmp_path / "ids", replace(frames, can_id=frames.can_id + np.uint32(FOREIGN)))
    assert not rules.windows(other, np.arange(len(other))).rarity.any()
    # The same IDs, but every message comes half as often: other messages, which agree with no history.
    slow = graphs_of(tmp_path / "periods", replace(frames, timestamp=frames.timestamp * 2))
    before = np.flatnonzero(slow.end_time < 2 * SILENT_S[0])
    assert not (rules.windows(slow, before).rarity >= FLAGGED).any()
    # One of its messages has a known ID, and pauses.
    known = np.where(frames.can_id == SILENCED, SILENCED, frames.can_id + np.uint32(FOREIGN)).astype(np.uint32)
    shared = graphs_of(tmp_path / "shared", replace(frames, can_id=known))
    assert len(shared.absent_code)
    alone = np.flatnonzero(np.diff(shared.absent_ptr) > 0)
    assert not rules.rarities(shared, alone).any()


def test_a_new_id_on_a_known_bus_is_rare_unless_benign_drives_have_new_ids(bus, tmp_path):
    flat, rules, _ = bus
    frames = with_frames(bus_frames(silenced=False), FOREIGN, [1.5])
    drive = graphs_of(tmp_path / "graphs", frames)
    rows = np.arange(len(drive))
    assert (rules.windows(drive, rows).rarity >= FLAGGED).sum() == 1
    seen = graphs_of(tmp_path / "seen", with_frames(bus_frames(silenced=False), FOREIGN, [0.5, 1.5, 2.5]))
    half = len(flat) // 2
    used = Rules.fit(flat, Split(train=np.arange(half), validation=np.arange(half, len(flat)), test={}))
    assert used is not None
    # As if validation had such windows: 3 of `len(seen)`.
    lenient = replace(used, new=float(np.log10(len(seen) / 3)))
    assert (lenient.windows(drive, rows).rarity >= FLAGGED).sum() == 0


def test_rules_survive_a_result_file(bus):
    flat, rules, rows = bus
    again = Rules.from_plain(json.loads(json.dumps(rules.plain(), allow_nan=False)))
    assert np.array_equal(again.rarities(flat, rows), rules.rarities(flat, rows))
    scale = RuleScale(threshold=0.25, decade=3.0)
    assert RuleScale.from_plain(json.loads(json.dumps(scale.plain(), allow_nan=False))) == scale
    judgement = {"rules": rules.plain(), "rule_scale": scale.plain()}
    raised = RaisedScores.from_judgement(judgement)
    assert raised is not None
    assert np.array_equal(
        raised(flat, rows, np.zeros(len(rows))), scale.raised(np.zeros(len(rows)), rules.windows(flat, rows))
    )
    assert RaisedScores.from_judgement({"rules": rules.plain()}) is None


def test_rules_of_another_version_are_refused_with_the_names_that_differ(bus):
    _, rules, _ = bus
    older = {name: value for name, value in rules.plain().items() if name not in ("checks", JUMP)} | {"later": 1}
    with pytest.raises(CheckpointError, match=rf"another version of can-train: rules differs in checks, {JUMP}, later"):
        Rules.from_plain(older)


VICTIM, IDLE = 0x100, 0x110
LOG_S = 12.0


def swaying(seed, forged_s=(), label_s=()):
    """Frames of two IDs each 10 ms: a value of 16 bits that sways slowly, beside noise and a counter.

    The value is 2,000 higher in the time span `forged_s`, and frames in `label_s` are labelled as attacks.
    """
    rng = np.random.default_rng(seed)
    times = np.repeat(np.arange(0, LOG_S, 0.01), 2) + np.tile([0.0, 0.004], round(LOG_S / 0.01))
    value = 20_000 + 9_000 * np.sin(times * 2 + 6 * rng.random()) + rng.integers(-2, 3, len(times))
    if forged_s:
        value[(times >= forged_s[0]) & (times < forged_s[1])] += 2_000
    payload = rng.integers(0, 256, (len(times), 8)).astype(np.uint8)
    payload[:, 0], payload[:, 1:3] = np.arange(len(times)) // 2 % 16, value.astype(">u2").view(np.uint8).reshape(-1, 2)
    payload[:, 3] = 0
    label = (times >= label_s[0]) & (times < label_s[1]) if label_s else np.zeros(len(times))
    return Frames(times, np.tile(np.uint32([VICTIM, IDLE]), len(times) // 2), np.full(len(times), 8, np.uint8), payload,
                  np.asarray(label, np.uint8))  # fmt: skip


def swaying_rules(folder, logs):
    blocks = [list(GraphBuilder(WINDOW, WINDOW).feed(log)) for log in logs]
    flat = cached_graphs(folder, blocks, WINDOW)
    last = np.concatenate([rows[-len(rows) // 5 :] for rows in (np.flatnonzero(flat.source == log)
                                                               for log in range(len(logs)))])  # fmt: skip
    train = np.setdiff1d(np.arange(len(flat)), last)
    rules = Rules.fit(flat, Split(train=train, validation=last, test={}))
    assert rules is not None
    return rules


@pytest.mark.parametrize("attacked", [False, True])
def test_a_value_that_a_forger_takes_over_and_leaves_jumps_and_its_id_is_named(tmp_path, attacked):
    # A labelled attack in training, and the jump after it, leave the rules as they are.
    logs = [swaying(0, (5.0, 5.5), (5.0, 5.5)) if attacked else swaying(0), *map(swaying, range(1, 6))]
    rules = swaying_rules(tmp_path / "train", logs)
    drive = graphs_of(tmp_path / "drive", swaying(7, (6.0, 8.0)))
    jumps = rules.rarities(drive, np.arange(len(drive)))[:, RULES.index(JUMP)] >= FLAGGED
    node = np.flatnonzero(jumps)
    window = np.searchsorted(np.cumsum(drive.num_ids), node, side="right")
    times = drive.end_time[window]
    at_edges = [(times > edge) & (times < edge + 3 * WINDOW * 0.01) for edge in (6.0, 8.0)]
    assert all(edge.any() for edge in at_edges)
    assert np.logical_or(*at_edges).all()
    raised = RaisedScores(rules=rules, scale=RuleScale(threshold=1.0, decade=0.5))
    named = np.flatnonzero(raised.contributions(drive, np.arange(len(drive))).any(axis=0))
    assert [PROPERTIES[_RULE_COLUMNS[column]] for column in named] == ["jump_2-3"]


def test_a_drive_like_those_of_training_has_no_jump(tmp_path):
    rules = swaying_rules(tmp_path / "train", [swaying(seed) for seed in range(6)])
    drives = [graphs_of(tmp_path / str(seed), swaying(seed)) for seed in range(10, 14)]
    for drive in drives:
        assert not (rules.rarities(drive, np.arange(len(drive)))[:, RULES.index(JUMP)] >= FLAGGED).any()
    # The low byte of the value, and the noise beside it, are no steady values.
    words = [WORDS[word] for word in np.flatnonzero(~np.isnan(rules.largest_jump).all(axis=0))]
    assert "2-3" in words
    assert not {"3", "5", "6", "7", "8", "3-4", "5-6", "8-7"} & set(words)


COUNTED, PROTECTED, SETTLING, TWO_FACED = 0x120, 0x121, 0x122, 0x123


def protected(seed):
    """Frames of four IDs each 10 ms.

    A counter beside noise; a value with a counter and a CRC-8; a slow value with an XOR, but no counter; and a payload
    that is one of two, in which two bytes change together.
    """
    rng = np.random.default_rng(seed)
    count = np.arange(round(LOG_S / 0.01))
    payload = np.zeros((4, len(count), 8), np.uint8)
    payload[0, :, :7] = rng.integers(0, 256, (len(count), 7))
    payload[0, :, 7] = (count + seed) % 15 << 4 | 3
    payload[1, :, 2] = 100 + 90 * np.sin(count / 50)
    payload[1, :, 6] = 0xA0 | (count + seed) % 16
    payload[2, :, 0] = 20 + (count + 40 * seed) // 100
    payload[3, :, [1, 7]] = rng.integers(0, 2) ^ (count // 700)
    for own, checksum in ((1, lambda others: crc8([*others.T], 0x1D, 0xFF)), (2, lambda others: 0x5A ^ others[:, 0])):
        payload[own, :, 7] = checksum(payload[own, :, :7])
    times = (count[:, None] * 0.01 + np.arange(4) * 0.002).ravel()
    ids = np.tile(np.uint32([COUNTED, PROTECTED, SETTLING, TWO_FACED]), len(count))
    length = np.full(len(times), 8, np.uint8)
    return Frames(times, ids, length, payload.transpose(1, 0, 2).reshape(-1, 8), np.zeros(len(times), np.uint8))


def changed(frames, position, byte, by=1):
    payload = frames.payload.copy()
    payload[position, byte] += by
    return replace(frames, payload=payload)


def without(frames, position):
    chosen = np.ones(len(frames), np.bool_)
    chosen[position] = False
    return frames[chosen]


AT = 4 * 600  # position of the frame of `COUNTED` in the middle of a drive


@pytest.mark.parametrize(
    ("forge", "can_id", "kinds"),
    [
        (lambda frames: changed(frames, AT, 7, 1 << 4), COUNTED, [COUNTER]),
        (lambda frames: changed(frames, AT, 7), COUNTED, []),
        (lambda frames: changed(frames, AT + 1, 2), PROTECTED, [CHECKSUM]),
        (lambda frames: changed(frames, AT + 1, 7), PROTECTED, [CHECKSUM]),
        (lambda frames: changed(frames, AT + 1, 6), PROTECTED, [COUNTER, CHECKSUM]),
        (lambda frames: without(frames, AT + 1), PROTECTED, [COUNTER]),
        (lambda frames: without(frames, AT + 1 + 4 * np.arange(6)), PROTECTED, []),
        (lambda frames: changed(frames, AT + 2, 0), SETTLING, [CHECKSUM]),
        (lambda frames: changed(frames, AT + 3, 1), TWO_FACED, []),
    ],
    ids=["step", "beside", "value", "checksum", "both", "lost", "lost for long", "no counter", "chance"],
)
def test_a_broken_counter_or_checksum_is_rare_and_its_id_is_named(checked_rules, tmp_path, forge, can_id, kinds):
    drive = graphs_of(tmp_path / "drive", forge(protected(9)))
    every = np.arange(len(drive))
    table = checked_rules.rarities(drive, every)
    broken = table[:, [RULES.index(COUNTER), RULES.index(CHECKSUM)]] >= FLAGGED
    assert [kind for kind, column in zip((COUNTER, CHECKSUM), broken.T, strict=True) if column.any()] == kinds
    nodes = np.flatnonzero(broken.any(axis=1))
    # The frame and the frame after it may lie in two windows.
    assert len(nodes) <= 2
    assert set(drive.ids[drive.node_code[nodes]].tolist()) <= {can_id}
    raised = RaisedScores(rules=checked_rules, scale=RuleScale(threshold=1.0, decade=0.5))
    named = np.flatnonzero(raised.contributions(drive, every)[nodes].any(axis=0))
    names = {PROPERTIES[_RULE_COLUMNS[column]] for column in named}
    assert names & {COUNTER, CHECKSUM} == set(kinds)


@pytest.fixture(scope="module")
def checked_rules(tmp_path_factory):
    rules = swaying_rules(tmp_path_factory.mktemp("checked") / "train", [protected(seed) for seed in range(5)])
    checks = dict(zip(rules.ids.tolist(), rules.checks.tolist(), strict=True))
    names = {
        can_id: [name for check, name in enumerate(CHECKS) if bits >> check & 1] for can_id, bits in checks.items()
    }
    assert names[COUNTED] == ["high half of byte 8, up"]
    assert names[PROTECTED][0] == "low half of byte 7, up"
    assert "CRC-8 SAE J1850, last byte" in names[PROTECTED]
    assert "XOR, last byte" in names[SETTLING]
    assert names[TWO_FACED] == []
    return Rules.from_plain(json.loads(json.dumps(rules.plain(), allow_nan=False)))


def test_a_check_that_a_benign_validation_drive_breaks_is_none(tmp_path):
    logs = [*(protected(seed) for seed in range(4)), changed(protected(4), [4 * 1150 + 1, 4 * 1150], 7)]
    rules = swaying_rules(tmp_path / "train", logs)
    checks = dict(zip(rules.ids.tolist(), rules.checks.tolist(), strict=True))
    assert [bool(checks[can_id]) for can_id in (COUNTED, PROTECTED, SETTLING)] == [True, True, True]
    assert not checks[PROTECTED] & int(CHECKSUM_BITS)


@pytest.mark.parametrize(("forged", "flagged"), [(1, [120]), (2, [120, 121])])
def test_the_senders_frame_after_a_forged_frame_breaks_nothing(checked_rules, tmp_path, forged, flagged):
    frames = protected(9)
    # The first forged frame is the last frame of window 120.
    at = 121 * WINDOW - 1
    copies = changed(frames, AT, 7, 2 << 4)[np.arange(len(frames)) == AT]
    copies = replace(copies, timestamp=frames.timestamp[[at]])
    drive = Frames.concatenate([frames[:at], *[copies] * forged, frames[at:]])
    drive = graphs_of(tmp_path / "drive", drive)
    broken = checked_rules.rarities(drive, np.arange(len(drive)))[:, RULES.index(COUNTER)] >= FLAGGED
    assert np.searchsorted(np.cumsum(drive.num_ids), np.flatnonzero(broken), side="right").tolist() == flagged


def test_a_broken_check_is_flagged_at_the_threshold_of_the_raised_scores(checked_rules, tmp_path):
    drive = graphs_of(tmp_path / "drive", changed(protected(9), AT, 7, 1 << 4))
    raised = RaisedScores(rules=checked_rules, scale=RuleScale(threshold=1.0, decade=0.5, chosen=3.0))
    scores = raised(drive, np.arange(len(drive)), np.zeros(len(drive)))
    assert sorted(set(scores.tolist())) == [0.0, 3.5]
    again = RaisedScores(rules=checked_rules, scale=RuleScale(**json.loads(json.dumps(raised.scale.plain()))))
    assert np.array_equal(again(drive, np.arange(len(drive)), np.zeros(len(drive))), scores)


def test_rules_of_another_version_are_refused(checked_rules):
    judgement = {"rules": checked_rules.plain(), "rule_scale": {"threshold": 1.0, "decade": 0.5, "slope": 2.0}}
    with pytest.raises(CheckpointError, match="another version of can-train: rule_scale differs in chosen, slope"):
        RaisedScores.from_judgement(judgement)


def test_too_few_benign_windows_make_no_rules(bus):
    flat, _, _ = bus
    rows = np.arange(len(flat))
    few = Split(train=rows, validation=rows[: LEAST_VALIDATION - 1], test={})
    assert Rules.fit(flat, few) is None
    assert learned_notes(learned(None, flat, few)) == [
        "No rule raises a score: that takes 50 benign validation windows, not 49"
    ]


def test_one_log_is_told_to_be_too_few_and_the_ids_without_a_value_are_counted(bus, tmp_path):
    drive = swaying(1)
    # A constant ID each 20 ms, and a moving one that comes every half a second.
    times = np.concatenate([np.arange(0, LOG_S, 0.02), np.arange(0, LOG_S, 0.5)]) + 0.001
    ids = np.repeat(np.uint32([0x700, 0x701]), [round(LOG_S / 0.02), round(LOG_S / 0.5)])
    payload = np.where(ids[:, None] == 0x700, 7, np.random.default_rng(0).integers(0, 256, (len(ids), 8)))
    more = Frames(times, ids, np.full(len(ids), 8, np.uint8), payload.astype(np.uint8), np.zeros(len(ids), np.uint8))
    both = Frames.concatenate([drive, more])
    flat = graphs_of(tmp_path / "graphs", both[np.argsort(both.timestamp, kind="stable")])
    rows = np.arange(len(flat))
    split = Split(train=rows[: -len(rows) // 2], validation=rows[-len(rows) // 2 :], test={})
    counts = learned(Rules.fit(flat, split), flat, split)
    windows = len(split.validation)
    assert counts == {"windows": windows, "logs": 1, "ids": 4, "checked": 2, "values": 2, "lines": 0, "slow": 1,
                      "constant": 1}  # fmt: skip
    (note,) = learned_notes(counts)
    silent, others = note.split(". ")
    assert silent == "No rule judges silent or late IDs: that takes 5 benign logs, not 1"
    assert others.split(", ") == [
        "Jumps are judged in 2 of 4 IDs (slower than 0.25 s: 1",
        "constant: 1)",
        "counters and checksums in 2",
        "values that follow from other IDs in 0",
    ]
    of_many, rules, _ = bus
    every = np.arange(len(of_many))
    assert learned_notes(learned(rules, of_many, Split(train=every, validation=every, test={}))) == []


finite = st.floats(-1e3, 1e3, allow_subnormal=False)


@given(arrays(np.float64, st.integers(1, 200), elements=finite), arrays(np.float64, 20, elements=finite))
def test_larger_values_are_never_less_rare(benign, values):
    rarities = Tail.of(benign).rarities(np.sort(values))
    assert (np.diff(rarities) >= 0).all()
    assert (rarities >= 0).all()


def test_one_benign_value_in_a_thousand_has_a_rarity_of_three():
    benign = np.random.default_rng(0).exponential(size=100_000)
    for rarity in (2.0, 3.0, 4.0):
        (value,) = np.quantile(benign, [1 - 10**-rarity])
        assert Tail.of(benign).rarities(np.array([value])) == pytest.approx(rarity, abs=0.15)
    assert not Tail.of(np.full(10, -np.inf)).rarities(np.array([-np.inf])).any()


@given(arrays(np.float64, 30, elements=finite), arrays(np.float64, 30, elements=st.floats(0, 20)), finite)
def test_a_rule_raises_scores_and_flags_exactly_what_is_rarer_than_one_in_a_million(score, rarity, threshold):
    nowhere = np.zeros(len(rarity), np.bool_)
    raised = RuleScale(threshold=threshold, decade=0.7).raised(score, RareWindows(rarity, nowhere, nowhere))
    assert (raised >= score).all()
    assert np.array_equal(raised > threshold, (score > threshold) | (rarity >= FLAGGED))
    assert np.array_equal(raised[rarity < TOLD], score[rarity < TOLD])


def test_a_window_as_rare_as_one_in_a_million_is_flagged():
    scale, nowhere = RuleScale(threshold=0.1, decade=0.7), np.array([False])
    assert scale.raised(np.array([-5.0]), RareWindows(np.array([FLAGGED]), nowhere, nowhere)) > scale.threshold


whole = st.integers(-1_000, 1_000).map(float)


@given(arrays(np.float64, 30, elements=whole), arrays(np.bool_, 30), whole, whole)
def test_another_vehicle_is_judged_by_the_threshold_of_the_network(score, is_foreign, own, chosen):
    rare = RareWindows(np.zeros(30), np.zeros(30, np.bool_), is_foreign)
    raised = RuleScale(threshold=own, decade=0.7, chosen=chosen).raised(score, rare)
    assert np.array_equal(raised > chosen, np.where(is_foreign, score > own, score > chosen))
    assert (np.diff(raised[is_foreign]) == np.diff(score[is_foreign])).all()


def test_a_vehicle_whose_ids_training_has_not_seen_is_foreign(bus):
    flat, rules, rows = bus
    assert not rules.windows(flat, rows).is_foreign.any()
    other = FlatGraphs(**{**vars(flat), "ids": flat.ids + 0x400})
    assert rules.windows(other, rows).is_foreign.all()
