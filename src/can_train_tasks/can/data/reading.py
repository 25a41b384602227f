"""Reads any CAN log as frames, in bounded memory.

Shapes: M frames or rows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import DataError
from can_train_tasks.can.data.clocks import LogClock
from can_train_tasks.can.data.formats import NumberTexts, number_texts, recognise, shortened
from can_train_tasks.can.data.grammar import MAX_TIME_S, ParsedRows, parse_rows
from can_train_tasks.can.data.graphs import BENIGN, MAX_KINDS, Frames, Ints, counted, named_id, too_many_kinds
from can_train_tasks.can.data.log_text import BLOCK_BYTES, LogText, TextSample
from can_train_tasks.can.data.recordings import BLOCK_FRAMES, Recording, recording_format
from can_train_tasks.can.data.sidecars import find_sidecar
from can_train_tasks.can.settings import RECORDINGS, CanDatasetSettings

# Labels that mark an attack without naming it.
ATTACK_WORDS: Final = frozenset(
    {"1", "t", "true", "yes", "attack", "attacked", "anomaly", "anomalous", "malicious", "injected"}
)

CLOCK_JITTER_S: Final = 0.010  # a good row may step back in time by this much: public captures step back up to 7.9 ms
TIME_RUNS_BACKWARDS: Final = f"time runs backwards by more than {CLOCK_JITTER_S * 1000:g} ms"
MAX_JITTER_SHARE: Final = 0.5  # share of the frames that may step back by a clock's jitter; above, a log is reversed
_MAX_EXAMPLES: Final = 3
_MAX_CHANNELS: Final = 4  # channels that a notice names
_MAX_LOST: Final = 6  # CAN IDs, and labels, of malformed rows that a notice names
_LINE_OF_RECORDING_BYTES: Final = 40.0  # size of a frame in a binary log, with its header, uncompressed


class LogSample(NamedTuple):
    """Parts of a log."""

    text: TextSample
    frames: list[Frames]  # the frames of each part
    expected_frames: int  # estimate of the frames in the whole log


class _Block(NamedTuple):
    first_line: int  # number of the block's first line, counted from 1; in a binary log, number of the first frame
    lines: Sequence[str] | pl.Series
    rows: ParsedRows


class _TextLog:
    """A log of text, parsed in parts of `block_bytes`."""

    def __init__(self, path: Path, settings: CanDatasetSettings, block_bytes: int) -> None:
        self._path = path
        self.text = LogText(path, block_bytes)
        self.grammar, self._narrow, self.channel = recognise(self.text.first_lines, settings, path)
        if settings.channel:
            self._narrow = None
        self._clock = LogClock(self.grammar)

    def blocks(self) -> Iterator[_Block]:
        self._clock = LogClock(self.grammar)
        for first_line, lines in self.text.blocks():
            yield _Block(first_line, lines, self._parse(lines))

    def parts(self, sample: TextSample) -> Iterator[_Block]:
        for lines in sample.parts:
            yield _Block(1, lines, self._parse(lines))

    def _parse(self, lines: pl.Series) -> ParsedRows:
        if self._narrow is not None:
            rows = parse_rows(lines, self._narrow)
            if not rows.malformed["line"].str.contains(self.grammar.pattern).any():
                return self._absolute(rows, lines)
            self._narrow = None  # another channel, or a label
        return self._absolute(parse_rows(lines, self.grammar), lines)

    def _absolute(self, rows: ParsedRows, lines: pl.Series) -> ParsedRows:
        rows = self._clock.of(rows, lines)
        if self._clock.elapsed_s > MAX_TIME_S:
            raise DataError("The times of a log's lines must add up to one of a clock",
                            value=f"{self._path}: {self._clock.elapsed_s:.3g} s after its beginning",
                            remedy="Correct the log's times, or its line `timestamps relative`")  # fmt: skip
        return rows


@dataclass(frozen=True, kw_only=True)
class DecidedBases:
    """The bases of CAN IDs and payload bytes in the CSV logs of a data set.

    Attributes:
        settings: Settings for each log, by its path.
        notes: Sentences for the user about assumed bases.
    """

    settings: Mapping[Path, CanDatasetSettings]
    notes: Sequence[str]


def decide_bases(paths: Sequence[Path], settings: CanDatasetSettings, *, whole: bool = True) -> DecidedBases:
    """Decides the bases by all rows of all logs, since the first rows of one log may fit either base.

    Args:
        paths: The logs of a data set.
        settings: Settings of the data set; a base that the user chose is taken.
        whole: Whether logs are read further where their first lines do not tell the bases.

    Raises:
        ConfigError: A log lacks a column that the user named.
    """
    if not any(base.startswith("auto") for base in (settings.id_base, settings.byte_base)):
        return DecidedBases(settings=dict.fromkeys(paths, settings), notes=())
    texts = {path: written for path in paths if (written := _first_numbers(path, settings)) is not None}
    decided: dict[Path, CanDatasetSettings] = {}
    notes = []
    for group in _sources(texts):
        for path in group if whole else ():
            texts[path] = _all_numbers(path, {other: texts[other] for other in group})
        joined = reduce(NumberTexts.joined, (texts[path] for path in group))
        decided |= dict.fromkeys(group, joined.decided())
        more = f" and {counted(len(group) - 1, 'more log')}" if len(group) > 1 else ""
        notes += [f"{group[0].name}{more}: {note}" for note in joined.notes()]
    return DecidedBases(settings={path: decided.get(path, settings) for path in paths}, notes=notes)


def _sources(texts: Mapping[Path, NumberTexts]) -> list[list[Path]]:
    """Groups the logs whose numbers have one base.

    Logs with a header that tells its base form a group for each header. The other logs form one group; if some of their
    IDs can only be hexadecimal and some only decimal, they form a group for each header.
    """
    untold = [written for written in texts.values() if not written.header_base]
    is_mixed = len({written.certain_id_base() for written in untold} - {""}) > 1
    groups: dict[str, list[Path]] = defaultdict(list)
    for path, written in texts.items():
        groups[written.header if is_mixed or written.header_base else ""].append(path)
    return [*groups.values()]


def _first_numbers(path: Path, settings: CanDatasetSettings) -> NumberTexts | None:
    try:
        return None if recording_format(path) else number_texts(LogText(path).first_lines, settings)
    except DataError:
        return None  # the reader of the log raises the error


def _all_numbers(path: Path, texts: Mapping[Path, NumberTexts]) -> NumberTexts:
    """Reads a log until its numbers, together with the other logs' numbers, tell both bases."""
    written = texts[path]
    others = reduce(NumberTexts.joined, texts.values())
    for _, lines in LogText(path).blocks():
        if (both := others.joined(written)).id_base() and both.byte_base():
            break
        written = written.read(lines)
    return written


class LogReader:
    """One CAN log, streamed; `block_bytes` of text are parsed at once.

    `kind` is the kind of attacks whose label names no kind. The `report` of faults is complete once `blocks()` is
    exhausted.

    Raises:
        MissingDataError: The file does not exist.
        ConfigError: The log lacks a column that the user named.
        DataError: The log is empty, binary, or of no known format; or the package that reads it is not installed.
    """

    def __init__(
        self, path: Path, settings: CanDatasetSettings, *, kind: str = "attack", block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.path = path
        bases = decide_bases([path], settings)
        settings, self._notes = bases.settings[path], bases.notes
        binary = recording_format(path)
        if settings.format not in ("auto", binary) and (binary or settings.format in RECORDINGS):
            raise DataError(f"A log must be in the format {settings.format}, as was asked for",
                            value=f"{path} is {binary or 'text'}",
                            remedy="Leave out dataset.format: the format is recognised")  # fmt: skip
        self._log = Recording(path, binary) if binary else _TextLog(path, settings, block_bytes)
        self._grammar = None if isinstance(self._log, Recording) else self._log.grammar
        self._channel = settings.channel
        if settings.channel and self._grammar is not None and not self._grammar.has("channel"):
            raise DataError("Only a log that names interfaces has some to choose from", value=str(path),
                            remedy="Leave out dataset.channel")  # fmt: skip
        self._encoder = LabelEncoder(settings.benign_values, kind)
        self._max_malformed = settings.max_malformed
        self._has_labels = self._grammar is not None and self._grammar.has("label")
        self._all_labelled = self._has_labels and not (self._grammar and self._grammar.unlabelled_rows)
        self._sidecar = None if self._all_labelled else find_sidecar(path)
        self._start_s: float | None = None  # time of the log's first frame
        self.report = self._new_report()
        self.format = self._grammar.name if self._grammar else binary  # one of settings.FORMATS or settings.RECORDINGS
        self.kinds = self._encoder.names  # kinds by label code, "benign" first; grows while the log is read
        self.line_bytes = _LINE_OF_RECORDING_BYTES if isinstance(self._log, Recording) else self._log.text.line_bytes

    def blocks(self) -> Iterator[Frames]:
        """Yields all frames in the order of the file.

        Raises:
            DataError: More rows are bad than `max_malformed` allows (raised at the end), or the file changed meanwhile.
        """
        self.report = self._new_report()
        previous = -np.inf
        for block in self._chosen_blocks():
            self.report.add_rows(block.rows, block.lines, block.first_line, previous)
            if len(block.rows.timestamp):
                previous = block.rows.timestamp[-1]
                yield self._frames(block.rows)
        self.report.check(self._max_malformed)

    @property
    def labelled(self) -> bool:
        """Whether the log has labels of attacks.

        Where a log may have labels on some rows only, the answer is final once the log was read to its end.
        """
        by_sidecar = self._sidecar is not None and self._sidecar.whole
        return self._all_labelled or by_sidecar or self.report.labelled > 0

    @property
    def decimal_ids(self) -> bool:
        """Whether the log writes CAN IDs as decimal numbers."""
        return self._grammar is not None and self._grammar.id_base == 10

    @property
    def id_base(self) -> str:
        """Base of the log's CAN IDs, `hex` or `dec`; empty for a binary log."""
        return "" if self._grammar is None else {16: "hex", 10: "dec"}[self._grammar.id_base]

    @property
    def byte_base(self) -> str:
        """Base of the log's payload bytes, `hex` or `dec`; empty for a binary log and for other notations."""
        return "" if self._grammar is None else {"hex": "hex", "decimal": "dec"}.get(self._grammar.payload_code, "")

    def line_numbers(self, frames: Ints) -> Ints:
        """Returns the line numbers [R], counted from 1, of the log's frames `frames` [R].

        For a binary log these are the numbers of the frames.
        """
        found, seen = np.empty(len(frames), np.int64), 0
        for block in self._chosen_blocks():
            position = block.rows.position
            here = (frames >= seen) & (frames < seen + len(position))
            found[here] = block.first_line + position[frames[here] - seen]
            seen += len(position)
        return found

    def sample(self, num_parts: int, part_bytes: int, reach_bytes: int) -> LogSample:
        """Reads parts of the log (see `LogText.sample`); of a binary log, the beginning.

        The report covers the parts, each as if it were a separate log.

        Raises:
            DataError: The log is damaged, or the parts are the whole log and more rows are bad than allowed.
        """
        self.report = self._new_report()
        if isinstance(self._log, Recording):
            text, blocks = self._beginning(num_parts * part_bytes)
        else:
            text = self._log.text.sample(num_parts, part_bytes, reach_bytes)
            blocks = self._log.parts(text)
        parts = []
        for block in map(self._choose, blocks):
            self.report.add_rows(block.rows, block.lines, block.first_line, -np.inf)
            if len(block.rows.timestamp):
                parts.append(self._frames(block.rows))
        if text.complete:
            self.report.check(self._max_malformed)
        expected_frames = round(self.report.frames * text.text_bytes / max(text.read_bytes, 1))
        return LogSample(text, parts, expected_frames)

    def _beginning(self, wanted_bytes: int) -> tuple[TextSample, Iterator[_Block]]:
        """Reads the first blocks of a binary log, about `wanted_bytes` in all."""
        size = self.path.stat().st_size
        log = (_Block(*block) for block in self._log.blocks())
        blocks = list(islice(log, max(1, int(wanted_bytes / _LINE_OF_RECORDING_BYTES / BLOCK_FRAMES))))
        ended = next(log, None) is None
        read = size if ended else min(size, int(sum(len(one.rows.position) for one in blocks) * self.line_bytes))
        return TextSample([], read, size), iter(blocks)

    def _chosen_blocks(self) -> Iterator[_Block]:
        return (self._choose(_Block(*block)) for block in self._log.blocks())

    def _choose(self, block: _Block) -> _Block:
        """Counts the channels of a block's rows, and leaves out the channels that the user did not choose."""
        rows = block.rows
        if rows.channel is None:
            if isinstance(self._log, _TextLog) and self._log.channel:
                self.report.channels[self._log.channel] += len(rows.position)
            return block
        self.report.channels.update(dict(rows.channel.drop_nulls().value_counts().iter_rows()))
        if not self._channel:
            return block
        return block._replace(rows=rows.select((rows.channel == self._channel).fill_null(False).to_numpy()))

    def _new_report(self) -> ReadReport:
        notes = [self._grammar.assumption] if self._grammar and self._grammar.assumption else []
        if self._sidecar is not None:
            source = f"{self._sidecar.path.parent.name}/{self._sidecar.path.name}"
            unknown = f"{source} does not say when the log's attacks were, so it counts as unlabelled"
            notes.append(f"its labels come from {source}" if self._sidecar.whole else unknown)
        return ReadReport(
            path=self.path,
            chosen_channel=self._channel,
            base_notes=self._notes,
            notes=notes,
            some_labelled=self._has_labels and not self._all_labelled,
            decimal_ids=self.decimal_ids,
        )

    def _frames(self, rows: ParsedRows) -> Frames:
        label = np.zeros(len(rows.timestamp), np.uint8)
        if rows.label is not None:
            assert self._grammar is not None
            label = self._encoder.codes(rows.label, rows.kind, several=self._grammar.several_labels).copy()
        frames = Frames(rows.timestamp, rows.can_id, rows.length, rows.payload, label)
        if self._start_s is None:
            self._start_s = float(frames.timestamp[0])
        for injection in self._sidecar.injections if self._sidecar else ():
            marked = injection.marks(frames, self._start_s)
            if marked.any():
                label[marked] = self._encoder.code(injection.kind)
        return frames


class LabelEncoder:
    """Turns the label texts of one log into codes; `names` has the kinds by code, and code 0 is benign.

    Args:
        benign_values: Labels that mean: no attack; letter case does not matter.
        unnamed: The kind of attacks whose label names no kind.
    """

    def __init__(self, benign_values: Iterable[str], unnamed: str) -> None:
        self.names = [BENIGN]
        self._benign = {value.casefold() for value in benign_values}
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
        # A row without a label is benign, even if `benign_values` lacks the empty text.
        codes = [0 if text is None else max(map(self.code, text.split() if several else [text])) for text in texts]
        return labels.replace_strict(texts, codes, return_dtype=pl.UInt8).to_numpy()

    def _is_benign(self, texts: pl.Series) -> pl.Series:
        return texts.is_in([text for text in texts.unique().to_list() if _canonical(text) in self._benign])

    def code(self, text: str) -> int:
        """Looks up the code of a label, and gives a new kind a new one.

        Raises:
            DataError: There are more kinds than codes.
        """
        word = _canonical(text)
        if word in self._benign:
            return 0
        name = self._unnamed if word in ATTACK_WORDS else word
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


def _canonical(text: str) -> str:
    """Removes differences of letter case, quotes and blanks, and between 1.0 and 1."""
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
    """Counts of frames and faults; complete once the log was read to its end."""

    path: Path
    frames: int = 0  # frames that were read
    malformed: int = 0  # rows that are no frame and were left out
    reasons: Counter[str] = field(default_factory=Counter)  # malformed rows by reason
    backwards: int = 0  # frames that step back in time by more than `CLOCK_JITTER_S`; not left out
    jitter: int = 0  # frames that step back in time by less; not left out
    largest_jitter_s: float = 0.0
    examples: list[RowProblem] = field(default_factory=list)  # the first bad rows, in the order of the file
    error_frames: int = 0  # error frames, left out; not malformed
    xl_frames: int = 0  # CAN XL frames, left out; not malformed
    cut: int = 0  # frames with padding bytes after the bytes of the DLC
    labelled: int = 0  # frames whose row has a label
    some_labelled: bool = False  # whether rows may lack a label
    decimal_ids: bool = False  # whether the log writes IDs as decimal numbers
    ids: Counter[int] = field(default_factory=Counter)  # frames of each CAN ID
    lost_ids: Counter[int] = field(default_factory=Counter)  # malformed rows of each CAN ID, where the ID is known
    lost_labels: Counter[str] = field(default_factory=Counter)  # malformed rows of each label, where the label is known
    channels: Counter[str] = field(default_factory=Counter)  # frames of each channel, read or not
    chosen_channel: str = ""  # the only channel that was read; empty: all channels were read
    base_notes: Sequence[str] = ()  # sentences about the bases of numbers, which name the log
    notes: list[str] = field(default_factory=list)  # other sentences for the user

    @property
    def bad_share(self) -> float:
        """Share of the rows that count against `max_malformed`."""
        return (self.malformed + self.backwards) / max(self.frames + self.malformed, 1)

    def add_rows(self, rows: ParsedRows, lines: Sequence[str] | pl.Series, first_line: int, previous_s: float) -> None:
        """Counts one block, whose first line has the number `first_line`, after a frame of time `previous_s`."""
        # Rounded to the microseconds of logs: differences of float64 times near 10^9 s have errors of about 10^-7 s.
        step_s = np.round(np.diff(rows.timestamp, prepend=previous_s), 6)
        backwards = rows.position[step_s < -CLOCK_JITTER_S]
        jitter_s = -step_s[(step_s < 0) & (step_s >= -CLOCK_JITTER_S)]
        self.frames += len(rows.timestamp)
        self.malformed += len(rows.malformed)
        self.error_frames += rows.error_frames
        self.xl_frames += rows.xl_frames
        self.cut += rows.cut
        self.labelled += 0 if rows.label is None else rows.label.len() - rows.label.null_count()
        _count(self.ids, pl.Series(rows.can_id))
        _count(self.lost_ids, rows.malformed["id"])
        _count(self.lost_labels, rows.malformed["label"].str.strip_chars(' "\t'))
        _count(self.reasons, rows.malformed["reason"])
        self.backwards += len(backwards)
        self.jitter += len(jitter_s)
        self.largest_jitter_s = max(self.largest_jitter_s, jitter_s.max(initial=0.0))
        wanted = _MAX_EXAMPLES - len(self.examples)
        bad = [*rows.malformed.select("position", "line", "reason").head(wanted).iter_rows()]
        bad += [(position, lines[position], TIME_RUNS_BACKWARDS) for position in backwards[:wanted].tolist()]
        for position, text, reason in sorted(bad)[:wanted]:
            self.examples.append(RowProblem(first_line + position, reason, shortened(text)))

    def check(self, max_malformed: float) -> None:
        """Checks that a log has few faults.

        Raises:
            DataError: More rows are bad than allowed, time runs backwards throughout, or there is no frame at all.
        """
        if self.bad_share > max_malformed:
            bad = self.malformed + self.backwards
            are = "is" if bad == 1 else "are"
            enough = math.ceil(self.bad_share * 100) / 100
            first = self.examples[0]
            lost = self._lost()
            raise DataError(
                f"At most {max_malformed:.2%} of a log's rows may be malformed or run backwards in time",
                value=(
                    f"{bad:,} of {counted(self.frames + self.malformed, 'row')} of {self.path} {are}; "
                    f"{self.path}:{first.line}: {first.reason}, in {first.text!r}"
                ),
                remedy=f"Repair the log, or allow more with `--set dataset.max_malformed={enough:g}`"
                + (f", which leaves out {lost}" if lost else ""),
            )
        if self.jitter > MAX_JITTER_SHARE * self.frames:
            raise DataError("A log's time must run forwards",
                            value=f"{self.path} steps back at {self.jitter:,} of {counted(self.frames, 'frame')}",
                            remedy="Sort the log by time; if its times are differences, as of `candump -t d`, record "
                                   "times of a clock: `candump -t a`")  # fmt: skip
        if not self.frames and self.chosen_channel and self.channels:
            raise DataError("dataset.channel must be an interface of the log",
                            value=f"{self.chosen_channel}; {self.path} has {self._named_channels()}",
                            remedy=f"Use `--set dataset.channel={self.channels.most_common(1)[0][0]}`")  # fmt: skip
        if not self.frames:
            raise DataError("A log must hold frames", value=f"{self.path} holds none that is well-formed")

    def left_out(self) -> str:
        """Counts, in words, the rows that are no frames, by reason, and the frames of interfaces that were not chosen.

        The text is empty without such rows and frames.
        """
        others = self.channels.total() - self.channels[self.chosen_channel] if self.chosen_channel else 0
        parts = [
            counted(self.error_frames, "error frame") if self.error_frames else "",
            counted(self.xl_frames, "CAN XL frame") if self.xl_frames else "",
            f"{counted(others, 'frame')} not of {self.chosen_channel}" if others else "",
            f"{counted(self.malformed, 'malformed row')} ({self._reasons()})" if self.malformed else "",
        ]
        return ", ".join(filter(None, parts))

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
            first = self.channels.most_common(1)[0][0]
            done = (
                f"only {self.chosen_channel} was read"
                if self.chosen_channel
                else (f"they were taken for one bus; choose one with `--set dataset.channel={first}`")
            )
            sentences.append(f"{name}: its frames are of {self._named_channels()}: {done}")
        if self.error_frames:
            sentences.append(f"{name}: {counted(self.error_frames, 'error frame', 'were')} left out")
        if self.xl_frames:
            xl_frames = counted(self.xl_frames, "CAN XL frame", "were")
            sentences.append(f"{name}: {xl_frames} left out: CAN XL has no CAN IDs")
        if self.cut:
            its, were = ("its", "was") if self.cut == 1 else ("their", "were")
            cut = counted(self.cut, "payload", "have")
            sentences.append(f"{name}: {cut} more bytes than {its} DLC, and {were} cut to it")
        if self.some_labelled and 0 < self.labelled < self.frames:
            unlabelled = self.frames - self.labelled
            sentences.append(
                f"{name}: {counted(self.labelled, 'row', 'have')} a label; the {counted(unlabelled, 'row')} without a "
                f"label {'is' if unlabelled == 1 else 'are'} benign"
            )
        if self.malformed:
            num_rows = self.frames + self.malformed
            are = "is" if self.malformed == 1 else "are"
            rows = f"{self.malformed:,} of {counted(num_rows, 'row')} {are} malformed and left out"
            sentences.append(f"{name}: {rows}: {self._reasons()}")
            sentences.append(f"{name}: left out {are} {self._lost()}")
        if self.backwards:
            sentences.append(f"{name}: {TIME_RUNS_BACKWARDS} at {counted(self.backwards, 'row')}; the order was kept")
        sentences += [f"{name}, {example}" for example in self.examples]
        if self.jitter:
            by = f"by at most {self.largest_jitter_s * 1000:.1f} ms"
            sentences.append(f"{name}: time steps back at {counted(self.jitter, 'row')}, {by}; the order was kept")
        return sentences
