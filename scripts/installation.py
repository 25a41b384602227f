"""Makes `.venv` and keeps it up to date. It decides what a set-up still lacks and does that, one process at a time;
what belongs in it is said by pyproject.toml and scripts/constraints.txt.

A set-up that was killed at any moment is noticed by the next one: `.venv` carries a stamp, which says "unfinished"
before anything is touched and gets the fingerprint of what was installed when all is done.
"""

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Final, NamedTuple

PYTHON_VARIABLE: Final = "CAN_TRAIN_PYTHON"

SIZES: Final = (
    "about 0.4 GB to download and 1.5 GB on disk with PyTorch's CPU build; 5 GB on disk with its CUDA build, "
    "the usual one on Linux"
)
"""Measured on Linux x86-64 with the versions in scripts/constraints.txt."""

STATUS_INTERVAL_S: Final = 0.5
"""Seconds between two looks at a running command: on a terminal its line seems alive."""

LOGGED_STATUS_INTERVAL_S: Final = 15.0
"""Seconds between two status lines where no terminal rewrites them: a CI log stays short and yet shows life."""

TAIL_BYTES: Final = 8192
"""How much of a log's end is read to report from it: more than TAIL_LINES ever need."""

TAIL_LINES: Final = 10
"""Lines of a failed command's output in an error: pip's reason may stand before seven lines of general remarks."""

LINE_CHARACTERS: Final = 200
"""Where a quoted line is cut: pip puts a whole list of versions on one."""

LOGGED_CHARACTERS: Final = 100
"""Where a status line is cut where there is no terminal's width: pip names all packages on one."""

UNFINISHED: Final = "unfinished"
"""The fingerprint of an environment that a process is changing, or was when it was killed."""

INCOMPLETE: Final = "incomplete"
"""The fingerprint of a sound environment in which something is yet to be installed."""

_LAST_RETRY: Final = "Retrying (Retry(total=0"
"""What pip writes before it gives a connection up."""

_STAMP: Final = "can-train.json"
_NEW_STAMP: Final = "can-train.json.new"


class SetUpError(Exception):
    """What keeps the environment from being used, with its remedy."""


class Need(Enum):
    """What an environment needs before it can be used."""

    NOTHING = auto()
    INSTALLATION = auto()
    REBUILDING = auto()


class Stamp(NamedTuple):
    """What `.venv` says of itself: what it was installed from, and whether the developers' tools are in it."""

    fingerprint: str
    tools: bool


def say(text: str) -> None:
    """Tells the person what happens, on stderr: stdout belongs to the command that follows."""
    print(f"can-train: {text}", file=sys.stderr, flush=True)


# .venv: what it needs


def requirements(root: Path, *, tools: bool, building: bool = True) -> list[str]:
    """Reads from pyproject.toml what is to be installed beside the project itself.

    Args:
        root: The project's folder.
        tools: Whether the developers' tools are needed too.
        building: Whether the project itself is to be installed, which takes what builds it.

    Raises:
        SetUpError: It is not valid TOML.
    """
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SetUpError(f"{root / 'pyproject.toml'} cannot be read: {error}") from error
    needed = [*(project["build-system"]["requires"] if building else []), *project["project"]["dependencies"]]
    return needed + (project["dependency-groups"]["dev"] if tools else [])


def fingerprint(root: Path) -> str:
    """Hashes all that a finished set-up depends on: what is asked for, where it lies, and the interpreter behind it.

    The editable installation points at `root`, and the packages belong to the Python that `.venv` links to: a folder
    that was moved and a system Python that was replaced both need a new set-up.
    """
    parts = [
        (root / "pyproject.toml").read_bytes(),
        (root / "scripts" / "constraints.txt").read_bytes(),
        os.fsencode(root),
        os.fsencode((root / ".venv" / "bin" / "python").resolve()),
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def read_stamp(folder: Path) -> Stamp | None:
    """Reads what an environment says of itself: None where nobody has stamped it, UNFINISHED where it is unreadable."""
    try:
        content = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
        return Stamp(str(content["fingerprint"]), bool(content["tools"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return Stamp(UNFINISHED, False)


def write_stamp(folder: Path, stamp: Stamp) -> None:
    """Stamps an environment; a reader sees the old stamp or the new one, even after a power cut."""
    temporary = folder / _NEW_STAMP
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(stamp._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / _STAMP)


def need(stamp: Stamp | None, current: str, *, tools: bool) -> Need:
    """Decides what an environment needs.

    Args:
        stamp: What it says of itself; None where somebody else made it.
        current: The fingerprint that a finished set-up would have now.
        tools: Whether the developers' tools are wanted too.
    """
    if stamp is None:
        return Need.INSTALLATION
    if stamp.fingerprint == UNFINISHED:
        return Need.REBUILDING
    return Need.NOTHING if stamp.fingerprint == current and stamp.tools >= tools else Need.INSTALLATION


# .venv: making it


def make_ready(root: Path, *, tools: bool) -> Path:
    """Makes `.venv` or brings it up to date where that is needed, and returns its interpreter.

    Raises:
        SetUpError: That failed.
    """
    folder = root / ".venv"
    python = folder / "bin" / "python"
    try:
        needed = need(read_stamp(folder), fingerprint(root), tools=tools)
        if needed is not Need.NOTHING or not os.access(python, os.X_OK):
            with _one_at_a_time(root) as lock:
                _set_up(Job(root, lock), folder, tools=tools)
    except OSError as error:
        raise SetUpError(f"cannot set up {folder}: {error}") from error
    return python


def _set_up(job: "Job", folder: Path, *, tools: bool) -> None:
    stamp = read_stamp(folder)
    needed = need(stamp, fingerprint(job.root), tools=tools) if _has_pip(folder) else Need.REBUILDING
    if needed is Need.NOTHING:  # another process has done it while this one waited
        return
    started = time.monotonic()
    tools = tools or (stamp is not None and stamp.tools)
    if needed is Need.REBUILDING:
        _rebuild(job, folder, stamp, tools=tools)
    else:
        say("something changed or is missing: installing into .venv what pyproject.toml and the constraints ask for")
    write_stamp(folder, Stamp(UNFINISHED, tools))
    wanted = requirements(job.root, tools=tools)
    if wanted:
        _pip_install(job, folder, wanted, tools=tools)
    _pip_install(job, folder, ["--no-build-isolation", "--no-deps", "--editable", "."], tools=tools)
    write_stamp(folder, Stamp(fingerprint(job.root), tools))
    say(f"set up in {time.monotonic() - started:.0f} s")


def _has_pip(folder: Path) -> bool:
    python = folder / "bin" / "python"
    check = [str(python), "-I", "-c", "import pip"]
    return os.access(python, os.X_OK) and subprocess.run(check, capture_output=True, check=False).returncode == 0


def _rebuild(job: "Job", folder: Path, stamp: Stamp | None, *, tools: bool) -> None:
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise SetUpError(
                f"{sys.executable} has no module `{module}`, which making .venv needs.\n"
                f"Install it (Debian, Ubuntu: apt install python3-venv), call another Python, or set {PYTHON_VARIABLE}."
            )
    if stamp is None and folder.is_dir() and any(child.name != _NEW_STAMP for child in folder.iterdir()):
        raise SetUpError(f"{folder} is no Python environment with pip, nor made here; move it away and try again.")
    reason = "first use" if stamp is None else "the last set-up was interrupted, or .venv is broken"
    version = ".".join(map(str, sys.version_info[:3]))
    say(f"{reason}: making .venv with Python {version} and what pyproject.toml asks for,\n  {SIZES}")
    empty(folder, tools=tools)
    job.run([sys.executable, "-I", "-m", "venv", str(folder)])


def empty(folder: Path, *, tools: bool) -> None:
    """Leaves nothing in an environment's folder but the stamp that says it is unfinished.

    The folder itself stays, since it may be a link to another disk. The stamp is written first and stays, so that
    whoever comes after an interruption at any point knows what the rest is.
    """
    folder.mkdir(exist_ok=True)
    write_stamp(folder, Stamp(UNFINISHED, tools))
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != _STAMP:
            child.unlink()


def _pip_install(job: "Job", folder: Path, arguments: list[str], *, tools: bool) -> None:
    packages = next(folder.glob("lib/python*/site-packages"))
    before = packages.stat().st_mtime_ns
    try:
        job.run([str(folder / "bin" / "python"), "-I", "-u", "-m", "pip", "install", *arguments])
    except SetUpError:
        # Without a network, say, pip fails before it touches anything, and what is there need not be made anew.
        if packages.stat().st_mtime_ns == before:
            write_stamp(folder, Stamp(INCOMPLETE, tools))
        raise


class Job(NamedTuple):
    """The set-up that this process does, under the lock that it holds."""

    root: Path
    lock: int

    def run(self, command: list[str]) -> None:
        """Runs one command of the set-up and shows that it lives.

        The command inherits the lock: where this process alone is killed, the next one still waits for the command.

        Raises:
            SetUpError: It failed.
        """
        log = self.root / ".venv" / "set-up.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=_pip_environment(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(self.lock,),
            )
            try:
                _watch(process, log)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if process.returncode != 0:
            raise SetUpError(f"the set-up failed:\n{failure(_tail(log))}\nThe whole output is in {log}.")


_PIP_VARIABLES: Final = {
    "PIP_CONSTRAINT": "scripts/constraints.txt",
    "PIP_BUILD_CONSTRAINT": "scripts/constraints.txt",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PIP_PROGRESS_BAR": "off",
    "PIP_USER": "0",
}
"""As variables, since these reach the pip that prepares a build too. The path is relative to the project's folder: pip
splits the variable at spaces. A person's `user = true` would make pip refuse."""


def _pip_environment(command: list[str]) -> dict[str, str]:
    environment = {**os.environ, **_PIP_VARIABLES}
    if "--no-build-isolation" in command:
        # Such a build has no environment of its own to constrain, and pip 26.3 refuses to be told.
        del environment["PIP_BUILD_CONSTRAINT"]
    return environment


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[int]:
    """Holds the project's set-up lock, waiting for it; yields its file descriptor."""
    with (root / ".venv.lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running here; waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            say("this file system has no locks: start no second set-up here until this one has ended")
        yield file.fileno()


# What a running command shows


def _watch(process: subprocess.Popen[bytes], log: Path) -> None:
    live = sys.stderr.isatty()
    started = time.monotonic()
    try:
        while not _ends_within(STATUS_INTERVAL_S if live else LOGGED_STATUS_INTERVAL_S, process):
            line = f"{time.monotonic() - started:4.0f} s  {pip_status(_tail(log))}"
            if live:
                _rewrite_line(line[: shutil.get_terminal_size().columns - 1])
            else:
                say(line[:LOGGED_CHARACTERS])
    finally:
        if live:
            _rewrite_line("")


def _ends_within(timeout_s: float, process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _rewrite_line(text: str) -> None:
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace")


def failure(output: str) -> str:
    """Says why a command failed, from its output; pip takes a missing network for packages in conflict."""
    if _LAST_RETRY in output:
        return (
            "  no package index could be reached.\nMake .venv where there is a network (on a cluster: its login node), "
            f"or set {PYTHON_VARIABLE} to a Python that has the packages."
        )
    return last_lines(output)


def pip_status(output: str) -> str:
    """Picks the last line in which pip says what it begins to do, out of its remarks and warnings."""
    begun = re.findall(r"^ *((?:Collecting|Downloading|Building|Preparing|Installing) .+)", output, flags=re.MULTILINE)
    return begun[-1] if begun else "working"


def last_lines(text: str, count: int = TAIL_LINES) -> str:
    """Quotes the last lines that say something, indented and cut at LINE_CHARACTERS."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {line[:LINE_CHARACTERS]}" for line in lines[-count:])
