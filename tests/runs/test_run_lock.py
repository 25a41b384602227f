"""Two attempts of one run in real processes, each a job's: the earlier one trains on after SLURM has given it up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import with_absolute_paths
from can_train.errors import EarlierAttemptError, RunError
from can_train.reporter import LineReporter, SilentReporter
from can_train.runs.attempts import Attempts, SlurmContext
from can_train.runs.run_folder import RunFolder, make_run, read_holder, try_lock, wait_for_lock, write_holder
from fakes.bitwise import assert_ends_like
from fakes.own_tasks import CLASSIFIER, write_task
from fakes.processes import TIMEOUT_S, Command, run_job
from fakes.run_facts import CLUSTER, slurm_job

pytestmark = pytest.mark.slow

SETTINGS = {"training.epochs": 2, "training.checkpoint_every": 4, "training.min_steps_per_epoch": 12,
            "training.micro_batch_size": 8}  # fmt: skip
STEPS = 24
GATED = CLASSIFIER.replace("points, labels = batch", "points, labels = wait_at_gate(batch)", 1).replace(
    "from helpers import WIDTH",
    """from helpers import WIDTH
import os, time
from pathlib import Path

def wait_at_gate(batch):
    run = Path(os.environ["RUN"])
    while (run / "checkpoints" / "manifest.json").exists() and not (run / "gate").exists():
        time.sleep(0.01)
    return batch
""",
)
"""A task that trains to its first checkpoint, and goes on once there is a file `gate` in the run's folder."""


class Process:
    """An attempt of a run in a job that had been started again so many times before."""

    def __init__(self, folder: RunFolder, restarts: int) -> None:
        self.folder = folder
        self._log_path = folder.path / f"log-of-{restarts}.txt"
        job = {
            "RUN": str(folder.path),
            "SLURM_JOB_ID": "7",
            "SLURM_CLUSTER_NAME": CLUSTER,
            "SLURM_RESTART_COUNT": str(restarts),
        }
        with self._log_path.open("w") as log:
            streams = {1: log.fileno(), 2: log.fileno()}
            self.process = Command(str(folder.path), variables={**os.environ, **job}, streams=streams, entry=run_job)

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def close(self) -> None:
        with self.process:
            pass

    def wait(self) -> int:
        return self.process.wait()

    def wait_for(self, condition: Callable[[], Any]) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.is_alive, self.log
            assert time.monotonic() < until, "what was waited for did not happen"
            time.sleep(0.01)

    def wait_until_saved(self) -> None:
        self.wait_for((self.folder.checkpoints_path / "manifest.json").exists)


Start = Callable[..., Process]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def make_folder(place: Path, state: Path) -> RunFolder:
    folders = {"paths.runs_dir": str(place / "runs"), "paths.state_dir": str(state)}
    task = f"{write_task(state / 'task', GATED)}:MyTask"
    request = RunRequest(task=task, device="cpu", values=SETTINGS | folders)
    return make_run(with_absolute_paths(resolve(request)), SilentReporter())


def open_gate(folder: RunFolder) -> None:
    (folder.path / "gate").touch()


@pytest.fixture
def folder(tmp_path: Path, state: Path) -> RunFolder:
    return make_folder(tmp_path, state)


@pytest.fixture
def start(folder: RunFolder) -> Iterator[Start]:
    begun: list[Process] = []

    def process(restarts: int) -> Process:
        begun.append(Process(folder, restarts))
        return begun[-1]

    yield process
    for one in begun:
        one.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, state: Path) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("alone"), state)
    open_gate(folder)
    alone = Process(folder, 0)
    with alone.process:
        assert alone.wait() == 0, alone.log
    return alone.folder.path


def endings(folder: RunFolder) -> list[str]:
    ends = (folder.attempts.end(start.attempt) for start in folder.attempts.starts())
    return [end.ending if end else "" for end in ends]


def saved(folder: RunFolder) -> str:
    return (folder.checkpoints_path / "manifest.json").read_text()


def test_an_earlier_attempt_of_this_machine_saves_ends_and_is_continued(
    start: Start, folder: RunFolder, undisturbed: Path
) -> None:
    orphan = start(0)
    orphan.wait_until_saved()
    before, later = saved(folder), start(1)
    later.wait_for(lambda: "An earlier attempt" in later.log)
    assert f"process {orphan.process.pid} of " in folder.attempts.waits_for(2)
    open_gate(folder)
    assert (orphan.wait(), later.wait()) == (143, 0), later.log
    assert "A later attempt waits" not in orphan.log, "it was asked to end before its next checkpoint"
    assert endings(folder) == ["terminated", "finished"]
    assert saved(folder) != before
    assert "Continuing at step" in later.log
    assert folder.attempts.waits_for(2) == ""
    assert_ends_like(folder.path, undisturbed)


def test_an_earlier_attempt_elsewhere_ends_at_its_next_checkpoint(
    start: Start, folder: RunFolder, undisturbed: Path
) -> None:
    orphan = start(0)
    orphan.wait_until_saved()
    assert Attempts(folder.path, SlurmContext(job=slurm_job("7"), restarts=1)).current == 2
    holder = read_holder(folder.path / "lock")
    assert holder is not None
    with (folder.path / "lock").open("a+") as lock:
        open_gate(folder)
        wait_for_lock(lock, replace(holder, host="elsewhere"), SilentReporter(), wait_s=TIMEOUT_S)
        step = json.loads(saved(folder))["checkpoints"][0]["step"]
    assert orphan.wait() == 143, orphan.log
    assert "A later attempt waits for this run" in orphan.log
    assert step < STEPS, "it ended before its last step"
    assert endings(folder)[0] == "terminated"
    assert start(2).wait() == 0
    assert_ends_like(folder.path, undisturbed)


def test_an_earlier_attempt_that_does_not_answer_is_killed(start: Start, folder: RunFolder) -> None:
    orphan = start(0)
    orphan.wait_until_saved()
    holder = read_holder(folder.path / "lock")
    assert holder is not None
    with (folder.path / "lock").open("a+") as lock:
        wait_for_lock(lock, holder, LineReporter(sys.stderr), wait_s=TIMEOUT_S, save_s=0)
    assert orphan.wait() == -signal.SIGKILL


def test_an_attempt_whose_lock_another_machine_has_ends_and_saves_nothing(start: Start, folder: RunFolder) -> None:
    orphan = start(0)
    orphan.wait_until_saved()
    before = saved(folder)
    later = Attempts(folder.path, SlurmContext(job=slurm_job("7"), restarts=1))
    with (folder.path / "lock").open("a+") as lock:
        write_holder(lock, later.this_process())
    open_gate(folder)
    assert orphan.wait() == 143, orphan.log
    assert saved(folder) == before
    assert endings(folder) == ["terminated"]


def test_whoever_trains_a_run_notices_that_another_machine_has_its_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for locked in (folder.locked(), folder.locked_to_train(SilentReporter())):
        with locked:
            assert not folder.is_taken_over()
            with (tmp_path / "lock").open("a+") as lock:
                write_holder(lock, replace(folder.attempts.this_process(), host="elsewhere"))
            assert folder.is_taken_over()


PERSON = SlurmContext()
FIRST = SlurmContext(job=slurm_job("7"))


@pytest.mark.parametrize(("earlier", "later"), [(PERSON, FIRST), (FIRST, PERSON), (FIRST, FIRST)])
def test_who_trains_a_run_beside_a_job_is_left_alone(
    tmp_path: Path, earlier: SlurmContext, later: SlurmContext
) -> None:
    folders = RunFolder(tmp_path), RunFolder(tmp_path)
    for folder, context in zip(folders, (earlier, later), strict=True):
        folder.attempts = Attempts(tmp_path, context)
        assert folder.attempts.current
    refused = pytest.raises(RunError, match=f"being trained by another process: {tmp_path.name}: process {os.getpid()}")
    with folders[0].locked_to_train(SilentReporter()), refused, folders[1].locked_to_train(SilentReporter()):
        pass
    assert not folders[0].attempts.is_superseded()


@pytest.mark.parametrize(
    ("later", "is_superseded"),
    [
        (SlurmContext(job=slurm_job("7"), restarts=1), True),
        (SlurmContext(job=slurm_job("8")), True),
        (FIRST, False),
        (PERSON, False),
    ],
)
def test_the_job_that_began_last_has_the_run(tmp_path: Path, later: SlurmContext, is_superseded: bool) -> None:
    attempts = [Attempts(tmp_path, context) for context in (FIRST, later)]
    assert [one.current for one in attempts] == [1, 2]
    assert [one.is_superseded() for one in attempts] == [is_superseded, False]
    assert attempts[1].supersedes(attempts[0].this_process()) == is_superseded
    assert not attempts[0].supersedes(attempts[1].this_process())


def test_an_innocent_process_is_never_signalled(tmp_path: Path) -> None:
    """The number of the process that had the lock may be another's by now, as on a machine of the same name."""
    attempts = Attempts(tmp_path, SlurmContext(job=slurm_job("7")))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as innocent:
        holder = replace(attempts.this_process(1), pid=innocent.pid)
        with (tmp_path / "lock").open("a+") as other, (tmp_path / "lock").open("a+") as lock:
            assert try_lock(other)
            with pytest.raises(EarlierAttemptError, match=f"process {innocent.pid} of .* did not end within 0 min"):
                wait_for_lock(lock, holder, SilentReporter(), wait_s=0.5, save_s=0)
        assert innocent.poll() is None
        innocent.kill()


def test_what_is_locked_says_by_whom(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with (
        folder.locked(),
        pytest.raises(RunError, match=f"{tmp_path.name}: process {os.getpid()} of"),
        RunFolder(tmp_path).locked(),
    ):
        pass
