"""The description of a task for the configuration: its settings, models and modes, and the import paths of its code.
The description of an installed task is read without importing torch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from can_train.config.task_loading import BASE, described_tasks, load_class, load_object, task_entries
from can_train.errors import ConfigError, MissingDataError


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


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of a task."""

    settings: type  # its settings dataclass
    modes: tuple[str, ...]  # that it trains in, the default first
    sizes: tuple[str, ...] = ()  # that it comes in, the default first; empty if it has one
    needs: Mapping[str, str] = field(default_factory=dict)  # further needs beside data, in words, by mode
    only_sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by mode, where it does not train all
    prerequisites: Mapping[str, tuple[Prerequisite, ...]] = field(default_factory=dict)  # by mode


def _no_experience(dataset: str, mode: str) -> tuple[float, str, Sequence[tuple[float, str]]]:
    return 0.60, "other dataset", ()


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
        evaluation: Import path. Settings dataclass of an evaluation; its fields become options of `can-train evaluate`,
            and may be annotated as Typer's options are.
        tables: Import path. Writes a run's judgement as tables of text, all of it.
        summary_tables: Import path. Writes the tables that are printed by default.
        files: Import path. Lists a data set's files, in a fixed order, from its settings and the data root, without
            torch; no files if the data are generated. Raises MissingDataError. Empty: `Task.files` lists them.
        digest: Import path. Computes the digest of a data set's content from its settings, the data root and a
            reporter: the digest of `BatchTask.data_digest`, without torch. Raises MissingDataError. Empty: a
            digest of the files.
        experience: From data set and mode: the first safety factor, why, and (multiplier, why) adjustments.
    """

    task_class: Any = ""
    settings: type = NoSettings
    dataset: type = DatasetSettings
    training: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    configs: str = ""
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
    evaluation: Any = NoSettings
    tables: Any = "can_train.training.sample_judging:tables"
    summary_tables: Any = "can_train.training.sample_judging:tables"
    files: Any = ""
    digest: Any = ""
    experience: Callable[[str, str], tuple[float, str, Sequence[tuple[float, str]]]] = _no_experience

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
    _check_settings(f"{name}.Settings", cls.Settings)
    _check_settings(f"{name}.DatasetSettings", cls.DatasetSettings, ("name", "path"))
    _check_settings(f"{name}.EvaluationSettings", cls.EvaluationSettings)
    for model, settings in cls.models.items():
        _check_settings(f"{name}.models[{model!r}]", settings)
    for mode, settings in cls.modes.items():
        _check_settings(f"{name}.modes[{mode!r}]", settings, ("name",))
    modes = dict(cls.modes) or TaskSettings().modes
    models = dict(cls.models) or {"": TaskSettings().models[""].settings}
    return TaskSettings(
        task_class=cls, settings=cls.Settings, dataset=cls.DatasetSettings, modes=modes, training=cls.training,
        models={model: ModelSpec(settings=settings, modes=tuple(modes)) for model, settings in models.items()},
        default_model=next(iter(models)), evaluation=cls.EvaluationSettings,
        configs=str(Path(inspect.getfile(cls)).parent / "configs"),
    )  # fmt: skip


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
        raise ConfigError(f"The types of {where} must be known where the class is", value=str(error)) from error
