import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train_tasks.can.synthetic.attacks import ATTACKS, FIRST_ATTACKS, attack, draw_bursts
from can_train_tasks.can.synthetic.traffic import SECOND_US, draw_time_spans
from fakes.simulated_drives import BENIGN_S, VERSIONS, assert_same, attacked, benign_drive, frames_of

REMOVING = ("suppress", "masquerade")
KINDS = [*((1, kind) for kind in FIRST_ATTACKS), *((2, kind) for kind in ATTACKS)]


@given(st.integers(0, 2**32), st.integers(2_000_000, 100_000_000), st.integers(1_000_000, 20_000_000))
def test_stretches_are_ordered_apart_and_leave_more_time_than_they_take(seed: int, duration: int, cycle: int) -> None:
    stretches = draw_time_spans(np.random.default_rng(seed), duration, cycle_us=cycle)
    edges = [0, *(edge for stretch in stretches for edge in (stretch.start_us, stretch.end_us)), duration]
    assert (np.diff(edges) > 0).all()
    share = sum(stretch.end_us - stretch.start_us for stretch in stretches) / duration
    assert 0.14 < share < 0.36


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("version", "kind"), [one for one in KINDS if one[1] not in REMOVING])
def test_an_injecting_attack_adds_labelled_frames_and_touches_no_other(version: int, kind: str, seed: int) -> None:
    vehicle, traffic = benign_drive(version, seed, number=seed)
    result = attacked(version, kind, vehicle, traffic, seed)
    assert_same(result.take(~result.attack), traffic)
    assert result.attack.any()
    assert (np.diff(result.time_us) >= 0).all()


@pytest.mark.parametrize(("version", "kind"), [one for one in KINDS if one[1] != "masquerade"])
def test_the_strength_of_an_attack_varies_more_than_its_length(version: int, kind: str) -> None:
    vehicle, traffic = benign_drive(version)
    counts = [attacked(version, kind, vehicle, traffic, seed).attack.sum() for seed in range(24)]
    assert max(counts) > 3 * min(counts)
    assert min(counts) > 0


@given(st.integers(0, 2**32), st.integers(5, 3600))
def test_bursts_are_rare_apart_and_one_is_late(seed: int, seconds: int) -> None:
    duration = seconds * SECOND_US
    bursts = draw_bursts(np.random.default_rng(seed), duration)
    edges = [0, *(edge for burst in bursts for edge in (burst.start_us, burst.end_us)), duration]
    assert (np.diff(edges) > 0).all()
    # Cut by time, the first four fifths and the last fifth have one each.
    assert bursts[0].end_us < 0.8 * duration or len(bursts) == 2
    assert bursts[-1].start_us > 0.8 * duration
    if seconds >= 40:
        assert sum(burst.end_us - burst.start_us for burst in bursts) / duration < 1 / 30


@pytest.mark.parametrize("kind", ATTACKS)
def test_every_burst_of_version_2_has_an_attack_frame(kind: str) -> None:
    vehicle, traffic = benign_drive(2, seed=1, number=2)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        bursts = draw_bursts(np.random.default_rng(seed), BENIGN_S[2] * SECOND_US)
        result = attack(kind, rng, vehicle, traffic, BENIGN_S[2] * SECOND_US)
        times = result.time_us[result.attack]
        assert all(((times >= burst.start_us) & (times < burst.end_us)).any() for burst in bursts)


@pytest.mark.parametrize("version", VERSIONS)
def test_dos_floods_with_id_zero(version: int) -> None:
    result = attacked(version, "DoS", *benign_drive(version))
    assert not result.can_id[result.attack].any()


@pytest.mark.parametrize(
    ("kind", "channels"),
    [
        ("rpm", {"rpm"}), ("speed", {"speed"}), ("double", {"steering", "speed"}), ("standstill", {"speed"}),
        ("force-neutral", {"gear"}), ("triple", {"rpm", "speed", "gear"}),
    ],
)  # fmt: skip
def test_spoofing_forges_the_messages_it_is_named_for(kind: str, channels: set[str]) -> None:
    for version in (1, 2) if kind in FIRST_ATTACKS else (2,):
        vehicle, traffic = benign_drive(version)
        result = attacked(version, kind, vehicle, traffic, seed=3)
        assert set(result.can_id[result.attack]) == {vehicle.fastest_carrier(channel)[0].can_id for channel in channels}


@pytest.mark.parametrize(("kind", "channel"), [("standstill", "speed"), ("force-neutral", "gear")])
def test_zero_is_claimed_while_the_vehicle_drives(kind: str, channel: str) -> None:
    vehicle, traffic = benign_drive(2)
    result = attacked(2, kind, vehicle, traffic)
    message, signal = vehicle.fastest_carrier(channel)
    assert (signal.read(result.payload[result.attack]) == signal.low).all()
    assert (signal.read(frames_of(traffic, message).payload) != signal.low).any()


def test_systematic_counts_through_ids_or_through_payloads() -> None:
    found = set()
    for seed in range(8):
        vehicle, traffic = benign_drive(2)
        result = attacked(2, "systematic", vehicle, traffic, seed)
        times = result.time_us[result.attack]
        for burst in draw_bursts(np.random.default_rng(seed), BENIGN_S[2] * SECOND_US):
            rows = np.flatnonzero(result.attack)[(times >= burst.start_us) & (times < burst.end_us)]
            steps = np.diff(result.can_id[rows]) % (vehicle.max_id + 1)
            changed = np.abs(np.diff(result.payload[rows].astype(int), axis=0)).sum(axis=1)
            assert ((steps == 1) & (changed == 0)).all() or ((steps == 0) & np.isin(changed, (1, 255))).all()
            found.add(int(steps[0]))
    assert found == {0, 1}


@pytest.mark.parametrize("version", VERSIONS)
def test_interval_sends_payloads_that_the_vehicle_sent(version: int) -> None:
    vehicle, traffic = benign_drive(version)
    result = attacked(version, "interval", vehicle, traffic)
    forged = result.take(result.attack)
    known = {(can_id, payload.tobytes()) for can_id, payload in zip(traffic.can_id, traffic.payload, strict=True)}
    assert all((i, p.tobytes()) in known for i, p in zip(forged.can_id, forged.payload, strict=True))


@pytest.mark.parametrize("version", VERSIONS)
def test_replay_sends_an_earlier_stretch_again(version: int) -> None:
    vehicle, traffic = benign_drive(version)
    result = attacked(version, "replay", vehicle, traffic)
    forged = result.take(result.attack)
    first_sent: dict[tuple[int, bytes], int] = {}
    for can_id, payload, time_us in zip(traffic.can_id, traffic.payload, traffic.time_us, strict=True):
        first_sent.setdefault((can_id, payload.tobytes()), time_us)
    replayed = zip(forged.can_id, forged.payload, forged.time_us, strict=True)
    assert all(first_sent[can_id, payload.tobytes()] < time_us for can_id, payload, time_us in replayed)
    assert len(set(forged.can_id)) > 1


def test_every_replay_includes_a_fast_message() -> None:
    vehicle, traffic = benign_drive(1)
    fast = [message.can_id for message in vehicle.cyclic_messages(50_000)]
    for seed in range(60):
        result = attacked(1, "replay", vehicle, traffic, seed)
        assert np.isin(fast, result.can_id[result.attack]).any()


@pytest.mark.parametrize("version", VERSIONS)
def test_suppress_labels_the_frame_after_each_missing_one_and_adds_none(version: int) -> None:
    vehicle, traffic = benign_drive(version)
    result = attacked(version, "suppress", vehicle, traffic)
    kept = set(zip(result.can_id, result.time_us, strict=True))
    missing = [t for i, t in zip(traffic.can_id, traffic.time_us, strict=True) if (i, t) not in kept]
    followers = np.searchsorted(result.time_us, missing)
    assert missing
    assert len(result) + len(missing) == len(traffic)
    assert set(np.flatnonzero(result.attack)) == set(followers)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seed", range(6))
def test_masquerade_replaces_frames_one_for_one_and_changes_their_reading(version: int, seed: int) -> None:
    vehicle, traffic = benign_drive(version, seed)
    result = attacked(version, "masquerade", vehicle, traffic, seed)
    np.testing.assert_array_equal(np.sort(result.can_id), np.sort(traffic.can_id))
    victims = {vehicle.fastest_carrier(channel)[0].can_id: channel for channel in ("rpm", "speed", "steering")}
    for can_id in set(result.can_id[result.attack]):
        message, signal = vehicle.fastest_carrier(victims[can_id])
        real, forged = (signal.read(frames_of(log, message).payload) for log in (traffic, result))
        assert (real != forged).any()
    untouched = ~np.isin(traffic.can_id, list(victims))
    assert_same(result.take(~np.isin(result.can_id, list(victims))), traffic.take(untouched))


def test_a_masquerade_of_version_2_is_in_the_victims_rhythm_and_range() -> None:
    for seed in range(12):
        vehicle, traffic = benign_drive(2, seed)
        result = attacked(2, "masquerade", vehicle, traffic, seed)
        for can_id in set(result.can_id[result.attack]):
            real, forged = (log.take(log.can_id == can_id) for log in (traffic, result))
            shift_us = forged.time_us - real.time_us
            assert shift_us.min() >= 0
            assert shift_us.max() < 200
            starts = np.flatnonzero(np.diff(forged.attack.astype(int), prepend=0))
            assert (np.diff(np.split(shift_us, starts)[1]) == 0).all()
            np.testing.assert_array_equal(forged.length, real.length)
