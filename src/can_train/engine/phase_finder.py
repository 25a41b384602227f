"""The largest micro-batch of one phase: predicted by the cost model, verified with a worst-case batch at the predicted
limit, refined by what that measured. The search itself is the finder's; here sizes are costs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from can_train.engine.finder import Seen, search
from can_train.memory.probes import Probed
from can_train.policy.device_limits import PhaseLimit, typical_totals
from can_train.policy.packing import ROUNDING, BatchCosts

UNITS: Final = 2**20
"""Steps of the search up to the largest cost worth trying: finer than any sample matters."""

_FILLED: Final = 16
"""Samples that a packed batch is filled up with at most."""

CAUTION: Final = 0.97
"""Share of the predicted room that the first trial takes: gaps between blocks grow with the batch, and a trial that
fits is worth more than one that does not, since it can be read."""

CEILING: Final = 0.99
"""Share of the room that the search aims to have held; beyond it, another out-of-memory buys next to nothing."""

_MOST_COPIES: Final = 64
"""Times that the whole data set is repeated at most to make a trial's batch."""


class Peak(NamedTuple):
    """What a trial took at most.

    Attributes:
        allocated: Bytes in use.
        reserved: Bytes that the allocator held for them; 0 where there is no such thing.
    """

    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where batches have to fit.

    Attributes:
        capacity_bytes: What the allocator may hold.
        slack_bytes: What it is expected to hold beyond what is in use.
    """

    capacity_bytes: float
    slack_bytes: float


Measure = Callable[[NDArray[np.int64]], Peak]
"""Runs the samples at some positions as one micro-batch."""


def find_phase_limit(probed: Probed, measure: Measure, order: BatchCosts, *, upper: float, room: Room) -> PhaseLimit:
    """Searches for the largest cost that fits.

    Args:
        probed: What the probes of the phase showed: they have fitted, and are the first reading.
        measure: Runs one trial.
        order: The samples that batches are made of.
        upper: Cost beyond which memory decides nothing.
        room: Where the batches have to fit.

    Returns:
        The limit; its tuned limit is the cost of the largest batch that was run and fits.
    """
    model, mean_totals = probed.model, tuple(order.mean_counts().tolist())
    free = room.capacity_bytes - model.base_bytes
    likely = CAUTION * (free - room.slack_bytes)
    # What the probes leave open may be more than what they have shown to fit: half-way up is then worth a trial.
    predicted = max(
        likely - model.half_width(typical_totals(model, mean_totals, free)), (likely + probed.largest_cost) / 2
    )
    unit = upper / UNITS
    trial = _Trial(probed, measure, order, unit)
    # The probes have shown that their cost fits, and are the first reading of the search.
    fits = min(int(probed.largest_cost / unit), UNITS - 1)
    seen = Seen(fails=UNITS + 1, fits=fits, readings=[(fits, fits * unit)] if fits else [], from_zero=True)
    start = min(UNITS, max(fits + 1, int(predicted / unit)))
    found = search(trial, seen, start=start, capacity=max(CEILING * free, 1.0))
    cost, peak = trial.largest
    return PhaseLimit(
        model=model,
        tuned_limit=cost,
        capped=found.size >= UNITS,
        trials=found.trials,
        ooms=found.ooms,
        measured_ratio=max(peak - model.base_bytes, 1.0) / cost if cost else 1.0,
        mean_totals=mean_totals,
    )


def predict_phase_limit(probed: Probed, order: BatchCosts, *, upper: float, room_bytes: float) -> PhaseLimit:
    """Predicts the largest cost that fits, without a trial: for a device that is not at hand.

    Args:
        probed: What the probes of the phase showed.
        order: The samples that batches are made of.
        upper: Cost beyond which memory decides nothing.
        room_bytes: Where the batches would have to fit.
    """
    return PhaseLimit(
        model=probed.model,
        tuned_limit=upper,
        capped=True,
        trials=0,
        ooms=0,
        measured_ratio=1.0,
        mean_totals=tuple(order.mean_counts().tolist()),
    ).predicted_within(room_bytes)


class _Trial:
    """Runs worst-case batches of some cost.

    Attributes:
        largest: (cost, peak in bytes) of the costliest batch that fits.
    """

    def __init__(self, probed: Probed, measure: Measure, order: BatchCosts, unit: float) -> None:
        self._model = probed.model
        self._measure = measure
        self._order = order
        self.largest = (probed.largest_cost, probed.largest_peak)
        self._unit = unit

    def __call__(self, units: int) -> float | None:
        positions = pack_worst_case(self._order, units * self._unit)
        if len(positions) == 0:
            # Less than the smallest sample: nothing would run, and that fits.
            return None
        cost = self._order.chosen(positions).cost(0, len(positions))
        peak = self._measure(positions)
        self.largest = max(self.largest, (cost, float(peak.allocated)))
        # What is held decides whether more fits; carried over to the whole of the units, as packing leaves a remainder.
        return (max(peak) - self._model.base_bytes) * units * self._unit / cost


def pack_worst_case(order: BatchCosts, limit: float) -> NDArray[np.int64]:
    """Packs the costliest samples that there are up to a cost.

    Args:
        order: The samples; they come again where a batch needs more than there are.
        limit: Cost of the batch.

    Returns:
        Positions in `order`; empty where no sample costs so little.
    """
    each = order.each()
    ranked = np.argsort(-each, kind="stable")
    ranked = ranked[each[ranked] <= limit * (1 + ROUNDING)]
    if len(ranked) == 0:
        return ranked
    whole = order.chosen(ranked).cost(0, len(ranked))
    copies = min(int(limit / whole) + 1 if whole > 0 else 1, _MOST_COPIES)
    packed = np.tile(ranked, copies)
    packed = packed[: order.chosen(packed).reach(0, limit)]
    return _filled(order, packed, ranked, limit)


def _filled(order: BatchCosts, packed: NDArray[np.int64], ranked: NDArray[np.int64], limit: float) -> NDArray[np.int64]:
    """Adds the largest samples that still fit: a remainder of almost a sample is much where few fit at all."""
    each = order.each()[ranked]
    room = limit - order.chosen(packed).cost(0, len(packed))
    for _ in range(_FILLED):
        fitting = int(np.searchsorted(-each, -room))
        if fitting == len(ranked):
            break
        longer = np.append(packed, ranked[fitting])
        cost = order.chosen(longer).cost(0, len(longer))
        if cost > limit * (1 + ROUNDING) or limit - cost >= room:
            break
        packed, room = longer, limit - cost
    return packed
