"""Finds out what fits on a device: probes and trials of training, evaluation and other work.

Shapes: R samples, F features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit import random_state
from can_train.fit.batch_dependence import SPLIT, BatchDependence, measure_batch_dependence
from can_train.fit.cost_model import CostModel, DeviceLimits, PhaseLimit
from can_train.fit.optimizer import OptimizerMemory, Precision, make_optimizer, measure_optimizer
from can_train.fit.packing import BatchCosts
from can_train.fit.probe import ProbeFit, fit_by_probes
from can_train.fit.random_state import Snapshot
from can_train.fit.search import Peak, find_phase_limit, pack_worst_case, predict_phase_limit
from can_train.io.units import size_text
from can_train.memory.allocator import LARGE_PAGE_BYTES
from can_train.memory.catalogue import cards_that_hold, predicted_room
from can_train.memory.out_of_memory import CatchOutOfMemory

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.fit.micro_batcher import Losses
    from can_train.memory.meters import Meter
    from can_train.task import Feature, LogicalBatch, Task

Upper = Callable[[BatchCosts], float]
"""Returns the largest cost worth trying, given the priced samples."""

# Samples of a batch that is timed, where they fit.
_TIMED_SAMPLES: Final = 64

# Share of the capacity that they may take.
_TIMED_SHARE: Final = 0.5

# Runs of which the quickest counts: the others waited for other processes.
_TIMED_RUNS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A kind of work on batches of samples, whose memory is to be found out."""

    run: Callable[[NDArray[np.int64]], None]  # Runs a batch of some rows
    rows: NDArray[np.int64]  # [R] the samples that batches are made of
    counts: NDArray[np.float64]  # [R, F] their features
    features: Sequence[Feature]  # What the memory of a batch grows with
    resident: Sequence[Tensor]  # Tensors that are on the device meanwhile
    gradient_bytes: int = 0  # Size of the weights' gradients, where the work computes them
    steps_per_trial: int = 1  # Times that a batch is run in a trial

    def peak(self, meter: Meter, positions: NDArray[np.int64], *, steps: int = 1) -> Peak:
        """Runs the batch of the samples at some positions, several times, and returns the peak."""
        meter.reset_peak()
        for _ in range(steps):
            with meter.measuring(self.resident):
                self.run(self.rows[positions])
        return Peak(meter.peak_bytes(), meter.peak_reserved_bytes())


def probe(work: Workload, meter: Meter) -> ProbeFit:
    """Fits the cost model of some work; raises DoesNotFitError where not even a sample fits."""
    slack_bytes = 0

    def measure(positions: NDArray[np.int64]) -> int:
        nonlocal slack_bytes
        meter.release(collect=False)
        peak = work.peak(meter, positions)
        # Fragmentation grows little with the batch; of the largest probe's, a last page that must fit whole is added.
        slack_bytes = max(slack_bytes, peak.reserved - peak.allocated + LARGE_PAGE_BYTES) if peak.reserved else 0
        return peak.allocated

    fit = fit_by_probes(
        measure,
        work.features,
        work.counts,
        capacity_bytes=meter.capacity_bytes,
        gradient_bytes=work.gradient_bytes,
    )
    return replace(fit, slack_bytes=float(slack_bytes))


def find_limit(
    work: Workload,
    meter: Meter,
    upper: Upper,
    *,
    on_trial: Callable[[float], object] = lambda cost: None,
    verify: bool = True,
) -> PhaseLimit:
    """Fits the cost model of some work, and searches for the largest batch that fits.

    Args:
        work: The work.
        meter: Meter of the device.
        upper: Largest cost worth trying.
        on_trial: Called before each trial with its cost in bytes.
        verify: Whether limits are tried; otherwise they are predicted, for a device that need not be at hand.
    """
    fit = probe(work, meter)
    costs = BatchCosts.priced(fit.model, work.counts)
    # Where the features cost nothing, any batch is as good as any other, and a trial of one sample ends the search.
    highest = upper(costs) if any(fit.model.coefficients) else 1.0
    if not verify:
        return predict_phase_limit(fit, costs, upper=highest, room_bytes=predicted_room(meter.capacity_bytes))

    def trial(positions: NDArray[np.int64]) -> Peak:
        on_trial(costs.chosen(positions).total)
        meter.release()
        return work.peak(meter, positions, steps=work.steps_per_trial)

    return find_phase_limit(fit, trial, costs, upper=highest, capacity_bytes=meter.capacity_bytes)


def seconds_per_sample(work: Workload, model: CostModel, meter: Meter) -> float:
    """Times a warm batch that takes half of the device at most; raises DoesNotFitError where no sample fits."""
    costs = work.counts @ np.asarray(model.coefficients)
    room = _TIMED_SHARE * meter.capacity_bytes - model.base_bytes
    rows = np.resize(work.rows, int(np.clip(room / max(costs.mean(), 1.0), 1, _TIMED_SAMPLES)))
    seconds = []
    with CatchOutOfMemory():
        work.run(rows)
        for _ in range(_TIMED_RUNS):
            _synchronize(meter.device)
            started = time.perf_counter()
            work.run(rows)
            _synchronize(meter.device)
            seconds.append(time.perf_counter() - started)
        return min(seconds) / len(rows)
    meter.release()
    raise DoesNotFitError("A sample must fit on the device", value=f"one needs {costs.mean() / 2**20:.1f} MiB")


def _synchronize(device: torch.device) -> None:
    # Kernels run on after their launch has returned.
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def left_as_it_was(model: nn.Module, meter: Meter) -> Iterator[list[Tensor]]:
    """Sets gradients aside for the block, and restores buffers, random generators and gradients after it.

    Yields:
        Copies of the buffers: a step of training, and a part of an evaluation, hold such copies too.
    """
    parameters = [*model.parameters()]
    snapshot, gradients = Snapshot(model, meter.device), [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield snapshot.copies
    finally:
        snapshot.restore()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        meter.release()
        meter.reset_peak()


@dataclass(kw_only=True)
class Explorer:
    """Runs batches of a task to measure their memory."""

    task: Task
    model: nn.Module  # Its model, on the meter's device; left as it is
    training: TrainingSettings
    meter: Meter
    rows: NDArray[np.int64]  # [R] the training samples
    verify: bool = True  # Whether limits are tried; otherwise they are predicted, for a device that need not be at hand
    reference_tensors: Sequence[Tensor] = ()  # Tensors of reference models that are on the device

    @cached_property
    def _counts(self) -> NDArray[np.float64]:
        return self.task.batch_features(self.rows)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        # Not cached: parameters may be frozen or thawed between two calls.
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def _precision(self) -> Precision:
        return Precision.named(self.training.precision)

    def explore(
        self, upper: Upper, *, held_bytes: int = 0, on_trial: Callable[[float], object] = lambda cost: None
    ) -> DeviceLimits:
        """Fits the cost models of training and evaluation, and searches for their limits.

        Args:
            upper: Largest cost worth trying.
            held_bytes: Optimizer state that is on the device already.
            on_trial: Called before each trial with its cost in bytes.

        Raises:
            DoesNotFitError: The model does not fit, or not even a sample beside it.
        """

        def limit(work: Workload, upper: Upper) -> PhaseLimit:
            return find_limit(work, self.meter, upper, on_trial=on_trial, verify=self.verify)

        with left_as_it_was(self.model, self.meter) as buffer_copies:
            optimizer = self.optimizer_memory()
            state, gradients = self._placeholders(optimizer, held_bytes)
            work = self._training_work(optimizer, [*state, *gradients, *buffer_copies])
            training = limit(work, upper)
            # Evaluation runs without them.
            del gradients, work
            # Evaluation gains nothing from parts larger than training's.
            needed = min(training.tuned_limit / max(upper(BatchCosts.priced(training.model, self._counts)), 1.0), 1.0)
            work = self._work(self._evaluate, [*state, *buffer_copies])
            self.model.eval()
            try:
                evaluation = limit(work, lambda costs: needed * upper(costs))
            finally:
                self.model.train()
        return DeviceLimits(
            device_key=self.meter.key,
            capacity_bytes=self.meter.capacity_bytes,
            training=training,
            evaluation=evaluation,
            optimizer_peak_bytes=self._bytes_without_batch(optimizer) + optimizer.transient_bytes,
            gradient_bytes=optimizer.parameter_bytes,
        )

    def step_cost(self) -> tuple[CostModel, float]:
        """Returns the cost model of training and a step's seconds per sample; raises DoesNotFitError."""
        with left_as_it_was(self.model, self.meter) as buffer_copies:
            optimizer = self.optimizer_memory()
            state, gradients = self._placeholders(optimizer, 0)
            work = self._training_work(optimizer, [*state, *gradients, *buffer_copies])
            model = probe(work, self.meter).model
            return model, seconds_per_sample(work, model, self.meter)

    @contextmanager
    def worst_case(self, training: PhaseLimit, cost: float) -> Iterator[tuple[Callable[[], None], Sequence[Tensor]]]:
        """Yields a function that runs a worst-case batch of training, and the tensors that are resident meanwhile."""
        with left_as_it_was(self.model, self.meter) as buffer_copies:
            optimizer = self.optimizer_memory()
            state, gradients = self._placeholders(optimizer, 0)
            work = self._training_work(optimizer, [*state, *gradients, *buffer_copies])
            batch = pack_worst_case(BatchCosts.priced(training.model, self._counts), cost)
            yield (lambda: work.run(self.rows[batch]) if len(batch) else None), work.resident

    def optimizer_memory(self) -> OptimizerMemory:
        """Measures, on the host, the memory of the optimizer for the parameters that are trained now."""
        training, device = self.training, self.meter.device
        with self.meter.host():
            return measure_optimizer(
                self._parameters, lambda shadows: make_optimizer(list(shadows), training, training.lr, device)
            )

    def batch_dependence(self) -> BatchDependence:
        """Measures whether samples of a batch influence each other's gradient."""
        # Samples below the middle need little memory; those above the first quarter have some of every feature.
        ranked = self.rows[np.argsort(self._counts[:, 0], kind="stable")]
        batch = self._batch(np.resize(ranked[len(ranked) // 4 :], sum(SPLIT)), coupled=True)
        with CatchOutOfMemory():
            return measure_batch_dependence(
                self.model.train(),
                lambda start, stop: self._losses(batch, start, stop),
                batch.denominators,
                device=self.meter.device,
                half=self._precision.autocast is not None,
            )
        self.meter.release()
        return BatchDependence(terms={}, modules=(), drops=False, measured=False)

    def _placeholders(self, optimizer: OptimizerMemory, held_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
        """Allocates as much as the optimizer's state and the gradients so far take in the middle of a run."""
        missing = max(optimizer.state_bytes - held_bytes, 0)
        with CatchOutOfMemory():
            state = [torch.empty(missing, dtype=torch.uint8, device=self.meter.device)]
            return state, [torch.zeros_like(parameter) for parameter in self._parameters]
        raise model_does_not_fit(self._bytes_without_batch(optimizer), self.meter.capacity_bytes)

    def _bytes_without_batch(self, optimizer: OptimizerMemory) -> int:
        # A step holds copies of the buffers.
        buffers = [*self.model.buffers()] * 2
        model = sum(tensor.nbytes for tensor in [*self.model.parameters(), *buffers, *self.reference_tensors])
        return model + optimizer.parameter_bytes + optimizer.state_bytes

    def _training_work(self, optimizer: OptimizerMemory, resident: Sequence[Tensor]) -> Workload:
        return replace(self._work(self._train_step, resident), gradient_bytes=optimizer.parameter_bytes)

    def _work(self, run: Callable[[NDArray[np.int64]], None], resident: Sequence[Tensor]) -> Workload:
        return Workload(
            run=run,
            rows=self.rows,
            counts=self._counts,
            features=self.task.features,
            steps_per_trial=self.training.find_batch_size_steps_per_trial,
            resident=[*self.model.parameters(), *self.model.buffers(), *self.reference_tensors, *resident],
        )

    def _train_step(self, rows: NDArray[np.int64]) -> None:
        """Runs forward and backward; drops the gradients, also where it fails."""
        # Each part of a batch holds copies of the buffers, beside those of the step.
        held = Snapshot(self.model, self.meter.device)
        try:
            batch = self._batch(rows, coupled=True)
            losses = self._losses(batch, 0, len(rows))
            weights = self.task.loss_weights
            parts = [weights[term] * total / (batch.denominators[term] or 1.0) for term, (total, _) in losses.items()]
            sum(parts[1:], start=parts[0]).backward()
        finally:
            del held
            for parameter in self._parameters:
                parameter.grad = None

    def _evaluate(self, rows: NDArray[np.int64]) -> None:
        with torch.inference_mode():
            self._losses(self._batch(rows, coupled=False), 0, len(rows))

    def _batch(self, rows: NDArray[np.int64], *, coupled: bool) -> LogicalBatch:
        generator = random_state.step_generator(seed=self.training.seed, step=0) if coupled else None
        return self.task.logical_batch(rows, self.meter.device, self._precision.dtype, generator)

    def _losses(self, batch: LogicalBatch, start: int, stop: int) -> Losses:
        with self._precision.context(self.meter.device):
            return batch.losses(self.model, start, stop)


def model_does_not_fit(need_bytes: int, capacity_bytes: int) -> DoesNotFitError:
    """Makes the error for a model that leaves no room for a batch."""
    return DoesNotFitError(
        "Weights, gradients and optimizer state must fit on the device",
        value=f"they need {size_text(need_bytes)} of {size_text(capacity_bytes)}",
        remedy=f"Choose a smaller model (--size student), or a larger device ({cards_that_hold(need_bytes)})",
        details=OutOfMemoryDetails(need_bytes=need_bytes),
    )
