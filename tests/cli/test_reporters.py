import io

import pytest

from can_train.cli.output import LineReporter, TerminalReporter


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


def test_a_terminal_shows_notices_with_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = TerminalReporter()
    with reporter.stage("training", total=2, unit="steps") as stage:
        stage.advance(1, loss=0.5)
        reporter.notice("[red]not markup[/red]")
    assert "[red]not markup[/red]" in capsys.readouterr().err
