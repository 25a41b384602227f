"""An index of a folder's immutable files, so that a hundred thousand files need not be read again. The index may be
deleted at any time: files outside the index are read, and a damaged or unwritable index is ignored. A change of a file
after it was indexed is not noticed, because records are immutable.

Not SQLite: for the same records its file is 8 times as large, a look-up takes 1.5 to 2 times as long, a damaged page
gives wrong records without an error, and locks fail on some network file systems. A file that is replaced needs no
lock.
"""

import gc
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, reduce
from operator import xor
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from can_train.io.records import list_names, read_bytes, unusable, utc_text, write_bytes_atomic

INDEX_FROM: Final = 500
"""Least number of files that are worth an index."""

SETTLED_S: Final = 3.0
"""Seconds after which another change of a folder changes its time: some file systems count in steps of 2 s."""

_SHARE: Final = 256  # share of the indexed files that may be missing in the index before it is written again
_LEVEL: Final = 1  # of compression: the records of a folder differ little, so a higher level gains little
_NUMBER_BYTES: Final = 4

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Kind(Generic[_Record]):
    """The records of a folder.

    Attributes:
        type: The dataclass of the records.
        group: Returns the name of a record's group; a reader asks for whole groups.
        latest: Returns the latest moment in a record.
        superseded: Suffix of the files that a record replaces; empty: there are none.
        suffix: Suffix of the records that replace them.
    """

    type: type[_Record]
    group: Callable[[_Record], str]
    latest: Callable[[_Record], datetime]
    superseded: str = ""
    suffix: str = ""


class _Group(msgspec.Struct):
    digest: int = 0  # of the names of its files
    chunks: list[tuple[int, int]] = []  # offset and size of each chunk in the body


class _Header(msgspec.Struct):
    files: int = 0
    sizes: tuple[int, int] = (0, 0)  # bytes of the names and of the body, which follow
    latest: str = ""
    groups: dict[str, _Group] = {}


class _Listing(msgspec.Struct):
    check: int  # checksum of the index
    changed_ns: int  # when the folder was last changed
    names: list[str]  # of files outside the index


def index_folder(state: Path) -> Path:
    """Returns the folder of the indexes of a state folder. It may be deleted at any time."""
    return state / "index"


def digest(names: Iterable[str]) -> int:
    """Computes a digest of names, independent of their order. The digest of a union of disjoint sets is `a ^ b`."""
    return reduce(xor, (zlib.crc32(name) << 32 | zlib.adler32(name) for name in map(os.fsencode, names)), 0)


@dataclass(frozen=True)
class Index(Generic[_Record]):
    """The content of an index.

    Args:
        path: File of the index.
        kind: Kind of the records.
    """

    path: Path
    kind: Kind[_Record]
    check: int = 0  # checksum of the content
    _header: _Header = field(default_factory=_Header)
    _names: bytes = b""
    _body: bytes = b""

    @classmethod
    def load(cls, path: Path, kind: Kind[_Record]) -> "Index[_Record]":
        """Reads an index; a missing or damaged index is empty."""
        # A version with other fields in its records may have left fields out.
        shape = zlib.crc32(msgspec.json.encode(msgspec.json.schema(kind.type)))
        path = path.with_name(f"{path.name}-{shape:08x}")
        data, check = _read(path)
        if not check:
            return cls(path, kind)
        size, rest = int.from_bytes(data[:_NUMBER_BYTES]), data[_NUMBER_BYTES:]
        header = msgspec.msgpack.decode(rest[:size], type=_Header)
        names, body = header.sizes
        return cls(path, kind, check, header, bytes(rest[size : size + names]), bytes(rest[size + names :][:body]))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the indexed files."""
        return frozenset(zlib.decompress(self._names).decode().split("\0")) if self._names else frozenset()

    @property
    def groups(self) -> Mapping[str, int]:
        """Digest of the names of the files, by group."""
        return {name: group.digest for name, group in self._header.groups.items()}

    @property
    def latest(self) -> datetime | None:
        """Latest moment in any record; None without records."""
        return datetime.fromisoformat(self._header.latest) if self._header.latest else None

    def records(self, groups: Iterable[str]) -> dict[str, _Record]:
        """Returns the records of groups, by the names of their files."""
        decoder = msgspec.msgpack.Decoder(dict[str, self.kind.type])  # type: ignore[name-defined]
        records: dict[str, _Record] = {}
        for name in groups:
            for start, size in self._header.groups.get(name, _Group()).chunks:
                records |= decoder.decode(zlib.decompress(self._body[start : start + size]))
        return records

    def is_worth_extending(self, files: int, index_from: int) -> bool:
        """Returns whether a number of files outside the index should be added to it."""
        return files >= max(index_from, self._header.files // _SHARE)

    def extend(self, records: Mapping[str, _Record]) -> None:
        """Writes the index with more records, if its folder is writable."""
        groups, latest, body = dict(self._header.groups), self._header.latest, bytearray(self._body)
        by_group: dict[str, dict[str, msgspec.Raw]] = {}
        for name, record in records.items():
            # A number from elsewhere may be too large, and a name of no encoding.
            with suppress(ValueError, OverflowError):
                name.encode()
                encoded = msgspec.Raw(msgspec.msgpack.encode(record))
                by_group.setdefault(self.kind.group(record), {})[name] = encoded
                # Only of a record in the index: the deletion of another record is not noticed.
                latest = max(latest, utc_text(self.kind.latest(record)))
        for name, added in by_group.items():
            chunk = zlib.compress(msgspec.msgpack.encode(added), _LEVEL)
            group = groups.get(name, _Group())
            chunks = [*group.chunks, (len(body), len(chunk))]
            groups[name] = _Group(digest=group.digest ^ digest(added), chunks=chunks)
            body += chunk
        # Not compressed: the names are half of the content, and needed after each new file.
        every = self.names.union(*by_group.values())
        names = zlib.compress("\0".join(every).encode(), 0)
        header = msgspec.msgpack.encode(_Header(len(every), (len(names), len(body)), latest, groups))
        _write(self.path, b"".join((len(header).to_bytes(_NUMBER_BYTES), header, names, body)))


def read_folder(
    folder: Path, path: Path, kind: Kind[_Record], *, settled_s: float = SETTLED_S
) -> tuple[Index[_Record], list[str]]:
    """Reads the index of a folder, and lists the names of the files outside the index.

    Args:
        folder: The folder, which need not exist.
        path: File of the index; a file next to it remembers the listing.
        kind: Kind of the records.
        settled_s: Seconds without a change after which the listing of a folder is remembered.

    Raises:
        StateError: The folder cannot be listed.
    """
    index = Index.load(path, kind)
    if not index.check:
        return index, list_names(folder)
    started, changed_ns = time.monotonic(), _changed_ns(folder)
    listing_path = index.path.with_name(f"{index.path.name}.listing")
    listing = recall(listing_path, _Listing)
    if listing is not None and (listing.check, listing.changed_ns) == (index.check, changed_ns):
        return index, listing.names
    names = set(list_names(folder))
    if not index.names <= names:
        # Somebody has deleted records.
        return Index(index.path, kind), sorted(names)
    end = len(kind.superseded)
    unindexed = sorted(
        name for name in names - index.names
        if not (end and name.endswith(kind.superseded) and name[:-end] + kind.suffix in index.names)
    )  # fmt: skip
    # By the clock of the file system; 0 if the index cannot be touched.
    server_time = 0.0
    with suppress(OSError):
        os.utime(index.path)
        server_time = index.path.stat().st_mtime
    if server_time - (time.monotonic() - started) - changed_ns / 1e9 > settled_s:
        remember(listing_path, _Listing(index.check, changed_ns, unindexed))
    return index, unindexed


@contextmanager
def without_collections() -> Iterator[None]:
    """Stops the collection of cycles in the block, which would look at tens of thousands of records again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def remember(path: Path, value: object) -> None:
    """Writes a value for `recall`, if the folder is writable."""
    # File names may have no encoding, and numbers from elsewhere may be too large.
    with suppress(ValueError, OverflowError, TypeError):
        _write(path, msgspec.msgpack.encode(value))


def recall(path: Path, kind: type[_Record]) -> _Record | None:
    """Reads a value that `remember` has written; None if it is missing or damaged."""
    with suppress(ValueError):
        return msgspec.msgpack.decode(_read(path)[0], type=kind)
    return None


def _write(path: Path, data: bytes) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, zlib.crc32(data).to_bytes(_NUMBER_BYTES) + data)


def _read(path: Path) -> tuple[memoryview, int]:
    """Reads a file of `_write` and its checksum; empty and 0 if the file is missing or damaged."""
    try:
        data = memoryview(read_bytes(path))
    except OSError:
        data = memoryview(b"")
    check, rest = int.from_bytes(data[:_NUMBER_BYTES]), data[_NUMBER_BYTES:]
    return (rest, check) if zlib.crc32(rest) == check else (memoryview(b""), 0)


def _changed_ns(folder: Path) -> int:
    # The time of the inode: a copy keeps the time of modification. Of the opened folder: a network file system then
    # asks its server, as for a listing.
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unusable("read", folder, error) from error
    try:
        return os.fstat(descriptor).st_ctime_ns
    finally:
        os.close(descriptor)
