"""The text of a log as blocks of lines: plain or compressed, in UTF-8 or UTF-16."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import polars as pl

from can_train.errors import DataError, MissingDataError

# Bytes of text that are read at once. Smaller blocks parse slower; text and parsed columns together take about fifteen
# times as much memory.
BLOCK_BYTES: Final = 16 * 2**20
RECOGNISED_BYTES: Final = 2**20  # the first bytes of a log, which tell its format
# A longer line is no row of any log. Without this bound a file without line ends would be read whole.
MAX_LINE_BYTES: Final = RECOGNISED_BYTES

_SKIP_BYTES: Final = 2**20  # bytes that are decompressed at once on the way to a later part of a text
_CONVERTED_BYTES: Final = 2**16  # bytes that are read at once for decompressing or decoding
# Bytes that are decompressed at once. A zstd block of four bytes holds up to 128 KiB of text, so that a piece holds up
# to 32 MiB.
_PIECE_BYTES: Final = 2**10
# Largest window of a compressed file, the text that it may refer back to, which its decompressor keeps in memory: the
# window of `zstd --long`, and twice the window of `xz -9`. A file can ask for gigabytes.
WINDOW_BYTES: Final = 2**27
_XZ_BYTES: Final = 2**20  # memory that xz needs in addition to the window
MAX_NESTED: Final = 2  # most compressions of one file, one inside the other, each with a window
# Most lines of a block. The shortest rows of a log have about 30 bytes, so that only other text has more lines.
MAX_BLOCK_LINES: Final = 2**19
_DAMAGE: Final = (EOFError, zlib.error, lzma.LZMAError)  # errors of reading a damaged file, in addition to OSError
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CONTROL_BYTES: Final = bytes(set(range(32)) - set(b"\t\n\v\f\r"))  # control bytes that no text has
# Least share of control bytes in a binary file: recorded or compressed numbers have about a tenth; a log that was being
# written when the power failed has a few.
_MAX_CONTROL_SHARE: Final = 0.01
_PEEKED_BYTES: Final = 8  # the marks at the beginning of files are shorter
_NO_SEPARATOR: Final = "\x01"  # no line has this character, so that the CSV parser takes every line for one field


class TextSample(NamedTuple):
    """Parts of a text."""

    parts: list[pl.Series]  # the lines of each part, null where empty
    read_bytes: int  # size of all parts
    text_bytes: int  # size of the whole text; for a compressed text, an estimate from the part that was read

    @property
    def complete(self) -> bool:
        """Whether the parts are the whole text."""
        return self.read_bytes >= self.text_bytes


def missing_package(what: str, extra: str) -> DataError:
    """Makes the error for a log whose reader needs a package that is not installed."""
    return DataError(f"The package for {what} is not installed", remedy=f'pip install "can-train[{extra}]"')


class _WindowTooLargeError(Exception):
    """A compressed text refers back over more than `WINDOW_BYTES`."""


UTF16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class _Converted:
    """A stream of the bytes that a generator yields in parts."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._position = 0
        self._rest = b""

    def peek(self, size: int) -> bytes:
        while len(self._rest) < size and (part := next(self._parts, b"")):
            self._rest += part
        return self._rest[:size]

    def read(self, size: int) -> bytes:
        parts = [self._rest]
        missing = size - len(self._rest)
        while missing > 0 and (part := next(self._parts, b"")):
            parts.append(part)
            missing -= len(part)
        whole = b"".join(parts)
        self._rest = whole[size:]
        self._position += min(size, len(whole))
        return whole[:size]

    def tell(self) -> int:
        return self._position


def _utf16_as_utf8(stream: Any) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    while part := stream.read(_CONVERTED_BYTES):
        if text := decoder.decode(part):  # the byte order mark alone makes no text
            yield text.encode()


def _decompressed(raw: Any, new_frame: Callable[[], Any], failure: type[Exception]) -> Iterator[bytes]:
    """Yields the text of successive frames of zstd, or streams of xz.

    A few bytes may hold gigabytes of text, and these decompressors return the whole text of a piece at once.
    """
    # The file readers of both packages are not used: zstandard's reader accepts a truncated file, and lzma's reader
    # takes as much memory as the file's header asks for.
    frame, begun = new_frame(), False  # whether the frame has begun and not ended
    while compressed := memoryview(raw.read(_CONVERTED_BYTES)):
        while compressed:
            piece = compressed[:_PIECE_BYTES]
            if not begun and (padding := len(piece) - len(bytes(piece).lstrip(b"\0"))):
                compressed = compressed[padding:]
                continue
            try:
                text: bytes = frame.decompress(piece)
            except failure as error:
                if "memory" in str(error).lower():  # only the text of both packages' errors tells of the limit
                    raise _WindowTooLargeError from error
                raise EOFError(str(error)) from error
            begun = not frame.eof
            compressed = compressed[len(piece) - len(frame.unused_data) :]
            if frame.eof:
                frame = new_frame()
            if text:
                yield text
    if begun:
        raise EOFError("it ends inside a block")


def _open_zstd(raw: Any) -> _Converted:
    try:
        import zstandard
    except ImportError as error:
        raise missing_package("a log compressed by zstd (zstandard)", "can") from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    return _Converted(_decompressed(raw, decompressor.decompressobj, zstandard.ZstdError))


_NEW_XZ: Final = partial(lzma.LZMADecompressor, memlimit=WINDOW_BYTES + _XZ_BYTES)


class Compression(NamedTuple):
    """A compression of whole files, recognised by the first bytes: suffixes may be missing or wrong."""

    name: str
    suffix: str
    magic: bytes
    open: Callable[[Any], Any]  # opens a stream that unpacks a bounded piece at a time


COMPRESSIONS: Final = (
    Compression("gzip", ".gz", b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw, mode="rb")),
    Compression("bzip2", ".bz2", b"BZh", bz2.BZ2File),
    Compression("xz", ".xz", b"\xfd7zXZ\0", lambda raw: _Converted(_decompressed(raw, _NEW_XZ, lzma.LZMAError))),
    Compression("zstd", ".zst", b"\x28\xb5\x2f\xfd", _open_zstd),
)
# Archives, files of several files: (offset of the mark, mark, program that unpacks the archive).
_ARCHIVES: Final = (
    (0, b"PK\3\4", "unzip"),
    (0, b"7z\xbc\xaf\x27\x1c", "7z x"),
    (0, b"Rar!", "unrar x"),
    (257, b"ustar", "tar -xf"),
)


class TextStream(NamedTuple):
    """An open log."""

    text: Any  # stream with `read` and `tell`
    raw: IO[bytes]  # the file behind the stream
    plain: bool  # whether the stream is the file, which can seek


class LogText:
    """The text of one log; its `first_lines`, null where empty, have the mean length `line_bytes`.

    Raises:
        MissingDataError: The file does not exist.
        DataError: The file cannot be read, or is empty or binary.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self._path = path
        self._block_bytes = block_bytes
        with opened_text(path) as (stream, _, _):
            self._state = file_state(path)
            start = stream.read(RECOGNISED_BYTES)
        if not start.removeprefix(_BYTE_ORDER_MARK).strip():
            raise DataError("The log is empty", value=str(path), remedy="Give another log")
        for offset, mark, program in _ARCHIVES:
            if start.startswith(mark, offset):
                raise DataError("The log is an archive of files", value=str(path),
                                remedy=f"Unpack it, and give the folder: {program} {path}")  # fmt: skip
        if len(start) - len(start.translate(None, _CONTROL_BYTES)) > _MAX_CONTROL_SHARE * len(start):
            raise DataError("The log is binary, and no BLF, MF4, pcap or SQLite file", value=str(path),
                            remedy="Convert it: `python -m can.logconvert FILE log.asc`, of python-can")  # fmt: skip
        whole_lines = start.rfind(b"\n") + 1 if len(start) == RECOGNISED_BYTES else len(start)
        if not whole_lines:
            raise _endless_line(path)
        self.first_lines = split_lines(start[:whole_lines])
        self.line_bytes = whole_lines / max(len(self.first_lines), 1)

    def blocks(self) -> Iterator[tuple[int, pl.Series]]:
        """Yields the number of a block's first line, counted from 1, and its lines, null where empty.

        Raises:
            DataError: The file changed since it was first opened, is damaged, or has a line over `MAX_LINE_BYTES`.
        """
        next_line, rest = 1, b""
        with opened_text(self._path) as (stream, _, _):
            while read := stream.read(self._block_bytes):
                end = read.rfind(b"\n") + 1
                whole = b"".join((rest, read[:end])) if end else b""
                rest = read[end:] if end else rest + read
                if len(rest) > MAX_LINE_BYTES:
                    raise _endless_line(self._path)
                for text in _pieces(whole) if end else ():
                    if not text.isspace():
                        yield next_line, split_lines(text)
                    next_line += text.count(b"\n")
            if rest.strip():
                yield next_line, split_lines(rest)
            if file_state(self._path) != self._state:
                raise changed_log(self._path)

    def sample(self, num_parts: int, part_bytes: int, reach_bytes: int) -> TextSample:
        """Reads parts that are evenly spread over the text, or the whole text where it is no larger than the parts.

        Args:
            num_parts: Number of parts.
            part_bytes: Size of each part.
            reach_bytes: Size of the beginning of a compressed text that the parts come from: the text before a part
                must be decompressed.

        Raises:
            DataError: The file is damaged.
        """
        size, _, _ = self._state
        with opened_text(self._path) as (stream, raw, plain):
            if plain and size <= num_parts * part_bytes:
                num_parts, part_bytes = 1, size
            last_start = (size if plain else reach_bytes) - part_bytes
            step = max(last_start // max(num_parts - 1, 1), part_bytes)
            texts: list[bytes] = []
            for start in range(0, num_parts * step, step):
                if plain:
                    stream.seek(start)
                # GzipFile.seek reads on in small steps; larger ones take less time.
                while stream.tell() < start and stream.read(min(start - stream.tell(), _SKIP_BYTES)):
                    pass
                text = stream.read(part_bytes)
                ended = len(text) < part_bytes or (plain and stream.tell() == size)
                # Incomplete lines at either end belong to no part, unless the text begins or ends there.
                begin = text.find(b"\n") + 1 or len(text) if start else 0
                texts.append(text[begin : len(text) if ended else text.rfind(b"\n") + 1])
                if ended:
                    break
            text_bytes = stream.tell()
            if not plain and not ended:
                text_bytes = text_bytes * size // max(raw.tell(), 1)
        parts = [split_lines(text) for text in texts if text]
        return TextSample(parts, sum(map(len, texts)), size if plain else text_bytes)


@contextmanager
def opened_text(path: Path) -> Iterator[TextStream]:
    """Opens a log as text in UTF-8, whatever its compression and encoding.

    Raises as `unpacked` does.
    """
    with unpacked(path) as (stream, raw):
        is_utf16 = stream.peek(_PEEKED_BYTES).startswith(UTF16_MARKS)
        text = _Converted(_utf16_as_utf8(stream)) if is_utf16 else stream
        yield TextStream(text, raw, plain=stream is raw and not is_utf16)


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[Any, IO[bytes]]]:
    """Opens a file, and decompresses it if necessary; yields the stream, and the file behind it.

    Raises:
        MissingDataError: The file does not exist.
        DataError: The file cannot be read, is damaged, or was compressed too often or with too large a window.
    """
    compression = None
    try:
        with path.open("rb") as raw:
            stream: Any = raw
            for _ in range(MAX_NESTED):
                if (next_one := _compression_of(stream)) is None:
                    break
                compression = next_one
                stream = compression.open(stream)
            if compression and _compression_of(stream):
                raise DataError(f"The log was compressed more than {MAX_NESTED} times", value=str(path),
                                remedy="Unpack it, and give the unpacked log")  # fmt: skip
            yield stream, raw
    except FileNotFoundError as error:
        raise MissingDataError("The log does not exist", value=str(path),
                               remedy="Give the path of a log that exists") from error  # fmt: skip
    except _WindowTooLargeError as error:
        raise DataError(f"The log was compressed with a window of more than {WINDOW_BYTES >> 20} MiB", value=str(path),
                        remedy="Unpack it, and give the unpacked log") from error  # fmt: skip
    except (OSError, *_DAMAGE) as error:
        # gzip and bz2 raise OSError without a number on damaged files.
        if compression is None or (isinstance(error, OSError) and error.errno):
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError("The log cannot be read", value=f"{path}: {reason}",
                            remedy="Check its permissions") from error  # fmt: skip
        raise DataError(f"The compressed log is no whole {compression.name} file", value=f"{path}: {error}",
                        remedy="Copy or download it again") from error  # fmt: skip


def _compression_of(stream: Any) -> Compression | None:
    start = stream.peek(_PEEKED_BYTES)
    return next((compression for compression in COMPRESSIONS if start.startswith(compression.magic)), None)


def changed_log(path: Path) -> DataError:
    """Makes the error for a log that changed between two readings."""
    return DataError("The log changed while it was read", value=str(path),
                     remedy="Wait until the recording has ended, or read a copy")  # fmt: skip


def file_state(path: Path) -> tuple[int, int, int]:
    """Returns what changes when a file is written: size, modification time, inode."""
    # The inode reveals a new file of equal size and modification time.
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _endless_line(path: Path) -> DataError:
    return DataError(f"A line of the log is longer than {MAX_LINE_BYTES:,} bytes", value=str(path),
                     remedy="Write each frame on a line of its own, or give another log")  # fmt: skip


def _pieces(text: bytes) -> Iterator[bytes]:
    """Cuts whole lines into parts of at most `MAX_BLOCK_LINES`."""
    if text.count(b"\n") <= MAX_BLOCK_LINES:
        yield text
        return
    middle = text.rfind(b"\n", 0, len(text) // 2) + 1 or text.index(b"\n") + 1
    yield from _pieces(text[:middle])
    yield from _pieces(text[middle:])


def split_lines(text: bytes) -> pl.Series:
    """Splits whole lines, without their line ends and a byte order mark before them; an empty line is null."""
    if not text.isascii() or _NO_SEPARATOR.encode() in text:
        text = text.decode(errors="replace").replace(_NO_SEPARATOR, "\N{REPLACEMENT CHARACTER}").encode()
    # The CSV parser uses all cores and makes no Python object for a line.
    return pl.read_csv(
        io.BytesIO(text), has_header=False, separator=_NO_SEPARATOR, quote_char=None, schema={"line": pl.String},
        raise_if_empty=False,
    )["line"]  # fmt: skip
