"""`can-train factors`: shows the safety factors that were learned, and resets, pins, exports, imports and draws them.
Each action writes at most one event, refreshes the export, and reports the change in words or as JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.cli.output import ask, print_aside, print_json, print_tables, print_text, writing
from can_train.cli.run_locator import StateDir
from can_train.config.resolved import check_folder, differences, flat
from can_train.errors import ConfigError, StateError, nearest_first, unknown_name, with_command_name
from can_train.factors.exchange import make_export, run_notes
from can_train.factors.observations import ANY_DEVICE, Observation, read_records, without_size
from can_train.factors.policies import POLICIES
from can_train.factors.store import FactorStore, ReplayedSize, get_safety_factor_db, replay_runs, replay_sizes
from can_train.factors.summary import (
    FactorFigures,
    FactorSummary,
    find_summaries,
    full_keys,
    keys_like,
    policy_of,
    read_figures,
)
from can_train.io.records import write_json_atomic, write_text_atomic
from can_train.io.units import counted
from can_train.reporter import TextTable

_STANDARD_OUTPUT: Final = "-"
_SUGGESTIONS: Final = 3
_NEXT: Final = "Every training run teaches: can-train --help shows how to start one."
_COLUMNS: Final = (
    "key", "device", "factor", "runs", "mean peak", "max peak", "last peak", "OOMs", "converged", "reason",
)  # fmt: skip
_RUN_COLUMNS: Final = ("run", "attempt", "ended", "factor", "used", "peak", "batch", "micro-batch", "outcome", "notes")
_SIZE_COLUMNS: Final = ("run", "ended", "phase", "rung", "micro-batch", "fastest", "predicted", "measured")
_LISTED_RUNS: Final = 50  # of one configuration and device, the last ones; Rich takes a second for two thousand
_BEFORE_RESET: Final = "before the reset"
_JSON_NAMES: Final = {
    "key": "config_key", "factor": "safety_factor", "initial_reason": "initial_factor_reason", "runs": "num_runs",
    "mean_peak": "avg_memory_pct", "max_peak": "max_memory_pct", "last_peak": "last_memory_pct",
}  # fmt: skip
"""Names in the JSON of fields of `FactorFigures` that have another name there."""

_Report = tuple[str, Mapping[str, Any], Sequence[str]]
"""The report of an action: its text, empty where the output is the result; the values that --json prints; notices."""


def factors(  # noqa: PLR0913 - Typer makes an option of each argument
    key: Annotated[
        str | None,
        typer.Argument(help="Configuration key, with or without its size; all of them without.", metavar="KEY"),
    ] = None,
    *,
    show: Annotated[bool, typer.Option("--show", help="List every run; with a KEY that is done anyway.")] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Let the runs so far teach nothing any more; they stay.")
    ] = False,
    pin: Annotated[
        float | None, typer.Option(help="Fix the factor of KEY, whatever is learned.", metavar="VALUE")
    ] = None,
    unpin: Annotated[bool, typer.Option("--unpin", help="Let the learned factor of KEY hold again.")] = False,
    export: Annotated[
        str | None, typer.Option(help="Write factors as JSON; - is standard output.", metavar="FILE")
    ] = None,
    import_file: Annotated[
        Path | None, typer.Option("--import", help="Import a file's factors.", metavar="FILE")
    ] = None,
    replay: Annotated[
        str | None, typer.Option(help=f"What another policy would have done: {', '.join(POLICIES)}.", metavar="POLICY")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw factors and peaks of KEY's runs into FILE.svg.", metavar="FILE")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Kind of device, as v100-16gb.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --reset.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show the learned safety factors and the runs that taught them; reset, pin, export or import them."""
    asked = {"reset": reset, "pin": pin is not None, "unpin": unpin, "export": export is not None,
             "import": import_file is not None, "replay": replay is not None, "plot": plot is not None,
             "show": show}  # fmt: skip
    actions = [name for name, is_given in asked.items() if is_given]
    if len(actions) > 1:
        switches = " and ".join(f"--{name}" for name in actions)
        raise ConfigError(f"{switches} cannot be combined", remedy="Leave one out")
    if state_dir is not None:
        check_folder("--state-dir", Path(state_dir))
    store = get_safety_factor_db(state_dir)
    if replay is not None:
        return _print_replay(store, key, device, replay, as_json=as_json)
    if reset:
        text, values, notices = _reset(store, key, device, yes=yes)
    elif pin is not None:
        text, values, notices = _pin(store, key, device, pin)
    elif unpin:
        text, values, notices = _unpin(store, key, device)
    elif export is not None:
        text, values, notices = _export(store, key, device, export)
    elif plot is not None:
        text, values, notices = _plot(store, key, device, plot)
    elif import_file is not None:
        text, values, notices = _import(store, key, device, import_file)
    else:
        return _print_summaries(store, key, device, show=show or key is not None, as_json=as_json)
    notices = list(notices)
    if "event" in values:
        try:
            store.refresh_export()
        except StateError as error:
            notices.append(f"The change holds, but {store.db_path.name} is out of date. {error}")
    if as_json and values:
        return print_json({"action": actions[0], **values, "notices": notices})
    if text:
        print_text(with_command_name(text))
    for notice in notices:
        print_aside(with_command_name(notice))
    return None


def _print_summaries(store: FactorStore, key: str | None, device: str | None, *, show: bool, as_json: bool) -> None:
    records = read_records(store.state)
    figures = read_figures(store.state, records)
    if figures or key is not None:
        figures = find_summaries(figures, key, device)
    summaries = store.of_figures(figures, records) if show else []
    notes = [
        f"no result: {started.run_id} (attempt {started.attempt}, {started.key}), begun {_minute(started.started)}, "
        + ("lost: its process is gone" if started.is_running() is False else "still runs or was lost")
        for started in records.unfinished
    ]
    notes += [f"{'clock ahead' if aside.is_read else 'set aside'}: {aside.shown}: {aside.reason}"
              for aside in records.set_aside]  # fmt: skip
    if as_json:
        factors = [_summary_json(summary) for summary in summaries] or [_figures_json(each) for each in figures]
        print_json({
            "factors": factors,
            "unfinished": [{**asdict(start), "lost": start.is_running() is False} for start in records.unfinished],
            "set_aside": [{"path": aside.shown, "reason": aside.reason, "is_read": aside.is_read}
                          for aside in records.set_aside],
        })  # fmt: skip
    elif figures:
        rows = [
            (row.key, "any other" if row.device == ANY_DEVICE else row.device, _factor(row),
             str(row.runs + row.imported_runs), _percent(row.mean_peak), _percent(row.max_peak),
             _percent(row.last_peak), str(row.ooms), "yes" if row.converged else "no", "; ".join(_reasons(row)))
            for row in figures
        ]  # fmt: skip
        tables = [TextTable("Safety factors of the next runs", _COLUMNS, rows, notes)]
        print_tables(tables + [table for summary in summaries for table in _runs_tables(summary)])
    else:
        print_text(with_command_name("\n".join([f"Nothing has been learned yet in {store.state}.", *notes, _NEXT])))


def _print_replay(store: FactorStore, key: str | None, device: str | None, name: str, *, as_json: bool) -> None:
    """Prints the runs of configurations with the factor that another policy would have set before each."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    objects, tables = [], []
    for summary in store.find(key, device):
        if not summary.runs:
            continue
        replay = replay_runs(summary, policy_of(summary.runs[-1], name))
        pairs = list(zip(summary.runs, replay.factors, strict=True))
        sizes = replay_sizes(summary)
        objects.append({
            "config_key": summary.key, "device": summary.device, "policy": name, "safety_factor": summary.factor,
            "replayed_safety_factor": replay.next_factor,
            "runs": [{"run_id": run.run_id, "attempt": run.attempt, "rank": run.rank, "end_time": run.end_time,
                      "factor": run.factor, "replayed_factor": factor, "peak_memory_pct": run.peak,
                      "outcome": run.outcome, "micro_batches": [asdict(size) for size in of_run]}
                     for (run, factor), of_run in zip(pairs, sizes, strict=True)],
        })  # fmt: skip
        rows = [(_with_rank(run, summary), str(run.attempt), _minute(run.ended), f"{run.factor:.4f}", f"{factor:.4f}",
                 _percent(run.peak), run.outcome) for run, factor in pairs]  # fmt: skip
        next_factor, in_force = ("–" if value is None else f"{value:.4f}"
                                 for value in (replay.next_factor, summary.factor))  # fmt: skip
        note = f"next: {name} {next_factor}; in force {in_force} ({summary.reason})"
        title = f"{summary.key} on {_shown_device(summary.device)}, replayed with {name}"
        columns = ("run", "attempt", "ended", "factor", name, "peak", "outcome")
        tables.append(TextTable(title, columns, rows, [note]))
        if any(sizes):
            title = f"{summary.key} on {_shown_device(summary.device)}: the fastest micro-batches by earlier runs"
            tables.append(TextTable(title, _SIZE_COLUMNS, list(_size_rows(summary, sizes)), []))
    if as_json:
        print_json({"replays": objects})
    elif tables:
        print_tables(tables)
    else:
        print_text("No run is left to replay: all of them began before a reset.")


def _with_rank(run: Observation, summary: FactorSummary) -> str:
    """Returns the name of a run, with the rank where several processes of an attempt have taught something."""
    several = any(other.rank for other in summary.runs if (other.run_id, other.attempt) == (run.run_id, run.attempt))
    return f"{run.run_id}, rank {run.rank}" if several else run.run_id


def _size_rows(summary: FactorSummary, sizes: Sequence[Sequence[ReplayedSize]]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each run and phase whose micro-batches were timed. Times are per sample."""
    for run, of_run in zip(summary.runs, sizes, strict=True):
        for size in of_run:
            yield (
                _with_rank(run, summary),
                _minute(run.ended),
                size.phase or "–",
                size.own_rung,
                f"{size.own_samples:.3g}",
                f"{size.samples:.3g}" if size.rung == size.own_rung else f"{size.samples:.3g} ({size.rung})",
                _microseconds(size.predicted_seconds),
                _microseconds(size.measured_seconds),
            )


def _microseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:,.4g} µs"


def _on(device: str | None) -> str:
    return f" on {device}" if device else ""


def _affected(store: FactorStore, key: str | None, device: str | None) -> tuple[list[FactorSummary], str | None]:
    """Finds the configurations that an event of a key is about; returns them with the key as the event has it."""
    matching = store.find(key, device)
    if key is None:
        return matching, None
    summaries = store.records()
    # A name in the listing is meant as it is; an event of a key without its size is one of all sizes.
    name = key if key in {summary.key for summary in summaries} else matching[0].key
    keys = {summary.key for summary in summaries if name in (summary.key, without_size(summary.key, summary.size))}
    devices = {summary.device for summary in matching}
    affected = [each for each in summaries if each.key in keys and (device is None or each.device in devices)]
    return affected, name


def _reset(store: FactorStore, key: str | None, device: str | None, *, yes: bool) -> _Report:
    affected, key = _affected(store, key, device)
    devices = {summary.device for summary in affected}
    if device is not None and devices == {ANY_DEVICE}:
        # A factor that was imported for any device serves this device, although nothing was learned on it.
        raise unknown_name("device", device, devices)
    keys = sorted({summary.key for summary in affected})
    runs = sum(len(summary.runs) for current in affected for summary in (current, *current.other_settings))
    what = f"{counted(runs, 'run')} of {keys[0] if len(keys) == 1 else counted(len(keys), 'key')}{_on(device)}"
    if not yes:
        question = f"Shall {what} teach nothing any more? Their history stays."
        ask(question, command="--reset", otherwise="Nothing was reset")
    path = store.reset(key, device)
    pinned = [summary for summary in affected if summary.state == "pinned"]
    notices = [f"{summary.key} on {_shown_device(summary.device)} is {summary.reason}: --unpin removes that"
               for summary in pinned]  # fmt: skip
    text = f"{', '.join(keys)}: no run teaches{_on(device)}; the next run is a first one."
    if runs:
        text = f"{what} teach nothing any more; the next run is a first one. Their history stays."
    return text, {"config_keys": keys, "device": device, "runs": runs, "event": str(path)}, notices


def _pin(store: FactorStore, key: str | None, device: str | None, value: float) -> _Report:
    if key is None:
        raise ConfigError("--pin needs a KEY", remedy="can-train factors lists keys")
    summaries, notices = store.records(), []
    keys = {summary.key for summary in summaries}
    # A key that no run has had is pinned as it was given, and so is a name in the listing.
    if key not in keys and keys_like(summaries, key):
        (key,) = full_keys(summaries, key)
    if key not in keys:
        nearest = ", ".join(nearest_first(key, keys)[:_SUGGESTIONS])
        hint = f" Known keys, nearest first: {nearest}." if nearest else ""
        notices.append(f"No run has had the key {key} yet.{hint}")
    path = store.pin(key, value, device)
    text = f"{key} is pinned at {value:g}{_on(device)}. Runs go on teaching beneath it; --unpin removes it."
    return text, {"config_key": key, "device": device, "value": value, "event": str(path)}, notices


def _unpin(store: FactorStore, key: str | None, device: str | None) -> _Report:
    if key is None:
        raise ConfigError("--unpin needs a KEY", remedy="can-train factors lists keys")
    affected, name = _affected(store, key, device)
    key, summaries = name or key, store.records()
    if all(summary.state != "pinned" for summary in affected):
        pinned = sorted({summary.key for summary in summaries if summary.state == "pinned"})
        remedy = f"Pinned: {', '.join(pinned)}" if pinned else "No key is pinned"
        raise ConfigError("The key is not pinned", value=f"{key}{_on(device)}", remedy=remedy)
    path = store.unpin(key, device)
    return f"{key} is no longer pinned{_on(device)}.", {"config_key": key, "device": device, "event": str(path)}, ()


def _export(store: FactorStore, key: str | None, device: str | None, file: str) -> _Report:
    export = make_export(store.find(key, device))
    if file == _STANDARD_OUTPUT:
        print_json(export)
        return "", {}, ()
    with writing("export", file, "Name a file in a folder that you may write to, or - for standard output"):
        write_json_atomic(Path(file), export)
    return f"{counted(len(export), 'key')} exported to {file}.", {"config_keys": list(export), "file": file}, ()


def _plot(store: FactorStore, key: str | None, device: str | None, file: Path) -> _Report:
    from can_train.report.charts import svg_file
    from can_train.report.figures import factor_chart

    if key is None:
        raise ConfigError("--plot needs a KEY", remedy="can-train factors lists keys")
    if file.suffix.lower() != ".svg":
        raise ConfigError("A plot can only be written as SVG", value=str(file), remedy="Name a file that ends in .svg")
    # A factor that was pinned or imported for any device has no runs.
    summaries = [summary for summary in store.find(key, device) if summary.runs]
    if len(summaries) > 1:
        devices = ", ".join(summary.device for summary in summaries)
        remedy = f"Add --device {summaries[0].device}"
        raise ConfigError("Runs on several kinds of device do not share a plot", value=devices, remedy=remedy)
    chart = factor_chart(summaries[0]) if summaries else None
    if chart is None:
        raise ConfigError("No run has taught anything yet", value=key, remedy="Train first: every run teaches")
    with writing("plot", file):
        write_text_atomic(file, svg_file(chart))
    drawn = summaries[0]
    values = {"config_key": drawn.key, "device": drawn.device, "runs": len(drawn.runs), "file": str(file)}
    text = f"{counted(len(drawn.runs), 'run')} of {drawn.key} on {_shown_device(drawn.device)} drawn in {file}."
    return text, values, ()


def _import(store: FactorStore, key: str | None, device: str | None, file: Path) -> _Report:
    if key is not None or device is not None:
        what = "KEY" if key is not None else "--device"
        raise ConfigError(f"{what} cannot be combined with --import, which takes all of a file",
                          remedy=f"Leave {what} out")  # fmt: skip
    path, keys = store.import_file(file)
    text = f"{counted(len(keys), 'key')} imported from {file}; their earlier runs teach nothing any more."
    if path is None:
        text = f"Nothing changed: {file} has the factors in force."
    return text, {"config_keys": keys, "file": str(file), "event": None if path is None else str(path)}, ()


# Tables and JSON


def _factor(summary: FactorFigures | FactorSummary) -> str:
    if summary.factor is None:
        return "–"
    if summary.state == "pinned" or summary.interval is None:
        return f"{summary.factor:.3f}"
    return f"{summary.factor:.3f} ± {summary.interval:.3f}"


def _reasons(figures: FactorFigures) -> Iterator[str]:
    yield figures.reason
    if figures.state == "learned":
        yield f"first: {figures.initial_reason}"
    if figures.state == "pinned" and figures.interval is not None:
        yield f"learned: {figures.learned_factor:.3f} ± {figures.interval:.3f}"
    if figures.imported_runs and figures.runs:
        yield f"{counted(figures.imported_runs, 'run')} of a file"
    if figures.runs_before_reset:
        yield f"+{counted(figures.runs_before_reset, 'run')} {_BEFORE_RESET}"
    if figures.runs_with_other_settings:
        yield f"+{counted(figures.runs_with_other_settings, 'run')} with other settings"


def _runs_tables(summary: FactorSummary) -> list[TextTable]:
    """Makes the list of a configuration's runs on one kind of device, oldest first; then one list for each of the other
    settings. Without a run there is no list.
    """
    if not (summary.all_runs or summary.other_settings):
        return []
    notes = []
    name = f"{summary.key} on {_shown_device(summary.device)}"
    if summary.aim_reason:
        notes.append(f"aims at {summary.aim:.1%} instead of {summary.target:.1%}: {summary.aim_reason}")
    *earlier, last = _settings_apart([other.fingerprint for other in summary.other_settings] + [summary.fingerprint])
    tables = [_runs_table(f"{name}{f', {last}' if last else ''}", summary, notes)]
    for other, settings in zip(summary.other_settings, earlier, strict=True):
        tables.append(_runs_table(f"{name}, {settings}", other, [f"factor {_factor(other)}, {other.reason}"]))
    return tables


def _runs_table(title: str, summary: FactorSummary, notes: Sequence[str]) -> TextTable:
    before, runs = len(summary.runs_before_reset), list(enumerate(summary.all_runs))
    older = len(runs) - _LISTED_RUNS
    if older > 0:
        notes = [*notes, f"{counted(older, 'earlier run')}: can-train factors {summary.key} --show --json"]
    rows = [
        (run.run_id, str(run.attempt), _minute(run.ended), f"{run.factor:.4f}",
         "–" if run.used is None else f"{run.used:.3f}", _percent(run.peak), str(run.logical_batch),
         str(run.largest_micro_batch), run.outcome,
         "; ".join(filter(None, (_BEFORE_RESET if index < before else "", run_notes(run)))))
        for index, run in runs[-_LISTED_RUNS:]
    ]  # fmt: skip
    return TextTable(title, _RUN_COLUMNS, rows, notes)


def _settings_apart(fingerprints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describes each group of settings by the settings that differ between the groups."""
    groups = [dict(flat(fingerprint)) for fingerprint in fingerprints]
    names = differences(groups)
    return [" ".join(f"{name}={settings[name]}" if name in settings else f"no {name}" for name in names)
            for settings in groups]  # fmt: skip


def _figures_json(figures: FactorFigures) -> dict[str, Any]:
    """Makes plain values of figures; peaks are shares of the capacity."""
    values = {_JSON_NAMES.get(name, name): value for name, value in asdict(figures).items()
              if name not in ("size", "imported_runs")}  # fmt: skip
    return {**values, "num_runs": figures.runs + figures.imported_runs}


def _summary_json(summary: FactorSummary) -> dict[str, Any]:
    before = len(summary.runs_before_reset)
    runs = [
        {**asdict(run), "peak_memory_pct": run.peak, "before_reset": index < before}
        for index, run in enumerate(summary.all_runs)
    ]
    return {**_figures_json(summary.figures), "fingerprint": summary.fingerprint, "runs": runs,
            "other_settings": [_summary_json(other) for other in summary.other_settings]}  # fmt: skip


def _shown_device(device: str) -> str:
    """Returns a kind of device as a sentence names it."""
    return "any other device" if device == ANY_DEVICE else device


def _minute(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
