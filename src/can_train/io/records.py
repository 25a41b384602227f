"""Immutable JSON documents: how a record becomes a file that nobody rewrites, and how any file at all becomes a record
or a reason why it is none. What the records are, others say.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Final, TypeVar, cast, get_args, get_origin

from can_train.errors import StateError
from can_train.io.atomic import json_text, write_new_atomic

SCHEMA: Final = 1
"""Version of the files' shape; raised when a field changes its meaning, not when one with a default is added."""


DOCUMENT_SUFFIX: Final = ".json"


_MOST_COUNT: Final = 2**63 - 1
"""Largest count or size that is believed; larger whole numbers break arithmetic with fractions."""


_YEARS: Final = (1970, 9000)
"""First and last year of a time that is believed; dates at the ends of the calendar cannot change their time zone."""


_MOST_DEPTH: Final = 50
"""Nested levels of a document; far from what recursion can do with it, far above what settings need."""


_READ_BYTES: Final = 2**16
"""Read at a time: most documents come whole with one request."""


@dataclass(frozen=True)
class SetAside:
    """A file that could not be read as a record. It stays where it is."""

    path: Path
    reason: str

    @property
    def shown(self) -> str:
        """The path as text that can be printed, whatever bytes a foreign file has in its name."""
        return os.fsencode(self.path).decode(errors="replace")


def utc_now() -> str:
    """The time, as the files have it: ISO 8601 in UTC, to the microsecond."""
    return utc_text(datetime.now(UTC))


def utc_text(time: datetime) -> str:
    """A time as the files have it."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")


def time_stamp(time: str) -> str:
    """The digits of a time, for the name of a file: names are then in the order of times."""
    return re.sub(r"\D", "", time)[:20]


def check_time(name: str, text: str) -> None:
    """Checks a time.

    Raises:
        ValueError: It is not ISO 8601, names no time zone, or lies outside any run's life.
    """
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{name} must name its time zone")
    if not _YEARS[0] <= time.year <= _YEARS[1]:
        raise ValueError(f"{name} {text} is no time of a run")


def check_counts(**counts: int | None) -> None:
    """Checks numbers of bytes, samples or events; None is one that was not measured.

    Raises:
        ValueError: One is negative, or too large to be one.
    """
    for name, count in counts.items():
        if count is not None and not 0 <= count <= _MOST_COUNT:
            raise ValueError(f"{name} {count!s:.20} is no count")


def write_document(path: Path, record: Any) -> None:
    """Writes a dataclass as a document; once this returns, a crash no longer loses it.

    Raises:
        StateError: The file cannot be written, or something has its name. No reason to stop a training.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new_atomic(path, json_text({"schema": SCHEMA, **asdict(record)}).encode())
    except FileExistsError as error:
        raise unusable("written", path, FileExistsError("a file of this name exists, and stays")) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise unusable("written", path, error) from error


def list_names(folder: Path) -> list[str]:
    """Lists a folder in the order of names; one that does not exist is empty.

    Raises:
        StateError: It cannot be listed.
    """
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - ten thousand paths cost more than their content
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unusable("read", folder, error) from error


_Read = TypeVar("_Read")


def read_documents(
    folder: Path, names: Iterable[str], kind: type[_Read], set_aside: list[SetAside], *, most_bytes: int
) -> list[_Read]:
    """Reads documents of one kind.

    Args:
        folder: Where they are.
        names: Their names.
        kind: The dataclass they become.
        set_aside: Gets those that cannot be read.
        most_bytes: Largest file that is taken for one.
    """
    records = []
    for name in names:
        path = f"{folder}{os.sep}{name}"
        try:
            records.append(_parse(_content(path, most_bytes), kind))
        except (OSError, ValueError, ArithmeticError, RecursionError) as error:
            set_aside.append(SetAside(Path(path), str(error)))
    return records


def unusable(verb: str, path: Path, error: Exception) -> StateError:
    """Makes the error for a state folder that cannot be read or written."""
    remedy = "Choose another state folder with --state-dir, or mend this one"
    shown = os.fsencode(path).decode(errors="replace")
    return StateError(f"The state folder cannot be {verb}", value=f"{shown}: {error}", remedy=remedy)


def _content(path: str, most_bytes: int) -> bytes:
    # Unblocked: a pipe that somebody gave such a name would keep its reader waiting for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _READ_BYTES)
        if len(data) == _READ_BYTES:
            if os.fstat(descriptor).st_size > most_bytes:
                raise ValueError(f"larger than {most_bytes >> 20} MiB, so not of can-train")
            parts = [data]
            while parts[-1]:
                parts.append(os.read(descriptor, _READ_BYTES))
            data = b"".join(parts)
    finally:
        os.close(descriptor)
    return data


def _parse(data: bytes, kind: type[_Read]) -> _Read:
    """Turns a file's content into a record.

    Raises:
        ValueError: It is none, or one of a shape that a newer can-train wrote.
    """
    if not data:
        raise ValueError("empty")
    values = json.loads(data.decode())
    if not isinstance(values, dict) or type(values.get("schema")) is not int or values["schema"] < 1:
        raise ValueError("not a record of can-train")
    if values["schema"] > SCHEMA:
        raise ValueError(f"written by a newer can-train (schema {values['schema']}, this one knows {SCHEMA})")
    if data.count(b"{") + data.count(b"[") > _MOST_DEPTH:
        check_depth(values)
    if b"\\u" in data:
        # Half of a pair of escapes is text to JSON and cannot be printed or written again.
        json.dumps(values, ensure_ascii=False).encode()
    return record_from(kind, values)


def check_depth(value: Any) -> None:
    """Checks that a value does not nest too deeply for what walks through it.

    Raises:
        ValueError: It does.
    """
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(f"nested more than {_MOST_DEPTH} levels deep")


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def record_from(kind: type[_Read], values: Mapping[str, Any]) -> _Read:
    """Makes a record of plain values; values that it has no field for come from a later version and are passed over.

    Raises:
        ValueError: One is missing, or not what it should be.
    """
    arguments: dict[str, Any] = {}
    for name, exact, expected, required in _expected(cast("Any", kind)):
        if name in values:
            value = values[name]
            # Most are what they should be: thousands of files are read at a time.
            arguments[name] = value if type(value) in exact else _converted(name, value, expected)
        elif required:
            raise ValueError(f"{name} is missing")
    return kind(**arguments)


@cache
def _expected(kind: type[Any]) -> tuple[tuple[str, frozenset[type], Any, bool], ...]:
    """Each field's name, the types of plain values that it has, its own type, and whether it must be there."""
    return tuple(
        (item.name, _plain_types(item.type), item.type, item.default is MISSING and item.default_factory is MISSING)
        for item in fields(kind)
    )


def _plain_types(expected: Any) -> frozenset[type]:
    members = get_args(expected) if isinstance(expected, UnionType) else (expected,)
    return frozenset(get_origin(member) or member for member in members)


def _converted(name: str, value: Any, expected: Any) -> Any:
    if isinstance(expected, type) and hasattr(expected, "__dataclass_fields__") and isinstance(value, dict):
        return record_from(expected, value)
    if float in _plain_types(expected) and type(value) is int:
        return float(value)
    raise ValueError(f"{name} is {value!r:.40}")
