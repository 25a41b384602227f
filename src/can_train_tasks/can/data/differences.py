"""Tells times that are differences from line to line, as `candump -td` prints, from the times of a clock that jitters.

Differences are the gaps between frames: they are small, go up and down like noise, and do not grow with the number of
lines. A clock may step back too, where a recorder merges interfaces, but soon grows by far more than it steps back.

Shapes: M frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from can_train_tasks.can.data.grammar import Grammar

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Floats

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
