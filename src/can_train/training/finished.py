"""Reads what a finished run has trained: its settings, its best weights and its result, for runs that build on it and
for those who look at it again.
"""

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from can_train.config.compose import from_plain
from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import CheckpointError, ConfigError, RunError
from can_train.training.checkpoints import Checkpoints
from can_train.training.moved import found_beside
from can_train.training.run_folder import CONFIG, RunFolder

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
        run=found_beside(from_plain(config), path),
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
