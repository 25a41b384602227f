"""A log as blocks of whole lines, plain or gzipped, in bounded memory. It refuses what is no text and notices a file
that changes while it is read; what the lines mean is left to `formats`.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

import polars as pl

from can_train.errors import DataError, MissingDataError

BLOCK_BYTES: Final = 16 * 2**20
"""Text read at once. Smaller blocks parse slower; text and parsed columns together take about fifteen times as much."""

SAMPLE_BYTES: Final = 2**20
"""Text from the beginning of a log that its format is recognised from."""

MAX_LINE_BYTES: Final = SAMPLE_BYTES
"""A longer line is no row of any log; without this bound a file without line ends would be read whole."""

_SKIPPED_BYTES: Final = 2**20
"""Decompressed at once on the way to a part of a text."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CONTROL_BYTES: Final = bytes(set(range(32)) - set(b"\t\n\v\f\r"))
"""Bytes that no text holds."""

_MAX_CONTROL_SHARE: Final = 0.01
"""Share of them from which a file is binary: recorded or compressed numbers have about a tenth, a log that was being
written when the power failed has a few."""

_NO_SEPARATOR: Final = "\x01"
"""Stands in no line, so that the CSV parser takes every line for one field."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a text is read in parts.

    Attributes:
        pieces: How many.
        piece_bytes: Of each.
        reach_bytes: How far they may lie from the beginning of a compressed log, which can only be read from there.
    """

    pieces: int
    piece_bytes: int
    reach_bytes: int


@dataclass(frozen=True, kw_only=True)
class TextPieces:
    """Parts of a text.

    Attributes:
        pieces: The lines of each, null where empty.
        read_bytes: What they have together.
        text_bytes: What the whole text has; of a compressed one, as far as what was read of it tells.
    """

    pieces: list[pl.Series]
    read_bytes: int
    text_bytes: int

    @property
    def whole(self) -> bool:
        """Whether they are all there is."""
        return self.read_bytes >= self.text_bytes


class LogText:
    """The text of one log.

    Args:
        path: The file.
        block_bytes: Text read at once, in bytes.

    Raises:
        MissingDataError: There is no such file.
        DataError: It cannot be read, or is empty or binary.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self._path = path
        self._block_bytes = block_bytes
        with self._reading() as stream:
            self._state = _file_state(path)
            start = stream.read(SAMPLE_BYTES)
        _check_text(start, path)
        whole_lines = start.rfind(b"\n") + 1 if len(start) == SAMPLE_BYTES else len(start)
        if not whole_lines:
            raise _endless_line(path)
        self.sample: pl.Series = _split_lines(start[:whole_lines])
        """The first lines, null where empty."""
        self.line_bytes: float = whole_lines / max(len(self.sample), 1)
        """Their mean length."""

    def blocks(self) -> Iterator[tuple[int, pl.Series]]:
        """Yields the number of a block's first line, counted from 1, and its lines, null where empty.

        Raises:
            DataError: The file changed since it was opened first, is damaged, or has a line of absurd length.
        """
        next_line = 1
        with self._reading() as stream:
            for text in self._whole_lines(stream):
                yield next_line, _split_lines(text)
                next_line += text.count(b"\n")
            if _file_state(self._path) != self._state:
                raise DataError(
                    "A log must not change while it is read",
                    value=str(self._path),
                    remedy="Wait until the recording has ended, or read a copy",
                )

    def spread(self, wanted: Spread) -> TextPieces:
        """Reads parts of the text, evenly spread from its beginning to its end, or all of it where that is no more.

        Raises:
            DataError: The file is damaged.
        """
        size, _, _ = self._state
        with self._reading() as stream:
            compressed = isinstance(stream, gzip.GzipFile)
            if not compressed and size <= wanted.pieces * wanted.piece_bytes:
                wanted = Spread(pieces=1, piece_bytes=size, reach_bytes=0)
            last_start = (wanted.reach_bytes if compressed else size) - wanted.piece_bytes
            step = max(last_start // max(wanted.pieces - 1, 1), wanted.piece_bytes)
            found: list[bytes] = []
            for start in range(0, wanted.pieces * step, step):
                _skip_to(stream, start)
                text = stream.read(wanted.piece_bytes)
                ended = len(text) < wanted.piece_bytes or (not compressed and stream.tell() == size)
                found.append(_inner_lines(text, begun=start == 0, ended=ended))
                if ended:
                    break
            text_bytes = stream.tell()
            if isinstance(stream, gzip.GzipFile) and not ended:
                text_bytes = text_bytes * size // max(cast(IO[bytes], stream.fileobj).tell(), 1)
        return TextPieces(
            pieces=[_split_lines(text) for text in found if text],
            read_bytes=sum(map(len, found)),
            text_bytes=text_bytes if compressed else size,
        )

    def _whole_lines(self, stream: IO[bytes]) -> Iterator[bytes]:
        """Cuts the stream into blocks that end where a line ends."""
        rest = b""
        while text := stream.read(self._block_bytes):
            head, newline, tail = text.rpartition(b"\n")
            if newline:
                yield b"".join((rest, head, newline))
                rest = b""
            rest += tail
            if len(rest) > MAX_LINE_BYTES:
                raise _endless_line(self._path)
        if rest:
            yield rest

    @contextmanager
    def _reading(self) -> Iterator[IO[bytes]]:
        """Opens the file, decompressing it where it begins like a gzip file, and translates what may go wrong."""
        try:
            with self._path.open("rb") as raw:
                compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
                raw.seek(0)
                yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if compressed else raw
        except FileNotFoundError as error:
            raise MissingDataError("A log must exist", value=str(self._path)) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                "A compressed log must be a whole gzip file",
                value=f"{self._path}: {error}",
                remedy="Copy or download it again",
            ) from error
        except OSError as error:
            raise DataError("A log must be a file that can be read", value=f"{self._path}: {error.strerror}") from error


def _skip_to(stream: IO[bytes], position: int) -> None:
    """Moves forward; through a compressed stream by reading, in larger steps than it would itself."""
    if not isinstance(stream, gzip.GzipFile):
        stream.seek(position)
    while stream.tell() < position and stream.read(min(position - stream.tell(), _SKIPPED_BYTES)):
        pass


def _inner_lines(text: bytes, *, begun: bool, ended: bool) -> bytes:
    """Cuts off the line in which a part begins and the one in which it ends, unless the text itself does so there."""
    begin = 0 if begun else text.find(b"\n") + 1 or len(text)
    end = len(text) if ended else text.rfind(b"\n") + 1
    return text[begin:end]


def _endless_line(path: Path) -> DataError:
    return DataError(f"A line of a log is at most {MAX_LINE_BYTES:,} bytes long", value=str(path))


def _file_state(path: Path) -> tuple[int, int, int]:
    """What differs once somebody wrote to a file or put another one in its place."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _check_text(start: bytes, path: Path) -> None:
    if not start.removeprefix(_BYTE_ORDER_MARK).strip():
        raise DataError("A log must hold frames", value=f"{path} is empty")
    if len(start) - len(start.translate(None, _CONTROL_BYTES)) > _MAX_CONTROL_SHARE * len(start):
        raise DataError(
            "A log must be text (UTF-8, or gzipped)",
            value=f"{path} is binary",
            remedy="Convert it, for example with `candump` or python-can's `can_logconvert`, to a text format",
        )


def _split_lines(text: bytes) -> pl.Series:
    """Splits whole lines, without their line ends and a byte order mark in front of them; an empty line is null."""
    if not text.isascii() or _NO_SEPARATOR.encode() in text:
        text = text.decode(errors="replace").replace(_NO_SEPARATOR, "\N{REPLACEMENT CHARACTER}").encode()
    table = pl.read_csv(
        io.BytesIO(text),
        has_header=False,
        separator=_NO_SEPARATOR,
        quote_char=None,
        schema={"line": pl.String},
        raise_if_empty=False,
    )
    return table["line"]
