"""Recognises windows and logs that occur in several files: windows by a hash, logs by a hash of all frames.

Shapes: M frames, G windows of W frames, R windows that are looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Bools, FlatGraphs, Frames, Ints

Hashes = NDArray[np.uint64]

# Odd numbers with evenly mixed bits: a constant of SplitMix64, and multiples of the golden ratio's constant.
_MIX: Final = np.uint64(0xBF58_476D_1CE4_E5B9)
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_WORDS: Final = np.array([(2 * i + 1) * _GOLDEN % 2**64 for i in range(8)], np.uint64)  # for 8 words of 8 bytes each
_ID, _LENGTH, _TIME, _PLACE = (np.uint64((2 * i + 1) * _GOLDEN % 2**64) for i in range(8, 12))


def windows_of(values: NDArray[Any], window: int, stride: int) -> NDArray[Any]:
    """Returns a view [G, W] of the windows of values [M]; the last window must end with the last value."""
    if window == stride:
        # For a thousand frames, a sliding view takes as long as all arithmetic on it.
        return values.reshape(-1, window)
    return sliding_window_view(values, window)[::stride]


def window_digests(frames: Frames, window: int, stride: int) -> Hashes:
    """Hashes the IDs, the payloads and the times since the window's first frame of each window, [G].

    The hash of a window does not change when its log is compressed, converted, or cut at another place.
    """
    times = windows_of(frames.timestamp, window, stride)
    content = windows_of(_content(frames), window, stride)
    hashes = _ticks(times - times[:, :1])
    hashes *= _TIME
    hashes += content
    hashes += np.arange(window, dtype=np.uint64) * _PLACE
    return _mixed(_mixed(hashes).sum(axis=1, dtype=np.uint64))


class LogDigest:
    """Hashes all frames of a log: their IDs, payloads and times since the first frame."""

    def __init__(self) -> None:
        self._sum = np.zeros(1, np.uint64)
        self._frames = 0
        self._start_s: float | None = None

    def update(self, frames: Frames) -> None:
        """Adds the next frames, at least one."""
        if self._start_s is None:
            self._start_s = float(frames.timestamp[0])
        place = np.arange(self._frames, self._frames + len(frames), dtype=np.uint64)
        ticks = _ticks(frames.timestamp - self._start_s)
        self._sum += _mixed(_content(frames) + ticks * _TIME + place * _PLACE).sum(dtype=np.uint64)
        self._frames += len(frames)

    def hexdigest(self) -> str:
        """Returns the number of frames so far and the hash of the frames."""
        return f"{self._frames:x}-{self._sum[0]:016x}"


def known_windows(flat: FlatGraphs, rows: Ints, trained: FlatGraphs, trained_rows: Ints) -> Bools:
    """Returns whether each window of `rows` [R] occurs in the windows `trained_rows`.

    Args:
        flat: Graphs with the windows `rows`.
        rows: [R] windows that are looked up.
        trained: Graphs with the windows `trained_rows`; may be `flat`.
        trained_rows: The trained windows.
    """
    occurs: Bools = np.isin(flat.digest[rows], trained.digest[trained_rows])
    digests = [source.frames_digest for source in trained.sources]
    for index, source in enumerate(flat.sources):
        if source.frames_digest and source.frames_digest in digests and flat is not trained:
            # In the same log, windows may begin at other frames now: a window that shares a frame with a trained window
            # counts as trained.
            of_log = flat.source[rows] == index
            begins = np.sort(
                trained.first_frame[trained_rows[trained.source[trained_rows] == digests.index(source.frames_digest)]]
            )
            first = flat.first_frame[rows[of_log]]
            after = np.searchsorted(begins, first - trained.window, side="right")
            occurs[of_log] |= after < np.searchsorted(begins, first + flat.window, side="left")
    return occurs


def _content(frames: Frames) -> Hashes:
    """Hashes the ID and the payload of each frame, [M]."""
    # Zeros after a payload add nothing, so the hash does not depend on longer payloads in the block.
    words = np.ascontiguousarray(frames.payload).view(np.uint64)
    hashes: Hashes = frames.can_id * _ID + frames.length * _LENGTH
    for index in range(words.shape[1]):
        hashes += words[:, index] * _WORDS[index]
    return _mixed(hashes)


def _ticks(seconds: NDArray[np.float64]) -> Hashes:
    ticks = seconds * 1e6  # logs hold microseconds
    return np.rint(ticks, out=ticks).astype(np.int64).view(np.uint64)


def _mixed(hashes: Hashes) -> Hashes:
    """Mixes the bits of hashes in place."""
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(29)
    return hashes
