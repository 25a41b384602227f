"""Window graphs of CAN frames, as flat arrays.

Shapes: G graphs (windows) of W frames, N nodes, E directed edges, R groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from can_train.errors import ConfigError
from can_train.tasks.can.data.frames import MAX_PAYLOAD_BYTES, Frames

# Stored per node. The ID index is the eleventh feature; it depends on the vocabulary, so the model adds it.
NODE_FEATURES: Final = (*(f"byte_{i}_mean" for i in range(1, 9)), "count", "last_position")

# Stored per directed edge between the IDs of consecutive frames.
EDGE_FEATURES: Final = (
    "count", "count_share", "interval_mean_ms", "interval_std_ms", "regularity",
    "first_position", "last_position", "spread", "reverse_exists", "degree_product", "degree_ratio",
)  # fmt: skip

# Frames. A sort key holds source, destination and position inside the window: three times 20 bits fit an integer.
MAX_WINDOW: Final = 2**20

# Frames, counted once for every window they are in, that are worked on at a time: overlapping windows cannot multiply
# the memory, and the temporary arrays stay near the processor's cache (2**13 is a quarter slower, 2**17 no faster).
_CHUNK_FRAMES: Final = 2**16
_MILLISECONDS: Final = 1000.0  # in a second


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One log that contributed windows.

    Attributes:
        path: As it was found.
        role: "train" (its time is cut into training and validation), "test" (all of it is for testing) or "log" (its
            time is cut into training, validation and test).
        group: The test folder it belongs to; for a "log", its own name.
        frames: Frames read, without malformed rows.
        labelled: Whether the log says which frames are attacks.
        sha256: Hash of its content.
    """

    path: str
    role: str
    group: str
    frames: int
    labelled: bool
    sha256: str


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatGraphs:
    """All windows of a data set.

    Attributes:
        node_ptr: [G + 1] int64, the nodes of graph g are node_ptr[g]:node_ptr[g + 1].
        edge_ptr: [G + 1] int64, the same for edges.
        node_code: [N] int32, index into `ids`.
        node_features: [N, 10] float32, columns `NODE_FEATURES`, unscaled.
        edge_index: [2, E] int32, source and destination as node positions inside their own graph.
        edge_features: [E, 11] float32, columns `EDGE_FEATURES`, unscaled.
        label: [G] uint8, index into `kinds`: the most frequent attack kind in the window, 0 where no frame is an
            attack.
        source: [G] int32, index into `sources`.
        first_frame: [G] int64, position of the window's first frame in its file.
        start_time: [G] float64, seconds, of the window's first frame.
        end_time: [G] float64, seconds, of its last frame.
        ids: [K] int64, the distinct CAN IDs, ascending.
        kinds: Names of the label codes; kinds[0] is "benign".
        sources: The files, in reading order.
        window: Frames in a window.
    """

    node_ptr: NDArray[np.int64]
    edge_ptr: NDArray[np.int64]
    node_code: NDArray[np.int32]
    node_features: NDArray[np.float32]
    edge_index: NDArray[np.int32]
    edge_features: NDArray[np.float32]
    label: NDArray[np.uint8]
    source: NDArray[np.int32]
    first_frame: NDArray[np.int64]
    start_time: NDArray[np.float64]
    end_time: NDArray[np.float64]
    ids: NDArray[np.int64]
    kinds: tuple[str, ...]
    sources: tuple[SourceFile, ...]
    window: int

    def __len__(self) -> int:
        return len(self.label)

    @property
    def num_nodes(self) -> NDArray[np.int64]:
        """[G] nodes of each graph."""
        return np.diff(self.node_ptr)

    @property
    def num_edges(self) -> NDArray[np.int64]:
        """[G] directed edges of each graph, self-loops included."""
        return np.diff(self.edge_ptr)


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphBlock:
    """Graphs of consecutive windows of one log, as in `FlatGraphs` but for this:

    `can_id` [N] is ascending inside each graph, and edges are in ascending order of (source, destination). `label` is
    the reader's code of the window's most frequent attack kind, the lowest of several.
    """

    num_nodes: NDArray[np.int64]
    num_edges: NDArray[np.int64]
    can_id: NDArray[np.uint32]
    node_features: NDArray[np.float32]
    edge_index: NDArray[np.int32]
    edge_features: NDArray[np.float32]
    label: NDArray[np.uint8]
    first_frame: NDArray[np.int64]
    start_time: NDArray[np.float64]
    end_time: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.label)


class GraphBuilder:
    """Builds the graphs of one log from its frames, which come in portions of any size."""

    def __init__(self, window: int, stride: int) -> None:
        if window > MAX_WINDOW:
            raise ConfigError(
                f"dataset.window must be at most {MAX_WINDOW}", value=str(window), remedy="Use --set dataset.window=100"
            )
        self._window = window
        self._stride = stride
        self._pending: list[Frames] = []
        self._pending_from = 0
        self._next_start = 0
        self.frames_seen = 0

    def feed(self, frames: Frames) -> Iterator[GraphBlock]:
        """Takes the log's next frames and yields the windows they complete, in order, in blocks of bounded size."""
        joined = Frames.concatenate([*self._pending, frames])
        joined_from, start = self._pending_from, self._next_start
        self.frames_seen += len(frames)
        num_windows = max(0, (self.frames_seen - start - self._window) // self._stride + 1)
        self._next_start = start + num_windows * self._stride
        self._pending_from = min(self._next_start, self.frames_seen)
        self._pending = [joined[self._pending_from - joined_from :]]
        # A generator of its own, so that the frames are counted by this call and not by the first block taken.
        return self._build(joined[start - joined_from :], start, num_windows)

    def _build(self, frames: Frames, first_frame: int, num_windows: int) -> Iterator[GraphBlock]:
        per_chunk = max(1, _CHUNK_FRAMES // self._window)
        for begin in range(0, num_windows, per_chunk):
            last = min(begin + per_chunk, num_windows) - 1
            part = frames[begin * self._stride : last * self._stride + self._window]
            yield _build_chunk(part, self._window, self._stride, first_frame + begin * self._stride)


@dataclass(frozen=True, eq=False)
class _Groups:
    """The equal keys of every row, rows one after another and keys ascending inside a row.

    Attributes:
        key: [R].
        row: [R] the row of each group.
        count: [R] members of each group.
        first: [R] where its members begin in `member`.
        member: [G · L] flat index (row · L + column) of every entry, ordered by group, then column.
    """

    key: NDArray[np.int64]
    row: NDArray[np.int64]
    count: NDArray[np.int64]
    first: NDArray[np.int64]
    member: NDArray[np.int64]


def _group_rows(keys: NDArray[np.int64]) -> _Groups:
    """Groups the entries of each row of `keys` [G, L]."""
    # One sort of (key, column): rows are short, so it is fast, and no table grows with the number of different IDs,
    # which fuzzing drives up.
    num_rows, length = keys.shape
    ordered = np.sort(keys * length + np.arange(length), axis=1)
    key, column = np.divmod(ordered, length)
    begins = np.ones((num_rows, length), dtype=np.bool_)
    begins[:, 1:] = key[:, 1:] != key[:, :-1]
    first = np.flatnonzero(begins)
    member = (column + np.arange(num_rows)[:, None] * length).ravel()
    return _Groups(key.ravel()[first], first // length, np.diff(first, append=keys.size), first, member)


def _build_chunk(frames: Frames, window: int, stride: int, first_frame: int) -> GraphBlock:
    """Builds the graphs of all windows of `frames`, whose first frame is frame `first_frame` of the log."""

    def windows(values: NDArray[Any]) -> NDArray[Any]:
        return sliding_window_view(values, window)[::stride]  # [G, W]

    nodes = _group_rows(windows(frames.can_id).astype(np.int64))
    times = windows(frames.timestamp)
    num_graphs = len(times)
    num_nodes = np.bincount(nodes.row, minlength=num_graphs)
    node_start = np.cumsum(num_nodes) - num_nodes

    node_of_frame = np.empty(num_graphs * window, dtype=np.int64)
    node_of_frame[nodes.member] = np.repeat(np.arange(len(nodes.key)), nodes.count)
    payload = [windows(frames.payload[:, byte]).ravel() for byte in range(MAX_PAYLOAD_BYTES)]
    local_node = node_of_frame.reshape(num_graphs, window) - node_start[:, None]
    edges = _group_rows(local_node[:, :-1] * window + local_node[:, 1:])
    edge_index = np.stack(np.divmod(edges.key, window))  # [2, E]
    return GraphBlock(
        num_nodes=num_nodes,
        num_edges=np.bincount(edges.row, minlength=num_graphs),
        can_id=nodes.key.astype(np.uint32),
        node_features=_node_features(nodes, node_of_frame, payload, window),
        edge_index=edge_index.astype(np.int32),
        edge_features=_edge_features(edges, edge_index, node_start, times),
        label=_window_labels(windows(frames.label)),
        first_frame=first_frame + np.arange(num_graphs) * stride,
        start_time=times[:, 0].copy(),
        end_time=times[:, -1].copy(),
    )


def _node_features(
    nodes: _Groups, node_of_frame: NDArray[np.int64], payload: list[NDArray[np.uint8]], window: int
) -> NDArray[np.float32]:
    """Computes `NODE_FEATURES` [N, 10]. Bytes beyond a frame's length count as 0."""
    sums = [np.bincount(node_of_frame, weights=byte) for byte in payload]
    columns = {f"byte_{i}_mean": total / (255.0 * nodes.count) for i, total in enumerate(sums, start=1)}
    columns["count"] = nodes.count
    columns["last_position"] = (nodes.member[nodes.first + nodes.count - 1] % window) / (window - 1)
    return _table(columns, NODE_FEATURES)


def _edge_features(
    edges: _Groups, edge_index: NDArray[np.int64], node_start: NDArray[np.int64], times: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Computes `EDGE_FEATURES` [E, 11] from `times` [G, W].

    Positions are those of the edge's source frames, 0 to 1. Regularity is 1 / (1 + std / mean), and 1 where all
    intervals are 0: those do not vary either. Degrees count distinct edges in and out, so a self-loop counts twice.
    """
    window = times.shape[1]
    mean, std = _interval_moments(edges, times)
    variation = np.divide(std, mean, out=np.zeros_like(std), where=mean > 0)
    position = edges.member % (window - 1) / (window - 1)
    first, last = position[edges.first], position[edges.first + edges.count - 1]
    source, target = edge_index + node_start[edges.row]
    degree = np.bincount(np.concatenate([source, target]))  # every frame has a neighbour, so no node is left out
    columns = {
        "count": edges.count,
        "count_share": edges.count / window,
        "interval_mean_ms": mean,
        "interval_std_ms": std,
        "regularity": 1.0 / (1.0 + variation),
        "first_position": first,
        "last_position": last,
        "spread": last - first,
        "reverse_exists": _reverse_exists(edges, edge_index, window),
        "degree_product": degree[source] * degree[target],
        "degree_ratio": degree[source] / degree[target],
    }
    return _table(columns, EDGE_FEATURES)


def _table(columns: dict[str, NDArray[Any]], names: Sequence[str]) -> NDArray[np.float32]:
    table = np.empty((len(columns[names[0]]), len(names)), dtype=np.float32)
    for index, name in enumerate(names):
        table[:, index] = columns[name]
    return table


def _interval_moments(edges: _Groups, times: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns mean and population standard deviation, [E] each in ms, of the time from source to destination frame."""
    # Public captures run backwards by up to 7.9 ms; a negative interval would make a mean of 0 or less.
    interval = np.maximum(np.diff(times, axis=1), 0.0).ravel()[edges.member] * _MILLISECONDS
    mean = np.add.reduceat(interval, edges.first) / edges.count
    deviation = interval - np.repeat(mean, edges.count)
    return mean, np.sqrt(np.add.reduceat(deviation * deviation, edges.first) / edges.count)


def _reverse_exists(edges: _Groups, edge_index: NDArray[np.int64], window: int) -> NDArray[np.bool_]:
    """Returns for each edge, [E], whether the opposite one is in the same graph."""
    source, target = edge_index
    # The keys are in ascending order already, since edges are ordered by graph, source and destination.
    graph = edges.row * window**2
    keys, wanted = graph + edges.key, graph + target * window + source
    found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    exists: NDArray[np.bool_] = keys[found] == wanted
    return exists


def _window_labels(label: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the most frequent attack code of each window of `label` [G, W], 0 where there is none: [G]."""
    num_codes = int(label.max()) + 1
    row = np.arange(len(label))[:, None] * num_codes
    counts = np.bincount((label + row).ravel(), minlength=len(label) * num_codes).reshape(-1, num_codes)
    counts[:, 0] = 0
    most_frequent: NDArray[np.intp] = counts.argmax(axis=1)
    return most_frequent.astype(np.uint8)
