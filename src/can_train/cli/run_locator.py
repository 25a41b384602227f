"""Where the commands about runs look for them: the options that name the folders, and the runs found there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from can_train.config.resolved import state_folder
from can_train.errors import ConfigError
from can_train.slurm.status import KnownRun, RunStatus, find_run, known_runs, run_status
from can_train.training.run_folder import Registry

Run = Annotated[
    str, typer.Argument(help="Run id, an unambiguous beginning of it, its short name, or its folder.", metavar="RUN")
]

RunsDir = Annotated[str, typer.Option(help="Folder of run folders.", metavar="FOLDER")]

StateDir = Annotated[
    str | None,
    typer.Option(help="State folder. [$CAN_TRAIN_HOME, else the user's state directory]", metavar="FOLDER"),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class RunLocator:
    """Finds runs in a folder of runs and in the registry of a state folder; None: the user's."""

    runs_dir: str
    state_dir: str | None

    @property
    def state_folder(self) -> Path:
        """The state folder.

        Raises:
            ConfigError: An option has an empty value, as from an unset variable of a script.
        """
        for flag, value in (("--runs-dir", self.runs_dir), ("--state-dir", self.state_dir)):
            if value == "":
                raise ConfigError(f"{flag} is empty", remedy="Give a value, or leave the flag out")
        return state_folder(None if self.state_dir is None else Path(self.state_dir))

    @property
    def registry(self) -> Registry:
        """The registry in the state folder."""
        return Registry(self.state_folder)

    def runs(self) -> list[KnownRun]:
        """Lists all runs, the newest first."""
        return known_runs(self.registry, Path(self.runs_dir))

    def find(self, name: str) -> KnownRun:
        """Finds a run by its id, a part of it, or its folder."""
        return find_run(self.runs(), name)

    def status(self, known: KnownRun) -> RunStatus:
        """Finds out the status of a run."""
        return run_status(known, self.registry)
