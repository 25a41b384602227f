"""Charts as SVG text, without a plotting library: pure functions of numbers.

Everything in a plot is placed in per cent of the plot: a chart fills any width, while letters, lines and marks keep
their size. Axes are drawn outside the plot, in the margins of a `<figure>` or of a file.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Final, Literal

Point = tuple[float, float | None]
"""A place in a chart; a y of None interrupts a line."""

# Of the grid that paths are drawn on, which is stretched to the plot: fine enough for the widest screen.
_GRID_X: Final = 2000
_GRID_Y: Final = 1000
_STRETCHED: Final = f'viewBox="0 0 {_GRID_X} {_GRID_Y}" preserveAspectRatio="none" width="100%"'
# A line with more points is thinned: a screen has fewer pixels.
_MOST_POINTS: Final = 700
_LEAST_SPAN: Final = 1e-300
_MOST_TICKS: Final = 6
_BYTE_UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"))

# Of a treemap, in pixels.
_MAP_WIDTH: Final = 1088  # on a wide screen; on a narrow one all tiles are narrower
_MAP_HEIGHT: Final = 420
_HEAD: Final = 22  # above the tiles of a group, for its name
_LINE: Final = 15  # of a tile's text
_LETTER: Final = 6.5  # mean width of a letter
_LEAST_TILE: Final = 30  # narrower tiles have no text

# Of a file with one chart, in pixels.
_FILE_WIDTH: Final = 760
_FILE_HEIGHT: Final = 400
_FILE_MARGINS: Final = (56, 20, 64, 84)  # left, right, top, bottom
_LETTER_WIDTH: Final = 7  # of the legend's letters, roughly
_SWATCH_WIDTH: Final = 24


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a plot: its range, the ticks with their texts, and its quantity, with the unit.

    Attributes:
        unit: Of the ticks' texts, in the values' unit.
        suffix: Behind a value, as text.
        is_whole: Whether there is nothing between whole numbers.
        is_decades: Whether values are common logarithms.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    label: str
    unit: float = 1.0
    suffix: str = ""
    is_whole: bool = False
    is_decades: bool = False

    def share(self, value: float) -> float:
        """Returns where a value lies, from 0 at the low end to 1; values outside lie at the ends."""
        span = self.high - self.low
        return min(max((value - self.low) / span, 0.0), 1.0) if span else 0.5

    @property
    def attribute(self) -> str:
        """The axis for the page's script, as JSON in an attribute of HTML."""
        return _json({"low": self.low, "high": self.high, "label": self.label, "unit": self.unit,
                      "suffix": self.suffix, "whole": self.is_whole, "decades": self.is_decades})  # fmt: skip


def number_axis(low: float, high: float, label: str, *, unit: float = 1.0, whole: bool = False) -> Axis:
    """Makes an axis that shows a range of values in a unit, with round ticks.

    Args:
        low: Smallest value.
        high: Largest value.
        label: The quantity, with its unit.
        unit: Of the ticks' texts, in the values' unit.
        whole: Whether there is nothing between whole numbers.
    """
    # Below the smallest normal number, a difference has no round ticks.
    if (high - low) / unit < _LEAST_SPAN:
        high = low + (abs(low) if abs(low) / unit >= _LEAST_SPAN else unit)
    span = (high - low) / unit
    least = span / _MOST_TICKS
    power = 10.0 ** floor(log10(least))
    steps = (first * power * 10.0**exponent for exponent in range(7) for first in (1, 2, 5))
    step = next((step for step in steps if step >= max(least * (1 - 1e-9), float(whole))), 1.0)
    digits = max(0, -floor(log10(step)))
    first, last = ceil(low / unit / step - 1e-9), floor(high / unit / step + 1e-9)
    ticks = [(index * step * unit, f"{index * step:,.{digits}f}") for index in range(first, last + 1)]
    return Axis(low=low, high=high, ticks=ticks, label=label, unit=unit, is_whole=whole)


def decade_axis(low: float, high: float, label: str) -> Axis:
    """Makes an axis of the common logarithms of positive values, with a tick at each power of ten, and between two of
    them where there are few.
    """
    ends = floor(log10(low)), ceil(log10(high))
    digits = (1,) if log10(high / low) >= _MOST_TICKS / 2 else (1, 2, 5)
    values = [digit * 10.0**power for power in range(ends[0], ends[1] + 1) for digit in digits]
    ticks = [(log10(value), f"{value:g}") for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return Axis(low=log10(low), high=log10(high), ticks=ticks, label=label, is_decades=True)


def focused_axis(values: Sequence[float], label: str) -> Axis:
    """Makes an axis of values, at least one, that begins at 0 unless all of them are far from it."""
    low, high = min(values), max(values)
    if 0 <= low < high / 2:
        return number_axis(0.0, high, label)
    margin = (high - low) / 10
    return number_axis(low - margin, high + margin, label)


def share_axis(label: str, *, high: float = 1.0) -> Axis:
    """Makes an axis of shares, from 0 % to 100 % or a little more."""
    ticks = [(tick / 100, f"{tick} %") for tick in (0, 25, 50, 75, 100)]
    return Axis(low=0.0, high=high, ticks=ticks, label=label, unit=0.01, suffix=" %")


def byte_axis(high: float, label: str) -> Axis:
    """Makes an axis of bytes from 0, in the largest unit that leaves no small fractions."""
    unit, name = next(((size, name) for size, name in _BYTE_UNITS if high >= 2 * size), (2**10, "KiB"))
    return replace(number_axis(0.0, high, f"{label} ({name})", unit=unit), suffix=f" {name}")


Kind = Literal["line", "steps", "area", "dots", "crosses", "level"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """The marks of one name in the legend.

    Attributes:
        name: In the legend; empty: it is not there.
        color: 0 is grey; the others are told apart with any colour vision.
        points: Places of a line, or of an area's upper edge.
        kind: `steps` is a line without slopes; `level` a line from end to end at the first point's y.
        base: Of an area: its lower edge.
        dashed: Whether a line is.
        dotted: Whether a line is.
        faint: Whether a line is thin, for noisy values.
        texts: Text of each mark, shown when the pointer is on it.
        links: Place in the page that each mark leads to; empty: none.
    """

    name: str
    color: int
    points: Sequence[Point] = ()
    kind: Kind = "line"
    base: Sequence[Point] = ()
    dashed: bool = False
    dotted: bool = False
    faint: bool = False
    texts: Sequence[str] = ()
    links: Sequence[str] = ()

    @property
    def in_legend(self) -> bool:
        """Whether it has a name, and anything to be seen."""
        return bool(self.name) and any(y is not None for _, y in self.points)

    @property
    def look(self) -> str:
        """The names of its style."""
        return f"c{self.color}" + " dashed" * self.dashed + " dotted" * self.dotted + " faint" * self.faint


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plot with its axes.

    Attributes:
        title: Above it, and read aloud.
        description: The content in a sentence, read aloud.
        x: The horizontal axis.
        y: The vertical axis; a chart of strips has none.
        series: Drawn in this order.
        strips: Name, colour and stretches of x of each strip, in place of series.
        height: Of the plot, in pixels.
        is_zoomable: Whether the page's script shows a part of x larger.
    """

    title: str
    description: str
    x: Axis
    y: Axis | None = None
    series: Sequence[Series] = ()
    strips: Sequence[tuple[str, int, Sequence[tuple[float, float]]]] = ()
    height: int = 240
    is_zoomable: bool = False


def thinned(points: Sequence[Point], choose: Callable[[Sequence[float]], float] = max) -> list[Point]:
    """Returns a point for each of at most some hundred stretches of a line: its last x, and the `choose` of its y."""
    size = ceil(len(points) / _MOST_POINTS) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], choose(values) if (values := [y for _, y in part if y is not None]) else None)
            for part in parts]  # fmt: skip


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return sum(values) / len(values)


# The parts of a chart


def read_style(name: str = "charts.css") -> str:
    """Reads a style sheet of this folder: of charts, or of the page. In charts.css are Okabe and Ito's colours, which
    people with any colour vision tell apart; lighter ones on a dark page.
    """
    return "\n" + Path(__file__).with_name(name).read_text(encoding="utf-8")


def plot_svg(chart: Chart, attributes: str, *, has_values: bool = False) -> str:
    """Draws a chart; axes and legend overflow the element. With `has_values`, the page's script finds the values."""
    parts = [f"<title>{escape(chart.title)}</title><desc>{escape(chart.description)}</desc>"]
    ticks = []
    for value, text in chart.x.ticks:
        x = _percent(chart.x.share(value))
        ticks.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>')
        ticks.append(f'<text x="{x}" y="100%" dy="17" text-anchor="middle">{escape(text)}</text>')
    parts += [f'<g class="ticks">{"".join(ticks)}</g>'] if has_values else ticks
    parts.append('<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>')
    parts.append(f'<text x="100%" y="100%" dy="35" text-anchor="end">{escape(chart.x.label)}</text>')
    if chart.y is None:
        parts += _strips(chart)
    else:
        for value, text in chart.y.ticks:
            y = _percent(1 - chart.y.share(value))
            parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="-7" y="{y}" dy="4" text-anchor="end">{escape(text)}</text>')
        parts.append(f'<text x="0" y="-11" dx="-44">{escape(chart.y.label)}</text>')
        for series in (each for each in chart.series if each.points):
            drawn = _drawn(series, chart.x, chart.y)
            parts.append(f"<g{_values(series)}>{drawn}</g>" if has_values and series.name else drawn)
        if has_values:
            zoom = " data-zoom" if chart.is_zoomable else ""
            attributes += f' data-x="{chart.x.attribute}" data-y="{chart.y.attribute}"{zoom}'
    label = escape(f"{chart.title}: {chart.description}", quote=True)
    # An image has no links inside.
    role = "group" if any(series.links for series in chart.series) else "img"
    return f'<svg class="plot" role="{role}" aria-label="{label}" {attributes}>{"".join(parts)}</svg>'


def _values(series: Series) -> str:
    """Writes the values of a series as attributes for the page's script."""
    low = f' data-low="{_points(series.base)}"' if series.base else ""
    name = escape(series.name, quote=True)
    return f' data-name="{name}" data-kind="{series.kind}" data-points="{_points(series.points)}"{low}'


def _points(points: Sequence[Point]) -> str:
    return _json([[_short(x), None if y is None or not isfinite(y) else _short(y)] for x, y in points])


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _json(value: object) -> str:
    return escape(json.dumps(value, separators=(",", ":")), quote=True)


def _drawn(series: Series, x: Axis, y: Axis) -> str:
    if series.kind == "level":
        level = _percent(1 - y.share(series.points[0][1] or 0.0))
        return f'<line class="line {series.look}" x1="0" x2="100%" y1="{level}" y2="{level}"/>'
    if series.kind in ("dots", "crosses"):
        return "".join(_marks(series, x, y))
    if series.kind == "area":
        edge = [*series.points, *reversed(series.base)]
        path = f'<path class="area {series.look}" d="{_path(edge, x, y)}Z"/>'
    else:
        line = _path(series.points, x, y, steps=series.kind == "steps")
        path = f'<path class="line {series.look}" d="{line}"/>'
    return f'<svg {_STRETCHED} height="100%" overflow="visible">{path}</svg>'


def _marks(series: Series, x: Axis, y: Axis) -> list[str]:
    empty, marks = [""] * len(series.points), []
    texts, links = [*series.texts, *empty], [*series.links, *empty]
    for (at, value), text, link in zip(series.points, texts, links, strict=False):
        if value is None:
            continue
        left, top = _percent(x.share(at)), _percent(1 - y.share(value))
        title, data = f"<title>{escape(text)}</title>" if text else "", f'data-at="{x.share(at):.5g}"'
        if series.kind == "dots":
            mark = f'<circle class="mark {series.look}" {data} cx="{left}" cy="{top}" r="4">{title}</circle>'
        else:
            cross = f'<path class="line {series.look}" d="M-4-4L4 4M-4 4L4-4">{title}</path>'
            touched = '<rect class="sensitive" x="-10" y="-10" width="20" height="20"/>' if link else ""
            mark = f'<svg {data} x="{left}" y="{top}" overflow="visible">{touched}{cross}</svg>'
        marks.append(f'<a href="#{escape(link, quote=True)}">{mark}</a>' if link else mark)
    return marks


def _path(points: Sequence[Point], x: Axis, y: Axis, *, steps: bool = False) -> str:
    """Writes a line as a path's commands, broken where it has no y."""
    parts = []
    for is_drawn, part in groupby(points, key=lambda point: point[1] is not None and isfinite(point[1])):
        if not is_drawn:
            continue
        first, *rest = [
            (round(_GRID_X * x.share(at)), round(_GRID_Y * (1 - y.share(value or 0.0)))) for at, value in part
        ]
        # A single point would draw nothing.
        moves = [(f"H{across}V{down}" if steps else f"L{across} {down}") for across, down in rest] or ["h1"]
        parts.append(f"M{first[0]} {first[1]}" + "".join(moves))
    return "".join(parts)


def _strips(chart: Chart) -> Iterator[str]:
    """Draws a strip for each name, from top to bottom."""
    height = 100 / len(chart.strips)
    for row, (name, color, spans) in enumerate(chart.strips):
        top = row * height
        yield f'<text x="-7" y="{top + height / 2:.2f}%" dy="4" text-anchor="end">{escape(name)}</text>'
        edges = [(round(_GRID_X * chart.x.share(start)), round(_GRID_X * chart.x.share(stop))) for start, stop in spans]
        # At least as wide as can be seen.
        boxes = "".join(f"M{left} 0h{max(right - left, 3)}v{_GRID_Y}H{left}Z" for left, right in edges)
        path = f'<path class="span c{color}" d="{boxes}"/>'
        yield f'<svg {_STRETCHED} y="{top + height * 0.15:.2f}%" height="{height * 0.7:.2f}%">{path}</svg>'


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


# A treemap


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles of one name in a treemap.

    Attributes:
        name: Above the tiles.
        color: As of a series.
        sizes: Of each tile, above 0, the largest first.
        texts: Lines of each tile; the last one is its size, as text.
    """

    name: str
    color: int
    sizes: Sequence[float]
    texts: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Treemap:
    """Areas as large as sizes: `groups`, the largest first, and in each its tiles. Title and description as of a
    chart.
    """

    title: str
    description: str
    groups: Sequence[Tiles]


Box = tuple[float, float, float, float]  # left, top, width and height


def treemap_html(treemap: Treemap) -> str:
    """Makes the treemap of a page. Names and sizes stand in the tiles, cut off at their edges, and whole where the
    pointer is: colours only repeat the names of the groups.
    """
    shares = [sum(group.sizes) for group in treemap.groups]
    boxes = squarified(shares, (0, 0, _MAP_WIDTH, _MAP_HEIGHT))
    drawn = "".join(_group(group, box) for group, box in zip(treemap.groups, boxes, strict=True))
    label = escape(f"{treemap.title}: {treemap.description}", quote=True)
    size = f'width="100%" height="{_MAP_HEIGHT}"'
    svg = f'<svg class="plot" role="img" aria-label="{label}" {size}>{drawn}</svg>'
    return f'<figure class="map"><figcaption>{escape(treemap.title)}</figcaption>{svg}</figure>'


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Divides a box into boxes of these sizes, the largest first, which are as square as a division in rows makes them.

    Source: Bruls, Huizing and van Wijk, Squarified Treemaps (2000).
    """
    left, top, width, height = box
    boxes, rest = list[Box](), list(sizes)
    unit = width * height / sum(rest) if rest else 0.0
    while rest:
        side = min(width, height)
        row = [rest.pop(0) * unit]
        while rest and _longest([*row, rest[0] * unit], side) <= _longest(row, side):
            row.append(rest.pop(0) * unit)
        depth, done = sum(row) / side, 0.0
        for area in row:
            length = area / depth
            is_column = width >= height
            boxes.append((left, top + done, depth, length) if is_column else (left + done, top, length, depth))
            done += length
        if width >= height:
            left, width = left + depth, max(width - depth, _LEAST_SPAN)
        else:
            top, height = top + depth, max(height - depth, _LEAST_SPAN)
    return boxes


def _longest(row: Sequence[float], side: float) -> float:
    """Returns the longest side of a row's boxes, in units of the other side."""
    depth = sum(row) / side
    return max(max(area / depth**2, depth**2 / area) for area in row)


def _group(group: Tiles, box: Box) -> str:
    _, _, width, height = box
    head = _HEAD if height >= 2 * _HEAD else 0
    # Across, the group's own width is the unit of its tiles.
    boxes = squarified(group.sizes, (0, head, width, height - head))
    tiles = "".join(_tile(group, texts, (left / width, top, across / width, down), across)
                    for texts, (left, top, across, down) in zip(group.texts, boxes, strict=True))  # fmt: skip
    name = f'<text class="name" x="6" y="15">{escape(_cut(group.name, width))}</text>' if head else ""
    place = (box[0] / _MAP_WIDTH, box[1], width / _MAP_WIDTH, height)
    return f'<svg {_placed(place)}>{name}{tiles}<rect class="edge wide" width="100%" height="100%"/></svg>'


def _tile(group: Tiles, texts: Sequence[str], place: Box, width: float) -> str:
    height = place[3]
    lines = texts[: int((height - 4) / _LINE)] if width >= _LEAST_TILE else ()
    words = "".join(f'<text class="name" x="6" y="{_LINE * (row + 1)}">{escape(_cut(line, width))}</text>'
                    for row, line in enumerate(lines))  # fmt: skip
    return (
        f"<svg {_placed(place)}><title>{escape(', '.join([group.name, *texts]))}</title>"
        f'<rect class="area c{group.color}" width="100%" height="100%"/><rect class="edge" width="100%" height="100%"/>'
        f"{words}</svg>"
    )


def _cut(text: str, width: float) -> str:
    """Cuts a text that a tile of the map's usual width does not hold; a narrower page cuts it off at the edge."""
    letters = int((width - 6) / _LETTER)
    return text if len(text) <= letters else f"{text[: max(letters - 1, 0)]}…"


def _placed(place: Box) -> str:
    left, top, width, height = place
    return f'x="{_percent(left)}" y="{top:.1f}" width="{_percent(width)}" height="{max(height, 0.1):.1f}"'


# A chart in a page, and in a file of its own


def figure_html(chart: Chart) -> str:
    """Makes a chart of a page, with title and legend."""
    swatch = f'class="plot" width="{_SWATCH_WIDTH - 4}" height="12" aria-hidden="true"'
    items = "".join(f"<li><svg {swatch}>{_sample(series)}</svg>{escape(series.name)}</li>"
                    for series in chart.series if series.in_legend)  # fmt: skip
    legend = f'<ul class="legend">{items}</ul>' if items else ""
    kind = ' class="strips"' if chart.y is None else ""
    svg = plot_svg(chart, f'width="100%" height="{chart.height}"', has_values=chart.y is not None)
    return f"<figure{kind}><figcaption>{escape(chart.title)}</figcaption>{svg}{legend}</figure>"


def _sample(series: Series) -> str:
    """Draws the swatch of a series, 20 pixels wide and 12 high."""
    if series.kind == "dots":
        return f'<circle class="mark {series.look}" cx="10" cy="6" r="4"/>'
    if series.kind == "crosses":
        return f'<path class="line {series.look}" d="M6 2L14 10M6 10L14 2"/>'
    if series.kind == "area":
        return f'<rect class="area {series.look}" width="20" height="12"/>'
    return f'<path class="line {series.look}" d="M0 6H20"/>'


def svg_file(chart: Chart) -> str:
    """Makes the text of an SVG file with one chart that has series."""
    left, right, top, bottom = _FILE_MARGINS
    width, height = _FILE_WIDTH - left - right, _FILE_HEIGHT - top - bottom
    plot = plot_svg(chart, f'x="{left}" y="{top}" width="{width}" height="{height}"')
    across, items = 0, []
    for series in chart.series:
        if series.in_legend:
            text = f'<text x="{_SWATCH_WIDTH}" y="10">{escape(series.name)}</text>'
            items.append(f'<g transform="translate({across})">{_sample(series)}{text}</g>')
            across += _SWATCH_WIDTH + _LETTER_WIDTH * len(series.name) + 12
    size = f'viewBox="0 0 {_FILE_WIDTH} {_FILE_HEIGHT}" width="{_FILE_WIDTH}" height="{_FILE_HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" {size}><style>{read_style()}</style>'
        f'<rect width="100%" height="100%" style="fill: var(--page)"/>'
        f'<text class="title" x="12" y="24">{escape(chart.title)}</text>{plot}'
        f'<g transform="translate({left} {_FILE_HEIGHT - 28})">{"".join(items)}</g></svg>\n'
    )
