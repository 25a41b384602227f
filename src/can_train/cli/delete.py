"""`can-train delete RUN…`: deletes the folders of runs that have ended and that no other run builds on, and their
entries in the registry. What their attempts taught stays.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from can_train.cli.output import ask_to_delete, print_json, print_text
from can_train.cli.run_locator import AsJson, RunLocator, Runs, RunsDir, StateDir, Yes
from can_train.errors import RunError
from can_train.io.records import check_removable, is_folder, remove_folder
from can_train.io.units import counted, local_time, size_text
from can_train.report.run_list import RunFilter, RunList
from can_train.runs.run_folder import CONFIG, short_name
from can_train.runs.status import KnownRun, RunStatus
from can_train.slurm import client as slurm


def delete(
    runs: Runs,
    *,
    yes: Yes = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Delete runs that have ended, with their checkpoints and results. Asks first."""
    locator = RunLocator(runs_dir, state_dir)
    statuses = locator.statuses(runs)
    known = [status.known for status in statuses]
    check_deletable(locator, statuses)
    sizes = {run.run_id: folder_size(run.folder.path) for run in known}
    total = f"{counted(len(known), 'run')}, {size_text(sum(sizes.values()))}"
    if not as_json:
        for run in known:
            print_text(f"{short_name(run.run_id)}  {size_text(sizes[run.run_id])}  {local_time(run.record.time)}  "
                       f"{run.record.key}")  # fmt: skip
    ask_to_delete(total, yes=yes, can_ask=not as_json)
    for run in known:
        delete_run(locator, run)
    if as_json:
        print_json({"deleted": [{"run_id": run.run_id, "path": run.path, "bytes": sizes[run.run_id]} for run in known]})
    else:
        print_text(f"Deleted {total}.")


def check_deletable(locator: RunLocator, statuses: Sequence[RunStatus]) -> None:
    """Checks that runs have ended, are folders of runs that this user may delete, and that no other run builds on them.

    Raises:
        RunError: A run may not be deleted; none has been.
    """
    for status in statuses:
        _check_ended(status)
        with _naming(status.known):
            for place in _places(locator, status.known):
                check_removable(place)
    chosen = {str(status.known.folder.path.resolve()) for status in statuses}
    ids = {status.known.run_id for status in statuses}
    listed = RunList(locator.runs(), locator.state_folder, slurm).select(RunFilter())
    # A folder that was copied or moved has its name.
    building = listed.runs_with(_names_run, lambda value: value in chosen or Path(value).name in ids)
    waiting = [run for run in listed.runs if ids & set(run.record.after.split(","))]
    building += [status.known for status in listed.statuses(waiting) if status.state.live]
    if other := next((run for run in building if run.run_id not in ids), None):
        raise RunError("Another run builds on a run to delete", value=other.run_id,
                       remedy=f"Delete that one, too: can-train delete {short_name(other.run_id)} …")  # fmt: skip


def _names_run(setting: str) -> bool:
    return setting.startswith("mode.") or setting == "training.start_from"


def _check_ended(status: RunStatus) -> None:
    path, run_id = status.known.folder.path, status.known.run_id
    if status.state.live:
        raise RunError("The run has not ended", value=f"{run_id}: {status.state}",
                       remedy=f"Cancel it first: can-train cancel {short_name(run_id)}")  # fmt: skip
    # A link, or a folder that somebody has put into the place of a run, is not can-train's to delete.
    if is_folder(path) and (path.is_symlink() or not (path / CONFIG).is_file()):
        raise RunError("This is not the folder of a run", value=str(path),
                       remedy=f"Look at it, and remove it by hand: it is a link, or has no {CONFIG}")  # fmt: skip


def folder_size(path: Path) -> int:
    """Returns the bytes of a folder's files."""
    sizes = [os.lstat(Path(place, name)).st_size for place, _, names in os.walk(path) for name in names]
    return sum(sizes)


def delete_run(locator: RunLocator, run: KnownRun) -> None:
    """Deletes the folder of a run and its entry in the registry.

    Raises:
        RunError: The folder cannot be deleted.
    """
    with _naming(run):
        for place in _places(locator, run):
            remove_folder(place)


def _places(locator: RunLocator, run: KnownRun) -> list[Path]:
    """Returns the folder of a run and its entry in the registry, as far as they exist."""
    return [place for place in (run.folder.path, locator.registry.entry(run.run_id).parent) if is_folder(place)]


@contextmanager
def _naming(run: KnownRun) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Ask the owner of the folder to delete it"
        if _is_own(run.folder.path):
            remedy = f"Let it be written to:\n  chmod -R u+w {shlex.quote(str(run.folder.path))}"
        raise RunError("The run cannot be deleted", value=f"{run.path}: {error.strerror}", remedy=remedy) from error


def _is_own(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:
        return False
