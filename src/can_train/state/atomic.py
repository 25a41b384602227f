"""Files that appear whole or not at all, also when the power fails: written beside their place, flushed to the disk,
then renamed over it.
"""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

TEMPORARY_SUFFIX: Final = ".tmp"
"""Ends the name of a file that is being written; a crash may leave one behind, and readers pass it over."""

_CANNOT_FLUSH_FOLDERS: Final = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What network file systems without folder flushes answer; there the rename is as durable as they make it."""


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes its place at `path` when the block ends well; else nothing changes.

    The folder must exist. The file gets the permissions that the process's umask gives new files.

    Raises:
        OSError: The file cannot be written.
    """
    # Not the final name with a suffix, which could be longer than a file system allows; and not tempfile's file, whose
    # permissions would hide the result from a group that shares the folder.
    temporary = path.with_name(f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all (see `open_atomic`)."""
    with open_atomic(path) as file:
        file.write(data)


def write_text_atomic(path: Path, text: str) -> None:
    """Writes UTF-8 text whole or not at all (see `open_atomic`)."""
    write_bytes_atomic(path, text.encode())


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes indented JSON whole or not at all (see `open_atomic`).

    Raises:
        OSError: The file cannot be written.
        ValueError: A number is not finite, so that the file would not be JSON.
    """
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _flush_folder(folder: Path) -> None:
    """Makes a rename in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH_FOLDERS:
            raise
    finally:
        os.close(descriptor)
