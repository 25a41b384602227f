"""The interface of lower layers for notices and progress, and the reporters that write plain lines. The
command line passes a reporter down, which writes lines or draws on a terminal.
"""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import starmap
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
_ROWS_BELOW_HEADINGS: Final = 20  # lines of epochs, which a screen shows together with their headings
_METRIC_WIDTH: Final = 11  # characters of a metric's name with which the line of an epoch fits 80 columns
_BEST: Final = "best"
_UNKNOWN: Final = "–"


@dataclass(frozen=True)
class TextTable:
    """A table of text cells, for a terminal or a page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class EpochFigures:
    """The figures of an epoch that has been trained; None: not measured after this epoch.

    Attributes:
        epoch: Counted from 1.
        epochs: Epochs of the whole run.
        training_loss: Over training samples, computed after the epoch as the validation loss is.
        validation_loss: Over the validation samples, as the mean of all validation sets.
        averaged_loss: The validation loss of the averaged weights; None: there are none.
        is_best: Whether this is the best validation so far.
        metric: Name and value of a metric on the validation samples; None: there is none.
        samples_per_second: Training samples.
        peak: Most memory in use since the run started or resumed, with its unit; empty: unknown.
        seconds_left: Until the last epoch ends.
    """

    epoch: int
    epochs: int
    training_loss: float | None = None
    validation_loss: float | None = None
    averaged_loss: float | None = None
    is_best: bool = False
    metric: tuple[str, float] | None = None
    samples_per_second: float | None = None
    peak: str = ""
    seconds_left: float | None = 0.0


class Stage(Protocol):
    """A piece of work in progress."""

    def advance(self, amount: int = 1, **figures: float | str) -> None:
        """Advances by `amount` of the stage's unit. Figures are shown beside the progress, the most important first: a
        number with its name, a text alone.
        """


class Reporter(Protocol):
    """Receives notices and progress."""

    @property
    def verbose(self) -> bool:
        """Whether details are shown."""

    def notice(self, text: str) -> None:
        """Shows a notice: a sentence, or several sentences, one a line."""

    def detail(self, text: str) -> None:
        """Shows lines that only a person reads who asked for more (`-v`)."""

    def epoch(self, figures: EpochFigures) -> None:
        """Shows the line of an epoch."""

    def stage(
        self, title: str, *, total: int | None = None, unit: str = "", done: int = 0
    ) -> AbstractContextManager[Stage]:
        """Opens a piece of work that ends with the `with` block.

        Args:
            title: Names the work.
            total: Its units; None: unknown.
            unit: The noun of a unit, in the plural; `bytes` are shown as MiB.
            done: Units that were done before, which tell nothing about the time left.
        """


class _SilentStage:
    def advance(self, amount: int = 1, **figures: float | str) -> None:
        pass


class SilentReporter:
    """A reporter that shows nothing: the default of the Python API."""

    verbose = False

    def notice(self, text: str) -> None:
        """Drops the notice."""

    def detail(self, text: str) -> None:
        """Drops the details."""

    def epoch(self, figures: EpochFigures) -> None:
        """Drops the line of an epoch."""

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Stage]:
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
    _epochs: "EpochTable" = field(default_factory=lambda: EpochTable(), init=False)  # noqa: PLW0108 - defined below

    def notice(self, text: str) -> None:
        """Prints a notice as a paragraph."""
        self.write(wrapped(text, COLUMNS, label=NOTE))

    def detail(self, text: str) -> None:
        """Prints details as lines, if they are wanted."""
        if self.verbose and text:
            self.write(wrapped(text, COLUMNS, hang=_INDENT))

    def epoch(self, figures: EpochFigures) -> None:
        """Prints the line of an epoch, below headings from time to time."""
        self.write("\n".join(self._epochs.lines(figures, COLUMNS)))

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Stage]:
        """Prints lines about a stage while it runs."""
        stage = _LineStage(self, title, total, unit, done)
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
    figures: dict[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pace = Pace(self.total, self.done)
        self.printed = time.monotonic()

    def advance(self, amount: int = 1, **figures: float | str) -> None:
        self.done += amount
        self.figures = figures or self.figures
        if time.monotonic() - self.printed >= self.reporter.interval_s:
            self.print(last=False)

    def print(self, *, last: bool) -> None:
        self.printed = time.monotonic()
        # A stage without a unit counts nothing.
        parts = [f"{self.title}: {amount_text(self.done, self.total, self.unit)}" if self.unit else self.title]
        seconds_left = self.pace.seconds_left(self.done)
        if last:
            parts.append(f"{self.pace.elapsed_s:.1f} s")
        elif seconds_left is not None:
            parts.append(f"{clock(seconds_left)} left")
        # What cannot be had elsewhere comes first; figures that do not fit into the line are left out.
        line = ", ".join(parts)
        for text in filter(None, starmap(figure_text, self.figures.items())):
            if len(line) + len(text) + len(", ") <= COLUMNS:
                line += f", {text}"
        self.reporter.write(line)


class Pace:
    """The time that a piece of work has taken and will take.

    Args:
        total: Its units; None: unknown.
        done: Units that were done before, in no time of this process.
    """

    def __init__(self, total: int | None, done: int = 0) -> None:
        self._total, self._before, self._started = total, done, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    def seconds_left(self, done: int) -> float | None:
        """Returns the seconds that the rest will take at the pace so far; None: unknown."""
        if self._total is None or done <= self._before:
            return None
        return self.elapsed_s / (done - self._before) * max(0, self._total - done)


def clock(seconds: float) -> str:
    """Writes a duration as a clock does.

    Example:
        >>> clock(7), clock(18_130.4)
        ('0:07', '5:02:10')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class EpochTable:
    """Writes the lines of a training's epochs."""

    def __init__(self) -> None:
        self._shown = 0  # lines since the headings
        self._headings = ""
        # Columns that an epoch without a validation has, too.
        self._metric = ""
        self._has_average = False

    def lines(self, figures: EpochFigures, columns: int) -> list[str]:
        """Writes the line of an epoch; above it headings, at first, every few lines, and where a column is new. Columns
        for which there is no room are left out: the rate first, then the peak, then the metric.

        Args:
            figures: The figures.
            columns: Characters that a line may have.
        """
        name, value = figures.metric or (self._metric, None)
        self._metric, self._has_average = name, self._has_average or figures.averaged_loss is not None
        cells = self._cells(figures, value)
        room = columns + len(_INDENT)
        for number in (3, 2, 1):
            if sum(cell.width + len(_INDENT) for cell in cells) > room:
                cells = [cell for cell in cells if cell.optional != number]
        headings, line = (
            _INDENT.join(text.rjust(cell.width) for cell, text in zip(cells, texts, strict=True)).rstrip()
            for texts in ([cell.heading for cell in cells], [cell.text for cell in cells])
        )
        if headings == self._headings and self._shown % _ROWS_BELOW_HEADINGS:
            self._shown += 1
            return [line]
        self._headings, self._shown = headings, 1
        return [headings, line]

    def _cells(self, figures: EpochFigures, value: float | None) -> "list[_Cell]":
        metric, rate, epochs = self._metric, figures.samples_per_second, str(figures.epochs)
        name = metric if len(metric) <= _METRIC_WIDTH else f"{metric[: _METRIC_WIDTH - 1]}…"
        return [
            _Cell("epoch", f"{figures.epoch}/{epochs}", 2 * len(epochs) + 1),
            _Cell("train loss", _short(figures.training_loss)),
            _Cell("val loss", _short(figures.validation_loss)),
            *([_Cell("avg loss", _short(figures.averaged_loss))] if self._has_average else []),
            _Cell("", _BEST if figures.is_best else "", len(_BEST)),
            *([_Cell(printable(name), _short(value), optional=1)] if metric else []),
            _Cell("samples/s", _UNKNOWN if rate is None else figure_text("", rate).strip(), optional=3),
            _Cell("peak", figures.peak or _UNKNOWN, optional=2),
            _Cell("time left", _UNKNOWN if figures.seconds_left is None else clock(figures.seconds_left)),
        ]


@dataclass
class _Cell:
    heading: str
    text: str
    least: int = 9  # characters: of 1.234e-05, of 12.34 GiB, of 1:02:03
    optional: int = 0  # 0: always shown; the highest number is left out first

    @property
    def width(self) -> int:
        """Characters of its column."""
        return max(self.least, len(self.heading))


def _short(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:#.4g}".rstrip(".")


def figure_text(name: str, value: float | str) -> str:
    """Writes a figure beside a stage's progress."""
    if isinstance(value, str):
        return value
    return f"{name} {value:,.0f}" if value >= _WHOLE_FROM else f"{name} {value:.4g}"


def amount_text(done: int, total: int | None, unit: str) -> str:
    """Writes how much of a stage is done: `3/8 steps`, `1/4 MiB`, `96/300 KiB`."""
    if unit == "bytes":
        size, name = (2**20, "MiB") if (total or done) >= 2**20 else (2**10, "KiB")
        return f"{done / size:.0f}/{total / size:.0f} {name}" if total else f"{done / size:.0f} {name}"
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
        self.verbose = shown.verbose
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

    def epoch(self, figures: EpochFigures) -> None:
        """Shows the line of an epoch, and writes it down."""
        self._shown.epoch(figures)
        self._lines.epoch(figures)

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Stage]:
        """Shows a stage, and writes down how far it is."""
        with (
            self._shown.stage(title, total=total, unit=unit, done=done) as shown,
            self._lines.stage(title, total=total, unit=unit, done=done) as line,
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
        self.verbose = shown.verbose
        self.detail = shown.detail
        self.epoch = shown.epoch
        self.stage = shown.stage
        self._notice = shown.notice

    def notice(self, text: str) -> None:
        """Shows a notice, as a detail if it names the folder."""
        (self.detail if self._folder in text else self._notice)(text)


class _LoggedStage:
    def __init__(self, *stages: Stage) -> None:
        self._stages = stages

    def advance(self, amount: int = 1, **figures: float | str) -> None:
        for stage in self._stages:
            stage.advance(amount, **figures)


class _LogLines(LineReporter):
    """A full disk stops no training."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            super().write(text)
