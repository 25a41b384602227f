from dataclasses import replace

import numpy as np
import pytest

from can_train.fit.features import members
from can_train.tasks.can.data.graphs import NODE_FEATURES
from can_train.tasks.can.evaluation.baselines import FRAMES_PER_CHUNK, window_features
from fakes.windows_by_hand import windows_of

FLAT = windows_of([[1, 2, 1, 1], [5, 5, 5, 5], [1, 2, 3, 4], [2, 3, 2, 3]])


def test_members_are_the_nodes_of_the_chosen_windows_in_their_order():
    found = members(FLAT.node_ptr, np.array([2, 0]))
    assert found.positions.tolist() == [3, 4, 5, 6, 0, 1]
    assert found.starts.tolist() == [0, 4]
    assert found.sizes.tolist() == [4, 2]


def test_each_window_is_summarised_from_its_own_nodes():
    F, count = len(NODE_FEATURES), NODE_FEATURES.index("count")
    table = window_features(FLAT, np.array([2, 0]))
    assert table[:, [count + part * F for part in range(4)]].tolist() == [[1, 0, 1, 1], [2, 1, 1, 3]]


def test_the_last_columns_are_nodes_edges_and_seconds():
    table = window_features(FLAT, np.array([0, 1, 2]))
    assert table[:, -3:].tolist() == [[2, 3, 1], [1, 1, 1], [4, 3, 1]]


def test_the_edges_are_summarised_like_the_nodes():
    FLAT_EDGES = windows_of([[1, 2, 1, 1]])
    FLAT_EDGES.edge_features[:, -1] = [1, 2, 6]
    F = FLAT_EDGES.edge_features.shape[1]
    node_columns = 4 * len(NODE_FEATURES)
    last = window_features(FLAT_EDGES, np.array([0]))[0, [node_columns + (part + 1) * F - 1 for part in range(4)]]
    assert last == pytest.approx([3, np.std([1, 2, 6]), 1, 6])


def test_a_shift_in_time_changes_nothing():
    later = windows_of([[1, 2, 1, 1]], start_time=[1e9])
    assert window_features(later, np.array([0])).tolist() == window_features(FLAT, np.array([0])).tolist()


def test_working_window_by_window_changes_nothing():
    rows = np.array([3, 1, 2, 0])
    one_at_a_time = replace(FLAT, window=FRAMES_PER_CHUNK)
    assert np.array_equal(window_features(one_at_a_time, rows), window_features(FLAT, rows))


def test_no_windows_make_an_empty_table():
    assert window_features(FLAT, np.empty(0, np.int64)).shape == (0, 4 * (10 + 11) + 3)
