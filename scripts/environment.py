"""Finds the Python that `can-train`, `scripts/test` and `scripts/check` run in: that of `.venv` beside them, or the one
that CAN_TRAIN_PYTHON names. How `.venv` is made is installation.py's. Python 3.6 and newer can parse this file, so that
an old one can say that it is too old.
"""

import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        "can-train: needs Python 3.11 or newer, and {} is {}.{}.\n"
        "Call it with a newer one (python3.12 ./can-train ...).\n".format(sys.executable, *sys.version_info[:2])
    )
    sys.exit(2)

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from installation import PYTHON_VARIABLE, SetUpError, make_ready, requirements, say


class Interpreter(NamedTuple):
    """A Python with everything installed, and the environment variables to run it with."""

    path: str
    variables: Mapping[str, str]

    def command(self, module: str, arguments: Iterable[str]) -> list[str]:
        """Makes the command that runs a module; `-P` keeps the working folder's files from shadowing packages."""
        return [self.path, "-P", "-m", module, *arguments]

    def become(self, module: str, arguments: Iterable[str]) -> NoReturn:
        """Replaces this process by a run of the module."""
        os.execve(self.path, self.command(module, arguments), self.variables)

    def run(self, module: str, arguments: Iterable[str], *, folder: Path) -> int:
        """Runs the module in a folder and returns its exit status."""
        return subprocess.call(self.command(module, arguments), env=self.variables, cwd=folder)


def interpreter(root: Path, *, tools: bool = False) -> Interpreter:
    """Returns the project's Python, set up where that is still to be done; ends the process where that fails.

    Args:
        root: The project's folder.
        tools: Whether the developers' tools are needed too.
    """
    try:
        named = os.environ.get(PYTHON_VARIABLE)
        if named:
            return named_interpreter(root, named, tools=tools)
        return Interpreter(str(make_ready(root, tools=tools)), os.environ)
    except SetUpError as error:
        say(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted; the next call repairs what is unfinished")
        sys.exit(130)


# The interpreter that a cluster or an image brings


def named_interpreter(root: Path, name: str, *, tools: bool) -> Interpreter:
    """Returns the interpreter that CAN_TRAIN_PYTHON names, with the project's source on its path.

    Raises:
        SetUpError: It cannot be run, is too old, or lacks a package.
    """
    found = shutil.which(name)
    if found is None:
        raise SetUpError(f"{PYTHON_VARIABLE} names nothing that can be run: {name}")
    path = str(Path(found).absolute())
    # The source is used where it lies: nothing is built.
    required = requirements(root, tools=tools, building=False)
    version, installed = _probe(path, [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in required])
    lacking = shortcomings(version, installed, required)
    if lacking:
        raise SetUpError(
            f"{PYTHON_VARIABLE}={name} lacks what pyproject.toml asks for:\n  "
            + "\n  ".join(lacking)
            + f"\nInstall that there, or unset {PYTHON_VARIABLE} to have .venv made."
        )
    search_path = os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")]))
    return Interpreter(path, {**os.environ, "PYTHONPATH": search_path})


_PROBE: Final = """
import json, sys
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
"""Runs in an interpreter of any age: prints its version and those of the packages named."""


def _probe(path: str, names: Iterable[str]) -> tuple[tuple[int, ...], dict[str, str]]:
    try:
        answer = subprocess.run([path, "-c", _PROBE, *names], capture_output=True, text=True, check=True).stdout
        version, installed = json.loads(answer.splitlines()[-1])
        return tuple(version), installed
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError) as error:
        reason = getattr(error, "stderr", "") or error
        raise SetUpError(f"{PYTHON_VARIABLE} names no Python that works: {path}\n{reason}") from error


def shortcomings(version: tuple[int, ...], installed: Mapping[str, str], required: Iterable[str]) -> list[str]:
    """Lists what an interpreter lacks, one readable line each.

    Args:
        version: The interpreter's version, (major, minor).
        installed: Versions by the requirements' names.
        required: Requirements as pyproject.toml spells them: a name, and at most a lowest version after `>=`.
    """
    if version < (3, 11):
        return [f"Python 3.11 or newer (it is {version[0]}.{version[1]})"]
    lacking = []
    for requirement in required:
        name, _, lowest = requirement.partition(">=")
        if name not in installed:
            lacking.append(requirement)
        elif _numbers(installed[name]) < _numbers(lowest):
            lacking.append(f"{requirement} (it has {installed[name]})")
    return lacking


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]*", version)
    return tuple(int(number) for number in release[0].split(".") if number) if release else ()
