"""`can-train sync RUN… PLACE` and `archive`: copies runs by rsync to a folder or to another machine, with the facts
that only this machine knows, so that they are listed and shown there as here.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from can_train.cli.output import ask_to_delete, print_json, print_text, print_wrapped
from can_train.cli.run_locator import AsJson, RunLocator, RunsDir, StateDir, Yes
from can_train.errors import ConfigError, RunError, with_command_name
from can_train.io.records import this_host, utc_now, write_document
from can_train.io.units import counted, size_text
from can_train.runs.registry import RunLabels
from can_train.runs.run_folder import short_name
from can_train.runs.status import COPY, CopyRecord, RunStatus

_REMOTE: Final = re.compile(r"(?:[\w.-]+@)?[\w][\w.-]*:.+")
_PLACE: Final = typer.Argument(help="Runs or sweeps, then a folder, or a place of another machine: user@host:path.",
                               metavar="RUN... PLACE")  # fmt: skip


def sync(
    names: Annotated[list[str], _PLACE],
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Copy runs to a folder or another machine by rsync. Given again, it copies only changes."""
    locator = RunLocator(runs_dir, state_dir)
    runs, place = _split(names, "sync")
    _copy(locator, locator.statuses(runs), place, as_json=as_json)


def archive(
    names: Annotated[list[str], _PLACE],
    *,
    yes: Yes = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Copy runs as sync does, compare the copies, and delete the runs here. Asks first."""
    # Imported late: reading lists of runs is slow to import, and `sync` needs none of it.
    from can_train.cli.delete import check_deletable, delete_run, folder_size

    locator = RunLocator(runs_dir, state_dir)
    runs, place = _split(names, "archive")
    statuses = locator.statuses(runs)
    known = [status.known for status in statuses]
    check_deletable(locator, statuses)
    total = f"{counted(len(known), 'run')} here, {size_text(sum(folder_size(run.folder.path) for run in known))}"
    ask_to_delete(total, yes=yes, can_ask=not as_json, command="archive")
    _copy(locator, statuses, place, as_json=as_json)
    # By content: what is deleted here must be there. The time of a folder changes when the facts are added to it.
    differing = _rsync(["--checksum", "--omit-dir-times", "--dry-run", "--itemize-changes"],
                       [run.folder.path for run in known], place)  # fmt: skip
    if differing.strip():
        raise RunError("The copies differ, and nothing was deleted here", value=differing.splitlines()[0],
                       remedy="Give the same line again")  # fmt: skip
    for run in known:
        delete_run(locator, run)
    if not as_json:
        print_text(f"Deleted {total}.")


def _split(names: Sequence[str], command: str) -> tuple[list[str], str]:
    *runs, place = names
    if not runs:
        raise ConfigError("PLACE is missing", value=place,
                          remedy=f"Name a folder or a machine: can-train {command} {place} user@host:runs")  # fmt: skip
    # A place that begins with a hyphen would be an option of rsync or ssh.
    if place.startswith("-") or (":" in place and not _REMOTE.fullmatch(place) and "/" not in place.partition(":")[0]):
        raise ConfigError("A place is a folder or user@host:path", value=repr(place), remedy="Write it as me@host:runs")
    return runs, place


def _copy(locator: RunLocator, statuses: Sequence[RunStatus], place: str, *, as_json: bool) -> None:
    if gone := [status.known.run_id for status in statuses if not status.facts.has_folder]:
        raise RunError("The run's folder is gone", value=gone[0], remedy="Leave it out")
    labels = locator.registry.labels()
    with tempfile.TemporaryDirectory() as beside:
        for status in statuses:
            name = status.known.run_id
            write_document(Path(beside) / name / COPY, _describe(status, labels.get(name, RunLabels())))
        # First the run: a copy without the facts is a run, too.
        _rsync([], [status.known.folder.path for status in statuses], place)
        # The folder there has the mode of the run's folder, not of this one.
        _rsync(["--omit-dir-times", "--no-perms"], [Path(beside) / status.known.run_id for status in statuses], place)
    if as_json:
        print_json([{"run_id": status.known.run_id, "place": place} for status in statuses])
        return
    print_text(f"Copied {counted(len(statuses), 'run')} to {place}.")
    folder = place.rpartition(":")[2] if _REMOTE.fullmatch(place) else place
    # --runs-dir adds a folder to the runs that a machine knows, and a list has only the newest of all.
    name, where = short_name(statuses[0].known.run_id), f"--runs-dir {folder}"
    print_wrapped(with_command_name(f"Look there: can-train status {name} {where}"))
    if len(statuses) > 1:
        print_wrapped(with_command_name(f"List all there: can-train runs --limit 0 {where}"))


def _describe(status: RunStatus, labels: RunLabels) -> CopyRecord:
    record, label = status.known.record, status.known.label
    return CopyRecord(run_id=record.run_id, key=record.key, made=record.time, sweep=record.sweep, label=label,
                      state=status.state.state, sentence=status.state.sentence, tags=[*labels.tags], note=labels.note,
                      time=utc_now(), host=this_host())  # fmt: skip


def _rsync(options: Sequence[str], folders: Sequence[Path], place: str) -> str:
    """Copies folders into a place; returns the output of rsync.

    Raises:
        RunError: rsync is not installed, or fails.
    """
    if any(folder.parent.resolve() == Path(place).expanduser().resolve() for folder in folders):
        raise ConfigError("A run cannot be copied onto itself", value=place, remedy="Name another folder")
    program = shutil.which("rsync")
    if program is None:
        raise RunError("rsync is not installed", remedy="Install it here and there: apt-get install rsync")
    target = place if _REMOTE.fullmatch(place) else str(Path(place).expanduser().absolute())
    # An argument list: no shell reads a name. `--protect-args` keeps the other machine's shell from it, too.
    command = [program, "--archive", "--partial", "--protect-args", "--exclude=/*/lock", *options, "--",
               *(str(folder.absolute()) for folder in folders), f"{target.rstrip('/')}/"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [f"exit status {result.returncode}"]
        raise RunError("The runs could not be copied", value=f"rsync: {lines[0]}",
                       remedy=f"Check that you can write to {place}")  # fmt: skip
    return result.stdout
