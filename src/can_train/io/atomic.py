"""Files that appear whole or not at all, also when the power fails: each is written under a temporary name, flushed to
the disk, and then renamed, or linked where an existing file must not be replaced.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

# Ends the name of a file that is being written; a crash may leave one behind, and readers ignore it.
TEMPORARY_SUFFIX: Final = ".tmp"

# What network file systems without folder flushes answer; there the rename is as durable as they make it.
_CANNOT_FLUSH_FOLDERS: Final = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)

# What file systems without hard links answer (FAT, some FUSE and SMB mounts, Android).
_CANNOT_LINK: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EMLINK)

Link = Callable[[Path, Path], None]

# Ends the name of the empty file that reserves a name where there are no hard links.
_CLAIM_SUFFIX: Final = ".claim"


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces `path` when the block ends without an error; else nothing changes.

    The folder must exist. The permissions follow the process's umask.

    Raises:
        OSError: The file cannot be written.
    """
    with _temporary(path) as (temporary, file):
        yield file
        _flush(file)
        temporary.replace(path)
    _flush_folder(path.parent)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all."""
    with open_atomic(path) as file:
        file.write(data)


def write_new_atomic(path: Path, data: bytes, *, link: Link = os.link) -> None:
    """Writes a file whole or not at all, and never replaces one: of several writers of one name, one succeeds.

    Args:
        path: Its path.
        data: Its content.
        link: Gives a file a second name; tests pass one that fails as some file systems do.

    Raises:
        FileExistsError: Something has that name; it stays as it is.
        OSError: The file cannot be written.
    """
    with _temporary(path) as (temporary, file):
        file.write(data)
        _flush(file)
        try:
            _link(temporary, path, link)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            _rename_to_free_name(temporary, path)
        else:
            temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Writes UTF-8 text whole or not at all."""
    write_bytes_atomic(path, text.encode())


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes indented JSON whole or not at all.

    Raises:
        OSError: The file cannot be written.
        ValueError: A number is not finite, which JSON cannot express.
    """
    write_text_atomic(path, json_text(value))


def json_text(value: Any) -> str:
    """Makes indented JSON that ends with a line break.

    Raises:
        ValueError: A number is not finite.
    """
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    # Not the final name with a suffix, which could be longer than a file system allows; and not tempfile's file, whose
    # permissions would hide the result from a group that shares the folder.
    temporary = path.with_name(f".{os.urandom(8).hex()}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield temporary, file
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _link(temporary: Path, path: Path, link: Link) -> None:
    try:
        link(temporary, path)
    except FileExistsError:
        # An NFS server may have made the link and its answer been lost; the repeated request then finds the link there.
        if temporary.stat().st_nlink != 2:
            raise


def _rename_to_free_name(temporary: Path, path: Path) -> None:
    # Not atomic by itself, so an empty file claims the name first. A writer that is killed in here leaves its claim,
    # and
    # the name is never used: a file lost is better than a file replaced.
    claim = path.with_name(f".{path.name}{_CLAIM_SUFFIX}")
    claim.open("xb").close()
    try:
        # The previous owner of the claim may have just finished.
        if path.exists() or path.is_symlink():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        temporary.replace(path)
    finally:
        claim.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    # Makes a rename in the folder durable.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def is_file(path: Path) -> bool:
    """Whether a file can be seen. Unlike `Path.is_file`, it is False where a folder above it cannot be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether a folder can be seen. Unlike `Path.is_dir`, it is False where a folder above it cannot be read."""
    try:
        return path.is_dir()
    except OSError:
        return False
