"""What attackers do to a simulated drive: which frames they add, remove or replace, and which of them are labelled.
Each attack comes in bursts whose strength is drawn anew, from blatant to barely visible.

Labels: a frame that the attacker sent is an attack. A suppressed message leaves nothing to label; there the frame that
became ready next after each missing one is labelled, so that the attack windows are those that lack a frame.

Shapes: M frames.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from can_train.tasks.can.data.frames import MAX_PAYLOAD_BYTES
from can_train.tasks.can.synthetic.traffic import SECOND_US, TimeSpan, Traffic, draw_time_spans
from can_train.tasks.can.synthetic.vehicles import Message, Signal, Vehicle, write_checksum

_T = TypeVar("_T")

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
class AttackContext:
    """One drive before the attack: what the vehicle wants to send, ordered by time, and when the attacker is active."""

    vehicle: Vehicle
    traffic: Traffic
    bursts: tuple[TimeSpan, ...]
    rng: np.random.Generator

    def rows(self, message: Message, burst: TimeSpan) -> NDArray[np.int64]:
        """Returns the positions of a message's frames inside a burst."""
        first, last = np.searchsorted(self.traffic.time_us, [burst.start_us, burst.end_us])
        rows: NDArray[np.int64] = first + np.flatnonzero(self.traffic.can_id[first:last] == message.can_id)
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


def _spoof(*channels: str) -> Callable[[AttackContext], Traffic]:
    """Makes the attack in which a forged frame follows the real ones that carry these channels."""
    return partial(
        _inject, lambda context, burst: Traffic.merge([_spoof_channel(context, burst, name) for name in channels])
    )


def _spoof_channel(context: AttackContext, burst: TimeSpan, channel: str) -> Traffic:
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
    """Silences one to three messages; the module's docstring says which frames are labelled."""
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
    replaced = np.zeros(len(context.traffic), np.bool_)
    forged = []
    for burst in context.bursts:
        message, signal = context.vehicle.fastest_carrier(_draw(context.rng, ("rpm", "speed", "steering")))
        rows = context.rows(message, burst)
        replaced[rows] = True
        forged.append(_impersonate(context, rows, message, signal))
    return Traffic.merge([context.traffic.take(~replaced), *forged])


def _impersonate(context: AttackContext, rows: NDArray[np.int64], message: Message, signal: Signal) -> Traffic:
    rng = context.rng
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
    return forged


def _periodic(rng: np.random.Generator, burst: TimeSpan, period_us: int) -> NDArray[np.int64]:
    """Draws the attacker's sending times: a period with up to a tenth of jitter, [M] ascending, at least one."""
    time_us = np.arange(burst.start_us, burst.end_us, period_us)
    return time_us + rng.integers(period_us // 10 + 1, size=len(time_us))


def _attack_frames(
    time_us: NDArray[np.int64], can_id: NDArray[np.int64], length: NDArray[np.int64], payload: NDArray[np.uint8]
) -> Traffic:
    labels = np.ones(len(time_us), np.bool_)
    return Traffic(time_us=time_us, can_id=can_id, length=length, payload=payload, attack=labels)


def _draw(rng: np.random.Generator, choices: Sequence[_T]) -> _T:
    return choices[int(rng.integers(len(choices)))]


# By the name of its files; can-train-and-test calls spoofed signals by what they claim.
ATTACKS: Final[Mapping[str, Callable[[AttackContext], Traffic]]] = {
    "DoS": partial(_inject, _flood),
    "fuzzing": partial(_inject, _fuzz),
    "rpm": _spoof("rpm"),
    "interval": partial(_inject, _change_interval),
    "replay": partial(_inject, _replay),
    "speed": _spoof("speed"),
    "double": _spoof("steering", "speed"),
    "suppress": _suppress,
    "masquerade": _masquerade,
}
