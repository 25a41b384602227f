"""Charts as SVG text: axes with round ticks, lines where the numbers are, and nothing of a name that is markup."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.report.charts import (
    Axis,
    Chart,
    Series,
    Tiles,
    Treemap,
    byte_axis,
    decade_axis,
    figure_html,
    focused_axis,
    mean,
    number_axis,
    plot_svg,
    share_axis,
    squarified,
    svg_file,
    thinned,
    treemap_html,
)

finite = st.floats(-1e12, 1e12)
NASTY = '<script>alert("&")</script>'
SHARES = share_axis("share")


def chart(*series: Series, **values: object) -> Chart:
    return Chart(**{"title": "T", "description": "D", "x": SHARES, "y": SHARES, "series": series, **values})


@given(low=finite, span=st.floats(1e-6, 1e12), whole=st.booleans())
def test_the_ticks_of_an_axis_are_few_and_lie_on_it_with_texts_that_differ(
    low: float, span: float, whole: bool
) -> None:
    high = low + max(span, abs(low) * 1e-6)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    axis = number_axis(low, high, "x", whole=whole)
    values, texts = [value for value, _ in axis.ticks], [text for _, text in axis.ticks]
    assert len(values) <= 8
    assert all(low - 1e-6 * (high - low) <= value <= high + 1e-6 * (high - low) for value in values)
    assert len(set(texts)) == len(texts)
    if not whole:
        assert len(values) >= 2


@pytest.mark.parametrize(
    ("high", "texts"),
    [
        (7, ["0", "2", "4", "6"]),
        (0.035, ["0.00", "0.01", "0.02", "0.03"]),
        (1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_are_round_numbers(high: float, texts: list[str]) -> None:
    assert [text for _, text in number_axis(0, high, "x").ticks] == texts


def test_bytes_are_shown_in_the_unit_that_suits_them() -> None:
    assert byte_axis(3 * 2**30, "memory").label == "memory (GiB)"
    axis = byte_axis(64 * 2**20, "memory")
    assert axis.label == "memory (MiB)"
    assert axis.ticks[1] == (20 * 2**20, "20")
    assert byte_axis(1000.0, "memory").label == "memory (KiB)"


@pytest.mark.parametrize(("values", "low"), [([0.1, 1.0], 0.0), ([1.5, 2.0], 1.45), ([-1.0, 1.0], -1.2)])
def test_an_axis_begins_at_zero_where_that_is_near(values: list[float], low: float) -> None:
    assert focused_axis(values, "loss").low == pytest.approx(low)


@pytest.mark.parametrize("low", [0.0, 5.0, -3.0])
def test_an_axis_of_one_value_has_a_range(low: float) -> None:
    axis = number_axis(low, low, "x")
    assert axis.high > axis.low
    assert 0 <= axis.share(low) <= 1


def test_a_line_goes_through_its_points_and_is_broken_where_one_is_missing() -> None:
    svg = plot_svg(chart(Series(name="a", color=1, points=[(0, 0), (0.5, 1), (0.75, None), (1, 0.5)])), "")
    assert 'd="M0 1000L1000 0M2000 500h1"' in svg
    stepped = plot_svg(chart(Series(name="a", color=1, kind="steps", points=[(0, 0), (0.5, 1)])), "")
    assert 'd="M0 1000H1000V0"' in stepped


def test_marks_lie_at_their_places_and_say_what_they_are() -> None:
    svg = plot_svg(chart(Series(name="a", color=2, kind="dots", points=[(0.25, 0.5)], texts=[NASTY])), "")
    [dot] = ElementTree.fromstring(svg).findall("circle")
    assert (dot.get("cx"), dot.get("cy"), dot.find("title").text) == ("25%", "50%", NASTY)


def test_strips_are_drawn_where_their_spans_are() -> None:
    spans = [("found", 1, [(0.0, 0.5), (0.75, 1.0)]), ("missed", 5, [])]
    root = ElementTree.fromstring(plot_svg(chart(y=None, strips=spans), ""))
    assert [path.get("d") for path in root.iter("path")] == ["M0 0h1000v1000H0ZM1500 0h500v1000H1500Z", ""]
    assert [text.text for text in root.iter("text")][-2:] == ["found", "missed"]


@given(
    st.lists(st.tuples(finite, st.none() | finite), max_size=30),
    st.sampled_from(["line", "steps", "area", "dots", "crosses", "level"]),
)
def test_every_chart_is_well_formed_and_draws_within_its_plot(points: list, kind: str) -> None:
    series = Series(name="a", color=1, kind=kind, points=points, base=points)
    known = [value for _, value in points if value is not None]
    x = number_axis(min((at for at, _ in points), default=0), max((at for at, _ in points), default=1), "x")
    y = number_axis(min(known, default=0), max(known, default=1), "y")
    root = ElementTree.fromstring(plot_svg(chart(series, x=x, y=y), ""))
    for path in root.iter("path"):
        if (path.get("d") or "").startswith("M-4"):
            continue
        numbers = [int(number) for number in re.findall(r"\d+", path.get("d") or "")]
        assert all(0 <= number <= 2000 for number in numbers)
    for name in ("cx", "cy", "x1", "x2", "y1", "y2"):
        shares = [float(one.get(name).rstrip("%")) for one in root.iter() if (one.get(name) or "").endswith("%")]
        assert all(0 <= share <= 100 for share in shares)


def test_what_is_written_by_users_is_escaped_and_read_aloud() -> None:
    nasty = chart(
        Series(name=NASTY, color=1, points=[(0, 0)]),
        title=NASTY,
        description=NASTY,
        x=Axis(low=0, high=1, ticks=[(0, NASTY)], label=NASTY),
    )
    for text in (figure_html(nasty), svg_file(nasty)):
        assert "<script" not in text
        ElementTree.fromstring(text)
    root = ElementTree.fromstring(plot_svg(nasty, ""))
    assert (root.get("role"), root.get("aria-label")) == ("img", f"{NASTY}: {NASTY}")


def test_a_file_stands_alone() -> None:
    text = svg_file(chart(Series(name="a", color=1, points=[(0, 0), (1, 1)])))
    assert re.findall(r"https?://[^\s\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in text
    assert ElementTree.fromstring(text).get("viewBox") == "0 0 760 400"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5000))
def test_a_thinned_line_keeps_what_is_asked_for(values: list[float]) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    highest = thinned(points)
    assert len(highest) <= 700
    assert max(y for _, y in highest if y is not None) == max(values)
    assert highest[-1][0] == points[-1][0]
    assert thinned([(0, 1.0), (1, None)], mean) == [(0, 1.0), (1, None)]


@given(low=st.floats(1e-9, 1e6), ratio=st.floats(10, 1e9))
def test_ticks_of_a_logarithmic_axis_lie_on_it_at_their_values(low: float, ratio: float) -> None:
    axis = decade_axis(low, low * ratio, "rate")
    assert axis.ticks
    for place, text in axis.ticks:
        assert axis.low - 1e-6 <= place <= axis.high + 1e-6
        assert 10**place == pytest.approx(float(text), rel=1e-5)
    assert len({text for _, text in axis.ticks}) == len(axis.ticks) <= 19


@given(
    sizes=st.lists(st.floats(1, 1e5), min_size=1, max_size=20), width=st.floats(10, 2000), height=st.floats(10, 2000)
)
def test_the_tiles_of_a_treemap_fill_it_in_proportion_to_their_sizes(
    sizes: list[float], width: float, height: float
) -> None:
    ordered = sorted(sizes, reverse=True)
    boxes = squarified(ordered, (0, 0, width, height))
    total = sum(ordered)
    for size, (left, top, across, down) in zip(ordered, boxes, strict=True):
        assert across * down == pytest.approx(size / total * width * height, rel=1e-6)
        assert -1e-6 * width <= left <= left + across <= width * (1 + 1e-6)
        assert -1e-6 * height <= top <= top + down <= height * (1 + 1e-6)
    # Their areas add up to the whole, so boxes without room in common leave no gap.
    for index, (left, top, across, down) in enumerate(boxes):
        for left2, top2, across2, down2 in boxes[index + 1 :]:
            common_x = min(left + across, left2 + across2) - max(left, left2)
            common_y = min(top + down, top2 + down2) - max(top, top2)
            assert min(common_x, common_y) <= 1e-6 * max(width, height)


def test_equal_tiles_are_squares() -> None:
    assert squarified([1.0] * 4, (0, 0, 2, 2)) == [(0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 1, 1)]


def test_a_treemap_says_in_words_what_its_colours_say() -> None:
    groups = [
        Tiles(name=f"saved {NASTY}", color=1, sizes=[60.0, 30.0], texts=[(NASTY, "mul", "60 MiB"), ("add", "30 MiB")]),
        Tiles(name="weights", color=2, sizes=[10.0, 1e-6], texts=[("head", "10 MiB"), ("tail", "1 B")]),
    ]
    text = treemap_html(Treemap(title=NASTY, description="kinds", groups=groups))
    figure = ElementTree.fromstring(text)
    words = [each.text for each in figure.iter("text")]
    assert words == [f"saved {NASTY}", NASTY, "mul", "60 MiB", "add", "30 MiB", "weights", "head", "10 MiB"]
    # A tile that is too small for its text has it where the pointer is.
    titles = [each.text for each in figure.iter("title")]
    assert titles[-1] == "weights, tail, 1 B"
    assert figure.find("svg").get("aria-label") == f"{NASTY}: kinds"
