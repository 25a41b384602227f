"""Which module of the package imports which, read from the source files."""

import ast
from collections.abc import Iterator, Mapping, Sequence

from guards.sources import Source

Graph = Mapping[str, frozenset[str]]
"""For each module, named without the package (`fit.plan`), the modules that it imports."""


def import_graph(sources: Sequence[Source], *, lazy: bool) -> Graph:
    """Reads the graph; with `lazy`, imports inside functions count too. Imports for type checkers alone never do."""
    names = {module_name(source) for source in sources}
    return {module_name(source): frozenset(_imports(source, names, lazy=lazy)) for source in sources}


def module_name(source: Source) -> str:
    return source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(source: Source, names: set[str], *, lazy: bool) -> Iterator[str]:
    for node in _statements(source.tree, lazy=lazy):
        targets = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            targets = [f"{node.module}.{name}" for name in targets] + [str(node.module)]
        inside = {target.removeprefix(f"{source.package}.") for target in targets} & names
        # `from can_train.fit import plan` names the module; `from can_train.fit.plan import Plan` its parent path.
        yield from inside - {module_name(source)}


def _statements(tree: ast.AST, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield from _statements(node, lazy=lazy)


def cycle(graph: Graph) -> list[str]:
    """Finds modules that import each other in a circle; empty where there are none."""
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for other in sorted(graph.get(module, ())):
            if found := visit(other, [*path, module]):
                return found
        finished.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def longest_chain(graph: Graph) -> list[str]:
    """Finds the longest chain of imports of a graph without cycles."""
    longest: dict[str, list[str]] = {}

    def chain(module: str) -> list[str]:
        if module not in longest:
            longest[module] = [module, *max((chain(other) for other in sorted(graph[module])), key=len, default=[])]
        return longest[module]

    return max((chain(module) for module in sorted(graph)), key=len, default=[])


def importers(graph: Graph) -> dict[str, list[str]]:
    """Lists, for each module, the modules that import it."""
    return {module: sorted(other for other in graph if module in graph[other]) for module in graph}
