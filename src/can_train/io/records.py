"""Files that processes share: files that appear whole or not at all, immutable JSON records, and the process that wrote
a record.

A file is written under a temporary name, flushed to the disk, and then renamed, or linked where an existing one must
not be replaced. A record is a frozen dataclass that becomes a file which nobody rewrites; a file becomes a record that
is checked against the dataclass, or is set aside with the reason. The callers define the records.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from io import FileIO, UnsupportedOperation
from pathlib import Path
from stat import S_ISREG, S_ISVTX
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, TextIO, TypeVar

import msgspec

from can_train.errors import RunError, StateError, remedy_for

if TYPE_CHECKING:
    import psutil

SCHEMA: Final = 1
"""Version of the files' shape; raised when a field changes its meaning, not when one with a default is added."""

DOCUMENT_SUFFIX: Final = ".json"

TEMPORARY_SUFFIX: Final = ".tmp"
"""Ends the name of a file that is being written; a crash may leave one behind, and readers ignore it."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of bytes, samples or events; larger numbers overflow the arithmetic of floats and numpy."""

# Errors of network file systems without folder flushes, which make a rename durable or not.
_CANNOT_FLUSH_FOLDERS: Final = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
# Errors of file systems without hard links (FAT, some FUSE and SMB mounts, Android).
_CANNOT_LINK: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EMLINK)

# Dates at the ends of the calendar overflow when their time zone is changed.
_FIRST_YEAR: Final = 1970
_LAST_YEAR: Final = 9000
# Nested levels of a record: far above the need of settings, far below the limit of Python's recursion.
_MOST_DEPTH: Final = 50
_READ_BYTES: Final = 2**16  # read at a time: most records arrive whole with one request
# Seconds by which a process may seem to start after its record: the kernel counts from a boot time, which is rounded
# to a second and moves when the clock is corrected.
_CLOCK_SLACK_S: Final = 2.0

# Seconds by which the time in a record may be later than the time of its file: clocks and time zones differ.
_CLOCKS_APART_S: Final = 86400.0
_TIMES: Final = ("time", "start_time", "end_time")  # fields of records

_Record = TypeVar("_Record")


_SKETCHED: Final = 1000  # Files of a folder whose contents are read; of more, up to twice as many
_SKETCH_BYTES: Final = 1 << 20  # That are read at each end of a file


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


@contextmanager
def writing_path(path: Path) -> Iterator[Path]:
    """Names a file beside `path`, which replaces it when the block ends without an error; else nothing changes. For
    libraries that open a file by its name.

    Raises:
        OSError: The file cannot be written.
    """
    with _temporary(path) as (temporary, _):
        yield temporary
        # A library may have written another file of that name.
        with temporary.open("rb+") as written:
            _flush(written)
        temporary.replace(path)
    _flush_folder(path.parent)


@contextmanager
def writing_place(path: Path, *, as_folder: bool) -> Iterator[Path]:
    """Names a file, or makes a folder, which takes the place of `path` when the block ends without an error; else
    nothing changes. It has the name of `path`, for libraries that look at a file's ending. A folder that has files is
    not replaced.

    Raises:
        OSError: It cannot be written.
    """
    with TemporaryDirectory(prefix=".", suffix=TEMPORARY_SUFFIX, dir=path.parent) as beside:
        staged = Path(beside) / path.name
        if as_folder:
            staged.mkdir()
        yield staged
        if not as_folder:
            with staged.open("rb+") as written:
                _flush(written)
        staged.replace(path)
    _flush_folder(path.parent)


def temporary_beside(path: Path) -> Path:
    """Names a file or folder that is being written or removed, in the folder of `path`: a rename stays within one file
    system.
    """
    # Not the final name with a suffix, which could be longer than a file system allows.
    return path.with_name(f".{os.urandom(8).hex()}{TEMPORARY_SUFFIX}")


def remove_folder(folder: Path, *, ignore_errors: bool = False) -> None:
    """Removes a folder in one step, so that nobody takes half of it for the whole. A folder of which nothing can be
    removed stays as it is.

    Args:
        folder: The folder.
        ignore_errors: Leave files that cannot be removed, under another name.

    Raises:
        OSError: It cannot be removed.
    """
    aside = temporary_beside(folder)
    if ignore_errors:
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        return
    # Whoever may write to the parent can rename the folder, also where the files in it are another user's.
    check_removable(folder)
    before = _paths_in(folder)
    folder.rename(aside)
    try:
        shutil.rmtree(aside)
    except OSError:
        # A file that is immutable, or that a network file system holds open. A folder that lacks files must not have
        # its name again.
        if is_folder(aside) and _paths_in(aside) == before:
            aside.rename(folder)
        raise


def check_removable(folder: Path) -> None:
    """Checks, by owners and modes, that this user may remove a folder and everything in it.

    Raises:
        OSError: Something in it cannot be removed.
    """

    def fail(error: OSError) -> None:
        raise error

    _check_may_remove(folder.parent, [folder.name])
    for place, folders, files in os.walk(folder, onerror=fail):
        _check_may_remove(Path(place), [*folders, *files])


def _check_may_remove(place: Path, names: Sequence[str]) -> None:
    if names and not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    status, user = place.stat(), os.geteuid()
    # In a sticky folder, each user removes only the entries that are the user's own.
    if status.st_mode & S_ISVTX and user not in (0, status.st_uid):
        for name in names:
            if (place / name).lstat().st_uid != user:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(place / name))


def _paths_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all."""
    with open_atomic(path) as file:
        file.write(data)


def write_new_atomic(path: Path, data: bytes, *, link: Callable[[Path, Path], None] = os.link) -> None:
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
            link(temporary, path)
        except FileExistsError:
            # An NFS server may have made the link and its answer been lost; the repeated request then finds the link
            # there.
            if temporary.stat().st_nlink != 2:
                raise
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            _rename_to_free_name(temporary, path)
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    r"""Writes UTF-8 text whole or not at all. A byte of a file's name that is not UTF-8 is written as `\udce9`, an
    escape of JSON, too.
    """
    write_bytes_atomic(path, text.encode(errors="backslashreplace"))


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
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # As `write_text_atomic` does, for the callers that encode the text.
    return text.encode(errors="backslashreplace").decode()


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    # Not tempfile's file, whose permissions would hide the result from a group that shares the folder. Nor may that
    # group write to it, as it could with a umask of 002: a run's configuration names code.
    temporary = temporary_beside(path)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            yield temporary, file
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A full disk is noticed as the file is written, without a name.
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _rename_to_free_name(temporary: Path, path: Path) -> None:
    # Not atomic by itself, so an empty file claims the name first. A writer that is killed in here leaves its claim,
    # and the name is never used: a file lost is better than a file replaced.
    claim = path.with_name(f".{path.name}.claim")
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
    with suppress(OSError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Whether a folder can be seen. Unlike `Path.is_dir`, it is False where a folder above it cannot be read."""
    with suppress(OSError):
        return path.is_dir()
    return False


def expanded(path: Path | str) -> Path:
    """Replaces `~`. The home of a user who does not exist stays as it is written, and names no file."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def open_regular(path: Path | str) -> FileIO:
    """Opens a file to read it, and nothing else that may have its name: a pipe would block its reader for ever, and a
    device may never end.

    Raises:
        OSError: It cannot be opened. Where it is no regular file, the error is a ValueError as well, as for a file of
            wrong content.
    """
    return FileIO(path, opener=_open_descriptor)


def _open_descriptor(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsupportedOperation(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_to_append(path: Path, *, reads: bool = False) -> TextIO:
    """Opens a file of UTF-8 text to append to it, which need not exist. In a folder that others may write to, a link of
    that name could lead to a file of the user's elsewhere, and a pipe would block for ever.

    Args:
        path: Its path.
        reads: Whether it is also read.

    Raises:
        OSError: It cannot be opened, is a link, or is no regular file.
    """
    try:
        return open(path, "a+" if reads else "a", encoding="utf-8",
                    opener=lambda name, flags: _open_descriptor(name, flags | os.O_NOFOLLOW))  # fmt: skip
    except OSError as error:
        # A pipe that nobody reads has no device.
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        why = "a link, which is not followed" if error.errno == errno.ELOOP else "not a regular file"
        raise OSError(errno.EINVAL, why, str(path)) from None


def read_bytes(path: Path) -> bytes:
    """Reads a regular file; raises the errors of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Reads a regular file of UTF-8 text; raises the errors of `open_regular`, and UnicodeDecodeError."""
    return read_bytes(path).decode()


def text_or_nothing(path: Path) -> str:
    """Reads a text file; empty if it cannot be read."""
    with suppress(OSError):
        return read_bytes(path).decode(errors="replace")
    return ""


def parse_object(text: str) -> dict[str, Any]:
    """Parses a JSON object; anything else, such as a line that is still being written, has no values."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


@dataclass(frozen=True)
class SetAside:
    """A file that is no record, or only in part. The file is not changed."""

    path: Path
    reason: str
    is_read: bool = False  # whether the record counts all the same, from the time of its file

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


def sketch(paths: Sequence[Path]) -> str:
    """Computes a digest of files and folders. It changes with the sizes of files, with the names of files in a folder,
    and with nearly every change of their contents: of large data, a part is read. A file that is given by itself may be
    renamed, as it may be moved. The digest is empty for no files.
    """
    files = [(path, place) for path in paths for place in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [(path, place) for path, place in files if place.is_file()]
    digest, every = hashlib.sha256(), max(1, len(files) // _SKETCHED)
    for number, (path, place) in enumerate(files):
        size = place.stat().st_size
        # The bytes of a name need not be UTF-8.
        digest.update(os.fsencode(place.relative_to(path)) + f" {size}\n".encode())
        if number % every == 0:
            with place.open("rb") as file:
                digest.update(file.read(_SKETCH_BYTES))
                file.seek(max(0, size - _SKETCH_BYTES))
                digest.update(file.read(_SKETCH_BYTES))
    return digest.hexdigest() if files else ""


def write_document(path: Path, record: Any) -> None:
    """Writes a dataclass as a new file. Once this returns, a crash no longer loses it.

    Raises:
        StateError: The file cannot be written, or something has its name. No reason to stop a training.
    """
    try:
        # A record that its readers would set aside is refused here, where its writer gets the error.
        data = json_text({"schema": SCHEMA, **asdict(record)}).encode()
        parse_document(data, type(record))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new_atomic(path, data)
        if ahead := _times_ahead(record, utc_now()):
            # The clock was set back since an earlier record: readers must accept the later time of this record.
            latest_s = max(datetime.fromisoformat(getattr(record, name)).timestamp() for name in ahead)
            os.utime(path, (latest_s, latest_s))
    except FileExistsError as error:
        raise unusable("written", path, FileExistsError("a file of this name exists, and stays")) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise unusable("written", path, error) from error


def check_writable(folder: Path) -> None:
    """Makes a folder, and a file in it for a moment.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _temporary(folder / "_") as (temporary, _):
        temporary.unlink()


def place_refusal(path: Path, *, as_folder: bool = False) -> str:
    """Returns the reason why a file, or an empty folder, cannot be made at a path, as a clause; empty if it can be."""
    folder = path.absolute().parent
    if path.is_dir() and not as_folder:
        return f"{path} is a folder"
    if not folder.is_dir():
        return f"{folder} is {'a file' if folder.exists() else 'not there'}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


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


def read_documents(
    folder: Path, names: Iterable[str], kind: type[_Record], set_aside: list[SetAside], *, most_bytes: int
) -> dict[str, _Record]:
    """Reads records of one dataclass; returns them by the names of their files.

    Args:
        folder: Folder of the files.
        names: Names of the files.
        kind: The dataclass.
        set_aside: Files that are no such records are appended; also records whose time lies far after the time of
            their file, and which count from the latter: otherwise the error of a clock would put them last for ever.
        most_bytes: Larger files are no records.
    """
    records = {}
    for name in names:
        path = f"{folder}{os.sep}{name}"
        try:
            with open_regular(path) as file:
                data, status = file.read(_READ_BYTES), os.fstat(file.fileno())
                if len(data) == _READ_BYTES:
                    if status.st_size > most_bytes:
                        raise ValueError(f"larger than {most_bytes >> 20} MiB, so not written by can-train")
                    data += file.read()
            written = utc_text(datetime.fromtimestamp(status.st_mtime, UTC))
            record = parse_document(data, kind)
            if ahead := _times_ahead(record, written):
                dated = ", ".join(sorted({getattr(record, field) for field in ahead}))
                record = replace(record, **dict.fromkeys(ahead, written))  # type: ignore[type-var]
                reason = f"dated {dated}, after its file was written, and counted from then: {written}"
                set_aside.append(SetAside(Path(path), reason, is_read=True))
            records[name] = record
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, FileNotFoundError) and not Path(path).is_symlink():
                # The file was deleted after the listing.
                continue
            set_aside.append(SetAside(Path(path), getattr(error, "strerror", None) or str(error)))
    return records


def unusable(verb: str, path: Path, error: Exception) -> StateError:
    """Makes the error for a state folder that cannot be read or written."""
    value = f"{os.fsencode(path).decode(errors='replace')}: {error}"
    remedy = remedy_for(error, "Choose another state folder with --state-dir, or make this one readable and writable")
    return StateError(f"The state folder cannot be {verb}", value=value, remedy=remedy)


def _times_ahead(record: Any, written: str) -> list[str]:
    """Lists the fields of a record whose times lie far after the time of its file."""
    texts = {name: getattr(record, name) for name in _TIMES if hasattr(record, name)}
    # Compared as text first, which is fast: nearly all times are right, and a store has thousands.
    later = [name for name, text in texts.items() if not text.endswith("+00:00") or text > written]
    end = datetime.fromisoformat(written) + timedelta(seconds=_CLOCKS_APART_S)
    return [name for name in later if datetime.fromisoformat(texts[name]) > end]


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
    # Counting first is cheap, and few records are nested.
    if data.count(b"{") + data.count(b"[") > _MOST_DEPTH:
        _check_depth(msgspec.json.decode(data), _MOST_DEPTH)
    return msgspec.json.decode(data, type=kind)


def _check_depth(value: Any, levels: int) -> None:
    # Printing and copying recurse into values; a deeply nested file would make them fail.
    if levels == 0:
        raise ValueError(f"nested more than {_MOST_DEPTH} levels deep")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, levels - 1)


@dataclass(frozen=True, kw_only=True)
class JobId:
    """The identity of a SLURM job. Each cluster counts its jobs from 1, so that a number alone is ambiguous.

    Attributes:
        number: 123, or 123_4 for an element of an array.
        cluster: The cluster's name; empty in a record that does not name it.
    """

    number: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.number} on {self.cluster}" if self.cluster else self.number


@dataclass(frozen=True, kw_only=True)
class AttemptStart:
    """The record that a process began an attempt of a run."""

    attempt: int  # its number in the run, from 1
    start_time: str  # in ISO 8601 with a time zone
    host: str = ""
    pid: int = 0  # 0: not known
    rank: int = 0
    job_id: str = ""  # number of SLURM's job around the process (123, or 123_4 in an array); empty: none
    restarts: int = 0  # how often that job had been requeued before
    cluster: str = ""  # of that job; empty: none, or not recorded

    @property
    def slurm_job(self) -> JobId | None:
        """SLURM's job around the process."""
        return JobId(number=self.job_id, cluster=self.cluster) if self.job_id else None

    def is_running(self, host: str | None = None) -> bool | None:
        """Returns whether the process still runs; None where this machine (`host`, if given) cannot know."""
        if self.pid < 1 or self.host != (this_host() if host is None else host):
            return None
        return is_running(self.pid, self.start_time)


def this_host() -> str:
    """Returns this machine's name, as records have it."""
    # Equal to socket.gethostname(), without an import that takes a tenth of the command line's start.
    return os.uname().nodename


def is_running(pid: int, recorded_at: str) -> bool:
    """Returns whether the process that had an id at a time (ISO 8601 with a time zone) still runs."""
    return find_process(pid, recorded_at) is not None


def terminate(pid: int, recorded_at: str) -> bool:
    """Sends SIGTERM to the process that had an id at a time, if it runs Python; returns whether there was one.

    Raises:
        RunError: It belongs to another user.
    """
    import psutil

    try:
        process = find_process(pid, recorded_at)
        if process is None or "python" not in " ".join(process.cmdline()).lower():
            return False
        process.terminate()
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied as error:
        raise RunError("The run is another user's process", value=f"process {pid}",
                       remedy="Ask that user to stop it") from error  # fmt: skip
    return True


def find_process(pid: int, recorded_at: str) -> "psutil.Process | None":
    """Finds the process that had an id at a time (ISO 8601 with a time zone); None where it has ended."""
    # Imported here: records are written and compared more often than processes are looked for.
    import psutil

    try:
        process = psutil.Process(pid)
        # The system reuses the id of an ended process: a process that started after the record was written is another
        # process.
        is_same = process.create_time() <= datetime.fromisoformat(recorded_at).timestamp() + _CLOCK_SLACK_S
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    # A damaged record may have a number that no process has.
    except (psutil.NoSuchProcess, OverflowError):
        return None
