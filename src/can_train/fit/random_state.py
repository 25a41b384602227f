"""The random generators of a run: their seeds, a generator for each step, and their states in a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - third parties draw from the global generator
    torch.manual_seed(seed)


def seed_rank(*, seed: int, rank: int, step: int) -> None:
    """Seeds the global generators of a rank so that each rank drops other units; rank 0's are left as they are."""
    # By the steps done so far as well: a rank that joins later must not repeat earlier draws.
    if rank:
        seed_everything(int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint32)[0]))


def capture_generators() -> dict[str, Any]:
    """Returns the state of every global generator in types that `torch.load(weights_only=True)` accepts."""
    version, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (str(version), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_generators(state: dict[str, Any]) -> None:
    """Restores states of `capture_generators`; GPU generators only where there are as many GPUs."""
    version, internal, gauss = state["python"]
    # A checkpoint may have made lists of the tuples that Python's generator insists on.
    random.setstate((version, tuple(internal), gauss))
    version, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((version, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def step_generator(
    *, seed: int, step: int, update: int = 0, before: bool = False, noise: bool = False
) -> torch.Generator:
    """Returns the generator of a step's randomness that samples share, in one of its optimizer updates, of the work
    that a task does `before` the step, or of an update's gradient `noise`: pure functions of these numbers, and draws
    from one generator change nothing in another.
    """
    key = (1,) if before else (3, update) if noise else (2, update) if update else ()
    sequence = np.random.SeedSequence([seed, step], spawn_key=key)
    mixed = sequence.generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(mixed[0]) << 32 | int(mixed[1]))
