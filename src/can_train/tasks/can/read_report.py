"""What was wrong with a log, counted while it is read, and whether that is too much."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from can_train.errors import DataError
from can_train.tasks.can.formats import LENGTH_DISAGREES, ParsedRows

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
class BadRow:
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
    examples: list[BadRow] = field(default_factory=list)
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
            BadRow(first_line + position, shortened(text), reason) for position, text, reason in sorted(bad)[:wanted]
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
