"""The memory of choices: the newest of them, whatever the sizes of what is pushed."""

import io

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.tasks.can.fusion.agent import ReplayMemory

PUSHES = st.lists(st.integers(0, 30), max_size=8)


def filled(capacity: int, sizes: list[int]) -> tuple[ReplayMemory, list[int]]:
    """A memory into which windows 1, 2, … were pushed, each with three times its number; and all that were."""
    memory, pushed = ReplayMemory(capacity), []
    for size in sizes:
        rows = np.arange(len(pushed) + 1, len(pushed) + 1 + size)
        memory.push(rows, 3 * rows)
        pushed += rows.tolist()
    return memory, pushed


def everything(memory: ReplayMemory) -> list[int]:
    uniform = (np.arange(len(memory)) + 0.5) / max(len(memory), 1)
    rows, actions = memory.recall(uniform)
    assert (actions == 3 * rows).all()
    return sorted(rows.tolist())


@given(st.integers(1, 12), PUSHES)
def test_the_newest_choices_are_remembered_and_no_others(capacity: int, sizes: list[int]) -> None:
    memory, pushed = filled(capacity, sizes)
    assert len(memory) == min(capacity, len(pushed))
    if pushed:
        assert everything(memory) == pushed[-capacity:]


@given(st.integers(1, 12), PUSHES, st.lists(st.floats(0, 1, exclude_max=True), min_size=1))
def test_what_is_recalled_was_pushed(capacity: int, sizes: list[int], uniform: list[float]) -> None:
    memory, pushed = filled(capacity, sizes)
    rows, _ = memory.recall(np.array(uniform))
    assert set(rows.tolist()) <= (set(pushed) or {0})


def test_a_number_just_below_one_names_the_last_choice() -> None:
    memory, _ = filled(2**17 + 1, [2**17 + 1])
    rows, _ = memory.recall(np.array([np.nextafter(1.0, 0.0)]))
    assert rows.tolist() == [2**17 + 1]


def test_a_memory_goes_through_a_checkpoint() -> None:
    memory, _ = filled(5, [3, 4])
    buffer = io.BytesIO()
    torch.save(memory.state_dict(), buffer)
    buffer.seek(0)
    other = ReplayMemory(5)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for one in (memory, other):
        one.push(np.array([100, 101]), np.array([300, 303]))
    assert everything(other) == everything(memory) == [5, 6, 7, 100, 101]
