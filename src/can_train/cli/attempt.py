"""Trains one run and shows what came of it; the common end of `train`, `resume` and a submitted job."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from can_train.cli.output import LineReporter, make_reporter, print_tables
from can_train.errors import CanTrainError
from can_train.training.attempts import StopRequests

if TYPE_CHECKING:
    from can_train.config.resolved import ResolvedRun
    from can_train.reporter import Reporter
    from can_train.training.run_folder import RunFolder
    from can_train.training.train import Outcome


def start(run: "ResolvedRun") -> None:
    """Trains a new run and shows what came of it."""
    # torch, which a submission need not wait for, though it names what the job is to call.
    from can_train.training.train import train_new

    _show(train_new(run, make_reporter()))


def go_on(folder: "RunFolder") -> None:
    """Continues a run, or shows one that has ended."""
    _go_on(folder, make_reporter(), StopRequests(), {})


def go_on_in_job(folder: "RunFolder", stops: StopRequests) -> None:
    """Does the same in a job, where nobody watches: plain lines, and an exit code for the scheduler."""
    try:
        _go_on(folder, LineReporter(sys.stderr), stops, os.environ)
    except CanTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def _go_on(folder: "RunFolder", reporter: "Reporter", stops: StopRequests, environment: Mapping[str, str]) -> None:
    """Trains as one of the processes that the environment tells of."""
    # A job handles signals by now, which the seconds that these imports take may bring.
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
        _show(outcome)


def _show(outcome: "Outcome") -> None:
    print_tables(outcome.tables)
    print(f"\nRun {outcome.folder.run_id}: {outcome.summary}")
    print(f"Result: {outcome.folder.result_path}")
