"""What a task tells the configuration about itself, without importing torch: its settings classes and its models."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from can_train.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class Prerequisite:
    """A finished run that a mode builds on.

    Attributes:
        role: What it is to the mode: `teacher`. It names a flag, and the setting of the mode that holds the folder.
        what: The role in words: `a teacher`.
        models: Models that it may have trained.
        modes: Modes that it may have trained in; the first is the one that messages propose.
        sizes: Sizes that it may have; the first is the one that messages propose. Empty: any.
        same_model: Whether its model must have the size and settings of the model that builds on it.
        required: Whether the mode cannot run without it.
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
        sizes: The sizes it comes in, the default first; empty if it has one.
        needs: What a mode needs beside data, in words, by mode.
        only_sizes: The sizes that a mode trains, for modes that do not train all.
        prerequisites: The finished runs that a mode builds on, by mode.
    """

    settings: type
    modes: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    only_sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prerequisites: Mapping[str, tuple[Prerequisite, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Everything that the configuration needs to know about a task.

    Attributes:
        dataset: Settings dataclass of its data sets; has the fields `name` and `path`.
        inputs: Fields of it that decide what a model sees; a run and the runs that it builds on must agree in them.
        inherited: Fields of it that other data take over from a finished run that is evaluated on them.
        follows: Fields of it that have the value of another field if they are 0: `{"stride": "window"}`.
        modes: Settings dataclass of each of its modes; has the field `name`, and one for each prerequisite's folder.
        models: Its models by name.
        factory: Import path `module:function`. Makes the task from a resolved run and the finished models that it
            builds on (by role), and prepares its data.
        sampler: Import path. Makes the task from a sample of the data, in seconds and without writing. The task also
            has `sample_note` (what was sampled; empty if nothing had to be) and `estimated_train_rows`.
        evaluator: Import path. Prepares other data for the evaluation of a finished run.
        files: Import path. Lists a data set's files, in a fixed order, from its settings and the data root, without
            torch; no files if the data are generated. Raises MissingDataError.
        experience: From data set and mode: the first safety factor, why, and (multiplier, why) adjustments.
    """

    dataset: type
    inputs: tuple[str, ...]
    inherited: tuple[str, ...]
    follows: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, type]
    models: Mapping[str, ModelSpec]
    factory: str
    sampler: str
    evaluator: str
    files: str
    experience: Callable[[str, str], tuple[float, str, Sequence[tuple[float, str]]]]

    def table(self) -> str:
        """Writes the table of models and modes, one line each, the default mode first."""
        rows = [("--model", "--mode", "needs")]
        for name, spec in self.models.items():
            for mode in spec.modes:
                default = " (default)" if mode == spec.modes[0] else ""
                rows.append((name, mode + default, spec.needs.get(mode, "data only")))
        return "\n".join(f"  {model:<9}{mode:<25}{needs}" for model, mode, needs in rows)

    @property
    def prerequisites(self) -> list[Prerequisite]:
        """The finished runs that its modes build on, each role once."""
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
    """Lists the installed tasks: the folders in `tasks/` that have a settings module."""
    root = Path(__file__).resolve().parents[1] / "tasks"
    return sorted(path.parent.name for path in root.glob("*/settings.py"))


def load_task_settings(task: str) -> TaskSettings:
    """Imports the description of a task; raises ConfigError, which lists the tasks, if there is none."""
    if task not in task_names():
        raise unknown_name("task", task, task_names())
    settings: TaskSettings = importlib.import_module(f"can_train.tasks.{task}.settings").TASK
    return settings


def installed_sizes() -> set[str]:
    """Returns the sizes of all models of the installed tasks."""
    tasks = [load_task_settings(name) for name in task_names()]
    return {size for task in tasks for model in task.models.values() for size in model.sizes}


def load_object(path: str) -> Any:
    """Imports the object that an import path `module:name` names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
