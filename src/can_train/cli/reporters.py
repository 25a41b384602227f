"""How progress looks: bars on a terminal, plain lines through a pipe or in a job's log. Both write to standard error,
so that standard output holds results only.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from can_train.reporter import Reporter, Stage

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
