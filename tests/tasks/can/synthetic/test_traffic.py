import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train_tasks.can.synthetic.traffic import SECOND_US, Traffic, simulate_bus, vehicle_traffic
from can_train_tasks.can.synthetic.vehicles import Checksum, Message, SendType, Signal, make_vehicles, write_checksum
from fakes.simulated_drives import IDS, VERSIONS, as_traffic, assert_same, benign_drive, drive_log, frames_of

# The bus


def bits_on_the_wire(can_id: int) -> str:
    """The arbitration field: 11 bits of the ID, RTR, IDE; or 11 bits, SRR, IDE, 18 bits, RTR. A 0 wins over a 1."""
    return f"{can_id:011b}00" if can_id <= 0x7FF else f"{can_id >> 18:011b}11{can_id % 2**18:018b}0"


def slow_bus(traffic: Traffic, bit_us: int) -> list[tuple[int, int]]:
    """Arbitration by its definition: whenever the bus falls idle, the lowest ID among the frames ready goes next."""
    waiting = list(range(len(traffic)))
    sent, clock = [], 0
    while waiting:
        clock = max(clock, min(int(traffic.time_us[i]) for i in waiting))
        ready = [i for i in waiting if traffic.time_us[i] <= clock]
        winner = min(ready, key=lambda i: (bits_on_the_wire(int(traffic.can_id[i])), i))
        waiting.remove(winner)
        clock += bit_us * ((47 if traffic.can_id[winner] <= 0x7FF else 67) + 8 * int(traffic.length[winner]))
        sent.append((winner, clock))
    return sent


FEW_IDS = st.one_of(st.integers(0, 4), st.builds(lambda base, more: base << 18 | more, st.integers(1, 4), IDS))


@given(
    st.lists(st.tuples(st.integers(0, 3000), FEW_IDS, st.binary(max_size=8), st.booleans()), max_size=25),
    st.sampled_from([2, 4]),
)
def test_the_bus_is_never_shared_never_idle_and_goes_to_the_lowest_id(
    frames: list[tuple[int, int, bytes, bool]], bit_us: int
) -> None:
    if not frames:
        return
    traffic = as_traffic(sorted(frames, key=lambda frame: frame[0]))
    order, ends = zip(*slow_bus(traffic, bit_us), strict=True)
    expected = traffic.take(np.array(order))
    expected.time_us[:] = ends
    assert_same(simulate_bus(traffic, bit_us), expected)


# Vehicles and their traffic


@pytest.mark.parametrize("seed", range(3))
def test_vehicles_have_25_to_45_ids_partly_shared_and_never_all(seed: int) -> None:
    sets = [{message.can_id for message in vehicle.messages} for vehicle in make_vehicles(seed)]
    assert all(25 <= len(ids) <= 45 and max(ids) <= 0x7FF for ids in sets)
    unknown = sets[-1]
    assert unknown & set.union(*sets[:-1])
    assert len(unknown - set.union(*sets[:-1])) > len(unknown) / 2


@pytest.mark.parametrize("seed", range(3))
def test_every_vehicle_sends_about_a_thousand_frames_a_second(seed: int) -> None:
    for vehicle in make_vehicles(seed):
        traffic = vehicle_traffic(np.random.default_rng(seed), vehicle, 10 * SECOND_US)
        assert 750 < len(traffic) / 10 < 1_500


def test_a_cyclic_message_keeps_its_period_but_for_jitter_and_rare_gaps() -> None:
    vehicle, traffic = benign_drive(1)
    for message in vehicle.cyclic_messages(20_000):
        periods = np.diff(frames_of(traffic, message).time_us) / message.period_us
        assert np.median(np.abs(periods - 1)) < 0.05
        assert len(np.unique(periods)) > 10
        assert (periods < 1.5).mean() > 0.9


def test_occasional_messages_pause_and_eager_ones_repeat_early() -> None:
    vehicles = [make_vehicles(seed)[0] for seed in range(8)]
    gaps: dict[SendType, list[float]] = {send_type: [] for send_type in SendType}
    for vehicle in vehicles:
        traffic = vehicle_traffic(np.random.default_rng(0), vehicle, 20 * SECOND_US)
        for message in vehicle.messages:
            gaps[message.send_type] += (np.diff(frames_of(traffic, message).time_us) / message.period_us).tolist()
    assert max(gaps[SendType.CYCLIC_IF_ACTIVE]) > 4 > max(gaps[SendType.CYCLIC_AND_ON_CHANGE])
    assert min(gaps[SendType.CYCLIC_AND_ON_CHANGE]) < 0.1 < min(gaps[SendType.CYCLIC])


def crc8_bit_by_bit(data: bytes, polynomial: int = 0x1D) -> int:
    crc = 0xFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ polynomial if crc & 0x80 else crc << 1) & 0xFF
    return crc ^ 0xFF


def xor(data: bytes) -> int:
    return int(np.bitwise_xor.reduce(np.frombuffer(data, np.uint8)))


def crc8_h2f_bit_by_bit(data: bytes) -> int:
    return crc8_bit_by_bit(data, 0x2F)


@pytest.mark.parametrize(("kind", "known"), [(Checksum.CRC8, 0x4B), (Checksum.CRC8_H2F, 0xDF)])
def test_the_crcs_are_published_ones(kind: Checksum, known: int) -> None:
    message = Message(
        can_id=0x3132, period_us=1, length=8, send_type=SendType.CYCLIC, constants=(0,) * 8, signals=(),
        counter_byte=None,
        checksum=kind,
    )  # fmt: skip
    payload = np.array([list(b"3456789\0")], np.uint8)
    write_checksum(message, payload)
    assert payload[0, 7] == known


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", ["train_01_attack_free/attack-free-1.csv", "test_06_masquerade/masquerade-1.csv"])
def test_checksums_hold_in_benign_traffic_and_under_masquerade(version: int, path: str) -> None:
    vehicle, log = drive_log(version, path)
    rules = {Checksum.XOR: xor, Checksum.CRC8: crc8_bit_by_bit, Checksum.SUM: lambda data: sum(data) % 256,
             Checksum.CRC8_H2F: crc8_h2f_bit_by_bit}  # fmt: skip
    seen = set()
    for message in vehicle.messages:
        if message.checksum is Checksum.NONE:
            continue
        for payload in frames_of(log, message).payload:
            data = message.can_id.to_bytes(2 if message.can_id <= 0x7FF else 4) + payload.tobytes()[: message.length]
            assert rules[message.checksum](data[:-1]) == data[-1]
            seen.add(message.checksum)
    assert seen if version == 3 else seen == {Checksum.XOR, Checksum.CRC8}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", ["train_01_attack_free/attack-free-1.csv", "test_06_masquerade/masquerade-1.csv"])
def test_counters_count_in_benign_traffic_and_under_masquerade(version: int, path: str) -> None:
    vehicle, log = drive_log(version, path)
    counting = [message for message in vehicle.messages if message.counter_byte is not None]
    assert len(counting) > 3
    for message in counting:
        count = frames_of(log, message).payload[:, message.counter_byte].astype(int)
        assert (np.diff(count) % 16 == 1).all()


def test_signals_of_one_drive_agree_with_each_other() -> None:
    vehicle, traffic = benign_drive(1)
    speed = [(m, s) for m in vehicle.messages for s in m.signals if s.channel == "speed" and m.period_us <= 20_000]
    (first, signal), *others = speed
    course = signal.read(frames_of(traffic, first).payload)
    assert np.abs(np.diff(course)).max() < np.ptp(course) / 5
    for message, other in others:
        frames = frames_of(traffic, message)
        latest = np.searchsorted(frames_of(traffic, first).time_us, frames.time_us).clip(max=len(course) - 1)
        assert abs(np.corrcoef(course[latest], other.read(frames.payload))[0, 1]) > 0.95


@given(st.integers(0, 65_535), st.integers(0, 65_535), st.integers(-70_000, 140_000))
def test_a_signal_reads_what_was_written_clipped_to_its_range(low: int, high: int, raw: int) -> None:
    signal = Signal(channel="speed", byte=3, width=2, low=low, high=high)
    payload = np.zeros((1, 8), np.uint8)
    signal.write(payload, np.array([raw]))
    assert signal.read(payload)[0] == min(max(raw, min(low, high)), max(low, high))
    assert not payload[0, [0, 1, 2, 5, 6, 7]].any()
