"""`can-train runs` and `can-train status RUN`: the states of runs, as tables and as JSON."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from can_train.cli.command import command_of
from can_train.cli.output import (
    TextTable,
    duration,
    finite,
    local_time,
    print_tables,
    rough_duration,
    seconds_between,
)
from can_train.cli.ranking import RankedResult, rank
from can_train.cli.run_locator import AsJson, Run, RunLocator, RunsDir, StateDir
from can_train.errors import ConfigError
from can_train.slurm.run_state import QUEUED, RUNNING, AttemptFacts, infer_attempt_state, live_row
from can_train.slurm.status import RunStatus, log_path, run_statuses, short_name

_LIMIT: Final = 20
"""Runs that are listed unless more are asked for: what fits a terminal."""

_WATCH_INTERVAL_S: Final = 5.0
"""Seconds between two questions to SLURM, whose controller everybody shares."""

_CLEAR: Final = "\x1b[H\x1b[2J"
"""Control sequence that empties a terminal."""

_COLUMNS: Final = ("run", "configuration", "state", "time", "epoch", "loss")
"""They fit a terminal of 80 columns; steps and all else are in `status` and in the JSON."""


@dataclass(frozen=True, kw_only=True)
class RunsRequest:
    """The options of `can-train runs`."""

    limit: Annotated[int, typer.Option(help="Newest runs that are listed; 0: all.", min=0)] = _LIMIT
    best: Annotated[str | None, typer.Option(help="Rank finished runs by a metric: mcc.", metavar="METRIC")] = None
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds, until Ctrl-C.")] = False
    as_json: AsJson = False
    runs_dir: RunsDir = "runs"
    state_dir: StateDir = None


def make_runs_command() -> Callable[..., None]:
    """Makes the command."""
    return command_of(RunsRequest, _runs)


def _runs(request: RunsRequest) -> None:
    """List runs, the newest first, with what became of them."""
    locator, limit = RunLocator(request.runs_dir, request.state_dir), request.limit
    if request.watch and (request.as_json or request.best is not None):
        other = "--json" if request.as_json else "--best"
        raise ConfigError("--watch shows the table", value=f"--watch {other}", remedy="Give one of them")
    if request.best is not None:
        _print_best(locator, request.best, limit, as_json=request.as_json)
    elif request.watch:
        _watch(locator, limit)
    elif request.as_json:
        _print_json([run_json(status) for status in _newest(locator, limit)[0]])
    else:
        _print_runs(*_newest(locator, limit), locator)


def status(run: Run, as_json: AsJson = False, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Show the state of a run, and how it came to it."""
    locator = RunLocator(runs_dir, state_dir)
    found = locator.status(locator.find(run))
    if as_json:
        _print_json(run_json(found))
        return
    print("\n".join(_status_lines(found)))
    print_tables(_history_tables(found))


def _print_json(values: Any) -> None:
    print(json.dumps(values, indent=2, ensure_ascii=False))


def _newest(locator: RunLocator, limit: int) -> tuple[list[RunStatus], int]:
    """Returns the status of the newest runs, and how many older ones there are."""
    known = locator.runs()
    chosen = known[:limit] if limit else known
    return run_statuses(chosen, locator.registry), len(known) - len(chosen)


def _print_runs(statuses: Sequence[RunStatus], older: int, locator: RunLocator) -> None:
    if not statuses:
        print(f"No run is there yet, neither in {locator.runs_dir} nor in the state folder.")
        print("can-train --help shows how to start one.")
        return
    rows = []
    for each in statuses:
        seconds, loss = _seconds(each), each.progress.best_validation_loss
        epoch, epochs = each.progress.epoch, each.progress.epochs
        rows.append((
            short_name(each.known.run_id),
            each.known.record.key,
            each.state.label,
            rough_duration(seconds) if seconds is not None else "",
            _done_of(0 if epoch is None and epochs else epoch, epochs),
            f"{loss:.3g}" if loss is not None else "",
        ))  # fmt: skip
    notes = [f"{older} older: can-train runs --limit {older + len(statuses)}"] if older else []
    print_tables([TextTable("Runs", _COLUMNS, rows, notes)])


def _watch(locator: RunLocator, limit: int) -> None:
    """Redraws a terminal until Ctrl-C; a pipe gets a line for each run whose state has changed."""
    before: dict[str, str] = {}
    try:
        while True:
            statuses, older = _newest(locator, limit)
            states = {each.known.run_id: str(each.state) for each in statuses}
            if sys.stdout.isatty():
                print(_CLEAR, end="")
                _print_runs(statuses, older, locator)
            else:
                for run_id in reversed(states):
                    if before.get(run_id) != states[run_id]:
                        print(f"{run_id}  {states[run_id]}", flush=True)
            before = states
            time.sleep(_WATCH_INTERVAL_S)
    except KeyboardInterrupt:
        return


def _print_best(locator: RunLocator, metric: str, limit: int, *, as_json: bool) -> None:
    finished = [each for each in _newest(locator, 0)[0] if each.facts.result is not None]
    if not finished:
        raise ConfigError("No run has finished yet, so none is best", remedy="can-train runs lists those there are")
    ranked = rank([each.facts.result or {} for each in finished], metric)
    best = [(finished[one.index], one) for one in (ranked[:limit] if limit else ranked)]
    if as_json:
        _print_json([
            {**run_json(each), "metric": metric, "value": one.value, "parts": finite(one.parts)} for each, one in best
        ])  # fmt: skip
    else:
        print_tables([_best_table(best, metric)])


def _best_table(best: Sequence[tuple[RunStatus, RankedResult]], metric: str) -> TextTable:
    num_parts = max(len(one.parts) for _, one in best)
    columns = ("run", "configuration", metric, *(("lowest", "highest") if num_parts > 1 else ()))
    rows = []
    for each, one in best:
        extremes = (min(one.parts.values()), max(one.parts.values())) if num_parts > 1 else ()
        figures = [f"{value:.4g}" for value in (one.value, *extremes)]
        rows.append((short_name(each.known.run_id), each.known.record.key, *figures))
    notes = [f"{metric} is the mean over {num_parts} test sets"] if num_parts > 1 else []
    return TextTable(f"Best by {metric}", columns, rows, notes)


def _status_lines(found: RunStatus) -> list[str]:
    record, progress, jobs = found.known.record, found.progress, found.facts.jobs
    seconds, loss = _seconds(found), progress.best_validation_loss
    is_resumable = not found.state.live and found.facts.result is None and found.facts.has_folder
    steps = [
        f"step {_done_of(progress.step, progress.steps)}" if progress.step is not None else "",
        f"epoch {_done_of(progress.epoch, progress.epochs)}" if progress.epoch is not None else "",
        f"saved at step {progress.saved_step}" if progress.saved_step is not None else "",
    ]
    memory = [
        f"peak {progress.peak_share:.1%} of what is usable" if progress.peak_share is not None else "",
        f"safety factor {progress.safety_factor:.4g}" if progress.safety_factor is not None else "",
    ]
    lines = {
        "run": record.run_id,
        "state": str(found.state),
        "time": duration(seconds) if seconds is not None else "",
        "progress": ", ".join(filter(None, steps)),
        "loss": f"{loss:.4g} at best in validation" if loss else "",
        "memory": ", ".join(filter(None, memory)),
        "folder": str(found.known.folder.path),
        "log": str(log_path(jobs[-1], found.known)) if jobs and jobs[-1].log_path else "",
        "after": record.after,
        "sweep": record.sweep,
        "to go on": f"can-train resume {short_name(record.run_id)}" if is_resumable else "",
    }
    width = max(map(len, lines))
    return [f"{name:<{width}}  {text}" for name, text in lines.items() if text]


def _history_tables(found: RunStatus) -> list[TextTable]:
    jobs = [
        (job.job_id, job.executor, local_time(job.time),
         " ".join(f"{name}={value}" for name, value in job.resources.items()), job.reason)
        for job in found.facts.jobs
    ]  # fmt: skip
    attempts = [
        (
            str(attempt.start.attempt),
            attempt.start.job_id or f"process {attempt.start.pid}",
            attempt.start.host,
            local_time(attempt.start.start_time),
            duration(seconds_between(attempt.start.start_time, attempt.end.time)) if attempt.end else "",
            str(infer_attempt_state(attempt, found.facts)),
        )
        for attempt in found.facts.attempts
    ]
    tables = [
        TextTable("Jobs", ("job", "executor", "submitted", "asked for", "why again"), jobs),
        TextTable("Attempts", ("attempt", "job", "host", "began", "took", "ending"), attempts),
    ]
    return [table for table in tables if table.rows]


def run_json(found: RunStatus) -> dict[str, Any]:
    """Makes the JSON object of a run."""
    record, facts = found.known.record, found.facts
    row = live_row(facts)
    restarts: dict[str, int] = {}
    for attempt in facts.attempts:
        job_id = attempt.start.job_id
        restarts[job_id] = max(restarts.get(job_id, 0), attempt.start.restarts)
    values = {
        "run_id": record.run_id,
        "short_name": short_name(record.run_id),
        "key": record.key,
        "path": str(found.known.folder.path),
        "made": record.time,
        "after": record.after or None,
        "sweep": record.sweep or None,
        "state": found.state.state,
        "why": found.state.sentence,
        "certain": found.state.certain,
        "live": found.state.live,
        "seconds": _seconds(found),
        "job_id": facts.jobs[-1].job_id if facts.jobs else None,
        "nodes": row.nodes or None if row else None,
        "restarts": sum(restarts.values()),
        "resubmissions": max(0, len(facts.jobs) - 1),
        **vars(found.progress),
        "jobs": [vars(job) for job in facts.jobs],
        "attempts": [_attempt_json(attempt, found) for attempt in facts.attempts],
    }
    return {name: finite(value) for name, value in values.items()}


def _attempt_json(attempt: AttemptFacts, found: RunStatus) -> dict[str, Any]:
    start, end, state = attempt.start, attempt.end, infer_attempt_state(attempt, found.facts)
    return {
        **{name: getattr(start, name) for name in ("attempt", "job_id", "restarts", "host", "pid")},
        "time": start.start_time,
        "ended": end.time if end else None,
        "state": state.state,
        "why": state.sentence,
    }


def _seconds(found: RunStatus) -> float | None:
    """Returns how long a run has waited, or worked from its first attempt to its last; None: not known."""
    attempts, jobs, state = found.facts.attempts, found.facts.jobs, found.state.state
    if jobs and (state == QUEUED or (state == RUNNING and not attempts)):
        return seconds_between(jobs[-1].time)
    if not attempts:
        return None
    began, end = attempts[0].start.start_time, attempts[-1].end
    if state == RUNNING:
        return seconds_between(began)
    return seconds_between(began, end.time) if end is not None else None


def _done_of(done: int | None, total: int | None) -> str:
    if done is None:
        return ""
    return f"{done}/{total}" if total else str(done)
