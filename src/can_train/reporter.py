"""The interface of lower layers for notices and progress, and the reporters that write plain lines. The
command line passes a reporter down, which writes lines or draws on a terminal.
"""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Final, Protocol, TextIO

from can_train.errors import command_name, printable, with_command_name

# Seconds between progress lines: a day's log stays readable.
_LINE_INTERVAL_S: Final = 10.0
COLUMNS: Final = 80
"""Columns of sentences in a pipe, and of the normal output of a training."""
NOTE: Final = "note: "
"""Begins a notice."""
_INDENT: Final = "  "
_COMMANDS: Final = ("can-train ", "wandb ")  # beginnings of lines that are commands to type
_WHOLE_FROM: Final = 1000  # a larger figure is shown without decimals


@dataclass(frozen=True)
class TextTable:
    """A table of text cells, for a terminal or a page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


class Stage(Protocol):
    """A piece of work in progress."""

    def advance(self, amount: int = 1, **figures: float) -> None:
        """Advances by `amount` of the stage's unit; `figures`, such as a loss, are shown beside the progress."""


class Reporter(Protocol):
    """Receives notices and progress."""

    def notice(self, text: str) -> None:
        """Shows a notice: a sentence, or several sentences, one a line."""

    def detail(self, text: str) -> None:
        """Shows lines that only a person reads who asked for more (`-v`)."""

    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> AbstractContextManager[Stage]:
        """Opens a piece of work of `total` units (None: unknown); it ends with the `with` block."""


class _SilentStage:
    def advance(self, amount: int = 1, **figures: float) -> None:
        pass


class SilentReporter:
    """A reporter that shows nothing: the default of the Python API."""

    def notice(self, text: str) -> None:
        """Drops the notice."""

    def detail(self, text: str) -> None:
        """Drops the details."""

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Yields a stage that shows nothing."""
        yield _SilentStage()


@dataclass(eq=False)
class LineReporter:
    """Prints plain lines: one every few seconds while a stage takes time, and one at its end.

    Attributes:
        stream: Where to write from now on.
        interval_s: Seconds between progress lines of a stage.
        verbose: Whether details are printed.
    """

    stream: TextIO
    interval_s: float = field(default=_LINE_INTERVAL_S, kw_only=True)
    verbose: bool = field(default=False, kw_only=True)

    def notice(self, text: str) -> None:
        """Prints a notice as a paragraph."""
        self.write(wrapped(text, COLUMNS, label=NOTE))

    def detail(self, text: str) -> None:
        """Prints details as lines, if they are wanted."""
        if self.verbose and text:
            self.write(wrapped(text, COLUMNS, hang=_INDENT))

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Prints lines about a stage while it runs."""
        stage = _LineStage(self, title, total, unit)
        yield stage
        stage.print(last=True)

    def write(self, text: str) -> None:
        """Prints lines, with their control characters as text."""
        print(printable(text), file=self.stream, flush=True)


@dataclass
class _LineStage:
    reporter: LineReporter
    title: str
    total: int | None
    unit: str
    done: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = self.printed = time.monotonic()

    def advance(self, amount: int = 1, **figures: float) -> None:
        self.done += amount
        self.figures = figures or self.figures
        if time.monotonic() - self.printed >= self.reporter.interval_s:
            self.print(last=False)

    def print(self, *, last: bool) -> None:
        self.printed = time.monotonic()
        elapsed_s = self.printed - self.started
        parts = [f"{self.title}: {amount_text(self.done, self.total, self.unit)}"]
        parts += [figure_text(name, value) for name, value in self.figures.items()]
        if last:
            parts.append(f"{elapsed_s:.1f} s")
        elif self.total and self.done:
            seconds = round(elapsed_s / self.done * (self.total - self.done))
            parts.append(f"{seconds // 60}:{seconds % 60:02d} left")
        self.reporter.write(", ".join(parts))


def figure_text(name: str, value: float) -> str:
    """Writes a figure beside a stage's progress."""
    return f"{name} {value:,.0f}" if value >= _WHOLE_FROM else f"{name} {value:.4g}"


def amount_text(done: int, total: int | None, unit: str) -> str:
    """Writes how much of a stage is done: `3/8 steps`, `1/4 MiB`."""
    if unit == "bytes":
        return f"{done / 2**20:.0f}/{total / 2**20:.0f} MiB" if total else f"{done / 2**20:.0f} MiB"
    amount = f"{done:,}/{total:,}" if total else f"{done:,}"
    return f"{amount} {unit.removesuffix('s') if (total or done) == 1 else unit}"


def wrapped(text: str, columns: int, *, label: str = "", hang: str = "") -> str:
    """Breaks the lines of a text; a broken line keeps its indentation.

    Args:
        text: The text.
        columns: Characters that a line may have. Only a word that is longer makes a longer line.
        label: Written before the text, whose other lines are indented by as much.
        hang: Further indentation of the continuation of a broken line.
    """
    lines: list[str] = []
    for line in printable(with_command_name(text)).split("\n"):
        indent = " " * (len(label) + len(line) - len(line.lstrip()))
        first = indent if lines else label + indent[len(label) :]
        # A command that is broken cannot be typed.
        width = len(indent) + len(line) if line.lstrip().startswith((*_COMMANDS, f"{command_name()} ")) else columns
        lines += wrap(line.strip(), width, initial_indent=first, subsequent_indent=indent + hang,
                      break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return "\n".join(lines)


class LoggedReporter:
    """Passes everything on to another reporter, and writes it to a file as lines, from the first one on.

    Args:
        shown: The other reporter.
    """

    def __init__(self, shown: Reporter) -> None:
        self._shown = shown
        # Lines wait here until there is a file.
        self._lines = _LogLines(io.StringIO(), verbose=True)

    def notice(self, text: str) -> None:
        """Shows a notice, and writes it down."""
        self._shown.notice(text)
        self._lines.notice(text)

    def detail(self, text: str) -> None:
        """Shows details if they are wanted, and writes them down."""
        self._shown.detail(text)
        self._lines.detail(text)

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Shows a stage, and writes down how far it is."""
        with (
            self._shown.stage(title, total=total, unit=unit) as shown,
            self._lines.stage(title, total=total, unit=unit) as line,
        ):
            yield _LoggedStage(shown, line)

    def write(self, text: str) -> None:
        """Writes lines to the file alone."""
        self._lines.write(text)

    @contextmanager
    def writing_to(self, open_file: Callable[[], TextIO], head: str) -> Iterator[None]:
        """Appends to a file inside the block: a heading, the waiting lines, and new lines. A file that cannot be
        written stops nothing, and is reported.
        """
        waiting = self._lines.stream
        try:
            self._lines.stream = open_file()
        except OSError as error:
            self._shown.notice(f"Notices are not written to the log: {error.filename}: {error.strerror}")
        text = waiting.getvalue() if isinstance(waiting, io.StringIO) else ""
        self._lines.write(f"{head}\n{text}".rstrip())
        try:
            yield
        finally:
            with suppress(OSError):
                self._lines.stream.close()
            self._lines.stream = io.StringIO()


class DemotingReporter:
    """A reporter that shows notices about one folder as details: an earlier notice said that it cannot be used.

    Args:
        shown: The reporter that shows everything.
        folder: The folder.
    """

    def __init__(self, shown: Reporter, folder: Path) -> None:
        self._folder = str(folder)
        self.detail = shown.detail
        self.stage = shown.stage
        self._notice = shown.notice

    def notice(self, text: str) -> None:
        """Shows a notice, as a detail if it names the folder."""
        (self.detail if self._folder in text else self._notice)(text)


class _LoggedStage:
    def __init__(self, *stages: Stage) -> None:
        self._stages = stages

    def advance(self, amount: int = 1, **figures: float) -> None:
        for stage in self._stages:
            stage.advance(amount, **figures)


class _LogLines(LineReporter):
    """A full disk stops no training."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            super().write(text)
