"""`can-train factors [KEY]`: shows what past runs taught, and takes a person's decisions about it. Imports neither
torch nor Hydra, so that it answers at once.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.cli.factors_actions import Request, Store, act
from can_train.cli.factors_tables import factors_json, factors_table, log_notes, replay_json, replay_table, runs_tables
from can_train.cli.tables import print_tables
from can_train.errors import ConfigError, unknown_name
from can_train.policy.policies import POLICIES
from can_train.state.events import EventLog, read_events
from can_train.state.factor_store import get_safety_factor_db
from can_train.state.observations import ObservationLog, read_observations
from can_train.state.records import FactorRecord, find_records, policy_of, records_of
from can_train.state.replay import replay

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


def _show(request: Request, records: Sequence[FactorRecord], log: ObservationLog, events: EventLog) -> None:
    show = request.show or request.key is not None
    if request.as_json:
        _print_json(factors_json(records, log, events, show=show))
        return
    tables = [factors_table(records, log_notes(log, events))]
    print_tables(tables + [table for record in records if show for table in runs_tables(record)])


def _replay(request: Request, records: Sequence[FactorRecord]) -> None:
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
