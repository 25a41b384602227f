"""Makes what a run trains from its configuration: the task with its data, and the model with fresh weights."""

import hashlib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from torch import Tensor, nn

from can_train.config.compose import from_plain
from can_train.config.resolved import FinishedModel, PathSettings, ResolvedRun, cache_folder, data_root
from can_train.config.task_settings import load_object, load_task_settings
from can_train.errors import CheckpointError, ConfigError, RunError, StateError
from can_train.fit import random_state
from can_train.fit.optimizer import Precision
from can_train.memory.meters import Meter
from can_train.reporter import Reporter, SilentReporter
from can_train.task import Task
from can_train.training.checkpoint import Checkpoints
from can_train.training.run_folder import CONFIG, RunFolder, relocate_prerequisites

T = TypeVar("T")


def load_task(run: ResolvedRun, reporter: Reporter) -> Task:
    """Makes the task of a run, its data prepared; where they cannot be kept for later runs, for this one alone.

    Raises:
        StateError: Nor can they be written to the folder of temporary files.
        CheckpointError: A model that it builds on is not there, or does not fit.
    """
    factory: Callable[..., Task] = load_object(load_task_settings(run.task).factory)
    finished = finished_models(run)
    return with_cache(run.paths, reporter, lambda cache: factory(run, finished, data_root(run.paths), cache, reporter))


def with_cache(paths: PathSettings, reporter: Reporter, make: Callable[[Path], T]) -> T:
    """Makes something of prepared data; where they cannot be kept for later, of some that are there for this alone.

    Args:
        paths: Where they are kept.
        reporter: Is told where they cannot be.
        make: Makes it, given the folder of prepared data.

    Raises:
        StateError: Nor can they be written to the folder of temporary files.
    """
    try:
        return make(cache_folder(paths))
    except StateError as error:
        try:
            scratch = TemporaryDirectory(prefix="can-train-")
        except OSError:
            raise error from None
        reporter.notice(f"Prepared data are not kept. {error}")
    # What is made maps what it reads: that stays readable after its files are gone.
    with scratch as folder:
        return make(Path(folder))


def sample_task(run: ResolvedRun, reporter: Reporter) -> Task:
    """Makes the task of a run from a bounded sample of its data, for a plan; writes nothing."""
    sampler: Callable[..., Task] = load_object(load_task_settings(run.task).sampler)
    return sampler(run, finished_models(run), data_root(run.paths), cache_folder(run.paths), reporter)


def fresh_model(run: ResolvedRun, task: Task, meter: Meter) -> nn.Module:
    """Makes the model of a run on its device; generators start from the run's seed."""
    # Preparing data may or may not have drawn random numbers (a cache): weights start from here.
    random_state.seed_everything(run.training.seed)
    return task.build_model().to(meter.device, Precision.named(run.training.precision).dtype)


_REMEDY: Final = "Copy the run once more from where it was trained, or train it anew"


_NAMED: Final = 3
"""Weights that a message names."""


def load_finished(path: Path) -> FinishedModel:
    """Reads the model that a run has trained.

    Args:
        path: Folder of the run.

    Raises:
        RunError: There is no run, or its files cannot be read.
        CheckpointError: It has not finished, or its weights are not whole.
    """
    folder = RunFolder(path)
    if not (path / CONFIG).exists():
        raise RunError("A run that is built on stays where it was, or lies beside the run that builds on it",
                       value=f"{path} is gone", remedy="Bring its folder back to either place")  # fmt: skip
    config = folder.config()
    result = folder.result()
    if result is None:
        raise CheckpointError(
            "Only a finished run has a model",
            value=str(path),
            remedy=f"Finish it first: {shlex.join(['can-train', 'resume', str(path)])}",
        )
    weights = _weights(folder)
    return FinishedModel(
        run_id=folder.run_id,
        run=relocate_prerequisites(from_plain(config), path),
        weights=weights,
        result=result,
        sha256=_digest(weights),
    )


def finished_models(run: ResolvedRun) -> dict[str, FinishedModel]:
    """Reads the finished models that a run builds on, by role.

    Raises:
        ConfigError: One that it needs is not named.
        RunError: One is gone.
        CheckpointError: One has not finished.
    """
    return {
        needed.role: finished_model(run, needed.role)
        for needed in run.prerequisites
        if needed.required or getattr(run.mode, needed.role)
    }


def finished_model(run: ResolvedRun, role: str) -> FinishedModel:
    """Reads the finished model of a role that a run builds on.

    Raises:
        ConfigError: It is not named.
        RunError: It is gone.
        CheckpointError: It has not finished.
    """
    path = getattr(run.mode, role)
    if not path:
        what = next(needed.what for needed in run.prerequisites if needed.role == role)
        raise ConfigError(f"Mode {run.mode.name} needs {what}", remedy=f"Name its run: --{role.replace('_', '-')}")
    return load_finished(Path(path))


def _weights(folder: RunFolder) -> dict[str, Tensor]:
    """Reads the best weights of a finished run."""
    state = Checkpoints(folder.checkpoints_path).newest()
    found = {} if state is None else state.get("best")
    whole = isinstance(found, dict) and all(isinstance(value, Tensor) for value in found.values())
    if not whole or not found:
        why = "there are none" if state is None else "its last checkpoint holds others"
        raise CheckpointError("A finished run has weights", value=f"{folder.checkpoints_path}: {why}", remedy=_REMEDY)
    broken = [name for name, value in found.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise CheckpointError("The weights of a finished run are finite numbers",
                              value=f"{folder.run_id}: {', '.join(broken[:_NAMED])}", remedy=_REMEDY)  # fmt: skip
    return dict(found)


def _digest(weights: Mapping[str, Any]) -> str:
    """Digests weights: names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().view(-1).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


_NAMED_TENSORS: Final = 5
"""Differences that a message names."""


def start_from(model: nn.Module, run_path: Path) -> None:
    """Gives a model the best weights of a finished run.

    Args:
        model: Fresh; on any device.
        run_path: Folder of the run.

    Raises:
        CheckpointError: The run has not finished, or its model is another; what differs is named.
    """
    folder = RunFolder(run_path)
    state = Checkpoints(folder.checkpoints_path).load(SilentReporter())
    if folder.result() is None or state is None:
        raise CheckpointError(
            "Training starts from the weights of a finished run",
            value=str(run_path),
            remedy=f"Finish it first: can-train resume {folder.run_id}",
        )
    differences = _differences(model.state_dict(), state["best"])
    if differences:
        more = f"; and {len(differences) - _NAMED_TENSORS} more" if len(differences) > _NAMED_TENSORS else ""
        raise CheckpointError(
            "The run that training starts from must have the same model",
            value=f"{folder.run_id}: {'; '.join(differences[:_NAMED_TENSORS])}{more}",
            remedy="Choose a run of the same model, size, features and data set",
        )
    model.load_state_dict(state["best"])


def _differences(mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Says field by field how weights differ in name or shape."""
    missing = [f"{name} is not in it" for name in mine if name not in other]
    unknown = [f"{name} is only in it" for name in other if name not in mine]
    shapes = [
        f"{name} is {_shape(other[name])}, not {_shape(mine[name])}"
        for name in mine
        if name in other and _shape(mine[name]) != _shape(other[name])
    ]
    return missing + unknown + shapes


def _shape(value: Any) -> str:
    return " × ".join(map(str, value.shape)) or "one number" if isinstance(value, Tensor) else type(value).__name__
