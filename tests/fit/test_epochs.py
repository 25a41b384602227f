from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.epochs import Epochs
from fakes.line_fit import LineTask

ROWS = np.arange(100, 200)


def epochs(**changed: Any) -> Epochs:
    sizes = changed.pop("main_feature", np.ones(len(ROWS)))
    rows = changed.pop("rows", lambda epoch: ROWS)
    settings = {"seed": 0, "logical_batch": 30, "preflight_units": np.inf, **changed}

    def order(epoch: int) -> Any:
        return LineTask().epoch_order(rows(epoch), seed=settings["seed"], epoch=epoch)

    return Epochs(order, lambda some: sizes[some - ROWS[0]], **settings)


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


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=300), batch=st.integers(1, 40), epoch=st.integers(0, 5))
def test_bucketed_batches_hold_each_sample_once_and_pad_no_more(sizes: list[int], batch: int, epoch: int) -> None:
    rows, feature = np.arange(len(sizes)), np.array(sizes, dtype=float)

    def steps(*, bucketed: bool) -> list[Any]:
        run = Epochs(lambda epoch: np.random.default_rng(epoch).permutation(rows), lambda some: feature[some], seed=3,
                     logical_batch=batch, preflight_units=np.inf, bucketed=bucketed)  # fmt: skip
        return run.steps(epoch)

    shuffled, bucketed = steps(bucketed=False), steps(bucketed=True)
    assert sorted(np.concatenate(bucketed).tolist()) == rows.tolist()
    assert [len(step) for step in bucketed] == [len(step) for step in shuffled]
    # Where the last batch is a short one, it may be better for it to have the smallest samples, or the largest.
    padded = [sum(len(step) * feature[step].max() for step in cut) for cut in (bucketed, shuffled)]
    assert padded[0] <= padded[1] or len(sizes) % batch
    assert [step.tolist() for step in bucketed] == [step.tolist() for step in steps(bucketed=True)]


def test_bucketed_batches_come_in_another_order_in_each_epoch() -> None:
    sizes = np.arange(100.0)
    run = epochs(main_feature=sizes, bucketed=True, logical_batch=10)
    largest = [[sizes[step - 100].max() for step in run.steps(epoch)] for epoch in (0, 1)]
    assert sorted(largest[0]) == sorted(largest[1]) == list(range(9, 100, 10))
    assert largest[0] != largest[1]


@given(st.integers(1, 100), st.integers(1, 40), st.integers(1, 5))
def test_steps_of_a_run_are_counted_by_size_as_by_order(size: int, logical_batch: int, number: int) -> None:
    rows = ROWS[:size]
    counted, ordered = (
        epochs(rows=lambda epoch: rows, logical_batch=logical_batch, size=given) for given in (size, None)
    )
    assert counted.total_steps(number) == ordered.total_steps(number)


def test_a_million_epochs_are_not_put_into_order() -> None:
    def order(epoch: int) -> Any:
        raise AssertionError(f"epoch {epoch} was put into order")

    run = Epochs(order, len, seed=0, logical_batch=30, preflight_units=np.inf, size=100)
    assert run.total_steps(10**6) == 4 * 10**6
