"""Where the commands about runs look for them: the options that name the folders, and the runs found there."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from can_train.config.resolved import PathSettings, check_folder, state_folder, user_file
from can_train.errors import ConfigError, RunError

# Imported where they are used: `can-train --help` names runs, and looks for none.
if TYPE_CHECKING:
    from can_train.runs.registry import Registry
    from can_train.runs.status import KnownRun, RunStatus
    from can_train.runs.trust import CodeTrust

Run = Annotated[
    str, typer.Argument(help="Id of a run, any part of it that no other run has, its folder, or last.", metavar="RUN")
]
Runs = Annotated[
    list[str], typer.Argument(help="Runs, each as in can-train show, or names of sweeps.", metavar="RUN...")
]
RunOrSweep = Annotated[
    str,
    typer.Argument(
        help="Id of a run, any part of it that no other run has, its folder, last, or a sweep.", metavar="RUN"
    ),
]


def _own_runs_dir(context: typer.Context, value: str) -> str:
    """Returns the folder of runs of the person's settings file, unless one is given."""
    source = context.get_parameter_source("runs_dir")
    given = source is not None and source.name != "DEFAULT"
    return value if given else user_file().values.get("runs_dir", value)


RunsDir = Annotated[
    str,
    typer.Option(
        help="Folder of run folders, beside the runs that the state folder lists.",
        metavar="FOLDER",
        callback=_own_runs_dir,
    ),
]
StateDir = Annotated[
    str | None, typer.Option(help="State folder. [$CAN_TRAIN_HOME, else the user's state directory]", metavar="FOLDER")
]
WeightsFile = Annotated[
    str,
    typer.Option(
        "--weights", help="Weights after an epoch, which --keep N wrote: epoch-10. [those the run ended with]",
        metavar="NAME",
    ),
]  # fmt: skip
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Run the code that the run names, although it is not known to be yours.")
]
RunDataRoot = Annotated[
    str | None, typer.Option("--data-root", help="Folder of the published data sets. [the run's]", metavar="FOLDER")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, or a simulated GPU: sim:2GiB.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def flag_values(words: Sequence[str]) -> dict[str, str]:
    """Returns the value of each flag of a command line that is not parsed yet; a switch has the word behind it."""
    given = {}
    for word, following in pairwise([*words, ""]):
        if word.startswith("--"):
            flag, equals, joined = word.partition("=")
            given[flag.replace("_", "-")] = joined if equals else following
    return given


class RunLocator:
    """Finds runs in a folder of runs and in the registry of a state folder; None: the user's."""

    def __init__(self, runs_dir: str, state_dir: str | None) -> None:
        check_folder("--runs-dir", Path(runs_dir))
        if state_dir is not None:
            check_folder("--state-dir", Path(state_dir))
        self.runs_dir = Path(runs_dir)
        self.state_folder = state_folder(None if state_dir is None else Path(state_dir))

    @cached_property
    def registry(self) -> "Registry":
        """The registry of the state folder."""
        from can_train.runs.registry import Registry

        return Registry(self.state_folder)

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Self:
        """Makes the locator of a command line whose flags are not parsed yet."""
        given = flag_values(words)
        runs_dir = given.get("--runs-dir", user_file().values.get("runs_dir", PathSettings().runs_dir))
        return cls(runs_dir, given.get("--state-dir"))

    def check_folder(self) -> None:
        """Raises ConfigError if the folder of runs is missing and runs of other folders would be listed, unless it is
        the default folder.
        """
        default = Path(user_file().values.get("runs_dir", PathSettings().runs_dir))
        if self.runs_dir != default and not self.runs_dir.is_dir() and self.runs():
            raise ConfigError("There is no such folder of runs", value=f"--runs-dir {self.runs_dir}",
                              remedy="Leave it out for all runs of this user")  # fmt: skip

    def runs(self) -> "list[KnownRun]":
        """Lists all runs, the newest first."""
        from can_train.runs.status import known_runs

        return known_runs(self.registry, self.runs_dir)

    def find(self, name: str) -> "KnownRun":
        """Finds a run by its id, any part of it, its folder, or `last`."""
        from can_train.runs.status import find_run

        return find_run(self.runs(), name, self.registry.set_aside)

    def find_ended(self, name: str) -> "KnownRun":
        """Finds a run as `find` does; raises RunError where it is queued or trains."""
        record = self.find(name)
        if record.folder.result() is None and (status := self.status(record)).state.live:
            raise RunError("The run has not finished", value=str(status.state),
                           remedy=f"Wait for its end: can-train logs {name} -f")  # fmt: skip
        return record

    def status(self, known_run: "KnownRun") -> "RunStatus":
        """Finds out the status of a run."""
        from can_train.runs.status import run_statuses
        from can_train.slurm import client as slurm

        return run_statuses([known_run], self.registry, slurm)[0]

    def statuses(self, names: Sequence[str]) -> "list[RunStatus]":
        """Finds runs by their names, as `find_all` does, and their status."""
        from can_train.runs.status import run_statuses
        from can_train.slurm import client as slurm

        return run_statuses(self.find_all(names), self.registry, slurm)

    def find_all(self, names: Sequence[str]) -> "list[KnownRun]":
        """Finds runs by their names; a run with two names is listed once. The name of a sweep or of a search stands for
        all of its runs.
        """
        from can_train.runs.status import find_runs

        # Read once: a search has a name for each of its trials.
        known, aside = self.runs(), self.registry.set_aside
        return list({run.run_id: run for name in names for run in find_runs(known, name, aside)[1]}.values())

    def find_any(self, name: str) -> "tuple[str, list[KnownRun]]":
        """Finds a run or a sweep: the name of the sweep, empty for a run, and the runs."""
        from can_train.runs.status import find_runs

        return find_runs(self.runs(), name, self.registry.set_aside)

    def trust(self, *, trusts_all: bool) -> "CodeTrust":
        """Makes the rule that decides whether the code of a run may run."""
        from can_train.runs.trust import CodeTrust

        return CodeTrust(state=self.state_folder, trusts_all=trusts_all)
