"""A search whose trials are jobs of a real SLURM, one node of which is lost meanwhile."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from can_train.runs.attempts import Attempts
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
