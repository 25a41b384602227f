"""What state a run is in, and why: a pure function of all that is known of it. The run's own result comes first, then
the queue, then how its last attempt ended; a job of which no attempt began may never have started.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from can_train.launch.endings import how_it_ended
from can_train.launch.slurm_query import AT_WORK, UNFINISHED, WAITING, AccountRow, QueueRow
from can_train.launch.slurm_reasons import NEVER_SATISFIED, reason_in_words
from can_train.launch.states import (
    CANCELLED,
    FAILED,
    FINISHED,
    NEVER_STARTED,
    QUEUED,
    REQUEUED,
    RUNNING,
    AttemptFacts,
    Evidence,
    RunState,
)
from can_train.state.registry import JobRecord

_UNOPENED: Final = "0:53"
"""Exit code of a job whose folder or log could not be opened: nothing of it ran."""

_UNLAUNCHED: Final = "JobLaunchFailure"
"""SLURM's reason for the same."""


def judge(evidence: Evidence) -> RunState:
    """Decides what state a run is in."""
    if evidence.result is not None:
        return RunState(state=FINISHED, sentence=_finished(evidence.result))
    row = live_row(evidence)
    if row is not None:
        return _queued(row, evidence) if row.state in WAITING else _running(row, evidence)
    found = _without_queue(evidence)
    if not evidence.present and not found.live:
        return _without_folder(found, evidence)
    if found.state == FINISHED:
        return replace(found, sentence="but its result.json is gone")
    if found.state == REQUEUED:
        # Put back into a queue that no longer has it: it left before anybody looked.
        return RunState(state=CANCELLED if evidence.cancels else FAILED, sentence="it left the queue without a word")
    return found


def _without_queue(evidence: Evidence) -> RunState:
    job, attempt = _current(evidence)
    job_id = attempt.began.job_id if attempt else job.job_id if job and job.executor == "slurm" else ""
    if job_id:
        return _of_slurm(job_id, attempt, evidence)
    return _of_process(attempt, evidence) if attempt else _unbegun_process(job, evidence)


def _without_folder(found: RunState, evidence: Evidence) -> RunState:
    """A run whose folder was deleted or moved away: only SLURM can know how it ended."""
    rows = [row for job_id in slurm_jobs(evidence) if (row := _final_row(job_id, evidence)) is not None]
    gone = f"its folder {evidence.run.path} is gone"
    if not rows:
        return RunState(state=FAILED, sentence=f"{gone}, and with it how it ended", certain=False)
    if rows[-1].state == "COMPLETED":
        return RunState(state=FINISHED, sentence=f"as SLURM says; {gone}")
    return replace(found, sentence="; ".join(filter(None, [found.sentence, gone])))


def judge_attempt(attempt: AttemptFacts, evidence: Evidence) -> RunState:
    """Decides how one attempt ended, or that it goes on."""
    job_id = attempt.began.job_id
    row = live_row(evidence)
    last = attempt is evidence.attempts[-1]
    if last and attempt.ended is None and row is not None and row.job_id == job_id and row.state in AT_WORK:
        return RunState(state=RUNNING)
    if last and attempt.ended is None and not job_id and attempt.alive is not False:
        return _of_process(attempt, evidence)
    rows = [row for row in evidence.answer.accounts or () if row.job_id == job_id]
    found = rows[attempt.began.restarts] if attempt.began.restarts < len(rows) else None
    if found is None or found.state in UNFINISHED:
        found = _final_row(job_id, evidence) if last else None
    log = evidence.log_tail if last and job_id else ""
    return how_it_ended(attempt.ended, found, log, asked=_asked(attempt, evidence))


def slurm_jobs(evidence: Evidence) -> list[str]:
    """Names the jobs of SLURM that a run had, the first one first: those submitted, and any that it was typed into."""
    submitted = [(job.time, job.job_id) for job in evidence.jobs if job.executor == "slurm"]
    entered = [(facts.began.time, facts.began.job_id) for facts in evidence.attempts if facts.began.job_id]
    return list(dict.fromkeys(job_id for _, job_id in sorted([*submitted, *entered])))


def live_row(evidence: Evidence) -> QueueRow | None:
    """Finds the newest job of a run that waits or runs."""
    rows = {row.job_id: row for row in evidence.answer.queue or () if row.state in WAITING | AT_WORK}
    return next((rows[job_id] for job_id in reversed(slurm_jobs(evidence)) if job_id in rows), None)


def _current(evidence: Evidence) -> tuple[JobRecord | None, AttemptFacts | None]:
    """Returns the last job, and the last attempt unless that job is newer."""
    job = evidence.jobs[-1] if evidence.jobs else None
    attempt = evidence.attempts[-1] if evidence.attempts else None
    if job is not None and attempt is not None:
        in_job = job.executor == "slurm" and attempt.began.job_id == job.job_id
        if not in_job and attempt.began.time < job.time:
            attempt = None
    return job, attempt


def _queued(row: QueueRow, evidence: Evidence) -> RunState:
    why = reason_in_words(row.reason)
    before = [facts for facts in evidence.attempts if facts.began.job_id == row.job_id]
    if row.reason == NEVER_SATISFIED and not before:
        return RunState(state=NEVER_STARTED, sentence=f"{why}; can-train cancel takes it out of the queue")
    history = f"before that: {_told(judge_attempt(before[-1], evidence))}" if before else ""
    return RunState(state=QUEUED, sentence="; ".join(filter(None, [why, history, _anew(evidence)])))


def _running(row: QueueRow, evidence: Evidence) -> RunState:
    where = f"on {row.nodes}" if row.nodes else "in its job"
    attempts = [facts for facts in evidence.attempts if facts.began.job_id == row.job_id]
    if not attempts:
        return RunState(state=RUNNING, sentence="; ".join(filter(None, [f"starting {where}", _anew(evidence)])))
    if attempts[-1].ended is not None:
        # Either the job is about to leave the queue or to go back into it, or its next attempt is about to begin.
        ended = how_it_ended(attempts[-1].ended, None, "", asked=False)
        return RunState(state=RUNNING, sentence=f"{where}; an attempt ended ({_told(ended)}), its job has not")
    return RunState(state=RUNNING, sentence="; ".join(filter(None, [where, _anew(evidence)])))


def _anew(evidence: Evidence) -> str:
    reason = evidence.jobs[-1].reason if evidence.jobs else ""
    return f"submitted again ({reason})" if reason else ""


def _of_slurm(job_id: str, attempt: AttemptFacts | None, evidence: Evidence) -> RunState:
    """A run whose job is no longer in the queue, or whose SLURM does not answer."""
    ended = attempt.ended if attempt else None
    # A process that was told to stop may have been put back into the queue.
    if evidence.answer.queue is None and (ended is None or ended.ending in ("terminated", "time_limit")):
        state = RUNNING if attempt and ended is None else QUEUED
        sentence = f"as far as its files say; SLURM, which has its job {job_id}, does not answer here"
        return RunState(state=state, sentence=sentence, certain=False)
    row = _final_row(job_id, evidence)
    if attempt is None:
        return _unbegun(row, evidence)
    return how_it_ended(ended, row, evidence.log_tail, asked=_asked(attempt, evidence))


def _unbegun(row: AccountRow | None, evidence: Evidence) -> RunState:
    """A job of which no attempt began: it never started, or what comes before the training failed."""
    if row is None and not evidence.log_tail:
        gone = "SLURM no longer knows its job, and it printed nothing"
        return RunState(state=CANCELLED if evidence.cancels else NEVER_STARTED, sentence=gone)
    unopened = row is not None and (row.exit_code == _UNOPENED or row.reason == _UNLAUNCHED)
    if row is None or (row.nodes and not unopened):
        return how_it_ended(None, row, evidence.log_tail, asked=bool(evidence.cancels))
    # What waits for a run that did not finish is cancelled by nobody. The accounting hears why some seconds later.
    reasons = [row.reason, *(queued.reason for queued in evidence.answer.queue or () if queued.job_id == row.job_id)]
    unmet = not row.by_person and any(reason.startswith("Dependency") for reason in reasons)
    if row.state == "CANCELLED" and not unmet:
        why = reason_in_words(row.reason)
        return RunState(state=CANCELLED, sentence="before it started" + (f"; then, {why}" if why else ""))
    reason = NEVER_SATISFIED if unmet else _UNLAUNCHED if unopened else row.reason
    return RunState(state=NEVER_STARTED, sentence=reason_in_words(reason))


def _final_row(job_id: str, evidence: Evidence) -> AccountRow | None:
    """Finds what SLURM says of the end of a job that is not in the queue any more."""
    rows = [row for row in evidence.answer.accounts or () if row.job_id == job_id]
    if rows and rows[-1].state not in UNFINISHED:
        return rows[-1]
    # The accounting lags by seconds, and may be off altogether: the controller remembers its last minutes.
    left = [row for row in evidence.answer.queue or () if row.job_id == job_id and row.state not in WAITING | AT_WORK]
    if not left:
        return None
    last = left[-1]
    return AccountRow(job_id=job_id, state=last.state, nodes=last.nodes, time_limit=last.time_limit, reason=last.reason)


def _asked(attempt: AttemptFacts, evidence: Evidence) -> bool:
    return any(cancel.time >= attempt.began.time for cancel in evidence.cancels)


def _of_process(attempt: AttemptFacts, evidence: Evidence) -> RunState:
    """An attempt that was or is a process of this or another machine, without a scheduler."""
    if attempt.ended is None and attempt.alive:
        return RunState(state=RUNNING, sentence=f"process {attempt.began.pid} of this machine")
    if attempt.ended is None and attempt.alive is None:
        where = f"process {attempt.began.pid} of {attempt.began.host}, which cannot be seen from here"
        return RunState(state=RUNNING, sentence=where, certain=False)
    return how_it_ended(attempt.ended, None, evidence.log_tail, asked=_asked(attempt, evidence))


def _unbegun_process(job: JobRecord | None, evidence: Evidence) -> RunState:
    if job is None and evidence.worked:
        return RunState(state=FAILED, sentence="it began, and no ending was written down", certain=False)
    if job is None:
        return RunState(state=NEVER_STARTED, sentence="no job was started for it")
    if evidence.job_alive is not False:
        sentence = "starting" if evidence.job_alive else f"on {job.host}, which cannot be seen from here"
        return RunState(state=RUNNING, sentence=sentence, certain=bool(evidence.job_alive))
    return how_it_ended(None, None, evidence.log_tail, asked=bool(evidence.cancels))


def _finished(result: Mapping[str, Any]) -> str:
    loss, epoch = result.get("best_validation_loss"), result.get("best_epoch")
    return f"best validation loss {loss:.4g} after epoch {epoch}" if isinstance(loss, int | float) else ""


def _told(state: RunState) -> str:
    return f"{state.state}, {state.sentence}" if state.sentence else state.state
