import re

import pytest
from rich.console import Console

from can_train.cli.output import print_tables
from can_train.reporter import TextTable

TWO = TextTable(
    "Title",
    ("key", "factor", "runs", "reason"),
    [("a_long_configuration_key", "0.871 ± 0.012", "5", "learned from 5 runs")],
    ["a note"],
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert Console().is_terminal


@pytest.mark.usefixtures("terminal")
def test_a_table_too_wide_for_its_terminal_becomes_paragraphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_tables([TWO])
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("a_long_configuration_key")
    assert lines[start + 1 : start + 3] == ["  factor 0.871 ± 0.012  runs 5", "  reason learned from 5 runs"]
    assert max(map(len, lines)) <= 40


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", range(40, 100, 3))
def test_no_heading_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_tables([TWO])
    shown = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert all(word in shown for word in (*TWO.columns[1:], *TWO.rows[0][0].split()))
    assert max(map(len, shown.splitlines())) <= columns


def test_a_pipe_gets_a_row_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables([TWO])
    assert "a_long_configuration_key 0.871 ± 0.012    5 learned from 5 runs" in capsys.readouterr().out


def test_remarks_below_a_table_fit_eighty_columns_in_a_pipe_and_brackets_in_cells_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remark = "recall by kind: " + ", ".join(f"kind_{number} 0.500 of 10" for number in range(9))
    print_tables([TextTable("Title", ("name", "value"), [("hidden", "[bold]")], [remark])])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines).endswith(remark)
    assert any(line.split() == ["hidden", "[bold]"] for line in lines)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", ["60", "400"])
def test_text_like_markup_is_shown_as_it_is_in_every_part_of_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = "[/x] [bold] [link=x] :warning:"
    print_tables(
        [TextTable(f"title {text}", ("name", f"value {text}"), [(f"a {text}", f"b {text}")], [f"note {text}"])]
    )
    shown = " ".join(re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).split())
    assert all(f"{word} {text}" in shown for word in ("title", "value", "a", "b", "note"))


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", ["20", "60", "400"])
def test_no_part_of_a_table_changes_what_a_terminal_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = "a\x1b]0;x\x07b\x9b2J"
    print_tables([TextTable(text, (text, "value"), [(text, text), (text, f"{text}\nmore")], [text])])
    shown = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)
    assert re.sub(r"\s", "", shown).count(r"a\x1b]0;x\x07b\x9b2J") >= 6
