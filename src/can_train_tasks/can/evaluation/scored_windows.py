"""The windows that a finished run scores, how their logs are read, and the columns of a file of their scores.

Shapes: W windows.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.config.resolved import EvaluationData, FinishedModel
from can_train.errors import ConfigError
from can_train.io.records import expanded
from can_train_tasks.can.data.dataset import (
    CanData,
    load_data,
    prepare,
    simulate_if_synthetic,
    with_notices,
)
from can_train_tasks.can.data.grammar import ATTACK_WORDS
from can_train_tasks.can.data.graphs import FlatGraphs, Floats, Ints
from can_train_tasks.can.data.layout import find_evaluation_logs, unread_notes
from can_train_tasks.can.data.log_text import LogText
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.data.recordings import TableText, recording_format
from can_train_tasks.can.evaluation.live_input import choose, with_columns_of
from can_train_tasks.can.inputs import read_as_trained
from can_train_tasks.can.settings import NOTHING_TESTED, CanDatasetSettings

# Dataset settings that the weights of a model depend on, and dataset settings that decide which windows are tested.
_MODEL_SETTINGS: Final = ("window", "features", "identity")
_SPLIT_SETTINGS: Final = ("name", "synthetic", "stride", "validation_share", "test_share")


def windows_of(
    finished: FinishedModel, request: EvaluationData, *, splits_own: bool = True
) -> tuple[CanData, EvaluationData]:
    """Loads windows, and completes the request as `_judged_data` does; windows of other logs are all test windows, and
    so are windows of the run's logs if they are named and `splits_own` is False.

    Raises:
        ConfigError: The request changes a setting that the model or its split depends on, or asks for the run's test
            windows, and none were kept.
        DataError: A log cannot be read, or is too short.
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
        data = load_data(dataset, request.data_root, request.cache, request.reporter)
        if not data.split.test:
            raise ConfigError(f"{NOTHING_TESTED}, so the run has no windows to judge", value=finished.run_id,
                              remedy="Name another log: --dataset path/to/log")  # fmt: skip
        return data, replace(request, own=True)
    dataset = read_as_trained(dataset, finished.result["judgement"])
    placed = simulate_if_synthetic(dataset, request.cache, request.reporter)
    logs = find_evaluation_logs(placed, request.data_root)
    dataset, notes = as_recorded(trained, dataset, [log.path for log in logs], chosen)
    for note in notes:
        request.reporter.notice(note)
    data = prepare(dataset, logs, request.cache, request.reporter)
    data = with_notices(data, unread_notes(placed, request.data_root), request.reporter)
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


_DEFAULTS: Final = CanDatasetSettings()


def as_recorded(
    trained: CanDatasetSettings, dataset: CanDatasetSettings, paths: Sequence[Path], chosen: Collection[str] = ()
) -> tuple[CanDatasetSettings, list[str]]:
    """Adds a finished run's settings about its recorder to the settings of other logs, where all these logs fit.

    Args:
        trained: Settings of the run.
        dataset: Settings of the other logs; what they set stays.
        paths: The other logs.
        chosen: Names of settings that the command line sets, to the default perhaps.

    Returns:
        The settings; and, for each setting of the run that does not fit, a sentence.
    """
    notes = []
    for name, (misfit, instead) in _MISFITS.items():
        if name in chosen or getattr(dataset, name) != getattr(_DEFAULTS, name):
            continue
        if (value := getattr(trained, name)) == getattr(_DEFAULTS, name):
            continue
        wanted = replace(dataset, **{name: value})
        reason = next(filter(None, (misfit(path, wanted) for path in paths)), "")
        dataset = dataset if reason else wanted
        if reason and reason != _TOLD:
            notes.append(f"The run's dataset.{name} was not used: {reason}; {instead}")
    return dataset, notes


# The log's format tells what the setting would: nobody need know that the setting is not used.
_TOLD: Final = "told"


def _first_lines(path: Path) -> pl.Series | None:
    """Returns the first lines of a log of text or of a table; None where its format has no columns."""
    kind = recording_format(path)
    if kind == "parquet":
        return TableText(path).first_lines
    return None if kind else LogText(path).first_lines


def _columns(path: Path, wanted: CanDatasetSettings) -> str:
    if (lines := _first_lines(path)) is None:
        return _TOLD
    fits = with_columns_of(lines, wanted).columns == wanted.columns
    return "" if fits else f"the header of {path.name} does not name them"


def _time_unit(path: Path, wanted: CanDatasetSettings) -> str:
    lines = _first_lines(path)
    choice = None if lines is None else choose(lines.to_list(), wanted)
    if choice is None or choice.tells_unit():
        return _TOLD
    if choice.may_be_in(wanted.time_unit):
        return ""
    return f"in {wanted.time_unit}, the IDs of {path.name} would repeat as on no bus"


def _channel(path: Path, wanted: CanDatasetSettings) -> str:
    reader = LogReader(path, replace(wanted, channel=""))
    for _ in reader.blocks():
        if wanted.channel in reader.report.channels:
            return ""
    if not reader.report.channels:
        return f"{path.name} names no interface"
    return f"{path.name} has no interface {wanted.channel}"


def _benign_values(path: Path, wanted: CanDatasetSettings) -> str:
    # A run whose benign value is a word for attacks elsewhere tells them by its own values alone.
    if ATTACK_WORDS & {value.casefold() for value in wanted.benign_values} or _has_benign(path, wanted):
        return ""
    usual = replace(wanted, benign_values=_DEFAULTS.benign_values)
    return f"{path.name} has none of them among its labels" if _has_benign(path, usual) else ""


def _has_benign(path: Path, settings: CanDatasetSettings) -> bool:
    return any((frames.label == 0).any() for frames in LogReader(path, settings).blocks())


# By setting: tells why a log does not fit the setting (empty: it fits); and what is done instead.
_MISFITS: Final[dict[str, tuple[Callable[[Path, CanDatasetSettings], str], str]]] = {
    "columns": (_columns, "the columns are recognised by their names"),
    "time_unit": (_time_unit, "the unit was guessed"),
    "channel": (_channel, "all interfaces were read"),
    "benign_values": (_benign_values, "the usual ones were used"),
}
