"""`--submit`: checks runs, keeps their code, sends them to a cluster or a background process, and says how to follow
them. Imports no torch: what a login node cannot know is found out in the job.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from can_train.config.resolved import ResolvedRun, state_dir
from can_train.errors import CanTrainError
from can_train.io.units import parse_time_min, time_text
from can_train.slurm.client import NoControllerError, Partition, read_partitions
from can_train.slurm.job import Entry
from can_train.slurm.run_state import FINISHED
from can_train.slurm.snapshot import Code, describe, keep, read_code
from can_train.slurm.submission_plan import PlannedRun, SubmissionPlan, SubmitOptions, expectation, plan_submission
from can_train.slurm.submit import (
    StartedJob,
    Submission,
    enter_job,
    run_here,
    script_text,
    start_jobs,
    start_process,
    submit_jobs,
)
from can_train.training.run_folder import JobRecord, Registry, RunFolder, new_run_id, register_run

_LISTED: Final = 10
"""Runs of an array that are listed; of more, the first ones and how many follow."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that are submitted together.

    Attributes:
        ordered: The runs.
        folders: Of each its folder, which need not be there.
        submission: What else is said of them.
    """

    ordered: Sequence[PlannedRun]
    folders: Sequence[RunFolder]
    submission: Submission

    @property
    def run(self) -> ResolvedRun:
        """The first one; the others ask for the same."""
        return self.ordered[0].run


def submit_runs(entry: Entry, runs: Sequence[ResolvedRun], wanted: SubmitOptions, *, as_json: bool = False) -> None:
    """Submits runs, those that ask for the same as one array; points out those that are there already.

    Args:
        entry: What a job calls, `attempt.continue_in_job`: a job finds it by name, in its own copy of the code.
        runs: At least one.
        wanted: What else is wanted.
        as_json: Whether to print JSON.

    Raises:
        CanTrainError: A run cannot be submitted; of those that ask for the same, none has been.
    """
    code, state = read_code(), state_dir(runs[0].paths)
    order = plan_submission(runs, wanted, code.digest, read_partitions() if _on_slurm(runs) else [])
    note(order)
    expected = [expectation(group[0].run, Registry(state).runs()) for group in order.groups]
    keep(code, state)
    if not as_json:
        _say_duplicate_runs(order)
    jobs: list[JobRecord] = []
    for ordered, expects in zip(order.groups, expected, strict=True):
        started = start_group(entry, make_group(ordered, order, state), order, code)
        jobs += started
        if not as_json:
            _say(ordered[0].run, started, expects)
    if as_json:
        print(json.dumps(_as_json(jobs, order), indent=2, ensure_ascii=False))


def scripts(runs: Sequence[ResolvedRun], wanted: SubmitOptions) -> list[str | None]:
    """Writes the batch scripts that would be sent: for each run its own, or that of the array it is in; None where it
    would be a process of this machine. Nothing is written down or sent.

    Raises:
        CanTrainError: A run could not be submitted.
    """
    code, state = read_code(), state_dir(runs[0].paths)
    order = plan_submission(runs, SubmitOptions(after=wanted.after, force=True), code.digest, _partitions_if_any(runs))
    note(order)
    texts: list[str | None] = [None] * len(runs)
    for ordered in order.groups:
        if ordered[0].run.cluster.executor == "slurm":
            group = make_group(ordered, order, state)
            text = script_text(group.folders, group.run.cluster, group.submission, code.folder(state))
            for one in ordered:
                texts[one.index] = text
    return texts


def _on_slurm(runs: Sequence[ResolvedRun]) -> bool:
    return any(run.cluster.executor == "slurm" for run in runs)


def _partitions_if_any(runs: Sequence[ResolvedRun]) -> list[Partition]:
    try:
        return read_partitions() if _on_slurm(runs) else []
    except NoControllerError as error:
        print(f"note: {error.rule} ({error.value}): its limits are not checked", file=sys.stderr)
        return []


def make_group(ordered: Sequence[PlannedRun], order: SubmissionPlan, state: Path) -> Group:
    """Names the runs that are submitted together, and their folders; makes none."""
    first = ordered[0].run
    return Group(
        ordered=ordered,
        folders=[RunFolder(one.run.runs_dir / new_run_id(one.run.key)) for one in ordered],
        submission=Submission(
            name=first.key,
            state_dir=state,
            dependency=order.dependency,
            sweep=new_run_id("sweep") if len(ordered) > 1 else "",
        ),
    )


def start_group(entry: Entry, group: Group, order: SubmissionPlan, code: Code) -> list[JobRecord]:
    """Makes the folders of a group's runs, starts their jobs, and enters both into the registry.

    Raises:
        CanTrainError: They cannot be started; nothing half-made is left of what was not accepted.
    """
    after, jobs = ",".join(order.after), []
    for one, folder, job in zip(group.ordered, group.folders, _started(entry, group, code), strict=True):
        register_run(one.run, folder, identity=one.identity, after=after, sweep=group.submission.sweep)
        jobs.append(enter_job(folder, job, group.submission) if job else run_here(entry, folder, group.submission))
    return jobs


def _started(entry: Entry, group: Group, code: Code) -> Iterator[StartedJob | None]:
    """Starts the jobs, each yielded once it has been accepted; None is one for this process."""
    waiting = [*group.folders]
    try:
        for one, folder in zip(group.ordered, group.folders, strict=True):
            folder.make(one.run.config)
            describe(code, group.submission.state_dir, folder.path)
        if group.run.cluster.executor == "slurm":
            jobs = start_jobs(entry, group.folders, group.run.cluster, group.submission)
            waiting.clear()
            yield from jobs
        for folder in [*waiting]:
            job = start_process(entry, folder) if group.run.cluster.executor == "local" else None
            waiting.remove(folder)
            yield job
    except CanTrainError:
        # Not for a Ctrl-C: sbatch may have accepted by then, and a job needs its folder.
        for folder in waiting:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def submit_again(entry: Entry, folder: RunFolder, run: ResolvedRun, submission: Submission) -> JobRecord:
    """Sends a run that has a folder to SLURM once more.

    Args:
        entry: What a job calls, `attempt.continue_in_job`: a job finds it by name, in its own copy of the code.
        folder: Of the run, which has a snapshot of the code.
        run: What its job asks for, but for memory where its last job had more.
        submission: What else is said of it.

    Raises:
        RunError: SLURM refused.
    """
    jobs = Registry(submission.state_dir).jobs(folder.run_id)
    # It may have been submitted again with more memory since its configuration was written.
    memory = str(jobs[-1].resources.get("mem", run.cluster.mem)) if jobs else run.cluster.mem
    return submit_jobs(entry, [folder], replace(run.cluster, mem=memory), submission)[0]


def note(order: SubmissionPlan) -> None:
    """Says what a person should know of a submission."""
    for notice in order.notices:
        print(f"note: {notice}", file=sys.stderr)


def _say_duplicate_runs(order: SubmissionPlan) -> None:
    for duplicate_run in order.duplicate_runs:
        verb = "has finished" if duplicate_run.state == FINISHED else f"is {duplicate_run.state}"
        print(f"{duplicate_run.run.run_id}  is the same, and {verb}")
        print(f"  its state: can-train status {duplicate_run.run.run_id}")
    if order.duplicate_runs:
        print("Not submitted again; --force does so all the same.")


def _say(run: ResolvedRun, jobs: Sequence[JobRecord], expects: str) -> None:
    if run.cluster.executor == "debug":
        return
    kind = "job" if run.cluster.executor == "slurm" else "process"
    for job in jobs[:_LISTED]:
        print(f"{job.run_id}  {kind} {job.job_id}")
    if len(jobs) > _LISTED:
        print(f"... and {len(jobs) - _LISTED} more, to {kind} {jobs[-1].job_id}")
    if run.cluster.executor == "slurm":
        print(f"  asked for  {_asked(run)}")
    print(f"  expected   {expects}")
    print(f"State: can-train status {jobs[0].run_id}")
    print(f"Log:   can-train logs {jobs[0].run_id} -f")


def _asked(run: ResolvedRun) -> str:
    cluster = run.cluster
    parts = [
        f"partition {cluster.partition}" if cluster.partition else "",
        f"{cluster.nodes} nodes" if cluster.nodes > 1 else "",
        f"{cluster.num_gpus} × {cluster.gpu_type or 'GPU'}" if cluster.num_gpus else cluster.gres,
        f"{cluster.cpus} processors a rank" if cluster.cpus else "",
        cluster.mem,
        f"at most {time_text(parse_time_min(cluster.time))}",
    ]
    return ", ".join(part for part in parts if part)


def _as_json(jobs: Sequence[JobRecord], order: SubmissionPlan) -> dict[str, Any]:
    return {
        "submitted": [
            {
                "run_id": job.run_id,
                "executor": job.executor,
                "job_id": job.job_id,
                "log": job.log_path,
                "script": _script_path(job),
            }
            for job in jobs
        ],
        "identical": [
            {"run_id": duplicate_run.run.run_id, "path": duplicate_run.run.path, "state": duplicate_run.state}
            for duplicate_run in order.duplicate_runs
        ],
    }


def _script_path(job: JobRecord) -> str | None:
    """Where submitit keeps what it sent; one for a whole array."""
    if job.executor != "slurm":
        return None
    return str(Path(job.log_path).with_name(f"{job.job_id.partition('_')[0]}_submission.sh"))
