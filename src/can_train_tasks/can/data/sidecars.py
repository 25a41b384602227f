"""Labels in a JSON file beside a log: ROAD's `capture_metadata.json` and CAN-MIRGU's `Attacks_metadata.json`.

This module imports quickly: a submission uses it to identify logs.

Shapes: M frames.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Bools, Floats, Frames

# In the log's folder and in its parent folder: CAN-MIRGU has one file for three folders of logs.
_NAMES: Final = "*metadata.json"
_MAX_BYTES: Final = 16 * 2**20  # a larger file is another kind of data
# Larger times are seconds since 1970 (CAN-MIRGU); smaller times are seconds since the log's first frame (ROAD).
_LEAST_EPOCH_S: Final = 1e8
_ANY: Final = "X"  # stands for any digit of an ID or a payload
# `injection_interval`, or several with numbers; also the interval of a suspended or imitated ECU.
_INTERVAL: Final = re.compile(r"(?P<what>injection|suspension|masquerade)_interval(?P<number>_\d+)?")
_KIND: Final = re.compile(r"(?P<what>.*?)(?:_attack)?(?:_\d+)?(?P<masquerade>_masquerade)?")


@dataclass(frozen=True, kw_only=True)
class Injection:
    """An attack's time and, if known, the IDs and the payload digits that were sent."""

    begin_s: float
    end_s: float
    can_ids: frozenset[int]  # empty: any ID
    digits: str  # hexadecimal digits of the payload, `_ANY` for any digit; empty: any payload
    kind: str

    def __str__(self) -> str:
        ids = ", ".join(f"{can_id:03X}" for can_id in sorted(self.can_ids))
        parts = [
            f"{self.begin_s:.15g} to {self.end_s:.15g} s",
            f"ID {ids}" if ids else "",
            self.digits and f"payload {self.digits}",
        ]
        return ", ".join(filter(None, parts))

    def marks(self, frames: Frames, start_s: float) -> Bools:
        """Returns whether each frame [M] belongs to the attack; `start_s` is the time of the log's first frame."""
        begin_s = 0.0 if self.begin_s >= _LEAST_EPOCH_S else start_s
        # Logs hold microseconds.
        elapsed: Floats = (frames.timestamp - begin_s).round(6)
        marked: Bools = (elapsed >= self.begin_s) & (elapsed <= self.end_s)
        if self.can_ids:
            has_id = frames.can_id < 0
            for can_id in self.can_ids:
                has_id |= frames.can_id == can_id
            marked &= has_id
        for position, digit in enumerate(self.digits):
            if digit == _ANY:
                continue
            marked &= frames.length > position // 2
            if marked.any():
                byte = frames.payload[:, position // 2]
                marked &= (byte & 15 if position % 2 else byte >> 4) == int(digit, 16)
        return marked


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The entry of a JSON file about one log."""

    path: Path
    entry: Mapping[str, Any]
    injections: tuple[Injection, ...]
    whole: bool  # whether the entry labels the whole log: it has the times of attacks, or says that there were none

    @property
    def content(self) -> str:
        """The text that decides the labels."""
        return json.dumps(self.entry, sort_keys=True)


def find_sidecar(log: Path) -> Sidecar | None:
    """Returns the entry about a log in a JSON file in its folder or the parent folder; None without an entry."""
    name = re.sub(r"(?i)\.(?:gz|xz|bz2|zst)$", "", log.name).rpartition(".")[0] or log.name
    folder = log.resolve().parent
    for path in (folder / f"{name}.json", *sorted(folder.glob(_NAMES)), *sorted(folder.parent.glob(_NAMES))):
        try:
            status = path.stat()
        except OSError:
            continue
        content = _content(path, status.st_mtime_ns) if status.st_size <= _MAX_BYTES else {}
        entry = content if path.stem == name and any(map(_INTERVAL.fullmatch, content)) else content.get(name)
        if isinstance(entry, dict):
            injections = tuple(_injections(entry, name))
            # ROAD's ambient captures have entries without any of these fields. In the entries of captures that began
            # after the attack on the vehicle, the fields are null.
            # Fields of other names may tell of attacks, too.
            words = f"{name} {' '.join(map(str, entry))}".casefold()
            harmless = not any(word in words for word in ("attack", "interval", "inject"))
            return Sidecar(path=path, entry=entry, injections=injections, whole=bool(injections) or harmless)
    return None


@cache  # a folder of logs has one file for all
def _content(path: Path, modified_ns: int) -> Mapping[str, Any]:  # read again once it was modified
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(re.sub(r",(?=\s*[}\]])", "", text))  # CAN-MIRGU's file has trailing commas
    except (OSError, ValueError, RecursionError):
        return {}  # another kind of file
    return content if isinstance(content, dict) else {}


def _injections(entry: Mapping[str, Any], name: str) -> Iterator[Injection]:
    parts = _KIND.fullmatch(name)
    kind = f"{parts['what']}{parts['masquerade'] or ''}" if parts else name
    for key, value in entry.items():
        if not (match := _INTERVAL.fullmatch(key)):
            continue
        what, number = match["what"], match["number"] or ""

        def field(field_name: str, number: str = number) -> Any:
            return entry.get(f"{field_name}{number}", entry.get(field_name))

        for begin_s, end_s in _intervals(value):
            suspended = what == "suspension"  # the ID's frames are missing in this interval
            yield Injection(
                begin_s=begin_s,
                end_s=end_s,
                can_ids=frozenset() if suspended else frozenset(_can_ids(field(f"{what}_id") or field("injection_id"))),
                digits="" if suspended else _digits(field("injection_data_str")),
                kind=kind,
            )


def _intervals(value: Any) -> Iterator[tuple[float, float]]:
    if isinstance(value, list) and value and isinstance(value[0], list):
        for each in value:
            yield from _intervals(each)
    elif isinstance(value, list) and len(value) == 2 and all(isinstance(each, int | float) for each in value):
        yield float(value[0]), float(value[1])


def _can_ids(value: Any) -> Iterator[int]:
    for text in value if isinstance(value, list) else str(value if value is not None else "").split(","):
        try:
            yield text if isinstance(text, int) else int(str(text), 16)
        except ValueError:
            continue  # `XXX`: any ID


def _digits(value: Any) -> str:
    digits = re.sub(r"[\s_:-]", "", value).upper() if isinstance(value, str) else ""
    return digits if re.fullmatch(f"[0-9A-F{_ANY}]*", digits) else ""
