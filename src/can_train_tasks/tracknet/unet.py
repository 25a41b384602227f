"""The network that turns three pictures into a heatmap.

Shapes: B samples; H, W height and width of pictures and heatmap; C channels of the first level. Level i has C·2^i
channels and H/2^i × W/2^i pixels.
"""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from can_train.errors import ConfigError
from can_train_tasks.tracknet.settings import CONCAT, TrackNetDatasetSettings, UNetSettings

_PICTURE_CHANNELS: Final = 3  # Red, green and blue
INPUT_CHANNELS: Final = 3 * _PICTURE_CHANNELS  # Of three pictures
_FIRST_GUESS: Final = 0.01  # Height of every pixel before training, as in the focal loss's paper: balls are small


class Convolutions(nn.Sequential):
    """Two convolutions, each followed by group normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            # Group normalisation uses means of one sample. Batch normalisation uses means of a micro-batch: splitting
            # a batch would change the gradients.
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                       nn.GroupNorm(math.gcd(groups, outputs), outputs), nn.ReLU(inplace=True)]  # fmt: skip
        super().__init__(*layers)


class Encoder(nn.Module):
    """Computes the features of each level from pictures [B, channels, H, W]."""

    def __init__(self, settings: UNetSettings, channels: int) -> None:
        super().__init__()
        widths = _widths(settings)
        inputs = (channels, *widths[:-1])
        self.levels = nn.ModuleList(Convolutions(before, here, settings.groups)
                                    for before, here in zip(inputs, widths, strict=True))  # fmt: skip

    def forward(self, pictures: Tensor) -> list[Tensor]:
        """Returns [B, C·2^i, H/2^i, W/2^i] for each level i."""
        features: list[Tensor] = []
        for level in self.levels:
            features.append(level(F.max_pool2d(features[-1], 2) if features else pictures))
        return features


class Decoder(nn.Module):
    """Joins the features of all levels, from the lowest level to the first."""

    def __init__(self, settings: UNetSettings) -> None:
        super().__init__()
        widths = _widths(settings)
        self.levels = nn.ModuleList(Convolutions(below + here, here, settings.groups)
                                    for here, below in zip(widths[-2::-1], widths[:0:-1], strict=True))  # fmt: skip

    def forward(self, features: list[Tensor]) -> Tensor:
        """Returns [B, C, H, W]."""
        *above, joined = features
        for level, here in zip(self.levels, reversed(above), strict=True):
            joined = level(torch.cat([F.interpolate(joined, scale_factor=2.0), here], dim=1))
        return joined


class UNet(nn.Module):
    """U-Net: encoder and decoder, connected on each level.

    Attributes:
        backbone: The encoder, which `training.freeze` may name.

    Source: Ronneberger et al. 2015, arXiv:1505.04597; Sun et al. 2020 (TrackNetV2), with fewer channels.
    """

    def __init__(self, settings: UNetSettings, channels: int = INPUT_CHANNELS) -> None:
        super().__init__()
        self.backbone, self.decoder = Encoder(settings, channels), Decoder(settings)
        self.head = nn.Conv2d(settings.width, 1, 1)
        nn.init.constant_(self.head.bias, math.log(_FIRST_GUESS / (1 - _FIRST_GUESS)))  # type: ignore[arg-type]

    def forward(self, pictures: Tensor) -> Tensor:
        """Computes the heatmaps' logits [B, H, W] from pictures [B, 9 or 12, H, W] with values in [0, 1]."""
        logits: Tensor = self.head(self.decoder(self.backbone(pictures)))
        return logits.squeeze(1)


def make_unet(settings: UNetSettings, dataset: TrackNetDatasetSettings) -> UNet:
    """Makes the network for the picture size of a data set.

    Raises:
        ConfigError: Width or height is not a multiple of 2^(levels - 1).
    """
    factor = 2 ** (settings.levels - 1)
    if dataset.width % factor or dataset.height % factor:
        raise ConfigError(f"Width and height can be halved on each level: they are multiples of {factor}",
                          value=f"dataset.width {dataset.width}, dataset.height {dataset.height}",
                          remedy="Choose other sizes, or fewer levels with --set model.levels=2")  # fmt: skip
    return UNet(settings, INPUT_CHANNELS + (_PICTURE_CHANNELS if dataset.background == CONCAT else 0))


def _widths(settings: UNetSettings) -> list[int]:
    return [settings.width * 2**level for level in range(settings.levels)]
