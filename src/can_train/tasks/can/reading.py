"""Reads any CAN log as frames, in bounded memory: recognises its format from the content, parses it block by block,
keeps count of what is wrong with it and refuses it where that is too much.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from can_train.errors import DataError
from can_train.tasks.can.formats import LINE_GRAMMARS, Grammar, ParsedRows, first_row, parse_rows
from can_train.tasks.can.frames import Frames
from can_train.tasks.can.header_csv import header_grammars
from can_train.tasks.can.labels import AttackKinds
from can_train.tasks.can.log_text import BLOCK_BYTES, LogText, Spread
from can_train.tasks.can.read_report import ReadReport, shortened
from can_train.tasks.can.settings import FORMATS, CanDatasetSettings

RECOGNISED_LINES: Final = 1000
"""Lines that a format is recognised from: enough to outvote damaged rows, parsed by all grammars in milliseconds."""

RECOGNISED_SHARE: Final = 0.5
"""Share of those rows that must be well-formed: with fewer, the grammar matches by accident."""


@dataclass(frozen=True, kw_only=True)
class LogPieces:
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
        self._kinds = AttackKinds(settings.benign_values, kind)
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

    def pieces(self, wanted: Spread) -> LogPieces:
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
        return LogPieces(pieces=pieces, read_bytes=text.read_bytes, whole=text.whole, expected_frames=expected_frames)

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
