"""Finds the Python that `can-train` and the scripts run in: the Python of `.venv`, which it makes with venv and pip, or
the Python that CAN_TRAIN_PYTHON names. Python 3.6 can parse this file, so that an old Python says that it is too old.
"""

import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        "can-train: needs Python 3.11 or newer, and {} is {}.{}.\n"
        "Call it with a newer one (python3.12 ./can-train ...).\n".format(sys.executable, *sys.version_info[:2])
    )
    sys.exit(2)

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PYTHON_VARIABLE: Final = "CAN_TRAIN_PYTHON"

SIZES: Final = "about 0.4 GB to download and 1.5 GB on disk with PyTorch's CPU build, 5 GB on disk with its CUDA build"
"""Measured on Linux x86-64 with the versions in scripts/constraints.txt."""

UNFINISHED: Final = "unfinished"
"""The text of .venv's stamp from before its first change until the fingerprint of the installation is written.
A set-up that was killed is noticed by it, and made anew: pip takes a half-written package for an installed one."""

INCOMPLETE: Final = "incomplete"
"""The text of the stamp after pip failed before it changed anything: the files can stay."""

# Variables, not options, since they must also reach the pip that prepares a build. The path is relative to the
# project's folder, because pip splits the value at spaces.
CONSTRAINTS: Final = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), "scripts/constraints.txt")
# With `user = true` in a person's own settings pip would refuse.
PIP_SETTINGS: Final = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0"}


class SetUpError(Exception):
    """The environment cannot be used; the message has the reason and a remedy."""


def say(text: str) -> None:
    """Prints to stderr: stdout belongs to the command that runs afterwards."""
    print(f"can-train: {text}", file=sys.stderr, flush=True)


def project_python(root: Path, *, tools: bool = False) -> str:
    """Returns the path of the project's Python, with everything installed. Exits with status 2 if that fails.

    Run modules with `-P`; otherwise files in the working folder shadow packages.

    Args:
        root: The project's folder.
        tools: Whether the developers' tools (pytest, ruff, mypy) are needed too.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    try:
        return named_python(root, named, tools=tools) if named else venv_python(root, tools=tools)
    except (SetUpError, OSError) as error:
        say(str(error) if isinstance(error, SetUpError) else f"the set-up failed: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted; the next call repairs what is unfinished")
        sys.exit(130)


def requirements(root: Path, *, tools: bool, building: bool = True) -> list[str]:
    """Reads the required packages from pyproject.toml: with the developers' tools, and, for an
    installation (`building`), with the build's and the tasks' packages.
    """
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SetUpError(f"{root / 'pyproject.toml'} cannot be read: {error}") from error
    builders = project["build-system"]["requires"] if building else []
    extras = project["project"].get("optional-dependencies", {})
    # `all` names the extras of tasks: can-train[one,other].
    tasks = [need for name in re.findall(r"\w+", " ".join(extras.get("all", []))) for need in extras.get(name, [])]
    of_tasks = list(dict.fromkeys(tasks)) if building else []
    return [
        *builders,
        *project["project"]["dependencies"],
        *of_tasks,
        *(project["dependency-groups"]["dev"] if tools else []),
    ]


# .venv


def venv_python(root: Path, *, tools: bool) -> str:
    """Returns the Python of `.venv`, which is made or brought up to date if necessary."""
    if not is_current(root, tools=tools):
        with _set_up_lock(root) as lock:
            if not is_current(root, tools=tools):  # another process may have done it meanwhile
                _set_up(root, lock, tools=tools)
    return str(root / ".venv" / "bin" / "python")


def is_current(root: Path, *, tools: bool) -> bool:
    """Checks whether `.venv` has the required packages. With the developers' tools it also serves without them."""
    accepted = [fingerprint(root, tools=True), fingerprint(root, tools=tools)]
    return read_stamp(root / ".venv") in accepted and os.access(root / ".venv" / "bin" / "python", os.X_OK)


def fingerprint(root: Path, *, tools: bool) -> str:
    """Hashes the inputs of an installation. They include the folder, which the editable installation points at, and
    the Python behind `.venv`: it does not survive a move, or an upgrade of the system's Python.
    """
    files = [root / "pyproject.toml", root / "scripts" / "constraints.txt"]
    paths = [root, (root / ".venv" / "bin" / "python").resolve()]
    parts = [*(file.read_bytes() for file in files), *map(os.fsencode, paths), bytes([tools])]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def read_stamp(venv: Path) -> str:
    """Returns a fingerprint, INCOMPLETE, UNFINISHED (also for a damaged stamp), or "" where there is no stamp."""
    try:
        stamp = (venv / "can-train.stamp").read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return stamp if re.fullmatch(f"[0-9a-f]{{64}}|{INCOMPLETE}", stamp) else UNFINISHED


def write_stamp(venv: Path, stamp: str) -> None:
    """Replaces the stamp in one step: a reader never sees half of it."""
    (venv / "can-train.stamp.new").write_text(stamp)
    (venv / "can-train.stamp.new").replace(venv / "can-train.stamp")


@contextmanager
def _set_up_lock(root: Path) -> Iterator[int]:
    """Keeps two set-ups from running at once. Yields the lock's file descriptor."""
    # A link of that name would have another file of the user's emptied.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(root / ".venv.lock", flags, 0o666), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running here; waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            say("this file system has no locks: start no second set-up here until this one has ended")
        yield file.fileno()


def _set_up(root: Path, lock: int, *, tools: bool) -> None:
    venv, python = root / ".venv", root / ".venv" / "bin" / "python"
    check = [str(python), "-I", "-c", "import pip"]
    has_pip = os.access(python, os.X_OK) and subprocess.call(check, stderr=subprocess.DEVNULL) == 0
    if has_pip and read_stamp(venv) != UNFINISHED:
        say("something changed or is missing: installing into .venv what pyproject.toml and the constraints ask for")
    else:
        _make_venv(root, lock)
    write_stamp(venv, UNFINISHED)
    pip = [str(python), "-I", "-u", "-m", "pip", "install"]
    packages = next(venv.glob("lib/python*/site-packages"))
    before = packages.stat().st_mtime_ns
    try:
        wanted = requirements(root, tools=tools)
        if wanted:
            _run(root, lock, [*pip, *wanted], **CONSTRAINTS)
        # Without CONSTRAINTS: pip 26.3 refuses a build constraint where no environment is made for the build.
        _run(root, lock, [*pip, "--no-build-isolation", "--no-deps", "--editable", "."])
    except SetUpError:
        if packages.stat().st_mtime_ns == before:  # without a network, pip fails before it changes anything
            write_stamp(venv, INCOMPLETE)
        raise
    write_stamp(venv, fingerprint(root, tools=tools))
    say("set up")


def _make_venv(root: Path, lock: int) -> None:
    venv = root / ".venv"
    if importlib.util.find_spec("ensurepip") is None:
        raise SetUpError(
            f"{sys.executable} has no module `ensurepip`, which making .venv needs.\n"
            f"Install it (Debian, Ubuntu: apt install python3-venv), call another Python, or set {PYTHON_VARIABLE}."
        )
    stamped = read_stamp(venv) != ""
    if not stamped and venv.is_dir() and any(venv.iterdir()):
        raise SetUpError(f"{venv} is no Python environment with pip, nor made here; move it away and try again.")
    reason = "the last set-up was interrupted, or .venv is broken" if stamped else "first use"
    version = ".".join(map(str, sys.version_info[:3]))
    say(f"{reason}: making .venv with Python {version} and what pyproject.toml asks for,\n  {SIZES}")
    empty(venv)
    _run(root, lock, [sys.executable, "-I", "-m", "venv", str(venv)])


def empty(venv: Path) -> None:
    """Removes everything but the stamp. `venv --clear` removes that too: whoever comes after an interruption would not
    know whose files the rest is. The folder itself stays, since it may be a link to another disk.
    """
    venv.mkdir(exist_ok=True)
    write_stamp(venv, UNFINISHED)
    for child in venv.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != "can-train.stamp":
            child.unlink()


def _run(root: Path, lock: int, command: list[str], **variables: str) -> None:
    """Runs venv or pip. Shows its errors, and pip's remarks about downloads and installations."""
    environment = {**os.environ, **PIP_SETTINGS, **variables}
    # The command inherits the lock: if only this process is killed, the next one still waits for the command to end.
    # A session of its own: the command would answer Ctrl-C with a traceback.
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=[lock],
        start_new_session=True,
    )  # fmt: skip
    try:
        for line in process.stdout or ():
            if line.lstrip().startswith((b"Downloading", b"Installing")):
                say(line.decode(errors="replace").strip()[:100])  # one line names all packages
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    if process.wait() != 0:
        raise SetUpError(
            "the set-up failed for the reason written above. If no package index could be reached:\n"
            "make .venv where there is a network (on a cluster: its login node), "
            f"or set {PYTHON_VARIABLE} to a Python that has the packages."
        )


# The interpreter that a cluster or an image brings

PROBE: Final = """
import sys
sys.path = [folder for folder in sys.path if folder]
import json
installed = {}
if sys.version_info >= (3, 8):
    from importlib.metadata import PackageNotFoundError, version
    for name in sys.argv[1:]:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            pass
print(json.dumps([sys.version_info[:2], installed]))
"""
"""Prints an interpreter's version, and the versions of the named packages. Nothing is imported from the current folder,
which is the empty path. `-P` would do that, but only Python 3.11 has it, and an older one is to say that it is too old.
"""


def named_python(root: Path, name: str, *, tools: bool) -> str:
    """Returns the interpreter that CAN_TRAIN_PYTHON names. Nothing is installed into it: it gets the source by path."""
    path = shutil.which(name)
    if path is None:
        raise SetUpError(f"{PYTHON_VARIABLE} names nothing that can be run: {name}")
    python = str(Path(path).absolute())
    required = requirements(root, tools=tools, building=False)
    probe = [python, "-c", PROBE, *(re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in required)]
    try:
        answer = subprocess.run(probe, capture_output=True, text=True, check=True).stdout
        version, installed = json.loads(answer.splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError) as error:
        reason = getattr(error, "stderr", "") or error
        raise SetUpError(f"{PYTHON_VARIABLE} names no Python that works: {python}\n{reason}") from error
    lacking = shortcomings(tuple(version), installed, required)
    if lacking:
        raise SetUpError(
            f"{PYTHON_VARIABLE}={name} lacks requirements of pyproject.toml:\n  "
            + "\n  ".join(lacking)
            + f"\nInstall that there, or unset {PYTHON_VARIABLE} to have .venv made."
        )
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")]))
    return python


def shortcomings(version: tuple[int, ...], installed: Mapping[str, str], required: Iterable[str]) -> list[str]:
    """Lists the requirements (`torch>=2.6`) that an interpreter's version and packages do not meet."""
    if version < (3, 11):
        return [f"Python 3.11 or newer (it is {version[0]}.{version[1]})"]
    lacking = []
    for requirement in required:
        name, _, lowest = requirement.partition(">=")
        if name not in installed:
            lacking.append(requirement)
        elif _release(installed[name]) < _release(lowest):
            lacking.append(f"{requirement} (it has {installed[name]})")
    return lacking


def _release(version: str) -> list[int]:
    """Returns the numbers before anything else: [2, 6, 0] of `2.6.0+cu124`."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])]
