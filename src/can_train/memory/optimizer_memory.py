"""What an optimizer takes: its state, and what a step needs for a moment. Measured on the host with a stand-in for the
parameters, since the first real step must neither be tried nor be repeated.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from can_train.memory.live_storage import LiveStorage

_UNLIMITED: Final = 2**62


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes on the device.

    Attributes:
        parameter_bytes: The trained parameters; their gradients take as much.
        state_bytes: What the optimizer keeps from its first step on.
        transient_bytes: What a step needs beside that while it runs.
        tensor_bytes: Of each trained parameter, none of them empty: the pieces that an optimizer works in.
    """

    parameter_bytes: int
    state_bytes: int
    transient_bytes: int
    tensor_bytes: tuple[int, ...]


def measure_optimizer(
    parameters: Iterable[Tensor], make: Callable[[Sequence[nn.Parameter]], Optimizer]
) -> OptimizerMemory:
    """Takes two steps of the optimizer on zeros of the parameters' shapes.

    Args:
        parameters: The trained ones.
        make: Makes the optimizer as the run will.
    """
    with LiveStorage(_UNLIMITED) as tracker:
        shadows = [nn.Parameter(torch.zeros_like(parameter, device="cpu")) for parameter in parameters]
        parameter_bytes = tracker.live_bytes
        for shadow in shadows:
            shadow.grad = torch.zeros_like(shadow)
        optimizer = make(shadows)
        before = tracker.live_bytes
        optimizer.step()
        state_bytes = tracker.live_bytes - before
        optimizer.step()
        transient_bytes = tracker.peak_bytes - tracker.live_bytes
    return OptimizerMemory(
        parameter_bytes=parameter_bytes,
        state_bytes=max(state_bytes, 0),
        transient_bytes=max(transient_bytes, 0),
        tensor_bytes=tuple(shadow.nbytes for shadow in shadows if shadow.nbytes),
    )
