"""The vehicles of version 2 and what they send, beside figures of logged vehicles."""

from collections import Counter

import numpy as np
import pytest

from can_train_tasks.can.synthetic.fleet import TARGETS, make_fleet
from can_train_tasks.can.synthetic.traffic import SECOND_US, Traffic, simulate_bus
from can_train_tasks.can.synthetic.vehicles import MAX_STANDARD_ID, SendType
from fakes.simulated_drives import BENIGN_S, benign_drive, frames_of

SEEDS = range(20, 24)


def ids_of(vehicle: int, seed: int) -> set[int]:
    return {message.can_id for message in make_fleet(seed)[vehicle].messages}


@pytest.mark.parametrize("seed", SEEDS)
def test_vehicles_have_45_to_90_ids_of_both_kinds(seed: int) -> None:
    fleet = [ids_of(vehicle, seed) for vehicle in range(4)]
    assert all(40 <= len(ids) <= 95 for ids in fleet)
    extended = [np.mean([can_id > MAX_STANDARD_ID for can_id in ids]) for ids in fleet]
    assert extended[:2] == [0.0, 1.0]
    assert all(0.1 < share < 0.6 for share in extended[2:])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_unseen_vehicle_has_ids_of_its_own_and_a_few_of_the_others(seed: int) -> None:
    seen = set.union(*(ids_of(vehicle, seed) for vehicle in range(3)))
    unseen = ids_of(3, seed)
    assert len(unseen - seen) > 0.85 * len(unseen)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_target_has_a_fast_message_that_never_pauses(seed: int) -> None:
    for vehicle in make_fleet(seed):
        for channel in TARGETS:
            message, signal = vehicle.fastest_carrier(channel)
            assert message.send_type is SendType.CYCLIC
            assert message.period_us <= 50_000
            assert abs(signal.high - signal.low) >= 6


@pytest.mark.parametrize("vehicle", range(4))
def test_a_vehicle_sends_as_often_as_logged_ones_and_its_bus_is_not_full(vehicle: int) -> None:
    for seed in SEEDS:
        _, traffic = benign_drive(2, seed, vehicle)
        assert 500 < len(traffic) / BENIGN_S[2] < 1_000
        sent = simulate_bus(traffic, make_fleet(seed)[vehicle].bit_us)
        assert (sent.time_us.max() - traffic.time_us.max()) < 10_000


def spreads(log: Traffic) -> list[float]:
    found = []
    for can_id, count in Counter(log.can_id.tolist()).items():
        gaps_us = np.diff(log.time_us[log.can_id == can_id])
        if count >= 10:
            found.append(float(np.median(np.abs(gaps_us - np.median(gaps_us))) / np.median(gaps_us)))
    return found


@pytest.mark.parametrize("vehicle", range(4))
def test_periods_scatter_as_on_logged_buses(vehicle: int) -> None:
    medians = []
    for seed in SEEDS:
        design, traffic = benign_drive(2, seed, vehicle)
        medians.append(np.median(spreads(simulate_bus(traffic, design.bit_us))))
    assert 0.0002 < np.mean(medians) < 0.0068


@pytest.mark.parametrize("vehicle", range(4))
def test_payloads_change_as_seldom_as_logged_ones(vehicle: int) -> None:
    same, bits = [], []
    for seed in SEEDS:
        design, traffic = benign_drive(2, seed, vehicle)
        payloads = [frames_of(traffic, message).payload for message in design.messages]
        pairs = [(one[1:], one[:-1]) for one in payloads if len(one) >= 10]
        same.append(np.median([(later == earlier).all(axis=1).mean() for later, earlier in pairs]))
        bits.append(np.median([np.unpackbits(later ^ earlier).sum() / len(later) for later, earlier in pairs]))
    assert 0.23 < np.mean(same) < 0.96
    assert 0.2 < np.mean(bits) < 1.9


def test_a_cyclic_message_keeps_its_period_by_a_clock_that_is_a_little_off() -> None:
    design, traffic = benign_drive(2)
    for message in design.messages:
        if message.send_type is not SendType.CYCLIC:
            continue
        ratios = np.diff(frames_of(traffic, message).time_us) / message.period_us
        assert abs(np.median(ratios) - 1) < 0.02
        assert (ratios < 1.5).mean() > 0.95


def test_messages_that_follow_events_pause_repeat_and_come_between() -> None:
    longest: dict[SendType, float] = dict.fromkeys(SendType, 0.0)
    shortest = dict.fromkeys(SendType, np.inf)
    for seed in range(20, 28):
        design, traffic = benign_drive(2, seed)
        for message in design.messages:
            gaps = np.diff(frames_of(traffic, message).time_us)
            if len(gaps):
                longest[message.send_type] = max(longest[message.send_type], float(gaps.max()))
                shortest[message.send_type] = min(shortest[message.send_type], float(gaps.min() / message.period_us))
    assert longest[SendType.ON_CHANGE] > 5 * SECOND_US
    assert longest[SendType.CYCLIC_IF_ACTIVE] > 5 * SECOND_US
    assert shortest[SendType.CYCLIC_AND_ON_CHANGE] < 0.4 < shortest[SendType.CYCLIC]


def test_a_multiplexed_payload_turns_its_pages_in_order() -> None:
    found = 0
    for seed in range(20, 26):
        design, traffic = benign_drive(2, seed)
        for message in design.messages:
            if message.pages:
                selector = frames_of(traffic, message).payload[:, 0].astype(int)
                assert (np.diff(selector) % len(message.pages) == 1).all()
                found += 1
    assert found


def test_a_sampled_reading_changes_only_when_it_is_sampled() -> None:
    design, traffic = benign_drive(2, seed=20)
    for message in design.messages:
        frames = frames_of(traffic, message)
        for signal in message.signals:
            if signal.every_us:
                changes = np.flatnonzero(np.diff(signal.read(frames.payload)))
                slot = frames.time_us // signal.every_us
                assert (slot[changes] < slot[changes + 1]).all()


def test_speed_gear_and_stops_agree() -> None:
    design, traffic = benign_drive(2, seed=20)
    (speed, speed_signal), (gear, gear_signal) = (design.fastest_carrier(channel) for channel in ("speed", "gear"))
    speeds, gears = frames_of(traffic, speed), frames_of(traffic, gear)
    latest = np.searchsorted(speeds.time_us, gears.time_us).clip(max=len(speeds) - 1)
    stands = speed_signal.read(speeds.payload)[latest] == speed_signal.low
    neutral = gear_signal.read(gears.payload) == gear_signal.low
    assert 0.02 < neutral.mean() < 0.9
    assert (stands == neutral).mean() > 0.95
