"""What a person decided about factors, each decision an immutable file: a reset, a pin, its removal, an import. No
event is rewritten, and an older one that arrives later undoes nothing: the time in the file decides.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from can_train.factors.observations import Factor, without_size
from can_train.io.records import (
    DOCUMENT_SUFFIX,
    SetAside,
    check_time,
    list_names,
    read_documents,
    time_stamp,
    write_document,
)

# Stands for every kind of device that has no entry of its own.
ANY_DEVICE: Final = ""

_FOLDER: Final = "events"

# Largest file that is taken for an event; an import contains the runs of its file.
_MOST_BYTES: Final = 2**26


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an imported file says of one configuration on one kind of device."""

    safety_factor: Factor  # of the next run
    initial_factor_reason: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)  # exported again, never learned from


@dataclass(frozen=True, kw_only=True)
class Event:
    """One decision."""

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
        """Finds an import's entry: the key's own comes before that of the key without its size."""
        for name in (key, without_size(key, size)):
            devices = self.entries.get(name, {})
            entry = devices.get(device, devices.get(ANY_DEVICE))
            if entry is not None:
                return entry
        return None

    def applies_to(self, key: str, device: str, size: str = "") -> bool:
        """Whether the decision holds for a configuration, whose model has a size, on a kind of device."""
        if self.kind == "import":
            return self.entry_for(key, device, size) is not None
        return self.key in (None, key, without_size(key, size)) and self.device in (None, device)

    def named(self) -> Iterator[tuple[str, str]]:
        """Yields the configurations and devices that have a factor by this event alone."""
        if self.kind == "pin" and self.key is not None:
            yield self.key, ANY_DEVICE if self.device is None else self.device
        for key, devices in self.entries.items():
            for device in devices:
                yield key, device


@dataclass(frozen=True)
class EventLog:
    """All events in a state folder, by their time."""

    events: list[Event]
    set_aside: list[SetAside]  # files that could not be read


@dataclass(frozen=True)
class ActiveEvents:
    """The events in force for one configuration on one kind of device."""

    pin: Event | None = None
    cutoff: Event | None = None  # the last reset or import: runs that began before it are not learned from
    imported: Imported | None = None  # what the cutoff says of the configuration, if it is an import


def active_events(events: Iterable[Event], key: str, device: str, size: str = "") -> ActiveEvents:
    """Finds the events in force.

    Args:
        events: By their time.
        key: Configuration key.
        device: Kind of device.
        size: The model's size in the key; empty where it has none.
    """
    pin = cutoff = None
    for event in events:
        if event.applies_to(key, device, size):
            if event.kind in ("reset", "import"):
                cutoff = event
            else:
                pin = event if event.kind == "pin" else None
    return ActiveEvents(pin, cutoff, cutoff.entry_for(key, device, size) if cutoff else None)


def write_event(state: Path, event: Event) -> Path:
    """Records a decision. Once this returns, a crash no longer loses it.

    Raises:
        StateError: The file cannot be written.
    """
    name = f"{time_stamp(event.time)}-{event.kind}-{os.urandom(4).hex()}{DOCUMENT_SUFFIX}"
    write_document(state / _FOLDER / name, event)
    return state / _FOLDER / name


def read_events(state: Path) -> EventLog:
    """Reads a state folder's events; the folder need not exist. Writes nothing.

    Raises:
        StateError: The folder cannot be listed.
    """
    folder = state / _FOLDER
    names = [name for name in list_names(folder) if name.endswith(DOCUMENT_SUFFIX)]
    set_aside: list[SetAside] = []
    events = read_documents(folder, names, Event, set_aside, most_bytes=_MOST_BYTES)
    # The sort is stable: events of one moment stay in the order of their files' names.
    return EventLog(sorted(events, key=lambda event: event.moment), set_aside)
