"""Events with any number of muons, batches of them that hold no padding, and the networks: a generator that draws first
how many muons an event has and then the muons, and a critic of sets.

Shapes: B events; of all events of a batch together M real muons, G generated ones, P pairs of a real and a generated
muon; V variables of a muon, C conditions, Z and L random numbers of a muon and of an event, H width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from can_train_tasks.muon.settings import MuonGanSettings

CONDITIONS: Final = 4
"""log10(E / PeV), cos θ, log10 A, depth / 1000 g/cm²."""
_SLOPE: Final = 0.2  # Of leaky ReLU for negative inputs
# Range of the spread of log n that the generator may assume: no event is exact, none a thousand times too large.
_SPREADS: Final = (0.02, 2.0)
_FIRST_LOG_SPREAD: Final = -1.5  # Spread with which training starts: e^-1.5, a fifth


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """What is drawn for an event in one step.

    Attributes:
        noise: [bound, Z] of its generated muons.
        shower_noise: [L] that its generated muons share.
        multiplicity_noise: of its number of generated muons.
        alpha: in [0, 1], share of the real muons in the mixture on which the critic's gradient is penalized.
    """

    noise: Tensor
    shower_noise: Tensor
    multiplicity_noise: float
    alpha: float


@dataclass(frozen=True, kw_only=True, eq=False)
class MuonEvent:
    """One event.

    Attributes:
        conditions: [C].
        muons: [n, V] real ones, normalised.
        bound: Most muons that the generator may give it.
        drawn: What this step has drawn for it.
    """

    conditions: Tensor
    muons: Tensor
    bound: int
    drawn: Drawn | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MuonBatch:
    """Events one after another.

    Attributes:
        conditions: [B, C].
        counts: [B] real muons.
        bounds: [B] most generated muons.
        real: [M, V] and real_event: [M] the event of each.
        noise: [G, Z], and noise_event: [G] the event of each; slot: [G] its number in its event, from 0.
        shower_noise: [B, L].
        multiplicity_noise: [B].
        alpha: [B].
        pair_real, pair_generated: [P] positions of paired muons: the first ones of an event, as many as it has of
            both, the k-th real with the k-th generated one.
    """

    conditions: Tensor
    counts: Tensor
    bounds: Tensor
    real: Tensor
    real_event: Tensor
    noise: Tensor
    noise_event: Tensor
    slot: Tensor
    shower_noise: Tensor
    multiplicity_noise: Tensor
    alpha: Tensor
    pair_real: Tensor
    pair_generated: Tensor


def collate_events(events: Sequence[MuonEvent]) -> MuonBatch:
    """Puts events, for which a step has drawn, one after another."""
    drawn = [event.drawn for event in events if event.drawn is not None]
    counts = torch.tensor([len(event.muons) for event in events])
    bounds = torch.tensor([event.bound for event in events])
    real_event, real_slot = _numbered(counts)
    noise_event, slot = _numbered(bounds)
    return MuonBatch(
        conditions=torch.stack([event.conditions for event in events]),
        counts=counts, bounds=bounds,
        real=torch.cat([event.muons for event in events]), real_event=real_event,
        noise=torch.cat([one.noise for one in drawn]), noise_event=noise_event, slot=slot,
        shower_noise=torch.stack([one.shower_noise for one in drawn]),
        multiplicity_noise=torch.tensor([one.multiplicity_noise for one in drawn]),
        alpha=torch.tensor([one.alpha for one in drawn]),
        pair_real=(real_slot < bounds[real_event]).nonzero().squeeze(1),
        pair_generated=(slot < counts[noise_event]).nonzero().squeeze(1),
    )  # fmt: skip


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the event of each of its muons, and the number of each in its event."""
    event = torch.repeat_interleave(counts)
    return event, torch.arange(len(event)) - (counts.cumsum(0) - counts)[event]


def mean_by_event(values: Tensor, event: Tensor, counts: Tensor) -> Tensor:
    """Averages lines [N, H] over the events [N] that they belong to, in 32 bits at least.

    A line of event B, of which there is none, is not counted: counts [B] is what the sums are divided by.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    sums = values.new_zeros(len(counts) + 1, values.shape[1]).index_add(0, event, values)
    return sums[:-1] / counts[:, None]


class PerMuon(nn.Module):
    """Multilayer perceptron of each muon, whose first layer also adds what is known of its event.

    Args:
        inputs: Width of a muon.
        known: Width of what is known of its event.
        settings: Width H and number of layers.
    """

    def __init__(self, inputs: int, known: int, settings: MuonGanSettings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.muon, self.event = nn.Linear(inputs, hidden), nn.Linear(known, hidden)
        self.more = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(settings.layers - 1))

    def forward(self, muons: Tensor, known: Tensor, event: Tensor) -> Tensor:
        """Computes [N, H] from muons [N, inputs], events [B, known] and the event [N] of each muon."""
        hidden = nn.functional.leaky_relu(self.muon(muons) + self.event(known).index_select(0, event), _SLOPE)
        for layer in self.more:
            hidden = nn.functional.leaky_relu(layer(hidden), _SLOPE)
        return hidden


class Multiplicity(nn.Module):
    r"""How many muons an event has: :math:`\ln n \sim N(\mu(c), \sigma(c)^2)`.

    Args:
        expectation: [1 + C] of a straight line through ln n of the training events, to which the network adds.
        settings: Its width.
    """

    expectation: Tensor

    def __init__(self, expectation: Tensor, settings: MuonGanSettings) -> None:
        super().__init__()
        self.register_buffer("expectation", expectation)
        self.hidden, self.output = nn.Linear(CONDITIONS, settings.hidden), nn.Linear(settings.hidden, 2)
        nn.init.zeros_(self.output.weight)
        with torch.no_grad():
            self.output.bias.copy_(torch.tensor([0.0, _FIRST_LOG_SPREAD]))

    def line(self, conditions: Tensor) -> Tensor:
        """Computes [B] what the straight line expects of ln n, from conditions [B, C]."""
        line: Tensor = self.expectation[0] + (conditions * self.expectation[1:]).sum(1)
        return line

    def forward(self, conditions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes mean and spread of ln n, [B] each, from conditions [B, C]."""
        # In full precision: half precision rounds a thousand muons to a different number in each part of a batch.
        with torch.autocast(conditions.device.type, enabled=False):
            found: Tensor = self.output(torch.tanh(self.hidden(conditions)))
            return self.line(conditions) + found[:, 0], found[:, 1].exp().clamp(*_SPREADS)

    def negative_log_likelihood(self, conditions: Tensor, counts: Tensor) -> Tensor:
        """Computes [B] how unlikely real numbers of muons [B] are, without the constant."""
        mean, spread = self(conditions)
        unlikely: Tensor = 0.5 * ((counts.to(mean.dtype).log() - mean) / spread).square() + spread.log()
        return unlikely

    def distance(self, conditions: Tensor, counts: Tensor) -> Tensor:
        """Computes [B] how far the distribution of ln n is from real numbers of muons [B]: the continuous ranked
        probability score, which one surprising event does not decide as it decides the likelihood.

        Source: Gneiting and Raftery, "Strictly Proper Scoring Rules", 2007.
        """
        mean, spread = self(conditions)
        z = (counts.to(mean.dtype).log() - mean) / spread
        density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        score: Tensor = spread * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
        return score

    def draw(self, conditions: Tensor, noise: Tensor, bounds: Tensor) -> Tensor:
        """Returns [B] whole numbers of muons, at least 1 and at most `bounds`, from normal random numbers [B]."""
        mean, spread = self(conditions)
        # Bounded before it becomes a whole number, which cannot hold infinity; what is not a number becomes 1.
        logarithm = torch.minimum(mean + spread * noise, bounds.to(mean.dtype).log())
        return logarithm.exp().nan_to_num(nan=1.0).round().long().clamp(min=1).minimum(bounds)


class MuonGenerator(nn.Module):
    """Draws how many muons an event has, then the muons.

    Args:
        expectation: [1 + C], as `Multiplicity` has it.
        mean: [V] of the training muons.
        deviation: [V] of them. An untrained generator draws from a normal distribution with these moments.
        settings: Its size.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, expectation: Tensor, mean: Tensor, deviation: Tensor, settings: MuonGanSettings) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        self.multiplicity = Multiplicity(expectation, settings)
        # Beside the conditions an event's muons know how many they are, more or fewer than expected.
        self.each = PerMuon(settings.noise, CONDITIONS + 1 + settings.shower_noise, settings)
        self.output = nn.Linear(settings.hidden, len(mean))
        nn.init.zeros_(self.output.bias)

    def forward(self, batch: MuonBatch) -> tuple[Tensor, Tensor]:
        """Generates muons [G, V], as many as the bounds allow, and [B] how many of each event's count."""
        with torch.no_grad():
            counts = self.multiplicity.draw(batch.conditions, batch.multiplicity_noise, batch.bounds)
            surplus = counts.to(batch.conditions.dtype).log() - self.multiplicity.line(batch.conditions)
        known = torch.cat([batch.conditions, surplus[:, None], batch.shower_noise], dim=1)
        moved = self.output(self.each(batch.noise, known, batch.noise_event))
        return self.mean + self.deviation * (batch.noise[:, : len(self.mean)] + moved), counts


class SetCritic(nn.Module):
    r"""Scores a set of muons, whatever their order: :math:`\rho(\mathrm{mean}_k \phi(x_k, c), c)`.

    Args:
        variables: Width V of a muon.
        settings: Its size.
    """

    def __init__(self, variables: int, settings: MuonGanSettings) -> None:
        super().__init__()
        self.each = PerMuon(variables, CONDITIONS, settings)
        self.event = nn.Linear(settings.hidden + CONDITIONS, settings.hidden)
        self.output = nn.Linear(settings.hidden, 1)

    def forward(self, muons: Tensor, event: Tensor, counts: Tensor, conditions: Tensor) -> Tensor:
        """Computes [B] scores of sets with `counts` [B] muons.

        Args:
            muons: [N, V].
            event: [N] each one's event; B: it belongs to none.
            counts: [B].
            conditions: [B, C].
        """
        # A muon of no event is computed as one of the first: in the sums it has a line of its own.
        hidden = self.each(muons, conditions, event.where(event < len(counts), 0))
        pooled = mean_by_event(hidden, event, counts)
        hidden = self.event(torch.cat([pooled.to(conditions.dtype), conditions], dim=1))
        score: Tensor = self.output(nn.functional.leaky_relu(hidden, _SLOPE)).squeeze(1)
        return score


class MuonGan(nn.Module):
    """Generator and critic."""

    def __init__(self, generator: MuonGenerator, critic: SetCritic) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def score(self, batch: MuonBatch, generated: Tensor, counts: Tensor) -> Tensor:
        """Computes the critic's scores [B] of generated muons [G, V], of which the first `counts` [B] count."""
        event = kept_event(batch.noise_event, batch.slot, counts)
        score: Tensor = self.critic(generated, event, counts, batch.conditions)
        return score

    def gradient_norm(self, batch: MuonBatch, generated: Tensor, counts: Tensor) -> Tensor:
        r"""Computes [B] norms of the critic's gradient between the real and the generated set of each event.

        The sets are cut to the muons that both have, m, which are paired in their order and mixed with the event's α.
        The distance between two sets is :math:`\sqrt{\frac1m \sum_k |x_k - y_k|^2}`, which does not grow with m; the
        norm that belongs to it is :math:`\sqrt{m \sum_k |\nabla_k|^2}`.
        """
        event = batch.noise_event[batch.pair_generated]
        alpha = batch.alpha[event][:, None]
        mixed = alpha * batch.real[batch.pair_real] + (1 - alpha) * generated[batch.pair_generated]
        mixed = mixed.detach().requires_grad_()
        pairs = torch.minimum(counts, batch.counts)
        kept = kept_event(event, batch.slot[batch.pair_generated], pairs)
        scores = self.critic(mixed, kept, pairs, batch.conditions)
        # Times m: half precision has no numbers as small as the gradient of a mean over thousands.
        (gradient,) = torch.autograd.grad(scores, mixed, pairs.to(scores.dtype), create_graph=True)
        squares = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).square().sum(1, keepdim=True)
        squared = mean_by_event(squares, kept, pairs).squeeze(1)
        # A norm has no gradient at 0.
        norm: Tensor = (squared + torch.finfo(torch.float32).tiny ** 0.5).sqrt()
        return norm


def kept_event(event: Tensor, slot: Tensor, counts: Tensor) -> Tensor:
    """Returns the event of each muon, and B for one whose number in its event is not below counts [B]."""
    return event.where(slot < counts[event], len(counts))
