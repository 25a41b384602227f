"""Asks a companion in parts that fit, on the device, or on the host where not even one sample fits there. What becomes
of the answers is the caller's matter.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.engine.micro_batcher import MicroBatcher
from can_train.errors import DoesNotFitError
from can_train.memory.meters import CpuMeter, Meter
from can_train.memory.out_of_memory import OutOfMemoryEndsQuietly
from can_train.policy.device_limits import DeviceLimits, PhaseLimit
from can_train.policy.packing import BatchCosts, PartLimit
from can_train.training.passes import Pass, Trials, find_limit
from can_train.training.task import Companion

ASKED_SHARE: Final = 0.9
"""Share of the tuned limit that a question's part may cost."""

ASKED_AT_ONCE: Final = 512
"""Mean samples of a part, beyond which it gains no more speed: a processor's caches are full long before."""

BLOCK: Final = 4096
"""Samples whose answers wait in memory for the disk."""

Ask = Callable[[NDArray[np.int64]], Any]
"""Asks about some samples, all at once."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a companion is asked.

    Attributes:
        meter: Of the device.
        dtype: Number format of models there.
        outside: Opens a span whose memory is not the run's device's, where the place is another one.
    """

    meter: Meter
    dtype: torch.dtype
    outside: Callable[[], AbstractContextManager[None]] = nullcontext


def where_it_fits(place: Place, use: Callable[[Place], T], say: Callable[[], object]) -> T:
    """Uses a companion on the device, or on the host where it does not fit there.

    Args:
        place: The device.
        use: Uses it somewhere.
        say: Called before it is used on the host.

    Raises:
        DoesNotFitError: It does not fit on the host either.
    """
    with OutOfMemoryEndsQuietly():
        try:
            return use(place)
        except DoesNotFitError:
            pass
    place.meter.release()
    say()
    host = Place(meter=CpuMeter(), dtype=place.dtype, outside=place.meter.host)
    with host.outside():
        return use(host)


class Question:
    """Something that a companion is asked, in parts that fit.

    Args:
        place: Where.
        companion: The companion.
        model: Its copy there.
        ask: Asks about some samples.

    Attributes:
        peak_bytes: Predicted peak of the largest part so far.

    Raises:
        DoesNotFitError: Not even a sample fits.
    """

    def __init__(self, place: Place, companion: Companion, model: nn.Module, ask: Ask) -> None:
        self._companion = companion
        self._place = place
        self._ask = ask
        self._limit = _limit_of(place, companion, model, ask)
        limits = DeviceLimits(
            device_key=place.meter.key,
            capacity_bytes=place.meter.capacity_bytes,
            training=self._limit,
            evaluation=self._limit,
            optimizer_peak_bytes=0,
        )
        self._batcher = MicroBatcher(model, meter=place.meter, limits=limits)
        self.peak_bytes = 0.0

    def answers(self, rows: NDArray[np.int64]) -> list[Any]:
        """Asks about some samples; returns the parts' answers."""
        costs = self._limit.costs(self._companion.batch_features(rows))

        def ask(start: int, stop: int) -> Any:
            self.peak_bytes = max(self.peak_bytes, self._limit.peak_bytes(costs.cost(start, stop)))
            return self._ask(rows[start:stop])

        with self._place.outside():
            return self._batcher.evaluate(ask, costs, PartLimit(cost=ASKED_SHARE * self._limit.tuned_limit))


def asking(companion: Companion, model: nn.Module, ask: Ask) -> Pass:
    """Describes asking as a kind of work."""
    return Pass(
        run=lambda rows: _forget(ask(rows)),
        rows=companion.rows,
        counts=companion.batch_features(companion.rows),
        features=companion.features,
        resident=[*model.parameters(), *model.buffers()],
    )


def _limit_of(place: Place, companion: Companion, model: nn.Module, ask: Ask) -> PhaseLimit:
    """Finds out how much may be asked at once."""
    trials = Trials(verify=True, steps=1, tried=lambda cost: None)
    try:
        return find_limit(asking(companion, model, ask), place.meter, _enough, trials)
    finally:
        place.meter.release()
        place.meter.reset_peak()


def _enough(costs: BatchCosts) -> float:
    """Cost of as many mean samples as are worth asking about at once, of the whole limit."""
    return float(costs.each().mean()) * ASKED_AT_ONCE / ASKED_SHARE


def _forget(answer: Any) -> None:
    """Drops an answer: the work was to give it."""
