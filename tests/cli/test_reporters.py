import io
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from can_train.cli.output import TerminalReporter, Verbosity, _Bar, make_reporter
from can_train.errors import ConfigError
from can_train.io.records import open_to_append
from can_train.reporter import EpochFigures, EpochTable, LineReporter, LoggedReporter, amount_text

MARKUP = ("[/x]", "[bold]", "[link=x]", "[/__w/pair.cc:537]", ":warning:")


def test_a_pipe_gets_one_line_at_a_stages_end() -> None:
    stream = io.StringIO()
    reporter = LineReporter(stream)
    with reporter.stage("training", total=1200, unit="steps") as stage:
        for _ in range(1200):
            stage.advance(1, loss=0.25)
    (line,) = stream.getvalue().splitlines()
    assert re.fullmatch(r"training: 1,200/1,200 steps, \d+\.\d s, loss 0\.25", line)


def test_a_long_stage_says_how_far_it_is() -> None:
    stream = io.StringIO()
    with LineReporter(stream, interval_s=0).stage("reading", total=4 * 2**20, unit="bytes") as stage:
        stage.advance(2**20)
    assert stream.getvalue().splitlines()[0].startswith("reading: 1/4 MiB, 0:00 left")


def test_a_stage_of_unknown_length_counts() -> None:
    stream = io.StringIO()
    with LineReporter(stream).stage("finding", unit="trials") as stage:
        stage.advance(3, size=64)
    assert re.fullmatch(r"finding: 3 trials, \d+\.\d s, size 64\n", stream.getvalue())


def test_the_time_left_counts_from_where_a_run_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("can_train.reporter.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with LineReporter(stream).stage("training", total=1000, unit="steps", done=900) as stage:
        now[0] = 3600.0
        stage.advance(10)
    # 10 steps took an hour, so the other 90 take nine.
    assert stream.getvalue().splitlines()[0] == "training: 910/1,000 steps, 9:00:00 left"


BARS = {
    30: "training  900/1,200 steps  0:00 left",
    50: "training  900/1,200 steps  0:00 left  epoch 2/4",
    80: "training  900/1,200 steps  0:00 left  epoch 2/4  loss 0.25  1,753/s  37.7 MiB",
    120: "training  ━━━━━━━━━━  900/1,200 steps  0:00 left  epoch 2/4  loss 0.25  1,753/s  37.7 MiB",
}


@pytest.mark.parametrize("columns", BARS)
def test_a_bar_shows_title_amount_and_time_whole_and_other_figures_where_there_is_room(columns: int) -> None:
    bar = _Bar("training", 1200, "steps", 600)
    bar.advance(300, epoch="epoch 2/4", loss=0.25, rate="1,753/s", peak="37.7 MiB")
    assert "".join(text for text, _ in bar.parts(columns)) == BARS[columns]


EPOCH = EpochFigures(
    epoch=3, epochs=12, training_loss=0.05892, validation_loss=0.0225, is_best=True, metric=("accuracy", 0.5),
    samples_per_second=1753.4, peak="37.7 MiB", seconds_left=18_130,
)  # fmt: skip
EPOCH_LINES = {
    50: ["epoch  train loss   val loss        time left",
         " 3/12     0.05892    0.02250  best    5:02:10"],
    60: ["epoch  train loss   val loss         accuracy  time left",
         " 3/12     0.05892    0.02250  best     0.5000    5:02:10"],
    80: ["epoch  train loss   val loss         accuracy  samples/s       peak  time left",
         " 3/12     0.05892    0.02250  best     0.5000      1,753   37.7 MiB    5:02:10"],
}  # fmt: skip


@pytest.mark.parametrize("columns", EPOCH_LINES)
def test_the_line_of_an_epoch_leaves_columns_out_and_cuts_none(columns: int) -> None:
    table = EpochTable()
    lines = table.lines(EPOCH, columns)
    assert lines == EPOCH_LINES[columns]
    assert max(map(len, lines)) <= columns
    assert [table.lines(EPOCH, columns) for _ in range(20)] == [lines[1:]] * 19 + [lines]


def test_the_columns_of_an_epoch_stay_where_they_are_and_a_new_one_has_its_heading() -> None:
    table = EpochTable()
    first, averaged = replace(EPOCH, epoch=1), replace(EPOCH, averaged_loss=0.02)
    not_validated = EpochFigures(epoch=2, epochs=12, samples_per_second=1753.4, peak="37.7 MiB")
    lines = [table.lines(each, 100) for each in (first, not_validated, averaged, not_validated)]
    assert [len(each) for each in lines] == [2, 1, 2, 1]
    assert "avg loss" in lines[2][0]
    # The peak ends in the same column, whatever an epoch lacks.
    for whole, lacking in ((lines[0][1], lines[1][0]), (lines[2][1], lines[3][0])):
        assert whole.index("37.7 MiB") == lacking.index("37.7 MiB")


def test_an_epoch_without_validation_metric_and_peak_shows_the_rest() -> None:
    heading, line = EpochTable().lines(EpochFigures(epoch=1, epochs=2, samples_per_second=12.345), 80)
    assert heading.split() == ["epoch", "train", "loss", "val", "loss", "samples/s", "peak", "time", "left"]
    assert line.split() == ["1/2", "–", "–", "12.35", "–", "0:00"]
    # Nothing has been trained since the run was resumed.
    (unknown,) = EpochTable().lines(EpochFigures(epoch=1, epochs=2, seconds_left=None), 80)[1:]
    assert unknown.split() == ["1/2", "–", "–", "–", "–", "–"]


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


def test_a_stage_of_less_than_a_mib_is_counted_in_kib() -> None:
    small, large = amount_text(98304, 307200, "bytes"), amount_text(2**20, 2**22, "bytes")
    assert (small, large, amount_text(1, 1, "steps")) == ("96/300 KiB", "1/4 MiB", "1/1 step")
