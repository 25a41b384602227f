import io
import os
from pathlib import Path

import pytest

from can_train.cli.output import TerminalReporter, Verbosity, make_reporter
from can_train.errors import ConfigError
from can_train.io.records import open_to_append
from can_train.reporter import LineReporter, LoggedReporter

MARKUP = ("[/x]", "[bold]", "[link=x]", "[/__w/pair.cc:537]", ":warning:")


def test_a_pipe_gets_one_line_at_a_stages_end() -> None:
    stream = io.StringIO()
    reporter = LineReporter(stream)
    with reporter.stage("training", total=1200, unit="steps") as stage:
        for _ in range(1200):
            stage.advance(1, loss=0.25)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("training: 1,200/1,200 steps, loss 0.25, ")


def test_a_long_stage_says_how_far_it_is() -> None:
    stream = io.StringIO()
    with LineReporter(stream, interval_s=0).stage("reading", total=4 * 2**20, unit="bytes") as stage:
        stage.advance(2**20)
    assert stream.getvalue().splitlines()[0].startswith("reading: 1/4 MiB, 0:00 left")


def test_a_stage_of_unknown_length_counts() -> None:
    stream = io.StringIO()
    with LineReporter(stream).stage("finding", unit="trials") as stage:
        stage.advance(3, size=64)
    assert stream.getvalue().startswith("finding: 3 trials, size 64")


def test_a_notice_is_a_line_of_its_own() -> None:
    stream = io.StringIO()
    LineReporter(stream).notice("mind the gap")
    assert stream.getvalue() == "note: mind the gap\n"


def test_a_long_notice_is_broken_below_its_beginning_and_its_words_stay_whole() -> None:
    stream = io.StringIO()
    LineReporter(stream).notice(f"{'word ' * 20}\nPlan\n  {'x' * 90}")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("note: word word")
    assert lines[1].startswith("      word")
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-2:] == ["      Plan", f"        {'x' * 90}"]


def test_details_are_for_who_asks_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (False, True):
        stream = io.StringIO()
        LineReporter(stream, verbose=verbose).detail("  tuned limit    8 MiB")
        assert stream.getvalue() == "  tuned limit    8 MiB\n" * verbose
        TerminalReporter(verbose=verbose).detail("  tuned limit    8 MiB")
        assert ("tuned limit" in capsys.readouterr().err) == verbose


def test_who_asks_for_quiet_gets_it(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = make_reporter(Verbosity.of(quiet=True, verbose=False))
    reporter.notice("a notice")
    with reporter.stage("training") as stage:
        stage.advance()
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="cannot be combined"):
        Verbosity.of(quiet=True, verbose=True)


def test_a_terminal_shows_notices_with_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = TerminalReporter()
    with reporter.stage("training", total=2, unit="steps") as stage:
        stage.advance(1, loss=0.5)
        reporter.notice("[red]not markup[/red]")
    assert "[red]not markup[/red]" in capsys.readouterr().err


@pytest.mark.parametrize("text", MARKUP)
def test_text_like_markup_is_shown_as_it_is_in_a_bar_a_notice_and_details(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    reporter = TerminalReporter(verbose=True)
    with reporter.stage(f"reading {text}", total=2, unit=text) as stage:
        stage.advance(1, **{text: 0.5})
    reporter.notice(text)
    reporter.detail(text)
    *_, bar, notice, detail = (line for line in capsys.readouterr().err.splitlines() if text in line)
    assert bar.count(text) == 3
    # The first line after a bar shows the cursor again.
    assert (notice.removeprefix("\x1b[?25h"), detail) == (f"note: {text}", text)


def test_a_log_has_what_came_before_it_could_be_written_and_what_follows(tmp_path: Path) -> None:
    shown, path = io.StringIO(), tmp_path / "log.txt"
    reporter = LoggedReporter(LineReporter(shown))
    with reporter.stage("reading", total=2, unit="rows") as stage:
        stage.advance(2)
    with reporter.writing_to(lambda: open_to_append(path), "--- first"):
        reporter.notice("mind the gap")
        reporter.detail("it is wide")
        reporter.write("the file alone has this")
    with reporter.writing_to(lambda: open_to_append(path), "--- second"):
        reporter.notice("once more")
    head, read, *others = path.read_text().splitlines()
    assert (head, read[:18]) == ("--- first", "reading: 2/2 rows,")
    assert others == [
        "note: mind the gap", "it is wide", "the file alone has this", "--- second", "note: once more",
    ]  # fmt: skip
    assert shown.getvalue().splitlines() == [read, "note: mind the gap", "note: once more"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("missing/log.txt", "No such file or directory"), ("/dev/full", "not a regular file"),
     ("pipe", "not a regular file"), ("link", "a link, which is not followed")],
)  # fmt: skip
def test_a_log_that_cannot_be_written_stops_nothing_and_is_told(tmp_path: Path, name: str, why: str) -> None:
    shown, path = io.StringIO(), tmp_path / name
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    reporter = LoggedReporter(LineReporter(shown))
    with reporter.writing_to(lambda: open_to_append(path), "---"):
        reporter.notice("still here")
    told = " ".join(shown.getvalue().split())
    assert told == f"note: Notices are not written to the log: {path}: {why} note: still here"
    assert not (tmp_path / "precious").exists()
