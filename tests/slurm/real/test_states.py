"""What `runs` and `status` say is what a real SLURM did: with its accounting, and without. What jobs do is a line of
shell each; that a training's own endings reach the same commands, the last tests see.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fakes.made_runs import KEY, Runs, begin
from slurm.real.on_slurm import Slurm

TRAINING = ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=8",
            "--device", "cpu", "--no-baselines", "--submit", "--cluster", "slurm", "--mem", "1500M",
            "--time", "10")  # fmt: skip

EATS_MEMORY = """srun python3 -c 'import time; x = bytearray(400 << 20); time.sleep(5)'; exit 1"""


@pytest.fixture
def runs(slurm: Slurm) -> Runs:
    return Runs(slurm.folder)


def submit(slurm: Slurm, runs: Runs, number: int, script: str, *options: str) -> tuple[str, str]:
    """Makes a run whose job is a line of shell; returns its id and the job's."""
    path = runs.add(number)
    job = slurm.sbatch(script, f"--job-name={KEY}", *options)
    runs.submit(path, job, log_path=str(slurm.folder / f"{job}.log"), cluster=slurm.cluster.name)
    return path.name, job


def listed(slurm: Slurm) -> dict[str, dict[str, Any]]:
    found = json.loads(slurm.can_train("runs", "--json", "--limit", "0").stdout)
    return {each["run_id"]: each for each in found}


def without_accounting(slurm: Slurm) -> None:
    """Puts a sacct before the real one that does what it does where accounting is off."""
    programs = slurm.folder / "programs"
    programs.mkdir()
    (programs / "sacct").write_text("#!/bin/sh\necho Slurm accounting storage is disabled >&2\nexit 1\n")
    (programs / "sacct").chmod(0o755)
    slurm.variables["PATH"] = f"{programs}:{slurm.variables['PATH']}"


def left_queue(slurm: Slurm, *jobs: str) -> None:
    slurm.wait_for(lambda: not slurm.command("squeue", "--noheader", f"--jobs={','.join(jobs)}"))


@pytest.mark.parametrize("accounting", [True, False])
def test_each_ending_is_told_with_its_cause(slurm: Slurm, runs: Runs, accounting: bool) -> None:
    # It must not have failed before the job that depends on it is there.
    _, parent = ok = submit(slurm, runs, 1, "exit 1", "--hold")
    cases = {
        submit(slurm, runs, 2, "echo 'ValueError: no such thing'; exit 3"): ("failed", "ValueError: no such thing"),
        submit(slurm, runs, 3, EATS_MEMORY): ("host out-of-memory", "memory"),
        submit(slurm, runs, 4, "exit 0", f"--dependency=afterok:{parent}", "--kill-on-invalid-dep=yes"): (
            "never started", "did not finish"),
        submit(slurm, runs, 5, "exit 0", "--output=/no/such/folder/log"): ("never started", "log file"),
    }  # fmt: skip
    slurm.command("scontrol", "release", parent)
    left_queue(slurm, *(job for _, job in (*cases, ok)))
    if accounting:
        for _, job in cases:
            slurm.ended(job)
    else:
        without_accounting(slurm)
    found = listed(slurm)
    told = {run: (found[run]["state"], part in found[run]["why"]) for (run, _), (_, part) in cases.items()}
    assert told == {run: (state, True) for (run, _), (state, _) in cases.items()}


@pytest.mark.parametrize("accounting", [True, False])
def test_what_waits_is_queued_with_the_reason_until_it_is_cancelled(slurm: Slurm, runs: Runs, accounting: bool) -> None:
    if not accounting:
        without_accounting(slurm)
    reasons = {
        submit(slurm, runs, 1, "exit 0", "--hold")[0]: "held by its user",
        submit(slurm, runs, 2, "exit 0", "--begin=now+1hour")[0]: "its start was set for later",
        submit(slurm, runs, 3, "exit 0", "--partition=short", "--time=60")[0]: "above the partition's",
    }
    found = slurm.wait_for(
        lambda: all(reasons[run] in each["why"] for run, each in listed(slurm).items()) and listed(slurm)
    )
    assert {each["state"] for each in found.values()} == {"queued"}
    for run in reasons:
        assert re.search("cancelled: before it started", slurm.can_train("cancel", run).stdout)
    assert {each["state"] for each in listed(slurm).values()} == {"cancelled"}
    assert slurm.command("squeue", "--noheader") == ""


def test_a_run_that_was_cancelled_from_outside_is_cancelled_too(slurm: Slurm, runs: Runs) -> None:
    run, job = submit(slurm, runs, 1, "sleep 300")
    slurm.wait_until(job, "RUNNING")
    assert listed(slurm)[run]["state"] == "running"
    begin(runs.runs_dir / run, job_id=job, cluster=slurm.cluster.name)
    slurm.command("scancel", job)
    assert slurm.ended(job) == "CANCELLED"
    assert listed(slurm)[run]["state"] == "cancelled"


def test_each_element_of_an_array_has_its_own_state_and_end(slurm: Slurm, runs: Runs) -> None:
    script = "test $SLURM_ARRAY_TASK_ID -lt 8 || sleep 300; exit $((SLURM_ARRAY_TASK_ID % 2))"
    job = slurm.sbatch(script, "--array=0-9", "--output=%A_%a.log", "--mem=50")
    names = []
    for element in range(10):
        path = runs.add(element)
        runs.submit(
            path, f"{job}_{element}", log_path=str(slurm.folder / f"{job}_{element}.log"), cluster=slurm.cluster.name
        )
        names.append(path.name)
    slurm.wait_for(lambda: slurm.command("squeue", "--noheader", "--array", f"--jobs={job}").count("\n") == 2)
    slurm.wait_for(lambda: {listed(slurm)[name]["state"] for name in names[8:]} == {"running"})
    slurm.can_train("cancel", names[8])
    found = slurm.wait_for(lambda: (each := listed(slurm))[names[8]]["state"] == "cancelled" and each)
    assert found[names[9]]["state"] == "running", "only the one element was cancelled"
    assert {found[name]["why"] for name in names[0:8:2]} == {"its job ended without a result"}
    # The accounting, which knows, hears of an end some seconds after it.
    slurm.wait_for(lambda: {(each := listed(slurm))[name]["why"] for name in names[1:8:2]} == {"exit code 1"} and each)


def test_a_training_is_cancelled_saved_and_submitted_again_for_the_same_folder(slurm: Slurm) -> None:
    out = slurm.can_train(*TRAINING, "--epochs", "5000").stdout
    run = next(word for word in out.split() if "synthetic_gat" in word)
    slurm.wait_for(lambda: (listed(slurm)[run]["step"] or 0) > 0)
    assert "queued or running" in slurm.can_train("resume", run, check=False).stderr
    assert "cancelled" in slurm.can_train("cancel", run).stdout
    cancelled = listed(slurm)[run]
    assert cancelled["saved_step"] == cancelled["step"]
    assert "goes on as job" in slurm.can_train("resume", run).stdout
    again = slurm.wait_for(lambda: (each := listed(slurm)[run])["step"] > cancelled["step"] and each)
    assert (again["state"], len(again["jobs"]), len(again["attempts"])) == ("running", 2, 2)
    slurm.can_train("cancel", run)


def test_a_log_is_followed_to_the_end_of_a_finished_training(slurm: Slurm) -> None:
    out = slurm.can_train(*TRAINING, "--epochs", "1").stdout
    run = next(word for word in out.split() if "synthetic_gat" in word)
    followed = slurm.can_train("logs", run, "-f")
    assert "Result: " in followed.stdout
    assert f"Run {run}: finished" in followed.stderr
    assert Path(listed(slurm)[run]["path"], "result.json").is_file()
