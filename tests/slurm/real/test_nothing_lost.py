"""Jobs that are ended in every way that there is, on a real SLURM: their runs go on where they were, and what they end
with is what a run ends with that nobody disturbed. Most of the time is spent waiting, so the jobs run side by side.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from can_train.runs.attempts import AttemptEnd, Attempts
from can_train.runs.registry import JobRecord, Registry
from fakes.bitwise import assert_ends_like
from sandbox import daemons
from sandbox.cluster import Cluster
from slurm.real.on_slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

TRAINING = ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=8",
            "--epochs", "2", "--checkpoint-every", "4", "--min-steps-per-epoch", "12", "--no-baselines")  # fmt: skip
JOB = ("--submit", "--force", "--set", "cluster.cpus=1", "--set", "cluster.signal_delay_s=5")
SMALL = ("--set", "cluster.mem=900M")
ENOUGH_STEPS = 4
STOP_AGAIN_S = 0.01


@dataclass(frozen=True)
class Run:
    """A run that was submitted."""

    slurm: Slurm
    path: Path

    @property
    def jobs(self) -> list[JobRecord]:
        return Registry(self.slurm.folder / "state").jobs(self.path.name)

    @property
    def job(self) -> str:
        return self.jobs[-1].job_id

    @property
    def attempts(self) -> Attempts:
        return Attempts(self.path)

    @property
    def endings(self) -> list[str]:
        ended = (self.attempts.end(record.attempt) for record in self.attempts.starts())
        return [record.ending if record else "" for record in ended]

    @property
    def last(self) -> AttemptEnd:
        ended = self.attempts.end(len(self.attempts.starts()))
        assert ended is not None
        return ended

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.path / "slurm").glob("*_log.out")))

    @property
    def step(self) -> int:
        manifest = self.path / "checkpoints" / "manifest.json"
        return int(json.loads(manifest.read_text())["checkpoints"][0]["step"]) if manifest.exists() else 0

    def stop(self) -> int:
        """Stops the training where it is, once it has come some way; returns its process."""
        self.slurm.wait_for(lambda: self.step >= ENOUGH_STEPS)
        pid = self.attempts.starts()[-1].pid
        os.kill(pid, signal.SIGSTOP)
        return pid

    def go_on(self) -> None:
        """What a person does with a run that stays as it is."""
        self.slurm.can_train("resume", str(self.path))
        self.finish()

    def finish(self) -> None:
        """Waits until the run has finished and SLURM has noted it, without the time that it keeps a job back."""
        self.slurm.wait_for(self._finished)
        self.slurm.ended(self.job)
        self.slurm.ended(self.job)

    def _finished(self) -> bool:
        if any(row == "PENDING BeginTime" for row in self.slurm.queue(self.job, "%T %r")):
            self.slurm.kick(self.job)
        return (self.path / "result.json").exists()


@dataclass(frozen=True)
class Stage:
    """A SLURM, on which many runs may be started at once. Only the second node is set down, drained and filled; the
    runs of other events stay away from it.
    """

    slurm: Slurm

    @property
    def quiet(self) -> str:
        return self.slurm.nodes[0]

    @property
    def events(self) -> str:
        return self.slurm.nodes[1]

    def set_node(self, state: str) -> None:
        self.slurm.command("scontrol", "update", f"NodeName={self.events}", f"State={state}", "Reason=a test")

    def mend_node(self) -> None:
        """A node that is down may come back by itself, also between a look at its state and the command for it."""

        def is_up() -> bool:
            state = self.slurm.command("sinfo", "--noheader", f"--nodes={self.events}", "--format=%T")
            is_away = "down" in state or "drain" in state
            if is_away:
                self.slurm.attempt("scontrol", "update", f"NodeName={self.events}", "State=resume")
            return not is_away

        self.slurm.wait_for(is_up)

    def submit(self, name: str, *arguments: str, device: str = "cpu", exclude: str | None = None) -> Run:
        """Submits a run to the quiet node, or to the nodes that `exclude` leaves."""
        runs = self.slurm.folder / name
        line = (*TRAINING, *JOB, "--device", device, "--runs-dir", str(runs), *arguments)
        avoided = self.events if exclude is None else exclude
        self.slurm.can_train(*line, *(("--set", f"cluster.exclude={avoided}") if avoided else ()))
        (path,) = runs.glob("2*")
        return Run(self.slurm, path)

    def train(self, name: str, device: str) -> Path:
        runs = self.slurm.folder / name
        self.slurm.can_train(*TRAINING, "--device", device, "--runs-dir", str(runs))
        (path,) = runs.glob("2*")
        return path


def time_limit(stage: Stage) -> Run:
    """SLURM wakes what it warns: a stopped process is a training that lasts."""
    run = stage.submit("warned", *SMALL, "--set", "cluster.time=2")
    run.stop()
    run.finish()
    return run


def time_out(stage: Stage) -> Run:
    run = stage.submit("timed-out", *SMALL, "--set", "cluster.time=5")
    pid, over = run.stop(), Event()
    Thread(target=keep_stopped, args=(pid, over)).start()
    stage.slurm.command("scontrol", "update", f"JobId={run.job}", "TimeLimit=1")
    stage.slurm.wait_for(lambda: run.slurm.ended(run.job) == "TIMEOUT")
    over.set()
    run.go_on()
    return run


def keep_stopped(pid: int, over: Event) -> None:
    while not over.wait(STOP_AGAIN_S):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def scancel(stage: Stage) -> Run:
    run = stage.submit("cancelled", *SMALL)
    run.stop()
    stage.slurm.command("scancel", run.job)
    stage.slurm.ended(run.job)
    assert run.step > ENOUGH_STEPS
    run.go_on()
    return run


def requeue(stage: Stage) -> Run:
    run = stage.submit("requeued", *SMALL)
    run.stop()
    stage.slurm.command("scontrol", "requeue", run.job)
    run.finish()
    return run


def kill(stage: Stage) -> Run:
    run = stage.submit("killed", *SMALL)
    os.kill(run.stop(), signal.SIGKILL)
    run.finish()
    return run


def early_warning(stage: Stage) -> Run:
    """Long before the first step. A job is RUNNING before it has a process that a warning could reach."""
    run = stage.submit("early", *SMALL)
    stage.slurm.wait_for(run.attempts.starts)
    stage.slurm.command("scancel", "--signal=USR2", run.job)
    run.finish()
    return run


def host_oom(stage: Stage) -> tuple[Run, str]:
    """Another job waits for it to end well."""
    run = stage.submit("host-oom", "--set", "cluster.mem=200M")
    child = stage.slurm.sbatch("true", f"--dependency=afterok:{run.job}", "--kill-on-invalid-dep=yes")
    run.finish()
    return run, child


def too_large(stage: Stage) -> Run:
    run = stage.submit("too-large", *SMALL, device="sim:1MiB")
    stage.slurm.ended(run.job)
    return run


def foreign_oom(stage: Stage) -> Run:
    """Another process fills the GPU of the node that the job happens to come to first."""
    folder = stage.slurm.folder
    (folder / "crowd").write_text("255MiB")
    first = f'[ -e "{folder}/first" ] || echo $SLURMD_NODENAME > "{folder}/first"'
    crowd = f'[ $SLURMD_NODENAME != $(cat "{folder}/first") ] || export CAN_TRAIN_SIM_FOREIGN="{folder}/crowd"'
    setup = ("--set", f"cluster.setup=['{first}', '{crowd}']")
    run = stage.submit("crowded", *SMALL, *setup, device="sim:256MiB", exclude="")
    run.finish()
    return run


def preemption(stage: Stage) -> Run:
    run = stage.submit("preempted", *SMALL, "--set", "cluster.partition=scavenge", exclude=stage.quiet)
    run.stop()
    every_cpu = ("--nodes=1", "--exclusive", f"--nodelist={stage.events}", "--time=1")
    stage.slurm.ended(stage.slurm.sbatch("true", *every_cpu))
    run.finish()
    return run


def node_down(stage: Stage) -> Run:
    run = stage.submit("downed", *SMALL, exclude=stage.quiet)
    run.stop()
    stage.set_node("down")
    stage.slurm.wait_for(lambda: "PENDING" in stage.slurm.queue(run.job, "%T"))
    # It goes on where it was not allowed to begin. The other node is back at once, while what SLURM ended there still
    # holds on: SLURM holds a job that comes back to such a node ("launch failed requeued held").
    stage.slurm.command("scontrol", "update", f"JobId={run.job}", f"ExcNodeList={stage.events}")
    run.finish()
    stage.mend_node()
    return run


def node_drained(stage: Stage) -> Run:
    run = stage.submit("drained", *SMALL, exclude=stage.quiet)
    pid = run.stop()
    stage.set_node("drain")
    os.kill(pid, signal.SIGCONT)
    run.finish()
    stage.mend_node()
    return run


def node_events(stage: Stage) -> list[Run]:
    """One after another, since each needs the second node for itself."""
    return [foreign_oom(stage), preemption(stage), node_down(stage), node_drained(stage)]


Scenes = dict[str, Future[Any]]


@pytest.fixture(scope="module")
def stage(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield Stage(Slurm(sandbox, tmp_path_factory.mktemp("nothing-lost"), os.environ))
    daemons.clear(sandbox)


@pytest.fixture(scope="module")
def undisturbed(stage: Stage) -> Path:
    """Before all others, which so find the data prepared."""
    return stage.train("undisturbed", "cpu")


@pytest.fixture(scope="module")
def scenes(stage: Stage, undisturbed: Path) -> Iterator[Scenes]:
    """Everything that happens, all at once, as far as the nodes have room."""
    acts: list[Callable[[Stage], Any]] = [
        time_limit, time_out, node_events, host_oom, kill, requeue, scancel, early_warning, too_large,
    ]  # fmt: skip
    with ThreadPoolExecutor(len(acts)) as pool:
        yield {act.__name__: pool.submit(act, stage) for act in acts}


def assert_went_on(run: Run, undisturbed: Path) -> None:
    """Nothing was searched for again, and the end is the undisturbed one's."""
    # A slow search says several times how far it is.
    attempts = run.log.split("Starting with JobEnvironment")
    assert sum("finding what fits in memory" in attempt for attempt in attempts) == 1
    assert "Continuing at step" in run.log
    assert_ends_like(run.path, undisturbed)


def test_a_job_whose_time_is_up_saves_and_goes_on(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["time_limit"].result()
    assert run.endings == ["time_limit", "finished"]
    assert run.slurm.attempts(run.job)[-1] == "COMPLETED"
    assert_went_on(run, undisturbed)


def test_a_job_that_cannot_answer_ends_and_goes_on_when_it_is_asked_to(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["time_out"].result()
    assert run.endings == ["", "finished"]
    assert_ends_like(run.path, undisturbed)


def test_a_cancelled_job_saves_and_stays_cancelled(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["scancel"].result()
    assert run.slurm.attempts(run.jobs[0].job_id) == ["CANCELLED"]
    assert run.endings == ["terminated", "finished"]
    assert_ends_like(run.path, undisturbed)


def test_a_job_that_is_put_back_by_hand_goes_on(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["requeue"].result()
    assert run.slurm.attempts(run.job)[0] == "REQUEUED"
    assert_went_on(run, undisturbed)


def test_a_killed_process_is_started_again(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["kill"].result()
    assert run.endings == ["killed", "finished"]
    assert len(run.jobs) == 1
    assert_went_on(run, undisturbed)


def test_a_job_without_enough_memory_is_submitted_with_more(scenes: Scenes, undisturbed: Path) -> None:
    run, child = scenes["host_oom"].result()
    assert run.jobs[1].reason == "host out-of-memory: 300M instead of 200M"
    # Whether the second one has enough depends on how much of the libraries the machine has in its cache.
    assert {*run.endings[:-1]} == {"host_oom"}
    assert run.slurm.ended(child) == "COMPLETED"
    assert_ends_like(run.path, undisturbed)


def test_a_job_that_is_warned_at_once_begins_again(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["early_warning"].result()
    assert run.endings == ["time_limit", "finished"]
    assert len(run.jobs) == 1
    assert_ends_like(run.path, undisturbed)


def test_a_job_that_fits_on_no_such_gpu_is_left_and_the_cards_are_named(scenes: Scenes) -> None:
    run = scenes["too_large"].result()
    assert (run.endings, len(run.jobs)) == (["gpu_oom"], 1)
    assert run.last.details["one_sample"]
    assert "gb" in run.last.details["cards"]


def test_a_job_whose_gpu_others_fill_is_submitted_to_another_node(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["node_events"].result()[0]
    assert [job.reason for job in run.jobs] == ["", "CUDA out-of-memory: others held 255 MiB; another node"]
    assert run.endings == ["gpu_oom", "finished"]
    assert run.attempts.starts()[0].host != run.attempts.starts()[1].host
    assert_ends_like(run.path, undisturbed, same_device=False)


def test_a_preempted_job_saves_and_comes_back(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["node_events"].result()[1]
    # Until the whole node is free it may begin again, and be preempted again.
    *preempted, last = run.slurm.attempts(run.job)
    assert ({*preempted}, last) == ({"PREEMPTED"}, "COMPLETED")
    assert {*run.endings[:-1]} == {"terminated"}
    assert_went_on(run, undisturbed)


def test_a_job_whose_node_fails_goes_on(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["node_events"].result()[2]
    assert run.slurm.attempts(run.job) == ["NODE_FAIL", "COMPLETED"]
    assert_went_on(run, undisturbed)


def test_a_job_whose_node_is_drained_finishes(scenes: Scenes, undisturbed: Path) -> None:
    run = scenes["node_events"].result()[3]
    assert run.endings == ["finished"]
    assert_ends_like(run.path, undisturbed)
