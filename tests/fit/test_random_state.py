import io
import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.random_state import capture_generators, restore_generators, seed_everything, step_generator
from fakes.line_fit import LineTask


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_restored_generators_go_on_as_they_would_have() -> None:
    seed_everything(3)
    draws()
    buffer = io.BytesIO()
    torch.save(capture_generators(), buffer)
    expected = draws()
    draws()
    buffer.seek(0)
    restore_generators(torch.load(buffer, weights_only=True))
    assert draws() == expected


def test_a_seed_decides_every_generator() -> None:
    seed_everything(3)
    first = draws()
    seed_everything(3)
    assert draws() == first
    seed_everything(4)
    assert all(one != other for one, other in zip(draws(), first, strict=True))


@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(1, 50))
def test_an_epochs_order_is_a_permutation_that_only_seed_and_epoch_decide(seed: int, epoch: int, size: int) -> None:
    rows = np.arange(size) * 3
    order = LineTask().epoch_order(rows, seed=seed, epoch=epoch)
    assert sorted(order) == rows.tolist()
    assert (order == LineTask().epoch_order(rows, seed=seed, epoch=epoch)).all()


def test_epochs_and_steps_differ() -> None:
    rows = np.arange(100)
    assert (LineTask().epoch_order(rows, seed=1, epoch=0) != LineTask().epoch_order(rows, seed=1, epoch=1)).any()
    noise = [torch.rand((), generator=step_generator(seed=1, step=step)) for step in (0, 1)]
    assert noise[0] != noise[1]
