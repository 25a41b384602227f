"""What a simulated vehicle sends while it is driven, what attackers make of that, and who may send on the bus.

The drive: the vehicle's state, and every message's sending times and payloads. Only additions, multiplications,
divisions and uniform draws occur here, and time is counted in whole microseconds: these give the same bytes on every
platform, which sines and logarithms do not.

The attacks: which frames are added, removed or replaced, and which of them are labelled. Each attack comes in bursts
whose strength is drawn anew, from blatant to barely visible. A frame that the attacker sent is an attack. A suppressed
message leaves nothing to label; there the frame that became ready next after each missing one is labelled, so that the
attack windows are those that lack a frame.

Shapes: M frames, T ticks of the vehicle's state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from heapq import heappop, heappush
from typing import Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from can_train.tasks.can.data.graphs import MAX_PAYLOAD_BYTES, Bools, Floats, Ints
from can_train.tasks.can.synthetic.vehicles import STATUS_CHANNELS, Message, SendType, Vehicle, write_checksum

_T = TypeVar("_T")

SECOND_US: Final = 1_000_000
_TICK_US: Final = 10_000  # resolution of the vehicle's state: the period of the fastest message
_BIT_US: Final = 2  # at 500 kbit/s, the usual speed of a powertrain bus
_FRAME_BITS: Final = 47  # of a data frame with an 11-bit ID, without payload and stuff bits, with the gap after it
_LOSS: Final = 0.002  # share of frames that a busy control unit skips: a missing frame alone proves no attack
_JITTER: Final = 0.02  # largest usual deviation of a frame from its period, as a share of the period
_LATE: Final = 0.01  # share of frames delayed by other work of their control unit, by up to a third of the period
_REPEATED: Final = 0.3  # share of frames of an on-change message that are followed by another before the next is due
_MIN_REPEAT_DELAY_US: Final = 500  # attackers are no faster, so a short interval alone proves no attack either
_ACTIVITY_CYCLE_US: Final = 8 * SECOND_US  # how often a message becomes active, if it depends on events

_BURST_CYCLE_US: Final = 6 * SECOND_US  # a burst of one to two seconds in each: a quarter of a drive is under attack
# From a bus at four fifths of its capacity down to one frame in most windows.
_DOS_PERIODS_US: Final = (400, 1_000, 4_000, 15_000, 60_000)
_FUZZING_PERIODS_US: Final = (800, 3_000, 12_000, 40_000, 120_000)
_SPOOFED_SHARES: Final = (1.0, 0.5, 0.2, 0.08)  # of the real frames are followed by a forged one
_MIN_SPOOF_DELAY_US: Final = 300
# Longest delay of the forged frame, as a share of the period: the sooner it follows, the longer receivers believe it.
_MAX_SPOOF_DELAYS: Final = (0.1, 0.5, 1.0)
_INTERVAL_FACTORS: Final = (0.13, 0.3, 0.55, 0.85, 1.3)  # the attacker's period ÷ the real one
_REPLAYED_SHARES: Final = (1.0, 0.4, 0.1)  # of a vehicle's IDs are replayed together
# Longest period of a message worth suppressing, and of the one that every replay includes: it shows in each window.
_FAST_US: Final = 50_000
_MODERATE_US: Final = 200_000  # longest period of a message sent at a wrong interval: several frames in a burst


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Frames on their way to the bus, or in a log of it.

    Attributes:
        time_us: [M] int64, microseconds since the drive began at which the frame is ready to be sent or, after
            `simulate_bus`, has been sent.
        can_id: [M] int64.
        length: [M] int64, payload bytes.
        payload: [M, 8] uint8, zero beyond the length.
        attack: [M] bool, the label.
    """

    time_us: Ints
    can_id: Ints
    length: Ints
    payload: NDArray[np.uint8]
    attack: Bools

    def __len__(self) -> int:
        return len(self.time_us)

    def take(self, rows: Bools | Ints) -> Self:
        """Returns a copy of the rows given by a mask or by their positions."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Joins at least one part, ordered by time; at equal times earlier parts go first."""
        whole = cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})
        return whole.take(np.argsort(whole.time_us, kind="stable"))


@dataclass(frozen=True, kw_only=True)
class TimeSpan:
    """A part of a drive, in microseconds since its start."""

    start_us: int
    end_us: int


def draw_time_spans(rng: np.random.Generator, duration_us: int, *, cycle_us: int) -> tuple[TimeSpan, ...]:
    """Draws one time span in each cycle of about `cycle_us`, 15 to 35 % of it long and never at its very start.

    Returns:
        At least one time span, in order, not overlapping.
    """
    num_cycles = max(1, round(duration_us / cycle_us))
    whole_us = duration_us // num_cycles
    spans = []
    for cycle in range(num_cycles):
        length_us = int(whole_us * (0.15 + 0.2 * rng.random()))
        earliest_us = whole_us // 10
        start_us = cycle * whole_us + earliest_us + int((whole_us - length_us - earliest_us) * rng.random())
        spans.append(TimeSpan(start_us=start_us, end_us=start_us + length_us))
    return tuple(spans)


def vehicle_traffic(rng: np.random.Generator, vehicle: Vehicle, duration_us: int) -> Traffic:
    """Simulates everything a vehicle wants to send during one drive, ordered by the time it is ready."""
    state = _simulate_state(rng, duration_us)
    return Traffic.merge([_message_traffic(rng, message, state, duration_us) for message in vehicle.messages])


def _simulate_state(rng: np.random.Generator, duration_us: int) -> dict[str, Floats]:
    """Returns the readings [T] of every channel, in [0, 1], one each 10 ms. They follow from a common course of speed
    and steering, and so agree with one another.
    """
    num_ticks = duration_us // _TICK_US + 1
    speed = np.clip(1.5 * _smooth_random(rng, num_ticks, hold_s=5) - 0.25, 0.0, 1.0)
    change = np.diff(speed, prepend=speed[:1]) * 300
    throttle = np.clip(0.1 + 0.25 * speed + change + 0.1 * _smooth_random(rng, num_ticks, hold_s=1), 0.0, 1.0)
    gear = np.minimum(np.floor(speed * 6), 5)
    rpm = _moving_average(np.clip(0.12 + 0.5 * (speed * 6 - gear) + 0.25 * throttle, 0.0, 1.0), width=30)
    steering = np.clip(0.5 + 1.2 * (_smooth_random(rng, num_ticks, hold_s=2) - 0.5), 0.0, 1.0)
    warm_s = np.arange(num_ticks) / 100 + 200 * rng.random()
    state = {
        "speed": speed,
        "throttle": throttle,
        "brake": np.clip(-change, 0.0, 1.0),
        "gear": gear / 5,
        "rpm": rpm,
        "torque": np.clip(0.6 * throttle + 0.3 * rpm, 0.0, 1.0),
        "steering": steering,
        "yaw": np.clip(0.5 + (steering - 0.5) * speed, 0.0, 1.0),
        "coolant": 0.2 + 0.7 * warm_s / (warm_s + 120),
        "fuel": np.full(num_ticks, 0.05 + 0.9 * rng.random()),
    }
    state |= {channel: np.floor(4 * _random_levels(rng, num_ticks, hold_s=4)) / 4 for channel in STATUS_CHANNELS}
    return state


def _message_traffic(rng: np.random.Generator, message: Message, state: dict[str, Floats], duration_us: int) -> Traffic:
    time_us = _sending_times(rng, message, duration_us)
    payload = np.tile(np.array(message.constants, np.uint8), (len(time_us), 1))
    for signal in message.signals:
        raw = signal.to_raw(state[signal.channel][time_us // _TICK_US])
        noisy = signal.channel not in STATUS_CHANNELS
        signal.write(payload, raw + rng.integers(-1, 2, size=len(raw)) if noisy else raw)
    if message.counter_byte is not None:
        count = (np.arange(len(time_us)) + int(rng.integers(16))) % 16
        payload[:, message.counter_byte] = (message.constants[message.counter_byte] & 0xF0) | count
    write_checksum(message, payload)
    can_id, length = (np.full(len(time_us), value, np.int64) for value in (message.can_id, message.length))
    labels = np.zeros(len(time_us), np.bool_)
    return Traffic(time_us=time_us, can_id=can_id, length=length, payload=payload, attack=labels)


def _sending_times(rng: np.random.Generator, message: Message, duration_us: int) -> Ints:
    """Draws when a message is ready, [M] ascending: its period from a random phase, with jitter, delays and gaps."""
    period_us = message.period_us
    due_us = np.arange(int(rng.integers(period_us)), duration_us, period_us)
    sent = rng.random(len(due_us)) >= _LOSS
    active = np.zeros(len(due_us), np.bool_)
    for span in draw_time_spans(rng, duration_us, cycle_us=_ACTIVITY_CYCLE_US):
        active |= (due_us >= span.start_us) & (due_us < span.end_us)
    if message.send_type is SendType.CYCLIC_IF_ACTIVE:
        sent &= active
    jitter = _JITTER * (rng.random(len(due_us)) + rng.random(len(due_us)))
    jitter += np.where(rng.random(len(due_us)) < _LATE, rng.random(len(due_us)) / 3, 0.0)
    due_us += np.floor(jitter * period_us).astype(np.int64)
    if message.send_type is SendType.CYCLIC_AND_ON_CHANGE:
        repeated = active & (rng.random(len(due_us)) < _REPEATED)
        again_us = due_us + rng.integers(_MIN_REPEAT_DELAY_US, period_us, size=len(due_us))
        due_us = np.sort(np.concatenate([due_us[sent], again_us[repeated]]))
    else:
        due_us = due_us[sent]
    return due_us[due_us < duration_us]


def _random_levels(rng: np.random.Generator, num_ticks: int, *, hold_s: int) -> Floats:
    """Random levels in [0, 1), each held for `hold_s`, from a random moment on, [T]."""
    hold = hold_s * SECOND_US // _TICK_US
    levels = np.repeat(rng.random(num_ticks // hold + 2), hold)
    return levels[int(rng.integers(hold)) :][:num_ticks]


def _smooth_random(rng: np.random.Generator, num_ticks: int, *, hold_s: int) -> Floats:
    """A smooth random course in [0, 1) that turns every `hold_s` or so, [T]."""
    width = hold_s * SECOND_US // _TICK_US
    levels = _random_levels(rng, num_ticks + 2 * width, hold_s=hold_s)
    return _moving_average(_moving_average(levels, width=width), width=width)[2 * width :]


def _moving_average(course: Floats, *, width: int) -> Floats:
    """Averages each value [T] with the `width` - 1 before it; the first stands for those before the start."""
    total = np.cumsum(np.concatenate([np.full(width, course[0]), course]))
    means: Floats = np.clip((total[width:] - total[:-width]) / width, 0.0, 1.0)
    return means


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackContext:
    """One drive before the attack: what the vehicle wants to send, ordered by time, and when the attacker is active."""

    vehicle: Vehicle
    traffic: Traffic
    bursts: tuple[TimeSpan, ...]
    rng: np.random.Generator

    def rows(self, message: Message, burst: TimeSpan) -> Ints:
        """Returns the positions of a message's frames inside a burst."""
        first, last = np.searchsorted(self.traffic.time_us, [burst.start_us, burst.end_us])
        rows: Ints = first + np.flatnonzero(self.traffic.can_id[first:last] == message.can_id)
        return rows


def attack(kind: str, rng: np.random.Generator, vehicle: Vehicle, traffic: Traffic, duration_us: int) -> Traffic:
    """Attacks a drive.

    Args:
        kind: A name of `ATTACKS`.
        rng: The attacker's choices.
        vehicle: The vehicle attacked.
        traffic: What it wants to send, ordered by time.
        duration_us: Length of the drive.

    Returns:
        What is sent instead, ordered by the time it is ready, attack frames labelled.
    """
    bursts = draw_time_spans(rng, duration_us, cycle_us=_BURST_CYCLE_US)
    return ATTACKS[kind](AttackContext(vehicle=vehicle, traffic=traffic, bursts=bursts, rng=rng))


def _inject(burst_frames: Callable[[AttackContext, TimeSpan], Traffic], context: AttackContext) -> Traffic:
    return Traffic.merge([context.traffic, *(burst_frames(context, burst) for burst in context.bursts)])


def _flood(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Floods the bus with ID 0, which always wins arbitration."""
    time_us = _periodic(context.rng, burst, _draw(context.rng, _DOS_PERIODS_US))
    payload = np.full((len(time_us), MAX_PAYLOAD_BYTES), _draw(context.rng, (0x00, 0xFF)), np.uint8)
    return _attack_frames(time_us, np.zeros_like(time_us), np.full_like(time_us, MAX_PAYLOAD_BYTES), payload)


def _fuzz(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Sends random payloads, in some bursts under random IDs, in others under the vehicle's own."""
    rng = context.rng
    time_us = _periodic(rng, burst, _draw(rng, _FUZZING_PERIODS_US))
    if rng.random() < 0.5:
        can_id = rng.integers(0x800, size=len(time_us))
        length = rng.integers(MAX_PAYLOAD_BYTES + 1, size=len(time_us))
    else:
        own = np.array([(message.can_id, message.length) for message in context.vehicle.messages])
        can_id, length = own[rng.integers(len(own), size=len(time_us))].T
    payload = rng.integers(256, size=(len(time_us), MAX_PAYLOAD_BYTES), dtype=np.uint8)
    payload[np.arange(MAX_PAYLOAD_BYTES) >= length[:, None]] = 0
    return _attack_frames(time_us, can_id, length, payload)


def _spoof(channels: Sequence[str], context: AttackContext, burst: TimeSpan) -> Traffic:
    """Sends a forged frame after the real ones that carry the channels."""
    return Traffic.merge([_spoof_channel(channel, context, burst) for channel in channels])


def _spoof_channel(channel: str, context: AttackContext, burst: TimeSpan) -> Traffic:
    rng = context.rng
    message, signal = context.vehicle.fastest_carrier(channel)
    rows = context.rows(message, burst)
    rows = rows[rng.random(len(rows)) < _draw(rng, _SPOOFED_SHARES)]
    forged = context.traffic.take(rows)
    max_delay_us = int(message.period_us * _draw(rng, _MAX_SPOOF_DELAYS))
    forged.time_us[:] += rng.integers(_MIN_SPOOF_DELAY_US, max_delay_us, size=len(rows))
    span = signal.high - signal.low
    if rng.random() < 0.5:
        raw = np.full(len(rows), signal.low + int(span * rng.random()))
    else:
        raw = signal.read(forged.payload) + int(span * (0.4 * rng.random() - 0.2))
    signal.write(forged.payload, raw)
    # Not every attacker knows the checksum.
    if rng.random() < 0.5:
        write_checksum(message, forged.payload)
    forged.attack[:] = True
    return forged


def _change_interval(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Sends a real message's latest payload again, with a period of the attacker's own."""
    message = _draw(context.rng, context.vehicle.cyclic_messages(_MODERATE_US))
    time_us = _periodic(context.rng, burst, int(message.period_us * _draw(context.rng, _INTERVAL_FACTORS)))
    own = np.flatnonzero(context.traffic.can_id == message.can_id)
    latest = np.searchsorted(context.traffic.time_us[own], time_us, side="right") - 1
    forged = context.traffic.take(own[np.maximum(latest, 0)])
    return _attack_frames(time_us, forged.can_id, forged.length, forged.payload)


def _replay(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Sends again what some of the vehicle's IDs sent in an earlier time span as long as the burst."""
    rng = context.rng
    duration_us = min(burst.end_us - burst.start_us, burst.start_us)
    recorded_us = int((burst.start_us - duration_us) * rng.random())
    ids = np.array([message.can_id for message in context.vehicle.messages])
    # One fast message at least, so that no burst is without a frame.
    always = _draw(rng, context.vehicle.cyclic_messages(_FAST_US)).can_id
    ids = ids[(rng.random(len(ids)) < _draw(rng, _REPLAYED_SHARES)) | (ids == always)]
    first, last = np.searchsorted(context.traffic.time_us, [recorded_us, recorded_us + duration_us])
    forged = context.traffic.take(first + np.flatnonzero(np.isin(context.traffic.can_id[first:last], ids)))
    forged.time_us[:] += burst.start_us - recorded_us
    forged.attack[:] = True
    return forged


def _suppress(context: AttackContext) -> Traffic:
    """Silences one to three messages; the head of this file says which frames are labelled."""
    missing = np.zeros(len(context.traffic), np.bool_)
    for burst in context.bursts:
        candidates = context.vehicle.cyclic_messages(_FAST_US)
        for _ in range(int(context.rng.integers(1, 4))):
            missing[context.rows(_draw(context.rng, candidates), burst)] = True
    rest = context.traffic.take(~missing)
    next_ready = np.searchsorted(rest.time_us, context.traffic.time_us[missing])
    rest.attack[np.minimum(next_ready, len(rest) - 1)] = True
    return rest


def _masquerade(context: AttackContext) -> Traffic:
    """Silences a message and sends it in its place: only its reading is wrong, and its timing a little."""
    rng = context.rng
    replaced = np.zeros(len(context.traffic), np.bool_)
    parts = []
    for burst in context.bursts:
        message, signal = context.vehicle.fastest_carrier(_draw(rng, ("rpm", "speed", "steering")))
        rows = context.rows(message, burst)
        replaced[rows] = True
        forged = context.traffic.take(rows)
        # The attacker's clock is not the victim's: another phase, and the jitter of software instead of a timer's.
        shift_us = message.period_us * (0.3 * rng.random() + 0.1 * rng.random(len(rows)))
        forged.time_us[:] += np.floor(shift_us).astype(np.int64)
        raw = signal.read(forged.payload)
        if rng.random() < 0.5:
            signal.write(forged.payload, np.full_like(raw, raw[0]))
        else:
            final_error = (signal.high - signal.low) * _draw(rng, (-0.5, -0.2, 0.2, 0.5))
            signal.write(forged.payload, raw + np.floor(np.linspace(0.0, final_error, len(raw))).astype(np.int64))
        write_checksum(message, forged.payload)
        forged.attack[:] = True
        parts.append(forged)
    return Traffic.merge([context.traffic.take(~replaced), *parts])


def _periodic(rng: np.random.Generator, burst: TimeSpan, period_us: int) -> Ints:
    """Draws the attacker's sending times: a period with up to a tenth of jitter, [M] ascending, at least one."""
    time_us = np.arange(burst.start_us, burst.end_us, period_us)
    return time_us + rng.integers(period_us // 10 + 1, size=len(time_us))


def _attack_frames(time_us: Ints, can_id: Ints, length: Ints, payload: NDArray[np.uint8]) -> Traffic:
    labels = np.ones(len(time_us), np.bool_)
    return Traffic(time_us=time_us, can_id=can_id, length=length, payload=payload, attack=labels)


def _draw(rng: np.random.Generator, choices: Sequence[_T]) -> _T:
    return choices[int(rng.integers(len(choices)))]


# By the name of its files; can-train-and-test calls spoofed signals by what they claim.
ATTACKS: Final[Mapping[str, Callable[[AttackContext], Traffic]]] = {
    "DoS": partial(_inject, _flood),
    "fuzzing": partial(_inject, _fuzz),
    "rpm": partial(_inject, partial(_spoof, ("rpm",))),
    "interval": partial(_inject, _change_interval),
    "replay": partial(_inject, _replay),
    "speed": partial(_inject, partial(_spoof, ("speed",))),
    "double": partial(_inject, partial(_spoof, ("steering", "speed"))),
    "suppress": _suppress,
    "masquerade": _masquerade,
}


def simulate_bus(traffic: Traffic) -> Traffic:
    """Sends frames over the bus: one at a time, never interrupted, among those waiting the lowest ID first.

    Args:
        traffic: Frames ordered by the time they are ready.

    Returns:
        The frames in the order of the bus; `time_us` is the end of each transmission.
    """
    num_frames = len(traffic)
    frame_us = ((_FRAME_BITS + 8 * traffic.length) * _BIT_US).tolist()
    ready_us = [*traffic.time_us.tolist(), np.iinfo(np.int64).max]
    # ID and position in one integer: the heap compares integers faster than tuples.
    rank = (traffic.can_id * num_frames + np.arange(num_frames)).tolist()
    waiting: list[int] = []
    order, sent_us = [], []
    arrived = clock_us = 0
    for _ in range(num_frames):
        if not waiting and ready_us[arrived] > clock_us:
            clock_us = ready_us[arrived]
        while ready_us[arrived] <= clock_us:
            heappush(waiting, rank[arrived])
            arrived += 1
        frame = heappop(waiting) % num_frames
        clock_us += frame_us[frame]
        order.append(frame)
        sent_us.append(clock_us)
    sent = traffic.take(np.array(order, np.int64))
    sent.time_us[:] = sent_us
    return sent
