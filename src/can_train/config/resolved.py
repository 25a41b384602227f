"""A run with every setting decided: what planning, launching and training receive, and what `resume` reads back."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from can_train.config.cluster import ClusterSettings
from can_train.config.factor import FactorSettings
from can_train.config.monitor import MonitorSettings
from can_train.config.task_settings import Prerequisite, load_task_settings
from can_train.config.training import TrainingSettings


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
