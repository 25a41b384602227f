"""Probes and trials on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.settings import TrainingSettings
from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit import random_state
from can_train.fit.batch_dependence import SPLIT, BatchDependence, measure_batch_dependence
from can_train.fit.cost_model import CostModel, DeviceLimits, PhaseLimit
from can_train.fit.optimizer import OptimizerMemory, Precision, make_optimizer, measure_optimizer
from can_train.fit.packing import BatchCosts
from can_train.fit.probe import Probed, fit_by_probes
from can_train.fit.random_state import Snapshot
from can_train.fit.search import Peak, Room, find_phase_limit, pack_worst_case, predict_phase_limit
from can_train.io.units import size_text
from can_train.memory.allocator import LARGE_PAGE_BYTES
from can_train.memory.catalogue import cards_that_hold, predicted_room
from can_train.memory.meters import Meter, simulate_fit, simulate_peak
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.task import Feature, LogicalBatch, Task

if TYPE_CHECKING:
    from can_train.fit.micro_batcher import Losses

Upper = Callable[[BatchCosts], float]
"""From the priced samples to the largest cost worth trying."""


Run = Callable[[NDArray[np.int64]], None]
"""Runs a batch of some rows."""


_TIMED_SAMPLES: Final = 64
"""Samples of a batch that is timed, where they fit."""


_TIMED_SHARE: Final = 0.5
"""Share of the capacity that they may take."""


_TIMED_RUNS: Final = 5
"""Runs of which the quickest counts: the others waited for something else."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A kind of work.

    Attributes:
        run: Does it for a batch of some rows.
        rows: [R] the samples that batches are made of.
        counts: [R, F] what each of them has of the features.
        features: What its memory grows with.
        resident: Tensors that are on the device beside it.
        gradient_bytes: What the gradients of the weights take, where it makes some.
    """

    run: Run
    rows: NDArray[np.int64]
    counts: NDArray[np.float64]
    features: Sequence[Feature]
    resident: Sequence[Tensor]
    gradient_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Trials:
    """How batches are tried.

    Attributes:
        verify: Whether limits are tried; else they are what the probes predict, of a device that need not be there.
        steps: Times that a batch is run in a trial.
        tried: Called before each trial beside the probes, with the cost in bytes that it has.
    """

    verify: bool
    steps: int
    tried: Callable[[float], None]


def find_limit(work: Pass, meter: Meter, upper: Upper, trials: Trials) -> PhaseLimit:
    """Fits the cost model of a kind of work, and searches for the largest batch that fits.

    Args:
        work: The work.
        meter: Of the device.
        upper: Largest cost worth trying.
        trials: How to try.
    """
    probed, slack = probe(work, meter)
    capacity, model = meter.capacity_bytes, probed.model
    costs = BatchCosts(work.counts, model.features, model.coefficients)
    highest = _worthwhile(upper(costs), model)
    if not trials.verify:
        return predict_phase_limit(probed, costs, upper=highest, room_bytes=predicted_room(capacity))

    def trial(positions: NDArray[np.int64]) -> Peak:
        trials.tried(costs.chosen(positions).cost(0, len(positions)))
        meter.release()
        return _peak(work, meter, positions, trials.steps)

    room = Room(capacity_bytes=capacity, slack_bytes=slack)
    return find_phase_limit(probed, trial, costs, upper=highest, room=room)


def probe(work: Pass, meter: Meter) -> tuple[Probed, int]:
    """Fits the cost model, and sees what the allocator holds beyond what is in use.

    That grows little with the batch: gaps between blocks, and a last page that must fit whole.
    """
    slack = 0

    def measure(positions: NDArray[np.int64]) -> int:
        nonlocal slack
        meter.release(collect=False)
        seen = _peak(work, meter, positions, 1)
        slack = max(slack, seen.reserved - seen.allocated + LARGE_PAGE_BYTES) if seen.reserved else 0
        return seen.allocated

    probed = fit_by_probes(
        measure,
        work.features,
        work.counts,
        capacity_bytes=meter.capacity_bytes,
        gradient_bytes=work.gradient_bytes,
    )
    return probed, slack


def seconds_a_sample(work: Pass, model: CostModel, meter: Meter) -> float:
    """Returns how long a batch takes for each of its samples, once one has been run.

    Args:
        work: The work.
        model: What its batches cost.
        meter: Of the device; what is timed takes half of it at most.

    Raises:
        DoesNotFitError: Not even a sample fits.
    """
    costs = work.counts @ np.asarray(model.coefficients)
    room = _TIMED_SHARE * meter.capacity_bytes - model.base_bytes
    rows = np.resize(work.rows, int(np.clip(room / max(costs.mean(), 1.0), 1, _TIMED_SAMPLES)))
    taken = []
    with CatchOutOfMemory():
        work.run(rows)
        for _ in range(_TIMED_RUNS):
            _wait_for(meter.device)
            started = time.perf_counter()
            work.run(rows)
            _wait_for(meter.device)
            taken.append(time.perf_counter() - started)
        return min(taken) / len(rows)
    meter.release()
    raise DoesNotFitError("A sample must fit on the device", value=f"one needs {costs.mean() / 2**20:.1f} MiB")


def _peak(work: Pass, meter: Meter, positions: NDArray[np.int64], steps: int) -> Peak:
    meter.reset_peak()
    for _ in range(steps):
        with meter.measuring(work.resident):
            work.run(work.rows[positions])
    return Peak(meter.peak_bytes(), meter.peak_reserved_bytes())


def _worthwhile(upper: float, model: CostModel) -> float:
    """Where the features cost nothing, any batch is as good as any other, and a trial of one sample ends the search."""
    return upper if any(model.coefficients) else 1.0


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(kw_only=True)
class Explorer:
    """Runs batches to see what they take.

    Attributes:
        task: Whose samples.
        model: On the meter's device.
        training: Settings of the run.
        meter: Of the device.
        rows: [R] the training samples.
        tried: Called before each trial beside the probes, with the cost in bytes that it has.
        verify: Whether limits are tried; else they are what the probes predict, of a device that need not be there.
        beside: Tensors on the device that training does not change: a reference model's.
    """

    task: Task
    model: nn.Module
    training: TrainingSettings
    meter: Meter
    rows: NDArray[np.int64]
    tried: Callable[[float], None]
    verify: bool = True
    beside: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        self._precision = Precision.named(self.training.precision)
        self._counts = self.task.batch_features(self.rows)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def explore(self, upper: Upper, *, held_bytes: int = 0) -> DeviceLimits:
        """Fits the cost models of training and evaluation, and searches for their limits.

        Args:
            upper: Largest cost worth trying.
            held_bytes: Optimizer state that is on the device already.
        """
        with self._left_as_it_is() as copies:
            optimizer = self.optimizer_memory()
            state, aside = self._resident(optimizer, held_bytes)
            step = self._pass(self._train_step, [*state, *aside, *copies], gradients=optimizer.parameter_bytes)
            training = self._limit(step, upper)
            del aside, step
            self.model.eval()
            # Evaluation gains nothing from parts larger than what training takes at a time.
            needed = min(training.tuned_limit / max(upper(training.costs(self._counts)), 1.0), 1.0)
            evaluation = self._limit(self._pass(self._evaluate, [*state, *copies]), lambda costs: needed * upper(costs))
        return DeviceLimits(
            device_key=self.meter.key,
            capacity_bytes=self.meter.capacity_bytes,
            training=training,
            evaluation=evaluation,
            optimizer_peak_bytes=self._resident_bytes(optimizer) + optimizer.transient_bytes,
            gradient_bytes=optimizer.parameter_bytes,
        )

    def step_cost(self) -> tuple[CostModel, float]:
        """Fits the cost model of training, and times a step.

        Returns:
            The model, and a step's seconds for each of its samples.

        Raises:
            DoesNotFitError: Not even a sample fits.
        """
        with self._left_as_it_is() as copies:
            optimizer = self.optimizer_memory()
            state, aside = self._resident(optimizer, 0)
            work = self._pass(self._train_step, [*state, *aside, *copies], gradients=optimizer.parameter_bytes)
            model = probe(work, self.meter)[0].model
            return model, seconds_a_sample(work, model, self.meter)

    def simulate_peak(self, training: PhaseLimit, cost: float) -> Peak:
        """Measures, on the host, what a GPU's allocator would hold for a worst-case batch of training.

        Args:
            training: What batches cost.
            cost: Of the batch, in bytes.
        """
        with self._worst_case(training, cost) as (run, resident):
            return Peak(*simulate_peak(run, resident))

    def simulate_fit(self, training: PhaseLimit, cost: float, capacity_bytes: int) -> bool:
        """Tries, on the host, whether a worst-case batch of training would run on a GPU of a capacity."""
        with self._worst_case(training, cost) as (run, resident):
            return simulate_fit(run, resident, capacity_bytes)

    @contextmanager
    def _worst_case(self, training: PhaseLimit, cost: float) -> Iterator[tuple[Callable[[], None], list[Tensor]]]:
        """Makes a worst-case batch of training and what is resident beside it."""
        with self._left_as_it_is() as copies:
            state, aside = self._resident(self.optimizer_memory(), 0)
            batch = pack_worst_case(training.costs(self._counts), cost)
            resident = [*self.model.parameters(), *self.model.buffers(), *self.beside, *state, *aside, *copies]
            yield (lambda: self._train_step(self.rows[batch]) if len(batch) else None), resident

    @contextmanager
    def _left_as_it_is(self) -> Iterator[list[Tensor]]:
        """Sets gradients aside for the block, and leaves everything as it was.

        Yields:
            Copies of the buffers, in the place of those that a step of training holds (an evaluation's part, likewise).
        """
        snapshot, gradients = Snapshot(self.model, self.meter.device), [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield snapshot.copies
        finally:
            self.model.train()
            snapshot.restore()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self.meter.release()
            self.meter.reset_peak()

    def optimizer_memory(self) -> OptimizerMemory:
        """Measures, on the host, what the optimizer will take."""
        training = self.training
        with self.meter.host():
            return measure_optimizer(
                self._parameters,
                lambda shadows: make_optimizer(list(shadows), training, training.lr, self.meter.device),
            )

    def batch_dependence(self) -> BatchDependence:
        """Measures whether samples of a batch influence each other's gradient."""
        batch = self._batch(self._small_samples(sum(SPLIT)), coupled=True)
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

    def _small_samples(self, size: int) -> NDArray[np.int64]:
        """Rows of samples below the middle, which need little memory and have something of everything."""
        ranked = self.rows[np.argsort(self._counts[:, 0], kind="stable")]
        return np.resize(ranked[len(ranked) // 4 :], size)

    def _resident(self, optimizer: OptimizerMemory, held_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
        """Takes the places of the optimizer's state and of the gradients so far: as in the middle of a run.

        Raises:
            DoesNotFitError: They do not fit beside the weights.
        """
        missing = max(optimizer.state_bytes - held_bytes, 0)
        with CatchOutOfMemory():
            state = [torch.empty(missing, dtype=torch.uint8, device=self.meter.device)]
            return state, [torch.zeros_like(parameter) for parameter in self._parameters]
        raise model_does_not_fit(self._resident_bytes(optimizer), self.meter.capacity_bytes)

    def _resident_bytes(self, optimizer: OptimizerMemory) -> int:
        # A step holds copies of the buffers.
        buffers = [*self.model.buffers()] * 2
        model = sum(tensor.nbytes for tensor in [*self.model.parameters(), *buffers, *self.beside])
        return model + optimizer.parameter_bytes + optimizer.state_bytes

    def _pass(self, run: Run, resident: Sequence[Tensor], *, gradients: int = 0) -> Pass:
        return Pass(
            run=run, rows=self.rows, counts=self._counts, features=self.task.features, gradient_bytes=gradients,
            resident=[*self.model.parameters(), *self.model.buffers(), *self.beside, *resident],
        )  # fmt: skip

    def _limit(self, work: Pass, upper: Upper) -> PhaseLimit:
        steps = self.training.find_batch_size_steps_per_trial
        return find_limit(work, self.meter, upper, Trials(verify=self.verify, steps=steps, tried=self.tried))

    def _train_step(self, rows: NDArray[np.int64]) -> None:
        """Runs forward and backward; its gradients are dropped, also where it fails."""
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
