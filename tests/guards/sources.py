"""The package's source files, parsed, for the guards to look at."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "can_train"
TASKS = PACKAGE.parent / "can_train_tasks"


class Source(NamedTuple):
    """One file: where it lies in its package (`fit/search.py`), its text, its syntax tree and the package."""

    path: str
    text: str
    tree: ast.Module
    package: str = "can_train"

    @property
    def room(self) -> str:
        """The layer's folder, or the module's own name where it lies in the package itself."""
        return self.path.partition("/")[0].removesuffix(".py")


def parse(path: str, text: str, package: str = "can_train") -> Source:
    return Source(path, text, ast.parse(text), package)


@cache
def package_sources(folder: Path = PACKAGE) -> tuple[Source, ...]:
    """Parses the launcher's files, or those of the tasks that come with it, once in a process."""
    files = sorted(folder.rglob("*.py"))
    texts = ((file.relative_to(folder).as_posix(), file.read_text(encoding="utf-8")) for file in files)
    return tuple(parse(path, text, folder.name) for path, text in texts)


def imported_modules(source: Source) -> set[str]:
    """The modules that a file names in its imports, wherever they stand, in full: `can_train.fit.plan`."""
    modules = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "can_train":
            modules.update(f"can_train.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


def without_docstrings(tree: ast.Module) -> list[ast.AST]:
    """Every node of a file but the strings that stand as statements of their own: docstrings and field descriptions."""
    descriptions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [node for node in ast.walk(tree) if not (isinstance(node, ast.Constant) and id(node) in descriptions)]
