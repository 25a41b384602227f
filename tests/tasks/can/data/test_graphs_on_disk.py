"""The flat cache: what is written comes back, what is damaged is found, and nothing half-written is ever seen."""

import os
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from can_train.errors import StateError
from can_train.io.arrays import FolderDamageError, discard_folder
from can_train_tasks.can.data.graphs import FlatGraphs, read_graphs, writing_graphs
from fakes.random_bus import KINDS, cached_graphs, random_blocks, source_file

LOGS = [random_blocks(7, seed=1), random_blocks(5, seed=2) + random_blocks(4, seed=3)]


def assert_same(left: FlatGraphs, right: FlatGraphs) -> None:
    for field in fields(FlatGraphs):
        np.testing.assert_array_equal(getattr(left, field.name), getattr(right, field.name), err_msg=field.name)


def test_a_cache_holds_the_graphs_of_all_blocks_in_order(tmp_path: Path) -> None:
    flat = cached_graphs(tmp_path / "key", LOGS)
    blocks = [block for log in LOGS for block in log]
    for name in ("node_features", "edge_features", "label", "first_frame", "start_time", "end_time"):
        np.testing.assert_array_equal(getattr(flat, name), np.concatenate([getattr(block, name) for block in blocks]))
    np.testing.assert_array_equal(flat.edge_index, np.concatenate([block.edge_index for block in blocks], axis=1))
    np.testing.assert_array_equal(flat.num_nodes, np.concatenate([block.num_nodes for block in blocks]))
    np.testing.assert_array_equal(flat.num_edges, np.concatenate([block.num_edges for block in blocks]))
    np.testing.assert_array_equal(flat.source, [0] * 7 + [1] * 9)


def test_node_codes_point_at_the_ascending_distinct_ids(tmp_path: Path) -> None:
    flat = cached_graphs(tmp_path / "key", LOGS)
    can_id = np.concatenate([block.can_id for log in LOGS for block in log])
    np.testing.assert_array_equal(flat.ids, np.unique(can_id))
    np.testing.assert_array_equal(flat.ids[flat.node_code], can_id)


def test_a_cache_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = cached_graphs(tmp_path / "key", LOGS)
    read = read_graphs(tmp_path / "key")
    assert_same(read, written)
    assert (read.kinds, read.window) == (KINDS, 20)
    assert read.sources == tuple(replace(source_file(), path=f"data/{index}.log") for index in range(2))
    assert read.notices == ("0 rows left out", "1 rows left out")


def test_every_array_is_a_file_that_numpy_loads(tmp_path: Path) -> None:
    flat = cached_graphs(tmp_path / "key", LOGS)
    np.testing.assert_array_equal(np.load(tmp_path / "key/edge_index.npy"), flat.edge_index.T)
    np.testing.assert_array_equal(np.load(tmp_path / "key/ids.npy"), flat.ids)


def test_changing_a_mapped_array_leaves_the_file_alone(tmp_path: Path) -> None:
    flat = cached_graphs(tmp_path / "key", LOGS)
    torch.from_numpy(flat.node_features).zero_()
    assert read_graphs(tmp_path / "key").node_features.any()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "key"
    if not folder.exists():
        cached_graphs(folder, LOGS)
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    sound = file.read_bytes()
    damaged = bytearray(sound)
    damaged[data.draw(st.integers(0, len(sound) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(damaged)
    with pytest.raises(FolderDamageError, match=r"."):
        read_graphs(folder)
    file.write_bytes(sound)


@pytest.mark.parametrize("name", ["meta.json", "label.npy", "edge_features.npy"])
def test_a_truncated_or_missing_file_is_noticed(name: str, tmp_path: Path) -> None:
    cached_graphs(tmp_path / "key", LOGS)
    file = tmp_path / "key" / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FolderDamageError, match=r"bytes instead of|Expecting"):
        read_graphs(tmp_path / "key")
    file.unlink()
    with pytest.raises(FolderDamageError, match="No such file"):
        read_graphs(tmp_path / "key")


def test_a_writer_that_does_not_finish_leaves_nothing(tmp_path: Path) -> None:
    with writing_graphs(tmp_path / "key", 20) as writer:
        writer.append(LOGS[0][0], KINDS)
    assert not list(tmp_path.iterdir())


def test_two_writers_of_the_same_cache_both_succeed(tmp_path: Path) -> None:
    with writing_graphs(tmp_path / "key", 20) as slow:
        for block in LOGS[0]:
            slow.append(block, KINDS)
        slow.end_log(replace(source_file(), path="data/0.log"), ["0 rows left out"])
        fast = cached_graphs(tmp_path / "key", [LOGS[0]])
        late = slow.finish()
    assert_same(late, fast)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_discarded_cache_stays_readable_where_it_is_mapped(tmp_path: Path) -> None:
    flat = cached_graphs(tmp_path / "key", LOGS)
    discard_folder(tmp_path / "key")
    discard_folder(tmp_path / "key")
    assert not list(tmp_path.iterdir())
    assert flat.node_features.shape[0] == len(flat.node_code)
    assert flat.node_features.any()


def test_leftovers_of_killed_processes_are_removed_once_they_are_old(tmp_path: Path) -> None:
    for name, age_hours in (("old", 48), ("young", 1)):
        leftover = tmp_path / f".{name}.tmp"
        leftover.mkdir()
        for path in (leftover / "label.npy", leftover):
            path.touch()
            os.utime(path, (time.time() - age_hours * 3600,) * 2)
    cached_graphs(tmp_path / "key", LOGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".young.tmp", "key"]


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="cannot be written"), writing_graphs(tmp_path / "file/key", 20):
        pass
