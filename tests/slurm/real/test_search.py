"""A search and a sweep whose runs are jobs of a real SLURM, one node of which is lost or broken meanwhile."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from can_train.runs.attempts import Attempts
from can_train.runs.registry import Registry
from can_train.runs.run_folder import RunFolder
from can_train.runs.trials import TrialRun
from fakes.own_tasks import CLASSIFIER, write_task
from slurm.real.on_slurm import Slurm
from slurm.real.test_nothing_lost import Run, Stage

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

TRIALS = 12
# A training that lasts long enough to be stopped on its way.
SLOW = CLASSIFIER.replace(
    "    def loss(self, model, batch):\n", "    def loss(self, model, batch):\n        time.sleep(0.05)\n"
)
LINE = ("--epochs", "9", "--checkpoint-every", "2", "--device", "cpu", "--trials", str(TRIALS), "--max-parallel", "2",
        "--set", "training.lr=interval(1e-4,1e-1)", "--set", "task.hidden=interval(8,64)", "--submit",
        "--exclusive")  # fmt: skip


@pytest.fixture
def stage(slurm: Slurm) -> Iterator[Stage]:
    stage = Stage(slurm)
    yield stage
    stage.mend_node()


def lost_trial(stage: Stage, folder: Path) -> TrialRun:
    """Waits for a trial that trains on the second node, and takes the node from SLURM."""

    def on_node() -> Path | None:
        for path in folder.glob("2*"):
            starts = Attempts(path).starts()
            if starts and starts[-1].host == stage.events and not (path / "result.json").exists():
                return path
        return None

    path = stage.slurm.wait_for(on_node)
    run = Run(stage.slurm, path)
    run.stop()
    stage.set_node("down")
    stage.slurm.wait_for(lambda: "PENDING" in stage.slurm.queue(run.job, "%T"))
    trial = TrialRun.of(RunFolder(path))
    assert trial is not None
    return trial


def test_a_search_of_twelve_trials_loses_none_with_a_node(stage: Stage) -> None:
    slurm = stage.slurm
    task = write_task(slurm.folder / "mine", f"import time\n{SLOW}")
    sent = json.loads(slurm.can_train("--task", f"{task}:MyTask", *LINE, "--json").stdout)
    assert len(sent["submitted"]) == TRIALS
    folder = slurm.folder / "runs"
    before = lost_trial(stage, folder)
    stage.mend_node()

    def finished() -> bool:
        for each in sent["submitted"]:
            if any(row == "PENDING BeginTime" for row in slurm.queue(each["job_id"], "%T %r")):
                slurm.kick(each["job_id"])
        return len([*folder.glob("2*/result.json")]) == TRIALS

    slurm.wait_for(finished)
    trials = [TrialRun.of(RunFolder(Path(each["path"]))) for each in sent["submitted"]]
    assert sorted(each.trial.number for each in trials if each is not None) == [*range(1, TRIALS + 1)]
    values = [each.trial.values for each in trials if each is not None]
    assert len({json.dumps(each) for each in values}) == TRIALS
    assert before.trial.values in values
    again = Attempts(before.folder.path)
    assert len(again.starts()) >= 2, "the trial of the lost node was started again"
    shown = slurm.can_train("compare", sent["search"]).stdout
    assert f"{TRIALS} trials, the best first" in shown
    # The same line has nothing more to send, and a larger number sends the rest.
    line = ("--task", f"{task}:MyTask", *LINE, "--json")
    assert json.loads(slurm.can_train(*line).stdout)["submitted"] == []
    (more,) = json.loads(slurm.can_train(*line, "--trials", str(TRIALS + 1)).stdout)["submitted"]
    slurm.wait_for((Path(more["path"]) / "result.json").exists)


@pytest.mark.parametrize("error", ["CUDA error: uncorrectable ECC error encountered", "the card says no"])
def test_runs_of_a_sweep_that_fail_on_a_broken_node_are_retried_on_the_other(slurm: Slurm, error: str) -> None:
    broken, sound = slurm.nodes
    fails = f'        if os.environ["SLURMD_NODENAME"] == "{broken}":\n            raise RuntimeError("{error}")\n'
    text = CLASSIFIER.replace(
        "    def loss(self, model, batch):\n", f"    def loss(self, model, batch):\n{fails}        time.sleep(0.1)\n"
    )
    task = write_task(slurm.folder / "mine", f"import os\nimport time\n{text}")
    line = ("--task", f"{task}:MyTask", "--epochs", "2", "--device", "cpu", "--submit", "--exclusive", "--json")
    sent = json.loads(slurm.can_train(*line, "--set", "training.seed=range(0,5)").stdout)["submitted"]
    folders = [RunFolder(Path(each["path"])) for each in sent]
    slurm.wait_for(lambda: all(folder.result_path.exists() for folder in folders))
    registry, retried = Registry(slurm.folder / "state"), 0
    for folder in folders:
        first, *again = registry.jobs(folder.run_id)
        starts = folder.attempts.starts()
        assert [start.host for start in starts] == [*[broken] * len(again), sound]
        assert [job.resources["exclude"] for job in again] == [broken] * len(again)
        assert len(again) <= 1
        assert first.reason == ""
        retried += len(again)
    # The node is free again at once, and takes run after run until it is avoided.
    assert retried >= 2
    told = json.loads(slurm.can_train("status", registry.runs()[0].sweep, "--json").stdout)
    assert (told["states"], told["failures"]) == ({"finished": len(folders)}, [])
    reasons = [job["reason"] for run in told["runs"] for job in run["jobs"][1:]]
    assert all(broken in reason and reason.endswith("another node") for reason in reasons)
