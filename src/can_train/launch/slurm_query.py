"""Asks SLURM what became of jobs: squeue for what is in the queue or has just left it, sacct for what the accounting
keeps. Reading text and calling programs are two things; a SLURM that does not answer is an answer, not an error.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from can_train.launch.programs import said_by

_TIMEOUT_S: Final = 10.0
"""Longest wait for one program: a controller that is down is otherwise asked again for a minute and more."""

_SQUEUE_FIELDS: Final = "%i|%T|%r|%N|%S|%l"
_SACCT_FIELDS: Final = "JobID,State,ExitCode,Start,End,NodeList,Timelimit,ReqMem,Reason"
"""None of them is text of a user, which could hold the separator."""

_UNKNOWN_JOB: Final = "Invalid job id"
"""What squeue says, with an exit code of 1, when it has never heard of the only job that it was asked about."""

_JOB_ID: Final = re.compile(r"\d+(_\d+)?")

_NOTHING: Final = frozenset(("", "None", "N/A", "Unknown", "None assigned", "(null)", "n/a"))
"""How SLURM writes that there is none."""

WAITING: Final = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
"""States of a job that waits."""

AT_WORK: Final = frozenset(
    ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
)
"""States of a job that has nodes."""

UNFINISHED: Final = AT_WORK | {"PENDING"}
"""States in the accounting of an attempt that goes on; REQUEUED, there, is one that has ended."""


@dataclass(frozen=True, kw_only=True)
class QueueRow:
    """A job as squeue has it.

    Attributes:
        job_id: 123, or 123_4 for an element of an array.
        state: In SLURM's word: PENDING, RUNNING, COMPLETED.
        reason: Why it waits, or ended, in SLURM's word; empty: none.
        nodes: Where it runs or ran; empty: it never started.
        start: When it started or is expected to, in local time; empty: not known.
        time_limit: As SLURM writes it.
    """

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    time_limit: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the accounting has of a step: `batch`, `extern`, or the number of an srun."""

    name: str
    state: str
    exit_code: str


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """One attempt of a job as sacct has it: a job that was put back into the queue has several.

    Attributes:
        job_id: 123, or 123_4 for an element of an array.
        state: In SLURM's first word: CANCELLED, not "CANCELLED by 1000".
        exit_code: `code:signal`.
        nodes: Where it ran; empty: it never started.
        start: In local time; empty: it never started.
        end: In local time; empty: it has not ended.
        time_limit: As SLURM writes it.
        memory: What was asked for.
        reason: Why it last waited, in SLURM's word; empty: none.
        by_person: Whether the state names who cancelled it.
        steps: Its steps.
    """

    job_id: str
    state: str
    exit_code: str = ""
    nodes: str = ""
    start: str = ""
    end: str = ""
    time_limit: str = ""
    memory: str = ""
    reason: str = ""
    by_person: bool = False
    steps: Sequence[Step] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What SLURM said of some jobs.

    Attributes:
        queue: squeue's rows; None: it does not answer.
        accounts: sacct's rows, the attempts of a job in their order; None: it does not answer.
    """

    queue: Sequence[QueueRow] | None = None
    accounts: Sequence[AccountRow] | None = None


def ask(job_ids: Iterable[str]) -> Answer:
    """Asks about all jobs at once: one call of squeue and one of sacct, each with a time limit.

    Args:
        job_ids: 123 or 123_4; what cannot be a job of SLURM is passed over.
    """
    jobs = ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids if _JOB_ID.fullmatch(job_id)}))
    if not jobs:
        return Answer(queue=(), accounts=())
    # Of all states: jobs that ended minutes ago are still there, sooner than in the accounting and where there is none.
    queue = _output(
        ["squeue", "--all", "--array", "--noheader", "--states=all", f"--jobs={jobs}", "-o", _SQUEUE_FIELDS]
    )
    if queue is None:
        # A controller that is down, or no SLURM at all: the accounting would only repeat what it last heard.
        return Answer()
    # Without jobs sacct would begin at midnight; without duplicates it would show the last attempt only.
    accounts = _output(["sacct", "--duplicates", "--noheader", "--parsable2", f"--jobs={jobs}", "-o", _SACCT_FIELDS])
    return Answer(queue=parse_squeue(queue), accounts=None if accounts is None else parse_sacct(accounts))


def parse_squeue(text: str) -> list[QueueRow]:
    """Reads what squeue printed; lines of another form are passed over."""
    found = []
    for line in text.splitlines():
        cells = [_clean(cell) for cell in line.split("|")]
        if len(cells) == _SQUEUE_FIELDS.count("|") + 1 and _JOB_ID.fullmatch(cells[0]):
            job_id, state, reason, nodes, start, time_limit = cells
            found.append(
                QueueRow(job_id=job_id, state=state, reason=reason, nodes=nodes, start=start, time_limit=time_limit)
            )
    return found


def parse_sacct(text: str) -> list[AccountRow]:
    """Reads what sacct printed, each step with the attempt before it; lines of another form are passed over."""
    rows: list[AccountRow] = []
    steps: list[list[Step]] = []
    for line in text.splitlines():
        cells = [_clean(cell) for cell in line.split("|")]
        if len(cells) != _SACCT_FIELDS.count(",") + 1:
            continue
        job_id, _, step = cells[0].partition(".")
        state = cells[1].partition(" ")[0].rstrip("+")
        if step:
            if rows and rows[-1].job_id == job_id:
                steps[-1].append(Step(name=step, state=state, exit_code=cells[2]))
        elif _JOB_ID.fullmatch(job_id):
            rows.append(_account(cells, state))
            steps.append([])
    return [AccountRow(**{**vars(row), "steps": tuple(its)}) for row, its in zip(rows, steps, strict=True)]


def _account(cells: Sequence[str], state: str) -> AccountRow:
    job_id, told, exit_code, start, end, nodes, time_limit, memory, reason = cells
    return AccountRow(
        job_id=job_id,
        state=state,
        exit_code=exit_code,
        nodes=nodes,
        start=start,
        end=end,
        time_limit=time_limit,
        memory=memory,
        reason=reason,
        by_person=" by " in told,
    )


def _clean(cell: str) -> str:
    cell = cell.strip()
    return "" if cell in _NOTHING else cell


def cancel_jobs(job_ids: Sequence[str]) -> str:
    """Cancels jobs.

    Returns:
        What scancel complained of; empty: nothing.
    """
    said = said_by(["scancel", *job_ids], seconds=_CANCEL_TIMEOUT_S, environment=_environment())
    return said.complaint.strip() if said.status != 0 else ""


_CANCEL_TIMEOUT_S: Final = 90.0
"""Longest wait for scancel, which waits up to 60 s for a job that is being completed."""


def _output(command: list[str]) -> str | None:
    """Runs a program; None where it is not there, fails, or does not answer in time."""
    said = said_by(command, seconds=_TIMEOUT_S, environment=_environment())
    if said.status:
        return "" if _UNKNOWN_JOB in said.complaint else None
    return said.output if said.status == 0 else None


def _environment() -> dict[str, str]:
    """The variables without a person's own filters and formats, which would change what is printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_"))}
    return {**kept, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
