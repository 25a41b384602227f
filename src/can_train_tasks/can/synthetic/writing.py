"""The drives of the synthetic data set, and their files.

The files have the folders, names and rows of can-train-and-test's newer release, so that the reader of real logs reads
them. The bytes depend on the settings only.

Shapes: M frames.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from itertools import cycle, product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from can_train.io.arrays import discard_folder, writing_folder
from can_train.reporter import Reporter
from can_train_tasks.can.data.graphs import Ints
from can_train_tasks.can.settings import SyntheticSettings
from can_train_tasks.can.synthetic.attacks import attack, attack_often
from can_train_tasks.can.synthetic.driving import drive_vehicle
from can_train_tasks.can.synthetic.fleet import make_fleet, make_loose_fleet
from can_train_tasks.can.synthetic.traffic import SECOND_US, Traffic, simulate_bus, vehicle_traffic
from can_train_tasks.can.synthetic.vehicles import MAX_STANDARD_ID, NUM_VEHICLES, Vehicle, make_vehicles

ATTACK_FREE: Final = "attack-free"
_KNOWN_ATTACKS: Final = ("DoS", "fuzzing", "rpm", "interval")
_KNOWN_VEHICLES: Final = tuple(range(1, NUM_VEHICLES))
_EPOCH_US: Final = 1_600_000_000 * SECOND_US  # Unix time of the first drive's beginning: constant, for equal bytes
_BETWEEN_DRIVES_US: Final = 86_400 * SECOND_US
_HEADER: Final = b"timestamp,arbitration_id,data_field,attack\n"
_TIME_DIGITS: Final = 16  # digits of a Unix time in microseconds: ten before the decimal point, six after it
_ID_DIGITS: Final = 3  # digits of an ID of 11 bits
_EXTENDED_ID_DIGITS: Final = 8


class Generator(NamedTuple):
    """The parts that make the drives of a version."""

    # Change it whenever the same settings give other bytes, so that folders of an earlier version are not used.
    revision: str
    make_vehicles: Callable[[int], tuple[Vehicle, ...]]  # takes the seed
    drive: Callable[[np.random.Generator, Vehicle, int], Traffic]  # takes the duration in microseconds
    attack: Callable[[str, np.random.Generator, Vehicle, Traffic, int], Traffic]
    unknown_attacks: tuple[str, ...]  # attacks that training does not see
    test_share: float  # length of a test drive ÷ length of a training drive


_MORE_ATTACKS: Final = ("replay", "speed", "double", "triple", "standstill", "force-neutral", "systematic")
# Attacks are rare in versions 2 and 3: with test drives of full length, a test folder has some forty attack windows.
GENERATORS: Final[Mapping[int, Generator]] = {
    1: Generator("1", make_vehicles, vehicle_traffic, attack_often, ("replay", "speed", "double"), 0.5),
    2: Generator("2", make_fleet, drive_vehicle, attack, _MORE_ATTACKS, 1.0),
    3: Generator("3", make_loose_fleet, drive_vehicle, attack, _MORE_ATTACKS, 1.0),
}


class PlannedDrive(NamedTuple):
    """One drive and its file."""

    folder: str  # folder of the file
    kind: str  # `ATTACK_FREE` or a kind of attack
    vehicle: int  # 1 to `NUM_VEHICLES`; the file's number, as in can-train-and-test

    @property
    def path(self) -> str:
        """Path of the file in the data set's folder."""
        return f"{self.folder}/{self.kind}-{self.vehicle}.csv"

    @property
    def is_test(self) -> bool:
        """Whether the drive belongs to a test folder."""
        return self.folder.startswith("test_")


def plan_drives(version: int) -> tuple[PlannedDrive, ...]:
    """Returns the drives of the data set, in a fixed order: a drive's random numbers follow from its position."""
    unknown_attacks = GENERATORS[version].unknown_attacks
    parts = {
        "train_01_attack_free": product((ATTACK_FREE,), _KNOWN_VEHICLES),
        "train_02_with_attacks": product(_KNOWN_ATTACKS, _KNOWN_VEHICLES),
        "test_01_known_vehicle_known_attack": zip(_KNOWN_ATTACKS, cycle(_KNOWN_VEHICLES)),
        "test_02_unknown_vehicle_known_attack": product(_KNOWN_ATTACKS, (NUM_VEHICLES,)),
        "test_03_known_vehicle_unknown_attack": zip(unknown_attacks, cycle(_KNOWN_VEHICLES)),
        "test_04_unknown_vehicle_unknown_attack": product(unknown_attacks, (NUM_VEHICLES,)),
        "test_05_suppress": product(("suppress",), _KNOWN_VEHICLES),
        "test_06_masquerade": product(("masquerade",), _KNOWN_VEHICLES),
    }
    return tuple(PlannedDrive(folder, kind, vehicle) for folder, pairs in parts.items() for kind, vehicle in pairs)


def synthetic_folder_name(settings: SyntheticSettings) -> str:
    """Names the folder of a synthetic data set by its settings and the generator's version."""
    identity = f"{GENERATORS[settings.version].revision}:{settings.seed}:{settings.drive_s!r}"
    return f"synthetic-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def synthetic_folder(cache: Path, settings: SyntheticSettings, reporter: Reporter) -> Path:
    """Returns the data set's folder in `cache`; simulates and writes it if it, or a file in it, is missing.

    Raises:
        StateError: The folder cannot be written.
    """
    folder = cache / synthetic_folder_name(settings)
    # A scratch disk deletes files by their age, one by one.
    if not all((folder / drive.path).is_file() for drive in plan_drives(settings.version)):
        if folder.is_dir():
            discard_folder(folder)
        write_synthetic(folder, settings, reporter)
    return folder


def write_synthetic(folder: Path, settings: SyntheticSettings, reporter: Reporter, *, tests: bool = True) -> None:
    """Simulates the data set and writes it. The folder appears complete or not at all.

    Args:
        folder: Is made.
        settings: Settings of the data set.
        reporter: Is told about the progress.
        tests: Whether to write test drives, which a plan of a training does not need.

    Raises:
        StateError: The folder cannot be written.
    """
    vehicles = GENERATORS[settings.version].make_vehicles(settings.seed)
    # A drive's random numbers follow from its position among all drives.
    drives = [(position, drive) for position, drive in enumerate(plan_drives(settings.version))
              if tests or not drive.is_test]  # fmt: skip
    with (
        writing_folder(folder) as staged,
        reporter.stage("simulating the synthetic data set", total=len(drives), unit="files") as stage,
    ):
        for position, drive in drives:
            log = simulate(drive, position, vehicles[drive.vehicle - 1], settings)
            path = staged / drive.path
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.write(_HEADER)
                file.write(format_rows(log, _EPOCH_US + position * _BETWEEN_DRIVES_US))
                file.flush()
                # Flushed before the folder's rename: after a power failure a complete folder must not hold empty files.
                os.fsync(file.fileno())
            stage.advance()


def simulate(drive: PlannedDrive, position: int, vehicle: Vehicle, settings: SyntheticSettings) -> Traffic:
    """Simulates one drive; its random numbers follow from `position`, its place in the plan. Returns the log."""
    traffic_rng, attack_rng = (
        np.random.default_rng(np.random.SeedSequence(settings.seed, spawn_key=(1, position, part))) for part in range(2)
    )
    generator = GENERATORS[settings.version]
    share = generator.test_share if drive.is_test else 1.0
    duration_us = int(settings.drive_s * share * SECOND_US)
    traffic = generator.drive(traffic_rng, vehicle, duration_us)
    if drive.kind != ATTACK_FREE:
        traffic = generator.attack(drive.kind, attack_rng, vehicle, traffic, duration_us)
    return simulate_bus(traffic, vehicle.bit_us)


def format_rows(log: Traffic, start_us: int) -> bytes:
    """Writes a log as the rows of a can-train-and-test file, without its header.

    The drive began at the Unix time `start_us`. An ID of 29 bits, which published logs lack, has eight digits.
    """
    # Column by column: a Python loop over the rows would be many times slower.
    comma, point, newline = (np.uint8(ord(character)) for character in ",.\n")
    time = _digits(start_us + log.time_us, base=10, count=_TIME_DIGITS)
    before = [*time[:-6], point, *time[-6:], comma]
    head = [*before, *_digits(log.can_id, base=16, count=_EXTENDED_ID_DIGITS), comma]
    data = [digit for byte in log.payload.T for digit in _digits(byte, base=16, count=2)]
    tail = [comma, *_digits(log.attack.astype(np.int64), base=10, count=1), newline]
    rows = np.empty((len(log), len(head) + len(data) + len(tail)), np.uint8)
    for position, column in enumerate([*head, *data, *tail]):
        rows[:, position] = column
    written = np.ones(rows.shape, np.bool_)
    omitted_digits = slice(len(before), len(before) + _EXTENDED_ID_DIGITS - _ID_DIGITS)
    written[:, omitted_digits] = (log.can_id > MAX_STANDARD_ID)[:, None]
    written[:, len(head) : len(head) + len(data)] = np.arange(len(data)) < 2 * log.length[:, None]
    return rows[written].tobytes()


def _digits(numbers: Ints | NDArray[np.uint8], *, base: int, count: int) -> list[NDArray[np.uint8]]:
    """Returns the ASCII digits of numbers [M], the most significant first: `count` columns [M]."""
    alphabet = np.frombuffer(b"0123456789ABCDEF", np.uint8)
    columns = []
    for _ in range(count):
        numbers, digit = np.divmod(numbers, base)
        columns.append(alphabet[digit])
    return columns[::-1]
