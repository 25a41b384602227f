"""The behaviour of IDs against a slow reference, frame by frame and window by window."""

from collections import defaultdict
from math import log2, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from can_train_tasks.can.data.behaviour import BEHAVIOUR, WORDS
from can_train_tasks.can.data.graphs import Frames, GraphBlock, GraphBuilder

WINDOW = 5
# How far a window's values can move the mean of its ID, by column.
CLIP = dict(zip(BEHAVIOUR, (1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.5), strict=True))
QUANTUM = 2.0**-16


@st.composite
def logs(draw: st.DrawFn) -> Frames:
    size = draw(st.integers(WINDOW, 60))
    ids = draw(st.lists(st.sampled_from([0, 1, 0x7FF, 2**29 - 1]), min_size=size, max_size=size))
    gaps = draw(st.lists(st.sampled_from([0.0, 1e-4, 3e-3, 0.5, -2e-3]), min_size=size, max_size=size))
    payload = draw(
        st.lists(
            st.one_of(st.sampled_from([0, 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1)),
            min_size=size,
            max_size=size,
        )
    )
    return Frames(
        timestamp=1.6e9 + np.cumsum(gaps),
        can_id=np.array(ids, np.uint32),
        length=np.full(size, 8, np.uint8),
        payload=np.array(payload, ">u8").view(np.uint8).reshape(-1, 8).copy(),
        label=np.zeros(size, np.uint8),
    )


def built(frames: Frames, stride: int = WINDOW, portions: tuple[int, ...] = ()) -> GraphBlock:
    builder = GraphBuilder(WINDOW, stride)
    blocks = []
    for begin, end in zip((0, *portions), (*portions, len(frames)), strict=True):
        blocks += list(builder.feed(frames[begin:end]))
    names = ("can_id", "num_nodes", "behaviour", "past", "past_windows", "jumps", "broken_checks", "payload",
             "num_absent", "absent_id", "absent_silence", "absent_payload")  # fmt: skip
    joined = {name: np.concatenate([getattr(block, name) for block in blocks]) for name in names}
    return type("Block", (), joined)()


def seconds(value: float) -> float:
    return log2(min(max(value, 2.0**-14), 2.0**10))


def reference(frames: Frames, stride: int) -> list[dict[str, object]]:
    """The nodes of all windows, by the definitions."""
    gap, bits = [nan] * len(frames), [nan] * len(frames)
    before: dict[int, int] = {}
    jumps, step_before = [[0] * len(WORDS)] * len(frames), dict[int, list[int]]()
    words = frames.payload.view(np.uint64).ravel()
    for position, can_id in enumerate(frames.can_id.tolist()):
        if can_id in before:
            earlier = before[can_id]
            gap[position] = max(float(np.float32(frames.timestamp[position] - frames.timestamp[earlier])), 0.0)
            bits[position] = (int(words[position]) ^ int(words[earlier])).bit_count()
            steps = [step_of(word, frames.payload[earlier], frames.payload[position]) for word in WORDS]
            if can_id in step_before and not gap[position] > 3 * gap[earlier]:
                pairs = zip(steps, step_before[can_id], strict=True)
                jumps[position] = [max(abs(now - then) - abs(then), 0) for now, then in pairs]
            step_before[can_id] = steps
        before[can_id] = position
    nodes: list[dict[str, object]] = []
    windows: dict[int, list[dict[str, float]]] = defaultdict(list)
    windows_before: dict[int, list[list[int]]] = defaultdict(lambda: [[0] * len(WORDS)] * 2)
    for start in range(0, len(frames) - WINDOW + 1, stride):
        part = range(start, start + WINDOW)
        for can_id in sorted(set(frames.can_id[part].tolist())):
            own = [position for position in part if frames.can_id[position] == can_id]
            now = node_behaviour(frames, own, part, ([gap[p] for p in own], [bits[p] for p in own]))
            largest = [max(column) for column in zip(*(jumps[position] for position in own), strict=True)]
            steady = zip(largest, *windows_before[can_id], strict=True)
            recent = [now if two > one // 2 else max(now, one) for now, one, two in steady]
            windows_before[can_id] = [largest, windows_before[can_id][0]]
            nodes.append({"can_id": can_id, "now": now, "past": mean_of(windows[can_id]), "n": len(windows[can_id]),
                          "jumps": recent, "payload": int(words[own[-1]].astype(np.int64))})  # fmt: skip
            if not np.isnan(now["gap_min"]):
                windows[can_id].append(now)
    return nodes


def step_of(word: str, then: NDArray[np.uint8], now: NDArray[np.uint8]) -> int:
    """The change of a word, whose bytes are named from the most significant byte on; values run over their ends."""
    numbers = [int(number) - 1 for number in word.split("-")]
    before, after = (int.from_bytes(bytes(payload[numbers])) for payload in (then, now))
    size = 256 ** len(numbers)
    step = (after - before) % size
    return step - size if step >= size // 2 else step


def node_behaviour(
    frames: Frames, own: list[int], part: range, changes: tuple[list[float], list[float]]
) -> dict[str, float]:
    gaps, bits = ([value for value in column if not np.isnan(value)] for column in changes)
    duration = max(frames.timestamp[part[-1]] - frames.timestamp[part[0]], 2.0**-14)
    silence = max(frames.timestamp[part[-1]] - frames.timestamp[own[-1]], 0.0)
    found = {"rate": log2(len(own) / duration), "silence": seconds(silence)}
    if not gaps:
        return {name: found.get(name, nan) for name in BEHAVIOUR}
    mean = float(np.mean(gaps))
    return found | {
        "gap_min": seconds(min(gaps)),
        "gap_mean": seconds(mean),
        "gap_spread": float(np.std(gaps)) / max(mean, 2.0**-14),
        "bits_changed": log2(1 + np.mean(bits)),
        "unchanged": bits.count(0) / len(bits),
    }


def mean_of(windows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of earlier windows, none of which counts further from the mean before it than `CLIP`."""
    found = {}
    for name in BEHAVIOUR:
        plain, clipped = [], []
        for window in windows:
            middle = np.mean(plain) if plain else window[name]
            clipped.append(float(np.clip(window[name], middle - CLIP[name], middle + CLIP[name])))
            plain.append(window[name])
        found[name] = float(np.mean(clipped)) if clipped else 0.0
    return found


@settings(max_examples=60, deadline=None)
@given(logs(), st.sampled_from([2, WINDOW, 7]))
def test_behaviour_is_that_of_the_definitions(frames: Frames, stride: int) -> None:
    block, nodes = built(frames, stride), reference(frames, stride)
    assert block.can_id.tolist() == [node["can_id"] for node in nodes]
    assert block.past_windows.tolist() == [node["n"] for node in nodes]
    assert block.jumps.tolist() == [node["jumps"] for node in nodes]
    for index, node in enumerate(nodes):
        now, past = node["now"], node["past"]
        assert isinstance(now, dict)
        assert isinstance(past, dict)
        for column, name in enumerate(BEHAVIOUR):
            assert block.behaviour[index, column] == pytest.approx(now[name], abs=4 * QUANTUM, rel=1e-5, nan_ok=True)
            assert block.past[index, column] == pytest.approx(past[name], abs=8 * QUANTUM, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(logs(), st.data())
def test_behaviour_does_not_depend_on_the_portions_a_log_comes_in(frames: Frames, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(frames)), max_size=4).map(sorted))
    whole, parts = built(frames), built(frames, portions=tuple(cuts))
    for name in (
        "behaviour",
        "past",
        "past_windows",
        "jumps",
        "broken_checks",
        "payload",
        "num_absent",
        "absent_id",
        "absent_silence",
        "absent_payload",
    ):
        assert np.array_equal(getattr(whole, name), getattr(parts, name), equal_nan=name == "behaviour")


@pytest.fixture
def _regular_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("can_train_tasks.can.data.behaviour._REGULAR_WINDOWS", 3)
    monkeypatch.setattr("can_train_tasks.can.data.behaviour._REGULAR_SHARE", 0.7)


@pytest.mark.usefixtures("_regular_soon")
@settings(max_examples=60, deadline=None)
@given(logs(), st.sampled_from([2, WINDOW, 7]), st.data())
def test_regular_ids_that_a_window_lacks_are_absent_for_as_long_as_they_are_silent(
    frames: Frames, stride: int, data: st.DataObject
) -> None:
    block = built(frames, stride, tuple(data.draw(st.lists(st.integers(0, len(frames)), max_size=3).map(sorted))))
    seen_s: dict[int, float] = {}
    payload: dict[int, int] = {}
    windows: dict[int, int] = defaultdict(int)
    expected, last = [], []
    for number, start in enumerate(range(0, len(frames) - WINDOW + 1, stride)):
        ids, times, payloads = (
            column[start : start + WINDOW].tolist()
            for column in (frames.can_id, frames.timestamp, frames.payload.view("<i8")[:, 0])
        )
        regular = [can_id for can_id in sorted(windows) if windows[can_id] >= max(3, 0.7 * number)]
        absent = [(can_id, seconds(times[-1] - seen_s[can_id])) for can_id in regular if can_id not in ids]
        expected.append(absent)
        last += [payload[can_id] for can_id, _ in absent]
        seen_s |= dict(zip(ids, times, strict=True))
        payload |= dict(zip(ids, payloads, strict=True))
        for can_id in set(ids):
            windows[can_id] += 1
    assert block.num_absent.tolist() == [len(absent) for absent in expected]
    assert block.absent_id.tolist() == [can_id for absent in expected for can_id, _ in absent]
    assert block.absent_silence.tolist() == pytest.approx([each for absent in expected for _, each in absent], rel=1e-6)
    assert block.absent_payload.tolist() == last
    assert block.payload.tolist() == [node["payload"] for node in reference(frames, stride)]


def test_an_attack_moves_the_past_of_an_id_by_no_more_than_a_clipped_window() -> None:
    times = np.concatenate([np.arange(500) * 0.01, 5 + np.arange(WINDOW) * 1e-5, 6 + np.arange(WINDOW) * 0.01])
    frames = Frames(
        timestamp=times,
        can_id=np.full(len(times), 0x100, np.uint32),
        length=np.full(len(times), 8, np.uint8),
        payload=np.zeros((len(times), 8), np.uint8),
        label=np.zeros(len(times), np.uint8),
    )
    block, column = built(frames), BEHAVIOUR.index("gap_min")
    attack = len(block.past) - 2
    assert block.behaviour[attack, column] < log2(0.01) - 5
    moved = block.past[attack + 1, column] - block.past[attack, column]
    assert moved == pytest.approx(-1 / block.past_windows[attack + 1], rel=0.01)


def test_no_more_ids_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("can_train_tasks.can.data.behaviour._MAX_IDS", 8)
    size = 2000
    builder = GraphBuilder(WINDOW, WINDOW)
    for begin in range(0, size, 20):
        ids = np.where(np.arange(20) % 2, 0x7FF, 0x1000 + begin + np.arange(20)).astype(np.uint32)
        part = Frames(
            timestamp=(begin + np.arange(20.0)) * 1e-3,
            can_id=ids,
            length=np.full(20, 8, np.uint8),
            payload=np.zeros((20, 8), np.uint8),
            label=np.zeros(20, np.uint8),
        )
        *_, block = builder.feed(part)
        assert len(builder._history._frames.can_id) <= 2 * 8
        assert len(builder._history._windows.can_id) <= 2 * 8
        assert len(builder._history._seen.can_id) <= 3 * 8
    # The one that never stops is still known.
    assert block.past_windows[block.can_id == 0x7FF].max() > size // WINDOW // 2
