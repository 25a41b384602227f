"""What a login node can know to be wrong before a job waits for ever, or dies unseen: a partition that is not there,
limits over the partition's, a warning that comes before the job has started, a full disk. Decisions on what was read.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from can_train.config.cluster import ClusterSettings
from can_train.errors import ConfigError, RunError, nearest_first, unknown_name
from can_train.launch.cluster_info import Partition
from can_train.launch.shares import wants_gpu
from can_train.policy.sizes import size_text
from can_train.policy.slurm_units import memory_text, parse_memory_mib, parse_time_min, time_text

EARLY_S: Final = 60
"""Seconds that SLURM may send its warning too early."""

START_S: Final = 30
"""Seconds from a job's start until Python can take a warning: imports from a network file system."""

LEAST_DELAY_S: Final = 10
"""Shortest warning that is worth having: a checkpoint takes seconds."""

LEAST_FREE_BYTES: Final = 2**30
"""Free disk that a run needs: checkpoints and prepared data."""


def find_partitions(name: str, partitions: Sequence[Partition]) -> list[Partition]:
    """Finds the partitions that a job may go to; none where it names none and the cluster has no default.

    Args:
        name: As asked for, several by comma; empty: the default.
        partitions: Of the cluster.

    Raises:
        ConfigError: There is none of that name; the message lists them, nearest first.
    """
    if not name:
        return [partition for partition in partitions if partition.is_default]
    known = {partition.name: partition for partition in partitions}
    for part in name.split(","):
        if part not in known:
            raise unknown_name("partition", part, known)
    return [known[part] for part in name.split(",")]


def check_job(cluster: ClusterSettings, partitions: Sequence[Partition]) -> None:
    """Checks that a job could start in one of the partitions, and be warned before its end.

    Args:
        cluster: What it asks for, settled.
        partitions: Where it may go; none: nothing is known.

    Raises:
        ConfigError: It could not.
    """
    check_warning(parse_time_min(cluster.time), cluster.signal_delay_s)
    refusals = []
    for partition in partitions:
        try:
            _check_partition(cluster, partition)
        except ConfigError as error:
            refusals.append(error)
    if refusals and len(refusals) == len(partitions):
        raise refusals[0]


def _check_partition(cluster: ClusterSettings, partition: Partition) -> None:
    _check_time(cluster, partition)
    _check_nodes(cluster, partition)
    if partition.nodes:
        _check_processors(cluster, partition)
        _check_memory(cluster, partition)
        _check_gpus(cluster, partition)


def waits(partitions: Sequence[Partition]) -> str:
    """Says where a job waits for a partition that takes or starts none at the moment; empty: nowhere."""
    down = [partition.name for partition in partitions if not partition.is_up]
    if not down or len(down) < len(partitions):
        return ""
    return f"Partition {', '.join(down)} is not up: the job waits until it is"


def check_warning(time_min: int, delay_s: int) -> None:
    """Checks that a job has started before it is warned of its end.

    Raises:
        ConfigError: It could be warned before it can save anything.
    """
    spare_s = time_min * 60 - EARLY_S - START_S
    if delay_s < spare_s:
        return
    shorter = f"--set cluster.signal_delay_s={min(spare_s // 2, delay_s)}, or " if spare_s // 2 >= LEAST_DELAY_S else ""
    least = -(-(delay_s + EARLY_S + START_S + 1) // 60)
    raise ConfigError(
        f"A job must have started ({START_S} s) before it is warned of its end, up to {EARLY_S} s earlier than asked",
        value=f"time limit {time_text(time_min)}, warning {delay_s} s before it",
        remedy=f"Give {shorter}--time {least} or more",
    )


def check_device(device: str, cluster: ClusterSettings) -> str:
    """Checks that a run's device and the GPUs of its job belong together.

    Returns:
        What a person should know; empty: nothing.

    Raises:
        ConfigError: The device is a GPU that the job does not have.
    """
    gpus = cluster.num_gpus or (cluster.ranks_per_node if "gpu" in cluster.gres else 0)
    if not wants_gpu(device):
        return f"The job asks for GPUs, and trains on {device}: they stay idle" if gpus else ""
    if device.startswith("cuda") and not gpus:
        raise ConfigError("A run on a GPU needs a job with one", value=f"--device {device}", remedy="Give --gpus 1")
    if device.startswith("cuda:"):
        raise ConfigError(
            "A job's ranks take its GPUs one each", value=f"--device {device}", remedy="Give --device cuda"
        )
    return ""


def check_disk(folder: Path, flag: str, free_bytes: Callable[[Path], int] | None = None) -> None:
    """Checks that there is room in a folder, or where it will be made.

    Args:
        folder: It need not exist.
        flag: What names it.
        free_bytes: Measures; None: asks the system.

    Raises:
        RunError: There is not.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = (free_bytes or _free_bytes)(there)
    if free < LEAST_FREE_BYTES:
        raise RunError(
            f"A run needs {size_text(LEAST_FREE_BYTES)} of disk for checkpoints and prepared data",
            value=f"{size_text(free)} free in {there}",
            remedy=f"Free some, or give another folder with {flag}",
        )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _check_time(cluster: ClusterSettings, partition: Partition) -> None:
    limit = partition.max_time_min
    if limit is not None and parse_time_min(cluster.time) > limit:
        raise _over("Its time limit is", time_text(limit), partition, asked=cluster.time, remedy="--time")


def _check_nodes(cluster: ClusterSettings, partition: Partition) -> None:
    most = min(partition.max_nodes or len(partition.nodes), len(partition.nodes) or cluster.nodes)
    if cluster.nodes > most:
        raise _over("A job has at most", f"{most} nodes", partition, asked=str(cluster.nodes), remedy="--nodes")


def _check_processors(cluster: ClusterSettings, partition: Partition) -> None:
    wanted = max(1, cluster.cpus) * cluster.ranks_per_node
    most = max(node.cpus for node in partition.nodes)
    if wanted > most:
        asked = (
            f"{wanted}: {cluster.ranks_per_node} of {cluster.cpus} each" if cluster.ranks_per_node > 1 else f"{wanted}"
        )
        raise _over("A node has at most", f"{most} processors", partition, asked=asked, remedy="--cpus")


def _check_memory(cluster: ClusterSettings, partition: Partition) -> None:
    most = max(node.memory_mib for node in partition.nodes)
    if cluster.mem and parse_memory_mib(cluster.mem) > most:
        raise _over("A node has at most", memory_text(most), partition, asked=cluster.mem, remedy="--mem")


def _check_gpus(cluster: ClusterSettings, partition: Partition) -> None:
    kind, wanted = cluster.gpu_type, cluster.num_gpus
    if not wanted or any(node.num_gpus(kind) >= wanted for node in partition.nodes):
        return
    kinds = {name for node in partition.nodes for name in node.gpus if name}
    if kind and kind not in kinds:
        named = f"Of this partition: {', '.join(nearest_first(kind, kinds))}" if kinds else "It has no kinds of GPUs"
        raise ConfigError(f"Partition {partition.name} has no GPU of this kind", value=repr(kind), remedy=named)
    most = max(node.num_gpus(kind) for node in partition.nodes)
    raise _over("A node has at most", f"{most} GPUs", partition, asked=cluster.gpus, remedy="--gpus")


def _over(what: str, limit: str, partition: Partition, *, asked: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"Partition {partition.name} would never start this job. {what} {limit}",
        value=f"asked for {asked}",
        remedy=f"Give {remedy} less, or another --partition",
    )
