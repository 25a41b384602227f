"""`can-train sync RUN… PLACE` and `archive`: copies runs by rsync to a folder or to another machine, with the facts
that only this machine knows, so that they are listed and shown there as here.
"""

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import typer

from can_train.cli.output import ask_to_delete, print_json, print_text, print_wrapped
from can_train.cli.run_locator import AsJson, RunLocator, RunsDir, StateDir, Yes
from can_train.errors import ConfigError, RunError
from can_train.io.records import this_host, utc_now, write_document
from can_train.io.units import counted, size_text
from can_train.runs.registry import RunLabels
from can_train.runs.run_folder import short_name
from can_train.runs.status import COPY, CopyRecord, RunStatus

_REMOTE: Final = re.compile(r"(?:[\w.-]+@)?[\w][\w.-]*:.+")
_NO_PARENT: Final = re.compile(r"mkdir .* failed: No such file or directory")
_SSH_FAILED: Final = 255  # exit status of rsync where ssh reached no machine
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
    # By content: what is deleted here must be there. The facts are there anew, and change the time of their folder.
    differing = _rsync(["--checksum", "--omit-dir-times", "--dry-run", "--itemize-changes", f"--exclude=/*/{COPY}"],
                       [run.folder.path for run in known], place)  # fmt: skip
    if differing.strip():
        # rsync writes the kind of the difference as a code, and then the name.
        name = differing.splitlines()[0].partition(" ")[2]
        raise RunError("The copies differ, and nothing was deleted here", value=name,
                       remedy="Move its copy away, and give the same line again")  # fmt: skip
    for run in known:
        delete_run(locator, run)
    if not as_json:
        print_text(f"Deleted {total}.")


def _split(names: Sequence[str], command: str) -> tuple[list[str], str]:
    *runs, place = names
    if not runs:
        line = f"can-train {command} {shlex.quote(place)} user@host:runs"
        raise ConfigError("PLACE is missing", value=place, remedy=f"Name a folder or a machine: {line}")
    # A place that begins with a hyphen would be an option of rsync or ssh.
    if place.startswith("-") or (":" in place and not _REMOTE.fullmatch(place) and "/" not in place.partition(":")[0]):
        raise ConfigError("A place is a folder or user@host:path", value=repr(place), remedy="Write it as me@host:runs")
    machine, folder = _split_place(place)
    if machine and folder.startswith("~") and not folder.startswith("~/") and folder != "~":
        remedy = "Write the home directory of another person as a path: me@host:/home/them/runs"
        raise ConfigError("No shell there reads a place", value=repr(place), remedy=remedy)
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
    # --runs-dir adds a folder to the runs that a machine knows, and a list has only the newest of all.
    name, where = short_name(statuses[0].known.run_id), f"--runs-dir {_quoted(_split_place(place)[1])}"
    print_wrapped(f"Look there:\n  can-train status {name} {where}")
    if len(statuses) > 1:
        print_wrapped(f"List all there:\n  can-train runs --limit 0 {where}")


def _split_place(place: str) -> tuple[str, str]:
    """Returns the machine, empty for this one, and the folder."""
    machine, _, folder = place.partition(":") if _REMOTE.fullmatch(place) else ("", "", place)
    return machine, folder


def _quoted(folder: str) -> str:
    # A quoted tilde would be a folder of that name.
    if folder.rstrip("/") == "~":
        return "~"
    return f"~/{shlex.quote(folder[2:])}" if folder.startswith("~/") else shlex.quote(folder)


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
    machine, folder = _split_place(place)
    # An argument list: no shell reads a name. `--protect-args` keeps the other machine's shell from it, too, which
    # would expand a tilde. Folders there are below the home directory anyway.
    below_home = folder[2:].lstrip("/") if folder == "~" or folder.startswith("~/") else folder
    # Without a folder, the slash below would be the root of the other machine.
    target = f"{machine}:{below_home or '.'}" if machine else str(Path(place).expanduser().absolute())
    command = [program, "--archive", "--partial", "--protect-args", "--8-bit-output", "--exclude=/*/lock", *options,
               "--", *(str(folder.absolute()) for folder in folders), f"{target.rstrip('/')}/"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        raise _refusal(result, place)
    return result.stdout


def _refusal(result: subprocess.CompletedProcess[str], place: str) -> RunError:
    machine, folder = _split_place(place)
    lines = [line for line in result.stderr.splitlines() if line.strip()] or [f"exit status {result.returncode}"]
    # rsync makes only the last folder of a path. The user makes the folders above it: a disk may not be mounted.
    if _NO_PARENT.search(result.stderr):
        parent = str(PurePosixPath(folder.rstrip("/")).parent)
        making = f"mkdir -p {_quoted(parent)}"
        if machine:
            making = shlex.join(["ssh", machine, making])
        return RunError("The folder in which the copies' folder would be made is missing",
                        value=f"{machine}:{parent}" if machine else parent,
                        remedy=f"Make it:\n  {making}\nThen give the same line again")  # fmt: skip
    remedy = f"Check that you can write to {place}"
    if machine and (result.returncode == _SSH_FAILED or lines[0].startswith("ssh: ")):
        remedy = f"Check that you can log in there: ssh {machine}"
    return RunError("The runs could not be copied", value=f"rsync: {lines[0]}", remedy=remedy)
