"""The format of lines that arrive one by one: chosen by the first lines, and revised where later lines do not fit.

Shapes: M frames.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import polars as pl

from can_train.errors import CanTrainError
from can_train_tasks.can.data.clocks import TICKS_PER_SECOND
from can_train_tasks.can.data.formats import header_grammars
from can_train_tasks.can.data.grammar import Grammar, ParsedRows, parse_rows
from can_train_tasks.can.data.line_formats import line_grammars, variants
from can_train_tasks.can.settings import CanDatasetSettings, ColumnSettings

RECENT_LINES: Final = 200  # last lines that a new choice must also read, so that a few odd lines change no format
JUDGED_LINES: Final = 1000  # most lines that a new choice is made on, some milliseconds of work
# Lines between two vain attempts to choose anew: garbage on a line must not cost an attempt each time.
PATIENT_LINES: Final = 1000

# Median time between frames of one ID: a frame takes 50 µs on the fastest bus, and a slower bus does not exist.
SHORTEST_PERIOD_S: Final = 50e-6
LONGEST_PERIOD_S: Final = 5.0

# `  can0  12A   [2]  00 F0`: candump's screen format without -t, whose lines have no time.
_WITHOUT_TIME: Final = re.compile(r"[ \t]*[A-Za-z][!-~]*[ \t]+[0-9A-Fa-f]{3,8}[ \t]+(?:(?:TX|RX)[ \t-]+)?\[\d+\]")
# candump prints the times of clocks in seconds, with six or nine digits after the point.
_CANDUMP_SECONDS: Final = r"^[ \t]*\([0-9]+\.[0-9]{6}(?:[0-9]{3})?\)"

Lines = Sequence[str | None]


class Choice(NamedTuple):
    """The grammar that reads most of some lines."""

    grammar: Grammar
    rows: ParsedRows
    lines: pl.Series  # the lines; lines without times have times in front
    untimed: bool  # whether the lines have no times
    settings: CanDatasetSettings  # without names of columns, where no header has them

    @property
    def read(self) -> int:
        """Number of lines that are frames. Error frames count too: a faulty bus may send nothing else."""
        return _read(self.rows)

    def heading(self, lines: Lines) -> list[str | None]:
        """Returns those of the chosen `lines` above the first frame that are not malformed: a CSV log's header."""
        first = int(self.rows.position[0]) if len(self.rows.position) else 0
        malformed = {*self.rows.malformed["position"].to_list()}
        return [line for at, line in enumerate(lines[:first]) if line and at not in malformed]

    def tells_unit(self) -> bool:
        """Returns whether the format tells the unit of its times."""
        if self.grammar.dated or self.grammar.unit_known:
            return True
        return self.grammar.name.startswith("candump") and bool(self.lines.str.contains(_CANDUMP_SECONDS).any())

    def may_be_in(self, unit: str) -> bool:
        """Returns whether IDs repeat as on a bus if the times are in this unit; so they do where no ID repeats."""
        order = np.argsort(self.rows.can_id, kind="stable")
        same = np.diff(self.rows.can_id[order].astype(np.int64)) == 0
        periods = np.abs(np.diff(self.rows.timestamp[order])[same]) * self.grammar.ticks_per_second
        period_s = np.median(periods) / TICKS_PER_SECOND[unit] if len(periods) else SHORTEST_PERIOD_S
        return bool(SHORTEST_PERIOD_S <= period_s <= LONGEST_PERIOD_S)


def choose(lines: Lines, settings: CanDatasetSettings) -> Choice | None:
    """Chooses the grammar that reads most of the lines; None where no grammar reads a line.

    Of grammars that read as many lines, one that asks for no label and no direction comes first: the lines seen so far
    may all have one, and later lines may not. Nothing live depends on labels.
    """
    timed = sum(bool(line and line.lstrip().startswith("(")) for line in lines)
    untimed = sum(bool(line and _WITHOUT_TIME.match(line)) for line in lines) > timed
    series = pl.Series("line", with_times(lines, time.time(), time.time()) if untimed else lines, dtype=pl.String)
    settings = with_columns_of(series, settings)
    best: Choice | None = None
    for grammar in variants([*header_grammars(series, settings), *line_grammars(series)], series):
        # Most formats match no line; a look at the lines takes a tenth of the time of parsing.
        left_out = filter(None, (grammar.error_frame, grammar.xl_frame))
        if not any(series.str.contains(pattern).any() for pattern in (grammar.pattern, *left_out)):
            continue
        choice = Choice(grammar, parse_rows(series, grammar), series, untimed, settings)
        if best is None or (choice.read, _asks_little(grammar)) > (best.read, _asks_little(best.grammar)):
            best = choice
    return best if best is not None and best.read else None


def with_columns_of(lines: pl.Series, settings: CanDatasetSettings) -> CanDatasetSettings:
    """Leaves out the names of columns, if the header in the first lines of a log does not have them all."""
    try:
        header_grammars(lines, settings)
    except CanTrainError:
        return replace(settings, columns=ColumnSettings())
    return settings


def is_misread(lines: Lines, grammar: Grammar, settings: CanDatasetSettings) -> bool:
    """Returns whether another grammar reads more of the lines than `grammar`."""
    choice = choose(lines, settings)
    return choice is not None and choice.read > _read(parse_rows(choice.lines, grammar))


def lines_around(rows: ParsedRows, recent: Lines, lines: Lines) -> list[str | None]:
    """Returns the lines around the first malformed one of `lines`, which came after `recent`."""
    first = int(rows.malformed["position"].to_list()[0])
    before = [*recent, *lines[:first]]
    return [*before[-RECENT_LINES:], *lines[first : first + JUDGED_LINES]]


def with_times(lines: Lines, since_s: float, now_s: float) -> list[str | None]:
    """Puts times before lines without times, evenly spaced from `since_s` to `now_s`."""
    times = np.linspace(since_s, now_s, len(lines) + 1)[1:]
    return [
        f"({at:.6f}) {line.lstrip()}" if line and _WITHOUT_TIME.match(line) else line
        for line, at in zip(lines, times.tolist(), strict=True)
    ]


def _read(rows: ParsedRows) -> int:
    return len(rows.position) + rows.error_frames + rows.xl_frames


def _asks_little(grammar: Grammar) -> bool:
    return not grammar.has("direction") and (grammar.unlabelled_rows or not grammar.has("label"))
