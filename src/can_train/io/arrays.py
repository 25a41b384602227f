"""Folders of arrays that are mapped into memory: one .npy file for each array, and a meta.json. A folder is written
block by block, gets its name only when complete, and is verified by checksums before it is mapped. The caller makes
damaged folders again.
"""

import json
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from can_train.errors import StateError
from can_train.io.records import TEMPORARY_SUFFIX, remove_folder, temporary_beside

META: Final = "meta.json"

# Length of our .npy headers: constant, since the shape is written last, and a multiple of 64, which numpy asks for.
_HEADER_BYTES: Final = 128
# Bytes for each read. Files are verified by reading, not through the map: its touched pages would count as memory.
_READ_BYTES: Final = 2**20
# An older unfinished folder belongs to no living process: preparing takes minutes.
_LEFTOVER_SECONDS: Final = 24 * 3600


class FolderDamageError(Exception):
    """A folder of arrays is missing, truncated or altered. Callers catch it and make the folder anew."""


def read_arrays(
    folder: Path, names: Sequence[str], *, verify: bool = True
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Verifies a folder's arrays and maps them into memory, copy on write: changes do not reach the files.

    Args:
        folder: The folder.
        names: Arrays that it must have.
        verify: Whether every byte is read to find altered ones; the sizes of files are always checked.

    Returns:
        The arrays, and the folder's metadata.

    Raises:
        FolderDamageError: A file is missing, truncated or altered.
    """
    meta = read_meta(folder)
    with noticing_damage():
        arrays = {name: _map_array(folder / f"{name}.npy", **meta["arrays"][name], verify=verify) for name in names}
    return arrays, meta


def read_meta(folder: Path) -> dict[str, Any]:
    """Reads a folder's metadata.

    Raises:
        FolderDamageError: The file is missing or altered.
    """
    with noticing_damage():
        document = json.loads((folder / META).read_text(encoding="utf-8"))
        meta: dict[str, Any] = document["meta"]
        if zlib.crc32(json.dumps(meta).encode()) != document["crc32"]:
            raise ValueError(f"{META} was altered")
        return meta


class StoredArray:
    """An array of a folder whose rows are read on access: `array[start:stop]`.

    The file is not mapped: the pages of a map that were touched count as memory of the process, and grow with the data.

    Args:
        folder: A folder that `read_arrays` has verified.
        name: The array.

    Raises:
        FolderDamageError: The folder has no such array.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.npy"
        with noticing_damage():
            entry = read_meta(folder)["arrays"][name]
            self.dtype, self.shape = np.dtype(entry["dtype"]), tuple(entry["shape"])

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        count, offset = max(stop - start, 0) * width, _HEADER_BYTES + start * width * self.dtype.itemsize
        values = np.fromfile(self._path, self.dtype, count, offset=offset)
        return values.reshape(-1, *self.shape[1:])


def discard_folder(folder: Path) -> None:
    """Removes a folder as `remove_folder` does. Processes that have it mapped keep their map.

    Raises:
        StateError: It cannot be removed.
    """
    # Another process may have seen the same damage first.
    with _as_state_error(folder.parent), suppress(FileNotFoundError):
        # On a network file system, files that are mapped stay for as long.
        remove_folder(folder, ignore_errors=True)


class ArrayWriter:
    """Context manager that writes a folder of arrays. Leaving it before `finish` leaves nothing behind.

    Args:
        folder: Path of the finished folder. Its parent is created.
        kinds: Type and shape of one row of every array.
    """

    def __init__(self, folder: Path, kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._folder, self._kinds, self._temporary = folder, kinds, temporary_beside(folder)
        self._stack = ExitStack()
        self._arrays: dict[str, _ArrayFile] = {}

    def __enter__(self) -> Self:
        with _as_state_error(self._folder.parent):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            # Unfinished folders of processes that were killed.
            for leftover in self._folder.parent.glob(f".*{TEMPORARY_SUFFIX}/"):
                newest = max((file.stat().st_mtime for file in leftover.iterdir()), default=leftover.stat().st_mtime)
                if time.time() - newest > _LEFTOVER_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)
            self._temporary.mkdir()
            self._stack.callback(shutil.rmtree, self._temporary, ignore_errors=True)
            # On a full disk, writing the buffer of a file fails again when it is closed.
            self._stack.enter_context(suppress(OSError))
            for name, (dtype, row_shape) in self._kinds.items():
                self._arrays[name] = _ArrayFile(self._temporary / f"{name}.npy", np.dtype(dtype), row_shape)
                self._stack.callback(self._arrays[name].file.close)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def append(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Appends rows to some of the arrays.

        Raises:
            StateError: The folder cannot be written.
        """
        with _as_state_error(self._folder.parent):
            for name, rows in arrays.items():
                self._arrays[name].append(rows)

    def take_back(self, name: str, rows: int) -> Iterator[NDArray[Any]]:
        """Yields the rows of a one-dimensional array, then removes it from the folder. It served as a temporary file.

        Args:
            name: The array.
            rows: Rows of each block.

        Raises:
            StateError: The folder cannot be written.
        """
        array, dtype = self._arrays.pop(name), np.dtype(self._kinds[name][0])
        with _as_state_error(self._folder.parent):
            array.finish()
            with array.path.open("rb") as file:
                file.seek(_HEADER_BYTES)
                while data := file.read(rows * dtype.itemsize):
                    yield np.frombuffer(data, dtype)
            array.path.unlink()

    def finish(self, meta: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Completes the folder, maps it and renames it. If another process has made the folder meanwhile, its
        folder stays; our arrays are mapped already, and remain readable although the files are removed.

        Args:
            meta: The folder's metadata, as JSON values.

        Raises:
            StateError: The folder cannot be written.
        """
        with _as_state_error(self._folder.parent):
            arrays = {name: array.finish() for name, array in self._arrays.items()}
            whole = {**meta, "arrays": arrays}
            document = {"crc32": zlib.crc32(json.dumps(whole).encode()), "meta": whole}
            (self._temporary / META).write_text(json.dumps(document, indent=1), encoding="utf-8")
            mapped, _ = read_arrays(self._temporary, list(arrays))
            try:
                self._temporary.rename(self._folder)
            except OSError:
                if not self._folder.exists():
                    raise
        return mapped


class _ArrayFile:
    """A .npy file that rows are appended to."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self.path, self._dtype, self._row_shape = path, dtype, row_shape
        self._rows = self._crc32 = 0
        self.file = path.open("wb")
        self.file.write(bytes(_HEADER_BYTES))

    def append(self, rows: NDArray[Any]) -> None:
        data = np.ascontiguousarray(rows, dtype=self._dtype).data
        self._crc32 = zlib.crc32(data, self._crc32)
        self.file.write(data)
        self._rows += len(rows)

    def finish(self) -> dict[str, Any]:
        """Writes the header, closes the file and returns its entry in meta.json."""
        # Not flushed to the disk: after a power failure the checksum is wrong, and the folder is made again.
        shape = (self._rows, *self._row_shape)
        self.file.seek(0)
        self.file.write(_npy_header(self._dtype.str, shape))
        self.file.close()
        return {"dtype": self._dtype.str, "shape": shape, "crc32": self._crc32}


def _npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
    magic = b"\x93NUMPY\x01\x00"
    length = _HEADER_BYTES - len(magic) - 2
    return magic + struct.pack("<H", length) + text.ljust(length - 1).encode("ascii") + b"\n"


@contextmanager
def noticing_damage() -> Iterator[None]:
    """Turns the errors that reading a damaged file raises into `FolderDamageError`."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError, BadZipFile) as error:
        raise FolderDamageError(str(error)) from error


def _map_array(path: Path, *, dtype: str, shape: Sequence[int], crc32: int, verify: bool) -> NDArray[Any]:
    expected_bytes = _HEADER_BYTES + np.dtype(dtype).itemsize * int(np.prod(shape))
    found_bytes = path.stat().st_size
    if found_bytes != expected_bytes:
        raise ValueError(f"{path.name} has {found_bytes} bytes instead of {expected_bytes}")
    if verify:
        with path.open("rb") as file:
            is_sound, found_crc32 = file.read(_HEADER_BYTES) == _npy_header(dtype, shape), 0
            while data := file.read(_READ_BYTES):
                found_crc32 = zlib.crc32(data, found_crc32)
        if not is_sound or found_crc32 != crc32:
            raise ValueError(f"{path.name} was altered")
    mapped = np.memmap(path, dtype=dtype, mode="c", offset=_HEADER_BYTES, shape=tuple(shape))
    return mapped.view(np.ndarray)


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder for generated files, which is renamed to `folder` at the end.

    The folder appears complete or not at all. If another process has made it meanwhile, its files stay: they are equal.

    Raises:
        StateError: The folder cannot be written.
    """
    with _as_state_error(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as staging:
            staged = Path(staging) / folder.name
            staged.mkdir()
            yield staged
            try:
                staged.rename(folder)
            except OSError:
                # A folder with other files is somebody else's.
                existing = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
                if not {path.name for path in staged.iterdir()} <= existing:
                    raise


@contextmanager
def _as_state_error(parent: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError("The folder for prepared data cannot be written",
                         value=f"{parent} ({error.strerror or error})",
                         remedy="Free some space there, or choose another folder: export CAN_TRAIN_CACHE=FOLDER"
                         ) from error  # fmt: skip
