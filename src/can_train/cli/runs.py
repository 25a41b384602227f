"""`can-train runs` and `can-train status RUN`: runs with their states, and the best by a metric, as tables and JSON."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer

from can_train import __version__
from can_train.cli.output import clear_screen, print_json, print_note, print_tables, print_text, print_wrapped
from can_train.cli.run_locator import AsJson, Run, RunLocator, RunsDir, StateDir
from can_train.config.resolved import config_folder
from can_train.config.task_settings import key_name, package_folders
from can_train.errors import ConfigError, RunError, with_command_name
from can_train.io.index import index_folder, recall, remember
from can_train.io.records import is_file
from can_train.report.run_facts import change_text, device_of, listed_json, result_of, run_json, seconds_of
from can_train.report.scores import higher_is_better, mapping, rank, ranked_part, score
from can_train.report.text import duration, finite, local_time, seconds_between
from can_train.reporter import COLUMNS, TextTable, wrapped
from can_train.runs.run_folder import CONFIG, RESULT, name_to_type, short_name
from can_train.runs.run_state import infer_attempt_state
from can_train.runs.status import KnownRun, RunStatus, misnamed_runs, run_logs, run_statuses
from can_train.slurm import client as slurm

_LIMIT: Final = 20  # runs that are listed by default, which fit a terminal
_WATCH_INTERVAL_S: Final = 5.0  # between two questions to SLURM, whose controller everybody shares

_COLUMNS: Final = ("run", "state", "time", "device", "score", "trained")
"""They fit a terminal of 80 columns; steps and all else are in `status` and in the JSON."""
_UNKNOWN: Final = "unknown data set"  # of a run whose configuration cannot be read
_Run = TypeVar("_Run")
_LISTED_SETTINGS: Final = 6  # changed settings that a list has of a run


def runs(  # noqa: PLR0913 - Typer makes an option of each argument
    *,
    limit: Annotated[int, typer.Option(help="Newest runs that are listed; 0: all.", min=0)] = _LIMIT,
    best: Annotated[
        str | None, typer.Option(help="Rank finished runs by a metric, each data set by itself: mcc.", metavar="METRIC")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """List runs by data set, the newest first, with their states, scores and settings."""
    if watch and (as_json or best is not None):
        other = "--json" if as_json else "--best"
        raise ConfigError(f"--watch and {other} cannot be combined", remedy="Leave one out")
    locator = RunLocator(runs_dir, state_dir)
    if misnamed := misnamed_runs(locator.runs_dir):
        more = f" and {len(misnamed) - 1} more are" if len(misnamed) > 1 else " is"
        rule = "the name of a run has letters, digits and _-.+=@%, alone"
        print_note(f"{shlex.quote(misnamed[0])}{more} not listed: {rule}")
    if best is not None:
        _print_best(locator, best, limit, as_json=as_json)
    elif watch:
        _watch(locator, limit)
    elif as_json:
        print_json([listed_json(status) for status in _newest(locator, limit)[0]])
    else:
        _print_runs(*_newest(locator, limit), locator)


def status(run: Run, as_json: AsJson = False, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Show the state of a run, and how it came to it."""
    locator = RunLocator(runs_dir, state_dir)
    status = locator.status(locator.find(run))
    if as_json:
        print_json(run_json(status))
        return
    print_text(with_command_name("\n".join(_status_lines(status))))
    print_tables(_history_tables(status))


def _newest(locator: RunLocator, limit: int) -> tuple[list[RunStatus], int]:
    """Returns the status of the newest runs, and how many older ones there are."""
    runs = locator.runs()
    newest = runs[: limit or None]
    return run_statuses(newest, locator.registry, slurm), len(runs) - len(newest)


def _print_runs(statuses: Sequence[RunStatus], older: int, locator: RunLocator) -> None:
    if not statuses:
        print_text(f"No run is there yet, neither in {locator.runs_dir} nor in the state folder.")
        print_text(with_command_name("can-train --help shows how to start one."))
        return
    tables = []
    for name, group in _by_data_set(statuses, [_data_set(status.known.config) for status in statuses]).items():
        scores = [score(result_of(status)) for status in group]
        rows = []
        for status, headline in zip(group, scores, strict=True):
            seconds, progress = seconds_of(status), status.progress
            done = f" {_done_of(progress.epoch or 0, progress.epochs)}" if status.state.live and progress.epochs else ""
            # The time in its largest unit only.
            time_text = " ".join(duration(seconds).split()[:2]) if seconds is not None else ""
            score_text = f"{headline[1]:.3f}" if headline is not None else ""
            rows.append((short_name(status.known.run_id), f"{status.state.label}{done}", time_text, device_of(status),
                         score_text, _trained(status)))  # fmt: skip
        metrics = dict.fromkeys(headline[0] for headline in scores if headline is not None)
        tables.append(TextTable(name, _COLUMNS, rows, [_meaning(metric) for metric in metrics]))
    print_tables(tables, pipe_columns=COLUMNS)
    if older:
        print_wrapped(f"{older} older: can-train runs --limit {older + len(statuses)}")


def _data_set(config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the name of the data set that a run was trained on, and its folder."""
    data = mapping(config.get("dataset"))
    # A task without data sets to choose from stands for its own.
    name = data.get("name") or key_name(str(config.get("task") or "")) or _UNKNOWN
    return str(name), str(data.get("path") or "")


def _by_data_set(runs: Iterable[_Run], data_sets: Iterable[tuple[str, str]]) -> dict[str, list[_Run]]:
    """Groups runs by their data sets; data of one name in several places are several."""
    groups: dict[tuple[str, str], list[_Run]] = {}
    for run, data_set in zip(runs, data_sets, strict=True):
        groups.setdefault(data_set, []).append(run)
    names = [name for name, _ in groups]
    return {f"{name} ({path})" if names.count(name) > 1 and path else name: group
            for (name, path), group in groups.items()}  # fmt: skip


def _trained(status: RunStatus) -> str:
    """Writes model, size and mode, and below them the settings that differ from the presets."""
    config, texts = status.known.config, []
    for name, setting in (status.known.folder.changed_settings() or {}).items():
        value = str(setting["value"])
        # Of a folder of another run its short name.
        short = short_name(value.rpartition("/")[2]) if isinstance(setting["value"], str) and "/" in value else value
        texts.append(f"{name.rpartition('.')[2]}={short}")
    words = [config.get("model_name"), config.get("size"), mapping(config.get("mode")).get("name")]
    more = f" and {len(texts) - _LISTED_SETTINGS} more" if len(texts) > _LISTED_SETTINGS else ""
    what = " ".join(str(word) for word in words if word) if all(words[::2]) else status.known.record.key
    return "\n".join(filter(None, [what, " ".join(texts[:_LISTED_SETTINGS]) + more]))


def _meaning(metric: str) -> str:
    """Explains the figure of a metric, and which direction is better."""
    better = "higher" if higher_is_better(metric) else "lower"
    is_of_run = metric == "best_validation_loss" or "." in metric
    return f"{metric}{'' if is_of_run else ', the mean over the test sets'}: {better} is better"


def _watch(locator: RunLocator, limit: int) -> None:
    """Redraws a terminal until Ctrl-C; a pipe gets a line for each run whose state has changed."""
    before: dict[str, str] = {}
    # Here Ctrl-C is the way to go on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while True:
            statuses, older = _newest(locator, limit)
            states = {status.known.run_id: str(status.state) for status in statuses}
            if sys.stdout.isatty():
                clear_screen()
                _print_runs(statuses, older, locator)
            else:
                changed = [name for name in reversed(states) if before.get(name) != states[name]]
                print_text("".join(f"{name}  {states[name]}\n" for name in changed), end="")
            before = states
            time.sleep(_WATCH_INTERVAL_S)


def _status_lines(status: RunStatus) -> list[str]:
    record, progress, log = status.known.record, status.progress, run_logs(status.facts, status.known)[-1]
    seconds, loss = seconds_of(status), progress.best_validation_loss
    is_resumable = not status.state.live and status.facts.result is None and status.facts.has_folder
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
        "state": str(status.state),
        "time": duration(seconds) if seconds is not None else "",
        "progress": ", ".join(filter(None, steps)),
        "loss": f"{loss:.4g} at best in validation" if loss else "",
        "memory": ", ".join(filter(None, memory)),
        "folder": str(status.known.folder.path),
        "log": str(log) if is_file(log) else "",
        "after": record.after,
        "sweep": record.sweep,
        "changed": "; ".join(map(change_text, status.known.folder.changes())),
        "to go on": f"can-train resume {name_to_type(status.known.folder)}" if is_resumable else "",
    }
    width = max(map(len, lines))
    # A state may be a sentence; all else is a figure or a path.
    return [
        wrapped(text, COLUMNS, label=f"{name:<{width}}  ") if name == "state" else f"{name:<{width}}  {text}"
        for name, text in lines.items()
        if text
    ]


def _done_of(done: int | None, total: int | None) -> str:
    if done is None:
        return ""
    return f"{done}/{total}" if total else str(done)


def _history_tables(status: RunStatus) -> list[TextTable]:
    jobs = [
        (str(job.slurm_job or job.job_id), job.executor, local_time(job.time),
         " ".join(f"{name}={value}" for name, value in job.resources.items()), job.reason)
        for job in status.facts.jobs
    ]  # fmt: skip
    attempts = [
        (str(start.attempt), str(start.slurm_job or f"process {start.pid}"), start.host, local_time(start.start_time),
         duration(seconds_between(start.start_time, attempt.end.time)) if attempt.end else "",
         str(infer_attempt_state(attempt, status.facts)))
        for attempt in status.facts.attempts
        for start in (attempt.start,)
    ]  # fmt: skip
    tables = [
        TextTable("Jobs", ("job", "executor", "submitted", "asked for", "why again"), jobs),
        TextTable("Attempts", ("attempt", "job", "host", "began", "took", "ending"), attempts),
    ]
    return [table for table in tables if table.rows]


# Which result is best by a metric


def _print_best(locator: RunLocator, metric: str, limit: int, *, as_json: bool) -> None:
    finished = _finished_runs(locator)
    if not finished:
        raise ConfigError("No run has finished yet, so none is best", remedy="can-train runs lists the runs")
    ranked = rank([outcome.result for _, outcome in finished], metric)
    groups = _by_data_set(ranked, [finished[result.index][1].data_set for result in ranked])
    # The data set of the newest run comes first.
    newest_first = sorted(groups.items(), key=lambda item: min(result.index for result in item[1]))
    best = {name: group[: limit or None] for name, group in newest_first}
    # Only of those that are listed: the status of thousands of runs takes seconds.
    listed = [result.index for group in best.values() for result in group]
    statuses = run_statuses([finished[index][0] for index in listed], locator.registry, slurm)
    status_of = dict(zip(listed, statuses, strict=True))
    if as_json:
        print_json([
            {**listed_json(status_of[result.index]), "metric": metric, "higher_is_better": higher_is_better(metric),
             "rank": number, "value": result.value, "parts": finite(result.parts)}
            for group in best.values() for number, result in enumerate(group, start=1)
        ])  # fmt: skip
        return
    tables = []
    for name, group in best.items():
        has_parts = max(len(result.parts) for result in group) > 1
        # Of one test set the table's title has the name.
        columns = ("run", metric.rpartition(".")[2], *(("lowest", "highest") if has_parts else ()), "device", "trained")
        rows = []
        for result in group:
            status, values = status_of[result.index], result.parts.values()
            figures = [result.value, *((min(values), max(values)) if has_parts else ())]
            rows.append((short_name(status.known.run_id), *(f"{value:.4g}" for value in figures), device_of(status),
                         _trained(status)))  # fmt: skip
        tables.append(TextTable(f"{name}: best by {metric}", columns, rows, [_meaning(metric)]))
    print_tables(tables, pipe_columns=COLUMNS)


class _Outcome(msgspec.Struct):
    data_set: tuple[str, str]
    result: dict[str, Any]  # its `ranked_part`


class _RememberedOutcomes(msgspec.Struct):
    made_by: str
    outcomes: dict[str, tuple[list[int], _Outcome]]  # by the path of a run's folder, with the identity of its files


def _finished_runs(locator: RunLocator) -> list[tuple[KnownRun, _Outcome]]:
    """Finds the runs that have a result, the newest first. Only files that have changed are read again."""
    # Presets are files that a person edits.
    files = [*(file for folder in package_folders() for file in folder.rglob("*.py")), *config_folder().rglob("*.yaml")]
    made_by = f"{__version__} {max(path.stat().st_mtime_ns for path in files)}"
    path = index_folder(locator.state_folder) / "outcomes"
    earlier = recall(path, _RememberedOutcomes)
    before = earlier.outcomes if earlier is not None and earlier.made_by == made_by else {}
    finished, latest = [], {}
    for run in locator.runs():
        # Identified before they are read: a file written meanwhile is then read again.
        identity, outcome = _identify(run.path, CONFIG, RESULT), None
        if run.path in before and before[run.path][0] == identity:
            outcome = before[run.path][1]
        else:
            with suppress(RunError):
                result = run.folder.result()
                outcome = None if result is None else _Outcome(_data_set(run.config), ranked_part(result))
        if outcome is not None:
            finished.append((run, outcome))
            latest[run.path] = (identity, outcome)
    if latest != before:
        remember(path, _RememberedOutcomes(made_by, latest))
    return finished


def _identify(folder: str, *names: str) -> list[int]:
    """Returns numbers that change whenever files of a folder do."""
    numbers = []
    for name in names:
        try:
            status = os.stat(f"{folder}{os.sep}{name}")  # noqa: PTH116 - of thousands of runs, paths cost more
        except OSError:
            numbers += [0]
        else:
            numbers += [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return numbers
