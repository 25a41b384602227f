"""The memory that an optimizer takes beside the batch: measured in steps on the CPU, or expected by its class.

The state of bitsandbytes' optimizers is laid out as that library has it on a GPU: it need not be installed.

Source: bitsandbytes 0.44 and later, bitsandbytes/optim/optimizer.py, `init_state` and `get_state_buffer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from can_train.fit.offloaded_state import CHUNKS, OffloadedState, chunk_bytes, parameters_on_host
from can_train.fit.optimizer import make_optimizer, state_bytes
from can_train.io.units import size_text
from can_train.memory.sharded_tensors import shard_of
from can_train.memory.simulated.gpu import LiveStorageTracker

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.fit.peak_prediction import PeakPrediction

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
    state_bytes: int  # State that the optimizer keeps from its first two steps on
    transient_bytes: int  # Temporary memory of a step
    # Size of each of them that is not empty: the pieces that an optimizer works in.
    tensor_bytes: tuple[int, ...]
    host_bytes: int = 0  # State that waits on the host between steps
    later_bytes: int = 0  # State, of `state_bytes`, that the second step makes


def measure_optimizer(
    parameters: Iterable[Tensor],
    make: Callable[[Sequence[nn.Parameter]], Optimizer],
    *,
    offloaded: bool = False,
    unused: Collection[int] = (),
) -> OptimizerMemory:
    """Measures steps of the optimizer that `make` returns, on zeros of the trained parameters' shapes, which have their
    attributes: two, and a third where the second makes state, too. `offloaded` tells whether its state waits on the
    host. Parameters at the positions `unused` get no gradient.
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
        first_bytes = tracker.live_bytes - before
        # A step that makes no state has the temporary memory of all later ones: the second, for most optimizers.
        optimizer.step()
        state_bytes = tracker.live_bytes - before
        if state_bytes > first_bytes:
            optimizer.step()
        transient_bytes = tracker.peak_bytes - tracker.live_bytes
    return OptimizerMemory(
        parameter_bytes=before - weight_bytes,
        state_bytes=max(state_bytes, 0),
        transient_bytes=max(transient_bytes, 0),
        tensor_bytes=tuple(shadow.nbytes for shadow in shadows if shadow.nbytes and shadow.grad is not None),
        host_bytes=tracker.host_bytes,
        later_bytes=min(max(state_bytes - max(first_bytes, 0), 0), max(state_bytes, 0)),
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


# bitsandbytes

_NUM_STATES: Final = {"adamw": 2, "adam": 2, "lion": 1, "rmsprop": 1, "sgd": 1}
_NAME: Final = re.compile(rf"(paged)?({'|'.join(_NUM_STATES)})(8|32)bit")
_LEAST_8BIT: Final = 4096  # values of a tensor, below which its state has 32 bits
_LEAST_PAGED: Final = 100_000  # values of a tensor whose state is in managed memory
_BLOCK: Final = 256  # values of a state that share a largest one
_LARGER_BLOCK: Final = 2048  # the same before version 0.44
_MAP: Final = 256  # numbers of a quantization map; each optimizer has a signed and an unsigned one
_32_BITS: Final = 32


@dataclass(frozen=True, kw_only=True)
class LowBitOptimizer:
    """An optimizer by its name in bitsandbytes or in transformers' `TrainingArguments(optim=)`.

    Calling it makes an optimizer of parameters that takes the memory of bitsandbytes' and changes no parameter.
    """

    name: str
    num_states: int
    bits: int
    is_paged: bool
    wide: frozenset[int] = frozenset()  # positions of parameters whose state has 32 bits whatever their size

    @classmethod
    def named(cls, name: str, model: nn.Module) -> LowBitOptimizer | None:
        """Returns the optimizer for the trained parameters of a model; None where the name is of another kind."""
        short = re.sub(r"^(bitsandbytes|bnb)\.optim\.", "", name)
        if (match := _NAME.fullmatch(short.lower().replace("_bnb", "").replace("_", ""))) is None:
            return None
        # transformers' names: its Trainer keeps the state of embeddings in 32 bits.
        embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)] if "_" in short else []
        weights = {id(each.weight) for each in embeddings}
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        return cls(
            name=name,
            num_states=_NUM_STATES[match[2]],
            bits=int(match[3]),
            is_paged=match[1] is not None,
            wide=frozenset(place for place, parameter in enumerate(trained) if id(parameter) in weights),
        )

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Makes an optimizer of all trained parameters of the model, in their order."""
        return _StateAlone(parameters, self)

    def state_of(self, place: int, parameter: Tensor) -> dict[str, Tensor]:
        """Makes the state of the parameter at a place; without the part that is in managed memory."""
        is_wide = self._is_wide(place, parameter)
        dtype = torch.float32 if is_wide else torch.uint8
        state = {}
        for number in range(1, self.num_states + 1):
            if not self._is_managed(parameter):
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
            if not is_wide:
                blocks = -(-parameter.numel() // _BLOCK)
                state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return state

    def stated(self, found: PeakPrediction, trained: Sequence[Tensor]) -> PeakPrediction:
        """Returns a prediction with the interval of the layout, and the sentences that say what it assumes."""
        placed = list(enumerate(trained))
        narrow = [parameter.numel() for place, parameter in placed if not self._is_wide(place, parameter)]
        # Fewer blocks, in older versions.
        fewer = self.num_states * sum(4 * (-(-size // _BLOCK) - -(-size // _LARGER_BLOCK)) for size in narrow)
        managed = self.num_states * sum(
            parameter.numel() * (4 if self._is_wide(place, parameter) else 1)
            for place, parameter in placed
            if self._is_managed(parameter)
        )
        told = [f"The state of {self.name} is laid out as by bitsandbytes"]
        if self.wide and self.bits < _32_BITS:
            told.append("Its state of embeddings has 32 bits, as transformers' Trainer has it")
        if managed:
            told.append(f"{size_text(managed)} of the state are in managed memory, which the driver moves to the host")
        tensors = replace(found.tensors, least_bytes=found.tensors.least_bytes - fewer)
        context = found.context
        if found.card is not None:
            context = replace(context, most_bytes=context.most_bytes + managed)
        return replace(found, tensors=tensors, context=context, assumptions=(*found.assumptions, *told))

    def _is_wide(self, place: int, parameter: Tensor) -> bool:
        return self.bits == _32_BITS or place in self.wide or parameter.numel() < _LEAST_8BIT

    def _is_managed(self, parameter: Tensor) -> bool:
        return self.is_paged and parameter.numel() >= _LEAST_PAGED


class _StateAlone(Optimizer):
    """Makes its state in the first step, and changes no parameter: bitsandbytes' kernels take no memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: LowBitOptimizer) -> None:
        super().__init__(parameters, {})
        self._layout = layout
        self._maps: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter] = self._layout.state_of(place, parameter)
                if not self._maps and "absmax1" in self.state[parameter]:
                    self._maps = [torch.zeros(_MAP, dtype=torch.float32, device=parameter.device) for _ in range(2)]
