"""A node that SLURM has lost while what it trains goes on: two processes of one run, only one of which trains it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import daemons
from sandbox.cluster import FOLDER_VARIABLE, PORT_VARIABLE, Cluster
from slurm.real.on_slurm import Slurm
from slurm.real.test_nothing_lost import SMALL, Run, Stage, assert_went_on


@pytest.fixture
def stage(slurm: Slurm, sandbox: Cluster, repository: Path) -> Iterator[Stage]:
    stage = Stage(slurm)
    yield stage
    variables = {**os.environ, FOLDER_VARIABLE: str(sandbox.folder), PORT_VARIABLE: str(sandbox.port)}
    subprocess.run([sys.executable, repository / "scripts" / "slurm-sandbox", "start"], env=variables, check=True)
    stage.mend_node()


def lose_node(stage: Stage, run: Run) -> int:
    """Takes the run's node from SLURM while the training there is stopped; returns its process."""
    pid = run.stop()
    os.kill(daemons.running(stage.slurm.cluster)[stage.events], signal.SIGKILL)
    stage.set_node("down")
    stage.slurm.wait_for(lambda: "PENDING" in stage.slurm.queue(run.job, "%T"))
    stage.slurm.command("scontrol", "update", f"JobId={run.job}", "ExcNodeList=")
    stage.slurm.kick(run.job)
    return pid


def state(run: Run) -> dict[str, str]:
    found: dict[str, str] = json.loads(run.slurm.can_train("status", str(run.path), "--json").stdout)
    return found


def test_the_next_attempt_waits_until_the_earlier_one_has_saved_and_ended(stage: Stage) -> None:
    undisturbed: Path = stage.train("undisturbed", "cpu")
    run = stage.submit("lost", *SMALL, exclude=stage.quiet)
    pid = lose_node(stage, run)
    stage.slurm.wait_for(lambda: "An earlier attempt" in run.log)
    told = state(run)
    assert told["state"] == "running"
    assert f"it waits for process {pid} of {stage.events} (job {run.job} on {stage.slurm.cluster.name})" in told["why"]
    saved = run.step
    os.kill(pid, signal.SIGCONT)
    run.finish()
    assert "A later attempt waits for this run" in run.log
    assert run.endings == ["terminated", "finished"]
    assert [start.host for start in run.attempts.starts()] == [stage.events, stage.quiet]
    assert run.slurm.attempts(run.job) == ["NODE_FAIL", "COMPLETED"]
    assert f"Continuing at step {saved}\n" not in run.log, "it went on from what the earlier one saved last"
    assert_went_on(run, undisturbed)
