"""What live detection checks about its input: the clock, unreadable lines, IDs that training knew, and the bus load.

Each check tells the beginning of a fault once, and again only after the fault was over.

Shapes: M frames, R windows, V IDs of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from can_train.io.units import counted
from can_train_tasks.can.data.graphs import FlatGraphs, Floats, Frames, Ints

JUMP_S: Final = 5.0  # a clock jumps where it runs ahead of the frames' arrival, or steps back, by more than this
JUMP_EVERY_S: Final = 1.0  # least seconds of arrival between two events about the clock
LIVE_S: Final = 5.0  # seconds of arrival after which it is known whether frames arrive at the pace of their times
CHECKED_LINES: Final = 200  # lines that a share of unreadable lines is computed from
UNREADABLE_SHARE: Final = 0.1
STRANGE_S: Final = 2.0  # time and frames without an ID that training knew, after which a bus is called unknown
STRANGE_FRAMES: Final = 100
BACK_S: Final = 0.1  # a clock that steps back by more was set; interfaces that a recorder merges step back by less
LOAD_S: Final = 1.0  # time over which a bus load is measured
COARSE_US: Final = 500  # steps of a clock that blur the periods of IDs, where training knew finer ones
STEP_FRAMES: Final = 1000  # frames that tell the steps of a clock
_STEP_WINDOWS: Final = 20  # windows of a log that tell the steps of its clock
LOAD_MARGIN: Final = 1.2  # a bus may carry this many times as many frames a second as in the benign training drives


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault of the input, or its end."""

    text: str
    record: Mapping[str, Any]  # strict JSON; `event` is its kind


class ClockCheck:
    """Compares the times of frames with their arrival.

    Attributes:
        jumped_s: Sum of the jumps in seconds, negative where the clock has stepped back.
    """

    def __init__(self) -> None:
        self.jumped_s = 0.0
        self._since: tuple[float, float] | None = None  # time of a frame and of its arrival, before any jump
        self._last_s = self._arrived_s = 0.0
        self._told_s = -np.inf

    def see(self, times: Floats, arrived_s: float) -> Iterator[Finding]:
        """Takes the times [M] of frames that arrived together."""
        if self._since is None:
            self._since, self._last_s, self._arrived_s = (float(times[0]), arrived_s), float(times[0]), arrived_s
        steps = np.diff(times, prepend=self._last_s)
        waited_s = arrived_s - self._arrived_s
        back = steps < -JUMP_S
        # A log that is replayed faster than it was recorded has pauses that are no jumps.
        ahead = steps > JUMP_S + waited_s if self._is_live() else np.zeros_like(back)
        jumps = np.flatnonzero(back | ahead)
        self._last_s, self._arrived_s = float(times[-1]), arrived_s
        if not len(jumps):
            return
        self._since = (self._last_s, arrived_s)
        self.jumped_s += float(steps[jumps].sum())
        if arrived_s - self._told_s < JUMP_EVERY_S:
            return
        self._told_s = arrived_s
        to_s, step_s = float(times[jumps[0]]), float(steps[jumps[0]])
        direction = "back" if step_s < 0 else "forward"
        yield Finding(text=f"{to_s:.6f} s: the clock jumped {direction} by {abs(step_s):,.1f} s",
                      record={"event": "clock_jump", "time": to_s, "jump_s": step_s})  # fmt: skip

    def _is_live(self) -> bool:
        assert self._since is not None
        elapsed_s, arrival_s = self._last_s - self._since[0], self._arrived_s - self._since[1]
        return arrival_s >= LIVE_S and abs(elapsed_s - arrival_s) <= JUMP_S


class LineCheck:
    """Watches the share of lines that are no frames."""

    def __init__(self) -> None:
        self._frames = self._unreadable = 0  # counts when the share was last computed
        self._is_told = False

    def see(self, frames: int, unreadable: int) -> Iterator[Finding]:
        """Takes the counts of frames and of unreadable lines so far."""
        lines, bad = frames + unreadable - self._frames - self._unreadable, unreadable - self._unreadable
        if lines < CHECKED_LINES:
            return
        self._frames, self._unreadable = frames, unreadable
        share = bad / lines
        if share >= UNREADABLE_SHARE and not self._is_told:
            yield Finding(text=f"{bad:,} of the last {lines:,} lines cannot be read",
                          record={"event": "unreadable", "lines": lines, "share": share})  # fmt: skip
        self._is_told = share >= UNREADABLE_SHARE


class IdCheck:
    """Notices a bus without any ID that training knew: another vehicle, another bit rate, or garbage."""

    def __init__(self, vocabulary: Ints) -> None:
        self._vocabulary = vocabulary
        self._since_s = np.inf  # time of the last known frame, or of the first frame; a clock may step back
        self._frames = 0  # since then
        self._is_told = False

    def see(self, frames: Frames) -> Iterator[Finding]:
        """Takes the next frames [M]; how they are divided into calls changes nothing."""
        times = frames.timestamp
        known = np.flatnonzero(np.isin(frames.can_id, self._vocabulary))
        bounds = np.concatenate([[-1], known, [len(times)]])
        # The stretches between known frames. Only the first goes on from earlier frames, and only the last goes on.
        long = np.flatnonzero(np.diff(bounds) > STRANGE_FRAMES)
        for number in sorted({0, *long.tolist(), len(known)}):
            if number:
                self._since_s, self._frames, self._is_told = float(times[known[number - 1]]), 0, False
            yield from self._see_unknown(times[bounds[number] + 1 : bounds[number + 1]])

    def _see_unknown(self, times: Floats) -> Iterator[Finding]:
        """Takes the times of the next frames without an ID that training knew."""
        if not len(times):
            return
        since_s = np.minimum.accumulate(np.concatenate([[self._since_s], times]))[1:]
        counts = self._frames + np.arange(1, len(times) + 1)
        strange = (counts >= STRANGE_FRAMES) & (times - since_s >= STRANGE_S)
        self._since_s, self._frames = float(since_s[-1]), int(counts[-1])
        if self._is_told or not strange.any():
            return
        self._is_told = True
        first = int(strange.argmax())
        time_s, count = float(times[first]), int(counts[first])
        silent_s = time_s - float(since_s[first])
        told = f"no ID that training knew in {counted(count, 'frame')} of the last {silent_s:,.1f} s"
        yield Finding(text=f"{time_s:.6f} s: {told}: another vehicle, another bit rate, or garbage",
                      record={"event": "unknown_ids", "time": time_s, "frames": count})  # fmt: skip


class LoadCheck:
    """Notices more frames a second than the benign drives of training had; `usual` is None where nobody counted."""

    def __init__(self, usual: float | None) -> None:
        self._usual = usual
        self._begin_s = self._last_s = np.inf  # beginning of the second that is counted; time of the latest frame
        self._count = 0
        self._is_told = False

    def see(self, times: Floats) -> Iterator[Finding]:
        """Takes the times [M] of the next frames; how they are divided into calls changes nothing."""
        if self._usual is None:
            return
        back = np.flatnonzero(np.diff(times, prepend=self._last_s) < -BACK_S)
        bounds = [0, *back.tolist(), len(times)]
        for begin, end in pairwise(bounds):
            if begin in back:
                # The clock was set back: a second that is counted across would have frames of two seconds.
                self._begin_s, self._count = float(times[begin]), 0
            if begin < end:
                yield from self._see(times[begin:end], self._usual)
        self._last_s = float(times[-1])

    def _see(self, times: Floats, usual: float) -> Iterator[Finding]:
        seconds = np.maximum((times - self._begin_s) // LOAD_S, 0)
        numbers, counts = np.unique(seconds, return_counts=True)
        if numbers[0] == 0:
            counts[0] += self._count
        else:
            yield from self._judge(self._begin_s, self._count, usual)
        for number, count in zip(numbers[:-1].tolist(), counts[:-1].tolist(), strict=True):
            yield from self._judge(self._begin_s + number * LOAD_S, count, usual)
        self._begin_s, self._count = self._begin_s + float(numbers[-1]) * LOAD_S, int(counts[-1])

    def _judge(self, begin_s: float, count: int, usual: float) -> Iterator[Finding]:
        load = count / LOAD_S
        is_high = load > LOAD_MARGIN * usual
        if is_high and not self._is_told:
            told = f"{load:,.0f} frames a second, at most {usual:,.0f} in the benign training drives"
            yield Finding(text=f"{begin_s + LOAD_S:.6f} s: the bus load is high, {told}",
                          record={"event": "bus_load", "time": begin_s + LOAD_S, "frames_per_s": load,
                                  "usual_frames_per_s": usual})  # fmt: skip
        self._is_told = is_high


class StepCheck:
    """Notices a clock with coarser steps than the training logs had; `usual_us` is None where nobody measured."""

    def __init__(self, usual_us: int | None) -> None:
        self._usual_us = usual_us
        self._first_s: float | None = None
        self._frames = self._step_us = 0

    def see(self, times: Floats) -> Iterator[Finding]:
        """Takes the times [M] of the next frames."""
        if self._usual_us is None or self._frames >= STEP_FRAMES:
            return
        times = times[: STEP_FRAMES - self._frames]
        self._first_s = float(times[0]) if self._first_s is None else self._first_s
        self._step_us = _clock_step_us(times, self._first_s, self._step_us)
        self._frames += len(times)
        if self._frames >= STEP_FRAMES and (text := _about_steps(self._step_us, self._usual_us)):
            time_s = float(times[-1])
            yield Finding(text=f"note: {text}", record={"event": "note", "time": time_s, "text": text})


def _clock_step_us(times: Floats, first_s: float, step_us: int = 0) -> int:
    """Returns the largest step in microseconds that all times [M], and earlier times of step `step_us`, are apart."""
    return int(np.gcd.reduce(np.rint((times - first_s) * 1e6).astype(np.int64), initial=step_us))


def _about_steps(step_us: int, usual_us: int) -> str:
    if step_us < max(COARSE_US, 2 * usual_us):
        return ""
    steps, usual = (f"{each / 1000:g} ms" if each >= COARSE_US else f"{each} µs" for each in (step_us, usual_us))
    return (f"The clock has steps of {steps}, and in the training logs of {usual}: gaps between frames look irregular, "
            "which raises scores; record finer times, or train on logs of this clock")  # fmt: skip


def clock_step_us(flat: FlatGraphs, rows: Ints) -> int | None:
    """Returns the coarsest steps of the clocks of the logs of the windows `rows`; None where no clock moves."""
    return max(_steps_of_logs(flat, rows).values(), default=0) or None


def coarse_clock_notes(flat: FlatGraphs, rows: Ints, usual_us: int | None) -> list[str]:
    """Tells of the logs of the windows `rows` whose clocks have coarser steps than the training logs."""
    if usual_us is None:
        return []
    told = {source: _about_steps(step_us, usual_us) for source, step_us in _steps_of_logs(flat, rows).items()}
    return [f"{Path(flat.sources[source].path).name}: {text[0].lower()}{text[1:]}"
            for source, text in told.items() if text]  # fmt: skip


def _steps_of_logs(flat: FlatGraphs, rows: Ints) -> dict[int, int]:
    """Returns the steps of the clock of each log with enough of the windows `rows`."""
    steps = {}
    for source in np.unique(flat.source[rows]).tolist():
        of_log = rows[flat.source[rows] == source]
        # The times of a window's ends tell enough: of 40 times, a finer clock has one between two coarser steps.
        if len(of_log) >= _STEP_WINDOWS:
            times = np.concatenate([flat.start_time[of_log], flat.end_time[of_log]])
            steps[source] = _clock_step_us(times, float(times[0]))
    return steps


def highest_load(flat: FlatGraphs, rows: Ints) -> float | None:
    """Returns the most frames a second, over `LOAD_S`, in the benign windows among `rows`; None for shorter drives."""
    benign = np.sort(rows[flat.label[rows] == 0])
    # An attack between two benign windows may have sent most of the frames.
    breaks = 1 + np.flatnonzero((np.diff(benign) != 1) | (np.diff(flat.drive[benign]) != 0))
    highest = 0.0
    for stretch in np.split(benign, breaks):
        begin, first = flat.start_time[stretch], flat.first_frame[stretch]
        # The first window that begins `LOAD_S` or more after each window.
        later = np.searchsorted(np.maximum.accumulate(begin), begin + LOAD_S)
        inside = np.flatnonzero(later < len(begin))
        seconds = begin[later[inside]] - begin[inside]
        loads = (first[later[inside]] - first[inside])[seconds > 0] / seconds[seconds > 0]
        highest = max(highest, float(loads.max(initial=0.0)))
    return highest or None
