"""Immutable JSON records: a frozen dataclass becomes a file that nobody rewrites, and a file becomes a record that is
checked against the dataclass, or is set aside with the reason. What the records mean is their callers' subject.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from can_train.errors import StateError
from can_train.io.atomic import json_text, write_new_atomic

# Version of the files' shape; raised when a field changes its meaning, not when one with a default is added.
SCHEMA: Final = 1

DOCUMENT_SUFFIX: Final = ".json"

# Larger whole numbers overflow the arithmetic of floats and numpy.
# A number of bytes, samples or events.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

# Dates at the ends of the calendar overflow when their time zone is changed.
_FIRST_YEAR: Final = 1970
_LAST_YEAR: Final = 9000

# Nested levels of a record: far above what settings need, far below what Python's recursion allows.
_MOST_DEPTH: Final = 50

# Bytes read at a time: most records arrive whole with one request.
_READ_BYTES: Final = 2**16


@dataclass(frozen=True)
class SetAside:
    """A file that could not be read as a record. It stays where it is."""

    path: Path
    reason: str

    @property
    def shown(self) -> str:
        """The path as printable text; foreign file names may hold any bytes."""
        return os.fsencode(self.path).decode(errors="replace")


def utc_now() -> str:
    """Returns the current time as records write it: ISO 8601 in UTC, to the microsecond."""
    return utc_text(datetime.now(UTC))


def utc_text(time: datetime) -> str:
    """Returns a time as records write it."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")


def time_stamp(time: str) -> str:
    """Returns the digits of a time, which begin a file's name: names then sort by time."""
    return re.sub(r"\D", "", time)[:20]


def check_time(name: str, text: str) -> None:
    """Checks the text of a time.

    Raises:
        ValueError: It is not ISO 8601, has no time zone, or is too early or too late to calculate with.
    """
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{name} has no time zone")
    if not _FIRST_YEAR <= time.year <= _LAST_YEAR:
        raise ValueError(f"{name} {text} is not between {_FIRST_YEAR} and {_LAST_YEAR}")


def write_document(path: Path, record: Any) -> None:
    """Writes a dataclass as a new file. Once this returns, a crash no longer loses it.

    Raises:
        StateError: The file cannot be written, or something has its name. No reason to stop a training.
    """
    try:
        # A record that would be set aside on reading is refused here, where its writer can still be told.
        data = json_text({"schema": SCHEMA, **asdict(record)}).encode()
        parse_document(data, type(record))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new_atomic(path, data)
    except FileExistsError as error:
        raise unusable("written", path, FileExistsError("a file of this name exists, and stays")) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise unusable("written", path, error) from error


def list_names(folder: Path) -> list[str]:
    """Returns the sorted names in a folder; none where it does not exist.

    Raises:
        StateError: It cannot be listed.
    """
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - ten thousand paths cost more than their content
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unusable("read", folder, error) from error


_Record = TypeVar("_Record")


def read_documents(
    folder: Path, names: Iterable[str], kind: type[_Record], set_aside: list[SetAside], *, most_bytes: int
) -> list[_Record]:
    """Reads records of one dataclass.

    Args:
        folder: Folder of the files.
        names: Names of the files.
        kind: The dataclass.
        set_aside: Files that are no such records are appended to it.
        most_bytes: Largest file that is taken for a record.
    """
    records = []
    for name in names:
        path = f"{folder}{os.sep}{name}"
        try:
            records.append(parse_document(_read_bytes(path, most_bytes), kind))
        except (OSError, ValueError, RecursionError) as error:
            set_aside.append(SetAside(Path(path), str(error)))
    return records


def unusable(verb: str, path: Path, error: Exception) -> StateError:
    """Makes the error for a state folder that cannot be read or written."""
    return StateError(
        f"The state folder cannot be {verb}",
        value=f"{os.fsencode(path).decode(errors='replace')}: {error}",
        remedy="Choose another state folder with --state-dir, or make this one readable and writable",
    )


def _read_bytes(path: str, most_bytes: int) -> bytes:
    # Without O_NONBLOCK, a pipe of such a name would block its reader for ever.
    with open(path, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        data = file.read(_READ_BYTES) or b""
        if len(data) == _READ_BYTES:
            if os.fstat(file.fileno()).st_size > most_bytes:
                raise ValueError(f"larger than {most_bytes >> 20} MiB, so not written by can-train")
            data += file.read()
    return data


class _Header(msgspec.Struct):
    schema: Annotated[int, msgspec.Meta(ge=1)]


def parse_document(data: bytes, kind: type[_Record]) -> _Record:
    """Makes a record from a file's content. Unknown fields are ignored: a later version may add some.

    Raises:
        ValueError: The content is not JSON, not such a record, or in a shape that only a newer can-train knows.
        RecursionError: It is nested thousands of levels deep.
    """
    if not data:
        raise ValueError("empty")
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
    except msgspec.ValidationError as error:
        raise ValueError("not a record of can-train") from error
    if schema > SCHEMA:
        raise ValueError(f"written by a newer can-train (schema {schema}, this one knows {SCHEMA})")
    # Counting first is cheap, and few records nest at all.
    if data.count(b"{") + data.count(b"[") > _MOST_DEPTH:
        _check_depth(msgspec.json.decode(data), _MOST_DEPTH)
    return msgspec.json.decode(data, type=kind)


def _check_depth(value: Any, levels: int) -> None:
    # Printing and copying recurse into values; a file must not be able to make them fail.
    if levels == 0:
        raise ValueError(f"nested more than {_MOST_DEPTH} levels deep")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, levels - 1)
