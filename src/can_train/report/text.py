"""Durations, times, numbers and tables as text, and numbers as JSON values."""

import math
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

_LONGEST_VALUE: Final = 200  # characters; a value may be a file's content
_BEGINNING: Final = 24  # characters of a longer value that are shown
_UNITS_S: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Writes a duration in its largest unit, followed by the next smaller unit if the number is below ten.

    Example:
        >>> duration(8), duration(754), duration(7 * 3600 + 299), duration(200_000)
        ('8 s', '12 min', '7 h 4 min', '2 d 7 h')
    """
    whole = max(0, int(seconds))
    for (size, unit), (smaller, smaller_unit) in pairwise(_UNITS_S):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if whole < 10 * size and rest else "")
    return f"{whole} s"


def local_time(time: str) -> str:
    """Writes an ISO 8601 time in this machine's time zone, to the second."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M:%S}"


def seconds_between(start: str, end: str = "") -> float:
    """Returns the seconds between two ISO 8601 times; without an end, until now."""
    last = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return (last - datetime.fromisoformat(start)).total_seconds()


def value_text(value: Any) -> str:
    """Writes the value of a setting; an empty one is `none`, and a very long one is cut."""
    text = "none" if value is None or value == "" else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_BEGINNING]}…"


def number_or_none(value: Any) -> float | None:
    """Returns a finite number unchanged, and None for anything else, which a damaged or edited file may hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < math.inf else None
