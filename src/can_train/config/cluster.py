"""Names and defaults of where a submitted run goes, and what it asks for there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from can_train.config.checks import check_choice, check_range
from can_train.errors import ConfigError
from can_train.policy.slurm_units import parse_memory_mib, parse_time_min

EXECUTORS = ("slurm", "local", "debug")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """One place that `--submit` can send a run to."""

    executor: str = "local"
    """How jobs are started: slurm, local (a background process of this machine) or debug (in this process)."""
    partition: str = ""
    """Partition; empty: the cluster's default."""
    account: str = ""
    """Account that is charged; empty: the user's default."""
    qos: str = ""
    """Quality of service; empty: the default."""
    time: str = ""
    """Time limit as SLURM writes it (90, 1:30:00, 2-12); empty: a day, or the partition's limit if that is less."""
    nodes: int = 1
    """Nodes."""
    gpus: str = "auto"
    """GPUs of each node, one rank each: a number, type:number, or auto: one where the run's device is a GPU."""
    cpus: int = 0
    """Processors of each rank; 0: a share of the node."""
    mem: str = ""
    """Memory of each node (16G, 900M); empty: a share of the node."""
    constraint: str = ""
    """Features that nodes must have."""
    gres: str = ""
    """Generic resources of each node, as SLURM writes them."""
    exclude: str = ""
    """Nodes that are not to be used."""
    additional: Mapping[str, Any] = field(default_factory=dict)
    """Any other option of sbatch, by its long name."""
    setup: Sequence[str] = ()
    """Lines of shell that a job of SLURM runs first (module load, conda activate)."""
    signal_delay_s: int = 120
    """Seconds before the time limit at which a job is warned, saves and is put back into the queue."""
    max_restarts: int = 100
    """Times that a job is put back into the queue for the time limit or a killed process."""
    oom_resubmits: int = 2
    """Times that a run is submitted again after it ran out of memory."""
    max_parallel: int = 0
    """Jobs of an array that run at once; 0: any number."""

    def __post_init__(self) -> None:
        check_choice("cluster.executor", self.executor, EXECUTORS)
        check_range("cluster.nodes", self.nodes, low=1)
        for name in ("cpus", "max_restarts", "oom_resubmits", "max_parallel", "signal_delay_s"):
            check_range(f"cluster.{name}", getattr(self, name), low=0)
        self._check_resources()

    @property
    def ranks_per_node(self) -> int:
        """Processes of each node: one a GPU, and at least one."""
        return max(1, self.num_gpus or _gpus_of_gres(self.gres))

    @property
    def num_gpus(self) -> int:
        """GPUs of each node that `gpus` names; 0 where it leaves that to the partition."""
        return 0 if self.gpus == "auto" else int(self.gpus.rpartition(":")[2])

    @property
    def gpu_type(self) -> str:
        """Their kind, by the cluster's name for it; empty: any."""
        return self.gpus.rpartition(":")[0]

    def _check_resources(self) -> None:
        if self.time:
            parse_time_min(self.time)
        if self.mem:
            parse_memory_mib(self.mem)
        if self.gpus != "auto" and not re.fullmatch(r"(?:[\w.-]+:)?\d{1,4}", self.gpus, re.ASCII):
            raise ConfigError(
                "cluster.gpus is a number, type:number or auto", value=repr(self.gpus), remedy="Write it as 2 or a100:2"
            )
        if self.num_gpus and _gpus_of_gres(self.gres):
            raise ConfigError("GPUs are asked for once", value=f"gpus {self.gpus}, gres {self.gres}",
                              remedy="Leave one of them out")  # fmt: skip


def _gpus_of_gres(gres: str) -> int:
    """Counts the GPUs among generic resources: gpu:2, gpu:a100:2, gpu."""
    found = re.findall(r"(?:^|,)gpu(?::[^,:()]*[^,:()\d][^,:()]*)?(?::(\d+))?(?=[,(]|$)", gres)
    return sum(int(number or 1) for number in found)
