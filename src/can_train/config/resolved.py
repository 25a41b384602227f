"""A run with every setting resolved, and the folders that it uses."""

# Postponed annotations: importing the settings' classes only for them would lengthen every import chain by one.
from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

from can_train.config.task_settings import (
    Prerequisite,
    TaskSettings,
    described_tasks,
    key_name,
    load_task_settings,
    task_names,
)
from can_train.errors import ConfigError, StateError, unknown_name

if TYPE_CHECKING:
    from can_train.config.settings import ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings
    from can_train.reporter import Reporter

_UNICODE_LINE_BREAKS: Final = "\x85\u2028\u2029"
_MOST_NESTED: Final = 1000  # levels of YAML that its readers are trusted with
_MOST_VALUES: Final = 100_000  # of a YAML file whose values are repeated by aliases
PATH_FLAGS: Final = ("runs_dir", "data_root", "state_dir", "cache")
CLUSTER_FLAGS: Final = (
    "partition", "time", "gpus", "mem", "account", "qos", "nodes", "ranks", "cpus", "mem_per_gpu", "cpus_per_gpu",
    "tmp", "constraint", "gres", "exclude", "nodelist", "reservation", "exclusive", "clusters", "begin", "nice",
    "comment", "job_name", "mail_user", "mail_type", "container", "max_parallel", "pack",
)  # fmt: skip
"""Settings of `paths` and of `cluster` that have a flag of their own, and may stand in a person's settings file."""

TRACKERS: Final = ("tensorboard", "mlflow", "wandb")
NO_TRACKER: Final = "off"

USER_SETTINGS: Final = ("cluster", "tracker", *PATH_FLAGS, *CLUSTER_FLAGS)
"""Settings that the user's settings file may have."""

_VARIABLE: Final = re.compile(r"\$(?:\w+|\{\w+\})")
_DO_WITHOUT: Final = "Correct it, or do without: export CAN_TRAIN_CONFIG=/dev/null"
_CACHE: Final = "can-train-cache"  # folder of prepared data, in the folder that a person names for them
_USER_FILE: Final = "CAN_TRAIN_CONFIG"  # variable that names a person's settings file


def config_folder() -> Path:
    """Returns the folder of presets: inside the installed package, or at the root of the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def default_task() -> str:
    """Returns the task of a command line that names none."""
    # One line of a file of this package: the import of yaml would take longer than the rest of `can-train --help`.
    lines = (config_folder() / "config.yaml").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("task:")).partition(":")[2].strip()


def preset_folders(task: str = "", configs: str = "", config_dir: str = "") -> list[Path]:
    """Lists the folders of presets; a later folder wins.

    Args:
        task: Name of an installed task, or of the one that a task of one's own derives from.
        configs: Folder beside a task of one's own.
        config_dir: Folder that a person names.
    """
    shared = config_folder()
    named = [str(shared / task) if task in task_names() else "", configs, config_dir]
    return [shared, *(Path(folder) for folder in named if folder and Path(folder).is_dir())]


def presets(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """Lists the presets of a group, in all the folders or, without any, in `configs/`."""
    found = (path.stem for folder in folders or preset_folders() for path in (folder / group).glob("*.yaml"))
    return sorted(set(found))


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Where a run reads and writes, which changes nothing else; empty means the default that the field's text names."""

    runs_dir: str = "runs"
    """Folder of run folders."""
    data_root: str = ""
    """Folder of the published data sets; default $CAN_TRAIN_DATA, else ./data."""
    state_dir: str = ""
    """Folder of observations and of the list of runs; default $CAN_TRAIN_HOME, else the user's state directory."""
    cache: str = ""
    """Folder in which prepared data get a folder of their own; default $CAN_TRAIN_CACHE, else the state folder."""
    code_dir: str = ""
    """Folder of the code of the user's own task or optimizer, which is imported; empty: both are installed."""
    config_dir: str = ""
    """Folder of a person's own presets; empty: there is none."""
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
    settings: Any  # of the task itself: `--set task.name=value`
    dataset: Any  # the task's, as are the next two
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
        return plain_settings(self)

    @property
    def key(self) -> str:
        """The configuration's name in the factor store: task, data set, model, size and mode."""
        prefix: str | None = key_name(self.task)
        # The code of a task of one's own may be gone.
        if self.task in described_tasks():
            prefix = load_task_settings(self.task).key_prefix
        parts = (self.task if prefix is None else prefix, self.dataset.name, self.model_name, self.size, self.mode.name)
        return "_".join(filter(None, parts))

    @property
    def task_settings(self) -> TaskSettings:
        """The description of its task."""
        return load_task_settings(self.task, self.paths.code_dir)

    @property
    def runs_dir(self) -> Path:
        """Folder of run folders."""
        return Path(self.paths.runs_dir)

    @property
    def prerequisites(self) -> tuple[Prerequisite, ...]:
        """The finished runs that it builds on; the mode's setting named like the role holds the folder of each."""
        return self.task_settings.models[self.model_name].prerequisites.get(self.mode.name, ())


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedModel:
    """A model that a finished run has trained."""

    run_id: str
    run: ResolvedRun
    weights: Mapping[str, Any]  # the best ones by name, on the CPU
    result: Mapping[str, Any]  # the contents of the run's `result.json`
    sha256: str  # digest of the weights
    state: Mapping[str, Any] = field(default_factory=dict)  # state that its task derived from the training data
    made_buffers: Sequence[str] = ()  # names of the buffers that its first pass has registered


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """The data that a finished run is evaluated on, and how.

    Attributes:
        dataset: Settings of the data set.
        own: Whether the run was trained on the data, wherever they are stored now.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data.
        options: Evaluation options of the task (`TaskSettings.evaluation`).
        verbose: Whether everything is printed.
        writes_samples: Whether a file of the scores of single samples is written.
    """

    dataset: Any
    own: bool
    data_root: Path
    cache: Path
    reporter: Reporter
    options: Any = None
    verbose: bool = False
    writes_samples: bool = False


def plain_settings(settings: Any) -> dict[str, Any]:
    """Returns settings as a file has them: a path as its text, a member of an enumeration as its name."""
    plain: dict[str, Any] = _plain(asdict(settings))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, PurePath) else value


# Groups of settings that change the place of a run, not its result.
_LOCATIONS: Final = ("paths", "cluster", "device")


def flat_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a configuration by their dotted names, without those that say where a run happens."""
    # Empty groups are left out; the task's settings are set as `task.name`.
    here = {name: value for name, value in config.items() if name not in _LOCATIONS and value != {}}
    return {name.replace("settings.", "task.", 1) if name.startswith("settings.") else name: value
            for name, value in flat(here)}  # fmt: skip


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the settings that differ between configurations, each with its value in every one; None: not set."""
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name) for each in settings] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


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

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        """Writes texts with Unicode's line breaks between double quotes, which escape them."""

    # PyYAML writes them into single quotes as they are; read again, a next line (U+0085) is a plain line feed.
    def represent_text(dumper: Any, text: str) -> Any:
        style = '"' if any(line_break in text for line_break in _UNICODE_LINE_BREAKS) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent_text)
    return str(yaml.dump(dict(plain), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def plain_from_yaml(text: str) -> dict[str, Any]:
    """Reads a file of `plain_to_yaml`.

    Raises:
        ValueError: The text is not a YAML mapping.
    """
    import yaml

    # libyaml is seven times as fast, where it is installed, and listings read hundreds of configurations; but a
    # text that is nested a hundred thousand levels deep ends it, and the process, with a segmentation fault.
    may_be_deep = sum(map(text.count, "[{-?")) > _MOST_NESTED
    try:
        check_yaml(text)
        plain = yaml.load(
            text, Loader=yaml.SafeLoader if may_be_deep else getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(plain, dict):
        raise ValueError("not a mapping")
    return plain


def check_yaml(text: str) -> None:
    """Checks for YAML that a reader could not finish: thousands of nested brackets, values that contain themselves,
    aliases (`*name`) that stand for too many values.

    Raises:
        ValueError: The text has one of these.
    """
    if text.count("[") + text.count("{") > _MOST_NESTED:
        raise ValueError(f"more than {_MOST_NESTED:,} brackets")
    if "*" not in text:
        return
    import yaml

    sizes, open_values = dict[str, int](), [("", 0)]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        name, size = str(getattr(event, "anchor", None) or ""), 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_values.append((name, 1))
            continue
        if isinstance(event, yaml.AliasEvent):
            if name in dict(open_values):
                raise ValueError(f"*{name} is part of itself")
            size = sizes.get(name, 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            name, size = open_values.pop()
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        outer, total = open_values.pop()
        open_values.append((outer, total + size))
        sizes[name] = size
        if total + size > _MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {_MOST_VALUES:,} values")


@dataclass(frozen=True)
class UserFile:
    """The user's settings file. A command line overrides it; it overrides the presets."""

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
        raise ConfigError("Your settings file cannot be read", value=f"{path}: {error}",
                          remedy=_DO_WITHOUT) from error  # fmt: skip
    if not text.strip():
        return UserFile(path)
    import yaml

    try:
        # Values stay text, like the values of flags: YAML would read the time limit 1:30:00 as a number of seconds.
        plain = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML", value=" ".join(str(error).split()), remedy=_DO_WITHOUT) from error
    if plain is not None and not isinstance(plain, dict):
        raise ConfigError(
            f"{path} must have a setting on each line", value=repr(plain), remedy="Write data_root: /path"
        )
    values = {}
    for key, value in (plain or {}).items():
        name = str(key).replace("-", "_")
        if name not in USER_SETTINGS:
            raise unknown_name(f"setting in {path}", str(key), USER_SETTINGS)
        if not isinstance(value, str) or not value:
            remedy = "Give it one value, or remove the line"
            raise ConfigError(f"{path}: {key} must have one value", value=repr(value), remedy=remedy)
        if name in PATH_FLAGS:
            value = os.path.expandvars(value)
            if unset := _VARIABLE.search(value):
                raise ConfigError(f"{path}: {key} names a variable that is not set", value=unset[0],
                                  remedy="Set it, or write the folder itself")  # fmt: skip
            value = str(_home_expanded(value))
        values[name] = value
    return UserFile(path, values)


def _expanded(path: str) -> Path:
    """Replaces `~` and `$NAME`; an unknown name stays, and no such folder exists."""
    return _home_expanded(os.path.expandvars(path))


def _home_expanded(path: str) -> Path:
    # Imported here, as msgspec comes with it, a tenth of the time of `can-train --help`.
    from can_train.io.records import expanded

    return expanded(path)


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


def named_cache(paths: PathSettings) -> Path | None:
    """Returns the folder that a flag, $CAN_TRAIN_CACHE or the user's settings file names for prepared data."""
    named = paths.cache or os.environ.get("CAN_TRAIN_CACHE") or user_file().values.get("cache")
    return _home_expanded(named).absolute() if named else None


def cache_folder(paths: PathSettings) -> Path:
    """Returns the folder of prepared data, which may be deleted at any time."""
    named = named_cache(paths)
    # A folder of its own: a person names $SCRATCH, of which `doctor --prune` must not delete anything else.
    return named / _CACHE if named else state_dir(paths) / "cache"


def data_root(paths: PathSettings) -> Path:
    """Returns the folder of published data sets: as set, else $CAN_TRAIN_DATA, else the person's own, else ./data."""
    named = paths.data_root or os.environ.get("CAN_TRAIN_DATA")
    return Path(named or user_file().values.get("data_root") or "data")


def check_folder(name: str, folder: Path) -> None:
    """Raises ConfigError where a folder can neither be nor be made; `name` is its flag or setting."""
    for place in (folder, *folder.parents):
        # A link that leads nowhere exists as little as it can be made a folder.
        if os.path.lexists(place):
            if not place.is_dir():
                is_file = "is a file" if place.exists() else "is a link to a place that is not there"
                value = f"{folder} {is_file}" if place == folder else f"{folder}: {place} {is_file}"
                raise ConfigError(f"{name} must be a folder", value=value, remedy=f"Name another: {name} FOLDER")
            return


def _check_cache(folder: Path) -> None:
    # As msgspec, see `_home_expanded`.
    from can_train.io.records import check_writable

    check_folder("--cache", folder)
    try:
        # Tried in a folder that exists: nothing stays of it.
        check_writable(next(place for place in (folder, *folder.parents) if place.is_dir()))
    except OSError as error:
        raise ConfigError("--cache must be a folder that can be written", value=f"{folder}: {error.strerror}",
                          remedy="Name another: --cache FOLDER") from error  # fmt: skip


def with_folders_of(run: ResolvedRun, paths: PathSettings) -> PathSettings:
    """Returns the folders that are given; in place of empty ones the run's, if they are on this machine."""
    run_folders = {name: getattr(run.paths, name) for name in ("data_root", "state_dir", "cache")}
    return replace(paths, **{name: path for name, path in run_folders.items()
                             if not getattr(paths, name) and path and Path(path).is_dir()})  # fmt: skip


def with_absolute_paths(run: ResolvedRun) -> ResolvedRun:
    """Makes every folder in a run's settings absolute, and makes sure that prepared data can be written.

    A job, or a later `resume`, then finds them from any directory, even if the environment's defaults have changed.
    """
    for name in PATH_FLAGS:
        if given := getattr(run.paths, name):
            check_folder(f"--{name.replace('_', '-')}", _home_expanded(given))
    if cache := named_cache(run.paths):
        _check_cache(cache)
    root = _absolute(str(data_root(run.paths)))
    runs_dir = _absolute(run.paths.runs_dir or ".")
    paths = replace(run.paths, runs_dir=runs_dir, data_root=root, state_dir=str(state_dir(run.paths)),
                    cache=str(cache or ""), config_dir=_absolute(run.paths.config_dir))  # fmt: skip
    dataset = replace(run.dataset, path=_absolute(run.dataset.path))
    start = run.training.start_from
    # It may also be the name of a run, which is looked for later.
    training = replace(run.training, start_from=_absolute(start) if Path(start).exists() else start)
    return replace(run, paths=paths, dataset=dataset, training=training)


def _absolute(path: str) -> str:
    return str(_home_expanded(path).absolute()) if path else ""
