"""Loads what a run is made of: its task with the data, its model, and the finished models that it builds on."""

import hashlib
import json
import shlex
from collections.abc import Callable
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
from can_train.io.atomic import write_json_atomic
from can_train.memory.meters import Meter
from can_train.reporter import Reporter, SilentReporter
from can_train.task import Task
from can_train.training.checkpoint import REMEDY, Checkpoints
from can_train.training.run_folder import CONFIG, RunFolder, relocate_prerequisites

MAX_NAMED: Final = 5
"""Weights that an error names before it stops."""

INPUTS: Final = "built_on.json"
"""In a run's folder: the digests of its data and of each reference model, by role."""

T = TypeVar("T")


def load_task(run: ResolvedRun, reporter: Reporter) -> Task:
    """Makes the task of a run with all of its data prepared."""
    factory: Callable[..., Task] = load_object(load_task_settings(run.task).factory)
    finished = finished_models(run)
    return with_cache(run.paths, reporter, lambda cache: factory(run, finished, data_root(run.paths), cache, reporter))


def sample_task(run: ResolvedRun, reporter: Reporter) -> Task:
    """Makes the task of a run from a bounded sample of its data, for a plan; writes nothing."""
    sampler: Callable[..., Task] = load_object(load_task_settings(run.task).sampler)
    return sampler(run, finished_models(run), data_root(run.paths), cache_folder(run.paths), reporter)


def with_cache(paths: PathSettings, reporter: Reporter, make: Callable[[Path], T]) -> T:
    """Calls `make` with the folder of prepared data; with a temporary one where the cache cannot be written."""
    try:
        return make(cache_folder(paths))
    except StateError as error:
        try:
            scratch = TemporaryDirectory(prefix="can-train-")
        except OSError:
            raise error from None
        reporter.notice(f"Prepared data are not kept. {error}")
    # What is made maps the files that it reads: they stay readable after they are deleted.
    with scratch as folder:
        return make(Path(folder))


def check_inputs_unchanged(folder: RunFolder, task: Task) -> None:
    """Writes the digests of a run's inputs; in a later attempt, makes sure that they are the same.

    A log that grew, or a teacher that was trained on meanwhile, would change the run between two steps.

    Raises:
        RunError: The data or a reference model changed.
    """
    path = folder.path / INPUTS
    models = task.reference_models()
    now = {model.role: model.digest for model in models} | {"data": task.data_digest()}
    now = {role: digest for role, digest in now.items() if digest}
    # A damaged file is written anew: it proves nothing about the inputs.
    try:
        before = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        write_json_atomic(path, now)
        return
    changed = [role for role, digest in now.items() if before.get(role, digest) != digest]
    # A reference model's digest depends on the data too, so changed data are the only cause that is named.
    if "data" in changed:
        raise RunError("A run goes on with the data that it began with", value="its logs have other contents by now",
                       remedy="Bring back what was there, or train anew")  # fmt: skip
    if changed:
        named = ", ".join(f"the {model.role.replace('_', ' ')} {model.name}" for model in models
                          if model.role in changed)  # fmt: skip
        raise RunError("A run goes on with the models that it began with",
                       value=f"{named} has other weights by now, or is asked about other windows",
                       remedy="Bring back what was there, or train anew")  # fmt: skip


def fresh_model(run: ResolvedRun, task: Task, meter: Meter) -> nn.Module:
    """Makes the model of a run on its device; generators start from the run's seed."""
    # Preparing data may or may not have drawn random numbers (a cache): weights start from here.
    random_state.seed_everything(run.training.seed)
    return task.build_model().to(meter.device, Precision.named(run.training.precision).dtype)


def load_finished(path: Path) -> FinishedModel:
    """Reads the model that the run in a folder has trained.

    Raises:
        RunError: There is no run, or its files cannot be read.
        CheckpointError: It has not finished, or its weights are damaged.
    """
    folder = RunFolder(path)
    if not (path / CONFIG).exists():
        raise RunError("A run that is built on stays where it was, or lies beside the run that builds on it",
                       value=f"{path} is gone", remedy="Bring its folder back to either place")  # fmt: skip
    config = folder.config()
    result = folder.result()
    if result is None:
        raise CheckpointError("Only a finished run has a model", value=str(path),
                              remedy=f"Finish it first: {shlex.join(['can-train', 'resume', str(path)])}")  # fmt: skip
    weights = _weights(folder)
    # Of names, types and shapes too: weights of equal bytes may belong to different models.
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().view(-1).numpy().tobytes() if value.numel() else b"")
    return FinishedModel(
        run_id=folder.run_id,
        run=relocate_prerequisites(from_plain(config), path),
        weights=weights,
        result=result,
        sha256=digest.hexdigest(),
    )


def _weights(folder: RunFolder) -> dict[str, Tensor]:
    """Reads the best weights of a finished run."""
    state = Checkpoints(folder.checkpoints_path).newest()
    weights = {} if state is None else state.get("best")
    if not isinstance(weights, dict) or not weights or not all(isinstance(one, Tensor) for one in weights.values()):
        why = "there are none" if state is None else "its last checkpoint holds others"
        raise CheckpointError("A finished run has weights", value=f"{folder.checkpoints_path}: {why}", remedy=REMEDY)
    broken = [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise CheckpointError("The weights of a finished run are finite numbers",
                              value=f"{folder.run_id}: {', '.join(broken[:MAX_NAMED])}", remedy=REMEDY)  # fmt: skip
    return weights


def finished_models(run: ResolvedRun) -> dict[str, FinishedModel]:
    """Reads the finished models that a run builds on, by role; raises as `finished_model` does."""
    return {
        needed.role: finished_model(run, needed.role)
        for needed in run.prerequisites
        if needed.required or getattr(run.mode, needed.role)
    }


def finished_model(run: ResolvedRun, role: str) -> FinishedModel:
    """Reads the finished model of a role that a run builds on.

    Raises:
        ConfigError: Its run is not named.
        RunError: Its run is gone.
        CheckpointError: Its run has not finished.
    """
    path = getattr(run.mode, role)
    if not path:
        what = next(needed.what for needed in run.prerequisites if needed.role == role)
        raise ConfigError(f"Mode {run.mode.name} needs {what}", remedy=f"Name its run: --{role.replace('_', '-')}")
    return load_finished(Path(path))


def start_from(model: nn.Module, run_path: Path) -> None:
    """Gives a fresh model the best weights of the finished run in a folder.

    Raises:
        CheckpointError: The run has not finished, or its model is another; the error names what differs.
    """
    folder = RunFolder(run_path)
    state = Checkpoints(folder.checkpoints_path).load(SilentReporter())
    if folder.result() is None or state is None:
        raise CheckpointError(
            "Training starts from the weights of a finished run",
            value=str(run_path),
            remedy=f"Finish it first: can-train resume {folder.run_id}",
        )
    own, best = model.state_dict(), state["best"]
    differences = [f"{name} is not in it" for name in own if name not in best]
    differences += [f"{name} is only in it" for name in best if name not in own]
    differences += [
        f"{name} is {_shape(best[name])}, not {_shape(own[name])}"
        for name in own
        if name in best and _shape(best[name]) != _shape(own[name])
    ]
    if differences:
        more = f"; and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
        raise CheckpointError(
            "The run that training starts from must have the same model",
            value=f"{folder.run_id}: {'; '.join(differences[:MAX_NAMED])}{more}",
            remedy="Choose a run of the same model, size, features and data set",
        )
    model.load_state_dict(best)


def _shape(value: Any) -> str:
    return " × ".join(map(str, value.shape)) or "one number" if isinstance(value, Tensor) else type(value).__name__
