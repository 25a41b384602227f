"""`can-train factors`: shows the safety factors that were learned, and resets, pins, exports, imports and draws them.
Each action writes at most one event, refreshes the export, and reports the change in words or as JSON.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.cli.factors_tables import (
    factors_json,
    factors_table,
    record_notes,
    replay_json,
    replay_table,
    runs_tables,
    shown_device,
)
from can_train.cli.output import confirm, print_aside, print_json, print_tables, print_text
from can_train.errors import ConfigError, StateError, nearest_first, unknown_name, with_command_name
from can_train.factors.exchange import make_export
from can_train.factors.observations import ANY_DEVICE, read_records, without_size
from can_train.factors.policies import POLICIES
from can_train.factors.store import FactorStore, get_safety_factor_db, replay_runs
from can_train.factors.summary import FactorSummary, find_summaries, full_keys, keys_like, policy_of, read_figures
from can_train.io.records import write_json_atomic, write_text_atomic
from can_train.io.units import counted

_STANDARD_OUTPUT: Final = "-"
_SUGGESTIONS: Final = 3
_NEXT: Final = "Every training run teaches: can-train --help shows how to start one."


def factors(  # noqa: PLR0913 - Typer makes an option of each argument
    key: Annotated[
        str | None,
        typer.Argument(help="Configuration key, with or without its size; all of them without.", metavar="[KEY]"),
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
    state_dir: Annotated[
        str | None,
        typer.Option(help="State folder. [$CAN_TRAIN_HOME, else the user's state directory]", metavar="FOLDER"),
    ] = None,
) -> None:
    """Show the learned safety factors and the runs that taught them; reset, pin, export or import them."""
    for name, value in {"KEY": key, "--device": device, "--state-dir": state_dir, "--export": export}.items():
        if value == "":
            raise ConfigError(f"{name} is empty", remedy="Give a value or leave it out; can-train factors lists keys")
    asked = {"reset": reset, "pin": pin is not None, "unpin": unpin, "export": export is not None,
             "import": import_file is not None, "replay": replay is not None, "plot": plot is not None,
             "show": show}  # fmt: skip
    actions = [name for name, is_given in asked.items() if is_given]
    if len(actions) > 1:
        switches = " and ".join(f"--{name}" for name in actions)
        raise ConfigError(f"{switches} cannot be combined", remedy="Leave one out")
    store = get_safety_factor_db(state_dir)
    if replay is not None:
        return _print_replay(store, key, device, replay, as_json=as_json)
    if reset:
        result = _reset(store, key, device, yes=yes)
    elif pin is not None:
        result = _pin(store, key, device, pin)
    elif unpin:
        result = _unpin(store, key, device)
    elif export is not None:
        result = _export(store, key, device, export)
    elif plot is not None:
        result = _plot(store, key, device, plot)
    elif import_file is not None:
        result = _import(store, key, device, import_file)
    else:
        return _print_summaries(store, key, device, show=show or key is not None, as_json=as_json)
    return _print_result(actions[0], result, store, as_json=as_json)


def _print_summaries(store: FactorStore, key: str | None, device: str | None, *, show: bool, as_json: bool) -> None:
    records = read_records(store.state)
    figures = read_figures(store.state, records)
    if figures or key is not None:
        figures = find_summaries(figures, key, device)
    summaries = store.of_figures(figures, records) if show else []
    if as_json:
        print_json(factors_json(summaries or figures, records))
    elif figures:
        tables = [factors_table(figures, record_notes(records))]
        print_tables(tables + [table for summary in summaries for table in runs_tables(summary)])
    else:
        lines = [f"Nothing has been learned yet in {store.state}.", *record_notes(records), _NEXT]
        print_text(with_command_name("\n".join(lines)))


def _print_replay(store: FactorStore, key: str | None, device: str | None, name: str, *, as_json: bool) -> None:
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    summaries = [summary for summary in store.find(key, device) if summary.runs]
    replays = [replay_runs(summary, policy_of(summary.runs[-1], name)) for summary in summaries]
    if as_json:
        print_json({"replays": [replay_json(replay, name) for replay in replays]})
    elif replays:
        print_tables([replay_table(replay, name) for replay in replays])
    else:
        print_text("No run is left to replay: all of them began before a reset.")


@dataclass(frozen=True)
class ActionResult:
    """The report of an action."""

    text: str  # empty where the output is the result
    values: Mapping[str, Any]  # as --json prints it
    notices: Sequence[str] = ()


def _print_result(action: str, result: ActionResult, store: FactorStore, *, as_json: bool) -> None:
    notices = list(result.notices)
    if "event" in result.values:
        try:
            store.refresh_export()
        except StateError as error:
            notices.append(f"The change holds, but {store.db_path.name} is out of date. {error}")
    if as_json and result.values:
        print_json({"action": action, **result.values, "notices": notices})
        return
    if result.text:
        print_text(with_command_name(result.text))
    for notice in notices:
        print_aside(with_command_name(notice))


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


def _reset(store: FactorStore, key: str | None, device: str | None, *, yes: bool) -> ActionResult:
    affected, key = _affected(store, key, device)
    devices = {summary.device for summary in affected}
    if device is not None and devices == {ANY_DEVICE}:
        # A factor that was imported for any device serves this device, although nothing was learned on it.
        raise unknown_name("device", device, devices)
    keys = sorted({summary.key for summary in affected})
    runs = sum(len(summary.runs) for current in affected for summary in (current, *current.other_settings))
    what = f"{counted(runs, 'run')} of {keys[0] if len(keys) == 1 else counted(len(keys), 'key')}{_on(device)}"
    if not yes and not sys.stdin.isatty():
        raise ConfigError("Nothing was reset, since --reset asks first and standard input is no terminal",
                          remedy="Add --yes")  # fmt: skip
    if not yes and not confirm(f"Shall {what} teach nothing any more? Their history stays."):
        print_aside("Nothing was reset.")
        raise typer.Exit(1)
    path = store.reset(key, device)
    pinned = [summary for summary in affected if summary.state == "pinned"]
    notices = [f"{summary.key} on {shown_device(summary.device)} is {summary.reason}: --unpin removes that"
               for summary in pinned]  # fmt: skip
    text = f"{', '.join(keys)}: no run teaches{_on(device)}; the next run is a first one."
    if runs:
        text = f"{what} teach nothing any more; the next run is a first one. Their history stays."
    return ActionResult(text, {"config_keys": keys, "device": device, "runs": runs, "event": str(path)}, notices)


def _pin(store: FactorStore, key: str | None, device: str | None, value: float) -> ActionResult:
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
    return ActionResult(text, {"config_key": key, "device": device, "value": value, "event": str(path)}, notices)


def _unpin(store: FactorStore, key: str | None, device: str | None) -> ActionResult:
    if key is None:
        raise ConfigError("--unpin needs a KEY", remedy="can-train factors lists keys")
    affected, name = _affected(store, key, device)
    key, summaries = name or key, store.records()
    if all(summary.state != "pinned" for summary in affected):
        pinned = sorted({summary.key for summary in summaries if summary.state == "pinned"})
        remedy = f"Pinned: {', '.join(pinned)}" if pinned else "No key is pinned"
        raise ConfigError("The key is not pinned", value=f"{key}{_on(device)}", remedy=remedy)
    path = store.unpin(key, device)
    values = {"config_key": key, "device": device, "event": str(path)}
    return ActionResult(f"{key} is no longer pinned{_on(device)}.", values)


def _export(store: FactorStore, key: str | None, device: str | None, file: str) -> ActionResult:
    export = make_export(store.find(key, device))
    if file == _STANDARD_OUTPUT:
        print_json(export)
        return ActionResult("", {})
    try:
        write_json_atomic(Path(file), export)
    except OSError as error:
        remedy = "Name a file in a folder that you may write to, or - for standard output"
        raise ConfigError("The export cannot be written", value=f"{file}: {error}", remedy=remedy) from error
    values = {"config_keys": list(export), "file": file}
    return ActionResult(f"{counted(len(export), 'key')} exported to {file}.", values)


def _plot(store: FactorStore, key: str | None, device: str | None, file: Path) -> ActionResult:
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
    try:
        write_text_atomic(file, svg_file(chart))
    except OSError as error:
        raise ConfigError("The plot cannot be written", value=f"{file}: {error.strerror}",
                          remedy="Name a file in a folder that you may write to") from error  # fmt: skip
    drawn = summaries[0]
    values = {"config_key": drawn.key, "device": drawn.device, "runs": len(drawn.runs), "file": str(file)}
    text = f"{counted(len(drawn.runs), 'run')} of {drawn.key} on {shown_device(drawn.device)} drawn in {file}."
    return ActionResult(text, values)


def _import(store: FactorStore, key: str | None, device: str | None, file: Path) -> ActionResult:
    if key is not None or device is not None:
        what = "KEY" if key is not None else "--device"
        raise ConfigError(f"{what} cannot be combined with --import, which takes all of a file",
                          remedy=f"Leave {what} out")  # fmt: skip
    path, keys = store.import_file(file)
    text = f"{counted(len(keys), 'key')} imported from {file}; their earlier runs teach nothing any more."
    if path is None:
        text = f"Nothing changed: {file} has the factors in force."
    event = None if path is None else str(path)
    return ActionResult(text, {"config_keys": keys, "file": str(file), "event": event})
