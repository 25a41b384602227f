import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.cli.factors_tables import PLOT_COLUMNS, PlotPoint, plot_lines

shares = st.floats(0, 1.5)
points = st.builds(PlotPoint, factor=st.floats(0.01, 1), peak=st.none() | shares, ran_out=st.booleans())


def test_factor_and_peak_are_drawn_with_the_target() -> None:
    runs = [PlotPoint(0.8, 0.85, False), PlotPoint(0.9, None, True), PlotPoint(0.9, 0.9, False)]
    assert plot_lines(runs, target=0.9) == [
        "100% |    X",
        " 95% |",
        " 90% |----f---*---",
        " 85% |o",
        " 80% |f",
        "     +------------",
        "      3 runs, oldest first",
        "      o peak  f factor  * both  X out of memory  - target 90%",
    ]


def test_no_runs_give_no_plot() -> None:
    assert plot_lines([], target=0.9) == []


@given(runs=st.lists(points, min_size=1, max_size=300), columns=st.integers(64, 120))
def test_no_line_is_too_long_and_all_is_plain(runs: list[PlotPoint], columns: int) -> None:
    lines = plot_lines(runs, target=0.9, columns=columns)
    assert max(map(len, lines)) <= columns
    assert all(line.isascii() and line == line.rstrip() for line in lines)
    assert any(line.startswith(" 90% |-") or "*" in line or "o" in line for line in lines)


@pytest.mark.parametrize("place", [0, 500, 9_999])
def test_thinning_hides_no_out_of_memory(place: int) -> None:
    runs = [PlotPoint(0.5, 0.9, number == place) for number in range(10_000)]
    lines = plot_lines(runs, target=0.9)
    assert lines[0].count("X") == 1
    assert max(map(len, lines)) <= PLOT_COLUMNS
    assert "10000 runs, oldest first; up to 143 of them in a column" in lines[-2]
