"""`can-train resume RUN`: continues a run from its last checkpoint, bit by bit: where it ran before, or here."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from can_train.cli.command import command_of
from can_train.cli.run_locator import Run, RunLocator, RunsDir, StateDir
from can_train.errors import RunError
from can_train.slurm.run_state import FINISHED
from can_train.slurm.status import RunStatus

if TYPE_CHECKING:
    from can_train.config.resolved import ResolvedRun


def resume(
    run: Run,
    here: Annotated[bool, typer.Option("--here", help="Train in this process, wherever the run was before.")] = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Continue a run from its last checkpoint, where it ran before: one of SLURM is submitted again."""
    locator = RunLocator(runs_dir, state_dir)
    found = locator.status(locator.find(run))
    if not found.facts.has_folder:
        raise RunError("A run goes on from what is in its folder", value=f"{found.known.folder.path} is gone",
                       remedy="Train anew")  # fmt: skip
    if found.state.live and found.state.certain:
        raise RunError("A run that is queued or running goes on by itself", value=str(found.state),
                       remedy=f"Follow it with can-train logs -f, or end it: can-train cancel {run}")  # fmt: skip
    if not found.state.certain:
        print(f"note: {found.state}", file=sys.stderr)
    jobs = found.facts.jobs
    if here or found.state.state == FINISHED or not jobs or jobs[-1].executor != "slurm":
        _go_on(found)
    else:
        _submit(found, locator)


def _go_on(found: RunStatus) -> None:
    from can_train.cli.attempt import continue_run

    continue_run(found.known.folder)


def _submit(found: RunStatus, locator: RunLocator) -> None:
    from can_train.cli.attempt import continue_in_job
    from can_train.cli.submit import submit_again
    from can_train.config.compose import from_plain
    from can_train.slurm.submit import Submission
    from can_train.training.run_folder import RunFolder

    run = from_plain(found.known.folder.config())
    folder = RunFolder(found.known.folder.path.resolve())
    job = submit_again(
        continue_in_job,
        folder,
        run,
        Submission(name=run.key, state_dir=locator.state_folder, reason="resumed"),
    )
    print(f"Run {job.run_id} goes on as job {job.job_id}.")


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
    locator = RunLocator(request.runs_dir, request.state_dir)
    found = locator.status(locator.find(request.run))
    from can_train.config.compose import with_changes

    given = {name: getattr(request, name) for name in _CLUSTER_FLAGS}
    values = {f"cluster.{name}": value for name, value in given.items() if value is not None}
    # Not where it was written down: the registry that was asked is the one that gets the new run.
    values["paths.state_dir"] = str(locator.state_folder)
    run = _settled(with_changes(found.known.folder.config(), request.set or (), values), locator)
    if not found.facts.jobs:
        from can_train.cli.attempt import train_run

        train_run(run)
        return
    from can_train.cli.attempt import continue_in_job
    from can_train.cli.submit import submit_runs
    from can_train.slurm.submission_plan import SubmitOptions

    submit_runs(continue_in_job, [run], SubmitOptions(force=request.force))


def _settled(run: "ResolvedRun", locator: RunLocator) -> "ResolvedRun":
    """Finds the runs that it builds on, which may have been changed, or be gone."""
    from can_train.config.compose import RunRequest
    from can_train.slurm.prerequisites import PastRuns, settled_prerequisites

    data = RunRequest(model=run.model_name, dataset=run.dataset.path or run.dataset.name, device=run.device)
    past = PastRuns(locator.state_folder, Path(locator.runs_dir))
    return settled_prerequisites(run, data, past)[0]
