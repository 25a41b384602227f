"""The share of what an allocator holds that is in use."""

import pytest
import torch

from can_train.memory.meters import simulate_fit, simulate_peak

MIB = 2**20


def take(size: int) -> None:
    torch.empty(size, dtype=torch.uint8)


def test_a_batch_of_whole_pages_leaves_no_gap() -> None:
    assert simulate_peak(lambda: take(40 * MIB), []) == (40 * MIB, 40 * MIB)


def test_freed_blocks_that_are_too_small_to_use_again_are_gaps() -> None:
    def run() -> None:
        kept, freed = [], []
        for _ in range(8):
            kept.append(torch.empty(15 * MIB, dtype=torch.uint8))
            freed.append(torch.empty(5 * MIB, dtype=torch.uint8))
        freed.clear()
        kept.append(torch.empty(30 * MIB, dtype=torch.uint8))

    allocated, reserved = simulate_peak(run, [])
    assert allocated / reserved == pytest.approx(160 / 200, abs=0.03)


def test_what_is_resident_is_in_use() -> None:
    weights = torch.empty(100 * MIB, dtype=torch.uint8)
    assert simulate_peak(lambda: None, [weights]) == (100 * MIB, 100 * MIB)


def test_a_batch_fits_where_its_pages_do() -> None:
    def run() -> None:
        take(35 * MIB)

    assert simulate_fit(run, [], 40 * MIB)
    assert not simulate_fit(run, [], 30 * MIB)
    assert not simulate_fit(run, [torch.empty(10 * MIB, dtype=torch.uint8)], 40 * MIB)
    assert not simulate_fit(run, [torch.empty(50 * MIB, dtype=torch.uint8)], 40 * MIB)
