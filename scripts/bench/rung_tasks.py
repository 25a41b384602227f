"""Tasks whose largest sample is far larger than their weights, for the benchmark of the rungs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import can_train
from can_train import Phase

_CONVOLUTIONS = 6  # On each level of the U-Net
Losses = Mapping[str, tuple[Tensor, float | Tensor]]
SETTINGS = {"lr_batch_size": 2, "min_steps_per_epoch": 1}


class RandomSamples(Sequence[Any]):
    """Samples that are drawn by their number: normal numbers of a shape, or tokens."""

    def __init__(self, number: int, shape: Sequence[int], tokens: int = 0) -> None:
        self._number, self._shape, self._tokens = number, tuple(shape), tokens

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: Any) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(index)
        if self._tokens:
            return (torch.randint(self._tokens, self._shape, generator=generator),)
        return (torch.randn(self._shape, generator=generator),)


class _Drawn(can_train.Task):
    """Trains on samples that are drawn."""

    training = SETTINGS
    shape: tuple[int, ...] = ()
    tokens = 0

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        """The number of samples to train on."""

        samples: int = 10

    def datasets(self) -> dict[str, RandomSamples]:
        """Returns the parts of the data."""
        return {name: RandomSamples(number, self.shape, self.tokens)
                for name, number in (("train", self.settings.samples), ("validation", 2), ("test", 2))}  # fmt: skip


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer of a sequence."""
        out: Tensor = self.layer(x)
        return out


class Transformer(_Drawn):
    """An encoder of 12 layers with dropout."""

    shape = (32, 64, 16)

    def model(self) -> nn.Module:
        """Returns the network."""
        return nn.Sequential(*[Block(16, 0.1) for _ in range(12)], nn.Linear(16, 1))

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Returns the mean square of the scores."""
        return {"square": (model(batch[0].flatten(0, 1)).square().mean((1, 2)).sum() / 32, len(batch[0]))}


class Llama(_Drawn):
    """A Llama from a configuration, which checkpoints itself by its own switch."""

    shape, tokens = (1024,), 128

    def model(self) -> nn.Module:
        """Returns the network."""
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(vocab_size=self.tokens, hidden_size=32, intermediate_size=96, num_hidden_layers=8,
                        num_attention_heads=4, num_key_value_heads=2, use_cache=False)
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Returns the cross-entropy of the next tokens."""
        (tokens,) = batch
        scores = model(input_ids=tokens).logits[:, :-1]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return {"loss": (loss, tokens[:, 1:].numel())}


def _convolutions(channels: int, out: int) -> nn.Sequential:
    inputs = (channels, *[out] * (_CONVOLUTIONS - 1))
    layers = [(nn.Conv2d(one, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU(inplace=True)) for one in inputs]
    return nn.Sequential(*[layer for three in layers for layer in three])


class UNetModel(nn.Module):
    """A U-Net of three levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolutions(3, width), _convolutions(width, 2 * width)])
        self.middle = _convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList([_convolutions(6 * width, 2 * width), _convolutions(3 * width, width)])
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a map of the same size."""
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for level, skip in zip(self.up, reversed(skips), strict=True):
            x = level(torch.cat([skip, nn.functional.interpolate(x, scale_factor=2.0)], 1))
        out: Tensor = self.last(x)
        return out


class UNet(_Drawn):
    """A U-Net whose maps are added up."""

    shape = (3, 96, 96)

    def model(self) -> nn.Module:
        """Returns the network."""
        return UNetModel(8)

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Returns the mean square of the map."""
        return {"square": (model(batch[0]).square().mean((1, 2, 3)).sum(), len(batch[0]))}


class Pair(nn.Module):
    """A critic and a generator."""

    def __init__(self) -> None:
        super().__init__()

        def layers(first: int, last: int) -> nn.Sequential:
            middle = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.LeakyReLU(0.2))]
            return nn.Sequential(nn.Linear(first, 128), nn.LeakyReLU(0.2), *middle, nn.Linear(128, last))

        self.critic, self.generator = layers(16, 1), layers(8, 16)


class Gan(_Drawn):
    """A generator of points against a critic with a gradient penalty, which takes two steps for each of its."""

    shape = (512, 16)

    def model(self) -> nn.Module:
        """Returns both networks."""
        return Pair()

    def phases(self) -> Sequence[Phase]:
        """Returns both phases."""
        return (
            Phase(name="critic", loss=self.critic_loss, parameters=("critic.*",), steps=2),
            Phase(name="generator", loss=self.generator_loss, parameters=("generator.*",)),
        )

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Returns the loss of the generator, which validation measures."""
        return self.generator_loss(model, batch)

    def critic_loss(self, model: Any, batch: Any) -> Losses:
        """Returns how badly the critic tells points from generated ones, with its penalty."""
        (real,) = batch
        made = model.generator(real[..., :8]).detach()
        between = ((real + made) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=torch.is_grad_enabled())
        penalty = (slope.norm(dim=-1) - 1).square().mean(1).sum()
        told = (model.critic(made) - model.critic(real)).mean((1, 2)).sum()
        return {"critic": (told + penalty, len(real))}

    def generator_loss(self, model: Any, batch: Any) -> Losses:
        """Returns how badly the generator deceives the critic."""
        (real,) = batch
        return {"generator": (-model.critic(model.generator(real[..., :8])).mean((1, 2)).sum(), len(real))}
