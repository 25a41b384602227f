import io
import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit import random_state


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_restored_generators_go_on_as_they_would_have() -> None:
    random_state.seed_everything(3)
    draws()
    buffer = io.BytesIO()
    torch.save(random_state.capture(), buffer)
    expected = draws()
    draws()
    buffer.seek(0)
    random_state.restore(torch.load(buffer, weights_only=True))
    assert draws() == expected


def test_a_seed_decides_every_generator() -> None:
    random_state.seed_everything(3)
    first = draws()
    random_state.seed_everything(3)
    assert draws() == first
    random_state.seed_everything(4)
    assert all(one != other for one, other in zip(draws(), first, strict=True))


@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(1, 50))
def test_an_epochs_order_is_a_permutation_that_only_seed_and_epoch_decide(seed: int, epoch: int, size: int) -> None:
    rows = np.arange(size) * 3
    order = random_state.epoch_order(rows, seed=seed, epoch=epoch)
    assert sorted(order) == rows.tolist()
    assert (order == random_state.epoch_order(rows, seed=seed, epoch=epoch)).all()


def test_epochs_and_steps_differ() -> None:
    rows = np.arange(100)
    assert (random_state.epoch_order(rows, seed=1, epoch=0) != random_state.epoch_order(rows, seed=1, epoch=1)).any()
    noise = [torch.rand((), generator=random_state.step_generator(seed=1, step=step)) for step in (0, 1)]
    assert noise[0] != noise[1]
