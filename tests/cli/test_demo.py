"""`can-train demo`: it shows what it says, in a folder of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from can_train.cli.demo import Trained, _comparison
from guards.sources import PACKAGE
from scripts.test_examples import differences, example

COLUMNS = 80
LINES = 40


def environment(folder: Path) -> dict[str, str]:
    folders = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "XDG_STATE_HOME": str(folder / "home")}
    for name in ("home", "tmp", "here"):
        (folder / name).mkdir()
    return {**os.environ, **folders, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}


def left_behind(folder: Path) -> list[Path]:
    # torch and torch_geometric leave caches of their own in the temporary folder.
    return [path for path in folder.rglob("*") if path.is_file() and "torch" not in str(path.relative_to(folder))]


@pytest.mark.slow
def test_the_demo_prints_what_its_page_shows_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: Path
) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CAN_TRAIN_PYTHON", str(warm_python))
    for made, shown in differences("demo", tmp_path / "here"):
        assert made == shown
    assert left_behind(tmp_path) == []


def test_the_page_of_the_demo_shows_a_split_a_rescue_what_was_learned_and_the_same_weights() -> None:
    text = example.shown("demo")
    lines = text.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) <= LINES
    for part in (
        r"in one piece",
        r"another process takes 45 MiB",
        r"Step 6: memory ran out (?:once|\d times); finished\s+in \d micro-batches",
        r"used 98\.\d% of what was found to fit",
        r"100\.0% may be used",
        r"agree to 1\d\s+decimal\s+places",
        r"Try next:",
    ):
        assert re.search(part, text), part


@pytest.mark.slow
def test_a_demo_that_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "can_train", "demo"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        while not list((tmp_path / "tmp").glob("can-train-demo-*/state")) and demo.poll() is None:
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        _, complaints = demo.communicate()
    assert demo.returncode == 128 + signal.SIGINT
    assert "Traceback" not in complaints
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("apart", "said"),
    [(0.0, "the same, to the last bit"), (3e-13, "agree to 12 decimal places"), (0.5, "agree to 0 decimal places")],
)
def test_the_comparison_says_how_far_weights_lie_apart(apart: float, said: str) -> None:
    weights = torch.linspace(-1, 1, 7, dtype=torch.float64)
    other = weights.clone()
    other[3] += apart
    text = _comparison(Trained(result={}, weights={"a": weights}), Trained(result={}, weights={"a": other}))
    assert said in text
    assert "7 weights" in text
