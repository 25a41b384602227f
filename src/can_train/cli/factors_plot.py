"""Draws a configuration's factor and peak over its runs with plain characters, so that every terminal, pipe and file
shows them alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PLOT_COLUMNS: Final = 76
"""Widest line: with the two columns by which notes are indented, a little less than the narrowest terminal in use."""

_LABEL: Final = "{:>4.0%} |"
_LABEL_COLUMNS: Final = 6

_STEP: Final = 0.05
"""Share of the capacity, or of the tuned limit, that one line stands for."""

_WIDEST_RUN: Final = 4
"""Columns for a run where there is room: a few runs should not lie at the ends of a long line."""

_FACTOR, _PEAK, _BOTH, _OUT_OF_MEMORY, _TARGET = "f", "o", "*", "X", "-"


@dataclass(frozen=True)
class PlotPoint:
    """One run.

    Attributes:
        factor: Safety factor in force.
        peak: Peak ÷ capacity; None where nothing was measured.
        ran_out: Whether memory ran out.
    """

    factor: float
    peak: float | None
    ran_out: bool


def plot_lines(points: Sequence[PlotPoint], *, target: float, columns: int = PLOT_COLUMNS) -> list[str]:
    """Draws the runs from left to right, no line longer than `columns`.

    A history too long for the line is thinned: each column then stands for several runs and shows their last factor,
    their highest peak, and an out-of-memory if there was one.

    Args:
        points: The runs, oldest first; none give no lines.
        target: Peak to reach, as a share of the capacity.
        columns: Characters of the longest line.
    """
    if not points:
        return []
    room = columns - _LABEL_COLUMNS
    thinned = _thinned(points, room)
    spacing = max(min(room // len(thinned), _WIDEST_RUN), 1)
    lowest = min([target, *(share for point in thinned for share in (point.factor, point.peak or 1.0))])
    rows = range(_row(1.0), _row(lowest) - 1, -1)
    lines = [_line(row, thinned, _row(target), spacing) for row in rows]
    run_lines = f"{len(points)} runs, oldest first" if len(points) > 1 else "1 run"
    shared = f"; up to {-(-len(points) // len(thinned))} of them in a column" if len(thinned) < len(points) else ""
    legend = (
        f"{_PEAK} peak  {_FACTOR} factor  {_BOTH} both  {_OUT_OF_MEMORY} out of memory  {_TARGET} target {target:.0%}"
    )
    return [*lines, " " * (_LABEL_COLUMNS - 1) + "+" + "-" * (len(thinned) * spacing),
            *(" " * _LABEL_COLUMNS + text for text in (run_lines + shared, legend))]  # fmt: skip


def _thinned(points: Sequence[PlotPoint], most: int) -> list[PlotPoint]:
    if len(points) <= most:
        return list(points)
    bounds = [index * len(points) // most for index in range(most + 1)]
    return [_together(points[begin:end]) for begin, end in pairwise(bounds)]


def _together(points: Sequence[PlotPoint]) -> PlotPoint:
    peak = max((point.peak for point in points if point.peak is not None), default=None)
    return PlotPoint(points[-1].factor, peak, any(point.ran_out for point in points))


def _row(share: float) -> int:
    return round(min(share, 1.0) / _STEP)


def _line(row: int, points: Sequence[PlotPoint], target: int, spacing: int) -> str:
    empty = _TARGET if row == target else " "
    cells = [_mark(point, row).replace(" ", empty).ljust(spacing, empty) for point in points]
    return (_LABEL.format(row * _STEP) + "".join(cells)).rstrip()


def _mark(point: PlotPoint, row: int) -> str:
    # An out-of-memory is a peak above everything, whatever was measured before it.
    peak = _row(1.0) if point.ran_out else None if point.peak is None else _row(point.peak)
    if row == peak:
        return _OUT_OF_MEMORY if point.ran_out else _BOTH if row == _row(point.factor) else _PEAK
    return _FACTOR if row == _row(point.factor) else " "
