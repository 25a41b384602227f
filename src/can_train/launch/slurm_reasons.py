"""SLURM's reasons in words: why a job waits, and why it never started."""

from collections.abc import Mapping
from typing import Final

NEVER_SATISFIED: Final = "DependencyNeverSatisfied"
"""The one reason that no waiting changes."""

_WORDS: Final[Mapping[str, str]] = {
    "Priority": "other jobs come before it",
    "Resources": "it waits for free nodes",
    "Dependency": "it waits for another job",
    NEVER_SATISFIED: "the run that it waits for did not finish",
    "BeginTime": "it was put back into the queue and is held for a moment, or its start was set for later",
    "JobHeldUser": "it is held by its user (scontrol release lets it go)",
    "JobHeldAdmin": "it is held by an administrator",
    "JobArrayTaskLimit": "as many jobs of its array run as may at once",
    "JobHoldMaxRequeue": "it was put back into the queue as often as the cluster allows, and is held",
    "PartitionTimeLimit": "its time limit is above the partition's",
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
    "launch_failed_requeued_held": "it could not be started on its nodes, and is held (scontrol release lets it go)",
    "RaisedSignal": "it was ended by a signal",
    "NonZeroExitCode": "it ended with an error",
    "TimeLimit": "its time was up",
    "OutOfMemory": "it needed more memory than it asked for",
}  # fmt: skip

_LIMITS: Final[Mapping[str, str]] = {
    "AssocGrp": "a limit of its account is reached",
    "AssocMax": "a limit of its user in the account is reached",
    "Assoc": "a limit of its account is reached",
    "QOSGrp": "a limit of its quality of service is reached",
    "QOSMax": "a limit of a user under its quality of service is reached",
    "QOSMin": "it asks for less than its quality of service allows",
    "QOS": "a limit of its quality of service is reached",
    "MaxGRES": "it asks for more GPUs than one job may have",
    "MaxMem": "it asks for more memory than one job may have",
}
"""By the beginnings of some sixty reasons, which differ in what they limit: it is named after the words."""


def reason_in_words(reason: str) -> str:
    """Says a reason of SLURM; one that is not known stays as it is.

    Example:
        >>> reason_in_words("PartitionTimeLimit")
        "its time limit is above the partition's"
        >>> reason_in_words("QOSMaxGRESPerUser")
        'a limit of a user under its quality of service is reached (QOSMaxGRESPerUser)'
    """
    reason = reason.strip().strip("()")
    # Some are followed by the nodes that they are about, after a comma.
    known = _WORDS.get(reason) or _WORDS.get(reason.partition(",")[0].strip())
    if known:
        return known
    for beginning, words in _LIMITS.items():
        if reason.startswith(beginning):
            return f"{words} ({reason})"
    return reason
