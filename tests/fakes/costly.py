"""Memory without work: what takes it of a simulated GPU, and computes nothing."""

from typing import Any

import torch
from torch import Tensor, nn


class Costly(torch.autograd.Function):
    """Does nothing, and takes memory: until the backward pass, and as much again then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_bytes: int) -> Tensor:
        ctx.save_for_backward(torch.empty(num_bytes, dtype=torch.uint8))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        torch.empty_like(ctx.saved_tensors[0])
        return gradients[0], None


class CostlyNet(nn.Module):
    """An inner and an outer layer; the memory is what the inner one's backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, num_bytes: int) -> Tensor:
        hidden = self.inner(x)
        if hidden.requires_grad:
            hidden = Costly.apply(hidden, num_bytes)
        out: Tensor = self.outer(torch.tanh(hidden))
        return out
