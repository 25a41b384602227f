"""The tables that name commands and aliases agree with each other: a place that was forgotten does not fail by itself.

A command without its entry in `_MODULES` has no file, and without its entry in `_OF_ONE_PROCESS` it runs once in each
process of a launcher.
"""

import re
from pathlib import Path
from typing import Final

import pytest

from can_train.cli.main import _ARGUMENTS, _COMMANDS, _OF_ONE_PROCESS, _parser
from can_train.config.settings import ALIASES

REFERENCE: Final = (Path(__file__).resolve().parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")

RUNS_IN_EACH_PROCESS: Final = {
    "doctor", "factors", "runs", "show", "compare", "report", "status", "logs", "cancel", "resume", "resubmit",
    "completion", "tag", "note", "delete", "top", "sync", "archive",
}  # fmt: skip
"""Commands that print, that change nothing twice, or whose processes form one run."""


def section(title: str, page: str = REFERENCE) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def arguments(name: str) -> list[str]:
    return [one.metavar for one in _parser(name).params if one.param_type_name == "argument"]


def disagreements() -> list[str]:
    """Names each command that a table lacks, or that a table has alone."""
    documented = re.findall(r"`([a-z]+)[^`]*`", "".join(re.findall(r"(?m)^\| (.*) \|.*\|$", section("Commands"))))
    classified = (*_OF_ONE_PROCESS, *RUNS_IN_EACH_PROCESS)
    problems = []
    for name in _COMMANDS:
        try:
            if bool(arguments(name)) != (name in _ARGUMENTS):
                problems.append(f"{name}: _ARGUMENTS")
        except ImportError as error:
            problems.append(f"{name}: {error}")
        if name not in classified:
            problems.append(f"{name}: neither _OF_ONE_PROCESS nor RUNS_IN_EACH_PROCESS")
        if name not in documented:
            problems.append(f"{name}: docs/reference.md")
    return problems + [f"{name}: unknown command" for name in (*_ARGUMENTS, *classified) if name not in _COMMANDS]


def test_the_tables_of_commands_agree() -> None:
    assert disagreements() == []


def test_a_command_that_is_in_one_table_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_COMMANDS, "greet", "say hello")
    assert disagreements() == [
        "greet: No module named 'can_train.cli.greet'",
        "greet: neither _OF_ONE_PROCESS nor RUNS_IN_EACH_PROCESS",
        "greet: docs/reference.md",
    ]


def test_an_argument_that_help_does_not_show_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_ARGUMENTS, "show")
    monkeypatch.setitem(_ARGUMENTS, "shwo", "RUN")
    assert disagreements() == ["show: _ARGUMENTS", "shwo: unknown command"]


def documented_aliases(page: str) -> dict[str, str]:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (.*) \|$", section("Settings", page))
    return {alias: name for name, aliases in rows for alias in re.findall(r"`(\w+)`", aliases)}


def test_the_reference_lists_every_alias() -> None:
    assert documented_aliases(REFERENCE) == ALIASES


def test_an_alias_that_the_reference_lacks_is_noticed() -> None:
    assert documented_aliases(REFERENCE.replace("`max_epochs`", "")).keys() == ALIASES.keys() - {"max_epochs"}
