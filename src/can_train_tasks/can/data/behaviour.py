"""The behaviour of each CAN ID in a window and in its past: its timing, the changes of its payload, and its jumps.
And the checks that its frames break (`payload_fields`).

The last frame of every ID and its behaviour in earlier windows are kept from window to window, for one log.

A jump is a change of the rate of change: a speed of 50 km/h that is 51 km/h a frame later and 80 km/h after that. A
value in a payload may have 8 or 16 bits, so each byte and each pair of bytes is taken for a value (`WORDS`).

Shapes: M frames, K IDs that were seen, G windows of W frames, N nodes (an ID in a window), B columns (`BEHAVIOUR`), A
absences (an ID that a window lacks), J words (`WORDS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from can_train_tasks.can.data.payload_fields import CHECKSUM_BITS, broken_checks

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Frames

# Times and rates are binary logarithms of seconds and of frames a second, so that a difference of 1 is a factor of 2.
BEHAVIOUR: Final = (
    "gap_min", "gap_mean", "gap_spread", "rate", "silence", "bits_changed", "unchanged",
)  # fmt: skip

PAIRS: Final = 7  # pairs of adjacent bytes among the first eight bytes of a payload
# Numbers of a payload, by their first byte, that jumps are measured of: pairs of bytes with the most significant byte
# first, pairs with the least significant byte first, and bytes.
WORDS: Final = (*(f"{first}-{first + 1}" for first in range(1, PAIRS + 1)),
                *(f"{first + 1}-{first}" for first in range(1, PAIRS + 1)), *map(str, range(1, PAIRS + 2)))  # fmt: skip
# [J] Places of the most and of the least significant byte of each word; a word of one byte has it twice.
HIGH_BYTES: Final = np.array([*range(PAIRS), *range(1, PAIRS + 1), *range(PAIRS + 1)])
LOW_BYTES: Final = np.array([*range(1, PAIRS + 1), *range(PAIRS), *range(PAIRS + 1)])
_BYTE_MASK: Final = 0xFF

# Columns that compare a frame with its ID's previous frame.
_COMPARED: Final = [index for index, name in enumerate(BEHAVIOUR) if name not in ("rate", "silence")]
_LEAST_S: Final = 2.0**-14  # least gap, 61 µs: shorter than any frame on a bus of 1 Mbit/s
_MOST_S: Final = 2.0**10  # largest gap, 17 minutes
_LONG_GAP: Final = 3.0  # gap ÷ the gap before it, above which a value does not jump
_QUANTUM: Final = 2.0**-16  # unit of all values, so that sums are exact for any cut of a log into blocks
_TABLE_ROWS: Final = 2**12  # rows that are filled at a time
_MAX_IDS: Final = 2**16  # IDs that are remembered; only a bus with random 29-bit IDs has more
# An ID that a window lacks is absent if it was in this number, and in this share, of the log's earlier windows.
_REGULAR_WINDOWS: Final = 10
_REGULAR_SHARE: Final = 0.1
# An attack may lie in an ID's past: a window moves the mean by no more than a window at this distance from it would.
_CLIP: Final = np.array([1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.5])


class Changes(NamedTuple):
    """The changes of M frames from their ID's previous frame; NaN and -1 in the first frame of an ID."""

    gap_s: NDArray[np.float32]
    bits: NDArray[np.int8]
    jumps: NDArray[np.uint16]  # [M, J] jump of each word; 0 in the first and the second frame of an ID
    broken_checks: NDArray[np.uint64]  # [M] bits of `CHECKS`; 0 in the first frame of an ID
    # [M] without those checks that the ID's last frame broke, and that the frame keeps after the last frame but one
    unexcused_checks: NDArray[np.uint64]

    @classmethod
    def none(cls) -> Self:
        """Returns the changes of no frames."""
        return cls(np.empty(0, np.float32), np.empty(0, np.int8), np.empty((0, len(WORDS)), np.uint16),
                   np.empty(0, np.uint64), np.empty(0, np.uint64))  # fmt: skip


class Behaviour(NamedTuple):
    """The behaviour of N nodes, and their IDs' behaviour in the log's earlier windows."""

    now: NDArray[np.float32]  # [N, B]; NaN, except rate and silence, where no frame of the ID has an earlier frame
    past: NDArray[np.float32]  # [N, B] means over the earlier windows; 0 without earlier windows
    past_windows: NDArray[np.int32]  # [N] number of earlier windows


class Nodes(NamedTuple):
    """The places of N nodes of G consecutive windows in their log."""

    can_id: NDArray[np.uint32]  # [N]
    window: NDArray[np.int64]  # [N] number of the node's window, from 0 to G - 1
    seen_s: NDArray[np.float64]  # [N] time of the ID's last frame in the window
    payload: NDArray[np.int64]  # [N] the first eight bytes of that frame (see `payload_words`)
    end_s: NDArray[np.float64]  # [G] time of each window's last frame


class Absences(NamedTuple):
    """The regular IDs that G windows lack, ascending inside each window."""

    num_absent: NDArray[np.int64]  # [G]
    can_id: NDArray[np.uint32]  # [A]
    silence: NDArray[np.float32]  # [A] binary logarithm of seconds from the ID's last frame to the end of the window
    payload: NDArray[np.int64]  # [A] the first eight bytes of the ID's last frame


@dataclass
class _Remembered:
    """Values of K IDs; the IDs are in ascending order."""

    can_id: NDArray[np.uint32]
    values: dict[str, NDArray[Any]]

    def find(self, can_id: NDArray[np.uint32]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Returns the positions of IDs, and whether the IDs are remembered."""
        position = np.searchsorted(self.can_id, can_id)
        if not len(self.can_id):
            return position, np.zeros(len(can_id), dtype=np.bool_)
        position = np.minimum(position, len(self.can_id) - 1)
        return position, self.can_id[position] == can_id

    def update(self, can_id: NDArray[np.uint32], values: dict[str, NDArray[Any]]) -> None:
        """Sets the values of IDs; the IDs are in ascending order."""
        position, is_old = self.find(can_id)
        for name, new in values.items():
            self.values[name][position[is_old]] = new[is_old]
        if is_old.all():
            return
        joined = np.concatenate([self.can_id, can_id[~is_old]])
        order = np.argsort(joined, kind="stable")
        self.can_id = joined[order]
        for name, new in values.items():
            self.values[name] = np.concatenate([self.values[name], new[~is_old]])[order]

    def keep(self, chosen: NDArray[np.bool_]) -> None:
        """Forgets all IDs where `chosen` [K] is False."""
        self.can_id = self.can_id[chosen]
        self.values = {name: value[chosen] for name, value in self.values.items()}


def _nothing(**values: tuple[Any, int]) -> _Remembered:
    empty = {name: np.empty((0, width) if width else 0, dtype=dtype) for name, (dtype, width) in values.items()}
    return _Remembered(np.empty(0, dtype=np.uint32), empty)


class _Ordered(NamedTuple):
    """Frames [M] in the order of IDs, then time, and their IDs [K]."""

    ids: NDArray[np.uint32]  # [M]
    order: NDArray[np.intp]  # [M] positions of the frames in the log
    first: NDArray[np.intp]  # [K] the first frame of each ID
    last: NDArray[np.intp]  # [K] the last frame of each ID
    is_old: NDArray[np.bool_]  # [K] whether the ID is remembered
    new: NDArray[np.intp]  # first frames of IDs that are not remembered
    remembered: Mapping[str, NDArray[Any]]  # values of IDs that are remembered, in order

    @classmethod
    def of(cls, can_id: NDArray[np.uint32], remembered: _Remembered) -> Self:
        ids, order = _sorted_ids(can_id)
        first = _run_starts(ids)
        position, is_old = remembered.find(ids[first])
        values = {name: value[position[is_old]] for name, value in remembered.values.items()}
        return cls(ids, order, first, np.append(first[1:], len(ids)) - 1, is_old, first[~is_old], values)

    def before(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the value [M] of the frame before each frame; 0 where there is none.

        The value `name` is remembered for the frame before an ID's first frame.
        """
        earlier = np.roll(values, 1, axis=0)
        earlier[self.new] = 0
        earlier[self.first[self.is_old]] = self.remembered[name]
        return earlier


def _jumps(step: NDArray[np.int16], ordered: _Ordered) -> NDArray[np.uint16]:
    """Returns the jumps [M, J] of frames from their steps."""
    before = ordered.before("step", step)
    # Where nothing is known about the step before, the value does not jump.
    second = ordered.new[~np.isin(ordered.new, ordered.last)] + 1
    unknown = [ordered.new, second, ordered.first[ordered.is_old][~ordered.remembered["has_step"]]]
    for frames in unknown:
        before[frames] = step[frames]
    change = np.abs(np.subtract(step, before, dtype=np.int32))
    change -= np.abs(before, dtype=np.int32)
    jumps: NDArray[np.uint16] = np.maximum(change, 0, out=change).astype(np.uint16)
    return jumps


class IdHistory:
    """The history of each ID in a log so far."""

    def __init__(self) -> None:
        self._frames = _nothing(time=(np.float64, 0), payload=(np.int64, 0), length=(np.uint8, 0), gap=(np.float32, 0),
                                has_step=(np.bool_, 0), step=(np.int16, len(WORDS)), payload_before=(np.int64, 0),
                                length_before=(np.uint8, 0), broken=(np.uint64, 0))  # fmt: skip
        wide = (np.float64, len(BEHAVIOUR))
        self._windows = _nothing(count=(np.float64, 0), plain=wide, clipped=wide)
        self._jumped = _nothing(jumps=(np.uint16, len(WORDS)), before=(np.uint16, len(WORDS)))
        self._seen = _nothing(time=(np.float64, 0), count=(np.int64, 0), payload=(np.int64, 0))
        self._num_windows = 0

    def changes(self, frames: Frames) -> Changes:
        """Compares each of the log's next M frames with its ID's previous frame."""
        ordered = _Ordered.of(frames.can_id, self._frames)
        now: dict[str, NDArray[Any]] = {
            "time": frames.timestamp,
            "payload": payload_words(frames.payload),
            "length": frames.length,
        }
        now = {name: values[ordered.order] for name, values in now.items()}
        before = {name: ordered.before(name, values) for name, values in now.items()}
        # Public captures run backwards by some milliseconds.
        gap = np.maximum(now["time"] - before["time"], 0.0).astype(np.float32)
        gap[ordered.new] = np.nan
        bits = np.bitwise_count((now["payload"] ^ before["payload"]).view(np.uint64)).astype(np.int8)
        bits[ordered.new] = -1
        step = _steps(now["payload"], before["payload"])
        jumps = _jumps(step, ordered)
        # After a long gap the value has had time to change.
        is_late = gap > _LONG_GAP * ordered.before("gap", gap)
        jumps[is_late] = 0
        broken = broken_checks(now["payload"], now["length"], before["payload"], before["length"])
        broken[is_late] &= CHECKSUM_BITS  # a counter went on without frames that the log lacks
        broken[ordered.new] = 0
        last_but_one = [ordered.before(f"{name}_before", before[name]) for name in ("payload", "length")]
        # After a forged frame, the sender's next frame does not fit, but it fits the sender's last frame.
        excused = ordered.before("broken", broken) & ~broken_checks(now["payload"], now["length"], *last_but_one)
        changes = Changes(gap, bits, jumps, broken, broken & ~excused)
        kept = {**now, "gap": gap, "step": step, "broken": broken, "payload_before": before["payload"],
                "length_before": before["length"]}  # fmt: skip
        last = {name: values[ordered.last] for name, values in kept.items()}
        # An ID's first frame makes no step; steps of a short run may be its second frame's.
        last["has_step"] = ordered.is_old | (ordered.last > ordered.first)
        self._frames.update(ordered.ids[ordered.first], last)
        if len(self._frames.can_id) > 2 * _MAX_IDS:
            seen_s = self._frames.values["time"]
            self._frames.keep(seen_s >= np.partition(seen_s, -_MAX_IDS)[-_MAX_IDS])
            for remembered in (self._windows, self._jumped, self._seen):
                remembered.keep(np.isin(remembered.can_id, self._frames.can_id))
        place = np.empty_like(ordered.order)
        place[ordered.order] = np.arange(len(place))
        return Changes(**{name: values[place] for name, values in changes._asdict().items()})

    def recent_jumps(self, can_id: NDArray[np.uint32], jumps: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Returns the larger of the jumps [N, J] of nodes and of the last earlier window with the node's ID.

        A single window with a jump would be lost where an alarm needs several windows. Where the value also jumped in
        the window before that, nothing would be lost, and the jumps of the earlier window do not count.
        """
        ids, order = _sorted_ids(can_id)
        first = _run_starts(ids)
        position, is_old = self._jumped.find(ids[first])
        own = jumps[order]
        history = [own]
        for name in ("jumps", "before"):
            earlier = np.roll(history[-1], 1, axis=0)
            earlier[first] = 0
            earlier[first[is_old]] = self._jumped.values[name][position[is_old]]
            history.append(earlier)
        last = np.append(first[1:], len(ids)) - 1
        self._jumped.update(ids[first], {"jumps": own[last], "before": history[1][last]})
        recent = np.empty_like(jumps)
        recent[order] = np.maximum(own, np.where(history[2] > history[1] // 2, 0, history[1]))
        return recent

    def absences(self, nodes: Nodes) -> Absences:
        """Finds the regular IDs that the log's next G windows lack.

        Few IDs are regular even on a bus with many IDs: the shares of all IDs sum up to the mean number in a window.
        """
        ids, order = _sorted_ids(nodes.can_id)
        first = _run_starts(ids)
        position, is_old = self._seen.find(ids[first])
        carried = np.zeros(len(first), np.int64)
        carried[is_old] = self._seen.values["count"][position[is_old]]
        sizes = np.diff(first, append=len(ids))
        count = np.arange(1, len(ids) + 1) + np.repeat(carried - first, sizes)
        before = _Remembered(self._seen.can_id, {name: value.copy() for name, value in self._seen.values.items()})
        last = first + sizes - 1
        latest = order[last]
        self._seen.update(ids[first], {"time": nodes.seen_s[latest], "count": count[last],
                                       "payload": nodes.payload[latest]})  # fmt: skip

        least = np.maximum(_REGULAR_WINDOWS, _REGULAR_SHARE * (self._num_windows + np.arange(len(nodes.end_s))))
        self._num_windows += len(least)
        regular = self._seen.can_id[self._seen.values["count"] >= least.min(initial=np.inf)]
        # The history of each regular ID before the first window and after each window, [G + 1, K].
        seen_s = np.full((len(least) + 1, len(regular)), np.nan)
        counts, payload = np.zeros((2, *seen_s.shape), np.int64)
        position, is_old = before.find(regular)
        for values, name in ((seen_s, "time"), (counts, "count"), (payload, "payload")):
            values[0, is_old] = before.values[name][position[is_old]]
        column = np.minimum(np.searchsorted(regular, ids), max(len(regular) - 1, 0))
        of_regular = np.flatnonzero(regular[column] == ids) if len(regular) else order[:0]
        row, column = nodes.window[order[of_regular]], column[of_regular]
        places = order[of_regular]
        seen_s[row + 1, column], counts[row + 1, column] = nodes.seen_s[places], count[of_regular]
        payload[row + 1, column] = nodes.payload[places]
        lacking = np.isnan(seen_s[1:])
        latest = np.where(np.isnan(seen_s), 0, np.arange(len(seen_s))[:, None])
        np.maximum.accumulate(latest, axis=0, out=latest)
        seen_s, counts, payload = (
            np.take_along_axis(values, latest, axis=0)[1:] for values in (seen_s, counts, payload)
        )
        row, column = np.nonzero(lacking & (counts >= least[:, None]))
        silence = _log2_s(nodes.end_s[row] - seen_s[row, column]).astype(np.float32)
        return Absences(np.bincount(row, minlength=len(least)), regular[column], silence, payload[row, column])

    def past(self, can_id: NDArray[np.uint32], now: NDArray[np.float32]) -> Behaviour:
        """Returns the behaviour `now` of N nodes of consecutive windows together with the nodes' past."""
        ids, order = _sorted_ids(can_id)
        first = _run_starts(ids)
        position, is_old = self._windows.find(ids[first])
        # Columns are contiguous. Values are whole numbers of quanta, whose sums are exact in float64.
        values = np.multiply(now[order].T, 1.0 / _QUANTUM, order="C", dtype=np.float64)
        unknown = np.flatnonzero(np.isnan(values[0]))
        values[:, unknown] = 0.0
        counted = np.ones(len(ids))
        counted[unknown] = 0.0

        def earlier(name: str, added: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            """Returns the sums over the windows before each node's, [..., N], and over an ID's windows, [..., K]."""
            carried = np.zeros((*added.shape[:-1], len(first)))
            carried[..., is_old] = self._windows.values[name][position[is_old]].T
            whole = np.add.reduceat(added, first, axis=-1) + carried
            # One running sum over all IDs, which at the first node of an ID jumps to the sum of its earlier windows.
            jumping = np.zeros_like(added)
            jumping[..., 1:] = added[..., :-1]
            jumping[..., first] += carried
            jumping[..., first[1:]] -= whole[..., :-1]
            return np.cumsum(jumping, axis=-1, out=jumping), whole.T

        count, all_count = earlier("count", counted)
        plain, all_plain = earlier("plain", values)
        divisor = np.maximum(count, 1.0)
        middle = np.divide(plain, divisor, out=plain)
        new = np.flatnonzero(count == 0)
        middle[:, new] = values[:, new]
        reach = _CLIP[:, None] / _QUANTUM
        # np.clip would take three times as long.
        clipped = np.maximum(values, middle - reach, out=values)
        np.minimum(clipped, np.add(middle, reach, out=middle), out=clipped)
        np.rint(clipped, out=clipped)
        clipped[:, unknown] = 0.0
        sums, all_clipped = earlier("clipped", clipped)
        self._windows.update(ids[first], {"count": all_count, "plain": all_plain, "clipped": all_clipped})
        past = np.empty(now.shape, np.float32)
        sums /= divisor
        sums *= _QUANTUM
        past[order] = sums.T
        past_windows = np.empty(len(ids), np.int32)
        past_windows[order] = count
        return Behaviour(now, past, past_windows)


def _run_starts(ids: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Returns the first position of each run of equal values."""
    return np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))


def _sorted_ids(can_id: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
    """Returns IDs in ascending order, and their positions, ascending among equal IDs."""
    ids, order = sorted_columns(can_id[None], int(can_id.max(initial=0)))
    return ids[0].astype(np.uint32), order[0].astype(np.intp)


def sorted_columns(keys: NDArray[Any], largest: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sorts each row of `keys` [G, L], whole numbers up to `largest`; returns sorted keys and their columns, [G, L].

    The columns of equal keys ascend.
    """
    # numpy sorts values several times as fast as it finds their order, and it sorts short values faster.
    bits = keys.shape[1].bit_length()
    narrow = largest.bit_length() + bits < 32
    dtype = np.int32 if narrow else np.int64
    ordered = (keys.astype(dtype) << bits) | np.arange(keys.shape[1], dtype=dtype)
    ordered.sort(axis=1)
    return ordered >> bits, ordered & ((1 << bits) - 1)


def _steps(words: NDArray[np.int64], before: NDArray[np.int64]) -> NDArray[np.int16]:
    """Returns the changes [M, J] of each of `WORDS` from payloads `before` [M] to payloads `words` [M].

    A value that runs over its end goes on at the other end: from 255 to 0 is a step of 1.
    """
    now, then = (np.ascontiguousarray(each).view(np.uint8).reshape(-1, 8).astype(np.uint16) for each in (words, before))
    steps = np.empty((len(words), len(WORDS)), np.int16)
    for begin, high, low in ((0, 0, 1), (PAIRS, 1, 0)):
        new, old = ((each[:, high : PAIRS + high] << 8) | each[:, low : PAIRS + low] for each in (now, then))
        steps[:, begin : begin + PAIRS] = (new - old).view(np.int16)
    steps[:, 2 * PAIRS :] = (now - then).astype(np.uint8).view(np.int8)
    return steps


def word_values(payload: NDArray[np.int64], word: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers in payloads (see `payload_words`) at positions of `WORDS`; the shapes are broadcast."""
    high, low = (payload >> (8 * place[word]) & _BYTE_MASK for place in (HIGH_BYTES, LOW_BYTES))
    numbers: NDArray[np.int64] = np.where(word < 2 * PAIRS, high << 8 | low, low)
    return numbers


def payload_words(payload: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns the first eight bytes of each payload as one number [M], with the first byte in the lowest bits."""
    return np.ascontiguousarray(payload[:, :8]).view("<i8").ravel()


def summarise(
    changes: Changes,
    first: NDArray[np.int64],
    count: NDArray[np.int64],
    duration_s: NDArray[np.float64],
    silence_s: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Returns the behaviour [N, B] of nodes.

    Args:
        changes: Changes of the frames of all nodes, node after node.
        first: [N] position of each node's first frame in `changes`.
        count: [N] number of each node's frames.
        duration_s: [N] seconds from the first to the last frame of each node's window.
        silence_s: [N] seconds from each node's last frame to the last frame of its window.
    """
    last = first + count - 1
    unknown = np.flatnonzero(changes.bits < 0)
    nodes_of_unknown = np.searchsorted(first, unknown, side="right") - 1
    compared = count - np.bincount(nodes_of_unknown, minlength=len(count))
    divisor = np.maximum(compared, 1)
    shortest_s, gap = changes.gap_s.copy(), changes.gap_s.astype(np.float64)
    shortest_s[unknown], gap[unknown] = np.inf, 0.0
    shortest = np.minimum.reduceat(shortest_s, first)
    mean = np.add.reduceat(gap, first) / divisor
    square = np.add.reduceat(gap * gap, first) / divisor
    spread = np.sqrt(np.maximum(square - mean * mean, 0.0)) / np.maximum(mean, _LEAST_S)
    bits = (sums_to(changes.bits, last) + count - compared) / divisor
    unchanged = sums_to(changes.bits == 0, last) / divisor
    columns = {
        "gap_min": _log2_s(shortest),
        "gap_mean": _log2_s(mean),
        "gap_spread": spread,
        "rate": np.log2(count / np.maximum(duration_s, _LEAST_S)),
        "silence": _log2_s(silence_s),
        "bits_changed": np.log2(1.0 + bits),
        "unchanged": unchanged,
    }
    rounded = table_of(columns, BEHAVIOUR)
    rounded /= _QUANTUM
    np.rint(rounded, out=rounded)
    rounded *= _QUANTUM
    rounded[np.ix_(compared == 0, _COMPARED)] = np.nan
    return rounded


def sums_to(values: NDArray[Any], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums whole numbers [M] over successive groups; `last` [N] is the last position of each group."""
    # Differences of an exact running sum take half as long as np.add.reduceat.
    sums = np.cumsum(values, dtype=np.int64)[last]
    sums[1:] -= sums[:-1].copy()
    return sums


def table_of(columns: Mapping[str, NDArray[Any]], names: Sequence[str]) -> NDArray[np.float32]:
    """Returns a table [N, columns] with the columns `names`."""
    table = np.empty((len(columns[names[0]]), len(names)), dtype=np.float32)
    # Few rows at a time, which stay in the CPU's cache until all columns are filled in.
    for begin in range(0, len(table), _TABLE_ROWS):
        part = slice(begin, begin + _TABLE_ROWS)
        for index, name in enumerate(names):
            table[part, index] = columns[name][part]
    return table


def _log2_s(seconds: NDArray[Any]) -> NDArray[Any]:
    logarithms: NDArray[Any] = np.log2(np.clip(seconds, _LEAST_S, _MOST_S))
    return logarithms
