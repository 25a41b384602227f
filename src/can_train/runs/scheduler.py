"""The interface of a scheduler of jobs: the questions that can be asked about jobs, and the rows of its answer. States
and reasons are SLURM's words, into which the client of another scheduler translates its own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from can_train.errors import CanTrainError
from can_train.io.records import JobId

WAITING: Final = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
"""States of a waiting job in squeue."""
ACTIVE: Final = frozenset((
    "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
))  # fmt: skip
"""States of a job with nodes in squeue."""
SUSPENDED: Final = frozenset(("SUSPENDED", "STOPPED"))
"""States of a job with nodes whose processes stand still."""
UNFINISHED: Final = ACTIVE | {"PENDING"}
"""States of an attempt in sacct that has not ended; REQUEUED is the state of an ended attempt there."""


@dataclass(frozen=True, kw_only=True)
class QueueRow:
    """A job in squeue; an empty field is unknown or absent."""

    job: JobId
    state: str
    reason: str = ""  # why it waits or ended, a word of SLURM
    nodes: str = ""  # nodes of the job; empty: it never started
    start: str = ""  # actual or expected start, in local time
    time_limit: str = ""
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class JobStep:
    """A step in sacct; its name is `batch`, `extern`, or the number of an srun."""

    name: str
    state: str
    exit_code: str


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """An attempt of a job in sacct; a requeued job has several."""

    job: JobId
    state: str
    exit_code: str = ""  # `code:signal`
    nodes: str = ""  # nodes of the attempt; empty: it never started
    start: str = ""
    end: str = ""
    time_limit: str = ""
    memory: str = ""  # requested memory
    reason: str = ""  # why it last waited, a word of SLURM
    by_person: bool = False  # whether a user cancelled it
    steps: Sequence[JobStep] = ()


@dataclass(frozen=True, kw_only=True)
class SchedulerAnswer:
    """The answer of a scheduler about jobs.

    Attributes:
        queue: Jobs that the controllers know.
        accounts: Attempts of the jobs, in order; empty without accounting.
        silent: Reason by the name of a cluster that does not answer.
        local: Name of this machine's cluster; empty if it does not answer.
    """

    queue: Sequence[QueueRow] = ()
    accounts: Sequence[AccountRow] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    local: str = ""


class Scheduler(Protocol):
    """A scheduler that runs can ask about their jobs."""

    def query_jobs(self, jobs: Iterable[JobId]) -> SchedulerAnswer:
        """Asks about many jobs at once; it never raises."""

    def logs_into(self, job: JobId, folder: Path) -> bool:
        """Returns whether a job writes or wrote its log into a folder: then the job was submitted from that folder.

        Raises:
            NoControllerError: The cluster cannot be asked.
        """


class NoControllerError(CanTrainError):
    """No SLURM answers on this machine."""


NEVER_SATISFIED: Final = "DependencyNeverSatisfied"
"""The only reason that lets a job wait forever."""

BEGIN_TIME: Final = "BeginTime"
"""The reason of a job that has been requeued, or that was submitted with `--begin`."""

_REASONS: Final[Mapping[str, str]] = {
    "Priority": "other jobs come before it",
    "Resources": "it waits for free nodes",
    "Dependency": "it waits for another job",
    NEVER_SATISFIED: "the run that it waits for did not finish",
    BEGIN_TIME: "it was put back into the queue and is held for a moment, or its start was set for later",
    "JobHeldUser": "it is held by its user (scontrol release lets it go)",
    "JobHeldAdmin": "it is held by an administrator",
    "JobArrayTaskLimit": "as many jobs of its array run as may at once",
    "JobHoldMaxRequeue": "it was put back into the queue as often as the cluster allows, and is held",
    "PartitionTimeLimit": "its time limit is above the partition's, and it can never start",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives one job",
    "PartitionConfig": "the partition has no node with so many processors, GPUs or so much memory",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has what it asks for",
    "FeatureNotAvail": "no node has the features that it asks for",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "Nodes required for job are DOWN, DRAINED or reserved": "the nodes that it needs are down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Licenses": "it waits for a licence",
    "InvalidAccount": "its account may not be used here",
    "InvalidQOS": "its quality of service may not be used here",
    "AccountNotAllowed": "its account may not use the partition",
    "QOSNotAllowed": "its quality of service may not use the partition or the account",
    "Cleaning": "its last attempt is still being cleaned up",
    "Prolog": "the cluster prepares its nodes",
    "BurstBufferResources": "it waits for burst buffers",
    "JobLaunchFailure": "its nodes could not start it (a log file that cannot be opened, or a fault of a node)",
    "launch failed requeued held": "it could not be started on its nodes, and is held (scontrol release lets it go)",
    "RaisedSignal": "it was ended by a signal",
    "NonZeroExitCode": "it ended with an error",
    "TimeLimit": "its time was up",
    "OutOfMemory": "it needed more memory than it asked for",
}  # fmt: skip


_LIMIT_REASONS: Final[Mapping[str, str]] = {
    r"Assoc.*Per(Job|Node)": "it asks for more than its account gives one job, and can never start",
    r"QOS.*Per(Job|Node)": "it asks for more than its quality of service gives one job, and can never start",
    r"QOSMin": "it asks for less than its quality of service demands, and can never start",
    r"MaxMemPerLimit": "it asks for more memory than one job may have, and can never start",
    r"AssocMax": "a limit of its user in the account is reached",
    r"Assoc": "a limit of its account is reached",
    r"QOSMax": "a limit of a user under its quality of service is reached",
    r"QOS": "a limit of its quality of service is reached",
    r"Max.*PerAccount": "a limit of its account under its quality of service is reached",
}
"""Words by pattern; the first match counts. Some sixty reasons differ only in the limited resource."""


def reason_in_words(reason: str) -> str:
    """Returns a reason of SLURM in words; an unknown reason is returned unchanged.

    Example:
        >>> reason_in_words("PartitionTimeLimit")
        "its time limit is above the partition's, and it can never start"
        >>> reason_in_words("QOSMaxGRESPerUser")
        'a limit of a user under its quality of service is reached (QOSMaxGRESPerUser)'
        >>> reason_in_words("QOSMaxNodePerJobLimit")
        'it asks for more than its quality of service gives one job, and can never start (QOSMaxNodePerJobLimit)'
    """
    reason = reason.strip().strip("()")
    # A comma and the affected nodes follow some reasons.
    words_of_reason = _REASONS.get(reason) or _REASONS.get(reason.partition(",")[0].strip().replace("_", " "))
    if words_of_reason:
        return words_of_reason
    limits = (f"{words} ({reason})" for pattern, words in _LIMIT_REASONS.items() if re.match(pattern, reason))
    return next(limits, reason)
