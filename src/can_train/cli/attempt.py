"""Trains one run and shows what came of it; the common end of `train`, `resume` and a submitted job."""

import sys
from pathlib import Path

from can_train.cli.reporters import LineReporter, make_reporter
from can_train.cli.tables import print_tables
from can_train.config.compose import from_plain
from can_train.config.resolved import ResolvedRun
from can_train.errors import CanTrainError
from can_train.reporter import Reporter
from can_train.training.run import train_run
from can_train.training.run_folder import RunFolder


def attempt(run: ResolvedRun, folder: RunFolder, reporter: Reporter | None = None) -> None:
    """Trains (or goes on training) a run and prints its result."""
    outcome = train_run(run, folder, reporter or make_reporter())
    print_tables(outcome.tables)
    print(f"\nRun {folder.run_id}: {outcome.summary}")
    print(f"Result: {folder.result_path}")


def attempt_in_job(path: str) -> None:
    """Does the same in a job, where nobody watches: plain lines, and an exit code for the scheduler."""
    folder = RunFolder(Path(path))
    try:
        attempt(from_plain(folder.config()), folder, LineReporter(sys.stderr))
    except CanTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
