import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.tasks.can.synthetic.traffic import ATTACKS, draw_time_spans
from fakes.simulated_drives import assert_same, attacked, benign_drive, frames_of

REMOVING = ("suppress", "masquerade")


@given(st.integers(0, 2**32), st.integers(2_000_000, 100_000_000), st.integers(1_000_000, 20_000_000))
def test_stretches_are_ordered_apart_and_leave_more_time_than_they_take(seed: int, duration: int, cycle: int) -> None:
    stretches = draw_time_spans(np.random.default_rng(seed), duration, cycle_us=cycle)
    edges = [0, *(edge for stretch in stretches for edge in (stretch.start_us, stretch.end_us)), duration]
    assert (np.diff(edges) > 0).all()
    share = sum(stretch.end_us - stretch.start_us for stretch in stretches) / duration
    assert 0.14 < share < 0.36


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind not in REMOVING])
def test_an_injecting_attack_adds_labelled_frames_and_touches_no_other(kind: str, seed: int) -> None:
    vehicle, traffic = benign_drive(seed)
    result = attacked(kind, vehicle, traffic, seed)
    assert_same(result.take(~result.attack), traffic)
    assert result.attack.any()
    assert (np.diff(result.time_us) >= 0).all()


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind != "masquerade"])
def test_the_strength_of_an_attack_varies_more_than_its_length(kind: str) -> None:
    vehicle, traffic = benign_drive()
    counts = [attacked(kind, vehicle, traffic, seed).attack.sum() for seed in range(12)]
    assert max(counts) > 3 * min(counts)
    assert min(counts) > 0


def test_dos_floods_with_id_zero() -> None:
    result = attacked("DoS", *benign_drive())
    assert not result.can_id[result.attack].any()


@pytest.mark.parametrize(
    ("kind", "channels"), [("rpm", {"rpm"}), ("speed", {"speed"}), ("double", {"steering", "speed"})]
)
def test_spoofing_forges_the_messages_it_is_named_for(kind: str, channels: set[str]) -> None:
    vehicle, traffic = benign_drive()
    result = attacked(kind, vehicle, traffic)
    assert set(result.can_id[result.attack]) == {vehicle.fastest_carrier(channel)[0].can_id for channel in channels}


def test_interval_sends_payloads_that_the_vehicle_sent() -> None:
    vehicle, traffic = benign_drive()
    result = attacked("interval", vehicle, traffic)
    forged = result.take(result.attack)
    known = {(can_id, payload.tobytes()) for can_id, payload in zip(traffic.can_id, traffic.payload, strict=True)}
    assert all((i, p.tobytes()) in known for i, p in zip(forged.can_id, forged.payload, strict=True))


def test_replay_sends_an_earlier_stretch_again() -> None:
    vehicle, traffic = benign_drive()
    result = attacked("replay", vehicle, traffic)
    forged = result.take(result.attack)
    first_sent: dict[tuple[int, bytes], int] = {}
    for can_id, payload, time_us in zip(traffic.can_id, traffic.payload, traffic.time_us, strict=True):
        first_sent.setdefault((can_id, payload.tobytes()), time_us)
    replayed = zip(forged.can_id, forged.payload, forged.time_us, strict=True)
    assert all(first_sent[can_id, payload.tobytes()] < time_us for can_id, payload, time_us in replayed)
    assert len(set(forged.can_id)) > 1


def test_every_replay_includes_a_fast_message() -> None:
    vehicle, traffic = benign_drive()
    fast = [message.can_id for message in vehicle.cyclic_messages(50_000)]
    for seed in range(60):
        result = attacked("replay", vehicle, traffic, seed)
        assert np.isin(fast, result.can_id[result.attack]).any()


def test_suppress_labels_the_frame_after_each_missing_one_and_adds_none() -> None:
    vehicle, traffic = benign_drive()
    result = attacked("suppress", vehicle, traffic)
    kept = set(zip(result.can_id, result.time_us, strict=True))
    missing = [t for i, t in zip(traffic.can_id, traffic.time_us, strict=True) if (i, t) not in kept]
    followers = np.searchsorted(result.time_us, missing)
    assert missing
    assert len(result) + len(missing) == len(traffic)
    assert set(np.flatnonzero(result.attack)) == set(followers)


@pytest.mark.parametrize("seed", range(6))
def test_masquerade_replaces_frames_one_for_one_and_changes_their_reading(seed: int) -> None:
    vehicle, traffic = benign_drive(seed)
    result = attacked("masquerade", vehicle, traffic, seed)
    np.testing.assert_array_equal(np.sort(result.can_id), np.sort(traffic.can_id))
    victims = {vehicle.fastest_carrier(channel)[0].can_id: channel for channel in ("rpm", "speed", "steering")}
    for can_id in set(result.can_id[result.attack]):
        message, signal = vehicle.fastest_carrier(victims[can_id])
        real, forged = (signal.read(frames_of(log, message).payload) for log in (traffic, result))
        assert (real != forged).any()
    untouched = ~np.isin(traffic.can_id, list(victims))
    assert_same(result.take(~np.isin(result.can_id, list(victims))), traffic.take(untouched))
