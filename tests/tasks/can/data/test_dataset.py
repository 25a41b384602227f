"""Preparing a data set: from logs on disk to a split, with the real reader, and from the cache the second time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from can_train.errors import DataError
from can_train.reporter import SilentReporter, Stage
from can_train_tasks.can.data.dataset import CanData, cache_key, prepare
from can_train_tasks.can.data.graphs import FlatGraphs, GraphBuilder
from can_train_tasks.can.data.layout import LOG, TEST, TRAIN, LogFile, drop_duplicates, hash_logs
from can_train_tasks.can.settings import CanDatasetSettings, ColumnSettings
from fakes.random_bus import random_frames, write_log

SETTINGS = CanDatasetSettings(name="mine", window=20, stride=20)
REAL_LOG = Path(__file__).parents[4] / "../shared/data/can/labeled_TSC1.csv"


class Recorder(SilentReporter):
    """Remembers what it was told, and does something when a stage begins."""

    def __init__(self, on_stage: Callable[[str], object] = str) -> None:
        self.notices: list[str] = []
        self.stages: list[str] = []
        self._on_stage = on_stage

    def notice(self, text: str) -> None:
        self.notices.append(text)

    @contextmanager
    def stage(self, title: str, *, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Stage]:
        self.stages.append(title)
        self._on_stage(title)
        with super().stage(title, total=total, unit=unit) as stage:
            yield stage


def log_file(path: Path, role: str = LOG, group: str = "drive.csv", kind: str = "DoS", seed: int = 0) -> LogFile:
    return LogFile(path=write_log(path, random_frames(1_010, seed)), role=role, group=group, kind=kind)


def layout(folder: Path) -> list[LogFile]:
    return [
        log_file(folder / "train_01" / "DoS-1.csv", TRAIN, "train_01", "DoS", seed=1),
        log_file(folder / "test_01" / "fuzzing-1.csv", TEST, "test_01", "fuzzing", seed=2),
        log_file(folder / "test_02" / "DoS-2.csv", TEST, "test_02", "DoS", seed=3),
    ]


def prepared(logs: list[LogFile], folder: Path, settings: CanDatasetSettings = SETTINGS) -> tuple[CanData, Recorder]:
    recorder = Recorder()
    return prepare(settings, logs, folder / "cache", recorder), recorder


def assert_same_graphs(left: FlatGraphs, right: FlatGraphs) -> None:
    for field in fields(FlatGraphs):
        np.testing.assert_array_equal(getattr(left, field.name), getattr(right, field.name), err_msg=field.name)


def test_a_log_becomes_the_graphs_of_its_frames(tmp_path: Path) -> None:
    data, _ = prepared([log_file(tmp_path / "drive.csv")], tmp_path)
    frames = random_frames(1_010)
    (block,) = GraphBuilder(20, 20).feed(replace(frames, can_id=frames.can_id & 0x7FF))
    np.testing.assert_array_equal(data.flat.ids[data.flat.node_code], block.can_id)
    np.testing.assert_array_equal(data.flat.node_features, block.node_features)
    np.testing.assert_array_equal(data.flat.edge_index, block.edge_index)
    np.testing.assert_array_equal(data.flat.label, block.label)
    (source,) = data.flat.sources
    assert (source.frames, source.labelled, source.role) == (1_010, True, LOG)
    assert len(data.split.test["drive.csv"]) == 10


def test_kinds_of_several_logs_share_one_table(tmp_path: Path) -> None:
    data, _ = prepared(layout(tmp_path), tmp_path)
    flat = data.flat
    assert flat.kinds == ("benign", "DoS", "fuzzing")
    assert [set(flat.label[flat.source == index]) for index in range(3)] == [{0, 1}, {0, 2}, {0, 1}]
    assert {group: len(rows) for group, rows in data.split.test.items()} == {"test_01": 50, "test_02": 50}


def test_the_second_time_the_graphs_come_from_the_cache(tmp_path: Path) -> None:
    first, _ = prepared(layout(tmp_path), tmp_path)
    second, recorder = prepared(layout(tmp_path), tmp_path)
    assert_same_graphs(first.flat, second.flat)
    assert recorder.stages == ["Checking logs"]


def test_logs_that_moved_are_found_in_the_cache_and_named_by_their_new_place(tmp_path: Path) -> None:
    prepared(layout(tmp_path / "old"), tmp_path)
    data, recorder = prepared(layout(tmp_path / "new"), tmp_path)
    assert recorder.stages == ["Checking logs"]
    assert data.flat.sources[0].path == str(tmp_path / "new/train_01/DoS-1.csv")


def test_what_the_reader_noticed_is_said_from_the_cache_too(tmp_path: Path) -> None:
    log = log_file(tmp_path / "drive.csv")
    log.path.write_text(log.path.read_text().replace("\n0.1", "\nx0.1", 1))
    for _ in range(2):
        data, recorder = prepared([log], tmp_path)
        assert "drive.csv: 1 of 1,010 rows is malformed" in data.notices[0]
        assert recorder.notices == list(data.notices)


@pytest.mark.parametrize("name", ["meta.json", "edge_index.npy"])
def test_a_damaged_cache_is_said_and_made_again(name: str, tmp_path: Path) -> None:
    logs = layout(tmp_path)
    sound, _ = prepared(logs, tmp_path / "elsewhere")
    prepared(logs, tmp_path)
    (folder,) = (tmp_path / "cache").iterdir()
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    for expected in (1, 0):
        data, recorder = prepared(logs, tmp_path)
        assert_same_graphs(data.flat, sound.flat)
        assert len([notice for notice in recorder.notices if "are damaged and are made again" in notice]) == expected


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ({"window": 30}, True),
        ({"stride": 10}, True),
        ({"format": "can_train_and_test"}, True),
        ({"columns": ColumnSettings(label="attack")}, True),
        ({"benign_values": ["0"]}, True),
        ({"max_malformed": 0.5}, True),
        ({"name": "other", "path": "elsewhere", "identity": False, "validation_share": 0.3}, False),
    ],
)
def test_settings_that_change_graphs_and_no_others_have_a_cache_of_their_own(
    change: dict, is_another: bool, tmp_path: Path
) -> None:
    logs = hash_logs(layout(tmp_path), SilentReporter())
    assert (cache_key(SETTINGS, logs) != cache_key(replace(SETTINGS, **change), logs)) == is_another


def test_a_log_with_other_content_has_a_cache_of_its_own(tmp_path: Path) -> None:
    before = hash_logs([log_file(tmp_path / "drive.csv")], SilentReporter())
    after = hash_logs([log_file(tmp_path / "drive.csv", seed=1)], SilentReporter())
    assert cache_key(SETTINGS, before) != cache_key(SETTINGS, after)


def test_a_log_shorter_than_a_window_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = replace(SETTINGS, window=2_000)
    with pytest.raises(DataError, match=r"has 1,010 frames, a window needs 2,000(.|\n)*--set dataset.window"):
        prepared([log_file(tmp_path / "drive.csv")], tmp_path, settings)
    assert not list((tmp_path / "cache").iterdir())


def test_a_log_whose_drives_are_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    frames = random_frames(1_010)
    paused = replace(frames, timestamp=frames.timestamp + 60.0 * (np.arange(1_010) >= 600))
    path = write_log(tmp_path / "drive.csv", paused)
    with pytest.raises(DataError, match="has 1,010 frames, a window needs 800 without a pause of 10 s"):
        prepared([LogFile(path=path, role=TEST, group="test_01", kind="DoS")], tmp_path, replace(SETTINGS, window=800))


def test_attack_frames_before_a_pause_are_told_where_they_fill_no_window(tmp_path: Path) -> None:
    frames = random_frames(1_010)
    frames.label[:] = np.arange(1_010) == 604
    paused = replace(frames, timestamp=frames.timestamp + 60.0 * (np.arange(1_010) >= 605))
    path = write_log(tmp_path / "drive.csv", paused)
    data, _ = prepared([LogFile(path=path, role=TEST, group="test_01", kind="DoS")], tmp_path, SETTINGS)
    told = "10 frames before pauses and at the end of the log fill no window, and with them 1 attack frame is left out"
    assert f"drive.csv: {told}" in data.notices
    assert data.flat.drive.tolist() == [0] * 30 + [1] * 20


@pytest.mark.parametrize(("window", "stride", "lost"), [(20, 20, 10), (20, 7, 3), (300, 300, 110)])
def test_attack_frames_behind_the_last_window_are_told(window: int, stride: int, lost: int, tmp_path: Path) -> None:
    frames = random_frames(1_010)
    frames.label[:] = np.arange(1_010) >= 1_008
    path = write_log(tmp_path / "drive.csv", frames)
    settings = replace(SETTINGS, window=window, stride=stride)
    data, _ = prepared([LogFile(path=path, role=TEST, group="test_01", kind="DoS")], tmp_path, settings)
    assert data.notices == (
        f"drive.csv: the last {lost} frames of the log fill no window, and with them 2 attack frames are left out",
    )


@pytest.mark.parametrize("content", ["", "file,attack,frames\na,1,2\n", "some words\n" * 9])
def test_a_file_among_logs_that_is_no_log_is_to_lie_elsewhere(content: str, tmp_path: Path) -> None:
    logs = [log_file(tmp_path / "logs" / "drive.csv"), log_file(tmp_path / "logs" / "summary.csv", group="summary.csv")]
    logs[1].path.write_text(content)
    with pytest.raises(DataError) as error:
        prepared(logs, tmp_path)
    assert error.value.remedy.endswith(". A file that is no log must lie outside of the folder of logs")
    with pytest.raises(DataError) as error:
        prepared(logs[1:], tmp_path)
    assert "must lie outside" not in error.value.remedy


def test_a_log_that_changes_after_it_was_hashed_is_refused(tmp_path: Path) -> None:
    log = log_file(tmp_path / "drive.csv")

    def grow(stage: str) -> None:
        if stage == "Reading logs":
            log.path.write_text(log.path.read_text() + "9.0,123,,0\n")

    with pytest.raises(DataError, match="changed while it was read"):
        prepare(SETTINGS, [log], tmp_path / "cache", Recorder(grow))
    assert not list((tmp_path / "cache").iterdir())


def test_a_missing_log_is_a_clear_error(tmp_path: Path) -> None:
    log = LogFile(path=tmp_path / "gone.csv", role=LOG, group="gone.csv", kind="attack")
    with pytest.raises(DataError, match=r"gone.csv: No such file"):
        prepared([log], tmp_path)


def test_copies_of_training_logs_are_not_judged(tmp_path: Path) -> None:
    logs = [*layout(tmp_path), log_file(tmp_path / "test_02" / "copy.csv", TEST, "test_02", seed=1)]
    data, recorder = prepared(logs, tmp_path)
    assert len(data.flat.sources) == 3
    assert recorder.notices == ["Left out of testing, since identical to training logs: test_02/copy.csv"]


def test_a_test_folder_of_copies_only_is_named(tmp_path: Path) -> None:
    logs = [*layout(tmp_path), log_file(tmp_path / "test_03" / "copy.csv", TEST, "test_03", seed=1)]
    assert prepared(logs, tmp_path)[0].notices[-1] == "Nothing is left to test of test_03"


def test_copies_stay_in_two_test_folders_but_not_in_one(tmp_path: Path) -> None:
    logs = [
        log_file(tmp_path / f"{group}/{name}", TEST, group)
        for group, name in (("test_01", "a.csv"), ("test_02", "a.csv"), ("test_01", "b.csv"))
    ]
    kept, notices = drop_duplicates(hash_logs(logs, SilentReporter()))
    assert [hashed.log for hashed in kept] == logs[:2]
    assert notices == ["Left out as copies of other logs: test_01/b.csv"]


def test_a_training_log_is_read_once(tmp_path: Path) -> None:
    logs = [log_file(tmp_path / name, TRAIN, "train_01") for name in ("a.csv", "b.csv")]
    kept, notices = drop_duplicates(hash_logs(logs, SilentReporter()))
    assert [hashed.log for hashed in kept] == logs[:1]
    assert "b.csv" in notices[0]


@pytest.mark.skipif(not REAL_LOG.exists(), reason="the shared real log is not here")
def test_the_real_labelled_log_has_both_classes_in_every_part(tmp_path: Path) -> None:
    log = LogFile(path=REAL_LOG, role=LOG, group=REAL_LOG.name, kind="attack")
    data, _ = prepared([log], tmp_path, replace(SETTINGS, window=100, stride=100))
    split = data.split
    for rows in (split.train, split.validation, split.test[REAL_LOG.name]):
        assert set(data.flat.label[rows]) == {0, 1}
    assert "phases are cut separately" in data.notices[-1]


def test_a_log_with_too_few_frames_is_refused_with_the_rows_that_were_left_out(tmp_path: Path) -> None:
    rows = [f"({i / 1000:.6f}) can{i % 2} 12A#{i:04X}" for i in range(30)]
    rows += ["(1.0) can0 20000080#0000000000000000"] * 45 + ["(1.0) can0 12A#0"]
    path = tmp_path / "drive.log"
    path.write_text("\n".join(rows) + "\n")
    log = LogFile(path=path, role=LOG, group="drive.log", kind="attack")
    settings = replace(SETTINGS, channel="can0", max_malformed=0.1)
    with pytest.raises(DataError, match="a window needs 20") as caught:
        prepare(settings, [log], tmp_path / "cache", SilentReporter())
    assert str(caught.value).startswith(
        f"{path} has 15 frames, a window needs 20; left out: 45 error frames, 15 frames not of can0, "
        "1 malformed row (1 × the payload is not made of whole hexadecimal bytes)"
    )
