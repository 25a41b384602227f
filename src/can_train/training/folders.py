"""Where a run's inputs and caches are: the folders that settings, environment or defaults name."""

import os
from dataclasses import asdict, replace
from pathlib import Path

from can_train.config.resolved import PathSettings, ResolvedRun
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
