"""A run with every setting resolved, what its task tells the configuration of itself, without importing torch, and the
folders that it uses.
"""

# Postponed annotations: importing the settings' classes only for them would lengthen every import chain by one.
from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from can_train.errors import ConfigError, StateError, unknown_name

if TYPE_CHECKING:
    from can_train.config.settings import ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings
    from can_train.reporter import Reporter

PATH_FLAGS: Final = ("runs_dir", "data_root", "state_dir")
CLUSTER_FLAGS: Final = (
    "partition", "account", "qos", "time", "nodes", "gpus", "cpus", "mem", "constraint", "gres", "max_parallel",
)  # fmt: skip
"""Settings of `paths` and of `cluster` that have a flag of their own, and may stand in a person's settings file."""

TRACKERS: Final = ("tensorboard", "mlflow", "wandb")
NO_TRACKER: Final = "off"

USER_SETTINGS: Final = ("cluster", "tracker", *PATH_FLAGS, *CLUSTER_FLAGS)
"""What may stand in a person's settings file."""

_USER_FILE: Final = "CAN_TRAIN_CONFIG"  # variable that names a person's settings file


@dataclass(frozen=True, kw_only=True)
class Prerequisite:
    """A finished run that a mode builds on."""

    # What it is to the mode: `teacher`. It names a flag, and the setting of the mode that holds the folder.
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
    needs: Mapping[str, str] = field(default_factory=dict)  # what a mode needs beside data, in words, by mode
    only_sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by mode, where it does not train all
    prerequisites: Mapping[str, tuple[Prerequisite, ...]] = field(default_factory=dict)  # by mode


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
        tables: Import path. Writes a run's judgement as tables of text, all of it.
        summary_tables: Import path. Writes of it what a person sees by default.
        files: Import path. Lists a data set's files, in a fixed order, from its settings and the data root, without
            torch; no files if the data are generated. Raises MissingDataError.
        digest: Import path. Computes the digest of a data set's content from its settings, the data root and a
            reporter: that of its tasks (`Task.data_digest`), without torch. Raises MissingDataError.
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
    tables: str
    summary_tables: str
    files: str
    digest: str
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


def config_folder() -> Path:
    """Returns the folder of presets: inside the installed package, or at the root of the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def presets(group: str) -> list[str]:
    """Lists the presets of a group in `configs/`."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


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


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Where a run reads and writes, which changes nothing else; empty means the default that the field's text names."""

    runs_dir: str = "runs"
    """Folder of run folders."""
    data_root: str = ""
    """Folder of the published data sets; default $CAN_TRAIN_DATA, else ./data."""
    state_dir: str = ""
    """Folder of observations and caches; default $CAN_TRAIN_HOME, else the user's state directory."""
    tracker: str = NO_TRACKER
    """Where else a run is shown: tensorboard, mlflow or wandb, several separated by commas; off: nowhere."""

    def __post_init__(self) -> None:
        names = self.trackers
        for name in names:
            if name not in TRACKERS:
                raise unknown_name("tracker", name, TRACKERS if len(names) > 1 else (*TRACKERS, NO_TRACKER))

    @property
    def trackers(self) -> list[str]:
        """The names in `tracker`."""
        names = [] if self.tracker == NO_TRACKER else self.tracker.split(",")
        return list(dict.fromkeys(name.strip() for name in names if name.strip()))


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """One run with every setting resolved."""

    task: str
    model_name: str  # in its task
    size: str  # of the model; empty if it has one only
    device: str  # as requested: auto, cpu, cuda[:i], sim:SIZE
    dataset: Any  # the task's settings, as are the next two
    model: Any
    mode: Any
    cluster: ClusterSettings
    training: TrainingSettings
    factor: FactorSettings
    monitor: MonitorSettings
    paths: PathSettings

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The settings as plain values, which `config.yaml` holds and `compose.from_plain` reads."""
        return asdict(self)

    @property
    def key(self) -> str:
        """The configuration's name in the factor store: data set, model, size and mode."""
        return "_".join(part for part in (self.dataset.name, self.model_name, self.size, self.mode.name) if part)

    @property
    def runs_dir(self) -> Path:
        """Folder of run folders."""
        return Path(self.paths.runs_dir)

    @property
    def prerequisites(self) -> tuple[Prerequisite, ...]:
        """The finished runs that it builds on; the mode's setting named like the role holds the folder of each."""
        return load_task_settings(self.task).models[self.model_name].prerequisites.get(self.mode.name, ())


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedModel:
    """A model that a finished run has trained."""

    run_id: str
    run: ResolvedRun
    weights: Mapping[str, Any]  # the best ones by name, on the CPU
    result: Mapping[str, Any]  # the contents of the run's `result.json`
    sha256: str  # digest of the weights


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """Data that a finished run is evaluated on."""

    dataset: Any  # the task's settings of them
    own: bool  # whether they are what the run was trained on, wherever that is stored now
    data_root: Path  # folder of the published data sets
    cache: Path  # folder of prepared data
    reporter: Reporter


# Groups of settings that say where a run happens, not what it does.
_LOCATIONS: Final = ("paths", "cluster", "device")


def flat_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a configuration by their dotted names, without those that say where a run happens."""
    return dict(flat({name: value for name, value in config.items() if name not in _LOCATIONS}))


def flat(plain: Mapping[str, Any], *, separator: str = ".", before: str = "") -> Iterator[tuple[str, Any]]:
    """Lists nested values by the names on the way to them: `training.lr`."""
    for name, value in plain.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, separator=separator, before=f"{before}{name}{separator}")
        else:
            yield f"{before}{name}", value


def plain_to_yaml(plain: Mapping[str, Any]) -> str:
    """Writes plain values as YAML, in their order."""
    # Imported here and below: `can-train --help` needs this module and writes no configuration.
    import yaml

    return str(yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True))


def plain_from_yaml(text: str) -> dict[str, Any]:
    """Reads what `plain_to_yaml` wrote.

    Raises:
        ValueError: The text is not a YAML mapping.
    """
    import yaml

    try:
        # libyaml is seven times as fast, where it is installed, and listings read hundreds of configurations.
        plain = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(plain, dict):
        raise ValueError("not a mapping")
    return plain


@dataclass(frozen=True)
class UserFile:
    """What a person always sets, below what a command line says and above the presets."""

    path: Path  # where it is, or would be
    values: Mapping[str, str] = field(default_factory=dict)  # as they would follow a flag, by its name: `data_root`


def user_file(environ: Mapping[str, str] = os.environ) -> UserFile:
    """Reads a person's settings file: `$CAN_TRAIN_CONFIG`, else `can-train/config.yaml` in the user's configuration
    directory (`$XDG_CONFIG_HOME`, else `~/.config`), which need not exist.

    Raises:
        ConfigError: The file cannot be read, or sets something else; the error names file and key.
    """
    base, named = Path(environ.get("XDG_CONFIG_HOME", "")), environ.get(_USER_FILE)
    default = (base if base.is_absolute() else Path("~/.config")) / "can-train" / "config.yaml"
    path = _expanded(named or str(default))
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        if not named:
            return UserFile(path)
        remedy = f"Correct it, or do without: unset {_USER_FILE}"
        raise ConfigError(f"The file that {_USER_FILE} names does not exist", value=named, remedy=remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("Your settings file cannot be read", value=f"{path}: {error}") from error
    return UserFile(path, _user_values(path, text) if text.strip() else {})


def _user_values(path: Path, text: str) -> dict[str, str]:
    import yaml

    try:
        # Values stay text, as those of flags: YAML would read the time limit 1:30:00 as a number of seconds.
        plain = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML", value=" ".join(str(error).split())) from error
    if plain is not None and not isinstance(plain, dict):
        raise ConfigError(f"{path} has a setting a line", value=repr(plain), remedy="Write data_root: /path")
    values = {}
    for key, value in (plain or {}).items():
        name = str(key).replace("-", "_")
        if name not in USER_SETTINGS:
            raise unknown_name(f"setting in {path}", str(key), USER_SETTINGS)
        if not isinstance(value, str) or not value:
            remedy = "Give it one value, or remove the line"
            raise ConfigError(f"{path}: {key} has one value", value=repr(value), remedy=remedy)
        values[name] = str(_expanded(value)) if name in PATH_FLAGS else value
    return values


def _expanded(path: str) -> Path:
    """Replaces `~` and `$NAME`; what is not known stays, and names a folder that does not exist."""
    plain = Path(os.path.expandvars(path))
    try:
        return plain.expanduser()
    except RuntimeError:
        return plain


def state_folder(explicit: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Finds the state folder; it need not exist yet.

    Args:
        explicit: The folder given with `--state-dir`; None looks at `$CAN_TRAIN_HOME`, then at the person's settings
            file, then at the user's state directory (`$XDG_STATE_HOME`, else `~/.local/state`).
        environ: Environment variables.

    Raises:
        StateError: The path begins with `~` and the home directory is unknown.
        ConfigError: The person's settings file is wrong.
    """
    base = Path(environ.get("XDG_STATE_HOME", ""))
    # The XDG specification: a relative path is ignored.
    default = (base if base.is_absolute() else Path("~/.local/state")) / "can-train"
    home = environ.get("CAN_TRAIN_HOME")
    folder = explicit or Path(home or user_file(environ).values.get("state_dir") or default)
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        raise StateError("The home directory of the user, which holds the state folder, is unknown",
                         value=str(folder), remedy="Give --state-dir or set CAN_TRAIN_HOME") from error  # fmt: skip


def state_dir(paths: PathSettings) -> Path:
    """Returns the folder of everything that can-train stores between runs."""
    return state_folder(Path(paths.state_dir) if paths.state_dir else None)


def cache_folder(paths: PathSettings) -> Path:
    """Returns the folder of prepared data, which may be deleted at any time."""
    return state_dir(paths) / "cache"


def data_root(paths: PathSettings) -> Path:
    """Returns the folder of published data sets: as set, else $CAN_TRAIN_DATA, else the person's own, else ./data."""
    named = paths.data_root or os.environ.get("CAN_TRAIN_DATA")
    return Path(named or user_file().values.get("data_root") or "data")


def with_absolute_paths(run: ResolvedRun) -> ResolvedRun:
    """Makes every folder in a run's settings absolute.

    A job, or a later `resume`, then finds them from any directory, even if the environment's defaults have changed.
    """
    root = _absolute(str(data_root(run.paths)))
    runs_dir = _absolute(run.paths.runs_dir or ".")
    paths = replace(run.paths, runs_dir=runs_dir, data_root=root, state_dir=str(state_dir(run.paths)))
    dataset = replace(run.dataset, path=_absolute(run.dataset.path))
    start = run.training.start_from
    # It may also be the name of a run, which is looked for later.
    training = replace(run.training, start_from=_absolute(start) if Path(start).exists() else start)
    return replace(run, paths=paths, dataset=dataset, training=training)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
