"""Whether and how a run starts again after a job that has not finished it: decisions on what is known of the job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from can_train.config.settings import ClusterSettings
from can_train.training.attempts import ENDING_BY_STATUS, RESTARTED
from can_train.training.run_folder import JobRecord, RunFolder

MEMORY_GROWTH: Final = 1.5
"""Factor of a job's memory after the host ran out of it: twice it makes 2.25, three times 3.4."""

_FINE_STEP_MIB, _FINE_UP_TO_MIB, _COARSE_STEP_MIB = 100, 4096, 1024
"""Memory is asked for in steps that people would choose: 100 MiB up to 4 GiB, then whole GiB."""

_KILLED: Final = 128 + 9

_CARRIED_OVER: Final = ("partition", "account", "qos", "time", "mem", "exclude")
"""Resources that the next job asks for as the last one did, whatever the run's configuration says."""


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """What is known of a job whose training has ended.

    Attributes:
        ending: As `AttemptEnd` has it.
        restarts: How often can-train requeued the job.
        resubmits: How often the run was submitted again after an out-of-memory.
        one_sample, should_fit, foreign_bytes: As `OutOfMemoryDetails` has them.
        memory_mib, most_memory_mib: Of the job on each node, and of the partition's largest node; None: unknown.
        has_other_nodes: Whether the partition has enough nodes besides those to avoid.
    """

    ending: str
    restarts: int = 0
    resubmits: int = 0
    one_sample: bool = False
    should_fit: bool = False
    foreign_bytes: int = 0
    memory_mib: int | None = None
    most_memory_mib: int | None = None
    has_other_nodes: bool = False


@dataclass(frozen=True)
class Requeue:
    """The job goes back into the queue as it is."""

    reason: str


@dataclass(frozen=True)
class Resubmit:
    """The run gets a new job, with more memory or without the nodes of the old one."""

    reason: str
    memory_mib: int | None = None
    elsewhere: bool = False


@dataclass(frozen=True)
class NoRestart:
    """Nothing is started; the reason is empty where it needs no words."""

    reason: str = ""


Decision = Requeue | Resubmit | NoRestart


def infer_ending(recorded: str, *, status: int, host_oom: bool) -> str:
    """Decides how a training ended.

    Args:
        recorded: The ending that its processes recorded; empty where they could not.
        status: Exit status of the job step: the largest of its ranks'.
        host_oom: Whether the kernel killed a process because the job's memory ran out.

    Returns:
        One of the endings of `AttemptEnd`.
    """
    if recorded == "finished":
        return recorded
    if host_oom:
        return "host_oom"
    # srun terminates the other ranks of one that was killed.
    if status == _KILLED and recorded in ("", "terminated"):
        return "killed"
    return recorded or ENDING_BY_STATUS.get(status, "failed")


def decide_restart(outcome: JobOutcome, limits: ClusterSettings) -> Decision:
    """Decides whether and how a run starts again, no more often than its settings allow."""
    if outcome.ending in RESTARTED:
        what = "the time limit" if outcome.ending == "time_limit" else "a killed process"
        if outcome.restarts < limits.max_restarts:
            return Requeue(what)
        times = _times(outcome.restarts)
        return NoRestart(f"{what}, after {times} back into the queue (cluster.max_restarts)")
    if outcome.ending not in ("host_oom", "gpu_oom"):
        return NoRestart()
    decision = _more_memory(outcome) if outcome.ending == "host_oom" else _another_device(outcome)
    if isinstance(decision, Resubmit) and outcome.resubmits >= limits.oom_resubmits:
        what = decision.reason.partition(":")[0]
        return NoRestart(f"{what}, after {_times(outcome.resubmits)} submitted again (cluster.oom_resubmits)")
    return decision


def _more_memory(outcome: JobOutcome) -> Decision:
    had, most = outcome.memory_mib, outcome.most_memory_mib
    if had is None:
        return NoRestart("host out-of-memory, and how much the job had is not known")
    if most is not None and had >= most:
        return NoRestart(f"host out-of-memory with {had}M, and no node of the partition has more")
    memory = grown_memory_mib(had, most_mib=most)
    return Resubmit(f"host out-of-memory: {memory}M instead of {had}M", memory_mib=memory)


def grown_memory_mib(had_mib: int, *, most_mib: int | None = None) -> int:
    """Returns the memory of the next job: `MEMORY_GROWTH` times as much, in round figures, and no more than there is.

    >>> grown_memory_mib(400), grown_memory_mib(16384), grown_memory_mib(3000, most_mib=4000)
    (600, 24576, 4000)
    """
    wanted = MEMORY_GROWTH * had_mib
    step = _FINE_STEP_MIB if wanted <= _FINE_UP_TO_MIB else _COARSE_STEP_MIB
    memory = -int(-wanted // step) * step
    return memory if most_mib is None else min(memory, most_mib)


def _another_device(outcome: JobOutcome) -> Decision:
    if outcome.one_sample or not outcome.should_fit:
        return NoRestart()
    why = f"others held {outcome.foreign_bytes >> 20} MiB" if outcome.foreign_bytes else "it should fit"
    where = "another node" if outcome.has_other_nodes else "again, for want of another node"
    return Resubmit(f"CUDA out-of-memory: {why}; {where}", elsewhere=outcome.has_other_nodes)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def count_oom_resubmits(jobs: Sequence[JobRecord]) -> int:
    """Counts the last jobs in a row that were submitted after an out-of-memory; a person's submission ends the row."""
    count = 0
    for job in reversed(jobs):
        if not is_oom_reason(job.reason):
            break
        count += 1
    return count


def is_oom_reason(reason: str) -> bool:
    """Returns whether a job's reason is one that a `Resubmit` gave it."""
    return reason.startswith(("host out-of-memory: ", "CUDA out-of-memory: "))


def cluster_settings(folder: RunFolder) -> ClusterSettings:
    """Reads what a run asks of its cluster.

    Raises:
        RunError: Its configuration cannot be read.
    """
    return ClusterSettings(**folder.config().get("cluster", {}))


def next_cluster(cluster: ClusterSettings, last: Mapping[str, Any], decision: Resubmit) -> ClusterSettings:
    """Decides what the next job asks for, given the run's configuration and the resources of its last job."""
    changes: dict[str, Any] = {name: str(last[name]) for name in _CARRIED_OVER if name in last}
    if decision.memory_mib is not None:
        # sbatch takes one of --mem, --mem-per-cpu and --mem-per-gpu.
        others = {
            name: value
            for name, value in cluster.additional.items()
            if not name.replace("_", "-").startswith("mem-per-")
        }
        changes |= {"mem": f"{decision.memory_mib}M", "additional": others}
    elif not decision.elsewhere:
        # No other node is left, so those that were avoided are tried again; a person's own exclusions stay.
        changes["exclude"] = cluster.exclude
    return replace(cluster, **changes)
