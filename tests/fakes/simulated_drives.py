"""Drives of the simulated bus, and frames written out by hand, for the tests of the synthetic data set."""

import numpy as np
from hypothesis import strategies as st

from can_train_tasks.can.settings import SyntheticSettings
from can_train_tasks.can.synthetic.traffic import SECOND_US, Traffic
from can_train_tasks.can.synthetic.vehicles import MAX_EXTENDED_ID, MAX_STANDARD_ID, Message, Vehicle
from can_train_tasks.can.synthetic.writing import GENERATORS, plan_drives, simulate

VERSIONS = tuple(GENERATORS)
SHORTEST = {version: SyntheticSettings(version=version, seed=3, seconds=5.0) for version in VERSIONS}
DRIVES = {
    version: {drive.path: (drive, position) for position, drive in enumerate(plan_drives(version))}
    for version in VERSIONS
}
IDS = st.one_of(st.integers(0, MAX_STANDARD_ID), st.integers(0, MAX_EXTENDED_ID))
FRAMES = st.tuples(st.integers(0, 10**12), IDS, st.binary(max_size=8), st.booleans())
BENIGN_S = {1: 6, 2: 40, 3: 40}


def as_traffic(frames: list[tuple[int, int, bytes, bool]]) -> Traffic:
    payload = [list(data.ljust(8, b"\0")) for *_, data, _ in frames]
    return Traffic(
        time_us=np.array([frame[0] for frame in frames], np.int64),
        can_id=np.array([frame[1] for frame in frames], np.int64),
        length=np.array([len(frame[2]) for frame in frames], np.int64),
        payload=np.array(payload, np.uint8),
        attack=np.array([frame[3] for frame in frames]),
    )


def drive_log(version: int, path: str, seed: int = 3, seconds: float = 5.0) -> tuple[Vehicle, Traffic]:
    drive, position = DRIVES[version][path]
    vehicle = GENERATORS[version].make_vehicles(seed)[drive.vehicle - 1]
    settings = SyntheticSettings(version=version, seed=seed, seconds=seconds)
    return vehicle, simulate(drive, position, vehicle, settings)


def frames_of(log: Traffic, message: Message) -> Traffic:
    return log.take(log.can_id == message.can_id)


def benign_drive(version: int, seed: int = 0, number: int = 0) -> tuple[Vehicle, Traffic]:
    vehicle = GENERATORS[version].make_vehicles(seed)[number]
    return vehicle, GENERATORS[version].drive(np.random.default_rng(seed), vehicle, BENIGN_S[version] * SECOND_US)


def attacked(version: int, kind: str, vehicle: Vehicle, traffic: Traffic, seed: int = 0) -> Traffic:
    rng = np.random.default_rng(seed)
    return GENERATORS[version].attack(kind, rng, vehicle, traffic, BENIGN_S[version] * SECOND_US)


def assert_same(left: Traffic, right: Traffic) -> None:
    for name in ("time_us", "can_id", "length", "payload", "attack"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
