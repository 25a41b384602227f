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
from can_train.training.run_folder import Attempts, RunFolder, SlurmContext, make_run
from can_train.training.run_lock import read_holder, try_lock, wait_for_lock, write_holder
from fakes.bitwise import assert_ends_like

pytestmark = pytest.mark.slow

TIMEOUT_S = 300
SETTINGS = {"training.epochs": 2, "training.checkpoint_every": 4, "training.min_steps_per_epoch": 12,
            "dataset.synthetic.seconds": 8, "mode.baselines": False}  # fmt: skip
JOB = """\
import sys
from can_train.cli.train import continue_in_job
from can_train.slurm.job import Job
Job(continue_in_job, sys.argv[1])()
"""


class Process:
    """An attempt of a run in a job that had been started again so many times before; without, in no job."""

    def __init__(self, folder: RunFolder, restarts: int | None) -> None:
        self.folder = folder
        self._log_path = folder.path / f"log-of-{restarts}.txt"
        job = {} if restarts is None else {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", JOB, str(folder.path)], env={**os.environ, **job}, stderr=log
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Stops it where it is, once it has saved."""
        manifest = self.folder.checkpoints_path / "manifest.json"
        self.wait_for(manifest.exists)
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < until, "what was waited for did not happen"
            time.sleep(0.005)


Start = Callable[..., Process]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def make_folder(place: Path, state: Path) -> RunFolder:
    folders = {"paths.runs_dir": str(place / "runs"), "paths.state_dir": str(state)}
    request = RunRequest(model="gat", dataset="synthetic", size="student", device="cpu", values=SETTINGS | folders)
    return make_run(with_absolute_paths(resolve(request)), SilentReporter())


@pytest.fixture
def folder(tmp_path: Path, state: Path) -> RunFolder:
    return make_folder(tmp_path, state)


@pytest.fixture
def start(folder: RunFolder) -> Iterator[Start]:
    begun: list[Process] = []

    def process(restarts: int | None) -> Process:
        begun.append(Process(folder, restarts))
        return begun[-1]

    yield process
    for one in begun:
        one.process.kill()
        one.process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, state: Path) -> Path:
    alone = Process(make_folder(tmp_path_factory.mktemp("alone"), state), 0)
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
    orphan.stop()
    before, later = saved(folder), start(1)
    later.wait_for(lambda: "An earlier attempt" in later.log)
    assert f"process {orphan.process.pid} of " in folder.attempts.waits_for(2)
    orphan.go_on()
    assert (orphan.wait(), later.wait()) == (143, 0), later.log
    assert endings(folder) == ["terminated", "finished"]
    assert saved(folder) != before
    assert "Continuing at step" in later.log
    assert folder.attempts.waits_for(2) == ""
    assert_ends_like(folder.path, undisturbed)


def test_an_earlier_attempt_elsewhere_ends_at_its_next_checkpoint(
    start: Start, folder: RunFolder, undisturbed: Path
) -> None:
    orphan = start(0)
    orphan.stop()
    assert Attempts(folder.path, SlurmContext(job_id="7", restarts=1)).current == 2
    holder = read_holder(folder.path / "lock")
    assert holder is not None
    orphan.go_on()
    with (folder.path / "lock").open("a+") as lock:
        wait_for_lock(lock, replace(holder, host="elsewhere"), SilentReporter(), wait_s=TIMEOUT_S)
        step = json.loads(saved(folder))["checkpoints"][0]["step"]
    assert orphan.wait() == 143, orphan.log
    assert "A later attempt waits for this run" in orphan.log
    assert step < 20, "it ended before its last step"
    assert endings(folder)[0] == "terminated"
    assert start(2).wait() == 0
    assert_ends_like(folder.path, undisturbed)


def test_an_earlier_attempt_that_does_not_answer_is_killed(start: Start, folder: RunFolder) -> None:
    orphan = start(0)
    orphan.stop()
    holder = read_holder(folder.path / "lock")
    assert holder is not None
    with (folder.path / "lock").open("a+") as lock:
        wait_for_lock(lock, holder, LineReporter(sys.stderr), wait_s=TIMEOUT_S, save_s=0)
    assert orphan.wait() == -signal.SIGKILL


def test_an_attempt_whose_lock_another_machine_has_ends_and_saves_nothing(start: Start, folder: RunFolder) -> None:
    orphan = start(0)
    orphan.stop()
    before = saved(folder)
    later = Attempts(folder.path, SlurmContext(job_id="7", restarts=1))
    with (folder.path / "lock").open("a+") as lock:
        write_holder(lock, later.this_process())
    orphan.go_on()
    assert orphan.wait() == 143, orphan.log
    assert saved(folder) == before
    assert endings(folder) == ["terminated"]


@pytest.mark.parametrize(("earlier", "later"), [(None, 0), (0, None), (0, 0)])
def test_who_trains_a_run_beside_a_job_is_left_alone(
    start: Start, folder: RunFolder, earlier: int | None, later: int | None
) -> None:
    first = start(earlier)
    first.stop()
    second = start(later)
    assert second.wait() == 2
    assert f"being trained by another process: {folder.run_id}: process {first.process.pid} of" in second.log
    first.go_on()
    assert first.wait() == 0, first.log


def test_an_innocent_process_is_never_signalled(tmp_path: Path) -> None:
    """The number of the process that had the lock may be another's by now, as on a machine of the same name."""
    attempts = Attempts(tmp_path, SlurmContext(job_id="7"))
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
