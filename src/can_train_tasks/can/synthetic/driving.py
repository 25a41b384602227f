"""The traffic of a vehicle of version 2 or 3 while it is driven.

As in version 1, only uniform draws and arithmetic with equal results on every platform occur.

Each control unit sends by its clock, which is a little fast or slow, and nearly punctually. A logged period scatters
mostly by the bus, where frames that are due together wait for one another.

Shapes: M frames, T ticks of the vehicle's state.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from can_train_tasks.can.data.graphs import Floats, Ints
from can_train_tasks.can.synthetic.fleet import GEARS
from can_train_tasks.can.synthetic.traffic import (
    SECOND_US,
    TICK_US,
    Traffic,
    complete_state,
    moving_average,
    smooth_random,
)
from can_train_tasks.can.synthetic.vehicles import Message, SendType, Signal, Vehicle

_CLOCK_ERROR: Final = 1e-4  # largest error of a control unit's clock: 100 ppm, as for a cheap quartz
_LATE: Final = 0.002  # share of frames delayed by other work of their control unit
_MAX_LATE_US: Final = 2_000
_LOSS: Final = 0.0002  # share of frames that a busy control unit skips
_MAX_PHASE_US: Final = SECOND_US  # largest time from the first to the last control unit's wake-up
_REPETITIONS: Final = 3  # repetitions of a message that is sent on changes only
_MAX_REACTION_US: Final = 5_000  # largest time from a change to the frame that reports it
_ACTIVE_FROM: Final = 0.5  # least reading of an active status
_STATUS_HOLD_S: Final = 12  # seconds between two changes of a status
_OWN_HOLD_S: Final = 2  # seconds between two turns of a signal's own course


def drive_vehicle(rng: np.random.Generator, vehicle: Vehicle, duration_us: int) -> Traffic:
    """Simulates all frames that a vehicle of version 2 or 3 wants to send in a drive, by the time when ready."""
    state = _simulate_state(rng, duration_us)
    num_units = len(vehicle.jitters_us)
    clocks = _Clocks(
        start_us=rng.integers(_MAX_PHASE_US, size=num_units),
        error=_CLOCK_ERROR * (2 * rng.random(num_units) - 1),
        jitters_us=vehicle.jitters_us,
        duration_us=duration_us,
    )
    return Traffic.merge([_message_traffic(rng, message, state, clocks) for message in vehicle.messages])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Clocks:
    """The clocks of a vehicle's control units in one drive, a value for each unit."""

    start_us: Ints  # a moment of a unit's schedule before the drive
    error: Floats  # excess of a unit's second over a second, in seconds
    jitters_us: tuple[int, ...]
    duration_us: int


def _simulate_state(rng: np.random.Generator, duration_us: int) -> dict[str, Floats]:
    """Returns the readings [T] of every channel, in [0, 1], one for each 10 ms.

    The readings follow from a common course of speed and steering, with stops, and so agree with one another.
    """
    num_ticks = duration_us // TICK_US + 1
    speed = np.clip(1.6 * smooth_random(rng, num_ticks, hold_s=9) - 0.35, 0.0, 1.0)
    change = np.diff(speed, prepend=speed[:1]) * 400
    driving = speed > 0
    throttle = np.clip(0.05 + 0.25 * speed + change + 0.1 * driving * smooth_random(rng, num_ticks, hold_s=2), 0.0, 1.0)
    gear = np.where(driving, 1 + np.minimum(np.floor(speed * GEARS), GEARS - 1), 0)
    rpm = np.clip(0.12 + 0.5 * (speed * GEARS - np.maximum(gear - 1, 0)) + 0.25 * throttle, 0.0, 1.0)
    rpm = moving_average(rpm, width=30)
    steering = np.clip(0.5 + driving * 1.2 * (smooth_random(rng, num_ticks, hold_s=4) - 0.5), 0.0, 1.0)
    steering = moving_average(steering, width=50)
    course = {"speed": speed, "throttle": throttle, "gear": gear / GEARS, "rpm": rpm, "steering": steering}
    return complete_state(rng, course, change, status_hold_s=_STATUS_HOLD_S)


def _message_traffic(rng: np.random.Generator, message: Message, state: dict[str, Floats], clocks: _Clocks) -> Traffic:
    time_us = _sending_times(rng, message, state, clocks)
    count = np.arange(len(time_us)) + int(rng.integers(256))
    pages = np.array(message.pages or (message.constants,), np.uint8)
    payload = pages[count % len(pages)]
    for signal in message.signals:
        sampled_us = time_us - time_us % signal.every_us if signal.every_us else time_us
        raw = signal.to_raw(_course(rng, signal, state[signal.channel])[sampled_us // TICK_US])
        if signal.noise:
            raw += rng.integers(-signal.noise, signal.noise + 1, size=len(raw))
        signal.write(payload, raw)
    if message.counter_byte is not None:
        payload[:, message.counter_byte] = (message.constants[message.counter_byte] & 0xF0) | (count % 16)
    return Traffic.of(message, time_us, payload)


def _course(rng: np.random.Generator, signal: Signal, reading: Floats) -> Floats:
    """Returns the values [T] that a signal follows: its reading, late and mixed with a course of its own."""
    if lag := signal.lag_us // TICK_US:
        reading = np.concatenate([np.full(lag, reading[0]), reading])[: len(reading)]
    if signal.own:
        reading = (1 - signal.own) * reading + signal.own * smooth_random(rng, len(reading), hold_s=_OWN_HOLD_S)
    return reading


def _sending_times(rng: np.random.Generator, message: Message, state: dict[str, Floats], clocks: _Clocks) -> Ints:
    """Draws the times [M] when a message is ready, ascending."""
    changes_us = np.empty(0, np.int64)  # when the message reports changes of its trigger
    if message.trigger:
        ticks = np.flatnonzero(np.diff(state[message.trigger])) + 1
        changes_us = ticks * TICK_US + rng.integers(_MAX_REACTION_US, size=len(ticks))
    if message.send_type is SendType.ON_CHANGE:
        due_us = (changes_us[:, None] + message.period_us * np.arange(_REPETITIONS)).ravel()
    else:
        due_us = _schedule(message, clocks)
    if message.send_type is SendType.CYCLIC_IF_ACTIVE:
        due_us = due_us[state[message.trigger][due_us // TICK_US] >= _ACTIVE_FROM]
    due_us = due_us[rng.random(len(due_us)) >= _LOSS]
    late = rng.random(len(due_us)) < _LATE
    due_us += rng.integers(clocks.jitters_us[message.unit], size=len(due_us))
    due_us += late * rng.integers(_MAX_LATE_US, size=len(due_us))
    if message.send_type is SendType.CYCLIC_AND_ON_CHANGE:
        due_us = np.concatenate([due_us, changes_us])
    due_us = np.sort(due_us)
    return due_us[due_us < clocks.duration_us]


def _schedule(message: Message, clocks: _Clocks) -> Ints:
    """Returns the moments [M] when a message's period begins, by its control unit's clock."""
    period_us = message.period_us * (1 + clocks.error[message.unit])
    first_us = int((message.offset_us - clocks.start_us[message.unit]) % message.period_us)
    periods = np.arange(clocks.duration_us // message.period_us + 1)
    due_us: Ints = first_us + np.floor(periods * period_us).astype(np.int64)
    return due_us[due_us < clocks.duration_us]
