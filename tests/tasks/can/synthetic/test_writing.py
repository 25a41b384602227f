import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.config.compose import RunRequest, resolve
from can_train.errors import ConfigError, StateError
from can_train.reporter import SilentReporter, Stage
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.data.layout import find_logs
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings, SyntheticSettings
from can_train_tasks.can.synthetic.attacks import ATTACKS, FIRST_ATTACKS
from can_train_tasks.can.synthetic.traffic import SECOND_US
from can_train_tasks.can.synthetic.writing import (
    GENERATORS,
    format_rows,
    plan_drives,
    simulate,
    synthetic_folder,
    synthetic_folder_name,
    write_synthetic,
)
from fakes.simulated_drives import DRIVES, FRAMES, SHORTEST, VERSIONS, as_traffic, drive_log


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(version: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_folder(tmp_path_factory.mktemp("data"), SHORTEST[version], SilentReporter())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.csv"))}


def rows(folder: Path, path: str) -> list[list[str]]:
    return [line.split(",") for line in (folder / path).read_text().splitlines()[1:]]


# The files


def test_the_same_settings_give_the_same_bytes(version: int, folder: Path, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "again", SHORTEST[version], SilentReporter())
    assert contents(tmp_path / "again") == contents(folder)


def test_training_drives_without_test_drives_are_those_of_the_whole_set(
    version: int, folder: Path, tmp_path: Path
) -> None:
    write_synthetic(tmp_path / "training", SHORTEST[version], SilentReporter(), tests=False)
    whole = contents(folder)
    assert contents(tmp_path / "training") == {path: whole[path] for path in whole if not path.startswith("test_")}


def test_a_revision_stands_for_these_bytes(version: int, folder: Path) -> None:
    digest = hashlib.sha256(b"".join(data for _, data in sorted(contents(folder).items()))).hexdigest()
    known = {1: ("1", "fb0dcdf14288d51c"), 2: ("2", "699599f1a1c97b4c"), 3: ("3", "de7da61e47020043")}
    assert (GENERATORS[version].revision, digest[:16]) == known[version], "other bytes need another revision"


def test_version_1_lies_where_it_lay_before_there_was_another() -> None:
    assert synthetic_folder_name(SyntheticSettings(version=1)) == "synthetic-8ffc6cb0823b"


def test_another_seed_gives_other_bytes_in_every_file(version: int, folder: Path, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "other", SyntheticSettings(version=version, seed=4, seconds=5.0), SilentReporter())
    other = contents(tmp_path / "other")
    assert all(other[path] != data for path, data in contents(folder).items())


def test_no_two_drives_are_alike_nor_at_the_same_time(version: int, folder: Path) -> None:
    drives = [rows(folder, path) for path in contents(folder)]
    assert len({tuple(row[2] for row in drive) for drive in drives}) == len(DRIVES[version])
    spans = sorted((float(drive[0][0]), float(drive[-1][0])) for drive in drives)
    assert all(end < start for (_, end), (start, _) in pairwise(spans))


def test_a_drives_frames_follow_from_seed_and_position(version: int) -> None:
    drive, position = DRIVES[version]["train_01_attack_free/attack-free-1.csv"]
    vehicle = GENERATORS[version].make_vehicles(0)[0]
    logs = [
        simulate(drive, position + later, vehicle, SyntheticSettings(version=version, seed=seed, seconds=5.0))
        for seed, later in ((0, 0), (1, 0), (0, 1))
    ]
    assert len({log.payload.tobytes() for log in logs}) == 3


def test_the_reader_of_real_logs_recognises_every_file_and_reads_every_frame(version: int, folder: Path) -> None:
    for log in find_logs(CanDatasetSettings(path=str(folder)), Path("nowhere")):
        reader = LogReader(log.path, CanDatasetSettings(), kind=log.kind)
        frames = Frames.concatenate(list(reader.blocks()))
        expected = drive_log(version, log.path.relative_to(folder).as_posix())[1]
        assert reader.format == "can_train_and_test"
        assert reader.kinds[1:] == ([] if log.kind == "attack" else [log.kind])
        np.testing.assert_array_equal(frames.can_id, expected.can_id)
        np.testing.assert_array_equal(frames.length, expected.length)
        np.testing.assert_array_equal(frames.payload, expected.payload)
        np.testing.assert_array_equal(frames.label > 0, expected.attack)


def test_the_layout_is_the_newer_release_of_can_train_and_test(version: int, folder: Path) -> None:
    logs = find_logs(CanDatasetSettings(path=str(folder)), Path("nowhere"))
    groups = list(dict.fromkeys(log.group for log in logs))
    assert groups == [
        "train_01_attack_free", "train_02_with_attacks", "test_01_known_vehicle_known_attack",
        "test_02_unknown_vehicle_known_attack", "test_03_known_vehicle_unknown_attack",
        "test_04_unknown_vehicle_unknown_attack", "test_05_suppress", "test_06_masquerade",
    ]  # fmt: skip
    assert {log.kind for log in logs} == {*(FIRST_ATTACKS if version == 1 else ATTACKS), "attack"}


def test_attacks_and_vehicles_called_unknown_do_not_occur_in_training(version: int) -> None:
    drives = plan_drives(version)
    trained = {(d.kind, d.vehicle) for d in drives if d.folder.startswith("train_")}
    for drive in drives:
        if "unknown_attack" in drive.folder:
            assert drive.kind not in {kind for kind, _ in trained}
        if "unknown_vehicle" in drive.folder:
            assert drive.vehicle not in {vehicle for _, vehicle in trained}
        if "known_vehicle_known_attack" in drive.folder and "unknown" not in drive.folder:
            assert (drive.kind, drive.vehicle) in trained


def test_rows_have_six_decimals_three_or_eight_upper_case_id_digits_and_whole_bytes(folder: Path) -> None:
    row = re.compile(rb"\d{10}\.\d{6},(?:[01][0-9A-F]{7}|[0-7][0-9A-F]{2}),(?:[0-9A-F]{2}){0,8},[01]")
    for data in contents(folder).values():
        header, *lines, end = data.split(b"\n")
        assert (header, end) == (b"timestamp,arbitration_id,data_field,attack", b"")
        assert all(row.fullmatch(line) for line in lines)


def test_payloads_differ_in_length_and_may_be_empty(folder: Path) -> None:
    lengths = {len(row[2]) // 2 for path in contents(folder) for row in rows(folder, path)}
    assert {0, 8} < lengths


def test_time_never_runs_backwards(folder: Path) -> None:
    for path in contents(folder):
        assert (np.diff([float(row[0]) for row in rows(folder, path)]) > 0).all()


def test_only_attack_files_have_attack_frames(folder: Path) -> None:
    for path in contents(folder):
        assert any(row[3] == "1" for row in rows(folder, path)) == ("attack-free" not in path)


@pytest.mark.parametrize("seed", range(2))
def test_every_attack_file_has_attack_windows_and_benign_windows(version: int, seed: int) -> None:
    for path in DRIVES[version]:
        _, log = drive_log(version, path, seed)
        windows = log.attack[: len(log) // 100 * 100].reshape(-1, 100).any(axis=1)
        assert windows.any() == ("attack-free" not in path)
        assert not windows.all()


def test_a_test_drive_is_half_as_long_in_version_1_and_all_grow_with_the_seconds(version: int) -> None:
    train, test = "train_01_attack_free/attack-free-1.csv", "test_05_suppress/suppress-1.csv"
    for path, seconds in ((train, 10.0), (test, 5.0 if version == 1 else 10.0)):
        _, log = drive_log(version, path, seconds=10.0)
        assert log.time_us[-1] / SECOND_US == pytest.approx(seconds, rel=0.01)


def test_the_folders_name_follows_from_every_setting() -> None:
    choices = product(VERSIONS, (0, 1), (5.0, 6.0))
    names = [synthetic_folder_name(SyntheticSettings(version=v, seed=seed, seconds=s)) for v, seed, s in choices]
    assert len(set(names)) == 4 * len(VERSIONS)
    assert synthetic_folder_name(SyntheticSettings(seconds=6)) == synthetic_folder_name(SyntheticSettings(seconds=6.0))


def test_a_folder_that_exists_is_not_written_again(version: int, folder: Path) -> None:
    class Deaf(SilentReporter):
        def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Any:
            raise AssertionError("simulated again")

    assert synthetic_folder(folder.parent, SHORTEST[version], Deaf()) == folder


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": -1},
        {"seconds": 4.9},
        {"seconds": float("inf")},
        {"seconds": float("nan")},
        {"version": 0},
        {"version": 4},
    ],
)
def test_settings_that_no_drive_can_have_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.synthetic\.(se|version)"):
        SyntheticSettings(**settings)


def test_each_version_has_a_length_of_its_own() -> None:
    assert [SyntheticSettings(version=version).drive_s for version in VERSIONS] == [20.0, 60.0, 60.0]
    assert SyntheticSettings(version=1, seconds=60.0).drive_s == 60.0
    assert SyntheticSettings().version == 2


@pytest.mark.parametrize(("sets", "drive_s"), [((), 60.0), (("dataset.synthetic.version=1",), 20.0)])
def test_a_set_version_brings_its_length(sets: tuple[str, ...], drive_s: float) -> None:
    assert resolve(RunRequest(model="gat", dataset="synthetic", sets=sets)).dataset.synthetic.drive_s == drive_s


# Writing


class InterruptedReporter(SilentReporter):
    """Lets three files pass."""

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Stage]:
        class Interrupting:
            done = 0

            def advance(self, amount: int = 1, **figures: float) -> None:
                self.done += amount
                if self.done == 3:
                    raise KeyboardInterrupt

        yield Interrupting()


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_synthetic(tmp_path / "cache" / "data", SHORTEST[2], InterruptedReporter())
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_data_set_that_has_lost_a_file_is_simulated_again(folder: Path, version: int, tmp_path: Path) -> None:
    settings = SHORTEST[version]
    lost = tmp_path / synthetic_folder_name(settings)
    shutil.copytree(folder, lost)
    next(lost.rglob("*.csv")).unlink()
    assert contents(synthetic_folder(tmp_path, settings, SilentReporter())) == contents(folder)


def test_of_two_runs_the_first_to_finish_stays(version: int, folder: Path) -> None:
    before = contents(folder)
    write_synthetic(folder, SHORTEST[version], SilentReporter())
    assert contents(folder) == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_foreign_folder_is_left_alone_and_reported(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").touch()
    with pytest.raises(StateError, match=r"cannot be written: .*data"):
        write_synthetic(tmp_path / "data", SHORTEST[2], SilentReporter())
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "thesis.txt"]


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="cannot be written"):
        write_synthetic(tmp_path / "file" / "data", SHORTEST[2], SilentReporter())


@given(st.lists(FRAMES, min_size=1))
def test_formatted_rows_say_what_the_frames_say(frames: list[tuple[int, int, bytes, bool]]) -> None:
    start_us = 1_600_000_000 * SECOND_US
    expected = []
    for time, can_id, data, is_attack in frames:
        digits = f"{can_id:03X}" if can_id <= 0x7FF else f"{can_id:08X}"
        seconds = f"{(start_us + time) // SECOND_US}.{time % SECOND_US:06d}"
        expected.append(f"{seconds},{digits},{data.hex().upper()},{int(is_attack)}\n")
    assert format_rows(as_traffic(frames), start_us).decode() == "".join(expected)
