"""What is done after a job, while it still exists: its ending is recorded, and its run started again if it may be."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from can_train.errors import CanTrainError, RunError
from can_train.memory.host import control_groups
from can_train.slurm.client import (
    is_job_running,
    move_dependents,
    node_names,
    query_accounts,
    requeue_job,
    usable_nodes,
)
from can_train.slurm.restart import (
    Decision,
    JobOutcome,
    NoRestart,
    Requeue,
    Resubmit,
    cluster_settings,
    count_oom_resubmits,
    decide_restart,
    infer_ending,
    next_cluster,
)
from can_train.slurm.run_state import HOST_OOM, last_error_line, log_causes
from can_train.slurm.status import read_tail
from can_train.training.attempts import AttemptEnd, Attempts, SlurmContext, slurm_node_name
from can_train.training.run_folder import JobRecord, Registry, RunFolder, RunRecord

if TYPE_CHECKING:
    from can_train.slurm.job import Entry

_REGISTRATION_WAIT_S: Final = 10.0
"""A job that fails at once may be over before the submitting process has entered it into the registry."""

_LOOK_INTERVAL_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class _EndedJob:
    """A job that is over; `end` is what its processes recorded, None where they could not."""

    run: RunRecord
    job: JobRecord
    context: SlurmContext
    end: AttemptEnd | None
    registry: Registry
    state_dir: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.run.path))

    @property
    def attempts(self) -> Attempts:
        return Attempts(Path(self.run.path), self.context)

    @property
    def nodes_to_avoid(self) -> list[str]:
        """The nodes that this job avoided, and the one whose memory ran out."""
        before = node_names(str(self.job.resources.get("exclude", "")))
        return list(dict.fromkeys([*before, self.end.host if self.end else slurm_node_name()]))


def after_job(entry: "Entry", state_dir: Path, *, status: int, environment: bytes) -> str:
    """Records how the job around this process ended, and starts its run again where that makes sense.

    Args:
        entry: Trains the run in a folder, for a job that is submitted again.
        state_dir: State folder, which has the registry.
        status: Exit status of the job step.
        environment: Variables that the job began with, before its script set any (`remembered_environment`): those
            of a job in its place.

    Returns:
        What was done, in words; empty: nothing worth saying.
    """
    ended = _find_ended_job(state_dir)
    if ended is None or (ended.end and ended.end.ending == "finished"):
        return ""
    log = read_tail(Path(ended.job.log_path))
    host_oom = host_memory_ran_out(ended.context.job_id, log)
    ending = infer_ending(ended.end.ending if ended.end else "", status=status, host_oom=host_oom)
    decision = decide_restart(_outcome(ended, ending), cluster_settings(ended.folder))
    _record_end(ended, ending, decision, last_error_line(log) or f"exit status {status}")
    if isinstance(decision, NoRestart):
        return decision.reason
    was_cancelled = any(cancel.time > ended.job.time for cancel in ended.registry.cancels(ended.run.run_id))
    # A job that SLURM is ending is restarted by SLURM (preemption, a failed node) or by nobody (scancel).
    if was_cancelled or not is_job_running(ended.context.job_id):
        return ""
    if isinstance(decision, Requeue):
        done = requeue_job(ended.context.job_id)
        return f"{decision.reason}: {'put back into the queue' if done else 'SLURM refuses to put the job back'}"
    try:
        job = _resubmit(ended, decision, entry, environment)
    except CanTrainError as error:
        return f"{decision.reason}: could not be submitted again. {error}"
    move_dependents(ended.context.job_id, job.job_id)
    return f"{decision.reason}: submitted again as job {job.job_id}"


def _find_ended_job(state_dir: Path) -> _EndedJob | None:
    """Finds the run of the job around this process; None where there is none."""
    context, registry = replace(SlurmContext.from_environment(), rank=0), Registry(state_dir)
    found = _find_registered(registry, context.job_id) if context.job_id else None
    if found is None:
        return None
    run, job = found
    end = Attempts(Path(run.path), context).end_in(context)
    return _EndedJob(run=run, job=job, context=context, end=end, registry=registry, state_dir=state_dir)


def _find_registered(registry: Registry, job_id: str) -> tuple[RunRecord, JobRecord] | None:
    until = time.monotonic() + _REGISTRATION_WAIT_S
    while True:
        # The newest first: SLURM may have begun to count its jobs anew.
        for run in reversed(registry.runs()):
            for job in reversed(registry.jobs(run.run_id)):
                if (job.executor, job.job_id) == ("slurm", job_id):
                    return run, job
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_INTERVAL_S)


def host_memory_ran_out(job_id: str, log: str) -> bool:
    """Returns whether the kernel killed a process of the job around this process because the job's memory ran out.

    The log, the control groups and the accounting are asked: depending on the cluster's configuration, each of them
    may be silent.
    """
    if HOST_OOM in log_causes(log):
        return True
    # Groups above the job's count the kills of other jobs, too.
    if any(re.fullmatch(r"job_\d+", group.path.name) and group.has_killed() for group in control_groups()):
        return True
    rows = query_accounts(job_id) or []
    return any(step.state == "OUT_OF_MEMORY" for row in rows for step in row.steps)


def _outcome(ended: _EndedJob, ending: str) -> JobOutcome:
    details: Mapping[str, Any] = ended.end.details if ended.end and ending == "gpu_oom" else {}
    nodes = usable_nodes(os.environ.get("SLURM_JOB_PARTITION", "")) if ending in ("host_oom", "gpu_oom") else []
    others = {node.name for node in nodes}.difference(ended.nodes_to_avoid if nodes else ())
    return JobOutcome(
        ending=ending,
        restarts=ended.attempts.count_restarts(ended.context.job_id),
        resubmits=count_oom_resubmits(ended.registry.jobs(ended.run.run_id)),
        **{name: details[name] for name in ("one_sample", "should_fit", "foreign_bytes") if name in details},
        memory_mib=job_memory_mib(os.environ),
        most_memory_mib=max((node.memory_mib for node in nodes), default=None),
        has_other_nodes=len(others) >= cluster_settings(ended.folder).nodes,
    )


def job_memory_mib(environment: Mapping[str, str]) -> int | None:
    """Returns the memory that a job has on each node, in MiB; None where SLURM does not say."""
    for variable, times in (
        ("SLURM_MEM_PER_NODE", ""),
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        amount, number = environment.get(variable, ""), environment.get(times, "1")
        if amount.isdigit() and number.isdigit():
            return int(amount) * int(number)
    return None


def _record_end(ended: _EndedJob, ending: str, decision: Decision, error: str) -> None:
    """Records what the processes of the attempt could not know, or had no time to record."""
    end, why_not = ended.end, decision.reason if isinstance(decision, NoRestart) else ""
    is_recorded = end is not None and end.ending == ending
    if is_recorded and (not why_not or ending == "time_limit"):
        return
    messages = {
        "failed": error,
        "killed": "A process was killed (SIGKILL)",
        "host_oom": "The system killed a process for want of memory",
    }
    message = end.message if end and is_recorded else messages.get(ending, "")
    ended.attempts.record_end(ending, ". ".join(filter(None, (why_not, message))), end.details if end else {})


def _resubmit(ended: _EndedJob, decision: Resubmit, entry: "Entry", environment: bytes) -> JobRecord:
    # submitit takes longer to import than all else here, and most jobs need no new one.
    from can_train.slurm.script import environment as replaced_environment
    from can_train.slurm.script import remembered_environment
    from can_train.slurm.submit import Submission, submit_jobs

    submission = Submission(name=ended.run.key, state_dir=ended.state_dir, reason=decision.reason)
    cluster = next_cluster(cluster_settings(ended.folder), ended.job.resources, decision)
    avoiding = replace(cluster, exclude=",".join(ended.nodes_to_avoid)) if decision.elsewhere else cluster
    with replaced_environment(remembered_environment(environment)):
        try:
            return submit_jobs(entry, [ended.folder], avoiding, submission)[0]
        except RunError:
            if avoiding == cluster:
                raise
            # No other node has what else is asked for.
            return submit_jobs(entry, [ended.folder], cluster, submission)[0]
