"""Drives of the simulated bus, and frames written out by hand, for the tests of the synthetic data set."""

import numpy as np
from hypothesis import strategies as st

from can_train.tasks.can.settings import SyntheticSettings
from can_train.tasks.can.synthetic.traffic import SECOND_US, Traffic, attack, vehicle_traffic
from can_train.tasks.can.synthetic.vehicles import Message, Vehicle, make_vehicles
from can_train.tasks.can.synthetic.writing import plan_drives, simulate

SHORTEST = SyntheticSettings(seed=3, seconds=5.0)
DRIVES = {drive.path: (drive, position) for position, drive in enumerate(plan_drives())}
FRAMES = st.tuples(
    st.integers(0, 10**12), st.integers(0, 0x7FF), st.binary(max_size=8), st.booleans()
)  # fmt: skip


def as_traffic(frames: list[tuple[int, int, bytes, bool]]) -> Traffic:
    payload = [list(data.ljust(8, b"\0")) for *_, data, _ in frames]
    return Traffic(
        time_us=np.array([frame[0] for frame in frames], np.int64),
        can_id=np.array([frame[1] for frame in frames], np.int64),
        length=np.array([len(frame[2]) for frame in frames], np.int64),
        payload=np.array(payload, np.uint8),
        attack=np.array([frame[3] for frame in frames]),
    )


def drive_log(path: str, seed: int = SHORTEST.seed, seconds: float = SHORTEST.seconds) -> tuple[Vehicle, Traffic]:
    drive, position = DRIVES[path]
    vehicle = make_vehicles(seed)[drive.vehicle - 1]
    return vehicle, simulate(drive, position, vehicle, SyntheticSettings(seed=seed, seconds=seconds))


def frames_of(log: Traffic, message: Message) -> Traffic:
    return log.take(log.can_id == message.can_id)


def benign_drive(seed: int = 0) -> tuple[Vehicle, Traffic]:
    vehicle = make_vehicles(seed)[0]
    return vehicle, vehicle_traffic(np.random.default_rng(seed), vehicle, 6 * SECOND_US)


def attacked(kind: str, vehicle: Vehicle, traffic: Traffic, seed: int = 0) -> Traffic:
    return attack(kind, np.random.default_rng(seed), vehicle, traffic, 6 * SECOND_US)


def assert_same(left: Traffic, right: Traffic) -> None:
    for name in ("time_us", "can_id", "length", "payload", "attack"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
