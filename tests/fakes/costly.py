"""Modules that allocate memory on a simulated GPU and compute nothing."""

from typing import Any

import torch
from torch import Tensor, nn


class Costly(torch.autograd.Function):
    """Allocates memory until the backward pass, and as much again in it; the values pass through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_bytes: int) -> Tensor:
        ctx.save_for_backward(torch.empty(num_bytes, dtype=torch.uint8))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        torch.empty_like(ctx.saved_tensors[0])
        return gradients[0], None


class CostlyNet(nn.Module):
    """Two layers; the memory is held for the backward pass of the inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, num_bytes: int) -> Tensor:
        hidden = self.inner(x)
        if hidden.requires_grad:
            hidden = Costly.apply(hidden, num_bytes)
        out: Tensor = self.outer(torch.tanh(hidden))
        return out
