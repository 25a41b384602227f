"""Names and lines of files reach the terminal through one module, which prints their control characters as text."""

import ast
import re

import pytest

from guards.sources import Source, package_sources, parse

HOMES = {
    "reporter.py": "writes notices and progress to standard error",
    "cli/output.py": "writes results, tables, JSON and logs",
}
"""The modules that print, each with what it prints."""

DIRECT = re.compile(
    r"print|input|pprint|typer\.(echo|secho|confirm|prompt|style)|click\.\w+|rich\.print|"
    r"sys\.(__)?std(out|err)(__)?(\.buffer)?\.write(lines)?|[\w.]*console\.(print|log|out|print_json)|make_console|Console"
)


def direct_prints(source: Source) -> list[str]:
    """The places of a file that print past the home of printing."""
    if source.path in HOMES:
        return []
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    direct = [call for call in calls if DIRECT.fullmatch(ast.unparse(call.func))]
    return [f"{source.path}:{call.lineno}: {ast.unparse(call.func)}" for call in direct]


def test_nothing_prints_past_the_module_that_escapes_control_characters() -> None:
    assert [place for source in package_sources() for place in direct_prints(source)] == []


LINES = ["print(name)", "sys.stdout.write(name)", "typer.echo(name, err=True)", "typer.confirm(name)",
         "console.print(name)", "self._console.print(name)"]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_prints_by_itself_is_noticed(line: str) -> None:
    assert direct_prints(parse("cli/show.py", line)) == [f"cli/show.py:1: {line.partition('(')[0]}"]
    assert direct_prints(parse("cli/output.py", line)) == []
