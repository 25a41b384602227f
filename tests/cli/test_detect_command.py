"""`can-train detect` as a person gives it: what it prints, how it ends, and how it refuses."""

import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from can_train.cli.main import main
from fakes.candump import candump
from fakes.processes import TIMEOUT_S, Command
from fakes.random_bus import injected_frames
from fakes.trained_runs import finished_run, injected_log

Line = Callable[..., tuple[str, str]]


def run() -> Path:
    return finished_run("gat", log=injected_log, training__epochs=12, training__micro_batch_size=64,
                        mode__baselines=False)  # fmt: skip


def text(size: int = 4_000) -> str:
    frames = injected_frames(size, seed=1)
    return candump(replace(frames, timestamp=frames.timestamp + np.arange(size) // 320 * 1.5))


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Line:
    """Gives the command with an input; returns standard output and standard error."""
    path = tmp_path / "input.log"
    path.write_text(text())

    def said(*arguments: str, code: int = 0) -> tuple[str, str]:
        places = () if "--input" in arguments else ("--input", str(path))
        assert main(["detect", str(run()), *arguments, *places, "--state-dir", str(tmp_path / "state")]) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured.out, captured.err

    return said


def test_alarms_stand_on_standard_output_and_the_summary_on_standard_error(line: Line) -> None:
    out, err = line("--hold", "2/3")
    alarms = [each for each in out.splitlines() if " s: ALARM since " in each]
    assert len(alarms) > 3
    assert len([each for each in out.splitlines() if ": alarm ended, since " in each]) == len(alarms)
    assert "4,000 frames in " in err
    assert f"{len(alarms)} alarms." in err


def test_json_is_one_event_a_line(line: Line) -> None:
    out, _ = line("--json", "--explain", "--alarms-per-hour", "100")
    raised = [event for event in map(json.loads, out.splitlines()) if event["event"] == "alarm"]
    assert {"time", "start_time", "score", "threshold", "reasons"} <= set(raised[0])
    assert {"id", "known", "frames", "share", "properties"} <= set(raised[0]["reasons"][0])
    assert json.loads(line("--json", "--calibrate", "2s")[0].splitlines()[0])["event"] == "calibrated"


def test_the_alarm_command_gets_each_alarm_and_its_end_as_json(line: Line, tmp_path: Path) -> None:
    got = tmp_path / "what it got; $(touch shell)"
    out, err = line("--json", "--alarm-command", shlex.join(["tee", "-a", str(got)]))
    events = [event for event in map(json.loads, out.splitlines()) if event["event"] in ("alarm", "alarm_end")]
    assert len(events) > 6
    assert [json.loads(each) for each in got.read_text().splitlines()] == events
    assert f"--alarm-command ran {len(events)} times." in err


def test_an_alarm_command_that_fails_is_told_once_and_ends_nothing(line: Line) -> None:
    plain, _ = line()
    out, err = line("--alarm-command", "false")
    assert out == plain
    assert " ".join(err.split()).count("--alarm-command failed: exit status 1; further failures are counted") == 1
    assert "times, all of them without success" in err


def test_a_run_is_found_as_everywhere(line: Line, tmp_path: Path) -> None:
    assert main(["detect", "last", "--runs-dir", str(run().parent), "--state-dir", str(tmp_path / "state"),
                 "--input", str(tmp_path / "input.log")]) == 0  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--input", "no_such_interface"), "CAN interface"),
        (("--input", ""), "--input is empty"),
        (("--channel", ""), "--channel is empty"),
        (("--channel", "can7"), "can7; the input has can0 (4,000 frames)"),
        (("--threshold", "nan"), "--threshold is not a finite number"),
        (("--threshold", "1", "--calibrate", "10s"), "both choose the threshold"),
        (("--calibrate", "ten"), "Write it like --calibrate 10s"),
        (("--hold", "0/3"), "with M ≤ N"),
        (("--alarms-per-hour", "-1"), "--alarms-per-hour is not more than 0"),
        (("--alarm-command", ""), "--alarm-command is empty"),
        (("--alarm-command", "notify 'all"), "No closing quotation"),
        (("--alarm-command", "no_such_program --loud"), "begins with no program: no_such_program"),
        (("--alarm-command", str(Path(__file__))), "a file that cannot be executed"),
        (("--device", "quantum"), "Unknown device"),
        (("--tresh", "1"), "--threshold"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_in_a_sentence(line: Line, flags: tuple[str, ...], said: str) -> None:
    assert said in line(*flags, code=2)[1]


def test_an_error_is_a_line_of_json_as_each_event(line: Line) -> None:
    out, _ = line("--json", "--hold", "0/3", code=2)
    (text,) = out.splitlines()
    assert json.loads(text)["error"]["exit_code"] == 2


def test_a_task_without_live_detection_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", str(tmp_path), "--runs-dir", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


# Processes of their own


class Detection:
    """`can-train detect --json` between two pipes: frames go in, events come out."""

    def __init__(self, tmp_path: Path, *flags: str) -> None:
        (stdin, frames), (events, stdout) = os.pipe(), os.pipe()
        words = ("detect", str(run()), "--state-dir", str(tmp_path / "state"), "--json", *flags)
        self.process = Command(*words, streams={0: stdin, 1: stdout})
        os.close(stdin)
        os.close(stdout)
        self.frames, self.events = open(frames, "w"), open(events)  # noqa: PTH123, SIM115

    def feed(self, text: str) -> None:
        self.frames.write(text)
        self.frames.flush()

    def next_event(self) -> dict[str, Any]:
        return dict(json.loads(self.events.readline()))

    def end(self) -> tuple[int, str, str]:
        """Waits for its end; returns its exit status, the events that nobody has read, and its standard error."""
        out = "" if self.events.closed else self.events.read()
        code, err = self.process.wait(), self.process.stderr
        assert "Traceback" not in err
        return code, out, err


Start = Callable[..., Detection]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as at_the_end:

        def start(*flags: str) -> Detection:
            detection = Detection(tmp_path, *flags)
            at_the_end.enter_context(detection.process)
            at_the_end.enter_context(detection.events)
            at_the_end.callback(close_anyway, detection.frames)
            return detection

        yield start


def close_anyway(frames: IO[str]) -> None:
    with suppress(BrokenPipeError):
        frames.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_summary(number: signal.Signals, started: Start) -> None:
    detection = started()
    detection.feed(text())
    # The pipe is still open: alarms are told before the input ends, and then that the bus is silent.
    assert detection.next_event()["event"] == "alarm"
    while detection.next_event()["event"] != "silence":
        pass
    detection.process.send_signal(number)
    code, _, err = detection.end()
    assert code == 128 + number
    assert "4,000 frames in " in err
    assert "200 windows" in err


@pytest.mark.slow
def test_ctrl_c_in_an_alarm_tells_its_end(started: Start) -> None:
    # All windows are flagged, so that alarms go on until somebody stops watching, or the bus is silent.
    detection = started("--threshold", "-1000")
    detection.feed(text())
    raised = detection.next_event()
    assert raised["event"] == "alarm"
    detection.process.send_signal(signal.SIGINT)
    code, out, err = detection.end()
    assert code == 130
    kinds = [raised["event"], *(json.loads(line)["event"] for line in out.splitlines())]
    assert kinds[-1] == "alarm_end"
    assert kinds.count("alarm") == kinds.count("alarm_end")
    assert "of them flagged" in err


@pytest.mark.slow
def test_silence_ends_an_alarm_while_the_pipe_is_open(started: Start) -> None:
    detection = started("--threshold", "-1000")
    detection.feed(text())
    kinds = [detection.next_event()["event"]]
    while kinds[-1] != "silence":
        kinds.append(detection.next_event()["event"])
    assert kinds[-3:] == ["alarm", "alarm_end", "silence"]
    detection.process.send_signal(signal.SIGINT)
    code, out, err = detection.end()
    assert (code, out) == (130, "")
    assert "200 of them flagged" in err


@pytest.mark.slow
def test_a_pipe_of_which_nothing_is_a_frame_is_refused_while_it_is_open(started: Start) -> None:
    detection = started()
    detection.feed("hello\n" * 200)
    code, _, err = detection.end()
    assert code == 2
    assert "none of the first 100 lines is; the first is 'hello'" in err


@pytest.mark.slow
def test_the_end_of_the_pipe_ends_it(started: Start) -> None:
    detection = started()
    detection.feed(text() + "(1.5) can0 12A#0\n")
    detection.frames.close()
    code, out, err = detection.end()
    assert code == 0
    assert json.loads(out.splitlines()[-1])["event"] == "alarm_end"
    assert "1 line is malformed and left out" in err


@pytest.mark.slow
def test_a_reader_that_goes_ends_it_without_a_traceback(started: Start) -> None:
    detection = started()
    detection.feed(text(1_000))
    assert detection.next_event()["event"] == "alarm"
    detection.events.close()
    until = time.monotonic() + TIMEOUT_S
    while detection.process.is_alive and time.monotonic() < until:
        try:
            detection.feed(text())
        except BrokenPipeError:
            break
    code, _, _ = detection.end()
    assert code == 128 + signal.SIGPIPE
