"""What a job asks of SLURM: the parameters that submitit makes the batch script of, and that script."""

import os
import shlex
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from can_train.config.cluster import ClusterSettings


def parameters(cluster: ClusterSettings, *, name: str, code: Path) -> dict[str, Any]:
    """Returns submitit's parameters of a job.

    Args:
        cluster: What is asked for.
        name: Of the job.
        code: Folder whose `src` is imported.
    """
    wanted = {
        "name": name,
        "partition": cluster.partition,
        "time": 60,
        "nodes": cluster.nodes,
        "mem": cluster.mem,
        "signal_delay_s": cluster.signal_delay_s,
        "setup": [f"export PYTHONPATH={shlex.quote(str(code / 'src'))}", "export PYTHONSAFEPATH=1", *cluster.setup],
        "srun_args": ["--kill-on-bad-exit=1"],
        "additional_parameters": {"requeue": True, "kill-on-invalid-dep": "yes", **cluster.additional},
        "stderr_to_stdout": True,
    }
    return {("job_name" if key == "name" else key): value for key, value in wanted.items() if value not in ("", None)}


def executor(folder: Path, wanted: dict[str, Any]) -> SlurmExecutor:
    """Opens submitit's executor."""
    made = SlurmExecutor(folder)
    made.parameters.update(wanted)
    return made


def job_environment() -> dict[str, str]:
    """Returns the variables that a job is submitted with: none of an enclosing job's, but where the cluster is."""
    return {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}
