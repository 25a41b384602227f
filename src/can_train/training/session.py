"""One attempt of a run: its plan on every rank, its state in memory, and that state in a checkpoint."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from can_train.config.resolved import ResolvedRun
from can_train.config.settings import TrainingSettings
from can_train.errors import CheckpointError, DivergedError, DoesNotFitError, FailedRunError, first_sentence
from can_train.factors.observations import Outcome as AttemptOutcome
from can_train.fit.compiled import CompiledModel, compiles_on
from can_train.fit.engine import Engine
from can_train.fit.epochs import Epochs, order_by_epoch, packed_rows, size_of_epochs
from can_train.fit.factor_rule import FactorRule, SafetyFactor
from can_train.fit.micro_batcher import BatchResult, Denominators, MicroBatcher, combine_updates
from can_train.fit.offloaded_state import keep_states
from can_train.fit.optimizer import Optimization, make_optimization, only_trained
from can_train.fit.packing import BatchCosts
from can_train.fit.pass_state import buffer_shapes, load_weights
from can_train.fit.planner import Planner, Planners
from can_train.fit.precision import Precision, is_inexact
from can_train.fit.random_state import capture_generators, restore_generators, seed_rank, step_generator
from can_train.fit.rescue import Backoff, Ladder, OptimizerReserve
from can_train.fit.run_plan import OtherRung, RunPlan, price, still_fits
from can_train.fit.rungs import SPLIT_ALONE, Rung
from can_train.fit.step_time import StepTimer
from can_train.io.records import read_text, write_json_atomic
from can_train.io.units import counted, size_text
from can_train.memory.meters import Meter, tensors_of
from can_train.memory.monitor import LEAST_BYTES, LeakWatch, MemoryMonitor
from can_train.memory.out_of_memory import is_out_of_memory
from can_train.memory.sharded_tensors import sharded_state, whole
from can_train.reporter import Reporter
from can_train.runs.attempts import TERMINATED, StopRequests
from can_train.runs.recording import MetricsLog, StepLog, StepRecord, memory_limits, rewind_steps, steps_path
from can_train.runs.run_folder import RunFolder
from can_train.runs.trackers import Tracker
from can_train.task import BatchTask, LogicalBatch, Phase, TaskInEpoch, UpcomingBatch
from can_train.training.chosen_weights import AveragedWeights, BestWeights, Criterion, choose
from can_train.training.distributed import Ranks
from can_train.training.inference import rescue_settings
from can_train.training.loading import Checkpoints, ResidentData, fresh_model

if TYPE_CHECKING:
    from can_train.fit.sharding import Shards
    from can_train.runs.trials import TrialRun
    from can_train.training.limit_recorder import LimitRecorder
    from can_train.training.reference_models import ReferenceModels

T = TypeVar("T")

_PARAMETER: Final = "parameter"  # begins the name of a tensor that belongs to no sample
_LEAST_LEAK: Final = 0.1  # Share of the device; less that is held explains no out-of-memory
_HIGHEST_LR: Final = 0.1  # That is advised after a loss that is not finite; above it, few optimizers train
_COMPARED_SAMPLES: Final = 1000  # Training samples whose loss is compared with the validation loss


@dataclass(kw_only=True)
class Parts:
    """The parts that an attempt of a run is made from."""

    run: ResolvedRun
    folder: RunFolder
    task: BatchTask
    meter: Meter
    reporter: Reporter
    stops: StopRequests
    ranks: Ranks = field(default_factory=Ranks)
    trackers: Sequence[Tracker] = ()  # on rank 0 alone
    recorder: LimitRecorder | None = None  # None: probes on the device find what fits

    @property
    def training(self) -> TrainingSettings:
        """How the run is trained."""
        return self.run.training


@dataclass(kw_only=True)
class Progress:
    """How far a run is; part of its checkpoints."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    updates: int = 0  # optimizer steps of the current step that are done, where it has several
    best_loss: float = math.inf
    best_epoch: int = 0
    best_value: float | None = None  # of the figure that chooses the best weights; higher is better
    epochs_without_gain: int = 0  # in validations
    seconds: float = 0.0  # of training, where its time is limited
    trained: bool = False
    # Of the current epoch so far
    epoch_sums: dict[str, float] = field(default_factory=dict)  # of each loss term
    epoch_denominators: dict[str, float] = field(default_factory=dict)  # of each loss term
    epoch_samples: int = 0
    epoch_parts: int = 0  # micro-batches
    epoch_largest: int = 0  # samples of the largest micro-batch
    epoch_ooms: int = 0  # out-of-memories that were rescued

    def add_losses(self, result: BatchResult) -> None:
        """Adds the losses of a step to those of its epoch."""
        for term, mean in result.means.items():
            denominator = result.denominators[term]
            self.epoch_sums[term] = self.epoch_sums.get(term, 0.0) + mean * denominator
            self.epoch_denominators[term] = self.epoch_denominators.get(term, 0.0) + denominator

    def add_step(self, result: BatchResult, samples: int) -> None:
        """Counts an optimizer step, whose losses `add_losses` adds."""
        self.epoch_samples += samples
        self.epoch_parts += len(result.micro_batches)
        self.epoch_largest = max((self.epoch_largest, *result.micro_batches))
        self.epoch_ooms += result.ooms_rescued
        self.step_in_epoch += 1
        self.step += 1
        self.updates = 0

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch, counted from 0."""
        self.epoch, self.step_in_epoch = epoch, 0
        self.epoch_sums, self.epoch_denominators = {}, {}
        self.epoch_samples = self.epoch_parts = self.epoch_largest = self.epoch_ooms = 0

    @property
    def epochs_begun(self) -> int:
        """Epochs that have ended, and the epoch of which some steps are done."""
        return self.epoch + (self.step_in_epoch > 0)

    @property
    def epoch_means(self) -> dict[str, float]:
        """Mean of each loss term over the samples of the current epoch so far, as validation takes it."""
        return {term: total / (self.epoch_denominators[term] or 1.0) for term, total in self.epoch_sums.items()}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Progress:
        """Reads the progress in a checkpoint.

        Raises:
            ValueError: It is none.
        """
        progress = msgspec.convert(values, cls)
        counts = (value for value in vars(progress).values() if isinstance(value, int))
        if values.keys() != {each.name for each in fields(cls)} or min(counts) < 0:
            raise ValueError("a count of its progress is missing or negative")
        return progress


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Memory that something holds from step to step, and no plan counts."""

    held_bytes: int = 0  # 0: there is none
    first_step: int = 0  # The step after which the held memory began to grow


@dataclass(kw_only=True)
class PhaseEngine(Engine):
    """The engine of one phase of a task; most tasks have one phase.

    Attributes:
        task: The task as it is in the phase.
        planner: Makes another plan where other parameters are trained.
        run_plan: The phase's plan on this rank.
        shared_plan: Rank 0's plan: its prices let all ranks share samples out alike.
        planned_for: Which parameters were trained when the plan was made.
        told_rung: The rung of the plan, or the last rung that the user was told of.
        timer: Times steps, some of which try other sizes of micro-batches.
    """

    phase: Phase
    task: BatchTask
    planner: Planner
    run_plan: RunPlan
    shared_plan: RunPlan
    optimization: Optimization
    timer: StepTimer
    planned_for: tuple[bool, ...] = ()
    told_rung: Rung = SPLIT_ALONE
    _in_epoch: tuple[int, TaskInEpoch] | None = None

    def expect_step(self) -> None:
        """Reserves the memory of the optimizer's step on the rung in force, also while another phase trains."""
        trainable = self.optimization.trainable
        self.optimization.set_trainable(self.planned_for)
        try:
            needs = self.planner.explorer.optimizer_memory()
        finally:
            self.optimization.set_trainable(trainable)
        self.reserve.tensors.clear()
        self.reserve.expect(needs, held_bytes=self.optimization.device_state_bytes)

    def in_epoch(self, epoch: int, epochs: int) -> TaskInEpoch:
        """Returns the task as it is in an epoch of the phase."""
        if self._in_epoch is None or self._in_epoch[0] != epoch:
            self._in_epoch = epoch, self.task.in_epoch(epoch, epochs)
        return self._in_epoch[1]

    @contextmanager
    def timed(self, step: int, rows: NDArray[np.int64]) -> Iterator[tuple[MicroBatcher, BatchCosts]]:
        """Computes a share of a step's batch in the block, with the batcher that it yields: in micro-batches of the
        size that the step tries, on the rung that it tries.
        """
        trial, costs = self.timer.trial(step), self.run_plan.training_costs(self.task, rows)
        other = self._other_rung_of(step)
        batcher = self.batcher if other is None or self.batcher.other is None else self.batcher.other
        rules = batcher.rules
        if trial is not None:
            batcher.rules = replace(rules, fastest=trial.cost)
        try:
            with self.timer.timing(step, costs):
                yield batcher, costs if other is None else price(self.task, rows, other.limits.training)
        finally:
            batcher.rules = rules

    def count_timed(self, step: int, result: BatchResult, *, is_typical: bool) -> None:
        """Counts the micro-batches of a timed step; memory that ran out may have made them smaller."""
        batcher = self.batcher if self._other_rung_of(step) is None else self.batcher.other
        is_undisturbed = batcher is not None and batcher.is_undisturbed and not result.ooms_rescued
        self.timer.count(step, result.micro_batches, is_typical=is_typical and is_undisturbed)

    def record_step(self, step: int, result: BatchResult, *, is_counted: bool) -> None:
        """Records the micro-batches of a step, with costs on the plan's rung."""
        other, own = self._other_rung_of(step), self.run_plan.limits
        if other is not None and own is not None:
            result = replace(result, largest_cost=other.cost_on(own, result.largest_cost),
                             cost_after_rescue=other.cost_on(own, result.cost_after_rescue))  # fmt: skip
        self.record_result(result, is_counted=is_counted)

    def _other_rung_of(self, step: int) -> OtherRung | None:
        """Returns the rung beside the plan's that a step tries; None: it tries none."""
        trial, other = self.timer.trial(step), self.run_plan.other_rung
        return other if trial is not None and other is not None and trial.rung == other.rung.timed_as else None


@dataclass(kw_only=True)
class Session(Parts):
    """Everything one attempt of a run trains with.

    Args:
        plans: Of all ranks.
        steps_done: Optimizer steps of earlier attempts.

    Attributes:
        planners: Of all phases; they have the model.
        engines: The engine of each phase.
        engine: The engine of the phase that trains now.
        total_steps: Steps of the whole run, unless it stops early.
        bests: The weights that validation judged best so far, by their kind: trained, averaged.
        average: The average of the weights; None: there is none.
        shards: The model's shards on the ranks; None: each rank has the whole model.
        trial: The trial of a search that the run is; None: it is none.
        is_time_up: Whether training has taken the time that it may take, known to all ranks.
        stop_signal: A signal that some rank has received, known to all of them; None: none.
        ooms_elsewhere: Out-of-memories that other ranks survived, once training has ended.
        data: The task's data on the device.
        is_thawed: Whether other parameters are trained than at first, by other plans than those in the run folder.
        may_go_on_as_shards: Whether memory ran out on the last rung, and shards of the model may fit.
        in_optimizer_step: Whether an optimizer steps now, which cannot be undone.
        has_moved: Whether a step of the epoch has moved weights: under fp16 the scaler skips those that overflow.
        reserve_ran_out: Whether memory ran out that is reserved for a step of an optimizer.
        foreign_bytes: Most memory that other processes held when memory ran out outside of the micro-batches.
        not_finite: Metrics that were no finite numbers in a validation, which is told once.
        record_end: Writes the outcome of an attempt that may go on as shards, once it is known whether shards fit.
    """

    planners: Planners
    plans: InitVar[Sequence[RunPlan]]
    steps_done: InitVar[int]
    reference_models: ReferenceModels
    data: ResidentData
    progress: Progress = field(default_factory=Progress)
    average: AveragedWeights | None = None
    shards: Shards | None = None
    trial: TrialRun | None = None
    bests: dict[str, BestWeights] = field(default_factory=dict)
    is_time_up: bool = False
    stop_signal: int | None = None
    ooms_elsewhere: int = 0
    leak_watch: LeakWatch = field(default_factory=LeakWatch)
    is_thawed: bool = False
    may_go_on_as_shards: bool = False
    in_optimizer_step: bool = False
    has_moved: bool = False
    reserve_ran_out: bool = False
    foreign_bytes: int = 0
    not_finite: set[str] = field(default_factory=set)
    record_end: Callable[[AttemptOutcome], None] = field(default=lambda outcome: None)

    def __post_init__(self, plans: Sequence[RunPlan], steps_done: int) -> None:
        training, task, measured = self.training, self.task, self.run.monitor
        own = plans[self.ranks.rank]
        self.model = self.planners.first.model
        self._declared_buffers = buffer_shapes(self.model).items()
        self._made_buffers: Sequence[str] = ()
        self.epochs = Epochs(
            order_by_epoch(task, own.skipped, training),
            lambda rows: task.batch_features(rows)[:, 0],
            seed=training.seed,
            logical_batch=own.phase_plan.logical_batch,
            preflight_units=training.preflight_units,
            packed=lambda rows: packed_rows(task, rows),
            size=size_of_epochs(task, own.skipped, epochs=training.epochs),
            bucketed=training.order == "bucketed",
        )
        self.total_steps = self.epochs.total_steps(training.epochs)
        self.precision = Precision.named(training.precision)
        self.compiled = self._compiled_model(min(phase.memory_budget for phase in own.phases))
        left: int | None = self.total_steps - steps_done
        warmup = measured.warmup
        if self.compiled is not None and not self.meter.counts_always:
            # A step is measured by a look at its operations, which compiled code does not show.
            warmup, left = self.total_steps, None
        self.monitor = MemoryMonitor(meter=self.meter, interval=measured.interval, warmup=warmup, total_steps=left)
        self.engines = [self._phase_engine(*plans_of_phase) for plans_of_phase in
                        zip(self.planners.phases, own.phases, plans[0].phases, strict=True)]  # fmt: skip
        self.engine = self.engines[0]
        self.checkpoints = Checkpoints(self.folder.checkpoints_path)
        self.metrics = MetricsLog(self.folder.metrics_path)
        self.steps = StepLog(steps_path(self.folder.path, self.ranks.rank), self.total_steps)
        self._recorded_plan: RunPlan | None = None
        self._started, self._max_seconds = time.perf_counter(), training.max_seconds
        # The last step, and the results of its updates, until its losses are read.
        self._unread: tuple[StepRecord, NDArray[np.int64], Sequence[tuple[BatchResult, Denominators]]] | None = None

    def _phase_engine(self, planner: Planner, run_plan: RunPlan, shared_plan: RunPlan) -> PhaseEngine:
        training, meter, phase, plan = planner.training, self.meter, planner.phase, run_plan.phase_plan
        optimization = make_optimization(
            self.model, training, lr=training.lr * plan.lr_factor, total_steps=self.total_steps * phase.steps,
            phase=phase, schedule_of=planner.task.schedule, offloaded=run_plan.rung.offload_optimizer,
        )  # fmt: skip
        rescue = replace(
            rescue_settings(training),
            adaptive=training.adaptive_micro_batch and training.fit != "off",
            regrow=training.regrow,
        )
        batcher = MicroBatcher(self.model, meter=meter, rules=plan.rules, rescue=rescue, limits=run_plan.limits,
                               shards=self.shards)  # fmt: skip
        batcher.ladder = Ladder(planner.rungs).on(run_plan.rung)
        if other := run_plan.other_rung:
            # Its limits, and the memory that ran out under them, are in costs of their own.
            batcher.other = MicroBatcher(self.model, meter=meter, rules=other.rules(plan), rescue=rescue,
                                         limits=other.limits)  # fmt: skip
            batcher.other.ladder = Ladder(planner.rungs).on(other.rung)
            batcher.other.use_rung = self.use_rung
            batcher.other.watch(self.record_rescue)
        planner.explorer.rung = run_plan.rung
        batcher.use_rung = self.use_rung
        batcher.watch(self.record_rescue)
        batcher.compiled = self.compiled
        reserve = OptimizerReserve(planner.explorer.optimizer_memory(), meter, retries=training.oom_retries,
                                   held_bytes=optimization.device_state_bytes)  # fmt: skip
        return PhaseEngine(
            meter=meter, monitor=self.monitor, batcher=batcher, reserve=reserve, phase=phase, task=planner.task,
            planner=planner, run_plan=run_plan, shared_plan=shared_plan, optimization=optimization,
            planned_for=optimization.trainable, told_rung=run_plan.rung,
            timer=StepTimer(meter=meter, choice=run_plan.micro_batch),
        )  # fmt: skip

    def _compiled_model(self, memory_budget: float) -> CompiledModel | None:
        mode = self.training.compile
        if mode == "off" or not compiles_on(self.meter):
            return None
        return CompiledModel(self.model, mode, self.reporter.notice, memory_budget=memory_budget)

    def compile(self) -> None:
        """Compiles the modules that each phase calls, for the parameters that are trained now."""
        if self.compiled is None:
            return
        with self.reporter.stage("compiling the model", total=len(self.engines), unit="phases") as stage:
            for engine in self.engines:
                engine.planner.explorer.compile(self.compiled)
                stage.advance(1)
        if not self.compiled.is_in_use and not self.compiled.is_given_up:
            self.reporter.notice("training.compile has no effect: the loss calls no module of the model")

    @property
    def best(self) -> dict[str, Any]:
        """The weights that the run would end with now; empty before the first validation, and on other ranks."""
        return self.bests[choose(self.bests)].weights if self.bests else {}

    @cached_property
    def criterion(self) -> Criterion:
        """The figure that chooses the best weights."""
        return Criterion(*self.training.criterion)

    def start_clock(self) -> None:
        """Begins to count the time of training."""
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of training, of earlier attempts too."""
        return self.progress.seconds + (time.perf_counter() - self._started)

    @property
    def is_late(self) -> bool:
        """Whether training has taken its time, by this rank's clock."""
        return self.seconds >= self._max_seconds

    @property
    def fullest(self) -> PhaseEngine:
        """The engine of the phase with the highest predicted peak, which later runs learn from."""
        return max(self.engines, key=lambda engine: engine.run_plan.predicted_peak_bytes or 0.0)

    @property
    def own_plan(self) -> RunPlan:
        """This rank's plans of all phases as one."""
        first, *later = (engine.run_plan for engine in self.engines)
        return replace(first, later=tuple(later))

    @property
    def limits_of(self) -> str:
        """The device that limits are learned on: a device with shards has limits of its own."""
        return self.meter.key if self.shards is None else f"{self.meter.key}, {self.shards.size} shards"

    @property
    def trainable(self) -> list[tuple[bool, ...]]:
        """Which parameters of each phase are trained now, outside of the phases themselves."""
        return [engine.optimization.trainable for engine in self.engines]

    @property
    def ooms_rescued(self) -> int:
        """Out-of-memories survived so far, in all phases."""
        return sum(engine.batcher.ooms_rescued for engine in self.engines)

    @contextmanager
    def in_phase(self, engine: PhaseEngine) -> Iterator[None]:
        """Trains a phase in the block, with the other phases' parameters frozen."""
        before, self.engine = self.engine, engine
        with only_trained(self.model, engine.phase):
            try:
                yield
            finally:
                self.engine = before

    def share(self, engine: PhaseEngine, rows: NDArray[np.int64]) -> slice:
        """Returns which samples of a logical batch this rank computes."""
        floor = self.training.min_micro_batch_size
        return self.ranks.share(len(rows), lambda: engine.shared_plan.training_costs(engine.task, rows), floor)

    @cached_property
    def compared_rows(self) -> NDArray[np.int64]:
        """Some training samples, whose loss is compared with the validation loss after each epoch."""
        rows = np.setdiff1d(self.task.train_rows, self.own_plan.skipped)
        count = min(len(rows), len(self.task.validation_rows), _COMPARED_SAMPLES)
        compared: NDArray[np.int64] = rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
        return compared

    def evaluation_share(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], slice]:
        """Returns samples in the order in which they are evaluated, and which of them this rank computes."""
        rows = packed_rows(self.task, rows)
        return rows, self.ranks.share(len(rows), lambda: self.engine.shared_plan.evaluation_costs(self.task, rows))

    def upcoming(self) -> Iterator[UpcomingBatch]:
        """Yields the batches of training and validation that follow, up to the last epoch."""
        progress, training = self.progress, self.training
        step, first, updates_done = progress.step, progress.step_in_epoch, progress.updates
        for epoch in range(progress.epoch, training.epochs):
            # The samples of a stream are counted, and shared out, once they are read.
            steps = self.epochs.batches(epoch) if self.task.in_order else self.epochs.steps(epoch)
            for rows in steps[first:]:
                updates = [engine for engine in self.engines for _ in range(engine.phase.steps)]
                for update, engine in list(enumerate(updates))[updates_done:]:
                    generator = step_generator(seed=training.seed, step=step, update=update)
                    share = slice(None) if self.task.in_order else self.share(engine, rows)
                    yield UpcomingBatch(rows=rows, share=share, generator=generator)
                step, updates_done = step + 1, 0
            first = 0
            if training.validates_after(epoch + 1):
                validated = list(self.task.validation_sets.values())
                has_average = self.average is not None and self.average.begins_before(step)
                for evaluated in [*validated, self.compared_rows, *(validated if has_average else [])]:
                    rows, share = self.evaluation_share(evaluated)
                    yield UpcomingBatch(rows=rows, share=share)

    def changed_rungs(self) -> Iterator[str]:
        """Says for each phase whose rung has changed since the last call how its steps are computed now."""
        for engine in self.engines:
            rung = engine.batcher.ladder.rung
            if rung != engine.told_rung:
                engine.told_rung = rung
                yield f"{engine.phase.name}: {rung.describe()}" if engine.phase.name else rung.describe()

    def use_rung(self, rung: Rung) -> bool:
        """Keeps the state of all optimizers on the host where any phase's rung does; tells whether there is room."""
        on_host = any(engine.batcher.ladder.rung.offload_optimizer for engine in self.engines)
        keep = [engine.optimization.keep_state for engine in self.engines]
        if not keep_states(keep, on_host=on_host, meter=self.meter):
            return False
        for engine in self.engines:
            explorer = engine.planner.explorer
            if explorer.rung.offload_optimizer != on_host:
                explorer.rung = replace(explorer.rung, offload_optimizer=on_host)
                engine.expect_step()
        self.meter.release()
        return True

    def record_rescue(self) -> None:
        """Records an out-of-memory of any phase: the monitor's peak since then is all phases'."""
        for engine in self.engines:
            engine.record_rescue()
        self._move_data()

    def _move_data(self) -> bool:
        """Frees the memory of data on the device; tells whether there were any."""
        if not self.data.is_there:
            return False
        size = size_text(self.own_plan.data.num_bytes)
        self.data.move_to_host()
        self.reporter.notice(f"Memory ran out: the data leave the device, {size}; batches come from the host")
        return True

    def with_room(self, engine: PhaseEngine, reserve: Callable[[], None]) -> None:
        """Reserves memory of an engine's optimizer step. Where there is no room, the data leave the device, and then
        the state of the optimizers.

        Raises:
            DoesNotFitError: There is no room even then.
        """
        ways = iter((self._move_data, partial(self._leave_state, engine)))
        while True:
            try:
                return reserve()
            except DoesNotFitError:
                if not any(makes_room() for makes_room in ways):
                    self.reserve_ran_out = True
                    raise

    @property
    def ran_out_in_training(self) -> bool:
        """Whether memory ran out in micro-batches within the plan, or in the memory that is reserved beside them: only
        this shows something of the plan's limits.
        """
        batchers = (batcher for engine in self.engines for batcher in (engine.batcher, engine.batcher.other))
        return self.reserve_ran_out or any(each is not None and each.oom_cost is not None for each in batchers)

    @property
    def leak(self) -> Leak:
        """The memory that something holds from step to step, more with each step, beside the optimizers' state."""
        least = max(LEAST_BYTES, _LEAST_LEAK * self.meter.capacity_bytes)
        rise, steps = self.leak_watch.rise()
        if rise < least:
            return Leak()
        # Some optimizers make more state from step to step.
        states = (engine.optimization.device_state_bytes - engine.planner.explorer.optimizer_memory().state_bytes
                  for engine in self.engines)  # fmt: skip
        held = rise - max(sum(states), 0)
        return Leak() if held < least else Leak(held_bytes=held, first_step=max(self.progress.step - steps, 0))

    def forget_failures(self) -> None:
        """Lets a later attempt begin with the plan's micro-batches, on its rungs."""
        for engine in self.engines:
            for batcher in filter(None, (engine.batcher, engine.batcher.other)):
                batcher.forget_failures()
                batcher.ladder.level = 0

    def leave_state_next_time(self) -> bool:
        """Lets a later attempt, and later runs, begin with the optimizers' state on the host, which this attempt cannot
        send there any more; tells whether they can.
        """
        can_leave = False
        # A compiled model is traced once, on one rung.
        for engine in self.engines if self.compiled is None else ():
            rung, ladder = engine.batcher.ladder.rung, engine.batcher.ladder
            further = [each for each in engine.planner.rungs if each.offload_optimizer and each.goes_further(rung)]
            if further and not rung.offload_optimizer:
                ladder.rungs, ladder.level, can_leave = (rung, further[0]), 1, True
        return can_leave

    def _leave_state(self, engine: PhaseEngine) -> bool:
        """Keeps the state of the optimizers on the host from now on; tells whether that can be done."""
        ladder = engine.batcher.ladder
        # A compiled model is traced once, on one rung.
        return self.compiled is None and ladder.leave_state() and self.use_rung(ladder.rung)

    def replan_if_thawed(self) -> None:
        """Plans anew where other parameters are trained than the plans count; the logical batch stays."""
        changed = [engine for engine in self.engines if engine.optimization.trainable != engine.planned_for]
        if not changed:
            return
        for engine in changed:
            engine.planned_for = engine.optimization.trainable
            engine.optimization.forget_frozen()
        if len(self.engines) > 1:
            # Each phase leaves room for the state that the others' optimizers keep by now.
            self.planners = Planners.of_phases(self.planners.first)
            for engine, planner in zip(self.engines, self.planners.phases, strict=True):
                engine.planner = planner
        held_bytes = sum(engine.optimization.device_state_bytes for engine in self.engines)
        # Probes have peaks of their own, and reset the meter.
        self.monitor.pause()
        own = self.own_plan
        # A micro-batch size that was given stays as it is: there is no factor to plan with.
        if own.phase_plan.safety_factor is not None:
            rule = FactorRule(decided=own.factor, aim=own.factor.aim)
            plans = self.ranks.gather(lambda: self.planners.replan_same_batch(own, rule, held_bytes=held_bytes))
            self._use_thawed(plans)
        for engine in self.engines:
            engine.reserve.expect(
                engine.planner.explorer.optimizer_memory(), held_bytes=engine.optimization.device_state_bytes
            )
            self.with_room(engine, engine.reserve.hold)
        self.compile()

    def _use_thawed(self, plans: Sequence[RunPlan]) -> None:
        """Trains by all ranks' plans for the parameters that are trained now, which are not those trained at first."""
        self.is_thawed = True
        for engine, mine, first in zip(self.engines, plans[self.ranks.rank].phases, plans[0].phases, strict=True):
            engine.run_plan, engine.shared_plan = mine, first
            engine.timer.stop()
            engine.set_limits(mine.phase_plan.rules, mine.limits)

    def log(self, **record: Any) -> None:
        """Adds a line about the last step to the metrics, which rank 0 writes, and shows it in the trackers."""
        if self.ranks.is_first:
            self.metrics.append(step=self.progress.step, **record)
        # Loss terms of a whole epoch; `train/` is for each step.
        means = {f"epoch/{term}": mean for term, mean in record.pop("train", {}).items()}
        self.track({**record, **means})

    def track(self, figures: Mapping[str, float | None]) -> None:
        """Shows figures of the last step in the trackers."""
        known = {name: value for name, value in figures.items() if value is not None}
        for tracker in self.trackers:
            tracker.track(self.progress.step, known)

    def rewind_records(self, metrics_lines: int) -> None:
        """Drops what was recorded after the checkpoint: those steps are trained, and logged, once more."""
        self.metrics.rewind(metrics_lines)
        rewind_steps(self.folder.path, self.progress.step)

    def record_step(
        self, counts: BatchResult, rows: NDArray[np.int64], updates: Sequence[tuple[BatchResult, Denominators]]
    ) -> None:
        """Records the step that has just been taken, for the report and the trackers; `read_losses` completes it.

        Args:
            counts: Of all ranks and optimizer updates, without means.
            rows: [R] samples of the batch.
            updates: The results of the optimizer updates, of all ranks, with the denominators they were computed with.
        """
        step, (allocated, reserved) = self.progress.step, self.monitor.last_step
        run_plan = self.fullest.run_plan
        if self._recorded_plan is not run_plan:
            self._recorded_plan = run_plan
            device, capacity_bytes = self.meter.key, self.meter.capacity_bytes
            limits = memory_limits(run_plan, device=device, capacity_bytes=capacity_bytes, from_step=step)
            self.steps.limit(limits)
        record = StepRecord(
            step=step,
            loss=math.nan,
            allocated_bytes=allocated or None,
            reserved_bytes=reserved or None,
            micro_batches=len(counts.micro_batches),
            micro_batch_size=max(counts.micro_batches, default=0),
            ooms_rescued=counts.ooms_rescued,
        )
        self._unread = record, rows, updates

    def read_losses(self) -> None:
        """Reads the losses of the last step that was recorded, if nobody has: the device has computed them meanwhile.

        Raises:
            FailedRunError: A loss is not finite.
            ArgumentError: The denominators of the step's parts do not add up, or one is 0 and its sum is not.
        """
        if self._unread is None:
            return
        (record, rows, updates), self._unread = self._unread, None
        for result, denominators in updates:
            if not all(math.isfinite(mean) for mean in result.means.values()):
                raise self.no_longer_finite(f"step {record.step - 1}", result.means)
            first = self.task.describe(int(rows[0]))
            denominators.check(result, f"in step {record.step - 1}, whose batch of {len(rows)} begins with {first}")
        result = combine_updates([result for result, _ in updates])
        loss = self.weighted(result.means)
        self.progress.add_losses(result)
        self.steps.add(replace(record, loss=loss))
        self.track({"train/loss": loss, "train/micro_batch_size": record.micro_batch_size or None,
                    "train/ooms_rescued": record.ooms_rescued or None})  # fmt: skip

    def weighted(self, means: Mapping[str, float]) -> float:
        """Returns the weighted sum of loss terms."""
        return sum(self.task.loss_weights.get(term, 1.0) * mean for term, mean in means.items())

    def no_longer_finite(self, where: str, losses: Mapping[str, float]) -> FailedRunError:
        """Returns the error of losses that are not finite."""
        value = ", ".join([where, *(f"{term} {loss:g}" for term, loss in losses.items())])
        half = ", or train in full precision: --precision fp32" if self.training.precision in ("fp16", "bf16") else ""
        if where == "step 0":
            return FailedRunError("The loss is not finite before the first update",
                                  value=", ".join(filter(None, [value, self._first_not_finite()])),
                                  remedy="The learning rate is not the cause. Look for NaN and infinity in the "
                                         f"samples, and for logarithms and divisions in the loss{half}")  # fmt: skip
        lower_lr = min(self.training.lr / 10, _HIGHEST_LR)
        return DivergedError(
            "The loss is no longer finite",
            value=value,
            remedy=f"Train anew with a lower learning rate, --lr {lower_lr:g}, or with clipped gradients, "
            f"--grad-clip-norm 1{half}",
            lower_lr=lower_lr,
        )

    def _first_not_finite(self) -> str:
        """Names the first tensor that is not finite where the first batch is computed once more, with the weights that
        the run began with; empty where it cannot be computed.
        """
        if self.shards is not None or self.training.start_from:
            return ""
        rows, size = self.epochs.steps(0)[0], max(self.progress.epoch_largest, 1)
        try:
            with torch.no_grad():
                self.model.load_state_dict(fresh_model(self.run, self.task, self.meter, on_host=True).state_dict())
            for engine in self.engines:
                task, share = engine.in_epoch(0, self.training.epochs), self.share(engine, rows)
                batch = task.logical_batch(rows, self.meter.device, self.precision.dtype,
                                           step_generator(seed=self.training.seed, step=0, update=0))  # fmt: skip
                for start in range(share.start, share.stop, size):
                    part = start, min(start + size, share.stop)
                    if found := self._narrowed(batch, part):
                        of_sample = "" if found[1].startswith(_PARAMETER) else self.task.describe(int(rows[found[0]]))
                        return ", ".join(filter(None, [f"first in the {found[1]}", of_sample]))
        except Exception:  # noqa: BLE001 - the error that is told must not be another one
            return ""
        return "though all outputs of layers are finite"

    def _narrowed(self, batch: LogicalBatch, part: tuple[int, int]) -> tuple[int, str] | None:
        """Returns the first sample of a part whose tensors are not finite, and the first such tensor; None: all are."""
        start, stop = part
        with self.precision.context(self.meter.device):
            name = first_not_finite(self.model, lambda: batch.losses(self.model, start, stop))
        if not name or stop - start == 1:
            return (start, name) if name else None
        middle = (start + stop) // 2
        # Samples that depend on each other may all be finite alone.
        return self._narrowed(batch, (start, middle)) or self._narrowed(batch, (middle, stop)) or (start, name)

    def save(self) -> None:
        """Writes a checkpoint of everything that the next step depends on, on every rank.

        Where a later attempt has begun in a job, it counts as SIGTERM.

        Raises:
            SystemExit: A later attempt trains already; its checkpoints are left as they are.
        """
        # Weights of a step whose loss is not finite must not be saved.
        self.read_losses()
        if self.ranks.on_rank0(self.folder.is_taken_over):
            self.reporter.notice("A later attempt trains this run; this process ends, and saves nothing")
            raise SystemExit(TERMINATED)
        self.steps.flush()
        # These differ from rank to rank; all else is the same on all of them, so rank 0 writes it alone.
        of_ranks = self.ranks.gather(
            lambda: {
                "randomness": capture_generators(),
                "micro_batches": [engine.batcher.state_dict() for engine in self.engines],
                "thawed_plan": self.own_plan.to_plain() if self.is_thawed else None,
            }
        )

        with self.meter.host():
            weights = self.whole({
                "model": self.model.state_dict(),
                "average": None if self.average is None else self.average.state_dict(),
                "optimization": [engine.optimization.state_dict() for engine in self.engines],
            })  # fmt: skip

        if self._max_seconds < math.inf:
            self.progress.seconds = self.seconds
            self.start_clock()

        def write() -> None:
            state = {
                **weights,
                "trainable": [list(flags) for flags in self.trainable],
                "made_buffers": sorted(name for name, _ in buffer_shapes(self.model).items() - self._declared_buffers),
                "best": self.best,
                "bests": {kind: vars(best) for kind, best in self.bests.items()},
                "task": dict(self.task.state()),
                "reading": dict(self.task.reading_state()),
                "progress": asdict(self.progress),
                "metrics_lines": self.metrics.lines,
                "logical_batch": self.engine.run_plan.phase_plan.logical_batch,
                "device": self.limits_of,
                **of_ranks[0],
                "other_ranks": list(of_ranks[1:]),
            }
            self.checkpoints.save(state, step=self.progress.step, epochs_begun=self.progress.epochs_begun)
            if not self.stops.received and self.folder.attempts.is_superseded():
                self.reporter.notice("A later attempt waits for this run: its job was started again. This process ends")
                self.stops.received = signal.SIGTERM

        self.ranks.on_rank0(write)

    def whole(self, state: T) -> T:
        """Returns a state with whole tensors in the place of shards, on rank 0; all ranks call it alike."""
        return state if self.shards is None else whole(state, keep=self.ranks.is_first)

    def _load(self, weights: Mapping[str, Any]) -> None:
        """Loads whole weights into the model, of which this rank may have shards."""
        loaded = weights if self.shards is None else sharded_state(self.model, weights)
        load_weights(self.model, loaded, self._made_buffers)

    def restore(self, state: dict[str, Any]) -> dict[str, Any]:
        """Continues from a checkpoint's state, bit by bit; returns it, or the state of the checkpoint before it where
        the content of this one is damaged.

        Raises:
            CheckpointError: There is no other.
        """
        skipped = 0
        while why := next(filter(None, self.ranks.gather(partial(self._damage, state))), ""):
            skipped += 1
            damaged = f"The checkpoint of step {self.progress.step} is damaged ({why})"
            self.reporter.notice(f"{damaged}; going back to the one before it")
            state = load_checkpoint(self, skip=skipped) or state
        if skipped:
            self.ranks.on_rank0(lambda: self.checkpoints.drop(skipped))
        self.task.restore_reading(state.get("reading", {}))
        of_ranks, rank = [state, *state["other_ranks"]], self.ranks.rank
        if len(of_ranks) == self.ranks.size:
            same_device = state["device"] == self.limits_of
            self._restore_thawed([one["thawed_plan"] for one in of_ranks])
            for engine, micro_batches in zip(self.engines, of_ranks[rank]["micro_batches"], strict=True):
                engine.batcher.load_state_dict(micro_batches, same_device=same_device)
            restore_generators(of_ranks[rank]["randomness"])
        elif self.ranks.is_first:
            restore_generators(state["randomness"])
        else:
            # Of a rank that the run did not have: its randomness begins here.
            seed_rank(seed=self.training.seed, rank=rank, step=self.progress.step)
        return state

    def _damage(self, state: Mapping[str, Any]) -> str:
        """Restores the state that needs no other rank and checks the rest; returns the failure, empty if there is
        none.
        """
        self.progress = Progress.from_plain(state["progress"])
        self._made_buffers = state["made_buffers"]
        try:
            if state["best"]:
                self._load(state["best"])
            bests = {kind: msgspec.convert(best, BestWeights) for kind, best in state["bests"].items()}
            for best in bests.values():
                self._load(best.weights)
            self._load(state["model"])
            weights_here = self.ranks.is_first
            self.bests = {kind: best if weights_here else replace(best, weights={}) for kind, best in bests.items()}
            if self.average is not None:
                self.average.load_state_dict(state["average"])
            self._restore_ladders(state)
            saved = zip(self.engines, state["trainable"], state["optimization"], strict=True)
            for engine, trainable, optimization in saved:
                engine.optimization.set_trainable(trainable)
                engine.optimization.load_state_dict(optimization)
                # On a simulated GPU, tensors of the checkpoint are in its place.
                with self.meter.measuring(tensors_of([engine.optimization.optimizer])):
                    pass
                # `resume --epochs` may have made the schedule longer since.
                engine.optimization.follow_schedule()
                needed = engine.planner.explorer.optimizer_memory()
                engine.reserve.expect(needed, held_bytes=engine.optimization.device_state_bytes)
            if self.folder.goes_on_for_longer(self.progress.step):
                self.progress.trained, self.progress.epochs_without_gain = False, 0
            of_ranks = [state, *state["other_ranks"]]
            own = of_ranks[self.ranks.rank if len(of_ranks) == self.ranks.size else 0]
            restore_generators(own["randomness"])
            for micro_batches in own["micro_batches"]:
                msgspec.convert(micro_batches["backoff"], Backoff)
            for plan in (one["thawed_plan"] for one in of_ranks):
                RunPlan.from_plain(plan or self.own_plan.to_plain())
        # Whatever stands in the place of saved values, their readers stumble in ways of their own.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {first_sentence(error)}"
        return ""

    def _restore_ladders(self, state: Mapping[str, Any]) -> None:
        """Goes on on the rungs of the attempt before, so that the optimizers' state is read to where it waits."""
        of_ranks = [state, *state["other_ranks"]]
        if len(of_ranks) == self.ranks.size and state["device"] == self.limits_of:
            saved = of_ranks[self.ranks.rank]["micro_batches"]
            for engine, micro_batches in zip(self.engines, saved, strict=True):
                engine.batcher.ladder.load_state_dict(micro_batches["ladder"])
                if engine.batcher.other is not None and micro_batches["other"] is not None:
                    engine.batcher.other.ladder.load_state_dict(micro_batches["other"]["ladder"])
            self.use_rung(self.engine.batcher.ladder.rung)

    def _restore_thawed(self, saved: Sequence[dict[str, Any] | None]) -> None:
        """Goes on by all ranks' plans of the attempt before. Limits that are found once more may differ a little, and
        batches would be cut elsewhere. Where these plans do not fit, the next step makes others.
        """
        plans = [_split_finer(RunPlan.from_plain(one), self.own_plan.factor) for one in saved if one]
        rank = self.ranks.rank
        if not plans or not all(self.ranks.gather(lambda: _still_holds(plans[rank], self.planners))):
            return
        self._use_thawed(plans)
        for engine in self.engines:
            engine.planned_for = engine.optimization.trainable


def load_checkpoint(parts: Parts, *, skip: int = 0) -> dict[str, Any] | None:
    """Reads the last checkpoint on every rank, but for the newest `skip`; None where there is none."""
    checkpoints = Checkpoints(parts.folder.checkpoints_path)

    def load() -> dict[str, Any] | None:
        # The device has room for one copy of the checkpoint's tensors.
        with parts.meter.host():
            return checkpoints.load(parts.reporter, check=_check_progress, skip=skip)

    saved = parts.ranks.on_every_rank(load)

    steps = parts.ranks.gather(lambda: None if saved is None else int(saved["progress"]["step"]))
    if len(set(steps)) > 1:
        seen = f"they see those of steps {', '.join(map(str, steps))}"
        remedy = "All nodes must share the run folder; if they do, resume once they see the same files"
        raise CheckpointError("Every rank goes on from the same checkpoint", value=seen, remedy=remedy)
    return saved


def _check_progress(state: Mapping[str, Any]) -> None:
    """Checks the fields of a checkpoint that a session needs to restore it; raises ValueError or KeyError."""
    Progress.from_plain(state["progress"])
    msgspec.convert(state["metrics_lines"], int)
    msgspec.convert(state["device"], str)


def resolve_plans(planners: Planners, ranks: Ranks, factor: FactorRule, first_path: Path) -> list[RunPlan]:
    """Reads the plans of an earlier attempt, or makes them, and writes them.

    Args:
        planners: Of this rank.
        ranks: Those that train the run.
        factor: How the safety factor of a plan that is made here is decided.
        first_path: Where rank 0's plan is; the others' are beside it.

    Returns:
        Every rank's plan; rank 0's decides the logical batch.
    """
    path = first_path if ranks.is_first else first_path.with_name(f"{first_path.stem}-rank-{ranks.rank}.json")
    earlier = ranks.gather(lambda: read_plan(path))
    first, mine = earlier[0], earlier[ranks.rank]
    # Without rank 0's plan the logical batch is not decided, whatever the other ranks have.
    if first is None:
        plans = ranks.gather(lambda: planners.make(factor))
        plans = ranks.gather(lambda: planners.common(plans, plans[ranks.rank], factor))
    else:
        plans = ranks.gather(lambda: _adopt(planners, factor, first, mine))

    def finish() -> RunPlan:
        plan = plans[ranks.rank]
        if plan != mine:
            # An attempt that is killed here leaves some of them: the next one makes the others again.
            write_json_atomic(path, plan.to_plain())
            return plan
        if not factor.after_oom or factor.decided is None:
            return plan
        # The attempt before ran out of memory and lowered the factor: the same logical batch is split finer.
        return _split_finer(plan.without_data("memory ran out beside them"), factor.decided)

    return ranks.gather(finish)


def _split_finer(run_plan: RunPlan, factor: SafetyFactor) -> RunPlan:
    """Splits as a lower factor asks; a plan that is as fine is returned as it is."""

    def finer(phase: RunPlan) -> RunPlan:
        if phase.phase_plan.safety_factor is None or phase.phase_plan.safety_factor <= factor.value:
            return phase
        rules = replace(phase.phase_plan.rules, safe_limit=factor.value * phase.phase_plan.rules.tuned_limit)
        phase_plan = replace(phase.phase_plan, rules=rules, safety_factor=factor.value)
        other = phase.other_rung and replace(phase.other_rung, factor=min(phase.other_rung.factor, factor.value))
        return replace(phase, phase_plan=phase_plan, other_rung=other, factor=replace(factor, aim=phase.factor.aim))

    first, *later = map(finer, run_plan.phases)
    return replace(first, later=tuple(later))


def _adopt(planners: Planners, factor: FactorRule, first: RunPlan, own: RunPlan | None) -> RunPlan:
    """Takes over this rank's earlier plan, or makes one with the same logical batch."""
    planner = planners.first
    same_ranks = first.ranks == planner.ranks
    if not same_ranks:
        now = f"{'one process' if planner.ranks == 1 else f'{planner.ranks} processes'} in place of {first.ranks}"
        planner.reporter.notice(f"The run goes on with {now}: its batch is kept, limits and micro-batches start anew")
    # An attempt that was killed while it wrote plans may leave this rank one of another logical batch.
    if own is not None and same_ranks and own.shares_with(first):
        if _still_holds(own, planners):
            return _with_state_on_host(planners, factor, own) if _state_must_leave(planners, factor, own) else own
        if own.rung.ranks == planner.rungs[0].ranks:
            planner.reporter.notice(
                "The plan was made for another device: its batch is kept, and cut as this one needs"
            )
    if first.limits is None:
        return planners.make(factor)
    return planners.place_data(planners.replan_same_batch(first, factor), factor)


def _state_must_leave(planners: Planners, factor: FactorRule, plan: RunPlan) -> bool:
    """Tells whether the attempt before died in the step of an optimizer whose state a rung without it would hold."""
    if not factor.after_oom or planners.first.training.fit not in ("auto", "shard") or plan.rung.offload_optimizer:
        return False
    known = [planner.explorer.remembered(factor.earlier) for planner in planners.phases]
    return any(each is not None and each.climbed and each.offload_optimizer for each in known)


def _with_state_on_host(planners: Planners, factor: FactorRule, plan: RunPlan) -> RunPlan:
    for planner in planners.phases:
        planner.state_leaves = True
    planners.first.reporter.notice("Memory ran out in the attempt before: the optimizer's state waits on the host now")
    return planners.place_data(planners.replan_same_batch(plan, factor), factor)


def _still_holds(plan: RunPlan, planners: Planners) -> bool:
    """Tells whether an earlier plan is of this device, and of a model that is whole or shared out as it is now."""
    return plan.rung.ranks == planners.first.rungs[0].ranks and still_fits(plan, planners.first.meter)


def read_plan(path: Path) -> RunPlan | None:
    """Reads the plan of an earlier attempt; None where there is none."""
    try:
        return RunPlan.from_plain(json.loads(read_text(path)))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("A run goes on by the plan in its folder, which this version cannot read",
                              value=f"{path}: {type(error).__name__} {error}",
                              remedy="Go on with the version that began the run, or train anew") from error  # fmt: skip


def first_not_finite(model: nn.Module, compute: Callable[[], object]) -> str:
    """Names the first parameter, or input or output of a layer, that has NaN or infinity where `compute` calls the
    model; empty if all of them are finite.
    """
    found = [
        f"{_PARAMETER} {name}{faults}" for name, value in model.named_parameters() if (faults := _not_finite(value))
    ]

    def look(what: str, values: object) -> None:
        faults = "" if found else next(filter(None, map(_not_finite, tree_leaves(values))), "")
        if faults:
            found.append(f"{what}{faults}")

    hooks = []
    for name, layer in model.named_modules():
        called = f"{name} ({type(layer).__name__})" if name else f"the model ({type(layer).__name__})"
        hooks += [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, called=called: look(f"input of {called}", [args, kwargs]), with_kwargs=True
            ),
            layer.register_forward_hook(lambda _, args, output, called=called: look(f"output of {called}", output)),
        ]
    try:
        if not found:
            compute()
    finally:
        for hook in hooks:
            hook.remove()
    return next(iter(found), "")


def _not_finite(value: object) -> str:
    """Says how many values of a tensor are NaN or infinite; empty if none is, or if it is no tensor of such values."""
    if not isinstance(value, Tensor) or not is_inexact(value):
        return ""
    counts = {"NaN": int(value.isnan().sum()), "infinite": int(value.isinf().sum())}
    listed = " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    return f" ({listed} of {counted(value.numel(), 'value')})" if listed else ""
