"""ruff and mypy check every Python file that git knows, those without a suffix included."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from guards.sources import PACKAGE

ROOT = PACKAGE.parents[1]


def python_files(root: Path) -> set[str]:
    """Files that git knows, or would add, and that end in .py or begin with a line that runs Python; links left out."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [name for name in names if name and (root / name).is_file() and not (root / name).is_symlink()]
    return {name for name in files if Path(name).suffix in (".py", ".pyi") or runs_python(root / name)}


def runs_python(file: Path) -> bool:
    with file.open("rb") as opened:
        first = opened.readline()
    return first.startswith(b"#!") and b"python" in first


def files_of_ruff(root: Path) -> set[str]:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return {Path(line).relative_to(root).as_posix() for line in shown}


def files_of_mypy(root: Path) -> set[str]:
    """Files that mypy's settings name, and those with a suffix in the folders that they name."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert "exclude" not in settings
    paths = [root / name for name in settings["files"]]
    found = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py*"))]
    return {file.relative_to(root).as_posix() for file in found}


def unchecked(root: Path) -> list[str]:
    """Names each file that a tool leaves out, and the tool."""
    files, tools = python_files(root), {"ruff": files_of_ruff(root), "mypy": files_of_mypy(root)}
    return [f"{file}: not checked by {tool}" for tool, seen in tools.items() for file in sorted(files - seen)]


@pytest.mark.slow
def test_every_python_file_is_checked_by_ruff_and_mypy() -> None:
    assert unchecked(ROOT) == []


@pytest.mark.slow
def test_a_file_that_a_tool_leaves_out_is_found(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.ruff]\nextend-include = ["both"]\n[tool.mypy]\nfiles = ["src", "both"]\n'
    )
    (tmp_path / "src").mkdir()
    for name in ("src/module.py", "src/tool", "both", "outside.py"):
        (tmp_path / name).write_text("#!/usr/bin/env python3\n")
    (tmp_path / "src" / "shell").write_text("#!/bin/sh\n")
    (tmp_path / "link").symlink_to("src/tool")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert unchecked(tmp_path) == [
        "src/tool: not checked by ruff",
        "outside.py: not checked by mypy",
        "src/tool: not checked by mypy",
    ]
