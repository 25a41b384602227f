"""Settings of a finished run that say how a log of its recorder is read, for other logs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from can_train_tasks.can.data.log_text import LogText
from can_train_tasks.can.data.reading import ATTACK_WORDS, LogReader
from can_train_tasks.can.data.recordings import recording_format
from can_train_tasks.can.evaluation.live_format import choose, with_columns_of
from can_train_tasks.can.settings import CanDatasetSettings

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


def _columns(path: Path, wanted: CanDatasetSettings) -> str:
    if recording_format(path):
        return _TOLD
    fits = with_columns_of(LogText(path).first_lines, wanted).columns == wanted.columns
    return "" if fits else f"the header of {path.name} does not name them"


def _time_unit(path: Path, wanted: CanDatasetSettings) -> str:
    if recording_format(path):
        return _TOLD
    choice = choose(LogText(path).first_lines.to_list(), wanted)
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
