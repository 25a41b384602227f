r"""The summary at the top of RESULTS.md, made from the cells of the sections below it, by the texts of summary.toml.

A text names a cell as `{row|column}`; a row is named by its first cell or cells, `{row|next cell|column}`. A regular
expression with a group takes a figure from outside tables: `{/median error is (\S+),}`.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.harness import markdown, render

HEAD: Final = ("subject", "compared", "can-train", "the best other", "where can-train loses")
LINES: Final = Path(__file__).with_name("summary.toml")


class AbsentError(LookupError):
    """A text of the summary names a section, a row or a cell that is absent or empty."""


def read_lines() -> dict[str, Mapping[str, str]]:
    """Returns the texts of each section's line: `compared`, `can_train`, and the optional `other` and `loses`."""
    return tomllib.loads(LINES.read_text(encoding="utf-8"))


def summary(results: str) -> str:
    """Returns the summary of RESULTS.md, as a table with a note.

    Raises:
        AbsentError: A section, a row or a cell is not there, or is empty.
    """
    rows = [_cells(results, name, texts) for name, texts in read_lines().items()]
    return render("all", {"table": markdown([HEAD, *rows])})


def cell(section: str, names: Sequence[str]) -> str:
    """Returns a cell of a section: the names are the first cells of its row, and its column's."""
    *row, column = names
    for head, *body in _tables(section):
        if column in head:
            cells = [cells[head.index(column)] for cells in body if cells[: len(row)] == row]
            if cells and cells[0]:
                return cells[0]
    raise AbsentError(f"no cell {' | '.join(names)}")


def section_of(results: str, name: str) -> str:
    """Returns the text of a section of RESULTS.md."""
    match = re.search(f"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", results, re.DOTALL)
    if match is None:
        raise AbsentError(f"no section {name}")
    return match[1]


def _cells(results: str, name: str, texts: Mapping[str, str]) -> list[str]:
    section = section_of(results, name)
    shown = (texts.get(field, "–") for field in ("can_train", "other", "loses"))
    filled = (re.sub(r"\{(.+?)\}", lambda match: _value(section, match[1]), text) for text in shown)
    return [_link(results, name), texts["compared"], *filled]


def _value(section: str, named: str) -> str:
    if not named.startswith("/"):
        return cell(section, named.split("|"))
    if match := re.search(named[1:], section):
        return match[1]
    raise AbsentError(f"no {named}")


def _link(results: str, name: str) -> str:
    """Returns a link to a section's heading, by the name that GitHub gives it."""
    heading = results.partition(f"<!-- {name}:begin -->")[0].rpartition("\n## ")[2].strip()
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    return f"[{name}](#{anchor})"


def _tables(section: str) -> Iterator[list[list[str]]]:
    for block in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]
