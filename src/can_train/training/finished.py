"""Reads what a finished run has trained: its settings, its best weights and its result, for runs that build on it and
for those who look at it again.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from can_train.config.compose import from_plain
from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import CheckpointError, ConfigError
from can_train.training.checkpoints import Checkpoints
from can_train.training.run_folder import RunFolder


def load_finished(path: Path) -> FinishedModel:
    """Reads the model that a run has trained.

    Args:
        path: Folder of the run.

    Raises:
        RunError: There is no run, or its files cannot be read.
        CheckpointError: It has not finished, or its weights are not whole.
    """
    folder = RunFolder(path)
    config = folder.config()
    result, state = folder.result(), Checkpoints(folder.checkpoints_path).newest()
    if result is None or state is None:
        raise CheckpointError(
            "Only a finished run has a model",
            value=str(path),
            remedy=f"Finish it first: can-train resume {folder.run_id}",
        )
    weights = state["best"]
    return FinishedModel(
        run_id=folder.run_id, run=from_plain(config), weights=weights, result=result, sha256=_digest(weights)
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


def _digest(weights: Mapping[str, Any]) -> str:
    """Digests weights: names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().view(-1).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
