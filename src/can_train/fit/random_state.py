"""Random number generators and buffers: seeded, captured and restored."""

import random
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# Spawn key that tells what is drawn before a step from what is drawn in it.
_BEFORE_STEP: Final = 1


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - third parties draw from the global generator
    torch.manual_seed(seed)


def seed_rank(*, seed: int, rank: int, step: int) -> None:
    """Seeds the global generators of a rank so that each rank drops other units; rank 0's are left as they are."""
    # By the steps done so far as well: a rank that joins later must not draw again what was drawn.
    if rank:
        seed_everything(int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint32)[0]))


def capture() -> dict[str, Any]:
    """Returns the state of every global generator in types that `torch.load(weights_only=True)` accepts."""
    version, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (str(version), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(state: dict[str, Any]) -> None:
    """Restores what `capture` returned; GPU generators only where there are as many GPUs."""
    version, internal, gauss = state["python"]
    # A checkpoint may have made lists of the tuples that Python's generator insists on.
    random.setstate((version, tuple(internal), gauss))
    version, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((version, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def epoch_order(rows: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Shuffles the rows of one epoch: a pure function of seed and epoch, so that a position in it can be resumed."""
    return rows[np.random.default_rng([seed, epoch]).permutation(len(rows))]


def step_generator(*, seed: int, step: int) -> torch.Generator:
    """Returns the generator of a step's randomness that samples share: a pure function of seed and step."""
    return _generator(np.random.SeedSequence([seed, step]))


def before_step_generator(*, seed: int, step: int) -> torch.Generator:
    """Returns the generator of what a task does before a step; it leaves what the step itself draws unchanged."""
    return _generator(np.random.SeedSequence([seed, step], spawn_key=(_BEFORE_STEP,)))


def _generator(sequence: np.random.SeedSequence) -> torch.Generator:
    mixed = sequence.generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(mixed[0]) << 32 | int(mixed[1]))


class Snapshot:
    """The generators of the host and of a device, and a model's buffers, as they are now."""

    # Taken for every micro-batch: `capture` converts to types that can be saved, which takes longer.

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=True)  # noqa: NPY002 - models may draw from the global generator
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        # A module may replace a buffer rather than write into it, so module and name are kept beside the tensor. A
        # buffer that is None may be made in the first pass.
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @property
    def copies(self) -> list[Tensor]:
        """Copies of the buffers, which take memory on the model's device."""
        return [value for *_, value in self._buffers if value is not None]

    def restore(self) -> None:
        """Restores everything, bit by bit."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = None if buffer is None or value is None else buffer.copy_(value)
