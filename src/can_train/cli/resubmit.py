"""`can-train resubmit RUN --set …`: a new run of another's configuration with changes, started as that one was."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli.looking import Place, Run, RunsDir, StateDir
from can_train.errors import ConfigError

if TYPE_CHECKING:
    from can_train.config.cluster import ClusterSettings
    from can_train.state.registry import JobRecord

_FLAGS: Final = {
    "partition": "Partition of the new run.",
    "time": "Time limit of the new run.",
    "mem": "Memory of each node of the new run.",
    "gpus": "GPUs of each node of the new run.",
}


def resubmit(
    run: Run,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="What is to be different, in Hydra's grammar. Repeatable.", metavar="GROUP.KEY=VALUE"),
    ] = None,
    partition: Annotated[str | None, typer.Option(help=_FLAGS["partition"])] = None,
    time: Annotated[str | None, typer.Option(help=_FLAGS["time"])] = None,
    mem: Annotated[str | None, typer.Option(help=_FLAGS["mem"])] = None,
    gpus: Annotated[str | None, typer.Option(help=_FLAGS["gpus"])] = None,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Start a new run with the configuration of another and some changes, where that one ran."""
