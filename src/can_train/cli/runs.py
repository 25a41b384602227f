"""`can-train runs` and `can-train status RUN`: runs with their states, and the best by a metric, as tables and JSON."""

import csv
import io
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import typer

from can_train.cli.output import clear_screen, print_json, print_note, print_tables, print_text, print_wrapped
from can_train.cli.run_locator import AsJson, RunLocator, RunOrSweep, RunsDir, StateDir
from can_train.config.settings import check_choice
from can_train.errors import ConfigError, with_command_name
from can_train.io.records import is_file
from can_train.io.units import counted, duration, finite, local_time, seconds_between
from can_train.report.run_facts import (
    change_text,
    device_of,
    line_to_go_on,
    listed_json,
    result_of,
    run_json,
    seconds_of,
)
from can_train.report.run_list import (
    Condition,
    RunFigures,
    RunFilter,
    RunList,
    data_set_of,
    mean,
    parse_since,
    parse_states,
)
from can_train.report.scores import direction_of, headline, mapping, rank, score
from can_train.reporter import COLUMNS, TextTable, wrapped
from can_train.runs.run_folder import short_name
from can_train.runs.run_state import FAILURES, infer_attempt_state
from can_train.runs.status import KnownRun, RunStatus, misnamed_runs, run_logs, run_statuses
from can_train.runs.sweep_runs import failures_by_cause, failures_by_node
from can_train.slurm import client as slurm

_LIMIT: Final = 20  # runs that are listed by default, which fit a terminal
_WATCH_INTERVAL_S: Final = 5.0  # between two questions to SLURM, whose controller everybody shares

_NODES: Final = 3  # nodes of a cause that are listed
_AGAIN: Final = 10  # submissions of a sweep's runs after a failure that are listed

_COLUMNS: Final = ("run", "state", "time", "device", "score", "trained")
"""They fit a terminal of 80 columns; steps and all else are in `status` and in the JSON."""
_Run = TypeVar("_Run")
_LISTED_SETTINGS: Final = 6  # changed settings that a list has of a run


def runs(  # noqa: PLR0913 - Typer makes an option of each argument
    *,
    limit: Annotated[int | None, typer.Option(help=f"Newest runs that are listed; 0: all. [{_LIMIT}]", min=0)] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only runs in a state: failed, live, finished, cancelled, oom, …", metavar="STATE"),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Only runs on a data set.", metavar="NAME")] = None,
    since: Annotated[str | None, typer.Option(help="Only runs since: 7d, 12h, 2026-11-01.", metavar="WHEN")] = None,
    sweep: Annotated[str | None, typer.Option(help="Only the runs of a sweep or search.", metavar="SWEEP")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with a tag (can-train tag).", metavar="TAG")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only runs whose setting or metric compares: 'lr>0.01'; repeat it.", metavar="TEST"),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns of the list: run,state,lr,mcc,tags,…", metavar="NAMES")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="table, csv or json.", metavar="FORMAT")] = "table",
    best: Annotated[
        str | None,
        typer.Option(help="Rank finished runs by a metric, each data set by itself: mcc, NAME:min.", metavar="METRIC"),
    ] = None,
    usage: Annotated[
        bool, typer.Option("--usage", help="GPU-hours of the runs by person, data set and week, and the share lost.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """List runs by data set, the newest first, with their states, scores and settings."""
    check_choice("--format", format_, _FORMATS)
    as_json = as_json or format_ == "json"
    chosen = RunFilter(
        states=parse_states(state) if state else (), dataset=dataset or "", since=parse_since(since) if since else "",
        sweep=sweep or "", tag=tag or "", where=tuple(map(Condition.parse, where or ())),
    )  # fmt: skip
    if usage and (limit is not None or best is not None or columns is not None or watch or format_ == "csv"):
        # The hours of the newest runs alone would be taken for all: --since chooses runs of a time.
        raise ConfigError("--usage counts all runs that meet the conditions, in tables of its own",
                          remedy="Leave out --limit, --best, --columns, --watch and csv")  # fmt: skip
    limit = _LIMIT if limit is None else limit
    shape = {"--json": as_json, "--best": best is not None, "--columns": columns is not None or format_ == "csv"}
    if watch and (other := next((flag for flag, given in shape.items() if given), "")):
        raise ConfigError(f"--watch and {other} cannot be combined", remedy="Leave one out")
    if best is not None and shape["--columns"]:
        raise ConfigError("--best has columns of its own", value=f"--columns {columns or '--format csv'}",
                          remedy=f"Leave out --best, and add it: --columns run,{_metric_of(best)[0]}")  # fmt: skip
    locator = RunLocator(runs_dir, state_dir)
    locator.check_folder()
    if misnamed := misnamed_runs(locator.runs_dir):
        more = f" and {len(misnamed) - 1} more are" if len(misnamed) > 1 else " is"
        rule = "the name of a run has letters, digits and _-.+=@%, alone"
        print_note(f"{shlex.quote(misnamed[0])}{more} not listed: {rule}")
    if usage:
        _print_usage(_selected(locator, chosen), as_json=as_json)
    elif best is not None:
        _print_best(_selected(locator, chosen), best, limit, as_json=as_json)
    elif shape["--columns"]:
        _print_columns(_selected(locator, chosen), _column_names(columns), limit, "json" if as_json else format_)
    elif watch:
        _watch(locator, chosen, limit)
    elif as_json:
        print_json([listed_json(status) for status in _newest(locator, chosen, limit)[0]])
    else:
        _print_runs(*_newest(locator, chosen, limit), locator, is_filtered=chosen != RunFilter())
    if aside := locator.registry.set_aside:
        more = f"; and {len(aside) - 1} more" if len(aside) > 1 else ""
        print_note(f"set aside: {aside[0].shown}: {aside[0].reason}{more}")


def status(run: RunOrSweep, as_json: AsJson = False, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Show the state of a run, and how it came to it; of a sweep, the states of its runs, and how runs failed."""
    locator = RunLocator(runs_dir, state_dir)
    sweep, known = locator.find_any(run)
    if sweep:
        _print_sweep(sweep, run_statuses(known, locator.registry, slurm), as_json=as_json)
        return
    status = locator.status(known[0])
    if as_json:
        print_json(run_json(status))
        return
    print_text(with_command_name("\n".join(_status_lines(status))))
    print_tables(_history_tables(status), pipe_columns=COLUMNS)


def _selected(locator: RunLocator, chosen: RunFilter) -> RunList:
    return RunList(locator.runs(), locator.state_folder, slurm).select(chosen)


def _newest(locator: RunLocator, chosen: RunFilter, limit: int) -> tuple[list[RunStatus], int]:
    """Returns the status of the newest runs that meet conditions, and how many older ones do."""
    if chosen == RunFilter():
        runs = locator.runs()
        newest = runs[: limit or None]
        return run_statuses(newest, locator.registry, slurm), len(runs) - len(newest)
    selected = _selected(locator, chosen)
    newest = selected.runs[: limit or None]
    return selected.statuses(newest), len(selected.runs) - len(newest)


def _print_runs(statuses: Sequence[RunStatus], older: int, locator: RunLocator, *, is_filtered: bool = False) -> None:
    if not statuses and is_filtered:
        print_text("No run meets these conditions.")
        return
    if not statuses:
        print_text(f"No run is there yet, neither in {locator.runs_dir} nor in the state folder.")
        print_text(with_command_name("can-train --help shows how to start one."))
        return
    tables = []
    for name, group in _by_data_set(statuses, [data_set_of(status.known.config) for status in statuses]).items():
        scores = [score(result_of(status)) for status in group]
        rows = []
        for status, headlined in zip(group, scores, strict=True):
            seconds, progress = seconds_of(status), status.progress
            done = f" {_done_of(progress.epoch or 0, progress.epochs)}" if status.state.live and progress.epochs else ""
            # The time in its largest unit only.
            time_text = " ".join(duration(seconds).split()[:2]) if seconds is not None else ""
            score_text = f"{headlined[1]:.3f}" if headlined is not None else ""
            rows.append((short_name(status.known.run_id), f"{status.state.label}{done}", time_text, device_of(status),
                         score_text, _trained(status)))  # fmt: skip
        metrics = dict.fromkeys(each[0] for each in scores if each is not None)
        tables.append(TextTable(name, _COLUMNS, rows, [_meaning(metric) for metric in metrics]))
    print_tables(tables, pipe_columns=COLUMNS)
    if older:
        line = f"--limit {older + len(statuses)}"
        print_wrapped(f"{older} older: {f'add {line}' if is_filtered else f'can-train runs {line}'}")


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


def _meaning(metric: str, direction: str = "", *, parts: Sequence[Mapping[str, float]] = ()) -> str:
    """Explains the figure of a metric, and which direction is better; an empty one: the metric's name tells it. `parts`
    are the values of each run by test set.
    """
    better = "higher" if (direction or direction_of(metric)) == "max" else "lower"
    is_of_run = metric == "best_validation_loss" or "." in metric
    # A run without test sets has the figure of its validation, under no name.
    validated = ["" in by_set for by_set in parts]
    where = "" if is_of_run else ", the mean over the test sets"
    if not is_of_run and any(validated):
        of_validation = "of the validation that chose the weights"
        where = f", {of_validation}" if all(validated) else f"{where}, or {of_validation} where a run has none"
    return f"{metric}{where}: {better} is better"


def _watch(locator: RunLocator, chosen: RunFilter, limit: int) -> None:
    """Redraws a terminal until Ctrl-C; a pipe gets a line for each run whose state has changed."""
    before: dict[str, str] = {}
    # Here Ctrl-C is the way to go on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while True:
            statuses, older = _newest(locator, chosen, limit)
            states = {status.known.run_id: str(status.state) for status in statuses}
            if sys.stdout.isatty():
                clear_screen()
                _print_runs(statuses, older, locator, is_filtered=chosen != RunFilter())
            else:
                changed = [name for name in reversed(states) if before.get(name) != states[name]]
                print_text("".join(f"{name}  {states[name]}\n" for name in changed), end="")
            before = states
            time.sleep(_WATCH_INTERVAL_S)


def _status_lines(status: RunStatus) -> list[str]:
    record, progress, log = status.known.record, status.progress, run_logs(status.facts, status.known)[-1]
    seconds, loss = seconds_of(status), progress.best_validation_loss
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
        "loss": f"{loss:.4g} at best in validation" if loss is not None else "",
        "memory": ", ".join(filter(None, memory)),
        "folder": str(status.known.folder.path),
        "log": str(log) if is_file(log) else "",
        "after": record.after,
        "sweep": f"{record.sweep}  {status.known.label}".rstrip(),
        "changed": "; ".join(map(change_text, status.known.folder.changes())),
        "to go on": line_to_go_on(status),
    }
    width = max(map(len, lines))
    # A state may be a sentence; all else is a figure or a path.
    return [
        wrapped(text, COLUMNS, label=f"{name:<{width}}  ") if name == "state" else f"{name:<{width}}  {text}"
        for name, text in lines.items()
        if text
    ]


def _print_sweep(name: str, statuses: Sequence[RunStatus], *, as_json: bool) -> None:
    """Prints the states of a sweep's runs, its failures by cause and by node, and the lines that go on."""
    causes, nodes = failures_by_cause(statuses), failures_by_node(statuses)
    counts = Counter(status.state.label for status in statuses)
    failed = sum(len(cause.runs) for cause in causes)
    if as_json:
        print_json({
            "sweep": name, "states": counts, "runs": [listed_json(status) for status in statuses],
            "failures": [{"state": cause.state, "why": cause.why, "nodes": cause.nodes,
                          "run_ids": [status.known.run_id for status in cause.runs]} for cause in causes],
            "nodes": [vars(node) for node in nodes],
        })  # fmt: skip
        return
    print_text(f"sweep   {name}")
    print_wrapped(
        f"states  {counted(len(statuses), 'run')}: {', '.join(f'{n} {state}' for state, n in counts.most_common())}"
    )
    tables = []
    if causes:
        rows = [(str(len(cause.runs)), cause.state, _nodes_text(cause.nodes), _run_name(cause.runs[0]), cause.why)
                for cause in causes]  # fmt: skip
        tables.append(TextTable("Failures by cause", ("runs", "state", "nodes", "for example", "why"), rows))
        by_node = [(each.node, str(each.failed), str(each.finished)) for each in nodes]
        tables.append(TextTable("Failures by node", ("node", "failed", "finished"), by_node))
    again = [(_run_name(status), f"{local_time(job.time)}", job.reason)
             for status in statuses for job in status.facts.jobs if job.reason and job.reason != "resumed"]  # fmt: skip
    if again:
        notes = [f"and {len(again) - _AGAIN} more"] if len(again) > _AGAIN else []
        tables.append(TextTable("Submitted again", ("run", "time", "why"), again[:_AGAIN], notes))
    print_tables(tables, pipe_columns=COLUMNS)
    diverged = [status for cause in causes for status in cause.runs if status.lower_lr is not None]
    lines = [f"can-train resume {name} --all-failed"] if failed > len(diverged) else []
    lines += [line_to_go_on(status) for status in diverged[:1]]
    lines += [f"can-train cancel {name}"] if any(status.state.live for status in statuses) else []
    lines += [f"can-train compare {name}"] if counts["finished"] > 1 else []
    print_text(with_command_name("\n".join(["", "To go on", *(f"  {line}" for line in lines)])) if lines else "")


def _run_name(status: RunStatus) -> str:
    return f"{short_name(status.known.run_id)} {status.known.label}".strip()


def _nodes_text(nodes: Mapping[str, int]) -> str:
    """Writes the nodes of failed runs, the worst first, with the number of runs."""
    worst = sorted(nodes, key=lambda node: -nodes[node])
    more = f" and {len(worst) - _NODES} more" if len(worst) > _NODES else ""
    return ", ".join(f"{node} {nodes[node]}" for node in worst[:_NODES]) + more


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


# Usage


@dataclass
class _Usage:
    """The time that runs took together."""

    runs: int = 0
    hours: float = 0.0
    gpu_hours: float = 0.0
    # Hours of devices: of each GPU, or of a run without GPUs. Of all runs, and of those that failed.
    device_hours: float = 0.0
    failed_hours: float = 0.0
    peaks: list[float] = field(default_factory=list)
    busy_hours: float = 0.0  # In which kernels ran, of the hours of runs whose GPU was sampled
    sampled_hours: float = 0.0

    def add(self, figures: RunFigures, *, has_failed: bool) -> None:
        """Adds a run."""
        hours = (figures.seconds or 0.0) / 3600
        device_hours = hours * (figures.gpus or 1.0)
        self.runs += 1
        self.hours += hours
        self.gpu_hours += hours * figures.gpus
        self.device_hours += device_hours
        self.failed_hours += device_hours if has_failed else 0.0
        self.peaks += [figures.peak_share] if figures.peak_share is not None else []
        if figures.utilisation is not None:
            self.busy_hours += device_hours * figures.utilisation
            self.sampled_hours += device_hours

    @property
    def facts(self) -> dict[str, float | int | None]:
        """The figures by name."""
        return {"runs": self.runs, "hours": self.hours, "gpu_hours": self.gpu_hours,
                "lost_share": self.failed_hours / self.device_hours if self.device_hours else 0.0,
                "peak_share": sum(self.peaks) / len(self.peaks) if self.peaks else None,
                "utilisation": self.busy_hours / self.sampled_hours if self.sampled_hours else None}  # fmt: skip


def _print_usage(listed: RunList, *, as_json: bool) -> None:
    """Prints the time that runs took, by person, data set and week."""
    names = {"person": _owner, "data set": lambda run: listed.data_set(run)[0], "week": _week}
    tables: dict[str, dict[str, _Usage]] = {title: {} for title in (*names, "all")}
    for run in listed.runs:
        figures, has_failed = listed.figures(run), listed.state(run) in FAILURES
        for title, name in (*names.items(), ("all", lambda _: "all runs")):
            tables[title].setdefault(name(run), _Usage()).add(figures, has_failed=has_failed)
    if as_json:
        print_json({title: {name: each.facts for name, each in rows.items()} for title, rows in tables.items()})
        return
    notes = ["lost: the share of the time of runs that failed; peak: the mean peak of what is usable"]
    columns: tuple[str, ...] = ("runs", "hours", "GPU-hours", "lost", "peak")
    is_sampled = any(each.sampled_hours for each in tables["all"].values())
    if is_sampled:
        notes.append("busy: the share of the time in which the GPU's kernels ran, of runs that sampled it")
        columns = (*columns, "busy")
    print_tables([TextTable(f"By {title}" if title != "all" else "Together", (title, *columns),
                            _usage_rows(rows, is_sampled=is_sampled),
                            notes if title == "all" else [])
                  for title, rows in tables.items() if rows], pipe_columns=COLUMNS)  # fmt: skip


def _usage_rows(rows: Mapping[str, _Usage], *, is_sampled: bool) -> list[tuple[str, ...]]:
    ordered = sorted(rows.items(), key=lambda item: (-item[1].gpu_hours, -item[1].hours))
    shares = ("lost_share", "peak_share", *(("utilisation",) if is_sampled else ()))
    return [
        (name, str(each.runs), f"{each.hours:.1f}", f"{each.gpu_hours:.1f}",
         *("" if (share := each.facts[key]) is None else f"{share:.0%}" for key in shares))
        for name, each in ordered
    ]  # fmt: skip


def _owner(run: KnownRun) -> str:
    """Returns the name of the user whose folder a run is."""
    try:
        return run.folder.path.owner()
    except (OSError, KeyError):
        return "unknown"


def _week(run: KnownRun) -> str:
    year, week, _ = datetime.fromisoformat(run.record.time).astimezone().isocalendar()
    return f"{year}-W{week:02d}"


# Columns by choice

_FORMATS: Final = ("table", "csv", "json")
_OF_RUN: Final[dict[str, Callable[[RunList, KnownRun], Any]]] = {
    "run": lambda listed, run: short_name(run.run_id),
    "id": lambda listed, run: run.run_id,
    "state": lambda listed, run: listed.state(run),
    "made": lambda listed, run: local_time(run.record.time),
    "seconds": lambda listed, run: listed.figures(run).seconds,
    "dataset": lambda listed, run: listed.data_set(run)[0],
    "device": lambda listed, run: listed.figures(run).device,
    "metric": lambda listed, run: (headline(listed.scores(run)) or (None,))[0],
    "score": lambda listed, run: (headline(listed.scores(run)) or (None, None))[1],
    "steps": lambda listed, run: listed.figures(run).steps,
    "epochs": lambda listed, run: listed.figures(run).epochs,
    "peak": lambda listed, run: listed.figures(run).peak_share,
    "node": lambda listed, run: listed.figures(run).node,
    "why": lambda listed, run: listed.figures(run).why,
    "key": lambda listed, run: run.record.key,
    "sweep": lambda listed, run: run.record.sweep,
    "label": lambda listed, run: run.label,
    "tags": lambda listed, run: " ".join(listed.labels_of(run).tags),
    "note": lambda listed, run: listed.labels_of(run).note,
    "folder": lambda listed, run: run.path,
}
"""Values of the columns that are neither settings nor metrics."""
_DEFAULT_COLUMNS: Final = ("id", "state", "made", "seconds", "dataset", "model", "size", "mode", "device", "metric",
                           "score", "sweep", "tags", "note", "why")  # fmt: skip


def _column_names(text: str | None) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else [*_DEFAULT_COLUMNS]
    if not all(names):
        raise ConfigError("--columns names nothing", value=repr(text), remedy="Write it as --columns run,state,lr,mcc")
    return names


def _print_columns(listed: RunList, names: Sequence[str], limit: int, format_: str) -> None:
    # Before the limit: a metric of an older run is not unknown.
    columns = {name: _column(listed, name) for name in names}
    runs = listed.runs[: limit or None]
    listed.runs, older = runs, len(listed.runs) - len(runs)
    rows = [[value(run) for value in columns.values()] for run in runs]
    if format_ == "json":
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif format_ == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([names, *rows])
        print_text(text.getvalue(), end="")
    else:
        cells = [tuple(map(_cell, row)) for row in rows]
        print_tables([TextTable(counted(len(rows), "run"), tuple(names), cells)], pipe_columns=COLUMNS)
        if older:
            print_wrapped(f"{older} older: add --limit {older + len(rows)}")


def _column(listed: RunList, name: str) -> Callable[[KnownRun], Any]:
    """Returns the function that reads the value of a column.

    Raises:
        ConfigError: Nothing has this name.
    """
    if name in _OF_RUN:
        return lambda run: _OF_RUN[name](listed, run)
    if len(names := listed.setting_names(name)) == 1:
        return lambda run: listed.settings(run).get(names[0])
    if listed.runs and not any(name in listed.scores(run) for run in listed.runs):
        raise listed.unknown(name, _OF_RUN)
    return lambda run: mean(listed.scores(run).get(name))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# Which result is best by a metric


def _metric_of(text: str) -> tuple[str, str]:
    """Splits the metric of `--best` into its name and its direction; an empty direction: it has none."""
    name, _, direction = text.rpartition(":")
    return (name, direction) if name and direction in ("max", "min") else (text, "")


def _print_best(listed: RunList, metric: str, limit: int, *, as_json: bool) -> None:
    finished = [run for run in listed.runs if listed.has_finished(run)]
    if not finished:
        raise ConfigError("No run has finished yet, so none is best", remedy="can-train runs lists the runs")
    metric, direction = _metric_of(metric)
    direction = direction or direction_of(metric) or listed.direction_by_runs(finished, metric)
    ranked = rank([listed.scores(run) for run in finished], metric, direction)
    groups = _by_data_set(ranked, [listed.data_set(finished[result.index]) for result in ranked])
    # The data set of the newest run comes first.
    newest_first = sorted(groups.items(), key=lambda item: min(result.index for result in item[1]))
    best = {name: group[: limit or None] for name, group in newest_first}
    # Only of those that are listed: the status of thousands of runs takes seconds.
    shown = [result.index for group in best.values() for result in group]
    status_of = dict(zip(shown, listed.statuses([finished[index] for index in shown]), strict=True))
    if as_json:
        print_json([
            {**listed_json(status_of[result.index]), "metric": metric, "higher_is_better": direction == "max",
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
        meaning = _meaning(metric, direction, parts=[result.parts for result in group])
        tables.append(TextTable(f"{name}: best by {metric}", columns, rows, [meaning]))
    print_tables(tables, pipe_columns=COLUMNS)
