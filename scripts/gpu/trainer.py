"""Trains one configuration with the same parts as a run of can-train: meter, model, limits, micro-batches, optimizer.
`gpu.measurements` decides which batches it trains on.

Shapes: R rows (samples) of a batch.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.settings import TrainingSettings
from can_train.errors import DeviceError, DoesNotFitError
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.explore import Explorer
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.optimizer import make_optimization
from can_train.fit.packing import BatchCosts, SplitRules
from can_train.fit.precision import Precision
from can_train.fit.random_state import seed_everything, step_generator
from can_train.fit.rescue import RescueSettings
from can_train.fit.search import RecordedPhase
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.catalogue import UsableMemory, recordable
from can_train.memory.meters import AbsentGpuMeter, Meter, SimulatedMeter, open_meter
from can_train.memory.out_of_memory import is_out_of_memory
from can_train.task import BatchTask, LogicalBatch
from gpu.configurations import SIMULATED, Configuration
from gpu.tasks import make_task

MIB: Final = 2**20
Result = TypeVar("Result")

WARM_STEPS: Final = 2
"""Steps before a peak is measured. The first creates the optimizer's state, and may compile."""

MEASURED_STEPS: Final = 2

BEYOND_CAPACITY: Final = 2.0
"""The search for limits stops at this cost, as a share of the capacity."""


class Explored(NamedTuple):
    """The result of a search for limits.

    Attributes:
        limits: The limits of training and evaluation.
        costs: The cost of each training sample, in the order of the data.
        probe_cost: The cost of the largest training probe.
        probe_s: CPU time of the training probes.
    """

    limits: DeviceLimits
    costs: BatchCosts
    probe_cost: float
    probe_s: float


class StepPeak(NamedTuple):
    """Peaks over several steps, in bytes.

    Attributes:
        passes: Allocated during forward and backward.
        optimizer: Allocated during the optimizer's step.
        reserved: Reserved by the allocator during either.
    """

    passes: int
    optimizer: int
    reserved: int


@dataclass(kw_only=True)
class Trainer:
    """Trains a model on a device of limited capacity.

    Attributes:
        meter: Measures the device.
        task: Provides batches and losses.
        model: The model, on the device.
        training: Its training settings.
        configuration: What it was made from.
    """

    meter: Meter
    task: BatchTask
    model: nn.Module
    training: TrainingSettings
    configuration: Configuration

    def __post_init__(self) -> None:
        self._precision = Precision.named(self.training.precision)
        self._optimization = make_optimization(self.model, self.training, lr=self.training.lr, total_steps=1)
        self._steps = 0

    def explore(self) -> Explored:
        """Searches for the limits in the same way as a run."""
        started, watched = time.process_time(), _ProbeWatch(self.task)
        explorer = Explorer(
            task=cast(BatchTask, watched),
            model=self.model,
            training=self.training,
            meter=self.meter,
            rows=self.task.train_rows,
        )
        limits = explorer.explore(lambda _: BEYOND_CAPACITY * self.meter.capacity_bytes, on_trial=watched.end)
        model = limits.training.model
        costs = BatchCosts.priced(model, self.task.batch_features(self.task.train_rows))
        probes = [BatchCosts.priced(model, self.task.batch_features(rows)) for rows in watched.probes]
        largest = max(probe.cost(0, len(probe)) for probe in probes)
        return Explored(limits, costs, largest, probe_s=watched.ended - started)

    def peak(self, rows: NDArray[np.int64]) -> StepPeak | None:
        """Measures steps of two micro-batches, each with all of the rows. Returns None if memory runs out.

        Two, because the gradients of earlier micro-batches are set aside during a step, which takes memory.
        """
        # A batch at the limit may fit in the first steps only, since memory becomes fragmented.
        return self._tried(lambda: self._measured(rows)) if self.fits(rows) else None

    def fits(self, rows: NDArray[np.int64]) -> bool:
        """Returns whether the first steps of two such micro-batches succeed."""
        self.meter.release()

        def warm_up() -> int:
            for _ in range(WARM_STEPS):
                self.step(rows, parts=2)
            return WARM_STEPS

        return self._tried(warm_up) is not None

    def _tried(self, work: Callable[[], Result]) -> Result | None:
        """Runs some steps; returns their result, or None if memory runs out."""
        try:
            return work()
        except (DoesNotFitError, RuntimeError) as error:
            if not isinstance(error, DoesNotFitError) and not is_out_of_memory(error):
                raise
        self._optimization.optimizer.zero_grad(set_to_none=True)
        self.meter.release()
        return None

    def step(self, rows: NDArray[np.int64], *, parts: int = 1) -> None:
        """Takes an optimizer step on a logical batch that has the rows `parts` times."""
        self._accumulate(rows, parts)
        self._optimization.step()

    def _accumulate(self, rows: NDArray[np.int64], parts: int) -> None:
        device = self.meter.device
        generator = step_generator(seed=self.training.seed, step=self._steps)
        self._steps += 1
        batch = self.task.logical_batch(np.tile(rows, parts), device, self._precision.dtype, generator)

        def losses_of(start: int, stop: int) -> Losses:
            with self._precision.context(device):
                return batch.losses(self.model, start, stop)

        # No rescue: these measurements look for out-of-memory errors.
        batcher = MicroBatcher(
            self.model, meter=self.meter, rules=SplitRules(samples=len(rows)), rescue=RescueSettings(adaptive=False)
        )
        # The comparison of the first batch that is split takes memory that is not the step's.
        batcher.compares = False
        batcher.run(
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

    def confirm(self, recorded: RecordedPhase) -> tuple[DeviceLimits, list[str]]:
        """Confirms recorded lines as a run does; returns the limits, and why lines were not confirmed."""
        reasons: list[str] = []
        explorer = Explorer(
            task=self.task, model=self.model, training=self.training, meter=self.meter, rows=self.task.train_rows,
            on_refused=reasons.append,
        )  # fmt: skip
        return explorer.explore(lambda _: BEYOND_CAPACITY * self.meter.capacity_bytes, recorded=recorded), reasons


def record(configuration: Configuration, key: str) -> dict[str, Any]:
    """Records the lines of a configuration on the device of a key, in a process that sees no GPU."""
    from can_train.fit.recorded_limits import record_phase

    capacity, simulated = configuration.capacity_bytes, configuration.simulated
    target = UsableMemory(key=key, name=key, total_bytes=capacity, subtracted=(), source="simulated")
    if not simulated:
        card = recordable(key, capacity)
        if card is None:
            raise DeviceError("The catalogue has no such card", value=key, remedy="Add it to the catalogue")
        target = card
    task, training = (
        make_task(configuration.model, small=simulated),
        TrainingSettings(precision=configuration.precision),
    )
    seed_everything(training.seed)
    model = task.build_model().to(dtype=Precision.named(training.precision).dtype).train()
    explorer = Explorer(
        task=task, model=model, training=training, rows=task.train_rows, verify=False,
        meter=AbsentGpuMeter(target),
    )  # fmt: skip
    started = time.process_time()
    phase = record_phase(explorer, BEYOND_CAPACITY * capacity)
    return {"lines": msgspec.to_builtins(phase), "cpu_s": time.process_time() - started}


@contextmanager
def open_trainer(configuration: Configuration) -> Iterator[Trainer]:
    """Puts the configuration's model on a device of its capacity.

    On the simulated GPU, every tensor that is created inside the context counts.
    """
    training = TrainingSettings(precision=configuration.precision)
    task = make_task(configuration.model, small=configuration.simulated)
    with limited_device(configuration.device, configuration.capacity_bytes) as meter:
        seed_everything(training.seed)
        model = task.build_model().to(meter.device, Precision.named(training.precision).dtype).train()
        yield Trainer(meter=meter, task=task, model=model, training=training, configuration=configuration)


@contextmanager
def limited_device(device: str, capacity_bytes: int) -> Iterator[Meter]:
    """Opens a device and limits the memory that its allocator may use.

    On the simulated GPU, every tensor that is created inside the context counts.

    Args:
        device: `cuda`, `cuda:1` or `sim`.
        capacity_bytes: The limit.

    Raises:
        DeviceError: The device has less memory free.
    """
    if device == SIMULATED:
        simulated = SimulatedMeter(capacity_bytes, settings=read_allocator_settings())
        with simulated.active():
            yield simulated
        return
    # Opening a meter sets how the allocator's segments grow, which must happen before CUDA is first used.
    whole = open_meter(device)
    if capacity_bytes > whole.capacity_bytes:
        raise DeviceError(
            "The capacity exceeds the free memory of the device",
            value=f"{capacity_bytes / MIB:.0f} of {whole.capacity_bytes / MIB:.0f} MiB",
            remedy="Choose others: --capacities",
        )
    torch.cuda.set_per_process_memory_fraction(capacity_bytes / whole.total_bytes, whole.device)
    try:
        limited = open_meter(device)
        if limited.capacity_bytes > capacity_bytes:
            raise DeviceError(
                "This torch does not report its share of the GPU", value=torch.__version__, remedy="Take a later one"
            )
        yield limited
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, whole.device)


class _ProbeWatch:
    """Wraps a task and records the batches that are drawn from it until the training probes are over.

    Attributes:
        probes: The rows of each recorded batch.
        ended: When they were over, in seconds of CPU time.
    """

    def __init__(self, task: BatchTask) -> None:
        self._task = task
        self._watches = True
        self.ended = 0.0
        self.probes: list[NDArray[np.int64]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def logical_batch(self, rows: NDArray[np.int64], *placement: Any) -> LogicalBatch:
        """Records the rows and returns the task's batch."""
        if self._watches:
            self.probes.append(rows)
        return self._task.logical_batch(rows, *placement)

    def end(self, _: float) -> None:
        """Stops recording. The explorer calls this before every trial, and the first trial follows the probes."""
        if self._watches:
            self._watches, self.ended = False, time.process_time()
