"""The status of runs: what is known of them, on disk, in this machine's processes and in SLURM, and what follows."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from can_train.errors import RunError, nearest_first
from can_train.io.atomic import is_folder
from can_train.io.processes import is_running, this_host
from can_train.io.records import utc_text
from can_train.slurm.client import AccountRow, QueueRow, SlurmAnswer, query_jobs
from can_train.slurm.run_state import AttemptFacts, RunFacts, RunState, infer_run_state, slurm_jobs
from can_train.training.attempts import Attempts
from can_train.training.run_folder import CONFIG, JobRecord, Registry, RunFolder, RunRecord

_STAMP: Final = "%Y%m%d-%H%M%S"
_STAMP_LENGTH: Final = 15
_YEAR_LENGTH: Final = 4

_TAIL_LENGTH: Final = 4
"""A run id is a time, a key, and four hexadecimal digits."""

_SUGGESTIONS: Final = 5
"""Run ids in an error message."""

_LOG_TAIL_BYTES: Final = 2**16
"""End of a log that is searched for what ended a run: some thousand lines."""

_EPOCHS: Final = re.compile(r"^training:\n(?:  .*\n)*?  epochs: (\d+)$", re.MULTILINE)
"""The setting in config.yaml, as `plain_to_yaml` writes it."""


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A run of the registry or of a folder of runs; without an entry there, `record` is made from the folder's name."""

    record: RunRecord
    folder: RunFolder

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.record.run_id


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run has come: optimizer steps done and epochs begun, of how many; None: not known.

    Attributes:
        saved_step: Step of the newest checkpoint.
        peak_share: Memory peak ÷ capacity.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    saved_step: int | None = None
    best_validation_loss: float | None = None
    peak_share: float | None = None
    safety_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run: what is known of it, what state that means, and how far it has come."""

    known: KnownRun
    facts: RunFacts
    state: RunState
    progress: RunProgress


def run_status(known: KnownRun, registry: Registry) -> RunStatus:
    """Finds out the status of one run (see `run_statuses`)."""
    return run_statuses([known], registry)[0]


def run_statuses(
    runs: Iterable[KnownRun], registry: Registry, query: Callable[[Iterable[str]], SlurmAnswer] = query_jobs
) -> list[RunStatus]:
    """Finds out the status of many runs, in their order, with one question to SLURM.

    Raises:
        StateError: The registry cannot be read.
    """
    local = [(known, _local_facts(known, registry)) for known in runs]
    answer = query(job_id for _, facts in local if facts.result is None for job_id in slurm_jobs(facts))
    # Grouped once: among hundreds of runs, searching all rows for each would be quadratic.
    queue, accounts = _by_job(answer.queue or ()), _by_job(answer.accounts or ())
    statuses = []
    for known, facts in local:
        jobs = slurm_jobs(facts)
        if jobs:
            own_rows = SlurmAnswer(
                queue=[row for job_id in jobs for row in queue.get(job_id, ())],
                accounts=[row for job_id in jobs for row in accounts.get(job_id, ())],
            )
            facts = replace(facts, answer=SlurmAnswer() if answer.queue is None else own_rows)
        progress = read_progress(known.folder, facts.result)
        statuses.append(RunStatus(known=known, facts=facts, state=infer_run_state(facts), progress=progress))
    return statuses


_Row = TypeVar("_Row", QueueRow, AccountRow)


def _by_job(rows: Iterable[_Row]) -> Mapping[str, Sequence[_Row]]:
    found = defaultdict(list)
    for row in rows:
        found[row.job_id].append(row)
    return found


def _local_facts(known: KnownRun, registry: Registry) -> RunFacts:
    """Collects what the files and this machine's processes say."""
    folder, jobs = known.folder, registry.jobs(known.run_id)
    try:
        result = folder.result()
    except (RunError, OSError):
        result = None
    # The result says all about the end of a finished run, and logs are long to read.
    last = jobs[-1] if jobs and result is None else None
    return RunFacts(
        run=known.record,
        jobs=jobs,
        cancels=registry.cancels(known.run_id),
        attempts=_attempts(folder),
        result=result,
        has_folder=is_folder(folder.path),
        job_alive=_job_alive(last) if last else None,
        log_tail=read_tail(log_path(last, known)) if last and last.log_path else "",
    )


def _attempts(folder: RunFolder) -> list[AttemptFacts]:
    attempts = Attempts(folder.path)
    try:
        facts = [AttemptFacts(start=start, end=attempts.end(start.attempt)) for start in attempts.starts()]
    except (OSError, ValueError, TypeError):
        # A damaged record must not hide the run: the other facts decide.
        return []
    if facts and facts[-1].end is None and not facts[-1].start.job_id:
        facts[-1] = replace(facts[-1], alive=facts[-1].start.is_running())
    return facts


def _job_alive(job: JobRecord) -> bool | None:
    """Whether the process that is a job runs; None: the job is SLURM's, or another machine's."""
    if job.executor == "slurm" or job.host != this_host() or not job.job_id.isdecimal():
        return None
    return is_running(int(job.job_id), job.time)


def log_path(job: JobRecord, known: KnownRun) -> Path:
    """Returns the path of a job's log; a log inside a run's folder moves with the folder."""
    path, before = Path(job.log_path), Path(known.record.path)
    return known.folder.path / path.relative_to(before) if path.is_relative_to(before) else path


def read_tail(log: Path) -> str:
    """Reads the end of a log; empty where it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# Which runs there are, and what they are called


def known_runs(registry: Registry, runs_dir: Path) -> list[KnownRun]:
    """Lists the runs of the registry and those in `runs_dir` that it does not contain, the newest first.

    Raises:
        StateError: The registry cannot be read.
    """
    records = {record.run_id: record for record in registry.runs()}
    folders = {path.parent.name: path.parent for path in runs_dir.glob(f"*/{CONFIG}")}
    found = [_unregistered(path) for run_id, path in folders.items() if run_id not in records]
    for record in records.values():
        # Some move the folder of runs and name the new place: the registry's path is then the old one.
        path, moved = Path(record.path), folders.get(record.run_id)
        found.append(KnownRun(record=record, folder=RunFolder(moved if moved and not is_folder(path) else path)))
    return sorted(found, key=lambda known: (known.record.time, known.run_id), reverse=True)


def short_name(run_id: str) -> str:
    """Shortens a run id to day, time and last digits, which distinguish it from others of the same second.

    Example:
        >>> short_name("20260728-101500-hcrl_ch_gat_student_normal-3fa9")
        '0728-101500-3fa9'
    """
    return f"{run_id[_YEAR_LENGTH:_STAMP_LENGTH]}-{run_id[-_TAIL_LENGTH:]}" if _creation_time(run_id) else run_id


def find_run(runs: Sequence[KnownRun], name: str) -> KnownRun:
    """Finds a run by its id, its short name, an unambiguous beginning of its id, or its folder.

    Raises:
        RunError: There is no such run, or several; the message lists them, nearest first.
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
    nearest = ", ".join(nearest_first(name, (known.run_id for known in runs))[:_SUGGESTIONS])
    remedy = f"Nearest: {nearest}" if nearest else "No run is there yet; --runs-dir and --state-dir name other folders"
    raise RunError("There is no such run", value=repr(name), remedy=remedy)


def _unregistered(path: Path) -> KnownRun:
    run_id = path.name
    time = _creation_time(run_id)
    key = run_id[_STAMP_LENGTH + 1 : -_TAIL_LENGTH - 1] if time else run_id
    # A folder that a person renamed has no time in its name.
    created = time or datetime.fromtimestamp((path / CONFIG).stat().st_mtime)
    record = RunRecord(run_id=run_id, path=str(path.resolve()), key=key, time=utc_text(created.astimezone()))
    return KnownRun(record=record, folder=RunFolder(path))


def _creation_time(run_id: str) -> datetime | None:
    """Reads the time from a run id; None where can-train did not make the name."""
    if len(run_id) <= _STAMP_LENGTH + _TAIL_LENGTH + 2:
        return None
    try:
        return datetime.strptime(run_id[:_STAMP_LENGTH], _STAMP)
    except ValueError:
        return None


# How far a run has come


def read_progress(folder: RunFolder, result: Mapping[str, Any] | None) -> RunProgress:
    """Reads how far a run has come; a file that is missing or damaged leaves its values unknown.

    Args:
        folder: Of the run.
        result: The content of its `result.json`, None where it has not finished; the caller has it already.
    """
    if result is not None:
        steps, epochs = _integer(result, "steps"), _integer(result, "epochs")
        return RunProgress(
            step=steps,
            steps=steps,
            epoch=epochs,
            epochs=epochs,
            saved_step=steps,
            best_validation_loss=_number(result, "best_validation_loss"),
            peak_share=_number(result, "peak_memory_pct"),
            safety_factor=_number(result, "plan", "plan", "safety_factor"),
        )
    metrics = [_json(line) for line in _text(folder.metrics_path).splitlines()]
    plan = _json(_text(folder.plan_path)).get("plan")
    saved_step = _integer(_json(_text(folder.checkpoints_path / "manifest.json")), "checkpoints", 0, "step")
    steps_per_epoch = _number(plan, "mean_steps_per_epoch") or _number(plan, "steps_per_epoch")
    # By its pattern: parsing the whole configuration takes as long as all else about a run.
    setting = _EPOCHS.search(_text(folder.path / CONFIG)) if plan else None
    epochs = int(setting[1]) if setting else None
    last: Mapping[str, Any] = next((line for line in reversed(metrics) if line), {})
    done = [step for step in (_integer(last, "step"), saved_step) if step is not None]
    losses = [loss for line in metrics if (loss := _number(line, "validation_loss")) is not None]
    peaks = [peak for line in metrics if (peak := _number(line, "peak_memory_pct")) is not None]
    return RunProgress(
        step=max(done, default=None),
        steps=round(steps_per_epoch * epochs) if steps_per_epoch and epochs else None,
        epoch=_integer(last, "epoch"),
        epochs=epochs,
        saved_step=saved_step,
        best_validation_loss=min(losses, default=None),
        peak_share=peaks[-1] if peaks else None,
        safety_factor=_number(plan, "safety_factor"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _json(text: str) -> Mapping[str, Any]:
    """Parses an object; anything else, as a line that is still being written, has no values."""
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _number(values: Any, *path: str | int) -> float | None:
    """Returns the number at a path of keys and indices; None: there is none."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return float(values) if isinstance(values, int | float) and not isinstance(values, bool) else None


def _integer(values: Any, *path: str | int) -> int | None:
    number = _number(values, *path)
    return int(number) if number is not None and number.is_integer() else None
