"""Where the state folder is: what can-train remembers from run to run, shared by all runs of a user."""

import os
from collections.abc import Mapping
from pathlib import Path

from can_train.errors import StateError


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


def is_file(path: Path) -> bool:
    """Tells whether a file is there for us: unlike `Path.is_file`, also where a folder above it cannot be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Tells the same of a folder."""
    try:
        return path.is_dir()
    except OSError:
        return False
