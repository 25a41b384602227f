"""The limits of the house: how far a reader has to follow imports, and that a name means one thing."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from guards.import_graph import cycle, import_graph, importers, longest_chain, module_name
from guards.sources import PACKAGE, TASKS, Source, package_sources, parse

MAX_CHAIN = 9
MAX_LAZY_CHAIN = 12
MAX_FILES = 164
MAX_FILES_OF_A_TASK = 56
MAX_SINGLE_IMPORTERS = 27

SMALL_LINES = 60
SMALL_WITH_ONE_IMPORTER: dict[str, str] = {}
"""Modules with fewer lines than SMALL_LINES that a single module imports, each with the reason why it stands alone."""


def houses() -> dict[str, Sequence[Source]]:
    """The launcher's files, and each task's, which are read apart."""
    tasks = defaultdict(list)
    for source in package_sources(TASKS):
        tasks[source.room].append(source)
    return {"": package_sources(), **tasks}


def repeated(places: dict[str, list[str]]) -> dict[str, list[str]]:
    """The names that stand in several files."""
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def undocumented(source: Source) -> list[str]:
    missing = bool(source.text.strip()) and ast.get_docstring(source.tree) is None
    return [source.path] if missing or source.path.endswith("utils.py") else []


def duplicate_classes(sources: Sequence[Source]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(source.path)
    return repeated(places)


def duplicate_modules(sources: Sequence[Source]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for source in sources:
        name = source.path.rpartition("/")[2].removesuffix(".py")
        if source.room != "cli" and name != "__init__":
            places[name].append(source.path)
    return repeated(places)


def small_with_one_importer(sources: Sequence[Source]) -> set[str]:
    by = importers(import_graph(sources, lazy=True))
    return {
        module_name(source)
        for source in sources
        if len(by[module_name(source)]) == 1 and 0 < len(source.text.splitlines()) < SMALL_LINES
    }


def functions_in_functions(tree: ast.AST, is_inside: bool = False) -> Iterator[ast.FunctionDef]:
    """The functions that a function defines, wherever they stand in it, without the methods of its classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            if is_inside:
                yield node
            yield from functions_in_functions(node, is_inside=True)
        else:
            yield from functions_in_functions(node, is_inside and not isinstance(node, ast.ClassDef))


def closures_that_hold_themselves(source: Source) -> list[str]:
    """Functions in functions that call themselves: a reference cycle, whose tensors stay in memory until the garbage
    collector runs.
    """
    return [
        f"{source.path}: {function.name}"
        for function in functions_in_functions(source.tree)
        if any(isinstance(node, ast.Name) and node.id == function.name for node in ast.walk(function))
    ]


def test_every_module_says_what_it_is_and_none_is_called_utils() -> None:
    sources = [*package_sources(), *package_sources(TASKS)]
    assert [path for source in sources for path in undocumented(source)] == []


def test_there_are_not_too_many_files() -> None:
    files = {name: len([one for one in sources if one.text.strip()]) for name, sources in houses().items()}
    assert files.pop("") <= MAX_FILES
    assert max(files.values()) <= MAX_FILES_OF_A_TASK


@pytest.mark.parametrize("folder", [PACKAGE, TASKS], ids=lambda folder: folder.name)
def test_a_chain_of_imports_is_short(folder: Path) -> None:
    sources = package_sources(folder)
    assert len(longest_chain(import_graph(sources, lazy=False))) <= MAX_CHAIN
    assert len(longest_chain(import_graph(sources, lazy=True))) <= MAX_LAZY_CHAIN


@pytest.mark.parametrize("folder", [PACKAGE, TASKS], ids=lambda folder: folder.name)
def test_no_modules_import_each_other_in_a_circle(folder: Path) -> None:
    assert cycle(import_graph(package_sources(folder), lazy=True)) == []


def test_a_class_name_means_one_class() -> None:
    assert {name: places for name, sources in houses().items() if (places := duplicate_classes(sources))} == {}


def test_a_module_name_means_one_module() -> None:
    assert {name: places for name, sources in houses().items() if (places := duplicate_modules(sources))} == {}


def test_small_modules_with_one_importer_are_listed_with_a_reason() -> None:
    sources = [*package_sources(), *package_sources(TASKS)]
    assert small_with_one_importer(sources) == set(SMALL_WITH_ONE_IMPORTER)


def test_few_modules_have_a_single_importer() -> None:
    by = importers(import_graph(package_sources(), lazy=True))
    left_out = {module_name(one) for one in package_sources() if not one.text.strip()}
    assert len([module for module in by if len(by[module]) == 1 and module not in left_out]) <= MAX_SINGLE_IMPORTERS


def test_no_closure_holds_itself() -> None:
    sources = [*package_sources(), *package_sources(TASKS)]
    assert [name for source in sources for name in closures_that_hold_themselves(source)] == []


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


def test_a_small_module_with_one_importer_is_found() -> None:
    sources = package(fit__a="from can_train.fit import b", fit__b="x = 1", fit__c="x = 1")
    assert small_with_one_importer(sources) == {"fit.b"}


@pytest.mark.parametrize(("path", "text"), [("fit/plan.py", "x = 1\n"), ("fit/utils.py", '"""Module."""\n')])
def test_a_module_without_a_docstring_and_one_called_utils_are_found(path: str, text: str) -> None:
    assert undocumented(parse(path, text)) == [path]


def test_a_closure_that_holds_itself_is_found() -> None:
    text = (
        "def f(x):\n    def visit(y):\n        return visit(y - 1)\n    def once():\n        return x\n    return visit"
    )
    method = "def f():\n    class A:\n        def visit(self):\n            return visit()\n    return A"
    assert closures_that_hold_themselves(parse("fit/a.py", text)) == ["fit/a.py: visit"]
    assert closures_that_hold_themselves(parse("fit/a.py", method)) == []
