"""Reads any CAN log as frames, in bounded memory."""

import gzip
import io
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import DataError, MissingDataError
from can_train.tasks.can.data.formats import (
    LENGTH_DISAGREES,
    LINE_GRAMMARS,
    Grammar,
    ParsedRows,
    first_row,
    header_grammars,
    parse_rows,
)
from can_train.tasks.can.data.frames import BENIGN, Frames
from can_train.tasks.can.settings import FORMATS, CanDatasetSettings

ATTACK_WORDS: Final = frozenset(
    {"1", "t", "true", "yes", "attack", "attacked", "anomaly", "anomalous", "malicious", "injected"}
)
"""Labels that say that a frame is an attack, and not which one."""


MAX_KINDS: Final = 256
"""Codes are bytes. A label column with more values is no label column."""


class LabelEncoder:
    """Turns label texts into codes, and remembers what each code means.

    Args:
        benign_values: Label values that mean: no attack; letter case does not matter.
        unnamed: The kind of attacks whose label does not name one.
    """

    def __init__(self, benign_values: Iterable[str], unnamed: str) -> None:
        self.names = [BENIGN]
        """Kinds by code; 0 is benign."""
        self._benign = {value.casefold() for value in benign_values}
        self._unnamed = unnamed

    def codes(self, labels: pl.Series, names: pl.Series | None = None, *, several: bool = False) -> NDArray[np.uint8]:
        """Looks up codes, and gives new kinds new ones.

        Args:
            labels: [M] texts.
            names: [M] what attacks are called, where a second column says so; it makes no frame an attack.
            several: Whether a label is a list of words, any of which may tell of an attack.

        Returns:
            [M] codes.

        Raises:
            DataError: There are more kinds than codes.
        """
        if names is not None:
            nameless = self._is_benign(labels) | self._is_benign(names)
            labels = names.zip_with(~nameless, labels)
        texts = labels.unique().sort().to_list()
        codes = [max(self._code(word) for word in (text.split() if several else [text])) for text in texts]
        return labels.replace_strict(texts, codes, return_dtype=pl.UInt8).to_numpy()

    def _is_benign(self, texts: pl.Series) -> pl.Series:
        return texts.is_in([text for text in texts.unique().to_list() if _canonical(text) in self._benign])

    def _code(self, text: str) -> int:
        word = _canonical(text)
        if word in self._benign:
            return 0
        name = self._unnamed if word in ATTACK_WORDS else word
        if name not in self.names:
            if len(self.names) == MAX_KINDS:
                raise DataError(
                    f"A log has at most {MAX_KINDS - 1} kinds of attack",
                    value=f"{name!r} would be one more",
                    remedy="Name the label column with `--set dataset.columns.label=...`",
                )
            self.names.append(name)
        return self.names.index(name)


class KindTable:
    """The attack kinds of a data set, met log by log.

    Attributes:
        names: Kinds by code; 0 is benign.
    """

    def __init__(self) -> None:
        self.names = [BENIGN]

    def codes(self, reader_kinds: Sequence[str]) -> NDArray[np.uint8]:
        """Returns the data set's code for each of a reader's; kinds not seen before are added.

        Raises:
            DataError: There are more kinds than codes.
        """
        self.names += [kind for kind in reader_kinds if kind not in self.names]
        if len(self.names) > MAX_KINDS:
            raise DataError(
                f"A data set may name at most {MAX_KINDS - 1} kinds of attack",
                value=f"{len(self.names) - 1}",
                remedy="Name the column that holds the label: --set dataset.columns.label=…",
            )
        return np.array([self.names.index(kind) for kind in reader_kinds], dtype=np.uint8)


def _canonical(text: str) -> str:
    """Letter case, quotes and blanks do not matter, and 1.0 is 1."""
    word = text.strip(' \t\r"').casefold()
    try:
        number = float(word)
    except ValueError:
        return word
    return str(int(number)) if number.is_integer() else word


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
class SampleSpec:
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
class TextSample:
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

    def spread(self, wanted: SampleSpec) -> TextSample:
        """Reads parts of the text, evenly spread from its beginning to its end, or all of it where that is no more.

        Raises:
            DataError: The file is damaged.
        """
        size, _, _ = self._state
        with self._reading() as stream:
            compressed = isinstance(stream, gzip.GzipFile)
            if not compressed and size <= wanted.pieces * wanted.piece_bytes:
                wanted = SampleSpec(pieces=1, piece_bytes=size, reach_bytes=0)
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
        return TextSample(
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


CLOCK_JITTER_S: Final = 0.010
"""Seconds that time may step back without counting as a bad row: public captures do so by up to 7.9 ms."""


TIME_RUNS_BACKWARDS: Final = f"time runs backwards by more than {CLOCK_JITTER_S * 1000:g} ms"


MAX_JITTER_SHARE: Final = 0.5
"""Share of the frames that may step back by a clock's jitter: a log whose time steps back at most frames is
reversed."""


_MAX_EXAMPLES: Final = 3


_MAX_TEXT: Final = 80
"""Characters of a bad row that are shown."""


@dataclass(frozen=True)
class RowProblem:
    """One row that counts against the limit."""

    line: int
    text: str
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}, in {self.text!r}"


@dataclass(kw_only=True)
class ReadReport:
    """What a reader met; complete once the log was read to its end.

    Attributes:
        path: The log.
        frames: Frames that were read.
        malformed: Rows that are no frame and were left out.
        reasons: How many of them for which reason.
        backwards: Frames (kept) whose time lies further before their predecessor's than clocks jitter.
        jitter: Frames (kept) whose time lies before their predecessor's by less than that.
        largest_jitter_s: The largest such step in seconds.
        examples: The first bad rows, in the order of the file.
        notes: Other things that a person should know, as sentences.
    """

    path: Path
    frames: int = 0
    malformed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    backwards: int = 0
    jitter: int = 0
    largest_jitter_s: float = 0.0
    examples: list[RowProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def length_mismatches(self) -> int:
        """Malformed rows whose DLC disagrees with their payload."""
        return self.reasons[LENGTH_DISAGREES]

    @property
    def bad_share(self) -> float:
        """Share of the rows that count against `max_malformed`."""
        return (self.malformed + self.backwards) / max(self.frames + self.malformed, 1)

    def add_rows(self, rows: ParsedRows, lines: pl.Series, first_line: int, previous: float) -> None:
        """Counts what one block brought.

        Args:
            rows: The block, parsed.
            lines: Its text.
            first_line: Number of its first line.
            previous: Time in seconds of the frame before it.
        """
        # Microseconds are what logs hold; at 10^9 seconds a float64 holds less.
        step_s = np.round(np.diff(rows.timestamp, prepend=previous), 6)
        backwards = rows.position[step_s < -CLOCK_JITTER_S]
        jitter_s = -step_s[(step_s < 0) & (step_s >= -CLOCK_JITTER_S)]
        self.frames += len(rows.timestamp)
        self.malformed += len(rows.malformed)
        self.reasons.update(dict(rows.malformed["reason"].value_counts().iter_rows()))
        self.backwards += len(backwards)
        self.jitter += len(jitter_s)
        self.largest_jitter_s = max(self.largest_jitter_s, jitter_s.max(initial=0.0))
        wanted = _MAX_EXAMPLES - len(self.examples)
        bad = [*rows.malformed.head(wanted).iter_rows()]
        bad += [(position, lines[position], TIME_RUNS_BACKWARDS) for position in backwards[:wanted].tolist()]
        self.examples += [
            RowProblem(first_line + position, shortened(text), reason)
            for position, text, reason in sorted(bad)[:wanted]
        ]

    def check(self, max_malformed: float) -> None:
        """Refuses a log in which too much is wrong.

        Raises:
            DataError: More rows are bad than allowed, time runs backwards throughout, or there is no frame at all.
        """
        if self.bad_share > max_malformed:
            enough = math.ceil(self.bad_share * 100) / 100
            raise DataError(
                f"At most {max_malformed:.2%} of a log's rows may be malformed or run backwards in time",
                value=(
                    f"{self.malformed + self.backwards:,} of {self.frames + self.malformed:,} rows of {self.path} are; "
                    f"{self.path}:{self.examples[0].line}: {self.examples[0].reason}, in {self.examples[0].text!r}"
                ),
                remedy=f"Mend the log, or allow more with `--set dataset.max_malformed={enough:g}`",
            )
        if self.jitter > MAX_JITTER_SHARE * self.frames:
            raise DataError(
                "A log's time must run forwards",
                value=f"{self.path} steps back at {self.jitter:,} of {self.frames:,} frames",
                remedy="Sort the log by time",
            )
        if not self.frames:
            raise DataError("A log must hold frames", value=f"{self.path} holds none that is well-formed")

    def summary(self) -> list[str]:
        """Says what was wrong, in sentences for the person; nothing if nothing was."""
        name = self.path.name
        sentences = [f"{name}: {note}" for note in self.notes]
        if self.malformed:
            reasons = ", ".join(f"{count:,} × {reason}" for reason, count in self.reasons.most_common())
            num_rows = self.frames + self.malformed
            sentences.append(f"{name}: {self.malformed:,} of {num_rows:,} rows are malformed and left out: {reasons}")
        if self.backwards:
            sentences.append(f"{name}: {TIME_RUNS_BACKWARDS} at {self.backwards:,} rows; their order was kept")
        if self.malformed or self.backwards:
            sentences += [f"{name}, {example}" for example in self.examples]
        if self.jitter:
            largest_ms = self.largest_jitter_s * 1000
            sentences.append(
                f"{name}: time steps back at {self.jitter:,} rows, by at most {largest_ms:.1f} ms; their order was kept"
            )
        return sentences


def shortened(text: str) -> str:
    """Cuts a text that is too long to be shown."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


RECOGNISED_LINES: Final = 1000
"""Lines that a format is recognised from: enough to outvote damaged rows, parsed by all grammars in milliseconds."""


RECOGNISED_SHARE: Final = 0.5
"""Share of those rows that must be well-formed: with fewer, the grammar matches by accident."""


@dataclass(frozen=True, kw_only=True)
class LogSample:
    """Parts of a log.

    Attributes:
        pieces: The frames of each.
        read_bytes: Bytes of their text.
        whole: Whether they are all there is.
        expected_frames: How many the whole log has, as they suggest.
    """

    pieces: list[Frames]
    read_bytes: int
    whole: bool
    expected_frames: int


class LogReader:
    """One CAN log, streamed.

    Args:
        path: The log, plain or gzipped.
        settings: Format, columns and limits.
        kind: What attacks are called whose label does not name them.
        block_bytes: Text parsed at once, in bytes.

    Raises:
        MissingDataError: There is no such file.
        ConfigError: A column was named that the log does not have.
        DataError: It is empty, binary, or of no known format.
    """

    def __init__(
        self, path: Path, settings: CanDatasetSettings, *, kind: str = "attack", block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._text = LogText(path, block_bytes)
        self._grammar = _recognise(self._text.sample, settings, path)
        self._kinds = LabelEncoder(settings.benign_values, kind)
        self._max_malformed = settings.max_malformed
        self._path = path
        self.report = ReadReport(path=path)
        """What was wrong with the log; complete once `blocks()` is exhausted."""

    @property
    def format(self) -> str:
        """The format's name, one of `FORMATS`."""
        return self._grammar.name

    @property
    def labelled(self) -> bool:
        """Whether the log says which frames are attacks."""
        return self._grammar.has("label")

    @property
    def kinds(self) -> list[str]:
        """Attack kinds by label code; the first is "benign". It grows as kinds are met."""
        return self._kinds.names

    def blocks(self) -> Iterator[Frames]:
        """Yields all frames in the order of the file.

        Raises:
            DataError: At the end, if more rows are bad than `max_malformed` allows, or if the file changed meanwhile.
        """
        self.report = ReadReport(path=self._path, notes=[self._grammar.assumption] if self._grammar.assumption else [])
        previous = -np.inf
        for first_line, lines in self._text.blocks():
            rows = parse_rows(lines, self._grammar)
            self.report.add_rows(rows, lines, first_line, previous)
            if len(rows.timestamp):
                previous = rows.timestamp[-1]
                yield self._frames(rows)
        self.report.check(self._max_malformed)

    @property
    def line_bytes(self) -> float:
        """Mean length of the first lines."""
        return self._text.line_bytes

    def pieces(self, wanted: SampleSpec) -> LogSample:
        """Reads parts of the log, spread over it. The report is of these parts, as if each were a log; nothing is
        refused for what is wrong with them, unless they are the whole log.

        Raises:
            DataError: The log is damaged, or read whole and more is wrong with it than may be.
        """
        self.report = ReadReport(path=self._path, notes=[self._grammar.assumption] if self._grammar.assumption else [])
        text = self._text.spread(wanted)
        pieces = []
        for lines in text.pieces:
            rows = parse_rows(lines, self._grammar)
            self.report.add_rows(rows, lines, 1, -np.inf)
            if len(rows.timestamp):
                pieces.append(self._frames(rows))
        if text.whole:
            self.report.check(self._max_malformed)
        expected_frames = round(self.report.frames * text.text_bytes / max(text.read_bytes, 1))
        return LogSample(pieces=pieces, read_bytes=text.read_bytes, whole=text.whole, expected_frames=expected_frames)

    def _frames(self, rows: ParsedRows) -> Frames:
        if rows.label is None:
            label = np.zeros(len(rows.timestamp), np.uint8)
        else:
            label = self._kinds.codes(rows.label, rows.kind, several=self._grammar.several_labels)
        return Frames(
            timestamp=rows.timestamp, can_id=rows.can_id, length=rows.length, payload=rows.payload, label=label
        )


def _recognise(sample: pl.Series, settings: CanDatasetSettings, path: Path) -> Grammar:
    """Chooses the grammar that reads most of a log's first rows.

    Raises:
        ConfigError: A column was named that the log does not have.
        DataError: There are no rows, or no grammar reads them.
    """
    known = (*header_grammars(sample, settings), *LINE_GRAMMARS)
    grammars = [grammar for grammar in known if settings.format in ("auto", grammar.name)]
    if not grammars:
        raise _unrecognised(settings.format, _where(path, *first_row(sample)))
    parsed = [parse_rows(sample.head(RECOGNISED_LINES), grammar) for grammar in grammars]
    num_good = [len(rows.position) for rows in parsed]
    best = int(np.argmax(num_good))
    num_rows = num_good[best] + len(parsed[best].malformed)
    if num_rows == 0:
        raise DataError("A log must hold frames", value=f"{path} holds no rows")
    if num_good[best] < RECOGNISED_SHARE * num_rows:
        if settings.format == "auto" and not grammars[best].header:
            raise _unrecognised(settings.format, _where(path, *first_row(sample)))
        position, line, reason = parsed[best].malformed.row(0)
        raise _unrecognised(settings.format, f"{_where(path, position, line)}: {reason}")
    return grammars[best]


def _where(path: Path, position: int, line: str) -> str:
    return f"{path}:{position + 1}: {shortened(line)!r}"


def _unrecognised(wanted: str, found: str) -> DataError:
    known = f"one of the formats {', '.join(FORMATS)}" if wanted == "auto" else f"the format {wanted}, as was asked for"
    return DataError(
        f"A CAN log must be in {known}",
        value=found,
        remedy=(
            "If it is a CSV file with a header, name its columns: `--set dataset.columns.id=...` (likewise timestamp, "
            "data, dlc, label); name the format with `--set dataset.format=...`"
        ),
    )
