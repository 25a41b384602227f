"""Asks a reference model in parts that fit, on the device, or on the host where not even one sample fits there. What becomes
of the answers is the caller's matter.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.settings import TrainingSettings
from can_train.errors import DoesNotFitError
from can_train.fit.cost_model import DeviceLimits, PhaseLimit
from can_train.fit.explore import Workload, find_limit
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.optimizer import Precision
from can_train.fit.packing import BatchCosts, PartLimit
from can_train.fit.rescue import RescueSettings, describe_out_of_memory
from can_train.memory.meters import CpuMeter, Meter
from can_train.memory.out_of_memory import CatchOutOfMemory, headline, is_out_of_memory
from can_train.task import ReferenceModel

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
    """Where a reference model is asked.

    Attributes:
        meter: Of the device.
        dtype: Number format of models there.
        outside: Opens a span whose memory is not the run's device's, where the place is another one.
    """

    meter: Meter
    dtype: torch.dtype
    outside: Callable[[], AbstractContextManager[None]] = nullcontext


def with_host_fallback(place: Place, use: Callable[[Place], T], say: Callable[[], object]) -> T:
    """Uses a reference model on the device, or on the host where it does not fit there.

    Args:
        place: The device.
        use: Uses it somewhere.
        say: Called before it is used on the host.

    Raises:
        DoesNotFitError: It does not fit on the host either.
    """
    with CatchOutOfMemory():
        try:
            return use(place)
        except DoesNotFitError:
            pass
    place.meter.release()
    say()
    host = Place(meter=CpuMeter(), dtype=place.dtype, outside=place.meter.host)
    with host.outside():
        return use(host)


class BatchedInference:
    """Something that a reference model is asked, in parts that fit.

    Args:
        place: Where.
        reference model: The reference model.
        model: Its copy there.
        ask: Asks about some samples.

    Attributes:
        peak_bytes: Predicted peak of the largest part so far.

    Raises:
        DoesNotFitError: Not even a sample fits.
    """

    def __init__(self, place: Place, reference_model: ReferenceModel, model: nn.Module, ask: Ask) -> None:
        self._reference_model = reference_model
        self._place = place
        self._ask = ask
        self._limit = _limit_of(place, reference_model, model, ask)
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
        costs = BatchCosts.priced(self._limit.model, self._reference_model.batch_features(rows))

        def ask(start: int, stop: int) -> Any:
            self.peak_bytes = max(self.peak_bytes, self._limit.peak_bytes(costs.cost(start, stop)))
            return self._ask(rows[start:stop])

        with self._place.outside():
            return self._batcher.evaluate(ask, costs, PartLimit(cost=ASKED_SHARE * self._limit.tuned_limit))


def asking(reference_model: ReferenceModel, model: nn.Module, ask: Ask) -> Workload:
    """Describes asking as a kind of work."""
    return Workload(
        run=lambda rows: _forget(ask(rows)),
        rows=reference_model.rows,
        counts=reference_model.batch_features(reference_model.rows),
        features=reference_model.features,
        resident=[*model.parameters(), *model.buffers()],
    )


def _limit_of(place: Place, reference_model: ReferenceModel, model: nn.Module, ask: Ask) -> PhaseLimit:
    """Finds out how much may be asked at once."""
    try:
        return find_limit(asking(reference_model, model, ask), place.meter, _enough)
    finally:
        place.meter.release()
        place.meter.reset_peak()


def _enough(costs: BatchCosts) -> float:
    """Cost of as many mean samples as are worth asking about at once, of the whole limit."""
    return float(costs.each().mean()) * ASKED_AT_ONCE / ASKED_SHARE


def _forget(answer: Any) -> None:
    """Drops an answer: the work was to give it."""


PART_SAMPLES: Final = 256
"""Samples that are scored at a time: twice as fast on a processor as 2,048, whose tensors leave its cache. Where memory
runs out they are fewer."""


class Scored(Protocol):
    """Samples with a model that scores them.

    Attributes:
        model: In evaluation mode, on the CPU.
    """

    model: nn.Module

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the raw scores of samples, by the model or its copy on a device."""


class Scoring:
    """Scores samples through the engine, in parts that fit.

    Args:
        training: Settings of the run that scores.
        place: Where; its meter is active.
        advance: Called with the number of samples of each part.

    Attributes:
        seconds: Spent so far.
    """

    def __init__(self, training: TrainingSettings, place: Place, advance: Callable[[int], object]) -> None:
        self._context = Precision.named(training.precision).context
        self._rescue = RescueSettings(
            factor=training.backoff_factor, floor=training.min_micro_batch_size, retries=training.oom_retries
        )
        self._place = place
        self._advance = advance
        self._batchers: dict[nn.Module, tuple[nn.Module, MicroBatcher]] = {}
        self.seconds = 0.0

    def __call__(self, scored: Scored, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the raw scores of samples, in their order.

        Raises:
            PartDoesNotFitError: One of them does not fit on the device.
            DoesNotFitError: The model does not.
        """
        began, device = time.perf_counter(), self._place.meter.device
        with self._place.outside():
            model, batcher = self._there(scored.model)

            def scores_of(start: int, stop: int) -> NDArray[np.float64]:
                with torch.inference_mode(), self._context(device):
                    scores = scored.scores(model, rows[start:stop], device, self._place.dtype)
                found = np.asarray(scores.double().cpu())
                self._advance(stop - start)
                return found

            parts = batcher.evaluate(scores_of, len(rows), PartLimit(samples=PART_SAMPLES))
        self.seconds += time.perf_counter() - began
        return np.concatenate(parts)

    def _there(self, model: nn.Module) -> tuple[nn.Module, MicroBatcher]:
        """Copies a model to the device, once."""
        if model not in self._batchers:
            meter = self._place.meter
            try:
                copy = deepcopy(model).to(meter.device, self._place.dtype).eval()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                message = headline(error)
            else:
                batcher = MicroBatcher(copy, meter=meter, rescue=self._rescue)
                return self._batchers.setdefault(model, (copy, batcher))
            raise DoesNotFitError("A model must fit on the device", value=message,
                                  remedy="Choose another with --device: cpu has the host's memory",
                                  details=describe_out_of_memory(meter, None))  # fmt: skip
        return self._batchers[model]
