"""What a job asks for where nobody said: its GPUs, a fair share of a node's processors and memory, and its time. A pure
function of what was asked for and what the partition has.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from can_train.config.cluster import ClusterSettings
from can_train.launch.cluster_info import Node, Partition
from can_train.policy.slurm_units import memory_text, time_text

DAY_MIN: Final = 24 * 60
"""Time limit of a job that names none: most trainings end sooner, and schedulers start short jobs first."""

MOST_CPUS: Final = 8
"""Processors of a rank that nobody asked for: preparing data uses a few, training one."""

MOST_MEMORY_MIB: Final = 32 * 2**10
"""Memory of a rank that nobody asked for; data sets in memory are far below it."""

_SHARING_MEMORY: Final = frozenset(("mem-per-cpu", "mem-per-gpu", "exclusive"))
_SHARING_CPUS: Final = frozenset(("cpus-per-gpu", "exclusive", "threads-per-core"))
"""Other options of sbatch by which a person has said how much."""


def settled(cluster: ClusterSettings, partition: Partition | None, device: str) -> ClusterSettings:
    """Decides what the settings leave open.

    Args:
        cluster: As asked for.
        partition: Where the job goes; None: nothing is known of it.
        device: Of the run: auto, cpu, cuda[:i], sim:SIZE.

    Returns:
        Settings with a number of GPUs, a time limit, and, where the partition is known, processors and memory.
    """
    cluster = replace(cluster, gpus=_gpus(cluster, partition, device), time=cluster.time or _time(partition))
    nodes = [] if partition is None else _fitting(cluster, partition.nodes)
    if not nodes:
        return cluster
    said = {str(name).replace("_", "-") for name in cluster.additional}
    cpus = cluster.cpus or (0 if said & _SHARING_CPUS else min(_cpus(node) for node in nodes))
    if cluster.mem or said & _SHARING_MEMORY:
        return replace(cluster, cpus=cpus)
    memory = min(_memory_mib(cluster, node) for node in nodes)
    return replace(cluster, cpus=cpus, mem=memory_text(memory) if memory > 0 else "")


def wants_gpu(device: str) -> bool:
    """Tells whether a device may be a GPU."""
    return device == "auto" or device.startswith("cuda")


def _gpus(cluster: ClusterSettings, partition: Partition | None, device: str) -> str:
    if cluster.gpus != "auto":
        return cluster.gpus
    asked_otherwise = cluster.ranks_per_node > 1 or "gpu" in cluster.gres
    has_gpus = device.startswith("cuda") if partition is None else any(node.num_gpus() for node in partition.nodes)
    return "1" if wants_gpu(device) and has_gpus and not asked_otherwise else "0"


def _time(partition: Partition | None) -> str:
    limit = None if partition is None else partition.max_time_min
    return time_text(DAY_MIN if limit is None else min(DAY_MIN, limit))


def _fitting(cluster: ClusterSettings, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that have the GPUs asked for: the job must fit the smallest of them."""
    return [node for node in nodes if node.num_gpus(cluster.gpu_type) >= cluster.num_gpus]


def _parts(node: Node) -> int:
    """Ranks that share a node: one a GPU, or on a node without GPUs as many as have `MOST_CPUS` processors each."""
    return max(1, node.num_gpus() or node.cpus // MOST_CPUS)


def _cpus(node: Node) -> int:
    return max(1, min(MOST_CPUS, node.cpus // _parts(node)))


def _memory_mib(cluster: ClusterSettings, node: Node) -> int:
    """Memory of a node's ranks together."""
    return min(MOST_MEMORY_MIB, node.memory_mib // _parts(node)) * cluster.ranks_per_node
