"""Frames that were seen before are recognised in any file, and never judged as test."""

import gzip
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import DataError
from can_train.reporter import SilentReporter
from can_train_tasks.can.data.dataset import CanData, prepare
from can_train_tasks.can.data.digests import LogDigest, known_windows, window_digests
from can_train_tasks.can.data.graphs import Frames, GraphBuilder
from can_train_tasks.can.data.layout import LOG, TEST, TRAIN, LogFile
from can_train_tasks.can.settings import CanDatasetSettings
from fakes.random_bus import random_frames, write_log

SETTINGS = CanDatasetSettings(name="mine", window=20, stride=20)


def log_digest(frames: Frames, parts: int = 1) -> str:
    digest = LogDigest()
    for begin in range(0, len(frames), -(-len(frames) // parts)):
        digest.update(frames[begin : begin + -(-len(frames) // parts)])
    return digest.hexdigest()


def widened(frames: Frames) -> Frames:
    return replace(frames, payload=np.pad(frames.payload, ((0, 0), (0, 56))))


def rounded(frames: Frames) -> Frames:
    return replace(frames, timestamp=frames.timestamp.round(6))


@settings(max_examples=20)
@given(seed=st.integers(0, 99), parts=st.integers(1, 9), start_s=st.sampled_from([-7.0, 1.5, 1_700_000_000.0]))
def test_neither_blocks_nor_the_clocks_start_nor_wider_payloads_change_a_digest(
    seed: int, parts: int, start_s: float
) -> None:
    frames = rounded(random_frames(200, seed))
    later = replace(frames, timestamp=frames.timestamp + start_s)
    assert log_digest(frames) == log_digest(widened(later), parts)
    np.testing.assert_array_equal(window_digests(frames, 20, 7), window_digests(widened(later), 20, 7))


def changed(frames: Frames, name: str, row: int) -> Frames:
    array = getattr(frames, name).copy()
    array[row] = array[row] + np.asarray(1e-6 if name == "timestamp" else 1).astype(array.dtype)
    return replace(frames, **{name: array})


@given(name=st.sampled_from(["timestamp", "can_id", "length", "payload"]), row=st.integers(1, 59))
def test_any_change_of_a_frame_changes_the_digests_of_its_window_and_its_log(name: str, row: int) -> None:
    frames = rounded(random_frames(60))
    other = changed(frames, name, row)
    assert log_digest(frames) != log_digest(other)
    differ = window_digests(frames, 20, 20) != window_digests(other, 20, 20)
    # The time of a window's first frame is that of all others, too.
    assert np.flatnonzero(differ).tolist() == [row // 20]


def test_frames_in_another_order_have_another_digest() -> None:
    frames = replace(random_frames(20), timestamp=np.zeros(20))
    swapped = np.r_[1, 0, 2:20]
    other = replace(frames, can_id=frames.can_id[swapped], payload=frames.payload[swapped])
    assert window_digests(frames, 20, 20) != window_digests(other, 20, 20)


def test_the_digest_of_a_window_does_not_depend_on_the_frames_around_it() -> None:
    frames = random_frames(2_000)
    digests = np.concatenate([block.digest for block in GraphBuilder(20, 20).feed(frames)])
    assert digests[37] == window_digests(frames[740:760], 20, 20)[0]
    assert len(np.unique(digests)) == 100


def drive(path: Path, seed: int, role: str = TRAIN, frames: int = 1_000) -> LogFile:
    log = write_log(path, random_frames(frames, seed))
    return LogFile(path=log, role=role, group=path.name if role == LOG else path.parent.name, kind="DoS")


def copy(log: LogFile, path: Path, how: str) -> LogFile:
    """Writes the same frames in another way, into the test folder of `path`."""
    path.parent.mkdir(exist_ok=True)
    content = log.path.read_bytes()
    if how == "crlf":
        content = content.replace(b"\n", b"\r\n")
    if how == "candump":
        rows = [row.split(",") for row in content.decode().splitlines()[1:]]
        content = "".join(f"({1e9 + float(t):.6f}) can0 {i}#{data}\n" for t, i, data, _ in rows).encode()
    path.write_bytes({"gz": gzip.compress, "xz": lzma.compress}.get(how, bytes)(content))
    return replace(log, path=path, role=TEST, group=path.parent.name)


def prepared(logs: list[LogFile], folder: Path) -> CanData:
    return prepare(SETTINGS, logs, folder / "cache", SilentReporter())


@pytest.mark.parametrize("how", ["gz", "xz", "crlf", "candump"])
def test_a_copy_of_a_training_log_is_not_judged_however_it_is_written(how: str, tmp_path: Path) -> None:
    log = drive(tmp_path / "train_01" / "a.csv", seed=1)
    other = drive(tmp_path / "test_01" / "b.csv", seed=2, role=TEST)
    data = prepared([log, other, copy(log, tmp_path / "test_02" / "copy.csv", how)], tmp_path)
    assert list(data.split.test) == ["test_01"]
    assert len(data.split.test["test_01"]) == 50
    assert data.notices == (
        "Left out of testing, since identical to training logs: test_02/copy.csv",
        "Nothing is left to test of test_02",
    )


def test_two_copies_of_a_drive_in_a_folder_are_one_log(tmp_path: Path) -> None:
    log = drive(tmp_path / "logs" / "a.csv", seed=1, role=LOG)
    twin = replace(copy(log, tmp_path / "logs" / "b.csv.gz", "gz"), role=LOG, group="b.csv.gz")
    data = prepared([log, twin], tmp_path)
    assert list(data.split.test) == ["a.csv"]
    assert len(data.split.train) == 32
    assert data.notices == ("Left out as copies of other logs: logs/b.csv.gz",)


@pytest.mark.parametrize("names", [("a.log", "b.csv"), ("b.log", "a.csv")], ids=" ".join)
def test_of_two_copies_the_one_whose_labels_mark_attacks_is_taken(names: tuple[str, str], tmp_path: Path) -> None:
    bare, labelled = names
    log = drive(tmp_path / "logs" / labelled, seed=1, role=LOG)
    twin = replace(copy(log, tmp_path / "logs" / bare, "candump"), role=LOG, group=bare)
    data = prepared(sorted([log, twin], key=lambda each: each.path), tmp_path)
    assert list(data.split.test) == [labelled]
    assert data.flat.label[data.split.train].any()
    attacks = int((data.flat.label > 0).sum())
    taken = f"{labelled} was taken, whose labels mark {attacks} attack windows; {bare} 0"
    assert data.notices == (
        f"Left out as copies of other logs: logs/{bare}",
        f"Copies of one recording have different labels: {taken}",
    )


def test_windows_that_occur_in_training_are_counted_and_left_out(tmp_path: Path) -> None:
    log = drive(tmp_path / "train_01" / "a.csv", seed=1)
    other = drive(tmp_path / "test_01" / "b.csv", seed=2, role=TEST)
    head, *rows = log.path.read_text().splitlines(keepends=True)
    own = other.path.read_text().splitlines(keepends=True)[1:]
    # Ten windows from the middle of the training log, a second later, behind thirty of its own.
    moved = [f"{float(row.partition(',')[0]) + 1:.6f},{row.partition(',')[2]}" for row in rows[400:600]]
    other.path.write_text(head + "".join([*own[:600], *moved]))
    data = prepared([log, other], tmp_path)
    assert len(data.split.test["test_01"]) == 30
    assert data.notices == ("10 of 40 test windows occur in training and are left out: test_01 (10)",)


def test_a_data_set_whose_tests_all_occur_in_training_is_refused(tmp_path: Path) -> None:
    log = drive(tmp_path / "train_01" / "a.csv", seed=1)
    part = copy(log, tmp_path / "test_01" / "part.csv", "plain")
    part.path.write_text("".join(part.path.read_text().splitlines(keepends=True)[:401]))
    with pytest.raises(DataError, match=r"20 of 20 test windows occur in training"):
        prepared([log, part], tmp_path)


def test_a_bus_that_repeats_itself_is_judged_with_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "drive.log"
    path.write_text("".join(f"({i / 1000:.6f}) can0 {0x100 + i % 5:03X}#00\n" for i in range(1000)))
    logs = [LogFile(path=path, role=LOG, group="drive.log", kind="attack")]
    data = prepare(replace(SETTINGS, test_share=0.2), logs, tmp_path / "cache", SilentReporter())
    assert len(data.split.test["drive.log"]) == 10
    assert "all 10 test windows occur in training, so its figures are too good" in data.notices[-1]


@given(shift=st.integers(0, 19))
@settings(max_examples=10)
def test_windows_of_the_same_log_that_begin_elsewhere_are_known_by_their_frames(
    shift: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    log = drive(folder / "drive.csv", seed=1, role=LOG)
    trained = prepared([log], folder)
    again = prepare(replace(SETTINGS, stride=shift + 1), [replace(log, role=TEST)], folder / "other", SilentReporter())
    known_rows = np.concatenate([trained.split.train, trained.split.validation])
    rows = again.split.test["drive.csv"]
    known = known_windows(again.flat, rows, trained.flat, known_rows)
    # Four fifths of the drive were trained on.
    np.testing.assert_array_equal(known, again.flat.first_frame[rows] < 800)


def test_blocks_with_can_fd_frames_make_the_same_graphs_of_the_first_eight_bytes() -> None:
    frames = random_frames(300)
    (whole,) = GraphBuilder(20, 20).feed(frames)
    builder = GraphBuilder(20, 20)
    parts = [frames[:130], widened(frames[130:210]), frames[210:]]
    blocks = [block for part in parts for block in builder.feed(part)]
    for name in ("node_features", "edge_features", "can_id", "digest"):
        np.testing.assert_array_equal(np.concatenate([getattr(block, name) for block in blocks]), getattr(whole, name))
