"""Samples that are read with a seed of their own: their random augmentation depends neither on the processes that read
them nor on the parts that a batch is computed in.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.training.read_ahead import Failed

Rows = NDArray[np.int64]
_NEXT_TIME: Final = (
    0x9E37_79B9_7F4A_7C15  # between the seeds of a row that comes again: far from the seeds of other rows
)


def sample_seeds(rows: Rows, generator: torch.Generator | None) -> list[int]:
    """Returns a seed for each sample of a logical batch: a part that is computed once more, or in other parts, draws
    the same. A row that a sampler draws several times has another seed each time.
    """
    drawn = int(torch.randint(2**62, (), generator=generator)) if generator is not None else 0
    times, seeds = Counter[int](), list[int]()
    for row in rows.tolist():
        seeds.append(((drawn ^ row) + times[row] * _NEXT_TIME) % 2**62)
        times[row] += 1
    return seeds


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators for the block, and restores those of the host after it."""
    with _restored():
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        yield


@contextmanager
def seeded_host(seed: int) -> Iterator[None]:
    """Seeds the global generators of the host for the block, and restores them after it."""
    with _restored():
        _seed_host(seed)
        yield


def _seed_host(seed: int) -> None:
    # Not torch.manual_seed: it seeds the GPU's generators too, which nobody restores, and takes a millisecond.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def read_seeded(
    rows: Sequence[int], seeds: Sequence[int], get: Callable[[int], Any], failed: Failed | None = None
) -> list[Any]:
    """Reads samples by their rows, each with its seed in the global generators."""
    read = []
    with reading():
        for row, seed in zip(rows, seeds, strict=True):
            _seed_host(seed)
            try:
                read.append(get(row))
            except Exception as error:
                if failed is None:
                    raise
                read.append(failed(error))
    return read


@contextmanager
def reading() -> Iterator[None]:
    """Opens a span in which samples are read: data sets that augment draw from the global generators, which are
    restored after it.
    """
    # Sums of large tensors depend on the number of threads, and processes that read have one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _restored():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _restored() -> Iterator[None]:
    """Restores the generators of the host after the block."""
    before = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
