"""`--submit`: checks runs, keeps their code, sends them to a cluster or a background process, and says how to follow
them. Imports no torch: what a login node cannot know is found out in the job.
"""

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from can_train.cli.attempt import go_on_in_job
from can_train.launch.code import describe, keep, read_code
from can_train.launch.submission import Submission
from can_train.training.folders import state_dir
from can_train.training.new_run import enter
from can_train.training.run_folder import RunFolder, new_run_id

if TYPE_CHECKING:
    from can_train.config.cluster import ClusterSettings
    from can_train.config.resolved import ResolvedRun
    from can_train.state.registry import JobRecord


def submit_runs(runs: Sequence["ResolvedRun"]) -> None:
    """Submits runs that ask for the same cluster."""
    state = state_dir(runs[0].paths)
    code = read_code()
    keep(code, state)
    folders = [RunFolder.create(run.runs_dir, run.key, run.config) for run in runs]
    for folder in folders:
        describe(code, state, folder.path)
    submission = Submission(name=runs[0].key, state_dir=state, sweep=new_run_id("sweep") if len(runs) > 1 else "")
    if runs[0].cluster.executor == "debug":
        _run_here(runs, folders, submission)
        return
    try:
        jobs = _start(runs[0].cluster, folders, submission)
    except BaseException:
        # Nothing half-made is left of what was not accepted.
        for folder in folders:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    for run, folder in zip(runs, folders, strict=True):
        enter(run, folder, sweep=submission.sweep)
    _say(jobs)


def _start(cluster: "ClusterSettings", folders: Sequence[RunFolder], submission: Submission) -> Sequence["JobRecord"]:
    if cluster.executor == "slurm":
        from can_train.launch.slurm import submit_jobs

        return submit_jobs(go_on_in_job, folders, cluster, submission)
    from can_train.launch.local import submit_processes

    return submit_processes(go_on_in_job, folders, submission)


def _run_here(runs: Sequence["ResolvedRun"], folders: Sequence[RunFolder], submission: Submission) -> None:
    from can_train.launch.local import run_here

    for run, folder in zip(runs, folders, strict=True):
        enter(run, folder, sweep=submission.sweep)
        run_here(go_on_in_job, folder, submission)


def _say(jobs: Sequence["JobRecord"]) -> None:
    for job in jobs:
        print(f"{job.run_id}  {'job' if job.executor == 'slurm' else 'process'} {job.job_id}")
    print(f"State: can-train status {jobs[0].run_id}")
    print(f"Log:   can-train logs {jobs[0].run_id} -f")
