import os
from pathlib import Path

import pytest

from can_train.slurm.script import clean_environment, job_environment

OUTSIDE = {"HOME": "/home/me", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "token", "CUDA_VISIBLE_DEVICES": "1"}
OF_A_JOB = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURMD_NODENAME": "n1", "SRUN_CPUS_PER_TASK": "4",
    "SBATCH_TIMELIMIT": "1", "SUBMITIT_EXECUTOR": "slurm", "PMIX_RANK": "1", "MASTER_ADDR": "n1", "WORLD_SIZE": "2",
    "CUDA_VISIBLE_DEVICES": "3",
}  # fmt: skip


def test_nothing_of_an_enclosing_job_is_left_but_where_the_cluster_is() -> None:
    assert clean_environment(OUTSIDE) == OUTSIDE
    assert clean_environment({**OUTSIDE, **OF_A_JOB}) == {
        k: v for k, v in OUTSIDE.items() if k != "CUDA_VISIBLE_DEVICES"
    }


def test_the_environment_is_a_jobs_for_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    before = dict(os.environ)
    with job_environment(Path("/code/src")):
        assert "SLURM_JOB_ID" not in os.environ
        assert os.environ["PYTHONPATH"] == "/code/src:/mine"
    assert dict(os.environ) == before


def test_imports_come_from_the_copy_first_and_never_from_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with job_environment(Path("/a")):
        assert (os.environ["PYTHONPATH"], os.environ["PYTHONSAFEPATH"]) == ("/a", "1")
