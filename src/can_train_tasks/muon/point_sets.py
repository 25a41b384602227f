"""Events with any number of muons, batches without padding, and the two networks, a generator and a critic.

The generator draws first the number of muons of an event and then the muons. The critic scores sets of muons.

Shapes: B events of a batch. Over all events of a batch: M real muons, G generated muons, P pairs of a real and a
generated muon, N muons of either kind. V variables of a muon, C conditions, Z random numbers of a muon, L random
numbers of an event, H width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from can_train.fit.collate import join, pad_and_stack
from can_train_tasks.muon.settings import MuonGanSettings

CONDITIONS: Final = 4
"""Number of conditions C: log10(E / PeV), cos θ, log10 A, depth / 1000 g/cm²."""
_SLOPE: Final = 0.2  # Slope of leaky ReLU for negative inputs
# Allowed standard deviations of ln n: above 0, since no multiplicity is exact; at most 2, so that no draw is 1000 times
# too large.
_SPREADS: Final = (0.02, 2.0)
_FIRST_LOG_SPREAD: Final = -1.5  # Training starts with a spread of ln n of e^-1.5 = 0.22


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Random numbers of an event in one step.

    Attributes:
        noise: [bound, Z] random numbers of each generated muon.
        shower_noise: [L] random numbers that the event's generated muons share.
        multiplicity_noise: Random number behind the number of generated muons.
        alpha: Share of the real muons, in [0, 1], in the mixture whose critic gradient is penalised.
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
        muons: [n, V] normalised real muons.
        bound: Most muons that the generator may give the event.
        drawn: Random numbers of this step; None before they are drawn.
        primary: Number of the shower, then energy in GeV, zenith angle in rad, CORSIKA's number of the particle and
            depth in g/cm².
        seed: Of its random numbers, where its shower is to be drawn; None: the step decides.
    """

    conditions: Tensor
    muons: Tensor
    bound: int
    drawn: Drawn | None = None
    primary: tuple[float, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MuonBatch:
    """The muons of several events in succession, without padding.

    Attributes:
        conditions: [B, C].
        counts: [B] number of real muons.
        bounds: [B] most generated muons.
        real: [M, V] real muons.
        real_event: [M] event of each real muon.
        noise: [G, Z] random numbers of each generated muon.
        noise_event: [G] event of each generated muon.
        slot: [G] number of each generated muon in its event, from 0.
        shower_noise: [B, L].
        multiplicity_noise: [B].
        alpha: [B].
        pair_real, pair_generated: [P] positions of paired muons in `real` and in the generated muons. The k-th real
            muon of an event is paired with its k-th generated muon, as far as the event has both.
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
    """Joins events into a batch; the random numbers of each event must be drawn."""
    drawn = [event.drawn for event in events if event.drawn is not None]
    counts = torch.tensor([len(event.muons) for event in events])
    bounds = torch.tensor([event.bound for event in events])
    real_event, real_slot = _numbered(counts)
    noise_event, slot = _numbered(bounds)
    return MuonBatch(
        conditions=pad_and_stack([event.conditions for event in events]),
        counts=counts, bounds=bounds,
        real=join([event.muons for event in events]), real_event=real_event,
        noise=torch.cat([one.noise for one in drawn]), noise_event=noise_event, slot=slot,
        shower_noise=torch.stack([one.shower_noise for one in drawn]),
        multiplicity_noise=torch.tensor([one.multiplicity_noise for one in drawn]),
        alpha=torch.tensor([one.alpha for one in drawn]),
        pair_real=(real_slot < bounds[real_event]).nonzero().squeeze(1),
        pair_generated=(slot < counts[noise_event]).nonzero().squeeze(1),
    )  # fmt: skip


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the event of each muon, and the muon's number in that event, from 0."""
    event = torch.repeat_interleave(counts)
    return event, torch.arange(len(event)) - (counts.cumsum(0) - counts)[event]


def mean_by_event(values: Tensor, event: Tensor, counts: Tensor) -> Tensor:
    """Averages lines [N, H] over the events `event` [N] that they belong to, in at least 32 bits.

    Events are numbered from 0 to B - 1; a line with event number B is left out. The sums are divided by `counts` [B].
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    sums = values.new_zeros(len(counts) + 1, values.shape[1]).index_add(0, event, values)
    return sums[:-1] / counts[:, None]


class PerMuon(nn.Module):
    """Multilayer perceptron for each muon; its first layer also adds the inputs of the muon's event.

    Args:
        inputs: Width of a muon's inputs.
        known: Width of an event's inputs.
        settings: Width H and number of layers.
    """

    def __init__(self, inputs: int, known: int, settings: MuonGanSettings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.muon, self.event = nn.Linear(inputs, hidden), nn.Linear(known, hidden)
        self.more = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(settings.layers - 1))

    def forward(self, muons: Tensor, known: Tensor, event: Tensor) -> Tensor:
        """Computes [N, H] from muons [N, inputs], events [B, known] and the event number [N] of each muon."""
        hidden = nn.functional.leaky_relu(self.muon(muons) + self.event(known).index_select(0, event), _SLOPE)
        for layer in self.more:
            hidden = nn.functional.leaky_relu(layer(hidden), _SLOPE)
        return hidden


class Multiplicity(nn.Module):
    r"""Distribution of the number n of muons of an event: :math:`\ln n \sim N(\mu(c), \sigma(c)^2)`.

    Args:
        expectation: [1 + C] coefficients of the straight line through ln n of the training events; the network adds
            a correction to the line.
        settings: Width of the network.
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
        """Computes the straight line's ln n [B] for conditions [B, C]."""
        line: Tensor = self.expectation[0] + (conditions * self.expectation[1:]).sum(1)
        return line

    def forward(self, conditions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes mean and standard deviation of ln n, [B] each, for conditions [B, C]."""
        # In full precision: half precision rounds a thousand muons to a different number in each part of a batch.
        with torch.autocast(conditions.device.type, enabled=False):
            found: Tensor = self.output(torch.tanh(self.hidden(conditions)))
            return self.line(conditions) + found[:, 0], found[:, 1].exp().clamp(*_SPREADS)

    def negative_log_likelihood(self, conditions: Tensor, counts: Tensor) -> Tensor:
        """Computes the negative log-likelihood [B] of `counts` [B] real muons, without its constant."""
        mean, spread = self(conditions)
        unlikely: Tensor = 0.5 * ((counts.to(mean.dtype).log() - mean) / spread).square() + spread.log()
        return unlikely

    def distance(self, conditions: Tensor, counts: Tensor) -> Tensor:
        """Computes the continuous ranked probability score [B] of ln n's distribution, for `counts` [B] real muons.

        One surprising event can dominate a mean of likelihoods, but not a mean of these scores.

        Source: Gneiting and Raftery, "Strictly Proper Scoring Rules", 2007.
        """
        mean, spread = self(conditions)
        z = (counts.to(mean.dtype).log() - mean) / spread
        density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        score: Tensor = spread * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
        return score

    def draw(self, conditions: Tensor, noise: Tensor, bounds: Tensor) -> Tensor:
        """Returns numbers of muons [B], from 1 to `bounds` [B], for normal random numbers `noise` [B]."""
        mean, spread = self(conditions)
        # The bound comes before the conversion to whole numbers, which cannot hold infinity; NaN becomes 1.
        logarithm = torch.minimum(mean + spread * noise, bounds.to(mean.dtype).log())
        return logarithm.exp().nan_to_num(nan=1.0).round().long().clamp(min=1).minimum(bounds)


class MuonGenerator(nn.Module):
    """Draws the number of muons of an event, then the muons.

    An untrained generator draws muons from a normal distribution with the moments `mean` and `deviation`.

    Args:
        expectation: [1 + C] coefficients of the line in `Multiplicity`.
        mean: [V] mean of the training muons.
        deviation: [V] standard deviation of the training muons.
        settings: Size of the networks.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, expectation: Tensor, mean: Tensor, deviation: Tensor, settings: MuonGanSettings) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        self.multiplicity = Multiplicity(expectation, settings)
        # A muon's inputs: its random numbers; its event's conditions, surplus of muons over the line, random numbers.
        self.each = PerMuon(settings.noise, CONDITIONS + 1 + settings.shower_noise, settings)
        self.output = nn.Linear(settings.hidden, len(mean))
        nn.init.zeros_(self.output.bias)

    def forward(self, batch: MuonBatch) -> tuple[Tensor, Tensor]:
        """Generates muons [G, V], `bounds` for each event, and numbers [B]: only the first muons up to it count."""
        with torch.no_grad():
            counts = self.multiplicity.draw(batch.conditions, batch.multiplicity_noise, batch.bounds)
            surplus = counts.to(batch.conditions.dtype).log() - self.multiplicity.line(batch.conditions)
        known = torch.cat([batch.conditions, surplus[:, None], batch.shower_noise], dim=1)
        moved = self.output(self.each(batch.noise, known, batch.noise_event))
        return self.mean + self.deviation * (batch.noise[:, : len(self.mean)] + moved), counts


class SetCritic(nn.Module):
    r"""Scores a set of muons: :math:`\rho(\mathrm{mean}_k \phi(x_k, c), c)`. The order of the muons does not matter.

    Args:
        variables: Width V of a muon.
        settings: Size of the network.
    """

    def __init__(self, variables: int, settings: MuonGanSettings) -> None:
        super().__init__()
        self.each = PerMuon(variables, CONDITIONS, settings)
        self.event = nn.Linear(settings.hidden + CONDITIONS, settings.hidden)
        self.output = nn.Linear(settings.hidden, 1)

    def forward(self, muons: Tensor, event: Tensor, counts: Tensor, conditions: Tensor) -> Tensor:
        """Computes the scores [B] of sets of muons.

        Args:
            muons: [N, V].
            event: [N] event of each muon; B: the muon belongs to no event.
            counts: [B] muons of each event.
            conditions: [B, C].
        """
        # A muon of no event gets the conditions of event 0; `mean_by_event` then leaves it out.
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
        """Computes the critic's scores [B] for the first `counts` [B] generated muons [G, V] of each event."""
        event = kept_event(batch.noise_event, batch.slot, counts)
        score: Tensor = self.critic(generated, event, counts, batch.conditions)
        return score

    def gradient_norm(self, batch: MuonBatch, generated: Tensor, counts: Tensor) -> Tensor:
        r"""Computes the norm [B] of the critic's gradient between the real and the generated set of each event.

        Both sets are cut to the size m of the smaller set, paired in order, and mixed with the event's α. The distance
        between two sets is :math:`\sqrt{\frac1m \sum_k |x_k - y_k|^2}`, which does not grow with m; the norm that
        belongs to this distance is :math:`\sqrt{m \sum_k |\nabla_k|^2}`.
        """
        event = batch.noise_event[batch.pair_generated]
        alpha = batch.alpha[event][:, None]
        mixed = alpha * batch.real[batch.pair_real] + (1 - alpha) * generated[batch.pair_generated]
        mixed = mixed.detach().requires_grad_()
        pairs = torch.minimum(counts, batch.counts)
        kept = kept_event(event, batch.slot[batch.pair_generated], pairs)
        scores = self.critic(mixed, kept, pairs, batch.conditions)
        # Multiplied by m: half precision has no numbers as small as the gradient of a mean over thousands of muons.
        (gradient,) = torch.autograd.grad(scores, mixed, pairs.to(scores.dtype), create_graph=True)
        squares = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).square().sum(1, keepdim=True)
        squared = mean_by_event(squares, kept, pairs).squeeze(1)
        # The smallest number keeps the root away from 0, where it has no gradient.
        norm: Tensor = (squared + torch.finfo(torch.float32).tiny ** 0.5).sqrt()
        return norm


def kept_event(event: Tensor, slot: Tensor, counts: Tensor) -> Tensor:
    """Returns the event of each muon; B for a muon whose number in its event, `slot`, is not below `counts` [B]."""
    return event.where(slot < counts[event], len(counts))
