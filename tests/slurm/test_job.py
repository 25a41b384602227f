"""A job in a process of its own, with real signals; SLURM's commands are a script that notes what it is asked."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from can_train.config.resolved import plain_to_yaml
from can_train.runs.attempts import WARNED, AttemptEnd, Attempts, SlurmContext, StopRequests
from fakes.run_facts import CLUSTER, slurm_job

pytestmark = pytest.mark.slow

TIMEOUT_S = 300

ENTRIES = """
import signal, sys, time
from pathlib import Path
from can_train.slurm.job import Job

def train(folder, stops):
    with stops.installed(), stops.deferred():
        print("ready", flush=True)
        while not stops.received:
            time.sleep(0.01)
        time.sleep(float((folder.path / "step_s").read_text()))
        (folder.path / "saved").touch()
        (folder.path / "checkpoints").mkdir(exist_ok=True)
        (folder.path / "checkpoints" / "1.pt").touch()
        stops.exit()

def prepare(folder, stops):
    print("ready", flush=True)
    time.sleep(60)

def judge_badly(folder, stops):
    print("ready", flush=True)
    raise KeyError("no such metric")

# As submitit does, whose lines fill the log.
signal.signal(signal.SIGCONT, lambda number, frame: print("Bypassing signal", flush=True))
Job(globals()[sys.argv[1]], sys.argv[2])()
"""

SLURM = """#!/bin/sh
echo "$(basename "$0") $*" >> "{calls}"
[ "$(basename "$0")" != squeue ] || echo "7|{state}|n1||"
"""


class JobProcess:
    """A job's process, and what became of it."""

    def __init__(self, folder: Path, entry: str, *, state: str, max_restarts: int, step_s: float) -> None:
        self.folder = folder
        self.calls_path = folder / "calls"
        (folder / "config.yaml").write_text(plain_to_yaml({"cluster": {"max_restarts": max_restarts}}))
        (folder / "step_s").write_text(str(step_s))
        for program in ("scontrol", "squeue"):
            path = folder / "bin" / program
            path.parent.mkdir(exist_ok=True)
            path.write_text(SLURM.format(calls=self.calls_path, state=state))
            path.chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENTRIES, entry, str(folder)],
            env=self._variables(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def _variables(self) -> Mapping[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {
            **os.environ,
            "PATH": path,
            "SLURM_JOB_ID": "7",
            "SLURM_CLUSTER_NAME": CLUSTER,
            "SUBMITIT_EXECUTOR": "slurm",
        }

    def send(self, *numbers: int) -> int:
        for number in numbers:
            self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    @property
    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines() if self.calls_path.exists() else []

    @property
    def ended(self) -> AttemptEnd:
        ended = Attempts(self.folder).end(len(Attempts(self.folder).starts()))
        assert ended is not None
        return ended


Start = Callable[..., JobProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[JobProcess] = []

    def job(entry: str, state: str = "RUNNING|None", max_restarts: int = 3, step_s: float = 0.0) -> JobProcess:
        begun.append(JobProcess(tmp_path, entry, state=state, max_restarts=max_restarts, step_s=step_s))
        return begun[-1]

    yield job
    for one in begun:
        one.process.kill()
        one.process.communicate()


def test_a_warned_job_saves_and_is_put_back(start: Start) -> None:
    job = start("train")
    # SLURM sends SIGCONT before other signals.
    assert job.send(signal.SIGCONT, signal.SIGUSR2) == WARNED
    assert job.process.stdout is not None
    assert job.process.stdout.read() == ""
    assert (job.folder / "saved").exists()
    assert job.ended.ending == "time_limit"
    assert job.calls == ["scontrol requeue 7"]


@pytest.mark.parametrize(("entry", "saved"), [("train", True), ("prepare", False)])
def test_a_warned_job_that_slurm_does_not_put_back_says_why_it_does_not_go_on(
    start: Start, entry: str, saved: bool
) -> None:
    job = start(entry)
    (job.folder / "bin" / "scontrol").write_text("#!/bin/sh\necho Requested operation is disabled >&2; exit 1\n")
    assert job.send(signal.SIGUSR2) == WARNED
    assert (job.folder / "saved").exists() == job.ended.has_saved == saved
    warned = "warned and saved" if saved else "warned before a checkpoint"
    refusal = "its job could not be put back into the queue (Requested operation is disabled)"
    assert (job.ended.ending, job.ended.message) == ("time_limit", f"{warned}; {refusal}")


def test_a_warning_before_there_is_anything_to_save_loses_nothing(start: Start) -> None:
    job = start("prepare")
    assert job.send(signal.SIGUSR2) == WARNED
    assert (job.ended.ending, job.calls) == ("time_limit", ["scontrol requeue 7"])


@pytest.mark.parametrize("entry", ["train", "prepare"])
def test_a_job_that_is_asked_to_leave_is_not_put_back(start: Start, entry: str) -> None:
    job = start(entry)
    assert job.send(signal.SIGTERM) == 143
    assert (job.folder / "saved").exists() == (entry == "train")
    assert (job.ended.ending, job.calls) == ("terminated", [])


@pytest.mark.parametrize(
    ("state", "put_back"),
    [("COMPLETING|TimeLimit", True), ("CANCELLED|None", False), ("PREEMPTED|None", False), ("", False)],
    ids=["the limit itself", "cancelled", "preempted", "SLURM does not answer"],
)
def test_a_warned_job_that_is_then_sent_away_saves_and_stays_away_unless_for_the_limit(
    start: Start, state: str, put_back: bool
) -> None:
    job = start("train", state=state, step_s=0.5)
    assert job.send(signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM) == WARNED
    assert (job.folder / "saved").exists()
    assert ("scontrol requeue 7" in job.calls) == put_back


def test_a_job_that_was_put_back_too_often_is_left_and_says_how_to_go_on(start: Start, tmp_path: Path) -> None:
    for restarts in range(2):
        with (
            pytest.raises(SystemExit),
            Attempts(tmp_path, SlurmContext(job=slurm_job("7"), restarts=restarts)).recorded(StopRequests()),
        ):
            raise SystemExit(WARNED)
    job = start("train", max_restarts=1)
    assert job.send(signal.SIGUSR2) == WARNED
    assert (job.folder / "saved").exists()
    assert "cluster.max_restarts" in job.ended.message
    assert f"can-train resume {tmp_path.name}" in job.ended.message
    assert job.calls == []


def test_an_error_is_recorded_before_the_process_dies(start: Start) -> None:
    job = start("judge_badly")
    assert job.process.wait(TIMEOUT_S) == 1
    assert (job.ended.ending, job.ended.message) == ("failed", "KeyError: 'no such metric'")
