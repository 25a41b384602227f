"""Frames on their way over the bus, the arbitration of the bus, and the traffic of a vehicle of version 1.

Only additions, multiplications, divisions and uniform draws occur, and time is counted in whole microseconds: the bytes
are equal on every platform. Sines and logarithms may differ between platforms.

Shapes: M frames, T ticks of the vehicle's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from can_train_tasks.can.data.graphs import Bools, Floats, Ints
from can_train_tasks.can.synthetic.vehicles import (
    MAX_STANDARD_ID,
    STATUS_CHANNELS,
    Message,
    SendType,
    Vehicle,
    write_checksum,
)

SECOND_US: Final = 1_000_000
TICK_US: Final = 10_000  # resolution of the vehicle's state: the period of the fastest message
_FRAME_BITS: Final = 47  # bits of a data frame with an 11-bit ID and the gap after it, without payload and stuff bits
_EXTENDED_BITS: Final = 20  # additional bits of a frame with a 29-bit ID
_ID_EXTENSION_BITS: Final = 18  # bits of a 29-bit ID after its first 11 bits
_LOSS: Final = 0.002  # share of frames that a busy control unit skips: a missing frame alone proves no attack
_JITTER: Final = 0.02  # largest usual deviation of a frame from its period, as a share of the period
_LATE: Final = 0.01  # share of frames delayed by other work of their control unit, by up to a third of the period
_REPEATED: Final = 0.3  # share of an on-change message's frames with an extra frame before the next due frame
_MIN_REPEAT_DELAY_US: Final = 500  # attackers are no faster, so a short interval alone proves no attack
_ACTIVITY_CYCLE_US: Final = 8 * SECOND_US  # a message that depends on events becomes active once in each cycle


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Frames on their way to the bus, or in a log of it.

    Attributes:
        time_us: [M] int64, microseconds from the drive's beginning until the frame is ready or, after `simulate_bus`,
            has been sent.
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
        """Returns a copy of the rows that a mask or positions choose."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def of(cls, message: Message, time_us: Ints, payload: NDArray[np.uint8]) -> Self:
        """Makes the frames of one message, and writes their checksums."""
        write_checksum(message, payload)
        can_id, length = (np.full(len(time_us), value, np.int64) for value in (message.can_id, message.length))
        labels = np.zeros(len(time_us), np.bool_)
        return cls(time_us=time_us, can_id=can_id, length=length, payload=payload, attack=labels)

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
    """Draws one time span in each cycle of about `cycle_us`: 15 to 35 % of the cycle, and never at its very start.

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
    """Simulates all frames that a vehicle wants to send in one drive, ordered by the time when ready."""
    state = _simulate_state(rng, duration_us)
    return Traffic.merge([_message_traffic(rng, message, state, duration_us) for message in vehicle.messages])


def _simulate_state(rng: np.random.Generator, duration_us: int) -> dict[str, Floats]:
    """Returns the readings [T] of every channel, in [0, 1], one for each 10 ms.

    The readings follow from a common course of speed and steering, and so agree with one another.
    """
    num_ticks = duration_us // TICK_US + 1
    speed = np.clip(1.5 * smooth_random(rng, num_ticks, hold_s=5) - 0.25, 0.0, 1.0)
    change = np.diff(speed, prepend=speed[:1]) * 300
    throttle = np.clip(0.1 + 0.25 * speed + change + 0.1 * smooth_random(rng, num_ticks, hold_s=1), 0.0, 1.0)
    gear = np.minimum(np.floor(speed * 6), 5)
    rpm = moving_average(np.clip(0.12 + 0.5 * (speed * 6 - gear) + 0.25 * throttle, 0.0, 1.0), width=30)
    steering = np.clip(0.5 + 1.2 * (smooth_random(rng, num_ticks, hold_s=2) - 0.5), 0.0, 1.0)
    course = {"speed": speed, "throttle": throttle, "gear": gear / 5, "rpm": rpm, "steering": steering}
    return complete_state(rng, course, change, status_hold_s=4)


def complete_state(
    rng: np.random.Generator, course: dict[str, Floats], change: Floats, *, status_hold_s: int
) -> dict[str, Floats]:
    """Adds the other channels to readings of speed, throttle, gear, rpm and steering, [T] each.

    `change` [T] is the acceleration; a status changes after `status_hold_s` at the earliest.
    """
    speed, num_ticks = course["speed"], len(change)
    warm_s = np.arange(num_ticks) / 100 + 200 * rng.random()
    state = {
        **course,
        "brake": np.clip(-change, 0.0, 1.0),
        "torque": np.clip(0.6 * course["throttle"] + 0.3 * course["rpm"], 0.0, 1.0),
        "yaw": np.clip(0.5 + (course["steering"] - 0.5) * speed, 0.0, 1.0),
        "coolant": 0.2 + 0.7 * warm_s / (warm_s + 120),
        "fuel": np.full(num_ticks, 0.05 + 0.9 * rng.random()),
    }
    for channel in STATUS_CHANNELS:
        state[channel] = np.floor(4 * random_levels(rng, num_ticks, hold_s=status_hold_s)) / 4
    return state


def _message_traffic(rng: np.random.Generator, message: Message, state: dict[str, Floats], duration_us: int) -> Traffic:
    time_us = _sending_times(rng, message, duration_us)
    payload = np.tile(np.array(message.constants, np.uint8), (len(time_us), 1))
    for signal in message.signals:
        raw = signal.to_raw(state[signal.channel][time_us // TICK_US])
        noisy = signal.channel not in STATUS_CHANNELS
        signal.write(payload, raw + rng.integers(-1, 2, size=len(raw)) if noisy else raw)
    if message.counter_byte is not None:
        count = (np.arange(len(time_us)) + int(rng.integers(16))) % 16
        payload[:, message.counter_byte] = (message.constants[message.counter_byte] & 0xF0) | count
    return Traffic.of(message, time_us, payload)


def _sending_times(rng: np.random.Generator, message: Message, duration_us: int) -> Ints:
    """Draws the times [M] when a message is ready, ascending: its period, with random phase, jitter, delays, gaps."""
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


def random_levels(rng: np.random.Generator, num_ticks: int, *, hold_s: int) -> Floats:
    """Returns random levels [T] in [0, 1), each held for `hold_s`, from a random moment on."""
    hold = hold_s * SECOND_US // TICK_US
    levels = np.repeat(rng.random(num_ticks // hold + 2), hold)
    return levels[int(rng.integers(hold)) :][:num_ticks]


def smooth_random(rng: np.random.Generator, num_ticks: int, *, hold_s: int) -> Floats:
    """Returns a smooth random course [T] in [0, 1) that turns about every `hold_s`."""
    width = hold_s * SECOND_US // TICK_US
    levels = random_levels(rng, num_ticks + 2 * width, hold_s=hold_s)
    return moving_average(moving_average(levels, width=width), width=width)[2 * width :]


def moving_average(course: Floats, *, width: int) -> Floats:
    """Averages each value [T] with the `width` - 1 previous values; the first value continues before the start."""
    total = np.cumsum(np.concatenate([np.full(width, course[0]), course]))
    means: Floats = np.clip((total[width:] - total[:-width]) / width, 0.0, 1.0)
    return means


def simulate_bus(traffic: Traffic, bit_us: int) -> Traffic:
    """Sends frames over the bus: one at a time, never interrupted; of the waiting frames, the lowest ID goes first.

    Args:
        traffic: Frames ordered by the time when ready.
        bit_us: Duration of a bit in microseconds.

    Returns:
        The frames in the order of the bus; `time_us` is the end of each transmission.
    """
    frame_bits = _FRAME_BITS + _EXTENDED_BITS * (traffic.can_id > MAX_STANDARD_ID) + 8 * traffic.length
    frame_us = frame_bits * bit_us
    ready_us, sent_before_us = traffic.time_us, np.cumsum(frame_us) - frame_us
    start_us = sent_before_us + np.maximum.accumulate(ready_us - sent_before_us)  # if all frames keep their order
    # A busy period begins with a frame that finds the bus idle. Where never two frames wait at once, all frames of the
    # period keep their order; only other periods need a loop, frame by frame.
    busy_period = np.cumsum(ready_us >= np.concatenate([[-1], (start_us + frame_us)[:-1]]))
    contended = np.isin(busy_period, busy_period[:-1][ready_us[1:] <= start_us[:-1]])
    order, sent_us = np.arange(len(traffic)), start_us + frame_us
    rows = np.flatnonzero(contended)
    turns, sent_us[rows] = _arbitrate(ready_us[rows], frame_us[rows], _priority(traffic.can_id[rows]))
    order[rows] = rows[turns]
    sent = traffic.take(order)
    sent.time_us[:] = sent_us
    return sent


def _arbitrate(ready_us: Ints, frame_us: Ints, priority: Ints) -> tuple[Ints, Ints]:
    """Returns the positions of frames in the order of the bus, and the end of each frame's transmission."""
    num_frames = len(ready_us)
    durations_us = frame_us.tolist()
    arrivals_us = [*ready_us.tolist(), np.iinfo(np.int64).max]
    # Priority and position in one integer: the heap compares integers faster than tuples.
    rank = (priority * num_frames + np.arange(num_frames)).tolist()
    waiting: list[int] = []
    order, sent_us = [], []
    arrived = clock_us = 0
    for _ in range(num_frames):
        if not waiting and arrivals_us[arrived] > clock_us:
            clock_us = arrivals_us[arrived]
        while arrivals_us[arrived] <= clock_us:
            heappush(waiting, rank[arrived])
            arrived += 1
        frame = heappop(waiting) % num_frames
        clock_us += durations_us[frame]
        order.append(frame)
        sent_us.append(clock_us)
    return np.array(order, np.int64), np.array(sent_us, np.int64)


def _priority(can_id: Ints) -> Ints:
    """Returns the keys [M] that arbitration compares, lowest first: 11 bits of the ID, a flag, and 18 more bits."""
    more_bits = can_id & ((1 << _ID_EXTENSION_BITS) - 1)
    extended = 2 * (can_id - more_bits) + (1 << _ID_EXTENSION_BITS) + more_bits
    return np.where(can_id > MAX_STANDARD_ID, extended, can_id << (_ID_EXTENSION_BITS + 1))
