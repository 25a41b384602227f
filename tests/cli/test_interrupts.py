"""Ctrl-C ends can-train in one line with exit code 130, whatever it is doing, and with no traceback."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from guards.sources import PACKAGE

INTERRUPTED = 128 + signal.SIGINT
TRAIN = ("--model", "gat", "--dataset", "synthetic", "--device", "sim:64MiB", "--set", "dataset.synthetic.seconds=30")
STARTING = "starting: loading PyTorch\n"
ONE_LINE = "interrupted\n"
MOMENTS = 4
LONGEST_S = 8.0

INTERRUPTED_IMPORT = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    raise ImportError("the exception became another one") from None
"""


WAITING_ALREADY = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]); os.kill(os.getpid(), signal.SIGINT)"
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


def started(folder: Path, *arguments: str, fakes: Mapping[str, str] = {}, before: str = "") -> "subprocess.Popen[str]":
    """Starts a command in a folder; `fakes` are the texts of modules in place of others. The process that becomes the
    command's runs `before` first.
    """
    (folder / "fakes").mkdir(exist_ok=True)
    for name, text in fakes.items():
        (folder / "fakes" / f"{name}.py").write_text(text)
    command = [sys.executable, "-P", "-m", "can_train", *arguments]
    become = f"import os, signal; {before or None}; os.execv({sys.executable!r}, {command!r})"
    environment = {"PYTHONPATH": f"{folder / 'fakes'}:{PACKAGE.parent}", "CAN_TRAIN_HOME": str(folder / "state")}
    return subprocess.Popen(
        [sys.executable, "-c", become], cwd=folder, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_it_waits_while_python_starts(tmp_path: Path) -> None:
    process = started(tmp_path, "runs", before=WAITING_ALREADY)
    assert process.communicate() == ("", ONE_LINE)
    assert process.returncode == INTERRUPTED


@pytest.mark.parametrize("module", ["hydra", "torch"])
def test_it_is_not_lost_in_an_import_that_turns_it_into_another_error(tmp_path: Path, module: str) -> None:
    process = started(tmp_path, *TRAIN, fakes={module: INTERRUPTED_IMPORT})
    assert process.communicate() == ("", STARTING + ONE_LINE)
    assert process.returncode == INTERRUPTED


def test_a_process_that_ignores_it_goes_on(tmp_path: Path) -> None:
    going_on = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise OSError"
    process = started(tmp_path, "--version", fakes={"typer": going_on}, before=IGNORED)
    assert "OSError" in process.communicate()[1]


@pytest.mark.slow
def test_at_any_moment_of_the_first_seconds_it_is_told_in_a_line(tmp_path: Path) -> None:
    drawn = random.Random(1)
    for _ in range(MOMENTS):
        with started(tmp_path, *TRAIN) as process:
            time.sleep(drawn.uniform(0.2, LONGEST_S))
            process.send_signal(signal.SIGINT)
            _, complaints = process.communicate()
        assert process.returncode == INTERRUPTED, complaints
        assert "Traceback" not in complaints
        assert "Error" not in complaints
        # Once there is a run, the command that continues it is the line.
        assert complaints.endswith(ONE_LINE) or "note: This continues the run:\n" in complaints


@pytest.mark.slow
def test_after_the_first_steps_it_is_told_how_to_go_on(tmp_path: Path) -> None:
    with started(tmp_path, *TRAIN, "--epochs", "100") as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("  1/100"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate()
    assert process.returncode == INTERRUPTED
    assert "note: Stopped by a signal; saved at step" in complaints
    assert ONE_LINE not in complaints
