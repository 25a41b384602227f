"""A submission that is interrupted, or whose job cannot be recorded: no job stays in the queue that no run knows."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.runs.registry import JobRecord, Registry
from fakes.slurm_clusters import Clusters
from guards.sources import PACKAGE

INTERRUPTED = 128 + signal.SIGINT
TRAIN = ("--model", "gat", "--dataset", "synthetic", "--submit")
SWEEP = (*TRAIN, "--set", "training.seed=range(0,3)")
SEARCH = (*TRAIN, "--set", "training.lr=interval(1e-4,1e-2)", "--trials", "2")
ANSWER = "echo Submitted batch job 12"
WAIT_S = 60.0


@pytest.fixture
def alpha(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clusters:
    """Makes this machine one of a cluster."""
    clusters = Clusters(tmp_path, "alpha")
    monkeypatch.setenv("PATH", f"{clusters.bin}:/usr/bin:/bin")
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return clusters


def sbatch_does(clusters: Clusters, *lines: str) -> None:
    """Gives the cluster an sbatch that asks nobody, but where it is asked for its options."""
    text = "\n".join(("#!/bin/sh", 'case "$*" in *--help*|*--version*) exit 1;; esac', *lines, ""))
    (clusters.bin / "sbatch").write_text(text)


def jobs_of(folder: Path) -> list[JobRecord]:
    registry = Registry(folder / "state")
    return [job for run in registry.runs() for job in registry.jobs(run.run_id)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("line", "jobs"), [(TRAIN, ["12"]), (SWEEP, ["12_0", "12_1", "12_2"]), (SEARCH, ["12_0", "12_1"])],
    ids=["run", "sweep", "search"],
)  # fmt: skip
def test_a_signal_while_sbatch_is_asked_waits_until_the_job_is_recorded(
    alpha: Clusters,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: Sequence[str],
    jobs: list[str],
    number: int,
) -> None:
    sbatch_does(alpha, f"kill -{number} {os.getpid()}; sleep 0.2", ANSWER)
    before = signal.getsignal(number)
    assert main(line) == 128 + number
    told = " ".join(capsys.readouterr().err.split())
    assert [job.job_id for job in jobs_of(tmp_path)] == jobs
    started = "job 12 was" if len(jobs) == 1 else f"jobs 12_0 to {jobs[-1]} were"
    runs = Registry(tmp_path / "state").runs()
    assert (
        f"interrupted: {started} submitted first. To take back: can-train cancel {runs[0].sweep or runs[0].run_id}"
        in told
    )
    assert signal.getsignal(number) == before
    assert all(Path(run.path).is_dir() for run in runs)


def test_a_signal_while_a_run_is_submitted_again_waits_until_the_job_is_recorded(
    alpha: Clusters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SWEEP) == 0
    runs = [run.run_id for run in Registry(tmp_path / "state").runs()]
    sbatch_does(alpha, f"kill -INT {os.getpid()}; sleep 0.2", "echo Submitted batch job 14")
    assert main(("resume", runs[0])) == INTERRUPTED
    assert main(("resume", *runs[1:])) == INTERRUPTED
    told = capsys.readouterr().err
    assert f"To take back: can-train cancel {runs[0]}\n" in told
    # Not the whole sweep.
    assert f"can-train cancel {runs[1]} {runs[2]}" in " ".join(told.split())
    again = [job.job_id for job in jobs_of(tmp_path) if job.reason == "resumed"]
    assert sorted(again) == ["14", "14_0", "14_1"]


def test_a_signal_between_two_stages_of_a_pipeline_leaves_the_first_one_recorded(
    alpha: Clusters, tmp_path: Path
) -> None:
    sbatch_does(alpha, f"kill -INT {os.getpid()}; sleep 0.2", ANSWER)
    line = ("pipeline", "--dataset", "synthetic", "--submit")
    assert main(line) == INTERRUPTED
    assert [job.job_id for job in jobs_of(tmp_path)] == ["12"]


def interrupted_on_a_terminal(folder: Path, times: int) -> tuple[int, str, float]:
    """Submits, and sends SIGINT to the whole process group while sbatch works, as a terminal does at each Ctrl-C."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-P", "-m", "can_train", *TRAIN]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        until = time.monotonic() + WAIT_S
        while not (folder / "asked").exists() and time.monotonic() < until:
            time.sleep(0.05)
        begin = time.monotonic()
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.5)
        _, told = process.communicate(timeout=WAIT_S)
    return process.returncode, " ".join(told.split()), time.monotonic() - begin


def test_the_terminal_s_ctrl_c_does_not_reach_sbatch(alpha: Clusters, tmp_path: Path) -> None:
    sbatch_does(alpha, "touch asked; sleep 2; touch answered", ANSWER)
    status, told, _ = interrupted_on_a_terminal(tmp_path, 1)
    (job,) = jobs_of(tmp_path)
    assert (status, job.job_id, (tmp_path / "answered").exists()) == (INTERRUPTED, "12", True)
    assert told == (
        "the job is being submitted: this command ends when it is recorded, after seconds "
        f"interrupted: job 12 was submitted first. To take back: can-train cancel {job.run_id}"
    )


def test_a_second_ctrl_c_ends_a_submission_at_once_and_names_the_job(alpha: Clusters, tmp_path: Path) -> None:
    sbatch_does(alpha, "touch asked; sleep 60", ANSWER)
    status, told, took_s = interrupted_on_a_terminal(tmp_path, 2)
    assert status == INTERRUPTED
    assert took_s < 50  # sbatch would answer after 60 s
    name = "synthetic_gat_student_normal"
    look = f"Look: squeue --me --name={name}. Take it out: scancel JOBID"
    assert told.endswith(f"interrupted: a job {name} may be in the queue. {look}")


# Its last command makes the registry a file, in which nothing can be written.
BREAKS_REGISTRY = 'rm -rf "$CAN_TRAIN_HOME/runs"; touch "$CAN_TRAIN_HOME/runs"'


@pytest.mark.parametrize("line", [TRAIN, SWEEP], ids=["run", "sweep"])
def test_a_job_that_cannot_be_recorded_is_cancelled(
    alpha: Clusters, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: Sequence[str]
) -> None:
    sbatch_does(alpha, f"export CAN_TRAIN_HOME={tmp_path / 'state'}; {BREAKS_REGISTRY}", ANSWER)
    assert main(line) == 2
    assert "error: " in capsys.readouterr().err
    assert alpha.cancelled("alpha") == ["12"]
    # Nothing stays of runs that have no job.
    assert not [*(tmp_path / "runs").glob("2*")]


def test_a_job_that_can_be_neither_recorded_nor_cancelled_is_named(
    alpha: Clusters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch_does(alpha, f"export CAN_TRAIN_HOME={tmp_path / 'state'}; {BREAKS_REGISTRY}", ANSWER)
    (alpha.bin / "scancel").write_text("#!/bin/sh\necho 'scancel: error: Kill job error' >&2; exit 1\n")
    assert main((*TRAIN, "--json")) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["rule"] == "SLURM took a job that could be neither recorded nor cancelled"
    assert error["value"].startswith("job 12 on alpha: ")
    assert error["value"].endswith("; scancel: error: Kill job error")
    assert error["remedy"] == "Cancel it: scancel 12"


def test_a_job_whose_files_cannot_be_written_after_sbatch_has_answered_is_cancelled(
    alpha: Clusters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # submitit moves its files into place when it knows the number.
    sbatch_does(alpha, 'mkdir "${1%/*}/12_submission.sh"', ANSWER)
    assert main(TRAIN) == 2
    assert alpha.cancelled("alpha") == ["12"]
    assert not Registry(tmp_path / "state").runs()


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_job_that_slurm_took_before_its_answer_was_lost_is_cancelled(
    alpha: Clusters, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_taken: bool
) -> None:
    refusal = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    # The job logs into the folder of the script.
    log = f'echo "JobId=12 StdOut=${{1%/*}}/12_0_log.out Power=" > {tmp_path}/clusters/alpha/12.job' if is_taken else ""
    sbatch_does(alpha, log, f"echo '{refusal}' >&2; exit 1")
    alpha.write("alpha", "mine", "12|synthetic_gat_student_normal\n" if is_taken else "")
    assert main((*TRAIN, "--json")) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["rule"] == "SLURM did not answer sbatch"
    outcome = "it took the job, which was cancelled again" if is_taken else "it did not take the job"
    assert error["value"].endswith(f"Socket timed out on send/recv operation; {outcome}")
    assert alpha.cancelled("alpha") == (["12"] if is_taken else [])
    assert not Registry(tmp_path / "state").runs()
