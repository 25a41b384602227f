"""Inference in parts that fit: validation, judging, `evaluate` and reference models all compute through it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.errors import DoesNotFitError
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.packing import BatchCosts, MicroBatchLimit
from can_train.fit.precision import convert
from can_train.fit.rescue import PartDoesNotFitError, RescueSettings, describe_out_of_memory
from can_train.memory.meters import Meter
from can_train.memory.out_of_memory import CatchOutOfMemory

if TYPE_CHECKING:
    from torch import nn

    from can_train.config.settings import TrainingSettings
    from can_train.fit.precision import Precision

PART_SAMPLES: Final = 256
"""Samples that are scored at a time: twice as fast on a processor as 2,048, whose tensors leave its cache. Where memory
runs out they are fewer."""

EXPLAINED_SAMPLES: Final = 32
"""Samples at a time where the score's gradient is computed, which needs the outputs of every layer."""

Rows = NDArray[np.int64]

T = TypeVar("T")


def compute_as_trained(training: TrainingSettings) -> None:
    """Has PyTorch take the algorithms of a run's training, so that the same samples have the same bits."""
    # Not torch.use_deterministic_algorithms: it imports the compiler, which takes seconds and is not used here.
    torch.set_deterministic_debug_mode("error" if training.deterministic else "default")


@dataclass(frozen=True, kw_only=True)
class InferenceDevice:
    """Where a model computes."""

    meter: Meter
    precision: Precision  # number formats of the run that computes
    # Opens a block whose memory is not the run's device's, where this is another one.
    span: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(kw_only=True)
class BatchedInference:
    """Computes something of samples with one model, without gradients, in parts that fit on its device."""

    batcher: MicroBatcher  # of the model; splits a part further where memory runs out
    model: nn.Module  # on the device
    device: InferenceDevice
    costs_of: Callable[[Rows], BatchCosts | int] = len  # prices samples; their number, where all cost the same
    limit: MicroBatchLimit = field(default_factory=lambda: MicroBatchLimit(samples=PART_SAMPLES))  # of a part
    describe: Callable[[int], str] = "sample {}".format  # names a sample that does not fit
    advance: Callable[[int], object] = lambda samples: None  # called with the samples of each part that is done

    @classmethod
    def of_copy(cls, model: nn.Module, device: InferenceDevice, training: TrainingSettings) -> BatchedInference:
        """Copies a model to a device; raises `DoesNotFitError` where there is no room for it."""
        copied = copy_to_device(model, device)
        batcher = MicroBatcher(copied, meter=device.meter, rescue=rescue_settings(training))
        return cls(batcher=batcher, model=copied, device=device)

    def run(self, rows: Rows, compute: Callable[[Rows], T]) -> list[T]:
        """Computes something of each part of some samples, in order.

        Raises:
            DoesNotFitError: A single sample does not fit; the message names it.
        """

        def attempt(start: int, stop: int) -> T:
            result = compute(rows[start:stop])
            self.advance(stop - start)
            return result

        # A host that stands in for the device computes outside of the simulated GPU's count.
        try:
            with self.device.span():
                return self.batcher.evaluate(attempt, self.costs_of(rows), self.limit)
        except DoesNotFitError as error:
            raise in_evaluation(with_samples(error, self.describe, rows)) from None

    def scores(self, samples: Any, rows: Rows) -> NDArray[np.float64]:
        """Returns [R, …] scores of some samples, in their order, by `samples.scores`, which is as a task's."""

        def compute(*arguments: Any) -> NDArray[np.float64]:
            return np.asarray(samples.scores(*arguments).double().cpu())

        return np.concatenate(self.parts(compute, rows))

    def parts(self, compute: Callable[..., T], rows: Rows) -> list[T]:
        """Returns the results of `compute`, which has the arguments of `BatchTask.scores`, for each part of some
        samples, in their order.
        """
        meter, precision = self.device.meter, self.device.precision

        def inferred(part: Rows) -> T:
            with torch.no_grad(), precision.context(meter.device):
                return compute(self.model, part, meter.device, precision.dtype)

        return self.run(rows, inferred)

    def contributions(self, samples: Any, rows: Rows) -> NDArray[np.float64]:
        """Returns the contributions of some samples' parts to their scores, by `samples.contributions`."""

        def compute(part: Rows) -> NDArray[np.float64]:
            found = samples.contributions(self.model, part, self.device.meter.device, self.device.precision.dtype)
            return np.asarray(found.detach().double().cpu())

        smaller = replace(self, limit=MicroBatchLimit(samples=EXPLAINED_SAMPLES))
        return np.concatenate(smaller.run(rows, compute))


def with_samples(error: DoesNotFitError, describe: Callable[[int], str], rows: Rows) -> DoesNotFitError:
    """Returns an error of a batch with the name of the first sample of the part that failed."""
    value = error.value
    if isinstance(error, PartDoesNotFitError):
        start, stop = error.part
        more = f" and {stop - start - 1} more" if stop - start > 1 else ""
        value = f"{describe(int(rows[start]))}{more}; {value}"
    return DoesNotFitError(error.rule, value=value, remedy=error.remedy, details=error.details)


def in_evaluation(error: DoesNotFitError) -> DoesNotFitError:
    """Returns an error that says of itself that samples were evaluated."""
    error.details = replace(error.details, in_evaluation=True)
    return error


def copy_to_device(model: nn.Module, device: InferenceDevice) -> nn.Module:
    """Copies a model to a device, in evaluation mode; raises `DoesNotFitError` where there is no room for it."""
    with CatchOutOfMemory() as caught:
        # A copy even where the device is the host: a simulated GPU sees memory only when it is allocated.
        return convert(deepcopy(model), device.precision.dtype, device.meter.device).eval()
    raise DoesNotFitError("A model must fit on the device", value=caught.message,
                          remedy="Choose another with --device: cpu has the host's memory",
                          details=describe_out_of_memory(device.meter, None))  # fmt: skip


def rescue_settings(training: TrainingSettings) -> RescueSettings:
    """Returns the measures against an out-of-memory in inference: always split, as the gradient is not at stake."""
    floor = training.min_micro_batch_size
    return RescueSettings(factor=training.backoff_factor, floor=floor, retries=training.oom_retries)
