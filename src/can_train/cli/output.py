"""How results, tables and progress are printed, and how much of them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import starmap
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

from can_train.errors import CONTROL, ConfigError, command_name, printable
from can_train.io.units import finite
from can_train.reporter import (
    COLUMNS,
    NOTE,
    EpochTable,
    LineReporter,
    Pace,
    SilentReporter,
    TextTable,
    amount_text,
    clock,
    figure_text,
    wrapped,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from can_train.reporter import EpochFigures, Reporter, Stage

# A column with longer cells is text and may be wrapped in a narrow terminal; figures and names stay whole.
_WRAPPED_FROM: Final = 17
# Between a figure and its heading: lines are not broken there.
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_GAP: Final = "  "
# Columns of a table in a pipe, whose reader wants whole rows.
_UNBOUNDED: Final = 10_000
_COLOUR: Final = re.compile(r"(\x1b\[[\d;:]{0,64}m)")
_RESET: Final = "\x1b[m"
_KEY: Final = len("^C")
_MOST_BAR: Final = 10  # characters of a bar
_LEAST_BAR: Final = 4
_LINE: Final = "━"
_CLEAR: Final = "\x1b[H\x1b[2J"  # control sequence that empties a terminal
# Standard output while it is for data alone; empty: it is for everything.
_for_data: list[TextIO] = []


class Verbosity(Enum):
    """How much a command prints beside its result."""

    QUIET = "nothing but errors"
    NORMAL = "what everybody should know"
    VERBOSE = "also how it came about, and the result in full"

    @classmethod
    def of(cls, *, quiet: bool, verbose: bool) -> Verbosity:
        """Returns the verbosity of flags; raises ConfigError if they contradict each other."""
        if quiet and verbose:
            raise ConfigError("--quiet and --verbose cannot be combined", remedy="Leave one out")
        return cls.QUIET if quiet else cls.VERBOSE if verbose else cls.NORMAL


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print all figures, and what they rest on.")]


def print_text(text: str, *, end: str = "\n") -> None:
    """Prints to standard output. Names and lines of files come with control characters: they are printed as text."""
    print(printable(text), end=end, flush=True)


@contextmanager
def data_alone(*, wanted: bool = True) -> Iterator[None]:
    """Keeps standard output for `print_json` and `DataOutput` during the block. What a task, its libraries, C code and
    child processes print there goes to standard error, as do `print_text` and tables.

    Args:
        wanted: Whether it does so; else nothing changes.
    """
    if not wanted or _for_data or sys.stderr is None:
        yield
        return
    shown = sys.stdout
    with _real_output(shown) as data:
        _for_data.append(data)
        sys.stdout = sys.stderr
        try:
            yield
        finally:
            sys.stdout = shown
            _for_data.clear()


@contextmanager
def _real_output(shown: TextIO) -> Iterator[TextIO]:
    """Sends the file descriptor of standard output to standard error; yields a file that goes where it went before."""
    shown.flush()
    if _descriptor(shown) != 1:
        yield shown
        return
    place = os.dup(1)
    try:
        os.dup2(2, 1)
        with open(place, "w", encoding=shown.encoding, errors=shown.errors, closefd=False) as data:
            yield data
    finally:
        # Texts that still wait in buffers were printed in the block.
        with suppress(OSError):
            shown.flush()
        _flush_c_output()
        os.dup2(place, 1)
        os.close(place)


def _descriptor(file: TextIO) -> int | None:
    """Returns the file descriptor of a file; None: it has none, as in a notebook or a test."""
    with suppress(OSError):
        return file.fileno()
    return None


def _flush_c_output() -> None:
    # Libraries that print from C are loaded beside PyTorch, which imports ctypes. Other commands need not pay for it.
    if "ctypes" in sys.modules:
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)


def _data_file() -> TextIO:
    return _for_data[0] if _for_data else sys.stdout


class DataOutput:
    """Standard output for data: in a pipe they are UTF-8, whatever the locale says, and control characters stay."""

    def write(self, text: str) -> int:
        """Writes text."""
        file = _data_file()
        if file.isatty():
            print(printable(text), end="", file=file, flush=True)
            return len(text)
        file.flush()
        # A notebook's standard output, or that of a test, has no bytes.
        if (buffer := getattr(file, "buffer", None)) is None:
            return file.write(text)
        buffer.write(text.encode(errors="backslashreplace"))
        return len(text)


def print_log(text: str) -> None:
    """Prints a piece of a log to standard output. Of its control sequences, colours alone reach a terminal, and none a
    pipe: others are printed as text. A carriage return (of a progress bar that redraws itself) ends a line.
    """
    parts = _COLOUR.split(text.replace("\r\n", "\n").replace("\r", "\n"))
    is_coloured = sys.stdout.isatty() and len(parts) > 1
    # `split` puts the colours between the texts.
    shown = [part if index % 2 else printable(part) for index, part in enumerate(parts) if is_coloured or not index % 2]
    # The reset keeps the colours of a log from the shell that follows it.
    print("".join([*shown, _RESET] if is_coloured else shown), end="", flush=True)


def print_aside(text: str) -> None:
    """Prints to standard error, with control characters as text."""
    LineReporter(sys.stderr).write(text)


def print_error(error: object) -> None:
    """Prints an error to standard error. In a terminal, lines are broken between words, except lines with a command: a
    broken command cannot be typed.
    """
    lines = f"error: {error}".split("\n")
    if sys.stderr.isatty():
        columns = get_terminal_size((COLUMNS, 0)).columns
        lines = [line if command_name() in line or " --" in line else wrapped(line, columns) for line in lines]
    print_aside("\n".join(lines))


def print_note(text: str) -> None:
    """Prints a notice as a line on standard error, as reporters do."""
    LineReporter(sys.stderr).notice(text)


def with_default(text: str, default: object) -> str:
    """Returns the help of an option with its default in brackets: yes or no for a switch."""
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    return f"{text} [{shown}]"


def print_starting(verbosity: Verbosity = Verbosity.NORMAL) -> None:
    """Says that PyTorch is loaded next, if it is not there yet: for seconds nothing else is printed."""
    if verbosity != Verbosity.QUIET and "torch" not in sys.modules:
        print_aside("starting: loading PyTorch")


def clear_screen() -> None:
    """Clears the terminal that standard output is."""
    print(_CLEAR, end="")


def ask(question: str, *, command: str, otherwise: str, value: str = "", can_ask: bool = True) -> None:
    """Asks on standard error whether to go on, where `--yes` is not given.

    Args:
        question: A question whose answer is yes or no.
        command: The command or flag that asks.
        otherwise: What a no means, as a clause, `Nothing was deleted`.
        value: The value of the error.
        can_ask: Somebody could answer, if standard input is a terminal.

    Raises:
        ConfigError: Nobody can be asked.
        typer.Exit: The answer is no, with the exit code 0: a no is no error.
    """
    if not can_ask or not sys.stdin.isatty():
        raise ConfigError(f"{otherwise}, since {command} asks first and nobody can answer here", value=value,
                          remedy="Add --yes")  # fmt: skip
    if not typer.confirm(printable(question), err=True):
        print_aside(f"{otherwise}.")
        raise typer.Exit


def ask_to_delete(total: str, *, yes: bool, can_ask: bool, command: str = "delete") -> None:
    """Asks whether something may be deleted; `command` is the command or flag that asks. Raises as `ask` does."""
    if not yes:
        ask(f"Delete {total}?", command=command, otherwise="Nothing was deleted", value=total, can_ask=can_ask)


@contextmanager
def writing(what: str, path: object, remedy: str = "Name a file in a folder that you may write to") -> Iterator[None]:
    """Raises ConfigError where a file that the user named cannot be written in the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"The {what} cannot be written", value=f"{path}: {error.strerror}", remedy=remedy) from error


def print_wrapped(text: str) -> None:
    """Prints a text in as many lines as it needs; words, such as paths, stay whole."""
    columns = get_terminal_size((COLUMNS, 0)).columns if sys.stdout.isatty() else COLUMNS
    print_text(wrapped(text, columns, hang=_GAP))


def working(title: str) -> AbstractContextManager[object]:
    """Shows in a terminal that something is at work for the duration of a block."""
    from rich.text import Text

    console = make_console(stderr=True)
    return console.status(Text(printable(f"{title} ..."))) if console.is_interactive else nullcontext()


@contextmanager
def full_screen(draw: Callable[[int], RenderableType]) -> Iterator[Callable[[], None]]:
    """Shows the result of `draw`, which gets the number of lines, in the whole terminal during the block; yields a
    function that draws it again.
    """
    from rich.live import Live

    console = make_console()
    with Live(draw(console.height), console=console, screen=True, auto_refresh=False) as live:
        yield lambda: live.update(draw(console.height), refresh=True)


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Makes a console of Rich's that shows every text as it is: brackets and colons in it are no markup."""
    # Rich takes a tenth of a second to import, which `--help` does not pay.
    from rich.console import Console

    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def print_tables(tables: Sequence[TextTable], *, pipe_columns: int = _UNBOUNDED) -> None:
    """Prints each table under its title, with its notes below it.

    A table that is too wide for the terminal, or for `pipe_columns` where there is none, becomes a paragraph for each
    row.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    console = make_console()
    if not console.is_terminal:
        console = make_console(width=pipe_columns)
    for table in map(_printable, tables):
        console.print()
        console.print(Text(table.title, style="bold"))
        # Of the longest cell of each column.
        widths = [max((len(row[index]) for row in table.rows), default=0) for index in range(len(table.columns))]
        narrowest = [width if index == 0 else min(width, _WRAPPED_FROM) for index, width in enumerate(widths)]
        needed = [max(len(name), width) for name, width in zip(table.columns, narrowest, strict=True)]
        # A line below the headings takes a second space between columns.
        gaps = len(needed) - 1
        if sum(needed) + gaps <= console.width:
            lines = console.is_terminal and sum(needed) + 2 * gaps <= console.width
            drawn = RichTable(box=SIMPLE_HEAD if lines else None, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            for index, (name, width) in enumerate(zip(table.columns, widths, strict=True)):
                is_text = width >= _WRAPPED_FROM
                justify: Any = "left" if index == 0 or is_text else "right"
                drawn.add_column(name, justify=justify, no_wrap=index == 0 or not is_text, overflow="fold")
            for row in table.rows:
                drawn.add_row(*row)
            console.print(drawn)
        else:
            _print_paragraphs(table, widths, console)
        for note in table.notes:
            console.print(Text(wrapped(_GAP + note, console.width if console.is_terminal else COLUMNS)))


def print_judgement(summary: Sequence[TextTable], tables: Sequence[TextTable], verbosity: Verbosity) -> None:
    """Prints a judgement: its summary, after all of its tables if details are wanted."""
    # A short judgement is its own summary.
    if verbosity == Verbosity.VERBOSE and tables != summary:
        print_tables(tables)
    print_tables(summary, pipe_columns=COLUMNS)


def _printable(table: TextTable) -> TextTable:
    rows = [tuple(map(printable, row)) for row in table.rows]
    return TextTable(printable(table.title), tuple(map(printable, table.columns)), rows, table.notes)


def _print_paragraphs(table: TextTable, widths: Sequence[int], console: Console) -> None:
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


def print_json(values: Any, *, in_one_line: bool = False) -> None:
    """Prints plain values as JSON; a number that is not finite becomes null."""
    text = json.dumps(finite(values), indent=None if in_one_line else 2, ensure_ascii=False)
    # JSON escapes most control characters, and `printable` would escape the others in a way that JSON does not have.
    shown = CONTROL.sub(lambda character: f"\\u{ord(character[0]):04x}", text)
    print(shown, file=_data_file(), flush=True)


def make_reporter(verbosity: Verbosity = Verbosity.NORMAL) -> Reporter:
    """Chooses the reporter that suits standard error."""
    if verbosity == Verbosity.QUIET:
        return SilentReporter()
    if sys.stderr.isatty():
        return TerminalReporter(verbose=verbosity == Verbosity.VERBOSE)
    return LineReporter(sys.stderr, verbose=verbosity == Verbosity.VERBOSE)


@dataclass(eq=False)
class TerminalReporter:
    """Draws progress bars with Rich.

    Attributes:
        verbose: Whether details are printed.
    """

    verbose: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._console = make_console(stderr=True)
        self._epochs = EpochTable()

    def notice(self, text: str) -> None:
        """Prints a notice above the bars."""
        from rich.text import Text

        shown = Text(wrapped(text, self._console.width, label=NOTE))
        shown.stylize("yellow", end=len(NOTE))
        self._console.print(shown)

    def detail(self, text: str) -> None:
        """Prints details above the bars, if they are wanted."""
        from rich.text import Text

        if self.verbose and text:
            self._console.print(Text(wrapped(text, self._console.width, hang=_GAP)))

    def epoch(self, figures: EpochFigures) -> None:
        """Prints the line of an epoch above the bars, below headings from time to time."""
        from rich.text import Text

        for line in self._epochs.lines(figures, self._console.width):
            self._console.print(Text(line, style="bold" if figures.is_best else ""))

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Stage]:
        """Draws a bar with the amount, the time left and the figures."""
        from rich.progress import Progress, ProgressColumn
        from rich.text import Text

        bar = _Bar(printable(title), total, unit, done)

        class Line(ProgressColumn):
            # The terminal may get another width while the bar is drawn.
            def render(self, task: Any) -> Text:
                # Room for the `^C` that a terminal prints behind the bar: it stays on the bar's line, which is erased.
                return Text.assemble(*bar.parts(console.width - _KEY), no_wrap=True, overflow="crop")

        console = self._console
        with Progress(Line(), console=console) as progress:
            progress.add_task("")
            yield bar
            bar.has_ended = True


@dataclass(eq=False)
class _Bar:
    """A stage as a line of a terminal."""

    title: str
    total: int | None
    unit: str
    done: int
    has_ended: bool = False
    _figures: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._pace = Pace(self.total, self.done)

    def advance(self, amount: int = 1, **figures: float | str) -> None:
        self.done += amount
        if figures:
            self._figures = tuple(filter(None, starmap(figure_text, figures.items())))

    def parts(self, columns: int) -> list[tuple[str, str]]:
        """Returns the texts of the line with their styles. Title, amount and time are always whole; the figures, the
        most important first, and then the bar are shown as far as there is room.
        """
        left, elapsed = self._pace.seconds_left(self.done), clock(self._pace.elapsed_s)
        amount = amount_text(self.done, self.total, self.unit) if self.total or self.done else ""
        texts = [amount, elapsed if left is None or self.has_ended else f"{clock(left)} left"]
        room = columns - len(self.title) - sum(len(_GAP) + len(text) for text in texts)
        for figure in self._figures:
            if len(_GAP) + len(figure) <= room:
                texts.append(figure)
                room -= len(_GAP) + len(figure)
        width = min(_MOST_BAR, room - len(_GAP))
        bar: list[tuple[str, str]] = []
        if self.total and width >= _LEAST_BAR:
            full = width * min(self.done, self.total) // self.total
            bar = [(_GAP, ""), (_LINE * full, "bar.complete"), (_LINE * (width - full), "bar.back")]
        return [(self.title, ""), *bar, *((f"{_GAP}{text}", "") for text in texts if text)]
