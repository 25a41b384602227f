"""What a run does is read back from real trackers; one that fails or hangs is said once, and stops nothing."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import copy
from time import monotonic, sleep
from types import SimpleNamespace

import pytest

from can_train.config.resolved import TRACKERS, PathSettings
from can_train.errors import ConfigError
from can_train.io.records import parse_object, text_or_nothing
from can_train.runs import trackers
from can_train.runs.trackers import (
    Figures,
    TrackedRun,
    check_packages,
    read_batches,
    scores,
    tracked,
    unseen,
)
from can_train.training import train
from fakes.line_fit import LineTask, Notices, fixed, line_parts
from fakes.tracked_runs import Read, read_back
from fakes.trained_runs import finished_run

PATIENCE_S = 120  # for a process on a busy machine


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Nobody's server and nobody's account, and as long as it takes to write everything."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
            patch.delenv(name)
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr(trackers, "_FINISH_S", PATIENCE_S)
        yield


@pytest.fixture(scope="module")
def folder(alone: None) -> Path:
    """A run that all trackers were shown."""
    return finished_run("gat", paths__tracker=",".join(TRACKERS))


@pytest.fixture(params=TRACKERS)
def shown(request: pytest.FixtureRequest, folder: Path) -> Read:
    return read_back(request.param, folder)


def test_each_step_has_its_loss_and_its_micro_batch(folder: Path, shown: Read) -> None:
    result = json.loads((folder / "result.json").read_text())
    for name in ("train/loss", "train/micro_batch_size"):
        assert [step for step, _ in shown.figures[name]] == list(range(1, result["steps"] + 1))
    assert max(size for _, size in shown.figures["train/micro_batch_size"]) == result["micro_batch_size"]


def test_each_epoch_has_what_the_metrics_have(folder: Path, shown: Read) -> None:
    epoch, validation = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    for name in ("batch_size_safety_factor", "peak_memory_pct", "lr", "ooms_rescued"):
        assert shown.figures[name] == [(epoch["step"], pytest.approx(epoch[name]))]
    assert shown.figures["epoch/classification"] == [(epoch["step"], pytest.approx(epoch["train"]["classification"]))]
    assert shown.figures["validation_loss"] == [(epoch["step"], pytest.approx(validation["validation_loss"]))]


def test_each_test_folder_has_its_scores(folder: Path, shown: Read) -> None:
    result = json.loads((folder / "result.json").read_text())
    for name, test in result["judgement"]["test"].items():
        assert shown.figures[f"test/{name}/mcc"] == [(result["steps"], pytest.approx(test["model"]["mcc"]))]


def test_settings_are_parameters(shown: Read) -> None:
    training = shown.settings.get("training", {})
    assert float(training.get("lr") or shown.settings["training.lr"]) == pytest.approx(1e-3)
    assert (training.get("optimizer") or shown.settings["training.optimizer"]) == "adamw"


def test_a_run_that_ended_well_is_finished(shown: Read) -> None:
    assert shown.ends in ([], ["FINISHED"], ["0"])


def tracked_run(folder: Path) -> TrackedRun:
    (folder / "run-1").mkdir(parents=True, exist_ok=True)
    return TrackedRun(run_id="run-1", folder=str(folder / "run-1"), dataset="roads", key="roads_gat",
                      settings={"training": {"lr": 0.5}})  # fmt: skip


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + PATIENCE_S
    while not condition():
        assert monotonic() < deadline
        sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_a_resumed_run_goes_on_without_a_step_twice(tmp_path: Path, folder: Path, name: str) -> None:
    # To make the tables takes MLflow seconds.
    copy(folder.parent / "mlflow.db", tmp_path)
    run, notices = tracked_run(tmp_path), Notices()
    with suppress(SystemExit), tracked(run, [name], notices) as (first,):
        for step in range(1, 6):
            first.track(step, {"train/loss": 1 / step})
        # A person looks at it while it trains.
        state = tmp_path / "run-1" / "trackers" / f"{name}.json"
        wait_until(lambda: parse_object(text_or_nothing(state)).get("last_steps") == {"train/loss": 5})
        raise SystemExit(143)
    stopped = read_back(name, tmp_path / "run-1")
    with tracked(run, [name], notices) as (second,):
        for step in range(3, 9):
            second.track(step, {"train/loss": 1 / step})
        second.track(8, {"validation_loss": 0.25})
    read = read_back(name, tmp_path / "run-1")
    assert read.figures["train/loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 9)]
    assert read.figures["validation_loss"] == [(8, 0.25)]
    assert (read.runs, notices.texts) == (1, [])
    assert stopped.ends in ([], ["KILLED"], ["1"])
    assert read.ends in ([], ["FINISHED"], ["1", "0"])


@pytest.mark.slow
def test_a_task_without_data_sets_to_choose_from_is_tracked_by_mlflow(tmp_path: Path, folder: Path) -> None:
    copy(folder.parent / "mlflow.db", tmp_path)
    notices = Notices()
    with tracked(replace(tracked_run(tmp_path), dataset=""), ["mlflow"], notices) as (tracker,):
        tracker.track(1, {"train/loss": 1.0})
    assert notices.texts == []
    assert read_back("mlflow", tmp_path / "run-1").figures["train/loss"] == [(1, 1.0)]


class Kept:
    """A tracker that keeps what it is sent."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float | None]]] = []

    def track(self, step: int, values: Mapping[str, float | None]) -> None:
        self.points.append((step, dict(values)))


def test_a_rescue_is_shown_at_its_step(tmp_path: Path) -> None:
    kept, parts = Kept(), line_parts(tmp_path, LineTask(fail_above=20), epochs=1, batch_size=30, micro_batch_size=30)
    parts.trackers = [kept]
    with parts.stops.installed():
        train.train(train.make_session(parts, fixed(0.5)))
    steps = [values for _, values in kept.points if "train/loss" in values]
    assert [values.get("train/ooms_rescued") for values in steps] == [1, None]
    assert {values["train/micro_batch_size"] for values in steps} <= {14, 15}


def test_of_several_ranks_the_first_one_tracks(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, settings={"paths.tracker": "tensorboard"})
    parts.ranks = SimpleNamespace(is_first=False)
    with train._tracked(parts) as started:
        assert not started


@pytest.fixture
def of_my_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `wandb` that a test writes, which the tracker's process imports."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "wandb.py"


@pytest.mark.slow
def test_one_that_fails_is_said_once_and_the_run_goes_on(tmp_path: Path, of_my_own: Path) -> None:
    of_my_own.write_text("raise RuntimeError('no such project\\nand more')")
    notices = Notices()
    with tracked(tracked_run(tmp_path), ["wandb"], notices) as (tracker,):
        while not notices.texts:
            tracker.track(1, {"train/loss": 1.0})
        tracker.track(2, {"train/loss": 1.0})
    assert notices.texts == ["The tracker wandb failed, and the run goes on without it: no such project"]
    assert "and more" in (tmp_path / "run-1" / "trackers" / "wandb.log").read_text()


@pytest.mark.slow
def test_one_that_hangs_is_said_once_and_left_behind(
    tmp_path: Path, of_my_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_my_own.write_text("import time\ntime.sleep(1000)")
    monkeypatch.setattr(trackers, "_FINISH_S", 0.1)
    notices = Notices()
    with tracked(tracked_run(tmp_path), ["wandb"], notices) as (tracker,):
        # More than pipe and memory hold: what waits for the process must not wait here.
        for step in range(60_000):
            tracker.track(step, {"train/loss": 1.0})
    pid = tracker._process.pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(notices.texts) == 1
    assert f"wandb is still busy 0 s after the run's end, and goes on by itself (process {pid})" in notices.texts[0]
    assert tracker._left_out > 0


@pytest.mark.slow
def test_one_that_does_not_answer_in_time_is_ended(
    tmp_path: Path, of_my_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the process's own clock would: it hangs for five minutes first.
    of_my_own.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGALRM)")
    notices = Notices()
    with tracked(tracked_run(tmp_path), ["wandb"], notices) as (tracker,):
        tracker._process.wait()
    assert notices.texts == ["The tracker wandb did not answer for 300 s, and the run went on without it"]


@pytest.mark.slow
def test_one_that_was_too_slow_says_how_much_is_missing(
    tmp_path: Path, of_my_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It starts when all has been sent.
    of_my_own.write_text(f"""
import time
from pathlib import Path
from unittest.mock import MagicMock
while not Path({str(tmp_path / "go")!r}).exists():
    time.sleep(0.01)
init, Settings = MagicMock(), MagicMock()
""")
    monkeypatch.setattr(trackers, "_MOST_UNSENT_BYTES", 1000)
    notices = Notices()
    with tracked(tracked_run(tmp_path), ["wandb"], notices) as (tracker,):
        for step in range(1000):
            tracker.track(step, {"train/loss": 1.0})
        left_out = tracker._left_out
        (tmp_path / "go").touch()
    assert left_out > 0
    assert notices.texts == [f"The tracker wandb was too slow: {left_out} figures are missing"]


@pytest.mark.slow
def test_nobody_is_asked_to_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    notices = Notices()
    with tracked(tracked_run(tmp_path), ["wandb"], notices) as (tracker,):
        tracker.track(1, {"train/loss": 1.0})
    assert len(notices.texts) == 1
    assert "wandb is offline: No API key configured" in notices.texts[0]
    assert f"\n  wandb sync {tmp_path}/run-1/wandb/offline-run-*" in notices.texts[0]
    assert read_back("wandb", tmp_path / "run-1").figures["train/loss"] == [(1, 1.0)]


def test_a_missing_package_is_an_error_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match="--tracker mlflow needs packages that are not installed: mlflow") as raised:
        check_packages(["tensorboard", "mlflow"])
    assert f"\n  {sys.executable} -m pip install 'can-train[mlflow]'\n" in str(raised.value)


def test_a_server_of_mlflow_needs_no_database_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "alembic", None)
    with pytest.raises(ConfigError, match="alembic"):
        check_packages(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://somewhere")
    check_packages(["mlflow"])


def test_names_are_checked_and_each_counts_once() -> None:
    assert PathSettings(tracker="mlflow, wandb,mlflow").trackers == ["mlflow", "wandb"]
    assert PathSettings().trackers == PathSettings(tracker="off").trackers == []
    with pytest.raises(ConfigError, match=r"Unknown tracker: 'tensorbord'.\nValid, nearest first: tensorboard"):
        PathSettings(tracker="mlflow,tensorbord")
    with pytest.raises(ConfigError, match=r"'wndb'.\nValid, nearest first: wandb, mlflow, off, tensorboard"):
        PathSettings(tracker="wndb")


def test_lines_are_read_in_batches_whatever_pieces_they_come_in() -> None:
    reading, writing = os.pipe()
    batches = read_batches(reading)
    os.write(writing, b'{"a": 1}\n{"a": 2')
    assert next(batches) == [{"a": 1}]
    os.write(writing, b"}\n")
    os.write(writing, b'{"a": 3}\n')
    os.close(writing)
    assert list(batches) == [[{"a": 2}, {"a": 3}]]
    os.close(reading)


def test_a_figure_of_a_step_is_written_once() -> None:
    last = {"loss": 4}
    assert unseen(Figures(step=4, time_s=0.0, values={"loss": 1.0, "new": 2.0}), last).values == {"new": 2.0}
    assert unseen(Figures(step=5, time_s=0.0, values={"loss": 1.0}), last).values == {"loss": 1.0}
    assert last == {"loss": 5, "new": 4}


def test_scores_are_those_of_the_model_in_each_test_set() -> None:
    judgement = {
        "threshold": 0.5,
        "rule": "text",
        "test": {"a": {"model": {"mcc": 0.5, "f1": None}, "baselines": {"one": {"mcc": 0.1}}}, "b": "broken"},
        "validation": {"mcc": 1},
        "references": {"x": 1.0},
        "units": [1.0],
        "worst": float("nan"),
    }
    assert scores(judgement) == {"threshold": 0.5, "test/a/mcc": 0.5, "validation/mcc": 1.0}
