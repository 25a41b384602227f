"""`can-train runs`: the runs there are, with their states; once, again and again, or the best ones. Imports neither
torch nor Hydra, so that it answers at once.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from can_train.cli.looking import AsJson, Place, RunsDir, StateDir, told
from can_train.cli.requests import command_of
from can_train.cli.runs_tables import run_json, runs_table, strict
from can_train.cli.tables import TextTable, print_tables
from can_train.errors import ConfigError
from can_train.launch.ranking import Ranked, rank
from can_train.launch.survey import Surveyed, short_name, survey

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
    place, limit = Place(request.runs_dir, request.state_dir), request.limit
    if request.watch and (request.as_json or request.best is not None):
        other = "--json" if request.as_json else "--best"
        raise ConfigError("--watch shows the table", value=f"--watch {other}", remedy="Give one of them")
    if request.best is not None:
        _best(place, request.best, limit, as_json=request.as_json)
    elif request.watch:
        _watch(place, limit)
    elif request.as_json:
        print(json.dumps([run_json(each) for each in _looked(place, limit)[0]], indent=2, ensure_ascii=False))
    else:
        _print(*_looked(place, limit), place)


def _looked(place: Place, limit: int) -> tuple[list[Surveyed], int]:
    """Finds out about the newest runs; returns also how many there are besides."""
    known = place.runs()
    chosen = known[:limit] if limit else known
    return survey(chosen, place.registry), len(known) - len(chosen)


def _print(found: Sequence[Surveyed], older: int, place: Place) -> None:
    if found:
        print_tables([runs_table(found, older)])
    else:
        print(f"No run is there yet, neither in {place.runs_dir} nor in the state folder.")
        print("can-train --help shows how to start one.")


def _watch(place: Place, limit: int) -> None:
    """Looks until Ctrl-C: a terminal is redrawn, a pipe gets a line for each run that has changed."""
    before: dict[str, str] = {}
    try:
        while True:
            found, older = _looked(place, limit)
            if sys.stdout.isatty():
                print(_CLEAR, end="")
                _print(found, older, place)
            lines = {each.known.run_id: told(each.state) for each in found}
            changed = [run_id for run_id in reversed(lines) if before.get(run_id) != lines[run_id]]
            if not sys.stdout.isatty():
                for run_id in changed:
                    print(f"{run_id}  {lines[run_id]}", flush=True)
            before = lines
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return


def _best(place: Place, metric: str, limit: int, *, as_json: bool) -> None:
    finished = [each for each in _looked(place, 0)[0] if each.evidence.result is not None]
    if not finished:
        raise ConfigError("No run has finished yet, so none is best", remedy="can-train runs lists those there are")
    ranked = rank([each.evidence.result or {} for each in finished], metric)
    shown = [(finished[each.index], each) for each in (ranked[:limit] if limit else ranked)]
    if as_json:
        values = [
            {**run_json(each), "metric": metric, "value": found.value, "parts": strict(found.parts)}
            for each, found in shown
        ]
        print(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        print_tables([_best_table(shown, metric)])


def _best_table(ranked: Sequence[tuple[Surveyed, Ranked]], metric: str) -> TextTable:
    several = max(len(found.parts) for _, found in ranked)
    columns = ("run", "configuration", metric, *(("lowest", "highest") if several > 1 else ()))
    rows = []
    for each, found in ranked:
        ends = (min(found.parts.values()), max(found.parts.values())) if several > 1 else ()
        figures = [f"{value:.4g}" for value in (found.value, *ends)]
        rows.append((short_name(each.known.run_id), each.known.record.key, *figures))
    notes = [f"{metric} is the mean over {several} test sets"] if several > 1 else []
    return TextTable(f"Best by {metric}", columns, rows, notes)
