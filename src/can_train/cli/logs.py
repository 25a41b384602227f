"""`can-train logs RUN [-f]`: what a run's jobs printed, and what they print, until the run has ended."""

import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from can_train.cli.output import told
from can_train.cli.run_locator import Run, RunLocator, RunsDir, StateDir
from can_train.slurm.run_state import FINISHED
from can_train.slurm.status import GrowingLog, KnownRun, RunStatus, logs_of

_READ_S: Final = 0.5
"""Seconds between two looks at a log."""


_LOOK_S: Final = 5.0
"""Seconds between two looks at the run: SLURM's controller is everybody's."""


_ENDED_OTHERWISE: Final = 1
"""Exit code where a followed run did not finish."""


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    rank: Annotated[int, typer.Option(help="Process of a run that has several.", min=0)] = 0,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Print what a run printed; with -f, what it prints, across requeues and new jobs."""
    locator = RunLocator(runs_dir, state_dir)
    known = locator.find(run)
    if follow:
        found = _follow(locator, known, rank)
        _say(f"Run {known.run_id}: {told(found.state)}")
        raise typer.Exit(0 if found.state.state == FINISHED else _ENDED_OTHERWISE)
    found = locator.status(known)
    paths = logs_of(found.facts.jobs, known, rank)
    log = GrowingLog(paths[-1])
    if not _print_all(log):
        _say(f"Nothing is printed yet ({told(found.state)}). can-train logs {run} -f waits for it")
    for earlier in paths[:-1]:
        _say(f"The log of an earlier job: {earlier}")


def _follow(locator: RunLocator, known: KnownRun, rank: int) -> RunStatus:
    """Prints the newest log as it grows, goes over to that of a new job, and returns when the run has ended."""
    log, waited = None, False
    while True:
        found = locator.status(known)
        path = _newest(found, known, rank)
        if path is not None and (log is None or log.path != path):
            if log is not None:
                _print_all(log)
                _say(f"The run goes on in another job: {path}")
            log = GrowingLog(path)
        printed = log is not None and _print_for(log, 0.0 if not found.state.live else _LOOK_S)
        if not found.state.live:
            return found
        if not printed and not waited:
            _say(f"Waiting ({told(found.state)})")
        waited = True


def _newest(found: RunStatus, known: KnownRun, rank: int) -> Path | None:
    """Names the log of the newest job; None: its rank has not written one yet."""
    from can_train.errors import RunError

    try:
        return logs_of(found.facts.jobs, known, rank)[-1]
    except RunError:
        if not rank or not found.state.live:
            raise
        time.sleep(_READ_S)
        return None


def _print_for(log: GrowingLog, seconds: float) -> bool:
    """Prints what a log gets within some seconds; returns whether it got anything."""
    end = time.monotonic() + seconds
    printed = _print_all(log)
    while time.monotonic() < end:
        time.sleep(_READ_S)
        printed = _print_all(log) or printed
    return printed


def _print_all(log: GrowingLog) -> bool:
    printed = False
    while text := log.new_text():
        print(text, end="", flush=True)
        printed = True
    return printed


def _say(text: str) -> None:
    """Says something about the log, beside it."""
    print(text, file=sys.stderr, flush=True)
