"""Real processes, really killed: the resumed run ends with the weights of one that was left alone."""

import json
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fakes.bitwise import assert_ends_like
from fakes.processes import TIMEOUT_S, Command

pytestmark = pytest.mark.slow

TRAINING = ("--epochs", "2", "--checkpoint-every", "4", "--min-steps-per-epoch", "12")
DATA = ("--dataset", "synthetic", "--set", "dataset.synthetic.seconds=8")
SETTINGS = (*TRAINING, *DATA, "--size", "student", "--device", "cpu", "--no-baselines")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder that all runs here share, so that data is prepared once."""
    return tmp_path_factory.mktemp("state")


Undisturbed = Callable[[str], Path]
"""Model → the runs folder of one that nobody disturbed."""


def started(folder: Path, state: Path, *arguments: str) -> Command:
    settings = [] if arguments[0] == "resume" else ["--state-dir", str(state), *SETTINGS]
    return Command(*arguments, "--runs-dir", str(folder), *settings)


def finish(folder: Path, state: Path, *arguments: str) -> None:
    with started(folder, state, *arguments) as process:
        assert process.wait() == 0, process.stderr


def wait_until(condition: Callable[[], bool], process: Command) -> None:
    limit = time.monotonic() + TIMEOUT_S
    while not condition():
        ended = not process.is_alive
        assert condition() or not ended, process.stderr
        assert time.monotonic() < limit, "what was waited for did not happen"
        time.sleep(0.005)


def checkpoint_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    manifests = list(folder.glob("*/checkpoints/manifest.json"))
    return int(json.loads(manifests[0].read_text())["checkpoints"][0]["step"]) if manifests else 0


def metrics_lines(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl"))


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory, state: Path) -> Undisturbed:
    @cache
    def run(model: str) -> Path:
        folder = tmp_path_factory.mktemp(model)
        finish(folder, state, "--model", model)
        return folder

    return run


def assert_folder_ends_like(folder: Path, undisturbed: Path) -> None:
    assert_ends_like(only_run(folder), only_run(undisturbed))


def only_run(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def run_id(folder: Path) -> str:
    return only_run(folder).name


def plan_exists(folder: Path) -> bool:
    return bool(list(folder.glob("*/plan.json")))


@pytest.mark.parametrize(
    ("model", "step", "lines", "delay_s"),
    [
        ("gat", 0, 0, 0.0),
        ("gat", 4, 0, 0.1),
        ("vgae", 4, 0, 0.1),
        ("gat", 4, 2, 0.0),
        ("vgae", 4, 4, 0.0),
        ("gat", 4, 4, 0.05),
    ],
    ids=[
        "before the first step",
        "inside an epoch",
        "inside an epoch that draws noise",
        "between epochs",
        "after the last epoch",
        "while judging",
    ],
)
def test_a_run_killed_at_any_moment_ends_with_the_same_weights(
    left_alone: Undisturbed, state: Path, tmp_path: Path, model: str, step: int, lines: int, delay_s: float
) -> None:
    with started(tmp_path, state, "--model", model) as process:
        wait_until(lambda: plan_exists(tmp_path) and checkpoint_step(tmp_path) >= step, process)
        # Each epoch leaves two: of its training, and of its validation.
        wait_until(lambda: metrics_lines(tmp_path) >= lines, process)
        time.sleep(delay_s)
        process.kill()
    finish(tmp_path, state, "resume", run_id(tmp_path))
    assert_folder_ends_like(tmp_path, left_alone(model))


def test_a_run_ended_again_and_again_ends_with_the_same_weights(
    left_alone: Undisturbed, state: Path, tmp_path: Path
) -> None:
    arguments = ["--model", "gat"]
    for step, sent, status in ((4, signal.SIGTERM, 143), (8, signal.SIGKILL, -9), (16, signal.SIGINT, 130)):
        with started(tmp_path, state, *arguments) as process:
            wait_until(lambda step=step: checkpoint_step(tmp_path) >= step, process)
            process.send_signal(sent)
            assert process.wait() == status
        arguments = ["resume", run_id(tmp_path)]
    finish(tmp_path, state, *arguments)
    assert_folder_ends_like(tmp_path, left_alone("gat"))


@pytest.mark.parametrize("prepared", [".synthetic-*/*/*/*.csv", "synthetic-*"], ids=["writing logs", "making graphs"])
def test_data_whose_preparation_was_killed_is_prepared_again(
    left_alone: Undisturbed, tmp_path: Path, prepared: str
) -> None:
    state, runs = tmp_path / "state", tmp_path / "runs"
    with started(runs, state, "--model", "gat") as process:
        wait_until(lambda: bool(list((state / "cache").glob(prepared))), process)
        process.kill()
    assert not list(runs.glob("*"))
    finish(runs, state, "--model", "gat")
    assert_folder_ends_like(runs, left_alone("gat"))


def test_a_run_that_ended_is_shown_again_unchanged_unless_its_result_was_edited(
    left_alone: Undisturbed, state: Path
) -> None:
    folder = left_alone("gat")
    result = folder / run_id(folder) / "result.json"
    before = result.read_bytes()
    finish(folder, state, "resume", result.parent.name)
    assert result.read_bytes() == before
    # Somebody edited it since.
    result.write_text(json.dumps({**json.loads(before), "epochs": "many"}))
    with started(folder, state, "resume", result.parent.name) as process:
        assert process.wait() == 2
        assert "The run's result is damaged" in process.stderr
    result.write_bytes(before)
