"""Finds out what is known of runs: the registry's entries, their folders, their processes and their jobs, all jobs with
one question to SLURM. What it means, `judge` decides.
"""

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from can_train.errors import RunError, nearest_first
from can_train.launch.judge import judge, slurm_jobs
from can_train.launch.processes import is_alive
from can_train.launch.programs import tail
from can_train.launch.progress import Progress, read_progress
from can_train.launch.slurm_query import Answer, ask
from can_train.launch.states import AttemptFacts, Evidence, RunState
from can_train.state.documents import utc_text
from can_train.state.folders import is_file, is_folder
from can_train.state.registry import JobRecord, Registry, RunRecord
from can_train.training.attempts import Attempts
from can_train.training.run_folder import CONFIG, RunFolder

_STAMP: Final = "%Y%m%d-%H%M%S"
_STAMP_LENGTH: Final = 15
_YEAR_LENGTH: Final = 4
_TAIL_LENGTH: Final = 4
"""A run id is a time, a key, and four digits."""

_NAMED: Final = 5
"""Runs that a message names."""


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A run that the registry or a folder of runs knows.

    Attributes:
        record: The registry's entry, or one made of its folder's name.
        folder: Where it is, or was.
    """

    record: RunRecord
    folder: RunFolder

    @property
    def run_id(self) -> str:
        """Its name."""
        return self.record.run_id


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """All about a run.

    Attributes:
        known: The run.
        evidence: What is known of it.
        state: What that means.
        progress: How far it has come.
    """

    known: KnownRun
    evidence: Evidence
    state: RunState
    progress: Progress


def known_runs(registry: Registry, runs_dir: Path) -> list[KnownRun]:
    """Lists the registry's runs and those of a folder that it does not know, the newest first.

    Raises:
        StateError: The registry cannot be read.
    """
    records = {record.run_id: record for record in registry.runs()}
    folders = {path.parent.name: path.parent for path in runs_dir.glob(f"*/{CONFIG}")}
    found = [_registered(record, folders) for record in records.values()]
    found += [_unregistered(path) for run_id, path in folders.items() if run_id not in records]
    return sorted(found, key=lambda known: (known.record.time, known.run_id), reverse=True)


def short_name(run_id: str) -> str:
    """Shortens a run id to the day, the time and its last digits, which tell it from others of the same second.

    Example:
        >>> short_name("20260728-101500-hcrl_ch_gat_student_normal-3fa9")
        '0728-101500-3fa9'
    """
    return f"{run_id[_YEAR_LENGTH:_STAMP_LENGTH]}-{run_id[-_TAIL_LENGTH:]}" if _made(run_id) else run_id


def find_run(runs: Sequence[KnownRun], name: str) -> KnownRun:
    """Finds a run by its id, its short name, an unambiguous beginning of its id, or its folder.

    Raises:
        RunError: There is no such run, or several begin like this; the message lists them, nearest first.
    """
    path = Path(name)
    if (path / CONFIG).is_file():
        here = path.resolve()
        return next((known for known in runs if known.folder.path.resolve() == here), None) or _unregistered(here)
    exact = [known for known in runs if name in (known.run_id, short_name(known.run_id))]
    matching = exact or [known for known in runs if name and known.run_id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        listed = ", ".join(sorted(known.run_id for known in matching))
        raise RunError("Several runs begin like this", value=repr(name), remedy=f"One of: {listed}")
    nearest = ", ".join(nearest_first(name, (known.run_id for known in runs))[:_NAMED])
    remedy = f"Nearest: {nearest}" if nearest else "No run is there yet; --runs-dir and --state-dir name other folders"
    raise RunError("There is no such run", value=repr(name), remedy=remedy)


def survey(
    runs: Iterable[KnownRun], registry: Registry, asking: Callable[[Iterable[str]], Answer] = ask
) -> list[Surveyed]:
    """Finds out about runs, in their order.

    Args:
        runs: From `known_runs`.
        registry: Where their jobs are.
        asking: Asks SLURM about jobs.

    Raises:
        StateError: The registry cannot be read.
    """
    gathered = [(known, _gathered(known, registry)) for known in runs]
    open_jobs = [job_id for _, evidence in gathered if evidence.result is None for job_id in slurm_jobs(evidence)]
    answer = _by_job(asking(open_jobs))
    return [_surveyed(known, _answered(evidence, answer)) for known, evidence in gathered]


def log_of(job: JobRecord, known: KnownRun) -> Path:
    """Names the log of a job; where the run's folder has moved, it has moved with it."""
    path, before = Path(job.log_path), Path(known.record.path)
    return known.folder.path / path.relative_to(before) if path.is_relative_to(before) else path


def _registered(record: RunRecord, folders: dict[str, Path]) -> KnownRun:
    path = Path(record.path)
    moved = folders.get(record.run_id)
    # One run whose folder cannot be read does not hide all others.
    return KnownRun(record=record, folder=RunFolder(moved if moved and not is_folder(path) else path))


def _unregistered(path: Path) -> KnownRun:
    run_id = path.name
    time = datetime.strptime(run_id[:_STAMP_LENGTH], _STAMP) if _made(run_id) else None
    if time is None:
        time = datetime.fromtimestamp((path / CONFIG).stat().st_mtime)
    key = run_id[_STAMP_LENGTH + 1 : -_TAIL_LENGTH - 1] if _made(run_id) else run_id
    record = RunRecord(run_id=run_id, path=str(path.resolve()), key=key, time=utc_text(time.astimezone()))
    return KnownRun(record=record, folder=RunFolder(path))


def _made(run_id: str) -> bool:
    """Whether a name is one that can-train makes."""
    try:
        datetime.strptime(run_id[:_STAMP_LENGTH], _STAMP)
    except ValueError:
        return False
    return len(run_id) > _STAMP_LENGTH + _TAIL_LENGTH + 2


def _gathered(known: KnownRun, registry: Registry) -> Evidence:
    """Collects what the files and the processes of this machine say."""
    folder = known.folder
    jobs = registry.jobs(known.run_id)
    result = _result(folder)
    last = jobs[-1] if jobs else None
    return Evidence(
        run=known.record,
        jobs=jobs,
        cancels=registry.cancels(known.run_id),
        attempts=_attempts(folder),
        result=result,
        present=is_folder(folder.path),
        worked=is_file(folder.path / "attempts.jsonl"),
        job_alive=_job_alive(last) if last is not None and result is None else None,
        log_tail=tail(log_of(last, known)) if last is not None and last.log_path and result is None else "",
    )


def _attempts(folder: RunFolder) -> list[AttemptFacts]:
    attempts = Attempts(folder.path)
    try:
        facts = [AttemptFacts(began=began, ended=attempts.ended(began.attempt)) for began in attempts.began()]
    except (OSError, ValueError, TypeError):
        # Damaged, or of another version: what the others say must do.
        return []
    if not facts or facts[-1].ended is not None or facts[-1].began.job_id:
        return facts
    began = facts[-1].began
    alive = is_alive(began.pid, began.time) if began.host == socket.gethostname() else None
    return [*facts[:-1], replace(facts[-1], alive=alive)]


def _job_alive(job: JobRecord) -> bool | None:
    """Tells whether the process of a job is there; None: it is of SLURM, or of another machine."""
    if job.executor == "slurm" or job.host != socket.gethostname() or not job.job_id.isdecimal():
        return None
    return is_alive(int(job.job_id), job.time)


def _result(folder: RunFolder) -> dict[str, Any] | None:
    try:
        result = folder.result()
    except (RunError, OSError):
        return None
    return result if isinstance(result, dict) else None


def _by_job(answer: Answer) -> Callable[[str], Answer]:
    """Orders what SLURM said by jobs: of hundreds of runs nobody looks through everything for each."""
    queue, accounts = defaultdict(list), defaultdict(list)
    for row in answer.queue or ():
        queue[row.job_id].append(row)
    for account in answer.accounts or ():
        accounts[account.job_id].append(account)
    return lambda job_id: Answer(
        queue=None if answer.queue is None else queue.get(job_id, ()),
        accounts=None if answer.accounts is None else accounts.get(job_id, ()),
    )


def _answered(evidence: Evidence, answer: Callable[[str], Answer]) -> Evidence:
    """Gives a run what SLURM said of its own jobs."""
    mine = [answer(job_id) for job_id in slurm_jobs(evidence)]
    if any(each.queue is None for each in mine):
        return replace(evidence, answer=Answer())
    queue = [row for each in mine for row in each.queue or ()]
    accounts = [row for each in mine for row in each.accounts or ()]
    return replace(evidence, answer=Answer(queue=queue, accounts=accounts))


def _surveyed(known: KnownRun, evidence: Evidence) -> Surveyed:
    progress = read_progress(known.folder, evidence.result)
    return Surveyed(known=known, evidence=evidence, state=judge(evidence), progress=progress)
