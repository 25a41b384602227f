"""Finds the code of tasks and of their commands.

A package declares its tasks in the entry-point group `can_train.tasks` and its commands in `can_train.commands`, as
can-train's own package of tasks does. A command line may also name a task as `file.py:Class` or `package.module:Class`.
"""

import ast
import hashlib
import importlib
import os
import re
import sys
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from can_train.errors import ConfigError, TaskError, unknown_name

_TASKS: Final = "can_train.tasks"  # entry-point groups
_COMMANDS: Final = "can_train.commands"
_PROJECT: Final = "can-train"  # the project that declares the tasks of this package
BASE: Final = "can_train.training.sample_task:Task"
_INSTALLED: Final = ("site-packages", "dist-packages")  # folders of packages that every job finds, too
_HOW: Final = "A task is installed, or it is file.py:Class, or package.module:Class"


class EntryPoint(NamedTuple):
    """A task or a command that an installed package declares.

    Attributes:
        value: Import path `module:name`. A command's is a function. A task's is a class, or a `TaskSettings` in upper
            case, whose module does not import torch.
        project: The project that declares it.
        extras: The project's optional dependencies, by name.
    """

    value: str
    project: str
    extras: tuple[str, ...]

    @property
    def module(self) -> str:
        """Its module."""
        return self.value.partition(":")[0]

    @property
    def is_description(self) -> bool:
        """Whether it names a description, which is read in milliseconds."""
        return self.value.rpartition(":")[2].isupper()


def task_entries() -> dict[str, EntryPoint]:
    """Lists the declared tasks by name. Where two projects declare a name, can-train's own is meant."""
    return _entry_points(tuple(sys.path))[_TASKS]


def command_entries() -> dict[str, EntryPoint]:
    """Lists the declared commands by name, as `task_entries` lists tasks."""
    return _entry_points(tuple(sys.path))[_COMMANDS]


@lru_cache(maxsize=8)
def _entry_points(path: tuple[str, ...]) -> dict[str, dict[str, EntryPoint]]:
    """Reads the entry points of both groups in one pass over the installed packages, which takes milliseconds."""
    # Importing this module takes as long as all other imports of this file.
    from importlib.metadata import distributions

    declared: dict[str, dict[str, EntryPoint]] = {_TASKS: {}, _COMMANDS: {}}
    for package in distributions(path=list(path)):
        for entry in package.entry_points:
            if entry.group in declared:
                extras = tuple(package.metadata.get_all("Provides-Extra") or ())
                point = EntryPoint(entry.value, package.metadata["Name"], extras)
                declared[entry.group].setdefault(entry.name, point)
    project = _checkout_project()
    extras = tuple(project.get("optional-dependencies", {}))
    for group, entries in declared.items():
        values = project.get("entry-points", {}).get(group, {})
        entries.update({name: EntryPoint(value, _PROJECT, extras) for name, value in values.items()})
    return {group: dict(sorted(entries.items())) for group, entries in declared.items()}


def _checkout_project() -> dict[str, Any]:
    """Reads the project table of a checkout or of a job's snapshot, which need not be installed; else empty."""
    file = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if Path(__file__).resolve().parents[2].name != "src" or not file.is_file():
        return {}
    import tomllib

    project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == _PROJECT else {}


def command_usage(entry: EntryPoint) -> tuple[str, str]:
    """Reads the arguments of a command, as `RUN`, and the first line of its docstring, from its source: help runs no
    code of commands. Both are empty where the source cannot be read.
    """
    try:
        spec = find_spec(entry.module)
        tree = ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError):
        return "", ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.value.partition(":")[2]:
            first_line = (ast.get_docstring(node) or "").partition("\n")[0]
            return " ".join(argument.arg.upper() for argument in node.args.args), first_line
    return "", ""


def task_names() -> list[str]:
    """Lists the declared tasks by name."""
    return list(task_entries())


def described_tasks() -> list[str]:
    """Lists the declared tasks whose description is read without their class."""
    return [name for name, entry in task_entries().items() if entry.is_description]


def package_folders() -> list[Path]:
    """Lists the folders of can-train's code: the launcher, and the packages of its tasks."""
    package = Path(__file__).resolve().parents[1]
    names = {entry.module.partition(".")[0] for entry in task_entries().values() if entry.project == _PROJECT}
    return [package, *(package.parent / name for name in sorted(names))]


def load_object(path: Any) -> Any:
    """Imports the object that an import path `module:name` names; anything else is the object itself."""
    if not isinstance(path, str):
        return path
    module, name = path.split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(module, error)) is None:
            raise
        raise missing from error


def missing_extra(module: str, error: ModuleNotFoundError) -> ConfigError | None:
    """Makes the error for a package that a declared task needs; None: `module` is not a declared task's."""
    tasks = {name: entry for name, entry in task_entries().items()
             if f"{module}.".startswith(f"{entry.module.rpartition('.')[0] or entry.module}.")}  # fmt: skip
    missing = str(error.name).partition(".")[0]
    if not tasks or missing in ("can_train", module.partition(".")[0]):
        return None
    (name, entry), *_ = tasks.items()
    package = f"'{entry.project}[{name}]'" if name in entry.extras else missing
    return ConfigError(f"Task {name} needs a package that is not installed", value=missing,
                       remedy=f"Install it: pip install {package}")  # fmt: skip


def locate(task: str) -> tuple[str, str]:
    """Finds where the code of a task of one's own is.

    Args:
        task: As a person writes it.

    Returns:
        The task's name, as runs have it, and the folder of its module; empty for an installed package.

    Raises:
        ConfigError: There is no such task.
    """
    entry = task_entries().get(task)
    if entry is not None and entry.project == _PROJECT:
        return task, ""
    where, _, name = _import_path(task).rpartition(":")
    if not _is_file(where):
        return task, _folder_of(where)
    path = Path(os.path.expanduser(where)).absolute()  # noqa: PTH111 - raises nothing where there is no such home
    return f"{path.name}:{name}", str(path.parent)


def load_class(task: str, code_dir: str) -> type:
    """Imports the class of a task.

    Args:
        task: Its name, as `locate` returns it.
        code_dir: The folder that belongs to it.

    Raises:
        ConfigError: There is no such file, module or class, or it is not a task.
        TaskError: The code raised an error.
    """
    where, _, name = _import_path(task).rpartition(":")
    # With it comes torch: a torch.py beside a task's file is not imported in its place.
    base = load_object(BASE)
    if code_dir and code_dir not in sys.path:
        # Modules beside a task's file come before packages, as they do for a script, and behind the standard library.
        before = (index for index, folder in enumerate(sys.path) if set(_INSTALLED) & set(Path(folder).parts))
        sys.path.insert(next(before, len(sys.path)), code_dir)
    module = _load_file(Path(code_dir, where)) if _is_file(where) else _load_module(where)
    classes = {key: value for key, value in vars(module).items()
               if isinstance(value, type) and issubclass(value, base) and value is not base}  # fmt: skip
    if name not in classes:
        if hasattr(module, name):
            raise ConfigError(f"{name} of {where} does not derive from can_train.Task",
                              remedy=f"Write class {name}(can_train.Task)")  # fmt: skip
        raise unknown_name(f"class of {where}", name, classes)
    return classes[name]


def key_name(task: str) -> str:
    """Returns the name of a task in keys: its class in snake case, or its entry point."""
    name = task.rpartition(":")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _import_path(task: str) -> str:
    """Returns `file.py:Class` or `module:Class`."""
    if ":" in task:
        return task
    if _is_file(task):
        raise ConfigError(f"{task} names a file without a class", remedy=f"Write {task}:MyTask")
    entries = task_entries()
    if task not in entries:
        raise unknown_name("task", task, entries, more=f". {_HOW}")
    return entries[task].value


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _folder_of(module: str) -> str:
    """Returns the folder of a module's top-level package, which may be the current one."""
    spec = PathFinder.find_spec(top := module.partition(".")[0], [str(Path.cwd()), *sys.path])
    places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
    if not places:
        raise ConfigError("There is no such module", value=repr(top), remedy=f"Name one that Python can import. {_HOW}")
    folder = Path(places[0]).absolute().parent
    return "" if set(_INSTALLED) & set(folder.parts) else str(folder)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = sorted(file.name for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        if near:
            raise unknown_name(f"file in {path.parent}", path.name, near)
        raise ConfigError(
            "There is no such file", value=str(path), remedy="Name the file of the task: my_file.py:MyTask"
        )
    # The file's own name: objects of its classes are unpickled by it. A second file of that name gets another one.
    taken = getattr(sys.modules.get(path.stem), "__file__", None) if path.stem in sys.modules else str(path)
    name = path.stem if taken == str(path) else f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TaskError(f"{path.name} failed when it was imported", error) from error
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name} failed when it was imported", error) from error
