"""`can-train resubmit RUN --set …`: a new run of another's configuration with changes, started as that one was."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from can_train.cli.looking import Place, Run, RunsDir, StateDir
from can_train.cli.requests import command_of

if TYPE_CHECKING:
    from can_train.config.resolved import ResolvedRun

_CLUSTER: Final = "Of the new job; as before without."

_CLUSTER_FLAGS: Final = ("partition", "time", "mem", "gpus")


@dataclass(frozen=True, kw_only=True)
class ResubmitRequest:
    """What is asked for."""

    run: Run
    set: Annotated[
        list[str] | None,
        typer.Option("--set", help="What is to differ, in Hydra's grammar. Repeatable.", metavar="GROUP.KEY=VALUE"),
    ] = None
    partition: Annotated[str | None, typer.Option(help=_CLUSTER)] = None
    time: Annotated[str | None, typer.Option(help=_CLUSTER)] = None
    mem: Annotated[str | None, typer.Option(help=_CLUSTER)] = None
    gpus: Annotated[str | None, typer.Option(help=_CLUSTER)] = None
    force: Annotated[bool, typer.Option("--force", help="Also if an identical run is there already.")] = False
    runs_dir: RunsDir = "runs"
    state_dir: StateDir = None


def make_resubmit_command() -> Callable[..., None]:
    """Makes the command."""
    return command_of(ResubmitRequest, _resubmit)


def _resubmit(request: ResubmitRequest) -> None:
    """Start a new run with another's configuration and some changes, where that one ran."""
    place = Place(request.runs_dir, request.state_dir)
    found = place.look(place.find(request.run))
    from can_train.config.changes import changed

    given = {name: getattr(request, name) for name in _CLUSTER_FLAGS}
    values = {f"cluster.{name}": value for name, value in given.items() if value is not None}
    # Not where it was written down: the registry that was asked is the one that gets the new run.
    values["paths.state_dir"] = str(place.state_folder)
    run = _settled(changed(found.known.folder.config(), request.set or (), values), place)
    if not found.evidence.jobs:
        from can_train.cli.attempt import start

        start(run)
        return
    from can_train.cli.submit import submit_runs
    from can_train.launch.order import Wanted

    submit_runs([run], Wanted(force=request.force))


def _settled(run: "ResolvedRun", place: Place) -> "ResolvedRun":
    """Finds the runs that it builds on, which may have been changed, or be gone."""
    from can_train.config.compose import RunRequest
    from can_train.launch.prerequisites import PastRuns, settled_prerequisites

    data = RunRequest(model=run.model_name, dataset=run.dataset.path or run.dataset.name, device=run.device)
    past = PastRuns(place.state_folder, Path(place.runs_dir))
    return settled_prerequisites(run, data, past)[0]
