"""The text of the sandbox's configuration files. daemons.py writes them."""

from typing import Final

from sandbox.cluster import CPUS_PER_NODE, GPUS_PER_NODE, MEMORY_PER_NODE_MIB, Cluster

CLUSTER_NAME: Final = "sandbox"

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
    nodes = ",".join(cluster.nodes)
    return f"""\
ClusterName={CLUSTER_NAME}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={cluster.port}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={cluster.munge_socket},cred_expire={REQUEUE_HOLD_S}
CredType=cred/munge
StateSaveLocation={cluster.folder}/state
SlurmdSpoolDir={cluster.folder}/spool/%n
SlurmctldPidFile={cluster.folder}/run/slurmctld.pid
SlurmdPidFile={cluster.folder}/run/slurmd.%n.pid
SlurmctldLogFile={cluster.log("slurmctld")}
SlurmdLogFile={cluster.log("%n")}
MpiDefault=none
ReturnToService=2

# Schedule as fast as possible, because tests wait for every decision.
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait={KILL_WAIT_S}
MinJobAge=300
MessageTimeout=20
SlurmctldTimeout=30
SlurmdTimeout=60
UnkillableStepTimeout=30

# The nodes are processes on this machine, and may claim more CPUs and memory than it has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
{_memory_limits(cgroups)}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={cluster.accounting_port}
AccountingStoragePass={cluster.munge_socket}
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos

JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{_nodes(cluster, host)}
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE PriorityTier=10
PartitionName=scavenge Nodes={nodes} MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=short Nodes={nodes} MaxTime=00:02:00 PriorityTier=10
"""


def _memory_limits(cgroups: bool) -> str:
    if cgroups:
        return "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup"
    return "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherParams=OverMemoryKill"


def _nodes(cluster: Cluster, host: str) -> str:
    hardware = (
        f"CPUs={CPUS_PER_NODE} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 "
        f"RealMemory={MEMORY_PER_NODE_MIB} Gres=gpu:fake:{GPUS_PER_NODE}"
    )
    places = zip(cluster.nodes, cluster.node_ports, strict=True)
    return "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {hardware}" for node, port in places
    )


def gres_conf(cluster: Cluster) -> str:
    """Makes gres.conf. SLURM requires a device file for each GPU, but does not open it."""
    files = f"{cluster.folder}/dev/gpu[0-{GPUS_PER_NODE - 1}]"
    lines = [f"NodeName={node} Name=gpu Type=fake File={files} Flags=nvidia_gpu_env" for node in cluster.nodes]
    return "\n".join(["AutoDetect=off", *lines, ""])


def cgroup_conf() -> str:
    """Makes cgroup.conf. Only memory is limited, since the nodes' CPUs and GPUs do not exist."""
    return """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
ConstrainCores=no
ConstrainDevices=no
"""


def slurmdbd_conf(cluster: Cluster, *, host: str) -> str:
    """Makes slurmdbd.conf."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={cluster.munge_socket}
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={cluster.accounting_port}
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile={cluster.folder}/run/slurmdbd.pid
LogFile={cluster.log("slurmdbd")}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={cluster.database_port}
StorageUser={DATABASE_USER}
StoragePass={DATABASE_USER}
StorageLoc={DATABASE}
"""


def database_rights() -> str:
    """Makes the SQL that creates the database and user of slurmdbd."""
    user = f"'{DATABASE_USER}'@'127.0.0.1'"
    return (
        f"create database if not exists {DATABASE};"
        f"create user if not exists {user} identified by '{DATABASE_USER}';"
        f"grant all on {DATABASE}.* to {user};"
    )
