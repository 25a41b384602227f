"""The work of a job: it trains a run, and goes back into the queue before its time limit. After the training, while the
job still exists, the ending is recorded, and the run is started again if it may be.
"""

import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from can_train.config.settings import ClusterSettings
from can_train.errors import CanTrainError, RunError, StateError, printable
from can_train.io.records import JobId, is_folder, utc_now
from can_train.io.units import count_of
from can_train.memory.host import PACKED, control_groups
from can_train.runs import attempts
from can_train.runs.attempts import AttemptEnd, Attempts, SlurmContext, StopRequests
from can_train.runs.registry import JobRecord, Registry, RetryRecord, RunRecord
from can_train.runs.run_folder import RunFolder, place_in_sweep
from can_train.runs.run_state import GPU_OOM, HOST_OOM, best_text, error_in_words, log_causes
from can_train.runs.scheduler import NoControllerError, QueueRow
from can_train.runs.status import read_tail
from can_train.slurm import client

if TYPE_CHECKING:
    from can_train.slurm.script import Submission

Entry = Callable[[RunFolder, StopRequests], None]
"""Trains the run in a folder. Slow imports are made in the call: by then signals are handled."""

Resubmission = Callable[[RunFolder, ClusterSettings, "Submission"], JobRecord]
"""Submits a run again."""


@dataclass(frozen=True)
class Job:
    """A job, as submitit pickles it: the function that trains, and the folder of the run."""

    entry: Entry
    run_path: str

    def __call__(self) -> None:
        """Trains.

        Raises:
            SystemExit: A signal ended it, or an error that the log shows.
        """
        folder, stops = RunFolder(Path(self.run_path)), StopRequests()
        # submitit writes a line into the log for each SIGCONT, which SLURM sends before it ends a job.
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        try:
            with stops.installed(), folder.attempts.recorded(stops):
                self._train(folder, stops)
        except SystemExit as stop:
            # After the attempt is recorded: a requeue kills this process at once.
            if stop.code == attempts.WARNED and not stop.__cause__:
                _return_to_queue(folder, stops)
            raise
        finally:
            # A job of SLURM does so after the job step, which knows more ends.
            if os.environ.get("SUBMITIT_EXECUTOR") != "slurm" and (end := folder.attempts.end(folder.attempts.current)):
                notify(folder, cluster_settings(folder), end.ending, end.message)

    def _train(self, folder: RunFolder, stops: StopRequests) -> None:
        """Trains. A warned job that may not go back into the queue exits with the reason as the cause."""
        try:
            self.entry(folder, stops)
        except SystemExit as stop:
            if stop.code == attempts.WARNED:
                restarts = folder.attempts.count_restarts(SlurmContext.from_environment().job)
                decision = decide_restart(JobOutcome(ending="time_limit", restarts=restarts), cluster_settings(folder))
                if isinstance(decision, NoRestart):
                    raise SystemExit(attempts.WARNED) from RunError(
                        "The job's time is up", value=without_cause(decision.reason, "time_limit"),
                        remedy=f"Go on: can-train resume {folder.run_id}"
                    )  # fmt: skip
            raise


@dataclass(frozen=True)
class PackedJob:
    """A job whose processes train runs beside each other on one GPU, as submitit pickles it: each process one run."""

    entry: Entry
    run_paths: tuple[str, ...]

    def __call__(self) -> None:
        """Trains the run of this process; raises SystemExit as `Job` does."""
        number = count_of(os.environ, "SLURM_PROCID", 0)
        # The last job of a sweep may have fewer runs than processes. A job that goes back into the queue has runs that
        # are over.
        if number >= len(self.run_paths) or _is_over(RunFolder(Path(self.run_paths[number]))):
            return
        os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1",
                       PACKED: str(len(self.run_paths))}  # fmt: skip
        Job(self.entry, self.run_paths[number])()


def name_job(folder: RunFolder, cluster: ClusterSettings, state_dir: Path) -> None:
    """Names the job around this process by the label of its run in a sweep or search: all elements of an array begin
    with one name, and a trial has no values before it starts.
    """
    job, own = SlurmContext.from_environment().job, PACKED not in os.environ and not cluster.job_name
    # A person's own allocation keeps its name.
    if job is None or not own or os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return
    record = Registry(state_dir).run(folder.run_id)
    name = place_in_sweep(record, folder).job_name if record else ""
    if name not in ("", os.environ.get("SLURM_JOB_NAME")):
        client.rename_job(job, name)


def _is_over(folder: RunFolder) -> bool:
    """Returns whether a run has a result, or ended for a reason that a requeue does not mend."""
    if folder.result_path.is_file():
        return True
    if not (starts := folder.attempts.starts()):
        return False
    end = folder.attempts.end(starts[-1].attempt)
    return folder.attempts.is_superseded() or (end is not None and end.ending not in attempts.REPEATED)


def _return_to_queue(folder: RunFolder, stops: StopRequests) -> None:
    """Puts the job of a warned run back into the queue, or records SLURM's refusal."""
    context = SlurmContext.from_environment()
    # Rank 0 requeues for all ranks; submitit's local executor has no queue. A requeue kills all runs of a job: those
    # that share a GPU save first, and the job goes back after the last of them.
    if PACKED in os.environ or context.job is None or context.rank or os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return
    # SIGTERM after the warning comes from the time limit or from a person's scancel.
    if stops.terminated:
        row = None
        with suppress(NoControllerError):
            row = client.query_own_job(context.job)
        # A cancelled job must not go back, and SLURM requeues a preempted job.
        if row is None or (row.state != "RUNNING" and row.reason != "TimeLimit"):
            return
    if refusal := client.requeue_job(context.job):
        end = folder.attempts.end_in(context)
        warned = (end.unsaved if end is not None else "") or _SAVED
        folder.attempts.record_end("time_limit", f"{warned}; {_not_put_back(refusal)}", {})


def _not_put_back(refusal: str) -> str:
    return f"its job could not be put back into the queue ({refusal})"


def _not_submitted_again(why: str) -> str:
    return f"it could not be submitted again ({why})"


# Whether and how a run starts again

MEMORY_GROWTH: Final = 1.5
"""Factor of a job's memory after a host out-of-memory: 2.25 after two, 3.4 after three."""
_FINE_STEP_MIB, _FINE_UP_TO_MIB, _COARSE_STEP_MIB = 100, 4096, 1024
"""Requests are rounded to 100 MiB up to 4 GiB, then to whole GiB."""
_KILLED: Final = 128 + 9
_GONE: Final = (_KILLED, attempts.TERMINATED)  # statuses of a job step with a killed rank
_CARRIED_OVER: Final = ("partition", "account", "qos", "time", "mem", "exclude")
"""Resources that the next job takes from the last job instead of the run's configuration."""


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """The facts about a job whose training has ended.

    Attributes:
        ending: An ending of `AttemptEnd`.
        restarts: Number of requeues by can-train.
        resubmits: Number of submissions of the run after an out-of-memory.
        one_sample, should_fit, foreign_bytes: Fields of `OutOfMemoryDetails`.
        memory_mib, most_memory_mib: Memory of the job on each node, and of the partition's largest node; None: unknown.
        has_other_nodes: Whether the partition has enough nodes without the nodes to avoid.
        node_fault: Fault of the node that ended the training, in words; empty: none is known.
        retries: Number of submissions of the run after a fault of a node.
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
    node_fault: str = ""
    retries: int = 0


@dataclass(frozen=True)
class RestartDecision:
    """Whether and how a run starts again, and why; only a `NoRestart` may have no reason."""

    reason: str = ""


class Requeue(RestartDecision):
    """The job goes back into the queue unchanged."""


class NoRestart(RestartDecision):
    """Nothing is started."""


@dataclass(frozen=True)
class Resubmit(RestartDecision):
    """The run gets a new job, with more memory or without the nodes of the old job."""

    memory_mib: int | None = None
    elsewhere: bool = False


def infer_ending(recorded: str, *, status: int, host_oom: bool) -> str:
    """Infers the ending of a training.

    Args:
        recorded: The ending that the processes recorded; empty if they could not.
        status: Exit status of the job step: the largest status of the ranks.
        host_oom: Whether the kernel killed a process because the job's memory ran out.

    Returns:
        An ending of `AttemptEnd`.
    """
    if recorded == "finished":
        return recorded
    if host_oom:
        return "host_oom"
    # If a rank is killed, the others notice that it is gone, or srun terminates them, which gives a larger status.
    if (status == _KILLED and recorded in ("", "terminated")) or (status in _GONE and recorded == "rank_gone"):
        return "killed"
    if recorded == "rank_gone":
        return "failed"
    return recorded or attempts.ENDING_BY_STATUS.get(status, "failed")


_SAVED: Final = "warned and saved"  # message of a run that stopped before its time limit

_RESTART_REASONS: Final[Mapping[str, str]] = {
    "time_limit": "the time limit", "killed": "a killed process", "in_use": "an earlier attempt still trains the run",
}  # fmt: skip


def decide_restart(outcome: JobOutcome, limits: ClusterSettings) -> Requeue | NoRestart | Resubmit:
    """Decides whether and how a run starts again, within the number that its settings allow."""
    where = "another node" if outcome.has_other_nodes else "again, for want of another node"
    if outcome.ending in attempts.RESTARTED:
        what = _RESTART_REASONS[outcome.ending]
        if outcome.restarts < limits.max_restarts:
            return Requeue(what)
        return _used_up(what, outcome.restarts, "back into the queue", "max_restarts")
    if outcome.ending == "host_oom":
        had, most = outcome.memory_mib, outcome.most_memory_mib
        if had is None:
            return NoRestart("host out-of-memory, and how much the job had is not known")
        if most is not None and had >= most:
            return NoRestart(f"host out-of-memory with {had}M, and no node of the partition has more")
        memory = grown_memory_mib(had, most_mib=most)
        decision = Resubmit(f"host out-of-memory: {memory}M instead of {had}M", memory_mib=memory)
    elif outcome.ending == "gpu_oom" and outcome.should_fit and not outcome.one_sample:
        why = f"others held {outcome.foreign_bytes >> 20} MiB" if outcome.foreign_bytes else "it should fit"
        decision = Resubmit(f"CUDA out-of-memory: {why}; {where}", elsewhere=outcome.has_other_nodes)
    elif outcome.ending == "failed" and outcome.node_fault:
        if outcome.retries >= limits.retries:
            return _used_up(_NODE, outcome.retries, "submitted again", "retries")
        return Resubmit(f"{_NODE}: {outcome.node_fault}; {where}", elsewhere=outcome.has_other_nodes)
    else:
        return NoRestart()
    if outcome.resubmits >= limits.oom_resubmits:
        what = decision.reason.partition(":")[0]
        return _used_up(what, outcome.resubmits, "submitted again", "oom_resubmits")
    return decision


def grown_memory_mib(had_mib: int, *, most_mib: int | None = None) -> int:
    """Returns the memory of the next job: `MEMORY_GROWTH` times as much, rounded up, at most `most_mib`.

    >>> grown_memory_mib(400), grown_memory_mib(16384), grown_memory_mib(3000, most_mib=4000)
    (600, 24576, 4000)
    """
    wanted = MEMORY_GROWTH * had_mib
    step = _FINE_STEP_MIB if wanted <= _FINE_UP_TO_MIB else _COARSE_STEP_MIB
    memory = -int(-wanted // step) * step
    return memory if most_mib is None else min(memory, most_mib)


def _used_up(what: str, number: int, done: str, setting: str) -> NoRestart:
    """Returns the decision after something was done as often as a setting allows."""
    times = f"after {_times(number)} {done} (cluster.{setting})" if number else f"and cluster.{setting} is 0"
    return NoRestart(f"{what}, {times}")


_IN_STATE: Final = {"time_limit": "the time limit", "host_oom": HOST_OOM, "gpu_oom": GPU_OOM}
"""Causes that the state of a run names, by ending."""


def without_cause(reason: str, ending: str) -> str:
    """Returns the reason of a `NoRestart` without the cause that the state of the run names.

    >>> without_cause("host out-of-memory, after 2 times submitted again", "host_oom")
    'after 2 times submitted again'
    """
    cause = f"{_IN_STATE.get(ending)}, "
    return reason.removeprefix(cause).removeprefix("and ") if reason.startswith(cause) else reason


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def count_oom_resubmits(jobs: Sequence[JobRecord]) -> int:
    """Counts the submissions after an out-of-memory since the last submission by a person."""
    return sum(is_oom_reason(job.reason) for job in _submitted_again(jobs))


def count_retries(jobs: Sequence[JobRecord]) -> int:
    """Counts the submissions after a fault of a node since the last submission by a person."""
    return sum(not is_oom_reason(job.reason) for job in _submitted_again(jobs))


def _submitted_again(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    return [*takewhile(lambda job: is_oom_reason(job.reason) or job.reason.startswith(f"{_NODE}: "), reversed(jobs))]


def is_oom_reason(reason: str) -> bool:
    """Returns whether a `Resubmit` after an out-of-memory gave the reason of a job."""
    return reason.startswith(("host out-of-memory: ", "CUDA out-of-memory: "))


# Faults of a node

_NODE: Final = "fault of the node"
_NODE_FAULTS: Final = re.compile("|".join((
    # Memory and bus of a GPU, and its driver. An illegal access or a failed launch is mostly a program's error.
    r"uncorrectable (?:NVLink|ECC) error[^.;\n]*|\bXid\b[^.;\n]*|GPU (?:is lost|has fallen off the bus)",
    r"(?:Driver/library version mismatch|no CUDA-capable device is detected|No CUDA GPUs are available)",
    r"CUDA (?:driver initialization failed|error: (?:unknown error|system not yet initialized|initialization error))",
    r"couldn't communicate with the NVIDIA driver",
    # A file system that the node has lost.
    r"Stale file handle|Transport endpoint is not connected|Input/output error|Remote I/O error|Read-only file system",
)))  # fmt: skip
"""Errors for which the node is to blame, and not the run: on another node the same line may train."""
_AT_ONCE_S: Final = 600.0  # within which several runs must fail on a node
_SEVERAL: Final = 2
_RECENT_DAYS: Final = 14  # since a run was made: older runs are not read again after each failure


def node_fault(error: str) -> str:
    """Returns the fault of a node that an error names; empty: the error may be the run's own.

    Example:
        >>> node_fault("RuntimeError: CUDA error: uncorrectable ECC error encountered")
        'uncorrectable ECC error encountered'
    """
    match = _NODE_FAULTS.search(error)
    return match[0] if match else ""


@dataclass(frozen=True, kw_only=True)
class EndOnNode:
    """The last attempt of a run on a node: it failed, or it finished or still trains."""

    node: str
    has_failed: bool
    run: RunRecord | None = None
    job: JobId | None = None


def failing_nodes(ends: Sequence[EndOnNode]) -> dict[str, int]:
    """Returns the nodes on which several runs failed at once while runs were well elsewhere, with the number of runs.
    Where runs fail on every node, the runs are to blame.
    """
    failed = Counter(end.node for end in ends if end.has_failed)
    well = {end.node for end in ends if not end.has_failed}
    return {node: count for node, count in failed.items() if count >= _SEVERAL and node not in well and well}


def recent_ends(registry: Registry, now: datetime) -> list[EndOnNode]:
    """Reads the last attempts of the runs that ended within `_AT_ONCE_S`, or train."""
    ends = []
    for run in registry.runs():
        if (now - datetime.fromisoformat(run.time)).days > _RECENT_DAYS:
            continue
        of_run = Attempts(Path(run.path))
        with suppress(OSError):
            if not (starts := of_run.starts()):
                continue
            end, node, latest = of_run.end(starts[-1].attempt), starts[-1].host, starts[-1].start_time
            if end is not None:
                node, latest = end.host or node, end.time
            # An attempt that was killed without a record looks as if it trained, but not for long.
            if (now - datetime.fromisoformat(latest)).total_seconds() < _AT_ONCE_S:
                has_failed = end is not None and end.ending == "failed"
                ends.append(EndOnNode(node=node, has_failed=has_failed, run=run, job=starts[-1].slurm_job))
    return ends


def cluster_settings(folder: RunFolder) -> ClusterSettings:
    """Reads the cluster settings of a run.

    Raises:
        RunError: Its configuration cannot be read.
    """
    return ClusterSettings(**folder.config().get("cluster", {}))


def next_cluster(cluster: ClusterSettings, last: Mapping[str, Any], decision: Resubmit) -> ClusterSettings:
    """Returns the request of the next job, from the run's configuration and the resources of its last job."""
    changes: dict[str, Any] = {name: str(last[name]) for name in _CARRIED_OVER if name in last}
    # It has begun once.
    changes["begin"] = ""
    if decision.memory_mib is not None:
        # sbatch takes one of --mem, --mem-per-cpu and --mem-per-gpu.
        additional = cluster.additional.items()
        other_options = {name: text for name, text in additional if not name.replace("_", "-").startswith("mem-per-")}
        changes |= {"mem": f"{decision.memory_mib}M", "mem_per_gpu": "", "additional": other_options}
    elif not decision.elsewhere:
        # No other node is left, so avoided nodes are tried again, except those that a person excludes.
        changes["exclude"] = cluster.exclude
    return replace(cluster, **changes)


# The command of a person at the end of a run

_NOTIFY_S: Final = 60.0  # after which the command is ended: a job must not wait for it


def notify(folder: RunFolder, settings: ClusterSettings, ending: str, why: str = "", *, label: str = "") -> str:
    """Starts the person's command at the end of a run, if there is one for this end.

    Args:
        folder: The run.
        settings: Its settings, with the command.
        ending: An ending of `AttemptEnd`.
        why: The error, in a line; empty for a finished run, whose best figure is read.
        label: The run's label in its sweep.

    Returns:
        A sentence if the command failed; else an empty one.
    """
    if not settings.notify or (settings.notify_on == "failure" and ending in _NO_FAILURES):
        return ""
    if ending == "finished" and not why:
        why = best_text(folder.result() or {})
    words = {"run": folder.run_id, "state": ending.replace("_", " "), "why": why, "label": label,
             "folder": str(folder.path)}  # fmt: skip
    # An error comes from a program and its data: as an argument its lines and control characters do no harm to a shell,
    # but they might in a mail.
    command = [_PLACEHOLDER.sub(lambda found: printable(words.get(found[1], found[0])).replace("\n", " "), argument)
               for argument in settings.notify]  # fmt: skip
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_NOTIFY_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"cluster.notify failed ({error})"
    return f"cluster.notify ended with status {result.returncode}" if result.returncode else ""


_NO_FAILURES: Final = ("finished", "terminated", "interrupted")
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


# After a job

_REGISTRATION_WAIT_S: Final = 10.0
"""Wait in seconds: a job may fail before the submitting process has entered it into the registry."""
_LOOK_INTERVAL_S: Final = 0.5
_CONTROLLER_WAIT_S: Final = 300.0
"""Wait in seconds for a controller that is started anew: without it no run can start again."""
_CONTROLLER_LOOK_S: Final = 5.0

_MESSAGES: Final = {
    "killed": "A process was killed (SIGKILL)",
    "host_oom": "The system killed a process for want of memory",
}


@dataclass(frozen=True, kw_only=True)
class _EndedJob:
    """A job whose training is over; `end` is the record of its processes, None if they could not write it."""

    run: RunRecord
    job: JobRecord
    slurm_job: JobId
    folder: RunFolder
    attempts: Attempts
    end: AttemptEnd | None
    registry: Registry

    @cached_property
    def settings(self) -> ClusterSettings:
        """The cluster settings of its run."""
        return cluster_settings(self.folder)

    @property
    def avoided_nodes(self) -> list[str]:
        """The nodes that this job avoided."""
        return client.node_names(str(self.job.resources.get("exclude", "")))

    @property
    def nodes_to_avoid(self) -> list[str]:
        """The nodes that this job avoided, its own node, and the nodes on which several runs failed at once."""
        return list(dict.fromkeys([*self.avoided_nodes, self.node, *self.failing_nodes]))

    @property
    def node(self) -> str:
        """The node of its last attempt."""
        return self.end.host if self.end else attempts.slurm_node_name()

    @cached_property
    def recent_ends(self) -> list[EndOnNode]:
        """The last attempts of the runs that ended within minutes, or train."""
        ends = recent_ends(self.registry, datetime.now(UTC))
        # The process may not have recorded its end.
        return [*ends, *([] if self.end else [EndOnNode(node=self.node, has_failed=True)])]

    @cached_property
    def failing_nodes(self) -> dict[str, int]:
        """The nodes on which several runs failed at once, with the number of runs."""
        return failing_nodes(self.recent_ends)

    def fault_of_node(self, log: str) -> str:
        """Returns the fault of the node that ended the training; empty: the run is to blame."""
        if fault := node_fault(f"{self.end.message if self.end else ''}\n{error_in_words(log)}"):
            return f"{fault} on {self.node}"
        return self.suspicion

    @property
    def suspicion(self) -> str:
        """Says that several runs failed on the node at once; empty: they did not."""
        count = self.failing_nodes.get(self.node)
        return f"{count} runs failed on {self.node} at once" if count else ""

    def claim_retry(self) -> bool:
        """Returns whether this process is the one that may start a new job for the run: of several runs that fail on a
        node at once, each finds the others.
        """
        try:
            self.registry.add(RetryRecord(run_id=self.run.run_id, time=utc_now(), job_id=self.job.job_id))
        except StateError:
            return False
        return True


def after_job(resubmit: Resubmission, state_dir: Path, *, status: int, environment: bytes) -> str:
    """Records the end of the job around this process, and starts its run again if it may be.

    Args:
        resubmit: `submit.submit_job` with its `entry`.
        state_dir: State folder, which has the registry.
        status: Exit status of the job step.
        environment: Environment at the start of the job's script (`remembered_environment`), with which a new job
            starts.

    Returns:
        A sentence about the restart; may be empty.
    """
    runs = _find_ended_runs(state_dir)
    told, requeued = [], list[tuple[_EndedJob, str, Requeue]]()
    for ended in runs:
        after = _after_run(ended, resubmit, state_dir, status=status, environment=environment)
        if isinstance(after, str):
            told.append(f"{ended.run.run_id}: {after}" if after and len(runs) > 1 else after)
        else:
            requeued.append(after)
    # It kills this process: the last thing that a job does.
    return "\n".join(filter(None, [*told, _requeue(requeued) if requeued else ""]))


def _after_run(
    ended: "_EndedJob", resubmit: Resubmission, state_dir: Path, *, status: int, environment: bytes
) -> "str | tuple[_EndedJob, str, Requeue]":
    """Records how the run of a job ended, and submits it again if it may be; returns a sentence about it, or the run,
    its ending and the decision where the job goes back into the queue.
    """
    if not is_folder(ended.folder.path):
        return f"{ended.folder.path} is gone, so the run is not started again"
    # A run that shares its job with others, and was over before the job came back for them.
    if ended.job.packed_with > 1 and ended.end is None and _is_over(ended.folder):
        return ""
    # SLURM may start the job of a finished run again, on a node where nothing begins.
    if ended.end.ending == "finished" if ended.end else ended.folder.result_path.is_file():
        return notify(ended.folder, ended.settings, "finished", label=place_in_sweep(ended.run, ended.folder).label)
    # A person has resumed the run meanwhile, as they may while the job trains others.
    if ended.job.packed_with > 1 and ended.registry.jobs(ended.run.run_id)[-1].slurm_job != ended.slurm_job:
        return ""
    # SLURM gave up the node, and started the job elsewhere: a requeue would stop the job there.
    if ended.attempts.is_superseded(since=ended.job.time):
        return ""
    log = read_tail(Path(ended.job.log_path))
    host_oom = host_memory_ran_out(ended.slurm_job, log)
    ending = infer_ending(ended.end.ending if ended.end else "", status=status, host_oom=host_oom)
    fault = ended.fault_of_node(log) if ending == "failed" else ""
    is_running, silence = False, ""
    try:
        # Before its nodes are asked for.
        row = (
            _query_patiently(ended.slurm_job) if fault or ending != "failed" else client.query_own_job(ended.slurm_job)
        )
        is_running = row is not None and row.state == "RUNNING"
    except NoControllerError as error:
        silence = error.value
    decision = decide_restart(_outcome(ended, ending, fault), ended.settings)
    why = error_in_words(log, f"exit status {status}")
    # SLURM knows why it ends a job. If it loses a node, srun fails, and the training there may still go on.
    if is_running or ended.end or ending != "failed":
        _record_end(ended, ending, decision, why)
    again = partial(_submit_again, send=partial(_resubmit, resubmit=resubmit, state_dir=state_dir,
                                                environment=environment))  # fmt: skip
    if isinstance(decision, NoRestart):
        # A job that SLURM itself ends may be put back into the queue.
        is_over = is_running or silence
        told = (
            notify(ended.folder, ended.settings, ending, why, label=place_in_sweep(ended.run, ended.folder).label)
            if is_over
            else ""
        )
        earlier = _retry_earlier(ended, again) if is_running and ending == "failed" else []
        return "\n".join(filter(None, [". ".join(filter(None, (decision.reason, told))), *earlier]))
    was_cancelled = any(cancel.time > ended.job.time for cancel in ended.registry.cancels(ended.run.run_id))
    # SLURM restarts a job that it ends itself (preemption, a failed node); a cancelled job stays cancelled.
    if was_cancelled or not (is_running or silence):
        return ""
    if isinstance(decision, Requeue) and not silence:
        return ended, ending, decision
    if isinstance(decision, Requeue):
        return _record_failed_restart(ended, ending, _not_put_back(silence))
    if silence:
        return _record_failed_restart(ended, ending, _not_submitted_again(silence))
    told = again(ended, ending, decision) if ended.claim_retry() else ""
    return "\n".join(filter(None, [told, *_retry_earlier(ended, again)])) if ending == "failed" else told


def _query_patiently(job: JobId) -> QueueRow | None:
    """Asks about the job around this process; waits for a controller that is started anew.

    Raises:
        NoControllerError: SLURM does not answer for minutes, or its programs are missing.
    """
    until = time.monotonic() + _CONTROLLER_WAIT_S
    while True:
        try:
            return client.query_own_job(job)
        except NoControllerError:
            if time.monotonic() > until or not client.is_installed():
                raise
        time.sleep(_CONTROLLER_LOOK_S)


def _submit_again(
    ended: "_EndedJob", ending: str, decision: Resubmit, send: Callable[["_EndedJob", Resubmit], JobRecord]
) -> str:
    """Starts a new job for a run; returns a sentence about it."""
    try:
        job = send(ended, decision)
    except CanTrainError as error:
        return _record_failed_restart(ended, ending, _not_submitted_again(error.in_short.rstrip(".")))
    if job.slurm_job is not None:
        client.move_dependents(ended.slurm_job, job.slurm_job)
    return f"{decision.reason}: submitted again as job {job.job_id}"


def _retry_earlier(ended: "_EndedJob", again: Callable[["_EndedJob", str, Resubmit], str]) -> list[str]:
    """Starts new jobs for the runs that failed on the node before it became suspect; returns a sentence about each."""
    told = []
    for end in ended.recent_ends if ended.suspicion else ():
        if end.run is None or end.run.run_id == ended.run.run_id or end.node != ended.node or not end.has_failed:
            continue
        # One run that cannot be read does not keep the others from their retries.
        with suppress(CanTrainError, OSError):
            earlier = _ended_earlier(ended, end.run, end.job)
            if earlier is None:
                continue
            # `failing_nodes` needs runs that are well on another node.
            retries = count_retries(earlier.registry.jobs(end.run.run_id))
            outcome = JobOutcome(ending="failed", node_fault=ended.suspicion, retries=retries, has_other_nodes=True)
            decision = decide_restart(outcome, earlier.settings)
            if isinstance(decision, Resubmit) and earlier.claim_retry():
                told.append(f"{end.run.run_id}: {again(earlier, 'failed', decision)}")
    return told


def _ended_earlier(ended: "_EndedJob", run: RunRecord, job: JobId | None) -> "_EndedJob | None":
    """Returns the last job of a run that failed earlier; None where this job must not start the run again: it is
    another person's, it had another environment, or a person has started or cancelled it since.
    """
    folder, jobs = RunFolder(Path(run.path)), ended.registry.jobs(run.run_id)
    if job is None or not jobs or jobs[-1].slurm_job != job:
        return None
    if any(cancel.time > jobs[-1].time for cancel in ended.registry.cancels(run.run_id)):
        return None
    is_alike = folder.path.stat().st_uid == os.getuid() and folder.environment() == ended.folder.environment()
    if not is_alike or folder.result_path.exists():
        return None
    context = SlurmContext(job=job)
    of_run = Attempts(folder.path, context)
    # It shares the nodes that are avoided.
    resources = {**jobs[-1].resources, "exclude": ",".join(ended.nodes_to_avoid)}
    return _EndedJob(run=run, job=replace(jobs[-1], resources=resources), slurm_job=job, folder=folder,
                     attempts=of_run, end=of_run.end_in(context), registry=ended.registry)  # fmt: skip


def _requeue(runs: "Sequence[tuple[_EndedJob, str, Requeue]]") -> str:
    """Puts the job of some runs back into the queue; returns a sentence about it."""
    for ended, ending, _ in runs:
        if ended.end is not None and ended.end.rank is None:
            # The training has recorded its own failed attempt to requeue the job.
            ended.attempts.record_end(ending, ended.end.unsaved, ended.end.details)
    first, _, decision = runs[0]
    if refusal := client.requeue_job(first.slurm_job):
        return "\n".join(_record_failed_restart(ended, ending, _not_put_back(refusal)) for ended, ending, _ in runs)
    return f"{decision.reason}: put back into the queue"


def _record_failed_restart(ended: _EndedJob, ending: str, failure: str) -> str:
    """Records that a run could not be started again; returns a sentence with the command that continues it."""
    warned = (ended.end.unsaved if ended.end else "") or _SAVED
    message = {**_MESSAGES, "time_limit": warned}.get(ending) or (ended.end.message if ended.end else "")
    details = ended.end.details if ended.end else {}
    ended.attempts.record_end(ending, "; ".join(filter(None, (message, failure))), details)
    return f"{failure}. Go on: can-train resume {ended.run.run_id}"


def _find_ended_runs(state_dir: Path) -> list[_EndedJob]:
    """Finds the runs of the job around this process: one, or several that share a GPU; none if there is no such job."""
    context, registry = replace(SlurmContext.from_environment(), rank=0), Registry(state_dir)
    until = time.monotonic() + _REGISTRATION_WAIT_S
    while context.job is not None:
        runs, seen = [], set[str]()
        # The newest first: SLURM may have reused the number.
        jobs = ((run, job) for run in reversed(registry.runs()) for job in reversed(registry.jobs(run.run_id)))
        for run, job in jobs:
            if job.slurm_job == context.job and run.run_id not in seen:
                seen.add(run.run_id)
                of_run = Attempts(Path(run.path), context)
                runs.append(_EndedJob(run=run, job=job, slurm_job=context.job, folder=RunFolder(Path(run.path)),
                                      attempts=of_run, end=of_run.end_in(context), registry=registry))  # fmt: skip
                if job.packed_with <= 1:
                    return runs
                if len(runs) == job.packed_with:
                    return runs
        if time.monotonic() > until:
            return runs
        time.sleep(_LOOK_INTERVAL_S)
    return []


def host_memory_ran_out(job: JobId, log: str) -> bool:
    """Returns whether the kernel killed a process of the job around this process because the job's memory ran out.

    Sources: the log, the control groups and the accounting. Each may be silent, depending on the cluster.
    """
    if HOST_OOM in log_causes(log):
        return True
    # Groups above the job's group count kills in other jobs, too.
    if any(re.fullmatch(r"job_\d+", group.path.name) and group.has_killed() for group in control_groups()):
        return True
    # The last row belongs to this attempt; earlier rows to earlier attempts, or to an older job of the same number.
    rows = client.query_own_accounts(job)
    return any(step.state == "OUT_OF_MEMORY" for row in rows[-1:] for step in row.steps)


def _outcome(ended: _EndedJob, ending: str, fault: str) -> JobOutcome:
    details: Mapping[str, Any] = ended.end.details if ended.end and ending == "gpu_oom" else {}
    nodes: list[client.Node] = []
    if ending in ("host_oom", "gpu_oom") or fault:
        name = os.environ.get("SLURM_JOB_PARTITION", "")
        with suppress(NoControllerError):
            partitions = [partition for partition in client.read_partitions() if partition.name == name]
            nodes = [node for partition in partitions for node in partition.nodes if node.is_up]
    other_nodes = {node.name for node in nodes}.difference(ended.nodes_to_avoid if nodes else ())
    return JobOutcome(
        ending=ending, restarts=ended.attempts.count_restarts(ended.slurm_job),
        resubmits=count_oom_resubmits(ended.registry.jobs(ended.run.run_id)), node_fault=fault,
        retries=count_retries(ended.registry.jobs(ended.run.run_id)),
        **{name: details[name] for name in ("one_sample", "should_fit", "foreign_bytes") if name in details},
        memory_mib=job_memory_mib(os.environ), most_memory_mib=max((node.memory_mib for node in nodes), default=None),
        has_other_nodes=len(other_nodes) >= ended.settings.nodes,
    )  # fmt: skip


def job_memory_mib(environment: Mapping[str, str]) -> int | None:
    """Returns the memory of a job on each node, in MiB; None if SLURM does not set it."""
    for unit, times in {"NODE": "", "CPU": "SLURM_CPUS_ON_NODE", "GPU": "SLURM_GPUS_ON_NODE"}.items():
        amount, number = environment.get(f"SLURM_MEM_PER_{unit}", ""), environment.get(times, "1")
        if amount.isdigit() and number.isdigit():
            return int(amount) * int(number)
    return None


def _record_end(ended: _EndedJob, ending: str, decision: RestartDecision, error: str) -> None:
    """Records an ending that the processes of the attempt could not know or record."""
    end, why_not = ended.end, without_cause(decision.reason, ending) if isinstance(decision, NoRestart) else ""
    is_recorded = end is not None and end.ending == ending
    if is_recorded and (not why_not or ending == "time_limit"):
        return
    message = end.message if end and is_recorded else {**_MESSAGES, "failed": error}.get(ending, "")
    ended.attempts.record_end(ending, ". ".join(filter(None, (why_not, message))), end.details if end else {})


def _resubmit(
    ended: _EndedJob, decision: Resubmit, resubmit: Resubmission, state_dir: Path, environment: bytes
) -> JobRecord:
    # submitit is slow to import, and most jobs need no new job.
    from can_train.slurm.script import Submission, remembered_environment
    from can_train.slurm.script import environment as replaced_environment

    name = place_in_sweep(ended.run, ended.folder).job_name or ended.run.key
    submission = Submission(name=name, state_dir=state_dir, reason=decision.reason)
    cluster = next_cluster(ended.settings, ended.job.resources, decision)
    avoiding = replace(cluster, exclude=",".join(ended.nodes_to_avoid)) if decision.elsewhere else cluster
    with replaced_environment(remembered_environment(environment)):
        try:
            return resubmit(ended.folder, avoiding, submission)
        except RunError:
            if avoiding == cluster:
                raise
            # No other node has the requested resources.
            return resubmit(ended.folder, cluster, submission)
