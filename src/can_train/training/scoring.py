"""Scores samples with finished models, in parts that are cut further where memory runs out: nothing is explored before,
since what is scored once would take less time than finding out how much of it fits. What is scored is the caller's.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.training import TrainingSettings
from can_train.engine.micro_batcher import MicroBatcher
from can_train.engine.rescue import RescueSettings
from can_train.errors import DoesNotFitError
from can_train.memory.out_of_memory import headline, is_out_of_memory
from can_train.memory.shortage import shortage_on
from can_train.policy.packing import PartLimit
from can_train.training.asking import Place
from can_train.training.optimization import Precision

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
                                  shortage=shortage_on(meter, None))  # fmt: skip
        return self._batchers[model]
