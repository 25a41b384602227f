"""What a test does with its SLURM: send jobs, wait for them, call can-train as a user would, in a folder of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from fakes.processes import Command
from sandbox import daemons
from sandbox.cluster import Cluster

WAIT_LIMIT_S = 600
"""Where a test gives up: many times what a job of a few seconds takes, since a dozen of them share two cores."""

LOOK_INTERVAL_S = 0.2

UNFINISHED = {"PENDING", "RUNNING"}
"""What sacct says until it has heard of a job's end, a second or two after squeue."""

T = TypeVar("T")


class Slurm:
    """A running sandbox, and a test's folder.

    Args:
        cluster: The sandbox.
        folder: Where scripts, logs, runs and states of this test lie.
        variables: The environment of its commands.
    """

    def __init__(self, cluster: Cluster, folder: Path, variables: Mapping[str, str]) -> None:
        self.cluster = cluster
        self.folder = folder
        self.variables = {**variables, **daemons.environment(cluster), "CAN_TRAIN_HOME": str(folder / "state")}

    @property
    def nodes(self) -> list[str]:
        return self.cluster.nodes

    def can_train(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Calls can-train; its runs lie in `runs` of the folder."""
        ended = self._called(*arguments)
        if check and ended.returncode != 0:
            pytest.fail(f"can-train {' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
        return ended

    def _called(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        if self.variables.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
            # Other code than what a fork has imported.
            return self._run([sys.executable, "-P", "-m", "can_train", *arguments])
        with Command(*arguments, folder=self.folder, variables=self.variables) as command:
            status = command.wait()
            return subprocess.CompletedProcess(arguments, status, command.stdout, command.stderr)

    def launched(self, *launcher: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Has one of SLURM's launchers call can-train."""
        return self._run([*launcher, sys.executable, "-P", "-m", "can_train", *words])

    def command(self, *words: str) -> str:
        """Runs one of SLURM's commands and returns what it prints."""
        ended = self._run(words)
        if ended.returncode != 0:
            pytest.fail(f"{' '.join(words)} ended with {ended.returncode}: {ended.stderr}")
        return ended.stdout

    def attempt(self, *words: str) -> None:
        """Runs one of SLURM's commands, which may fail."""
        self._run(words)

    def _run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )

    def sbatch(self, script: str, *options: str) -> str:
        """Sends a script (its lines after #!) and returns the job's id; its log is `ID.log` in the folder."""
        limits = ("--time=5", "--mem=100", "--output=%j.log", "--open-mode=append")
        return self.command("sbatch", "--parsable", *limits, *options, f"--wrap={script}").strip()

    def log(self, job: str) -> str:
        return (self.folder / f"{job}.log").read_text()

    # States

    def queue(self, job: str, form: str) -> list[str]:
        """What squeue says of a job, running or not: a line for each element, by squeue's %-codes."""
        return self.command("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={form}").splitlines()

    def accounts(self, job: str, *fields: str) -> list[tuple[str, ...]]:
        """What sacct says of a job: a tuple of fields for each of its attempts, and for the steps of each."""
        lines = self.command("sacct", "-D", "-n", "-P", f"--jobs={job}", f"--format={','.join(fields)}").splitlines()
        return [tuple(line.split("|")) for line in lines]

    def attempts(self, job: str) -> list[str]:
        """The states of a job's attempts, in order."""
        rows = self.accounts(job, "jobid", "state")
        return [state.split()[0] for name, state in rows if "." not in name]

    def wait_for(self, value: Callable[[], T]) -> T:
        """Waits until a function returns something true, and returns that."""
        deadline = time.monotonic() + WAIT_LIMIT_S
        while time.monotonic() < deadline:
            if found := value():
                return found
            time.sleep(LOOK_INTERVAL_S)
        pytest.fail(f"nothing came in {WAIT_LIMIT_S} s; squeue says:\n{self.command('squeue', '--states=all')}")

    def wait_until(self, job: str, state: str) -> None:
        """Waits until squeue shows a job, or each element of an array, in a state."""
        self.wait_for(lambda: {*self.queue(job, "%T")} == {state})

    def ended(self, job: str) -> str:
        """Waits for a job's end and returns its last attempt's state, as sacct has it."""
        self.wait_for(lambda: not self.command("squeue", "--noheader", f"--jobs={job}"))
        return self.wait_for(lambda: {*self.attempts(job)[-1:]} - UNFINISHED).pop()

    def kick(self, job: str) -> None:
        """Starts a requeued job without the wait that SLURM wants."""
        daemons.kick(self.cluster, job)
