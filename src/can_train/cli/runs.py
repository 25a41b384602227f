"""Runs as tables and as JSON: what listings and `status` show of them."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from can_train.cli.command import command_of
from can_train.cli.output import (
    TextTable,
    duration,
    in_one_unit,
    moment,
    print_tables,
    seconds_between,
    shown,
    strict,
    told,
)
from can_train.cli.run_locator import AsJson, Run, RunLocator, RunsDir, StateDir
from can_train.errors import ConfigError
from can_train.slurm.run_state import QUEUED, RUNNING, infer_attempt_state, live_row
from can_train.slurm.status import RankedResult, RunProgress, RunStatus, log_of, rank, run_statuses, short_name

_COLUMNS: Final = ("run", "configuration", "state", "time", "epoch", "loss")
"""They fit a terminal of 80 columns; steps and all else are in `status` and in the JSON."""


def runs_table(runs: Sequence[RunStatus], older: int) -> TextTable:
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


def run_lines(each: RunStatus) -> list[str]:
    """Writes what is known of a run as aligned lines."""
    record, progress = each.known.record, each.progress
    seconds = seconds_of(each)
    jobs = each.facts.jobs
    resumable = not each.state.live and each.facts.result is None and each.facts.present
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


def history_tables(each: RunStatus) -> list[TextTable]:
    """Makes the tables of a run's jobs and of its attempts."""
    jobs = [(job.job_id, job.executor, moment(job.time), _asked(job.resources), job.reason) for job in each.facts.jobs]
    attempts = [
        (
            str(facts.start.attempt),
            facts.start.job_id or f"process {facts.start.pid}",
            facts.start.host,
            moment(facts.start.start_time),
            duration(seconds_between(facts.start.start_time, facts.end.time)) if facts.end else "",
            told(infer_attempt_state(facts, each.facts)),
        )
        for facts in each.facts.attempts
    ]
    tables = [
        TextTable("Jobs", ("job", "executor", "submitted", "asked for", "why again"), jobs),
        TextTable("Attempts", ("attempt", "job", "host", "began", "took", "ending"), attempts),
    ]
    return [table for table in tables if table.rows]


def run_json(each: RunStatus) -> dict[str, Any]:
    """Makes the JSON object of a run."""
    record, facts = each.known.record, each.facts
    row = live_row(facts)
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
        "job_id": facts.jobs[-1].job_id if facts.jobs else None,
        "nodes": row.nodes or None if row else None,
        "restarts": restarts(each),
        "resubmissions": max(0, len(facts.jobs) - 1),
        **vars(each.progress),
        "jobs": [vars(job) for job in facts.jobs],
        "attempts": [_attempt_json(each, index) for index in range(len(facts.attempts))],
    }
    return {name: strict(value) for name, value in values.items()}


def restarts(each: RunStatus) -> int:
    """Counts how often jobs of a run were put back into the queue, as far as attempts began after it."""
    most: dict[str, int] = {}
    for facts in each.facts.attempts:
        most[facts.start.job_id] = max(most.get(facts.start.job_id, 0), facts.start.restarts)
    return sum(most.values())


def seconds_of(each: RunStatus) -> float | None:
    """Returns how long a run has waited, or worked from its first attempt to its last; None: not known."""
    attempts, jobs = each.facts.attempts, each.facts.jobs
    if each.state.state == QUEUED and jobs:
        return seconds_between(jobs[-1].time)
    if not attempts:
        return seconds_between(jobs[-1].time) if each.state.state == RUNNING and jobs else None
    began, ended = attempts[0].start.start_time, attempts[-1].end
    if each.state.state == RUNNING:
        return seconds_between(began)
    return seconds_between(began, ended.time) if ended is not None else None


def _attempt_json(each: RunStatus, index: int) -> dict[str, Any]:
    facts = each.facts.attempts[index]
    ending = infer_attempt_state(facts, each.facts)
    return {
        **{name: getattr(facts.start, name) for name in ("attempt", "job_id", "restarts", "host", "pid")},
        "time": facts.start.start_time,
        "ended": facts.end.time if facts.end else None,
        "state": ending.state,
        "why": ending.sentence,
    }


def _of(done: int | None, total: int | None) -> str:
    if done is None:
        return ""
    return f"{done}/{total}" if total else str(done)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _epochs(progress: RunProgress) -> str:
    return _of(progress.epoch if progress.epoch is not None or not progress.epochs else 0, progress.epochs)


def _progress(progress: RunProgress) -> str:
    parts = [f"step {_of(progress.step, progress.steps)}" if progress.step is not None else ""]
    parts += [f"epoch {_of(progress.epoch, progress.epochs)}" if progress.epoch is not None else ""]
    parts += [f"saved at step {progress.saved_step}" if progress.saved_step is not None else ""]
    return ", ".join(filter(None, parts))


def _memory(progress: RunProgress) -> str:
    peak = f"peak {progress.peak_share:.1%} of what is usable" if progress.peak_share is not None else ""
    factor = f"safety factor {progress.safety_factor:.4g}" if progress.safety_factor is not None else ""
    return ", ".join(filter(None, [peak, factor]))


def _asked(resources: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in resources.items())


_SHOWN: Final = 20
"""Runs that are listed unless more are asked for: what fits a terminal."""


_WATCH_S: Final = 5.0
"""Seconds between two looks: SLURM's controller is everybody's."""


_CLEAR: Final = "\x1b[H\x1b[2J"
"""What makes a terminal empty."""


@dataclass(frozen=True, kw_only=True)
class RunsRequest:
    """What is asked for."""

    limit: Annotated[int, typer.Option(help="Newest runs that are listed; 0: all.", min=0)] = _SHOWN
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
        _best(locator, request.best, limit, as_json=request.as_json)
    elif request.watch:
        _watch(locator, limit)
    elif request.as_json:
        print(json.dumps([run_json(each) for each in _looked(locator, limit)[0]], indent=2, ensure_ascii=False))
    else:
        _print(*_looked(locator, limit), locator)


def _looked(locator: RunLocator, limit: int) -> tuple[list[RunStatus], int]:
    """Finds out about the newest runs; returns also how many there are besides."""
    known = locator.runs()
    chosen = known[:limit] if limit else known
    return run_statuses(chosen, locator.registry), len(known) - len(chosen)


def _print(found: Sequence[RunStatus], older: int, locator: RunLocator) -> None:
    if found:
        print_tables([runs_table(found, older)])
    else:
        print(f"No run is there yet, neither in {locator.runs_dir} nor in the state folder.")
        print("can-train --help shows how to start one.")


def _watch(locator: RunLocator, limit: int) -> None:
    """Looks until Ctrl-C: a terminal is redrawn, a pipe gets a line for each run that has changed."""
    before: dict[str, str] = {}
    try:
        while True:
            found, older = _looked(locator, limit)
            if sys.stdout.isatty():
                print(_CLEAR, end="")
                _print(found, older, locator)
            lines = {each.known.run_id: told(each.state) for each in found}
            changed = [run_id for run_id in reversed(lines) if before.get(run_id) != lines[run_id]]
            if not sys.stdout.isatty():
                for run_id in changed:
                    print(f"{run_id}  {lines[run_id]}", flush=True)
            before = lines
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return


def _best(locator: RunLocator, metric: str, limit: int, *, as_json: bool) -> None:
    finished = [each for each in _looked(locator, 0)[0] if each.facts.result is not None]
    if not finished:
        raise ConfigError("No run has finished yet, so none is best", remedy="can-train runs lists those there are")
    ranked = rank([each.facts.result or {} for each in finished], metric)
    shown = [(finished[each.index], each) for each in (ranked[:limit] if limit else ranked)]
    if as_json:
        values = [
            {**run_json(each), "metric": metric, "value": found.value, "parts": strict(found.parts)}
            for each, found in shown
        ]
        print(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        print_tables([_best_table(shown, metric)])


def _best_table(ranked: Sequence[tuple[RunStatus, RankedResult]], metric: str) -> TextTable:
    several = max(len(found.parts) for _, found in ranked)
    columns = ("run", "configuration", metric, *(("lowest", "highest") if several > 1 else ()))
    rows = []
    for each, found in ranked:
        ends = (min(found.parts.values()), max(found.parts.values())) if several > 1 else ()
        figures = [f"{value:.4g}" for value in (found.value, *ends)]
        rows.append((short_name(each.known.run_id), each.known.record.key, *figures))
    notes = [f"{metric} is the mean over {several} test sets"] if several > 1 else []
    return TextTable(f"Best by {metric}", columns, rows, notes)


def status(run: Run, as_json: AsJson = False, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Show the state of a run, and how it came to it."""
    locator = RunLocator(runs_dir, state_dir)
    found = locator.status(locator.find(run))
    if as_json:
        print(json.dumps(run_json(found), indent=2, ensure_ascii=False))
        return
    print("\n".join(run_lines(found)))
    print_tables(history_tables(found))
