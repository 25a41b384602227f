"""The times in logs: their unit and their starting point.

The unit comes from the name of a column, or from the periods of CAN IDs. Times may count from the previous line, from
midnight or from the beginning of a recording.

Shapes: M frames.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train_tasks.can.data.grammar import (
    CLOCK_CODE,
    MAX_TIME_S,
    SECONDS_A_DAY,
    Grammar,
    ParsedRows,
    moment_parts,
    moment_seconds,
)

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Floats

# Ticks by unit, as settings name it.
TICKS_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

# Most IDs of a bus come every 5 ms to 1 s; in the next smaller unit that is a thousand times as many ticks. No bus has
# a longer median period.
_SLOWEST_PERIOD_S: Final = 5.0
# From this share of the slowest period on, the log may be of a fast bus in the next smaller unit, if its times have no
# more digits than that unit needs.
_DOUBTFUL_SHARE: Final = 0.1
_DIGITS: Final = {"ms": 3, "us": 0, "ns": 0}  # digits after the point by unit: microseconds, and whole numbers
_SLOW_PERIOD_S: Final = 1.0  # at longer periods, a period of a few milliseconds in the next unit is as likely
_MIN_FRAMES: Final = 50  # frames needed to guess a unit
MAX_FRAMES_PER_SECOND: Final = 30_000  # more than any bus carries: the shortest frame takes 47 µs at 1 Mbit/s
# Seconds since 1970 have ten digits until the year 2286.
_LARGEST_EPOCH_S: Final = 1e11
_EPOCHS_S: Final = (9e8, 4.1e9)  # from 1998 to 2099: times that are dates

_MIDNIGHT_JITTER_S: Final = 1.0  # a clock that jitters at midnight steps forward by a day minus at most this

_NAMES: Final = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_UNIT_WORDS: Final = {
    "s": "s", "sec": "s", "secs": "s", "second": "s", "seconds": "s",
    "ms": "ms", "msec": "ms", "msecs": "ms", "millis": "ms", "millisec": "ms", "millisecond": "ms",
    "milliseconds": "ms",
    "us": "us", "usec": "us", "usecs": "us", "micros": "us", "microsec": "us", "microsecond": "us",
    "microseconds": "us",
    "ns": "ns", "nsec": "ns", "nanos": "ns", "nanosec": "ns", "nanosecond": "ns", "nanoseconds": "ns",
}  # fmt: skip


def plain_name(column: str) -> str:
    """Returns the letters and digits of a column's name, in lower case."""
    return re.sub("[^a-z0-9]", "", column.casefold().replace("\N{GREEK SMALL LETTER MU}", "u"))


def unit_of_name(column: str, stems: tuple[str, ...]) -> str | None:
    """Returns the unit in the name of a column of times; empty without a unit; None for any other column.

    Args:
        column: The name, such as `Time [ms]`.
        stems: The names of such columns without a unit.
    """
    name = plain_name(column)
    # `times` and `timestamps` may be plurals.
    if name in stems or name.removesuffix("s") in stems:
        return ""
    stem = next((stem for stem in sorted(stems, key=len, reverse=True) if name.startswith(stem)), "")
    unit = _UNIT_WORDS.get(name.removeprefix(stem))
    return unit if unit is None or stem or len(name) > 2 else None


def guess_unit(ticks: Floats, can_id: NDArray[np.uint32], decimals: int) -> tuple[str, str]:
    """Guesses the unit of the times of a log's first frames.

    Args:
        ticks: [M] times as written in the log.
        can_id: [M] IDs of the frames.
        decimals: Digits after the point in most times.

    Returns:
        The unit, and a notice about it for the user; empty where seconds are certain.
    """
    period = _period(ticks, can_id)
    span, typical = (float(np.ptp(ticks)), float(np.median(np.abs(ticks)))) if len(ticks) else (0.0, 0.0)
    unit, slowest = "s", _SLOWEST_PERIOD_S
    frames_per_tick = len(ticks) / span if span else np.inf
    possible = [name for name, factor in TICKS_PER_SECOND.items() if frames_per_tick * factor <= MAX_FRAMES_PER_SECOND]
    for smaller, digits in _DIGITS.items():
        if period < slowest * (_DOUBTFUL_SHARE if decimals <= digits and smaller in possible else 1.0):
            break
        unit, slowest = smaller, slowest * 1000
    for dated in possible:
        factor = TICKS_PER_SECOND[dated]
        if _EPOCHS_S[0] <= typical / factor <= _EPOCHS_S[1] and period <= _SLOWEST_PERIOD_S * factor:
            unit = dated
    if not period:
        unit = next((name for name, factor in TICKS_PER_SECOND.items() if typical < _LARGEST_EPOCH_S * factor), "ns")
    if unit != "s":
        reason = f"half of the IDs would come every {period:,.6g} s or later"
        if typical > _LARGEST_EPOCH_S:
            reason = "they would be beyond the year 5138"
        return unit, (
            f"times were read as {_NAMES[unit]}, because as seconds {reason}; if they are in another unit, use "
            "`--set dataset.time_unit=s` (or ms, us, ns)"
        )
    if period >= _SLOW_PERIOD_S:
        return unit, (
            f"times were read as seconds, in which half of the IDs come every {period:.3g} s or later; if they are "
            "milliseconds, use `--set dataset.time_unit=ms`"
        )
    return unit, ""


def _period(ticks: Floats, can_id: NDArray[np.uint32]) -> float:
    """Returns the median over IDs of the ticks from a frame to the ID's next one; 0 with few frames.

    Each ID counts once: a flood has most frames of a log that begins with it, and comes far more often than usual IDs.
    """
    order = np.argsort(can_id, kind="stable")
    steps, same = np.abs(np.diff(ticks[order])), np.diff(can_id[order]) == 0
    if len(ticks) < _MIN_FRAMES or not same.any():
        return 0.0
    told = pl.DataFrame({"id": can_id[order][1:][same], "step": steps[same]})
    periods = told.group_by("id").agg(pl.col("step").median())["step"]
    return float(np.median(periods.to_numpy()))


class LogClock:
    """Makes times continuous over the blocks of a log: over midnight, from line to line, from recording to recording.

    Attributes:
        elapsed_s: Sum in seconds of the times that count from the previous line.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.elapsed_s = 0.0
        self._is_of_day = grammar.from_midnight or not grammar.session
        self._start_s = 0.0
        self._last_s = np.nan
        self._days = 0

    def of(self, rows: ParsedRows, lines: pl.Series) -> ParsedRows:
        """Returns the rows of the next block of lines, with continuous times."""
        if not self._grammar.relative and self._grammar.time_code != CLOCK_CODE:
            return rows
        steps = self._steps(lines)
        times = np.array(rows.timestamp)
        for (first, start_s), (end, _) in pairwise([*self._recordings(lines), (len(lines), None)]):
            if start_s is not None:
                self._start_s, self.elapsed_s, self._last_s, self._days = start_s, 0.0, np.nan, 0
            part = slice(*np.searchsorted(rows.position, [first, end]))
            if self._grammar.relative:
                elapsed_s = self.elapsed_s + np.cumsum(steps[first:end])
                self.elapsed_s = float(elapsed_s[-1]) if len(elapsed_s) else self.elapsed_s
                times[part] = elapsed_s[rows.position[part] - first]
            else:
                times[part] = self._over_midnight(times[part]) if self._is_of_day else times[part]
            times[part] += self._start_s
        return replace(rows, timestamp=times)

    def _steps(self, lines: pl.Series) -> Floats:
        """Returns the times of all lines with a time: lines of events that are no frames have times, too."""
        if not self._grammar.relative:
            return np.zeros(0)
        text = lines.str.extract(r"^[ \t]*([0-9.,:]+)[ \t]")
        if self._grammar.time_code == CLOCK_CODE:
            steps = text.to_frame("text").select(moment_parts(pl.col("text"))).select(moment_seconds()).to_series()
        else:
            steps = text.str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)
        # A time beyond any clock makes its row malformed, and must not move the rows after it.
        filled = steps.fill_null(0.0)
        return filled.set(filled > MAX_TIME_S, 0.0).to_numpy()

    def _over_midnight(self, times: Floats) -> Floats:
        if not len(times):
            return times
        steps = np.diff(times, prepend=self._last_s)
        self._last_s = float(times[-1])
        # Clocks jitter at midnight, too: back to the previous evening, and forward again.
        turns = np.flatnonzero((steps < -SECONDS_A_DAY / 2) | (steps > SECONDS_A_DAY - _MIDNIGHT_JITTER_S))
        days = [self._days]
        for is_midnight in (steps[turns] < 0).tolist():
            days.append(days[-1] + 1 if is_midnight else max(0, days[-1] - 1))
        self._days = days[-1]
        return times + np.repeat(days, np.diff([0, *turns, len(times)])) * float(SECONDS_A_DAY)

    def _recordings(self, lines: pl.Series) -> list[tuple[int, float | None]]:
        """Returns the recordings in a block of lines: position of the first line, and start time of the recording.

        The start time is None for a recording that continues from the previous block.
        """
        begun: list[tuple[int, float | None]] = [(0, None)]
        if not self._grammar.session:
            return begun
        numbered = pl.DataFrame({"line": lines}).with_row_index()
        for position, line in numbered.filter(pl.col("line").str.contains(self._grammar.session)).iter_rows():
            match = re.search(self._grammar.session, line)
            assert match is not None
            # A date `31:1:2026` and a time `9:5:7:65`, whose last number is milliseconds.
            day, month, year = map(int, match["date"].split(":"))
            hour, minute, second, millisecond = map(int, match["clock"].split(":"))
            with suppress(ValueError):  # a day that does not exist
                midnight = datetime(year, month, day, tzinfo=UTC)
                start_s = (midnight + timedelta(0, second, 0, millisecond, minute, hour)).timestamp()
                begun.append((position, start_s - start_s % SECONDS_A_DAY if self._grammar.from_midnight else start_s))
        return begun


# Times that are differences from line to line, as `candump -td` prints, are the gaps between frames: they are small, go
# up and down like noise, and do not grow with the number of lines. A clock may step back too, where a recorder merges
# interfaces, but soon grows by far more than it steps back.
LEAST_ROWS: Final = 20  # fewer rows decide at the end of a log only
USUAL_ROWS: Final = 200  # by so many rows, 20 ms of the fastest bus, a clock has grown by more than its jitter
MOST_ROWS: Final = 1000  # rows that decide in any case
LONGEST_DIFFERENCE_S: Final = 100.0  # a clock's time is larger, unless the clock begins at zero and runs forwards
CLOCK_JITTER_S: Final = 0.010  # a clock may step back in time by this much: public captures step back up to 7.9 ms
# Shares of steps back: noise has a half, less where many gaps are equal; logs that run backwards have nearly all.
_LEAST_SHARE: Final = 0.1
_MOST_SHARE: Final = 0.8
_GROWTH: Final = 4  # times the largest step back that a clock has grown by, once that is certain
# Formats that say what their times count from.
_CLOCKED: Final = frozenset({"asc", "busmaster", "python_can", "savvycan", "syncan", "trc"})


def may_be_differences(grammar: Grammar) -> bool:
    """Returns whether the format leaves open what its times count from."""
    return not (grammar.dated or grammar.relative or grammar.name in _CLOCKED)


def are_differences(times: Floats, *, final: bool = False) -> bool | None:
    """Returns whether the first times of a log are differences from line to line.

    Args:
        times: [M] times in seconds; the first `MOST_ROWS` count.
        final: Whether no more times come.

    Returns:
        None where more times must come first.
    """
    times = times[:MOST_ROWS]
    final = final or len(times) == MOST_ROWS
    if len(times) < 2:
        return False if final else None
    steps = np.diff(times)
    back = -steps[steps < 0]
    share, largest = len(back) / len(steps), back.max(initial=0.0)
    if times.min() < 0 or times.max() >= LONGEST_DIFFERENCE_S:
        return False
    growth = float(np.median(times[len(times) // 2 :]) - np.median(times[: len(times) // 2]))
    is_noise = _LEAST_SHARE <= share <= _MOST_SHARE
    if final:
        return is_noise and growth <= largest
    if len(times) < LEAST_ROWS:
        return None
    if len(times) < USUAL_ROWS:
        # No clock jitters by so much so often.
        if is_noise and growth <= largest and np.median(back) > CLOCK_JITTER_S:
            return True
        return False if not is_noise and growth > _GROWTH * largest else None
    if not is_noise or growth > _GROWTH * largest:
        return False
    return True if growth <= largest / 2 else None
