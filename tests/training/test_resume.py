"""Real processes, really killed: the resumed run ends with the weights of one that was left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
TRAINING = ("--epochs", "2", "--checkpoint-every", "4", "--min-steps-per-epoch", "12")
DATA = ("--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5")
SETTINGS = (*TRAINING, *DATA, "--size", "student", "--device", "cpu", "--no-floors")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder that all runs here share, so that data is prepared once."""
    return tmp_path_factory.mktemp("state")


def command(folder: Path, state: Path, *arguments: str) -> list[str]:
    settings = [] if arguments[0] == "resume" else ["--state-dir", str(state), *SETTINGS]
    return [sys.executable, "-m", "can_train", *arguments, "--runs-dir", str(folder), *settings]


def finish(folder: Path, state: Path, *arguments: str) -> None:
    words = command(folder, state, *arguments)
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def started(folder: Path, state: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(folder, state, *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < limit, "what was waited for did not happen"
        time.sleep(0.005)


def checkpoint_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    manifests = list(folder.glob("*/checkpoints/manifest.json"))
    return int(json.loads(manifests[0].read_text())["checkpoints"][0]["step"]) if manifests else 0


def final_state(folder: Path) -> dict[str, Any]:
    manifest = next(folder.glob("*/checkpoints/manifest.json"))
    newest = json.loads(manifest.read_text())["checkpoints"][0]["file"]
    state: dict[str, Any] = torch.load(manifest.parent / newest, weights_only=True)
    return state


def losses(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in next(folder.glob("*/metrics.jsonl")).read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "epoch", "train", "validation_loss")} for line in lines]


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Compares two checkpoints bit by bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    else:
        assert one == other, where


@pytest.fixture(scope="module", params=["gat", "vgae"])
def left_alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, state: Path
) -> tuple[str, Path]:
    """A model, and the runs folder of one that nobody disturbed."""
    folder = tmp_path_factory.mktemp("runs")
    finish(folder, state, "--model", request.param)
    return request.param, folder


def assert_ends_like(folder: Path, undisturbed: Path) -> None:
    assert_same(final_state(folder), final_state(undisturbed))
    assert losses(folder) == losses(undisturbed)


@pytest.mark.parametrize("steps", [0, 4, 12, 16])
def test_a_run_killed_at_any_moment_ends_with_the_same_weights(
    left_alone: tuple[str, Path], state: Path, tmp_path: Path, steps: int
) -> None:
    model, undisturbed = left_alone
    with started(tmp_path, state, "--model", model) as process:
        wait_until(lambda: bool(list(tmp_path.glob("*/plan.json"))) and checkpoint_step(tmp_path) >= steps, process)
        process.kill()
    finish(tmp_path, state, "resume", next(tmp_path.iterdir()).name)
    assert_ends_like(tmp_path, undisturbed)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_resumed_run_ends_with_the_same_weights(
    left_alone: tuple[str, Path], state: Path, tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    model, undisturbed = left_alone
    with started(tmp_path, state, "--model", model) as process:
        wait_until(lambda: checkpoint_step(tmp_path) >= 4, process)
        process.send_signal(sent)
        assert process.wait(TIMEOUT_S) == status
    finish(tmp_path, state, "resume", next(tmp_path.iterdir()).name)
    assert_ends_like(tmp_path, undisturbed)


def test_a_run_killed_again_and_again_ends_with_the_same_weights(
    left_alone: tuple[str, Path], state: Path, tmp_path: Path
) -> None:
    model, undisturbed = left_alone
    arguments = ["--model", model]
    for steps in (4, 8, 20):
        with started(tmp_path, state, *arguments) as process:
            wait_until(lambda steps=steps: checkpoint_step(tmp_path) >= steps, process)
            os.kill(process.pid, signal.SIGKILL)
        arguments = ["resume", next(tmp_path.iterdir()).name]
    finish(tmp_path, state, *arguments)
    assert_ends_like(tmp_path, undisturbed)


def test_a_run_that_ended_is_shown_again_unchanged(left_alone: tuple[str, Path], state: Path) -> None:
    _, folder = left_alone
    result = next(folder.glob("*/result.json"))
    before = result.read_bytes()
    finish(folder, state, "resume", result.parent.name)
    assert result.read_bytes() == before
