"""A simulated vehicle: its CAN IDs, their periods, and the meaning of payload bytes; and the vehicles of version 1.

Shapes: M frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from can_train_tasks.can.data.payload_fields import MAX_PAYLOAD_BYTES, crc8

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Floats, Ints

_T = TypeVar("_T")

MAX_STANDARD_ID: Final = 0x7FF  # largest ID of 11 bits; larger IDs have 29 bits
MAX_EXTENDED_ID: Final = 0x1FFF_FFFF
NUM_VEHICLES: Final = 4  # three vehicles in training, and one vehicle only in tests, as in can-train-and-test

# Readings of the vehicle's state; most are smooth. Attacks forge the first three, so every vehicle sends these three.
ANALOG_CHANNELS: Final = ("rpm", "speed", "steering", "throttle", "brake", "torque", "yaw", "coolant", "fuel", "gear")
# Readings that hold one of a few levels for seconds: doors, lamps, modes.
STATUS_CHANNELS: Final = ("status_1", "status_2", "status_3", "status_4")
_NUM_TARGETS: Final = 3  # each of the first three `ANALOG_CHANNELS` gets a separate fast, cyclic message

# Fewest and most messages of each period: 25 to 43 IDs, some 800 to 1,200 frames/s, about a fifth of 500 kbit/s.
_PERIODS_MS: Final = {10: (4, 6), 20: (5, 8), 50: (3, 6), 100: (5, 9), 200: (3, 5), 500: (2, 5), 1000: (3, 6)}
_ID_RANGE: Final = (0x010, 0x7E0)  # 11 bits; smaller and larger IDs are left to bus management and diagnostics
_SHARED_IDS: Final = 24  # IDs that all vehicles may use, each vehicle with another meaning, as makers do
_SHARED_PART: Final = 3  # one in this many of a vehicle's IDs is a shared ID
_OWN_IDS: Final = 45  # IDs reserved for each vehicle: enough for the largest vehicle
# Payload bytes to draw from: most messages fill a frame, a few carry nothing but their ID.
_LENGTHS: Final = (8, 8, 8, 8, 8, 8, 7, 6, 5, 4, 3, 2, 0)
_CRC8_START: Final = 0xFF  # initial value and final XOR of SAE J1850, and of AUTOSAR's CRC8H2F


class SendType(Enum):
    """When a message is sent: every period; every period while active; every period, and on changes; or on changes."""

    CYCLIC = auto()
    CYCLIC_IF_ACTIVE = auto()
    CYCLIC_AND_ON_CHANGE = auto()
    ON_CHANGE = auto()


class Checksum(Enum):
    """The kind of checksum in the last byte, which protects the other bytes and the ID."""

    NONE = auto()
    XOR = auto()
    CRC8 = auto()  # SAE J1850
    SUM = auto()  # as in public DBC files of Toyota
    CRC8_H2F = auto()  # AUTOSAR's CRC8H2F, as in public DBC files of Volkswagen


_CRC8_POLYNOMIALS: Final = {Checksum.CRC8: 0x1D, Checksum.CRC8_H2F: 0x2F}


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One reading inside a payload, most significant byte first."""

    channel: str  # the name of the reading
    byte: int  # position of the reading's first byte
    width: int  # bytes: 1 or 2
    low: int  # raw value for a reading of 0
    high: int  # raw value for a reading of 1
    every_us: int = 0  # microseconds between samples of the reading; 0: each frame has a new sample
    noise: int = 0  # largest error of a sample, in raw values
    lag_us: int = 0  # microseconds that the signal is behind the reading
    own: float = 0.0  # share of a course of the signal's own, which no other signal follows

    def to_raw(self, reading: Floats) -> Ints:
        """Converts readings in [0, 1] to raw values, [M]."""
        return self.low + np.floor(reading * (self.high - self.low)).astype(np.int64)

    def read(self, payload: NDArray[np.uint8]) -> Ints:
        """Extracts the raw values from payloads [M, 8]."""
        value = np.zeros(len(payload), np.int64)
        for position in range(self.byte, self.byte + self.width):
            value = value * 256 + payload[:, position]
        return value

    def write(self, payload: NDArray[np.uint8], raw: Ints) -> None:
        """Writes raw values [M], clipped to the signal's range, into payloads [M, 8]."""
        value = np.clip(raw, min(self.low, self.high), max(self.low, self.high))
        for position in reversed(range(self.byte, self.byte + self.width)):
            payload[:, position] = value % 256
            value = value // 256


@dataclass(frozen=True, kw_only=True)
class Message:
    """One CAN ID of a vehicle."""

    can_id: int  # ID of 11 or 29 bits
    period_us: int  # microseconds between two frames; for a message that is sent on changes, between repetitions
    length: int  # payload bytes
    send_type: SendType
    constants: tuple[int, ...]  # the 8 initial payload bytes, before readings are written; zero beyond `length`
    signals: tuple[Signal, ...]  # the readings in the payload
    counter_byte: int | None  # byte whose low nibble counts the frames; None without a counter
    checksum: Checksum  # kind of checksum in the last byte
    pages: tuple[tuple[int, ...], ...] = ()  # constants that take turns, where a message is multiplexed
    trigger: str = ""  # the channel that decides when the message is sent; empty for a cyclic message
    unit: int = 0  # the control unit that sends the message by its clock
    offset_us: int = 0  # microseconds from the beginning of the unit's schedule


@dataclass(frozen=True, kw_only=True)
class Vehicle:
    """A vehicle's messages, by ascending ID, and its bus."""

    messages: tuple[Message, ...]
    jitters_us: tuple[int, ...] = ()  # largest usual delay of each control unit behind its schedule
    bit_us: int = 2  # duration of a bit: at 500 kbit/s, the usual speed of a powertrain bus
    max_id: int = MAX_STANDARD_ID  # the largest ID that may be sent

    def fastest_carrier(self, channel: str) -> tuple[Message, Signal]:
        """Returns the fastest message that is always sent and carries a channel, and the channel's signal."""
        cyclic = [m for m in self.messages if m.send_type is SendType.CYCLIC]
        carriers = [(m, s) for m in cyclic for s in m.signals if s.channel == channel]
        return min(carriers, key=lambda pair: (pair[0].period_us, pair[0].can_id))

    def cyclic_messages(self, max_period_us: int) -> list[Message]:
        """Returns the messages that are always sent, with a period of at most `max_period_us`."""
        return [m for m in self.messages if m.send_type is SendType.CYCLIC and m.period_us <= max_period_us]


def draw(rng: np.random.Generator, choices: Sequence[_T]) -> _T:
    """Draws one of several choices."""
    return choices[int(rng.integers(len(choices)))]


def make_vehicles(seed: int) -> tuple[Vehicle, ...]:
    """Designs the vehicles of a data set; vehicle i does not depend on the number of vehicles."""
    ids = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,))).permutation(np.arange(*_ID_RANGE))
    vehicles = []
    for number in range(NUM_VEHICLES):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, number)))
        first = _SHARED_IDS + number * _OWN_IDS
        vehicles.append(_make_vehicle(rng, shared=ids[:_SHARED_IDS], reserved=ids[first : first + _OWN_IDS]))
    return tuple(vehicles)


def write_checksum(message: Message, payload: NDArray[np.uint8]) -> None:
    """Writes the checksum into payloads [M, 8] of one message."""
    if message.checksum is Checksum.NONE:
        return
    last = message.length - 1
    # The ID comes first: a payload that is copied under another ID then fails the check, as in AUTOSAR's profiles.
    id_bytes = message.can_id.to_bytes(2 if message.can_id < 2**16 else 4)
    protected = [np.full(len(payload), byte, np.uint8) for byte in id_bytes]
    protected += [payload[:, position] for position in range(last)]
    payload[:, last] = _checksum(message.checksum, protected)


def _checksum(kind: Checksum, columns: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    if kind in _CRC8_POLYNOMIALS:
        return crc8(columns, _CRC8_POLYNOMIALS[kind], _CRC8_START) ^ np.uint8(_CRC8_START)
    combine = np.add if kind is Checksum.SUM else np.bitwise_xor
    combined: NDArray[np.uint8] = combine.reduce(columns, dtype=np.uint8)
    return combined


def _make_vehicle(rng: np.random.Generator, *, shared: Ints, reserved: Ints) -> Vehicle:
    periods_ms = []
    for period_ms, (fewest, most) in _PERIODS_MS.items():
        periods_ms += [period_ms] * int(rng.integers(fewest, most, endpoint=True))
    num_shared = len(periods_ms) // _SHARED_PART
    ids = np.concatenate([rng.permutation(shared)[:num_shared], reserved[: len(periods_ms) - num_shared]])
    # Lower IDs win arbitration, so makers give them to the faster messages.
    messages = [
        _make_target(rng, int(can_id), period_ms, ANALOG_CHANNELS[rank])
        if rank < _NUM_TARGETS
        else _make_message(rng, int(can_id), period_ms)
        for rank, (can_id, period_ms) in enumerate(zip(np.sort(ids), periods_ms, strict=True))
    ]
    return Vehicle(messages=tuple(messages))


def _make_target(rng: np.random.Generator, can_id: int, period_ms: int, channel: str) -> Message:
    """Makes a full frame with the channel in two bytes, another reading, a counter and a checksum."""
    high = int(rng.integers(8_000, 60_000))
    second_channel = draw(rng, ANALOG_CHANNELS[_NUM_TARGETS:])
    return Message(
        can_id=can_id,
        period_us=period_ms * 1000,
        length=MAX_PAYLOAD_BYTES,
        send_type=SendType.CYCLIC,
        constants=_constants(rng, MAX_PAYLOAD_BYTES),
        signals=(
            Signal(channel=channel, byte=int(rng.integers(0, 3)), width=2, low=int(rng.integers(0, 500)), high=high),
            Signal(channel=second_channel, byte=4, width=1, low=0, high=255),
        ),
        counter_byte=MAX_PAYLOAD_BYTES - 2,
        checksum=draw(rng, (Checksum.XOR, Checksum.CRC8)),
    )


def _make_message(rng: np.random.Generator, can_id: int, period_ms: int) -> Message:
    length = draw(rng, _LENGTHS)
    protected = length >= 4 and rng.random() < 0.5
    counter_byte = length - 2 if protected or (length >= 2 and rng.random() < 0.2) else None
    # Control loops (10 ms) never pause; the slower a message, the likelier it depends on events.
    chance, send_type = rng.random(), SendType.CYCLIC
    if period_ms >= 20 and chance < 0.15:
        send_type = SendType.CYCLIC_AND_ON_CHANGE
    elif period_ms >= 100 and chance > 0.75:
        send_type = SendType.CYCLIC_IF_ACTIVE
    return Message(
        can_id=can_id,
        period_us=period_ms * 1000,
        length=length,
        send_type=send_type,
        constants=_constants(rng, length),
        signals=_draw_signals(rng, free_bytes=length if counter_byte is None else counter_byte),
        counter_byte=counter_byte,
        checksum=draw(rng, (Checksum.XOR, Checksum.CRC8)) if protected else Checksum.NONE,
    )


def _constants(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    """Draws typical filler bytes: mostly zeros and ones, now and then a fixed code."""
    palette = [0x00, 0x00, 0x00, 0xFF, 0xFF, int(rng.integers(256))]
    filled = [draw(rng, palette) for _ in range(length)]
    return tuple(filled + [0] * (MAX_PAYLOAD_BYTES - length))


def _draw_signals(rng: np.random.Generator, free_bytes: int) -> tuple[Signal, ...]:
    """Fills the bytes from the left with readings of one or two bytes; where no reading is drawn, constants remain."""
    signals = []
    byte = 0
    while byte < free_bytes:
        chance = rng.random()
        width = 2 if chance < 0.3 and byte + 1 < free_bytes else 1
        if chance < 0.6:
            low, high = np.sort(rng.integers(0, 256**width, size=2)).tolist()
            channel = draw(rng, ANALOG_CHANNELS if chance < 0.5 else STATUS_CHANNELS)
            signals.append(Signal(channel=channel, byte=byte, width=width, low=low, high=high))
        byte += width
    return tuple(signals)
