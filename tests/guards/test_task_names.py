"""The launcher knows no task by name: what is special about a task stands in its folder or in configs/."""

import ast

import pytest

from guards.sources import TASKS as TASK_PACKAGE
from guards.sources import Source, imported_modules, package_sources, parse, without_docstrings

TASKS = {file.parent.name for file in TASK_PACKAGE.glob("*/settings.py")}


def task_names(source: Source, tasks: set[str]) -> list[str]:
    """Imports, identifiers and strings of a file that are a task's name, alone or within a dotted path or a file's."""
    found = [f"imports {module}" for module in sorted(imported_modules(source)) if _mentions_module(module, tasks)]
    for node in without_docstrings(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in tasks or _mentions_module(node.value.replace("/", "."), tasks):
                found.append(f"line {node.lineno}: {node.value!r}")
        elif _identifier(node) in tasks:
            found.append(f"{_identifier(node)} is a name")
    return [f"{source.path}: {what}" for what in found]


def _mentions_module(text: str, tasks: set[str]) -> bool:
    return TASK_PACKAGE.name in text or any(f".tasks.{task}." in f".{text}." for task in tasks)


def _identifier(node: ast.AST) -> str | None:
    for field in ("id", "attr", "arg", "name"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            return value
    return None


def test_there_are_tasks_to_look_for() -> None:
    assert "can" in TASKS


def test_no_task_is_named_outside_its_folder() -> None:
    assert [found for source in package_sources() for found in task_names(source, TASKS)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from can_train_tasks.can.settings import CanSettings",
        "from can_train_tasks import can",
        "SETTINGS = 'can_train_tasks.can.settings:TASK'",
        "open('src/can_train_tasks/settings.py')",
        "import_module(f'can_train_tasks.{name}')",
        "task = 'muon'",
        "SETTINGS = 'can_train_tasks.can.settings.CanSettings'",
        "open('tasks/muon/settings.py')",
        "def plan(muon: int) -> None: ...",
        "if config.muon: ...",
    ],
)
def test_a_task_by_name_is_found(line: str) -> None:
    assert task_names(parse("training/loop.py", line), {"can", "muon"})


@pytest.mark.parametrize(
    "line",
    [
        '"""What the can task needs."""',
        "parser = 'can_train.cli.main'",
        "text = 'a batch can be split'",
        "from can_train.tasks.contract import Task",
        "threshold = aliases['accumulation_muon_threshold']",
    ],
)
def test_words_that_only_look_like_a_task_are_let_pass(line: str) -> None:
    assert task_names(parse("training/loop.py", line), {"can", "muon"}) == []
