"""The SLURM client: the only caller of SLURM's programs. submitit alone starts jobs by sbatch and srun.

The module itself is a `can_train.runs.scheduler.Scheduler`.
"""

import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

from can_train.errors import ConfigError, unknown_name
from can_train.io.records import JobId
from can_train.io.units import parse_time_min
from can_train.runs.scheduler import AccountRow, JobStep, NoControllerError, QueueRow, SchedulerAnswer

SRUN: Final = "srun"
"""The program that starts the processes of a job step."""
SBATCH: Final = "sbatch"
"""The program that takes a batch script."""
_QUERY_TIMEOUT_S: Final = 20.0
"""Longest wait for an answer: a busy controller needs seconds, and programs wait over a minute for a dead one."""
_PERSON_TIMEOUT_S: Final = 4.0
"""Longest wait of a person who asks about runs, for squeue and sacct together."""
_LEAST_TIMEOUT_S: Final = 0.5
SUBMIT_TIMEOUT_S: Final = 60.0
"""Longest wait for sbatch: longer than a busy controller needs."""
_ACTION_TIMEOUT_S: Final = 90.0
"""Longest wait for a change: scancel waits up to 60 s for a job that is being completed."""


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The output of a program. Its status is None, with the reason in `errors`, if it did not end in time."""

    status: int | None
    output: str = ""
    errors: str = ""


def run_command(*command: str, timeout_s: float = _QUERY_TIMEOUT_S) -> CommandResult:
    """Runs a program and waits for its end; it never raises."""
    # A person's filters and formats (SQUEUE_FORMAT, SACCT_FORMAT) would change the output, and SLURM_CLUSTERS the
    # cluster.
    prefixes = ("SQUEUE_", "SACCT_", "SLURM_CLUSTERS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    variables = {**kept, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        # In a session of its own: the terminal's Ctrl-C is for this process, which may wait with it (`start_jobs`).
        done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace",
                              timeout=timeout_s, check=False, start_new_session=True)  # fmt: skip
    except subprocess.TimeoutExpired:
        return CommandResult(status=None, errors=f"{command[0]} gave no answer after {timeout_s:g} s")
    except FileNotFoundError:
        return CommandResult(status=None, errors=f"{command[0]} is not on the PATH")
    except OSError as error:
        return CommandResult(status=None, errors=str(error))
    return CommandResult(status=done.returncode, output=done.stdout, errors=done.stderr)


# Clusters

_EVERY_CLUSTER: Final = "all"  # SLURM's word in --clusters


def local_cluster(*, timeout_s: float = _QUERY_TIMEOUT_S) -> str:
    """Returns the name of the cluster that SLURM's programs on this machine ask.

    Raises:
        NoControllerError: It does not answer.
    """
    text = query_cluster("scontrol", "show", "config", timeout_s=timeout_s)
    name = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    if name is None:
        raise no_controller("scontrol show config names no cluster")
    return name[1]


def _asking(program: str, cluster: str, local: str) -> list[str]:
    # SLURM finds another cluster's controller through the accounting, which many clusters do not have.
    return [program] if cluster == local else [program, f"--clusters={cluster}"]


# The queue and the accounting

_SQUEUE_FIELDS: Final = {
    "number": "%i", "state": "%T", "reason": "%r", "nodes": "%N", "start": "%S", "time_limit": "%l",
}  # fmt: skip
"""squeue's code of each field of `QueueRow`; the job's name, which may contain the separator, is added at the end."""
_SACCT_FIELDS: Final = {
    "number": "JobID", "state": "State", "exit_code": "ExitCode", "start": "Start", "end": "End", "nodes": "NodeList",
    "time_limit": "Timelimit", "memory": "ReqMem", "reason": "Reason",
}  # fmt: skip
"""sacct's name of each field of `AccountRow`. No field is text of a user, which could contain the separator."""

_UNKNOWN_JOB: Final = "Invalid job id"
"""squeue's complaint, with exit status 1, about a single job that it no longer knows."""
_NUMBER: Final = re.compile(r"\d+(_\d+)?")
_NO_VALUE: Final = frozenset(("", "None", "N/A", "Unknown", "None assigned", "(null)", "n/a"))


def query_jobs(jobs: Iterable[JobId]) -> SchedulerAnswer:
    """Asks about many jobs at once: each cluster with one call of squeue and one of sacct. Jobs without a cluster are
    looked for on the local cluster.
    """
    numbers: dict[str, set[str]] = defaultdict(set)
    for job in jobs:
        # A hundred elements of an array are one job to squeue.
        if _NUMBER.fullmatch(job.number):
            numbers[job.cluster].add(job.number.partition("_")[0])
    # Without a job, squeue would list everybody's jobs.
    if not numbers:
        return SchedulerAnswer()
    until = time.monotonic() + _PERSON_TIMEOUT_S
    try:
        local = local_cluster(timeout_s=_PERSON_TIMEOUT_S)
    except NoControllerError as error:
        return SchedulerAnswer(silent=dict.fromkeys(numbers, error.value))
    if "" in numbers:
        numbers[local] |= numbers.pop("")
    queue, accounts, silent = [], [], {}
    for cluster in sorted(numbers, key=lambda name: name != local):
        asked = ",".join(sorted(numbers[cluster]))
        try:
            queue += _query_queue(asked, cluster, local, timeout_s=_left_s(until))
        except NoControllerError as error:
            # If the controller is down, the accounting is out of date.
            silent[cluster] = error.value
        else:
            accounts += _query_accounts(asked, cluster, local, timeout_s=_left_s(until))
    return SchedulerAnswer(queue=queue, accounts=accounts, silent=silent, local=local)


def _left_s(until: float) -> float:
    return max(_LEAST_TIMEOUT_S, until - time.monotonic())


def _query_accounts(numbers: str, cluster: str, local: str, *, timeout_s: float) -> list[AccountRow]:
    fields = ",".join(_SACCT_FIELDS.values())
    # Without --jobs sacct begins at midnight; without --duplicates it shows only the last attempt.
    asked = ("--duplicates", "--noheader", "--parsable2", f"--jobs={numbers}", "-o", fields)
    result = run_command(*_asking("sacct", cluster, local), *asked, timeout_s=timeout_s)
    return parse_sacct(result.output, cluster) if result.status == 0 else []


def _query_queue(numbers: str, cluster: str, local: str, *, timeout_s: float = _QUERY_TIMEOUT_S) -> list[QueueRow]:
    """Asks squeue about jobs, separated by commas.

    Raises:
        NoControllerError: The cluster's controller does not answer.
    """
    # All states: jobs that ended minutes ago are still listed, sooner than in sacct and also without accounting.
    fields = "|".join((*_SQUEUE_FIELDS.values(), "%j"))
    asked = ("--all", "--array", "--noheader", "--states=all", f"--jobs={numbers}", "-o", fields)
    result = run_command(*_asking("squeue", cluster, local), *asked, timeout_s=timeout_s)
    if result.status != 0 and _UNKNOWN_JOB not in result.errors:
        raise no_controller(_why_it_failed(result, "squeue"))
    return parse_squeue(result.output, cluster)


_ERROR: Final = re.compile(r"^\w+: (?:error|fatal):")


def _why_it_failed(result: CommandResult, program: str) -> str:
    """Returns the last line of a program's error, without advice, which follows the error of an unknown cluster."""
    lines = [line for line in result.errors.splitlines() if "Use 'sacctmgr" not in line]
    reasons = [reason for line in lines if (reason := _ERROR.sub("", line).strip())]
    return reasons[-1] if reasons else f"{program} fails"


def parse_squeue(text: str, cluster: str) -> list[QueueRow]:
    """Parses squeue's output about one cluster; ignores lines of another form, such as the name of the cluster."""
    rows = []
    for line in text.splitlines():
        cells = _cells(line, most=len(_SQUEUE_FIELDS) + 1)
        if len(cells) < len(_SQUEUE_FIELDS) or not _NUMBER.fullmatch(cells[0]):
            continue
        values = dict(zip((*_SQUEUE_FIELDS, "name"), cells, strict=False))
        rows.append(QueueRow(job=JobId(number=values.pop("number"), cluster=cluster), **values))
    return rows


def parse_sacct(text: str, cluster: str) -> list[AccountRow]:
    """Parses sacct's output about one cluster; a step belongs to the attempt before it. Ignores other lines."""
    rows: list[AccountRow] = []
    for line in text.splitlines():
        cells = _cells(line)
        if len(cells) != len(_SACCT_FIELDS):
            continue
        values: dict[str, Any] = dict(zip(_SACCT_FIELDS, cells, strict=True))
        number, _, step = values.pop("number").partition(".")
        # "CANCELLED by 1000"; a state that is cut off ends in "+".
        state, _, suffix = values.pop("state").partition(" ")
        row = AccountRow(job=JobId(number=number, cluster=cluster), **values, state=state.rstrip("+"),
                         by_person=suffix.startswith("by "))  # fmt: skip
        if not step and _NUMBER.fullmatch(number):
            rows.append(row)
        elif step and rows and rows[-1].job == row.job:
            ended = JobStep(name=step, state=row.state, exit_code=row.exit_code)
            rows[-1] = replace(rows[-1], steps=(*rows[-1].steps, ended))
    return rows


def _cells(line: str, *, most: int = 0) -> list[str]:
    cells = [cell.strip() for cell in line.split("|", most - 1)]
    return ["" if cell in _NO_VALUE else cell for cell in cells]


# One job


def logs_into(job: JobId, folder: Path) -> bool:
    """Returns whether a job of the cluster that it names writes or wrote its log into a folder: then the job was
    submitted from that folder, and is not another job of the same number.

    Raises:
        NoControllerError: The cluster cannot be asked.
    """
    local = local_cluster()
    result = run_command(*_asking("scontrol", job.cluster, local), "show", "job", "-o", job.number)
    if result.status == 0:
        return _log_path(result.output).parent == folder
    if _UNKNOWN_JOB not in result.errors:
        raise no_controller(_why_it_failed(result, "scontrol"))
    # The controller forgets a job after minutes; the accounting keeps the command that submitted it.
    asked = ("--allocations", "--noheader", "--parsable2", f"--jobs={job.number}", "-o", "SubmitLine")
    result = run_command(*_asking("sacct", job.cluster, local), *asked)
    return result.status == 0 and f"{folder}{os.sep}" in result.output


def _log_path(shown: str) -> Path:
    """Returns the log of the first job that `scontrol show job -o` shows."""
    return Path(_fields(shown.partition("\n")[0]).get("StdOut", ""))


def may_requeue(job: JobId) -> bool:
    """Returns whether a job may go back into the queue: a site may refuse it. True if SLURM does not answer."""
    try:
        asked = _asking("scontrol", job.cluster, local_cluster())
    except NoControllerError:
        return True
    result = run_command(*asked, "show", "job", "-o", job.number)
    return _fields(result.output.partition("\n")[0]).get("Requeue") != "0"


def cancel_jobs(jobs: Sequence[JobId]) -> str:
    """Cancels jobs, each on its cluster; returns scancel's error message, empty where it succeeded.

    Raises:
        NoControllerError: This machine's SLURM does not answer.
    """
    local = local_cluster()
    for cluster in sorted({job.cluster for job in jobs}):
        numbers = [job.number for job in jobs if job.cluster == cluster]
        result = run_command(*_asking("scancel", cluster, local), *numbers, timeout_s=_ACTION_TIMEOUT_S)
        if result.status != 0:
            return result.errors.strip()
    return ""


# The job around this process: the programs on its node ask its cluster


def query_own_job(job: JobId) -> QueueRow | None:
    """Asks squeue about the job; None if squeue no longer knows it.

    Raises:
        NoControllerError: SLURM does not answer.
    """
    return next(iter(_query_queue(job.number, job.cluster, job.cluster)), None)


def query_own_accounts(job: JobId) -> list[AccountRow]:
    """Asks sacct about the job; empty without accounting."""
    return _query_accounts(job.number, job.cluster, job.cluster, timeout_s=_QUERY_TIMEOUT_S)


def requeue_job(job: JobId) -> str:
    """Puts the job back into the queue, which kills its processes; returns SLURM's refusal, empty on success."""
    result = run_command("scontrol", "requeue", job.number, timeout_s=_ACTION_TIMEOUT_S)
    return "" if result.status == 0 else _why_it_failed(result, "scontrol")


def rename_job(job: JobId, name: str) -> None:
    """Gives the job another name in the queue, as far as SLURM does so."""
    run_command("scontrol", "update", f"JobId={job.number}", f"JobName={name}")


def move_dependents(old: JobId, new: JobId) -> None:
    """Makes the jobs that wait for the job `old` wait for the job `new`."""
    waiting = run_command("squeue", "--me", "--noheader", "--array", "--states=PENDING", "-o", "%i|%E").output
    for line in waiting.splitlines():
        number, _, dependency = line.partition("|")
        moved = moved_dependency(dependency, old, new)
        if moved != dependency:
            update = ("scontrol", "update", f"JobId={number}", f"Dependency={moved}")
            run_command(*update, timeout_s=_ACTION_TIMEOUT_S)


def moved_dependency(dependency: str, old: JobId, new: JobId) -> str:
    """Replaces a job by another job of the same cluster in a dependency, which is in the notation of squeue.

    >>> old, new = JobId(number="12", cluster="a"), JobId(number="40", cluster="a")
    >>> moved_dependency("afterok:12(unfulfilled),afterok:123(unfulfilled)", old, new)
    'afterok:40,afterok:123'
    """
    whole_number = rf"(?<![\d_]){re.escape(old.number)}(?![\d_])"
    if not re.search(whole_number, dependency):
        return dependency
    # squeue adds the state of each dependency, which scontrol does not accept.
    return re.sub(whole_number, new.number, re.sub(r"\(\w+\)", "", dependency))


# A submission that got no answer

_LIMITED: Final = """\
import os, signal, subprocess, sys
# The terminal's Ctrl-C must not end sbatch between its request and its answer.
os.setsid()
child = subprocess.Popen(sys.argv[2:], process_group=0)
try:
    sys.exit(child.wait(float(sys.argv[1])))
except subprocess.TimeoutExpired:
    # A site's sbatch may be a script: its children would keep the output open.
    os.killpg(child.pid, signal.SIGKILL)
"""


def limited(command: Sequence[str]) -> list[str]:
    """Returns a command that runs another command in a session of its own, out of reach of the terminal's signals. It
    ends after `SUBMIT_TIMEOUT_S` with success and no output.
    """
    return [sys.executable, "-I", "-c", _LIMITED, str(SUBMIT_TIMEOUT_S), *command]


def find_jobs(name: str, folder: Path, clusters: str) -> list[JobId]:
    """Finds a person's jobs of a name in the queues of clusters that write their logs into a folder: SLURM took them,
    but its answer did not arrive. An array is one job.

    Raises:
        NoControllerError: A controller does not answer.
    """
    local = local_cluster()
    return [job for cluster in clusters.split(",") for job in _find_jobs(name, folder, cluster, local)]


def _find_jobs(name: str, folder: Path, cluster: str, local: str) -> list[JobId]:
    squeue, scontrol = _asking("squeue", cluster, local), _asking("scontrol", cluster, local)
    listed = query_cluster(*squeue, "--me", "--noheader", "-o", "%F|%j").splitlines()
    # For another cluster, squeue prints its name first. An element of an array that has started has its own name.
    found = (line.strip().partition("|") for line in listed)
    numbers = dict.fromkeys(
        number for number, _, named in found if number.isdecimal() and (named == name or named.endswith(f"_{name}"))
    )
    shown = {number: query_cluster(*scontrol, "show", "job", "-o", number) for number in numbers}
    return [JobId(number=number, cluster=cluster) for number, text in shown.items() if _log_path(text).parent == folder]


@dataclass(frozen=True, kw_only=True)
class ExpectedStart:
    """SLURM's answer to the question when a job would start; exactly one of the two is known."""

    time: datetime | None = None  # local time
    refusal: str = ""  # reason why SLURM would not take the job


_STARTS: Final = re.compile(r"\bto start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


def expected_start(script: str) -> ExpectedStart:
    """Asks sbatch when the job of a batch script would start; nothing is submitted."""
    with NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        result = run_command(SBATCH, "--test-only", file.name, timeout_s=SUBMIT_TIMEOUT_S)
    if (started := _STARTS.search(result.errors + result.output)) is not None:
        return ExpectedStart(time=datetime.fromisoformat(started[1]))
    return ExpectedStart(refusal=_why_it_failed(result, SBATCH).removeprefix("allocation failure: "))


# Partitions and nodes

_KEY: Final = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")
_UNLIMITED: Final = ("UNLIMITED", "INFINITE", "NONE", "N/A", "")
_GPU: Final = re.compile(r"(?:^|,)gpu(?::([^:,()]*[^:,()\d][^:,()]*))?:(\d+)")
_USABLE: Final = frozenset(("IDLE", "MIXED", "ALLOCATED", "COMPLETING", "RESERVED", "PLANNED", "CLOUD", "DYNAMIC_NORM"))
"""Words of a node's state (`IDLE+PLANNED`) under which a job may still start there."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node and its resources for jobs; the kind of a GPU is "" on a cluster without kinds."""

    name: str
    cpus: int
    memory_mib: int
    tmp_mib: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    is_up: bool = True
    features: Sequence[str] = ()

    def num_gpus(self, kind: str = "") -> int:
        """Counts the GPUs of a kind; empty: of every kind."""
        return sum(number for name, number in self.gpus.items() if kind in ("", name))


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """The limits that a cluster enforces: rows of `sacctmgr`, by its columns' names."""

    qualities: Sequence[Mapping[str, str]] = ()  # of service
    associations: Sequence[Mapping[str, str]] = ()  # of all accounts (`User` is empty), and of this user with accounts
    default_account: str = ""  # of this user


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition, with its limits for a job; None: no limit."""

    name: str
    is_default: bool = False
    max_time_min: int | None = None
    default_time_min: int | None = None
    max_nodes: int | None = None
    nodes: Sequence[Node] = ()
    is_up: bool = True
    max_array: int | None = None  # jobs of an array
    qos: str = ""  # with limits for every job in the partition; empty: no QOS
    accounting: Accounting = field(default_factory=Accounting)


def is_installed() -> bool:
    """Returns whether SLURM's programs are on this machine; the controller may still not answer."""
    return all(shutil.which(program) for program in ("scontrol", "sbatch"))


def read_version() -> str:
    """Returns the version of SLURM's programs; empty if they do not say it."""
    # Debian's SLURM calls itself slurm-wlm.
    version = re.search(r"\d+\.\d[\w.]*", run_command("sbatch", "--version").output)
    return version.group() if version else ""


def programs_folder() -> str:
    """Returns the folder of SLURM's programs on this machine; empty if they are not installed."""
    program = shutil.which("scontrol")
    return str(Path(program).absolute().parent) if program else ""


def read_partitions(cluster: str = "") -> list[Partition]:
    """Asks the controller of a cluster for its partitions and their nodes; empty: of this machine's cluster.

    Raises:
        NoControllerError: There is none, or it does not answer.
    """
    of_cluster = _asking("scontrol", cluster, "")
    partitions, nodes = (query_cluster(*of_cluster, "show", what, "-o") for what in ("partition", "node"))
    return parse_partitions(partitions, nodes)


_QOS_COLUMNS: Final = (
    "Name", "Flags", "MaxWall", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins", "MinTRES", "GrpTRES", "GrpTRESMins",
    "MaxTRESPU", "MaxTRESPA", "MaxSubmitPU", "MaxSubmitPA", "GrpSubmit",
)  # fmt: skip
_ASSOCIATION_COLUMNS: Final = (
    "Account", "User", "Partition", "ParentName", "QOS", "DefaultQOS", "MaxWall", "MaxTRES", "MaxTRESPerNode",
    "MaxTRESMins", "GrpTRES", "GrpTRESMins", "MaxSubmit", "GrpSubmit",
)  # fmt: skip


def read_partitions_and_limits(cluster: str = "") -> list[Partition]:
    """Asks the controller as `read_partitions` does, and the accounting for the limits of this user's jobs.

    Raises:
        NoControllerError: There is none, or it does not answer.
    """
    asked = (*_asking("scontrol", cluster, ""), "show", "config")
    partitions, lines = read_partitions(cluster), run_command(*asked).output.splitlines()
    # Without an answer there are no limits, as on a cluster that enforces none: SLURM decides.
    settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    if (largest := settings.get("MaxArraySize", "")).isdecimal():
        partitions = [replace(partition, max_array=int(largest)) for partition in partitions]
    if {"limits", "safe"}.isdisjoint(settings.get("AccountingStorageEnforce", "").split(",")):
        return partitions
    user, place = pwd.getpwuid(os.geteuid()).pw_name, f"cluster={settings.get('ClusterName', '')}"
    owners = [("assoc", "where", place, f"user={name}") for name in (user, "")]
    associations = [row for owner in owners for row in _sacctmgr(owner, _ASSOCIATION_COLUMNS)]
    default = _sacctmgr(("user", "where", f"name={user}"), ("DefaultAccount",))
    accounting = Accounting(qualities=_sacctmgr(("qos",), _QOS_COLUMNS), associations=associations,
                            default_account=default[0]["DefaultAccount"] if default else "")  # fmt: skip
    return [replace(partition, accounting=accounting) for partition in partitions]


def _sacctmgr(what: Sequence[str], columns: Sequence[str]) -> list[dict[str, str]]:
    result = run_command("sacctmgr", "--noheader", "--parsable2", "show", *what, f"format={','.join(columns)}")
    cells = [line.split("|") for line in result.output.splitlines()]
    return [dict(zip(columns, row, strict=True)) for row in cells if len(row) == len(columns)]


def refused_option(program: str, options: Sequence[str]) -> str:
    """Returns the words with which sbatch or srun refuses options; empty if it takes them, or cannot be asked.

    Both read their options before they print their help, also the options of a site's plugins, and ask no controller.
    """
    result = run_command(program, *options, "--help")
    # A program that prints no help cannot be asked.
    if result.status in (0, None) or run_command(program, "--help").status != 0:
        return ""
    lines = [line for line in result.errors.splitlines() if line and "for more information" not in line]
    return "; ".join(re.sub(r"^\w+: (?:error: )?", "", line) for line in lines)


def has_pyxis() -> bool | None:
    """Returns whether srun has Pyxis, a plugin for containers; None if srun cannot be asked."""
    result = run_command(SRUN, "--help")
    return None if result.status != 0 else "--container-image" in result.output


def read_reservations(cluster: str = "") -> list[str] | None:
    """Asks the controller for the names of its reservations; None if it does not answer."""
    result = run_command(*_asking("scontrol", cluster, ""), "show", "reservation", "-o")
    return None if result.status != 0 else re.findall(r"^ReservationName=(\S+)", result.output, re.MULTILINE)


def query_cluster(*command: str, timeout_s: float = _QUERY_TIMEOUT_S) -> str:
    """Runs a program of SLURM and returns its output.

    Raises:
        NoControllerError: It is not installed, fails, or takes too long.
    """
    if shutil.which(command[0]) is None or shutil.which("sbatch") is None:
        problem = f"{command[0]} and sbatch are not both installed"
    else:
        result = run_command(*command, timeout_s=timeout_s)
        if result.status == 0:
            return result.output
        problem = _why_it_failed(result, command[0])
    raise no_controller(problem)


def no_controller(problem: str) -> NoControllerError:
    """Makes the error for a SLURM that does not answer."""
    return NoControllerError("No SLURM answers on this machine", value=problem,
                             remedy=f"{where_to_submit()}; or train here: --cluster local in the background, --cluster "
                                    "debug in the foreground")  # fmt: skip


def where_to_submit() -> str:
    """Returns the beginning of a remedy where no SLURM answers on this machine."""
    # A controller is started anew within a minute; programs that are missing stay missing.
    when = "Try again in a minute; or submit" if is_installed() else "Submit"
    return f"{when} from a login node of the cluster"


def parse_partitions(partitions: str, nodes: str) -> list[Partition]:
    """Parses the output of `scontrol show partition -o` and `scontrol show node -o`."""
    node_fields = [_fields(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    fields_by_name = {fields.get("PartitionName", ""): fields for fields in map(_fields, partitions.splitlines())}
    return [
        Partition(
            name=name,
            is_default=fields.get("Default") == "YES",
            max_time_min=_time_min(fields.get("MaxTime", "")),
            default_time_min=_time_min(fields.get("DefaultTime", "")),
            max_nodes=int(count) if (count := fields.get("MaxNodes", "")).isdigit() else None,
            nodes=[_node(node) for node in node_fields if name in node.get("Partitions", "").split(",")],
            is_up=fields.get("State", "UP") == "UP",
            qos="" if (qos := fields.get("QoS", "")) in _UNLIMITED else qos,
        )
        for name, fields in fields_by_name.items()
        if name
    ]


def read_clusters(names: str) -> list[str]:
    """Returns the clusters of `--clusters`, where `all` means each one that the accounting knows.

    Raises:
        NoControllerError: SLURM does not answer at all.
        ConfigError: The accounting knows no cluster of a name, or does not answer.
    """
    asked, known = cluster_names(names), cluster_names(_EVERY_CLUSTER) if names else []
    if names and not known:
        local_cluster()  # raises where no SLURM answers
        raise ConfigError("SLURM finds other clusters through its accounting, which knows none here", value=names,
                          remedy="Leave out --clusters, and submit on a login node of the cluster")  # fmt: skip
    for name in asked:
        if name not in known:
            raise unknown_name("cluster", name, known)
    return asked


def cluster_names(names: str) -> list[str]:
    """Returns the clusters of `--clusters`, as `read_clusters` does, without a check."""
    if names == _EVERY_CLUSTER:
        return [row["Cluster"] for row in _sacctmgr(("clusters",), ("Cluster",))]
    return list(dict.fromkeys(filter(None, names.split(","))))


def _time_min(text: str) -> int | None:
    return None if text in _UNLIMITED else parse_time_min(text)


def _node(fields: Mapping[str, str]) -> Node:
    gpus: dict[str, int] = {}
    for kind, number in _GPU.findall(fields.get("Gres", "")):
        gpus[kind] = gpus.get(kind, 0) + int(number)
    # Specialised memory is reserved for the system.
    memory_mib = int(fields.get("RealMemory") or 0) - int(fields.get("MemSpecLimit") or 0)
    features = [name for name in fields.get("AvailableFeatures", "").split(",") if name not in _NO_VALUE]
    return Node(name=fields["NodeName"], cpus=int(fields.get("CPUEfctv") or fields.get("CPUTot") or 1), gpus=gpus,
                memory_mib=memory_mib, tmp_mib=int(fields.get("TmpDisk") or 0), features=features,
                is_up=_USABLE.issuperset(fields.get("State", "IDLE").split("+")))  # fmt: skip


def _fields(line: str) -> dict[str, str]:
    """Splits `Key=value` pairs; values may contain spaces (OS, Reason)."""
    keys = list(_KEY.finditer(line))
    ends = [*(match.start() for match in keys[1:]), len(line)]
    pairs = [(match[1], line[match.end() : end].strip()) for match, end in zip(keys, ends, strict=False)]
    # The first value of a key counts: a person's text, which comes last (Reason), may look like more pairs.
    return dict(reversed(pairs))


def node_names(expression: str) -> list[str]:
    """Expands a node list as SLURM writes it: n[1-2]."""
    # submitit is slow to import, and most looks at runs need no node list.
    from submitit.slurm.slurm import _parse_node_list

    return _parse_node_list(expression) if expression else []
