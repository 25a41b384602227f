"""Frames as they arrive, bus by bus: text from a pipe, as candump prints it, or messages of CAN interfaces.

Shapes: M frames.
"""

from __future__ import annotations

import math
import os
import re
import select
import shlex
import time
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import CanTrainError, ConfigError, DataError
from can_train.io.units import counted
from can_train_tasks.can.data.clocks import TICKS_PER_SECOND, LogClock, are_differences, may_be_differences
from can_train_tasks.can.data.formats import header_grammars, number_texts, shortened, with_unit
from can_train_tasks.can.data.grammar import MAX_CAN_ID, Grammar, ParsedRows, parse_rows
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.line_formats import TransmitRequests, line_grammars, variants
from can_train_tasks.can.data.log_text import COMPRESSIONS, UTF16_MARKS, opened_text
from can_train_tasks.can.data.payload_fields import FD_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from can_train_tasks.can.data.recordings import recording_format
from can_train_tasks.can.settings import CanDatasetSettings, ColumnSettings

STANDARD_INPUT: Final = "-"
_STANDARD_INPUT_DESCRIPTOR: Final = 0
_NO_DESCRIPTOR: Final = -1
# Seconds without a frame, after which a bus is called silent: many times the period of any usual message.
SILENCE_S: Final = 2.0
# Seconds between two looks at the input. Frames are parsed together: one by one they would take fifty times as long.
# It delays an alarm by less than a tenth of the length of a window of a busy bus.
PAUSE_S: Final = 0.005
READ_BYTES: Final = 2**20  # most bytes of text that are parsed together, a tenth of a second of work
MAX_LINE_BYTES: Final = 2**16  # a longer line is no frame, and is not kept in memory
UNREADABLE_LINES: Final = 100  # lines, or bytes, without a frame: the input is no log. Headers are shorter
UNREADABLE_BYTES: Final = 2**17
# First lines of a log that tell the unit of its times and the bases of its numbers, where no heading does.
TELLING_LINES: Final = 200
_MARK_BYTES: Final = 8  # the marks at the beginning of compressed files are shorter
MESSAGES: Final = 4096  # most messages of an interface that are taken together
RECENT_LINES: Final = 200  # last lines that a new choice must also read, so that a few odd lines change no format
JUDGED_LINES: Final = 1000  # most lines that a new choice is made on, some milliseconds of work
# Lines between two vain attempts to choose anew: garbage on a line must not cost an attempt each time.
PATIENT_LINES: Final = 1000

# Median time between frames of one ID: a frame takes 50 µs on the fastest bus, and a slower bus does not exist.
SHORTEST_PERIOD_S: Final = 50e-6
LONGEST_PERIOD_S: Final = 5.0

# `  can0  12A   [2]  00 F0`: candump's screen format without -t, whose lines have no time.
_WITHOUT_TIME: Final = re.compile(r"[ \t]*[A-Za-z][!-~]*[ \t]+[0-9A-Fa-f]{3,8}[ \t]+(?:(?:TX|RX)[ \t-]+)?\[\d+\]")
# candump prints the times of clocks in seconds, with six or nine digits after the point.
_CANDUMP_SECONDS: Final = r"^[ \t]*\([0-9]+\.[0-9]{6}(?:[0-9]{3})?\)"
_EXAMPLES: Final = 3  # reasons for malformed lines that a message names
_NAMED_CHANNELS: Final = 4  # interfaces that a message names
UNWATCHED_FRAMES: Final = 1000  # frames of other interfaces after which a note reports that the watched one is absent
_COMMENTS: Final = ("#", ";", "//")  # beginnings of lines above the frames of a log; a log may have many such lines

# Meaning of SocketCAN's error frames, by the bit of their identifier (linux/can/error.h).
ERROR_CLASSES: Final = {
    0x1: "transmission timed out", 0x2: "arbitration lost", 0x4: "controller problem", 0x8: "protocol violation",
    0x10: "transceiver problem", 0x20: "no acknowledgement", 0x40: "bus off", 0x80: "bus error",
    0x100: "controller restarted",
}  # fmt: skip
BUS_OFF: Final = 0x40
_SOCKETCAN_LENGTH: Final = 8  # bytes of SocketCAN's error frames; other interfaces use other identifiers
_ERROR_LINE: Final = re.compile(
    r"[ \t]*\((?P<time>[^)]*)\)[ \t]+(?P<channel>[!-~]+)[ \t]+(?:(?:RX|TX)[ \t]+[B-][ \t]+[E-][ \t]+)?"
    r"(?P<id>[23][0-9A-Fa-f]{7})(?:#|[ \t]+\[)"
)

Lines = Sequence[str | None]


class BusFrames(NamedTuple):
    """Frames of one bus, which arrived together."""

    channel: str  # the interface, as the input names it; empty where the input names no interface
    frames: Frames


class BusErrors(NamedTuple):
    """An error frame of one bus, or several that have no times."""

    channel: str
    time_s: float | None  # None where the input has no time
    error_frames: int
    bus_offs: int  # error frames that report that the controller left the bus
    classes: int  # bits of `ERROR_CLASSES`

    @classmethod
    def of(cls, channel: str, time_s: float | None, kinds: Sequence[int]) -> Self:
        """Counts error frames; `kinds` are their identifiers, 0 for an identifier without a meaning."""
        classes = reduce(or_, kinds, 0)
        return cls(channel, time_s, len(kinds), sum(1 for kind in kinds if kind & BUS_OFF), classes)


def error_text(classes: int) -> str:
    """Names the classes of errors, which are bits of `ERROR_CLASSES`; empty where the input does not tell them."""
    return ", ".join(name for bit, name in ERROR_CLASSES.items() if classes & bit)


class Unread(NamedTuple):
    """Lines or messages that arrived and are no frames."""

    lines: int


Batch = BusFrames | BusErrors | Unread | None


class FrameInput(ABC):
    """Where frames arrive.

    Attributes:
        channel: The only interface that is watched; empty: all interfaces.
        frames: Number of frames of watched interfaces so far.
        channels: Number of frames of each interface so far, watched or not.
        errors: Number of error frames so far.
        bus_offs: Number of error frames that report that a controller left its bus.
        malformed: Number of malformed lines or messages, which are left out, by reason.
        notes: Facts about the input that a person should know, in sentences.
    """

    def __init__(self, channel: str = "") -> None:
        self.channel = channel
        self.frames = 0
        self.channels: Counter[str] = Counter()
        self.errors = self.bus_offs = 0
        self.malformed: Counter[str] = Counter()
        self.notes: list[str] = []

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Yields frames soon after they arrive, until the input ends; None where nothing arrives for `SILENCE_S`."""

    @abstractmethod
    def close(self) -> None:
        """Closes the input."""

    def malformed_text(self) -> str:
        """Counts the lines that were left out, as a sentence; empty without such lines."""
        count = self.malformed.total()
        if not count:
            return ""
        reasons = [f"{number:,} × {reason}" for reason, number in self.malformed.most_common(_EXAMPLES) if number]
        return f"{counted(count, 'line', 'are')} malformed and left out: {', '.join(reasons)}"

    def _by_bus(self, frames: Frames, channels: NDArray[Any]) -> Iterator[BusFrames]:
        """Yields [M] frames bus by bus; `channels` [M] names the interface of each.

        Raises:
            DataError: The settings name an interface, and the input names none.
        """
        names = list(dict.fromkeys(channels.tolist()))
        if self.channel and "" in names:
            raise DataError("The input names no interfaces", value=f"--channel {self.channel}",
                            remedy="Leave out --channel")  # fmt: skip
        for name in names:
            self._meet(name)
        for name in names:
            of_bus = channels == name
            count = int(np.count_nonzero(of_bus))
            self.channels[name] += count
            if self.channel in ("", name):
                self.frames += count
                yield BusFrames(name, frames if count == len(frames) else frames[of_bus])
        if not self.frames and not self.notes and self.channels.total() >= UNWATCHED_FRAMES:
            self.notes.append(f"No frame of {self.channel} so far: the input has {self._named_channels()}")

    def _meet(self, name: str) -> None:
        """Adds a note when an input has its second interface."""
        if name in self.channels:
            return
        self.channels[name] = 0
        if len(self.channels) > 1 and not self.channel:
            first = next(iter(self.channels)) or name
            self.notes.append(f"The input has several buses, each watched by itself: {', '.join(self.channels)}; "
                              f"--channel {first} watches one")  # fmt: skip

    def _counted(self, errors: BusErrors) -> Iterator[BusErrors]:
        self._meet(errors.channel)
        if self.channel in ("", errors.channel):
            self.errors += errors.error_frames
            self.bus_offs += errors.bus_offs
            yield errors

    def _check(self) -> None:
        """Checks an input that has ended.

        Raises:
            DataError: No frame of a watched interface has arrived.
        """
        if self.frames or self.errors:
            return
        if self.channels:
            raise DataError("--channel is no interface of the input",
                            value=f"{self.channel}; the input has {self._named_channels()}",
                            remedy=f"Use --channel {self.channels.most_common(1)[0][0]}")  # fmt: skip
        raise DataError("The input ended without a frame",
                        remedy="Check the pipe: candump -L can0 | can-train detect RUN")  # fmt: skip

    def _named_channels(self) -> str:
        return ", ".join(
            f"{name} ({counted(count, 'frame')})" for name, count in self.channels.most_common(_NAMED_CHANNELS)
        )


def open_input(name: str, dataset: CanDatasetSettings) -> FrameInput:
    """Opens standard input (`-`), a file, or a CAN interface (`can0`, or `INTERFACE:CHANNEL` with python-can's names).

    `dataset.channel` is the only interface that is watched; empty: all interfaces.

    Raises:
        ConfigError: The input cannot be opened, or python-can is not installed.
        DataError: A compressed file is damaged.
    """
    try:
        if name == STANDARD_INPUT:
            os.fstat(_STANDARD_INPUT_DESCRIPTOR)  # raises OSError where standard input is closed
            return TextInput(_STANDARD_INPUT_DESCRIPTOR, dataset)
        if Path(name).exists() and not Path(name).is_dir():
            # A pipe can be opened once only: what is read from it here would be lost.
            if Path(name).is_file() and (binary := recording_format(Path(name))):
                raise ConfigError(f"{name} is {binary.upper()}, a binary format: live detection reads text",
                                  remedy=f"Use can-train evaluate RUN --dataset {shlex.quote(name)}")  # fmt: skip
            if Path(name).is_file():
                with opened_text(Path(name)) as stream:
                    is_plain = stream.plain
                if not is_plain:
                    return PackedInput(Path(name), dataset)
            return TextInput(os.open(name, os.O_RDONLY), dataset)
    except OSError as error:
        what = "standard input" if name == STANDARD_INPUT else name
        raise ConfigError("The input cannot be read", value=f"{what}: {error.strerror}",
                          remedy="Check its permissions, or pipe: candump -L can0 | can-train detect RUN"
                          ) from error  # fmt: skip
    return BusInput(_open_bus(name), dataset.channel)


class TextInput(FrameInput):
    """Lines of text from a file descriptor, in any of the formats that logs have."""

    def __init__(self, descriptor: int, dataset: CanDatasetSettings) -> None:
        super().__init__(dataset.channel)
        self._descriptor = descriptor
        self._settings = dataset
        self._grammar: Grammar | None = None
        self._before: Grammar | None = None  # the grammar that was given up
        self._log_clock: LogClock | None = None  # once the grammar is known
        self._requests: TransmitRequests | None = None  # once the grammar is known
        self._unknown: list[str | None] = []  # the first lines, as long as their format is not known
        self._unknown_bytes = 0
        self._beginning = b""  # the first bytes
        self._awaits_more = False  # whether a format reads the first lines, but more lines must tell its unit or bases
        self._untimed = False  # whether the lines have no times, and get the times of their arrival
        self._heading: list[str | None] = []  # the lines above the first frame, which a new choice of format needs
        self._recent: list[str | None] = []  # the last lines that were parsed
        self._vain_lines: float = math.inf  # lines since the last vain attempt to choose the format anew
        self._may_be_deltas = True  # whether the format leaves open what the times count from
        self._deltas: bool | None = None  # whether the times are differences; None: not known yet
        self._undecided: list[tuple[Frames, NDArray[Any]]] = []  # with the interface of each frame
        self._clock_s = 0.0  # sum of the differences
        self._arrived_s = time.time()

    def batches(self) -> Iterator[Batch]:
        """Yields the frames of whole lines.

        Raises:
            DataError: None of the first lines is a frame, or the input ends without a frame.
        """
        rest, skipping, unread = b"", False, 0
        for text in self._chunks():
            if text is None:
                yield from self._recognised(final=True)
                if self._unknown_rows() and not self.notes:
                    self.notes.append(f"No line is a frame so far: {self._unknown_text()}")
                yield None
                continue
            self._beginning = self._beginning or text[:_MARK_BYTES]
            whole, newline, rest = (rest + text).rpartition(b"\n")
            if skipping and newline:
                # The rest of a line that was too long.
                whole, skipping = whole.partition(b"\n")[2], False
            if len(rest) > MAX_LINE_BYTES:
                self.malformed["the line is too long"] += not skipping
                rest, skipping = b"", True
            if newline:
                yield from self._frames(whole)
            if self.malformed.total() > unread:
                # Garbage alone must not keep the detector from seeing that the bus is silent.
                yield Unread(self.malformed.total() - unread)
                unread = self.malformed.total()
            if self._grammar is None and not self._awaits_more:
                self._unknown_bytes += len(text)
                if self._unknown_bytes > UNREADABLE_BYTES or len(self._unknown_rows()) >= UNREADABLE_LINES:
                    raise self._unreadable()
        if rest and not skipping:
            yield from self._frames(rest)
        yield from self._recognised(final=True)
        yield from self._decided(final=True)
        if self._unknown_rows():
            raise self._unreadable()
        self._check()

    def close(self) -> None:
        """Closes the file; standard input stays open."""
        if self._descriptor != _STANDARD_INPUT_DESCRIPTOR:
            os.close(self._descriptor)

    def _chunks(self) -> Iterator[bytes | None]:
        """Yields the bytes that arrive, up to `READ_BYTES`; None where no byte came for `SILENCE_S`."""
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
                    raise DataError("The input can no longer be read", value=error.strerror or str(error),
                                    remedy="Start it again") from error  # fmt: skip
                if not part:
                    ended = True
                    break
                parts.append(part)
                size += len(part)
            if parts:
                yield b"".join(parts)

    def _unknown_rows(self) -> list[str]:
        return [line for line in self._unknown if line and line.strip() and not line.lstrip().startswith(_COMMENTS)]

    def _unknown_text(self) -> str:
        rows = self._unknown_rows()
        if not rows:
            return "it has no lines, as binary data have none"
        first = shortened(rows[0])
        if len(rows) == 1:
            return f"the only line is {first!r}"
        return f"none of the first {min(len(rows), UNREADABLE_LINES):,} lines is; the first is {first!r}"

    def _unreadable(self) -> DataError:
        packed = next((each for each in COMPRESSIONS if self._beginning.startswith(each.magic)), None)
        if packed is not None or self._beginning.startswith(UTF16_MARKS):
            how, program = "text in UTF-16", "iconv -f UTF-16"
            if packed is not None:
                how, program = f"compressed by {packed.name}", f"{packed.name} -dc"
            return DataError(f"The input is {how}",
                             remedy=f"Use --input FILE, or pipe: {program} FILE | can-train detect RUN")  # fmt: skip
        return DataError("The input is no CAN log with time, ID and data in each line", value=self._unknown_text(),
                         remedy="Pipe candump -L can0, or text as `zcat` prints it; can-train evaluate reads other logs"
                         )  # fmt: skip

    def _frames(self, text: bytes) -> Iterator[BusFrames | BusErrors]:
        if self._grammar is None and not self._unknown:
            text = text.removeprefix(BOM_UTF8)
        lines = [line or None for line in text.decode(errors="replace").split("\n")]
        if self._grammar is None:
            self._unknown += lines
            yield from self._recognised()
        else:
            yield from self._parsed(lines, self._grammar)

    def _recognised(self, *, final: bool = False) -> Iterator[BusFrames | BusErrors]:
        """Yields the frames of the first lines, once their format is known.

        With `final`, no more lines come: unit and bases are guessed from the lines so far.
        """
        if self._grammar is None and self._unknown:
            self._grammar = self._recognise(self._unknown, final=final)
            if self._grammar is not None:
                lines, self._unknown = self._unknown, []
                yield from self._parsed(lines, self._grammar, is_chosen=True)

    def _parsed(
        self, lines: list[str | None], grammar: Grammar, *, is_chosen: bool = False
    ) -> Iterator[BusFrames | BusErrors]:
        """Yields the frames of lines; `is_chosen` if the grammar was just chosen by these lines."""
        now_s = time.time()
        timed = with_times(lines, self._arrived_s, now_s) if self._untimed else lines
        self._arrived_s = now_s
        series = pl.Series("line", timed, dtype=pl.String)
        rows = parse_rows(series, grammar)
        if not is_chosen and self._is_misread(lines, rows, grammar):
            self._before, self._grammar = grammar, None
            self._unknown = [*self._heading, *lines]
            yield from self._recognised()
            return
        self._recent = [*self._recent, *lines[-RECENT_LINES:]][-RECENT_LINES:]
        rows = self._requests.of(rows, series) if self._requests else rows
        rows = self._log_clock.of(rows, series) if self._log_clock else rows
        self.malformed.update(rows.malformed["reason"].to_list())
        if len(rows.timestamp):
            label = np.zeros(len(rows.timestamp), np.uint8)
            channels = (
                np.full(len(label), "", object) if rows.channel is None else rows.channel.fill_null("").to_numpy()
            )
            self._undecided.append((Frames(rows.timestamp, rows.can_id, rows.length, rows.payload, label), channels))
            yield from self._decided()
        if rows.error_frames:
            for errors in self._errors(timed, rows.error_frames, grammar):
                yield from self._counted(errors)

    def _is_misread(self, lines: Sequence[str | None], rows: ParsedRows, grammar: Grammar) -> bool:
        """Returns whether another format reads more of the latest lines: the first ones may have fitted several."""
        self._vain_lines += len(lines)
        # An error frame alone fits several formats. Until the first frame, each malformed line may tell another one.
        if not len(rows.malformed) or (self.channels.total() and self._vain_lines < PATIENT_LINES):
            return False
        around = lines_around(rows, self._recent, lines)
        misread = is_misread([*self._heading, *around], grammar, self._settings)
        self._vain_lines = math.inf if misread else 0
        return misread

    def _errors(self, lines: list[str | None], count: int, grammar: Grammar) -> Iterator[BusErrors]:
        """Yields the `count` error frames among lines, each by itself where the lines have their times."""
        matches = [match for line in lines if line and (match := _ERROR_LINE.match(line))]
        if not grammar.name.startswith("candump") or len(matches) != count:
            yield BusErrors("", None, count, 0, 0)
            return
        # Time differences are not the time of an error frame.
        untimed: dict[str, list[int]] = {}
        for match in matches:
            channel, kind = match["channel"], int(match["id"], 16) & MAX_CAN_ID
            try:
                time_s = math.nan if self._deltas or grammar.dated else float(match["time"])
            except ValueError:
                time_s = math.nan
            if math.isfinite(time_s):
                yield BusErrors.of(channel, time_s, [kind])
            else:
                untimed.setdefault(channel, []).append(kind)
        for channel, kinds in untimed.items():
            yield BusErrors.of(channel, None, kinds)

    def _recognise(self, lines: Sequence[str | None], *, final: bool) -> Grammar | None:
        """Finds the grammar that reads most of the first lines.

        Returns:
            The grammar before where no grammar reads a line; None without one, and where more lines must tell the unit
            of times or the number bases.
        """
        choice = choose(lines, self._settings)
        if choice is None:
            self._vain_lines = 0
            return self._before
        texts = number_texts(choice.lines, choice.settings) if choice.grammar.name == "columns" else None
        bases = texts.notes() if texts else []
        needs_unit = not choice.tells_unit() and (self._before is None or self._before.name != choice.grammar.name)
        is_open = needs_unit or bool(bases)
        self._awaits_more = is_open and len(lines) < TELLING_LINES and not final
        if self._awaits_more:
            return None
        if choice.grammar.header and choice.settings.columns != self._settings.columns:
            self._note("The header lacks columns of the run's dataset.columns, so they are recognised by "
                              "their names")  # fmt: skip
        for note in bases:
            # A heading tells the base of IDs only.
            remedy = f"; {note.doubt}, a heading such as `id_{note.other_base}` tells it"
            fact = f"{note.fact[0].upper()}{note.fact[1:]}"
            self._note(fact + (remedy if note.setting == "id_base" else ""))
        grammar = self._with_unit(choice)
        if choice.untimed and not self._untimed:
            self._note("The lines have no times, so those of their arrival are used, which are less exact; "
                              "candump -ta or -L prints times")  # fmt: skip
        is_another = self._before is not None and self._before.pattern != grammar.pattern
        if self._before is not None and not is_another:
            self._vain_lines = 0
        if self._before is None or is_another:
            self._log_clock, self._requests = LogClock(grammar), TransmitRequests(grammar)
        if is_another and self.channels.total():
            self._note("The lines no longer fit the format that the first ones told, and it was chosen anew")
        self._untimed, self._heading, self._recent = choice.untimed, choice.heading(lines), []
        self._may_be_deltas = may_be_differences(grammar) and not choice.untimed
        if self._before is not None and self._before.name != grammar.name:
            self._deltas = None
        return grammar

    def _with_unit(self, choice: Choice) -> Grammar:
        """Sets the unit of the times, by the settings or by how often IDs repeat, and notes a guess."""
        grammar, before = choice.grammar, self._before
        if choice.tells_unit():
            return grammar
        if before is not None and before.name == grammar.name:
            return replace(grammar, ticks_per_second=before.ticks_per_second, unit_known=True)
        wanted = self._settings.time_unit
        if wanted != "auto" and not choice.may_be_in(wanted):
            self._note(f"The run's dataset.time_unit is not used: in {wanted}, IDs would repeat as on no bus")
            wanted = "auto"
        decided = with_unit(grammar, wanted, choice.rows, choice.lines)
        unit = next(name for name, ticks in TICKS_PER_SECOND.items() if ticks == decided.ticks_per_second)
        if decided.assumption != grammar.assumption:
            tells = "; one such as `time [ms]` tells it" if grammar.header else ""
            self._note(f"No heading tells the unit of the times, which are taken for {unit} because of how "
                              f"often IDs repeat{tells}")  # fmt: skip
        return decided

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _decided(self, *, final: bool = False) -> Iterator[BusFrames]:
        """Yields the waiting frames, once it is known whether their times are differences."""
        if not self._undecided:
            return
        frames = Frames.concatenate([waiting for waiting, _ in self._undecided])
        channels = np.concatenate([names for _, names in self._undecided])
        if self._deltas is None:
            self._deltas = self._may_be_deltas and are_differences(frames.timestamp, final=final)
            if self._deltas:
                self.notes.append("The times are differences from line to line (candump -td), and were added up")
        if self._deltas is None:
            return
        self._undecided = []
        if self._deltas:
            times = self._clock_s + np.cumsum(frames.timestamp)
            self._clock_s = float(times[-1])
            frames = replace(frames, timestamp=times)
        yield from self._by_bus(frames, channels)


class PackedInput(TextInput):
    """Lines of a file that is compressed, or in UTF-16."""

    def __init__(self, path: Path, dataset: CanDatasetSettings) -> None:
        super().__init__(_NO_DESCRIPTOR, dataset)
        self._path = path

    def close(self) -> None:
        """Does nothing: the file is closed once it was read."""

    def _chunks(self) -> Iterator[bytes | None]:
        with opened_text(self._path) as stream:
            while text := stream.text.read(READ_BYTES):
                yield text


class Choice(NamedTuple):
    """The grammar that reads most of some lines."""

    grammar: Grammar
    rows: ParsedRows
    lines: pl.Series  # the lines; lines without times have times in front
    untimed: bool  # whether the lines have no times
    settings: CanDatasetSettings  # without names of columns, where no header has them

    @property
    def read(self) -> int:
        """Number of lines that are frames. Error frames count too: a faulty bus may send nothing else."""
        return _read(self.rows)

    def heading(self, lines: Lines) -> list[str | None]:
        """Returns the chosen `lines` above the first frame, without malformed ones: a CSV log's header."""
        first = int(self.rows.position[0]) if len(self.rows.position) else 0
        malformed = {*self.rows.malformed["position"].to_list()}
        return [line for at, line in enumerate(lines[:first]) if line and at not in malformed]

    def tells_unit(self) -> bool:
        """Returns whether the format tells the unit of its times."""
        if self.grammar.dated or self.grammar.unit_known:
            return True
        return self.grammar.name.startswith("candump") and bool(self.lines.str.contains(_CANDUMP_SECONDS).any())

    def may_be_in(self, unit: str) -> bool:
        """Returns whether IDs repeat as on a bus if the times are in this unit; so they do where no ID repeats."""
        order = np.argsort(self.rows.can_id, kind="stable")
        same = np.diff(self.rows.can_id[order].astype(np.int64)) == 0
        periods = np.abs(np.diff(self.rows.timestamp[order])[same]) * self.grammar.ticks_per_second
        period_s = np.median(periods) / TICKS_PER_SECOND[unit] if len(periods) else SHORTEST_PERIOD_S
        return bool(SHORTEST_PERIOD_S <= period_s <= LONGEST_PERIOD_S)


def choose(lines: Lines, settings: CanDatasetSettings) -> Choice | None:
    """Chooses the grammar that reads most of the lines; None where no grammar reads a line.

    Of grammars that read as many lines, one that asks for no label and no direction comes first: the lines seen so far
    may all have one, and later lines may not. Nothing live depends on labels.
    """
    timed = sum(bool(line and line.lstrip().startswith("(")) for line in lines)
    untimed = sum(bool(line and _WITHOUT_TIME.match(line)) for line in lines) > timed
    series = pl.Series("line", with_times(lines, time.time(), time.time()) if untimed else lines, dtype=pl.String)
    settings = with_columns_of(series, settings)
    best: Choice | None = None
    for grammar in variants([*header_grammars(series, settings), *line_grammars(series)], series):
        # Most formats match no line; a look at the lines takes a tenth of the time of parsing.
        left_out = filter(None, (grammar.error_frame, grammar.xl_frame))
        if not any(series.str.contains(pattern).any() for pattern in (grammar.pattern, *left_out)):
            continue
        choice = Choice(grammar, parse_rows(series, grammar), series, untimed, settings)
        if best is None or (choice.read, _asks_little(grammar)) > (best.read, _asks_little(best.grammar)):
            best = choice
    return best if best is not None and best.read else None


def with_columns_of(lines: pl.Series, settings: CanDatasetSettings) -> CanDatasetSettings:
    """Leaves out the names of columns, if the header in the first lines of a log does not have them all."""
    try:
        header_grammars(lines, settings)
    except CanTrainError:
        return replace(settings, columns=ColumnSettings())
    return settings


def is_misread(lines: Lines, grammar: Grammar, settings: CanDatasetSettings) -> bool:
    """Returns whether another grammar reads more of the lines than `grammar`."""
    choice = choose(lines, settings)
    return choice is not None and choice.read > _read(parse_rows(choice.lines, grammar))


def lines_around(rows: ParsedRows, recent: Lines, lines: Lines) -> list[str | None]:
    """Returns the lines around the first malformed one of `lines`, which came after `recent`."""
    first = int(rows.malformed["position"].to_list()[0])
    before = [*recent, *lines[:first]]
    return [*before[-RECENT_LINES:], *lines[first : first + JUDGED_LINES]]


def with_times(lines: Lines, since_s: float, now_s: float) -> list[str | None]:
    """Puts times before lines without times, evenly spaced from `since_s` to `now_s`."""
    times = np.linspace(since_s, now_s, len(lines) + 1)[1:]
    return [
        f"({at:.6f}) {line.lstrip()}" if line and _WITHOUT_TIME.match(line) else line
        for line, at in zip(lines, times.tolist(), strict=True)
    ]


def _read(rows: ParsedRows) -> int:
    return len(rows.position) + rows.error_frames + rows.xl_frames


def _asks_little(grammar: Grammar) -> bool:
    return not grammar.has("direction") and (grammar.unlabelled_rows or not grammar.has("label"))


class BusInput(FrameInput):
    """Messages of CAN interfaces, by python-can."""

    def __init__(self, bus: Any, channel: str = "") -> None:
        super().__init__(channel)
        self._bus = bus

    def batches(self) -> Iterator[Batch]:
        """Yields batches of the frames that arrive within `PAUSE_S`.

        Raises:
            DataError: The interface fails.
        """
        from can import CanError

        while True:
            try:
                message = self._bus.recv(SILENCE_S)
                messages, until_s = list[Any](), time.monotonic() + PAUSE_S
                while message is not None:
                    messages.append(message)
                    waits_s = max(0.0, until_s - time.monotonic())
                    message = self._bus.recv(waits_s) if len(messages) < MESSAGES else None
            except (CanError, OSError) as error:
                raise DataError("The CAN interface has gone down", value=str(error),
                                remedy="Bring it up: ip link set can0 up") from error  # fmt: skip
            if not messages:
                yield None
                continue
            yield from self._frames([message for message in messages if not message.is_error_frame])
            yield from self._errors([message for message in messages if message.is_error_frame])

    def close(self) -> None:
        """Shuts the bus down."""
        self._bus.shutdown()

    def _errors(self, messages: Sequence[Any]) -> Iterator[BusErrors]:
        for message in messages:
            kind = message.arbitration_id if message.dlc == _SOCKETCAN_LENGTH else 0
            yield from self._counted(BusErrors.of(_channel(message), message.timestamp, [kind]))

    def _frames(self, messages: Sequence[Any]) -> Iterator[BusFrames]:
        good = [message for message in messages if len(message.data) <= _most_bytes(message)]
        self.malformed.update(f"more than {_most_bytes(message)} bytes" for message in messages
                              if len(message.data) > _most_bytes(message))  # fmt: skip
        width = (
            FD_PAYLOAD_BYTES if any(len(message.data) > MAX_PAYLOAD_BYTES for message in good) else MAX_PAYLOAD_BYTES
        )
        payload = b"".join(bytes(message.data).ljust(width, b"\0") for message in good)
        frames = Frames(
            timestamp=np.array([message.timestamp for message in good], np.float64),
            can_id=np.array([message.arbitration_id for message in good], np.uint32),
            # A remote frame asks for data, and has no payload.
            length=np.array([0 if message.is_remote_frame else len(message.data) for message in good], np.uint8),
            payload=np.frombuffer(payload, np.uint8).reshape(-1, width),
            label=np.zeros(len(good), np.uint8),
        )
        yield from self._by_bus(frames, np.array([_channel(message) for message in good], object))


def _most_bytes(message: Any) -> int:
    return FD_PAYLOAD_BYTES if message.is_fd else MAX_PAYLOAD_BYTES


def _channel(message: Any) -> str:
    return "" if message.channel is None else str(message.channel)


def _open_bus(name: str) -> Any:
    try:
        import can
    except ImportError as error:
        raise ConfigError("python-can is not installed, which reads CAN interfaces", value=f"--input {name}",
                          remedy="pip install 'can-train[live]', or pipe: candump -L can0 | can-train detect RUN"
                          ) from error  # fmt: skip
    interface, colon, channel = name.partition(":")
    try:
        return can.Bus(interface=interface if colon else "socketcan", channel=channel if colon else name)
    except (can.CanError, OSError, ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError("--input is neither -, nor a file, nor a CAN interface that is up", value=f"{name}: {error}",
                          remedy="ip -brief link shows interfaces; python-can's others are INTERFACE:CHANNEL"
                          ) from error  # fmt: skip
