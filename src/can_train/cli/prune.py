"""`can-train doctor --prune`: lists unused files that can be made again, and deletes them when the user agrees.
Runs, checkpoints, observations and events stay.
"""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from can_train.cli.output import ask_to_delete, print_json, print_tables, print_text
from can_train.errors import ConfigError
from can_train.factors.observations import repeated_starts
from can_train.io.index import index_folder
from can_train.io.records import TEMPORARY_SUFFIX, remove_folder
from can_train.io.units import parse_time_min, size_text
from can_train.reporter import COLUMNS, TextTable
from can_train.runs.registry import Registry
from can_train.runs.status import known_runs
from can_train.slurm.snapshot import code_folder, described_folder

OLDER_THAN: Final = "90d"
"""Default time without use after which a file may be deleted."""

_WRITING_S: Final = 86400.0  # after which a file that was being written is finished, or its writer dead
_TEMPORARY: Final = re.compile(rf"\.[0-9a-f]{{16}}{re.escape(TEMPORARY_SUFFIX)}|\..*\.claim")
_AGE: Final = re.compile(r"\d{1,9}[dh]")  # without a unit, it would be minutes, as SLURM has them
_OUTPUTS: Final = "outputs"  # folder of prepared data with a folder for the outputs of each reference model
_WHY: Final = {
    "prepared data": "made again from the data set",
    "outputs of reference models": "computed again by the model",
    "copies of code": "of runs that are no longer there",
    "what is remembered of records": "read again from their files",
    "repeated starts": "their attempts' observations say the same",
    "unfinished files": "their writers are gone",
}


@dataclass(frozen=True, kw_only=True)
class Prunable:
    """A file or folder that may be deleted."""

    kind: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Places:
    """The folders that are searched for files."""

    state: Path
    cache: Path  # of prepared data
    runs: Path

    @property
    def text(self) -> str:
        """The folders whose files can be made again, in words."""
        return str(self.state) if self.state in self.cache.parents else f"{self.state} and {self.cache}"


def find_prunable(places: Places, *, older_s: float, now: float) -> list[Prunable]:
    """Finds the files and folders that may be deleted.

    Args:
        places: The folders.
        older_s: Least seconds without use; unfinished files need at least a day.
        now: Seconds since 1970.
    """
    state, cache = places.state, places.cache
    kinds = {path: "prepared data" for path in _children(cache) if path.name != _OUTPUTS}
    kinds |= dict.fromkeys(_children(cache / _OUTPUTS), "outputs of reference models")
    registry = Registry(state)
    in_use = {described_folder(run.folder.path) for run in known_runs(registry, places.runs)}
    # A run that cannot be read may use any of them.
    copies = () if registry.set_aside else _children(code_folder(state))
    kinds |= {path: "copies of code" for path in copies if path not in in_use}
    kinds |= dict.fromkeys(_children(index_folder(state)), "what is remembered of records")
    kinds |= dict.fromkeys(repeated_starts(state), "repeated starts")
    for root in (state, cache, places.runs):
        for folder, folders, names in os.walk(root):
            temporary = filter(_TEMPORARY.fullmatch, [*folders, *names])
            kinds |= {Path(folder, name): "unfinished files" for name in temporary}
    # A folder of prepared data gets its name when it is complete.
    kinds |= {path: "unfinished files" for path in _children(cache) if path.name.startswith(".")}
    prunable = []
    for path, kind in kinds.items():
        used_at, size_bytes = 0.0, 0
        for part in (path, *path.rglob("*")) if path.is_dir() and not path.is_symlink() else (path,):
            with suppress(OSError):
                status = part.lstat()
                # Looking at a folder is no use of it.
                used_at = max(used_at, status.st_mtime, 0.0 if part.is_dir() else status.st_atime)
                size_bytes += status.st_size
        if now - used_at > (max(older_s, _WRITING_S) if kind == "unfinished files" else older_s):
            prunable.append(Prunable(kind=kind, path=path, size_bytes=size_bytes))
    return prunable


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def prune(places: Places, older_than: str, *, yes: bool, as_json: bool) -> None:
    """Lists the files and folders that may be deleted, asks, and deletes them.

    Raises:
        ConfigError: Nobody can be asked, and `yes` is not given; nothing is deleted.
    """
    if not _AGE.fullmatch(older_than):
        raise ConfigError(
            "--older-than must be a number of days or hours", value=older_than, remedy="Write it as 90d or 12h"
        )
    older_s = 60.0 * parse_time_min(older_than)
    prunable = find_prunable(places, older_s=older_s, now=time.time())
    total = f"{len(prunable)} of them, {size_text(sum(item.size_bytes for item in prunable))}"
    if not as_json:
        _print_table(prunable, places, older_than)
    if prunable:
        ask_to_delete(total, yes=yes, can_ask=not as_json, command="--prune")
    left = [item for item in prunable if not _delete(item.path)]
    if as_json:
        objects = {item: {"kind": item.kind, "path": str(item.path), "bytes": item.size_bytes} for item in prunable}
        print_json({"older_than": older_than,
                    "deleted": [plain for item, plain in objects.items() if item not in left],
                    "left": [objects[item] for item in left]})  # fmt: skip
    elif prunable:
        print_text(f"Deleted {len(prunable) - len(left)} of {len(prunable)}.")
    if left and as_json:
        raise typer.Exit(2)
    if left:
        raise ConfigError("Some files could not be deleted", value=str(left[0].path),
                          remedy="Ask who owns them: can-train doctor --prune lists them again")  # fmt: skip


def _print_table(prunable: list[Prunable], places: Places, older_than: str) -> None:
    if not prunable:
        print_text(f"Nothing in {places.text} has gone unused for {older_than}.")
        return
    rows = []
    for kind, why in _WHY.items():
        sizes = [item.size_bytes for item in prunable if item.kind == kind]
        rows += [(kind, str(len(sizes)), size_text(sum(sizes)), why)] if sizes else []
    columns = ("what", "number", "size", "why it can go")
    print_tables([TextTable(f"Not used for {older_than}", columns, rows, [f"in {places.text}"])], pipe_columns=COLUMNS)


def _delete(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
