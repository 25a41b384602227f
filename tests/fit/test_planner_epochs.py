from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.planner import Epochs

ROWS = np.arange(100, 200)


def epochs(**changed: Any) -> Epochs:
    sizes = changed.pop("main_feature", np.ones(len(ROWS)))
    rows = changed.pop("rows", lambda epoch: ROWS)
    plain = {"seed": 0, "logical_batch": 30, "preflight_units": np.inf}
    return Epochs(rows, lambda some: sizes[some - ROWS[0]], **{**plain, **changed})


def seen(epochs: Epochs, epoch: int) -> list[int]:
    return [int(row) for step in epochs.steps(epoch) for row in step]


def test_every_sample_is_seen_once_an_epoch_the_last_step_on_fewer() -> None:
    assert [len(step) for step in epochs().steps(0)] == [30, 30, 30, 10]
    assert sorted(seen(epochs(), 0)) == ROWS.tolist()


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    run = epochs()
    later = seen(run, 7)
    assert seen(run, 0) != later
    assert seen(epochs(), 7) == later
    assert seen(epochs(seed=1), 7) != later


def test_the_order_does_not_depend_on_the_size_of_a_batch() -> None:
    assert seen(epochs(logical_batch=7), 3) == seen(epochs(), 3) == seen(epochs(preflight_units=5), 3)


def test_preflight_splits_a_batch_where_its_own_samples_are_too_much() -> None:
    main_feature = np.where(np.arange(100) < 10, 50.0, 1.0)
    steps = epochs(main_feature=main_feature, preflight_units=60).steps(0)
    units = [main_feature[step - 100].sum() for step in steps]
    assert max(units) <= 60
    assert sum(units) == main_feature.sum()
    assert len(steps) > 10


def test_preflight_never_joins_two_batches() -> None:
    steps = epochs(logical_batch=10, preflight_units=10**6).steps(0)
    assert [len(step) for step in steps] == [10] * 10


@pytest.mark.parametrize("preflight_units", [np.inf, 40.0])
@given(seed=st.integers(0, 2**32), logical_batch=st.integers(1, 150), count=st.integers(0, 4))
def test_a_schedule_is_as_long_as_the_steps_of_its_epochs(
    preflight_units: float, seed: int, logical_batch: int, count: int
) -> None:
    sizes = np.random.default_rng(seed).integers(1, 30, len(ROWS)).astype(np.float64)
    run = epochs(
        rows=lambda epoch: ROWS[: 100 - 23 * epoch],
        main_feature=sizes,
        seed=seed,
        logical_batch=logical_batch,
        preflight_units=preflight_units,
    )
    assert run.total_steps(count) == sum(len(run.steps(epoch)) for epoch in range(count))
