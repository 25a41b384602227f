"""One attempt of a run, from a command line or in a job: connects its ranks, trains it and prints its result. Also the
command that follows the end of a job.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from can_train.cli.output import (
    Verbosity,
    make_reporter,
    print_aside,
    print_json,
    print_judgement,
    print_note,
    print_text,
    print_wrapped,
)
from can_train.errors import CanTrainError, ConfigError, with_command_name
from can_train.reporter import LineReporter, SilentReporter
from can_train.runs.run_folder import name_to_type, resume_hint
from can_train.slurm.launchers import find_launch, launched_place

if TYPE_CHECKING:
    from can_train.config.settings import ClusterSettings
    from can_train.reporter import Reporter
    from can_train.runs.attempts import StopRequests
    from can_train.runs.registry import JobRecord
    from can_train.runs.run_folder import RunFolder
    from can_train.slurm.script import Submission
    from can_train.training.distributed import RankPlace, Ranks
    from can_train.training.train import Outcome


@contextmanager
def launched_ranks(device: str, verbosity: Verbosity) -> "Iterator[Ranks]":
    """Connects the processes that a launcher has started, which train one run in the block; one that is alone needs no
    connection. A rank ends silently where another one has failed: that one, and rank 0, say why.

    Raises:
        ConfigError: The launcher does not tell its processes their ranks.
        RunError: They do not find each other.
    """
    from can_train.training.distributed import RankFailedError, join_ranks

    ranks = join_ranks(_own_place(verbosity), device)
    try:
        yield ranks
    except RankFailedError as error:
        if ranks.is_first:
            raise
        raise SystemExit(error.exit_code) from error
    finally:
        ranks.leave()


def _own_place(verbosity: Verbosity) -> "RankPlace | None":
    launch = find_launch()
    if launch is None:
        return None
    try:
        place = launched_place(launch)
    except ConfigError as error:
        # Rank 0 says it for all.
        if launch.rank > 0:
            raise SystemExit(error.exit_code) from error
        raise
    if launch.rank == 0 and verbosity != Verbosity.QUIET:
        print_note(f"{launch}: they train one run together")
    return place


def continue_run(
    folder: "RunFolder", ranks: "Ranks", verbosity: Verbosity = Verbosity.NORMAL, *, as_json: bool = False
) -> None:
    """Continues a run, or prints the result of one that has finished."""
    from can_train.runs.attempts import StopRequests

    if not ranks.is_first:
        _continue(folder, SilentReporter(), StopRequests(), lambda device: ranks)
        return
    printer = RunPrinter(verbosity, as_json=as_json)
    with printer:
        printer.print(lambda: _continue(folder, make_reporter(verbosity), StopRequests(), lambda device: ranks), folder)


def continue_in_job(folder: "RunFolder", stops: "StopRequests") -> None:
    """Starts or continues a run in a job, with plain lines and an exit code for the scheduler."""
    # A job handles signals by now, and one may arrive during the seconds that these imports take.
    from can_train.slurm.launchers import rank_place
    from can_train.training.distributed import join_ranks

    try:
        outcome = _continue(folder, LineReporter(sys.stderr), stops,
                            lambda device: join_ranks(rank_place(os.environ), device))  # fmt: skip
        if outcome is not None:
            _print_outcome(outcome, Verbosity.NORMAL)
    except CanTrainError as error:
        print_aside(f"error: {error}")
        raise SystemExit(error.exit_code) from error


def _continue(
    folder: "RunFolder", reporter: "Reporter", stops: "StopRequests", join: Callable[[str], "Ranks"]
) -> "Outcome | None":
    """Trains as one of the processes that `join` connects, given the run's device; the first returns the outcome."""
    from can_train.config.compose import from_plain
    from can_train.runs.run_folder import relocate_prerequisites, without_missing_prerequisites
    from can_train.training.train import train_on

    run, notices = without_missing_prerequisites(relocate_prerequisites(from_plain(folder.config()), folder.path))
    for notice in notices:
        reporter.notice(notice)
    ranks = join(run.device)
    had_finished = folder.result_path.exists()
    outcome = train_on(run, folder, reporter, stops, ranks)
    if not ranks.is_first:
        return None
    if not had_finished:
        log_outcome(outcome)
    return outcome


def after_job(
    state_dir: Annotated[Path, typer.Option(help="State folder, where the registry is.")],
    status: Annotated[int, typer.Option(help="Exit status of the job step.")],
) -> None:
    """Record how a job ended, and restart its run if that makes sense.

    Standard input has the variables that the job began with.
    """
    from can_train.slurm.job import after_job as restart_after_job

    message = restart_after_job(_resubmit, state_dir, status=status, environment=sys.stdin.buffer.read())
    if message:
        print_text(f"can-train: {message}")


def _resubmit(folder: "RunFolder", cluster: "ClusterSettings", submission: "Submission") -> "JobRecord":
    from can_train.slurm.submit import submit_job

    return submit_job(continue_in_job, folder, cluster, submission)


class RunPrinter:
    """Prints the outcomes of runs as text or, at the end of the block, as JSON: an object for each run.

    Args:
        verbosity: How much is printed.
        as_json: Whether standard output is for JSON alone.
        of_several: Whether there are several runs.
    """

    def __init__(self, verbosity: Verbosity, *, as_json: bool, of_several: bool = False) -> None:
        self._verbosity = verbosity
        self._as_json = as_json
        self._of_several = of_several
        self._folder: RunFolder | None = None
        self._found: list[Any] = []

    def begin(self, folder: "RunFolder") -> None:
        """Notes that a run is being trained."""
        self._folder = folder

    def print(self, attempt: Callable[[], "Outcome | None"], folder: "RunFolder | None" = None) -> None:
        """Trains a run by a call of `attempt`, and prints its outcome; `folder` is there if it is not a new run."""
        self._folder, error = folder, None
        try:
            if (outcome := attempt()) is not None:
                with redirect_stdout(sys.stderr) if self._as_json else nullcontext():
                    if not (self._as_json and self._verbosity == Verbosity.QUIET):
                        _print_outcome(outcome, self._verbosity)
                self._print_next(f"show {name_to_type(outcome.folder)}", wanted=not self._of_several)
        except CanTrainError as failure:
            failure.in_json, error = self._as_json, failure
            raise
        except SystemExit:
            if self._verbosity == Verbosity.QUIET and self._folder is not None:
                # The reporter, which says it otherwise, is silent.
                print_note(resume_hint(self._folder))
            raise
        finally:
            if self._as_json:
                self._found.append(_run_object(self._folder, error))

    def _print_next(self, command: str, *, wanted: bool) -> None:
        if wanted and self._verbosity != Verbosity.QUIET and not self._as_json:
            print_text(with_command_name(f"More:   can-train {command}"))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._print_next("runs", wanted=self._of_several and kind is None)
        if self._as_json:
            print_json(self._found if self._of_several else self._found[0])


def _run_object(folder: "RunFolder | None", error: CanTrainError | None) -> dict[str, Any]:
    """Makes the JSON object of a run that was trained here: its `run_facts`, and the error that ended it."""
    from can_train.cli.run_locator import RunLocator
    from can_train.report.run_facts import run_facts

    facts = {}
    if folder is not None:
        locator = RunLocator(str(folder.path.parent), folder.config()["paths"]["state_dir"] or None)
        facts = run_facts(locator.status(locator.find(str(folder.path))))
    return facts if error is None else {**facts, "error": error.to_plain()}


def log_outcome(outcome: "Outcome") -> None:
    """Writes to the run's log all that can be printed of its result."""
    from can_train.io.records import open_to_append

    with suppress(OSError), open_to_append(outcome.folder.log_path) as log, redirect_stdout(log):
        _print_outcome(outcome, Verbosity.VERBOSE)


def _print_outcome(outcome: "Outcome", verbosity: Verbosity) -> None:
    folder = outcome.folder
    print_judgement(outcome.summary_tables, outcome.tables, verbosity)
    print_text("")
    print_wrapped(f"Run {folder.run_id}: {outcome.summary}")
    # From here a path that lies below is short enough for a line.
    result, here = folder.result_path.resolve(), Path.cwd()
    print_text(f"Result: {result.relative_to(here) if result.is_relative_to(here) else result}")
