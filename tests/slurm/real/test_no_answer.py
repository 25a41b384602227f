"""A SLURM that does what it is asked and whose answer does not arrive, or that does not answer at all."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from can_train.runs.registry import JobRecord, Registry
from sandbox import daemons
from slurm.real.on_slurm import Slurm

TRAIN = ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=8",
         "--epochs", "1", "--no-baselines", "--device", "cpu", "--mem", "1500M", "--time", "10", "--submit",
         "--set", "cluster.additional.hold=true")  # fmt: skip

SILENT = """#!/bin/sh
{program} "$@" > /dev/null
"""
BREAKS_SQUEUE = SILENT + "touch squeue-is-broken\n"
SLOW = """#!/bin/sh
case "$*" in *--help*) exec {program} "$@";; esac
touch asked; sleep 1
{program} "$@"
status=$?; sleep 1; exit $status
"""
BREAKABLE = """#!/bin/sh
[ ! -e squeue-is-broken ] || exit 1
{program} "$@"
"""


@contextmanager
def instead(slurm: Slurm, **programs: str) -> Iterator[None]:
    """Puts programs before SLURM's own of the same names."""
    folder, path = slurm.folder / "programs", slurm.variables["PATH"]
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(text.format(program=f"/usr/bin/{name}"))
        (folder / name).chmod(0o755)
    slurm.variables["PATH"] = f"{folder}:{path}"
    try:
        yield
    finally:
        slurm.variables["PATH"] = path


@contextmanager
def without_controller(slurm: Slurm) -> Iterator[None]:
    """Stops the controller's process, which keeps its connections: who asks waits."""
    controller = daemons.running(slurm.cluster)["slurmctld"]
    os.kill(controller, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(controller, signal.SIGCONT)


def queued(slurm: Slurm) -> list[str]:
    return slurm.command("squeue", "--me", "--noheader", "--format=%i").split()


def only_run(slurm: Slurm) -> Path:
    (path,) = (slurm.folder / "runs").glob("2*")
    return path


def jobs(slurm: Slurm) -> list[JobRecord]:
    return Registry(slurm.folder / "state").jobs(only_run(slurm).name)


def test_a_job_that_sbatch_submitted_without_saying_so_is_found(slurm: Slurm) -> None:
    # Of the same name, and another folder's.
    other = slurm.sbatch("true", "--hold", "--job-name=synthetic_gat_student_normal")
    with instead(slurm, sbatch=SILENT):
        (run,) = json.loads(slurm.can_train(*TRAIN, "--json").stdout)["submitted"]
    assert {run["job_id"], other} == {*queued(slurm)}
    assert slurm.queue(run["job_id"], "%j") == ["synthetic_gat_student_normal"]


def test_an_array_that_sbatch_submitted_without_saying_so_is_found(slurm: Slurm) -> None:
    with instead(slurm, sbatch=SILENT):
        runs = json.loads(slurm.can_train(*TRAIN, "--set", "training.seed=range(0,3)", "--json").stdout)["submitted"]
    assert len({*queued(slurm)}) == 1
    array = runs[0]["job_id"].partition("_")[0]
    assert [run["job_id"] for run in runs] == [f"{array}_{element}" for element in range(3)]


def test_a_job_of_which_nobody_heard_is_taken_back_before_there_is_another(slurm: Slurm) -> None:
    slurm.can_train(*TRAIN)
    run = str(only_run(slurm))
    slurm.can_train("cancel", run)
    with instead(slurm, sbatch=BREAKS_SQUEUE, squeue=BREAKABLE):
        refused = slurm.can_train("resume", run, check=False)
    assert refused.returncode == 2
    assert "whether it took the job is not known" in refused.stderr
    (unseen,) = queued(slurm)
    slurm.can_train("resume", run)
    assert queued(slurm) == [jobs(slurm)[-1].job_id]
    assert unseen not in [job.job_id for job in jobs(slurm)]


def test_a_submission_that_ctrl_c_interrupts_leaves_no_job_that_no_run_knows(slurm: Slurm) -> None:
    command = [sys.executable, "-P", "-m", "can_train", *TRAIN]
    with instead(slurm, sbatch=SLOW):
        process = subprocess.Popen(command, cwd=slurm.folder, env=slurm.variables, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True)  # fmt: skip
        slurm.wait_for((slurm.folder / "asked").exists)
        # To the whole group, as a terminal sends it.
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=60)
    (job,) = jobs(slurm)
    assert (process.returncode, queued(slurm)) == (130, [job.job_id])
    assert f"job {job.job_id} was submitted first. To take back: can-train cancel {job.run_id}" in " ".join(
        told.split()
    )


def test_where_the_controller_hangs_files_answer_and_nothing_is_changed(slurm: Slurm) -> None:
    slurm.can_train(*TRAIN)
    run, before = str(only_run(slurm)), queued(slurm)
    with without_controller(slurm):
        told = json.loads(slurm.can_train("status", run, "--json").stdout)
        refused = [slurm.can_train(verb, run, check=False) for verb in ("cancel", "resume")]
    assert (told["state"], told["certain"]) == ("queued", False)
    for one in refused:
        assert one.returncode == 2
        assert "The state of the job is unknown" in one.stderr
    assert queued(slurm) == before
    assert len(jobs(slurm)) == 1
