"""The picture of README.md, made from sections of RESULTS.md: the results of searches for the largest batch, and
whether trainings survive, by tool.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from bench.summary import cell, section_of
from can_train.report.charts import Chart, number_axis, plot_svg, read_style

PICTURE: Final = Path(__file__).resolve().parents[2] / "docs" / "comparison.svg"


class Block(NamedTuple):
    """Bars from the first table of a section that has them.

    Attributes:
        section: Its name.
        title: Above the bars.
        panels: Titles of the columns of bars, and titles of the table's columns.
        tools: Rows of the table, and the numbers of their bars' colours.
    """

    section: str
    title: str
    panels: Mapping[str, str]
    tools: Mapping[str, int]


def read_blocks() -> list[Block]:
    """Reads the blocks from picture.toml."""
    blocks = tomllib.loads(Path(__file__).with_name("picture.toml").read_text(encoding="utf-8"))
    colors = {"own": 1, "other": 0}
    read = []
    for section, block in blocks.items():
        tools = {tool: color for kind, color in colors.items() for tool in block[kind]}
        read.append(Block(section, block["title"], block["panels"], tools))
    return read


# In pixels.
WIDTH: Final = 900
TOP: Final = 66  # of a block, above its bars
ROW: Final = 23
BOTTOM: Final = 40  # of a block, below its bars
NAMES: Final = 270  # of the tools, left of the first panel
VALUE: Final = 44  # of a bar, left of it
BETWEEN: Final = 20


def picture(results: str) -> str:
    """Returns the text of the SVG file, from the text of RESULTS.md."""
    drawn, top = [], 0
    for block in read_blocks():
        drawn.append(f'<g transform="translate(0 {top})">{block_svg(block, section_of(results, block.section))}</g>')
        top += TOP + ROW * len(block.tools) + BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {top}">'
        f"<style>{read_style()}</style>"
        f'<rect width="100%" height="100%" style="fill: var(--page)"/>{"".join(drawn)}</svg>\n'
    )


def block_svg(block: Block, section: str) -> str:
    """Draws a block: its title, the tools' names, one at each row of bars, and the panels."""
    width = (WIDTH - NAMES - BETWEEN) / len(block.panels) - VALUE - BETWEEN
    parts = [f'<text class="title" x="12" y="26">{escape(block.title)}</text>']
    for number, tool in enumerate(block.tools):
        parts.append(f'<text x="12" y="{TOP + (number + 0.5) * ROW + 4:.0f}">{escape(tool.replace("`", ""))}</text>')
    for number, (title, column) in enumerate(block.panels.items()):
        left = NAMES + VALUE + number * (width + VALUE + BETWEEN)
        parts.append(f'<text x="{left:.0f}" y="{TOP - 10}" style="fill: var(--ink)">{escape(title)}</text>')
        values = {tool: shown(cell(section, (tool, column))) for tool in block.tools}
        place = f'x="{left:.0f}" y="{TOP}" width="{width:.0f}" height="{ROW * len(values)}"'
        parts.append(plot_svg(chart(title, values, block.tools), place))
    return "".join(parts)


def chart(title: str, values: Mapping[str, str], colors: Mapping[str, int]) -> Chart:
    """Returns a bar for each tool, with its value left of it."""
    bars = [(value, colors[tool], spans(float(value.replace(",", "")))) for tool, value in values.items()]
    description = ", ".join(f"{tool} {value}" for tool, value in values.items())
    axis = number_axis(0.0, max(stop for _, _, several in bars for _, stop in several), "")
    return Chart(title=title, description=description, x=axis, strips=bars)


def shown(text: str) -> str:
    """Returns the number at the start of a cell."""
    number = re.match(r"[\d.,]*\d", text)
    return number[0] if number else text


def spans(value: float) -> Sequence[tuple[float, float]]:
    """Returns the stretch of a bar; none of 0, since a stretch is never too small to be seen."""
    return [(0.0, value)] if value else []
