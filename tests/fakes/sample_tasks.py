"""Tasks that are described by their samples, for tests of what trains them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from can_train import Phase, Task

Losses = Mapping[str, tuple[Tensor, float | Tensor]]
LONG = 6  # Positions that few samples have more of


class Words(Task):
    """Sums of the numbers in lists of different lengths; the loss is a mean over all positions."""

    def datasets(self) -> Mapping[str, Sequence[Any]]:
        drawn = np.random.default_rng(0)
        samples = [torch.from_numpy(drawn.normal(size=(int(drawn.integers(1, 9)), 2))) for _ in range(60)]
        return {"train": samples[:40], "validation": samples[40:50], "test": samples[50:]}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def collate(self, samples: Sequence[Any]) -> Any:
        return super().collate(samples), torch.tensor([len(sample) for sample in samples])

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        values, lengths = batch
        there = torch.arange(values.shape[1]) < lengths[:, None]
        error = (model(values)[..., 0] - values.sum(-1)).square()
        return {"error": ((error * there).sum(), there.sum())}

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        return {"values": (batch[1].sum(), 1)}


class Measured(Words):
    """Measures predictions of the sums."""

    def predict(self, model: nn.Module, batch: Any) -> Sequence[Any]:
        return list(model(batch[0])[..., 0].sum(1))

    def measure(self, samples: Sequence[Any], predictions: Sequence[Any]) -> Mapping[str, float]:
        errors = [float((made - sample.sum()).abs()) for made, sample in zip(predictions, samples, strict=True)]
        return {"mae": sum(errors) / len(errors), "largest": max(errors), "undefined": math.nan}


class RareClass(Task):
    """Classifies points, of which the few of class 1 are not among the samples that a plan compares; their loss weighs
    more in a mean, and is not summed with the weights.
    """

    is_mean_of_rare = False  # Whether a mean over the points of class 1, over no points 0, takes the place of the loss

    def datasets(self) -> Mapping[str, Sequence[Any]]:
        drawn = torch.Generator().manual_seed(0)
        samples = [(torch.randn(4, generator=drawn), int(index % 10 == 8)) for index in range(60)]
        return {"train": samples[:40], "validation": samples[40:50], "test": samples[50:]}

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        points, classes = batch
        made = model(points)
        if self.is_mean_of_rare:
            rare = made[classes == 1].square().sum(1)
            return {"rare": (rare.sum() / max(len(rare), 1), len(classes))}
        weights = made.new_tensor([1.0, 20.0])
        return {"class": (cross_entropy(made, classes, weight=weights) * len(classes), len(classes))}


class MeanOfRare(RareClass):
    """Its loss is a mean over the points of class 1, and 0 over points without one."""

    is_mean_of_rare = True


class TwoTerms(Words):
    """Its two terms have different denominators, which only the loss tells."""

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        size = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        return {**super().loss(model, batch), "size": (size * len(batch[1]), len(batch[1]))}


class RareTerm(TwoTerms):
    """A term of it is left out where a batch has nothing that it is about: few samples are long."""

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        values, lengths = batch
        is_long = lengths > LONG
        if not is_long.any():
            return super().loss(model, batch)
        error = model(values[is_long])[:, LONG].square().sum()
        return {**super().loss(model, batch), "long": (error, int(is_long.sum()))}


class Noisy(Words):
    """Adds noise, which is drawn for the whole batch."""

    def draw(self, samples: Sequence[Any], generator: torch.Generator) -> Sequence[Any]:
        noise = torch.randn(len(samples), generator=generator, dtype=torch.float64)
        return [sample + noise[number] for number, sample in enumerate(samples)]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = nn.Linear(2, 4), nn.Linear(2, 2)


class TwoPhases(Noisy):
    """A generator against a critic, which takes two steps for each of its."""

    def model(self) -> nn.Module:
        return Pair()

    def phases(self) -> Sequence[Phase]:
        return (
            Phase(name="critic", parameters=["critic"], loss=self.critic_loss, steps=2, training={"lr": 1e-2}),
            Phase(name="generator", parameters=["generator"], loss=self.generator_loss, training={"optimizer": "sgd"}),
        )

    def critic_loss(self, model: Any, batch: Any) -> Losses:
        values, lengths = batch
        real, made = model.critic(values), model.critic(model.generator(values))
        there = (torch.arange(values.shape[1]) < lengths[:, None])[..., None]
        return {"critic": (((made - real).square() * there).sum(), there.sum())}

    def generator_loss(self, model: Any, batch: Any) -> Losses:
        return {"generator": (-self.critic_loss(model, batch)["critic"][0], len(batch[1]))}

    def validation_loss(self, model: Any, batch: Any) -> Losses:
        return self.critic_loss(model, batch)
