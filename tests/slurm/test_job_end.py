"""What is found out after a job: how much memory it had, and whether that ran out."""

from pathlib import Path

import pytest

from can_train.slurm.job import host_memory_ran_out, job_memory_mib


@pytest.mark.parametrize(
    ("environment", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "1500"}, 1500),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}, 400),
        ({"SLURM_MEM_PER_GPU": "100", "SLURM_GPUS_ON_NODE": "2"}, 200),
        ({}, None),
    ],
)
def test_what_a_job_has_of_a_node_is_read_off_its_variables(environment: dict[str, str], mib: int | None) -> None:
    assert job_memory_mib(environment) == mib


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=30.0. Some of your processes may",
        "srun: error: n1: task 0: Out Of Memory",
        "slurmstepd-n1: error: StepId=1.0 exceeded memory limit (413884416 > 104857600), being killed",
        "slurmstepd: error: Exceeded job memory limit at some point.",
    ],
)
def test_a_process_killed_for_memory_shows_in_the_log(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert host_memory_ran_out("30", f"training\n{line}\nmore\n")


def test_without_a_sign_of_it_no_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not host_memory_ran_out("30", "error: CUDA out of memory. Tried to allocate 2.00 MiB\n")


def test_the_accounting_tells_of_a_step_that_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\nprintf '30|FAILED|||||||\\n30.0|OUT_OF_MEMORY|||||||\\n'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert host_memory_ran_out("30", "")


def test_what_an_attempt_before_this_one_ran_out_of_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("30|FAILED|||||||", "30.0|OUT_OF_MEMORY|||||||", "30|RUNNING|||||||", "30.0|FAILED|||||||")
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\nprintf '" + "\\n".join(rows) + "\\n'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert not host_memory_ran_out("30", "")
