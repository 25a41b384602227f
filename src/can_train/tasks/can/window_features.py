"""Windows as rows of a plain table, for detectors that are not graph models: how a window's nodes and edges are
distributed, how many there are, how long it lasted. No ID and no absolute time is among the columns.

Shapes: R chosen windows, F features of a member (a node or an edge), C columns.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.policy.ragged import Members, members
from can_train.tasks.can.flat import FlatGraphs

FRAMES_PER_CHUNK: Final = 200_000
"""Frames whose windows are expanded at a time. A window has no more nodes or edges than frames, so a chunk's temporary
arrays stay below about 60 MB."""


def in_chunks(flat: FlatGraphs, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Cuts chosen windows into parts that are small enough to expand in memory."""
    step = max(1, FRAMES_PER_CHUNK // flat.window)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def window_features(flat: FlatGraphs, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Makes the table of chosen windows.

    Args:
        flat: All windows; each has at least one node and one edge.
        rows: [R].

    Returns:
        [R, C]: mean, standard deviation, minimum and maximum of each node feature, the same of each edge feature, the
        number of nodes, the number of edges, and the duration in seconds.
    """
    columns = 4 * (flat.node_features.shape[1] + flat.edge_features.shape[1]) + 3
    table = np.empty((len(rows), columns), np.float32)
    done = 0
    for chunk in in_chunks(flat, rows):
        nodes, edges = members(flat.node_ptr, chunk), members(flat.edge_ptr, chunk)
        parts = (
            _summaries(flat.node_features, nodes),
            _summaries(flat.edge_features, edges),
            nodes.sizes,
            edges.sizes,
            flat.end_time[chunk] - flat.start_time[chunk],
        )
        table[done : done + len(chunk)] = np.column_stack(parts)
        done += len(chunk)
    return table


def _summaries(features: NDArray[np.float32], of: Members) -> NDArray[np.float64]:
    """Returns [R, 4 * F]: means, standard deviations, minima, maxima over each window's members."""
    values = features[of.positions].astype(np.float64)
    mean = np.add.reduceat(values, of.starts) / of.sizes[:, None]
    deviation = values - np.repeat(mean, of.sizes, axis=0)
    variance = np.add.reduceat(deviation * deviation, of.starts) / of.sizes[:, None]
    low, high = np.minimum.reduceat(values, of.starts), np.maximum.reduceat(values, of.starts)
    return np.hstack([mean, np.sqrt(variance), low, high])
