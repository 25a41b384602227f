"""Frames as they arrive: text on a pipe, as candump prints it, or messages of a CAN interface.

Shapes: M frames.
"""

from __future__ import annotations

import os
import re
import select
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from can_train.errors import ConfigError, DataError
from can_train.tasks.can.data.clocks import TICKS_PER_SECOND, LogClock
from can_train.tasks.can.data.formats import header_grammars, with_unit
from can_train.tasks.can.data.grammar import Grammar, parse_rows
from can_train.tasks.can.data.graphs import MAX_PAYLOAD_BYTES, Frames
from can_train.tasks.can.data.line_formats import line_grammars, variants
from can_train.tasks.can.settings import CanDatasetSettings

STANDARD_INPUT: Final = "-"
_STANDARD_INPUT_DESCRIPTOR: Final = 0
SILENCE_S: Final = (
    2.0  # without a frame, after which a bus is called silent: many times the period of any usual message
)
# Seconds between two looks at the input. Frames are parsed together: one by one they would take fifty times as long.
# It delays an alarm by less than a tenth of what a window of a busy bus lasts.
PAUSE_S: Final = 0.005
READ_BYTES: Final = 2**20  # of text that are parsed together at most, a tenth of a second of work
MAX_LINE_BYTES: Final = 2**16  # a longer line is no frame, and is not kept in memory
RECOGNISED_LINES: Final = 1000  # first lines that are kept until a format reads one of them
UNIT_LINES: Final = 200  # first lines of a CSV log by which the unit of its times is guessed where no name tells it
UNKNOWN_FORMAT: Final = "of no known format"
MESSAGES: Final = 4096  # of an interface that are taken together at most
# Rows from which it is told whether times are differences (candump -td), and the share of steps back that tells it:
# differences go up and down like noise, and clocks step back rarely.
DELTA_ROWS: Final = 20
DELTA_SHARE: Final = 0.25
LONGEST_DELTA_S: Final = 100.0  # no clock's time is so small, but for one that begins at zero and runs forwards
_EXAMPLES: Final = 3  # reasons for malformed lines that are told

# `  can0  12A   [2]  00 F0`: candump's screen format without -t, whose lines have no time.
_WITHOUT_TIME: Final = re.compile(r"[ \t]*[A-Za-z][!-~]*[ \t]+[0-9A-Fa-f]{3,8}[ \t]+(?:(?:TX|RX)[ \t-]+)?\[\d+\]")


class FrameInput(ABC):
    """Where frames arrive.

    Attributes:
        frames: How many arrived.
        malformed: How many lines or messages were none, and were left out, by reason.
        notes: What a person should know about the input, in sentences.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.malformed: Counter[str] = Counter()
        self.notes: list[str] = []

    @abstractmethod
    def batches(self) -> Iterator[Frames | None]:
        """Yields frames soon after they arrive, until the input ends; None where none arrives for `SILENCE_S`."""

    @abstractmethod
    def close(self) -> None:
        """Gives the input back."""

    def malformed_text(self) -> str:
        """Tells what was left out, as a sentence; empty if nothing was."""
        count = self.malformed.total()
        if not count:
            return ""
        found = [f"{number:,} × {reason}" for reason, number in self.malformed.most_common(_EXAMPLES) if number]
        return f"{count:,} {'line is' if count == 1 else 'lines are'} malformed and left out: {', '.join(found)}"


def open_input(name: str, dataset: CanDatasetSettings) -> FrameInput:
    """Opens standard input (`-`), a file, or a CAN interface (`can0`, or `INTERFACE:CHANNEL` as python-can has them).

    Raises:
        ConfigError: It cannot be opened, or python-can is not installed.
    """
    try:
        if name == STANDARD_INPUT:
            os.fstat(_STANDARD_INPUT_DESCRIPTOR)  # it may be closed
            return TextInput(_STANDARD_INPUT_DESCRIPTOR, dataset)
        if Path(name).exists() and not Path(name).is_dir():
            return TextInput(os.open(name, os.O_RDONLY), dataset)
    except OSError as error:
        what = "standard input" if name == STANDARD_INPUT else name
        raise ConfigError("The input must be readable", value=f"{what}: {error.strerror}",
                          remedy="Check its permissions, or pipe: candump -L can0 | can-train detect RUN"
                          ) from error  # fmt: skip
    return BusInput(_open_bus(name))


class TextInput(FrameInput):
    """Lines of text from a file descriptor, in any of the formats that logs have."""

    def __init__(self, descriptor: int, dataset: CanDatasetSettings) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._settings = dataset
        self._grammar: Grammar | None = None
        self._log_clock: LogClock | None = None  # once the grammar is known
        self._unknown: list[str | None] = []  # the first lines, as long as no format reads one of them
        self._untimed = False  # whether the lines have no times, and get those of their arrival
        self._deltas: bool | None = None  # whether the times are differences; None: not known yet
        self._undecided: list[Frames] = []
        self._clock_s = 0.0  # sum of the differences
        self._arrived_s = time.time()

    def batches(self) -> Iterator[Frames | None]:
        """Yields the frames of whole lines."""
        rest, skipping = b"", False
        for text in self._chunks():
            if text is None:
                yield from self._recognised(final=True)
                yield None
                continue
            whole, newline, rest = (rest + text).rpartition(b"\n")
            if skipping and newline:
                # What is left of a line that was too long.
                whole, skipping = whole.partition(b"\n")[2], False
            if len(rest) > MAX_LINE_BYTES:
                self.malformed["the line is too long"] += not skipping
                rest, skipping = b"", True
            if newline:
                yield from self._frames(whole)
        if rest and not skipping:
            yield from self._frames(rest)
        yield from self._recognised(final=True)
        yield from self._decided(final=True)
        self.malformed[UNKNOWN_FORMAT] += sum(1 for line in self._unknown if line and line.strip())

    def close(self) -> None:
        """Closes the file; standard input is left to the process."""
        if self._descriptor != _STANDARD_INPUT_DESCRIPTOR:
            os.close(self._descriptor)

    def _chunks(self) -> Iterator[bytes | None]:
        """Yields what has arrived, up to `READ_BYTES`; None where nothing did for `SILENCE_S`."""
        ended, looked_s = False, 0.0
        while not ended:
            if not select.select([self._descriptor], [], [], SILENCE_S)[0]:
                yield None
                continue
            # A busy bus sends a line every 0.1 ms.
            time.sleep(max(0.0, looked_s + PAUSE_S - time.monotonic()))
            looked_s = time.monotonic()
            parts, size = [], 0
            while size < READ_BYTES and select.select([self._descriptor], [], [], 0)[0]:
                try:
                    part = os.read(self._descriptor, READ_BYTES - size)
                except OSError as error:
                    raise DataError("The input must stay readable", value=error.strerror or str(error),
                                    remedy="Start it again") from error  # fmt: skip
                if not part:
                    ended = True
                    break
                parts.append(part)
                size += len(part)
            if parts:
                yield b"".join(parts)

    def _frames(self, text: bytes) -> Iterator[Frames]:
        lines = [line or None for line in text.decode(errors="replace").split("\n")]
        if self._grammar is None:
            self._unknown += lines
            yield from self._recognised()
        else:
            yield from self._parsed(lines, self._grammar)

    def _recognised(self, *, final: bool = False) -> Iterator[Frames]:
        """Yields the frames of the first lines, once their format is known; with `final` no other lines are waited for
        that tell more of it.
        """
        if self._grammar is not None or not self._unknown:
            return
        lines, self._unknown = self._unknown, []
        self._grammar = self._recognise(lines, final=final)
        if self._grammar is not None:
            yield from self._parsed(lines, self._grammar)
            return
        # A header may come long before the first row.
        forgotten = max(0, len(lines) - RECOGNISED_LINES)
        self.malformed[UNKNOWN_FORMAT] += forgotten
        self._unknown = lines[forgotten:]

    def _parsed(self, lines: list[str | None], grammar: Grammar) -> Iterator[Frames]:
        now_s = time.time()
        if self._untimed:
            lines = _with_times(lines, self._arrived_s, now_s)
        self._arrived_s = now_s
        series = pl.Series("line", lines, dtype=pl.String)
        self._log_clock = self._log_clock or LogClock(grammar)
        rows = self._log_clock.of(parse_rows(series, grammar), series)
        self.malformed.update(rows.malformed["reason"].to_list())
        if len(rows.timestamp):
            label = np.zeros(len(rows.timestamp), np.uint8)
            self._undecided.append(Frames(rows.timestamp, rows.can_id, rows.length, rows.payload, label))
            yield from self._decided()

    def _recognise(self, lines: Sequence[str | None], *, final: bool) -> Grammar | None:
        """Finds the grammar that reads most of the first lines, if any reads one; None also where more of them are to
        tell the unit of its times.
        """
        sample = list(lines)
        self._untimed = any(line and _WITHOUT_TIME.match(line) for line in sample)
        if self._untimed:
            now_s = time.time()
            sample = _with_times(sample, now_s, now_s)
        series = pl.Series("line", sample, dtype=pl.String)
        known = variants([*header_grammars(series, self._settings), *line_grammars(series)], series)
        parsed = [parse_rows(series, grammar) for grammar in known]
        counts = [len(rows.position) for rows in parsed]
        if not any(counts):
            return None
        best = int(np.argmax(counts))
        grammar, wanted = known[best], self._settings.time_unit
        if grammar.header and not (grammar.dated or (wanted == "auto" and grammar.unit_known)):
            if wanted == "auto" and len(lines) < UNIT_LINES and not final:
                return None
            grammar = with_unit(grammar, wanted, parsed[best], series)
            if grammar.assumption != known[best].assumption:
                unit = next(name for name, ticks in TICKS_PER_SECOND.items() if ticks == grammar.ticks_per_second)
                self.notes.append(f"No heading tells the unit of the times, which are taken for {unit} because of how "
                                  "often IDs repeat; one such as `time [ms]` tells it")  # fmt: skip
        if self._untimed:
            self.notes.append("The lines have no times, so those of their arrival are used, which are less exact; "
                              "candump -ta or -L prints times")  # fmt: skip
        return grammar

    def _decided(self, *, final: bool = False) -> Iterator[Frames]:
        """Yields the frames that wait, once it is known what their times are."""
        if not self._undecided:
            return
        frames = Frames.concatenate(self._undecided)
        if self._deltas is None and (len(frames) >= DELTA_ROWS or final):
            steps = np.diff(frames.timestamp)
            backwards = np.count_nonzero(steps < 0) > DELTA_SHARE * max(len(steps), 1)
            self._deltas = bool(backwards and frames.timestamp.min() >= 0 and frames.timestamp.max() < LONGEST_DELTA_S)
            if self._deltas:
                self.notes.append("The times are differences from line to line (candump -td), and were added up")
        if self._deltas is None:
            return
        self._undecided = []
        if self._deltas:
            times = self._clock_s + np.cumsum(frames.timestamp)
            self._clock_s = float(times[-1])
            frames = Frames(times, frames.can_id, frames.length, frames.payload, frames.label)
        self.frames += len(frames)
        yield frames


def _with_times(lines: Sequence[str | None], since_s: float, now_s: float) -> list[str | None]:
    """Puts times before lines that have none, as if they had arrived evenly since the ones before."""
    times = np.linspace(since_s, now_s, len(lines) + 1)[1:]
    return [line and f"({at:.6f}) {line.lstrip()}" for line, at in zip(lines, times.tolist(), strict=True)]


class BusInput(FrameInput):
    """Messages of a CAN interface, by python-can."""

    def __init__(self, bus: Any) -> None:
        super().__init__()
        self._bus = bus

    def batches(self) -> Iterator[Frames | None]:
        """Yields the frames that arrive within `PAUSE_S` together.

        Raises:
            DataError: The interface fails.
        """
        from can import CanError

        while True:
            try:
                first = self._bus.recv(SILENCE_S)
                messages = [] if first is None else [first, *self._waiting()]
            except (CanError, OSError) as error:
                raise DataError("A CAN interface must stay up", value=str(error),
                                remedy="Bring it up: ip link set can0 up") from error  # fmt: skip
            yield self._frames(messages) if messages else None

    def close(self) -> None:
        """Shuts the bus down."""
        self._bus.shutdown()

    def _waiting(self) -> Iterator[Any]:
        until_s = time.monotonic() + PAUSE_S
        for _ in range(MESSAGES):
            message = self._bus.recv(max(0.0, until_s - time.monotonic()))
            if message is None:
                return
            yield message

    def _frames(self, messages: Sequence[Any]) -> Frames:
        good = []
        for one in messages:
            if one.is_error_frame:
                self.malformed["an error frame"] += 1
            elif len(one.data) > MAX_PAYLOAD_BYTES:
                self.malformed[f"more than {MAX_PAYLOAD_BYTES} bytes"] += 1
            else:
                good.append(one)
        payload = b"".join(bytes(one.data).ljust(MAX_PAYLOAD_BYTES, b"\0") for one in good)
        self.frames += len(good)
        return Frames(
            timestamp=np.array([one.timestamp for one in good], np.float64),
            can_id=np.array([one.arbitration_id for one in good], np.uint32),
            # A remote frame asks for data, and has none.
            length=np.array([0 if one.is_remote_frame else len(one.data) for one in good], np.uint8),
            payload=np.frombuffer(payload, np.uint8).reshape(-1, MAX_PAYLOAD_BYTES),
            label=np.zeros(len(good), np.uint8),
        )


def _open_bus(name: str) -> Any:
    try:
        import can
    except ImportError as error:
        raise ConfigError("A CAN interface is read by python-can, which is not installed", value=f"--input {name}",
                          remedy="pip install 'can-train[live]', or pipe: candump -L can0 | can-train detect RUN"
                          ) from error  # fmt: skip
    interface, colon, channel = name.partition(":")
    try:
        return can.Bus(interface=interface if colon else "socketcan", channel=channel if colon else name)
    except (can.CanError, OSError, ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError("--input is -, a file, or a CAN interface that is up", value=f"{name}: {error}",
                          remedy="ip -brief link shows interfaces; python-can's others are INTERFACE:CHANNEL"
                          ) from error  # fmt: skip
