"""A run with every setting resolved, and the folders that it uses."""

# Postponed annotations: importing the settings' classes only for them would lengthen every import chain by one.
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from can_train.config.task_settings import Prerequisite, load_task_settings
from can_train.errors import StateError

if TYPE_CHECKING:
    from can_train.config.settings import ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings
    from can_train.reporter import Reporter

# libyaml is seven times as fast, where it is installed, and listings read hundreds of configurations.
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
    """One run with every setting resolved.

    Attributes:
        task: Name of the task.
        model_name: Name of the model in its task.
        size: Size of the model; empty if it has one only.
        device: As requested: auto, cpu, cuda[:i], sim:SIZE.
        dataset: The task's data-set settings.
        model: The model's settings.
        mode: The task's mode settings.
    """

    task: str
    model_name: str
    size: str
    device: str
    dataset: Any
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
    """A model that a finished run has trained.

    Attributes:
        run_id: Of the run.
        run: Its settings.
        weights: Its best weights by name, on the CPU.
        result: The contents of its `result.json`.
        sha256: Digest of the weights.
    """

    run_id: str
    run: ResolvedRun
    weights: Mapping[str, Any]
    result: Mapping[str, Any]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """Data that a finished run is evaluated on.

    Attributes:
        dataset: The task's settings of them.
        own: Whether they are what the run was trained on, wherever that is stored now.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data.
        reporter: Where progress and notices go.
    """

    dataset: Any
    own: bool
    data_root: Path
    cache: Path
    reporter: Reporter


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
        StateError: The path begins with `~` and the home directory is unknown.
    """
    if explicit is None and environ.get("CAN_TRAIN_HOME"):
        explicit = Path(environ["CAN_TRAIN_HOME"])
    if explicit is None:
        base = Path(environ.get("XDG_STATE_HOME", ""))
        # The XDG specification: a relative path is ignored.
        explicit = (base if base.is_absolute() else Path("~/.local/state")) / "can-train"
    try:
        return explicit.expanduser().absolute()
    except RuntimeError as error:
        raise StateError(
            "The home directory of the user, which holds the state folder, is unknown",
            value=str(explicit),
            remedy="Give --state-dir or set CAN_TRAIN_HOME",
        ) from error


def state_dir(paths: PathSettings) -> Path:
    """Returns the folder of everything that can-train stores between runs."""
    return state_folder(Path(paths.state_dir) if paths.state_dir else None)


def cache_folder(paths: PathSettings) -> Path:
    """Returns the folder of prepared data, which may be deleted at any time."""
    return state_dir(paths) / "cache"


def data_root(paths: PathSettings) -> Path:
    """Returns the folder of published data sets: as set, else $CAN_TRAIN_DATA, else ./data."""
    return Path(paths.data_root or os.environ.get("CAN_TRAIN_DATA") or "data")


def with_absolute_paths(run: ResolvedRun) -> ResolvedRun:
    """Makes every folder in a run's settings absolute.

    A job, or a later `resume`, then finds them from any directory, even if the environment's defaults have changed.
    """
    paths = PathSettings(
        runs_dir=_absolute(run.paths.runs_dir or "."),
        data_root=_absolute(str(data_root(run.paths))),
        state_dir=str(state_dir(run.paths)),
    )
    dataset = replace(run.dataset, path=_absolute(run.dataset.path))
    training = replace(run.training, start_from=_absolute(run.training.start_from))
    return replace(run, paths=paths, dataset=dataset, training=training)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
