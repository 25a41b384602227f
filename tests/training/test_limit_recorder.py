"""The process that records a run for its device, beside the reading of its data."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun
from can_train.fit.run_plan import RunPlan
from can_train.fit.search import NO_RECORDING
from can_train.memory.meters import RECORDED, CpuMeter, open_meter
from can_train.reporter import SilentReporter
from can_train.runs.run_folder import RunFolder
from can_train.training import limit_recorder
from can_train.training.limit_recorder import LimitRecorder
from can_train.training.report import detail_lines
from can_train.training.train import train_new
from fakes.own_tasks import CLASSIFIER, write_task

DEVICE = "sim:64MiB"


class Details(SilentReporter):
    """A reporter that keeps details."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def detail(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for a recorded process however slow the machine is: the tests of what it records are none of its speed."""
    monkeypatch.setattr(limit_recorder, "_WAIT_S", float(limit_recorder._LIMIT_S))


def own_run(folder: Path, text: str = CLASSIFIER, **training: object) -> ResolvedRun:
    task = write_task(folder / "mine", text)
    values = {f"training.{name}": value for name, value in ({"epochs": 1} | training).items()}
    values |= {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state")}
    return resolve(RunRequest(task=f"{task}:MyTask", device=DEVICE, values=values))


def plan_of(folder: RunFolder) -> RunPlan:
    return RunPlan.from_plain(json.loads(folder.plan_path.read_text()))


def trained(run: ResolvedRun) -> tuple[RunFolder, str]:
    reporter = Details()
    return train_new(run, reporter).folder, "\n".join(reporter.texts)


@pytest.mark.slow
def test_a_run_begins_with_recorded_lines_and_the_next_one_with_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDED, "1")
    run = own_run(tmp_path)
    first, told = trained(run)
    assert re.search(r"fits \(recorded, confirmed by one trial: 10[0-3]\.\d% of the recorded peak", told)
    limits = plan_of(first).limits
    assert limits is not None
    assert (limits.training.trials, limits.evaluation.trials) == (1, 1)
    assert limits.evaluation.recorded_share == pytest.approx(1, abs=0.05)
    recorder = LimitRecorder(run, open_meter(DEVICE))
    recorder.start()
    assert recorder.result() == NO_RECORDING
    second, told = trained(run)
    assert f"the tuned limit of run {first.run_id}, confirmed by one trial" in told
    plan = plan_of(second)
    assert "recorded" not in "\n".join(detail_lines(plan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            "raise ValueError('only here')",
            "myTask.sample_datasets failed: ValueError: only here",
        ),
        ("import os; os._exit(1)", "the process that records the task has died"),
        ("import time; time.sleep(60)", "recording the task takes longer than 3 s"),
    ],
)
def test_where_nothing_can_be_recorded_probes_find_what_fits_and_details_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, reason: str
) -> None:
    monkeypatch.setenv(RECORDED, "1")
    if "sleep" in broken:
        monkeypatch.setattr(limit_recorder, "_WAIT_S", 3.0)
    in_child = f"    def datasets(self):\n        import sys\n        if 'limit_recorder' in sys.argv[0]: {broken}\n"
    folder, told = trained(own_run(tmp_path, CLASSIFIER.replace("    def datasets(self):\n", in_child)))
    assert f"Probes on the device show how memory grows: {reason}" in told
    limits = plan_of(folder).limits
    assert limits is not None
    assert limits.training.recorded_share == 0


def test_nothing_is_recorded_where_nothing_is_searched_for_or_the_device_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_default = LimitRecorder(own_run(tmp_path), open_meter(DEVICE))
    monkeypatch.setenv(RECORDED, "1")
    meter = open_meter(DEVICE)
    assert meter.recordable is not None
    for recorder in (
        by_default,
        LimitRecorder(own_run(tmp_path), CpuMeter()),
        LimitRecorder(own_run(tmp_path, find_batch_size="off", micro_batch_size=4), meter),
    ):
        recorder.start()
        assert recorder.result() == NO_RECORDING
        recorder.close()


@pytest.mark.slow
def test_the_process_ends_with_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORDED, "1")
    recorder = LimitRecorder(own_run(tmp_path), open_meter(DEVICE))
    recorder.start()
    process = recorder._process
    assert process is not None
    assert process.poll() is None
    recorder.close()
    assert process.returncode == -9


def test_a_process_that_has_answered_is_not_killed_hours_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, killed = LimitRecorder(own_run(tmp_path), CpuMeter()), list[int]()
    recorder._process = subprocess.Popen([sys.executable, "-c", "print('{}')"], stdout=subprocess.PIPE, text=True)
    assert recorder.result() == NO_RECORDING
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    recorder.close()
    assert killed == []


def test_a_job_that_nobody_understands_is_answered_with_the_reason() -> None:
    command = [sys.executable, "-P", "-m", "can_train.training.limit_recorder"]
    answer = subprocess.run(command, input='{"config": {}, "target": {}}', capture_output=True, text=True, check=True)
    assert '"reason":"' in answer.stdout
    assert replace(NO_RECORDING, reason="x").reason == "x"
