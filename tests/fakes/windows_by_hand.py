"""Small window graphs built from lists of CAN IDs, for tests of what happens after the graph builder."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from can_train_tasks.can.data.behaviour import BEHAVIOUR, WORDS
from can_train_tasks.can.data.graphs import EDGE_FEATURES, NODE_FEATURES, FlatGraphs, SourceFile

KINDS = ("benign", "DoS", "fuzzing")


def source_file(name: str = "log", *, labelled: bool = True) -> SourceFile:
    return SourceFile(path=name, role="test", group=name, frames=100, labelled=labelled, sha256="0" * 64)


def windows_of(
    frames: Sequence[Sequence[int]],
    *,
    label: Sequence[int] | None = None,
    source: Sequence[int] | None = None,
    drive: Sequence[int] | None = None,
    start_time: Sequence[float] | None = None,
    end_time: Sequence[float] | None = None,
    sources: tuple[SourceFile, ...] = (source_file(),),
) -> FlatGraphs:
    """Each window is the list of its frames' IDs, and begins with the frame after the one before it. Without `end_time`
    it lasts a second.

    Of the features only the counts are filled in.
    """
    G = len(frames)
    nodes = [sorted(set(window)) for window in frames]
    pairs = [sorted(set(pairwise(window))) for window in frames]
    ids = sorted({can_id for window in nodes for can_id in window})
    node_features = np.zeros((sum(map(len, nodes)), len(NODE_FEATURES)), np.float32)
    node_features[:, NODE_FEATURES.index("count")] = [
        window.count(can_id) for window, own in zip(frames, nodes, strict=True) for can_id in own
    ]
    start = np.arange(G, dtype=np.float64) if start_time is None else np.array(start_time, np.float64)
    return FlatGraphs(
        node_ptr=np.cumsum([0, *map(len, nodes)], dtype=np.int64),
        edge_ptr=np.cumsum([0, *map(len, pairs)], dtype=np.int64),
        node_code=np.array([ids.index(can_id) for own in nodes for can_id in own], np.int32),
        node_features=node_features,
        behaviour=np.zeros((len(node_features), len(BEHAVIOUR)), np.float32),
        past=np.zeros((len(node_features), len(BEHAVIOUR)), np.float32),
        past_windows=np.zeros(len(node_features), np.int32),
        jumps=np.zeros((len(node_features), len(WORDS)), np.uint16),
        broken_checks=np.zeros(len(node_features), np.uint64),
        payload=np.zeros(len(node_features), np.int64),
        absent_ptr=np.zeros(G + 1, np.int64),
        absent_code=np.empty(0, np.int32),
        absent_silence=np.empty(0, np.float32),
        absent_payload=np.empty(0, np.int64),
        edge_index=np.array(
            [[own.index(a), own.index(b)] for own, pair in zip(nodes, pairs, strict=True) for a, b in pair], np.int32
        ).T,
        edge_features=np.ones((sum(map(len, pairs)), len(EDGE_FEATURES)), np.float32),
        label=np.zeros(G, np.uint8) if label is None else np.array(label, np.uint8),
        source=np.zeros(G, np.int32) if source is None else np.array(source, np.int32),
        drive=np.array((source or [0] * G) if drive is None else drive, np.int32),
        first_frame=np.arange(G, dtype=np.int64) * max(map(len, frames)),
        start_time=start,
        end_time=start + 1 if end_time is None else np.array(end_time, np.float64),
        digest=np.arange(G, dtype=np.uint64),
        ids=np.array(ids, np.int64),
        kinds=KINDS,
        sources=sources,
        window=max(map(len, frames)),
    )
