"""What a training prints: on one screen, in a pipe and in a terminal; less with -q, more with -v."""

import os
import pty
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fakes.processes import Command

COLUMNS = 80
LINES = 40
MAIN_JOB = (
    *("--model", "gat", "--size", "student", "--dataset", "synthetic", "--device", "sim:128MiB"),
    *("--set", "dataset.synthetic.seconds=15", "--batch-size", "256", "--epochs", "2"),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the lines are typed; the first one also prepares the data."""
    return tmp_path_factory.mktemp("here")


def environment(folder: Path) -> dict[str, str]:
    # A dumb terminal gets bars only once they are full, as they stay on the screen of another.
    terminal = {"TERM": "dumb", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    return {**os.environ, **terminal, "CAN_TRAIN_HOME": str(folder / "state")}


def printed(folder: Path, *arguments: str) -> tuple[list[str], list[str]]:
    """Runs a line in pipes; returns the lines of standard output and of standard error."""
    with Command(*arguments, folder=folder, variables=environment(folder)) as done:
        assert done.wait() == 0, done.stderr
        return done.stdout.splitlines(), done.stderr.splitlines()


def shown(folder: Path, *arguments: str) -> list[str]:
    """Runs a line in a terminal; returns the lines on it."""
    reader, writer = pty.openpty()
    streams = {1: writer, 2: writer}
    with Command(*arguments, folder=folder, variables=environment(folder), streams=streams) as process:
        os.close(writer)
        text = b""
        try:
            while part := os.read(reader, 2**16):
                text += part
        except OSError:
            pass  # The last writer has closed it.
        os.close(reader)
        assert process.wait() == 0, text.decode()
    return [line.rpartition("\r")[2].rstrip() for line in text.decode().replace("\r\n", "\n").split("\n")]


def assert_fits_and_is_whole(lines: Sequence[str]) -> None:
    text = "\n".join(lines)
    assert max(map(len, lines)) <= COLUMNS, text
    # Lines while it trains scroll away: how far a stage is on a slow machine, and one for each epoch.
    while_training = re.compile(r".* left, |starting: |epoch +train loss| +\d+/\d+ ")
    assert len([line for line in lines if not while_training.match(line)]) <= LINES, text
    parts = ("Plan: 256 samples a step (as asked for), 5 steps", "micro-batch", "predicted to peak at",
             "test_01 ", "test_06 ", "2 epochs, 10 steps", "Result: runs/")  # fmt: skip
    assert [part for part in parts if part not in text] == []
    heading = "folder MCC PR-AUC recall@1% alarms/h best baseline its MCC beaten"
    assert heading in [" ".join(line.split()) for line in lines]
    for word in ("tuned limit", "safety factor", "KiB ·", "flag_nothing  ", "recall by kind"):
        assert word not in text


def test_the_main_job_fits_a_screen_in_a_pipe_and_in_a_terminal(folder: Path) -> None:
    out, err = printed(folder, *MAIN_JOB)
    assert_fits_and_is_whole([*err, *out])
    assert_fits_and_is_whole(shown(folder, *MAIN_JOB))


def test_a_quiet_training_prints_its_result_only_and_a_verbose_one_every_detector(folder: Path) -> None:
    small = ("--set", "dataset.synthetic.seconds=5", "--epochs", "1", "--runs-dir", "few")
    quiet, complaints = printed(folder, *MAIN_JOB[:-2], *small, "-q")
    assert complaints == []
    assert any(line.startswith("Result: few/") for line in quiet)
    run = ("resume", next((folder / "few").iterdir()).name, "--runs-dir", "few")
    again, _ = printed(folder, *run, "--quiet")
    assert again == quiet
    verbose, _ = printed(folder, *run, "--verbose")
    assert verbose[-len(quiet) - 1 : -1] == quiet
    assert verbose[-1].startswith("More:   can-train show ")
    # A table of figures and one of bursts for each of the six folders.
    assert sum(line.startswith("flag_nothing ") for line in verbose) == 12
    assert any("recall by kind" in line for line in verbose)
    _, planned = printed(folder, *MAIN_JOB[:-2], *small, "-v")
    assert any(line.startswith("  safety factor  ") for line in planned)


def test_a_state_folder_that_cannot_be_written_is_said_once_and_at_the_start(
    folder: Path, data_prepared_once: None, warm_python: Path
) -> None:
    small = ("--set", "dataset.synthetic.seconds=5", "--epochs", "1", "--no-baselines")
    # Nobody, not even root, makes a folder there.
    state = "/proc/can-train"
    line = (*MAIN_JOB[:-2], *small, "--state-dir", state, "--runs-dir", "without")
    command = [str(warm_python), "-P", "-m", "can_train", *line]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    assert err[0] == "starting: loading PyTorch"
    note = " ".join(line.strip() for line in err[1:7])
    assert note.startswith(f"note: The state folder {state} cannot be written: ")
    assert "--state-dir" in note
    assert len([line for line in err if state in line]) == 1
    assert any(line.startswith("Result: without/") for line in out)
