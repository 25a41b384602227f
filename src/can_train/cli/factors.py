"""What `can-train factors` does beside showing: resets, pins, exports and imports. Each action writes at most one
event, refreshes the export, and says in words and in plain values what it did.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.cli.factors_tables import (
    factors_json,
    factors_table,
    log_notes,
    named_device,
    replay_json,
    replay_table,
    runs_tables,
)
from can_train.cli.output import print_tables
from can_train.errors import ConfigError, StateError, nearest_first, unknown_name
from can_train.factors.events import Event, EventLog, read_events
from can_train.factors.observations import ObservationLog, read_observations
from can_train.factors.policies import POLICIES
from can_train.factors.records import FactorSummary, find_records, full_key, keys_like, policy_of, records_of
from can_train.factors.store import FactorStore, export_of, get_safety_factor_db, replay
from can_train.io.atomic import json_text, write_text_atomic

_STANDARD_OUTPUT: Final = "-"


_SUGGESTIONS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for: its arguments by their names."""

    key: str | None = None
    show: bool = False
    reset: bool = False
    pin: float | None = None
    unpin: bool = False
    export: str | None = None
    import_file: Path | None = None
    replay: str | None = None
    device: str | None = None
    as_json: bool = False
    yes: bool = False
    state_dir: str | None = None


@dataclass(frozen=True)
class Store:
    """The store, and what was read of it.

    Attributes:
        files: Where events are written.
        records: All that is known.
        events: By their time.
    """

    files: FactorStore
    records: Sequence[FactorSummary]
    events: Sequence[Event]


@dataclass(frozen=True)
class Done:
    """What an action did.

    Attributes:
        text: In words; empty where the output is the result.
        values: The same as plain values.
        notices: What a person should know beside it.
    """

    text: str
    values: Mapping[str, Any]
    notices: Sequence[str] = field(default=())


Action = Callable[[Request, Store], Done]


def reset(request: Request, store: Store) -> Done:
    """Lets runs teach nothing any more, after asking."""
    found = find_records(store.records, request.key, request.device)
    keys = sorted({record.key for record in found})
    runs = sum(len(record.runs) for one in found for record in (one, *one.others))
    what = f"{_counted(runs, 'run')} of {keys[0] if len(keys) == 1 else _counted(len(keys), 'key')}{_on(request)}"
    if not request.yes:
        _ask(f"Shall {what} teach nothing any more? Their history stays.")
    path = store.files.reset(None if request.key is None else keys[0], request.device)
    pinned = [f"{one.key} on {named_device(one.device)} is {one.why}: --unpin removes that" for one in found
              if one.state == "pinned"]  # fmt: skip
    if runs:
        text = f"{what} teach nothing any more; the next run is a first one. Their history stays."
    else:
        text = f"{', '.join(keys)}: no run teaches{_on(request)}; the next run is a first one."
    return Done(text, {"config_keys": keys, "device": request.device, "runs": runs, "event": str(path)}, pinned)


def pin(request: Request, store: Store) -> Done:
    """Fixes a factor, also of a key that no run has yet."""
    given, value = _key(request, "--pin"), request.pin or 0.0
    known = {record.key for record in store.records}
    key = full_key(store.records, given) if keys_like(store.records, given) else given
    notices = []
    if key not in known:
        nearest = ", ".join(nearest_first(key, known)[:_SUGGESTIONS])
        hint = f" Known keys, nearest first: {nearest}." if nearest else ""
        notices.append(f"No run has had the key {key} yet.{hint}")
    path = store.files.pin(key, value, request.device)
    text = f"{key} is pinned at {value:g}{_on(request)}. Runs go on teaching beneath it; --unpin removes it."
    return Done(text, {"config_key": key, "device": request.device, "value": value, "event": str(path)}, notices)


def unpin(request: Request, store: Store) -> Done:
    """Lets the learned factor hold again."""
    found = find_records(store.records, _key(request, "--unpin"), request.device)
    key = found[0].key
    if all(record.state != "pinned" for record in found):
        pinned = sorted({record.key for record in store.records if record.state == "pinned"})
        remedy = f"Pinned: {', '.join(pinned)}" if pinned else "No key is pinned"
        raise ConfigError("The key is not pinned", value=f"{key}{_on(request)}", remedy=remedy)
    path = store.files.unpin(key, request.device)
    text = f"{key} is no longer pinned{_on(request)}."
    return Done(text, {"config_key": key, "device": request.device, "event": str(path)})


def export(request: Request, store: Store) -> Done:
    """Writes factors to a file, or to standard output."""
    exported = export_of(find_records(store.records, request.key, request.device), store.events)
    text, target = json_text(exported), str(request.export)
    if target == _STANDARD_OUTPUT:
        sys.stdout.write(text)
        return Done("", {})
    try:
        write_text_atomic(Path(target), text)
    except OSError as error:
        remedy = "Name a file in a folder that you may write to, or - for standard output"
        raise ConfigError("The export cannot be written", value=f"{target}: {error}", remedy=remedy) from error
    return Done(
        f"{_counted(len(exported), 'key')} exported to {target}.", {"config_keys": list(exported), "file": target}
    )


def import_file(request: Request, store: Store) -> Done:
    """Takes over a file's factors."""
    path, keys = store.files.import_file(Path(str(request.import_file)))
    text = (
        f"{_counted(len(keys), 'key')} imported from {request.import_file}; their earlier runs teach nothing any more."
    )
    return Done(text, {"config_keys": keys, "file": str(request.import_file), "event": str(path)})


_WRITING: Final[Mapping[str, Action]] = {"reset": reset, "pin": pin, "unpin": unpin, "import": import_file}
"""Actions that change factors, after which the export is out of date."""


def act(name: str, request: Request, store: Store) -> None:
    """Does an action and prints what it did.

    Raises:
        CanTrainError: The action is not possible; nothing was changed.
    """
    done = _WRITING.get(name, export)(request, store)
    notices = list(done.notices)
    if name in _WRITING:
        notices += _refreshed(store.files)
    if request.as_json and done.values:
        values = {"action": name, **done.values, "notices": notices}
        print(json.dumps(values, indent=2, ensure_ascii=False))
        return
    if done.text:
        print(done.text)
    for notice in notices:
        print(notice, file=sys.stderr)


def _refreshed(store: FactorStore) -> list[str]:
    """Refreshes the export; what stood in the way, if anything did."""
    try:
        store.refresh_export()
    except StateError as error:
        return [f"It holds, but {store.db_path.name} is out of date. {error}"]
    return []


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(
            "--reset asks first, and nobody can answer here", value="standard input is no terminal", remedy="Add --yes"
        )
    if not typer.confirm(question, err=True):
        typer.echo("Nothing was reset.", err=True)
        raise typer.Exit(1)


def _key(request: Request, flag: str) -> str:
    if not request.key:
        raise ConfigError(f"{flag} needs a KEY", remedy="can-train factors lists keys")
    return request.key


def _on(request: Request) -> str:
    return f" on {request.device}" if request.device else ""


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


_NEXT: Final = "Every training run teaches: can-train --help shows how to start one."


_OPTIONS: Final[dict[str, Any]] = {
    "key": Annotated[
        str | None,
        typer.Argument(help="Configuration key, with or without its size; all of them without.", metavar="[KEY]"),
    ],
    "show": Annotated[bool, typer.Option("--show", help="List every run; with a KEY that is done anyway.")],
    "reset": Annotated[bool, typer.Option("--reset", help="Let the runs so far teach nothing any more; they stay.")],
    "pin": Annotated[float | None, typer.Option(help="Fix the factor of KEY, whatever is learned.", metavar="VALUE")],
    "unpin": Annotated[bool, typer.Option("--unpin", help="Let the learned factor of KEY hold again.")],
    "export": Annotated[str | None, typer.Option(help="Write factors as JSON; - is standard output.", metavar="FILE")],
    "import_file": Annotated[Path | None, typer.Option("--import", help="Take over a file's factors.", metavar="FILE")],
    "replay": Annotated[
        str | None, typer.Option(help=f"What another policy would have done: {', '.join(POLICIES)}.", metavar="POLICY")
    ],
    "device": Annotated[str | None, typer.Option(help="Kind of device, as v100-16gb.")],
    "as_json": Annotated[bool, typer.Option("--json", help="Print JSON.")],
    "yes": Annotated[bool, typer.Option("--yes", help="Do not ask before --reset.")],
    "state_dir": Annotated[
        str | None,
        typer.Option(help="State folder. [$CAN_TRAIN_HOME, else the user's state directory]", metavar="FOLDER"),
    ],
}


_ACTIONS: Final = ("reset", "pin", "unpin", "export", "import", "replay", "show")
"""Of these, one at a time. `--show` lists runs, which `--replay` does anyway."""


def make_factors_command() -> Callable[..., None]:
    """Makes the command; its signature is made of the options above, its defaults are those of `Request`."""

    def factors(**arguments: Any) -> None:
        """Show the safety factors that were learned, and from which runs; reset, pin, export or import them."""
        _factors(Request(**arguments))

    defaults = vars(Request())
    factors.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
            for name, annotation in _OPTIONS.items()
        ]
    )
    return factors


def _factors(request: Request) -> None:
    action = _action(request)
    store = get_safety_factor_db(request.state_dir)
    log, events = read_observations(store.state), read_events(store.state)
    records = records_of(log.finished, events.events, store.policy)
    if action == "replay":
        _replay(request, records)
    elif action not in (None, "show"):
        act(action, request, Store(store, records, events.events))
    elif not records and request.key is None and not request.as_json:
        print("\n".join([f"Nothing has been learned yet in {store.state}.", *log_notes(log, events), _NEXT]))
    else:
        found = find_records(records, request.key, request.device) if records or request.key is not None else records
        _show(request, found, log, events)


def _action(request: Request) -> str | None:
    """Finds the one thing that is asked for; None is the table.

    Raises:
        ConfigError: Several things are, or something that does not go with it.
    """
    given = {"import" if name == "import_file" else name: value for name, value in vars(request).items()}
    asked = [name for name in _ACTIONS if given[name] is not None and given[name] is not False]
    if len(asked) > 1:
        switches = " and ".join(f"--{name}" for name in asked)
        raise ConfigError("One thing at a time", value=switches, remedy="Give one of them")
    if asked == ["import"] and (request.key is not None or request.device is not None):
        what = "a KEY" if request.key is not None else "--device"
        raise ConfigError("--import takes all of a file", value=what, remedy=f"Leave {what} out")
    for name, value in (("KEY", request.key), ("--device", request.device), ("--state-dir", request.state_dir)):
        if value == "":
            raise ConfigError(f"{name} is empty", remedy="Give a value or leave it out; can-train factors lists keys")
    return asked[0] if asked else None


def _show(request: Request, records: Sequence[FactorSummary], log: ObservationLog, events: EventLog) -> None:
    show = request.show or request.key is not None
    if request.as_json:
        _print_json(factors_json(records, log, events, show=show))
        return
    tables = [factors_table(records, log_notes(log, events))]
    print_tables(tables + [table for record in records if show for table in runs_tables(record)])


def _replay(request: Request, records: Sequence[FactorSummary]) -> None:
    name = str(request.replay)
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    found = [record for record in find_records(records, request.key, request.device) if record.runs]
    done = [replay(record, policy_of(record.runs[-1], name)) for record in found]
    if request.as_json:
        _print_json({"replays": [replay_json(each, name) for each in done]})
    elif done:
        print_tables([replay_table(each, name) for each in done])
    else:
        print("No run is left to replay: all of them began before a reset.")


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2, ensure_ascii=False))
