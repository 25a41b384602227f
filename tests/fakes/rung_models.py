"""Models of several kinds, whose blocks are worth recomputing, with the loss of some samples."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES: Final = 3


class TransformerBlock(nn.Module):
    """A block with attention, dropout and a layer norm."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return scale * self.layer(x)


class Transformer(nn.Module):
    """Blocks in a list, called with a keyword."""

    def __init__(self, width: int = 32, blocks: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TransformerBlock(width, dropout) for _ in range(blocks)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.9)
        return self.head(x)


def double_conv(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skip connections, BatchNorm and operations in place."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = double_conv(3, width)
        self.inner = double_conv(width, width)
        self.up = double_conv(2 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        below = functional.interpolate(self.inner(functional.max_pool2d(skip, 2)), scale_factor=2)
        return self.last(self.up(torch.cat([skip, below], 1)))


class Recurrent(nn.Module):
    """A recurrent module, which is a block without parts."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.GRU(width, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])[0]


class Spectral(nn.Module):
    """Power iterations change a buffer that the result depends on, in each forward pass."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        make = torch.nn.utils.parametrizations.spectral_norm
        self.blocks = nn.ModuleList([nn.Sequential(make(nn.Linear(width, width)), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, 1),
    )  # fmt: skip


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # Its switch for checkpointing turns the cache off, and with it the layout of keys and values: on some processors it
    # decides the last bits.
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a critic: its gradient is a part of it, so that the backward pass is differentiated again."""
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.sum() + (slope.flatten(1).norm(dim=1) - 1).square().sum()


def language(model: Any, x: Tensor) -> Tensor:
    tokens = (x.abs() * 20).long().clamp(max=49)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss * len(x)


Case = tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[Any, Tensor], Tensor]]

MODELS: Final[dict[str, Case]] = {
    "transformer": (Transformer, (40, 32), mean_square),
    "unet": (UNet, (3, 16, 16), mean_square),
    "recurrent": (Recurrent, (12, 16), mean_square),
    "spectral": (Spectral, (16,), mean_square),
    "sequence": (sequence, (16,), mean_square),
    "critic": (sequence, (16,), penalized),
    "gpt": (gpt, (30,), language),
}


def samples_of(shape: tuple[int, ...], count: int = SAMPLES) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))
