"""One configuration, put together as can-train puts a run together: meter, model, limits, micro-batches, optimizer.
Which batches it runs, and what that shows, is left to the measurements.

Shapes: R rows (samples) of a batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from can_train.config.settings import TrainingSettings
from can_train.errors import DoesNotFitError
from can_train.fit import random_state
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.explore import Explorer
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.optimizer import Precision, make_optimization
from can_train.fit.packing import BatchCosts, SplitRules
from can_train.fit.rescue import RescueSettings
from can_train.memory.meters import Meter
from can_train.memory.out_of_memory import is_out_of_memory
from can_train.task import LogicalBatch, Task
from gpu.configurations import Configuration
from gpu.limited import limited_device
from gpu.tasks import make_task

WARM_STEPS: Final = 2
"""Steps before a peak counts: the first makes the optimizer's state, or compiles."""

MEASURED_STEPS: Final = 2

BEYOND_CAPACITY: Final = 2.0
"""Cost, as a share of the capacity, beyond which the search for a limit need not look."""


class Explored(NamedTuple):
    """What a search for limits found.

    Attributes:
        limits: Of training and evaluation.
        costs: Prices of all training samples, in their order.
        probe_cost: Cost of the costliest probe of training.
    """

    limits: DeviceLimits
    costs: BatchCosts
    probe_cost: float


class StepPeak(NamedTuple):
    """What steps took at most, in bytes.

    Attributes:
        passes: Allocated, in forward and backward.
        optimizer: Allocated, in the optimizer's step.
        reserved: Held by the allocator, in either.
    """

    passes: int
    optimizer: int
    reserved: int


@dataclass(kw_only=True)
class Trainer:
    """A model in training on a device of some capacity.

    Attributes:
        meter: Of the device.
        task: Its samples.
        model: On the device.
        training: Settings.
    """

    meter: Meter
    task: Task
    model: nn.Module
    training: TrainingSettings

    def __post_init__(self) -> None:
        self._precision = Precision.named(self.training.precision)
        self._optimization = make_optimization(
            self.model, self.training, lr=self.training.lr, total_steps=1, device=self.meter.device
        )
        self._steps = 0

    def explore(self) -> Explored:
        """Searches for limits as a run does."""
        watched = _ProbeWatch(self.task)
        explorer = Explorer(
            task=watched,
            model=self.model,
            training=self.training,
            meter=self.meter,
            rows=self.task.train_rows,
        )
        limits = explorer.explore(lambda _: BEYOND_CAPACITY * self.meter.capacity_bytes, on_trial=watched.end)
        model = limits.training.model
        costs = BatchCosts.priced(model, self.task.batch_features(self.task.train_rows))
        probes = [BatchCosts.priced(model, self.task.batch_features(rows)) for rows in watched.probes]
        return Explored(limits, costs, max(probe.cost(0, len(probe)) for probe in probes))

    def peak(self, rows: NDArray[np.int64]) -> StepPeak | None:
        """Measures steps on a logical batch that is twice the rows, in two micro-batches of them: gradients set aside
        are part of what a step takes. None: memory runs out.
        """
        return self._measured(rows) if self.fits(rows) else None

    def fits(self, rows: NDArray[np.int64]) -> bool:
        """Tells whether the first steps on such a logical batch run to their end."""
        self.meter.release()
        try:
            for _ in range(WARM_STEPS):
                self.step(rows, parts=2)
        except (DoesNotFitError, RuntimeError) as error:
            if not isinstance(error, DoesNotFitError) and not is_out_of_memory(error):
                raise
        else:
            return True
        self._optimization.optimizer.zero_grad(set_to_none=True)
        self.meter.release()
        return False

    def step(self, rows: NDArray[np.int64], *, parts: int = 1) -> None:
        """Takes an optimizer step on a logical batch that repeats the rows."""
        self._accumulate(rows, parts)
        self._optimization.step()

    def _accumulate(self, rows: NDArray[np.int64], parts: int) -> None:
        device = self.meter.device
        generator = random_state.step_generator(seed=self.training.seed, step=self._steps)
        self._steps += 1
        batch = self.task.logical_batch(np.tile(rows, parts), device, self._precision.dtype, generator)

        def losses_of(start: int, stop: int) -> Losses:
            with self._precision.context(device):
                return batch.losses(self.model, start, stop)

        # The first out-of-memory is an answer here, not something to be rescued from.
        MicroBatcher(
            self.model,
            meter=self.meter,
            rules=SplitRules(samples=len(rows)),
            rescue=RescueSettings(adaptive=False),
        ).run(
            losses_of,
            parts * len(rows),
            denominators=batch.denominators,
            weights=self.task.loss_weights,
            scale=self._optimization.scaler.scale,
        )

    def _measured(self, rows: NDArray[np.int64]) -> StepPeak:
        meter = self.meter
        passes, optimizer, reserved = 0, 0, 0
        for _ in range(MEASURED_STEPS):
            meter.reset_peak()
            self._accumulate(rows, parts=2)
            passes, reserved = max(passes, meter.peak_bytes()), max(reserved, meter.peak_reserved_bytes())
            meter.reset_peak()
            self._optimization.step()
            optimizer, reserved = max(optimizer, meter.peak_bytes()), max(reserved, meter.peak_reserved_bytes())
        return StepPeak(passes, optimizer, reserved)


@contextmanager
def open_trainer(configuration: Configuration) -> Iterator[Trainer]:
    """Puts a model on a device of the configuration's capacity; on a simulated one everything inside counts."""
    training = TrainingSettings(precision=configuration.precision)
    task = make_task(configuration.model, small=configuration.simulated)
    with limited_device(configuration.device, configuration.capacity_bytes) as meter:
        random_state.seed_everything(training.seed)
        model = task.build_model().to(meter.device, Precision.named(training.precision).dtype).train()
        yield Trainer(meter=meter, task=task, model=model, training=training)


class _ProbeWatch:
    """A task that remembers the batches that are drawn of it until the probes of training are over.

    Attributes:
        probes: Their rows.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._watches = True
        self.probes: list[NDArray[np.int64]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def logical_batch(self, rows: NDArray[np.int64], *others: Any) -> LogicalBatch:
        """Notes the rows, and makes their batch."""
        if self._watches:
            self.probes.append(rows)
        return self._task.logical_batch(rows, *others)

    def end(self, _: float) -> None:
        """Called before every trial; the first comes after the probes of training."""
        self._watches = False
