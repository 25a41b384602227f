"""Runs of the command line in processes of their own: to their end, or killed on the way and resumed."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from fakes.processes import TIMEOUT_S, Command


def command(folder: Path, state: Path, *words: str) -> Command:
    """A command whose runs lie in a folder."""
    return Command(*words, "--runs-dir", str(folder / "runs"), "--state-dir", str(state))


def finish(folder: Path, state: Path, *words: str) -> str:
    """Runs a command to its end; returns what it said on the way."""
    with command(folder, state, *words) as process:
        assert process.wait() == 0, process.stderr
        return process.stderr


def finish_killed(folder: Path, state: Path, words: Sequence[str], *, at: Sequence[int]) -> None:
    """Trains to the end, killed with SIGKILL at each checkpoint of some steps, and resumed."""
    for step in at:
        with command(folder, state, *words) as process:
            deadline = time.monotonic() + TIMEOUT_S
            while _saved_step(folder) < step:
                assert process.is_alive, process.stderr
                assert time.monotonic() < deadline
                time.sleep(0.005)
        words = ("resume", only_run(folder).name)
    finish(folder, state, *words)


def only_run(folder: Path) -> Path:
    """The run in a folder."""
    (run,) = (folder / "runs").iterdir()
    return run


def _saved_step(folder: Path) -> int:
    manifests = list(folder.glob("runs/*/checkpoints/manifest.json"))
    return int(json.loads(manifests[0].read_text())["checkpoints"][0]["step"]) if manifests else 0
