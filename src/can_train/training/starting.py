"""Weights of another run, as those that a training starts from."""

from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from can_train.errors import CheckpointError
from can_train.reporter import SilentReporter
from can_train.training.checkpoints import Checkpoints
from can_train.training.run_folder import RunFolder

_NAMED: Final = 5
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
        more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        raise CheckpointError(
            "The run that training starts from must have the same model",
            value=f"{folder.run_id}: {'; '.join(differences[:_NAMED])}{more}",
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
