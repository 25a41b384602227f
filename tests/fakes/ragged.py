"""Ragged samples with a heavy tail, a small network over them, and the losses that people train such networks with:
each as sums with the denominators of the whole logical batch.

Shapes: R samples, N their items (nodes, tokens) in all, T of the longest, F features, H hidden, C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.fit.micro_batcher import Losses
from can_train.fit.packing import BatchCosts, SplitRules

FEATURES = 5
HIDDEN = 8
CLASSES = 3
CLASS_WEIGHTS = (1.0, 5.0, 20.0)
PENALTY = 10.0


def cut_at(sizes: Sequence[int]) -> tuple[BatchCosts, SplitRules]:
    """Costs and rules under which a batch is cut into parts of these sizes."""
    return BatchCosts.of_samples([1 / size for size in sizes for _ in range(size)]), SplitRules(safe_limit=1.0)


def pareto_sizes(samples: int, seed: int, *, largest: int = 200) -> np.ndarray:
    """Draws [samples] items a sample, most of them few."""
    drawn = 2 + np.floor(np.random.default_rng(seed).pareto(1.2, samples) * 4)
    return np.minimum(drawn, largest).astype(np.int64)


@dataclass(kw_only=True)
class Ragged:
    """Samples of different lengths, with everything that the losses below need.

    Attributes:
        sizes: [R] items of each.
        x: [N, F] the items.
        sample_class: [R] labels of samples.
        item_class: [N] labels of items.
        masked: [N] which items count in a masked mean.
        noise: [N, H] drawn once for the whole batch (a reparameterisation).
        alpha: [R, 1] drawn once for the whole batch (an interpolation).
    """

    sizes: np.ndarray
    x: Tensor
    sample_class: Tensor
    item_class: Tensor
    masked: Tensor
    noise: Tensor
    alpha: Tensor
    ptr: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.ptr = np.concatenate([[0], np.cumsum(self.sizes)])

    @classmethod
    def draw(cls, samples: int, dtype: torch.dtype, seed: int = 0) -> "Ragged":
        sizes = pareto_sizes(samples, seed)
        rng = np.random.default_rng(seed + 1)
        items = int(sizes.sum())

        def normal(*shape: int) -> Tensor:
            return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

        return cls(
            sizes=sizes,
            x=normal(items, FEATURES),
            sample_class=torch.from_numpy(rng.integers(0, CLASSES, samples)),
            item_class=torch.from_numpy(rng.integers(0, CLASSES, items)),
            masked=torch.from_numpy(rng.random(items) < 0.3),
            noise=normal(items, HIDDEN),
            alpha=torch.from_numpy(rng.random((samples, 1))).to(dtype),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def items(self, start: int, stop: int) -> slice:
        """Where the items of samples `start:stop` are."""
        return slice(int(self.ptr[start]), int(self.ptr[stop]))

    def owner(self, start: int, stop: int) -> Tensor:
        """Returns which sample of the part each of its items belongs to."""
        return torch.from_numpy(np.repeat(np.arange(stop - start), self.sizes[start:stop]))


class RaggedNet(nn.Module):
    """Items see the mean of their sample; samples are the mean of their items."""

    def __init__(self, norm: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, HIDDEN)
        self.norm = norm or nn.LayerNorm(HIDDEN)
        self.outer = nn.Linear(2 * HIDDEN, HIDDEN)
        self.recurrent = nn.GRU(FEATURES, HIDDEN, batch_first=True)
        self.classes = nn.Linear(HIDDEN, CLASSES)
        self.spread = nn.Linear(HIDDEN, HIDDEN)
        self.decoder = nn.Linear(HIDDEN, FEATURES)
        self.critic = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        self.dropout = dropout

    def items(self, x: Tensor, owner: Tensor, samples: int) -> Tensor:
        """Embeds items: [N, F] → [N, H]."""
        hidden = F.dropout(torch.tanh(self.norm(self.inner(x))), self.dropout, self.training)
        context = mean_of(hidden, owner, samples)[owner]
        embedded: Tensor = torch.tanh(self.outer(torch.cat([hidden, context], dim=1)))
        return embedded


def mean_of(values: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Means over each sample's items: [N, H] → [samples, H]."""
    counts = torch.zeros(samples, dtype=values.dtype).index_add(0, owner, torch.ones(len(owner), dtype=values.dtype))
    return torch.zeros(samples, values.shape[1], dtype=values.dtype).index_add(0, owner, values) / counts.unsqueeze(1)


@dataclass(frozen=True)
class Objective:
    """A loss of a logical batch.

    Attributes:
        denominators: Per term, from the whole batch.
        losses: Each term's sum and own denominator over samples `start:stop`.
    """

    denominators: Callable[[Ragged], dict[str, float]]
    losses: Callable[[RaggedNet, Ragged, int, int], Losses]


def _embedded(net: RaggedNet, data: Ragged, start: int, stop: int) -> Tensor:
    return net.items(data.x[data.items(start, stop)], data.owner(start, stop), stop - start)


def _graph_mean(net: RaggedNet, data: Ragged, start: int, stop: int) -> Losses:
    pooled = mean_of(_embedded(net, data, start, stop), data.owner(start, stop), stop - start)
    total = F.cross_entropy(net.classes(pooled), data.sample_class[start:stop], reduction="sum")
    return {"graph": (total, float(stop - start))}


def _node_mean(net: RaggedNet, data: Ragged, start: int, stop: int) -> Losses:
    items = data.items(start, stop)
    logits = net.classes(_embedded(net, data, start, stop))
    return {"node": (F.cross_entropy(logits, data.item_class[items], reduction="sum"), float(len(logits)))}


def _class_weighted(net: RaggedNet, data: Ragged, start: int, stop: int) -> Losses:
    pooled = mean_of(_embedded(net, data, start, stop), data.owner(start, stop), stop - start)
    labels, weight = data.sample_class[start:stop], torch.tensor(CLASS_WEIGHTS, dtype=data.x.dtype)
    total = F.cross_entropy(net.classes(pooled), labels, weight=weight, reduction="sum")
    return {"class": (total, float(weight[labels].sum()))}


def _masked_mean(net: RaggedNet, data: Ragged, start: int, stop: int) -> Losses:
    items = data.items(start, stop)
    masked = data.masked[items]
    error = (net.decoder(_embedded(net, data, start, stop)) - data.x[items]).square().mean(dim=1)
    return {"masked": ((error * masked).sum(), float(masked.sum()))}


def _token_mean(net: RaggedNet, data: Ragged, start: int, stop: int) -> Losses:
    """Sequences padded to the longest of the part; the padding does not count."""
    lengths = data.sizes[start:stop]
    split = torch.split(data.x[data.items(start, stop)], lengths.tolist())
    padded = nn.utils.rnn.pad_sequence(list(split), batch_first=True)
    states, _ = net.recurrent(padded)
    real = torch.arange(padded.shape[1]) < torch.from_numpy(lengths).unsqueeze(1)
    total = F.cross_entropy(net.classes(states[real]), data.item_class[data.items(start, stop)], reduction="sum")
    return {"token": (total, float(lengths.sum()))}


def _vgae(net: RaggedNet, data: Ragged, start: int, stop: int) -> Losses:
    """Reconstruction of items, of their sample's mean, and divergence: three means over different things."""
    items, owner = data.items(start, stop), data.owner(start, stop)
    mean = _embedded(net, data, start, stop)
    log_spread = net.spread(mean).clamp(-4, 4)
    decoded = net.decoder(mean + data.noise[items] * log_spread.exp())
    node = (decoded - data.x[items]).square().mean(dim=1).sum()
    pooled = mean_of(decoded - data.x[items], owner, stop - start).square().sum()
    divergence = -0.5 * (1 + 2 * log_spread - mean.square() - (2 * log_spread).exp()).sum()
    count = float(len(mean))
    return {"node": (node, count), "sample": (pooled, float(stop - start)), "kl": (divergence, count)}


def _gradient_penalty(net: RaggedNet, data: Ragged, start: int, stop: int) -> Losses:
    """A critic on samples' means, with the penalty of WGAN-GP: backward through a backward."""
    real = mean_of(data.x[data.items(start, stop)], data.owner(start, stop), stop - start)
    fake = mean_of(data.noise[data.items(start, stop), :FEATURES], data.owner(start, stop), stop - start)
    alpha = data.alpha[start:stop]
    between = (alpha * real + (1 - alpha) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(net.critic(between).sum(), between, create_graph=True)
    penalty = PENALTY * (slope.norm(2, dim=1) - 1).square().sum()
    wasserstein = net.critic(fake).sum() - net.critic(real).sum()
    return {"wasserstein": (wasserstein, float(stop - start)), "penalty": (penalty, float(stop - start))}


def _of_items(*terms: str) -> Callable[[Ragged], dict[str, float]]:
    return lambda data: {term: float(len(data.x)) for term in terms}


def _of_samples(*terms: str) -> Callable[[Ragged], dict[str, float]]:
    return lambda data: {term: float(len(data)) for term in terms}


OBJECTIVES = {
    "graph mean": Objective(_of_samples("graph"), _graph_mean),
    "node mean": Objective(_of_items("node"), _node_mean),
    "class-weighted mean": Objective(
        lambda data: {"class": sum(CLASS_WEIGHTS[label] for label in data.sample_class.tolist())}, _class_weighted
    ),
    "masked mean": Objective(lambda data: {"masked": float(data.masked.sum())}, _masked_mean),
    "token mean": Objective(_of_items("token"), _token_mean),
    "vgae": Objective(lambda data: {**_of_items("node", "kl")(data), **_of_samples("sample")(data)}, _vgae),
    "gradient penalty": Objective(_of_samples("wasserstein", "penalty"), _gradient_penalty),
}
