"""How many files a person opens to follow what can-train does: counted by running it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from can_train import MicroBatcher, get_safety_factor_db
from can_train.factors.observations import write_record
from fakes.random_bus import random_frames, write_log
from fakes.samples import KEY, observation
from guards.first_step import files, function_of
from guards.sources import PACKAGE

MAX_TO_FIRST_STEP = 35
MAX_OBSERVATION_TO_FACTOR = 10
MAX_OUT_OF_MEMORY_TO_RETRY = 8


class FilesRun:
    """Records the package's files in which a function is called between `start` and `stop`."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._functions: set[tuple[str, str]] = set()

    def start(self) -> None:
        sys.setprofile(lambda frame, event, _: self._record(frame.f_code) if event == "call" else None)

    def stop(self) -> None:
        sys.setprofile(None)
        self.files = files(self._functions)

    def _record(self, code: object) -> None:
        if found := function_of(code):  # type: ignore[arg-type]
            self._functions.add(found)


@pytest.mark.slow
def test_a_reader_reaches_the_first_optimizer_step_in_few_files(tmp_path: Path) -> None:
    log = write_log(tmp_path / "drive.csv", random_frames(40_000))
    line = ["--model", "gat", "--size", "student", "--dataset", str(log), "--device", "cpu", "--batch-size", "16"]
    places = ["--epochs", "1", "--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state")]
    ended = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("first_step.py")), *line, *places],
        env={**os.environ, "PYTHONPATH": f"{PACKAGE.parent}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert "training/train.py" in found["stack"]
    assert len(found["opened"]) <= MAX_TO_FIRST_STEP, found


def files_to_next_factor(folder: Path) -> list[str]:
    run = FilesRun()
    run.start()
    write_record(folder, observation())
    factor = get_safety_factor_db(folder).get_factor(KEY)
    run.stop()
    assert 0 < factor < 1
    return run.files


def test_a_reader_follows_an_observation_to_the_next_factor_in_few_files(tmp_path: Path) -> None:
    files_to_next_factor(tmp_path / "imports")
    found = files_to_next_factor(tmp_path / "state")
    assert "factors/store.py" in found
    assert len(found) <= MAX_OBSERVATION_TO_FACTOR, found


def out_of_memory_once(losses: Callable[[int, int], Tensor], run: FilesRun) -> Callable[[int, int], dict[str, object]]:
    calls = 0

    def losses_of(start: int, stop: int) -> dict[str, object]:
        nonlocal calls
        calls += 1
        if calls == 1:
            run.start()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        run.stop()
        return {"squares": (losses(start, stop), float(stop - start))}

    return losses_of


def test_a_reader_follows_an_out_of_memory_to_the_retry_in_few_files() -> None:
    model, samples, run = nn.Linear(3, 1), torch.ones(8, 3), FilesRun()
    squares = out_of_memory_once(lambda start, stop: model(samples[start:stop]).square().sum(), run)
    MicroBatcher(model).run(squares, 8)  # type: ignore[arg-type]
    assert "fit/rescue.py" in run.files
    assert len(run.files) <= MAX_OUT_OF_MEMORY_TO_RETRY, run.files
