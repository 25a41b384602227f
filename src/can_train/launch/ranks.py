"""Reads off SLURM's environment where a process stands among those of its job step; connecting them is the engine's."""

from collections.abc import Mapping
from typing import Final

from submitit.slurm.slurm import _parse_node_list

from can_train.engine.ranks import RankPlace

FIRST_PORT: Final = 15_000
PORTS: Final = 17_000
"""Ports for rank 0, by job: above what services use, below 32,768, where Linux begins to give ports to anybody."""


def rank_place(environment: Mapping[str, str]) -> RankPlace | None:
    """Tells where this process stands; None where it is the only one, as in the shell of a job of several tasks.

    MASTER_ADDR and MASTER_PORT decide where rank 0 listens where they are set, else it is the step's first node, and a
    port that follows from the job's number.

    Args:
        environment: Variables as `srun` sets them.
    """
    # SLURM_NTASKS is set in that shell too, with a SLURM_PROCID of 0: it would wait for ranks that nobody starts.
    size = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if size == 1:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    return RankPlace(
        rank=int(environment["SLURM_PROCID"]),
        size=size,
        local_rank=int(environment["SLURM_LOCALID"]),
        address=environment.get("MASTER_ADDR") or _parse_node_list(nodes)[0],
        port=int(environment.get("MASTER_PORT") or FIRST_PORT + int(environment["SLURM_JOB_ID"]) % PORTS),
    )
