"""The largest micro-batch of one phase: predicted by the cost model, verified with a worst-case batch at the predicted
limit, refined by what that measured. The search itself is the finder's; here sizes are costs.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from can_train.engine.finder import find_max_size
from can_train.policy.cost_model import CostModel
from can_train.policy.device_limits import PhaseLimit
from can_train.policy.packing import ROUNDING, BatchCosts

UNIT_BYTES: Final = 4096
"""Step of the search: finer than any sample matters."""

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


Measure = Callable[[NDArray[np.int64]], Peak]
"""Runs the samples at some positions as one micro-batch."""


def find_phase_limit(model: CostModel, measure: Measure, order: BatchCosts, *, upper: float, room: float) -> PhaseLimit:
    """Searches for the largest cost that fits.

    Args:
        model: Of the phase.
        measure: Runs one trial.
        order: The samples that batches are made of.
        upper: Cost beyond which memory decides nothing.
        room: What the allocator may hold beside the model's base, in bytes.

    Returns:
        The limit; its tuned limit is the cost of the largest batch that was run and fits, 0 where none does.
    """
    trial = _Trial(model, measure, order)
    most = max(1, int(upper / UNIT_BYTES) + 1)
    predicted = room - model.half_width(model.shared_totals(room))
    start = min(most, max(1, int(predicted / UNIT_BYTES)))
    if room <= 0:
        return PhaseLimit(model=model, tuned_limit=0.0, capped=False, trials=0, ooms=0, measured_ratio=1.0)
    found = find_max_size(trial, start=start, upper=most, capacity=room)
    cost, peak = trial.largest
    return PhaseLimit(
        model=model,
        tuned_limit=cost,
        capped=found.size >= most,
        trials=found.trials,
        ooms=found.ooms,
        measured_ratio=max(peak - model.base_bytes, 1.0) / cost if cost else 1.0,
    )


class _Trial:
    """Runs worst-case batches of some cost.

    Attributes:
        largest: (cost, peak in bytes) of the costliest batch that fits.
    """

    def __init__(self, model: CostModel, measure: Measure, order: BatchCosts) -> None:
        self._model = model
        self._measure = measure
        self._order = order
        self.largest = (0.0, 0)

    def __call__(self, units: int) -> float | None:
        positions = pack_worst_case(self._order, units * UNIT_BYTES)
        if len(positions) == 0:
            # Less than the smallest sample: nothing would run, and that fits.
            return None
        cost = self._order.chosen(positions).cost(0, len(positions))
        peak = self._measure(positions)
        self.largest = max(self.largest, (cost, peak.allocated))
        # What is held decides whether more fits; carried over to the whole of the units, as packing leaves a remainder.
        return (max(peak) - self._model.base_bytes) * units * UNIT_BYTES / cost


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
    while (fitting := int(np.searchsorted(-each, -room))) < len(ranked):
        longer = np.append(packed, ranked[fitting])
        cost = order.chosen(longer).cost(0, len(longer))
        if cost > limit * (1 + ROUNDING) or limit - cost >= room:
            break
        packed, room = longer, limit - cost
    return packed
