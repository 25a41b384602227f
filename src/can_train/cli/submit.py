"""`--submit`: checks runs, keeps their code, sends them to a cluster or a background process, and says how to follow
them. Imports no torch: the job itself examines its GPU.

`entry`, wherever it is an argument, is `train.continue_in_job`: a job finds it by name, in its own copy of the code.
"""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from can_train.cli.output import print_json, print_note, print_text
from can_train.config.resolved import ResolvedRun, state_dir
from can_train.config.settings import ClusterSettings
from can_train.errors import CanTrainError, with_command_name
from can_train.io.units import parse_time_min, time_text
from can_train.runs.registry import JobRecord, Registry
from can_train.runs.run_folder import RunFolder, SweepRun, new_run_id, register_run
from can_train.runs.run_state import FINISHED
from can_train.runs.scheduler import NoControllerError
from can_train.slurm.client import Partition, may_requeue, read_partitions_and_limits
from can_train.slurm.container import needed_paths
from can_train.slurm.job import Entry
from can_train.slurm.script import Submission, parameters, python_command, script, with_sbatch_variables
from can_train.slurm.snapshot import Code, code_of_runs, describe, keep, with_code
from can_train.slurm.submission_plan import (
    JobDevice,
    PlannedRun,
    SubmissionPlan,
    expectation,
    job_device,
    plan_submission,
)
from can_train.slurm.submit import run_here, start_jobs, start_process, submission_folder, submit_job

_MAX_LISTED: Final = 10  # runs of an array that are listed; of more, the first ones and how many follow


def submit_runs(
    entry: Entry, runs: Sequence[ResolvedRun], *, after: Sequence[str] = (), force: bool, as_json: bool = False
) -> None:
    """Submits runs, equal requests as one array; names runs that are identical to earlier ones.

    Raises:
        CanTrainError: A run cannot be submitted; of those that ask for the same, none has been.
    """
    code, state = code_of_runs(runs), state_dir(runs[0].paths)
    partitions = read_cluster(runs)
    plan = plan_submission(runs, code.digest, partitions, after=after, force=force)
    print_notices(plan)
    expected = [expectation(group[0].run, Registry(state).runs()) for group in plan.groups]
    keep(code, state)
    if not as_json:
        for duplicate in plan.duplicate_runs:
            run_id, before = duplicate.known.run_id, duplicate.state
            doubt = "" if before.certain else " as far as its files say"
            does = "has finished" if before.state == FINISHED else f"is {before.state}{doubt}"
            print_text(f"{run_id}  is the same, and {does}")
            print_text(with_command_name(f"  its state: can-train status {run_id}"))
        if plan.duplicate_runs:
            print_text("Not submitted again; --force does so all the same.")
    jobs: list[JobRecord] = []
    folders: dict[str, RunFolder] = {}
    for group, expects in zip(plan.groups, expected, strict=True):
        # With the cluster `debug` they train here, and print their results.
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            started = start_group(entry, group, plan, code)
        jobs += started
        folders |= {job.run_id: RunFolder(group[0].run.runs_dir / job.run_id) for job in started}
        if not as_json:
            print_jobs(group[0].run, started, expects, [plan.sweep[each.index] for each in group if plan.sweep])
    if as_json:
        identical = [
            {"run_id": duplicate.known.run_id, "path": duplicate.known.record.path, "state": duplicate.state.state}
            for duplicate in plan.duplicate_runs
        ]
        print_json({"submitted": [job_json(job, folders[job.run_id]) for job in jobs], "identical": identical})


def job_json(job: JobRecord, folder: RunFolder) -> dict[str, Any]:
    """Makes the JSON object of a job that was started."""
    # The script that submitit sent; a whole array has one script.
    script_path = Path(job.log_path).with_name(f"{job.job_id.partition('_')[0]}_submission.sh")
    return {"run_id": job.run_id, "path": str(folder.path.resolve()), "executor": job.executor, "job_id": job.job_id,
            "cluster": job.cluster or None, "log": job.log_path,
            "script": str(script_path) if job.executor == "slurm" else None}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The job that would be submitted for a run."""

    script: str | None  # of its job, or of the array that it is in; None where it would be a process of this machine
    device: JobDevice


def plan_jobs(
    runs: Sequence[ResolvedRun], after: Sequence[str], *, quiet: bool = False, together: bool = True
) -> list[PlannedJob]:
    """Plans the job of each run; nothing is written down or sent.

    Args:
        runs: The runs.
        after: Runs to wait for.
        quiet: Print no notices.
        together: Send runs with equal requests as one array.

    Raises:
        CanTrainError: A run could not be submitted.
    """
    code, state, partitions = code_of_runs(runs), state_dir(runs[0].paths), []
    try:
        partitions = read_cluster(runs)
    except NoControllerError as error:
        if not quiet:
            print_note(f"{error.rule} ({error.value}): its limits are not checked")
    plan = plan_submission(runs, code.digest, partitions, after=after, force=True)
    if not quiet:
        print_notices(plan)
    jobs = [PlannedJob(script=None, device=JobDevice())] * len(runs)
    for group in plan.groups if together else [[run] for alike in plan.groups for run in alike]:
        cluster = group[0].run.cluster
        if cluster.executor == "slurm":
            folders, submission = _new_group(group, plan, state)
            paths = (
                []
                if not cluster.container
                else needed_paths(
                    [planned.run.config for planned in group], code.folder(state), state, group[0].run.runs_dir
                )
            )
            job_parameters = parameters(cluster, submission, code.folder(state), paths)
            python = python_command(cluster, code.folder(state), paths)
            text = script(submission_folder(folders, submission), job_parameters, len(group), python)
            for planned in group:
                jobs[planned.index] = PlannedJob(script=text, device=job_device(planned.run, partitions))
    return jobs


def read_cluster(runs: Sequence[ResolvedRun]) -> list[Partition]:
    """Reads the partitions of the cluster that runs are sent to; none where they go elsewhere."""
    on_slurm = next((run.cluster for run in runs if run.cluster.executor == "slurm"), None)
    if on_slurm is None:
        return []
    # Of several clusters, SLURM takes the one where the job starts first: each must know the request.
    first = with_sbatch_variables(on_slurm, os.environ)[0].clusters.partition(",")[0]
    return read_partitions_and_limits(first)


def print_notices(plan: SubmissionPlan) -> None:
    """Prints the notices of a submission."""
    for notice in plan.notices:
        print_note(notice)


def _new_group(group: Sequence[PlannedRun], plan: SubmissionPlan, state: Path) -> tuple[list[RunFolder], Submission]:
    """Names the folders of runs that are submitted together, and their array; makes none."""
    sweep = new_run_id("sweep") if len(group) > 1 else ""
    # squeue shows the name of the job.
    name = plan.sweep[0].name if sweep and plan.sweep else group[0].run.key
    submission = Submission(name=name, state_dir=state, dependency=plan.dependency, sweep=sweep)
    return [RunFolder(planned.run.runs_dir / new_run_id(planned.run.key)) for planned in group], submission


def start_group(
    entry: Entry,
    group: Sequence[PlannedRun],
    plan: SubmissionPlan,
    code: Code,
    prepare: Callable[[PlannedRun, RunFolder], object] = lambda planned, folder: None,
) -> list[JobRecord]:
    """Makes the folders of runs that are submitted together, starts their jobs, and enters both into the registry.

    Args:
        entry: Function that trains the run in a folder.
        group: The runs, which have equal requests.
        plan: Their submission.
        code: Their code.
        prepare: Called for each run with its folder, before its job is started.

    Raises:
        CanTrainError: They cannot be started; folders of runs that were not accepted are removed.
    """
    from can_train.config.compose import changed_settings

    state = state_dir(group[0].run.paths)
    folders, submission = _new_group(group, plan, state)
    cluster, waiting, jobs = group[0].run.cluster, [*folders], []
    try:
        for planned, folder in zip(group, folders, strict=True):
            folder.make(with_code(planned.run, code, state).config, changed_settings(planned.run.config))
            describe(code, state, folder.path)
            prepare(planned, folder)
        if cluster.executor == "slurm":
            jobs = start_jobs(entry, folders, cluster, submission)
            waiting.clear()
            _note_forbidden_requeue(jobs[0], cluster)
        for index, (planned, folder) in enumerate(zip(group, folders, strict=True)):
            if cluster.executor == "local":
                jobs.append(start_process(entry, folder))
            waiting = waiting[1:]
            register_run(
                planned.run,
                folder,
                identity=planned.identity,
                after=",".join(plan.after),
                sweep=plan.sweep[planned.index] if plan.sweep else SweepRun(),
            )
            if cluster.executor == "debug":
                jobs.append(run_here(entry, folder, submission))
            else:
                Registry(state).add(jobs[index])
    except CanTrainError:
        # Not for a Ctrl-C: sbatch may have accepted by then, and a job needs its folder.
        for folder in waiting:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return jobs


def submit_again(entry: Entry, folder: RunFolder, run: ResolvedRun, submission: Submission) -> JobRecord:
    """Sends a run that has a folder, with a snapshot of its code, to SLURM once more.

    It requests the resources of `run`, but the memory of the last job if that was more.

    Raises:
        RunError: SLURM refused.
    """
    jobs = Registry(submission.state_dir).jobs(folder.run_id)
    # It may have been submitted again with more memory since its configuration was written.
    memory = str(jobs[-1].resources.get("mem", run.cluster.mem)) if jobs else run.cluster.mem
    cluster = replace(run.cluster, mem=memory, mem_per_gpu="") if memory else run.cluster
    job = submit_job(entry, folder, cluster, submission)
    _note_forbidden_requeue(job, run.cluster)
    return job


def _note_forbidden_requeue(job: JobRecord, cluster: ClusterSettings) -> None:
    if job.slurm_job is not None and cluster.max_restarts and not may_requeue(job.slurm_job):
        print_note(f"SLURM does not let job {job.slurm_job} go back into the queue (Requeue=0): at its time limit the "
                   f"run saves and ends. Then go on: can-train resume {job.run_id}")  # fmt: skip


def print_jobs(run: ResolvedRun, jobs: Sequence[JobRecord], expects: str, sweep: Sequence[SweepRun] = ()) -> None:
    """Prints the jobs that were started, their request, and how to follow them.

    Args:
        run: The first of their runs.
        jobs: The jobs.
        expects: What earlier runs measured, in words.
        sweep: The place of each run in its sweep; empty: they are in none.
    """
    cluster = run.cluster
    if cluster.executor == "debug":
        return
    kind = "job" if cluster.executor == "slurm" else "process"
    labels = [each.label for each in sweep] or [""] * len(jobs)
    for job, label in [*zip(jobs, labels, strict=True)][:_MAX_LISTED]:
        print_text("  ".join(filter(None, [job.run_id, f"{kind} {job.job_id}", label])))
    if len(jobs) > _MAX_LISTED:
        print_text(f"... and {len(jobs) - _MAX_LISTED} more, to {kind} {jobs[-1].job_id}")
    if cluster.executor == "slurm":
        asked = [
            f"partition {cluster.partition}" if cluster.partition else "",
            f"{cluster.nodes} nodes" if cluster.nodes > 1 else "",
            f"{cluster.num_gpus} × {cluster.gpu_type or 'GPU'}" if cluster.num_gpus else cluster.gres,
            f"{cluster.cpus} processors a rank" if cluster.cpus else "",
            cluster.mem,
            f"at most {time_text(parse_time_min(cluster.time))}",
        ]
        print_text(f"  asked for  {', '.join(filter(None, asked))}")
    print_text(f"  expected   {expects}")
    print_text(with_command_name(f"State: can-train status {sweep[0].name if sweep else jobs[0].run_id}"))
    print_text(with_command_name(f"Log:   can-train logs {jobs[0].run_id} -f"))
