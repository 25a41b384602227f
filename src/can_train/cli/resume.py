"""`can-train resume RUN`: continues a run from its last checkpoint, where it ran before, or here; for longer, on
another device, with a log that has moved.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from can_train.cli.cancel import check_answer
from can_train.cli.output import (
    Quiet,
    Verbose,
    Verbosity,
    make_reporter,
    print_json,
    print_note,
    print_starting,
    print_text,
)
from can_train.cli.run_locator import AsJson, Run, RunLocator, RunsDir, StateDir, TrustCode
from can_train.errors import RunError, with_command_name
from can_train.runs.run_folder import RunFolder, name_to_type
from can_train.runs.run_state import FINISHED, live_row
from can_train.slurm import client as slurm
from can_train.slurm.launchers import check_started_once, find_launch

if TYPE_CHECKING:
    from can_train.runs.registry import JobRecord
    from can_train.runs.status import RunStatus


def resume(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    here: Annotated[bool, typer.Option("--here", help="Train in this process, wherever the run was before.")] = False,
    *,
    epochs: Annotated[
        str | None, typer.Option(help="Go on until so many epochs are done, also after the end.", metavar="INTEGER")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Go on with another device. The batch stays, and is cut as that one needs.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Where the run's data are now; their content is compared.", metavar="PATH")
    ] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Continue a run from its last checkpoint, where it ran before: in SLURM, in the background, or here."""
    verbosity = Verbosity.of(quiet=quiet, verbose=verbose)
    launch = find_launch()
    # Rank 0 speaks for all.
    quiet = quiet or (launch is not None and launch.rank > 0)
    locator = RunLocator(runs_dir, state_dir)
    status = locator.status(locator.find(run))
    _check_state(status, run)
    jobs = status.facts.jobs
    in_slurm = not here and bool(jobs) and jobs[-1].executor == "slurm"
    in_job = in_slurm or (not here and bool(jobs) and jobs[-1].executor == "local")
    if in_job:
        check_started_once("A submission", "To train in the processes of a launcher, add --here")
    if in_slurm:
        check_answer(status)
    # Before the code of the run is imported, here or in a job.
    locator.trust(trusts_all=trust_code).config(status.known.folder, has_code=in_job)
    if not status.state.certain and not quiet:
        print_note(str(status.state))
    print_starting(Verbosity.QUIET if quiet else verbosity)
    from can_train.training.resume import change_run

    folder = status.known.folder
    if device is not None and not in_job:
        from can_train.memory.meters import resolve_device

        resolve_device(device)
    make_changes = partial(change_run, folder, make_reporter(verbosity), epochs=epochs, device=device, dataset=dataset)
    if in_job:
        _print_changes(make_changes(), quiet=quiet)
        goes_on = status.facts.result is not None and folder.result() is None
        if goes_on or status.state.state != FINISHED:
            # Of two that resume it at once, the second one finds the first one's job.
            with folder.locked(doing="submitted"):
                _check_state(locator.status(status.known), run)
                job = _submit_again(status, locator) if in_slurm else _start_again(folder, locator)
                if as_json:
                    from can_train.cli.submit import job_json

                    print_json({"submitted": [job_json(job, folder)], "identical": []})
                else:
                    print_text(f"Run {job.run_id} goes on as {'job' if in_slurm else 'process'} {job.job_id}.")
                    print_text(with_command_name(f"Log:   can-train logs {name_to_type(folder)} -f"))
            return
    from can_train.cli.train import continue_run, launched_ranks

    with launched_ranks(device or folder.config()["device"], verbosity) as ranks:
        if not in_job:
            _print_changes(ranks.on_rank0(make_changes), quiet=quiet)
        if not quiet and folder.result() is not None:
            longer = f"can-train resume {name_to_type(folder)} --epochs {2 * folder.config()['training']['epochs']}"
            print_note(f"The run has finished, and nothing is left to train. For longer:\n  {longer}")
        continue_run(folder, ranks, verbosity, as_json=as_json)


def _print_changes(sentences: Sequence[str], *, quiet: bool) -> None:
    for sentence in () if quiet else sentences:
        print_note(sentence)


def _check_state(status: "RunStatus", name: str) -> None:
    """Raises RunError where a run cannot go on, or goes on by itself."""
    if not status.facts.has_folder:
        raise RunError("The run's folder is gone", value=str(status.known.folder.path),
                       remedy="Train anew")  # fmt: skip
    if (row := live_row(status.facts)) is not None and not status.state.live:
        raise RunError("The run's job is still in the queue", value=f"job {row.job}",
                       remedy=f"Cancel the job first: can-train cancel {name}")  # fmt: skip
    if status.state.live and status.state.certain:
        remedy = f"Follow it with can-train logs {name} -f, or end it: can-train cancel {name}"
        raise RunError("The run is queued or running already", value=str(status.state), remedy=remedy)


def _start_again(folder: RunFolder, locator: RunLocator) -> "JobRecord":
    """Starts a process for a run in the background, and enters it into the registry."""
    from can_train.cli.train import continue_in_job
    from can_train.slurm.submit import start_process

    job = start_process(continue_in_job, RunFolder(folder.path.resolve()))
    locator.registry.add(job)
    return job


def _submit_again(status: "RunStatus", locator: RunLocator) -> "JobRecord":
    from can_train.cli.submit import submit_again
    from can_train.cli.train import continue_in_job
    from can_train.config.compose import from_plain
    from can_train.runs.status import run_statuses
    from can_train.slurm.script import Submission
    from can_train.slurm.submission_plan import dependency_on

    settings = from_plain(status.known.folder.config())
    folder = RunFolder(status.known.folder.path.resolve())
    # A parent whose folder is gone is not waited for; the run itself names the missing parent.
    awaited = status.known.record.after.split(",")
    awaited_runs = [earlier for earlier in locator.runs() if earlier.run_id in awaited]
    parents = run_statuses(awaited_runs, locator.registry, slurm)
    dependency = dependency_on(parents, settings.cluster.executor, settings.cluster.clusters)
    submission = Submission(name=settings.key, state_dir=locator.state_folder, dependency=dependency, reason="resumed")
    return submit_again(continue_in_job, folder, settings, submission)
