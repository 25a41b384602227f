"""How far generated showers are from real ones, and the simple methods that a generator is compared with.

Shapes: E events; N muons of all of them together, V variables, K directions.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import wasserstein_distance
from torch import Tensor

from can_train_tasks.muon.point_sets import MuonEvent

Floats = NDArray[np.float64]
_DIRECTIONS: Final = 8  # Along which sets are compared: the axes, and random ones
_SEED: Final = 0  # Of directions and baselines: the same in every run, so that runs are compared


def sliced_energy_distance(real: Tensor, real_counts: Tensor, made: Tensor, made_counts: Tensor) -> Tensor:
    r"""Computes [E] distances between the real and the generated muons of each event, averaged over directions.

    Along each direction it is :math:`2 E|X-Y| - E|X-X'| - E|Y-Y'|`. Of samples, X and X' are different ones: the
    estimate is then right on average however few they are, where the Wasserstein distance of few samples prefers
    generators that spread too little.

    Args:
        real: [N, V], event after event.
        real_counts: [E] at least 1; the event's own distance is 0 for one.
        made: [N', V], event after event.
        made_counts: [E] at least 2.

    Source: Székely and Rizzo, "Energy statistics", 2013.
    """
    directions = _directions(real.shape[1]).to(real)
    x, y = real @ directions, made @ directions
    both = _merge(x, real_counts, y, made_counts)
    within_x, within_y = _pair_sums(x, real_counts), _pair_sums(y, made_counts)
    between = _pair_sums(both, real_counts + made_counts) - within_x - within_y
    n, m = real_counts[:, None].to(real.dtype), made_counts[:, None].to(real.dtype)
    distance = 2 * between / (n * m) - 2 * within_x / (n * (n - 1)).clamp(min=1) - 2 * within_y / (m * (m - 1))
    return distance.mean(1)


def _directions(variables: int) -> Tensor:
    """Returns [V, K] unit vectors, the axes first."""
    generator = torch.Generator().manual_seed(_SEED)
    others = torch.randn(variables, _DIRECTIONS - variables, generator=generator)
    return torch.cat([torch.eye(variables), others / others.norm(dim=0)], dim=1)


def _events_of(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(counts, output_size=int(counts.sum()))


def _merge(x: Tensor, x_counts: Tensor, y: Tensor, y_counts: Tensor) -> Tensor:
    """Returns the lines of both, event after event."""
    event = torch.cat([_events_of(x_counts), _events_of(y_counts)])
    return torch.cat([x, y]).index_select(0, torch.sort(event, stable=True).indices)


def _pair_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Computes [E, K] sums of |a - b| over all pairs of lines of an event, in O(N log N)."""
    event = _events_of(counts)[:, None].expand_as(values)
    by_value = torch.sort(values, dim=0).indices
    # Sorting by the event keeps the order of values within each.
    order = by_value.gather(0, torch.sort(event.gather(0, by_value), dim=0, stable=True).indices)
    ordered, starts = values.gather(0, order), counts.cumsum(0) - counts
    event = event[:, 0]
    rank = torch.arange(len(values), device=values.device) - starts[event]
    # The k-th smallest of n is the larger one in k pairs and the smaller one in n - 1 - k.
    weights = (2 * rank - counts[event] + 1).to(values.dtype)[:, None]
    return values.new_zeros(len(counts), values.shape[1]).index_add(0, event, weights * ordered)


def wasserstein_distances(
    real: Sequence[Floats], made: Sequence[Floats], names: Sequence[str], units: Sequence[float]
) -> dict[str, float]:
    """Computes Wasserstein distances between all real and all generated muons of a set, a variable at a time.

    Args:
        real: Of each event [n, V].
        made: Of each event [n', V].
        names: V of them, as the result has them.
        units: V: what one of the normalised variable is.

    Returns:
        By name the distance in the variable's unit, and those of `w1_radius_m` and of `w1_multiplicity`, the events'
        numbers of muons; `w1_mean`: the mean over variables and multiplicity, each in standard deviations of the real
        ones; `multiplicity_error`: the mean difference of ln n, event by event.
    """
    x, y = np.concatenate(real), np.concatenate(made)
    columns = {name: (x[:, k] * unit, y[:, k] * unit) for k, (name, unit) in enumerate(zip(names, units, strict=True))}
    n, m = np.array([len(one) for one in real], float), np.array([len(one) for one in made], float)
    columns["w1_multiplicity"] = n, m
    found = {name: float(wasserstein_distance(a, b)) for name, (a, b) in columns.items()}
    scaled = [found[name] / max(float(a.std()), np.finfo(float).tiny) for name, (a, _) in columns.items()]
    radii = [np.hypot(values[:, 0], values[:, 1]) * units[0] for values in (x, y)]
    conditional = float(np.abs(np.log(n / np.maximum(m, 1.0))).mean())
    return {"w1_mean": float(np.mean(scaled)), **found, "w1_radius_m": float(wasserstein_distance(*radii)),
            "multiplicity_error": conditional}  # fmt: skip


def nearest_events(samples: Sequence[MuonEvent], training: Sequence[MuonEvent]) -> list[Floats]:
    """Resamples: returns for each sample the muons of one of the training events with the nearest conditions."""
    rng = np.random.default_rng(_SEED)
    known = np.stack([event.conditions.double().numpy() for event in training])
    scale = np.where(known.std(axis=0) > 0, known.std(axis=0), 1.0)
    found = []
    for sample in samples:
        away = (np.abs(known - sample.conditions.double().numpy()) / scale).sum(axis=1)
        # Events of one shower have the same conditions.
        nearest = rng.choice(np.flatnonzero(away <= away.min()))
        found.append(training[int(nearest)].muons.double().numpy())
    return found


def normal_events(samples: Sequence[MuonEvent], training: Sequence[MuonEvent]) -> list[Floats]:
    """Draws events whose muons, and the logarithm of whose multiplicity, are normal with the training data's moments,
    whatever the conditions.
    """
    rng = np.random.default_rng(_SEED)
    muons = np.concatenate([event.muons.double().numpy() for event in training])
    logarithms = np.log([len(event.muons) for event in training])
    counts = np.maximum(np.exp(rng.normal(logarithms.mean(), logarithms.std(), len(samples))).round(), 1).astype(int)
    mean, covariance = muons.mean(axis=0), np.atleast_2d(np.cov(muons.T))
    return [rng.multivariate_normal(mean, covariance, count) for count in counts]
