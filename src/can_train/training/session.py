"""What one attempt of a run trains with: its plan on every rank, its state in memory, and that state in a
checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from can_train.config.resolved import ResolvedRun
from can_train.config.settings import TrainingSettings
from can_train.errors import CheckpointError
from can_train.fit.factor_rule import FactorRule
from can_train.fit.micro_batcher import BatchResult, MicroBatcher
from can_train.fit.optimizer import (
    OptimizerReserve,
    Precision,
    capture_generators,
    make_optimization,
    restore_generators,
    seed_rank,
)
from can_train.fit.plan import Plan
from can_train.fit.planner import Epochs, Planner, RunPlan, rows_by_epoch, still_fits
from can_train.io.records import write_json_atomic
from can_train.memory.meters import LeakWatch, MemoryMonitor, Meter
from can_train.reporter import Reporter
from can_train.task import Task
from can_train.training.distributed import Ranks
from can_train.training.inference import rescue_settings
from can_train.training.loading import Checkpoints
from can_train.training.recording import StepLog, StepRecord, memory_limits, steps_path
from can_train.training.run_folder import MetricsLog, RunFolder, StopRequests
from can_train.training.trackers import Tracker

if TYPE_CHECKING:
    from can_train.training.reference_models import ReferenceModels


@dataclass(kw_only=True)
class Parts:
    """What an attempt of a run is made with."""

    run: ResolvedRun
    folder: RunFolder
    task: Task
    meter: Meter
    reporter: Reporter
    stops: StopRequests
    ranks: Ranks = field(default_factory=Ranks)
    trackers: Sequence[Tracker] = ()  # on rank 0 alone

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
    best_loss: float = math.inf
    best_epoch: int = 0
    epochs_without_gain: int = 0  # in validations
    trained: bool = False
    # Of the current epoch so far: Σ mean × samples of each term, samples, micro-batches, samples of the largest of
    # them.
    epoch_sums: dict[str, float] = field(default_factory=dict)
    epoch_samples: int = 0
    epoch_parts: int = 0
    epoch_largest: int = 0
    epoch_ooms: int = 0

    def add_step(self, result: BatchResult, samples: int) -> None:
        """Counts an optimizer step."""
        for term, mean in result.means.items():
            self.epoch_sums[term] = self.epoch_sums.get(term, 0.0) + mean * samples
        self.epoch_samples += samples
        self.epoch_parts += len(result.micro_batches)
        self.epoch_largest = max((self.epoch_largest, *result.micro_batches))
        self.epoch_ooms += result.ooms_rescued
        self.step_in_epoch += 1
        self.step += 1

    def end_epoch(self) -> None:
        """Counts an epoch; its sums begin anew."""
        self.epoch += 1
        self.step_in_epoch, self.epoch_sums, self.epoch_samples = 0, {}, 0
        self.epoch_parts, self.epoch_largest, self.epoch_ooms = 0, 0, 0


@dataclass(kw_only=True)
class Session(Parts):
    """Everything one attempt of a run trains with.

    Args:
        plans: Of all ranks.
        steps_done: Optimizer steps of earlier attempts.

    Attributes:
        planner: Has the model; makes another plan where other parameters are trained.
        run_plan: Of this rank.
        shared_plan: Rank 0's, by whose prices all ranks share samples out alike.
        total_steps: Optimizer steps of the whole run, unless it stops early.
        best: Weights of the lowest validation loss; on rank 0 alone.
        stop_signal: A signal that some rank has received, known to all of them; None: none.
        ooms_elsewhere: Out-of-memories that other ranks survived, once training has ended.
        largest_cost: Of the costliest micro-batch whose memory was counted, in bytes; the monitor's peak belongs to it.
        cost_after_rescue: The same of those after the last out-of-memory; of all, where there was none.
        largest_micro_batch: Of all that ran, in samples.
        foreign_bytes: Most memory that other processes were seen to take.
    """

    planner: Planner
    plans: InitVar[Sequence[RunPlan]]
    steps_done: InitVar[int]
    reference_models: ReferenceModels
    progress: Progress = field(default_factory=Progress)
    best: dict[str, Any] = field(default_factory=dict)
    stop_signal: int | None = None
    ooms_elsewhere: int = 0
    leak_watch: LeakWatch = field(default_factory=LeakWatch)
    largest_cost: float = 0.0
    cost_after_rescue: float = 0.0
    largest_micro_batch: int = 0
    foreign_bytes: int = 0

    def __post_init__(self, plans: Sequence[RunPlan], steps_done: int) -> None:
        training, meter, task, measured = self.training, self.meter, self.task, self.run.monitor
        self.run_plan, self.shared_plan, self.model = plans[self.ranks.rank], plans[0], self.planner.model
        self.epochs = Epochs(
            rows_by_epoch(task, self.run_plan.skipped, epochs=training.epochs),
            lambda rows: task.batch_features(rows)[:, 0],
            seed=training.seed,
            logical_batch=self.plan.logical_batch,
            preflight_units=training.preflight_units,
        )
        self.total_steps = self.epochs.total_steps(training.epochs)
        self.precision = Precision.named(training.precision)
        lr, total_steps = training.lr * self.plan.lr_factor, self.total_steps
        self.optimization = make_optimization(self.model, training, lr=lr, total_steps=total_steps, device=meter.device)
        self._planned_for = self.optimization.trainable
        self.monitor = MemoryMonitor(meter=meter, interval=measured.interval, warmup=measured.warmup,
                                     total_steps=total_steps - steps_done)  # fmt: skip
        rescue = replace(rescue_settings(training), adaptive=training.adaptive_micro_batch, regrow=training.regrow)
        limits = self.run_plan.limits
        self.batcher = MicroBatcher(self.model, meter=meter, rules=self.plan.rules, rescue=rescue, limits=limits)
        self.batcher.watch(self.note_rescue)
        needed = self.planner.explorer.optimizer_memory()
        self.reserve = OptimizerReserve(needed, meter, retries=training.oom_retries)
        self.checkpoints = Checkpoints(self.folder.checkpoints_path)
        self.metrics = MetricsLog(self.folder.metrics_path)
        self.steps = StepLog(steps_path(self.folder.path, self.ranks.rank), total_steps)
        self._recorded_plan: RunPlan | None = None

    @property
    def plan(self) -> Plan:
        """The decision that the attempt trains by."""
        return self.run_plan.plan

    @property
    def peak_bytes_after_rescue(self) -> int:
        """Peak of what ran after the last out-of-memory; 0 where nothing that was counted did."""
        return self.monitor.peak_bytes_after_rescue if self.cost_after_rescue else 0

    def note_run(self, result: BatchResult, *, counted: bool) -> None:
        """Remembers what this rank ran, and what it cost where its memory was counted."""
        self.largest_micro_batch = max((self.largest_micro_batch, *result.micro_batches))
        if counted:
            self.largest_cost = max(self.largest_cost, result.largest_cost)
            self.cost_after_rescue = max(self.cost_after_rescue, result.cost_after_rescue)

    def note_rescue(self) -> None:
        """Separates what runs from now on from what ran before: memory ran out, and is free again."""
        self.monitor.rescued()
        self.cost_after_rescue = 0.0
        self.foreign_bytes = max(self.foreign_bytes, self.meter.foreign_bytes())

    def replan_if_thawed(self) -> None:
        """Plans anew where other parameters are trained than the plan counts; the logical batch stays."""
        if self.optimization.trainable == self._planned_for:
            return
        self._planned_for = self.optimization.trainable
        self.optimization.drop_stale_state()
        held_bytes = self.optimization.state_bytes
        # Probes have peaks of their own, and reset the meter.
        self.monitor.pause()
        # A micro-batch size that was given stays as it is: there is no factor to plan with.
        if self.plan.safety_factor is not None:
            rule = FactorRule(known=self.run_plan.factor, aim=self.run_plan.aim)
            plans = self.ranks.gather(lambda: self.planner.make_again(self.run_plan, rule, held_bytes=held_bytes))
            self.run_plan, self.shared_plan = plans[self.ranks.rank], plans[0]
            self.batcher.use(self.plan.rules, self.run_plan.limits)
            # Costs are in bytes of another tuned limit now.
            self.largest_cost = self.cost_after_rescue = 0.0
        self.reserve.expect(self.planner.explorer.optimizer_memory(), held_bytes=held_bytes)
        self.reserve.hold()

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

    def record_step(self, result: BatchResult, *, loss: float) -> None:
        """Adds the step that has just been taken to the rank's record for the report, and shows it in the trackers.

        Args:
            result: Of all ranks.
            loss: Weighted, of the whole logical batch.
        """
        step, (allocated, reserved) = self.progress.step, self.monitor.last_step
        if self._recorded_plan is not self.run_plan:
            self._recorded_plan = self.run_plan
            device, capacity_bytes = self.meter.key, self.meter.capacity_bytes
            limits = memory_limits(self.run_plan, device=device, capacity_bytes=capacity_bytes, from_step=step)
            self.steps.limit(limits)
        self.steps.add(
            StepRecord(
                step=step,
                loss=loss,
                allocated_bytes=allocated or None,
                reserved_bytes=reserved or None,
                micro_batches=len(result.micro_batches),
                micro_batch_size=max(result.micro_batches, default=0),
                ooms_rescued=result.ooms_rescued,
            )
        )
        largest, rescued = max(result.micro_batches, default=None), result.ooms_rescued or None
        self.track({"train/loss": loss, "train/micro_batch_size": largest, "train/ooms_rescued": rescued})

    def save(self) -> None:
        """Writes a checkpoint of everything that the next step depends on, on every rank."""
        self.steps.flush()
        # These differ from rank to rank; all else is the same on all of them, so rank 0 writes it alone.
        of_ranks = self.ranks.gather(
            lambda: {"randomness": capture_generators(), "micro_batches": self.batcher.state_dict()}
        )

        def write() -> None:
            state = {
                "model": self.model.state_dict(),
                "trainable": list(self.optimization.trainable),
                "best": self.best,
                "optimization": self.optimization.state_dict(),
                "progress": asdict(self.progress),
                "metrics_lines": self.metrics.lines,
                "logical_batch": self.plan.logical_batch,
                "device": self.meter.key,
                **of_ranks[0],
                "other_ranks": list(of_ranks[1:]),
            }
            begun = self.progress.epoch + (self.progress.step_in_epoch > 0)
            self.checkpoints.save(state, step=self.progress.step, epochs_begun=begun)

        self.ranks.on_rank0(write)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint's state, bit by bit."""
        self.model.load_state_dict(state["model"])
        # The plan is the one for the parameters that are trained at first: the next step makes another where these
        # differ.
        self.optimization.set_trainable(state["trainable"])
        self.best = state["best"] if self.ranks.is_first else {}
        self.optimization.load_state_dict(state["optimization"])
        # `resume --epochs` may have made the schedule longer since.
        self.optimization.follow_schedule()
        self.reserve.expect(self.planner.explorer.optimizer_memory(), held_bytes=self.optimization.state_bytes)
        self.progress = Progress(**state["progress"])
        if self.folder.goes_on_for_longer(self.progress.step):
            self.progress.trained, self.progress.epochs_without_gain = False, 0
        of_ranks, rank = [state, *state["other_ranks"]], self.ranks.rank
        if len(of_ranks) == self.ranks.size:
            same_device = state["device"] == self.meter.key
            self.batcher.load_state_dict(of_ranks[rank]["micro_batches"], same_device=same_device)
            restore_generators(of_ranks[rank]["randomness"])
        elif self.ranks.is_first:
            restore_generators(state["randomness"])
        else:
            # Of a rank that the run did not have: its randomness begins here.
            seed_rank(seed=self.training.seed, rank=rank, step=self.progress.step)


def load_checkpoint(parts: Parts) -> dict[str, Any] | None:
    """Reads the last checkpoint on every rank; None where there is none."""
    checkpoints = Checkpoints(parts.folder.checkpoints_path)
    saved = parts.ranks.on_every_rank(lambda: checkpoints.load(parts.reporter))

    def step() -> int | None:
        return None if saved is None else int(saved["progress"]["step"])

    if len(set(steps := parts.ranks.gather(step))) > 1:
        seen = f"they see those of steps {', '.join(map(str, steps))}"
        remedy = "All nodes must share the run folder; if they do, resume once they see the same files"
        raise CheckpointError("Every rank goes on from the same checkpoint", value=seen, remedy=remedy)
    return saved


def resolve_plans(planner: Planner, ranks: Ranks, factor: FactorRule, first_path: Path) -> list[RunPlan]:
    """Reads the plans of an earlier attempt, or makes them, and writes them.

    Args:
        planner: Of this rank.
        ranks: Those that train the run.
        factor: How the safety factor of a plan that is made here is decided.
        first_path: Where rank 0's plan is; the others' are beside it.

    Returns:
        Every rank's plan; rank 0's decides the logical batch.
    """
    path = first_path if ranks.is_first else first_path.with_name(f"{first_path.stem}-rank-{ranks.rank}.json")
    earlier = ranks.gather(lambda: _read_plan(path))
    first, mine = earlier[0], earlier[ranks.rank]
    # Without rank 0's plan the logical batch is not decided, whatever the other ranks have.
    if first is None:
        plans = ranks.gather(lambda: planner.make(factor))
        plans = ranks.gather(lambda: planner.common(plans, plans[ranks.rank], factor))
    else:
        plans = ranks.gather(lambda: _adopt(planner, factor, first, mine))

    def finish() -> RunPlan:
        plan = plans[ranks.rank]
        if plan != mine:
            # An attempt that is killed here leaves some of them: the next one makes the others again.
            write_json_atomic(path, plan.to_plain())
            return plan
        known, old = factor.known, plan.plan.safety_factor
        if not factor.after_oom or known is None or old is None or known.factor >= old:
            return plan
        # The attempt before ran out of memory and lowered the factor: the same logical batch is split finer.
        rules = replace(plan.plan.rules, safe_limit=known.factor * plan.plan.rules.tuned_limit)
        finer = replace(plan.plan, rules=rules, safety_factor=known.factor)
        return replace(plan, plan=finer, factor_reason=known.reason)

    return ranks.gather(finish)


def _adopt(planner: Planner, factor: FactorRule, first: RunPlan, own: RunPlan | None) -> RunPlan:
    """Takes over this rank's earlier plan, or makes one with the same logical batch."""
    same_ranks = first.ranks == planner.ranks
    if not same_ranks:
        now = f"{planner.ranks} processes in place of {first.ranks}"
        planner.reporter.notice(f"The run goes on with {now}: its batch is kept, limits and micro-batches start anew")
    # An attempt that was killed while it wrote plans may leave this rank one of another logical batch.
    if own is not None and same_ranks and own.shares_with(first):
        if still_fits(own, planner.meter):
            return own
        planner.reporter.notice("The plan was made for another device: its batch is kept, and cut as this one needs")
    return planner.make(factor) if first.limits is None else planner.make_again(first, factor)


def _read_plan(path: Path) -> RunPlan | None:
    try:
        return RunPlan.from_plain(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("A run goes on by the plan in its folder, which this version cannot read",
                              value=f"{path}: {type(error).__name__} {error}",
                              remedy="Go on with the version that began the run, or train anew") from error  # fmt: skip
