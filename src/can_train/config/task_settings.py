"""The tasks: the description of a task for the configuration (settings, models, modes, import paths of its code), and
the code of tasks and of their commands.

A package declares its tasks in the entry-point group `can_train.tasks` and its commands in `can_train.commands`, as
can-train's own package of tasks does. A command line may also name a task as `file.py:Class` or `package.module:Class`.
The description of an installed task is read without importing torch.
"""

import ast
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, get_type_hints

from can_train.errors import ConfigError, MissingDataError, TaskError, is_stop, unknown_name

_TASKS: Final = "can_train.tasks"  # entry-point groups
_COMMANDS: Final = "can_train.commands"
_PROJECT: Final = "can-train"  # the project that declares the tasks of this package
BASE: Final = "can_train.training.sample_task:Task"
_INSTALLED: Final = ("site-packages", "dist-packages")  # folders of packages that every job finds, too
_MAX_CLASSES: Final = 5  # of a file that an error lists
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
    declared: dict[str, dict[str, EntryPoint]] = {_TASKS: {}, _COMMANDS: {}}
    for text, folder in _declarations(path):
        # Hundreds of packages declare other things, whose entry points need not be parsed.
        if not any(group in text for group in declared):
            continue
        project_name, extras = _metadata(folder)
        group = ""
        for line in map(str.strip, text.splitlines()):
            if line.startswith("["):
                group = line.strip("[] ")
            elif group in declared and "=" in line and not line.startswith(("#", ";")):
                name, value = (part.strip() for part in line.split("=", 1))
                declared[group].setdefault(name, EntryPoint(value, project_name, extras))
    # The project table of a checkout or of a job's snapshot, which need not be installed.
    file, project = Path(__file__).resolve().parents[3] / "pyproject.toml", dict[str, Any]()
    if Path(__file__).resolve().parents[2].name == "src" and file.is_file():
        import tomllib

        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    project = project if project.get("name") == _PROJECT else {}
    extras = tuple(project.get("optional-dependencies", {}))
    for group, entries in declared.items():
        values = project.get("entry-points", {}).get(group, {})
        entries.update({name: EntryPoint(value, _PROJECT, extras) for name, value in values.items()})
    return {group: dict(sorted(entries.items())) for group, entries in declared.items()}


def _declarations(path: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yields the entry points and the folder of each installed package that has any.

    `importlib.metadata` lists them, too; its import takes as long as all others of `can-train --help` but Typer's.
    """
    for place in path:
        names: list[str] = []
        with suppress(OSError), os.scandir(place or ".") as entries:
            names = sorted(each.name for each in entries if each.name.endswith((".dist-info", ".egg-info")))
        for name in names:
            with suppress(OSError, ValueError):
                folder = Path(place, name)
                yield (folder / "entry_points.txt").read_text(encoding="utf-8"), folder


def _metadata(folder: Path) -> tuple[str, tuple[str, ...]]:
    """Reads the name of an installed package and the names of its optional dependencies."""
    name, extras = folder.name.partition("-")[0], list[str]()
    for file in ("METADATA", "PKG-INFO"):
        with suppress(OSError, ValueError):
            # The description follows an empty line.
            for line in (folder / file).read_text(encoding="utf-8").partition("\n\n")[0].splitlines():
                key, _, value = line.partition(": ")
                name = value.strip() if key == "Name" else name
                extras += [value.strip()] if key == "Provides-Extra" else []
    return name, tuple(extras)


def command_usage(entry: EntryPoint) -> tuple[str, str]:
    """Reads the arguments of a command, as `RUN`, and the first line of its docstring, from its source: help runs no
    code of commands. Both are empty where the source cannot be read.
    """
    with suppress(ImportError, OSError, ValueError):
        spec = find_spec(entry.module)
        for node in ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8")).body:
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
        # The folder of the module's top-level package, which may be the current one.
        spec = PathFinder.find_spec(top := where.partition(".")[0], [str(Path.cwd()), *sys.path])
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
        if not places:
            raise ConfigError(
                "There is no such module", value=repr(top), remedy=f"Name one that Python can import. {_HOW}"
            )
        folder = Path(places[0]).absolute().parent
        return task, "" if set(_INSTALLED) & set(folder.parts) else str(folder)
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
    import_from(code_dir)
    path = Path(code_dir, where)
    if _is_file(where) and not path.is_file():
        near = sorted(file.name for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        remedy = "Name the file of the task: my_file.py:MyTask"
        missing = ConfigError("There is no such file", value=str(path), remedy=remedy)
        raise unknown_name(f"file in {path.parent}", path.name, near) if near else missing
    try:
        module = _load_file(path) if _is_file(where) else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if is_stop(error) or isinstance(error, ConfigError):
            raise
        if _is_file(where) and isinstance(error, ImportError) and _NO_PACKAGE in str(error):
            folder, module_name = _module_of(path)
            place = "" if folder == Path.cwd() else f" in {folder}"
            raise ConfigError("The file of a task imports modules of its package, which a file alone does not have",
                              value=str(path),
                              remedy=f"Name its module{place}: --task {module_name}:{name}") from error  # fmt: skip
        raise TaskError(f"{path.name} failed when it was imported", error) from error
    classes = {key: value for key, value in vars(module).items()
               if isinstance(value, type) and issubclass(value, base) and value is not base}  # fmt: skip
    if name not in classes:
        if hasattr(module, name):
            raise ConfigError(f"{name} of {where} does not derive from can_train.Task",
                              remedy=f"Write class {name}(can_train.Task)")  # fmt: skip
        raise unknown_name(f"class of {where}", name, classes)
    return classes[name]


_NO_PACKAGE: Final = "relative import"  # In Python's error for a module that has no package


def _module_of(path: Path) -> tuple[Path, str]:
    """Returns the folder from which a file is imported as a part of its package, and its dotted name there."""
    path = path.resolve()
    folder = path.parent.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    # A package needs no `__init__.py`.
    here = Path.cwd()
    folder = here if folder.is_relative_to(here) else folder
    return folder, ".".join(path.relative_to(folder).with_suffix("").parts)


def import_from(code_dir: str) -> None:
    """Makes the folder of a run's code importable, unless it is empty. To be called when torch has been imported, and
    before code of the run runs: a file of the folder may have the name of a package.
    """
    if code_dir not in ("", *sys.path):
        # Modules beside a task's file come before packages, as they do for a script, and behind the standard library.
        before = (index for index, folder in enumerate(sys.path) if set(_INSTALLED) & set(Path(folder).parts))
        sys.path.insert(next(before, len(sys.path)), code_dir)


def locate_optimizer(optimizer: str, task: str, code_dir: str) -> tuple[str, str]:
    """Finds where the code of an optimizer of one's own is.

    Args:
        optimizer: As a person writes it.
        task: The task's name, as `locate` returns it.
        code_dir: The folder of the run's code so far.

    Returns:
        The optimizer's name, as runs have it, and the folder of the code of task and optimizer; empty for installed
        ones.

    Raises:
        ConfigError: There is no such file, or the task's file lies in another folder.
    """
    entry, (where, _, name) = task_entries().get(task), optimizer.rpartition(":")
    of_task = "" if entry is not None and entry.is_description else code_dir
    if not _is_file(where):
        return optimizer, of_task
    if code_dir and "/" not in where and Path(code_dir, where).is_file():
        return optimizer, code_dir
    path = Path(os.path.expanduser(where)).absolute()  # noqa: PTH111 - as in `locate`
    if not path.is_file():
        raise ConfigError("There is no such file", value=str(path), remedy="Name the file of the optimizer's class: "
                          "--optimizer my_file.py:MyOptimizer")  # fmt: skip
    if of_task not in ("", str(path.parent)):
        raise ConfigError("The files of a task and of its optimizer lie in one folder",
                          value=f"{path}, and the task in {of_task}", remedy=f"Move {path.name} there")  # fmt: skip
    return f"{path.name}:{name}", str(path.parent)


def load_optimizer(optimizer: str) -> Any:
    """Imports an optimizer: `package.module.Class`, `package.module:Class`, or `file.py:Class` with a file in the
    folder that `import_from` has made importable.

    Raises:
        ConfigError: There is no such module, file or class.
        TaskError: The code raised an error.
    """
    where, _, name = optimizer.rpartition(":" if ":" in optimizer else ".")
    files = [path for folder in sys.path if (path := Path(folder, where)).is_file()]
    if _is_file(where) and ("/" in where or not files):
        raise ConfigError("There is no such file beside the task", value=repr(where),
                          remedy=f"Name it in the command: --optimizer FOLDER/{Path(where).name}:{name}")  # fmt: skip
    try:
        module = _load_file(files[0]) if _is_file(where) else importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ConfigError("training.optimizer needs a package that is not installed", value=f"{error.name}",
                          remedy="Install it, or name another optimizer: --optimizer adamw") from error  # fmt: skip
    except (Exception, SystemExit) as error:
        if is_stop(error):
            raise
        raise TaskError(f"{where} failed when it was imported", error) from error
    if not hasattr(module, name):
        raise unknown_name(f"class of {where}", name, [key for key, value in vars(module).items()
                           if isinstance(value, type)])  # fmt: skip
    return getattr(module, name)


def key_name(task: str) -> str:
    """Returns the name of a task in keys: its class in snake case, or its entry point."""
    name = task.rpartition(":")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _import_path(task: str) -> str:
    """Returns `file.py:Class` or `module:Class`."""
    if ":" in task:
        return task
    if _is_file(task):
        classes = _classes_in(task)
        example = f"{task}:{classes[0] if classes else 'MyTask'}"
        raise ConfigError(f"{task} names a file without a class", remedy=f"Write {example}",
                          value=f"it has {', '.join(classes)}" if classes else "")  # fmt: skip
    entries = task_entries()
    if task not in entries:
        raise unknown_name("task", task, entries, more=f". {_HOW}")
    return entries[task].value


def _classes_in(path: str) -> list[str]:
    """Lists the classes of a file that derive from others, as its text has them: nothing of it is run."""
    try:
        tree = ast.parse(Path(path).expanduser().read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.bases][:_MAX_CLASSES]


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _load_file(path: Path) -> ModuleType:
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
    except BaseException:
        del sys.modules[name]
        raise
    return module


# The description of a task


@dataclass(frozen=True, kw_only=True)
class Prerequisite:
    """A finished run that a mode builds on."""

    # Its role in the mode: `teacher`. It names a flag, and the setting of the mode that holds the folder.
    role: str
    what: str  # the role in words: `a teacher`
    models: tuple[str, ...]  # that it may have trained
    modes: tuple[str, ...]  # that it may have trained in; the first is the one that messages propose
    sizes: tuple[str, ...] = ()  # that it may have; the first is the one that messages propose. Empty: any
    same_model: bool = False  # whether its model must have the size and settings of the model that builds on it
    required: bool = True  # whether the mode cannot run without it
    # Whether the newest run that fits is taken where none is named; else a mode without it would depend on the past.
    looked_for: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of a task."""

    settings: type  # its settings dataclass
    modes: tuple[str, ...]  # that it trains in, the default first
    sizes: tuple[str, ...] = ()  # that it comes in, the default first; empty if it has one
    needs: Mapping[str, str] = field(default_factory=dict)  # further needs beside data, in words, by mode
    only_sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by mode, where it does not train all
    prerequisites: Mapping[str, tuple[Prerequisite, ...]] = field(default_factory=dict)  # by mode


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """Settings of a task or model that has none."""


@dataclass(frozen=True, kw_only=True)
class ModeSettings:
    """Settings of a mode that has none of its own."""

    name: str = ""
    """Its name."""


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """Settings of a data set that has none of its own."""

    name: str = ""
    """Name in keys and run ids."""
    path: str = ""
    """File or folder of the data."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Everything that the configuration needs to know about a task.

    An import path is `module:name`; the object itself may stand in its place.

    Attributes:
        task_class: Import path of the task's class, a `can_train.Task`; empty where `factory` and the other functions
            stand in for it.
        settings: Settings dataclass of the task itself.
        dataset: Settings dataclass of its data sets; has the fields `name` and `path`.
        training: Its own defaults of training settings, by name.
        aliases: Training settings that mean another one with this task, by name.
        configs: Folder of presets that lies beside a task of one's own.
        derived_from: Name of the declared task whose class it derives from: its presets are the task's, too.
        key_prefix: Prefix of the keys of its runs; None: the task's name.
        example: The flags of a first training line, where there must be some.
        inputs: Fields of it that decide the inputs of a model; a run and the runs that it builds on must agree in them.
        inherited: Fields of it that other data take over from a finished run that is evaluated on them.
        follows: Fields of it that have the value of another field if they are 0: `{"stride": "window"}`.
        modes: Settings dataclass of each of its modes; has the field `name`, and one for each prerequisite's folder.
        models: Its models by name; the name of a single one may be empty.
        default_model: The model of a command line that names none; empty: it must name one, if there are several.
        factory: Import path `module:function`. Makes the task from a resolved run and the finished models that it
            builds on (by role), and prepares its data.
        sampler: Import path. Makes the task from a sample of the data, in seconds and without writing. The task also
            has `sample_note` (names the sample; empty if it is all of the data) and `estimated_train_rows`.
        evaluator: Import path. Prepares the evaluation of a finished run (`training.evaluate.Evaluation`), on its own
            data or on other data.
        predictor: Import path. Loads the model of a finished run for predictions (`training.predict.LoadedModel`), from
            the finished model and `training.predict.LoadOptions`.
        evaluation: Import path. Settings dataclass of an evaluation; its fields become options of `can-train evaluate`,
            and may be annotated as Typer's options are.
        files: Import path. Lists a data set's files, in a fixed order, from its settings and the data root, without
            torch; no files if the data are generated. Raises MissingDataError. Empty: `Task.files` lists them.
        digest: Import path. Computes the digest of a data set's content from its settings, the data root and a
            reporter: the digest of `BatchTask.data_digest`, without torch. Raises MissingDataError. Empty: a
            digest of the files.
        signals: Import path. Finds signals in the data that a run was trained on, from its data set, the data root, the
            cache and a reporter: a table, sentences below it, and the same as plain values. Empty: there are none.
        experience: From data set and mode: the first safety factor, why, and (multiplier, why) adjustments.
    """

    task_class: Any = ""
    settings: type = NoSettings
    dataset: type = DatasetSettings
    training: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    configs: str = ""
    derived_from: str = ""
    key_prefix: str | None = None
    example: str = ""
    inputs: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()
    follows: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, type] = field(default_factory=lambda: {"": ModeSettings})
    models: Mapping[str, ModelSpec] = field(default_factory=lambda: {"": ModelSpec(settings=NoSettings, modes=("",))})
    default_model: str = ""
    factory: Any = "can_train.training.sample_task:make_task"
    sampler: Any = "can_train.training.sample_task:make_sample_task"
    evaluator: Any = "can_train.training.sample_evaluation:evaluator"
    predictor: Any = "can_train.training.predict:SampleModel"
    evaluation: Any = NoSettings
    files: Any = ""
    digest: Any = ""
    signals: Any = ""
    experience: Callable[[str, str], tuple[float, str, Sequence[tuple[float, str]]]] = lambda _dataset, _mode: (
        0.60,
        "other dataset",
        (),
    )

    def table(self) -> str:
        """Writes the table of models and modes, one line each, the default mode first."""
        rows = [("--model", "--mode", "needs")]
        for name, spec in self.models.items():
            for mode in spec.modes:
                default = " (default)" if mode == spec.modes[0] else ""
                rows.append((name, mode + default, spec.needs.get(mode, "data only")))
        return "\n".join(f"  {model:<9}{mode:<25}{needs}" for model, mode, needs in rows)

    def data_files(self, dataset: Any, root: Path) -> list[Path]:
        """Lists the files of a data set; raises MissingDataError if they are not there."""
        if self.files:
            return list(load_object(self.files)(dataset, root))
        files = [Path(path) for path in load_object(self.task_class).files(dataset, root)]
        if missing := [path for path in files if not path.exists()]:
            raise MissingDataError("There is no such data set", value=f"{missing[0]} does not exist",
                                   remedy="Check --dataset, and --data-root where the data set has a name")  # fmt: skip
        return files

    @property
    def prerequisites(self) -> list[Prerequisite]:
        """The finished runs that its modes build on, each role once."""
        by_mode = [needed for spec in self.models.values() for needed in spec.prerequisites.values()]
        return list({prerequisite.role: prerequisite for needed in by_mode for prerequisite in needed}.values())


def load_task_settings(task: str, code_dir: str = "") -> TaskSettings:
    """Imports the description of a task.

    Args:
        task: An installed one, the name of an entry point, `file.py:Class` or `package.module:Class`.
        code_dir: The folder of the module, for the last two.

    Raises:
        ConfigError: There is no such task; the message lists the installed ones.
        TaskError: Its code cannot be imported.
    """
    entry = task_entries().get(task)
    if entry is not None and entry.is_description:
        settings: TaskSettings = load_object(entry.value)
        return settings
    return describe(load_class(task, code_dir))


def installed_sizes() -> set[str]:
    """Returns the sizes of all models of the installed tasks."""
    tasks = [load_task_settings(name) for name in described_tasks()]
    return {size for task in tasks for model in task.models.values() for size in model.sizes}


@lru_cache(maxsize=64)
def describe(cls: Any) -> TaskSettings:
    """Describes a task to the configuration by the attributes of its class.

    Raises:
        ConfigError: The class lacks a method, or settings are not as they must be.
    """
    base, name = load_object(BASE), cls.__name__
    needed = ["datasets", "model", *([] if cls.phases is not base.phases else ["loss"])]
    lacking = [method for method in needed if getattr(cls, method) is getattr(base, method)]
    if lacking or inspect.isabstract(cls):
        lacking = lacking or sorted(cls.__abstractmethods__)
        raise ConfigError(f"{name} lacks a method that every task has", value=", ".join(lacking),
                          remedy=f"Write {name}.{lacking[0]}; see docs/tasks.md")  # fmt: skip
    if not isinstance(cls.training, Mapping):
        raise ConfigError(f"{name}.training must be a dict of training settings", value=f"{cls.training!r:.60}",
                          remedy='Write training = {"lr": 1e-3, "lr_batch_size": 32}')  # fmt: skip
    _check_settings(f"{name}.Settings", cls.Settings)
    _check_settings(f"{name}.DatasetSettings", cls.DatasetSettings, ("name", "path"))
    _check_settings(f"{name}.EvaluationSettings", cls.EvaluationSettings)
    for model, settings in cls.models.items():
        _check_settings(f"{name}.models[{model!r}]", settings)
    for mode, settings in cls.modes.items():
        _check_settings(f"{name}.modes[{mode!r}]", settings, ("name",))
    parent, origin, derived_from = _parent(cls, base)
    modes = dict(cls.modes) or parent.modes
    models = dict(parent.models)
    # Models and modes that a class has from the declared task belong together as they do there.
    if cls.modes or cls.models is not origin.models:
        of_models = dict(cls.models) or {model: spec.settings for model, spec in models.items()}
        models = {model: ModelSpec(settings=settings, modes=tuple(modes)) for model, settings in of_models.items()}

    def has_own(method: str) -> bool:
        return inspect.getattr_static(cls, method) is not inspect.getattr_static(origin, method)

    return replace(
        parent, task_class=cls, modes=modes, models=models, default_model=next(iter(models)),
        training={**parent.training, **cls.training}, derived_from=derived_from,
        settings=parent.settings if cls.Settings is base.Settings else cls.Settings,
        dataset=parent.dataset if cls.DatasetSettings is base.DatasetSettings else cls.DatasetSettings,
        evaluation=parent.evaluation if cls.EvaluationSettings is base.EvaluationSettings else cls.EvaluationSettings,
        # Its own methods, where it has written any, in place of functions that read without torch.
        files="" if has_own("files") else parent.files,
        digest="" if has_own("data_digest") else parent.digest,
        configs=_configs_beside(cls),
    )  # fmt: skip


def _configs_beside(cls: type) -> str:
    """Returns the folder of presets beside a class; empty where the class has no file, as in a notebook."""
    with suppress(TypeError, OSError):
        return str(Path(inspect.getfile(cls)).parent / "configs")
    return ""


def _parent(cls: Any, base: Any) -> tuple[TaskSettings, Any, str]:
    """Finds the declared task whose class `cls` derives from: its description, its class and its name. Without one they
    are the defaults, and the base class of all tasks.
    """
    classes = {f"{each.__module__}:{each.__qualname__}": each for each in cls.__mro__[1:]}
    packages = {path.partition(".")[0] for path in classes}
    for name, entry in task_entries().items():
        # Other packages' descriptions are not read: they may be broken.
        if entry.is_description and entry.module.partition(".")[0] in packages:
            settings: TaskSettings = load_object(entry.value)
            if settings.task_class in classes:
                return settings, classes[settings.task_class], name
    return TaskSettings(), base, ""


def _check_settings(where: str, cls: Any, needed: tuple[str, ...] = ()) -> None:
    frozen = '@dataclass(frozen=True, kw_only=True), and a default for each field, as in "hidden: int = 32"'
    if not (isinstance(cls, type) and is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ConfigError(f"{where} must be a frozen dataclass", remedy=f"Write {frozen}")
    for each in fields(cls):
        if each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(f"Every field of {where} must have a default", value=each.name, remedy=f"Write {frozen}")
    lacking = [name for name in needed if name not in [each.name for each in fields(cls)]]
    if lacking:
        raise ConfigError(f"{where} must have the fields {' and '.join(needed)}", value=f"{', '.join(lacking)} lacks",
                          remedy=f'Add {lacking[0]}: str = ""')  # fmt: skip
    try:
        get_type_hints(cls)
    except NameError as error:
        raise ConfigError(f"The types of {where} must be known where the class is", value=str(error),
                          remedy="Import them at the top of the file") from error  # fmt: skip
