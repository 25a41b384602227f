"""Gradients of a logical batch that is cut in one way or another."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from can_train.fit.micro_batcher import Losses, MicroBatcher, check_denominators
from fakes.ragged import cut_at


def gradient(
    model: nn.Module, batch: Any, sizes: tuple[int, ...], weights: Mapping[str, float] | None = None
) -> Tensor:
    """The gradient of a batch in parts of some sizes, as one vector."""
    model.zero_grad()

    def losses(start: int, stop: int) -> Losses:
        computed: Losses = batch.losses(model, start, stop)
        return computed

    costs, rules = cut_at(sizes)
    # Nothing is compared: mutants have faults.
    batcher = MicroBatcher(model, rules=rules)
    result = batcher.add_share(losses, costs, denominators=batch.denominators, weights=weights)
    check_denominators(result, batch.denominators, size=sum(sizes))
    assert result.micro_batches == sizes
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def relative_error(one: Tensor, other: Tensor) -> float:
    """The L2 norm of a difference, in units of the second."""
    return float((one - other).norm() / other.norm())
