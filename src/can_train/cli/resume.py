"""`can-train resume RUN`: continues a run from its last checkpoint, bit by bit: where it ran before, or here."""

import sys
from typing import Annotated

import typer

from can_train.cli.looking import Place, Run, RunsDir, StateDir, told
from can_train.errors import RunError
from can_train.launch.states import FINISHED
from can_train.launch.survey import Surveyed


def resume(
    run: Run,
    here: Annotated[bool, typer.Option("--here", help="Train in this process, wherever the run was before.")] = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Continue a run from its last checkpoint, where it ran before: one of SLURM is submitted again."""
    place = Place(runs_dir, state_dir)
    found = place.look(place.find(run))
    if not found.evidence.present:
        raise RunError("A run goes on from what is in its folder", value=f"{found.known.folder.path} is gone",
                       remedy="Train anew")  # fmt: skip
    if found.state.live and found.state.certain:
        raise RunError("A run that is queued or running goes on by itself", value=told(found.state),
                       remedy=f"Follow it with can-train logs -f, or end it: can-train cancel {run}")  # fmt: skip
    if not found.state.certain:
        print(f"note: {told(found.state)}", file=sys.stderr)
    jobs = found.evidence.jobs
    if here or found.state.state == FINISHED or not jobs or jobs[-1].executor != "slurm":
        _go_on(found)
    else:
        _submit(found, place)


def _go_on(found: Surveyed) -> None:
    from can_train.cli.attempt import go_on

    go_on(found.known.folder)


def _submit(found: Surveyed, place: Place) -> None:
    from can_train.cli.submit import submit_again
    from can_train.config.compose import from_plain
    from can_train.launch.submission import Submission
    from can_train.training.run_folder import RunFolder

    run = from_plain(found.known.folder.config())
    folder = RunFolder(found.known.folder.path.resolve())
    job = submit_again(folder, run, Submission(name=run.key, state_dir=place.state_folder, reason="resumed"))
    print(f"Run {job.run_id} goes on as job {job.job_id}.")
