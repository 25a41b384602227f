"""What attackers do to a simulated drive: which frames they add, take away or replace, and which of them are labelled.
Each attack comes in bursts whose strength is drawn anew, from blatant to barely visible.

Labels: a frame that the attacker sent is an attack. A suppressed message leaves nothing to label; there the frame that
became ready next after each missing one is labelled, so that the attack windows are those that lack a frame.

Shapes: M frames.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from can_train.tasks.can.data.frames import MAX_PAYLOAD_BYTES
from can_train.tasks.can.synthetic.traffic import SECOND_US, TimeSpan, Traffic, draw_time_spans
from can_train.tasks.can.synthetic.vehicles import Message, Signal, Vehicle, write_checksum

_T = TypeVar("_T")


_BURST_CYCLE_US: Final = 6 * SECOND_US
"""One burst of one to two seconds in each: about a quarter of an attack drive is under attack."""


_DOS_PERIODS_US: Final = (400, 1_000, 4_000, 15_000, 60_000)
"""From a bus at four fifths of its capacity down to one frame in most windows."""


_FUZZING_PERIODS_US: Final = (800, 3_000, 12_000, 40_000, 120_000)


_SPOOFED_SHARES: Final = (1.0, 0.5, 0.2, 0.08)
"""Share of the real frames that a forged one follows."""


_SOONEST_SPOOF_US: Final = 300


_LATEST_SPOOF: Final = (0.1, 0.5, 1.0)
"""How late the forged frame follows at most, as a share of the period: the sooner, the longer receivers believe it."""


_INTERVAL_FACTORS: Final = (0.13, 0.3, 0.55, 0.85, 1.3)
"""The attacker's period as a share of the real one."""


_REPLAYED_SHARES: Final = (1.0, 0.4, 0.1)
"""Share of a vehicle's IDs that are replayed together."""


_FAST_US: Final = 50_000
"""Longest period of a message worth suppressing, and of the one that every replay includes: it shows in each window."""


_MODERATE_US: Final = 200_000
"""Longest period of a message sent at a wrong interval: several frames in a burst."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackContext:
    """One drive, before the attack.

    Attributes:
        vehicle: The vehicle attacked.
        traffic: What it wants to send, ordered by time.
        bursts: When the attacker is active.
        rng: The attacker's choices.
    """

    vehicle: Vehicle
    traffic: Traffic
    bursts: tuple[TimeSpan, ...]
    rng: np.random.Generator

    def rows(self, message: Message, burst: TimeSpan) -> NDArray[np.int64]:
        """Finds the positions of a message's frames inside a burst."""
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


def _dos(scene: AttackContext) -> Traffic:
    """Floods the bus with the ID that always wins arbitration."""
    return _inject(scene, _dos_burst)


def _dos_burst(scene: AttackContext, burst: TimeSpan) -> Traffic:
    time_us = _periodic(scene.rng, burst, _draw(scene.rng, _DOS_PERIODS_US))
    payload = np.full((len(time_us), MAX_PAYLOAD_BYTES), _draw(scene.rng, (0x00, 0xFF)), np.uint8)
    return _forged(time_us, np.zeros_like(time_us), np.full_like(time_us, MAX_PAYLOAD_BYTES), payload)


def _fuzzing(scene: AttackContext) -> Traffic:
    """Sends random payloads, in some bursts under random IDs, in others under the vehicle's own."""
    return _inject(scene, _fuzzing_burst)


def _fuzzing_burst(scene: AttackContext, burst: TimeSpan) -> Traffic:
    rng = scene.rng
    time_us = _periodic(rng, burst, _draw(rng, _FUZZING_PERIODS_US))
    if rng.random() < 0.5:
        can_id = rng.integers(0x800, size=len(time_us))
        length = rng.integers(MAX_PAYLOAD_BYTES + 1, size=len(time_us))
    else:
        own = np.array([(message.can_id, message.length) for message in scene.vehicle.messages])
        can_id, length = own[rng.integers(len(own), size=len(time_us))].T
    payload = rng.integers(256, size=(len(time_us), MAX_PAYLOAD_BYTES), dtype=np.uint8)
    payload[np.arange(MAX_PAYLOAD_BYTES) >= length[:, None]] = 0
    return _forged(time_us, can_id, length, payload)


def _spoofing(*channels: str) -> Callable[[AttackContext], Traffic]:
    """Makes the attack that lets a forged frame follow the real ones that carry these channels."""

    def spoof(scene: AttackContext) -> Traffic:
        return _inject(scene, lambda scene, burst: Traffic.merge([_spoofed(scene, burst, c) for c in channels]))

    return spoof


def _spoofed(scene: AttackContext, burst: TimeSpan, channel: str) -> Traffic:
    rng = scene.rng
    message, signal = scene.vehicle.carrier(channel)
    rows = scene.rows(message, burst)
    rows = rows[rng.random(len(rows)) < _draw(rng, _SPOOFED_SHARES)]
    forged = scene.traffic.pick(rows)
    latest_us = int(message.period_us * _draw(rng, _LATEST_SPOOF))
    forged.time_us[:] += rng.integers(_SOONEST_SPOOF_US, latest_us, size=len(rows))
    span = signal.high - signal.low
    if rng.random() < 0.5:
        raw = np.full(len(rows), signal.low + int(span * rng.random()))
    else:
        raw = signal.read(forged.payload) + int(span * (0.4 * rng.random() - 0.2))
    signal.write(forged.payload, raw)
    if rng.random() < 0.5:
        write_checksum(message, forged.payload)
    forged.attack[:] = True
    return forged


def _interval(scene: AttackContext) -> Traffic:
    """Sends a real message's latest payload again, in a send_type of the attacker's own."""
    return _inject(scene, _interval_burst)


def _interval_burst(scene: AttackContext, burst: TimeSpan) -> Traffic:
    message = _draw(scene.rng, scene.vehicle.steady(_MODERATE_US))
    time_us = _periodic(scene.rng, burst, int(message.period_us * _draw(scene.rng, _INTERVAL_FACTORS)))
    own = np.flatnonzero(scene.traffic.can_id == message.can_id)
    latest = np.searchsorted(scene.traffic.time_us[own], time_us, side="right") - 1
    forged = scene.traffic.pick(own[np.maximum(latest, 0)])
    return _forged(time_us, forged.can_id, forged.length, forged.payload)


def _replay(scene: AttackContext) -> Traffic:
    """Sends again what some of the vehicle's IDs sent in an earlier stretch as long as the burst."""
    return _inject(scene, _replay_burst)


def _replay_burst(scene: AttackContext, burst: TimeSpan) -> Traffic:
    rng = scene.rng
    duration_us = min(burst.end_us - burst.start_us, burst.start_us)
    recorded_us = int((burst.start_us - duration_us) * rng.random())
    ids = np.array([message.can_id for message in scene.vehicle.messages])
    # One fast message at least, so that no burst is without a frame.
    always = _draw(rng, scene.vehicle.steady(_FAST_US)).can_id
    ids = ids[(rng.random(len(ids)) < _draw(rng, _REPLAYED_SHARES)) | (ids == always)]
    first, last = np.searchsorted(scene.traffic.time_us, [recorded_us, recorded_us + duration_us])
    forged = scene.traffic.pick(first + np.flatnonzero(np.isin(scene.traffic.can_id[first:last], ids)))
    forged.time_us[:] += burst.start_us - recorded_us
    forged.attack[:] = True
    return forged


def _suppress(scene: AttackContext) -> Traffic:
    """Silences one to three messages; see the module's note on labels."""
    missing = np.zeros(len(scene.traffic), np.bool_)
    for burst in scene.bursts:
        candidates = scene.vehicle.steady(_FAST_US)
        for _ in range(int(scene.rng.integers(1, 4))):
            missing[scene.rows(_draw(scene.rng, candidates), burst)] = True
    rest = scene.traffic.pick(~missing)
    next_ready = np.searchsorted(rest.time_us, scene.traffic.time_us[missing])
    rest.attack[np.minimum(next_ready, len(rest) - 1)] = True
    return rest


def _masquerade(scene: AttackContext) -> Traffic:
    """Silences a message and sends it in its place: all is right but its reading and a little of its timing."""
    replaced = np.zeros(len(scene.traffic), np.bool_)
    forged = []
    for burst in scene.bursts:
        message, signal = scene.vehicle.carrier(_draw(scene.rng, ("rpm", "speed", "steering")))
        rows = scene.rows(message, burst)
        replaced[rows] = True
        forged.append(_impersonated(scene, rows, message, signal))
    return Traffic.merge([scene.traffic.pick(~replaced), *forged])


def _impersonated(scene: AttackContext, rows: NDArray[np.int64], message: Message, signal: Signal) -> Traffic:
    rng = scene.rng
    forged = scene.traffic.pick(rows)
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


def _inject(scene: AttackContext, frames_of: Callable[[AttackContext, TimeSpan], Traffic]) -> Traffic:
    return Traffic.merge([scene.traffic, *(frames_of(scene, burst) for burst in scene.bursts)])


def _periodic(rng: np.random.Generator, burst: TimeSpan, period_us: int) -> NDArray[np.int64]:
    """Draws the attacker's sending times: a period with up to a tenth of jitter, [M] ascending, at least one."""
    time_us = np.arange(burst.start_us, burst.end_us, period_us)
    return time_us + rng.integers(period_us // 10 + 1, size=len(time_us))


def _forged(
    time_us: NDArray[np.int64], can_id: NDArray[np.int64], length: NDArray[np.int64], payload: NDArray[np.uint8]
) -> Traffic:
    attack_label = np.ones(len(time_us), np.bool_)
    return Traffic(time_us=time_us, can_id=can_id, length=length, payload=payload, attack=attack_label)


def _draw(rng: np.random.Generator, choices: Sequence[_T]) -> _T:
    return choices[int(rng.integers(len(choices)))]


ATTACKS: Final[Mapping[str, Callable[[AttackContext], Traffic]]] = {
    "DoS": _dos,
    "fuzzing": _fuzzing,
    "rpm": _spoofing("rpm"),
    "interval": _interval,
    "replay": _replay,
    "speed": _spoofing("speed"),
    "double": _spoofing("steering", "speed"),
    "suppress": _suppress,
    "masquerade": _masquerade,
}
"""Every kind of attack, under the name its files get; can-train-and-test calls spoofed signals by what they claim."""
