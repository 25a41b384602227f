"""How results, progress, states and durations are printed."""

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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table as RichTable

    from can_train.reporter import Reporter, Stage
    from can_train.task import Table

# Characters from which a column is text, which may be wrapped in a narrow terminal; figures and names stay whole.
_WRAPPED_FROM: Final = 17
# Between a figure and its heading: lines are not broken there.
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_GAP: Final = "  "
# Columns of a pipe, whose reader wants whole lines.
_UNBOUNDED: Final = 10_000

# Seconds between progress lines where there is no terminal: a day's log stays readable.
_LINE_INTERVAL_S: Final = 10.0

# Seconds of each unit, the largest first.
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True)
class TextTable:
    """A table as text, as `print_tables` draws it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def print_tables(tables: Sequence[Table]) -> None:
    """Prints each table under its title, with its notes below it.

    A table that is too wide for the terminal becomes a paragraph for each row.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNBOUNDED)
    for table in tables:
        console.print()
        console.print(Text(table.title, style="bold"))
        widths = _widths(table)
        narrowest = [width if index == 0 else min(width, _WRAPPED_FROM) for index, width in enumerate(widths)]
        if (
            sum(max(len(name), width) + 1 for name, width in zip(table.columns, narrowest, strict=True))
            <= console.width
        ):
            console.print(_rich_table(table, widths, lines=console.is_terminal))
        else:
            _print_paragraphs(table, widths, console)
        for note in table.notes:
            console.print(Text(f"  {note}"))


def _widths(table: Table) -> list[int]:
    """Returns the length of the longest cell of each column."""
    return [max((len(row[index]) for row in table.rows), default=0) for index in range(len(table.columns))]


def _rich_table(table: Table, widths: Sequence[int], *, lines: bool) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD if lines else None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, (name, width) in enumerate(zip(table.columns, widths, strict=True)):
        is_text = width >= _WRAPPED_FROM
        justify: Any = "left" if index == 0 or is_text else "right"
        drawn.add_column(name, justify=justify, no_wrap=not is_text, overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def _print_paragraphs(table: Table, widths: Sequence[int], console: Console) -> None:
    """Prints each row as its first cell and, below it, a line of the figures with their headings, then the texts."""
    from rich.text import Text

    for name, *cells in table.rows:
        console.print(Text(f"\n{name}"))
        named = list(zip(table.columns[1:], cells, widths[1:], strict=True))
        figures = [f"{heading} {cell}" for heading, cell, width in named if cell and width < _WRAPPED_FROM]
        texts = [f"{heading} {cell}" for heading, cell, width in named if cell and width >= _WRAPPED_FROM]
        for paragraph in [_GAP.join(figure.replace(" ", _NO_BREAK) for figure in figures), *texts]:
            lines = wrap(paragraph, console.width - 1, initial_indent=_GAP, subsequent_indent=_GAP)
            console.print(Text("\n".join(lines).replace(_NO_BREAK, " ")))
    console.print()


def make_reporter() -> Reporter:
    """Chooses the reporter that suits standard error."""
    return TerminalReporter() if sys.stderr.isatty() else LineReporter(sys.stderr)


class LineReporter:
    """Prints plain lines: one every few seconds while a stage takes time, and one at its end.

    Args:
        stream: Where to write.
        interval_s: Seconds between progress lines of a stage.
    """

    def __init__(self, stream: TextIO, *, interval_s: float = _LINE_INTERVAL_S) -> None:
        self._stream = stream
        self._interval_s = interval_s

    def notice(self, text: str) -> None:
        """Prints a notice as a line."""
        self._print(f"note: {text}")

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Prints lines about a stage while it runs."""
        stage = _LineStage(self._print, self._interval_s, title, total, unit)
        yield stage
        stage.print(last=True)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class _LineStage:
    def __init__(self, write: Any, interval_s: float, title: str, total: int | None, unit: str) -> None:
        self._write = write
        self._interval_s = interval_s
        self._title = title
        self._total = total
        self._unit = unit
        self._done = 0
        self._figures: dict[str, float] = {}
        self._started = self._printed = time.monotonic()

    def advance(self, amount: int = 1, **figures: float) -> None:
        self._done += amount
        self._figures = figures or self._figures
        if time.monotonic() - self._printed >= self._interval_s:
            self.print(last=False)

    def print(self, *, last: bool) -> None:
        self._printed = time.monotonic()
        elapsed_s = self._printed - self._started
        parts = [f"{self._title}: {_amount(self._done, self._total, self._unit)}"]
        parts += [f"{name} {value:.4g}" for name, value in self._figures.items()]
        parts.append(f"{elapsed_s:.1f} s" if last else _remaining(self._done, self._total, elapsed_s))
        self._write(", ".join(part for part in parts if part))


class TerminalReporter:
    """Draws progress bars with Rich."""

    def __init__(self) -> None:
        # Rich takes a tenth of a second to import, which `--help` does not pay.
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)

    def notice(self, text: str) -> None:
        """Prints a notice above the bars."""
        from rich.markup import escape

        self._console.print(f"[yellow]note:[/] {escape(text)}")

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
    amount = f"{done:,}/{total:,}" if total else f"{done:,}"
    return f"{amount} {unit.removesuffix('s') if (total or done) == 1 else unit}"


def _remaining(done: int, total: int | None, elapsed_s: float) -> str:
    if not total or not done:
        return ""
    seconds = round(elapsed_s / done * (total - done))
    return f"{seconds // 60}:{seconds % 60:02d} left"


def finite(value: Any) -> Any:
    """Copies a value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


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


def rough_duration(seconds: float) -> str:
    """Writes a duration in its largest unit only, for a column."""
    return " ".join(duration(seconds).split()[:2])


def local_time(time: str) -> str:
    """Writes a time from a file (ISO 8601) in this machine's time zone, to the second."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M:%S}"


def seconds_between(start: str, end: str = "") -> float:
    """Returns the seconds between two times of files (ISO 8601); without an end, until now."""
    last = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return (last - datetime.fromisoformat(start)).total_seconds()
