"""Runs as tables and as JSON: what listings and `status` show of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from can_train.cli.looking import duration, in_one_unit, moment, seconds_between, shown, told
from can_train.cli.tables import TextTable
from can_train.launch.judge import judge_attempt, live_row
from can_train.launch.progress import Progress
from can_train.launch.states import QUEUED, RUNNING
from can_train.launch.survey import Surveyed, log_of, short_name

_COLUMNS: Final = ("run", "configuration", "state", "time", "epoch", "loss")
"""They fit a terminal of 80 columns; steps and all else are in `status` and in the JSON."""


def runs_table(runs: Sequence[Surveyed], older: int) -> TextTable:
    """Makes the table of runs.

    Args:
        runs: The newest first.
        older: Runs that are left out.
    """
    rows = [
        (
            short_name(each.known.run_id),
            each.known.record.key,
            shown(each.state),
            in_one_unit(seconds) if (seconds := seconds_of(each)) is not None else "",
            _epochs(each.progress),
            _figure(each.progress.best_validation_loss),
        )
        for each in runs
    ]
    notes = [f"{older} older: can-train runs --limit {older + len(runs)}"] if older else []
    return TextTable("Runs", _COLUMNS, rows, notes)


def run_lines(each: Surveyed) -> list[str]:
    """Writes what is known of a run as aligned lines."""
    record, progress = each.known.record, each.progress
    seconds = seconds_of(each)
    jobs = each.evidence.jobs
    resumable = not each.state.live and each.evidence.result is None and each.evidence.present
    lines = {
        "run": each.known.run_id,
        "state": told(each.state),
        "time": duration(seconds) if seconds is not None else "",
        "progress": _progress(progress),
        "loss": f"{progress.best_validation_loss:.4g} at best in validation" if progress.best_validation_loss else "",
        "memory": _memory(progress),
        "folder": str(each.known.folder.path),
        "log": str(log_of(jobs[-1], each.known)) if jobs and jobs[-1].log_path else "",
        "after": record.after,
        "sweep": record.sweep,
        "to go on": f"can-train resume {short_name(each.known.run_id)}" if resumable else "",
    }
    width = max(map(len, lines))
    return [f"{name:<{width}}  {text}" for name, text in lines.items() if text]


def history_tables(each: Surveyed) -> list[TextTable]:
    """Makes the tables of a run's jobs and of its attempts."""
    jobs = [
        (job.job_id, job.executor, moment(job.time), _asked(job.resources), job.reason) for job in each.evidence.jobs
    ]
    attempts = [
        (
            str(facts.began.attempt),
            facts.began.job_id or f"process {facts.began.pid}",
            facts.began.host,
            moment(facts.began.time),
            duration(seconds_between(facts.began.time, facts.ended.time)) if facts.ended else "",
            told(judge_attempt(facts, each.evidence)),
        )
        for facts in each.evidence.attempts
    ]
    tables = [
        TextTable("Jobs", ("job", "executor", "submitted", "asked for", "why again"), jobs),
        TextTable("Attempts", ("attempt", "job", "host", "began", "took", "ending"), attempts),
    ]
    return [table for table in tables if table.rows]


def run_json(each: Surveyed) -> dict[str, Any]:
    """Makes the JSON object of a run."""
    record, evidence = each.known.record, each.evidence
    row = live_row(evidence)
    values = {
        "run_id": record.run_id,
        "short_name": short_name(record.run_id),
        "key": record.key,
        "path": str(each.known.folder.path),
        "made": record.time,
        "after": record.after or None,
        "sweep": record.sweep or None,
        "state": each.state.state,
        "why": each.state.sentence,
        "certain": each.state.certain,
        "live": each.state.live,
        "seconds": seconds_of(each),
        "job_id": evidence.jobs[-1].job_id if evidence.jobs else None,
        "nodes": row.nodes or None if row else None,
        "restarts": restarts(each),
        "resubmissions": max(0, len(evidence.jobs) - 1),
        **vars(each.progress),
        "jobs": [vars(job) for job in evidence.jobs],
        "attempts": [_attempt_json(each, index) for index in range(len(evidence.attempts))],
    }
    return {name: strict(value) for name, value in values.items()}


def restarts(each: Surveyed) -> int:
    """Counts how often jobs of a run were put back into the queue, as far as attempts began after it."""
    most: dict[str, int] = {}
    for facts in each.evidence.attempts:
        most[facts.began.job_id] = max(most.get(facts.began.job_id, 0), facts.began.restarts)
    return sum(most.values())


def seconds_of(each: Surveyed) -> float | None:
    """Returns how long a run has waited, or worked from its first attempt to its last; None: not known."""
    attempts, jobs = each.evidence.attempts, each.evidence.jobs
    if each.state.state == QUEUED and jobs:
        return seconds_between(jobs[-1].time)
    if not attempts:
        return seconds_between(jobs[-1].time) if each.state.state == RUNNING and jobs else None
    began, ended = attempts[0].began.time, attempts[-1].ended
    if each.state.state == RUNNING:
        return seconds_between(began)
    return seconds_between(began, ended.time) if ended is not None else None


def strict(value: Any) -> Any:
    """Makes a value of JSON proper, which has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): strict(inner) for name, inner in value.items()}
    return [strict(inner) for inner in value] if isinstance(value, list | tuple) else value


def _attempt_json(each: Surveyed, index: int) -> dict[str, Any]:
    facts = each.evidence.attempts[index]
    ending = judge_attempt(facts, each.evidence)
    return {
        **vars(facts.began),
        "ended": facts.ended.time if facts.ended else None,
        "state": ending.state,
        "why": ending.sentence,
    }


def _of(done: int | None, total: int | None) -> str:
    if done is None:
        return ""
    return f"{done}/{total}" if total else str(done)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _epochs(progress: Progress) -> str:
    return _of(progress.epoch if progress.epoch is not None or not progress.epochs else 0, progress.epochs)


def _progress(progress: Progress) -> str:
    parts = [f"step {_of(progress.step, progress.steps)}" if progress.step is not None else ""]
    parts += [f"epoch {_of(progress.epoch, progress.epochs)}" if progress.epoch is not None else ""]
    parts += [f"saved at step {progress.saved_step}" if progress.saved_step is not None else ""]
    return ", ".join(filter(None, parts))


def _memory(progress: Progress) -> str:
    peak = f"peak {progress.peak_share:.1%} of what is usable" if progress.peak_share is not None else ""
    factor = f"safety factor {progress.safety_factor:.4g}" if progress.safety_factor is not None else ""
    return ", ".join(filter(None, [peak, factor]))


def _asked(resources: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in resources.items())
