"""Distances between generated and real showers, and the baselines for a generator.

Shapes: E events; N muons of all events together, V variables, K directions.
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
_DIRECTIONS: Final = 8  # Directions along which sets are compared: the axes, then random directions
_SEED: Final = 0  # Seed of directions and baselines: equal in all runs, so that runs can be compared


def sliced_energy_distance(real: Tensor, real_counts: Tensor, made: Tensor, made_counts: Tensor) -> Tensor:
    r"""Computes the energy distance [E] between the real and the generated muons of each event.

    The result is the mean over directions. The distance along a direction is :math:`2 E|X-Y| - E|X-X'| - E|Y-Y'|`,
    where X and X' are different samples. The estimate is therefore unbiased even with few samples, whereas the
    Wasserstein distance of few samples prefers generators that spread too little.

    Args:
        real: [N, V] real muons, event after event.
        real_counts: [E] numbers of real muons, at least 1; with 1, the term E|X-X'| is 0.
        made: [N', V] generated muons, event after event.
        made_counts: [E] numbers of generated muons, at least 2.

    Source: Székely and Rizzo, "Energy statistics", 2013.
    """
    directions = _directions(real.shape[1]).to(real)
    x, y = real @ directions, made @ directions
    # The lines of x and y, event after event.
    event = torch.cat([_events_of(real_counts), _events_of(made_counts)])
    both = torch.cat([x, y]).index_select(0, torch.sort(event, stable=True).indices)
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


def _pair_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Computes the sums [E, K] of |a - b| over all pairs of lines of an event, in O(N log N)."""
    event = _events_of(counts)[:, None].expand_as(values)
    by_value = torch.sort(values, dim=0).indices
    # The stable sort by event keeps the order of values within each event.
    order = by_value.gather(0, torch.sort(event.gather(0, by_value), dim=0, stable=True).indices)
    ordered, starts = values.gather(0, order), counts.cumsum(0) - counts
    event = event[:, 0]
    rank = torch.arange(len(values), device=values.device) - starts[event]
    # The k-th smallest of n values (k from 0) is the larger value of k pairs and the smaller value of n - 1 - k pairs.
    weights = (2 * rank - counts[event] + 1).to(values.dtype)[:, None]
    return values.new_zeros(len(counts), values.shape[1]).index_add(0, event, weights * ordered)


def wasserstein_distances(
    real: Sequence[Floats], made: Sequence[Floats], names: Sequence[str], units: Sequence[float]
) -> dict[str, float]:
    """Computes the Wasserstein distance between all real and all generated muons of a set, for each variable.

    Args:
        real: [n, V] normalised real muons of each event.
        made: [n', V] normalised generated muons of each event.
        names: V names of the variables in the result.
        units: V factors that turn normalised variables into their units.

    Returns:
        Distances by name: of each variable, in its unit; `w1_radius_m`, of the distance from the core in m;
        `w1_multiplicity`, of the number of muons of an event; `w1_mean`, the mean over variables and multiplicity,
        each divided by the standard deviation of the real values, where they vary; `multiplicity_error`, the mean over
        events of the absolute difference of ln n.
    """
    x, y = np.concatenate(real), np.concatenate(made)
    columns = {name: (x[:, k] * unit, y[:, k] * unit) for k, (name, unit) in enumerate(zip(names, units, strict=True))}
    n, m = (np.array([len(muons) for muons in events], float) for events in (real, made))
    columns["w1_multiplicity"] = n, m
    distances = {name: float(wasserstein_distance(a, b)) for name, (a, b) in columns.items()}
    # The numbers of muons of a single event, or of equal ones, have no spread to compare with.
    scaled = [distances[name] / spread for name, (a, _) in columns.items() if (spread := float(a.std())) > 0]
    radii = [np.hypot(values[:, 0], values[:, 1]) * units[0] for values in (x, y)]
    conditional = float(np.abs(np.log(n / np.maximum(m, 1.0))).mean())
    return {
        "w1_mean": float(np.mean(scaled)) if scaled else np.nan,
        **distances,
        "w1_radius_m": float(wasserstein_distance(*radii)),
        "multiplicity_error": conditional,
    }


def nearest_events(samples: Sequence[MuonEvent], training: Sequence[MuonEvent]) -> list[Floats]:
    """Returns for each sample the muons of a random training event among those with the nearest conditions."""
    rng = np.random.default_rng(_SEED)
    conditions = np.stack([event.conditions.double().numpy() for event in training])
    scale = np.where(conditions.std(axis=0) > 0, conditions.std(axis=0), 1.0)
    events = []
    for sample in samples:
        away = (np.abs(conditions - sample.conditions.double().numpy()) / scale).sum(axis=1)
        # Several training events may be equally near: the events of one shower have equal conditions.
        nearest = rng.choice(np.flatnonzero(away <= away.min()))
        events.append(training[int(nearest)].muons.double().numpy())
    return events


def normal_events(samples: Sequence[MuonEvent], training: Sequence[MuonEvent]) -> list[Floats]:
    """Draws for each sample an event from normal distributions of its muons and of the logarithm of its multiplicity.

    The distributions have the moments of the training data; the sample's conditions are not used.
    """
    rng = np.random.default_rng(_SEED)
    muons = np.concatenate([event.muons.double().numpy() for event in training])
    logarithms = np.log([len(event.muons) for event in training])
    counts = np.maximum(np.exp(rng.normal(logarithms.mean(), logarithms.std(), len(samples))).round(), 1).astype(int)
    mean, covariance = muons.mean(axis=0), np.atleast_2d(np.cov(muons.T))
    return [rng.multivariate_normal(mean, covariance, count) for count in counts]
