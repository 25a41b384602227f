"""The picture of README.md, made from a section of RESULTS.md: what searches for the largest batch find, by tool."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from bench.summary import cell, section_of
from can_train.cli.charts import STYLE, Chart, number_axis, plot_svg

PICTURE: Final = Path(__file__).resolve().parents[2] / "docs" / "largest-batch.svg"

TITLE: Final = "The largest batch that fits: what a search finds, for 284 sizes of memory"

OWN: Final = 1
OTHERS: Final = 0
TOOLS: Final[Mapping[str, int]] = {
    "can-train, with readings": OWN,
    "can-train, without readings": OWN,
    "Lightning, power": OTHERS,
    "Lightning, binsearch": OTHERS,
    "Lightning, binsearch, `max_val` raised": OTHERS,
    "accelerate, from 128": OTHERS,
    "accelerate, from 8192": OTHERS,
}
"""Rows of the finder's first table, and their colours."""


class Panel(NamedTuple):
    """A column of bars: its title, and the column of the table."""

    title: str
    column: str


PANELS: Final = (
    Panel("Share of the GPU's limit", "mean share"),
    Panel("Batches that do not fit", "over the limit"),
    Panel("Trials until it is found", "trials"),
)

# In pixels.
WIDTH: Final = 900
HEIGHT: Final = 264
TOP: Final = 66
NAMES: Final = 250  # of the tools, left of the first panel
VALUE: Final = 44  # of a bar, left of it
BETWEEN: Final = 20
BOTTOM: Final = 34


def picture(results: str) -> str:
    """Returns the text of the SVG file, from the text of RESULTS.md."""
    finder = section_of(results, "finder")
    width = (WIDTH - NAMES - BETWEEN) / len(PANELS) - VALUE - BETWEEN
    panels = []
    for number, panel in enumerate(PANELS):
        left = NAMES + VALUE + number * (width + VALUE + BETWEEN)
        place = f'x="{left:.0f}" y="{TOP}" width="{width:.0f}" height="{HEIGHT - TOP - BOTTOM}"'
        panels.append(f'<text x="{left:.0f}" y="{TOP - 10}" style="fill: var(--ink)">{escape(panel.title)}</text>')
        panels.append(plot_svg(chart(finder, panel), place))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" style="fill: var(--page)"/><text class="title" x="12" y="26">{TITLE}</text>'
        f"{names()}{''.join(panels)}</svg>\n"
    )


def chart(finder: str, panel: Panel) -> Chart:
    """Returns a bar for each tool, with its value left of it."""
    values = {tool: cell(finder, (tool, panel.column)) for tool in TOOLS}
    bars = [(value, TOOLS[tool], spans(float(value))) for tool, value in values.items()]
    told = ", ".join(f"{tool} {value}" for tool, value in values.items())
    axis = number_axis(0.0, max(map(float, values.values())), "")
    return Chart(title=panel.title, description=told, x=axis, strips=bars)


def spans(value: float) -> Sequence[tuple[float, float]]:
    """Returns the stretch of a bar; none of 0, since a stretch is never too small to be seen."""
    return [(0.0, value)] if value else []


def names() -> str:
    """Writes the tools' names, one at each row of bars."""
    row = (HEIGHT - TOP - BOTTOM) / len(TOOLS)
    lines = (
        f'<text x="12" y="{TOP + (number + 0.5) * row + 4:.0f}">{escape(tool.replace("`", ""))}</text>'
        for number, tool in enumerate(TOOLS)
    )
    return "".join(lines)
