"""The share of what an allocator holds that is in use."""

import pytest
import torch

from can_train.memory.gaps import share_in_use

MIB = 2**20


def test_a_batch_of_whole_pages_leaves_no_gap() -> None:
    assert share_in_use(lambda: torch.empty(40 * MIB, dtype=torch.uint8), []) == 1.0


def test_freed_blocks_that_are_too_small_to_use_again_are_gaps() -> None:
    def run() -> None:
        kept, freed = [], []
        for _ in range(8):
            kept.append(torch.empty(15 * MIB, dtype=torch.uint8))
            freed.append(torch.empty(5 * MIB, dtype=torch.uint8))
        freed.clear()
        kept.append(torch.empty(30 * MIB, dtype=torch.uint8))

    assert share_in_use(run, []) == pytest.approx(160 / 200, abs=0.03)


def test_what_is_resident_is_in_use() -> None:
    weights = torch.empty(100 * MIB, dtype=torch.uint8)
    assert share_in_use(lambda: None, [weights]) == 1.0
