"""Two clusters with one accounting, whose nodes have different GPUs, and a cluster without accounting."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fakes.own_tasks import CLASSIFIER, write_task
from sandbox import daemons
from sandbox.cluster import ACCOUNTING_VARIABLE, FOLDER_VARIABLE, GPUS_VARIABLE, PORT_VARIABLE, Cluster
from slurm.real.conftest import start_anew, unused_cluster
from slurm.real.on_slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

LINE = ("--epochs", "1", "--device", "cpu", "--submit", "--mem", "900M", "--time", "10", "--json")


@contextmanager
def started(repository: Path, kind: str, accounting: str, gpus: str = "fake:2,fake:2") -> Iterator[Cluster]:
    with unused_cluster() as unused:
        # A controller keeps the name of its cluster in its folder.
        folder = unused.folder.with_name(f"{unused.folder.name}-{kind}")
        variables = {FOLDER_VARIABLE: str(folder), PORT_VARIABLE: str(unused.port), GPUS_VARIABLE: gpus,
                     ACCOUNTING_VARIABLE: accounting}  # fmt: skip
        start_anew(repository, variables)
        cluster = Cluster.named_by(variables)
        yield cluster
        daemons.stop(cluster)


@pytest.fixture
def second(sandbox: Cluster, repository: Path) -> Iterator[Cluster]:
    with started(repository, "second", f"{sandbox.folder}:{sandbox.port}", "h100:1,t4:2") as cluster:
        yield cluster


@pytest.fixture
def without_accounting(sandbox: Cluster, repository: Path) -> Iterator[Cluster]:
    with started(repository, "alone", "off") as cluster:
        yield cluster


def sent(slurm: Slurm, *words: str) -> list[Path]:
    task = write_task(slurm.folder / "mine", CLASSIFIER)
    submitted = json.loads(slurm.can_train("--task", f"{task}:MyTask", *LINE, *words).stdout)["submitted"]
    return [Path(each["path"]) for each in submitted]


def states(slurm: Slurm, folders: list[Path]) -> list[str]:
    return [json.loads(slurm.can_train("status", folder.name, "--json").stdout)["state"] for folder in folders]


def test_a_sweep_on_another_cluster_is_listed_cancelled_and_finished_from_here(slurm: Slurm, second: Cluster) -> None:
    there = ("--clusters", second.name, "--gpus", "h100:1")
    waiting = sent(slurm, *there, "--set", "training.lr=0.1,0.2", "--begin", "now+1hour")
    assert states(slurm, waiting) == ["queued", "queued"]
    told = slurm.can_train("cancel", waiting[1].name).stdout
    assert told == f"Run {waiting[1].name}: cancelled: before it started\n"
    assert states(slurm, waiting) == ["queued", "cancelled"]
    slurm.can_train("cancel", waiting[0].name)
    assert slurm.command("squeue", "--noheader", f"--clusters={second.name}").splitlines()[1:] == []
    (run,) = sent(slurm, *there)
    slurm.wait_for((run / "result.json").exists)
    slurm.wait_for(lambda: states(slurm, [run]) == ["finished"])


def test_a_run_finishes_and_a_waiting_one_is_cancelled_without_accounting(
    slurm: Slurm, without_accounting: Cluster
) -> None:
    alone = Slurm(without_accounting, slurm.folder, slurm.variables)
    (waiting,) = sent(alone, "--begin", "now+1hour")
    assert states(alone, [waiting]) == ["queued"]
    assert alone.can_train("cancel", waiting.name).stdout == f"Run {waiting.name}: cancelled: before it started\n"
    (run,) = sent(alone, "--set", "task.hidden=9")
    alone.wait_for((run / "result.json").exists)
    alone.wait_for(lambda: states(alone, [run]) == ["finished"])
