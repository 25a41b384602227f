"""Splitting time: parts share no frame, phases rescue a part with one class, and test folders stay apart."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.errors import DataError
from can_train_tasks.can.data.dataset import MIN_PHASE_WINDOWS, find_held_out_logs, find_phase_starts, split_rows
from can_train_tasks.can.data.graphs import FlatGraphs, SourceFile, Split
from fakes.random_bus import source_file
from fakes.windows_by_hand import windows_of

Log = tuple[SourceFile, Sequence[int]]
BENIGN_LOG = (source_file(), [0] * 100)


def graphs(*logs: Log, window: int = 10, stride: int = 10) -> FlatGraphs:
    """Windows with the given labels; a split looks at nothing else of them."""
    sizes = [len(labels) for _, labels in logs]
    empty = np.empty((0, 0), dtype=np.float32)
    count = sum(sizes)
    return FlatGraphs(
        node_ptr=np.zeros(count + 1, dtype=np.int64),
        edge_ptr=np.zeros(count + 1, dtype=np.int64),
        node_code=np.empty(0, dtype=np.int32),
        node_features=empty,
        behaviour=empty,
        past=empty,
        past_windows=np.empty(0, dtype=np.int32),
        jumps=np.empty((0, 0), dtype=np.uint16),
        broken_checks=np.empty(0, dtype=np.uint64),
        payload=np.empty(0, dtype=np.int64),
        absent_ptr=np.zeros(count + 1, dtype=np.int64),
        absent_code=np.empty(0, dtype=np.int32),
        absent_silence=np.empty(0, dtype=np.float32),
        absent_payload=np.empty(0, dtype=np.int64),
        edge_index=np.empty((2, 0), dtype=np.int32),
        edge_features=empty,
        label=np.concatenate([np.array(labels, dtype=np.uint8) for _, labels in logs]),
        source=np.repeat(np.arange(len(logs), dtype=np.int32), sizes),
        drive=np.repeat(np.arange(len(logs), dtype=np.int32), sizes),
        first_frame=np.concatenate([np.arange(size) * stride for size in sizes]),
        start_time=np.zeros(count),
        end_time=np.zeros(count),
        digest=np.arange(count, dtype=np.uint64),
        ids=np.empty(0, dtype=np.int64),
        kinds=("benign", "DoS", "fuzzing"),
        sources=tuple(source for source, _ in logs),
        window=window,
    )


def parts_of(split: Split) -> list[np.ndarray]:
    return [split.train, split.validation, *split.test.values()]


def frames_of(flat: FlatGraphs, rows: np.ndarray) -> set[int]:
    return {frame for first in flat.first_frame[rows] for frame in range(first, first + flat.window)}


def test_a_log_without_a_test_part_is_trained_and_validated_on_whole() -> None:
    split, _ = split_rows(graphs(BENIGN_LOG), 0.2, 0.0)
    assert (list(split.train), list(split.validation), split.test) == ([*range(80)], [*range(80, 100)], {})


@pytest.mark.parametrize(
    ("labels", "num_tested"), [([0] * 312, 0), ([0] * 313, 63), ([0] * 15 + [1] * 20 + [0] * 15, 10)]
)
def test_short_logs_without_attacks_are_not_tested_unless_a_share_is_given(labels: list[int], num_tested: int) -> None:
    flat = graphs((source_file(), labels))
    split, notices = split_rows(flat, 0.2, None)
    assert sum(map(len, split.test.values())) == num_tested
    assert any("dataset.test_share=0.2 keeps a test part" in notice for notice in notices) == (num_tested == 0)
    assert split_rows(flat, 0.2, 0.2)[0].test["drive.log"].size > 0


@given(
    runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=6),
    window=st.integers(2, 12),
    stride=st.integers(1, 12),
    shares=st.tuples(st.floats(0.1, 0.5), st.floats(0.1, 0.5)),
)
def test_no_frame_is_in_two_parts(runs: list, window: int, stride: int, shares: tuple[float, float]) -> None:
    labels = [label for label, length in runs for _ in range(length)] + [0] * 150
    flat = graphs((source_file(), labels), window=window, stride=stride)
    parts = parts_of(split_rows(flat, *shares)[0])
    for left, right in combinations([frames_of(flat, rows) for rows in parts], 2):
        assert not left & right
    if stride >= window:
        assert sum(map(len, parts)) == len(flat)


def test_a_log_is_cut_into_training_validation_and_test_in_the_order_of_time() -> None:
    split, notices = split_rows(graphs(BENIGN_LOG), 0.25, 0.2)
    assert split.train.tolist() == list(range(60))
    assert split.validation.tolist() == list(range(60, 80))
    assert split.test["drive.log"].tolist() == list(range(80, 100))
    assert notices == []


def test_overlapping_windows_across_a_cut_are_dropped() -> None:
    split, _ = split_rows(graphs(BENIGN_LOG, window=10, stride=5), 0.25, 0.2)
    assert split.train.tolist() == list(range(59))
    assert split.validation.tolist() == list(range(60, 79))
    assert split.test["drive.log"].tolist() == list(range(80, 100))


def test_training_logs_give_training_and_validation_and_test_logs_stay_in_their_groups() -> None:
    flat = graphs(
        (source_file("train", "train_01"), [0, 1] * 5),
        (source_file("test", "test_01"), [1] * 3),
        (source_file("test", "test_02"), [0] * 2),
        (source_file("test", "test_01"), [0] * 4),
    )
    split, notices = split_rows(flat, 0.2, 0.2)
    assert split.train.tolist() == list(range(8))
    assert split.validation.tolist() == [8, 9]
    assert {group: rows.tolist() for group, rows in split.test.items()} == {
        "test_01": [10, 11, 12, 15, 16, 17, 18],
        "test_02": [13, 14],
    }
    assert notices == []


def test_each_phase_is_cut_where_a_plain_cut_leaves_one_class() -> None:
    labels = [0] * 102 + [1] * 75 + [0] * 38  # the real truck log
    flat = graphs((source_file(), labels))
    split, notices = split_rows(flat, 0.2, 0.2)
    for rows in parts_of(split):
        assert set(flat.label[rows]) == {0, 1}
    assert sum(map(len, parts_of(split))) == len(labels)
    assert split.test["drive.log"].tolist()[:20] == list(range(82, 102))
    assert notices == [
        "data/drive.log: benign and attack phases are cut separately, since a part would have one class only"
    ]


def test_what_is_true_of_several_logs_is_said_once_with_their_number() -> None:
    labels = [1] * 30 + [0] * 70
    logs = [replace(source_file("train", "train_01"), path=f"data/{name}.csv") for name in "abcde"]
    (notice,) = split_rows(graphs(*((log, labels) for log in logs)), 0.2, 0.2)[1]
    assert notice.startswith("Each of 5 logs (a.csv, b.csv, c.csv and 2 more): benign and attack phases are cut")


def test_phases_do_not_share_frames_where_windows_overlap() -> None:
    flat = graphs((source_file(), [0] * 102 + [1] * 75 + [0] * 38), window=10, stride=3)
    parts = [frames_of(flat, rows) for rows in parts_of(split_rows(flat, 0.2, 0.2)[0])]
    assert all(not left & right for left, right in combinations(parts, 2))


def test_a_log_whose_attacks_cannot_be_spread_is_cut_plainly_and_named() -> None:
    split, notices = split_rows(graphs((source_file(), [1] * 5 + [0] * 95)), 0.25, 0.2)
    assert split.train.tolist() == list(range(60))
    assert notices == ["data/drive.log: its attacks lie so that one class is missing from validation and test"]


@pytest.mark.parametrize(
    ("runs", "starts"),
    [
        ([(0, 50)], [0]),
        ([(0, 50), (1, 50)], [0, 50]),
        ([(0, 50), (1, MIN_PHASE_WINDOWS - 1), (0, 50)], [0]),
        ([(0, 50), (1, MIN_PHASE_WINDOWS), (0, 50)], [0, 50, 50 + MIN_PHASE_WINDOWS]),
        ([(1, 3), (0, 50), (1, 3), (1, 60)], [0, 53]),
        ([(0, 2), (1, 2), (0, 2)], [0]),
    ],
)
def test_short_runs_join_the_phase_beside_them(runs: list[tuple[int, int]], starts: list[int]) -> None:
    is_attack = np.array([attack for attack, length in runs for _ in range(length)], dtype=np.bool_)
    assert find_phase_starts(is_attack).tolist() == starts


@pytest.mark.parametrize(
    ("frames", "remedy"),
    [(200, "Use longer logs, or train with smaller windows: --set dataset.window=20."), (12, "Use longer logs.")],
)
def test_a_log_too_short_for_three_parts_is_refused_with_a_window_that_would_do(frames: int, remedy: str) -> None:
    with pytest.raises(DataError, match=r"no window for validation, test \(drive.log\)") as error:
        split_rows(graphs((replace(source_file(), frames=frames), [0, 0])), 0.2, 0.2)
    assert str(error.value).endswith(remedy)


def test_a_short_training_log_is_no_error_beside_a_long_one() -> None:
    short, long = replace(source_file("train"), path="short"), replace(source_file("train"), path="long")
    split, _ = split_rows(graphs((short, [0]), (long, [0] * 10)), 0.2, 0.2)
    assert split.validation.tolist() == [9, 10]


def drives(*ids: Sequence[int], attack: Sequence[int] = ()) -> FlatGraphs:
    """A benign log of ten windows for each list of CAN IDs; those in `attack` hold one."""
    sources = tuple(replace(source_file(), path=f"{number}.log", group=f"{number}.log") for number in range(len(ids)))
    logs = np.repeat(np.arange(len(ids)), 10)
    label = [int(log in attack and place == 5) for log in range(len(ids)) for place in range(10)]
    flat = windows_of([list(ids[log]) * 2 for log in logs], label=label, source=logs.tolist(), sources=sources)
    return replace(flat, first_frame=np.tile(np.arange(10) * flat.window, len(ids)))


def test_of_several_benign_drives_some_are_kept_whole_for_validation() -> None:
    flat = drives(*[[1, 2, 3]] * 10)
    split, notices = split_rows(flat, 0.2, 0.2)
    assert find_held_out_logs(flat, 0.2, range(len(flat.sources))) == {8, 9}
    assert set(flat.source[split.train]) == set(range(8))
    assert np.bincount(flat.source[split.validation])[8:].tolist() == [8, 8]
    assert all(len(rows) == 2 for rows in split.test.values())
    assert "kept whole for validation" in " ".join(notices)


@pytest.mark.parametrize(
    ("flat", "held_out"),
    [
        (drives([1, 2], [1, 2]), set()),
        (drives([1, 2], [1, 2], [1, 2]), {2}),
        (drives([1, 2], [1, 2], [1, 9]), {1}),
        (drives([1, 2], [3, 4], [5, 6]), set()),
        (drives([1, 2], [1, 2], [1, 2], attack=[2]), set()),
        (drives([1, 2], [1, 2], [1, 2], [1, 2], attack=[3]), {2}),
    ],
)
def test_a_drive_is_kept_whole_where_others_have_its_ids_and_there_are_three(flat: FlatGraphs, held_out: set) -> None:
    assert find_held_out_logs(flat, 0.2, range(len(flat.sources))) == held_out
