"""Draws results on standard output: with Rich, which adapts to the terminal's width; a pipe gets every cell on one
line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table as DrawnTable

    # The home of the protocol imports torch.
    from can_train.training.task import Table

_WRAPPED_FROM: Final = 17
"""Characters from which a column is text, which may be wrapped in a narrow terminal; figures and names stay whole."""

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
        console.print(_drawn(table, lines=console.is_terminal))
        for note in table.notes:
            console.print(Text(f"  {note}"))


def _drawn(table: Table, *, lines: bool) -> DrawnTable:
    from rich import box
    from rich.table import Table as DrawnTable

    drawn = DrawnTable(box=box.SIMPLE_HEAD if lines else None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(table.columns):
        widest = max((len(row[index]) for row in table.rows), default=0)
        is_text = index == 0 or widest >= _WRAPPED_FROM
        drawn.add_column(
            column, justify="left" if is_text else "right", no_wrap=widest < _WRAPPED_FROM, overflow="fold"
        )
    for row in table.rows:
        drawn.add_row(*row)
    return drawn
