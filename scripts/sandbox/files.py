"""The text of the sandbox's configuration files, from the templates in `conf/`. daemons.py writes them."""

from pathlib import Path
from typing import Final

from sandbox.cluster import CPUS_PER_NODE, MEMORY_PER_NODE_MIB, Cluster

DATABASE: Final = "slurm_accounting"
DATABASE_USER: Final = "slurm"
"""Also its password. The database listens on the loopback interface only, and holds nothing but tests' jobs."""

KILL_WAIT_S: Final = 5
"""Time between SIGTERM and SIGKILL: enough to save a checkpoint on a busy machine. SLURM's default is 30."""

REQUEUE_HOLD_S: Final = 15
"""The lifetime of a job's credential (`cred_expire`, 120 by default). SLURM holds a requeued job back for one second
longer. It must exceed KILL_WAIT_S + 6 s: a node that was set down may keep a step for so long, and SLURM drains it if
its job comes back sooner."""


def slurm_conf(cluster: Cluster, *, host: str, cgroups: bool) -> str:
    """Makes slurm.conf.

    Args:
        cluster: The sandbox.
        host: This machine's name.
        cgroups: Whether to limit a job's memory by cgroups (version 1). Otherwise SLURM polls it once a second.
    """
    polled = "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherParams=OverMemoryKill"
    limits = "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup" if cgroups else polled
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} Boards=1 "
        f"SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory={MEMORY_PER_NODE_MIB} "
        f"Gres=gpu:{gpus}"
        for node, port, gpus in zip(cluster.nodes, cluster.node_ports, cluster.gpus, strict=True)
    )
    accounting = _filled("accounting.conf", cluster) if cluster.has_accounting else ""
    return _filled("slurm.conf", cluster, host=host, memory_limits=limits, node_lines=nodes, accounting=accounting)


def gres_conf(cluster: Cluster) -> str:
    """Makes gres.conf. SLURM requires a device file for each GPU, but does not open it."""
    lines = []
    for node, gpus in zip(cluster.nodes, cluster.gpus, strict=True):
        kind, number = gpus.split(":")
        files = ",".join(f"{cluster.folder}/dev/gpu{index}" for index in range(int(number)))
        lines.append(f"NodeName={node} Name=gpu Type={kind} File={files} Flags=nvidia_gpu_env")
    return "\n".join(["AutoDetect=off", *lines, ""])


def cgroup_conf(cluster: Cluster) -> str:
    """Makes cgroup.conf. Only memory is limited, since the nodes' CPUs and GPUs do not exist."""
    return _filled("cgroup.conf", cluster)


def slurmdbd_conf(cluster: Cluster, *, host: str) -> str:
    """Makes slurmdbd.conf."""
    return _filled("slurmdbd.conf", cluster, host=host)


def _filled(name: str, cluster: Cluster, **fields: str) -> str:
    template = Path(__file__).with_name("conf") / name
    return template.read_text().format(**globals(), cluster=cluster, nodes=",".join(cluster.nodes), **fields)


def database_rights() -> str:
    """Makes the SQL that creates the database and user of slurmdbd."""
    user = f"'{DATABASE_USER}'@'127.0.0.1'"
    return (
        f"create database if not exists {DATABASE};"
        f"create user if not exists {user} identified by '{DATABASE_USER}';"
        f"grant all on {DATABASE}.* to {user};"
    )
