"""Which windows of which logs a finished model is asked to judge: its run's own test windows, or everything in other
logs; and whether it has seen those logs in training.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from can_train.config.judged import JudgedData
from can_train.errors import CanTrainError, ConfigError
from can_train.reporter import Reporter
from can_train.tasks.can.dataset import CanData, prepare_judged
from can_train.tasks.can.duplicates import hash_logs
from can_train.tasks.can.flat import SourceFile
from can_train.tasks.can.layout import TEST, LogFile, find_judged_logs, find_logs
from can_train.tasks.can.settings import CanDatasetSettings
from can_train.tasks.can.synthetic.writing import is_synthetic, synthetic_folder_name
from can_train.tasks.can.task import load_data, located

_OF_THE_MODEL: Final = ("window", "identity")
"""Settings that a trained model is bound to."""

_OF_THE_SPLIT: Final = ("name", "synthetic", "stride", "validation_share", "test_share")
"""Settings that decide which windows of its own data were trained on."""

_MAX_NAMED_LOGS: Final = 3
"""Logs that a notice names before it stops."""


def read_own(trained: CanDatasetSettings, asked: JudgedData) -> CanData:
    """Prepares data as they were for training."""
    return load_data(trained, asked.data_root, asked.cache, asked.reporter)


def read_asked(trained: CanDatasetSettings, asked: JudgedData) -> tuple[CanData, bool]:
    """Prepares the windows that a model is asked to judge.

    Args:
        trained: The data that it was trained on.
        asked: Those that it is asked about.

    Returns:
        The windows, and whether they are split as they were for training, so that none of those judged was trained on.

    Raises:
        ConfigError: The model is bound to other settings.
        DataError: A log cannot be read, or is too short.
    """
    own = asked.own or _same_logs(trained, asked.dataset)
    _check_kept(trained, asked.dataset, (*_OF_THE_MODEL, *(_OF_THE_SPLIT if own else ())))
    if own:
        return read_own(asked.dataset, asked), True
    logs = find_judged_logs(located(asked.dataset, asked.cache, asked.reporter), asked.data_root)
    data = prepare_judged(asked.dataset, logs, asked.cache, asked.reporter)
    _tell_of_training(_training_logs(trained, asked), data.flat.sources, asked.reporter)
    return data, False


def _same_logs(trained: CanDatasetSettings, asked: CanDatasetSettings) -> bool:
    if trained.path and asked.path:
        return Path(trained.path).expanduser().resolve() == Path(asked.path).expanduser().resolve()
    return (trained.path, trained.name, trained.synthetic) == (asked.path, asked.name, asked.synthetic)


def _check_kept(trained: CanDatasetSettings, asked: CanDatasetSettings, names: Sequence[str]) -> None:
    for name in names:
        before, now = getattr(trained, name), getattr(asked, name)
        if before != now:
            why = "the model is bound to it" if name in _OF_THE_MODEL else "it tells what the run was trained on"
            raise ConfigError(f"dataset.{name} is the run's own, since {why}", value=f"{now}; the run has {before}",
                              remedy="Leave it out; --dataset names other data")  # fmt: skip


def _tell_of_training(logs: Sequence[LogFile], sources: Sequence[SourceFile], reporter: Reporter) -> None:
    """Says which of the judged logs were trained on, by their content."""
    seen = _hashes(logs, sources, reporter)
    known = [source.path for source in sources if source.sha256 in seen]
    if known:
        named = ", ".join(known[:_MAX_NAMED_LOGS]) + (", …" if len(known) > _MAX_NAMED_LOGS else "")
        reporter.notice(f"The run was trained on {len(known)} of these {len(sources)} logs, which flatters it: {named}")


def _training_logs(trained: CanDatasetSettings, asked: JudgedData) -> list[LogFile]:
    """Finds what a run was trained on; nothing where that is no longer there."""
    folder = asked.cache / synthetic_folder_name(trained.synthetic)
    here = replace(trained, path=str(folder)) if is_synthetic(trained) else trained
    try:
        return [log for log in find_logs(here, asked.data_root) if log.role != TEST]
    except CanTrainError:
        return []


def _hashes(logs: Sequence[LogFile], sources: Sequence[SourceFile], reporter: Reporter) -> set[str]:
    """Hashes those of some logs that are as long as one of the sources: hours of driving take long to read."""
    try:
        sizes = {Path(source.path).stat().st_size for source in sources}
        alike = [log for log in logs if log.path.stat().st_size in sizes]
        return {hashed.sha256 for hashed in hash_logs(alike, reporter)} if alike else set()
    except (CanTrainError, OSError):
        return set()
