"""What state a run is in, and why: a pure function of what the registry, the run's folder, its log and SLURM say. The
run's own result comes first, then the queue, then who ended it from outside, then what its process could say itself.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from can_train.launch.slurm_query import AT_WORK, WAITING, AccountRow, Answer, QueueRow
from can_train.launch.slurm_reasons import NEVER_SATISFIED, reason_in_words
from can_train.policy.cards import cards_that_hold
from can_train.state.registry import CancelRecord, JobRecord, RunRecord
from can_train.training.attempts import Began, Ended

QUEUED: Final = "queued"
RUNNING: Final = "running"
FINISHED: Final = "finished"
FAILED: Final = "failed"
GPU_OOM: Final = "CUDA out-of-memory"
HOST_OOM: Final = "host out-of-memory"
TIME_LIMIT: Final = "time limit"
PREEMPTED: Final = "preempted"
NODE_FAILURE: Final = "node failure"
CANCELLED: Final = "cancelled"
NEVER_STARTED: Final = "never started"

LIVE: Final = (QUEUED, RUNNING)
CAUSES: Final = (
    FINISHED, FAILED, GPU_OOM, HOST_OOM, TIME_LIMIT, PREEMPTED, NODE_FAILURE, CANCELLED, NEVER_STARTED,
)  # fmt: skip

_FROM_OUTSIDE: Final[Mapping[str, str]] = {
    "TIMEOUT": TIME_LIMIT,
    "DEADLINE": TIME_LIMIT,
    "PREEMPTED": PREEMPTED,
    "NODE_FAIL": NODE_FAILURE,
    "BOOT_FAIL": NODE_FAILURE,
    "CANCELLED": CANCELLED,
    "REVOKED": CANCELLED,
}
"""SLURM's states of a job that something else than its own processes ended."""

_SAID: Final[Mapping[str, str]] = {
    "finished": FINISHED,
    "failed": FAILED,
    "gpu_oom": GPU_OOM,
    "time_limit": TIME_LIMIT,
    "terminated": CANCELLED,
    "interrupted": CANCELLED,
}
"""What a process says of its own end. A signal is somebody's wish, unless the scheduler knows better."""

_LOG_MARKS: Final[Sequence[tuple[str, str]]] = (
    ("DUE TO TIME LIMIT", TIME_LIMIT),
    ("DUE TO PREEMPTION", PREEMPTED),
    ("DUE TO NODE FAILURE", NODE_FAILURE),
    ("oom-kill event", HOST_OOM),
    (": Out Of Memory", HOST_OOM),
    ("exceeded memory limit", HOST_OOM),
    (" CANCELLED AT ", CANCELLED),
)
"""What slurmstepd and srun leave in a log, the more exact before the less."""

_OOM: Final = "OUT_OF_MEMORY"
_UNOPENED: Final = "0:53"
"""Exit code of a job whose folder or log could not be opened: nothing of it ran."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One attempt of a run.

    Attributes:
        began: That it began.
        ended: How it ended, as its process said; None: it did not say.
        alive: Whether its process is there; None: it is of another machine, or in a job.
    """

    began: Began
    ended: Ended | None = None
    alive: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a run.

    Attributes:
        run: The registry's entry.
        jobs: Its jobs, the first one first.
        cancels: That a person asked for its end.
        attempts: Its attempts, the first one first.
        result: What `result.json` holds; None: the run has not finished.
        present: Whether its folder is where the registry says, or where it was looked for.
        worked: Whether there are traces of a training that wrote no attempts: one of an older version.
        job_alive: Whether the process that controls its last job is there, where that is one of this machine.
        answer: What SLURM says of its jobs.
        log_tail: The end of what its last job printed.
    """

    run: RunRecord
    jobs: Sequence[JobRecord] = ()
    cancels: Sequence[CancelRecord] = ()
    attempts: Sequence[AttemptFacts] = ()
    result: Mapping[str, Any] | None = None
    present: bool = True
    worked: bool = False
    job_alive: bool | None = None
    answer: Answer = Answer(queue=(), accounts=())
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run.

    Attributes:
        state: One of `LIVE` or `CAUSES`.
        sentence: More about it, in words.
        certain: Whether it is known, and not only what the files say.
    """

    state: str
    sentence: str = ""
    certain: bool = True

    @property
    def live(self) -> bool:
        """Whether it is queued or running."""
        return self.state in LIVE


def judge(evidence: Evidence) -> RunState:
    """Decides what state a run is in."""
    if evidence.result is not None:
        return RunState(state=FINISHED, sentence=_finished(evidence.result))
    job, attempt = _current(evidence)
    row = _live_row(evidence)
    if row is not None:
        return _queued(row, evidence) if row.state in WAITING else _running(row, attempt, evidence)
    scheduled = attempt.began.job_id if attempt else job.job_id if job is not None and job.executor == "slurm" else ""
    if scheduled:
        return _of_slurm(scheduled, attempt, evidence)
    return _of_process(job, attempt, evidence)


def _current(evidence: Evidence) -> tuple[JobRecord | None, AttemptFacts | None]:
    """Returns the last job, and the last attempt unless that job is newer."""
    job = evidence.jobs[-1] if evidence.jobs else None
    attempt = evidence.attempts[-1] if evidence.attempts else None
    if job is not None and attempt is not None:
        of_job = job.executor == "slurm" and attempt.began.job_id == job.job_id
        if not of_job and attempt.began.time < job.time:
            attempt = None
    return job, attempt


def _live_row(evidence: Evidence) -> QueueRow | None:
    """Finds the newest job that waits or runs."""
    rows = {row.job_id: row for row in evidence.answer.queue or () if row.state in WAITING | AT_WORK}
    return next((rows[job_id] for job_id in reversed(slurm_jobs(evidence)) if job_id in rows), None)


def slurm_jobs(evidence: Evidence) -> list[str]:
    """Names the jobs of SLURM that a run had, the first one first: those submitted, and any that it was typed into."""
    submitted = [(job.time, job.job_id) for job in evidence.jobs if job.executor == "slurm"]
    entered = [(facts.began.time, facts.began.job_id) for facts in evidence.attempts if facts.began.job_id]
    return list(dict.fromkeys(job_id for _, job_id in sorted([*submitted, *entered])))


def _queued(row: QueueRow, evidence: Evidence) -> RunState:
    why = reason_in_words(row.reason)
    if row.reason == NEVER_SATISFIED:
        return RunState(state=NEVER_STARTED, sentence=f"{why}; can-train cancel takes it out of the queue")
    before = _attempt_of(row.job_id, evidence)
    history = f"before that: {_told(cause_of(before, evidence))}" if before else ""
    return RunState(state=QUEUED, sentence="; ".join(filter(None, [why, history, _anew(evidence)])))


def _running(row: QueueRow, attempt: AttemptFacts | None, evidence: Evidence) -> RunState:
    where = f"on {row.nodes}" if row.nodes else "in its job"
    if attempt is None or (attempt.began.job_id == row.job_id and attempt.ended and row.state == "CONFIGURING"):
        return RunState(state=RUNNING, sentence=f"starting {where}")
    if attempt.ended is not None and attempt.began.job_id == row.job_id:
        ended = _told(_by_itself(attempt.ended))
        return RunState(state=RUNNING, sentence=f"{where}; an attempt ended ({ended}), the job has not")
    return RunState(state=RUNNING, sentence="; ".join(filter(None, [where, _anew(evidence)])))


def _anew(evidence: Evidence) -> str:
    reason = evidence.jobs[-1].reason if evidence.jobs else ""
    return f"submitted again: {reason}" if reason else ""


def _of_slurm(job_id: str, attempt: AttemptFacts | None, evidence: Evidence) -> RunState:
    """A run whose job is no longer in the queue, or whose SLURM does not answer."""
    ended = attempt.ended if attempt else None
    if evidence.answer.queue is None and (ended is None or ended.ending in ("terminated", "time_limit")):
        state = RUNNING if attempt and ended is None else QUEUED
        sentence = f"as far as its files say; SLURM, which has its job {job_id}, does not answer here"
        return RunState(state=state, sentence=sentence, certain=False)
    if attempt is not None:
        return cause_of(attempt, evidence)
    return _unbegun(_account(job_id, 0, evidence, last=True), evidence)


def _unbegun(row: AccountRow | None, evidence: Evidence) -> RunState:
    """A job of which no attempt began: it never started, or what comes before the training failed."""
    if row is None and evidence.cancels:
        return RunState(state=CANCELLED, sentence="before it started")
    if row is None and not evidence.log_tail:
        return RunState(state=NEVER_STARTED, sentence="SLURM no longer knows its job, and it printed nothing")
    if row is None:
        return _by_log(evidence) or _lost(evidence)
    unopened = row.exit_code == _UNOPENED or row.reason == "JobLaunchFailure"
    if row.nodes and not unopened:
        return _by_scheduler(row, None, evidence)
    # A dependency that cannot be met any more is cancelled by nobody.
    unmet = not row.by_person and row.reason.startswith("Dependency")
    if row.state == "CANCELLED" and not unmet:
        why = reason_in_words(row.reason)
        return RunState(state=CANCELLED, sentence="before it started" + (f" ({why})" if why else ""))
    reason = NEVER_SATISFIED if unmet else "JobLaunchFailure" if unopened else row.reason
    return RunState(state=NEVER_STARTED, sentence=reason_in_words(reason))


def cause_of(attempt: AttemptFacts, evidence: Evidence) -> RunState:
    """Decides how one attempt of a run ended."""
    last = attempt is evidence.attempts[-1]
    row = _account(attempt.began.job_id, attempt.began.restarts, evidence, last=last) if attempt.began.job_id else None
    ended = attempt.ended
    if ended is not None and ended.ending in ("finished", "gpu_oom"):
        return _by_itself(ended)
    if row is not None:
        return _by_scheduler(row, ended, evidence if last else replace(evidence, log_tail=""))
    told = _by_log(evidence) if last and attempt.began.job_id else None
    if ended is not None:
        # Of a signal the log may know the sender.
        return told if told is not None and ended.ending == "terminated" else _by_itself(ended)
    asked = any(cancel.time >= attempt.began.time for cancel in evidence.cancels)
    return told or (RunState(state=CANCELLED) if asked else _lost(evidence))


def _by_scheduler(row: AccountRow, ended: Ended | None, evidence: Evidence) -> RunState:
    """Reads an ending out of the accounting, with what the process and the log could say."""
    outside = _FROM_OUTSIDE.get(row.state)
    log = _by_log(evidence)
    out_of_memory = _OOM in (row.state, *(step.state for step in row.steps)) or (log and log.state == HOST_OOM)
    # The kernel kills one process, and the others fail: what they say of it is a consequence.
    if out_of_memory and (ended is None or ended.ending == "failed") and outside != TIME_LIMIT:
        asked = f" ({row.memory} a node were asked for)" if row.memory else ""
        return RunState(state=HOST_OOM, sentence=f"it needed more memory than its job had{asked}")
    if outside is not None:
        return RunState(state=outside, sentence=_outside_words(outside, row, ended))
    if ended is not None:
        return log if ended.ending == "terminated" and log is not None else _by_itself(ended)
    if log is not None:
        return log
    ending = _exit_words(row)
    return RunState(state=FAILED, sentence="; ".join(filter(None, [ending, last_error_line(evidence.log_tail)])))


def _outside_words(cause: str, row: AccountRow, ended: Ended | None) -> str:
    saved = "saved before it ended" if ended is not None and ended.ending != "failed" else ""
    what = {
        TIME_LIMIT: f"its limit of {row.time_limit} was up" if row.time_limit else "",
        NODE_FAILURE: f"of {row.nodes}" if row.nodes else "",
        PREEMPTED: f"on {row.nodes}, by a job that comes before it" if row.nodes else "",
    }.get(cause, "")
    return ", ".join(filter(None, [what, saved]))


def _exit_words(row: AccountRow) -> str:
    """Says an exit code; a step's signal says more than the exit code that the batch script made of it."""
    signals = [code.partition(":")[2] for code in (*(step.exit_code for step in row.steps), row.exit_code)]
    number = next((int(text) for text in signals if text.isdigit() and text != "0"), 0)
    if number:
        return f"ended by signal {number}{_signal_name(number)}"
    code = row.exit_code.partition(":")[0]
    return f"exit code {code}" if code not in ("", "0") else "its job ended without a result"


def _signal_name(number: int) -> str:
    return f" ({signal.Signals(number).name})" if number in {member.value for member in signal.Signals} else ""


def _by_itself(ended: Ended) -> RunState:
    state = _SAID.get(ended.ending, FAILED)
    if ended.ending == "finished":
        return RunState(state=state, sentence="but its result.json is gone")
    if state == GPU_OOM:
        return RunState(state=state, sentence=_gpu_oom_words(ended))
    signalled = {"interrupted": "interrupted (Ctrl-C), saved", "terminated": "by SIGTERM, saved"}
    warned = {"time_limit": "warned and saved, and not put back into the queue"}
    return RunState(state=state, sentence=ended.message or {**signalled, **warned}.get(ended.ending, ""))


def _gpu_oom_words(ended: Ended) -> str:
    need = ended.details.get("need_bytes")
    if not ended.details.get("one_sample") or not isinstance(need, int | float):
        return ended.message
    return "; ".join(filter(None, [ended.message, f"one sample does not fit: {cards_that_hold(int(need))}"]))


def _by_log(evidence: Evidence) -> RunState | None:
    """Reads an ending out of what SLURM wrote into the log; the last one counts, as requeued jobs go on in the same."""
    cause = log_cause(evidence.log_tail)
    return RunState(state=cause, sentence="as its log says") if cause else None


def log_cause(text: str) -> str:
    """Finds the last word of SLURM on an ending in a log; empty: there is none.

    Example:
        >>> log_cause("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***")
        'preempted'
    """
    for line in reversed(text.splitlines()):
        for mark, cause in _LOG_MARKS:
            if mark in line:
                return cause
    return ""


def _lost(evidence: Evidence) -> RunState:
    line = last_error_line(evidence.log_tail)
    gone = "its process is gone without a word, and nothing says who ended it"
    return RunState(state=FAILED, sentence=line or gone)


def last_error_line(text: str) -> str:
    """Returns the last line of a log that says something: of an error if there is one, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _is_error(line)]
    return (errors or lines or [""])[-1]


def _is_error(line: str) -> bool:
    head = line.partition(":")[0]
    return head == "error" or (head.isidentifier() or "." in head) and head.endswith(("Error", "Exception"))


def _attempt_of(job_id: str, evidence: Evidence) -> AttemptFacts | None:
    """Finds the last attempt inside a job."""
    of_job = [facts for facts in evidence.attempts if facts.began.job_id == job_id]
    return of_job[-1] if of_job else None


def _account(job_id: str, restarts: int, evidence: Evidence, *, last: bool) -> AccountRow | None:
    """Finds what SLURM says of the end of an attempt of a job that is not in the queue any more."""
    rows = [row for row in evidence.answer.accounts or () if row.job_id == job_id]
    row = rows[restarts] if restarts < len(rows) and not last else rows[-1] if rows else None
    if row is not None and row.state not in WAITING | AT_WORK:
        return row
    left = [row for row in evidence.answer.queue or () if row.job_id == job_id and row.state not in WAITING | AT_WORK]
    if not last or not left:
        return None
    known = left[-1]
    return AccountRow(
        job_id=job_id,
        state=known.state,
        nodes=known.nodes,
        time_limit=known.time_limit,
        reason="" if known.reason == "None" else known.reason,
    )


def _of_process(job: JobRecord | None, attempt: AttemptFacts | None, evidence: Evidence) -> RunState:
    """A run that this or another machine trained without a scheduler."""
    if attempt is None:
        return _unbegun_process(job, evidence)
    if attempt.ended is None and attempt.alive:
        return RunState(state=RUNNING, sentence=f"process {attempt.began.pid} of this machine")
    if attempt.ended is None and attempt.alive is None:
        where = f"process {attempt.began.pid} of {attempt.began.host}, which cannot be seen from here"
        return RunState(state=RUNNING, sentence=where, certain=False)
    return cause_of(attempt, evidence)


def _unbegun_process(job: JobRecord | None, evidence: Evidence) -> RunState:
    if job is None and evidence.worked:
        return RunState(state=FAILED, sentence="it began, and no ending was written down", certain=False)
    if job is None:
        gone = "" if evidence.present else ", and its folder is gone"
        return RunState(state=NEVER_STARTED, sentence=f"no job was started for it{gone}")
    if evidence.job_alive is not False:
        sentence = "starting" if evidence.job_alive else f"on {job.host}, which cannot be seen from here"
        return RunState(state=RUNNING, sentence=sentence, certain=bool(evidence.job_alive))
    return RunState(state=CANCELLED, sentence="before it began") if evidence.cancels else _lost(evidence)


def _finished(result: Mapping[str, Any]) -> str:
    loss, epoch = result.get("best_validation_loss"), result.get("best_epoch")
    if not isinstance(loss, int | float):
        return ""
    return f"best validation loss {loss:.4g} after epoch {epoch}"


def _told(state: RunState) -> str:
    return f"{state.state}, {state.sentence}" if state.sentence else state.state
