"""What a person decided about factors, as immutable files of their own: a reset, a pin, its removal, an import. Nothing
is ever rewritten or undone by an older event that arrives later; what events mean for factors, the records decide.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, get_args

from can_train.io.records import (
    DOCUMENT_SUFFIX,
    SetAside,
    check_time,
    list_names,
    read_documents,
    record_from,
    time_stamp,
    write_document,
)

ANY_DEVICE: Final = ""
"""Stands for every device that has no entry of its own."""


_FOLDER: Final = "events"


_MOST_BYTES: Final = 2**26
"""Largest file that is taken for an event; an import brings the runs of its file along."""


Kind = Literal["reset", "pin", "unpin", "import"]


_KINDS: Final = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an imported file says of one configuration on one kind of device."""

    safety_factor: float
    """Factor of the next run, in (0, 1]."""
    initial_factor_reason: str = ""
    """Where it came from, in words."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Its runs, as the file had them: kept and exported again, never learned from."""

    def __post_init__(self) -> None:
        if not isinstance(self.safety_factor, int | float) or isinstance(self.safety_factor, bool):
            raise ValueError(f"safety_factor is {self.safety_factor!r:.40}, not a number")
        if not 0 < self.safety_factor <= 1:
            raise ValueError(f"safety_factor {self.safety_factor:g} is not in (0, 1]")
        if not isinstance(self.initial_factor_reason, str):
            raise ValueError(f"initial_factor_reason is {self.initial_factor_reason!r:.40}, not text")
        if not isinstance(self.runs, list) or not all(isinstance(run, dict) for run in self.runs):
            raise ValueError("runs is not a list of objects")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One decision."""

    kind: str
    """A name of `Kind`."""
    time: str
    """When it was made (`next_time`)."""
    key: str | None = None
    """Configuration key; None means all of them."""
    device: str | None = None
    """Kind of device; None means all of them."""
    value: float | None = None
    """The factor that a pin sets, in (0, 1]."""
    source: str = ""
    """The file that an import took."""
    entries: dict[str, Any] = field(default_factory=dict)
    """What it said: `{key: {device or ANY_DEVICE: fields of Imported}}`."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(_KINDS)}")
        check_time("time", self.time)
        if self.kind == "pin" and (self.value is None or not 0 < self.value <= 1):
            raise ValueError(f"a pin's value {self.value} is not in (0, 1]")
        if self.kind in ("pin", "unpin") and self.key is None:
            raise ValueError(f"the key of {self.kind} is missing")
        for devices in self.entries.values():
            if not isinstance(devices, dict) or not all(isinstance(entry, dict) for entry in devices.values()):
                raise ValueError("entries are not {key: {device: {…}}}")
            for entry in devices.values():
                record_from(Imported, entry)

    @property
    def moment(self) -> datetime:
        """When the decision was made."""
        return datetime.fromisoformat(self.time)

    def imported(self, key: str, device: str) -> Imported | None:
        """What an import says of a configuration on a device; None where it says nothing."""
        devices = self.entries.get(key, {})
        entry = devices.get(device, devices.get(ANY_DEVICE))
        return None if entry is None else record_from(Imported, entry)

    def concerns(self, key: str, device: str) -> bool:
        """Whether the decision holds for a configuration on a device."""
        if self.kind == "import":
            return self.imported(key, device) is not None
        return self.key in (None, key) and self.device in (None, device)

    def named(self) -> Iterator[tuple[str, str]]:
        """The configurations and devices that the event alone is enough to know of."""
        if self.kind == "pin" and self.key is not None:
            yield self.key, ANY_DEVICE if self.device is None else self.device
        for key, devices in self.entries.items():
            for device in devices:
                yield key, device


@dataclass(frozen=True)
class EventLog:
    """All events in a state folder.

    Attributes:
        events: By their time; those of one moment by the names of their files.
        set_aside: Files that could not be read.
    """

    events: list[Event]
    set_aside: list[SetAside]


@dataclass(frozen=True)
class Standing:
    """What the events leave in force for one configuration on one device.

    Attributes:
        pin: The pin that holds.
        since: The last reset or import: runs that began before it teach nothing.
    """

    pin: Event | None = None
    since: Event | None = None


def standing(events: Iterable[Event], key: str, device: str) -> Standing:
    """Finds what is in force.

    Args:
        events: By their time.
        key: Configuration key.
        device: Kind of device.
    """
    pin = since = None
    for event in events:
        if not event.concerns(key, device):
            continue
        if event.kind in ("pin", "unpin"):
            pin = event if event.kind == "pin" else None
        else:
            since = event
    return Standing(pin, since)


def write_event(state: Path, event: Event) -> Path:
    """Writes a decision; once this returns, a crash no longer loses it.

    Raises:
        StateError: The file cannot be written.
    """
    stamp = time_stamp(event.time)
    path = state / _FOLDER / f"{stamp}-{event.kind}-{os.urandom(4).hex()}{DOCUMENT_SUFFIX}"
    write_document(path, event)
    return path


def read_events(state: Path) -> EventLog:
    """Reads a state folder's events; one that does not exist is empty. Writes nothing.

    Raises:
        StateError: The folder cannot be listed.
    """
    folder = state / _FOLDER
    names = [name for name in list_names(folder) if name.endswith(DOCUMENT_SUFFIX)]
    set_aside: list[SetAside] = []
    # The sort keeps the order of names among events of one moment.
    events = sorted(read_documents(folder, names, Event, set_aside, most_bytes=_MOST_BYTES), key=lambda e: e.moment)
    return EventLog(events, set_aside)


def entries_of(imported: Mapping[str, Mapping[str, Imported]]) -> dict[str, Any]:
    """Makes the plain values of an import's entries."""
    return {key: {device: vars(entry) for device, entry in devices.items()} for key, devices in imported.items()}
