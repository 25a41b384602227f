"""What `can-train factors` does beside showing: resets, pins, exports and imports. Each action writes at most one
event, refreshes the export, and says in words and in plain values what it did.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer

from can_train.cli.factors_tables import named_device
from can_train.errors import ConfigError, StateError, nearest_first
from can_train.state.atomic import json_text, write_text_atomic
from can_train.state.events import Event
from can_train.state.export import export_of
from can_train.state.factor_store import FactorStore
from can_train.state.records import FactorRecord, find_records, full_key, keys_like

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
    records: Sequence[FactorRecord]
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
