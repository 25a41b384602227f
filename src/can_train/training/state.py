"""What one attempt of a run trains with, and how far it is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from can_train.config.training import TrainingSettings
from can_train.engine.batch_result import BatchResult
from can_train.engine.micro_batcher import MicroBatcher
from can_train.engine.ranks import Ranks
from can_train.engine.reserve import OptimizerReserve
from can_train.memory.meters import Meter
from can_train.memory.monitor import MemoryMonitor
from can_train.policy.leak import LeakWatch
from can_train.policy.packing import BatchCosts
from can_train.policy.plan import Plan
from can_train.policy.sharing import share_out
from can_train.reporter import Reporter
from can_train.training import randomness
from can_train.training.checkpoints import Checkpoints
from can_train.training.companions import CompanionPlan, Companions
from can_train.training.epochs import Epochs
from can_train.training.factor_rule import FactorRule
from can_train.training.optimization import Optimization, Precision
from can_train.training.planning import Planner, RunPlan
from can_train.training.run_folder import MetricsLog
from can_train.training.signals import StopRequests
from can_train.training.task import Task, TaskInEpoch


@dataclass(kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        epoch: Epochs completed.
        step_in_epoch: Optimizer steps done in the current epoch.
        step: Optimizer steps done in all.
        best_loss: Lowest validation loss.
        best_epoch: The epoch it belongs to.
        epochs_without_gain: Validations since then.
        epoch_sums: Per term, Σ mean × samples over the current epoch.
        epoch_samples: Samples of the current epoch so far.
        epoch_parts: Micro-batches of the current epoch so far.
        epoch_largest: Samples of the largest of them.
        epoch_ooms: Out-of-memories survived in the current epoch.
        trained: Whether training has ended.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    best_loss: float = math.inf
    best_epoch: int = 0
    epochs_without_gain: int = 0
    epoch_sums: dict[str, float] = field(default_factory=dict)
    epoch_samples: int = 0
    epoch_parts: int = 0
    epoch_largest: int = 0
    epoch_ooms: int = 0
    trained: bool = False


@dataclass(kw_only=True)
class Session:
    """Everything one attempt of a run trains with.

    Attributes:
        shared_plan: Rank 0's, by whose prices all ranks share work out alike.
        best: Weights of the lowest validation loss; on rank 0 alone.
        ranks: The processes that train the run.
        stop_signal: A signal that some rank has received, known to all of them; None: none.
        ooms_elsewhere: Out-of-memories that other ranks survived, once training has ended.
        planner: Finds out anew what fits.
        companions: Finished models that the task asks; None: nobody knows of any.
        asked: How they are asked.
        task_in_epoch: The task as it is in the current epoch.
        trainable: Which parameters were trained at the last step; None before the first.
        monitor: Measures the attempt's peaks.
        largest_cost: Of the costliest micro-batch whose memory was counted, in bytes: what `peak_bytes` belongs to.
        settled_cost: Likewise, of those that ran after the last out-of-memory (all of them, where there was none).
        largest_micro_batch: Of all that ran, in samples.
        foreign_bytes: Most memory that other processes took meanwhile, as far as it was looked at.
    """

    task: Task
    model: nn.Module
    optimization: Optimization
    precision: Precision
    training: TrainingSettings
    run_plan: RunPlan
    shared_plan: RunPlan
    epochs: Epochs
    meter: Meter
    monitor: MemoryMonitor
    batcher: MicroBatcher
    reserve: OptimizerReserve
    checkpoints: Checkpoints
    metrics: MetricsLog
    stops: StopRequests
    reporter: Reporter
    ranks: Ranks = field(default_factory=Ranks)
    progress: Progress = field(default_factory=Progress)
    best: dict[str, Any] = field(default_factory=dict)
    planner: Planner
    companions: Companions | None = None
    asked: tuple[CompanionPlan, ...] = ()
    stop_signal: int | None = None
    ooms_elsewhere: int = 0
    trainable: tuple[bool, ...] | None = None
    leak_watch: LeakWatch = field(default_factory=LeakWatch)
    largest_cost: float = 0.0
    settled_cost: float = 0.0
    largest_micro_batch: int = 0
    foreign_bytes: int = 0

    def __post_init__(self) -> None:
        self.task_in_epoch: TaskInEpoch = self.task
        self.batcher.watch(self.note_rescue)

    def note_run(self, result: BatchResult, *, counted: bool) -> None:
        """Remembers what ran, and what it cost where its memory was counted."""
        self.largest_micro_batch = max((self.largest_micro_batch, *result.micro_batches))
        if counted:
            self.largest_cost = max(self.largest_cost, result.largest_cost)
            self.settled_cost = max(self.settled_cost, result.settled_cost)

    def note_rescue(self) -> None:
        """Tells what runs from now on apart from what ran before: memory has run out, and is free again."""
        self.monitor.rescued()
        self.settled_cost = 0.0
        self.foreign_bytes = max(self.foreign_bytes, self.meter.foreign_bytes())

    def renew_if_thawed(self) -> None:
        """Finds out anew what fits where other parameters are trained than at the last step; the batch stays."""
        trainable = tuple(parameter.requires_grad for parameter in self.model.parameters())
        if self.trainable is not None and trainable != self.trainable:
            self.optimization.drop_stale_state()
            held_bytes = self.optimization.state_bytes
            # Probes have peaks of their own, and reset the meter.
            self.monitor.pause()
            if self.plan.safety_factor is not None:
                rule = FactorRule(known=self.run_plan.factor, aim=self.run_plan.aim)
                plans = self.ranks.together(lambda: self._again(rule, held_bytes))
                self.run_plan, self.shared_plan = plans[self.ranks.rank], plans[0]
                self.batcher.use(self.plan.rules, self.run_plan.limits)
                # In bytes of another tuned limit.
                self.largest_cost = self.settled_cost = 0.0
            self.reserve.expect(self.planner.optimizer_memory(), held_bytes=held_bytes)
            self.reserve.hold()
        self.trainable = trainable

    def _again(self, rule: FactorRule, held_bytes: int) -> RunPlan:
        return self.planner.make_again(self.run_plan, rule, held_bytes=held_bytes)

    def share(self, rows: NDArray[np.int64], priced: Callable[[Task, NDArray[np.int64]], BatchCosts]) -> slice:
        """Decides which of some samples this rank computes.

        Args:
            rows: The samples.
            priced: Of `shared_plan`.
        """
        if self.ranks.size == 1:
            return slice(0, len(rows))
        stops = np.cumsum([0, *share_out(priced(self.task, rows), self.ranks.size)])
        return slice(int(stops[self.ranks.rank]), int(stops[self.ranks.rank + 1]))

    def training_share(self, rows: NDArray[np.int64]) -> slice:
        """Decides which samples of a logical batch this rank computes."""
        return self.share(rows, self.shared_plan.training_costs)

    def hear(self, signals: Sequence[int | None]) -> None:
        """Takes note of the signals that each rank has received."""
        self.stop_signal = next((signal for signal in signals if signal is not None), None)

    def rewind_metrics(self, lines: int) -> None:
        """Keeps so many lines of the metrics, of which rank 0 has the only book."""
        if self.ranks.is_first:
            self.metrics.rewind(lines)

    def log(self, **record: Any) -> None:
        """Adds a line to the metrics."""
        if self.ranks.is_first:
            self.metrics.append(**record)

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, unless it stops early."""
        return self.epochs.total_steps(self.training.epochs)

    @property
    def plan(self) -> Plan:
        """The decision that the attempt trains by."""
        return self.run_plan.plan

    @property
    def peak_bytes(self) -> int:
        """Largest peak of the attempt; 0 before anything was measured."""
        return self.monitor.peak_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Likewise, of what the allocator held."""
        return self.monitor.peak_reserved_bytes

    @property
    def peak_share(self) -> float | None:
        """Peak ÷ capacity; None before anything was measured."""
        return self.monitor.peak_share

    @property
    def oom_cost(self) -> float | None:
        """Smallest cost in bytes that ran out of memory, though within the plan and alone; None where none did."""
        return self.batcher.oom_cost

    @property
    def settled_peak_bytes(self) -> int:
        """Peak of what ran after the last out-of-memory, `settled_cost` in it; 0 where nothing that was counted did."""
        return self.monitor.settled_peak_bytes if self.settled_cost else 0


def save(session: Session) -> None:
    """Writes a checkpoint of everything that the next step depends on, on every rank.

    Raises:
        CheckpointError: It could not be written.
        RankFailedError: Rank 0 could not write it.
    """
    of_ranks = session.ranks.together(
        lambda: {"randomness": randomness.capture(), "micro_batches": session.batcher.state_dict()}
    )
    session.ranks.first(lambda: session.checkpoints.save(_state(session, of_ranks), step=session.progress.step))


def _state(session: Session, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": session.model.state_dict(),
        "best": session.best,
        "optimization": session.optimization.state_dict(),
        "progress": asdict(session.progress),
        "metrics_lines": session.metrics.lines,
        "logical_batch": session.plan.logical_batch,
        **of_ranks[0],
        "other_ranks": list(of_ranks[1:]),
    }
