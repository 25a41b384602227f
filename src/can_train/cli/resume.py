"""`can-train resume RUN`: continues a run from its last checkpoint, bit by bit: where it ran before, or here. And
`can-train resubmit RUN`: a new run with its configuration and some changes.
"""

from typing import Annotated, Final

import typer

from can_train.cli.output import Quiet, Verbose, Verbosity, print_note
from can_train.cli.run_locator import Run, RunLocator, RunsDir, StateDir
from can_train.errors import RunError
from can_train.slurm.run_state import FINISHED


def resume(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    here: Annotated[bool, typer.Option("--here", help="Train in this process, wherever the run was before.")] = False,
    *,
    quiet: Quiet = False,
    verbose: Verbose = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Continue a run from its last checkpoint, where it ran before: one of SLURM is submitted again."""
    verbosity = Verbosity.of(quiet=quiet, verbose=verbose)
    locator = RunLocator(runs_dir, state_dir)
    found = locator.status(locator.find(run))
    if not found.facts.has_folder:
        raise RunError("A run goes on from what is in its folder", value=f"{found.known.folder.path} is gone",
                       remedy="Train anew")  # fmt: skip
    if found.state.live and found.state.certain:
        raise RunError("A run that is queued or running goes on by itself", value=str(found.state),
                       remedy=f"Follow it with can-train logs {run} -f, or end it: can-train cancel {run}")  # fmt: skip
    if not found.state.certain and not quiet:
        print_note(str(found.state))
    jobs = found.facts.jobs
    if here or found.state.state == FINISHED or not jobs or jobs[-1].executor != "slurm":
        from can_train.cli.train import continue_run

        continue_run(found.known.folder, verbosity)
        return
    from can_train.cli.submit import submit_again
    from can_train.cli.train import continue_in_job
    from can_train.config.compose import from_plain
    from can_train.slurm.script import Submission
    from can_train.training.run_folder import RunFolder

    settings = from_plain(found.known.folder.config())
    folder = RunFolder(found.known.folder.path.resolve())
    submission = Submission(name=settings.key, state_dir=locator.state_folder, reason="resumed")
    job = submit_again(continue_in_job, folder, settings, submission)
    print(f"Run {job.run_id} goes on as job {job.job_id}.")


_OF_NEW_JOB: Final = "Of the new job; as before without."


def resubmit(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="What is to differ, in Hydra's grammar. Repeatable.", metavar="GROUP.KEY=VALUE"),
    ] = None,
    partition: Annotated[str | None, typer.Option(help=_OF_NEW_JOB)] = None,
    time: Annotated[str | None, typer.Option(help=_OF_NEW_JOB)] = None,
    mem: Annotated[str | None, typer.Option(help=_OF_NEW_JOB)] = None,
    gpus: Annotated[str | None, typer.Option(help=_OF_NEW_JOB)] = None,
    force: Annotated[bool, typer.Option("--force", help="Also if an identical run is there already.")] = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Start a new run with another's configuration and some changes, where that one ran."""
    locator = RunLocator(runs_dir, state_dir)
    found = locator.status(locator.find(run))
    from can_train.cli.train import continue_in_job, train_run
    from can_train.config.compose import RunRequest, with_changes
    from can_train.slurm.past_runs import PastRuns, resolve_prerequisites

    given = {"partition": partition, "time": time, "mem": mem, "gpus": gpus}
    values = {f"cluster.{name}": value for name, value in given.items() if value is not None}
    # Not where it was written down: the registry that was asked is the one that gets the new run.
    values["paths.state_dir"] = str(locator.state_folder)
    new = with_changes(found.known.folder.config(), set_ or (), values)
    # The runs that it builds on may have been changed, or be gone.
    data = RunRequest(model=new.model_name, dataset=new.dataset.path or new.dataset.name, device=new.device)
    new = resolve_prerequisites(new, data, PastRuns(locator.state_folder, locator.runs_dir))[0]
    if not found.facts.jobs:
        train_run(new)
        return
    from can_train.cli.submit import submit_runs

    submit_runs(continue_in_job, [new], force=force)
