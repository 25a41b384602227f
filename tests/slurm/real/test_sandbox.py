"""The SLURM that the other tests rely on does what a real one does."""

import os
import subprocess
import sys
from pathlib import Path

from sandbox import machine
from sandbox.cluster import FOLDER_VARIABLE, PORT_VARIABLE
from slurm.real.on_slurm import Slurm

ALLOCATE = "python3 -c 'import time; kept = bytearray(300 << 20); time.sleep(60)'"
TASK = "echo rank $SLURM_PROCID of $SLURM_NTASKS, $SLURM_LOCALID on $(hostname): gpu $CUDA_VISIBLE_DEVICES"


def test_a_job_runs_and_its_exit_code_is_known(slurm: Slurm) -> None:
    job = slurm.sbatch("echo hello; exit 3")
    assert slurm.ended(job) == "FAILED"
    assert slurm.accounts(job, "jobid", "exitcode")[0] == (job, "3:0")
    assert slurm.log(job) == "hello\n"


def test_two_nodes_of_two_tasks_see_their_place(slurm: Slurm) -> None:
    job = slurm.sbatch(f"srun sh -c '{TASK}'", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=1", "--time=1")
    assert slurm.ended(job) == "COMPLETED"
    first, second = slurm.nodes
    assert sorted(slurm.log(job).splitlines()) == [
        f"rank 0 of 4, 0 on {first}: gpu 0",
        f"rank 1 of 4, 1 on {first}: gpu 0",
        f"rank 2 of 4, 0 on {second}: gpu 0",
        f"rank 3 of 4, 1 on {second}: gpu 0",
    ]


def test_a_requeued_job_starts_again_when_it_is_kicked(slurm: Slurm) -> None:
    job = slurm.sbatch("echo $SLURM_RESTART_COUNT; test $SLURM_RESTART_COUNT || sleep 300", "--requeue")
    slurm.wait_until(job, "RUNNING")
    slurm.command("scontrol", "requeue", job)
    slurm.kick(job)
    assert slurm.ended(job) == "COMPLETED"
    assert slurm.attempts(job) == ["REQUEUED", "COMPLETED"]
    assert slurm.log(job).endswith("\n1\n")


def test_a_preempted_job_makes_room_and_comes_back(slurm: Slurm) -> None:
    wait = "test $SLURM_RESTART_COUNT || exec sleep 300"
    low = slurm.sbatch(wait, "--partition=scavenge", "--nodes=2", "--exclusive", "--requeue")
    slurm.wait_until(low, "RUNNING")
    high = slurm.sbatch("true", "--nodes=2", "--exclusive")
    assert slurm.ended(high) == "COMPLETED"
    assert slurm.ended(low) == "COMPLETED"
    assert slurm.attempts(low) == ["PREEMPTED", "COMPLETED"]


def test_memory_is_limited(slurm: Slurm) -> None:
    job = slurm.sbatch(f"srun {ALLOCATE}")
    slurm.ended(job)
    [state] = [state for step, state in slurm.accounts(job, "jobid", "state") if step == f"{job}.0"]
    assert state == ("OUT_OF_MEMORY" if machine.cgroups_usable() else "CANCELLED by 0")


def test_a_job_that_asks_for_more_time_than_its_partition_has_never_starts(slurm: Slurm) -> None:
    job = slurm.sbatch("true", "--partition=short", "--time=3")
    slurm.wait_for(lambda: slurm.queue(job, "%r") == ["PartitionTimeLimit"])


def test_a_node_is_drained_and_comes_back_for_the_next_test(slurm: Slurm) -> None:
    node = slurm.nodes[0]
    slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    job = slurm.sbatch("true", f"--nodelist={node}")
    slurm.wait_for(lambda: "ReqNodeNotAvail" in slurm.queue(job, "%r")[0])


def test_all_nodes_are_in_service_whatever_the_test_before_did(slurm: Slurm) -> None:
    assert slurm.command("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split() == ["idle"] * 2


def test_an_unknown_account_is_refused(slurm: Slurm) -> None:
    ended = subprocess.run(
        ["sbatch", "--account=nobody", "--wrap=true"], env=slurm.variables, capture_output=True, text=True, check=False
    )
    assert "Invalid account" in ended.stderr


def test_a_second_start_changes_nothing(slurm: Slurm, repository: Path) -> None:
    job = slurm.sbatch("exec sleep 300")
    slurm.wait_until(job, "RUNNING")
    subprocess.run(
        [sys.executable, repository / "scripts" / "slurm-sandbox", "start"],
        env={
            **os.environ,
            FOLDER_VARIABLE: str(slurm.cluster.folder),
            PORT_VARIABLE: str(slurm.cluster.port),
        },
        check=True,
    )
    assert slurm.queue(job, "%T") == ["RUNNING"]
