"""Draws results on standard output: with Rich, which adapts to the terminal's width; a table that would be torn up
there becomes a paragraph a row. A pipe gets every row on one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table as DrawnTable

    # The home of the protocol imports torch.
    from can_train.training.task import Table

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
