"""`can-train factors`: shows the safety factors that were learned, and resets, pins, exports and imports them. Each
action writes at most one event, refreshes the export, and reports what it did in words or as JSON.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.cli.factors_tables import (
    counted,
    factors_json,
    factors_table,
    log_notes,
    replay_json,
    replay_table,
    runs_tables,
    shown_device,
)
from can_train.cli.output import print_tables
from can_train.errors import ConfigError, StateError, nearest_first, unknown_name
from can_train.factors.events import read_events
from can_train.factors.exchange import make_export
from can_train.factors.observations import read_observations
from can_train.factors.policies import POLICIES
from can_train.factors.store import FactorStore, get_safety_factor_db, replay
from can_train.factors.summary import FactorSummary, find_summaries, full_key, keys_like, policy_of, summarize
from can_train.io.atomic import json_text, write_text_atomic

_STANDARD_OUTPUT: Final = "-"

_SUGGESTIONS: Final = 3

_NEXT: Final = "Every training run teaches: can-train --help shows how to start one."


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line's arguments, by their names in the signature of `factors`."""

    key: str | None
    show: bool
    reset: bool
    pin: float | None
    unpin: bool
    export: str | None
    import_file: Path | None
    replay: str | None
    device: str | None
    as_json: bool
    yes: bool
    state_dir: str | None

    @property
    def on_device(self) -> str:
        """The device as the end of a sentence."""
        return f" on {self.device}" if self.device else ""

    def need_key(self, flag: str) -> str:
        """Returns the KEY of an action that needs one."""
        if not self.key:
            raise ConfigError(f"{flag} needs a KEY", remedy="can-train factors lists keys")
        return self.key


def factors(  # noqa: PLR0913 - Typer makes an option of each argument
    *,
    key: Annotated[
        str | None,
        typer.Argument(help="Configuration key, with or without its size; all of them without.", metavar="[KEY]"),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="List every run; with a KEY that is done anyway.")] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Exclude the runs so far from learning; their history stays.")
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
        str | None,
        typer.Option(help=f"Show what another policy would have set: {', '.join(POLICIES)}.", metavar="POLICY"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Kind of device, as v100-16gb.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --reset.")] = False,
    state_dir: Annotated[
        str | None,
        typer.Option(help="State folder. [$CAN_TRAIN_HOME, else the user's state directory]", metavar="FOLDER"),
    ] = None,
) -> None:
    """Show the safety factors that were learned, and from which runs; reset, pin, export or import them."""
    request = Request(**locals())
    action = _action(request)
    store = get_safety_factor_db(request.state_dir)
    if action in _ACTIONS:
        _run_action(action, request, store)
    else:
        _show(request, store)


def _action(request: Request) -> str:
    """Returns the one thing that is asked for; empty for the table.

    Raises:
        ConfigError: Several things are, or something that does not go with it.
    """
    given = {"import" if name == "import_file" else name: value for name, value in vars(request).items()}
    asked = [name for name in (*_ACTIONS, "show") if given[name] is not None and given[name] is not False]
    if len(asked) > 1:
        switches = " and ".join(f"--{name}" for name in asked)
        raise ConfigError("One thing at a time", value=switches, remedy="Give one of them")
    if asked == ["import"] and (request.key is not None or request.device is not None):
        what = "a KEY" if request.key is not None else "--device"
        raise ConfigError("--import takes all of a file", value=what, remedy=f"Leave {what} out")
    for name, value in (("KEY", request.key), ("--device", request.device), ("--state-dir", request.state_dir)):
        if value == "":
            raise ConfigError(f"{name} is empty", remedy="Give a value or leave it out; can-train factors lists keys")
    return asked[0] if asked else ""


def _show(request: Request, store: FactorStore) -> None:
    log, events = read_observations(store.state), read_events(store.state)
    summaries = summarize(log.finished, events.events, store.policy)
    show = request.show or request.key is not None
    if summaries or request.key is not None:
        summaries = find_summaries(summaries, request.key, request.device)
    if request.as_json:
        _print_json(factors_json(summaries, log, events, show=show))
    elif summaries:
        tables = [factors_table(summaries, log_notes(log, events))]
        print_tables(tables + [table for summary in summaries if show for table in runs_tables(summary)])
    else:
        print("\n".join([f"Nothing has been learned yet in {store.state}.", *log_notes(log, events), _NEXT]))


@dataclass(frozen=True)
class ActionResult:
    """What an action did."""

    text: str  # empty where the output is the result
    values: Mapping[str, Any]  # the same for --json
    notices: Sequence[str] = ()


def _run_action(name: str, request: Request, store: FactorStore) -> None:
    result = _ACTIONS[name](request, store)
    notices = list(result.notices)
    if "event" in result.values:
        try:
            store.refresh_export()
        except StateError as error:
            notices.append(f"The change holds, but {store.db_path.name} is out of date. {error}")
    if request.as_json and result.values:
        _print_json({"action": name, **result.values, "notices": notices})
        return
    if result.text:
        print(result.text)
    for notice in notices:
        print(notice, file=sys.stderr)


def _reset(request: Request, store: FactorStore) -> ActionResult:
    found = find_summaries(store.records(), request.key, request.device)
    keys = sorted({summary.key for summary in found})
    runs = sum(len(summary.runs) for one in found for summary in (one, *one.other_settings))
    what = f"{counted(runs, 'run')} of {keys[0] if len(keys) == 1 else counted(len(keys), 'key')}{request.on_device}"
    if not request.yes:
        _confirm(f"Shall {what} teach nothing any more? Their history stays.")
    path = store.reset(None if request.key is None else keys[0], request.device)
    notices = [
        f"{one.key} on {shown_device(one.device)} is {one.reason}: --unpin removes that"
        for one in found
        if one.state == "pinned"
    ]
    if runs:
        text = f"{what} teach nothing any more; the next run is a first one. Their history stays."
    else:
        text = f"{', '.join(keys)}: no run teaches{request.on_device}; the next run is a first one."
    return ActionResult(
        text, {"config_keys": keys, "device": request.device, "runs": runs, "event": str(path)}, notices
    )


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(
            "--reset asks first, and nobody can answer here", value="standard input is no terminal", remedy="Add --yes"
        )
    if not typer.confirm(question, err=True):
        typer.echo("Nothing was reset.", err=True)
        raise typer.Exit(1)


def _pin(request: Request, store: FactorStore) -> ActionResult:
    given, value, summaries = request.need_key("--pin"), request.pin or 0.0, store.records()
    known = {summary.key for summary in summaries}
    key = full_key(summaries, given) if keys_like(summaries, given) else given
    notices = []
    if key not in known:
        nearest = ", ".join(nearest_first(key, known)[:_SUGGESTIONS])
        hint = f" Known keys, nearest first: {nearest}." if nearest else ""
        notices.append(f"No run has had the key {key} yet.{hint}")
    path = store.pin(key, value, request.device)
    text = f"{key} is pinned at {value:g}{request.on_device}. Runs are still learned from; --unpin removes the pin."
    values = {"config_key": key, "device": request.device, "value": value, "event": str(path)}
    return ActionResult(text, values, notices)


def _unpin(request: Request, store: FactorStore) -> ActionResult:
    summaries = store.records()
    found = find_summaries(summaries, request.need_key("--unpin"), request.device)
    key = found[0].key
    if all(summary.state != "pinned" for summary in found):
        pinned = sorted({summary.key for summary in summaries if summary.state == "pinned"})
        remedy = f"Pinned: {', '.join(pinned)}" if pinned else "No key is pinned"
        raise ConfigError("The key is not pinned", value=f"{key}{request.on_device}", remedy=remedy)
    path = store.unpin(key, request.device)
    values = {"config_key": key, "device": request.device, "event": str(path)}
    return ActionResult(f"{key} is no longer pinned{request.on_device}.", values)


def _export(request: Request, store: FactorStore) -> ActionResult:
    summaries = find_summaries(store.records(), request.key, request.device)
    export = make_export(summaries, read_events(store.state).events)
    text, file = json_text(export), str(request.export)
    if file == _STANDARD_OUTPUT:
        sys.stdout.write(text)
        return ActionResult("", {})
    try:
        write_text_atomic(Path(file), text)
    except OSError as error:
        remedy = "Name a file in a folder that you may write to, or - for standard output"
        raise ConfigError("The export cannot be written", value=f"{file}: {error}", remedy=remedy) from error
    return ActionResult(
        f"{counted(len(export), 'key')} exported to {file}.", {"config_keys": list(export), "file": file}
    )


def _import(request: Request, store: FactorStore) -> ActionResult:
    file = str(request.import_file)
    path, keys = store.import_file(Path(file))
    if path is None:
        text = f"Nothing changed: {file} has the factors in force."
        return ActionResult(text, {"config_keys": [], "file": file, "event": None})
    text = f"{counted(len(keys), 'key')} imported from {file}; their earlier runs teach nothing any more."
    return ActionResult(text, {"config_keys": keys, "file": file, "event": str(path)})


def _replay(request: Request, store: FactorStore) -> ActionResult:
    name = str(request.replay)
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    found: list[FactorSummary] = find_summaries(store.records(), request.key, request.device)
    replays = [replay(summary, policy_of(summary.runs[-1], name)) for summary in found if summary.runs]
    if request.as_json:
        _print_json({"replays": [replay_json(one, name) for one in replays]})
    elif replays:
        print_tables([replay_table(one, name) for one in replays])
    else:
        print("No run is left to replay: all of them began before a reset.")
    return ActionResult("", {})


_ACTIONS: Final[Mapping[str, Callable[[Request, FactorStore], ActionResult]]] = {
    "reset": _reset, "pin": _pin, "unpin": _unpin, "export": _export, "import": _import, "replay": _replay,
}  # fmt: skip


def _print_json(values: Mapping[str, Any]) -> None:
    print(json.dumps(values, indent=2, ensure_ascii=False))
