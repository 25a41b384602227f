"""Tables and progress as a person sees them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, TextIO

from can_train.reporter import Reporter, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table as DrawnTable

    from can_train.task import Table

_WRAPPED_FROM: Final = 17
"""Characters from which a column is text, which may be wrapped in a narrow terminal; figures and names stay whole."""


_FIXED: Final = "\N{NO-BREAK SPACE}"
"""Keeps a figure beside its heading while lines are broken."""


_GAP: Final = "  "
"""Before the lines of a paragraph, and between two figures of it."""


_UNBOUNDED: Final = 10_000
"""Columns of a pipe."""


@dataclass(frozen=True)
class TextTable:
    """A table as text, as `print_tables` draws it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def print_tables(tables: Sequence[Table]) -> None:
    """Prints each table under its title, its notes below it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNBOUNDED)
    for table in tables:
        console.print()
        console.print(Text(table.title, style="bold"))
        if _narrowest(table) <= console.width:
            console.print(_drawn(table, lines=console.is_terminal))
        else:
            _print_paragraphs(table, console)
        for note in table.notes:
            console.print(Text(f"  {note}"))


def _widest(table: Table, index: int) -> int:
    return max((len(row[index]) for row in table.rows), default=0)


def _narrowest(table: Table) -> int:
    """Columns below which names or figures would be torn up."""
    cells = [
        min(_widest(table, index), _WRAPPED_FROM) if index else _widest(table, 0) for index in range(len(table.columns))
    ]
    return sum(max(len(heading), cell) + 1 for heading, cell in zip(table.columns, cells, strict=True))


def _print_paragraphs(table: Table, console: Console) -> None:
    """Prints each row as its first cell, with the others by their headings below it: figures first, then text."""
    from rich.text import Text

    is_text = [_widest(table, index) >= _WRAPPED_FROM for index in range(len(table.columns))]
    for name, *cells in table.rows:
        console.print(Text(f"\n{name}"))
        told = [
            (f"{heading} {cell}", text)
            for heading, cell, text in zip(table.columns[1:], cells, is_text[1:], strict=True)
            if cell
        ]
        figures = _GAP.join(cell.replace(" ", _FIXED) for cell, text in told if not text)
        for paragraph in [figures, *(cell for cell, text in told if text)]:
            lines = wrap(paragraph, console.width - 1, initial_indent=_GAP, subsequent_indent=_GAP)
            console.print(Text("\n".join(lines).replace(_FIXED, " ")))
    console.print()


def _drawn(table: Table, *, lines: bool) -> DrawnTable:
    from rich import box
    from rich.table import Table as DrawnTable

    drawn = DrawnTable(box=box.SIMPLE_HEAD if lines else None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(table.columns):
        widest = _widest(table, index)
        is_text = index == 0 or widest >= _WRAPPED_FROM
        drawn.add_column(
            column, justify="left" if is_text else "right", no_wrap=widest < _WRAPPED_FROM, overflow="fold"
        )
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


LINE_INTERVAL_S: Final = 10.0
"""Seconds between progress lines where there is no terminal: a day's log stays readable."""


def make_reporter() -> Reporter:
    """Chooses the reporter that suits standard error."""
    return TerminalReporter() if sys.stderr.isatty() else LineReporter(sys.stderr)


class LineReporter:
    """Plain lines: one when a stage begins to take time, one every few seconds, one at its end.

    Args:
        stream: Where to write.
        interval_s: Seconds between progress lines of a stage.
    """

    def __init__(self, stream: TextIO, *, interval_s: float = LINE_INTERVAL_S) -> None:
        self._stream = stream
        self._interval_s = interval_s

    def notice(self, text: str) -> None:
        """Writes a notice as a line."""
        print(f"note: {text}", file=self._stream, flush=True)

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Writes lines about a stage as it goes."""
        stage = _LineStage(self, title, total, unit)
        yield stage
        stage.write(last=True)

    def line(self, text: str) -> None:
        """Writes one line."""
        print(text, file=self._stream, flush=True)

    @property
    def interval_s(self) -> float:
        """Seconds between progress lines."""
        return self._interval_s


class _LineStage:
    def __init__(self, reporter: LineReporter, title: str, total: int | None, unit: str) -> None:
        self._reporter = reporter
        self._title = title
        self._total = total
        self._unit = unit
        self._done = 0
        self._figures: dict[str, float] = {}
        self._started = self._written = time.monotonic()

    def advance(self, amount: int = 1, **figures: float) -> None:
        self._done += amount
        self._figures = figures or self._figures
        if time.monotonic() - self._written >= self._reporter.interval_s:
            self.write(last=False)

    def write(self, *, last: bool) -> None:
        self._written = time.monotonic()
        elapsed = self._written - self._started
        parts = [f"{self._title}: {_amount(self._done, self._total, self._unit)}"]
        parts += [f"{name} {value:.4g}" for name, value in self._figures.items()]
        parts.append(f"{elapsed:.1f} s" if last else _remaining(self._done, self._total, elapsed))
        self._reporter.line(", ".join(part for part in parts if part))


class TerminalReporter:
    """Rich progress bars."""

    def __init__(self) -> None:
        # Rich takes a tenth of a second to import, which `--help` does not pay.
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)

    def notice(self, text: str) -> None:
        """Writes a notice above the bars."""
        self._console.print(f"[yellow]note:[/] {_escaped(text)}")

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Draws a bar with the amount, the figures and the time left."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(title, total=total, amount="", figures="")

            class Bar:
                done = 0

                def advance(self, amount: int = 1, **figures: float) -> None:
                    self.done += amount
                    text = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
                    progress.update(task, advance=amount, amount=_amount(self.done, total, unit), figures=text)

            yield Bar()


def _amount(done: int, total: int | None, unit: str) -> str:
    if unit == "bytes":
        return f"{done / 2**20:.0f}/{total / 2**20:.0f} MiB" if total else f"{done / 2**20:.0f} MiB"
    return f"{done:,}/{total:,} {unit}" if total else f"{done:,} {unit}"


def _remaining(done: int, total: int | None, elapsed: float) -> str:
    if not total or not done:
        return ""
    seconds = round(elapsed / done * (total - done))
    return f"{seconds // 60}:{seconds % 60:02d} left"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def strict(value: Any) -> Any:
    """Makes a value of JSON proper, which has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): strict(inner) for name, inner in value.items()}
    return [strict(inner) for inner in value] if isinstance(value, list | tuple) else value


_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
"""Seconds of each unit, the largest first."""


def duration(seconds: float) -> str:
    """Writes a duration in its largest unit, with the next one where that is less than ten of it.

    Example:
        >>> duration(8), duration(754), duration(7 * 3600 + 299), duration(200_000)
        ('8 s', '12 min', '7 h 4 min', '2 d 7 h')
    """
    whole = max(0, int(seconds))
    for (size, unit), (smaller, smaller_unit) in pairwise(_UNITS):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if whole < 10 * size and rest else "")
    return f"{whole} s"


def in_one_unit(seconds: float) -> str:
    """Writes a duration in its largest unit only, for a column."""
    return " ".join(duration(seconds).split()[:2])


def moment(time: str) -> str:
    """Writes a time of the files in this machine's time zone, to the second."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M:%S}"


def seconds_between(start: str, end: str = "") -> float:
    """Seconds from one time of the files to another; without an end, to now."""
    last = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return (last - datetime.fromisoformat(start)).total_seconds()
