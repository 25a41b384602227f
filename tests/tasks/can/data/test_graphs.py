"""The vectorised graph builder against a slow reference that follows the definitions word by word."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from can_train.errors import ConfigError
from can_train_tasks.can.data.graphs import EDGE_FEATURES, MAX_WINDOW, NODE_FEATURES, Frames, GraphBlock, GraphBuilder


@st.composite
def logs(draw: st.DrawFn) -> Frames:
    size = draw(st.integers(0, 60))
    ids = draw(st.lists(st.integers(0, 2**29 - 1), min_size=1, max_size=8))
    gap = st.sampled_from([0.0, 1e-4, 3e-3, 0.5, -2e-3])
    length = draw(hnp.arrays(np.uint8, size, elements=st.integers(0, 8)))
    payload = draw(hnp.arrays(np.uint8, (size, 8)))
    return Frames(
        timestamp=1.6e9 + np.cumsum(draw(hnp.arrays(np.float64, size, elements=gap))),
        can_id=draw(hnp.arrays(np.uint32, size, elements=st.sampled_from(ids))),
        length=length,
        payload=np.where(np.arange(8) < length[:, None], payload, 0).astype(np.uint8),
        label=draw(hnp.arrays(np.uint8, size, elements=st.sampled_from([0, 0, 1, 3]))),
    )


def reference(frames: Frames) -> dict:
    """One window's graph, from the definitions, one element at a time."""
    window = len(frames)
    ids = sorted({int(i) for i in frames.can_id})
    positions = {i: [p for p in range(window) if frames.can_id[p] == i] for i in ids}
    nodes = [
        [*(np.mean(frames.payload[positions[i], byte] / 255) for byte in range(8)),
         len(positions[i]), positions[i][-1] / (window - 1)]
        for i in ids
    ]  # fmt: skip
    runs = defaultdict(list)
    for position, (source, target) in enumerate(pairwise(int(i) for i in frames.can_id)):
        runs[ids.index(source), ids.index(target)].append(position)
    degree = [sum((edge[0] == n) + (edge[1] == n) for edge in runs) for n in range(len(ids))]
    attacks = [int(code) for code in frames.label if code]
    return {
        "can_id": ids,
        "node_features": nodes,
        "edge_index": np.array(sorted(runs)).T,
        "edge_features": [reference_edge(frames, edge, runs, degree) for edge in sorted(runs)],
        "label": max(sorted(set(attacks)), key=attacks.count, default=0),
    }


def reference_edge(frames: Frames, edge: tuple[int, int], runs: dict, degree: list[int]) -> list[float]:
    window, positions = len(frames), runs[edge]
    intervals = [1000 * max(0.0, frames.timestamp[p + 1] - frames.timestamp[p]) for p in positions]
    mean, std = float(np.mean(intervals)), float(np.std(intervals))
    first, last = positions[0] / (window - 1), positions[-1] / (window - 1)
    source, target = edge
    values = {
        "count": len(positions),
        "count_share": len(positions) / window,
        "interval_mean_ms": mean,
        "interval_std_ms": std,
        "regularity": 1 / (1 + std / mean) if mean else 1.0,
        "first_position": first,
        "last_position": last,
        "spread": last - first,
        "reverse_exists": (target, source) in runs,
        "degree_product": degree[source] * degree[target],
        "degree_ratio": degree[source] / degree[target],
    }
    return [values[name] for name in EDGE_FEATURES]


def split_graphs(blocks: list[GraphBlock]) -> list[dict]:
    graphs = []
    for block in blocks:
        node_end, edge_end = np.cumsum(block.num_nodes), np.cumsum(block.num_edges)
        for g in range(len(block)):
            nodes = slice(node_end[g] - block.num_nodes[g], node_end[g])
            edges = slice(edge_end[g] - block.num_edges[g], edge_end[g])
            graphs.append({
                "can_id": block.can_id[nodes],
                "node_features": block.node_features[nodes],
                "edge_index": block.edge_index[:, edges],
                "edge_features": block.edge_features[edges],
                "label": block.label[g],
                "place": (block.first_frame[g], block.start_time[g], block.end_time[g]),
            })  # fmt: skip
    return graphs


def feed_in_parts(frames: Frames, window: int, stride: int, cuts: list[int]) -> list[GraphBlock]:
    builder = GraphBuilder(window, stride)
    edges = [0, *sorted(min(cut, len(frames)) for cut in cuts), len(frames)]
    return [block for a, b in pairwise(edges) for block in builder.feed(frames[a:b])]


@settings(deadline=None, max_examples=200)
@given(logs(), st.integers(2, 12), st.integers(1, 15), st.lists(st.integers(0, 60), max_size=4))
def test_any_log_in_any_portions_gives_the_graphs_of_the_definitions(
    frames: Frames, window: int, stride: int, cuts: list[int]
) -> None:
    graphs = split_graphs(feed_in_parts(frames, window, stride, cuts))
    starts = range(0, len(frames) - window + 1, stride)
    assert len(graphs) == len(starts)
    for graph, start in zip(graphs, starts, strict=True):
        part = frames[start : start + window]
        for name, expected in reference(part).items():
            np.testing.assert_allclose(graph[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert graph["place"] == (start, part.timestamp[0], part.timestamp[-1])


def bus(size: int) -> Frames:
    rng = np.random.default_rng(5)
    return Frames(
        timestamp=np.cumsum(rng.exponential(5e-4, size)),
        can_id=rng.integers(0, 40, size, dtype=np.uint32),
        length=np.full(size, 8, np.uint8),
        payload=rng.integers(0, 256, (size, 8), dtype=np.uint8),
        label=rng.integers(0, 2, size, dtype=np.uint8),
    )


@pytest.mark.parametrize("stride", [1, 60, 100, 130])
def test_long_logs_are_built_in_bounded_blocks_without_seams(stride: int) -> None:
    frames = bus(3_000 if stride == 1 else 100_000)
    blocks = feed_in_parts(frames, 100, stride, [])
    starts = np.concatenate([block.first_frame for block in blocks])
    np.testing.assert_array_equal(starts, np.arange(0, len(frames) - 99, stride))
    assert len(blocks) > 1
    assert max(len(block) for block in blocks) < 1_000
    later = blocks[-1]
    expected = reference(frames[(start := int(later.first_frame[-1])) : start + 100])
    np.testing.assert_allclose(later.node_features[-later.num_nodes[-1] :], expected["node_features"], rtol=1e-5)
    np.testing.assert_allclose(later.edge_features[-later.num_edges[-1] :], expected["edge_features"], rtol=1e-5)


def in_one_log(drives: list[Frames], pause_s: float) -> Frames:
    """Joins drives; each begins `pause_s` after the end of the drive before."""
    moved, end_s = [], 0.0
    for drive in drives:
        moved.append(replace(drive, timestamp=drive.timestamp + end_s - drive.timestamp[0]))
        end_s = moved[-1].timestamp[-1] + pause_s
    return Frames.concatenate(moved)


@pytest.mark.parametrize("pause_s", [10.0, 86_400.0, -3_600.0])
@pytest.mark.parametrize("stride", [7, 20, 33])
@pytest.mark.parametrize("cuts", [[], [1, 399, 400, 401, 700]])
def test_drives_in_one_log_have_the_windows_of_drives_in_logs_of_their_own(
    pause_s: float, stride: int, cuts: list[int]
) -> None:
    whole = bus(1_200)
    drives = [whole[:400], whole[400:703], whole[703:]]
    joined = feed_in_parts(in_one_log(drives, pause_s), 20, stride, cuts)
    own = [(number, block) for number, drive in enumerate(drives) for block in feed_in_parts(drive, 20, stride, [])]
    begins = np.cumsum([0, *map(len, drives)])
    for name in vars(own[0][1]):
        axis = 1 if name == "edge_index" else 0
        found = np.concatenate([getattr(block, name) for block in joined], axis=axis)
        if name in ("drive", "first_frame"):
            shift = np.arange(3) if name == "drive" else begins
            expected = np.concatenate([getattr(block, name) + shift[number] for number, block in own])
        else:
            expected = np.concatenate([getattr(block, name) for _, block in own], axis=axis)
        if name in ("start_time", "end_time"):
            continue
        # Times with an offset have rounding errors, which the smallest gaps show.
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=name)


def test_frames_before_a_pause_and_at_the_end_fill_no_window() -> None:
    whole = bus(1_000)
    whole.label[:] = 1
    builder = GraphBuilder(20, 20)
    list(builder.feed(in_one_log([whole[:405], whole[405:407], whole[407:]], 60.0)))
    assert (builder.drives, builder.windows, builder.left_over) == (3, 20 + 29, (5 + 2 + 13, 5 + 2 + 13))


def test_the_steps_of_a_slow_bus_are_no_pauses() -> None:
    slow = replace(bus(400), timestamp=np.arange(400) * 30.0)
    # One step is a pause as long as nobody knows that all steps are long.
    assert len(split_graphs(feed_in_parts(slow, 20, 20, []))) == (400 - 1) // 20


@pytest.mark.parametrize("window", [257, 258, 1000])
def test_bytes_of_an_id_add_up_however_often_it_is_in_a_window(window: int) -> None:
    # 257 times 255 is the last sum of 16 bits.
    payload = np.full((window, 8), 255, np.uint8)
    payload[:, 3:5] = [1, 0]
    frames = replace(bus(window), can_id=np.full(window, 5, np.uint32), payload=payload)
    (block,) = GraphBuilder(window, window).feed(frames)
    means = [1, 1, 1, 1 / 255, 0, 1, 1, 1]
    assert block.node_features[0, :8].tolist() == np.float32(means).tolist()


def test_the_shapes_follow_the_feature_names() -> None:
    (block,) = GraphBuilder(100, 100).feed(bus(100))
    assert block.node_features.shape == (block.num_nodes.sum(), len(NODE_FEATURES))
    assert block.edge_features.shape == (block.num_edges.sum(), len(EDGE_FEATURES))
    assert block.edge_index.shape == (2, block.num_edges.sum())


def test_the_builder_counts_the_frames_it_saw_even_without_a_full_window() -> None:
    builder = GraphBuilder(100, 100)
    assert not list(builder.feed(bus(60)))
    assert builder.frames_seen == 60


def test_a_window_that_overflows_the_sort_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 1048576"):
        GraphBuilder(MAX_WINDOW + 1, 1)
