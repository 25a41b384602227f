"""`can-train cancel RUN`: stops a run, which saves itself first where it trains, and writes down that a person wished
it.
"""

import time
from typing import Final

from can_train.cli.output import told
from can_train.cli.run_locator import Run, RunLocator, RunsDir, StateDir
from can_train.errors import RunError
from can_train.io.records import utc_now
from can_train.slurm.run_state import RunFacts
from can_train.slurm.status import KnownRun, RunStatus, stop
from can_train.training.run_folder import CancelRecord

_WAIT_S: Final = 30.0
"""Seconds that the command waits for the end: a step and a checkpoint fit in, a long step need not."""


_LOOK_S: Final = 1.0
"""Seconds between two looks meanwhile."""


def cancel(run: Run, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Stop a run; where it trains it saves itself first, and can-train resume goes on from there."""
    locator = RunLocator(runs_dir, state_dir)
    known = locator.find(run)
    found = locator.status(known)
    if not found.state.live and not _in_queue(found.facts):
        print(f"Run {known.run_id} has ended already: {told(found.state)}")
        return
    # First the wish, then the deed: whoever sees the end knows why.
    locator.registry.add(CancelRecord(run_id=known.run_id, time=utc_now()))
    if not stop(found.facts):
        found = locator.status(known)
        if found.state.live:
            raise RunError("Nothing of the run is there to be stopped", value=told(found.state))
    found = _waited(locator, known)
    if found.state.live:
        print(f"Run {known.run_id} was asked to stop, and is still at it: {told(found.state)}")
    else:
        print(f"Run {known.run_id}: {told(found.state)}")


def _in_queue(facts: RunFacts) -> bool:
    """Whether SLURM still holds a job of a run that will never start."""
    from can_train.slurm.run_state import live_row

    return live_row(facts) is not None


def _waited(locator: RunLocator, known: KnownRun) -> RunStatus:
    """Waits for the end of a run, for a while."""
    end = time.monotonic() + _WAIT_S
    while True:
        found = locator.status(known)
        if time.monotonic() >= end or not (found.state.live or _in_queue(found.facts)):
            return found
        time.sleep(_LOOK_S)
