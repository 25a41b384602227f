"""Runs of the command line in processes of their own: to their end, or killed on the way and resumed."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 240
"""Longest training, on a machine that does other things too."""


def command(folder: Path, state: Path, *words: str) -> list[str]:
    """A command line whose runs lie in a folder."""
    return [sys.executable, "-m", "can_train", *words, "--runs-dir", str(folder / "runs"), "--state-dir", str(state)]


def finish(folder: Path, state: Path, *words: str) -> str:
    """Runs a command to its end; returns what it said on the way."""
    done = subprocess.run(
        command(folder, state, *words), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def finish_killed(folder: Path, state: Path, words: Sequence[str], *, at: Sequence[int]) -> None:
    """Trains to the end, killed with SIGKILL at each checkpoint of some steps, and resumed."""
    for step in at:
        process = subprocess.Popen(command(folder, state, *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while _saved_step(folder) < step:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            process.kill()
            process.wait()
        words = ("resume", only_run(folder).name)
    finish(folder, state, *words)


def only_run(folder: Path) -> Path:
    """The run in a folder."""
    (run,) = (folder / "runs").iterdir()
    return run


def _saved_step(folder: Path) -> int:
    manifests = list(folder.glob("runs/*/checkpoints/manifest.json"))
    return int(json.loads(manifests[0].read_text())["checkpoints"][0]["step"]) if manifests else 0
