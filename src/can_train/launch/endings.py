"""How one attempt of a run ended: a pure function of what its process could say, of what SLURM says of its job, and of
what SLURM wrote into its log. Who ended it from outside comes before what the process says of the consequences.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import Final

from can_train.launch.slurm_query import AccountRow
from can_train.launch.states import (
    CANCELLED,
    FAILED,
    FINISHED,
    GPU_OOM,
    HOST_OOM,
    NODE_FAILURE,
    PREEMPTED,
    REQUEUED,
    TIME_LIMIT,
    RunState,
)
from can_train.training.attempts import Ended

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


def how_it_ended(ended: Ended | None, row: AccountRow | None, log: str, *, asked: bool) -> RunState:
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


def _by_itself(ended: Ended) -> RunState:
    state, words = _SAID.get(ended.ending, (FAILED, ""))
    return RunState(state=state, sentence=_oom_words(ended) if state == GPU_OOM else ended.message or words)


def _oom_words(ended: Ended) -> str:
    """The error, and where one sample is too much the cards that would hold it."""
    cards = ended.details.get("cards")
    named = f"cards that would hold it: {cards}" if ended.details.get("one_sample") and cards else ""
    return "; ".join(filter(None, [ended.message, named if str(cards) not in ended.message else ""]))


def _memory_words(row: AccountRow | None) -> str:
    asked = f" ({row.memory} of each node)" if row and row.memory else ""
    return f"it needed more memory than its job had asked for{asked}"


def _outside_words(cause: str, row: AccountRow, ended: Ended | None) -> str:
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
