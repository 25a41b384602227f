"""The windows that a finished run scores, and the columns of a file of their scores.

Shapes: W windows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.config.resolved import EvaluationData, FinishedModel
from can_train.errors import ConfigError
from can_train.io.records import expanded
from can_train_tasks.can.data.dataset import CanData, load_data, prepare, simulate_if_synthetic
from can_train_tasks.can.data.graphs import FlatGraphs, Floats, Ints
from can_train_tasks.can.data.layout import find_evaluation_logs
from can_train_tasks.can.evaluation.inherited import as_recorded
from can_train_tasks.can.inputs import read_as_trained
from can_train_tasks.can.settings import CanDatasetSettings

# Dataset settings that the weights of a model depend on, and dataset settings that decide which windows are tested.
_MODEL_SETTINGS: Final = ("window", "features", "identity")
_SPLIT_SETTINGS: Final = ("name", "synthetic", "stride", "validation_share", "test_share")


def windows_of(
    finished: FinishedModel, request: EvaluationData, *, splits_own: bool = True
) -> tuple[CanData, EvaluationData]:
    """Loads windows, and completes the request as `_judged_data` does; windows of other logs are all test windows, and
    so are those of the run's logs if they are named and `splits_own` is False.
    """
    trained: CanDatasetSettings = finished.run.dataset
    dataset: CanDatasetSettings = request.dataset
    if trained.path and dataset.path:
        same = expanded(trained.path).resolve() == expanded(dataset.path).resolve()
    else:
        same = (trained.path, trained.name, trained.synthetic) == (dataset.path, dataset.name, dataset.synthetic)
    own_split = request.own or (same and splits_own)
    chosen = ("channel",) if getattr(request.options, "channel", None) is not None else ()
    if own_split and not request.own:
        dataset, _ = as_recorded(trained, dataset, (), chosen)
    for name in (*_MODEL_SETTINGS, *(_SPLIT_SETTINGS if own_split else ())):
        before, now = getattr(trained, name), getattr(dataset, name)
        if before != now:
            why = "the model is bound to it" if name in _MODEL_SETTINGS else "it tells what the run was trained on"
            raise ConfigError(f"dataset.{name} cannot be changed, since {why}", value=f"{now}; the run has {before}",
                              remedy="Leave it out; --dataset names other data")  # fmt: skip
    if own_split:
        return load_data(dataset, request.data_root, request.cache, request.reporter), replace(request, own=True)
    dataset = read_as_trained(dataset, finished.result["judgement"])
    logs = find_evaluation_logs(simulate_if_synthetic(dataset, request.cache, request.reporter), request.data_root)
    dataset, notes = as_recorded(trained, dataset, [log.path for log in logs], chosen)
    for note in notes:
        request.reporter.notice(note)
    data = prepare(dataset, logs, request.cache, request.reporter)
    return data, replace(request, dataset=dataset, own=False)


def log_ranks(flat: FlatGraphs) -> Ints:
    """Returns the rank of each log in the order of the paths."""
    # The second argsort turns the order into ranks.
    return np.argsort(np.argsort(np.array([source.path for source in flat.sources]), kind="stable"))


def window_columns(
    flat: FlatGraphs, rows: Ints, folders: Sequence[str], score: Floats, threshold: float
) -> dict[str, Sequence[Any] | NDArray[Any]]:
    """Returns the columns of a file of scores for windows [W] with their test folders and final scores [W]."""
    source = flat.source[rows]
    return {
        "log": [flat.sources[index].path for index in source],
        "folder": folders,
        "window": rows - np.searchsorted(flat.source, source),
        "first_frame": flat.first_frame[rows],
        "start_time": flat.start_time[rows],
        "end_time": flat.end_time[rows],
        "score": score,
        "flagged": score > threshold,
    }
