"""The state of bitsandbytes' optimizers, laid out as that library has it on a GPU, for predictions where it need not be
installed.

Source: bitsandbytes 0.44 and later, bitsandbytes/optim/optimizer.py, `init_state` and `get_state_buffer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from can_train.fit.peak_prediction import PeakPrediction
from can_train.io.units import size_text

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
