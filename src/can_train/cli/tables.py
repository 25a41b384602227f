"""Draws results on standard output: with Rich, which adapts to the terminal's width and drops colour in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    # The home of the protocol imports torch.
    from can_train.training.task import Table


def print_tables(tables: Sequence[Table]) -> None:
    """Prints each table under its title, its notes below it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    for table in tables:
        drawn = RichTable(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, padding=(0, 1, 0, 0))
        for index, column in enumerate(table.columns):
            drawn.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in table.rows:
            drawn.add_row(*row)
        console.print()
        console.print(Text(table.title, style="bold"))
        console.print(drawn)
        for note in table.notes:
            console.print(Text(f"  {note}"))
