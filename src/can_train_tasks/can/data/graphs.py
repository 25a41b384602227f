"""CAN frames, the window graphs that they become, and these graphs on disk: all as flat arrays.

Prepared graphs are a folder with one file for every array of `FlatGraphs`. The caller chooses the folder's name, and
prepares damaged folders again.

Shapes: M frames, G graphs (windows) of W frames, N nodes, E directed edges, A absences (a regular ID that a window
lacks, see `IdHistory.absences`), R groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from can_train.errors import ConfigError, DataError
from can_train.io.arrays import ArrayWriter, noticing_damage, read_arrays
from can_train_tasks.can.data.behaviour import (
    BEHAVIOUR,
    WORDS,
    Changes,
    IdHistory,
    Nodes,
    payload_words,
    sorted_columns,
    summarise,
    sums_to,
    table_of,
)
from can_train_tasks.can.data.digests import window_digests, windows_of
from can_train_tasks.can.data.payload_fields import LARGEST_SHORT_ID

# Arrays as most signatures of the task have them.
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BENIGN: Final = "benign"  # the kind of label code 0
MAX_KINDS: Final = 256  # label codes are bytes; a label column with more values is no label column

# Stored per node. The ID index is the eleventh feature; it depends on the vocabulary, so the model adds it.
NODE_FEATURES: Final = (*(f"byte_{i}_mean" for i in range(1, 9)), "count", "last_position")

# Stored per directed edge between the IDs of consecutive frames.
EDGE_FEATURES: Final = (
    "count", "count_share", "interval_mean_ms", "interval_std_ms", "regularity",
    "first_position", "last_position", "spread", "reverse_exists", "degree_product", "degree_ratio",
)  # fmt: skip

# Part of the name of every folder. Raise it when the arrays or the meaning of a column change: older folders are then
# not found.
SCHEMA: Final = 11

# Type and shape of one row of every array on disk.
_ARRAYS: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "node_ptr": ("int64", ()),
    "edge_ptr": ("int64", ()),
    "node_code": ("int32", ()),
    "node_features": ("float32", (len(NODE_FEATURES),)),
    "behaviour": ("float32", (len(BEHAVIOUR),)),
    "past": ("float32", (len(BEHAVIOUR),)),
    "past_windows": ("int32", ()),
    "jumps": ("uint16", (len(WORDS),)),
    "broken_checks": ("uint64", ()),
    "payload": ("int64", ()),
    "absent_ptr": ("int64", ()),
    "absent_code": ("int32", ()),
    "absent_silence": ("float32", ()),
    "absent_payload": ("int64", ()),
    "edge_index": ("int32", (2,)),  # [E, 2] on disk, so that it can be appended to
    "edge_features": ("float32", (len(EDGE_FEATURES),)),
    "label": ("uint8", ()),
    "source": ("int32", ()),
    "drive": ("int32", ()),
    "first_frame": ("int64", ()),
    "start_time": ("float64", ()),
    "end_time": ("float64", ()),
    "digest": ("uint64", ()),
    "ids": ("int64", ()),
}
_RECODED_NODES: Final = 2**20  # nodes that get their final code at a time

# Frames. A sort key holds source, destination and position inside the window: three times 21 bits fit an integer.
MAX_WINDOW: Final = 2**20

LEAST_VALIDATION: Final = 50  # benign validation windows, without which nothing is known about rare windows

# Frames that are processed at a time, where a frame counts once for each of its windows: overlapping windows cannot
# multiply the memory, and the temporary arrays stay near the CPU's cache (2**13 is a quarter slower, 2**16 5 % slower).
_CHUNK_FRAMES: Final = 2**15
# Frames that are compared with earlier frames at a time; between two such blocks, surplus IDs are forgotten.
_COMPARED_FRAMES: Final = 2**16
_MILLISECONDS: Final = 1000.0  # in a second
# A step of a log's clock by at least this is a pause of the recording, or a clock that was set: no bus is silent for so
# long, and the time counts as no traffic. A new drive begins there.
PAUSE_S: Final = 10.0
# Frames of a log for each such step, at least. With fewer frames, such steps are usual on its bus, and are no pauses.
USUAL_FRAMES_A_PAUSE: Final = 100


@dataclass(frozen=True, eq=False)
class Frames:
    """Consecutive frames of a CAN log, in the order of the file."""

    timestamp: Floats  # [M] seconds
    can_id: NDArray[np.uint32]  # [M] identifier, 11 or 29 bits
    length: NDArray[np.uint8]  # [M] payload bytes, 0 to 64; 0 for a remote frame
    payload: NDArray[np.uint8]  # [M, P] bytes, zero beyond `length`; P is 8, or 64 where there are CAN FD frames
    label: NDArray[np.uint8]  # [M] index into the reader's `kinds`; 0 is benign

    def __len__(self) -> int:
        return len(self.timestamp)

    def __getitem__(self, part: slice | Bools) -> Self:
        """Returns a part; a contiguous part is a view."""
        return type(self)(**{name: column[part] for name, column in vars(self).items()})

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Joins at least one part, in order."""
        joined = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
        widest = max(part.payload.shape[1] for part in parts)
        joined["payload"] = [
            part if part.shape[1] == widest else np.pad(part, ((0, 0), (0, widest - part.shape[1])))
            for part in joined["payload"]
        ]
        return cls(**{name: np.concatenate(arrays) for name, arrays in joined.items()})


def id_text(can_id: int) -> str:
    """Writes a CAN ID in the notation of logs."""
    return f"{can_id:03X}" if can_id <= LARGEST_SHORT_ID else f"{can_id:08X}"


def named_id(can_id: int, *, decimal: bool) -> str:
    """Names a CAN ID in a sentence; `decimal` if its log has decimal IDs."""
    return f"ID {id_text(can_id)}" + (f" (in the log: {can_id})" if decimal else "")


@dataclass(frozen=True)
class SourceFile:
    """One log that contributed windows."""

    path: str  # path of the log when it was read
    # "train" (its time is cut into training and validation), "test" (all of it is for testing) or "log" (its time is
    # cut into training, validation and test).
    role: str
    group: str  # the log's test folder; for a "log", its name
    frames: int  # frames that were read, without malformed rows
    labelled: bool  # whether the log has labels of attacks
    sha256: str  # hash of its content
    frames_digest: str = ""  # hash of its frames in any notation (`LogDigest`); empty where only parts were read
    # Bases of IDs and payload bytes in its text: "hex" or "dec"; empty for a binary log or another notation of bytes.
    id_base: str = ""
    byte_base: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowGraphs:
    """The graphs of windows, without the IDs of their nodes."""

    node_features: NDArray[np.float32]  # [N, 10] columns `NODE_FEATURES`, unscaled
    behaviour: NDArray[np.float32]  # [N, 7] columns `BEHAVIOUR`; NaN where no frame of the ID has an earlier frame
    past: NDArray[np.float32]  # [N, 7] means of `behaviour` over the ID's earlier windows in the log
    past_windows: NDArray[np.int32]  # [N] number of the ID's earlier windows in the log
    jumps: NDArray[np.uint16]  # [N, 22] largest jump of each of `WORDS` (see `recent_jumps`)
    # [N] bits of the `CHECKS` that a frame of the node breaks; not those that only its first frame breaks after a frame
    # that broke them
    broken_checks: NDArray[np.uint64]
    payload: Ints  # [N] first eight bytes of the node's last frame, the first byte in the lowest bits
    absent_silence: NDArray[np.float32]  # [A] binary logarithm of seconds since the ID's last frame
    absent_payload: Ints  # [A] first eight bytes of the ID's last frame
    edge_index: NDArray[np.int32]  # [2, E] source and destination as node positions inside the graph
    edge_features: NDArray[np.float32]  # [E, 11] columns `EDGE_FEATURES`, unscaled
    label: NDArray[np.uint8]  # [G] code of the window's most frequent attack kind, 0 where it has no attack
    drive: NDArray[np.int32]  # [G] number of the window's drive: a log, or the part of a log between two pauses
    first_frame: Ints  # [G] position of the window's first frame in its file
    start_time: Floats  # [G] time of the window's first frame in seconds
    end_time: Floats  # [G] time of the window's last frame in seconds
    digest: NDArray[np.uint64]  # [G] hash of the window's IDs, payloads and relative times (`window_digests`)

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatGraphs(WindowGraphs):
    """All windows of a data set; their labels are indices into `kinds`, and no two logs share the number of a drive."""

    node_ptr: Ints  # [G + 1] the nodes of graph g are node_ptr[g]:node_ptr[g + 1]
    edge_ptr: Ints  # [G + 1] the edges of graph g are edge_ptr[g]:edge_ptr[g + 1]
    node_code: NDArray[np.int32]  # [N] index into `ids`
    absent_ptr: Ints  # [G + 1] the absences of graph g are absent_ptr[g]:absent_ptr[g + 1]
    absent_code: NDArray[np.int32]  # [A] index into `ids`
    source: NDArray[np.int32]  # [G] index into `sources`
    ids: Ints  # [K] the distinct CAN IDs, ascending
    kinds: tuple[str, ...]  # names of the label codes; kinds[0] is "benign"
    sources: tuple[SourceFile, ...]  # the files, in reading order
    window: int  # frames in a window
    notices: tuple[str, ...] = ()  # sentences about the files for the user

    @property
    def num_nodes(self) -> Ints:
        """Number of nodes of each graph, [G]."""
        return np.diff(self.node_ptr)

    @property
    def num_ids(self) -> Ints:
        """Number of IDs that may contribute to a graph's score, [G]: its nodes and its absences."""
        return self.num_nodes + np.diff(self.absent_ptr)

    @property
    def num_edges(self) -> Ints:
        """Number of directed edges of each graph, self-loops included, [G]."""
        return np.diff(self.edge_ptr)


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """The parts of a data set, as positions of graphs in `FlatGraphs`, ascending."""

    train: Ints
    validation: Ints  # for thresholds and early stopping
    test: dict[str, Ints]  # positions by test group; each group is tested separately


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphBlock(WindowGraphs):
    """Graphs of consecutive windows of one log.

    Edges are in ascending order of (source, destination). `label` is the reader's code of the window's most frequent
    attack kind; the lowest if several are.
    """

    num_nodes: Ints  # [G]
    num_edges: Ints  # [G]
    num_absent: Ints  # [G]
    can_id: NDArray[np.uint32]  # [N] ascending inside each graph
    absent_id: NDArray[np.uint32]  # [A] ascending inside each graph


class GraphBuilder:
    """Builds the graphs of one log from its frames, which come in portions of any size.

    No window reaches over a pause of the log (see `PAUSE_S`), and the history of its IDs begins anew there, as if each
    drive had a log of its own.

    Attributes:
        frames_seen: Number of frames so far.
        windows: Number of windows so far.
        drives: Number of drives so far, at least 1.
    """

    def __init__(self, window: int, stride: int) -> None:
        if window > MAX_WINDOW:
            raise ConfigError(f"dataset.window is more than {MAX_WINDOW}", value=str(window),
                              remedy="Use --set dataset.window=100")  # fmt: skip
        self._window, self._stride = window, stride
        self.frames_seen = self.windows = self.drives = 0
        self._pauses = 0  # steps of the clock by `PAUSE_S` or more
        self._last_s = np.nan
        self._left_over = np.zeros(2, np.int64)  # see `left_over`, of earlier drives
        self._begin_drive()

    def feed(self, frames: Frames) -> Iterator[GraphBlock]:
        """Takes the log's next frames; yields the windows that they complete, in order, in blocks of bounded size."""
        begins = self._pauses_in(frames.timestamp)
        blocks = [self._feed(frames[: begins[0]] if begins else frames)]
        for begin, end in pairwise([*begins, len(frames)]):
            self._left_over += self._unfilled()
            self._begin_drive()
            blocks.append(self._feed(frames[begin:end]))
        return chain.from_iterable(blocks)

    @property
    def left_over(self) -> tuple[int, int]:
        """Number of the frames at the ends of drives that fill no window, and of the attack frames among them."""
        count, attacks = (self._left_over + self._unfilled()).tolist()
        return count, attacks

    def _begin_drive(self) -> None:
        self.drives += 1
        self._pending: _ComparedFrames | None = None
        self._history = IdHistory()
        self._drive_from = self._pending_from = self._next_start = self.frames_seen

    def _pauses_in(self, times: Floats) -> list[int]:
        """Returns the positions of the frames before which the log has a pause, among its next frames."""
        # Rounded to the microseconds of logs: differences of float64 times near 10^9 s have errors of about 10^-7 s.
        steps = np.abs(np.round(np.diff(times, prepend=self._last_s), 6))
        self._last_s = float(times[-1]) if len(times) else self._last_s
        begins = []
        for position in np.flatnonzero(steps >= PAUSE_S).tolist():
            # Only earlier frames decide, so that a live bus has the drives of a log.
            if self._pauses * USUAL_FRAMES_A_PAUSE <= self.frames_seen + position:
                begins.append(position)
            self._pauses += 1
        return begins

    def _feed(self, frames: Frames) -> Iterator[GraphBlock]:
        """Takes the next frames of the drive."""
        changes = [Changes.none()]
        for begin in range(0, len(frames), _COMPARED_FRAMES):
            part = frames[begin : begin + _COMPARED_FRAMES]
            changes.append(self._history.changes(part))
        changed = Changes(*(np.concatenate(column) for column in zip(*changes, strict=True)))
        arrived = _ComparedFrames(**vars(frames), **changed._asdict())
        joined = _Joined(arrived[:0] if self._pending is None else self._pending, arrived)
        joined_from, start = self._pending_from, self._next_start
        self.frames_seen += len(frames)
        num_windows = max(0, (self.frames_seen - start - self._window) // self._stride + 1)
        self._next_start = start + num_windows * self._stride
        self.windows += num_windows
        self._pending_from = min(self._next_start, self.frames_seen)
        self._pending = joined.part(self._pending_from - joined_from, self.frames_seen - joined_from)
        # A separate generator, so that this call counts the frames, and not the first block that is taken.
        place = _Place(drive=self.drives - 1, first_frame=start, window=self._window, stride=self._stride)
        return self._build(joined, joined_from, place, num_windows, self._history)

    def _unfilled(self) -> Ints:
        """Counts the last frames of the drive, which fill no window, and the attack frames among them, [2]."""
        if self._pending is None:
            return np.zeros(2, np.int64)
        has_windows = self._next_start > self._drive_from
        filled = self._next_start - self._stride + self._window if has_windows else self._drive_from
        label = self._pending.label[max(filled - self._pending_from, 0) :]
        return np.array([len(label), np.count_nonzero(label)])

    def _build(
        self, joined: _Joined, joined_from: int, place: _Place, num_windows: int, history: IdHistory
    ) -> Iterator[GraphBlock]:
        per_chunk = max(1, _CHUNK_FRAMES // self._window)
        for window in range(0, num_windows, per_chunk):
            last = min(window + per_chunk, num_windows) - 1
            begin = place.first_frame + window * self._stride
            end = place.first_frame + last * self._stride + self._window
            chunk = joined.part(begin - joined_from, end - joined_from)
            yield _build_chunk(chunk, place._replace(first_frame=begin), history)


class _Place(NamedTuple):
    """The place of windows in their log."""

    drive: int
    first_frame: int  # position of the first window's first frame
    window: int
    stride: int


@dataclass(frozen=True, eq=False)
class _ComparedFrames(Frames):
    """Frames with their `Changes`."""

    gap_s: NDArray[np.float32]  # [M]
    bits: NDArray[np.int8]  # [M]
    jumps: NDArray[np.uint16]  # [M, J]
    broken_checks: NDArray[np.uint64]  # [M]
    unexcused_checks: NDArray[np.uint64]  # [M]


class _Joined(NamedTuple):
    """Waiting frames, whose windows are not full yet, and the frames that arrived after them."""

    waiting: _ComparedFrames
    arrived: _ComparedFrames

    def part(self, begin: int, end: int) -> _ComparedFrames:
        """Returns frames from `begin` to before `end`; copies frames only if the part includes waiting frames."""
        count = len(self.waiting)
        if begin >= count:
            return self.arrived[begin - count : end - count]
        return _ComparedFrames.concatenate([self.waiting[begin:], self.arrived[: end - count]])


@dataclass(frozen=True, eq=False)
class _Groups:
    """The equal keys of every row, rows one after another and keys ascending inside a row."""

    key: Ints  # [R]
    row: Ints  # [R] the row of each group
    count: Ints  # [R] members of each group
    first: Ints  # [R] position of the group's first member in `member`
    last: Ints  # [R] position of the group's last member in `member`
    member: Ints  # [G · L] flat index (row · L + column) of every entry, ordered by group, then column
    column: Ints  # [G · L] column of every entry, in the order of `member`


def _group_rows(keys: NDArray[Any], largest: int) -> _Groups:
    """Groups the entries of each row of `keys` [G, L], which are at most `largest`."""
    # One sort of (key, column): rows are short, so the sort is fast. A table by ID would grow with the number of IDs,
    # which is large in fuzzing.
    num_rows, length = keys.shape
    key, column = sorted_columns(keys, largest)
    begins = np.ones((num_rows, length), dtype=np.bool_)
    begins[:, 1:] = key[:, 1:] != key[:, :-1]
    first = np.flatnonzero(begins)
    member = (column + np.arange(num_rows)[:, None] * length).ravel()
    last = np.append(first[1:], keys.size) - 1
    return _Groups(
        key=key.ravel()[first].astype(np.int64), row=first // length, count=last - first + 1, first=first, last=last,
        member=member, column=column.ravel(),
    )  # fmt: skip


def _build_chunk(frames: _ComparedFrames, place: _Place, history: IdHistory) -> GraphBlock:
    """Builds the graphs of all windows of frames."""
    window, stride = place.window, place.stride

    def windows(values: NDArray[Any]) -> NDArray[Any]:
        return windows_of(values, window, stride)  # [G, W]

    nodes = _group_rows(windows(frames.can_id), int(frames.can_id.max()))
    times = windows(frames.timestamp)
    num_graphs = len(times)
    num_nodes = np.bincount(nodes.row, minlength=num_graphs)
    node_start = np.cumsum(num_nodes) - num_nodes

    position = np.arange(len(nodes.key)) - node_start[nodes.row]  # [N] position inside the graph
    node_of_frame = np.empty((num_graphs, window), dtype=np.int64)
    node_of_frame.ravel()[nodes.member] = np.repeat(position, nodes.count)
    words = windows(payload_words(frames.payload)).ravel()[nodes.member]
    columns = _byte_means(words, nodes)
    columns["count"] = nodes.count
    columns["last_position"] = nodes.column[nodes.last] / (window - 1)
    frame = windows(np.arange(len(frames))).ravel()[nodes.member]
    in_order = Changes(frames.gap_s[frame], frames.bits[frame], frames.jumps[frame], frames.broken_checks[frame],
                       frames.unexcused_checks[frame])  # fmt: skip
    duration_s = (times[:, -1] - times[:, 0])[nodes.row]
    seen_s = times.ravel()[nodes.member[nodes.last]]
    silence_s = np.maximum(times[nodes.row, -1] - seen_s, 0.0)
    can_id = nodes.key.astype(np.uint32)
    payload = words[nodes.last]
    absences = history.absences(Nodes(can_id, nodes.row, seen_s, payload, times[:, -1]))
    behaviour = history.past(can_id, summarise(in_order, nodes.first, nodes.count, duration_s, silence_s))
    bits = window.bit_length()
    edges = _group_rows(node_of_frame[:, :-1] << bits | node_of_frame[:, 1:], window << bits)
    edge_index = np.stack([edges.key >> bits, edges.key & ((1 << bits) - 1)])  # [2, E]
    return GraphBlock(
        num_nodes=num_nodes,
        num_edges=np.bincount(edges.row, minlength=num_graphs),
        can_id=can_id,
        node_features=table_of(columns, NODE_FEATURES),
        behaviour=behaviour.now,
        past=behaviour.past,
        past_windows=behaviour.past_windows,
        jumps=history.recent_jumps(can_id, np.maximum.reduceat(in_order.jumps, nodes.first)),
        broken_checks=_broken_checks(in_order, nodes.first),
        payload=payload,
        num_absent=absences.num_absent,
        absent_id=absences.can_id,
        absent_silence=absences.silence,
        absent_payload=absences.payload,
        edge_index=edge_index.astype(np.int32),
        edge_features=_edge_features(edges, edge_index, node_start, times),
        label=_window_labels(windows(frames.label)),
        drive=np.full(num_graphs, place.drive, np.int32),
        first_frame=place.first_frame + np.arange(num_graphs) * stride,
        start_time=times[:, 0].copy(),
        end_time=times[:, -1].copy(),
        digest=window_digests(frames, window, stride),
    )


def _broken_checks(changes: Changes, first: Ints) -> NDArray[np.uint64]:
    """Returns the checks [N] that the frames of nodes break; the first frames of nodes are at `first` [N]."""
    # A window after an attack begins with the sender's frame after the last forged frame.
    broken = changes.broken_checks.copy()
    broken[first] = changes.unexcused_checks[first]
    checks: NDArray[np.uint64] = np.bitwise_or.reduceat(broken, first)
    return checks


def _byte_means(words: Ints, nodes: _Groups) -> dict[str, NDArray[Any]]:
    """Returns the means of the nodes' payload bytes; bytes beyond a frame's length count as 0.

    `words` has the payloads of the nodes' frames, node after node.
    """
    means: dict[str, NDArray[Any]] = {}
    divisor = 255.0 * nodes.count
    # Several bytes are added at a time; each byte gets as many bits as its sum needs.
    width = 16 if nodes.count.max() * 255 < 2**16 else 32
    lowest = (1 << width) - 1
    mask = 0x00FF_00FF_00FF_00FF if width == 16 else 0x0000_00FF_0000_00FF
    for begin in range(0, width, 8):
        sums = sums_to((words >> begin) & mask, nodes.last)
        for bit in range(begin, 64, width):
            means[f"byte_{bit // 8 + 1}_mean"] = ((sums >> (bit - begin)) & lowest) / divisor
    return means


def _edge_features(edges: _Groups, edge_index: Ints, node_start: Ints, times: Floats) -> NDArray[np.float32]:
    """Computes `EDGE_FEATURES` [E, 11] from `times` [G, W].

    Intervals are times in ms from source to destination frame, and their standard deviation is the population's.
    Positions, from 0 to 1, belong to the edge's source frames. Regularity is 1 / (1 + std / mean), and 1 where all
    intervals are 0: they do not vary either. Degrees count distinct edges in and out, so a self-loop counts twice.
    """
    window = times.shape[1]
    # Public captures run backwards by up to 7.9 ms; a negative interval would make a mean of 0 or less.
    interval = np.maximum(np.diff(times, axis=1), 0.0).ravel()[edges.member] * _MILLISECONDS
    mean = np.add.reduceat(interval, edges.first) / edges.count
    deviation = interval - np.repeat(mean, edges.count)
    std = np.sqrt(np.add.reduceat(deviation * deviation, edges.first) / edges.count)
    variation = np.divide(std, mean, out=np.zeros_like(std), where=mean > 0)
    first, last = edges.column[edges.first] / (window - 1), edges.column[edges.last] / (window - 1)
    source, target = edge_index + node_start[edges.row]
    num_nodes = max(source.max(), target.max()) + 1  # every frame has a neighbour, so no node is left out
    degree = np.bincount(source, minlength=num_nodes) + np.bincount(target, minlength=num_nodes)
    source_degree, target_degree = degree[source], degree[target]
    columns = {
        "count": edges.count,
        "count_share": edges.count / window,
        "interval_mean_ms": mean,
        "interval_std_ms": std,
        "regularity": 1.0 / (1.0 + variation),
        "first_position": first,
        "last_position": last,
        "spread": last - first,
        "reverse_exists": _have_reverse(edges, edge_index),
        "degree_product": source_degree * target_degree,
        "degree_ratio": source_degree / target_degree,
    }
    return table_of(columns, EDGE_FEATURES)


def _have_reverse(edges: _Groups, edge_index: Ints) -> Bools:
    """Returns whether each edge [E] has an edge in the opposite direction; a self-loop is its own opposite."""
    # Opposite edges are neighbours when edges are sorted without direction; a search takes several times as long.
    low, high = edge_index.min(axis=0), edge_index.max(axis=0)
    size = int(high.max()) + 1
    pairs = (edges.row * size + low) * size + high
    (pair,), (edge,) = sorted_columns(pairs[None], int(pairs.max()))
    exists: Bools = low == high
    twin = np.flatnonzero(pair[1:] == pair[:-1])
    exists[edge[twin]] = exists[edge[twin + 1]] = True
    return exists


def _window_labels(label: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the most frequent attack code [G] of each window of `label` [G, W]; 0 for a window without attack."""
    most_frequent = np.zeros(len(label), np.uint8)
    attacked = np.flatnonzero(label.any(axis=1))
    if len(attacked):
        num_codes = int(label.max()) + 1
        row = np.arange(len(attacked))[:, None] * num_codes
        counts = np.bincount((label[attacked] + row).ravel(), minlength=row.size * num_codes).reshape(-1, num_codes)
        counts[:, 0] = 0
        most_frequent[attacked] = counts.argmax(axis=1)
    return most_frequent


def too_many_kinds(what: str, value: str) -> DataError:
    """Makes the error for more kinds of labels than codes."""
    return DataError(f"{what} has more than {MAX_KINDS - 1} kinds of attack", value=value,
                     remedy="Name the column that holds the label: `--set dataset.columns.label=NAME`")  # fmt: skip


class GraphWriter:
    """Writes the graphs of several logs to a folder, one log after another; made by `writing_graphs`.

    Memory stays bounded: only the set of distinct CAN IDs grows with the data.
    """

    def __init__(self, arrays: ArrayWriter, window: int) -> None:
        self._arrays = arrays
        self._window = window
        self._kinds = [BENIGN]
        self._sources: list[SourceFile] = []
        self._notices: list[str] = []
        self._ids: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self._ends = {"node": 0, "edge": 0, "absent": 0}  # nodes, edges and absences so far
        self._first_drive = self._num_drives = 0  # number of the next log's first drive, and of drives so far
        arrays.append({"node_ptr": np.zeros(1), "edge_ptr": np.zeros(1), "absent_ptr": np.zeros(1)})

    def append(self, block: GraphBlock, kinds: Sequence[str]) -> None:
        """Adds graphs of the current log; their labels are positions in `kinds`.

        Raises:
            DataError: The logs have more kinds than there are codes.
        """
        self._kinds += [kind for kind in kinds if kind not in self._kinds]
        if len(self._kinds) > MAX_KINDS:
            raise too_many_kinds("A data set", f"{len(self._kinds) - 1}")
        codes = np.array([self._kinds.index(kind) for kind in kinds], dtype=np.uint8)
        columns = {name: array for name, array in vars(block).items() if not name.startswith("num_")}
        columns |= {
            "edge_index": block.edge_index.T,
            "label": codes[block.label],
            "source": np.full(len(block), len(self._sources)),
            "drive": self._first_drive + block.drive,
        }
        self._num_drives = max(self._num_drives, int(columns["drive"].max(initial=-1)) + 1)
        for name, counts in (("node", block.num_nodes), ("edge", block.num_edges), ("absent", block.num_absent)):
            columns[f"{name}_ptr"] = self._ends[name] + np.cumsum(counts)
            self._ends[name] += int(counts.sum())
        self._arrays.append(columns)
        self._ids = np.union1d(self._ids, block.can_id)

    def end_log(self, source: SourceFile, notices: Iterable[str]) -> None:
        """Records the log behind the latest graphs."""
        self._sources.append(source)
        self._notices += notices
        self.end_drives()

    def end_drives(self) -> None:
        """Separates the next graphs, whose drives are numbered from 0 again, from the latest graphs."""
        self._first_drive = self._num_drives

    def finish(self) -> FlatGraphs:
        """Completes the folder, moves it to its place (see `ArrayWriter.finish`) and maps it."""
        self._arrays.append({"ids": self._ids})
        # The codes of CAN IDs are their positions among all IDs, which are complete only now.
        for ids, codes in (("can_id", "node_code"), ("absent_id", "absent_code")):
            for can_id in self._arrays.take_back(ids, _RECODED_NODES):
                self._arrays.append({codes: np.searchsorted(self._ids, can_id)})
        sources = [asdict(source) for source in self._sources]
        meta = {"kinds": self._kinds, "sources": sources, "window": self._window, "notices": self._notices}
        return _flat_graphs(self._arrays.finish(meta), meta)


@contextmanager
def writing_graphs(folder: Path, window: int) -> Iterator[GraphWriter]:
    """Opens a folder for the graphs of windows of `window` frames; leaving it before `finish` leaves nothing behind."""
    with ArrayWriter(folder, {**_ARRAYS, "can_id": ("uint32", ()), "absent_id": ("uint32", ())}) as arrays:
        yield GraphWriter(arrays, window)


def read_graphs(folder: Path, *, verify: bool = True) -> FlatGraphs:
    """Maps graphs into memory, copy on write: a change of an array does not change its file.

    Args:
        folder: The graphs' folder.
        verify: Whether every byte is read, to find altered bytes; the sizes of files are always compared.

    Raises:
        FolderDamageError: A file is missing, truncated or altered.
    """
    arrays, meta = read_arrays(folder, list(_ARRAYS), verify=verify)
    with noticing_damage():
        return _flat_graphs(arrays, meta)


def no_graphs(window: int) -> FlatGraphs:
    """Returns a data set without windows."""
    arrays: dict[str, NDArray[Any]] = {name: np.empty((0, *shape), kind) for name, (kind, shape) in _ARRAYS.items()}
    arrays |= dict.fromkeys(("node_ptr", "edge_ptr", "absent_ptr"), np.zeros(1, np.int64))
    return _flat_graphs(arrays, {"kinds": [BENIGN], "sources": [], "window": window, "notices": []})


def _flat_graphs(arrays: dict[str, NDArray[Any]], meta: dict[str, Any]) -> FlatGraphs:
    return FlatGraphs(
        **{**arrays, "edge_index": arrays["edge_index"].T},
        kinds=tuple(meta["kinds"]),
        sources=tuple(SourceFile(**source) for source in meta["sources"]),
        window=meta["window"],
        notices=tuple(meta["notices"]),
    )
