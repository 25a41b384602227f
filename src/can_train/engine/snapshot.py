"""What a forward or backward pass that fails half-way can have changed, apart from gradients: random number generators
and buffers (BatchNorm's running statistics). Taken before a pass, restored after it failed.
"""

import random

import numpy as np
import torch
from torch import Tensor, nn


class Snapshot:
    """Generators and buffers as they are now.

    Args:
        model: Whose buffers.
        device: Whose generator, beside those of the host.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=True)  # noqa: NPY002 - models may draw from the global generator
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        # A module may replace a buffer rather than write into it, so the name is kept beside the tensor; one that is
        # None may be made in its first pass.
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @property
    def copies(self) -> list[Tensor]:
        """The buffers' copies, which take memory where the model is."""
        return [value for *_, value in self._buffers if value is not None]

    def restore(self) -> None:
        """Puts everything back, bit by bit."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = None if buffer is None or value is None else buffer.copy_(value)
