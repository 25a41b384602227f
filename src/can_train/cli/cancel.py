"""`can-train cancel RUN`: stops a run, which saves itself first where it trains, and writes down that a person wished
it.
"""

import time
from typing import Final

from can_train.cli.output import told
from can_train.cli.run_locator import Place, Run, RunsDir, StateDir
from can_train.errors import RunError
from can_train.io.records import utc_now
from can_train.slurm.run_status import RunFacts
from can_train.slurm.survey import KnownRun, Surveyed, stop
from can_train.training.run_folder import CancelRecord

_WAIT_S: Final = 30.0
"""Seconds that the command waits for the end: a step and a checkpoint fit in, a long step need not."""


_LOOK_S: Final = 1.0
"""Seconds between two looks meanwhile."""


def cancel(run: Run, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Stop a run; where it trains it saves itself first, and can-train resume goes on from there."""
    place = Place(runs_dir, state_dir)
    known = place.find(run)
    found = place.look(known)
    if not found.state.live and not _in_queue(found.evidence):
        print(f"Run {known.run_id} has ended already: {told(found.state)}")
        return
    # First the wish, then the deed: whoever sees the end knows why.
    place.registry.add(CancelRecord(run_id=known.run_id, time=utc_now()))
    if not stop(found.evidence):
        found = place.look(known)
        if found.state.live:
            raise RunError("Nothing of the run is there to be stopped", value=told(found.state))
    found = _waited(place, known)
    if found.state.live:
        print(f"Run {known.run_id} was asked to stop, and is still at it: {told(found.state)}")
    else:
        print(f"Run {known.run_id}: {told(found.state)}")


def _in_queue(evidence: RunFacts) -> bool:
    """Whether SLURM still holds a job of a run that will never start."""
    from can_train.slurm.run_status import live_row

    return live_row(evidence) is not None


def _waited(place: Place, known: KnownRun) -> Surveyed:
    """Waits for the end of a run, for a while."""
    end = time.monotonic() + _WAIT_S
    while True:
        found = place.look(known)
        if time.monotonic() >= end or not (found.state.live or _in_queue(found.evidence)):
            return found
        time.sleep(_LOOK_S)
