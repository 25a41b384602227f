"""One line with lists of values stands for every combination of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.config.compose import MOST_RUNS, RunRequest, expand, resolve
from can_train.errors import ConfigError


def swept(*sets: str) -> list[Sequence[str]]:
    return [request.sets for request in expand([RunRequest(model="gat", dataset="synthetic", sets=sets)])]


def test_a_range_is_swept_without_its_end() -> None:
    assert swept("training.seed=range(0,3)") == [("training.seed=0",), ("training.seed=1",), ("training.seed=2",)]


def test_the_last_setting_changes_fastest() -> None:
    assert swept("training.seed=1,2", "training.lr=0.1,0.01") == [
        ("training.seed=1", "training.lr=0.1"),
        ("training.seed=1", "training.lr=0.01"),
        ("training.seed=2", "training.lr=0.1"),
        ("training.seed=2", "training.lr=0.01"),
    ]


@pytest.mark.parametrize(
    "text", ["training.lr=0.1", "model.hidden=[1,2]", 'dataset.path="a,b"', "no equals sign", "a=("]
)
def test_what_is_no_sweep_stays_as_it_is(text: str) -> None:
    assert swept(text) == [(text,)]


def test_a_quoted_comma_is_no_end_of_a_value() -> None:
    assert swept('cluster.partition="a,b",c') == [('cluster.partition="a,b"',), ("cluster.partition=c",)]


def test_values_without_number_are_refused() -> None:
    with pytest.raises(ConfigError, match="countable"):
        swept("training.lr=interval(0,1)")


def test_a_slip_does_not_start_a_million_runs() -> None:
    with pytest.raises(ConfigError, match=f"at most {MOST_RUNS}"):
        swept("training.seed=range(0,1000)", "training.lr=0.1,0.2")


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one value"):
        swept("training.seed=range(3,3)")


def test_each_run_of_a_sweep_is_composed_by_itself() -> None:
    requests = expand([RunRequest(model="gat", dataset="synthetic", sets=("training.seed=range(0,2)",))])
    assert [resolve(request).training.seed for request in requests] == [0, 1]


@given(st.lists(st.integers(0, 99), min_size=2, max_size=5), st.lists(st.integers(0, 9), min_size=2, max_size=3))
def test_every_combination_occurs_once_for_each_time_it_was_asked_for(first: list[int], second: list[int]) -> None:
    def listed(values: list[int]) -> str:
        return ",".join(map(str, values))

    found = swept(f"training.seed={listed(first)}", f"training.epochs={listed(second)}")
    assert found == [(f"training.seed={a}", f"training.epochs={b}") for a in first for b in second]
