"""A run with every setting decided, and the folders that it uses."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from can_train.config.settings import ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings
from can_train.config.task_settings import Prerequisite, load_task_settings
from can_train.errors import StateError


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Where a run reads and writes; empty means the default that the field's text names."""

    runs_dir: str = "runs"
    """Folder of run folders."""
    data_root: str = ""
    """Folder of the published data sets; default $CAN_TRAIN_DATA, else ./data."""
    state_dir: str = ""
    """Folder of observations and caches; default $CAN_TRAIN_HOME, else the user's state directory."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """One run, resolved.

    Attributes:
        task: Name of the task.
        model_name: Name of the model in its task.
        size: Size of the model; empty where it has one only.
        device: As asked for: auto, cpu, cuda[:i].
        dataset: The task's data-set settings.
        model: The model's settings.
        mode: The task's mode settings.
        config: The same as plain values, for the run folder.
    """

    task: str
    model_name: str
    size: str
    device: str
    dataset: Any
    model: Any
    mode: Any
    training: TrainingSettings
    factor: FactorSettings
    monitor: MonitorSettings
    cluster: ClusterSettings
    paths: PathSettings
    config: Mapping[str, Any]

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
        """The finished runs that it builds on; the folder of each stands in the mode's setting of its role."""
        return load_task_settings(self.task).models[self.model_name].prerequisites.get(self.mode.name, ())


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedModel:
    """A model that a finished run has trained.

    Attributes:
        run_id: Of the run.
        run: Its settings.
        weights: Its best weights by name, on the CPU.
        result: What came of it, as in `result.json`.
        sha256: Digest of the weights.
    """

    run_id: str
    run: ResolvedRun
    weights: Mapping[str, Any]
    result: Mapping[str, Any]
    sha256: str


_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where there is one: it is seven times as fast, and listings read hundreds of configurations."""


def plain_to_yaml(plain: Mapping[str, Any]) -> str:
    """Writes plain values as YAML, in their order."""
    text: str = yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True)
    return text


def plain_from_yaml(text: str) -> dict[str, Any]:
    """Reads what `plain_to_yaml` wrote.

    Raises:
        ValueError: The text is not a YAML mapping.
    """
    try:
        plain = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(plain, dict):
        raise ValueError("not a mapping")
    return plain


def state_folder(explicit: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Finds the state folder; it need not exist yet.

    Args:
        explicit: The folder given with `--state-dir`; None looks at `$CAN_TRAIN_HOME`, then at the user's state
            directory (`$XDG_STATE_HOME`, else `~/.local/state`).
        environ: Environment variables.

    Raises:
        StateError: Nothing says where the user's home is.
    """
    if explicit is not None:
        return _expanded(explicit)
    if environ.get("CAN_TRAIN_HOME"):
        return _expanded(Path(environ["CAN_TRAIN_HOME"]))
    base = Path(environ.get("XDG_STATE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (base if base.is_absolute() else _expanded(Path("~/.local/state"))) / "can-train"


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise StateError(
            "The state folder must be known", value=str(path), remedy="Give --state-dir or set CAN_TRAIN_HOME"
        ) from error


def data_root(paths: PathSettings) -> Path:
    """Returns the folder of published data sets: as set, else $CAN_TRAIN_DATA, else ./data."""
    return Path(paths.data_root or os.environ.get("CAN_TRAIN_DATA") or "data")


def state_dir(paths: PathSettings) -> Path:
    """Returns the folder of everything can-train keeps between runs."""
    return state_folder(Path(paths.state_dir) if paths.state_dir else None)


def cache_folder(paths: PathSettings) -> Path:
    """Returns the folder of prepared data, which may be deleted at any time."""
    return state_dir(paths) / "cache"


def settled_paths(run: ResolvedRun) -> ResolvedRun:
    """Writes out the folders that a run reads and writes, so that it finds them from anywhere, also where defaults that
    come from the environment have changed.
    """
    paths = PathSettings(
        runs_dir=_absolute(Path(run.paths.runs_dir)),
        data_root=_absolute(data_root(run.paths)),
        state_dir=str(state_dir(run.paths)),
    )
    dataset = replace(run.dataset, path=_absolute(Path(run.dataset.path)) if run.dataset.path else "")
    start_from = _absolute(Path(run.training.start_from)) if run.training.start_from else ""
    config = {
        **run.config,
        "paths": {**run.config["paths"], **asdict(paths)},
        "dataset": {**run.config["dataset"], "path": dataset.path},
        "training": {**run.config["training"], "start_from": start_from},
    }
    training = replace(run.training, start_from=start_from)
    return replace(run, paths=paths, dataset=dataset, training=training, config=config)


def _absolute(path: Path) -> str:
    return str(path.expanduser().absolute())
