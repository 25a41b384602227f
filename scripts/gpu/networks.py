"""Networks from outside the CAN tasks, small enough to train anywhere: a U-Net, an LSTM, a transformer, and the critic
of a WGAN-GP. Their data and losses are in `gpu.tasks`.

Shapes: B samples, L tokens, D width, V vocabulary, H and W pixels, P points, C coordinates of a point.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS: Final = 512
"""V, the vocabulary size of the LSTM and the transformer."""


class UNet(nn.Module):
    """A U-Net of depth two with BatchNorm: images [B, 3, H, W] → logits [B, 1, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = _convolutions(3, width)
        self.down = nn.ModuleList([_convolutions(width, 2 * width), _convolutions(2 * width, 4 * width)])
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)]
        )
        self.up = nn.ModuleList([_convolutions(4 * width, 2 * width), _convolutions(2 * width, width)])
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Returns one logit per pixel."""
        x = self.enter(images)
        skipped = []
        for down in self.down:
            skipped.append(x)
            x = down(F.max_pool2d(x, 2))
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([widen(x), skipped.pop()], dim=1))
        logits: Tensor = self.leave(x)
        return logits


class SequenceModel(nn.Module):
    """A two-layer LSTM language model: tokens [B, L] → logits [B, L, V]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.leave = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Returns the logits of the next token at every position."""
        logits: Tensor = self.leave(self.lstm(self.embedding(words))[0])
        return logits


class Transformer(nn.Module):
    """A causal pre-norm transformer: tokens [B, L] → logits [B, L, V]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(_Block(width, heads=4) for _ in range(layers))
        self.leave = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Returns the logits of the next token at every position."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.leave(x)
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mixing = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        heads = self.project(self.before_attention(x)).view(B, L, 3, self.heads, D // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(B, L, D))
        mixed: Tensor = x + self.mix(self.before_mixing(x))
        return mixed


def _convolutions(entering: int, leaving: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (entering, leaving):
        layers += [nn.Conv2d(channels, leaving, 3, padding=1), nn.BatchNorm2d(leaving), nn.ReLU()]
    return nn.Sequential(*layers)


class Critic(nn.Module):
    """A critic of point sets: points [B, P, C] → scores [B]."""

    def __init__(self, coordinates: int, width: int) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Linear(coordinates, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
        )
        self.whole = nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, points: Tensor) -> Tensor:
        """Returns one score per point set."""
        scores: Tensor = self.whole(self.each(points).mean(dim=1))
        return scores.squeeze(1)
