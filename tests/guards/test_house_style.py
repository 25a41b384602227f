"""The limits of the house: short functions, few arguments, files of one reason, modules that say what they decide."""

import ast

import pytest

from guards.sources import Source, package_sources, parse

MAX_FUNCTION_LINES = 40
MAX_FILE_LINES = 700


def faults(source: Source) -> list[str]:
    found = []
    if source.text.strip() and ast.get_docstring(source.tree) is None:
        found.append("has no docstring")
    if len(source.text.splitlines()) > MAX_FILE_LINES:
        found.append(f"has more than {MAX_FILE_LINES} lines")
    functions = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found += [f"{node.name} has {length(node)} lines" for node in functions if length(node) > MAX_FUNCTION_LINES]
    if source.path.endswith("utils.py"):
        found.append("is called utils")
    return [f"{source.path}: {what}" for what in found]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, its docstring left out."""
    first = function.body[0]
    described = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if described else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def test_the_package_keeps_to_the_limits() -> None:
    assert [found for source in package_sources() for found in faults(source)] == []


def test_a_docstring_is_not_counted() -> None:
    body = "\n".join(["    pass"] * (MAX_FUNCTION_LINES - 1))
    text = f'"""Module."""\ndef f():\n    """{"Long." + chr(10) * 30}"""\n{body}\n'
    assert faults(parse("fit/plan.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        '"""Module."""\n' + "x = 1\n" * MAX_FILE_LINES,
        '"""Module."""\ndef f():\n' + "    pass\n" * MAX_FUNCTION_LINES,
    ],
)
def test_what_breaks_a_limit_is_found(text: str) -> None:
    assert len(faults(parse("fit/plan.py", text))) == 1
