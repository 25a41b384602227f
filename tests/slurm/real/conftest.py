"""A SLURM for the tests in this folder, where CAN_TRAIN_SLURM_SANDBOX=1. Each process that runs tests has its own, so
that a test may fill it, drain a node or set one down; another session on the same machine has others.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest

from sandbox import daemons
from sandbox.cluster import DEFAULT_FOLDER, FOLDER_VARIABLE, PORT_VARIABLE, PORTS, Cluster
from slurm.real.on_slurm import Slurm

VARIABLE = "CAN_TRAIN_SLURM_SANDBOX"

FIRST_PORT = 27100
"""Of the first sandbox; the next ones' follow."""


def wanted() -> bool:
    return os.environ.get(VARIABLE) == "1"


@pytest.fixture(scope="session")
def sandbox(repository: Path) -> Iterator[Cluster]:
    if not wanted():
        pytest.skip(f"needs a SLURM: set {VARIABLE}=1")
    with unused_cluster() as cluster:
        variables = {FOLDER_VARIABLE: str(cluster.folder), PORT_VARIABLE: str(cluster.port)}
        call_sandbox(repository, "install", variables)
        start_anew(repository, variables)
        yield cluster
        daemons.stop(cluster)


def start_anew(repository: Path, variables: Mapping[str, str]) -> None:
    """Starts a sandbox; a session that was killed has stopped nothing."""
    for verb in ("stop", "start"):
        call_sandbox(repository, verb, variables)


def call_sandbox(repository: Path, verb: str, variables: Mapping[str, str]) -> None:
    command = [sys.executable, repository / "scripts" / "slurm-sandbox", verb]
    subprocess.run(command, env={**os.environ, **variables}, check=True)


@contextmanager
def unused_cluster() -> Iterator[Cluster]:
    """Takes the first of this machine's test sandboxes that no other process has; a process that dies gives it back."""
    for number in count():
        name = f"{DEFAULT_FOLDER}-tests-{number}"
        with Path(f"{name}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield Cluster(folder=Path(name), port=FIRST_PORT + number * PORTS)
            return


@pytest.fixture
def slurm(sandbox: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A SLURM without jobs, and `tmp_path` to work in."""
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_")):
            monkeypatch.delenv(name)
    for name, value in daemons.environment(sandbox).items():
        monkeypatch.setenv(name, value)
    yield Slurm(sandbox, tmp_path, os.environ)
    daemons.clear(sandbox)


# Every test that takes the fixture is marked, and none of them is skipped unseen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "slurm" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
            item.add_marker("slurm")


@pytest.hookimpl(wrapper=True, trylast=True)  # before pytest makes skips of expected failures
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return judged((yield))


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def judged(report: Report) -> Report:
    """Makes a skip a failure where SLURM is wanted: a check that was not made has not passed."""
    if wanted() and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, though {VARIABLE}=1: {report.longrepr}"
    return report
