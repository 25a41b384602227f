"""A network like BENDR: strided convolutions encode a window into steps, a transformer relates the steps.

Source: Kostas, Aroca-Ouellette, Rudzicz, "BENDR", 2021; contrastive learning as in wav2vec 2.0.

Shapes: n windows, C channels, L samples, S steps of the encoded sequence, H hidden units, K negatives.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from can_train_tasks.bendr.settings import BendrSettings

_POSITION_GROUPS: Final = (
    16  # groups of the convolution for positions, as in wav2vec 2.0; fewer where the width is no multiple
)


class TransformerBlock(nn.Module):
    """A transformer layer that normalises before attention and before the feed-forward map."""

    def __init__(self, settings: BendrSettings) -> None:
        super().__init__()
        width, inner = settings.hidden, settings.feedforward
        self.heads = settings.heads
        self.before_attention, self.before_map = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.map = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Dropout(settings.dropout), nn.Linear(inner, width)
        )
        self.drop = nn.Dropout(settings.dropout)

    def forward(self, steps: Tensor) -> Tensor:
        """Maps [n, S, H] to [n, S, H]."""
        n, length, width = steps.shape
        joined = self.queries_keys_values(self.before_attention(steps))
        parts = joined.view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        steps = steps + self.drop(self.mix(attended.transpose(1, 2).reshape(n, length, width)))
        mapped: Tensor = steps + self.drop(self.map(self.before_map(steps)))
        return mapped


class Contextualizer(nn.Module):
    """A transformer over the steps of an encoded sequence. A convolution encodes relative positions."""

    def __init__(self, settings: BendrSettings) -> None:
        super().__init__()
        width, kernel = settings.hidden, settings.position_kernel
        groups = next(size for size in (_POSITION_GROUPS, 8, 4, 2, 1) if width % size == 0)
        self.mask = nn.Parameter(torch.randn(width) * width**-0.5)
        self.before = nn.LayerNorm(width)
        self.positions = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=groups)
        self.drop = nn.Dropout(settings.dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(settings) for _ in range(settings.layers)))
        self.after = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))

    def forward(self, encoded: Tensor, masked: Tensor | None = None) -> Tensor:
        """Maps [n, S, H] to [n, S, H]; steps that `masked` [n, S] marks are first replaced by a learned vector."""
        steps = self.before(encoded)
        if masked is not None:
            steps = torch.where(masked[..., None], self.mask.to(steps.dtype), steps)
        around = functional.gelu(self.positions(steps.transpose(1, 2))).transpose(1, 2)
        found: Tensor = self.after(self.blocks(self.drop(steps + around)))
        return found


class BendrNetwork(nn.Module):
    """Encoder and contextualizer; with `classes` also a linear classifier of their outputs' means over the window."""

    def __init__(self, settings: BendrSettings, channels: int, classes: int = 0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, stride in enumerate(settings.strides):
            layers += [
                # The output has ceil(L / stride) steps, as `BendrSettings.steps` counts.
                nn.Conv1d(settings.hidden if number else channels, settings.hidden, 2 * stride - 1, stride, stride - 1),
                nn.Dropout(settings.dropout),
                nn.GroupNorm(settings.groups, settings.hidden),
                nn.GELU(),
            ]
        self.encoder = nn.Sequential(*layers)
        self.contextualizer = Contextualizer(settings)
        if classes:
            self.head = nn.Linear(2 * settings.hidden, classes)

    def encode(self, signal: Tensor) -> Tensor:
        """Maps [n, C, L] to [n, S, H]."""
        encoded: Tensor = self.encoder(signal).transpose(1, 2)
        return encoded

    def forward(self, signal: Tensor) -> Tensor:
        """Maps [n, C, L] to [n, classes] logits."""
        encoded = self.encode(signal)
        logits: Tensor = self.head(torch.cat([encoded.mean(1), self.contextualizer(encoded).mean(1)], dim=1))
        return logits

    def contrast(self, signal: Tensor, masked: Tensor, negatives: Tensor, temperature: float) -> Tensor:
        """Compares the contextualizer's output at each step with the encoded step, and with other encoded steps.

        Args:
            signal: [n, C, L].
            masked: [n, S] whether a step is hidden from the contextualizer.
            negatives: [n, S, K] positions of the other steps that each step is compared with.
            temperature: Divisor of the cosine similarities.

        Returns:
            [n, S, 1 + K] logits, the true step first.
        """
        encoded = self.encode(signal)
        guessed = functional.normalize(self.contextualizer(encoded, masked), dim=-1)
        # Similarities of all pairs of steps: gathering the negatives' vectors would take K times the sequence's memory.
        similar = guessed @ functional.normalize(encoded, dim=-1).transpose(1, 2) / temperature
        steps = torch.arange(similar.shape[1], device=similar.device).expand(similar.shape[:2])
        return similar.gather(2, torch.cat([steps[..., None], negatives], dim=2))
