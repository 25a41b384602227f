"""Attacks on a drive: the frames that an attacker adds, removes or replaces, and their labels.

Each attack comes in bursts whose strength is drawn anew, from blatant to barely visible. A frame that the attacker sent
is labelled as an attack. A suppressed frame cannot be labelled: the label goes to the next frame that becomes ready, so
that the windows that lack a frame are attack windows.

Masquerade at a plausible value is meant to be hard. The victim is silent, and the forged frames come in its rhythm,
with its counter and checksum; in version 2 the victim could have sent the forged reading. Only two signs betray the
attack: the reading disagrees with other messages, and the first and the last frame are shifted, by less than the usual
delays of the bus. A detector that finds most of these attacks in version 2 has found a flaw of the simulation.

Shapes: M frames.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train_tasks.can.data.graphs import Ints
from can_train_tasks.can.data.payload_fields import MAX_PAYLOAD_BYTES
from can_train_tasks.can.synthetic.traffic import SECOND_US, TimeSpan, Traffic, draw_time_spans
from can_train_tasks.can.synthetic.vehicles import Message, Signal, Vehicle, draw, write_checksum

_FIRST_BURST_CYCLE_US: Final = 6 * SECOND_US  # version 1: a burst in each cycle; bursts are a quarter of a drive

# Version 2. can-train-and-test has 36 to 927 benign frames for each attack frame; here the ratio holds for windows.
_ATTACK_SHARE: Final = 1 / 55  # share of a drive's time; the windows at the edges of a burst become attacks, too
_MIN_BURSTS: Final = 2  # a burst in the training part of a drive, and a burst in the validation part
_BURST_CYCLE_US: Final = 60 * SECOND_US  # longer drives have a burst in each cycle
_MIN_BURST_US: Final = SECOND_US // 4  # length in drives of a few seconds: a fast message is sent ten times in it
# Place of a drive's last burst, as shares of its time: with a last fifth for validation, both parts have a burst.
_LAST_BURST: Final = (0.82, 0.97)
_LAST_LENGTH: Final = 0.5  # length of the last burst ÷ length of an earlier burst, so that training has most attacks
# From a bus at four fifths of its capacity down to one frame in most windows.
_DOS_PERIODS_US: Final = (400, 1_000, 4_000, 15_000, 60_000)
_FUZZING_PERIODS_US: Final = (800, 3_000, 12_000, 40_000, 120_000)
_SPOOFED_SHARES: Final = (1.0, 0.5, 0.2, 0.08)  # shares of the real frames that a forged frame follows
_MIN_SPOOF_DELAY_US: Final = 300
# Longest delay of the forged frame, as a share of the period: the sooner it follows, the longer receivers believe it.
_MAX_SPOOF_DELAYS: Final = (0.1, 0.5, 1.0)
_INTERVAL_FACTORS: Final = (0.13, 0.3, 0.55, 0.85, 1.3)  # the attacker's period ÷ the real one
# Version 2's masquerade: largest delay of its frames, and drift of a reading in a burst as a share of its range.
_MAX_TAKEOVER_SHIFT_US: Final = 200
_DRIFTS: Final = (0.05, 0.1, 0.2, 0.3)
_REPLAYED_SHARES: Final = (1.0, 0.4, 0.1)  # shares of a vehicle's IDs that are replayed together
# Longest period of a suppressed message, and of a message that every replay includes: each window shows the change.
_FAST_US: Final = 50_000
_MODERATE_US: Final = 200_000  # longest period of a message with a wrong interval: several frames in a burst


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackContext:
    """One drive before the attack: the traffic of the vehicle, ordered by time, and the bursts of the attacker."""

    vehicle: Vehicle
    traffic: Traffic
    bursts: tuple[TimeSpan, ...]
    rng: np.random.Generator

    def rows(self, message: Message, burst: TimeSpan) -> Ints:
        """Returns the positions of a message's frames inside a burst."""
        first, last = self.edges(self.traffic, burst)
        rows: Ints = first + np.flatnonzero(self.traffic.can_id[first:last] == message.can_id)
        return rows

    @staticmethod
    def edges(traffic: Traffic, burst: TimeSpan) -> tuple[int, int]:
        """Returns the positions of a burst's first frame, and of the first frame after the burst."""
        first, last = np.searchsorted(traffic.time_us, [burst.start_us, burst.end_us])
        return int(first), int(last)


def attack(kind: str, rng: np.random.Generator, vehicle: Vehicle, traffic: Traffic, duration_us: int) -> Traffic:
    """Attacks a drive of version 2.

    Args:
        kind: A name of `ATTACKS`.
        rng: The attacker's choices.
        vehicle: The attacked vehicle.
        traffic: The traffic that the vehicle wants to send, ordered by time.
        duration_us: Length of the drive in microseconds.

    Returns:
        The traffic under attack, ordered by the time when a frame is ready, with attack frames labelled.
    """
    bursts = draw_bursts(rng, duration_us)
    while True:
        context = AttackContext(vehicle=vehicle, traffic=traffic, bursts=bursts, rng=rng)
        attacked = ATTACKS[kind](context)
        # A weak attack may draw a burst without an attack frame; then the attack is drawn again.
        if all(attacked.attack[slice(*context.edges(attacked, burst))].any() for burst in bursts):
            return attacked


def attack_often(kind: str, rng: np.random.Generator, vehicle: Vehicle, traffic: Traffic, duration_us: int) -> Traffic:
    """Attacks a drive of version 1; `kind` is a name of `FIRST_ATTACKS`. Otherwise like `attack`."""
    bursts = draw_time_spans(rng, duration_us, cycle_us=_FIRST_BURST_CYCLE_US)
    return FIRST_ATTACKS[kind](AttackContext(vehicle=vehicle, traffic=traffic, bursts=bursts, rng=rng))


def draw_bursts(rng: np.random.Generator, duration_us: int) -> tuple[TimeSpan, ...]:
    """Draws the bursts of a drive: a few bursts, in order and apart, that together take `_ATTACK_SHARE` of its time."""
    num_bursts = max(_MIN_BURSTS, round(duration_us / _BURST_CYCLE_US))
    last_from_us, last_to_us = (int(duration_us * share) for share in _LAST_BURST)
    cycle_us = last_from_us // (num_bursts - 1)
    ranges = [(cycle_us * number + cycle_us // 10, cycle_us * (number + 1)) for number in range(num_bursts - 1)]
    mean_us = duration_us * _ATTACK_SHARE / (num_bursts - 1 + _LAST_LENGTH)
    bursts = []
    for (from_us, to_us), factor in [*((each, 1.0) for each in ranges), ((last_from_us, last_to_us), _LAST_LENGTH)]:
        length_us = max(_MIN_BURST_US, int(factor * mean_us * (0.5 + rng.random())))
        start_us = from_us + int((to_us - from_us - length_us) * rng.random())
        bursts.append(TimeSpan(start_us=start_us, end_us=start_us + length_us))
    return tuple(bursts)


def _inject(burst_frames: Callable[[AttackContext, TimeSpan], Traffic], context: AttackContext) -> Traffic:
    return Traffic.merge([context.traffic, *(burst_frames(context, burst) for burst in context.bursts)])


def _flood(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Floods the bus with ID 0, which always wins arbitration."""
    time_us = _periodic(context.rng, burst, draw(context.rng, _DOS_PERIODS_US))
    payload = np.full((len(time_us), MAX_PAYLOAD_BYTES), draw(context.rng, (0x00, 0xFF)), np.uint8)
    return _attack_frames(time_us, np.zeros_like(time_us), np.full_like(time_us, MAX_PAYLOAD_BYTES), payload)


def _fuzz(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Sends random payloads, in some bursts under random IDs, in others under the vehicle's own."""
    rng = context.rng
    time_us = _periodic(rng, burst, draw(rng, _FUZZING_PERIODS_US))
    if rng.random() < 0.5:
        can_id = rng.integers(context.vehicle.max_id + 1, size=len(time_us))
        length = rng.integers(MAX_PAYLOAD_BYTES + 1, size=len(time_us))
    else:
        sent = np.array([(message.can_id, message.length) for message in context.vehicle.messages])
        can_id, length = sent[rng.integers(len(sent), size=len(time_us))].T
    payload = rng.integers(256, size=(len(time_us), MAX_PAYLOAD_BYTES), dtype=np.uint8)
    payload[np.arange(MAX_PAYLOAD_BYTES) >= length[:, None]] = 0
    return _attack_frames(time_us, can_id, length, payload)


def _systematise(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Tries one ID after another, or one payload after another under an ID of the vehicle."""
    rng = context.rng
    time_us = _periodic(rng, burst, draw(rng, _FUZZING_PERIODS_US))
    steps = int(rng.integers(context.vehicle.max_id + 1)) + np.arange(len(time_us))
    payload = np.full((len(time_us), MAX_PAYLOAD_BYTES), draw(rng, (0x00, 0xFF)), np.uint8)
    if rng.random() < 0.5:
        can_id, length = steps % (context.vehicle.max_id + 1), np.full_like(time_us, MAX_PAYLOAD_BYTES)
    else:
        victim = draw(rng, [message for message in context.vehicle.messages if message.length])
        can_id, length = np.full_like(time_us, victim.can_id), np.full_like(time_us, victim.length)
        payload[:, int(rng.integers(victim.length))] = steps % 256
        payload[:, victim.length :] = 0
    return _attack_frames(time_us, can_id, length, payload)


# The raw values [M] that an attacker claims, from the signal and the real frames [M, 8].
_Claim = Callable[[np.random.Generator, Signal, NDArray[np.uint8]], Ints]


def _claim_another(rng: np.random.Generator, signal: Signal, payload: NDArray[np.uint8]) -> Ints:
    """Claims one value of any size, or the real values moved by up to a fifth of the range."""
    span = signal.high - signal.low
    if rng.random() < 0.5:
        return np.full(len(payload), signal.low + int(span * rng.random()))
    return signal.read(payload) + int(span * (0.4 * rng.random() - 0.2))


def _claim_zero(rng: np.random.Generator, signal: Signal, payload: NDArray[np.uint8]) -> Ints:
    """Claims no speed, or no gear."""
    return np.full(len(payload), signal.low)


def _spoof(channels: Sequence[str], claim: _Claim, context: AttackContext, burst: TimeSpan) -> Traffic:
    """Sends a forged frame after the real frames that carry the channels."""
    rng, parts = context.rng, []
    for channel in channels:
        message, signal = context.vehicle.fastest_carrier(channel)
        rows = context.rows(message, burst)
        rows = rows[rng.random(len(rows)) < draw(rng, _SPOOFED_SHARES)]
        forged = context.traffic.take(rows)
        max_delay_us = int(message.period_us * draw(rng, _MAX_SPOOF_DELAYS))
        forged.time_us[:] += rng.integers(_MIN_SPOOF_DELAY_US, max_delay_us, size=len(rows))
        signal.write(forged.payload, claim(rng, signal, forged.payload))
        # Half of the attackers do not know the checksum.
        if rng.random() < 0.5:
            write_checksum(message, forged.payload)
        forged.attack[:] = True
        parts.append(forged)
    return Traffic.merge(parts)


def _change_interval(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Sends a real message's latest payload again, with the attacker's period."""
    message = draw(context.rng, context.vehicle.cyclic_messages(_MODERATE_US))
    time_us = _periodic(context.rng, burst, int(message.period_us * draw(context.rng, _INTERVAL_FACTORS)))
    own = np.flatnonzero(context.traffic.can_id == message.can_id)
    latest = np.searchsorted(context.traffic.time_us[own], time_us, side="right") - 1
    forged = context.traffic.take(own[np.maximum(latest, 0)])
    return _attack_frames(time_us, forged.can_id, forged.length, forged.payload)


def _replay(context: AttackContext, burst: TimeSpan) -> Traffic:
    """Sends frames of some of the vehicle's IDs again, from an earlier time span of the burst's length."""
    rng = context.rng
    duration_us = min(burst.end_us - burst.start_us, burst.start_us)
    recorded_us = int((burst.start_us - duration_us) * rng.random())
    ids = np.array([message.can_id for message in context.vehicle.messages])
    # At least one fast message, so that every burst has a frame.
    always = draw(rng, context.vehicle.cyclic_messages(_FAST_US)).can_id
    ids = ids[(rng.random(len(ids)) < draw(rng, _REPLAYED_SHARES)) | (ids == always)]
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
            missing[context.rows(draw(context.rng, candidates), burst)] = True
    rest = context.traffic.take(~missing)
    next_ready = np.searchsorted(rest.time_us, context.traffic.time_us[missing])
    rest.attack[np.minimum(next_ready, len(rest) - 1)] = True
    return rest


def _forge_roughly(context: AttackContext, message: Message, signal: Signal, rows: Ints) -> Traffic:
    """Version 1: freezes a reading or lets it drift; timing is slightly off."""
    rng = context.rng
    forged = context.traffic.take(rows)
    # The attacker's clock has another phase than the victim's, and the jitter of software instead of a timer.
    shift_us = message.period_us * (0.3 * rng.random() + 0.1 * rng.random(len(rows)))
    forged.time_us[:] += np.floor(shift_us).astype(np.int64)
    raw = signal.read(forged.payload)
    if rng.random() < 0.5:
        signal.write(forged.payload, np.full_like(raw, raw[0]))
    else:
        final_error = (signal.high - signal.low) * draw(rng, (-0.5, -0.2, 0.2, 0.5))
        signal.write(forged.payload, raw + np.floor(np.linspace(0.0, final_error, len(raw))).astype(np.int64))
    return forged


def _forge_plausibly(context: AttackContext, message: Message, signal: Signal, rows: Ints) -> Traffic:
    """Freezes a reading, repeats an earlier course of it, or lets it drift, in the victim's rhythm."""
    rng = context.rng
    forged = context.traffic.take(rows)
    forged.time_us[:] += int(rng.integers(_MAX_TAKEOVER_SHIFT_US))
    real = signal.read(forged.payload)
    drifting = _drift(rng, signal, real, forged.time_us)
    own = np.flatnonzero(context.traffic.can_id == message.can_id)
    before = int(np.searchsorted(own, rows[0]))
    earlier = own[int(rng.integers(max(1, before - len(rows)))) :][: len(rows)]
    claimed = draw(rng, (np.full_like(real, real[0]), signal.read(context.traffic.payload[earlier]), drifting))
    # While the vehicle stands, a frozen or repeated reading often equals the victim's reading: then it drifts.
    signal.write(forged.payload, drifting if np.array_equal(claimed, real) else claimed)
    return forged


def _drift(rng: np.random.Generator, signal: Signal, real: Ints, time_us: Ints) -> Ints:
    """Moves readings [M] more and more towards the other end of their range."""
    # The error grows only when the victim would have sampled, so that the reading changes at the victim's rate.
    sampled_us = time_us - time_us % signal.every_us if signal.every_us else time_us
    progress = (sampled_us - sampled_us[0]) / max(1, sampled_us[-1] - sampled_us[0])
    span = signal.high - signal.low
    direction = 1 if 2 * (real[0] - signal.low) < span else -1
    drifted: Ints = real + direction * np.floor(progress * draw(rng, _DRIFTS) * span).astype(np.int64)
    return drifted


# Makes the frames of a message with a signal, in place of the frames at positions of the traffic.
_Forge = Callable[[AttackContext, Message, Signal, Ints], Traffic]


def _take_over(forge: _Forge, context: AttackContext) -> Traffic:
    """Silences a message in each burst and sends frames from `forge` in its place, with the right checksum."""
    replaced = np.zeros(len(context.traffic), np.bool_)
    parts = []
    for burst in context.bursts:
        message, signal = context.vehicle.fastest_carrier(draw(context.rng, ("rpm", "speed", "steering")))
        rows = context.rows(message, burst)
        replaced[rows] = True
        forged = forge(context, message, signal, rows)
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


_Attack = Callable[[AttackContext], Traffic]

# Attacks by the name of their files; can-train-and-test names spoofed signals after their claims.
FIRST_ATTACKS: Final[Mapping[str, _Attack]] = {
    "DoS": partial(_inject, _flood),
    "fuzzing": partial(_inject, _fuzz),
    "rpm": partial(_inject, partial(_spoof, ("rpm",), _claim_another)),
    "interval": partial(_inject, _change_interval),
    "replay": partial(_inject, _replay),
    "speed": partial(_inject, partial(_spoof, ("speed",), _claim_another)),
    "double": partial(_inject, partial(_spoof, ("steering", "speed"), _claim_another)),
    "suppress": _suppress,
    "masquerade": partial(_take_over, _forge_roughly),
}
ATTACKS: Final[Mapping[str, _Attack]] = {
    **FIRST_ATTACKS,
    "masquerade": partial(_take_over, _forge_plausibly),
    "systematic": partial(_inject, _systematise),
    "triple": partial(_inject, partial(_spoof, ("rpm", "speed", "gear"), _claim_another)),
    "standstill": partial(_inject, partial(_spoof, ("speed",), _claim_zero)),
    "force-neutral": partial(_inject, partial(_spoof, ("gear",), _claim_zero)),
}
