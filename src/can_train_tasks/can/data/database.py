"""A CAN database (DBC): the messages of a bus and their signals, decoded for many frames at a time.

cantools reads the file. It decodes one frame at a time, in Python, so signals are decoded here.

Bits are counted from 0, the most significant bit of the first byte. Shapes: M frames of one ID, B payload bytes.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.errors import ConfigError
from can_train.io.records import expanded
from can_train_tasks.can.data.payload_fields import LARGEST_SHORT_ID

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Bools, Floats, Ints
    from can_train_tasks.can.data.payload_fields import Payloads

MOST_BITS: Final = 64  # of a signal that is decoded: longer signals are texts
_NO_MESSAGE: Final = "VECTOR__INDEPENDENT_SIG_MSG"  # holds signals that belong to no message
_FLOATS: Final[Mapping[int, type[np.floating[Any]]]] = {16: np.float16, 32: np.float32, 64: np.float64}
_PDU1_FORMATS: Final = 240  # J1939: below it, the second byte of an ID is a destination and not part of the group


# The setting `dataset.dbc` of a run: the file's name and its messages, so that the run does not need the file again. No
# character means anything in YAML or to Hydra.
_PACKED: Final = re.compile(r"([^;]*);zlib,([A-Za-z0-9+/=]+)")


@dataclass(frozen=True, kw_only=True)
class DatabaseSignal:
    """A signal of a message.

    Attributes:
        name: Name in the database.
        unit: Unit of the physical value; empty: none.
        bits: Its bits, the most significant bit first.
        signed: Whether the raw value is a two's complement.
        is_float: Whether the raw value is an IEEE number.
        scale: Physical units of a raw unit.
        offset: Physical value of the raw value 0.
        low: Smallest value that the database allows; None where it declares no range.
        high: Largest value that the database allows; None where it declares no range.
        multiplexer: The signal that tells in which frames this one is; empty: it is in every frame.
        pages: Values of the multiplexer in those frames.
    """

    name: str
    bits: tuple[int, ...]
    unit: str = ""
    signed: bool = False
    is_float: bool = False
    scale: float = 1.0
    offset: float = 0.0
    low: float | None = None
    high: float | None = None
    multiplexer: str = ""
    pages: tuple[int, ...] = ()

    def is_exactly(self, bits: Sequence[int]) -> bool:
        """Tells whether these bits, in their order, are the signal in each frame, as a whole number."""
        return self.bits == tuple(bits) and not self.is_float and not self.multiplexer

    def raw(self, payloads: Payloads) -> NDArray[Any]:
        """Returns raw values [M], for payloads that have all bits of the signal."""
        value = np.zeros(len(payloads), np.uint64)
        for byte, right, width, shift in self._parts:
            part = (payloads[:, byte].astype(np.uint64) >> np.uint64(right)) & np.uint64((1 << width) - 1)
            value |= part << np.uint64(shift)
        if self.is_float:
            kind = _FLOATS[len(self.bits)]
            return value.astype(f"u{len(self.bits) // 8}").view(kind)
        if not self.signed:
            return value
        unused = np.uint64(MOST_BITS - len(self.bits))
        signed: Ints = (value << unused).view(np.int64) >> unused.astype(np.int64)
        return signed

    def physical(self, payloads: Payloads) -> Floats:
        """Returns physical values [M], for payloads that have all bits of the signal."""
        with np.errstate(invalid="ignore", over="ignore"):
            values: Floats = self.raw(payloads).astype(np.float64) * self.scale + self.offset
        return values

    @cached_property
    def _parts(self) -> Sequence[tuple[int, int, int, int]]:
        """Byte, bits of the byte to the right of the signal, bits of the signal in it, and their shift in the value."""
        parts: dict[int, list[int]] = {}
        for shift, bit in enumerate(reversed(self.bits)):
            parts.setdefault(bit // 8, [7 - bit % 8, 0, shift])[1] += 1
        return [(byte, right, width, shift) for byte, (right, width, shift) in parts.items()]


@dataclass(frozen=True, kw_only=True)
class DatabaseMessage:
    """A message of the database."""

    name: str
    can_id: int
    is_j1939: bool = False  # any sender of the parameter group has its signals
    signals: Sequence[DatabaseSignal] = ()

    def signals_in(self, bits: Sequence[int]) -> Sequence[DatabaseSignal]:
        """Returns the signals with any of these bits; a signal that is exactly these bits, alone."""
        exact = [each for each in self.signals if each.is_exactly(bits)]
        return exact[:1] or [each for each in self.signals if not set(each.bits).isdisjoint(bits)]

    def decode(self, payloads: Payloads, length: NDArray[np.uint8]) -> Iterator[tuple[DatabaseSignal, Bools, Floats]]:
        """Yields each signal that has values, the frames [M] that have it, and its physical values in these frames.

        Args:
            payloads: [M, B] bytes.
            length: [M] bytes of each payload. A payload that ends before a signal does not have the signal.
        """
        present: dict[str, Bools] = {}
        for signal in self.signals:
            frames = self._frames_with(signal, payloads, length, present)
            if len(signal.bits) <= MOST_BITS and frames.any():
                yield signal, frames, signal.physical(payloads if frames.all() else payloads[frames])

    def _frames_with(
        self, signal: DatabaseSignal, payloads: Payloads, length: NDArray[np.uint8], present: dict[str, Bools]
    ) -> Bools:
        """Returns which frames have a signal [M]; `present` keeps the answer by the signal's name."""
        if signal.name not in present:
            frames: Bools = length > max(signal.bits) // 8
            if signal.multiplexer:
                multiplexer = self._by_name[signal.multiplexer]
                frames = frames & self._frames_with(multiplexer, payloads, length, present)
                page = np.zeros(len(frames), np.int64)
                page[frames] = multiplexer.raw(payloads[frames]).astype(np.int64)
                frames &= np.isin(page, signal.pages)
            present[signal.name] = frames
        return present[signal.name]

    @cached_property
    def _by_name(self) -> Mapping[str, DatabaseSignal]:
        return {signal.name: signal for signal in self.signals}


@dataclass(frozen=True, kw_only=True)
class Database:
    """The messages of a database; without a database, there are none."""

    messages: Sequence[DatabaseMessage] = ()
    _by_id: Mapping[int, DatabaseMessage] = field(init=False, repr=False, compare=False)
    _by_group: Mapping[int, DatabaseMessage] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_id = {message.can_id: message for message in reversed(self.messages)}
        by_group = {_group(message.can_id): message for message in reversed(self.messages) if message.is_j1939}
        object.__setattr__(self, "_by_id", by_id)
        object.__setattr__(self, "_by_group", by_group)

    @classmethod
    def parse(cls, text: str, name: str) -> Database:
        """Reads the text of a DBC file, which errors call `name`.

        Raises:
            ConfigError: The text is no DBC, or cantools is not installed.
        """
        try:
            import cantools.database
        except ImportError as error:
            raise ConfigError("DBC files need the package cantools, which is not installed", value=name,
                              remedy="Install it: pip install 'can-train[dbc]'") from error  # fmt: skip
        try:
            # Real databases have signals that overlap, or reach beyond their message: a strict reader refuses them.
            read: Any = cantools.database.load_string(text, database_format="dbc", strict=False)
        except (cantools.Error, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ConfigError("This is no DBC file", value=f"{name}: {error}",
                              remedy="Name a CAN database in the format DBC") from error  # fmt: skip
        return cls(messages=[as_message(each) for each in read.messages if each.name != _NO_MESSAGE])

    @classmethod
    def read(cls, path: Path) -> Database:
        """Reads a DBC file.

        Raises:
            ConfigError: There is no such file, it is no DBC, or cantools is not installed.
        """
        return cls.parse(read_text(path), str(path))

    @classmethod
    def unpack(cls, setting: str) -> Database:
        """Returns the database of the setting `dataset.dbc` of a run (see `packed`), which may be empty.

        Raises:
            ConfigError: The setting is damaged.
        """
        # Imported late: a listing of runs need not wait for it.
        import msgspec

        match = _PACKED.fullmatch(setting)
        if match is None:
            return cls()
        try:
            content = zlib.decompress(base64.b64decode(match[2]))
            return cls(messages=msgspec.json.decode(content, type=list[DatabaseMessage]))
        except (zlib.error, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError("The database in dataset.dbc is damaged", value=match[1],
                              remedy="Name its file again: --set dataset.dbc=car.dbc") from error  # fmt: skip

    def message(self, can_id: int) -> DatabaseMessage | None:
        """Returns the message of an ID; of SAE J1939, the message of its parameter group."""
        if can_id in self._by_id or can_id <= LARGEST_SHORT_ID:
            return self._by_id.get(can_id)
        return self._by_group.get(_group(can_id))


def packed(setting: str) -> str:
    """Returns the setting `dataset.dbc` with the messages of the file that it names.

    Raises:
        ConfigError: There is no such file, it is no DBC, or cantools is not installed.
    """
    import msgspec

    if _PACKED.fullmatch(setting):
        return setting
    path = expanded(setting)
    content = zlib.compress(msgspec.json.encode(Database.read(path).messages), level=9)
    return f"{path.name.replace(';', '_')};zlib,{base64.b64encode(content).decode()}"


def packed_name(setting: str) -> str:
    """Returns the name of the file that a setting of `packed` was read from."""
    return setting.partition(";")[0]


def read_text(path: Path) -> str:
    """Returns the text of a DBC file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        rule = "The DBC file is a folder" if path.is_dir() else "The DBC file cannot be read"
        raise ConfigError(rule, value=f"{path} ({error.strerror})", remedy="Name a file like car.dbc") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        # The editors of databases write the code page of Windows.
        return content.decode("cp1252", errors="replace")


def _group(can_id: int) -> int:
    """Returns the parameter group (PGN) of an ID of SAE J1939: without priority, sender and destination."""
    group = can_id >> 8 & 0x3FFFF
    return group if group >> 8 & 0xFF >= _PDU1_FORMATS else group & 0x3FF00


def as_message(read: Any) -> DatabaseMessage:
    """Makes a message of cantools' message."""
    return DatabaseMessage(name=read.name, can_id=read.frame_id, is_j1939=read.protocol == "j1939",
                   signals=[_signal(each) for each in read.signals if each.length])  # fmt: skip


def _signal(read: Any) -> DatabaseSignal:
    limits = [math.nan if each is None else float(each) for each in (read.minimum, read.maximum)]
    declares = math.isfinite(sum(limits)) and limits[0] != limits[1]
    return DatabaseSignal(
        name=read.name,
        bits=_bits(read.start, read.length, little_endian=read.byte_order == "little_endian"),
        unit=read.unit or "",
        signed=read.is_signed,
        is_float=read.is_float and read.length in _FLOATS,
        scale=float(read.scale),
        offset=float(read.offset),
        low=limits[0] if declares else None,
        high=limits[1] if declares else None,
        multiplexer=read.multiplexer_signal or "",
        pages=tuple(read.multiplexer_ids or ()),
    )


def _bits(start: int, length: int, *, little_endian: bool) -> tuple[int, ...]:
    """Returns the bits of a signal, the most significant bit first.

    A DBC counts the bits of each byte from its least significant bit. `start` is the least significant bit of a
    little-endian signal, and the most significant bit of a big-endian signal.
    """
    if little_endian:
        return tuple(bit ^ 7 for bit in range(start + length - 1, start - 1, -1))
    return tuple(range(start ^ 7, (start ^ 7) + length))
