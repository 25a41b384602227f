"""The environment that a job starts with: this process's, without what belongs to an enclosing job or would beat what
is asked for, and with the job's own copy of the code to import.
"""

import os
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_KEPT: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""SLURM's variables that say where the cluster is and who asks."""

_FOREIGN: Final = ("SLURM_", "SLURMD_", "SLURMSTEPD_", "SRUN_", "SBATCH_", "SUBMITIT_", "PMI_", "PMIX_")
"""Beginnings of the variables of an enclosing job, and of those that silently beat what a script says."""

_RANKS: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What an enclosing job's processes were told of each other."""

_GIVEN_GPUS: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
"""What SLURM tells a job of its GPUs; those of an enclosing job are not the new one's."""


@contextmanager
def job_environment(source: Path | None = None) -> Iterator[None]:
    """Makes this process's environment the one that a job is to start with, for the block.

    Args:
        source: Folder that the job imports first, before any other and not after its working folder; None: a script
            says so.
    """
    before = dict(os.environ)
    with environment({**clean_environment(before), **(import_path(source, before) if source else {})}):
        yield


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Makes some variables this process's whole environment, for the block."""
    before = dict(os.environ)
    try:
        _replace_environment(variables)
        yield
    finally:
        _replace_environment(before)


def remembered_environment(encoded: bytes) -> dict[str, str]:
    """Reads what the first line of a job's script remembered: what `env -0` prints, in Base64.

    Raises:
        ValueError: It is something else.
    """
    pairs = [os.fsdecode(pair) for pair in b64decode(encoded, validate=True).split(b"\0") if pair]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a job is submitted with: none of an enclosing job's, nor any that beats the script."""
    stray = {*_RANKS, *(_GIVEN_GPUS if "SLURM_JOB_ID" in environment else ())}
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name.startswith(_FOREIGN) or name in stray)
    }


def import_path(source: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which Python imports from `source` first, and never from its working folder."""
    after = environment.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{source}{os.pathsep}{after}" if after else str(source), "PYTHONSAFEPATH": "1"}


def _replace_environment(variables: Mapping[str, str]) -> None:
    for name in [*os.environ]:
        if name not in variables:
            del os.environ[name]
    os.environ.update(variables)
