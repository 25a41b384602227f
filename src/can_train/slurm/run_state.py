"""The state of a run."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from can_train.io.processes import AttemptStart
from can_train.slurm.client import (
    AT_WORK,
    NEVER_SATISFIED,
    UNFINISHED,
    WAITING,
    AccountRow,
    Answer,
    QueueRow,
    reason_in_words,
)
from can_train.training.attempts import AttemptEnd

if TYPE_CHECKING:
    from can_train.training.run_folder import CancelRecord, JobRecord, RunRecord

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


REQUEUED: Final = "requeued"
"""Of one attempt only: its job was put back into the queue, by whom SLURM does not say."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One attempt of a run.

    Attributes:
        start: That it began.
        end: How it ended, as its process said; None: it did not say.
        alive: Whether its process is there; None: it is of another machine, or in a job.
    """

    start: AttemptStart
    end: AttemptEnd | None = None
    alive: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
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
    answer: Answer = field(default_factory=lambda: Answer(queue=(), accounts=()))
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


_SAID: Final[Mapping[str, tuple[str, str]]] = {
    "finished": (FINISHED, ""),
    "failed": (FAILED, ""),
    "gpu_oom": (GPU_OOM, ""),
    "host_oom": (HOST_OOM, ""),
    "killed": (FAILED, "killed by somebody or something that SLURM does not name"),
    "time_limit": (TIME_LIMIT, "warned and saved"),
    "terminated": (CANCELLED, "by SIGTERM, saved"),
    "interrupted": (CANCELLED, "interrupted (Ctrl-C), saved"),
}
"""What a process says of its own end. A signal is somebody's wish, unless the scheduler knows better."""


_LOG_MARKS: Final[Sequence[tuple[str, str]]] = (
    ("DUE TO TIME LIMIT", TIME_LIMIT),
    ("DUE TO PREEMPTION", PREEMPTED),
    ("DUE TO NODE FAILURE", NODE_FAILURE),
    ("DUE TO JOB REQUEUE", REQUEUED),
    ("oom-kill event", HOST_OOM),
    (": Out Of Memory", HOST_OOM),
    ("exceeded memory limit", HOST_OOM),
    (" CANCELLED AT ", CANCELLED),
)
"""What slurmstepd and srun write into a log; the more exact comes before the less."""


_EXACT: Final = ("finished", "gpu_oom", "host_oom")
"""What nobody else can know better."""


_CONSEQUENCES: Final = (None, "failed", "killed")
"""What is said, or not, of an attempt of which the kernel killed one process: the others fail for want of it."""


_OOM: Final = "OUT_OF_MEMORY"
"""SLURM's state of a step, or of a job, that the kernel killed for its memory."""


def classify_exit(ended: AttemptEnd | None, row: AccountRow | None, log: str, *, asked: bool) -> RunState:
    """Decides how an attempt ended.

    Args:
        ended: What its process said; None: nothing.
        row: What SLURM says of it; None: nothing, or there was no SLURM.
        log: The end of what it printed; empty where that is not its own.
        asked: Whether a person asked can-train to cancel it.
    """
    if ended is not None and ended.ending in _EXACT:
        return _by_itself(ended)
    written = log_cause(log)
    states = (row.state, *(step.state for step in row.steps)) if row else ()
    outside = _FROM_OUTSIDE.get(row.state) if row else None
    said = ended.ending if ended else None
    # srun terminates the others, too, unless somebody else had them all terminated.
    consequence = said in _CONSEQUENCES or (said == "terminated" and outside is None)
    if consequence and outside != TIME_LIMIT and (_OOM in states or written == HOST_OOM):
        return RunState(state=HOST_OOM, sentence=_memory_words(row))
    if row is not None and outside is not None:
        return RunState(state=outside, sentence=_outside_words(outside, row, ended))
    if row is not None and row.state == "REQUEUED" and said in (None, "terminated"):
        return RunState(state=REQUEUED)
    if written and said in (None, "terminated"):
        return RunState(state=written, sentence="as its log says")
    if ended is not None:
        return _by_itself(ended)
    if asked and row is None:
        return RunState(state=CANCELLED)
    return RunState(state=FAILED, sentence=_silent_words(row, log))


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


def last_error_line(text: str) -> str:
    """Returns the last line of a log that says something: of an error if there is one, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _is_error(line)]
    return (errors or lines or [""])[-1]


def _is_error(line: str) -> bool:
    head, colon, _ = line.partition(":")
    named = head.replace(".", "_").isidentifier() and head.endswith(("Error", "Exception"))
    return bool(colon) and (head == "error" or named)


def _by_itself(ended: AttemptEnd) -> RunState:
    state, words = _SAID.get(ended.ending, (FAILED, ""))
    return RunState(state=state, sentence=_oom_words(ended) if state == GPU_OOM else ended.message or words)


def _oom_words(ended: AttemptEnd) -> str:
    """The error, and where one sample is too much the cards that would hold it."""
    cards = ended.details.get("cards")
    named = f"cards that would hold it: {cards}" if ended.details.get("one_sample") and cards else ""
    return "; ".join(filter(None, [ended.message, named if str(cards) not in ended.message else ""]))


def _memory_words(row: AccountRow | None) -> str:
    asked = f" ({row.memory} of each node)" if row and row.memory else ""
    return f"it needed more memory than its job had asked for{asked}"


def _outside_words(cause: str, row: AccountRow, ended: AttemptEnd | None) -> str:
    what = {
        TIME_LIMIT: f"its limit of {row.time_limit} was up" if row.time_limit else "",
        NODE_FAILURE: f"of {row.nodes}" if row.nodes else "",
        PREEMPTED: f"on {row.nodes}, by a job that comes before it" if row.nodes else "",
    }.get(cause, "")
    saved = "saved before it ended" if ended is not None and ended.ending != "failed" else ""
    return ", ".join(filter(None, [what, saved]))


def _silent_words(row: AccountRow | None, log: str) -> str:
    """Says what is known of a process that said nothing."""
    told = [_exit_words(row) if row else "", last_error_line(log)]
    return "; ".join(filter(None, told)) or "its process is gone without a word, and nothing says who ended it"


def _exit_words(row: AccountRow) -> str:
    """Says an exit code; a step's signal says more than the exit code that the batch script made of it."""
    codes = [*(step.exit_code for step in row.steps), row.exit_code]
    signals = [int(text) for text in (code.partition(":")[2] for code in codes) if text.isdecimal()]
    number = next((found for found in signals if found), 0)
    if number:
        names = {member.value: f" ({member.name})" for member in signal.Signals}
        return f"ended by signal {number}{names.get(number, '')}"
    code = row.exit_code.partition(":")[0]
    return f"exit code {code}" if code not in ("", "0") else "its job ended without a result"


_UNOPENED: Final = "0:53"
"""Exit code of a job whose folder or log could not be opened: nothing of it ran."""


_UNLAUNCHED: Final = "JobLaunchFailure"
"""SLURM's reason for the same."""


def infer_run_state(facts: RunFacts) -> RunState:
    """Decides what state a run is in."""
    if facts.result is not None:
        return RunState(state=FINISHED, sentence=_finished(facts.result))
    row = live_row(facts)
    if row is not None:
        return _queued(row, facts) if row.state in WAITING else _running(row, facts)
    found = _without_queue(facts)
    if not facts.present and not found.live:
        return _without_folder(found, facts)
    if found.state == FINISHED:
        return replace(found, sentence="but its result.json is gone")
    if found.state == REQUEUED:
        # Put back into a queue that no longer has it: it left before anybody looked.
        return RunState(state=CANCELLED if facts.cancels else FAILED, sentence="it left the queue without a word")
    return found


def _without_queue(facts: RunFacts) -> RunState:
    job, attempt = _current(facts)
    job_id = attempt.start.job_id if attempt else job.job_id if job and job.executor == "slurm" else ""
    if job_id:
        return _of_slurm(job_id, attempt, facts)
    return _of_process(attempt, facts) if attempt else _unbegun_process(job, facts)


def _without_folder(found: RunState, facts: RunFacts) -> RunState:
    """A run whose folder was deleted or moved away: only SLURM can know how it ended."""
    rows = [row for job_id in slurm_jobs(facts) if (row := _final_row(job_id, facts)) is not None]
    gone = f"its folder {facts.run.path} is gone"
    if not rows:
        return RunState(state=FAILED, sentence=f"{gone}, and with it how it ended", certain=False)
    if rows[-1].state == "COMPLETED":
        return RunState(state=FINISHED, sentence=f"as SLURM says; {gone}")
    return replace(found, sentence="; ".join(filter(None, [found.sentence, gone])))


def infer_attempt_state(attempt: AttemptFacts, facts: RunFacts) -> RunState:
    """Decides how one attempt ended, or that it goes on."""
    job_id = attempt.start.job_id
    row = live_row(facts)
    last = attempt is facts.attempts[-1]
    if last and attempt.end is None and row is not None and row.job_id == job_id and row.state in AT_WORK:
        return RunState(state=RUNNING)
    if last and attempt.end is None and not job_id and attempt.alive is not False:
        return _of_process(attempt, facts)
    rows = [row for row in facts.answer.accounts or () if row.job_id == job_id]
    found = rows[attempt.start.restarts] if attempt.start.restarts < len(rows) else None
    if found is None or found.state in UNFINISHED:
        found = _final_row(job_id, facts) if last else None
    log = facts.log_tail if last and job_id else ""
    return classify_exit(attempt.end, found, log, asked=_asked(attempt, facts))


def slurm_jobs(facts: RunFacts) -> list[str]:
    """Names the jobs of SLURM that a run had, the first one first: those submitted, and any that it was typed into."""
    submitted = [(job.time, job.job_id) for job in facts.jobs if job.executor == "slurm"]
    entered = [(facts.start.start_time, facts.start.job_id) for facts in facts.attempts if facts.start.job_id]
    return list(dict.fromkeys(job_id for _, job_id in sorted([*submitted, *entered])))


def live_row(facts: RunFacts) -> QueueRow | None:
    """Finds the newest job of a run that waits or runs."""
    rows = {row.job_id: row for row in facts.answer.queue or () if row.state in WAITING | AT_WORK}
    return next((rows[job_id] for job_id in reversed(slurm_jobs(facts)) if job_id in rows), None)


def _current(facts: RunFacts) -> tuple[JobRecord | None, AttemptFacts | None]:
    """Returns the last job, and the last attempt unless that job is newer."""
    job = facts.jobs[-1] if facts.jobs else None
    attempt = facts.attempts[-1] if facts.attempts else None
    if job is not None and attempt is not None:
        in_job = job.executor == "slurm" and attempt.start.job_id == job.job_id
        if not in_job and attempt.start.start_time < job.time:
            attempt = None
    return job, attempt


def _queued(row: QueueRow, facts: RunFacts) -> RunState:
    why = reason_in_words(row.reason)
    before = [attempt for attempt in facts.attempts if attempt.start.job_id == row.job_id]
    if row.reason == NEVER_SATISFIED and not before:
        return RunState(state=NEVER_STARTED, sentence=f"{why}; can-train cancel takes it out of the queue")
    history = f"before that: {_told(infer_attempt_state(before[-1], facts))}" if before else ""
    return RunState(state=QUEUED, sentence="; ".join(filter(None, [why, history, _anew(facts)])))


def _running(row: QueueRow, facts: RunFacts) -> RunState:
    where = f"on {row.nodes}" if row.nodes else "in its job"
    attempts = [attempt for attempt in facts.attempts if attempt.start.job_id == row.job_id]
    if not attempts:
        return RunState(state=RUNNING, sentence="; ".join(filter(None, [f"starting {where}", _anew(facts)])))
    if attempts[-1].end is not None:
        # Either the job is about to leave the queue or to go back into it, or its next attempt is about to begin.
        ended = classify_exit(attempts[-1].end, None, "", asked=False)
        return RunState(state=RUNNING, sentence=f"{where}; an attempt ended ({_told(ended)}), its job has not")
    return RunState(state=RUNNING, sentence="; ".join(filter(None, [where, _anew(facts)])))


def _anew(facts: RunFacts) -> str:
    reason = facts.jobs[-1].reason if facts.jobs else ""
    return f"submitted again ({reason})" if reason else ""


def _of_slurm(job_id: str, attempt: AttemptFacts | None, facts: RunFacts) -> RunState:
    """A run whose job is no longer in the queue, or whose SLURM does not answer."""
    ended = attempt.end if attempt else None
    # A process that was told to stop may have been put back into the queue.
    if facts.answer.queue is None and (ended is None or ended.ending in ("terminated", "time_limit")):
        state = RUNNING if attempt and ended is None else QUEUED
        sentence = f"as far as its files say; SLURM, which has its job {job_id}, does not answer here"
        return RunState(state=state, sentence=sentence, certain=False)
    row = _final_row(job_id, facts)
    if attempt is None:
        return _unbegun(row, facts)
    return classify_exit(ended, row, facts.log_tail, asked=_asked(attempt, facts))


def _unbegun(row: AccountRow | None, facts: RunFacts) -> RunState:
    """A job of which no attempt began: it never started, or what comes before the training failed."""
    if row is None and not facts.log_tail:
        gone = "SLURM no longer knows its job, and it printed nothing"
        return RunState(state=CANCELLED if facts.cancels else NEVER_STARTED, sentence=gone)
    unopened = row is not None and (row.exit_code == _UNOPENED or row.reason == _UNLAUNCHED)
    if row is None or (row.nodes and not unopened):
        return classify_exit(None, row, facts.log_tail, asked=bool(facts.cancels))
    # What waits for a run that did not finish is cancelled by nobody. The accounting hears why some seconds later.
    reasons = [row.reason, *(queued.reason for queued in facts.answer.queue or () if queued.job_id == row.job_id)]
    unmet = not row.by_person and any(reason.startswith("Dependency") for reason in reasons)
    if row.state == "CANCELLED" and not unmet:
        why = reason_in_words(row.reason)
        return RunState(state=CANCELLED, sentence="before it started" + (f"; then, {why}" if why else ""))
    reason = NEVER_SATISFIED if unmet else _UNLAUNCHED if unopened else row.reason
    return RunState(state=NEVER_STARTED, sentence=reason_in_words(reason))


def _final_row(job_id: str, facts: RunFacts) -> AccountRow | None:
    """Finds what SLURM says of the end of a job that is not in the queue any more."""
    rows = [row for row in facts.answer.accounts or () if row.job_id == job_id]
    if rows and rows[-1].state not in UNFINISHED:
        return rows[-1]
    # The accounting lags by seconds, and may be off altogether: the controller remembers its last minutes.
    left = [row for row in facts.answer.queue or () if row.job_id == job_id and row.state not in WAITING | AT_WORK]
    if not left:
        return None
    last = left[-1]
    return AccountRow(job_id=job_id, state=last.state, nodes=last.nodes, time_limit=last.time_limit, reason=last.reason)


def _asked(attempt: AttemptFacts, facts: RunFacts) -> bool:
    return any(cancel.time >= attempt.start.start_time for cancel in facts.cancels)


def _of_process(attempt: AttemptFacts, facts: RunFacts) -> RunState:
    """An attempt that was or is a process of this or another machine, without a scheduler."""
    if attempt.end is None and attempt.alive:
        return RunState(state=RUNNING, sentence=f"process {attempt.start.pid} of this machine")
    if attempt.end is None and attempt.alive is None:
        where = f"process {attempt.start.pid} of {attempt.start.host}, which cannot be seen from here"
        return RunState(state=RUNNING, sentence=where, certain=False)
    return classify_exit(attempt.end, None, facts.log_tail, asked=_asked(attempt, facts))


def _unbegun_process(job: JobRecord | None, facts: RunFacts) -> RunState:
    if job is None and facts.worked:
        return RunState(state=FAILED, sentence="it began, and no ending was written down", certain=False)
    if job is None:
        return RunState(state=NEVER_STARTED, sentence="no job was started for it")
    if facts.job_alive is not False:
        sentence = "starting" if facts.job_alive else f"on {job.host}, which cannot be seen from here"
        return RunState(state=RUNNING, sentence=sentence, certain=bool(facts.job_alive))
    return classify_exit(None, None, facts.log_tail, asked=bool(facts.cancels))


def _finished(result: Mapping[str, Any]) -> str:
    loss, epoch = result.get("best_validation_loss"), result.get("best_epoch")
    return f"best validation loss {loss:.4g} after epoch {epoch}" if isinstance(loss, int | float) else ""


def _told(state: RunState) -> str:
    return f"{state.state}, {state.sentence}" if state.sentence else state.state
