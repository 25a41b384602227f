"""`can-train status RUN`: what state a run is in and why, how far it has come, and all its jobs and attempts."""

import json

from can_train.cli.looking import AsJson, Place, Run, RunsDir, StateDir
from can_train.cli.runs_tables import history_tables, run_json, run_lines
from can_train.cli.tables import print_tables


def status(run: Run, as_json: AsJson = False, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Show the state of a run, and how it came to it."""
    place = Place(runs_dir, state_dir)
    found = place.look(place.find(run))
    if as_json:
        print(json.dumps(run_json(found), indent=2, ensure_ascii=False))
        return
    print("\n".join(run_lines(found)))
    print_tables(history_tables(found))
