"""The only caller of SLURM's programs."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from can_train.errors import CanTrainError
from can_train.io.units import parse_time_min

_TAIL_BYTES: Final = 2**16
"""End of a log that is looked through for what ended a run: some thousand lines."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a program said.

    Attributes:
        status: Its exit status; None: it is not there, or did not answer in time.
        output: What it printed.
        complaint: What it printed as errors, or why there is no status.
    """

    status: int | None
    output: str = ""
    complaint: str = ""


def run_command(command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Said:
    """Runs a program.

    Args:
        command: The program and its arguments.
        seconds: How long it may take.
        environment: Its variables; None: this process's.
    """
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Said(status=None, complaint=f"{command[0]} has no answer after {seconds:g} s")
    except OSError as error:
        return Said(status=None, complaint=str(error))
    return Said(status=done.returncode, output=done.stdout, complaint=done.stderr)


def output_of(command: Sequence[str], *, seconds: float) -> str | None:
    """Runs a program and returns what it prints; None where it fails."""
    said = run_command(command, seconds=seconds)
    return said.output if said.status == 0 else None


def tail(path: Path) -> str:
    """Reads the end of a log; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


_TIMEOUT_S: Final = 10.0
"""Longest wait for one program: a controller that is down is otherwise asked again for a minute and more."""


_SQUEUE_FIELDS: Final = "%i|%T|%r|%N|%S|%l"


_SACCT_FIELDS: Final = "JobID,State,ExitCode,Start,End,NodeList,Timelimit,ReqMem,Reason"
"""None of them is text of a user, which could hold the separator."""


_UNKNOWN_JOB: Final = "Invalid job id"
"""What squeue says, with an exit code of 1, when it has never heard of the only job that it was asked about."""


_JOB_ID: Final = re.compile(r"\d+(_\d+)?")


_NOTHING: Final = frozenset(("", "None", "N/A", "Unknown", "None assigned", "(null)", "n/a"))
"""How SLURM writes that there is none."""


WAITING: Final = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
"""States of a job that waits."""


AT_WORK: Final = frozenset(
    ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
)
"""States of a job that has nodes."""


UNFINISHED: Final = AT_WORK | {"PENDING"}
"""States in the accounting of an attempt that goes on; REQUEUED, there, is one that has ended."""


@dataclass(frozen=True, kw_only=True)
class QueueRow:
    """A job as squeue has it.

    Attributes:
        job_id: 123, or 123_4 for an element of an array.
        state: In SLURM's word: PENDING, RUNNING, COMPLETED.
        reason: Why it waits, or ended, in SLURM's word; empty: none.
        nodes: Where it runs or ran; empty: it never started.
        start: When it started or is expected to, in local time; empty: not known.
        time_limit: As SLURM writes it.
    """

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    time_limit: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the accounting has of a step: `batch`, `extern`, or the number of an srun."""

    name: str
    state: str
    exit_code: str


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """One attempt of a job as sacct has it: a job that was put back into the queue has several.

    Attributes:
        job_id: 123, or 123_4 for an element of an array.
        state: In SLURM's first word: CANCELLED, not "CANCELLED by 1000".
        exit_code: `code:signal`.
        nodes: Where it ran; empty: it never started.
        start: In local time; empty: it never started.
        end: In local time; empty: it has not ended.
        time_limit: As SLURM writes it.
        memory: What was asked for.
        reason: Why it last waited, in SLURM's word; empty: none.
        by_person: Whether the state names who cancelled it.
        steps: Its steps.
    """

    job_id: str
    state: str
    exit_code: str = ""
    nodes: str = ""
    start: str = ""
    end: str = ""
    time_limit: str = ""
    memory: str = ""
    reason: str = ""
    by_person: bool = False
    steps: Sequence[Step] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What SLURM said of some jobs.

    Attributes:
        queue: squeue's rows; None: it does not answer.
        accounts: sacct's rows, the attempts of a job in their order; None: it does not answer.
    """

    queue: Sequence[QueueRow] | None = None
    accounts: Sequence[AccountRow] | None = None


def query_jobs(job_ids: Iterable[str]) -> Answer:
    """Asks about all jobs at once: one call of squeue and one of sacct, each with a time limit.

    Args:
        job_ids: 123 or 123_4; what cannot be a job of SLURM is passed over.
    """
    jobs = ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids if _JOB_ID.fullmatch(job_id)}))
    if not jobs:
        return Answer(queue=(), accounts=())
    # Of all states: jobs that ended minutes ago are still there, sooner than in the accounting and where there is none.
    queue = _output(
        ["squeue", "--all", "--array", "--noheader", "--states=all", f"--jobs={jobs}", "-o", _SQUEUE_FIELDS]
    )
    if queue is None:
        # A controller that is down, or no SLURM at all: the accounting would only repeat what it last heard.
        return Answer()
    # Without jobs sacct would begin at midnight; without duplicates it would show the last attempt only.
    accounts = _output(["sacct", "--duplicates", "--noheader", "--parsable2", f"--jobs={jobs}", "-o", _SACCT_FIELDS])
    return Answer(queue=parse_squeue(queue), accounts=None if accounts is None else parse_sacct(accounts))


def parse_squeue(text: str) -> list[QueueRow]:
    """Reads what squeue printed; lines of another form are passed over."""
    found = []
    for line in text.splitlines():
        cells = [_clean(cell) for cell in line.split("|")]
        if len(cells) == _SQUEUE_FIELDS.count("|") + 1 and _JOB_ID.fullmatch(cells[0]):
            job_id, state, reason, nodes, start, time_limit = cells
            found.append(
                QueueRow(job_id=job_id, state=state, reason=reason, nodes=nodes, start=start, time_limit=time_limit)
            )
    return found


def parse_sacct(text: str) -> list[AccountRow]:
    """Reads what sacct printed, each step with the attempt before it; lines of another form are passed over."""
    rows: list[AccountRow] = []
    steps: list[list[Step]] = []
    for line in text.splitlines():
        cells = [_clean(cell) for cell in line.split("|")]
        if len(cells) != _SACCT_FIELDS.count(",") + 1:
            continue
        job_id, _, step = cells[0].partition(".")
        state = cells[1].partition(" ")[0].rstrip("+")
        if step:
            if rows and rows[-1].job_id == job_id:
                steps[-1].append(Step(name=step, state=state, exit_code=cells[2]))
        elif _JOB_ID.fullmatch(job_id):
            rows.append(_account(cells, state))
            steps.append([])
    return [AccountRow(**{**vars(row), "steps": tuple(its)}) for row, its in zip(rows, steps, strict=True)]


def _account(cells: Sequence[str], state: str) -> AccountRow:
    job_id, told, exit_code, start, end, nodes, time_limit, memory, reason = cells
    return AccountRow(
        job_id=job_id,
        state=state,
        exit_code=exit_code,
        nodes=nodes,
        start=start,
        end=end,
        time_limit=time_limit,
        memory=memory,
        reason=reason,
        by_person=" by " in told,
    )


def _clean(cell: str) -> str:
    cell = cell.strip()
    return "" if cell in _NOTHING else cell


def cancel_jobs(job_ids: Sequence[str]) -> str:
    """Cancels jobs.

    Returns:
        What scancel complained of; empty: nothing.
    """
    said = run_command(["scancel", *job_ids], seconds=_CANCEL_TIMEOUT_S, environment=_environment())
    return said.complaint.strip() if said.status != 0 else ""


_CANCEL_TIMEOUT_S: Final = 90.0
"""Longest wait for scancel, which waits up to 60 s for a job that is being completed."""


def _output(command: list[str]) -> str | None:
    """Runs a program; None where it is not there, fails, or does not answer in time."""
    said = run_command(command, seconds=_TIMEOUT_S, environment=_environment())
    if said.status:
        return "" if _UNKNOWN_JOB in said.complaint else None
    return said.output if said.status == 0 else None


def _environment() -> dict[str, str]:
    """The variables without a person's own filters and formats, which would change what is printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_"))}
    return {**kept, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}


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
    return parse_partitions(
        query_cluster("scontrol", "show", "partition", "-o"), query_cluster("scontrol", "show", "node", "-o")
    )


def query_cluster(*command: str, seconds: float = ANSWER_S) -> str:
    """Runs a command of SLURM and returns what it prints.

    Raises:
        NoControllerError: It is not there, fails, or takes too long.
    """
    if shutil.which(command[0]) is None or shutil.which("sbatch") is None:
        raise _nobody(f"{command[0]} and sbatch are not both installed")
    said = run_command(command, seconds=seconds)
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
class JobNode:
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


def usable_nodes(partition: str) -> list[JobNode]:
    """Lists the nodes of a partition that are up."""
    text = (
        output_of(["sinfo", "--noheader", "--Node", f"--partition={partition}", "-o", "%N|%T|%m"], seconds=_PATIENCE_S)
        or ""
    )
    cells = [line.split("|") for line in text.splitlines()]
    return [JobNode(name=row[0], memory_mib=int(row[2])) for row in cells if len(row) == 3 and row[1] in _USABLE]


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
