"""What a task tells the configuration about itself, without importing torch: its settings classes, and which of its
models train in which modes. The description is found by the task's name.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from can_train.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class Prerequisite:
    """A finished run that a mode builds on. Its folder stands in the mode's settings, in the field of its role; the
    flag is the role's name, too.

    Attributes:
        role: What it is to the mode: `teacher`.
        what: The same in words.
        models: Models that it may have trained.
        modes: Modes that it may have trained in, the one that a command to make it names first.
        sizes: Sizes that it may have, likewise; empty: any, and the model's default first.
        same_model: Whether size and settings of its model must be those of the run that builds on it.
        required: Whether the mode cannot do without it.
    """

    role: str
    what: str
    models: tuple[str, ...]
    modes: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    same_model: bool = False
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of a task.

    Attributes:
        settings: Its settings dataclass.
        modes: The modes it trains in, the default first.
        sizes: The sizes it comes in, the default first; empty where it has one.
        needs: What a mode needs beside data, in words, for the modes that need something.
        only_sizes: The sizes that a mode trains, for the modes that do not train all.
        prerequisites: The finished runs that a mode builds on, for the modes that do.
    """

    settings: type
    modes: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    only_sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prerequisites: Mapping[str, tuple[Prerequisite, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Everything the configuration needs to know of a task.

    Attributes:
        dataset: Settings dataclass of its data sets; has the fields `name` and `path`.
        inputs: Fields of it that decide what a model sees: a finished run that another one builds on agrees in them.
        modes: Settings dataclass of each of its modes; has the field `name`, and one for each prerequisite's folder.
        models: Its models by name.
        carried: Fields of it that other data which a finished run judges take over from the run's own.
        factory: Import path `module:function` of what makes the task from a resolved run and the finished models that
            it builds on (by role), its data prepared.
        sampler: Likewise, from what can be known of the data in seconds and without writing. Its task also has
            `sample_note` (what was sampled, empty where nothing had to be) and `estimated_train_rows` (training samples
            of the whole data set).
        evaluator: Import path of what prepares data for a finished run to judge, from what it has trained, what reads
            the finished model of a role that it builds on, and the data that it is asked about.
        files: Import path of what lists a data set's files, in an order of their own, from its settings and the data
            root: cheaply, without torch; none where the data are made. It raises MissingDataError where they are not.
        experience: From data set and mode: the first safety factor, why, and (multiplier, why) adjustments.
    """

    dataset: type
    inputs: tuple[str, ...]
    modes: Mapping[str, type]
    models: Mapping[str, ModelSpec]
    carried: tuple[str, ...]
    factory: str
    sampler: str
    evaluator: str
    files: str
    experience: Callable[[str, str], tuple[float, str, Sequence[tuple[float, str]]]]

    def table(self) -> str:
        """Writes the model–mode table, one line a model and mode, the default mode first."""
        rows = [("--model", "--mode", "needs")]
        for name, spec in self.models.items():
            for mode in spec.modes:
                default = " (default)" if mode == spec.modes[0] else ""
                rows.append((name, mode + default, spec.needs.get(mode, "data only")))
        return "\n".join(f"  {model:<9}{mode:<25}{needs}" for model, mode, needs in rows)

    @property
    def prerequisites(self) -> list[Prerequisite]:
        """The finished runs that any of its modes builds on, those of one role once."""
        found = [one for spec in self.models.values() for needed in spec.prerequisites.values() for one in needed]
        return list({one.role: one for one in found}.values())

    def modes_with(self, role: str) -> list[tuple[str, str]]:
        """Lists the models and modes that build on a finished run of a role."""
        return [
            (model, mode)
            for model, spec in self.models.items()
            for mode, needed in spec.prerequisites.items()
            if any(one.role == role for one in needed)
        ]


def task_names() -> list[str]:
    """Lists the tasks that are installed: the folders beside the package's other tasks that have a settings module."""
    root = Path(__file__).resolve().parents[1] / "tasks"
    return sorted(path.parent.name for path in root.glob("*/settings.py"))


def load_task_settings(task: str) -> TaskSettings:
    """Imports the description of a task.

    Raises:
        ConfigError: No such task; the message lists them.
    """
    if task not in task_names():
        raise unknown_name("task", task, task_names())
    settings: TaskSettings = importlib.import_module(f"can_train.tasks.{task}.settings").TASK
    return settings


def installed_sizes() -> set[str]:
    """Returns the sizes of all models of the installed tasks."""
    tasks = [load_task_settings(name) for name in task_names()]
    return {size for task in tasks for model in task.models.values() for size in model.sizes}


def load_object(path: str) -> Any:
    """Imports `module:name`; the home of what is named by a string so that its import waits until it is needed."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
