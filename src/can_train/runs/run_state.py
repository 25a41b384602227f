"""The state of a run, inferred from the facts that `status.py` collects."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from can_train.errors import without_positions
from can_train.reporter import COLUMNS
from can_train.runs import scheduler
from can_train.runs.attempts import REPEATED
from can_train.runs.scheduler import AccountRow, SchedulerAnswer

if TYPE_CHECKING:
    from can_train.io.records import AttemptStart, JobId
    from can_train.runs.attempts import AttemptEnd
    from can_train.runs.registry import CancelRecord, JobRecord, RunRecord

QUEUED: Final = "queued"
RUNNING: Final = "running"
SUSPENDED: Final = "suspended"
FINISHED: Final = "finished"
FAILED: Final = "failed"
GPU_OOM: Final = "CUDA out-of-memory"
HOST_OOM: Final = "host out-of-memory"
TIME_LIMIT: Final = "time limit"
PREEMPTED: Final = "preempted"
NODE_FAILURE: Final = "node failure"
CANCELLED: Final = "cancelled"
NEVER_STARTED: Final = "never started"
LIVE: Final = (QUEUED, RUNNING, SUSPENDED)
CAUSES: Final = (
    FINISHED, FAILED, GPU_OOM, HOST_OOM, TIME_LIMIT, PREEMPTED, NODE_FAILURE, CANCELLED, NEVER_STARTED,
)  # fmt: skip

FAILURES: Final = tuple(state for state in CAUSES if state not in (FINISHED, CANCELLED))
"""States of a run that ended without a result, and that nobody cancelled."""

REQUEUED: Final = "requeued"
"""State of an attempt only: its job was put back into the queue, and SLURM does not name the cause."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """The facts about an attempt."""

    start: AttemptStart
    end: AttemptEnd | None = None  # recorded by its process
    alive: bool | None = None  # whether its process runs; None: unknown on this machine, or the process is in a job
    waits_for: str = ""  # reason why it waits before it trains


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts about a run; its jobs and attempts are in order."""

    run: RunRecord
    jobs: Sequence[JobRecord] = ()
    cancels: Sequence[CancelRecord] = ()
    attempts: Sequence[AttemptFacts] = ()
    result: Mapping[str, Any] | None = None  # content of `result.json`; None: the run has not finished
    is_damaged: bool = False  # whether `result.json` exists and cannot be read
    is_closed: bool = False  # whether another person has closed it to this user
    has_folder: bool = True
    job_alive: bool | None = None  # whether the process that controls its last job runs; None: unknown
    answer: SchedulerAnswer = field(default_factory=SchedulerAnswer)
    log_tail: str = ""  # end of the last job's log


@dataclass(frozen=True)
class RunState:
    """The state of a run: an element of `LIVE` or `CAUSES`, and a sentence about it."""

    state: str
    sentence: str = ""
    certain: bool = True  # False if it follows from files alone: neither SLURM nor the process can be asked from here

    @property
    def live(self) -> bool:
        """Whether the run is queued or running, or would run if SLURM had not suspended its job."""
        return self.state in LIVE

    @property
    def label(self) -> str:
        """The state for a column; an uncertain state has a question mark."""
        return self.state if self.certain else f"{self.state}?"

    def __str__(self) -> str:
        return f"{self.label}: {self.sentence}" if self.sentence else self.label


# The end of an attempt

_BY_SLURM_STATE: Final[Mapping[str, str]] = {
    "TIMEOUT": TIME_LIMIT,
    "DEADLINE": TIME_LIMIT,
    "PREEMPTED": PREEMPTED,
    "NODE_FAIL": NODE_FAILURE,
    "BOOT_FAIL": NODE_FAILURE,
    "CANCELLED": CANCELLED,
    "REVOKED": CANCELLED,
}
"""State by SLURM's state of a job that was ended from outside."""

_BY_ENDING: Final[Mapping[str, tuple[str, str]]] = {
    "finished": (FINISHED, ""),
    "failed": (FAILED, ""),
    "rank_gone": (FAILED, ""),
    "in_use": (REQUEUED, ""),
    "gpu_oom": (GPU_OOM, ""),
    "host_oom": (HOST_OOM, ""),
    "killed": (FAILED, "killed by somebody or something that SLURM does not name"),
    "time_limit": (TIME_LIMIT, "warned and saved"),
    "terminated": (CANCELLED, "by SIGTERM, saved"),
    "interrupted": (CANCELLED, "interrupted (Ctrl-C), saved"),
}
"""State and sentence by the recorded ending. SIGTERM means a person's wish unless SLURM knows better."""

_LOG_PATTERNS: Final[Mapping[str, str]] = {
    TIME_LIMIT: "DUE TO TIME LIMIT",
    PREEMPTED: "DUE TO PREEMPTION",
    NODE_FAILURE: "DUE TO NODE FAILURE",
    REQUEUED: "DUE TO JOB REQUEUE",
    # Where memory is limited by control groups, by slurmstepd and by srun; where it is polled.
    HOST_OOM: r"oom-kill event|^srun: error: .*: Out Of Memory$|[Ee]xceeded (?:job |step )?memory limit",
    CANCELLED: " CANCELLED AT ",
}
"""Patterns of the lines that slurmstepd and srun write into a job's log."""

_LOG_CAUSE: Final = re.compile("|".join(f"({pattern})" for pattern in _LOG_PATTERNS.values()), re.MULTILINE)

_RETURNING: Final = (PREEMPTED, NODE_FAILURE, REQUEUED)
"""Causes after which SLURM puts a job back into the queue."""

_SCHEDULER_LINES: Final = ("srun: ", "slurmstepd", "can-train: ")
"""Beginnings of the lines of a log that the training did not write."""


def classify_exit(attempt: AttemptFacts | None, row: AccountRow | None, log: str, facts: RunFacts) -> RunState:
    """Returns the state that an attempt ended in, or a job that began no attempt.

    Args:
        attempt: The attempt; None: the job began no attempt.
        row: SLURM's account of the attempt or job; None: there is no account.
        log: End of its log; empty if the log belongs to another job.
        facts: All facts about the run.
    """
    end = attempt.end if attempt else None
    ending = end.ending if end else None
    # Of these endings nobody knows more than the process.
    if end is not None and ending in ("finished", "gpu_oom", "host_oom"):
        return _recorded(end)
    # What SLURM ended may be the runs beside it.
    if end is not None and ending == "failed" and _is_shared(facts):
        return _recorded(end)
    causes = log_causes(log)
    # SLURM calls no job failed that it ended itself: such a cause is of an earlier start of the job.
    if row is not None and row.state == "FAILED" and causes[-1:] and causes[-1] in _RETURNING:
        causes = []
    by_slurm = _BY_SLURM_STATE.get(row.state) if row else None
    # The kernel kills one process; the others then fail without it, or srun terminates them. Terminated processes of a
    # job that SLURM itself ended are not such a consequence.
    is_consequence = ending in (None, "failed", "killed", "rank_gone") or (ending == "terminated" and by_slurm is None)
    oom_in_account = row is not None and "OUT_OF_MEMORY" in (row.state, *(step.state for step in row.steps))
    if is_consequence and by_slurm != TIME_LIMIT and (oom_in_account or causes[-1:] == [HOST_OOM]):
        memory = f" ({row.memory} of each node)" if row and row.memory else ""
        return RunState(HOST_OOM, f"it needed more memory than its job had asked for{memory}")
    if row is not None and by_slurm is not None:
        return RunState(by_slurm, _ended_by_slurm(by_slurm, row, end))
    # A process records "terminated" also when SLURM requeues or ends its job: whoever ended it knows more.
    if ending in (None, "terminated"):
        if row is not None and row.state == "REQUEUED":
            return RunState(REQUEUED)
        if causes:
            return RunState(causes[-1], "as its log says")
    if end is not None:
        return _recorded(end)
    if row is None and any(attempt is None or cancel.time >= attempt.start.start_time for cancel in facts.cancels):
        return RunState(CANCELLED)
    why = "; ".join(filter(None, [_exit_words(row) if row else "", error_in_words(log)]))
    return RunState(FAILED, why or "its process ended without a record, and nothing shows what ended it")


def log_causes(text: str) -> list[str]:
    """Lists the causes of an end that SLURM wrote into a log, in order.

    Example:
        >>> log_causes("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***")
        ['cancelled', 'preempted']
    """
    causes = list(_LOG_PATTERNS)
    return [causes[(match.lastindex or 0) - 1] for match in _LOG_CAUSE.finditer(text)]


_RANK_LABEL: Final = re.compile(r"^(?:\[rank\d+\]:|\d+:) ?")
"""Prefix that torchrun and `srun --label` write before each line of a rank."""
_ERRORS: Final = (
    # An exception of Python, a line that a program calls an error, a level of logging.
    r"^(?:\w+\.)*(?:\w+(?:Error|Exception|NotFound)|KeyboardInterrupt|SystemExit)(?::|$)",
    r"^(?:[^\s:]+: ?)*(?i:fatal error|error|fatal)\b *:",
    r"(?:^|[\[\s])(?:ERROR|FATAL|CRITICAL)(?:[\]:]| +\w)",
    # A crash of Python: reports of Python, glibc, libstdc++, the dynamic linker, CUDA and NCCL.
    r"^(?:Fatal Python error|terminate called |what\(\): |(?:free|malloc|realloc)\(\): |double free|corrupted )",
    r"error while loading shared libraries|undefined symbol: |version `\S+' not found",
    r"\b(?:CUDA|CUDNN|cuDNN|CUBLAS|cuBLAS|NCCL|HIP) error\b|\bCUDA out of memory\. ",
    # A shell's errors, with the reasons of the system.
    r": (?:command not found|not found|unbound variable|cannot execute|bad interpreter|syntax error)\b",
    r": (?:No such file or directory|Permission denied|Exec format error|Is a directory|Input/output error)$",
    r"\b(?:No space left on device|Disk quota exceeded|Cannot allocate memory|Stale file handle)\b",
    # A signal, at the beginning of the line or after the number of the process.
    r"(?:^|\d +|: )(?:Killed|Aborted|Terminated|Segmentation fault|Bus error|Illegal instruction)(?:$|  | \()",
    r"^Floating point exception",
    # Python without the package, a module that a site lacks, a launcher's report.
    r": No module named |: can't open file |^Lmod has detected the following error|Unable to locate a modulefile",
    r"^(?:mpirun|mpiexec|prterun) noticed that |oom[-_]kill",
)
_ERROR: Final = re.compile("|".join(_ERRORS))
"""A line of a job's log that is certainly an error."""
_ASSIGNMENT: Final = re.compile(r"^(?:export |declare -\S+ )?[A-Za-z_][\w%()]*=")
"""A line of an environment, whose values may contain any word."""
_LONGEST_ERROR: Final = 240  # characters
SETUP_ENDED: Final = "cluster.setup ended with exit status"
"""Words of the error with which a job's script names the line of `cluster.setup` that failed."""
_SETUP_ERROR: Final = f"error: {SETUP_ENDED} "


def last_error_line(text: str) -> str:
    """Returns the last line of a log that is recognized as an error; empty without such a line. A line of the training
    takes precedence over a line of the scheduler.
    """
    errors, in_traceback = [], False
    for raw in text.splitlines():
        line = _RANK_LABEL.sub("", raw).rstrip()
        # The line after the frames, which are indented, names the exception.
        ends_traceback = in_traceback and line[:1].strip() != ""
        in_traceback = line.endswith("Traceback (most recent call last):") or (in_traceback and not ends_traceback)
        if ends_traceback or (_ERROR.search(line.strip()) and not _ASSIGNMENT.match(line.strip())):
            errors.append(line.strip())
    training_errors = [line for line in errors if not line.startswith(_SCHEDULER_LINES)]
    # Some lines of srun only repeat the exit status.
    errors = training_errors or [line for line in errors if ": Exited with exit code " not in line]
    return _cut(without_positions(errors[-1]), _LONGEST_ERROR) if errors else ""


def error_in_words(text: str, status: str = "") -> str:
    """Returns the error that a log shows; else the exit status in words and the last line of the log."""
    if error := last_error_line(text):
        return "; ".join(filter(None, (error, _words_of_setup(text) if error.startswith(_SETUP_ERROR) else "")))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    training_lines = [line for line in lines if not line.startswith(_SCHEDULER_LINES)] or lines
    last = _cut(f"no error was printed; last line: {training_lines[-1]}", COLUMNS) if training_lines else ""
    return "; ".join(filter(None, (status, last)))


def _words_of_setup(text: str) -> str:
    """Returns the error that a line of `cluster.setup` printed before it ended the job; empty if it printed none."""
    printed = text.rpartition(_SETUP_ERROR)[0].rstrip().rpartition("\n")[2]
    words = last_error_line(printed)
    return f"it printed: {words}" if words else ""


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"


def _recorded(end: AttemptEnd) -> RunState:
    state, sentence = _BY_ENDING.get(end.ending, (FAILED, ""))
    parts = [end.message or sentence]
    cards = end.details.get("cards")
    # If a single sample does not fit, only another card helps.
    if state == GPU_OOM and end.details.get("one_sample") and cards and str(cards) not in end.message:
        parts.append(f"cards that would hold it: {cards}")
    return RunState(state, "; ".join(filter(None, parts)))


def _ended_by_slurm(cause: str, row: AccountRow, end: AttemptEnd | None) -> str:
    words = {
        TIME_LIMIT: f"its limit of {row.time_limit} was up" if row.time_limit else "",
        NODE_FAILURE: f"of {row.nodes}" if row.nodes else "",
        PREEMPTED: f"on {row.nodes}, by a job that comes before it" if row.nodes else "",
    }
    saved = ""
    if end is not None and end.ending in ("time_limit", "terminated", "interrupted"):
        saved = "saved before it ended" if end.has_saved else "before a checkpoint"
    # Why the job was not put back into the queue.
    message = end.message if end is not None and end.ending == "time_limit" else ""
    return ", ".join(filter(None, [words.get(cause), message or saved]))


def _exit_words(row: AccountRow) -> str:
    # A step's signal says more than the exit code that the batch script made of it.
    codes = [*(step.exit_code for step in row.steps), row.exit_code]
    signals = [int(text) for text in (code.partition(":")[2] for code in codes) if text.isdecimal()]
    number = next((signal_number for signal_number in signals if signal_number), 0)
    if number:
        names = {member.value: f" ({member.name})" for member in signal.Signals}
        return f"ended by signal {number}{names.get(number, '')}"
    code = row.exit_code.partition(":")[0]
    return f"exit code {code}" if code not in ("", "0") else "its job ended without a result"


# The state of a run: the first line that holds decides.
#
#   result.json is there                                     finished
#   a job of it waits in the queue                           queued; never started if its dependency cannot be met
#   a job of it has nodes                                    running, or suspended
#   its latest job or attempt belongs to SLURM:
#       SLURM does not answer, no conclusive end recorded    running, queued or cancelled, not certain
#       no attempt began                                     never started, cancelled, or how the job ended
#       an attempt began                                     how it ended (`classify_exit`)
#   its latest attempt is a process:
#       its process runs, or nobody here can know            running; not certain in the second case
#       its process is gone                                  how it ended (`classify_exit`)
#   its latest job is a process that began no attempt        running, or how it ended
#   no job was started for it                                never started

_UNOPENED: Final = "0:53"
"""Exit code of a job whose folder or log could not be opened: nothing ran."""
_MAY_RETURN: Final = ("terminated", "time_limit", "killed", "rank_gone", "in_use")
"""Endings after which a job may go back into the queue."""
_UNLAUNCHED: Final = "JobLaunchFailure"
"""SLURM's reason of a job with that exit code."""


def best_text(result: Mapping[str, Any]) -> str:
    """Says, from the content of `result.json`, which weights a run ended with; empty where it does not tell."""
    loss, epoch, value = (result.get(name) for name in ("best_validation_loss", "best_epoch", "best_value"))
    if not isinstance(loss, int | float):
        return ""
    name = result.get("best_by", "loss")
    figure = (
        f"validation loss {loss:.4g}" if name == "loss" or not isinstance(value, int | float) else f"{name} {value:.4g}"
    )
    kind = ", averaged weights" if result.get("weights") == "averaged" else ""
    if name != "loss" and value is None and "best_value" in result and result.get("keep") != "last":
        return f"no best {name}, which was never a finite number: validation loss {loss:.4g} after epoch {epoch}{kind}"
    return f"{'last' if result.get('keep') == 'last' else 'best'} {figure} after epoch {epoch}{kind}"


def infer_run_state(facts: RunFacts) -> RunState:
    """Returns the state of a run."""
    if facts.result is not None:
        return RunState(FINISHED, best_text(facts.result))
    row = live_row(facts)
    if row is not None:
        return _state_in_queue(row, facts)
    state = _state_after_queue(facts)
    if facts.is_closed and not state.live:
        closed = f"{facts.run.path}/result.json cannot be read"
        if facts.attempts:
            return replace(state, sentence="; ".join(filter(None, [state.sentence, closed])))
        return RunState(FAILED, f"{closed}, and with it how it ended", certain=False)
    if not facts.has_folder and not state.live:
        # The folder was deleted or moved: only SLURM can know how the run ended.
        rows = [final for job in slurm_jobs(facts) if (final := _final_row(job, facts)) is not None]
        gone = f"its folder {facts.run.path} is gone"
        if not rows:
            return RunState(FAILED, f"{gone}, and with it how it ended", certain=False)
        if rows[-1].state == "COMPLETED":
            return RunState(FINISHED, f"as SLURM says; {gone}")
        return replace(state, sentence="; ".join(filter(None, [state.sentence, gone])))
    if facts.is_damaged and not state.live:
        return RunState(FINISHED, "but its result.json is damaged")
    if state.state == FINISHED:
        return replace(state, sentence="but its result.json is gone")
    if state.state == REQUEUED:
        # The job was requeued, and left the queue again before this look.
        attempt = facts.attempts[-1] if facts.attempts else None
        if attempt is not None and _was_cancelled(attempt, facts):
            saved = ", saved" if attempt.end is not None and attempt.end.has_saved else ""
            return RunState(CANCELLED, f"while its job was put back into the queue{saved}")
        return RunState(FAILED, state.sentence or "it left the queue, and SLURM does not say why")
    return state


def infer_attempt_state(attempt: AttemptFacts, facts: RunFacts) -> RunState:
    """Returns the state that an attempt of a run ended in, or that it is running."""
    job = attempt.start.slurm_job
    is_last = attempt is facts.attempts[-1]
    if is_last and attempt.end is None:
        row = live_row(facts)
        if row is not None and row.job == job and row.state in scheduler.ACTIVE:
            return RunState(SUSPENDED if row.state in scheduler.SUSPENDED else RUNNING)
        if job is None and attempt.alive is not False:
            return _process_state(attempt, facts)
        if job is not None and job.cluster in facts.answer.silent:
            return _unanswered_state(attempt, job, facts)
    rows = [row for row in facts.answer.accounts if row.job == job]
    account = rows[attempt.start.restarts] if attempt.start.restarts < len(rows) else None
    if account is None or account.state in scheduler.UNFINISHED:
        account = _final_row(job, facts) if is_last and job is not None else None
    # The log in the facts belongs to the last job.
    log = facts.log_tail if is_last and job is not None else ""
    state = classify_exit(attempt, account, log, facts)
    if account is not None or log_causes(log) or not _may_be_put_back(attempt):
        return state
    if _came_back(attempt, facts):
        # SLURM is not asked about the jobs of a finished run, and its accounting lags by seconds.
        return RunState(REQUEUED, _recorded(attempt.end).sentence if attempt.end else "")
    row = live_row(facts)
    is_leaving = is_last and row is not None and row.job == job
    return replace(state, certain=not is_leaving or _was_cancelled(attempt, facts))


def _may_be_put_back(attempt: AttemptFacts) -> bool:
    """Returns whether the record of an attempt allows that SLURM ended it, to put its job back into the queue."""
    return attempt.start.slurm_job is not None and (attempt.end is None or attempt.end.ending == "terminated")


def _came_back(attempt: AttemptFacts, facts: RunFacts) -> bool:
    """Returns whether the job of an attempt waits again, or began a later attempt."""
    job, row = attempt.start.slurm_job, live_row(facts)
    if row is not None and row.job == job and row.state in scheduler.WAITING:
        return True
    return any(each.start.slurm_job == job and each.start.restarts > attempt.start.restarts for each in facts.attempts)


def _was_cancelled(attempt: AttemptFacts, facts: RunFacts) -> bool:
    """Returns whether a person cancelled the run by can-train after an attempt began."""
    return any(cancel.time >= attempt.start.start_time for cancel in facts.cancels)


def slurm_jobs(facts: RunFacts) -> list[JobId]:
    """Lists a run's SLURM jobs in order: the submitted jobs, and jobs in which a person started the run by hand."""
    submitted = [(record.time, record.slurm_job) for record in facts.jobs]
    entered = [(attempt.start.start_time, attempt.start.slurm_job) for attempt in facts.attempts]
    jobs = [(time, job) for time, job in (*submitted, *entered) if job is not None]
    return list(dict.fromkeys(job for _, job in sorted(jobs, key=itemgetter(0))))


def live_row(facts: RunFacts) -> scheduler.QueueRow | None:
    """Returns the row of the newest job of a run that waits or runs; None if there is none. A job that waits or runs
    only for the other runs of its pack does not count.
    """
    rows = {row.job: row for row in live_rows(facts)}
    return next((rows[job] for job in reversed(slurm_jobs(facts)) if job in rows), None)


def live_rows(facts: RunFacts) -> list[scheduler.QueueRow]:
    """Returns the rows of the jobs of a run that wait or run for it, and not only for other runs of a pack."""
    live = scheduler.WAITING | scheduler.ACTIVE
    return [row for row in facts.answer.queue if row.state in live and not _has_left(row.job, facts)]


def _has_left(job: JobId, facts: RunFacts) -> bool:
    """Returns whether a run has ended in a job of several runs (`--pack`), which will not train it again."""
    is_shared = any(record.slurm_job == job and record.packed_with > 1 for record in facts.jobs)
    ends = [attempt.end for attempt in facts.attempts if attempt.start.slurm_job == job]
    return is_shared and bool(ends) and ends[-1] is not None and ends[-1].ending not in REPEATED


def _state_in_queue(row: scheduler.QueueRow, facts: RunFacts) -> RunState:
    attempts = [attempt for attempt in facts.attempts if attempt.start.slurm_job == row.job]
    again = f"submitted again ({facts.jobs[-1].reason})" if facts.jobs and facts.jobs[-1].reason else ""
    if row.state in scheduler.WAITING:
        why = scheduler.reason_in_words(row.reason)
        if row.reason == scheduler.BEGIN_TIME:
            kept = "it was put back into the queue, and is held" if attempts else "its start was set for later"
            why = f"{kept}; it starts at {row.start.replace('T', ' ')} at the earliest" if row.start else kept
        if row.reason == scheduler.NEVER_SATISFIED and not attempts:
            return RunState(NEVER_STARTED, f"{why}; can-train cancel takes it out of the queue")
        history = f"before that: {_in_words(infer_attempt_state(attempts[-1], facts))}" if attempts else ""
        return RunState(QUEUED, "; ".join(filter(None, [why, history, again])))
    where = f"on {row.nodes}" if row.nodes else "in its job"
    last = attempts[-1] if attempts else None
    if last is not None and last.end is not None:
        # After SIGTERM, the job may be on its way back into the queue: SLURM preempts it.
        is_asked_to_leave = _may_be_put_back(last) and not _was_cancelled(last, facts)
        if _is_shared(facts) and last.end.ending == "terminated" and not is_asked_to_leave:
            # Its job may still train other runs.
            return _recorded(last.end)
        # The job is about to leave the queue or to be requeued, or its next attempt is about to begin.
        ended = _recorded(last.end).sentence if is_asked_to_leave else _in_words(_recorded(last.end))
        return RunState(RUNNING, f"{where}; an attempt ended ({ended}), its job has not")
    if row.state in scheduler.SUSPENDED:
        return RunState(SUSPENDED, f"{where}; it trains on when SLURM resumes its job")
    where, waits = (where, attempts[-1].waits_for) if attempts else (f"starting {where}", "")
    return RunState(RUNNING, "; ".join(filter(None, [where, waits, again])))


def _is_shared(facts: RunFacts) -> bool:
    """Tells whether the last job of a run trains other runs beside it (`--pack`)."""
    return bool(facts.jobs) and facts.jobs[-1].packed_with > 1


def _state_after_queue(facts: RunFacts) -> RunState:
    job = facts.jobs[-1] if facts.jobs else None
    attempt = facts.attempts[-1] if facts.attempts else None
    if job is not None and attempt is not None:
        # The clocks of two machines may differ: an attempt in the job is newer than the submission, regardless of
        # times.
        in_job = job.slurm_job is not None and attempt.start.slurm_job == job.slurm_job
        if not in_job and attempt.start.start_time < job.time:
            attempt = None
    slurm_job = attempt.start.slurm_job if attempt else job.slurm_job if job else None
    if slurm_job is None:
        return _process_state(attempt, facts)
    end = attempt.end if attempt else None
    # A job whose process stopped at a signal may have been requeued.
    if slurm_job.cluster in facts.answer.silent and (end is None or end.ending in _MAY_RETURN):
        return _unanswered_state(attempt, slurm_job, facts)
    row = _final_row(slurm_job, facts)
    if attempt is None:
        return _unstarted_job_state(row, facts)
    # The job may have come back, and failed before it began another attempt: SLURM had ended this one.
    num_starts = sum(account.job == slurm_job for account in facts.answer.accounts)
    is_earlier = num_starts > attempt.start.restarts + 1 and (end is None or end.ending == "terminated")
    came_back = is_earlier and row is not None and row.state == "FAILED"
    return classify_exit(None if came_back else attempt, row, facts.log_tail, facts)


def _unanswered_state(attempt: AttemptFacts | None, job: JobId, facts: RunFacts) -> RunState:
    """Returns the state of a run whose job is on a cluster that does not answer."""
    begins = [record.time for record in facts.jobs[-1:]] + ([attempt.start.start_time] if attempt else [])
    state = RUNNING if attempt and attempt.end is None else QUEUED
    # A job that can-train cancelled after it was submitted or began does not go back into the queue.
    if state == QUEUED and any(cancel.time >= max(begins) for cancel in facts.cancels):
        state = CANCELLED
    sentence = f"as far as its files say; {silence_in_words(job, facts.answer)}; {where_to_ask(job, facts.answer)}"
    return RunState(state, sentence, certain=False)


def silence_in_words(job: JobId, answer: SchedulerAnswer) -> str:
    """Returns a sentence that a cluster does not answer about a job, with the reason."""
    reason = answer.silent[job.cluster]
    if not job.cluster:
        return f"SLURM cannot be asked about its job {job.number}: {reason}"
    return f"cluster {job.cluster}, which has its job {job.number}, does not answer here ({reason.rstrip('.')})"


def where_to_ask(job: JobId, answer: SchedulerAnswer) -> str:
    """Returns advice where to ask a cluster that does not answer here."""
    if job.cluster in ("", answer.local):
        return "ask again in a minute" if job.cluster else "ask on the cluster where it was submitted"
    return f"ask on a login node of {job.cluster}" + ("" if answer.local else ", or here in a minute")


def _unstarted_job_state(row: AccountRow | None, facts: RunFacts) -> RunState:
    """Returns the state of a run whose job is over and began no attempt: it did not start, or failed early."""
    if row is None and not facts.log_tail:
        # SLURM forgets an element of an array that is cancelled while the array waits.
        if facts.cancels:
            return RunState(CANCELLED, "before it started")
        return RunState(NEVER_STARTED, "SLURM no longer knows its job, and it printed nothing")
    unopened = row is not None and (row.exit_code == _UNOPENED or row.reason == _UNLAUNCHED)
    if row is None or (row.nodes and not unopened):
        return classify_exit(None, row, facts.log_tail, facts)
    # SLURM itself cancels a job whose dependency failed, and names no person. squeue has that reason some seconds
    # before sacct.
    reasons = [row.reason, *(queued.reason for queued in facts.answer.queue if queued.job == row.job)]
    unmet = not row.by_person and any(reason.startswith("Dependency") for reason in reasons)
    if row.state == "CANCELLED" and not unmet:
        return RunState(CANCELLED, "before it started")
    reason = scheduler.NEVER_SATISFIED if unmet else _UNLAUNCHED if unopened else row.reason
    return RunState(NEVER_STARTED, scheduler.reason_in_words(reason))


def _final_row(job: JobId, facts: RunFacts) -> AccountRow | None:
    """Returns the last account of a job that has left the queue; None if SLURM has none."""
    rows = [row for row in facts.answer.accounts if row.job == job]
    if rows and rows[-1].state not in scheduler.UNFINISHED:
        return rows[-1]
    # The accounting lags by seconds, or is off altogether; the controller remembers the last minutes.
    left = [
        row for row in facts.answer.queue if row.job == job and row.state not in scheduler.WAITING | scheduler.ACTIVE
    ]
    if not left:
        return None
    last = left[-1]
    return AccountRow(job=job, state=last.state, nodes=last.nodes, time_limit=last.time_limit, reason=last.reason)


def _process_state(attempt: AttemptFacts | None, facts: RunFacts) -> RunState:
    """Returns the state of a run whose latest attempt, or job without an attempt, is a process outside SLURM."""
    if attempt is None and not facts.jobs:
        return RunState(NEVER_STARTED, "no job was started for it")
    alive, unseen = attempt.alive if attempt else facts.job_alive, "which cannot be seen from here"
    if alive is False or (attempt and attempt.end):
        return classify_exit(attempt, None, facts.log_tail, facts)
    if attempt is None:
        sentence = "starting" if alive else f"on {facts.jobs[-1].host}, {unseen}"
    else:
        sentence = f"process {attempt.start.pid} of {'this machine' if alive else f'{attempt.start.host}, {unseen}'}"
    return RunState(RUNNING, sentence, certain=bool(alive))


def _in_words(state: RunState) -> str:
    return f"{state.state}, {state.sentence}" if state.sentence else state.state
