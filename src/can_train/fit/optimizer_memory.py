"""The memory that an optimizer takes beside the batch: measured in steps on the CPU, or expected by its class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from can_train.fit.offloaded_state import CHUNKS, OffloadedState, chunk_bytes, parameters_on_host
from can_train.fit.optimizer import make_optimizer, state_bytes
from can_train.memory.sharded_tensors import shard_of
from can_train.memory.simulated.gpu import LiveStorageTracker

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings

_UNLIMITED: Final = 2**62
_SAMPLE_WEIGHTS: Final = 2**18  # Whose state is measured: what an optimizer counts beside it is a small part
# State that an optimizer keeps, in sizes of the parameters. Others keep as much as Adam, or less.
_STATES: Final[Mapping[str, float]] = {"ASGD": 1, "RMSprop": 1, "Adagrad": 1, "Adafactor": 0.1}
_MOST_STATES: Final = 2.0
_MORE_STATE: Final = ("momentum", "amsgrad", "centered")  # Options that keep one more value of each parameter


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes that an optimizer takes of the device."""

    parameter_bytes: int  # Size of the trained parameters that get gradients, which take as much
    state_bytes: int  # State that the optimizer keeps from its first step on
    transient_bytes: int  # Temporary memory of a step
    # Size of each of them that is not empty: the pieces that an optimizer works in.
    tensor_bytes: tuple[int, ...]
    host_bytes: int = 0  # State that waits on the host between steps


def measure_optimizer(
    parameters: Iterable[Tensor],
    make: Callable[[Sequence[nn.Parameter]], Optimizer],
    *,
    offloaded: bool = False,
    unused: Collection[int] = (),
) -> OptimizerMemory:
    """Measures two steps of the optimizer that `make` returns, on zeros of the trained parameters' shapes, which have
    their attributes; `offloaded` tells whether its state waits on the host. Parameters at the positions `unused` get no
    gradient.
    """
    parameters = list(parameters)
    shards = [shard_of(parameter) for parameter in parameters]
    # A model on meta may be larger than the host.
    fake = FakeTensorMode() if any(shard.is_meta for shard in shards) else nullcontext()
    with fake, LiveStorageTracker(_UNLIMITED) as tracker:
        shadows = [nn.Parameter(torch.zeros(shard.shape, dtype=shard.dtype, device="cpu")) for shard in shards]
        weight_bytes = tracker.live_bytes
        for position, (shadow, parameter) in enumerate(zip(shadows, parameters, strict=True)):
            # The code of an optimizer may sort parameters by marks of their owner.
            vars(shadow).update(vars(parameter))
            shadow.grad = None if position in unused else torch.zeros_like(shadow)
        before = tracker.live_bytes
        # Adagrad makes its state here.
        with parameters_on_host(shadows) if offloaded else nullcontext():
            optimizer = make(shadows)
        if offloaded:
            OffloadedState(optimizer).begin()
        optimizer.step()
        state_bytes = tracker.live_bytes - before
        # State is made in the first step, so only the second has the temporary memory of all later ones.
        optimizer.step()
        transient_bytes = tracker.peak_bytes - tracker.live_bytes
    return OptimizerMemory(
        parameter_bytes=before - weight_bytes,
        state_bytes=max(state_bytes, 0),
        transient_bytes=max(transient_bytes, 0),
        tensor_bytes=tuple(shadow.nbytes for shadow in shadows if shadow.nbytes and shadow.grad is not None),
        host_bytes=tracker.host_bytes,
    )


def state_share(training: TrainingSettings, dtype: torch.dtype) -> float:
    """Returns the size of the state that the optimizer of some settings keeps ÷ the size of the weights; no weights are
    needed for it.
    """
    sample = [torch.empty(_SAMPLE_WEIGHTS, dtype=dtype, device="cpu")]
    needs = measure_optimizer(sample, lambda shadows: make_optimizer(shadows, training, training.lr, sample[0].device))
    return needs.state_bytes / needs.parameter_bytes


def expected_memory(optimizers: Sequence[Optimizer], *, on_host: bool = False) -> OptimizerMemory:
    """Returns the memory that optimizers are expected to take, by their classes: none of them is run for it. `on_host`
    tells whether their state waits on the host.
    """
    sizes: list[int] = []
    state, transient = 0.0, 0
    for optimizer in optimizers:
        groups = optimizer.param_groups
        trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        sizes += [parameter.nbytes for parameter in trained if parameter.nbytes]
        # An optimizer with momentum keeps nothing else, unless the table names it.
        usual = 0.0 if "momentum" in optimizer.defaults else _MOST_STATES
        copies = _STATES.get(type(optimizer).__name__, usual)
        copies += sum(any(group.get(option) for group in groups) for option in _MORE_STATE)
        stepped = chunk_bytes(trained) if on_host else sum(parameter.nbytes for parameter in trained)
        # PyTorch's optimizers make a copy of the parameters for a moment (`foreach`), unless they are fused.
        copied = 0 if any(group.get("fused") for group in groups) else stepped
        if on_host:
            copied += round(CHUNKS * copies * stepped)
        else:
            state += max(copies * stepped - state_bytes(optimizer), 0.0)
        transient = max(transient, copied)
    return OptimizerMemory(parameter_bytes=sum(sizes), state_bytes=round(state), transient_bytes=transient,
                           tensor_bytes=tuple(sizes))  # fmt: skip
