"""What a SLURM cluster has: partitions with their limits and nodes, as `scontrol` tells. Reading and understanding are
two functions; what follows from it, `checks` and `shares` decide.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from can_train.errors import CanTrainError
from can_train.launch.programs import said_by
from can_train.policy.slurm_units import parse_time_min

ANSWER_S: Final = 10.0
"""Seconds that a controller may take to answer: a busy one needs some, a dead one none."""

_FIELD: Final = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")
_UNLIMITED: Final = ("UNLIMITED", "INFINITE", "NONE", "N/A", "")
_GPU: Final = re.compile(r"(?:^|,)gpu(?::([^:,()]*[^:,()\d][^:,()]*))?:(\d+)")


class NoControllerError(CanTrainError):
    """No SLURM answers on this machine."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node.

    Attributes:
        name: Its name.
        cpus: Processors that jobs may have.
        memory_mib: Memory that jobs may have.
        gpus: Kind to number; one of the cluster without kinds has the kind "".
    """

    name: str
    cpus: int
    memory_mib: int
    gpus: Mapping[str, int] = field(default_factory=dict)

    def num_gpus(self, kind: str = "") -> int:
        """Counts the GPUs of a kind; empty: of any."""
        return sum(number for name, number in self.gpus.items() if kind in ("", name))


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition.

    Attributes:
        name: Its name.
        is_default: Whether jobs that name none go there.
        max_time_min: Longest job; None: any.
        max_nodes: Most nodes of a job; None: any.
        nodes: Its nodes.
        is_up: Whether it takes and starts jobs.
    """

    name: str
    is_default: bool = False
    max_time_min: int | None = None
    max_nodes: int | None = None
    nodes: Sequence[Node] = ()
    is_up: bool = True


def read_partitions() -> list[Partition]:
    """Asks the controller.

    Raises:
        NoControllerError: There is none, or it does not answer.
    """
    return parse_partitions(ask("scontrol", "show", "partition", "-o"), ask("scontrol", "show", "node", "-o"))


def ask(*command: str, seconds: float = ANSWER_S) -> str:
    """Runs a command of SLURM and returns what it prints.

    Raises:
        NoControllerError: It is not there, fails, or takes too long.
    """
    if shutil.which(command[0]) is None or shutil.which("sbatch") is None:
        raise _nobody(f"{command[0]} and sbatch are not both installed")
    said = said_by(command, seconds=seconds)
    if said.status != 0:
        complaints = said.complaint.strip().splitlines()
        raise _nobody(complaints[-1] if complaints else f"{command[0]} fails")
    return said.output


def parse_partitions(partitions: str, nodes: str) -> list[Partition]:
    """Understands `scontrol show partition -o` and `scontrol show node -o`."""
    described = [_fields(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    return [
        _partition(fields, [_node(node) for node in described if fields["PartitionName"] in _partitions_of(node)])
        for fields in map(_fields, partitions.splitlines())
        if "PartitionName" in fields
    ]


def _partition(fields: Mapping[str, str], nodes: Sequence[Node]) -> Partition:
    time, count = fields.get("MaxTime", ""), fields.get("MaxNodes", "")
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        max_time_min=None if time in _UNLIMITED else parse_time_min(time),
        max_nodes=int(count) if count.isdigit() else None,
        nodes=nodes,
        is_up=fields.get("State", "UP") == "UP",
    )


def _node(fields: Mapping[str, str]) -> Node:
    gpus: dict[str, int] = {}
    for kind, number in _GPU.findall(fields.get("Gres", "")):
        gpus[kind] = gpus.get(kind, 0) + int(number)
    return Node(
        name=fields["NodeName"],
        cpus=int(fields.get("CPUEfctv") or fields.get("CPUTot") or 1),
        # Specialised memory is kept for the system.
        memory_mib=int(fields.get("RealMemory") or 0) - int(fields.get("MemSpecLimit") or 0),
        gpus=gpus,
    )


def _partitions_of(node: Mapping[str, str]) -> list[str]:
    return node.get("Partitions", "").split(",")


def _fields(line: str) -> dict[str, str]:
    """Splits `Key=value` pairs; values may hold spaces (OS, Reason)."""
    found = list(_FIELD.finditer(line))
    ends = [*(match.start() for match in found[1:]), len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=True)}


def _nobody(why: str) -> NoControllerError:
    return NoControllerError(
        "No SLURM answers on this machine",
        value=why,
        remedy="Submit from a login node of the cluster; or train here: --cluster local in the background, "
        "--cluster debug in the foreground",
    )
