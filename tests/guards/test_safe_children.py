"""Every Python that this project starts is started with `-P` or `-I`: a `json.py` or `torch.py` in the folder that
somebody happens to work in does not run.
"""

import ast
import re
from pathlib import Path

import pytest

from can_train.cli import main
from guards.sources import PACKAGE, Source, parse, without_docstrings

ROOT = PACKAGE.parents[1]

INTERPRETER = re.compile(
    r"""(?i)sys\.executable|.*\bpython\b.*|.*\bpython3?['"]\)?|_\w*python\(.*\)|str\(\w*python\w*\)"""
)
"""The expressions that name an interpreter, as a word of a command."""

SAFE = ("-P", "-I")

BY_PATH = {
    "scripts/environment.py": ["python, '-c', PROBE"],
}
"""Commands without either flag, since an interpreter older than Python 3.11 gets them: PROBE itself leaves the folder
out.
"""

SHELL = re.compile(r"(?:^|[\s;&|])python3?(?:\.\d+)? +-(?!P|I)\w")
"""A command line in a text."""


def python_files() -> list[Source]:
    files = [ROOT / "can-train", *(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").rglob("*")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file() and is_python(file)}
    return [parse(file.relative_to(ROOT).as_posix(), text) for file, text in texts.items()]


def is_python(file: Path) -> bool:
    return file.suffix == ".py" or (not file.suffix and file.read_bytes().startswith(b"#!/usr/bin/env python"))


def unsafe_commands(source: Source) -> list[str]:
    """The commands of a file that start a Python which imports from the current folder."""
    unsafe = []
    for node in without_docstrings(source.tree):
        if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
            words = [ast.unparse(word) for word in node.elts[:3]]
            is_option = words[1].startswith(("'-", "*"))
            if INTERPRETER.fullmatch(words[0]) and is_option and words[1].strip("'") not in SAFE:
                unsafe += [", ".join(words)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and SHELL.search(node.value):
            unsafe.append(node.value)
    return [command for command in unsafe if command not in BY_PATH.get(source.path, [])]


def test_no_python_is_started_that_imports_from_the_current_folder() -> None:
    unsafe = {source.path: unsafe_commands(source) for source in python_files()}
    assert {path: commands for path, commands in unsafe.items() if commands} == {}


@pytest.mark.parametrize("command", ["[sys.executable, '-m', 'x']", "[python, '-c', 'pass']", "(str(python), '-u', x)",
                                     "[*a, *b], [sys.executable, *more]", "[tools / 'python', '-m', 'build']",
                                     "line = 'set -e; python -m can_train'"])  # fmt: skip
def test_a_python_that_imports_from_the_current_folder_is_noticed(command: str) -> None:
    assert len(unsafe_commands(parse("a.py", command))) == 1


@pytest.mark.parametrize(
    "command", ["[sys.executable, '-P', '-m', 'x']", "[python, '-I', *more]", "python, other = a, b"]
)
def test_a_python_that_does_not_is_none_of_them(command: str) -> None:
    assert unsafe_commands(parse("a.py", command)) == []


def test_the_libraries_of_a_command_start_no_such_python_either() -> None:
    (run,) = [node for node in ast.parse(Path(main.__file__).read_text()).body if getattr(node, "name", "") == "run"]
    assert "os.environ['PYTHONSAFEPATH'] = '1'" in ast.unparse(run)
