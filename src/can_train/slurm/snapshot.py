"""The code that a job runs: a copy of the package, its presets and the code of a task of one's own, as they were at
submission, in a folder of the state folder that is named by a digest of its content. Later edits do not change the
copy.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from can_train.config.resolved import ResolvedRun
from can_train.config.settings import is_code
from can_train.config.task_settings import load_object, package_folders
from can_train.errors import ConfigError, RunError, remedy_for
from can_train.io import records
from can_train.io.units import size_text

_DESCRIPTION: Final = "code.json"
_PARTS: Final = ("src", "configs", "pyproject.toml")  # of a checkout: files for a job
_DIGITS: Final = 24  # hexadecimal digits of a snapshot's name: 96 bits, so that two never collide
_TASK: Final = "task"  # folder of a snapshot with the code of a task of one's own
_TASK_SUFFIXES: Final = (".py", ".yaml", ".yml")  # of its code and presets; data are not copied
_MOST_FILES, _MOST_BYTES = 2000, 32 * 2**20  # of a task's code: several times a large package
_GIT_S: Final = 20  # seconds that git may take; it needs hundredths of a second


@dataclass(frozen=True, kw_only=True)
class Code:
    """The code as it is now.

    Attributes:
        root: Folder of the original.
        digest: Digest of all files' paths and contents.
        files: Content by path in the snapshot.
        revision: Revision in git; empty outside git.
        difference: Difference from that revision, in git's notation.
        untracked: Files outside git.
    """

    root: Path
    digest: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    revision: str = ""
    difference: str = ""
    untracked: tuple[str, ...] = ()

    def folder(self, state_dir: Path) -> Path:
        """Returns the folder of the snapshot in a state folder."""
        return code_folder(state_dir) / self.digest


def code_folder(state_dir: Path) -> Path:
    """Returns the folder of the snapshots in a state folder."""
    return state_dir / "code"


def described_folder(run_path: Path) -> Path | None:
    """Returns the folder of a run's snapshot; None if the run's folder names no snapshot."""
    folder = records.parse_object(records.text_or_nothing(run_path / _DESCRIPTION)).get("folder")
    return Path(folder) if isinstance(folder, str) else None


def read_code(*packages: Path) -> Code:
    """Reads the running code: of a checkout the files under src/ and configs/ that git tracks or would track, as they
    are in the working tree; of an installation the packages' folders.

    Args:
        packages: The folders of can-train's packages; none: the packages that this process imports.
    """
    folders = packages or package_folders()
    package = folders[0]
    if (package / "configs").is_dir():
        places = {f"src/{folder.name}/{name}": folder / name for folder in folders for name in _walk(folder)}
        return _with_files(Code(root=package), places)
    root = package.parents[1]
    names = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_PARTS)
    if names is None:
        files = {part: root / part for part in _PARTS if (root / part).is_file()}
        files |= {f"{part}/{name}": root / part / name for part in _PARTS for name in _walk(root / part)}
        return _with_files(Code(root=root), files)
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *_PARTS) or ""
    code = Code(root=root, revision=(_git(root, "rev-parse", "HEAD") or "").strip(),
                difference=_git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--", *_PARTS) or "",
                untracked=tuple(sorted({*untracked.split("\0")} - {""})))  # fmt: skip
    return _with_files(code, {name: root / name for name in {*names.split("\0")} - {""}})


def code_of_runs(runs: Sequence[ResolvedRun]) -> Code:
    """Reads the code for the jobs of runs: the running package, and the code of a task and an optimizer of one's own,
    which the runs have from the same folder.

    Raises:
        ConfigError: The task's code is too large for a snapshot.
    """
    run, code = next((run for run in runs if run.paths.code_dir), runs[0]), read_code()
    folder = Path(run.paths.code_dir)
    # A job finds an installed package with a task in the place where this process does.
    if not run.paths.code_dir:
        return code
    paths, task_class = set[Path](), run.task_settings.task_class
    # Of a module: its top-level package. Of a file: the Python files and packages in its folder, and its presets.
    if task_class:
        module = sys.modules[load_object(task_class).__module__]
        package = folder / module.__name__.partition(".")[0]
        if package.is_dir() and Path(str(module.__file__)).is_relative_to(package):
            paths = _code_below(package)
    if not paths or is_code(run.training.optimizer):
        packages = [folder / "configs", *(init.parent for init in folder.glob("*/__init__.py"))]
        paths |= {*folder.glob("*.py"), *(path for place in packages for path in _code_below(place))}
    # Of both: the modules that are imported from the folder.
    files = [Path(file) for each in [*sys.modules.values()] if isinstance(file := getattr(each, "__file__", None), str)]
    paths |= {file for file in files if file.suffix == ".py" and file.is_relative_to(folder)}
    places = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    size = sum(place.stat().st_size for place in places.values())
    if len(places) > _MOST_FILES or size > _MOST_BYTES:
        raise ConfigError("The code of a task is too large for its job",
                          value=f"{folder} has {len(places)} files of {size_text(size)}",
                          remedy=f"At most {_MOST_FILES} files and {size_text(_MOST_BYTES)} travel with a job: put the "
                                 "task into a folder that contains only its code")  # fmt: skip
    return _with_files(code, {f"{_TASK}/{name}": place for name, place in places.items()})


def with_code(run: ResolvedRun, code: Code, state_dir: Path) -> ResolvedRun:
    """Returns a run whose task and optimizer are imported from the snapshot."""
    if not run.paths.code_dir:
        return run
    return replace(run, paths=replace(run.paths, code_dir=str(code.folder(state_dir) / _TASK)))


def _code_below(folder: Path) -> set[Path]:
    return {folder / name for name in _walk(folder) if name.endswith(_TASK_SUFFIXES)}


def keep(code: Code, state_dir: Path) -> Path:
    """Puts a copy of the code into the state folder, unless it is there.

    Returns:
        The copy's folder; its `src` is to be imported.

    Raises:
        StateError: The state folder cannot be written.
    """
    folder = code.folder(state_dir)
    try:
        if folder.is_dir():
            _restore(folder, code.files)
        else:
            _make(folder, code.files)
    except OSError as error:
        raise records.unusable("written", folder, error) from error
    return folder


def _restore(folder: Path, files: Mapping[str, bytes]) -> None:
    """Repairs a copy of the code: a file system that deletes old files may have deleted some, and another user with the
    right to write may have added some, bytecode included.
    """
    for path in sorted(folder.rglob("*")):
        # A temporary file of another submission has a name that nothing imports.
        is_ours = path.relative_to(folder).as_posix() in files or path.name.endswith(records.TEMPORARY_SUFFIX)
        if path.is_symlink() or (path.is_file() and not is_ours):
            path.unlink(missing_ok=True)
    for name, content in files.items():
        path = folder / name
        if not records.is_file(path) or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            records.write_bytes_atomic(path, content)


def describe(code: Code, state_dir: Path, run_path: Path) -> None:
    """Writes the description of a run's code into the run's folder.

    Raises:
        RunError: The folder cannot be written.
    """
    description = {"digest": code.digest, "folder": str(code.folder(state_dir)), "root": str(code.root),
                   "revision": code.revision, "modified": bool(code.difference or code.untracked),
                   "untracked": list(code.untracked)}  # fmt: skip
    try:
        records.write_json_atomic(run_path / _DESCRIPTION, description)
        if code.difference:
            records.write_text_atomic(run_path / "code.diff", code.difference)
    except OSError as error:
        raise RunError("The run folder cannot be written", value=f"{run_path}: {error.strerror}",
                       remedy=remedy_for(error, "Give another place with --runs-dir")) from error  # fmt: skip


def code_of(run_path: Path) -> Path:
    """Finds the snapshot that a run was submitted with.

    Raises:
        RunError: The run has no snapshot, or its files have changed since the submission.
    """
    try:
        description: dict[str, Any] = json.loads(records.read_text(run_path / _DESCRIPTION))
        folder, digest = Path(description["folder"]), description["digest"]
        files = {name: folder / name for name in _walk(folder) if not name.endswith(records.TEMPORARY_SUFFIX)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError("The run was not submitted, or the note of its code is damaged",
                       value=str(run_path / _DESCRIPTION),
                       remedy="Submit it anew: can-train resubmit RUN") from error  # fmt: skip
    of_task = {name: path for name, path in files.items() if name.startswith(f"{_TASK}/")}
    package = _with_files(Code(root=folder), {name: files[name] for name in files.keys() - of_task.keys()})
    if _with_files(package, of_task).digest != digest:
        fact = "The code of the run's submission " + ("was changed" if files else "is gone")
        raise RunError(fact, value=str(folder),
                       remedy=f"Start a new run with today's code: can-train resubmit {run_path.name}")  # fmt: skip
    return folder


def _with_files(code: Code, places: Mapping[str, Path]) -> Code:
    # A file in git's list may have been deleted.
    files = {**code.files, **{name: place.read_bytes() for name, place in sorted(places.items()) if place.is_file()}}
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return replace(code, digest=digest.hexdigest()[:_DIGITS], files=files)


def _walk(folder: Path) -> list[str]:
    """Lists the files below a folder, without bytecode."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if "__pycache__" not in path.parts)


def _make(folder: Path, files: Mapping[str, bytes]) -> None:
    temporary = records.temporary_beside(folder)
    try:
        for name, content in files.items():
            place = temporary / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        # With a umask of 002 the members of a group could change the code that the job runs.
        for place in (temporary, *temporary.rglob("*")):
            place.chmod(place.stat().st_mode & ~0o022)
        temporary.rename(folder)
    except OSError:
        # Another submission has made the folder meanwhile.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _git(root: Path, *arguments: str) -> str | None:
    """Returns the output of git; None outside a repository or without git."""
    try:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape")
