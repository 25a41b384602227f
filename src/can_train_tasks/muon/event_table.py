"""Events of showers in flat arrays, which grow part by part while files are read.

An event is cut out of the arrays when it is asked for: as a Python object it takes more memory than its muons do.

Shapes: S showers, E events, M muons, V variables of a muon, C conditions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.training.read_ahead import ArraySamples
from can_train_tasks.muon.point_sets import CONDITIONS, MuonEvent
from can_train_tasks.muon.settings import MuonGanSettings
from can_train_tasks.muon.showers import Showers

Floats = NDArray[np.float64]

_PEV_GEV: Final = 1e6
_KM_G_CM2: Final = 1000.0  # Unit of normalised depth
_POSITION_M: Final = 500.0  # Unit of normalised x and y
_DELAY_NS: Final = 1.0  # Added to a delay before its logarithm: the first muon's delay is 0
UNITS: Final = {"x": _POSITION_M, "y": _POSITION_M, "energy": 1.0, "time": 1.0}
"""Units of normalised variables."""
_RIDGE: Final = 1e-6  # Penalty of the line through ln n: conditions that never vary get no slope
_POISSON_SPREADS: Final = 3.0  # Standard deviations added to an event's bound, for events of few muons
_BLOCK: Final = 2**18  # Events or muons whose sums are computed at a time


class _Conditions(Protocol):
    """Showers, or primaries without showers."""

    @property
    def energy_gev(self) -> Floats: ...
    @property
    def zenith_rad(self) -> Floats: ...
    @property
    def mass(self) -> Floats: ...
    @property
    def depth_g_cm2(self) -> Floats: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Moments of the training events: the scale of the generator's muons, and the expected multiplicity."""

    expectation: Floats  # [1 + C] coefficients of the line through ln n
    mean: Floats  # [V] mean of the muons
    deviation: Floats  # [V] standard deviation of the muons

    def bounds(self, conditions: NDArray[np.float32], model: MuonGanSettings) -> NDArray[np.int64]:
        """Returns the most muons that events are given under conditions [E, C]."""
        line = self.expectation
        logarithm = line[0] + (conditions.astype(np.float64) * line[1:]).sum(axis=1)
        expected = np.exp(np.minimum(logarithm, np.log(model.max_generated)))
        highest = model.bound * expected + _POISSON_SPREADS * np.sqrt(expected)
        bounds: NDArray[np.int64] = np.clip(np.ceil(highest).astype(np.int64), 2, model.max_generated)
        return bounds


class EventTable:
    """Events of showers. Parts of showers are appended; `deal` makes events of them, once.

    Args:
        variables: Variables of a muon.

    Attributes:
        muons: [M, V] normalised muons; those of an event are in succession.
        conditions: [S, C] normalised conditions.
        primaries: [S, 4] energy in GeV, zenith angle in rad, CORSIKA's number and depth in g/cm² of each primary.
        counts: [S] muons of each shower; [E] of each event once they are dealt.
        showers: [E] shower of each event.
        bounds: [E] most muons that an event is given.
    """

    def __init__(self, variables: Sequence[str]) -> None:
        self.variables = list(variables)
        self.muons = np.empty((0, len(self.variables)), np.float32)
        self.conditions = np.empty((0, CONDITIONS), np.float32)
        self.primaries = np.empty((0, 4), np.float64)
        self.counts = np.empty(0, np.int64)
        self.showers = self.bounds = self._starts = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (self.muons, self.conditions, self.primaries, self.counts, self.showers, self.bounds, self._starts)
        return sum(array.nbytes for array in arrays)

    def append(self, showers: Showers) -> None:
        """Appends showers, in the order of the files."""
        columns = (showers.energy_gev, showers.zenith_rad, showers.primary_id, showers.depth_g_cm2)
        _extend(self.primaries, np.stack(columns, axis=1))
        _extend(self.conditions, conditions_of(showers))
        _extend(self.counts, showers.counts)
        _extend(self.muons, np.stack([_normalised(name, showers.muons[name]) for name in self.variables], axis=1))

    def deal(self, parts: int, rng: np.random.Generator) -> None:
        """Makes events of showers: one each, or `parts`, to which the muons are dealt out at random. Each part is a
        thinned copy of the shower.
        """
        self.showers = np.arange(len(self.counts))
        if parts > 1:
            events = np.repeat(self.showers * parts, self.counts) + rng.integers(0, parts, len(self.muons))
            self.muons = self.muons[np.argsort(events, kind="stable")]
            numbers, self.counts = np.unique(events, return_counts=True)
            self.showers = numbers // parts
        self._starts = np.cumsum(self.counts) - self.counts

    def event(self, row: int) -> MuonEvent:
        """Cuts out an event."""
        start, shower = int(self._starts[row]), int(self.showers[row])
        muons = torch.from_numpy(self.muons[start : start + int(self.counts[row])])
        return MuonEvent(conditions=torch.from_numpy(self.conditions[shower]), muons=muons, bound=int(self.bounds[row]),
                         primary=(shower + 1, *self.primaries[shower].tolist()))  # fmt: skip

    def set_bounds(self, moments: Moments, model: MuonGanSettings) -> None:
        """Computes the bounds of all events."""
        blocks = [moments.bounds(self.conditions[self.showers[block]], model) for block in _blocks(len(self))]
        self.bounds = np.concatenate(blocks)

    def moments(self, rows: NDArray[np.int64]) -> Moments:
        """Computes the moments of some events, given by ascending rows, block by block."""
        is_chosen = np.zeros(len(self), bool)
        is_chosen[rows] = True
        of_muons = np.repeat(is_chosen, self.counts)

        def muons() -> Iterator[Floats]:
            return (self.muons[block][of_muons[block]].astype(np.float64) for block in _blocks(len(self.muons)))

        count = int(of_muons.sum())
        mean = _total(block.sum(axis=0) for block in muons()) / count
        variance = _total(np.square(block - mean).sum(axis=0) for block in muons()) / count
        deviation = np.maximum(np.sqrt(variance), np.finfo(np.float32).eps)
        return Moments(expectation=self._expectation(rows), mean=mean, deviation=deviation)

    def _expectation(self, rows: NDArray[np.int64]) -> Floats:
        """Fits a line through ln n of some events over their conditions."""

        def blocks() -> Iterator[tuple[Floats, Floats]]:
            for block in _blocks(len(rows)):
                conditions = self.conditions[self.showers[rows[block]]].astype(np.float64)
                yield np.insert(conditions, 0, 1.0, axis=1), np.log(self.counts[rows[block]].astype(np.float64))

        centre: Floats = _total(known.sum(axis=0) for known, _ in blocks()) / len(rows)
        centre[0] = 0.0
        squares = _total((known - centre).T @ (known - centre) for known, _ in blocks())
        products = _total((known - centre).T @ logarithms for known, logarithms in blocks())
        slopes = np.linalg.solve(squares + _RIDGE * len(rows) * np.eye(1 + CONDITIONS), products).astype(np.float64)
        slopes[0] -= slopes @ centre
        return slopes


class Events(ArraySamples):
    """Some events of a table, by their rows."""

    def __init__(self, table: EventTable, rows: NDArray[np.int64]) -> None:
        self._table, self._rows = table, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self._table.event(row) for row in self._rows[number].tolist()]
        return self._table.event(int(self._rows[number]))


def conditions_of(showers: _Conditions) -> NDArray[np.float32]:
    """Returns the normalised conditions [S, C]."""
    columns = (np.log10(showers.energy_gev / _PEV_GEV), np.cos(showers.zenith_rad), np.log10(showers.mass),
               showers.depth_g_cm2 / _KM_G_CM2)  # fmt: skip
    return np.stack(columns, axis=1).astype(np.float32)


def in_units(name: str, values: Floats) -> Floats:
    """Returns a normalised variable in m, GeV or ns."""
    if name == "energy":
        return 10.0**values
    return 10.0**values - _DELAY_NS if name == "time" else values * UNITS[name]


def _normalised(name: str, values: Floats) -> Floats:
    if name == "energy":
        return np.log10(values)
    return np.log10(values + _DELAY_NS) if name == "time" else values / UNITS[name]


def _extend(array: NDArray[Any], rows: NDArray[Any]) -> None:
    """Appends rows in place: the operating system moves the pages of a large array, and none are copied."""
    size = len(array)
    array.resize((size + len(rows), *array.shape[1:]), refcheck=False)
    array[size:] = rows


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, size, _BLOCK))


def _total(values: Iterator[Floats]) -> Floats:
    first = next(values)
    for value in values:
        first = first + value
    return first


def as_moments(saved: Mapping[str, Any]) -> Moments:
    """Makes moments of the state of a finished run."""
    return Moments(**{name: np.asarray(saved[name]) for name in ("expectation", "mean", "deviation")})
