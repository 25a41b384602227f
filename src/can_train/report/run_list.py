"""The runs that a list shows: a person's conditions, and the facts about runs that they are compared with.

The facts about a run that has ended no longer change. They are remembered in the index, and a list of twenty thousand
runs looks at the dates of files alone.
"""

import math
import operator
import os
import re
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from can_train import __version__
from can_train.config.resolved import config_folder, flat_settings
from can_train.config.settings import canonical_name
from can_train.config.task_settings import key_name, package_folders
from can_train.errors import ConfigError, unknown_name
from can_train.io.index import SETTLED_S, index_folder, recall, remember, without_collections
from can_train.io.records import utc_text
from can_train.io.units import number_or_none
from can_train.report.run_facts import device_of, result_of, seconds_of
from can_train.report.scores import mapping, metric_values
from can_train.runs import run_state
from can_train.runs.registry import Registry, RunLabels
from can_train.runs.run_folder import CONFIG, RESULT
from can_train.runs.run_state import FAILURES, FINISHED, LIVE
from can_train.runs.scheduler import Scheduler
from can_train.runs.status import KnownRun, RunStatus, find_sweep, run_statuses

_BEST_BY: Final = "training.best_by"
_REMEMBERED: Final = "listed"  # name of the file in the index
_SETTLED_S: Final = 3600.0
"""Seconds without a change after which the state of an ended run is remembered: the accounting of a cluster lags, and a
person may put its job back into the queue.
"""
_UNKNOWN: Final = "unknown data set"  # of a run whose configuration cannot be read


def data_set_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the name of the data set that a run was trained on, and its folder; of a set that is known by its name,
    the task, since sets of two tasks may have one name.
    """
    data, task = mapping(config.get("dataset")), key_name(str(config.get("task") or ""))
    # A task without data sets to choose from stands for its own.
    return str(data.get("name") or task or _UNKNOWN), str(data.get("path") or task)


# Conditions


_STATES: Final = {state.replace(" ", "-").lower(): (state,) for state in (*LIVE, *run_state.CAUSES)} | {
    "failed": FAILURES, "live": LIVE, "oom": (run_state.GPU_OOM, run_state.HOST_OOM),
    "ended": run_state.CAUSES, "error": (run_state.FAILED,),
}  # fmt: skip
"""States by the words of `--state`; `failed` is every state without a result, `error` the state for which the training
itself is the cause.
"""
_AGE: Final = re.compile(r"(\d{1,6})\s*(min|h|d|w)")
_AGE_UNITS: Final = {"min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_CONDITION: Final = re.compile(r"\s*([\w.@/-]+?)\s*(<=|>=|!=|==|=|<|>)\s*(.+?)\s*", re.DOTALL)
_HOLDS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
_SHORT: Final = {"model": "model_name", "mode": "mode.name", "dataset": "dataset.name"}


@dataclass(frozen=True)
class Condition:
    """A condition of `--where`.

    Attributes:
        name: A setting, by its dotted name or its last part, or a metric.
        sign: A key of `_HOLDS`.
        value: The value as it was written.
    """

    name: str
    sign: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Reads a condition; nothing in it is evaluated.

        Raises:
            ConfigError: It is none.
        """
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError("--where takes a setting or a metric, a sign and a value", value=repr(text),
                              remedy="Write it as --where 'lr>0.01'; the signs are = != < <= > >=")  # fmt: skip
        condition = cls(*match.groups())
        if condition.sign[0] in "<>" and _number(condition.value) is None:
            raise ConfigError(f"--where compares by {condition.sign} with a number", value=repr(text),
                              remedy=f"Write it as --where '{condition.name}{condition.sign}0.01'")  # fmt: skip
        return condition

    def holds(self, value: Any) -> bool:
        """Returns whether a value meets the condition; a value that is not there meets none."""
        if value is None or value == "":
            return self.sign == "=" and self.value == "none"
        mine, theirs = _number(self.value), _number(value)
        if mine is not None and theirs is not None:
            return _HOLDS[self.sign](theirs, mine)
        return self.sign[0] not in "<>" and _HOLDS[self.sign](_plain(value), _plain(self.value))


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def _plain(value: Any) -> str:
    text = str(value)
    return text.lower() if text in ("True", "False") else text.replace(" ", "")


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """The conditions of a list. An empty one holds for every run."""

    states: tuple[str, ...] = ()
    dataset: str = ""
    since: str = ""  # ISO 8601 in UTC
    sweep: str = ""
    tag: str = ""
    where: tuple[Condition, ...] = ()


def parse_states(text: str) -> tuple[str, ...]:
    """Reads `--state`: words of `_STATES`, separated by commas.

    Raises:
        ConfigError: A word is none of them.
    """
    words = [word.strip().lower().replace(" ", "-") for word in text.split(",")]
    for word in words:
        if word not in _STATES:
            raise unknown_name("state", word, _STATES)
    return tuple(dict.fromkeys(state for word in words for state in _STATES[word]))


def parse_since(text: str, now: datetime | None = None) -> str:
    """Reads `--since`: an age (7d, 12h, 2w) or a date (2026-11-01); returns the time in UTC.

    Raises:
        ConfigError: It is neither.
    """
    now = now or datetime.now(UTC)
    try:
        if match := _AGE.fullmatch(text.strip().lower()):
            return utc_text(now - timedelta(**{_AGE_UNITS[match[2]]: int(match[1])}))
        return utc_text(datetime.fromisoformat(text.strip()).astimezone())
    except (ValueError, OverflowError) as error:
        raise ConfigError("--since takes an age or a date", value=repr(text),
                          remedy="Write it as 7d, 12h, 2w or 2026-11-01") from error  # fmt: skip


# Facts


class RunFigures(msgspec.Struct, array_like=True):
    """What a list can show of a run in addition to its settings and scores; None or empty: unknown."""

    device: str = ""
    seconds: float | None = None
    steps: int | None = None
    epochs: int | None = None
    peak_share: float | None = None
    peak_bytes: float | None = None
    gpus: float = 0.0  # of runs that share a GPU, each has a part
    node: str = ""  # of its last attempt
    why: str = ""
    utilisation: float | None = None  # of the GPU, 0 to 1


_NO_SCORES: Final = msgspec.Raw(msgspec.msgpack.encode({}))
_NO_FIGURES: Final = msgspec.Raw(msgspec.msgpack.encode(RunFigures()))


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """The facts about a run; `identity` changes with the files that they were read from, `folder` with the names in its
    folder: can-train replaces these files, and changes neither in its place.
    """

    identity: int
    folder: int  # 0: it has just changed, and another change might not change its time
    data_set: tuple[str, str]
    groups: list[int]  # its groups of settings, as places in the table of groups
    state: str = ""  # empty: not settled
    ended: int = 0  # identity of the files that tell how a run without a result ended
    unanswered_s: int = 0  # time of a question that SLURM did not answer; 0: it answered
    scores: msgspec.Raw = _NO_SCORES  # `metric_values`
    figures: msgspec.Raw = _NO_FIGURES  # `RunFigures`


class _Table(msgspec.Struct):
    """The settings of many runs. Most runs have nearly the same: each value and each group of values is there once."""

    settings: list[tuple[str, Any]] = []
    groups: list[bytes] = []  # places of the settings of a group, four bytes each

    def of_run(self, groups: Sequence[int]) -> dict[str, Any]:
        """Returns the settings in some groups by their dotted names."""
        return dict(self.settings[place] for group in groups for place in array("I", self.groups[group]))

    def groups_with(self, names: Collection[str], condition: Condition) -> set[int]:
        """Returns the groups in which a setting with one of the names meets a condition."""
        return self.groups_of(
            {place for place, (name, value) in enumerate(self.settings) if name in names and condition.holds(value)}
        )

    def groups_of(self, places: Collection[int]) -> set[int]:
        """Returns the groups that have one of some settings."""
        places = frozenset(places)
        return {each for each, group in enumerate(self.groups) if not places.isdisjoint(array("I", group))}


class _TableWriter:
    """Adds the settings of runs to a table."""

    def __init__(self, table: _Table) -> None:
        self._table = table
        self._settings = {(name, repr(value)): place for place, (name, value) in enumerate(table.settings)}
        self._groups = {group: place for place, group in enumerate(table.groups)}

    def add(self, settings: Mapping[str, Any]) -> list[int]:
        """Adds settings; returns their groups."""
        by_group: dict[str, array[int]] = {}
        for name, value in settings.items():
            by_group.setdefault(name.partition(".")[0], array("I")).append(self._place(name, value))
        return [self._group(places.tobytes()) for places in by_group.values()]

    def _place(self, name: str, value: Any) -> int:
        place = self._settings.setdefault((name, repr(value)), len(self._table.settings))
        if place == len(self._table.settings):
            self._table.settings.append((name, value))
        return place

    def _group(self, places: bytes) -> int:
        group = self._groups.setdefault(places, len(self._table.groups))
        if group == len(self._table.groups):
            self._table.groups.append(places)
        return group


class _Remembered(msgspec.Struct):
    scored_by: str  # version of the code that read the scores
    table: _Table
    runs: dict[str, _Entry]  # by the path of the run's folder


def _some(values: Mapping[str, float | None]) -> bool:
    return any(value is not None for value in values.values())


class RunList:
    """The runs of a list, the newest first, with the facts about them.

    Args:
        runs: All runs, the newest first.
        state: State folder.
        scheduler: The scheduler of their jobs.
    """

    def __init__(self, runs: Sequence[KnownRun], state: Path, scheduler: Scheduler) -> None:
        self.runs = list(runs)
        self.labels: Mapping[str, RunLabels] = Registry(state).labels()
        self._all, self._state, self._scheduler = len(self.runs), state, scheduler
        self._path = index_folder(state) / _REMEMBERED
        self._statuses: dict[str, RunStatus] = {}
        self._entries: dict[str, _Entry] = {}
        self._table = _Table()
        self._is_changed = self._has_states = False

    @without_collections()
    def select(self, chosen: RunFilter) -> "RunList":
        """Keeps the runs that meet the conditions.

        Raises:
            ConfigError: A condition names a data set, setting or metric that no run has.
            RunError: No sweep has the name, or several have it.
        """
        # In the order of their costs. A sweep is found among all runs, whatever else they have to meet.
        if chosen.sweep:
            name = find_sweep(chosen.sweep, (run.record.sweep for run in self.runs))
            self.runs = [run for run in self.runs if run.record.sweep == name]
        if chosen.since:
            since = datetime.fromisoformat(chosen.since)
            self.runs = [run for run in self.runs if datetime.fromisoformat(run.record.time) >= since]
        if chosen.tag:
            self.runs = [run for run in self.runs if chosen.tag in self.labels_of(run).tags]
        self._read()
        if chosen.dataset:
            names = {self._entries[run.path].data_set[0] for run in self.runs}
            if self.runs and chosen.dataset not in names:
                raise unknown_name("data set", chosen.dataset, names)
            self.runs = [run for run in self.runs if self._entries[run.path].data_set[0] == chosen.dataset]
        every = self.runs
        for condition in chosen.where:
            self.runs = self._meeting(condition, every)
        if chosen.states:
            self._settle()
            self.runs = [run for run in self.runs if self._entries[run.path].state in chosen.states]
        return self

    def statuses(self, runs: Sequence[KnownRun]) -> list[RunStatus]:
        """Returns the status of some of the runs."""
        missing = [run for run in runs if run.path not in self._statuses]
        found = run_statuses(missing, Registry(self._state), self._scheduler) if missing else []
        for run, status in zip(missing, found, strict=True):
            self._statuses[run.path] = status
        return [self._statuses[run.path] for run in runs]

    def labels_of(self, run: KnownRun) -> RunLabels:
        """Returns the tags and the note of a run."""
        copied = run.copied
        return self.labels.get(run.run_id) or (
            RunLabels(tags=tuple(copied.tags), note=copied.note) if copied else RunLabels()
        )

    def data_set(self, run: KnownRun) -> tuple[str, str]:
        """Returns the name of the data set of a run, and its folder."""
        return self._entries[run.path].data_set

    def has_finished(self, run: KnownRun) -> bool:
        """Returns whether a run has a result that can be read."""
        return self._entries[run.path].state == FINISHED and self._entries[run.path].figures != _NO_FIGURES

    def state(self, run: KnownRun) -> str:
        """Returns the state of a run."""
        self._settle()
        return self._entries[run.path].state

    def figures(self, run: KnownRun) -> RunFigures:
        """Returns the figures of a run."""
        self._settle()
        return msgspec.msgpack.decode(self._entries[run.path].figures, type=RunFigures)

    def scores(self, run: KnownRun) -> dict[str, dict[str, float]]:
        """Returns the scores of a finished run by metric and test set; empty for every other run."""
        return msgspec.msgpack.decode(self._entries[run.path].scores, type=dict[str, dict[str, float]])

    def settings(self, run: KnownRun) -> dict[str, Any]:
        """Returns the settings of a run by their dotted names."""
        return self._table.of_run(self._entries[run.path].groups)

    # Conditions on settings and scores

    def _meeting(self, condition: Condition, every: Sequence[KnownRun]) -> list[KnownRun]:
        """Returns the runs that meet a condition, whose name some run of `every` must have."""
        names = self.setting_names(condition.name)
        if names:
            groups = self._table.groups_with(names, condition)
            return [run for run in self.runs if not groups.isdisjoint(self._entries[run.path].groups)]
        # A type with one field: the other metrics are not decoded.
        metric: Any = msgspec.defstruct("Metric", [("values", dict[str, float] | None, None)],
                                        rename={"values": condition.name})  # fmt: skip

        def means_of(runs: Sequence[KnownRun]) -> dict[str, float | None]:
            return {run.path: mean(msgspec.msgpack.decode(self._entries[run.path].scores, type=metric).values)
                    for run in runs}  # fmt: skip

        means = means_of(self.runs)
        if every and not _some(means) and not _some(means_of(every)):
            self.runs = list(every)
            raise self.unknown(condition.name)
        return [run for run in self.runs if (value := means[run.path]) is not None and condition.holds(value)]

    def setting_names(self, name: str) -> list[str]:
        """Returns the dotted names of the settings that a name means; none: no run has such a setting.

        Raises:
            ConfigError: It means settings of several groups.
        """
        every = {setting for setting, _ in self._table.settings}
        name = _SHORT.get(name, canonical_name(name))
        if name in every:
            return [name]
        names = sorted(setting for setting in every if setting.endswith(f".{name}"))
        if len(names) > 1:
            raise ConfigError(f"{len(names)} settings have this name", value=repr(name),
                              remedy=f"Give its group, too: {', '.join(names)}")  # fmt: skip
        return names

    def runs_with(self, is_name: Callable[[str], bool], is_value: Callable[[str], bool]) -> list[KnownRun]:
        """Lists the runs that have a setting with a certain name and, as its text, a certain value."""
        places = {place for place, (name, value) in enumerate(self._table.settings)
                  if isinstance(value, str) and is_name(name) and is_value(value)}  # fmt: skip
        groups = self._table.groups_of(places)
        return [run for run in self.runs if not groups.isdisjoint(self._entries[run.path].groups)]

    def unknown(self, name: str, others: Iterable[str] = ()) -> ConfigError:
        """Makes the error for a name that is neither a setting nor a metric of any run, nor one of the `others`."""
        metrics = {metric.rpartition(".")[2] for run in self.runs for metric in self.scores(run)}
        settings = {setting.rpartition(".")[2] for setting, _ in self._table.settings}
        return unknown_name("setting or metric", name, {*metrics, *others, *settings})

    def direction_by_runs(self, runs: Iterable[KnownRun], metric: str) -> str:
        """Returns the direction that runs say in `--best-by` for a metric; empty: none says one, or they differ."""
        names = (str(self.settings(run).get(_BEST_BY, "")).strip().rpartition(":") for run in runs)
        said = {direction for name, _, direction in names if name.rpartition("/")[2] == metric.rpartition(".")[2]}
        return said.pop() if len(said) == 1 and said <= {"max", "min"} else ""

    # Reading and remembering

    def _read(self) -> None:
        """Reads settings and scores; only files that have changed are read again."""
        earlier = recall(self._path, _Remembered) or _Remembered("", _Table(), {})
        code, self._entries, self._table = _scored_by(), earlier.runs, earlier.table
        writer = None
        self._is_changed = earlier.scored_by != code
        for run in self.runs:
            # Identified before they are read: a file written meanwhile is then read again.
            folder, before = _identify_folder(run.path), self._entries.get(run.path)
            is_known = before is not None and folder != 0 and before.folder == folder
            identity = before.identity if before is not None and is_known else _identify(run.path, CONFIG, RESULT)
            if before is None or before.identity != identity:
                writer = writer or _TableWriter(self._table)
                before = _Entry(identity, folder, data_set_of(run.config), writer.add(flat_settings(run.config)))
            elif earlier.scored_by == code or before.state != FINISHED:
                self._is_changed |= before.folder != folder
                before.folder = folder
                continue
            self._entries[run.path] = self._scored(run, before)
            self._is_changed = True
        if len(self.runs) == self._all:
            self._entries = {run.path: self._entries[run.path] for run in self.runs}
        self._remember()

    def _scored(self, run: KnownRun, entry: _Entry) -> _Entry:
        """Adds the scores to the facts about a run that has finished."""
        status = self.statuses([run])[0] if os.path.exists(f"{run.path}{os.sep}{RESULT}") else None  # noqa: PTH110 - of thousands of runs, paths cost more
        if status is None or status.facts.result is None:
            return entry
        scores = msgspec.Raw(msgspec.msgpack.encode(metric_values(status.facts.result)))
        return _with(entry, state=FINISHED, scores=scores, figures=_encoded_figures(status))

    def _settle(self) -> None:
        """Finds out the states of the runs without a result. SLURM is asked once about an ended run, or again
        after an hour where it is silent. The states of a list are found out once.
        """
        if self._has_states:
            return
        self._has_states = True
        unsettled, now_s = [], int(time.time())
        for run in self.runs:
            entry = self._entries[run.path]
            if entry.state == FINISHED or run.path in self._statuses:
                continue
            ended = self._identify_end(run)
            is_fresh = not entry.unanswered_s or now_s - _SETTLED_S < entry.unanswered_s <= now_s
            if not (entry.state and entry.ended == ended and is_fresh):
                unsettled.append((run, ended))
        statuses = self.statuses([run for run, _ in unsettled])
        for (run, ended), status in zip(unsettled, statuses, strict=True):
            entry = _with(self._entries[run.path], state=status.state.state, figures=_encoded_figures(status),
                          ended=ended if self._is_settled(status) else 0,
                          unanswered_s=now_s if status.facts.answer.silent else 0)  # fmt: skip
            self._is_changed |= bool(entry.ended)
            self._entries[run.path] = entry
        self._remember()

    def _identify_end(self, run: KnownRun) -> int:
        return _identify(run.path, "attempts") ^ _identify(str(self._state / "runs"), run.run_id)

    def _is_settled(self, status: RunStatus) -> bool:
        ends = [attempt.end.time for attempt in status.facts.attempts if attempt.end]
        latest = max([status.known.record.time, *(job.time for job in status.facts.jobs), *ends])
        is_old = datetime.fromisoformat(latest).timestamp() < time.time() - _SETTLED_S
        return is_old and status.state.certain and not status.state.live

    def _remember(self) -> None:
        if self._is_changed:
            kept = {path: entry if entry.ended or entry.state == FINISHED else _with(entry, state="")
                    for path, entry in self._entries.items()}  # fmt: skip
            remember(self._path, _Remembered(_scored_by(), self._table, kept))
            self._is_changed = False


def _with(entry: _Entry, **changes: Any) -> _Entry:
    return msgspec.structs.replace(entry, **changes)


def mean(values: Mapping[str, float] | None) -> float | None:
    """Returns the mean of a metric over its test sets; None without a value."""
    return sum(values.values()) / len(values) if values else None


def _encoded_figures(status: RunStatus) -> msgspec.Raw:
    result, facts = result_of(status), status.facts
    ends = [attempt for attempt in facts.attempts if attempt.end]
    figures = RunFigures(
        device=device_of(status), seconds=number_or_none(seconds_of(status)), steps=status.progress.step,
        epochs=status.progress.epoch, peak_share=status.progress.peak_share,
        peak_bytes=number_or_none(result.get("peak_memory_bytes")), gpus=_gpus(status),
        node=(ends[-1].end.host or ends[-1].start.host) if ends and ends[-1].end else "",
        why=status.state.sentence,
        utilisation=number_or_none(result.get("gpu_utilisation")),
    )  # fmt: skip
    return msgspec.Raw(msgspec.msgpack.encode(figures))


def _gpus(status: RunStatus) -> float:
    """Returns the number of GPUs of a run: of its last job as it was asked for, else of its device.

    Runs of one job share its GPU.
    """
    job = status.facts.jobs[-1] if status.facts.jobs else None
    asked = job.resources if job else {}
    nodes = int(number_or_none(asked.get("nodes")) or 1)
    for name in ("gpus-per-node", "gres"):
        if match := re.search(r"(?:^|:)(\d{1,4})$", str(asked.get(name, ""))):
            return nodes * int(match[1]) / max(job.packed_with if job else 1, 1)
    return float(bool(device_of(status)) and not device_of(status).startswith(("cpu", "sim", "auto")))


def _scored_by() -> str:
    # Presets are files that a person edits.
    files = [*(file for folder in package_folders() for file in folder.rglob("*.py")), *config_folder().rglob("*.yaml")]
    return f"{__version__} {max(path.stat().st_mtime_ns for path in files)}"


def _identify_folder(path: str) -> int:
    """Returns a number that changes whenever a file of a folder is made, replaced or removed; 0: it is not certain."""
    try:
        status = os.stat(path)  # noqa: PTH116 - of thousands of runs, paths cost more
    except OSError:
        return 0
    # A folder that another machine changes may have a time ahead of this machine's clock.
    is_settled = status.st_ctime < time.time() - SETTLED_S
    return hash((status.st_ino, status.st_mtime_ns, status.st_ctime_ns)) if is_settled else 0


def _identify(folder: str, *names: str) -> int:
    """Returns a number that changes whenever files of a folder do."""
    numbers = []
    for name in names:
        try:
            status = os.stat(f"{folder}{os.sep}{name}")  # noqa: PTH116 - of thousands of runs, paths cost more
        except OSError:
            numbers += [0]
        else:
            numbers += [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    # The hash of numbers is the same in every process.
    return hash(tuple(numbers))
