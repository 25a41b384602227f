"""Reads any CAN log as frames, in bounded memory.

Shapes: M frames or rows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train.io.units import counted
from can_train_tasks.can.data.clocks import (
    CLOCK_JITTER_S,
    MAX_FRAMES_PER_SECOND,
    MOST_ROWS,
    LogClock,
    are_differences,
    may_be_differences,
)
from can_train_tasks.can.data.formats import (
    NO_ROWS,
    NumberTexts,
    Recognised,
    column_roles,
    number_texts,
    recognise,
    set_option,
    shortened,
)
from can_train_tasks.can.data.grammar import (
    ATTACK_WORDS,
    MAX_TIME_S,
    ParsedRows,
    canonical_label,
    label_word,
    parse_rows,
)
from can_train_tasks.can.data.graphs import (
    BENIGN,
    MAX_KINDS,
    PAUSE_S,
    USUAL_FRAMES_A_PAUSE,
    Frames,
    Ints,
    named_id,
    too_many_kinds,
)
from can_train_tasks.can.data.line_formats import TransmitRequests
from can_train_tasks.can.data.log_text import BLOCK_BYTES, LogText, TextSample
from can_train_tasks.can.data.recordings import Recording, TableText, recording_format
from can_train_tasks.can.data.sidecars import Injection, find_sidecar
from can_train_tasks.can.settings import MISSING_WORDS, RECORDINGS, CanDatasetSettings

TIME_RUNS_BACKWARDS: Final = f"time runs backwards by more than {CLOCK_JITTER_S * 1000:g} ms"
MAX_JITTER_SHARE: Final = 0.5  # share of the frames that may step back by a clock's jitter; above, a log is reversed
_HEADING_LINES: Final = 100  # lines that tell the base and the columns of a log
_MIN_CLOCK_FRAMES: Final = 50  # frames that no bus sends within one step of a clock
_COARSE_SHARE: Final = 0.9  # share of the frames with the time of the frame before: a clock of 10 ms, on most buses
_MAX_EXAMPLES: Final = 3
_MAX_CHANNELS: Final = 4  # channels that a notice names
_MAX_LOST: Final = 6  # CAN IDs, and labels, of malformed rows that a notice names

# Number of a block's first line, counted from 1 (in a binary log: of its first frame); the lines; the rows.
Block = tuple[int, Sequence[str] | pl.Series, ParsedRows]


class LogSample(NamedTuple):
    """Parts of a log."""

    text: TextSample
    frames: list[Frames]  # the frames of each part
    expected_frames: int  # estimate of the frames in the whole log


def _open_text(
    path: Path, settings: CanDatasetSettings, block_bytes: int = BLOCK_BYTES
) -> tuple[LogText | TableText, dict[str, str]]:
    """Opens a log of text, or a table as text; and returns the settings that the types of the table's columns decide.

    Raises as `LogText`, `TableText` and `column_roles` do.
    """
    if recording_format(path) != "parquet":
        return LogText(path, block_bytes), {}
    table = TableText(path)
    try:
        return table, table.typed(column_roles(table.first_lines, settings.columns)) | {"format": "columns"}
    except DataError as error:
        raise DataError(error.rule, value=f"{path}: {error.value}",
                        remedy=f"{error.remedy}; of X-CANIDS, give the folder raw") from error  # fmt: skip


class _TextLog:
    """A log of text, parsed in parts of `block_bytes`.

    Attributes:
        typed: Settings that the types of a table's columns decide, such as the base of IDs that are numbers.
        other_columns: See `Recognised`.
        benign_column: See `Recognised`.
    """

    def __init__(self, path: Path, settings: CanDatasetSettings, block_bytes: int) -> None:
        self._path = path
        self._text, self.typed = _open_text(path, settings, block_bytes)
        settings = replace(settings, **self.typed)  # type: ignore[arg-type]
        recognised = self._recognised(settings)
        self.grammar, self._narrow, self.channel, self.other_columns, self.benign_column = recognised
        if settings.channel:
            self._narrow = None
        self._clock, self._requests = LogClock(self.grammar), TransmitRequests(self.grammar)
        self.line_bytes = self._text.line_bytes

    def _recognised(self, settings: CanDatasetSettings) -> Recognised:
        """Recognises the format by the first lines; by later ones if the log begins with megabytes of error frames."""
        first = self._text.first_lines
        try:
            return recognise(first, settings, self._path)
        except DataError as error:
            if error.rule != NO_ROWS:
                raise
            for _, lines in self._text.blocks():
                try:
                    return recognise(pl.concat([first.head(_HEADING_LINES), lines]), settings, self._path)
                except DataError as later:
                    if later.rule != NO_ROWS:
                        raise
            raise

    def blocks(self) -> Iterator[Block]:
        self._clock, self._requests = LogClock(self.grammar), TransmitRequests(self.grammar)
        return ((first_line, lines, self._parse(lines)) for first_line, lines in self._text.blocks())

    def sample(self, num_parts: int, part_bytes: int, reach_bytes: int) -> tuple[TextSample, Iterable[Block]]:
        sample = self._text.sample(num_parts, part_bytes, reach_bytes)
        return sample, ((1, lines, self._parse(lines)) for lines in sample.parts)

    def _parse(self, lines: pl.Series) -> ParsedRows:
        rows = parse_rows(lines, self._narrow or self.grammar)
        if self._narrow is not None and rows.malformed["line"].str.contains(self.grammar.pattern).any():
            self._narrow = None  # another channel, or a label
            rows = parse_rows(lines, self.grammar)
        rows = self._clock.of(self._requests.of(rows, lines), lines)
        if self._clock.elapsed_s > MAX_TIME_S:
            raise DataError("The times of the log's lines add up to more than any clock shows",
                            value=f"{self._path}: {self._clock.elapsed_s:.3g} s after its beginning",
                            remedy="Correct the log's times, or its line `timestamps relative`")  # fmt: skip
        return rows


def decide_bases(
    paths: Sequence[Path], settings: CanDatasetSettings, *, whole: bool = True
) -> tuple[dict[Path, CanDatasetSettings], list[str]]:
    """Decides the bases of CAN IDs and payload bytes in CSV logs.

    They are decided by all rows of all logs, since the first rows of one log may fit either base.

    Args:
        paths: The logs of a data set.
        settings: Settings of the data set; a base that the user chose is taken.
        whole: Whether logs are read further where their first lines do not tell the bases.

    Returns:
        Settings for each log, by its path; and sentences for the user about assumed bases.

    Raises:
        ConfigError: A log lacks a column that the user named.
    """
    decided, notes = dict.fromkeys(paths, settings), list[str]()
    if not any(base.startswith("auto") for base in (settings.id_base, settings.byte_base)):
        return decided, notes
    texts: dict[Path, NumberTexts] = {}
    for path in paths:
        with suppress(DataError):  # the reader of the log raises the error
            if recording_format(path) in ("", "parquet"):
                text, typed = _open_text(path, settings)
                written = number_texts(text.first_lines, replace(settings, **typed))  # type: ignore[arg-type]
                texts |= {} if written is None else {path: written}
    differ = _tell_both_bases(texts)
    for group in _sources(texts, by_own_base=differ):
        for path in group if whole else ():
            # A log is read until its numbers, together with the other logs' numbers, tell both bases.
            of_group = reduce(NumberTexts.joined, (texts[log] for log in group))
            for _, lines in _open_text(path, settings)[0].blocks():
                if (joined := of_group.joined(texts[path])).id_base() and joined.byte_base():
                    break
                texts[path] = texts[path].read(lines)
        joined = reduce(NumberTexts.joined, (texts[path] for path in group))
        bases = joined.decided()
        decided |= dict.fromkeys(group, replace(settings, id_base=bases.id_base, byte_base=bases.byte_base))
        more = f" and {counted(len(group) - 1, 'more log')}" if len(group) > 1 else ""
        notes += [f"{group[0].name}{more}: {note}" for note in joined.notes()]
        if bases.id_base == "dec" and not joined.header_base and differ:
            fact = (
                "CAN IDs were read as decimal numbers, as the log tells, although those of other logs are hexadecimal"
            )
            notes.append(f"{group[0].name}{more}: {fact}")
    return decided, notes


def _sources(texts: Mapping[Path, NumberTexts], *, by_own_base: bool) -> list[list[Path]]:
    """Groups the logs whose numbers have one base.

    Logs with a header that tells its base form a group for each header. The other logs form one group; if some of their
    IDs can only be hexadecimal and some only decimal, they form a group for each header. With `by_own_base`, logs whose
    IDs tell that they are decimal have a group of their own beside hexadecimal logs.
    """
    untold = [written for written in texts.values() if not written.header_base]
    is_mixed = len({written.certain_id_base() for written in untold} - {""}) > 1
    groups: dict[str, list[Path]] = defaultdict(list)
    for path, written in texts.items():
        bases = f"{written.settings.id_base} {written.settings.byte_base}"  # numbers of a table have their own
        of_header = written.header if is_mixed or written.header_base else ""
        own = written.id_base() or "hex" if by_own_base and not written.header_base else ""
        groups[f"{bases} {of_header} {own}"].append(path)
    return [*groups.values()]


def _tell_both_bases(texts: Mapping[Path, NumberTexts]) -> bool:
    """Tells whether the IDs of some logs are hexadecimal, by themselves, and those of others decimal."""
    return {"hex", "dec"} <= {written.id_base() for written in texts.values() if not written.header_base}


@contextmanager
def one_of(paths: Sequence[Path]) -> Iterator[None]:
    """Adds to an error about a log, in the block, that a file that is no log must lie elsewhere, if it is one of
    several.
    """
    try:
        yield
    except DataError as error:
        if len(paths) > 1:
            error.remedy = f"{error.remedy}. A file that is no log must lie outside of the folder of logs"
        raise


class LogReader:
    """One CAN log, streamed; `block_bytes` of text are parsed at once.

    `kind` is the kind of attacks whose label names no kind. The `report` of faults is complete once `blocks()` is
    exhausted.

    Attributes:
        format: A name of `settings.FORMATS` or `settings.RECORDINGS`.
        id_base: Base of the log's CAN IDs, `hex` or `dec`; empty where they are numbers and no texts.
        byte_base: Base of the log's payload bytes, `hex` or `dec`; empty where they are no such texts.
        kinds: Kinds by label code, "benign" first; grows while the log is read.

    Raises:
        MissingDataError: The file does not exist.
        ConfigError: The log lacks a column that the user named.
        DataError: The log is empty, binary, or of no known format; or the package that reads it is not installed.
    """

    def __init__(
        self, path: Path, settings: CanDatasetSettings, *, kind: str = "attack", block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.path = path
        decided, self._base_notes = decide_bases([path], settings)
        settings = decided[path]
        binary = recording_format(path)
        if settings.format not in ("auto", binary) and (binary or settings.format in RECORDINGS):
            raise DataError(f"The log is {binary or 'text'}, and {settings.format} was asked for", value=str(path),
                            remedy="Leave out dataset.format: the format is recognised")  # fmt: skip
        is_text = binary in ("", "parquet")
        self._log = _TextLog(path, settings, block_bytes) if is_text else Recording(path, binary)
        self._grammar = grammar = self._log.grammar
        self._channel = settings.channel
        if settings.channel and grammar is not None and not grammar.has("channel"):
            raise DataError(f"The log names no interface, and {settings.channel} was asked for", value=str(path),
                            remedy="Leave out dataset.channel")  # fmt: skip
        # Words that a person has named mean what they say.
        named = settings.benign_values != CanDatasetSettings().benign_values
        self._benign_column = "" if named or not isinstance(self._log, _TextLog) else self._log.benign_column
        self._encoder = LabelEncoder(settings.benign_values, kind, marks_benign=bool(self._benign_column))
        self._max_malformed = settings.max_malformed
        self._has_labels = grammar is not None and grammar.has("label")
        self._all_labelled = self._has_labels and not (grammar and grammar.unlabelled_rows)
        self._sidecar = None if self._all_labelled else find_sidecar(path)
        self._start_s: float | None = None  # time of the log's first frame, on any interface
        self.format = binary or (grammar.name if grammar else "")
        typed = self._log.typed if isinstance(self._log, _TextLog) else {}
        written = grammar if "id_base" not in typed else None
        self.id_base = {16: "hex", 10: "dec"}[written.id_base] if written else ""
        written = grammar if "byte_base" not in typed else None
        self.byte_base = {"hex": "hex", "decimal": "dec"}.get(written.payload_code, "") if written else ""
        self.report = self._new_report()
        self.kinds = self._encoder.names
        self.line_bytes = self._log.line_bytes

    def blocks(self) -> Iterator[Frames]:
        """Yields all frames in the order of the file.

        Raises:
            DataError: More rows are bad than `max_malformed` allows (raised at the end), or the file changed meanwhile.
        """
        yield from self._read(self._log.blocks(), continuous=True)
        self.report.check(self._max_malformed)

    @property
    def labelled(self) -> bool:
        """Whether the log has labels of attacks.

        Where a log may have labels on some rows only, the answer is final once the log was read to its end.
        """
        by_sidecar = self._sidecar is not None and self._sidecar.whole
        unread = self._all_labelled and not self.report.frames
        return unread or by_sidecar or self.report.labelled > 0

    def line_numbers(self, frames: Ints) -> Ints:
        """Returns the line numbers [R], counted from 1, of the log's frames `frames` [R].

        For a binary log these are the numbers of the frames.
        """
        numbers, seen = np.empty(len(frames), np.int64), 0
        for first_line, _, rows in self._chosen(self._log.blocks()):
            here = (frames >= seen) & (frames < seen + len(rows.position))
            numbers[here] = first_line + rows.position[frames[here] - seen]
            seen += len(rows.position)
        return numbers

    def sample(self, num_parts: int, part_bytes: int, reach_bytes: int) -> LogSample:
        """Reads parts of the log (see `LogText.sample`); of a binary log, the beginning.

        The report covers the parts, each as if it were a separate log.

        Raises:
            DataError: The log is damaged, or the parts are the whole log and more rows are bad than allowed.
        """
        text, blocks = self._log.sample(num_parts, part_bytes, reach_bytes)
        parts = list(self._read(blocks, continuous=False))
        if text.complete:
            self.report.check(self._max_malformed)
        expected_frames = round(self.report.frames * text.text_bytes / max(text.read_bytes, 1))
        return LogSample(text, parts, expected_frames)

    def _read(self, blocks: Iterable[Block], *, continuous: bool) -> Iterator[Frames]:
        """Yields the frames of blocks, and reports faults; `continuous` if each block follows the block before."""
        self.report = self._new_report()
        previous_s = -np.inf
        for first_line, lines, rows in self._chosen(blocks):
            if rows.label is not None:
                rows = replace(rows, label=self._encoder.without_missing(rows.label))
            self.report.add_rows(rows, lines, first_line, previous_s)
            if len(rows.timestamp):
                previous_s = rows.timestamp[-1] if continuous else -np.inf
                yield self._frames(rows)

    def _chosen(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Counts the channels of rows, and leaves out the channels that the user did not choose."""
        for first_line, lines, rows in blocks:
            if self._start_s is None and len(rows.timestamp):
                self._start_s = float(rows.timestamp[0])
            if rows.channel is not None:
                _count(self.report.channels, rows.channel)
            elif self._log.channel:
                self.report.channels[self._log.channel] += len(rows.position)
            if self._channel and rows.channel is not None:
                rows = rows.select((rows.channel == self._channel).fill_null(False).to_numpy())
            yield first_line, lines, rows

    def _new_report(self) -> ReadReport:
        notes = [self._grammar.assumption] if self._grammar and self._grammar.assumption else []
        if self._benign_column:
            notes.append(f"true cells of its column {self._benign_column!r} mark benign frames, and false ones attacks")
        if self._sidecar is not None:
            source = f"{self._sidecar.path.parent.name}/{self._sidecar.path.name}"
            unknown = f"{source} does not say when the log's attacks were, so it counts as unlabelled"
            notes.append(f"its labels come from {source}" if self._sidecar.whole else unknown)
        return ReadReport(
            path=self.path,
            chosen_channel=self._channel,
            base_notes=self._base_notes,
            notes=notes,
            decimal_ids=self.id_base == "dec",
            may_be_differences=self._grammar is not None and may_be_differences(self._grammar),
            marked=Counter(dict.fromkeys(self._sidecar.injections if self._sidecar else (), 0)),
            late_labels=self._grammar is not None and self._grammar.late_labels,
            other_columns=self._log.other_columns if isinstance(self._log, _TextLog) and not self._sidecar else "",
        )

    def _frames(self, rows: ParsedRows) -> Frames:
        label = np.zeros(len(rows.timestamp), np.uint8)
        if rows.label is not None:
            several = self._grammar is not None and self._grammar.several_labels
            label = self._encoder.codes(rows.label, rows.kind, several=several).copy()
            self.report.attacks += int(np.count_nonzero(label))
        frames = Frames(rows.timestamp, rows.can_id, rows.length, rows.payload, label)
        for injection in self._sidecar.injections if self._sidecar else ():
            marked = injection.marks(frames, self._start_s or 0.0)
            self.report.marked[injection] += int(np.count_nonzero(marked))
            if marked.any():
                label[marked] = self._encoder.code(injection.kind)
        return frames


class LabelEncoder:
    """Turns the label texts of one log into codes; `names` has the kinds by code, and code 0 is benign.

    Args:
        benign_values: Labels that mean: no attack; letter case does not matter.
        unnamed: The kind of attacks whose label names no kind.
        marks_benign: Whether true words mark benign frames, and false words attacks.
    """

    def __init__(self, benign_values: Iterable[str], unnamed: str, *, marks_benign: bool = False) -> None:
        self.names = [BENIGN]
        self._attacks = ATTACK_WORDS
        self._told_benign = {label_word(value) for value in benign_values}
        if marks_benign:
            self._attacks, self._told_benign = frozenset(self._told_benign), {*ATTACK_WORDS}
        self._benign = self._told_benign | MISSING_WORDS
        self._unnamed = unnamed

    def codes(self, labels: pl.Series, names: pl.Series | None = None, *, several: bool = False) -> NDArray[np.uint8]:
        """Looks up codes [M], and gives new kinds new ones.

        Args:
            labels: [M] texts, null in rows without a label.
            names: [M] names of attacks from a second column; a name alone makes no frame an attack.
            several: Whether a label is a list of words, where any word may mark an attack.

        Raises:
            DataError: There are more kinds than codes.
        """
        if names is not None:
            nameless = self._is_benign(labels) | self._is_benign(names)
            labels = names.zip_with(~nameless, labels)
        # Sorted, so that codes do not depend on polars' order of the texts.
        texts = labels.unique().sort().to_list()
        codes = [0 if text is None else max(map(self.code, text.split() if several else [text])) for text in texts]
        return labels.replace_strict(texts, codes, return_dtype=pl.UInt8).to_numpy()

    def _is_benign(self, texts: pl.Series) -> pl.Series:
        return texts.is_in([text for text in texts.unique().to_list() if label_word(text) in self._benign])

    def without_missing(self, labels: pl.Series) -> pl.Series:
        """Replaces texts by null that stand for a missing label, unless they are benign values."""
        missing = [
            text
            for text in labels.unique().drop_nulls().to_list()
            if (word := canonical_label(text)) in MISSING_WORDS and word not in self._told_benign
        ]
        return labels.set(labels.is_in(missing).fill_null(False), None) if missing else labels

    def code(self, text: str) -> int:
        """Looks up the code of a label, and gives a new kind a new one.

        Raises:
            DataError: There are more kinds than codes.
        """
        word = label_word(text)
        if word in self._benign:
            return 0
        name = self._unnamed if word in self._attacks else canonical_label(text)
        if name not in self.names:
            if len(self.names) == MAX_KINDS:
                raise too_many_kinds("A log", f"{name!r} would be one more")
            self.names.append(name)
        return self.names.index(name)


def _largest(counter: Counter[Any]) -> list[tuple[Any, int]]:
    """Returns the largest counts; equal counts in the order of their keys."""
    return sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:_MAX_LOST]


def _count(counter: Counter[Any], values: pl.Series) -> None:
    counter.update(dict(values.drop_nulls().value_counts().iter_rows()))


class RowProblem(NamedTuple):
    """A row that counts against `max_malformed`."""

    line: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}, in {self.text!r}"


@dataclass(kw_only=True)
class ReadReport:
    """Counts of frames and faults; complete once the log was read to its end."""

    path: Path
    frames: int = 0  # frames that were read
    same_times: int = 0  # frames with the time of the frame before
    malformed: int = 0  # rows that are no frame and were left out
    reasons: Counter[str] = field(default_factory=Counter)  # malformed rows by reason
    first_s: float | None = None  # time of the first frame
    has_clock: bool = False  # whether any frame has another time than the first one
    backwards: int = 0  # frames that step back in time by more than `CLOCK_JITTER_S`; not left out
    jitter: int = 0  # frames that step back in time by less; not left out
    largest_jitter_s: float = 0.0
    traffic_s: float = 0.0  # sum of the steps ahead in time, without pauses
    pauses: int = 0  # steps ahead by `PAUSE_S` or more
    paused_s: float = 0.0  # sum of the pauses
    first_pause_line: int = 0
    examples: list[RowProblem] = field(default_factory=list)  # the first bad rows, in the order of the file
    error_frames: int = 0  # error frames, left out; not malformed
    xl_frames: int = 0  # CAN XL frames, left out; not malformed
    requests: int = 0  # requests to send frames that the log has, too; left out
    cut: int = 0  # frames with padding bytes after the bytes of the DLC
    labelled: int = 0  # frames whose row has a label
    labels: Counter[str] = field(default_factory=Counter)  # frames of each label
    late_labels: bool = False  # whether labels are cells behind the last column that the header names
    directions: Counter[str] = field(default_factory=Counter)  # frames of each direction, where rows end in it
    attacks: int = 0  # frames whose label in the log marks an attack
    other_columns: str = ""  # sentence about columns that may have labels, and are not read
    decimal_ids: bool = False  # whether the log writes IDs as decimal numbers
    may_be_differences: bool = False  # whether the format leaves open what the times count from
    first_times: list[float] = field(default_factory=list)  # of the first frames in seconds, where that is open
    ids: Counter[int] = field(default_factory=Counter)  # frames of each CAN ID
    lost_ids: Counter[int] = field(default_factory=Counter)  # malformed rows of each CAN ID, where the ID is known
    lost_labels: Counter[str] = field(default_factory=Counter)  # malformed rows of each label, where the label is known
    channels: Counter[str] = field(default_factory=Counter)  # frames of each channel, read or not
    chosen_channel: str = ""  # the only channel that was read; empty: all channels were read
    base_notes: Sequence[str] = ()  # sentences about the bases of numbers, which name the log
    notes: list[str] = field(default_factory=list)  # other sentences for the user
    # Frames that each attack of a file beside the log marks.
    marked: Counter[Injection] = field(default_factory=Counter)

    @property
    def bad_share(self) -> float:
        """Share of the rows that count against `max_malformed`."""
        return (self.malformed + self.backwards) / max(self.frames + self.malformed, 1)

    def add_rows(self, rows: ParsedRows, lines: Sequence[str] | pl.Series, first_line: int, previous_s: float) -> None:
        """Counts one block, whose first line has the number `first_line`, after a frame of time `previous_s`."""
        # Rounded to the microseconds of logs: differences of float64 times near 10^9 s have errors of about 10^-7 s.
        exact_s = np.diff(rows.timestamp, prepend=previous_s)
        step_s = np.round(exact_s, 6)
        backwards = rows.position[step_s < -CLOCK_JITTER_S]
        jitter_s = -step_s[(step_s < 0) & (step_s >= -CLOCK_JITTER_S)]
        if self.may_be_differences and len(self.first_times) < MOST_ROWS:
            self.first_times += rows.timestamp[: MOST_ROWS - len(self.first_times)].tolist()
        self.frames += len(rows.timestamp)
        if len(rows.timestamp):
            self.first_s = float(rows.timestamp[0]) if self.first_s is None else self.first_s
            self.has_clock = self.has_clock or bool((rows.timestamp != self.first_s).any())
        self.malformed += len(rows.malformed)
        self.error_frames += rows.error_frames
        self.xl_frames += rows.xl_frames
        self.cut += rows.cut
        self.requests += rows.requests
        self.labelled += 0 if rows.label is None else rows.label.len() - rows.label.null_count()
        if rows.label is not None:
            _count(self.labels, rows.label.str.strip_chars(' "\t\r'))
        if rows.direction is not None:
            _count(self.directions, rows.direction)
        _count(self.ids, pl.Series(rows.can_id))
        _count(self.lost_ids, rows.malformed["id"])
        _count(self.lost_labels, rows.malformed["label"].str.strip_chars(' "\t'))
        _count(self.reasons, rows.malformed["reason"])
        self.backwards += len(backwards)
        self.jitter += len(jitter_s)
        self.largest_jitter_s = max(self.largest_jitter_s, jitter_s.max(initial=0.0))
        self.same_times += int(np.count_nonzero(exact_s == 0.0))
        self.traffic_s += float(exact_s[(step_s >= -CLOCK_JITTER_S) & (step_s < PAUSE_S)].sum())
        if len(pauses := np.flatnonzero((step_s >= PAUSE_S) & np.isfinite(step_s))):
            self.first_pause_line = self.first_pause_line or first_line + int(rows.position[pauses[0]])
            self.pauses += len(pauses)
            self.paused_s += float(step_s[pauses].sum())
        wanted = _MAX_EXAMPLES - len(self.examples)
        bad = [*rows.malformed.select("position", "line", "reason").head(wanted).iter_rows()]
        bad += [(position, lines[position], TIME_RUNS_BACKWARDS) for position in backwards[:wanted].tolist()]
        for position, text, reason in sorted(bad)[:wanted]:
            self.examples.append(RowProblem(first_line + position, reason, shortened(text)))

    def check(self, max_malformed: float) -> None:
        """Checks that a log has few faults.

        Raises:
            DataError: More rows are bad than allowed, time runs backwards throughout or stands still, the times are
                differences from line to line, or there is no frame at all.
        """
        if are_differences(np.array(self.first_times), final=True):
            raise DataError("The times of the log are differences from line to line, as `candump -t d` prints",
                            value=str(self.path),
                            remedy="Record times of a clock: `candump -t a`; can-train detect reads differences"
                            )  # fmt: skip
        if self.bad_share > max_malformed:
            bad = self.malformed + self.backwards
            are = "is" if bad == 1 else "are"
            enough = math.ceil(self.bad_share * 100) / 100
            first = self.examples[0]
            lost = self._lost()
            raise DataError(
                f"{bad:,} of {counted(self.frames + self.malformed, 'row')} of {self.path} {are} malformed or "
                f"{'runs' if bad == 1 else 'run'} backwards in time, at most {max_malformed:.2%} may be",
                value=f"{self.path}:{first.line}: {first.reason}, in {first.text!r}",
                remedy=f"Repair the log, or allow more with `--set dataset.max_malformed={enough:g}`"
                + (f", which leaves out {lost}" if lost else ""),
            )
        if self.jitter > MAX_JITTER_SHARE * self.frames:
            raise DataError("Time runs backwards in the log",
                            value=f"{self.path} steps back at {self.jitter:,} of {counted(self.frames, 'frame')}",
                            remedy="Sort the log by time; if its times are differences, as of `candump -t d`, record "
                                   "times of a clock: `candump -t a`")  # fmt: skip
        if self.frames >= _MIN_CLOCK_FRAMES and not self.has_clock:
            told = f"all {counted(self.frames, 'frame')} of {self.path} have the time {self.first_s:.15g}"
            raise DataError("The clock of the log stands still", value=told,
                            remedy="Record the log with the times of a clock, or name the column of the times: "
                                   "`--set dataset.columns.timestamp=NAME`")  # fmt: skip
        if not self.frames and self.chosen_channel and self.channels:
            raise DataError("dataset.channel is no interface of the log",
                            value=f"{self.chosen_channel}; {self.path} has {self._named_channels()}",
                            remedy=f"Use `--set dataset.channel={self.channels.most_common(1)[0][0]}`")  # fmt: skip
        if not self.frames:
            raise DataError("The log holds no well-formed frame", value=f"{self.path}", remedy="Give another log")

    def left_out(self) -> str:
        """Counts, in words, the rows that are no frames, by reason, and the frames of interfaces that were not chosen.

        The text is empty without such rows and frames.
        """
        not_chosen = self.channels.total() - self.channels[self.chosen_channel] if self.chosen_channel else 0
        parts = {
            counted(self.error_frames, "error frame"): self.error_frames,
            counted(self.xl_frames, "CAN XL frame"): self.xl_frames,
            counted(self.requests, "transmit request"): self.requests,
            f"{counted(not_chosen, 'frame')} not of {self.chosen_channel}": not_chosen,
            f"{counted(self.malformed, 'malformed row')} ({self._reasons()})": self.malformed,
        }
        return ", ".join(part for part, count in parts.items() if count)

    def _reasons(self) -> str:
        return ", ".join(f"{count:,} × {reason}" for reason, count in self.reasons.most_common())

    def _lost(self) -> str:
        """Names the known CAN IDs and labels of malformed rows; empty if no such ID or label is known."""
        if not self.malformed:
            return ""
        rows = []
        for can_id, count in _largest(self.lost_ids):
            total = count + self.ids[can_id]
            every = f"all {count:,} rows" if count > 1 else "the only row"
            part = f"{count:,} of {total:,} rows" if count < total else every
            rows.append(f"{part} of {named_id(can_id, decimal=self.decimal_ids)}")
        if more := len(self.lost_ids) - len(rows):
            rows.append(f"rows of {more:,} other IDs" if more > 1 else "rows of another ID")
        if unknown := self.malformed - self.lost_ids.total():
            rows.append(f"{counted(unknown, 'row')} without a readable ID")
        labels = [f"{count:,} × {label!r}" for label, count in _largest(self.lost_labels) if label]
        return ", ".join(rows) + (f"; the labels of these rows are {', '.join(labels)}" if labels else "")

    def _named_channels(self) -> str:
        most = self.channels.most_common(_MAX_CHANNELS)
        named = [f"{channel} ({counted(count, 'frame')})" for channel, count in most]
        more = len(self.channels) - len(named)
        return ", ".join(named) + (f" and {counted(more, 'more interface')}" if more else "")

    def summary(self) -> list[str]:
        """Describes the faults in sentences for the user; no sentences without faults."""
        name = self.path.name
        sentences = [*self.base_notes, *(f"{name}: {note}" for note in self.notes)]
        if len(self.channels) > 1:
            largest = self.channels.most_common(1)[0][0]
            done = f"they were taken for one bus; choose one with `--set dataset.channel={largest}`"
            if self.chosen_channel:
                done = f"only {self.chosen_channel} was read"
            sentences.append(f"{name}: its frames are of {self._named_channels()}: {done}")
        if unmarked := [str(injection) for injection, count in self.marked.items() if not count]:
            attacks = counted(len(unmarked), "attack", "mark")
            named = "; ".join(unmarked[:_MAX_EXAMPLES]) + ("; …" if len(unmarked) > _MAX_EXAMPLES else "")
            sentences.append(
                f"{name}: {attacks} no frame ({named}): correct the times (seconds), IDs (hexadecimal) or payloads"
            )
        if self.error_frames:
            sentences.append(f"{name}: {counted(self.error_frames, 'error frame', 'were')} left out")
        if self.xl_frames:
            xl_frames = counted(self.xl_frames, "CAN XL frame", "were")
            sentences.append(f"{name}: {xl_frames} left out: CAN XL has no CAN IDs")
        if self.requests:
            requests = counted(self.requests, "request", "were")
            sentences.append(
                f"{name}: {requests} to send a frame (TxRq) left out: the log has the sent frames (Tx), too"
            )
        if self.cut:
            its, were = ("its", "was") if self.cut == 1 else ("their", "were")
            cut = counted(self.cut, "payload", "have")
            sentences.append(f"{name}: {cut} more bytes than {its} DLC, and {were} cut to it")
        if self.other_columns and not self.labelled:
            sentences.append(f"{name}: {self.other_columns}")
        if self.late_labels and self.labels:
            values = ", ".join(f"{label!r} ({count:,})" for label, count in _largest(self.labels))
            sentences.append(f"{name}: the cells behind the last column were read as labels: {values}")
        if {"R", "T"} <= self.directions.keys():
            rows = " and ".join(f"{letter} ({counted(self.directions[letter], 'row')})" for letter in ("R", "T"))
            option = set_option("dataset.format", "candump_labelled")
            sentences.append(
                f"{name}: {rows} at the end were read as the direction, received and sent; if T marks attacks, "
                f"use `{option}`"
            )
        if 0 < self.frames == self.attacks:
            values = ", ".join(f"{label!r} ({count:,})" for label, count in _largest(self.labels))
            option = set_option("dataset.benign_values", ["LABEL"])
            every = "the only frame is an attack" if self.frames == 1 else f"all {self.frames:,} frames are attacks"
            by_labels = f"by the labels {values}; if a label means no attack, name it: `{option}`"
            sentences.append(f"{name}: {every} {by_labels}")
        if 0 < self.labelled < self.frames:
            unlabelled = self.frames - self.labelled
            sentences.append(
                f"{name}: {counted(self.labelled, 'row', 'have')} a label; the {counted(unlabelled, 'row')} without a "
                f"label {'is' if unlabelled == 1 else 'are'} benign"
            )
        if self.malformed:
            are, rows = "is" if self.malformed == 1 else "are", counted(self.frames + self.malformed, "row")
            left_out = f"{self.malformed:,} of {rows} {are} malformed and left out"
            sentences.append(f"{name}: {left_out}: {self._reasons()}")
            sentences.append(f"{name}: left out {are} {self._lost()}")
        if self.backwards:
            sentences.append(f"{name}: {TIME_RUNS_BACKWARDS} at {counted(self.backwards, 'row')}; the order was kept")
        sentences += [f"{name}, {example}" for example in self.examples]
        if self.jitter:
            by = f"by at most {self.largest_jitter_s * 1000:.1f} ms"
            sentences.append(f"{name}: time steps back at {counted(self.jitter, 'row')}, {by}; the order was kept")
        return [*sentences, *self._about_the_clock()]

    def _about_the_clock(self) -> list[str]:
        """Says where the log pauses, and whether it has more frames a second than a bus carries."""
        name, sentences = self.path.name, list[str]()
        # Logs of slow buses have such steps everywhere.
        if self.pauses and self.traffic_s > 0 and self.frames > USUAL_FRAMES_A_PAUSE * self.pauses:
            first = "" if self.pauses == 1 else "first "
            sentences.append(
                f"{name}: time jumps ahead by {PAUSE_S:g} s or more at {counted(self.pauses, 'row')}, {first}at line "
                f"{self.first_pause_line:,}, by {self.paused_s:,.0f} s in all: that time counts as no traffic"
            )
        if self.frames >= _MIN_CLOCK_FRAMES and self.same_times > _COARSE_SHARE * self.frames:
            together = self.frames / (self.frames - self.same_times)
            sentences.append(
                f"{name}: {together:,.0f} frames on average have the same time, so that gaps between frames are lost: "
                "record times with microseconds"
            )
        buses = 1 if self.chosen_channel else max(len(self.channels), 1)
        per_second = self.frames / self.traffic_s if self.traffic_s else 0.0
        if self.frames >= _MIN_CLOCK_FRAMES and per_second > buses * MAX_FRAMES_PER_SECOND:
            sentences.append(
                f"{name}: {per_second:,.0f} frames a second are more than a bus carries ({MAX_FRAMES_PER_SECOND:,}): "
                "its times may be in another unit, such as days; write them in seconds"
            )
        return sentences
