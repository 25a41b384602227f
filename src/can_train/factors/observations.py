"""The records of a state folder, as immutable JSON files: the measurements of an attempt of a run (`Started` when it
begins, `Observation` when it ends), and a person's decisions about factors (`Event`). Nobody rewrites them, so nothing
is locked. `can_train.factors.summary` computes the next run's factor from them.
"""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from msgspec import Meta

from can_train.errors import StateError
from can_train.factors.policies import MOST_SHARE
from can_train.fit.factor_rule import RememberedLimits
from can_train.fit.step_time import TimedSize
from can_train.io import records
from can_train.io.index import INDEX_FROM, Index, Kind, digest, index_folder, read_folder
from can_train.io.records import DOCUMENT_SUFFIX, AttemptStart, Count, SetAside, check_time
from can_train.memory.allocator_settings import settings_expand
from can_train.memory.simulated.allocator import LARGE_PAGE_BYTES

_OBSERVATIONS: Final = "observations"
_EVENTS: Final = "events"
_STARTED_SUFFIX: Final = f".started{DOCUMENT_SUFFIX}"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")  # characters of a run's id that a portable file name may not have
# Larger files are not read. An observation has a few thousand bytes; an import has the runs of its file.
_MOST_OBSERVATION_BYTES: Final = 2**20
_MOST_EVENT_BYTES: Final = 2**26
# Share of the capacity that may be missing although no other process runs: libraries load kernels outside the allocator
# when they are first used.
_FOREIGN_SHARE: Final = 0.01
ALLOCATOR: Final = "allocator"  # the allocator's settings in a fingerprint
ANY_DEVICE: Final = ""  # stands for every kind of device that has no entry of its own
Outcome = Literal["ok", "rescued", "oom", "interrupted", "error"]
Factor = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=MOST_SHARE)]  # of the tuned limit


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of an attempt."""

    key: str  # kind of device, one name for all cards alike: v100-16gb
    name: str  # the driver's name for it
    total_bytes: int
    driver: str = ""  # version


@dataclass(frozen=True, kw_only=True)
class Started(AttemptStart):
    """An attempt that began. Without an observation of it, it still runs, or was killed before it could write one."""

    run_id: str
    key: str  # configuration key
    device: Device
    # Narrower than the base class: these come from files.
    attempt: Count
    rank: Count = 0
    pid: Count = 0

    def __post_init__(self) -> None:
        check_time("start_time", self.start_time)

    @property
    def started(self) -> datetime:
        """When the attempt began."""
        return datetime.fromisoformat(self.start_time)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An attempt that ended. Costs are in bytes, shares of the capacity or of the tuned limit have no unit."""

    run_id: str
    attempt: Count  # 1 for the first attempt of the run
    key: str  # configuration key
    device: Device
    start_time: str  # ISO 8601 with a time zone (`next_time`)
    end_time: str
    outcome: Outcome
    rank: Count = 0  # which of the run's processes; each has a device of its own
    size: str = ""  # the model's size in the key; empty where it has only one
    factor: Factor  # safety factor in force
    factor_reason: str
    capacity_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    peak_allocated_bytes: Count | None  # None where the attempt ended before anything was measured
    peak_reserved_bytes: Count | None = None  # None where nothing is reserved (the CPU)
    predicted_peak_bytes: Count | None = None  # of the plan
    predicted_base_bytes: int | None = None  # the part of it for weights, gradients and optimizer state
    # Predicted peak of a micro-batch at the tuned limit; None where the search stopped before memory ended it.
    predicted_full_bytes: int | None = None
    tuned_limit: Count | None  # largest cost that fits; None without a search
    safe_limit: Count | None  # largest cost that the plan allowed; None without a search
    used: Share | None  # cost of the largest micro-batch that was run ÷ tuned limit; None without a search
    logical_batch: Count  # samples of one optimizer step
    largest_micro_batch: Count  # samples
    binding_limit: str  # the limit that decided the logical batch
    # limits that the search found, by the names of the phases; empty without a search, or where it ran out of time
    limits: dict[str, RememberedLimits] = field(default_factory=dict)
    # times of micro-batches by the names of the phases, each attempt's own size first; empty where none was tried
    times: dict[str, list[TimedSize]] = field(default_factory=dict)
    oom_used: Share | None = None  # cost of the smallest micro-batch that ran out of memory ÷ tuned limit
    # The largest micro-batch that ran after the last out-of-memory, and the peak since then; None where none ran.
    used_after_rescue: Share | None = None
    peak_bytes_after_rescue: Count | None = None
    oom_elsewhere: bool = False  # whether the out-of-memory of an outcome "oom" was outside of a plan's micro-batches
    leaked_bytes: Count = 0  # memory that something held from step to step, more with each, and no plan counts
    ooms_rescued: Count = 0  # out-of-memories at a cost within the safe limit, after which the micro-batch was split
    allocator_retries: Count = 0  # times that the allocator emptied its cache to serve a request
    foreign_bytes: Count = 0  # most memory that other processes took after the capacity was read
    torch_version: str = ""
    fingerprint: dict[str, Any] = field(default_factory=dict)  # the settings that change memory
    policy: dict[str, Any] = field(default_factory=dict)  # name and options of the policy in the run's settings

    def __post_init__(self) -> None:
        check_time("start_time", self.start_time)
        check_time("end_time", self.end_time)

    @cached_property
    def started(self) -> datetime:
        """When the attempt began."""
        return datetime.fromisoformat(self.start_time)

    @cached_property
    def ended(self) -> datetime:
        """When the attempt ended; never before it began, though the clock may have been set back in between."""
        return max(datetime.fromisoformat(self.end_time), self.started)

    @property
    def peak(self) -> float | None:
        """Peak memory ÷ capacity; None where nothing was measured."""
        return None if self.peak_allocated_bytes is None else self.peak_allocated_bytes / self.capacity_bytes

    @property
    def reserved(self) -> float | None:
        """Peak of reserved memory ÷ capacity; None where it says nothing of fragmentation.

        Segments that do not expand are cached until memory runs out: before that, allocated ÷ reserved is too low by 5
        to 30 % of the capacity. The page that was begun last is left out: on a device of a few pages it would pass for
        fragmentation.
        """
        expands = settings_expand(str(self.fingerprint.get(ALLOCATOR)))
        reserved_bytes = (self.peak_reserved_bytes or 0) - LARGE_PAGE_BYTES
        shows = expands and reserved_bytes > (self.peak_allocated_bytes or 0)
        return reserved_bytes / self.capacity_bytes if shows else None

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether memory ran out, rescued or not, while no other process held some of it."""
        return (self.outcome == "oom" or self.ooms_rescued > 0) and self.was_alone

    @property
    def was_alone(self) -> bool:
        """Whether no other process held some of the memory when it ran out."""
        return self.foreign_bytes <= _FOREIGN_SHARE * self.capacity_bytes

    @property
    def teaches_out_of_memory(self) -> bool:
        """Whether memory ran out although a search had found that the cost fits. An out-of-memory outside of the
        micro-batches, or beside memory that leaked, shows nothing of their cost.
        """
        is_of_cost = (self.ooms_rescued > 0 or not self.oom_elsewhere) and not self.leaked_bytes
        return self.ran_out_of_memory and self.tuned_limit is not None and is_of_cost


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The entry of an imported file for one configuration on one kind of device."""

    safety_factor: Factor  # of the next run
    initial_factor_reason: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)  # exported again, never learned from
    # Figures of these runs, where the file has them. They follow from the runs, so they are not compared.
    factor_variance: float | None = field(default=None, compare=False)
    converged: bool | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One decision of a person. An older one that arrives later undoes nothing: the time in the file decides."""

    kind: Literal["reset", "pin", "unpin", "import"]
    time: str  # ISO 8601 with a time zone (`next_time`)
    key: str | None = None  # configuration key, with or without its size; None means all of them
    device: str | None = None  # kind of device; None means all of them
    value: float | None = None  # the factor that a pin sets, in (0, 1]
    source: str = ""  # the file of an import
    entries: dict[str, dict[str, Imported]] = field(default_factory=dict)  # of an import, by key and device

    def __post_init__(self) -> None:
        check_time("time", self.time)
        if self.kind == "pin" and not 0 < (self.value or 0) <= 1:
            raise ValueError(f"a pin's value {self.value} is not in (0, 1]")
        if self.kind in ("pin", "unpin") and self.key is None:
            raise ValueError(f"the key of {self.kind} is missing")

    @property
    def moment(self) -> datetime:
        """When the decision was made."""
        return datetime.fromisoformat(self.time)

    def entry_for(self, key: str, device: str, size: str = "") -> Imported | None:
        """Finds an import's entry of the key, or else its entry of the key without the size."""
        for name in (key, without_size(key, size)):
            devices = self.entries.get(name, {})
            if entry := devices.get(device, devices.get(ANY_DEVICE)):
                return entry
        return None


def without_size(key: str, size: str) -> str:
    """Returns a configuration key without the model's size in it; the key itself where it has none.

    >>> without_size("hcrl_ch_gat_teacher_normal", "teacher")
    'hcrl_ch_gat_normal'
    """
    # From the right: a data set may be named like a size, a mode is not.
    before, _, after = key.rpartition(f"_{size}_")
    return f"{before}_{after}" if size and before else key


@dataclass(frozen=True)
class ActiveEvents:
    """The events in force for one configuration on one kind of device."""

    pin: Event | None = None
    cutoff: Event | None = None  # the last reset or import: runs that began before it are not learned from
    imported: Imported | None = None  # the cutoff's entry for the configuration, if it is an import

    @classmethod
    def of(cls, events: Iterable[Event], key: str, device: str, size: str = "") -> Self:
        """Finds the events in force.

        Args:
            events: By their time.
            key: Configuration key.
            device: Kind of device.
            size: The model's size in the key; empty where it has none.
        """
        pin = cutoff = imported = None
        for event in events:
            entry = event.entry_for(key, device, size)
            if event.kind == "import":
                applies = entry is not None
            else:
                applies = event.key in (None, key, without_size(key, size)) and event.device in (None, device)
            if applies and event.kind in ("reset", "import"):
                cutoff, imported = event, entry
            elif applies:
                pin = event if event.kind == "pin" else None
        return cls(pin, cutoff, imported)

    def learn_from(self, run: Observation) -> bool:
        """Tells whether a run is learned from: it began after the last reset or import."""
        return self.cutoff is None or run.started >= self.cutoff.moment


_KIND: Final = Kind(Observation, group=lambda run: run.key, latest=lambda run: run.ended,
                    superseded=_STARTED_SUFFIX, suffix=DOCUMENT_SUFFIX)  # fmt: skip


@dataclass(frozen=True)
class Records:
    """All records in a state folder: attempts by the time they began, events by the time they were made."""

    unfinished: list[Started]  # without an observation
    events: list[Event]
    set_aside: list[SetAside]  # files that could not be read
    _index: Index[Observation]
    _not_indexed: dict[str, Observation]  # by the names of their files

    @cached_property
    def finished(self) -> list[Observation]:
        """All observations. To read a hundred thousand takes seconds; `of_keys` reads fewer."""
        return self._sorted(self._index.records(self._index.groups) | self._not_indexed)

    def of_keys(self, keys: Collection[str]) -> list[Observation]:
        """Returns the observations of some configurations."""
        not_indexed = {name: run for name, run in self._not_indexed.items() if run.key in keys}
        return self._sorted(self._index.records(keys) | not_indexed)

    def _sorted(self, runs: dict[str, Observation]) -> list[Observation]:
        # Runs that began at one moment are sorted by the names of their files.
        return [run for _, run in sorted(runs.items(), key=lambda item: (item[1].started, item[0]))]

    @cached_property
    def keys(self) -> dict[str, int]:
        """The keys of the configurations with observations, each with a digest of their files' names."""
        digests = defaultdict(int, self._index.groups)
        for name, run in self._not_indexed.items():
            digests[run.key] ^= digest([name])
        return dict(digests)

    @property
    def latest(self) -> datetime | None:
        """The latest moment in any record; None without records."""
        times = [run.ended for run in self._not_indexed.values()] + [started.started for started in self.unfinished]
        times += [event.moment for event in self.events] + [time for time in (self._index.latest,) if time]
        return max(times, default=None)


def read_records(state: Path, *, index_from: int = INDEX_FROM) -> Records:
    """Reads a state folder, which need not exist. Writes nothing but an index, where the folder has become large.

    Args:
        state: The folder.
        index_from: Least number of observations outside the index that are added to it.

    Raises:
        StateError: The folder cannot be listed.
    """
    folder, events = state / _OBSERVATIONS, state / _EVENTS
    index, names = read_folder(folder, index_folder(state) / _OBSERVATIONS, _KIND)
    names = [name for name in names if name.endswith(DOCUMENT_SUFFIX)]
    finished = [name for name in names if not name.endswith(_STARTED_SUFFIX)]
    ended = {name.removesuffix(DOCUMENT_SUFFIX) + _STARTED_SUFFIX for name in finished}
    unfinished = [name for name in names if name.endswith(_STARTED_SUFFIX) and name not in ended]
    decided = [name for name in records.list_names(events) if name.endswith(DOCUMENT_SUFFIX)]
    aside: list[SetAside] = []
    runs = records.read_documents(folder, finished, Observation, aside, most_bytes=_MOST_OBSERVATION_BYTES)
    doubtful = {file.path.name for file in aside}
    running = records.read_documents(folder, unfinished, Started, aside, most_bytes=_MOST_OBSERVATION_BYTES)
    decisions = records.read_documents(events, decided, Event, aside, most_bytes=_MOST_EVENT_BYTES)
    certain = {name: run for name, run in runs.items() if name not in doubtful}
    if index.is_worth_extending(len(certain), index_from):
        index.extend(certain)
    return Records(
        # The sorts are stable: records of one moment stay in the order of their files' names.
        unfinished=sorted(running.values(), key=lambda started: started.started),
        events=sorted(decisions.values(), key=lambda event: event.moment),
        set_aside=aside,
        _index=index,
        _not_indexed=runs,
    )


def repeated_starts(state: Path) -> list[Path]:
    """Lists the `Started` records that an observation has replaced: it has all their fields."""
    folder = state / _OBSERVATIONS
    names = set(records.list_names(folder))
    starts = sorted(name for name in names if name.endswith(_STARTED_SUFFIX))
    return [folder / name for name in starts if name.removesuffix(_STARTED_SUFFIX) + DOCUMENT_SUFFIX in names]


def write_record(state: Path, record: Observation | Started | Event) -> Path:
    """Writes a record and returns its file. Once this returns, a crash no longer loses it.

    Raises:
        StateError: The file cannot be written, or exists. No reason to stop a training.
    """
    if isinstance(record, Event):
        name = f"{records.time_stamp(record.time)}-{record.kind}-{os.urandom(4).hex()}{DOCUMENT_SUFFIX}"
        path = state / _EVENTS / name
    else:
        # Unique without a counter or a lock: two attempts alike in all parts are the same process of the same attempt.
        process = f"{record.attempt}.{record.rank}" if record.rank else f"{record.attempt}"
        suffix = _STARTED_SUFFIX if isinstance(record, Started) else DOCUMENT_SUFFIX
        name = f"{records.time_stamp(record.start_time)}-{_UNSAFE.sub('-', record.run_id)[:150]}-{process}{suffix}"
        path = state / _OBSERVATIONS / name
    records.write_document(path, record)
    return path


def next_time(state: Path) -> str:
    """Returns the time for a new record: the clock's, or just after the latest record of the folder."""
    now = datetime.now(UTC)
    # What comes later must not look earlier: a clock that was set back would put an out-of-memory before the runs that
    # led to it, and a reset before what it resets.
    try:
        latest = read_records(state).latest
    except StateError:
        latest = None
    return records.utc_text(now if latest is None else max(now, latest + timedelta(microseconds=1)))
