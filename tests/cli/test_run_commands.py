"""A run of this machine from its submission to its end: followed, cancelled, resumed, submitted again; all with real
processes and signals.
"""

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from can_train.cli.main import main
from fakes.processes import TIMEOUT_S, Command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("data_prepared_once")]


class Line:
    """Calls can-train with folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.flags = ("--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state"))

    def start(self, *arguments: str) -> Command:
        return Command(*arguments, *self.flags, python=Path(sys.executable))

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Runs a command in this process; returns what it prints."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = main([*arguments, *self.flags])
        assert status == code, out.getvalue() + err.getvalue()
        return out.getvalue() + err.getvalue()

    def status(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", run, "--json"))
        return found

    def wait(self, run: str, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        limit = time.monotonic() + TIMEOUT_S
        while not found(status := self.status(run)):
            assert time.monotonic() < limit, status
            time.sleep(0.2)
        return status


def training(epochs: int, *more: str) -> tuple[str, ...]:
    return ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5",
            "--device", "cpu", "--no-baselines", "--epochs", str(epochs), *more)  # fmt: skip


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: Path) -> Line:
    monkeypatch.setattr(sys, "executable", str(warm_python))
    return Line(tmp_path)


def submitted(line: Line, epochs: int) -> str:
    out = line(*training(epochs, "--submit", "--cluster", "local"))
    return next(word for word in out.split() if "synthetic_gat" in word)


def test_a_run_is_followed_to_its_end_and_its_like_is_submitted_with_a_change(line: Line) -> None:
    run = submitted(line, 1)
    followed = line("logs", run, "-f")
    assert "Result: " in followed
    assert f"Run {run}: finished" in followed
    assert "Result: " in line("logs", run)
    assert "Result: " in (Path(line.status(run)["path"]) / "log.txt").read_text()
    over = line("resume", run)
    assert "The run has finished, and nothing is left to train" in over
    assert "Result: " in over
    out = line("resubmit", run, "--set", "training.seed=7", "--set", "training.epochs=2")
    again = next(word for word in out.split() if "synthetic_gat" in word)
    assert line.wait(again, lambda status: not status["live"])["epoch"] == 2
    assert "epochs: 2" in (Path(line.status(again)["path"]) / "config.yaml").read_text()


def test_a_run_is_cancelled_saved_and_goes_on_from_there(line: Line) -> None:
    run = submitted(line, 5000)
    line.wait(run, lambda status: (status["step"] or 0) > 0)
    assert "is queued or running" in line("resume", run, code=2)
    assert "cancelled" in line("cancel", run)
    cancelled = line.status(run)
    assert (cancelled["state"], cancelled["live"]) == ("cancelled", False)
    assert cancelled["saved_step"] == cancelled["step"]
    assert "has ended already" in line("cancel", run)
    # In the background, as before.
    assert f"Run {run} goes on as process" in line("resume", run)
    working = line.wait(run, lambda status: status["state"] == "running" and len(status["attempts"]) == 2)
    assert working["step"] >= cancelled["step"]
    assert "cancelled" in line("cancel", run)
    with line.start("resume", run, "--here") as resumed:
        line.wait(run, lambda status: status["state"] == "running" and len(status["attempts"]) == 3)
        resumed.send_signal(signal.SIGTERM)
        assert resumed.wait() == 128 + signal.SIGTERM


def test_a_run_that_was_killed_in_its_terminal_is_seen_to_be(line: Line) -> None:
    with line.start(*training(5000)) as process:
        limit = time.monotonic() + TIMEOUT_S
        # Its folder is there a moment before it is known that it runs.
        while not (found := json.loads(line("runs", "--json"))) or found[0]["state"] != "running":
            assert time.monotonic() < limit
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    killed = line.status(found[0]["run_id"])
    assert (killed["state"], killed["certain"]) == ("failed", True)
    assert "without a record" in killed["why"]


def notices(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("note: ")]


def test_ctrl_c_prints_the_line_that_continues_the_run_whose_log_has_all_of_it(line: Line) -> None:
    with line.start(*training(5000)) as process:
        limit = time.monotonic() + TIMEOUT_S
        while not (found := json.loads(line("runs", "--json"))) or not found[0]["step"]:
            assert time.monotonic() < limit
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        err = process.stderr
    match = re.search(r"This continues the run:\n +can-train (resume .*)$", err, re.MULTILINE)
    assert match
    with line.start(*shlex.split(match[1])) as resumed:
        line.wait("last", lambda status: status["state"] == "running" and len(status["attempts"]) == 2)
        resumed.send_signal(signal.SIGINT)
        assert resumed.wait() == 128 + signal.SIGINT
        again = resumed.stderr
    log = line("logs", "last").splitlines()
    assert [text for text in log if text.startswith("--- ")][1:] != []
    assert notices(log) == notices((err + again).splitlines())


def test_watching_through_a_pipe_writes_a_line_for_each_change_until_ctrl_c(line: Line) -> None:
    run = submitted(line, 1)
    command = [sys.executable, "-P", "-m", "can_train", "runs", "--watch", *line.flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        seen = [watching.stdout.readline()]
        while "finished" not in seen[-1]:
            seen.append(watching.stdout.readline())
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=TIMEOUT_S)
    assert watching.returncode == 0
    assert all(each.startswith(run) for each in seen)
    assert len(seen) == len(set(seen))
