"""The limits of the house: how far a reader has to follow imports, and that a name means one thing."""

import ast
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest

from guards.import_graph import cycle, import_graph, importers, longest_chain, module_name
from guards.sources import Source, package_sources, parse

MAX_CHAIN = 10
MAX_LAZY_CHAIN = 12
MAX_FILES = 109
MAX_FILES_OF_A_TASK = 50
MAX_SINGLE_IMPORTERS = 25

SMALL_LINES = 60
SMALL_WITH_ONE_IMPORTER: dict[str, str] = {}
"""Modules with fewer lines than SMALL_LINES that a single module imports, each with the reason why it stands alone."""

SHARED_NAMES = {
    "settings": "every task has settings beside those of all tasks",
    "task": "every task has a Task beside the base class",
    "evaluate": "a task evaluates windows, training evaluates runs",
    "reference_models": "a task applies them, training places them on a device",
}
"""Module names that occur more than once outside `cli/`, whose modules are named after commands."""


def task_of(path: str) -> str:
    """The task whose folder a file lies in, which is a house of its own; empty: none."""
    parts = path.split("/")
    return parts[1] if parts[0] == "tasks" and len(parts) > 2 else ""


def meet(one: str, other: str) -> bool:
    """Whether a reader meets two files side by side: those of two tasks are read apart."""
    return not (task_of(one) and task_of(other)) or task_of(one) == task_of(other)


def met(places: dict[str, list[str]]) -> dict[str, list[str]]:
    """The names whose files meet."""
    return {name: paths for name, paths in places.items() if any(meet(*pair) for pair in combinations(paths, 2))}


def undocumented(source: Source) -> list[str]:
    missing = bool(source.text.strip()) and ast.get_docstring(source.tree) is None
    return [source.path] if missing or source.path.endswith("utils.py") else []


def duplicate_classes(sources: Sequence[Source]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(source.path)
    return met(places)


def duplicate_modules(sources: Sequence[Source]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for source in sources:
        name = source.path.rpartition("/")[2].removesuffix(".py")
        if source.room != "cli" and name != "__init__" and name not in SHARED_NAMES:
            places[name].append(source.path)
    return met(places)


def small_with_one_importer(sources: Sequence[Source]) -> set[str]:
    by = importers(import_graph(sources, lazy=True))
    return {
        module_name(source)
        for source in sources
        if len(by[module_name(source)]) == 1 and 0 < len(source.text.splitlines()) < SMALL_LINES
    }


def test_every_module_says_what_it_is_and_none_is_called_utils() -> None:
    assert [found for source in package_sources() for found in undocumented(source)] == []


def test_there_are_not_too_many_files() -> None:
    by_task = Counter(task_of(source.path) for source in package_sources())
    assert by_task.pop("") <= MAX_FILES
    assert max(by_task.values()) <= MAX_FILES_OF_A_TASK


def test_a_chain_of_imports_is_short() -> None:
    sources = package_sources()
    assert len(longest_chain(import_graph(sources, lazy=False))) <= MAX_CHAIN
    assert len(longest_chain(import_graph(sources, lazy=True))) <= MAX_LAZY_CHAIN


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycle(import_graph(package_sources(), lazy=True)) == []


def test_a_class_name_means_one_class() -> None:
    assert duplicate_classes(package_sources()) == {}


def test_a_module_name_means_one_module() -> None:
    assert duplicate_modules(package_sources()) == {}


def test_small_modules_with_one_importer_are_listed_with_a_reason() -> None:
    assert small_with_one_importer(package_sources()) == set(SMALL_WITH_ONE_IMPORTER)


def test_few_modules_have_a_single_importer() -> None:
    by = importers(import_graph(package_sources(), lazy=True))
    # A task's model is imported by the task.
    left_out = {module_name(one) for one in package_sources() if not one.text.strip() or task_of(one.path)}
    assert len([module for module in by if len(by[module]) == 1 and module not in left_out]) <= MAX_SINGLE_IMPORTERS


# The guards themselves, on made-up packages


def package(**texts: str) -> list[Source]:
    return [parse(f"{name.replace('__', '/')}.py", text) for name, text in texts.items()]


def test_chains_and_cycles_are_found() -> None:
    sources = package(
        fit__a="from can_train.fit import b",
        fit__b="def f():\n    from can_train.fit.c import g",
        fit__c="import typing\nif typing.TYPE_CHECKING:\n    from can_train.fit.a import h",
    )
    assert longest_chain(import_graph(sources, lazy=False)) == ["fit.a", "fit.b"]
    assert longest_chain(import_graph(sources, lazy=True)) == ["fit.a", "fit.b", "fit.c"]
    assert cycle(import_graph(sources, lazy=True)) == []
    circle = package(fit__a="from can_train.fit.b import f", fit__b="def f():\n    from can_train.fit import a")
    assert cycle(import_graph(circle, lazy=True)) == ["fit.a", "fit.b", "fit.a"]
    assert cycle(import_graph(circle, lazy=False)) == []


def test_names_that_mean_two_things_are_found() -> None:
    sources = package(fit__a="class Plan:\n    pass", io__a="class Plan:\n    pass", cli__a="class _Plan:\n    pass")
    assert duplicate_classes(sources) == {"Plan": ["fit/a.py", "io/a.py"]}
    assert duplicate_modules(sources) == {"a": ["fit/a.py", "io/a.py"]}
    of_tasks = package(tasks__one__a="class Plan:\n    pass", tasks__two__a="class Plan:\n    pass")
    assert duplicate_classes(of_tasks) == duplicate_modules(of_tasks) == {}
    assert duplicate_classes([*of_tasks, *sources[:1]]).keys() == {"Plan"}


def test_a_small_module_with_one_importer_is_found() -> None:
    sources = package(fit__a="from can_train.fit import b", fit__b="x = 1", fit__c="x = 1")
    assert small_with_one_importer(sources) == {"fit.b"}


@pytest.mark.parametrize(("path", "text"), [("fit/plan.py", "x = 1\n"), ("fit/utils.py", '"""Module."""\n')])
def test_a_module_without_a_docstring_and_one_called_utils_are_found(path: str, text: str) -> None:
    assert undocumented(parse(path, text)) == [path]
