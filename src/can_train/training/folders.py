"""Where a run's inputs and caches are: the folders that settings, environment or defaults name."""

import os
from pathlib import Path

from can_train.config.resolved import PathSettings
from can_train.state.folders import state_folder


def data_root(paths: PathSettings) -> Path:
    """Returns the folder of published data sets: as set, else $CAN_TRAIN_DATA, else ./data."""
    return Path(paths.data_root or os.environ.get("CAN_TRAIN_DATA") or "data")


def state_dir(paths: PathSettings) -> Path:
    """Returns the folder of everything can-train keeps between runs."""
    return state_folder(Path(paths.state_dir) if paths.state_dir else None)


def cache_folder(paths: PathSettings) -> Path:
    """Returns the folder of prepared data, which may be deleted at any time."""
    return state_dir(paths) / "cache"
