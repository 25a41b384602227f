"""Units of the times in logs: by the name of a column, or by how often a CAN ID repeats."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.tasks.can.data.graphs import Floats

# By unit, as settings name it.
TICKS_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

# Most frames of a bus come 5 ms to 1 s after the same ID's last one; in the next smaller unit that is a thousand times
# as many. Slower than this is no bus.
_SLOWEST_PERIOD_S: Final = 5.0
# From here on it may be a fast bus in the next smaller unit, if the times have no more digits than that unit needs.
_DOUBTFUL_SHARE: Final = 0.1
_DIGITS: Final = {"ms": 3, "us": 0, "ns": 0}  # behind the point: microseconds, and whole numbers
_SLOW_PERIOD_S: Final = 1.0  # from here on, an ID of a few milliseconds is no less likely
_MIN_FRAMES: Final = 50  # by which a unit is guessed
# Seconds since 1970 have ten digits until the year 2286.
_LARGEST_EPOCH_S: Final = 1e11

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
    """Returns a column's name in lower case and without anything but letters and digits."""
    return re.sub("[^a-z0-9]", "", column.casefold().replace("\N{GREEK SMALL LETTER MU}", "u"))


def unit_of_name(column: str, stems: tuple[str, ...]) -> str | None:
    """Returns the unit in the name of a column of times; empty where it names none; None for any other column.

    Args:
        column: The name, such as `Time [ms]`.
        stems: What such columns are called without a unit.
    """
    name = plain_name(column)
    # `times` and `timestamps` may be plurals.
    if name in stems or name.removesuffix("s") in stems:
        return ""
    stem = next((stem for stem in sorted(stems, key=len, reverse=True) if name.startswith(stem)), "")
    unit = _UNIT_WORDS.get(name.removeprefix(stem))
    return unit if unit is None or stem or len(name) > 2 else None


def guess_unit(ticks: Floats, can_id: NDArray[np.uint32], decimals: int) -> tuple[str, str]:
    """Guesses in which unit the times of a log's first frames are.

    Args:
        ticks: [M] times as they were written.
        can_id: [M] their IDs.
        decimals: Digits behind the point of most times.

    Returns:
        The unit, and what the user should know about it, as a sentence; empty where seconds are certain.
    """
    period = _median_period(ticks, can_id) if len(ticks) >= _MIN_FRAMES else 0.0
    unit, slowest = "s", _SLOWEST_PERIOD_S
    for smaller, digits in _DIGITS.items():
        if period < slowest * (_DOUBTFUL_SHARE if decimals <= digits else 1.0):
            break
        unit, slowest = smaller, slowest * 1000
    if not period:
        unit = _unit_of_epoch(float(np.median(np.abs(ticks)))) if len(ticks) else "s"
    if unit != "s":
        reason = f"the same ID would come every {period:,.6g} s" if period else "they would be beyond the year 5138"
        return unit, (
            f"times were read as {_NAMES[unit]}, because as seconds {reason}; if they are in another unit, use "
            "`--set dataset.time_unit=s` (or ms, us, ns)"
        )
    if period >= _SLOW_PERIOD_S:
        return unit, (
            f"times were read as seconds, in which the same ID comes every {period:.3g} s; if they are milliseconds, "
            "use `--set dataset.time_unit=ms`"
        )
    return unit, ""


def _unit_of_epoch(ticks: float) -> str:
    return next((unit for unit, factor in TICKS_PER_SECOND.items() if ticks < _LARGEST_EPOCH_S * factor), "ns")


def _median_period(ticks: Floats, can_id: NDArray[np.uint32]) -> float:
    """The median of the times since the same ID's previous frame; 0 where no ID repeats."""
    order = np.argsort(can_id, kind="stable")
    steps, same = np.diff(ticks[order]), np.diff(can_id[order]) == 0
    return float(np.median(np.abs(steps[same]))) if same.any() else 0.0
