"""`can-train cancel RUN…`: stops runs, which save their state first where they train, and records who wanted that."""

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from can_train.cli.output import print_text
from can_train.cli.run_locator import RunLocator, Runs, RunsDir, StateDir
from can_train.errors import RunError
from can_train.io.records import JobId, terminate, this_host, utc_now
from can_train.runs.registry import CancelRecord
from can_train.runs.run_folder import short_name
from can_train.runs.run_state import RunFacts, live_row, live_rows, silence_in_words, slurm_jobs, where_to_ask
from can_train.runs.scheduler import ACTIVE, QueueRow
from can_train.runs.status import RunStatus, run_statuses
from can_train.slurm import client as slurm
from can_train.slurm.client import cancel_jobs, logs_into

_REFUSED: Final = "Only the job's owner may cancel it; can-train doctor shows whether SLURM answers"
_WAIT_S: Final = 30.0  # enough for a step and a checkpoint, unless the step is long
_STATUS_INTERVAL_S: Final = 1.0
_CLOCK_SLACK: Final = timedelta(minutes=5)  # between a node's clock and the controller's


def cancel(runs: Runs, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Stop runs, or all runs of a sweep; where a run trains it saves itself first, and resume goes on from there."""
    locator = RunLocator(runs_dir, state_dir)
    statuses = locator.statuses(runs)
    for status in statuses:
        check_answer(status)
    # SLURM may still hold the job of a run that will never start.
    live = [status for status in statuses if status.state.live or live_row(status.facts) is not None]
    for status in statuses if not live else ():
        print_text(f"Run {status.known.run_id} has ended already: {status.state}")
    _check_shared(live, locator)
    for status in live:
        check_own_jobs(status.facts)
    # Recorded first: whoever sees the end must find its reason.
    records = {status.known.run_id: locator.registry.add(CancelRecord(run_id=status.known.run_id, time=utc_now()))
               for status in live}  # fmt: skip
    try:
        _stop_all(live, locator, records)
    except BaseException:
        # What goes on was not cancelled, however it ends later.
        for path in records.values():
            path.unlink(missing_ok=True)
        raise
    for status in _wait_for_end(live, locator):
        what = " was asked to stop and has not ended yet" if status.state.live else ""
        print_text(f"Run {status.known.run_id}{what}: {status.state}")


def _check_shared(live: Sequence[RunStatus], locator: RunLocator) -> None:
    """Raises RunError where the job of a run trains other runs, too (`--pack`), which would end with it."""
    packed = {job.slurm_job for status in live for job in status.facts.jobs[-1:] if job.packed_with > 1}
    if not packed:
        return
    named = {status.known.run_id for status in live}
    sweeps = {status.known.record.sweep for status in live}
    beside = [run for run in locator.runs() if run.record.sweep in sweeps and run.run_id not in named
              and any(job.slurm_job in packed for job in locator.registry.jobs(run.run_id)[-1:])]  # fmt: skip
    others = [status.known.run_id for status in run_statuses(beside, locator.registry, slurm) if status.state.live]
    if others:
        together = " ".join(map(short_name, [*named, *others]))
        beside_them = f"beside them it trains {', '.join(others)}"
        raise RunError("A job that trains several runs ends as a whole", value=beside_them,
                       remedy=f"Cancel them together: can-train cancel {together}")  # fmt: skip


def _stop_all(live: Sequence[RunStatus], locator: RunLocator, records: dict[str, Path]) -> None:
    """Asks the jobs of runs to end in one command, and the processes one after another; takes each run that was asked
    out of `records`.
    """
    jobs = {status.known.run_id: [row.job for row in live_rows(status.facts)] for status in live}
    _cancel([job for own in jobs.values() for job in own], cancel_jobs)
    for run_id in filter(jobs.get, jobs):
        records.pop(run_id)
    for status in live:
        run_id = status.known.run_id
        if jobs[run_id]:
            continue
        if not stop(status.facts):
            now = locator.status(status.known)
            if now.state.live:
                raise RunError("No job and no process of the run was found", value=str(now.state),
                               remedy=f"Look at its state: can-train status {run_id}")  # fmt: skip
        records.pop(run_id)


def _cancel(jobs: Sequence[JobId], cancel_slurm_jobs: Callable[[Sequence[JobId]], str]) -> None:
    if jobs and (refusal := cancel_slurm_jobs(jobs)):
        raise RunError("SLURM refuses to cancel the job", value=refusal, remedy=_REFUSED)


def _wait_for_end(live: Sequence[RunStatus], locator: RunLocator) -> list[RunStatus]:
    end, names = time.monotonic() + _WAIT_S, [status.known for status in live]
    statuses = run_statuses(names, locator.registry, slurm)
    while any(each.state.live or live_row(each.facts) is not None for each in statuses) and time.monotonic() < end:
        time.sleep(_STATUS_INTERVAL_S)
        statuses = run_statuses(names, locator.registry, slurm)
    return statuses


def check_answer(status: RunStatus) -> None:
    """Raises RunError where only SLURM knows whether a run's job is still there, and does not answer."""
    jobs, answer = slurm_jobs(status.facts), status.facts.answer
    # A job whose cluster nobody recorded is over where its attempt has recorded an error.
    if not jobs or jobs[-1].cluster not in answer.silent or (not jobs[-1].cluster and status.state.certain):
        return
    where = where_to_ask(jobs[-1], answer).removeprefix("ask ")
    state = status.state if status.state.certain else status.state.state
    raise RunError("The state of the job is unknown",
                   value=f"{silence_in_words(jobs[-1], answer)}; the run's files say: {state}",
                   remedy=f"Give the same line {where}")  # fmt: skip


def check_own_jobs(facts: RunFacts, is_own: Callable[[JobId, Path], bool] = logs_into) -> None:
    """Checks that the jobs in SLURM with the numbers of a run's jobs are these jobs.

    Args:
        facts: The facts of the run.
        is_own: Returns whether a job writes its log into a folder.

    Raises:
        RunError: A job is not the run's, or cannot be told from another one.
        NoControllerError: SLURM does not answer.
    """
    logs = {record.slurm_job: Path(record.log_path) for record in facts.jobs}
    for row in live_rows(facts):
        log = logs.get(row.job)
        if is_own(row.job, log.parent) if log else _was_entered(row, facts):
            continue
        shown = f"job {row.job}" + (f", named {row.name}" if row.name else "")
        expected = f"does not log into {log.parent}" if log else "was not submitted by can-train, and started anew"
        # Only the accounting, which not every cluster has, knows clusters by their names.
        where = "" if row.job.cluster == facts.answer.local else f"--clusters={row.job.cluster} "
        raise RunError("The job may belong to another run, and was not cancelled", value=f"{shown}, {expected}",
                       remedy=f"If it is yours and should end: scancel {where}{row.job.number}")  # fmt: skip


def _was_entered(row: QueueRow, facts: RunFacts) -> bool:
    """Returns whether the run began an attempt in a job that a person had started, and that still runs."""
    began = [attempt.start.start_time for attempt in facts.attempts if attempt.start.slurm_job == row.job]
    if row.state not in ACTIVE or not row.start or not began:
        return False
    return datetime.fromisoformat(row.start).astimezone() <= datetime.fromisoformat(began[-1]) + _CLOCK_SLACK


def stop(
    facts: RunFacts,
    cancel_slurm_jobs: Callable[[Sequence[JobId]], str] = cancel_jobs,
    terminate_process: Callable[[int, str], bool] = terminate,
    host: str | None = None,
) -> bool:
    """Asks everything that works on a run to end; returns whether there was anything.

    Args:
        facts: The facts of the run.
        cancel_slurm_jobs: Returns an error message, empty where it succeeded.
        terminate_process: Takes a process id and when it was recorded; returns whether there was such a process.
        host: This machine; None asks it.

    Raises:
        RunError: It is on another machine, belongs to another user, or SLURM refuses.
    """
    # All of them: a run that was resubmitted may have an older job that is not quite over.
    live = [row.job for row in live_rows(facts)]
    if live:
        _cancel(live, cancel_slurm_jobs)
        return True
    # The training process itself, which saves its state. Its controlling process is asked only before training.
    job = facts.jobs[-1] if facts.jobs else None
    last = facts.attempts[-1] if facts.attempts else None
    is_newer = job is not None and (last is None or last.start.start_time < job.time)
    if last is not None and last.end is None and last.start.slurm_job is None:
        process_host, pid, recorded_at = last.start.host, last.start.pid, last.start.start_time
    elif job is not None and is_newer and job.executor != "slurm" and job.job_id.isdecimal():
        process_host, pid, recorded_at = job.host, int(job.job_id), job.time
    else:
        return False
    if process_host != (host or this_host()):
        raise RunError("The run is a process of another machine", value=f"process {pid} of {process_host}",
                       remedy=f"Cancel it there: can-train cancel {facts.run.run_id}")  # fmt: skip
    return terminate_process(pid, recorded_at)
