"""Reads any CAN log as frames, in bounded memory.

Shapes: M frames or rows.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import DataError, MissingDataError
from can_train.tasks.can.data import formats
from can_train.tasks.can.data.graphs import BENIGN, MAX_KINDS, Frames, Ints, too_many_kinds
from can_train.tasks.can.settings import CanDatasetSettings

# Bytes of text read at once. Smaller blocks parse slower; text and parsed columns together take about fifteen times as
# much memory.
BLOCK_BYTES: Final = 16 * 2**20
RECOGNISED_BYTES: Final = 2**20  # beginning of a log by which its format is recognised
RECOGNISED_LINES: Final = 1000  # enough to outvote damaged rows, parsed by all grammars in milliseconds
RECOGNISED_SHARE: Final = 0.5  # of those rows must be well-formed: with fewer, the grammar matches by accident
# A longer line is no row of any log. Without this bound a file without line ends would be read whole.
MAX_LINE_BYTES: Final = RECOGNISED_BYTES
# Labels that mark an attack without naming it.
ATTACK_WORDS: Final = frozenset(
    {"1", "t", "true", "yes", "attack", "attacked", "anomaly", "anomalous", "malicious", "injected"}
)

_SKIP_BYTES: Final = 2**20  # decompressed at once on the way to a later part of a text
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CONTROL_BYTES: Final = bytes(set(range(32)) - set(b"\t\n\v\f\r"))  # no text has them
# Share of them from which a file is binary: recorded or compressed numbers have about a tenth, a log that was being
# written when the power failed has a few.
_MAX_CONTROL_SHARE: Final = 0.01
_NO_SEPARATOR: Final = "\x01"  # occurs in no line, so that the CSV parser takes every line for one field

CLOCK_JITTER_S: Final = 0.010  # time may step back so far in a good row: public captures do so by up to 7.9 ms
TIME_RUNS_BACKWARDS: Final = f"time runs backwards by more than {CLOCK_JITTER_S * 1000:g} ms"
MAX_JITTER_SHARE: Final = 0.5  # of the frames may step back by a clock's jitter; a log with more is in reverse
_MAX_EXAMPLES: Final = 3
_SHOWN_CHARACTERS: Final = 80  # of a malformed row


class TextSample(NamedTuple):
    """Parts of a text."""

    parts: list[pl.Series]  # the lines of each, null where empty
    read_bytes: int  # size of all of them
    text_bytes: int  # size of the whole text; of a compressed one, an estimate from the part that was read

    @property
    def complete(self) -> bool:
        """Whether the parts are the whole text."""
        return self.read_bytes >= self.text_bytes


class LogSample(NamedTuple):
    """Parts of a log."""

    text: TextSample
    frames: list[Frames]  # of each part
    expected_frames: int  # estimate of the frames in the whole log


class LogReader:
    """One CAN log, plain or gzipped, streamed; `block_bytes` of text are parsed at once.

    `kind` names the attacks whose label does not. The `report` of what was wrong is complete once `blocks()` is
    exhausted.

    Raises:
        MissingDataError: There is no such file.
        ConfigError: The log lacks a column that the user named.
        DataError: It is empty, binary, or of no known format.
    """

    def __init__(
        self, path: Path, settings: CanDatasetSettings, *, kind: str = "attack", block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._text = LogText(path, block_bytes)
        self._grammar = _recognise(self._text.first_lines, settings, path)
        self._encoder = LabelEncoder(settings.benign_values, kind)
        self._max_malformed = settings.max_malformed
        self.path = path
        self.report = self._new_report()
        self.format = self._grammar.name  # one of settings.FORMATS
        self.labelled = self._grammar.has("label")
        self.kinds = self._encoder.names  # by label code, the first is "benign"; grows as kinds are met
        self.line_bytes = self._text.line_bytes

    def blocks(self) -> Iterator[Frames]:
        """Yields all frames in the order of the file.

        Raises:
            DataError: More rows are bad than `max_malformed` allows (raised at the end), or the file changed meanwhile.
        """
        self.report = self._new_report()
        previous = -np.inf
        for first_line, lines in self._text.blocks():
            rows = formats.parse_rows(lines, self._grammar)
            self.report.add_rows(rows, lines, first_line, previous)
            if len(rows.timestamp):
                previous = rows.timestamp[-1]
                yield self._frames(rows)
        self.report.check(self._max_malformed)

    @property
    def decimal_ids(self) -> bool:
        """Whether the log writes CAN IDs as decimal numbers."""
        return self._grammar.id_base == 10

    def line_numbers(self, frames: Ints) -> Ints:
        """Returns [R] the numbers, counted from 1, of the lines that hold the log's frames `frames` [R]."""
        found, seen = np.empty(len(frames), np.int64), 0
        for first_line, lines in self._text.blocks():
            position = formats.parse_rows(lines, self._grammar).position
            here = (frames >= seen) & (frames < seen + len(position))
            found[here] = first_line + position[frames[here] - seen]
            seen += len(position)
        return found

    def sample(self, num_parts: int, part_bytes: int, reach_bytes: int) -> LogSample:
        """Reads parts of the log (see `LogText.sample`). The report covers them, each as if it were a log of its own.

        Raises:
            DataError: The log is damaged, or the parts are the whole log and more rows are bad than allowed.
        """
        self.report = self._new_report()
        text = self._text.sample(num_parts, part_bytes, reach_bytes)
        parts = []
        for lines in text.parts:
            rows = formats.parse_rows(lines, self._grammar)
            self.report.add_rows(rows, lines, 1, -np.inf)
            if len(rows.timestamp):
                parts.append(self._frames(rows))
        if text.complete:
            self.report.check(self._max_malformed)
        expected_frames = round(self.report.frames * text.text_bytes / max(text.read_bytes, 1))
        return LogSample(text, parts, expected_frames)

    def _new_report(self) -> ReadReport:
        return ReadReport(path=self.path, notes=[self._grammar.assumption] if self._grammar.assumption else [])

    def _frames(self, rows: formats.ParsedRows) -> Frames:
        if rows.label is None:
            label = np.zeros(len(rows.timestamp), np.uint8)
        else:
            label = self._encoder.codes(rows.label, rows.kind, several=self._grammar.several_labels)
        return Frames(rows.timestamp, rows.can_id, rows.length, rows.payload, label)


def _recognise(sample: pl.Series, settings: CanDatasetSettings, path: Path) -> formats.Grammar:
    """Returns the grammar that reads most of a log's first rows."""
    known = (*formats.header_grammars(sample, settings), *formats.LINE_GRAMMARS)
    grammars = [grammar for grammar in known if settings.format in ("auto", grammar.name)]
    if not grammars:
        raise _unrecognised(settings.format, path, *formats.first_row(sample))
    parsed = [formats.parse_rows(sample.head(RECOGNISED_LINES), grammar) for grammar in grammars]
    num_good = [len(rows.position) for rows in parsed]
    best = int(np.argmax(num_good))
    num_rows = num_good[best] + len(parsed[best].malformed)
    if num_rows == 0:
        raise DataError("A log must hold frames", value=f"{path} holds no rows", remedy="Give another log")
    if num_good[best] < RECOGNISED_SHARE * num_rows:
        if settings.format == "auto" and not grammars[best].header:
            raise _unrecognised(settings.format, path, *formats.first_row(sample))
        raise _unrecognised(settings.format, path, *parsed[best].malformed.row(0))
    return grammars[best]


def _unrecognised(wanted: str, path: Path, position: int, line: str, reason: str = "") -> DataError:
    names = dict.fromkeys(grammar.name for grammar in (*formats.PUBLISHED_CSV_GRAMMARS, *formats.LINE_GRAMMARS))
    all_formats = f"one of the formats {', '.join(names)}, columns"
    return DataError(
        f"A CAN log must be in {all_formats if wanted == 'auto' else f'the format {wanted}, as was asked for'}",
        value=f"{path}:{position + 1}: {_shortened(line)!r}" + (f": {reason}" if reason else ""),
        remedy=(
            "If it is a CSV file with a header, name its columns: `--set dataset.columns.id=NAME` (the same for "
            "timestamp, data, dlc, label); or choose the format: `--set dataset.format=FORMAT`"
        ),
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


class LogText:
    """The text of one log; `first_lines`, null where empty, have the mean length `line_bytes`.

    Raises:
        MissingDataError: There is no such file.
        DataError: It cannot be read, or is empty or binary.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self._path = path
        self._block_bytes = block_bytes
        with self._open() as stream:
            self._state = _file_state(path)
            start = stream.read(RECOGNISED_BYTES)
        if not start.removeprefix(_BYTE_ORDER_MARK).strip():
            raise DataError("A log must hold frames", value=f"{path} is empty", remedy="Give another log")
        if len(start) - len(start.translate(None, _CONTROL_BYTES)) > _MAX_CONTROL_SHARE * len(start):
            raise DataError(
                "A log must be text (UTF-8, or gzipped)",
                value=f"{path} is binary",
                remedy="Convert it, for example with `candump` or python-can's `can_logconvert`, to a text format",
            )
        whole_lines = start.rfind(b"\n") + 1 if len(start) == RECOGNISED_BYTES else len(start)
        if not whole_lines:
            raise _endless_line(path)
        self.first_lines = _split_lines(start[:whole_lines])
        self.line_bytes = whole_lines / max(len(self.first_lines), 1)

    def blocks(self) -> Iterator[tuple[int, pl.Series]]:
        """Yields the number of a block's first line, counted from 1, and its lines, null where empty.

        Raises:
            DataError: The file changed since it was first opened, is damaged, or has a line of absurd length.
        """
        next_line = 1
        with self._open() as stream:
            for text in self._whole_lines(stream):
                yield next_line, _split_lines(text)
                next_line += text.count(b"\n")
            if _file_state(self._path) != self._state:
                raise changed_log(self._path)

    def sample(self, num_parts: int, part_bytes: int, reach_bytes: int) -> TextSample:
        """Reads parts of the text that are evenly spread over it, or all of it where that is no more.

        Args:
            num_parts: How many parts.
            part_bytes: Size of each.
            reach_bytes: Size of the beginning of a compressed text in which all parts lie: it is read from its start.

        Raises:
            DataError: The file is damaged.
        """
        size, _, _ = self._state
        with self._open() as stream:
            compressed = isinstance(stream, gzip.GzipFile)
            if not compressed and size <= num_parts * part_bytes:
                num_parts, part_bytes = 1, size
            last_start = (reach_bytes if compressed else size) - part_bytes
            step = max(last_start // max(num_parts - 1, 1), part_bytes)
            found: list[bytes] = []
            for start in range(0, num_parts * step, step):
                if not compressed:
                    stream.seek(start)
                # GzipFile.seek reads on in small steps; larger ones take less time.
                while stream.tell() < start and stream.read(min(start - stream.tell(), _SKIP_BYTES)):
                    pass
                text = stream.read(part_bytes)
                ended = len(text) < part_bytes or (not compressed and stream.tell() == size)
                # Incomplete lines at either end belong to no part, unless the text itself begins or ends there.
                begin = text.find(b"\n") + 1 or len(text) if start else 0
                found.append(text[begin : len(text) if ended else text.rfind(b"\n") + 1])
                if ended:
                    break
            text_bytes = stream.tell()
            if isinstance(stream, gzip.GzipFile) and not ended:
                text_bytes = text_bytes * size // max(cast(IO[bytes], stream.fileobj).tell(), 1)
        parts = [_split_lines(text) for text in found if text]
        return TextSample(parts, sum(map(len, found)), text_bytes if compressed else size)

    def _whole_lines(self, stream: IO[bytes]) -> Iterator[bytes]:
        """Yields blocks that end where a line ends."""
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
    def _open(self) -> Iterator[IO[bytes]]:
        """Opens the file, which is decompressed if it begins like a gzip file, and translates errors."""
        try:
            with self._path.open("rb") as raw:
                # By the content: suffixes may be missing or wrong.
                compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
                raw.seek(0)
                yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if compressed else raw
        except FileNotFoundError as error:
            raise MissingDataError("A log must exist", value=str(self._path)) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError("A compressed log must be a whole gzip file", value=f"{self._path}: {error}",
                            remedy="Copy or download it again") from error  # fmt: skip
        except OSError as error:
            found = f"{self._path}: {error.strerror}"
            raise DataError(
                "A log must be a file that can be read", value=found, remedy="Check its permissions"
            ) from error


def changed_log(path: Path) -> DataError:
    """Makes the error for a log that changed between two looks at it."""
    return DataError("A log must not change while it is read", value=str(path),
                     remedy="Wait until the recording has ended, or read a copy")  # fmt: skip


def _file_state(path: Path) -> tuple[int, int, int]:
    # The inode shows a file that was put in the place of another one of the same size and time.
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _endless_line(path: Path) -> DataError:
    return DataError(f"A line of a log is at most {MAX_LINE_BYTES:,} bytes long", value=str(path))


def _split_lines(text: bytes) -> pl.Series:
    """Splits whole lines, without their line ends and a byte order mark before them; an empty line is null."""
    if not text.isascii() or _NO_SEPARATOR.encode() in text:
        text = text.decode(errors="replace").replace(_NO_SEPARATOR, "\N{REPLACEMENT CHARACTER}").encode()
    # The CSV parser uses all cores and makes no Python object for a line.
    return pl.read_csv(
        io.BytesIO(text), has_header=False, separator=_NO_SEPARATOR, quote_char=None, schema={"line": pl.String},
        raise_if_empty=False,
    )["line"]  # fmt: skip


class LabelEncoder:
    """Turns the label texts of one log into codes; `names` are the kinds by code, and 0 is benign.

    Args:
        benign_values: Labels that mean: no attack; letter case does not matter.
        unnamed: The kind of attacks whose label does not name one.
    """

    def __init__(self, benign_values: Iterable[str], unnamed: str) -> None:
        self.names = [BENIGN]
        self._benign = {value.casefold() for value in benign_values}
        self._unnamed = unnamed

    def codes(self, labels: pl.Series, names: pl.Series | None = None, *, several: bool = False) -> NDArray[np.uint8]:
        """Looks up codes [M], and gives new kinds new ones.

        Args:
            labels: [M] texts.
            names: [M] names of attacks, where a second column gives them; it makes no frame an attack.
            several: Whether a label is a list of words, any of which may mark an attack.

        Raises:
            DataError: There are more kinds than codes.
        """
        if names is not None:
            nameless = self._is_benign(labels) | self._is_benign(names)
            labels = names.zip_with(~nameless, labels)
        # Sorted, so that codes do not depend on the order in which polars finds the texts.
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
                raise too_many_kinds("A log", f"{name!r} would be one more")
            self.names.append(name)
        return self.names.index(name)


def _canonical(text: str) -> str:
    """Removes differences of letter case, quotes and blanks, and those between 1.0 and 1."""
    word = text.strip(' \t\r"').casefold()
    try:
        number = float(word)
    except ValueError:
        return word
    return str(int(number)) if number.is_integer() else word


class RowProblem(NamedTuple):
    """A row that counts against `max_malformed`."""

    line: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}, in {self.text!r}"


@dataclass(kw_only=True)
class ReadReport:
    """What a reader met; complete once the log was read to its end."""

    path: Path
    frames: int = 0  # that were read
    malformed: int = 0  # rows that are no frame and were left out
    reasons: Counter[str] = field(default_factory=Counter)  # how many of them for which reason
    backwards: int = 0  # frames, not left out, whose time lies before their predecessor's by more than clocks jitter
    jitter: int = 0  # frames, not left out, whose time lies before their predecessor's by less than that
    largest_jitter_s: float = 0.0
    examples: list[RowProblem] = field(default_factory=list)  # the first bad rows, in the order of the file
    notes: list[str] = field(default_factory=list)  # other things that the user should know, as sentences

    @property
    def bad_share(self) -> float:
        """Share of the rows that count against `max_malformed`."""
        return (self.malformed + self.backwards) / max(self.frames + self.malformed, 1)

    def add_rows(self, rows: formats.ParsedRows, lines: pl.Series, first_line: int, previous_s: float) -> None:
        """Counts one block, whose first line has the number `first_line`, after a frame of time `previous_s`."""
        # Microseconds are what logs hold; at 10^9 seconds a float64 holds less.
        step_s = np.round(np.diff(rows.timestamp, prepend=previous_s), 6)
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
        for position, text, reason in sorted(bad)[:wanted]:
            self.examples.append(RowProblem(first_line + position, reason, _shortened(text)))

    def check(self, max_malformed: float) -> None:
        """Refuses a log in which too much is wrong.

        Raises:
            DataError: More rows are bad than allowed, time runs backwards throughout, or there is no frame at all.
        """
        if self.bad_share > max_malformed:
            enough = math.ceil(self.bad_share * 100) / 100
            first = self.examples[0]
            raise DataError(
                f"At most {max_malformed:.2%} of a log's rows may be malformed or run backwards in time",
                value=(
                    f"{self.malformed + self.backwards:,} of {self.frames + self.malformed:,} rows of {self.path} are; "
                    f"{self.path}:{first.line}: {first.reason}, in {first.text!r}"
                ),
                remedy=f"Repair the log, or allow more with `--set dataset.max_malformed={enough:g}`",
            )
        if self.jitter > MAX_JITTER_SHARE * self.frames:
            raise DataError("A log's time must run forwards",
                            value=f"{self.path} steps back at {self.jitter:,} of {self.frames:,} frames",
                            remedy="Sort the log by time")  # fmt: skip
        if not self.frames:
            raise DataError("A log must hold frames", value=f"{self.path} holds none that is well-formed")

    def summary(self) -> list[str]:
        """Describes what was wrong, in sentences for the user; empty if nothing was."""
        name = self.path.name
        sentences = [f"{name}: {note}" for note in self.notes]
        if self.malformed:
            reasons = ", ".join(f"{count:,} × {reason}" for reason, count in self.reasons.most_common())
            num_rows = self.frames + self.malformed
            sentences.append(f"{name}: {self.malformed:,} of {num_rows:,} rows are malformed and left out: {reasons}")
        if self.backwards:
            sentences.append(f"{name}: {TIME_RUNS_BACKWARDS} at {self.backwards:,} rows; their order was kept")
        sentences += [f"{name}, {example}" for example in self.examples]
        if self.jitter:
            largest_ms = self.largest_jitter_s * 1000
            sentences.append(
                f"{name}: time steps back at {self.jitter:,} rows, by at most {largest_ms:.1f} ms; their order was kept"
            )
        return sentences
