"""One attempt of a run, from a command line or in a job, and what follows a job's end."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from can_train.cli.output import LineReporter, make_reporter, print_tables
from can_train.errors import CanTrainError

if TYPE_CHECKING:
    from can_train.config.resolved import ResolvedRun
    from can_train.reporter import Reporter
    from can_train.training.attempts import StopRequests
    from can_train.training.run_folder import RunFolder
    from can_train.training.train import Outcome


def train_run(run: "ResolvedRun") -> None:
    """Trains a new run and prints its result."""
    from can_train.training.train import train_new

    _print_outcome(train_new(run, make_reporter()))


def continue_run(folder: "RunFolder") -> None:
    """Continues a run, or prints the result of one that has finished."""
    from can_train.training.attempts import StopRequests

    _continue(folder, make_reporter(), StopRequests(), {})


def continue_in_job(folder: "RunFolder", stops: "StopRequests") -> None:
    """Starts or continues a run in a job, with plain lines and an exit code for the scheduler."""
    try:
        _continue(folder, LineReporter(sys.stderr), stops, os.environ)
    except CanTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def after_job(
    state_dir: Annotated[Path, typer.Option(help="State folder, where the registry is.")],
    status: Annotated[int, typer.Option(help="Exit status of the job step.")],
) -> None:
    """Record how a job ended, and restart its run if that makes sense.

    Standard input has the variables that the job began with.
    """
    from can_train.slurm.after_job import after_job as restart_after_job

    message = restart_after_job(continue_in_job, state_dir, status=status, environment=sys.stdin.buffer.read())
    if message:
        print(f"can-train: {message}", flush=True)


def _continue(folder: "RunFolder", reporter: "Reporter", stops: "StopRequests", environment: Mapping[str, str]) -> None:
    """Trains as one of the processes that the environment describes."""
    # A job handles signals by now, and one may arrive during the seconds that these imports take.
    from can_train.config.compose import from_plain
    from can_train.slurm.job import rank_place
    from can_train.training.distributed import join_ranks
    from can_train.training.run_folder import relocate_prerequisites, without_missing_prerequisites
    from can_train.training.train import train_on

    run, notices = without_missing_prerequisites(relocate_prerequisites(from_plain(folder.config()), folder.path))
    for notice in notices:
        reporter.notice(notice)
    ranks = join_ranks(rank_place(environment), run.device)
    outcome = train_on(run, folder, reporter, stops, ranks)
    if ranks.is_first:
        _print_outcome(outcome)


def _print_outcome(outcome: "Outcome") -> None:
    print_tables(outcome.tables)
    print(f"\nRun {outcome.folder.run_id}: {outcome.summary}")
    print(f"Result: {outcome.folder.result_path}")
