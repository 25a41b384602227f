"""What the commands that look at runs have in common: where runs are looked for, and how times are written."""

from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import typer

from can_train.errors import ConfigError
from can_train.launch.states import RunState
from can_train.launch.survey import KnownRun, Surveyed, find_run, known_runs, survey
from can_train.state.folders import state_folder
from can_train.state.registry import Registry

Run = Annotated[
    str, typer.Argument(help="Run id, an unambiguous beginning of it, its short name, or its folder.", metavar="RUN")
]
RunsDir = Annotated[str, typer.Option(help="Folder of run folders.", metavar="FOLDER")]
StateDir = Annotated[
    str | None,
    typer.Option(help="State folder. [$CAN_TRAIN_HOME, else the user's state directory]", metavar="FOLDER"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
"""Seconds of each unit, the largest first."""


@dataclass(frozen=True)
class Place:
    """Where runs are looked for.

    Args:
        runs_dir: Folder of run folders.
        state_dir: State folder; None: the user's.
    """

    runs_dir: str
    state_dir: str | None

    @property
    def state_folder(self) -> Path:
        """The state folder.

        Raises:
            ConfigError: A flag is there without a value: an unset variable of a script.
        """
        for flag, value in (("--runs-dir", self.runs_dir), ("--state-dir", self.state_dir)):
            if value == "":
                raise ConfigError(f"{flag} is empty", remedy="Give a value, or leave the flag out")
        return state_folder(None if self.state_dir is None else Path(self.state_dir))

    @property
    def registry(self) -> Registry:
        """The registry in it."""
        return Registry(self.state_folder)

    def runs(self) -> list[KnownRun]:
        """Lists the runs that are known there, the newest first."""
        return known_runs(self.registry, Path(self.runs_dir))

    def find(self, name: str) -> KnownRun:
        """Finds a run by what a person calls it."""
        return find_run(self.runs(), name)

    def look(self, known: KnownRun) -> Surveyed:
        """Finds out all about a run."""
        return survey([known], self.registry)[0]


def shown(state: RunState) -> str:
    """A state as listings show it: one that is not certain has a question mark."""
    return state.state if state.certain else f"{state.state}?"


def told(state: RunState) -> str:
    """A state with its sentence."""
    return f"{shown(state)}: {state.sentence}" if state.sentence else shown(state)


def duration(seconds: float) -> str:
    """Writes a duration in its largest unit, with the next one where that is less than ten of it.

    Example:
        >>> duration(8), duration(754), duration(7 * 3600 + 299), duration(200_000)
        ('8 s', '12 min', '7 h 4 min', '2 d 7 h')
    """
    whole = max(0, int(seconds))
    for (size, unit), (smaller, smaller_unit) in pairwise(_UNITS):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if whole < 10 * size and rest else "")
    return f"{whole} s"


def in_one_unit(seconds: float) -> str:
    """Writes a duration in its largest unit only, for a column."""
    return " ".join(duration(seconds).split()[:2])


def moment(time: str) -> str:
    """Writes a time of the files in this machine's time zone, to the second."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M:%S}"


def seconds_between(start: str, end: str = "") -> float:
    """Seconds from one time of the files to another; without an end, to now."""
    last = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return (last - datetime.fromisoformat(start)).total_seconds()
