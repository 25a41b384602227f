"""What happens after a job."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from can_train.config.settings import ClusterSettings
from can_train.errors import CanTrainError, RunError
from can_train.slurm.client import (
    host_memory_ran_out,
    is_running,
    last_line,
    memory_mib,
    move_dependents,
    node_names,
    put_back,
    tail,
    usable_nodes,
)
from can_train.slurm.job import (
    Aftermath,
    Decision,
    Entry,
    Leave,
    Requeue,
    Resubmit,
    cluster_of,
    decide,
    ending_of,
    is_after_oom,
    limits_of,
)
from can_train.slurm.script import environment
from can_train.slurm.submit import Submission
from can_train.training.attempts import AttemptEnd, Attempts, SlurmContext, slurm_node_name
from can_train.training.run_folder import JobRecord, Registry, RunFolder, RunRecord

_REGISTERED_WITHIN_S: Final = 10.0
"""A job that fails at once may be over before the submitting process has entered it into the registry."""


_LOOK_EVERY_S: Final = 0.5


_CARRIED: Final = ("partition", "account", "qos", "time", "mem", "exclude")
"""Resources that the next job asks for as the last one did, whatever the run's configuration says."""


@dataclass(frozen=True, kw_only=True)
class _Over:
    """A job that is over.

    Attributes:
        run: Its run.
        job: Its entry in the registry.
        place: Which attempt of it this was.
        said: How that ended, as its processes said; None: they could not.
        state_dir: State folder.
    """

    run: RunRecord
    job: JobRecord
    place: SlurmContext
    said: AttemptEnd | None
    state_dir: Path

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(Path(self.run.path))

    @property
    def attempts(self) -> Attempts:
        """The run's attempts, as seen from the job."""
        return Attempts(Path(self.run.path), self.place)

    @property
    def registry(self) -> Registry:
        """Where the run and its jobs are."""
        return Registry(self.state_dir)

    @property
    def was_cancelled(self) -> bool:
        """Whether a person wants the job to end."""
        return any(cancel.time > self.job.time for cancel in self.registry.cancels(self.run.run_id))

    @property
    def avoided(self) -> list[str]:
        """Nodes that the next job is not to have: those that this one avoided, and the one that memory ran out on."""
        before = node_names(str(self.job.resources.get("exclude", "")))
        return list(dict.fromkeys([*before, self.said.host if self.said else slurm_node_name()]))


def after_job(entry: Entry, state_dir: Path, *, status: int, began_with: Mapping[str, str]) -> str:
    """Does what is to be done after the job around this process.

    Args:
        entry: Trains the run in a folder, for a job that is submitted again.
        state_dir: State folder, where the registry is.
        status: Exit status of the job step.
        began_with: Variables that the job began with, before its script set any: those of a job in its place.

    Returns:
        What was done, in words; empty: nothing that needs to be said.
    """
    over = _look(state_dir)
    if over is None or (over.said and over.said.ending == "finished"):
        return ""
    log = tail(Path(over.job.log_path))
    host_oom = host_memory_ran_out(over.place.job_id, log)
    ending = ending_of(over.said.ending if over.said else "", status=status, host_oom=host_oom)
    decision = _decide(over, ending)
    _record(over, _Finding(ending, _message(ending, status, log), decision))
    if isinstance(decision, Leave):
        return decision.reason
    if over.was_cancelled or not is_running(over.place.job_id):
        return ""
    return _do(over, decision, _Next(entry, began_with))


def _look(state_dir: Path) -> _Over | None:
    """Finds the run of the job around this process; None where there is none."""
    place = replace(SlurmContext.from_environment(), rank=0)
    found = _find(Registry(state_dir), place.job_id) if place.job_id else None
    if found is None:
        return None
    run, job = found
    said = Attempts(Path(run.path), place).end_in(place)
    return _Over(run=run, job=job, place=place, said=said, state_dir=state_dir)


def _find(registry: Registry, job_id: str) -> tuple[RunRecord, JobRecord] | None:
    """Finds the run that a job was started for; the newest, since SLURM may have begun to count anew."""
    until = time.monotonic() + _REGISTERED_WITHIN_S
    while True:
        for run in reversed(registry.runs()):
            for job in reversed(registry.jobs(run.run_id)):
                if (job.executor, job.job_id) == ("slurm", job_id):
                    return run, job
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_EVERY_S)


def _decide(over: _Over, ending: str) -> Decision:
    details: Mapping[str, Any] = over.said.details if over.said and ending == "gpu_oom" else {}
    nodes = usable_nodes(os.environ.get("SLURM_JOB_PARTITION", "")) if ending in ("host_oom", "gpu_oom") else []
    others = {node.name for node in nodes}.difference(over.avoided if nodes else ())
    facts = Aftermath(
        ending=ending,
        restarts=over.attempts.count_restarts(over.place.job_id),
        resubmits=resubmits(over.registry.jobs(over.run.run_id)),
        **{name: details[name] for name in ("one_sample", "should_fit", "foreign_bytes") if name in details},
        memory_mib=memory_mib(os.environ),
        most_memory_mib=max((node.memory_mib for node in nodes), default=None),
        has_other_nodes=len(others) >= cluster_of(over.folder).nodes,
    )
    return decide(facts, limits_of(over.folder))


def resubmits(jobs: Sequence[JobRecord]) -> int:
    """Counts the last jobs that were submitted for an out-of-memory: one that a person submits begins anew."""
    count = 0
    for job in reversed(jobs):
        if not is_after_oom(job.reason):
            break
        count += 1
    return count


@dataclass(frozen=True)
class _Finding:
    """What was found out: how the attempt ended, that in words, and what is done about it."""

    ending: str
    message: str
    decision: Decision


@dataclass(frozen=True)
class _Next:
    """What the next job is made of: what trains the run, and the variables that it begins with."""

    entry: Entry
    variables: Mapping[str, str]


def _record(over: _Over, finding: _Finding) -> None:
    """Writes down what the processes of the attempt could not know, or had no time to say."""
    said, left = over.said, finding.decision.reason if isinstance(finding.decision, Leave) else ""
    is_said = said is not None and said.ending == finding.ending
    if is_said and (not left or finding.ending == "time_limit"):
        return
    own = said.message if said and is_said else finding.message
    message = ". ".join(part for part in (left, own) if part)
    over.attempts.record_end(finding.ending, message, said.details if said else {})


def _message(ending: str, status: int, log: str) -> str:
    """Says in one line what is to be seen from outside."""
    if ending == "failed":
        return last_line(log) or f"exit status {status}"
    return {
        "killed": "A process was killed (SIGKILL)",
        "host_oom": "The system killed a process for want of memory",
    }.get(ending, "")


def _do(over: _Over, decision: Requeue | Resubmit, following: _Next) -> str:
    if isinstance(decision, Requeue):
        done = put_back(over.place.job_id)
        return f"{decision.reason}: {'put back into the queue' if done else 'SLURM refuses to put the job back'}"
    try:
        job = _submit_again(over, decision, following)
    except CanTrainError as error:
        return f"{decision.reason}: could not be submitted again. {error}"
    move_dependents(over.place.job_id, job.job_id)
    return f"{decision.reason}: submitted again as job {job.job_id}"


def _submit_again(over: _Over, decision: Resubmit, following: _Next) -> JobRecord:
    from can_train.slurm.submit import submit_jobs

    submission = Submission(name=over.run.key, state_dir=over.state_dir, reason=decision.reason)
    cluster = next_cluster(cluster_of(over.folder), over.job.resources, decision)
    avoiding = replace(cluster, exclude=",".join(over.avoided)) if decision.elsewhere else cluster
    with environment(following.variables):
        try:
            return submit_jobs(following.entry, [over.folder], avoiding, submission)[0]
        except RunError:
            if avoiding == cluster:
                raise
            # What else is asked for, no other node has.
            return submit_jobs(following.entry, [over.folder], cluster, submission)[0]


def next_cluster(cluster: ClusterSettings, last: Mapping[str, Any], decision: Resubmit) -> ClusterSettings:
    """Says what the next job asks for.

    Args:
        cluster: What the run's configuration says.
        last: Resources of its last job.
        decision: What is to be different.
    """
    carried: dict[str, Any] = {name: str(last[name]) for name in _CARRIED if name in last}
    if decision.memory_mib is not None:
        additional = {name: value for name, value in cluster.additional.items() if not _is_memory(name)}
        carried |= {"mem": f"{decision.memory_mib}M", "additional": additional}
    elif not decision.elsewhere:
        # Nodes that were avoided may be tried again, for want of others; a person's own exclusions stay.
        carried["exclude"] = cluster.exclude
    return replace(cluster, **carried)


def _is_memory(option: str) -> bool:
    return option.replace("_", "-").startswith("mem-per-")
