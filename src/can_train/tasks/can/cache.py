"""Keeps the graphs of a data set on disk: a folder with one .npy file for every array of `FlatGraphs` and a meta.json,
named by its key. It is written block by block, appears under its name only when complete, and is verified byte by byte
before it is mapped into memory. What goes into a key, and rebuilding what is damaged, are the caller's.
"""

import json
import os
import secrets
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from can_train.errors import StateError
from can_train.tasks.can.flat import EDGE_FEATURES, NODE_FEATURES, FlatGraphs, SourceFile
from can_train.tasks.can.graphs import GraphBlock

SCHEMA: Final = 1
"""Belongs in every key. Raise it when the arrays or the meaning of a column change: older caches are then not found."""

_ARRAYS: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "node_ptr": ("int64", ()),
    "edge_ptr": ("int64", ()),
    "node_code": ("int32", ()),
    "node_features": ("float32", (len(NODE_FEATURES),)),
    "edge_index": ("int32", (2,)),  # [E, 2] on disk, so that it can be appended to
    "edge_features": ("float32", (len(EDGE_FEATURES),)),
    "label": ("uint8", ()),
    "source": ("int32", ()),
    "first_frame": ("int64", ()),
    "start_time": ("float64", ()),
    "end_time": ("float64", ()),
    "ids": ("int64", ()),
}
"""Type and shape of one row of every array."""

_META: Final = "meta.json"

_HEADER_BYTES: Final = 128
"""Length of our .npy headers: constant, since the shape is written last, and a multiple of 64, which numpy asks for."""

_READ_BYTES: Final = 2**20
"""Read at a time. Files are verified by reading, not through the map, whose touched pages would count as our memory."""

_RECODED_NODES: Final = 2**20
"""Nodes that get their final code at a time."""

_LEFTOVER_SECONDS: Final = 24 * 3600
"""Age from which an unfinished folder cannot belong to a living process: preparing takes minutes."""


class CacheDamageError(Exception):
    """Says why a cache cannot be used. Not for users: the caller rebuilds."""


@dataclass(frozen=True, kw_only=True)
class CacheContent:
    """What a cache says beside its arrays.

    Attributes:
        kinds: As in `FlatGraphs`.
        sources: As in `FlatGraphs`.
        window: As in `FlatGraphs`.
        notices: What the readers had to say about the logs.
    """

    kinds: tuple[str, ...]
    sources: tuple[SourceFile, ...]
    window: int
    notices: tuple[str, ...]


def read_cache(folder: Path, *, verify: bool = True) -> tuple[FlatGraphs, CacheContent]:
    """Verifies a cache and maps it into memory, copy on write: nobody can change the files through it.

    Args:
        folder: The cache.
        verify: Whether every byte is read, in order to find altered ones; the sizes of files are looked at anyway.

    Raises:
        CacheDamageError: A file is missing, truncated or altered.
    """
    with _noticing_damage():
        meta = _read_meta(folder / _META)
        arrays = {name: _map_array(folder / f"{name}.npy", **meta["arrays"][name], verify=verify) for name in _ARRAYS}
        content = _content(meta)
    arrays["edge_index"] = arrays["edge_index"].T
    return _flat_graphs(arrays, content), content


def read_content(folder: Path) -> CacheContent:
    """Reads what a cache says beside its arrays.

    Raises:
        CacheDamageError: The file is missing or altered, or the folder is no cache.
    """
    with _noticing_damage():
        return _content(_read_meta(folder / _META))


def finished_ns(folder: Path) -> int:
    """Returns when a cache was finished, in nanoseconds since 1970.

    Raises:
        OSError: It is none.
    """
    return (folder / _META).stat().st_mtime_ns


def discard_cache(folder: Path) -> None:
    """Removes a cache in one step, so that nobody sees it half there. Who has it mapped keeps what they mapped.

    Raises:
        StateError: It cannot be removed.
    """
    aside = _temporary_folder(folder)
    with _blamed_on(folder.parent):
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return  # another process that saw the same damage was faster
        shutil.rmtree(aside, ignore_errors=True)


class CacheWriter:
    """Writes a cache, as a context manager: leaving it before `finish` leaves nothing behind.

    Memory stays bounded: only the set of distinct CAN IDs grows with the data.

    Args:
        folder: Where the finished cache will be. Its parent is created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = _temporary_folder(folder)
        self._stack = ExitStack()
        self._arrays: dict[str, _ArrayFile] = {}
        self._ids: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self._num_nodes = 0
        self._num_edges = 0

    def __enter__(self) -> Self:
        with _blamed_on(self._folder.parent):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self._folder.parent)
            self._temporary.mkdir()
            self._stack.callback(shutil.rmtree, self._temporary, ignore_errors=True)
            for name, (dtype, row_shape) in {**_ARRAYS, "can_id": ("uint32", ())}.items():
                array = _ArrayFile(self._temporary / f"{name}.npy", np.dtype(dtype), row_shape)
                self._stack.callback(array.close)
                self._arrays[name] = array
            self._arrays["node_ptr"].append(np.zeros(1))
            self._arrays["edge_ptr"].append(np.zeros(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def append(self, block: GraphBlock, source: int) -> None:
        """Adds graphs of source file number `source`; their labels are codes of the whole data set.

        Raises:
            StateError: The folder cannot be written.
        """
        with _blamed_on(self._folder.parent):
            for name in ("can_id", "node_features", "edge_features", "label", "first_frame", "start_time", "end_time"):
                self._arrays[name].append(getattr(block, name))
            self._arrays["edge_index"].append(block.edge_index.T)
            self._arrays["source"].append(np.full(len(block), source))
            self._arrays["node_ptr"].append(self._num_nodes + np.cumsum(block.num_nodes))
            self._arrays["edge_ptr"].append(self._num_edges + np.cumsum(block.num_edges))
        self._num_nodes += len(block.can_id)
        self._num_edges += block.edge_index.shape[1]
        self._ids = np.union1d(self._ids, block.can_id)

    def finish(self, content: CacheContent) -> FlatGraphs:
        """Completes the cache, maps it and puts it in its place. Where another process has put the same one there
        meanwhile, that one stays; ours, mapped already, remains readable although its files go.

        Raises:
            StateError: The folder cannot be written.
        """
        with _blamed_on(self._folder.parent):
            self._arrays["ids"].append(self._ids)
            self._write_node_codes()
            arrays = {name: self._arrays[name].finish() for name in _ARRAYS}
            _write_meta(self._temporary / _META, {**asdict(content), "arrays": arrays})
            flat, _ = read_cache(self._temporary)
            try:
                self._temporary.rename(self._folder)
            except OSError:
                if not self._folder.exists():
                    raise
        return flat

    def _write_node_codes(self) -> None:
        """Replaces the nodes' CAN IDs, whose codes are known only now, by their positions among all IDs."""
        can_id = self._arrays.pop("can_id")
        can_id.finish()
        with can_id.path.open("rb") as file:
            file.seek(_HEADER_BYTES)
            while data := file.read(_RECODED_NODES * self._ids.itemsize):
                self._arrays["node_code"].append(np.searchsorted(self._ids, np.frombuffer(data, self._ids.dtype)))
        can_id.path.unlink()


class _ArrayFile:
    """A .npy file that grows by rows."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self.path = path
        self._dtype = dtype
        self._row_shape = row_shape
        self._rows = 0
        self._crc32 = 0
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER_BYTES))

    def append(self, rows: NDArray[Any]) -> None:
        data = np.ascontiguousarray(rows, dtype=self._dtype).data
        self._crc32 = zlib.crc32(data, self._crc32)
        self._file.write(data)
        self._rows += len(rows)

    def finish(self) -> dict[str, Any]:
        """Writes the header, closes the file and returns its entry in meta.json.

        Nothing is forced to the disk: what a power failure takes away, the checksum notices and a rebuild restores.
        """
        shape = (self._rows, *self._row_shape)
        self._file.seek(0)
        self._file.write(_npy_header(self._dtype.str, shape))
        self.close()
        return {"dtype": self._dtype.str, "shape": shape, "crc32": self._crc32}

    def close(self) -> None:
        self._file.close()


def _npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    """Returns the header that makes a file an array for `np.load`, at a constant length."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
    magic = b"\x93NUMPY\x01\x00"
    length = _HEADER_BYTES - len(magic) - 2
    return magic + struct.pack("<H", length) + text.ljust(length - 1).encode("ascii") + b"\n"


def _content(meta: dict[str, Any]) -> CacheContent:
    return CacheContent(
        kinds=tuple(meta["kinds"]),
        sources=tuple(SourceFile(**source) for source in meta["sources"]),
        window=meta["window"],
        notices=tuple(meta["notices"]),
    )


@contextmanager
def _noticing_damage() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CacheDamageError(str(error)) from error


def _map_array(path: Path, *, dtype: str, shape: Sequence[int], crc32: int, verify: bool) -> NDArray[Any]:
    header = _npy_header(dtype, shape)
    expected_bytes = _HEADER_BYTES + np.dtype(dtype).itemsize * int(np.prod(shape))
    found_bytes = path.stat().st_size
    if found_bytes != expected_bytes:
        raise ValueError(f"{path.name} has {found_bytes} bytes instead of {expected_bytes}")
    if verify and not _is_sound(path, header, crc32):
        raise ValueError(f"{path.name} was altered")
    mapped = np.memmap(path, dtype=dtype, mode="c", offset=_HEADER_BYTES, shape=tuple(shape))
    return mapped.view(np.ndarray)


def _is_sound(path: Path, header: bytes, crc32: int) -> bool:
    with path.open("rb") as file:
        sound = file.read(_HEADER_BYTES) == header
        found_crc32 = 0
        while data := file.read(_READ_BYTES):
            found_crc32 = zlib.crc32(data, found_crc32)
    return sound and found_crc32 == crc32


def _flat_graphs(arrays: dict[str, NDArray[Any]], content: CacheContent) -> FlatGraphs:
    return FlatGraphs(**arrays, kinds=content.kinds, sources=content.sources, window=content.window)


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    text = json.dumps(meta)
    path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "meta": meta}, indent=1), encoding="utf-8")


def _read_meta(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    meta: dict[str, Any] = document["meta"]
    if zlib.crc32(json.dumps(meta).encode()) != document["crc32"]:
        raise ValueError(f"{path.name} was altered")
    return meta


def _temporary_folder(folder: Path) -> Path:
    """Names a folder beside `folder` that no other process uses: a rename stays inside one file system."""
    return folder.parent / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}"


def _remove_leftovers(cache_dir: Path) -> None:
    """Removes the unfinished folders of processes that were killed."""
    for folder in cache_dir.glob(".*.*-*/"):
        newest = max((file.stat().st_mtime for file in folder.iterdir()), default=folder.stat().st_mtime)
        if time.time() - newest > _LEFTOVER_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _blamed_on(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            "The folder for prepared graphs must be writable and have room",
            value=f"{cache_dir} ({error.strerror or error})",
            remedy="Free some space there, or choose another folder",
        ) from error
