"""SLURM as a job sees it from within: where it stands in the queue, what it has of its nodes, who waits for it, and how
it is put back. Programs that fail or do not answer are an answer, too: nothing here raises for them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from can_train.launch.programs import output_of

_PATIENCE_S: Final = 20.0
"""Longest wait for a program: a controller that is busy answers within seconds, one that is down never."""

_OOM_SAID: Final = re.compile(
    r"oom-kill event|^srun: error: .*: Out Of Memory$|[Ee]xceeded (?:job |step )?memory limit", re.MULTILINE
)
"""How slurmstepd and srun word it, where memory is limited by control groups and where it is polled."""

_SCHEDULERS: Final = ("srun: ", "slurmstepd", "can-train: ")
"""Beginnings of lines of a log that are not the training's own."""

_USABLE: Final = frozenset(("idle", "mixed", "allocated", "completing", "reserved", "planned"))
"""States of a node on which a job may still be started."""

_RUNNING: Final = "RUNNING"
_TIME_LIMIT: Final = "TimeLimit"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node that a job may be started on."""

    name: str
    memory_mib: int


def is_running(job_id: str) -> bool:
    """Tells whether a job is at work, so that it is not leaving already for some other reason."""
    return _state(job_id)[0] == _RUNNING


def left_in_time(job_id: str) -> bool:
    """Tells whether a job that was sent SIGTERM is leaving for its time limit, or not leaving at all: then it may be
    put back, while one that was cancelled must stay so, and one that was preempted SLURM puts back itself.
    """
    state, reason = _state(job_id)
    return state == _RUNNING or reason == _TIME_LIMIT


def put_back(job_id: str) -> bool:
    """Puts a job back into the queue; what runs in it is killed. Tells whether SLURM agreed."""
    return output_of(["scontrol", "requeue", job_id], seconds=_PATIENCE_S) is not None


def usable_nodes(partition: str) -> list[Node]:
    """Lists the nodes of a partition that are up."""
    text = (
        output_of(["sinfo", "--noheader", "--Node", f"--partition={partition}", "-o", "%N|%T|%m"], seconds=_PATIENCE_S)
        or ""
    )
    cells = [line.split("|") for line in text.splitlines()]
    return [Node(name=row[0], memory_mib=int(row[2])) for row in cells if len(row) == 3 and row[1] in _USABLE]


def node_names(expression: str) -> list[str]:
    """Spells out a list of nodes as SLURM writes it: n[1-2]."""
    text = output_of(["scontrol", "show", "hostnames", expression], seconds=_PATIENCE_S) if expression else ""
    return (text or "").split()


def memory_mib(environment: Mapping[str, str]) -> int | None:
    """Returns what a job has of each of its nodes, in MiB; None where SLURM does not say."""
    for variable, times in (
        ("SLURM_MEM_PER_NODE", ""),
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        amount, number = environment.get(variable, ""), environment.get(times, "1")
        if amount.isdigit() and number.isdigit():
            return int(amount) * int(number)
    return None


def move_dependents(old: str, new: str) -> None:
    """Makes the jobs that wait for one job wait for another."""
    waiting = (
        output_of(["squeue", "--me", "--noheader", "--array", "--states=PENDING", "-o", "%i|%E"], seconds=_PATIENCE_S)
        or ""
    )
    for line in waiting.splitlines():
        job_id, _, dependency = line.partition("|")
        moved = moved_dependency(dependency, old, new)
        if moved != dependency:
            output_of(["scontrol", "update", f"JobId={job_id}", f"Dependency={moved}"], seconds=_PATIENCE_S)


def moved_dependency(dependency: str, old: str, new: str) -> str:
    """Writes a job's dependency, as squeue shows it, with one job in the place of another.

    >>> moved_dependency("afterok:12(unfulfilled),afterok:123(unfulfilled)", "12", "40")
    'afterok:40,afterok:123'
    """
    if not re.search(rf"(?<![\d_]){re.escape(old)}(?![\d_])", dependency):
        return dependency
    plain = re.sub(r"\(\w+\)", "", dependency)
    return re.sub(rf"(?<![\d_]){re.escape(old)}(?![\d_])", new, plain)


def last_line(log: str) -> str:
    """Finds the last line of a log that the training printed itself."""
    lines = (line.strip() for line in reversed(log.splitlines()))
    return next((line for line in lines if line and not line.startswith(_SCHEDULERS)), "")


def host_memory_ran_out(job_id: str, log: str) -> bool:
    """Finds out whether the system killed a process of this job for the host's memory, from whatever tells it: the log,
    the control group, the accounting.
    """
    return _OOM_SAID.search(log) is not None or any(map(_killed_in, _control_groups())) or _step_ran_out(job_id)


def _step_ran_out(job_id: str) -> bool:
    text = (
        output_of(["sacct", "--noheader", "--parsable2", f"--jobs={job_id}", "-o", "JobID,State"], seconds=_PATIENCE_S)
        or ""
    )
    return any("." in line and line.endswith("|OUT_OF_MEMORY") for line in text.splitlines())


def _control_groups() -> Iterator[Path]:
    """Finds the counters of the control group of the job around this process, of version 2 or 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        of_job = re.match(r".*/job_\d+(?=/|$)", path)
        if of_job is not None and controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup") / controllers
            yield Path(f"{root}{of_job[0]}") / ("memory.events" if not controllers else "memory.oom_control")


def _killed_in(counters: Path) -> bool:
    try:
        return re.search(r"^oom_kill [1-9]", counters.read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def _state(job_id: str) -> tuple[str, str]:
    """Asks for state and reason, in SLURM's words; empty where it does not answer."""
    text = (
        output_of(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "-o", "%T|%r"], seconds=_PATIENCE_S)
        or ""
    )
    state, _, reason = text.partition("\n")[0].partition("|")
    return state, reason
