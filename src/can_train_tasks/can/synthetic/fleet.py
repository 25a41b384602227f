"""The vehicles of versions 2 and 3: a car with 11-bit IDs, a truck with 29-bit IDs of SAE J1939, two cars with both.

Training never sees the last vehicle. Periods, payloads and bus load resemble logged vehicles; `scripts/bench/bus`
compares them. In version 2, signals of one reading are equal but for their scale. In version 3, signals are tied as
loosely as in logged vehicles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from can_train_tasks.can.data.payload_fields import MAX_PAYLOAD_BYTES
from can_train_tasks.can.synthetic.vehicles import (
    MAX_EXTENDED_ID,
    MAX_STANDARD_ID,
    NUM_VEHICLES,
    STATUS_CHANNELS,
    Checksum,
    Message,
    SendType,
    Signal,
    Vehicle,
    draw,
)

# Attacks forge these readings, so every vehicle sends each of them in a separate fast message.
TARGETS: Final = ("rpm", "speed", "steering", "gear")
_LIVELY: Final = ("rpm", "speed", "steering", "throttle", "torque", "yaw", "brake")
_SLOW: Final = ("coolant", "fuel", "speed", "speed", "rpm", "torque", "yaw")
GEARS: Final = 6  # gears besides neutral, which is a reading of 0

_MS: Final = 1_000  # microseconds
_STANDARD_IDS: Final = (0x010, 0x7E0)  # smaller and larger IDs are left to bus management and diagnostics
_PARAMETER_GROUPS: Final = (0xF000, 0xFEFF)  # PGNs of SAE J1939 that are broadcast
_PRIORITIES: Final = (3, 6)  # J1939's priorities of control messages, and of other messages
_PRIORITY_SHIFT: Final = 26
_SHARED_IDS: Final = 24  # IDs that all vehicles may use, each vehicle with another meaning, as makers do
_SHARED_PART: Final = 8  # one in this many of a vehicle's IDs is a shared ID
_OWN_IDS: Final = 110  # IDs reserved for each vehicle: enough for the largest vehicle
_UNITS: Final = (6, 10)  # fewest and most control units of a vehicle
_MAX_ADDRESS: Final = 64  # largest address of a control unit, in the last byte of a 29-bit ID
_ADDRESS_BITS: Final = 8
_CONTROL_MS: Final = 50  # longest period of a control message
_SCHEDULE_US: Final = 5 * _MS  # a control unit looks for due messages at this interval
_SAMPLES_MS: Final = (100, 200, 500, 1000)  # intervals between samples of a slow reading
_REPEAT_MS: Final = 50  # a message that is sent on changes only is repeated after this time

# Shares of the messages that can have a property.
_TARGETS_PROTECTED: Final = 3  # messages of targets have a counter and a checksum this many times as often as others
_MIN_PROTECTED_BYTES: Final = 4
_MULTIPLEXED: Final = 0.1
_MAX_LIVELY_MS: Final = 100  # longest period of a reading that always changes
_NOISY: Final = 0.3  # share of lively readings with noise
_MIN_EVENT_MS: Final = 100  # faster messages are control loops, which never pause
_SENT_IF_ACTIVE: Final = 0.15
_SENT_ON_CHANGE_TOO: Final = 0.25

# Version 3: lags and shares of a course of its own, to draw from, for signals that no attacker forges.
_LAGS_US: Final = (0, 0, 50 * _MS, 100 * _MS)
_OWN_SHARES: Final = (0.0, 0.2, 0.35, 0.5, 0.7)


@dataclass(frozen=True, kw_only=True)
class VehicleKind:
    """The properties common to vehicles of a kind."""

    periods_ms: Mapping[int, tuple[int, int]]  # fewest and most messages of each period
    target_periods_ms: tuple[int, ...]  # periods of the messages that carry `TARGETS`, in the order of `TARGETS`
    extended: float  # share of messages with a 29-bit ID
    protected: float  # share of messages with a counter and a checksum
    counted: float  # share of messages with a counter alone
    constant: float  # share of messages that never change
    lively: float  # share of messages with a reading that differs in most frames
    on_change: int  # number of messages without a period
    fillers: tuple[int, ...]  # bytes in unused places of a payload
    lengths: tuple[int, ...]  # payload bytes to draw from
    jitters_us: tuple[int, ...]  # largest usual delays of a control unit behind its schedule, to draw from
    bit_us: int
    max_id: int
    checksums: tuple[Checksum, ...] = (Checksum.XOR, Checksum.CRC8)  # kinds to draw from


_CAR: Final = VehicleKind(
    periods_ms={10: (0, 1), 20: (3, 5), 50: (4, 6), 100: (9, 13), 200: (5, 8), 500: (4, 8), 1000: (6, 10)},
    target_periods_ms=(10, 20, 20, 50),
    extended=0.0,
    protected=0.18,
    counted=0.1,
    constant=0.2,
    lively=0.3,
    on_change=4,
    fillers=(0x00, 0x00, 0x00, 0x00, 0xFF),
    lengths=(8, 8, 8, 8, 8, 8, 8, 7, 6, 5, 4, 2, 0),
    jitters_us=(50, 150, 400, 800),
    bit_us=2,
    max_id=MAX_STANDARD_ID,
)
_MIXED: Final = VehicleKind(
    periods_ms={10: (0, 1), 25: (3, 5), 50: (3, 6), 100: (10, 14), 250: (4, 7), 500: (4, 8), 1000: (8, 12)},
    target_periods_ms=(10, 25, 25, 50),
    extended=0.3,
    protected=0.15,
    counted=0.15,
    constant=0.2,
    lively=0.3,
    on_change=5,
    fillers=(0x00, 0x00, 0xFF, 0x55),
    lengths=(8, 8, 8, 8, 8, 7, 6, 4, 3, 1),
    jitters_us=(50, 150, 400, 800),
    bit_us=2,
    max_id=MAX_STANDARD_ID,
)
_TRUCK: Final = VehicleKind(
    periods_ms={10: (0, 1), 20: (2, 4), 50: (4, 7), 100: (12, 18), 250: (4, 8), 500: (6, 10), 1000: (18, 28)},
    target_periods_ms=(20, 20, 10, 50),
    extended=1.0,
    protected=0.05,
    counted=0.05,
    constant=0.15,
    lively=0.4,
    on_change=3,
    fillers=(0xFF, 0xFF, 0xFF, 0xFF, 0x00),
    lengths=(8,),
    jitters_us=(60, 150, 400),
    bit_us=4,
    max_id=MAX_EXTENDED_ID,
)
_KINDS: Final = (_CAR, _TRUCK, _MIXED, _MIXED)
_PUBLIC_CHECKSUMS: Final = (Checksum.XOR, Checksum.CRC8, Checksum.SUM, Checksum.CRC8_H2F)
_LOOSE_CAR: Final = replace(_CAR, protected=0.08, counted=0.03, checksums=_PUBLIC_CHECKSUMS)
_LOOSE_MIXED: Final = replace(_MIXED, protected=0.08, counted=0.03, checksums=_PUBLIC_CHECKSUMS)
_LOOSE_TRUCK: Final = replace(_TRUCK, protected=0.01, counted=0.03, checksums=_PUBLIC_CHECKSUMS)
_LOOSE_KINDS: Final = (_LOOSE_CAR, _LOOSE_TRUCK, _LOOSE_MIXED, _LOOSE_MIXED)


def make_fleet(seed: int) -> tuple[Vehicle, ...]:
    """Designs the vehicles of version 2; vehicle i does not depend on the number of vehicles."""
    return _make_vehicles(seed, _KINDS)


def make_loose_fleet(seed: int) -> tuple[Vehicle, ...]:
    """Designs the vehicles of version 3. Otherwise like `make_fleet`."""
    vehicles = _make_vehicles(seed, _LOOSE_KINDS)
    seeds = (np.random.SeedSequence(seed, spawn_key=(2, number)) for number in range(len(vehicles)))
    return tuple(_loosen(np.random.default_rng(own), each) for own, each in zip(seeds, vehicles, strict=True))


def _loosen(rng: np.random.Generator, vehicle: Vehicle) -> Vehicle:
    """Gives the signals that no attacker forges a lag, and the signals of analog readings a course of their own."""
    forged = {message.can_id: signal for message, signal in map(vehicle.fastest_carrier, TARGETS)}
    messages = []
    for message in vehicle.messages:
        signals = []
        for signal in message.signals:
            lag_us, own = draw(rng, _LAGS_US), draw(rng, _OWN_SHARES)
            is_status = signal.channel in STATUS_CHANNELS
            loose = replace(signal, lag_us=lag_us, own=0.0 if is_status else own)
            signals.append(signal if forged.get(message.can_id) == signal else loose)
        messages.append(replace(message, signals=tuple(signals)))
    return replace(vehicle, messages=tuple(messages))


def _make_vehicles(seed: int, kinds: Sequence[VehicleKind]) -> tuple[Vehicle, ...]:
    order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    standard = order.permutation(np.arange(*_STANDARD_IDS)).tolist()
    groups = order.permutation(np.arange(*_PARAMETER_GROUPS)).tolist()
    vehicles = []
    for number in range(NUM_VEHICLES):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, number)))
        first, pools = _SHARED_IDS + number * _OWN_IDS, []
        for pool in (standard, groups):
            shared = rng.permutation(pool[:_SHARED_IDS]).tolist()[: _OWN_IDS // _SHARED_PART]
            pools.append(rng.permutation([*shared, *pool[first : first + _OWN_IDS]]).tolist())
        vehicles.append(_make_vehicle(rng, kinds[number], *pools))
    return tuple(vehicles)


def _make_vehicle(rng: np.random.Generator, kind: VehicleKind, standard: list[int], groups: list[int]) -> Vehicle:
    slots = _draw_slots(rng, kind)
    addresses = rng.permutation(_MAX_ADDRESS)[: int(rng.integers(*_UNITS, endpoint=True))].tolist()
    jitters_us = tuple(draw(rng, kind.jitters_us) for _ in addresses)
    extended = rng.random(len(slots)) < kind.extended
    standard = sorted(standard[: int((~extended).sum())])
    groups = sorted(groups[: int(extended.sum())])
    messages = []
    for (period_ms, content), is_extended in zip(slots, extended.tolist(), strict=True):
        unit = int(rng.integers(len(addresses)))
        priority = _PRIORITIES[period_ms > _CONTROL_MS]
        if is_extended:
            can_id = priority << _PRIORITY_SHIFT | groups.pop(0) << _ADDRESS_BITS | addresses[unit]
        else:
            can_id = standard.pop(0)
        slot = _Slot(can_id=can_id, period_ms=period_ms, unit=unit, content=content)
        messages.append(_make_message(rng, kind, slot))
    by_id = sorted(messages, key=lambda message: message.can_id)
    return Vehicle(messages=tuple(by_id), jitters_us=jitters_us, bit_us=kind.bit_us, max_id=kind.max_id)


def _draw_slots(rng: np.random.Generator, kind: VehicleKind) -> list[tuple[int, str]]:
    """Draws period and content of every message, roughly from fast to slow: lower IDs win arbitration."""
    slots = list(zip(kind.target_periods_ms, TARGETS, strict=True))
    slots += [(_REPEAT_MS, "on_change")] * kind.on_change
    for period_ms, (fewest, most) in kind.periods_ms.items():
        for _ in range(int(rng.integers(fewest, most, endpoint=True))):
            chance = rng.random()
            lively = kind.lively if period_ms <= _MAX_LIVELY_MS else 0.0
            if chance < lively:
                content = "lively"
            elif chance < lively + kind.constant:
                content = "constant"
            else:
                content = draw(rng, ("slow", "flags"))
            slots.append((period_ms, content))
    order = np.argsort([period_ms * (0.5 + rng.random()) for period_ms, _ in slots], kind="stable")
    return [slots[position] for position in order.tolist()]


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """The properties of a message that are drawn before its payload."""

    can_id: int
    period_ms: int
    unit: int
    content: str  # a name of `TARGETS`, or "lively", "slow", "flags", "constant" or "on_change"


def _make_message(rng: np.random.Generator, kind: VehicleKind, slot: _Slot) -> Message:
    is_target = slot.content in TARGETS
    length = MAX_PAYLOAD_BYTES if is_target else draw(rng, kind.lengths)
    if slot.content == "on_change":
        length = max(1, length)
    chance = rng.random() / (_TARGETS_PROTECTED if is_target else 1)
    fits = length >= _MIN_PROTECTED_BYTES and slot.content != "on_change"
    protected = fits and chance < kind.protected
    counted = protected or (fits and chance < kind.protected + kind.counted)
    free_bytes = length - protected - counted
    signals = _draw_signals(rng, slot, free_bytes)
    send_type = _draw_send_type(rng, slot) if signals else SendType.CYCLIC
    # In a multiplexed message, the first byte is the number of the page.
    paged = length == MAX_PAYLOAD_BYTES and all(signal.byte for signal in signals) and rng.random() < _MULTIPLEXED
    return Message(
        can_id=slot.can_id,
        period_us=slot.period_ms * _MS,
        length=length,
        send_type=send_type,
        constants=_draw_constants(rng, kind, length),
        signals=signals,
        counter_byte=free_bytes if counted else None,
        checksum=draw(rng, kind.checksums) if protected else Checksum.NONE,
        pages=_draw_pages(rng, kind) if paged and not counted and send_type is SendType.CYCLIC else (),
        trigger="" if send_type is SendType.CYCLIC else signals[0].channel,
        unit=slot.unit,
        offset_us=_SCHEDULE_US * int(rng.integers(max(1, slot.period_ms * _MS // _SCHEDULE_US))),
    )


def _draw_send_type(rng: np.random.Generator, slot: _Slot) -> SendType:
    chance = rng.random()
    if slot.content == "on_change":
        return SendType.ON_CHANGE
    if slot.content == "flags" and slot.period_ms >= _MIN_EVENT_MS:
        if chance < _SENT_IF_ACTIVE:
            return SendType.CYCLIC_IF_ACTIVE
        if chance < _SENT_IF_ACTIVE + _SENT_ON_CHANGE_TOO:
            return SendType.CYCLIC_AND_ON_CHANGE
    return SendType.CYCLIC


def _draw_constants(rng: np.random.Generator, kind: VehicleKind, length: int) -> tuple[int, ...]:
    palette = (*kind.fillers, int(rng.integers(256)))
    filled = [draw(rng, palette) for _ in range(length)]
    return tuple(filled + [0] * (MAX_PAYLOAD_BYTES - length))


def _draw_pages(rng: np.random.Generator, kind: VehicleKind) -> tuple[tuple[int, ...], ...]:
    num_pages = int(rng.integers(2, 5))
    return tuple((page, *_draw_constants(rng, kind, MAX_PAYLOAD_BYTES)[1:]) for page in range(num_pages))


def _draw_signals(rng: np.random.Generator, slot: _Slot, free_bytes: int) -> tuple[Signal, ...]:
    if slot.content == "constant" or not free_bytes:
        return ()
    if slot.content in TARGETS:
        return _target_signals(rng, slot)
    # A message that is sent on changes begins with a status, which triggers it.
    content = "flags" if slot.content == "on_change" else slot.content
    signals = []
    byte = int(rng.integers(max(1, free_bytes // 2)))
    for _ in range(int(rng.integers(1, 4 if content == "slow" else 3))):
        if byte >= free_bytes:
            break
        width = 2 if content == "lively" and byte + 1 < free_bytes and rng.random() < 0.5 else 1
        signals.append(_draw_signal(rng, content, draw(rng, _channels(content, slot.period_ms)), byte, width))
        byte += width + int(rng.integers(2))
    return tuple(signals)


def _target_signals(rng: np.random.Generator, slot: _Slot) -> tuple[Signal, ...]:
    """Returns the signal of the reading that attackers forge, and one more signal."""
    channel = slot.content
    if channel == "gear":
        byte, high = int(rng.integers(3)), GEARS * int(rng.integers(1, 9))
        target = Signal(channel=channel, byte=byte, width=1, low=0, high=high)
    else:
        low, high = int(rng.integers(500)), int(rng.integers(4_000, 60_000))
        every_us = slot.period_ms * _MS * int(rng.integers(1, 3))
        target = Signal(channel=channel, byte=int(rng.integers(3)), width=2, low=low, high=high, every_us=every_us)
    content = draw(rng, ("slow", "lively", "flags"))
    return (target, _draw_signal(rng, content, draw(rng, _channels(content, slot.period_ms)), 4, 1))


def _channels(content: str, period_ms: int) -> Sequence[str]:
    """Lists the readings that a message may carry; a fast message carries no target of attackers."""
    names = {"flags": STATUS_CHANNELS, "slow": _SLOW, "lively": _LIVELY}[content]
    return [name for name in names if period_ms > _CONTROL_MS or name not in TARGETS]


def _draw_signal(rng: np.random.Generator, content: str, channel: str, byte: int, width: int) -> Signal:
    low, high = np.sort(rng.integers(256**width, size=2)).tolist()
    if content == "flags":
        # Readings of a status have four levels; a small range of raw values keeps two, three or four of them apart.
        low, span = int(rng.integers(4)), draw(rng, (2, 3, 4, 64))
        return Signal(channel=channel, byte=byte, width=width, low=low, high=low + span)
    if content == "slow":
        every_us = draw(rng, _SAMPLES_MS) * _MS
        return Signal(channel=channel, byte=byte, width=width, low=low, high=high, every_us=every_us)
    noise = int(rng.integers(1, 4)) if rng.random() < _NOISY else 0
    return Signal(channel=channel, byte=byte, width=width, low=low, high=high, noise=noise)
