"""What a job does, and what is done about one that did not finish."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from submitit.slurm.slurm import _parse_node_list

from can_train.config.settings import ClusterSettings
from can_train.errors import RunError
from can_train.slurm.client import left_in_time, put_back
from can_train.training.attempts import WARNED, SlurmContext, StopRequests
from can_train.training.distributed import RankPlace
from can_train.training.run_folder import RunFolder

MEMORY_GROWTH: Final = 1.5
"""What the memory of a job is multiplied by after the host's ran out: twice it makes 2.25, three times 3.4."""


_FINE_MIB, _FINE_UP_TO_MIB, _COARSE_MIB = 100, 4096, 1024
"""Memory is asked for in steps that people would choose: 100 MiB up to 4 GiB, then whole GiB."""


_KILLED: Final = 128 + 9


_STATUSES: Final = {128 + 12: "time_limit", 128 + 15: "terminated", 128 + 2: "interrupted", _KILLED: "killed"}
"""What the exit status of a job step says where no process of it left a word."""


_CONSEQUENCES: Final = ("", "terminated")
"""Endings that say less than a kill: of a rank that left because another was killed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a person allows.

    Attributes:
        max_restarts: Times that a job is put back into the queue.
        oom_resubmits: Times that a run is submitted again after an out-of-memory.
    """

    max_restarts: int
    oom_resubmits: int


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """What is known of a job whose training has ended.

    Attributes:
        ending: As `ending_of` has it.
        restarts: Times that the job was put back into the queue for the time limit or a kill.
        resubmits: Times that the run was submitted again after an out-of-memory.
        one_sample: Of an out-of-memory: whether what cannot be split does not fit even on a device of its own.
        should_fit: Likewise: whether by all that is known it fits, so that trying again makes sense.
        foreign_bytes: Likewise: what others held of the device.
        memory_mib: What the job has of a node; None: unknown.
        most_memory_mib: What the largest node of its partition has; None: unknown.
        has_other_nodes: Whether the partition has enough nodes without those that the job ran on.
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
    """The job is put back into the queue, as it is."""

    reason: str


@dataclass(frozen=True)
class Resubmit:
    """The run is submitted again.

    Attributes:
        reason: Why, in words.
        memory_mib: What the new job asks for; None: what the old one did.
        elsewhere: Whether it avoids the nodes of the old one.
    """

    reason: str
    memory_mib: int | None = None
    elsewhere: bool = False


@dataclass(frozen=True)
class Leave:
    """Nothing is done.

    Attributes:
        reason: Why, in words; empty where nothing needs to be.
    """

    reason: str = ""


Decision = Requeue | Resubmit | Leave


def ending_of(said: str, *, status: int, host_oom: bool) -> str:
    """Decides how a training ended.

    Args:
        said: The ending that its processes wrote down; empty where they could not.
        status: Exit status of the job step: the largest of its ranks'.
        host_oom: Whether the system killed a process of it for the host's memory.

    Returns:
        One of the endings of `AttemptEnd`.
    """
    if said == "finished":
        return said
    if host_oom:
        return "host_oom"
    if status == _KILLED and said in _CONSEQUENCES:
        return "killed"
    return said or _STATUSES.get(status, "failed")


def decide(facts: Aftermath, limits: Limits) -> Decision:
    """Decides what becomes of a run whose job has ended."""
    if facts.ending in ("time_limit", "killed"):
        return _restarted(facts, limits)
    if facts.ending in ("host_oom", "gpu_oom"):
        return _resubmitted(facts, limits)
    return Leave()


def _restarted(facts: Aftermath, limits: Limits) -> Decision:
    what = "the time limit" if facts.ending == "time_limit" else "a killed process"
    if facts.restarts < limits.max_restarts:
        return Requeue(what)
    return Leave(f"{what}, after {_times(facts.restarts)} back into the queue (cluster.max_restarts)")


def _resubmitted(facts: Aftermath, limits: Limits) -> Decision:
    what = "host out-of-memory" if facts.ending == "host_oom" else "CUDA out-of-memory"
    decision = _more_memory(facts) if facts.ending == "host_oom" else _another_device(facts)
    if isinstance(decision, Resubmit) and facts.resubmits >= limits.oom_resubmits:
        return Leave(f"{what}, after {_times(facts.resubmits)} submitted again (cluster.oom_resubmits)")
    return decision


def _more_memory(facts: Aftermath) -> Decision:
    had, most = facts.memory_mib, facts.most_memory_mib
    if had is None:
        return Leave("host out-of-memory, and how much the job had is not known")
    if most is not None and had >= most:
        return Leave(f"host out-of-memory with {had}M, and no node of the partition has more")
    memory = grown_mib(had, most_mib=most)
    return Resubmit(f"host out-of-memory: {memory}M instead of {had}M", memory_mib=memory)


def grown_mib(had_mib: int, *, most_mib: int | None = None) -> int:
    """Returns the memory of the next attempt: `MEMORY_GROWTH` times as much, in round figures.

    Args:
        had_mib: Of the last one.
        most_mib: What there is at most, more than `had_mib`; None: unknown.

    >>> grown_mib(400), grown_mib(16384), grown_mib(3000, most_mib=4000)
    (600, 24576, 4000)
    """
    wanted = MEMORY_GROWTH * had_mib
    step = _FINE_MIB if wanted <= _FINE_UP_TO_MIB else _COARSE_MIB
    memory = -int(-wanted // step) * step
    return memory if most_mib is None else min(memory, most_mib)


def _another_device(facts: Aftermath) -> Decision:
    if facts.one_sample or not facts.should_fit:
        return Leave()
    why = f"others held {facts.foreign_bytes >> 20} MiB" if facts.foreign_bytes else "it should fit"
    where = "another node" if facts.has_other_nodes else "again, for want of another node"
    return Resubmit(f"CUDA out-of-memory: {why}; {where}", elsewhere=facts.has_other_nodes)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def is_after_oom(reason: str) -> bool:
    """Tells of a job's reason whether it is one of those above."""
    return reason.startswith(("host out-of-memory: ", "CUDA out-of-memory: "))


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


Entry = Callable[[RunFolder, StopRequests], None]
"""Trains the run in a folder. What takes long to import it imports when it is called: by then signals are handled."""


@dataclass(frozen=True)
class Job:
    """A job, as submitit keeps it.

    Args:
        entry: Trains the run in a folder.
        run_path: The folder.
    """

    entry: Entry
    run_path: str

    def __call__(self) -> None:
        """Trains.

        Raises:
            SystemExit: A signal ended it, or an error that the log tells.
        """
        folder, stops = RunFolder(Path(self.run_path)), StopRequests()
        try:
            with stops.installed(), folder.attempts.recorded(stops):
                self._train(folder, stops)
        except SystemExit as stop:
            # Only now: what is put back is killed where it stands.
            if stop.code == WARNED and not stop.__cause__:
                _again(stops)
            raise

    def _train(self, folder: RunFolder, stops: StopRequests) -> None:
        try:
            self.entry(folder, stops)
        except SystemExit as stop:
            if stop.code == WARNED:
                _check_restarts(folder)
            raise


def cluster_of(folder: RunFolder) -> ClusterSettings:
    """Reads what a run asks of its cluster.

    Raises:
        RunError: Its configuration cannot be read.
    """
    return ClusterSettings(**folder.config().get("cluster", {}))


def limits_of(folder: RunFolder) -> Limits:
    """Reads how often a run may be started again."""
    cluster = cluster_of(folder)
    return Limits(max_restarts=cluster.max_restarts, oom_resubmits=cluster.oom_resubmits)


def _check_restarts(folder: RunFolder) -> None:
    """Sees whether the job may go back into the queue.

    Raises:
        SystemExit: Not any more; its cause says so.
    """
    restarts = folder.attempts.count_restarts(SlurmContext.from_environment().job_id)
    decision = decide(Aftermath(ending="time_limit", restarts=restarts), limits_of(folder))
    if isinstance(decision, Leave):
        raise SystemExit(WARNED) from RunError(
            "The job's time is up", value=decision.reason, remedy=f"Go on: can-train resume {folder.run_id}"
        )


def _again(stops: StopRequests) -> None:
    """Puts the job back into the queue, unless it is leaving for good."""
    place = SlurmContext.from_environment()
    if place.rank != 0 or os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return
    if not stops.terminated or left_in_time(place.job_id):
        put_back(place.job_id)
