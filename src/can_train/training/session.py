"""What one attempt of a run trains with: its plan on every rank, its state in memory, and that state in a
checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from can_train.config.resolved import ResolvedRun
from can_train.config.settings import TrainingSettings
from can_train.errors import CheckpointError
from can_train.fit import random_state
from can_train.fit.epochs import Epochs, rows_by_epoch
from can_train.fit.factor_rule import FactorRule
from can_train.fit.micro_batcher import BatchResult, MicroBatcher
from can_train.fit.optimizer import Optimization, Precision, make_optimization
from can_train.fit.plan import Plan
from can_train.fit.planner import Planner, RunPlan, still_fits
from can_train.fit.rescue import RescueSettings
from can_train.fit.reserve import OptimizerReserve
from can_train.io.atomic import write_json_atomic
from can_train.memory.meters import Meter
from can_train.memory.monitor import LeakWatch, MemoryMonitor
from can_train.reporter import Reporter
from can_train.task import Task
from can_train.training.attempts import StopRequests
from can_train.training.checkpoint import Checkpoints
from can_train.training.distributed import Ranks
from can_train.training.run_folder import MetricsLog, RunFolder

if TYPE_CHECKING:
    from can_train.training.reference_models import ReferenceModels


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an attempt of a run is made with."""

    run: ResolvedRun
    folder: RunFolder
    task: Task
    meter: Meter
    reporter: Reporter
    stops: StopRequests
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(kw_only=True)
class Progress:
    """How far a run is; part of its checkpoints."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    best_loss: float = math.inf
    best_epoch: int = 0
    # In validations.
    epochs_without_gain: int = 0
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
class Session:
    """Everything one attempt of a run trains with.

    Attributes:
        run_plan: Of this rank.
        shared_plan: Rank 0's, by whose prices all ranks share samples out alike.
        best: Weights of the lowest validation loss; on rank 0 alone.
        stop_signal: A signal that some rank has received, known to all of them; None: none.
        ooms_elsewhere: Out-of-memories that other ranks survived, once training has ended.
        planner: Makes another plan where other parameters are trained.
        largest_cost: Of the costliest micro-batch whose memory was counted, in bytes; the monitor's peak belongs to it.
        cost_after_rescue: The same of those after the last out-of-memory; of all, where there was none.
        largest_micro_batch: Of all that ran, in samples.
        foreign_bytes: Most memory that other processes were seen to take.
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
    ranks: Ranks
    planner: Planner
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

    def __post_init__(self) -> None:
        self.batcher.watch(self.note_rescue)
        self._planned_for = self.optimization.trainable

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, unless it stops early."""
        return self.epochs.total_steps(self.training.epochs)

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
        """Adds a line to the metrics, which rank 0 writes."""
        if self.ranks.is_first:
            self.metrics.append(**record)


def build_session(
    parts: Parts, planner: Planner, plans: Sequence[RunPlan], reference_models: ReferenceModels, *, steps_done: int
) -> Session:
    """Makes what trains by the plans of all ranks, as it is before the first step.

    Args:
        parts: What the attempt is made with.
        planner: Of this rank; has the model.
        plans: Of all ranks.
        reference_models: The task's.
        steps_done: Optimizer steps of earlier attempts.
    """
    run, meter, model, run_plan = parts.run, parts.meter, planner.model, plans[parts.ranks.rank]
    training, measured = run.training, run.monitor
    epochs = _epochs(parts, run_plan)
    total_steps = epochs.total_steps(training.epochs)
    steps_left = total_steps - steps_done
    rescue = RescueSettings(
        adaptive=training.adaptive_micro_batch,
        factor=training.backoff_factor,
        floor=training.min_micro_batch_size,
        retries=training.oom_retries,
        regrow=training.regrow,
    )
    return Session(
        task=parts.task,
        model=model,
        optimization=make_optimization(
            model, training, lr=training.lr * run_plan.plan.lr_factor, total_steps=total_steps, device=meter.device
        ),
        precision=Precision.named(training.precision),
        training=training,
        run_plan=run_plan,
        shared_plan=plans[0],
        epochs=epochs,
        meter=meter,
        monitor=MemoryMonitor(meter=meter, interval=measured.interval, warmup=measured.warmup, total_steps=steps_left),
        batcher=MicroBatcher(model, meter=meter, rules=run_plan.plan.rules, rescue=rescue, limits=run_plan.limits),
        planner=planner,
        reserve=OptimizerReserve(planner.explorer.optimizer_memory(), meter, retries=training.oom_retries),
        checkpoints=Checkpoints(parts.folder.checkpoints_path),
        metrics=MetricsLog(parts.folder.metrics_path),
        stops=parts.stops,
        reporter=parts.reporter,
        ranks=parts.ranks,
        reference_models=reference_models,
    )


def _epochs(parts: Parts, run_plan: RunPlan) -> Epochs:
    return Epochs(
        rows_by_epoch(parts.task, run_plan.skipped, epochs=parts.run.training.epochs),
        lambda rows: parts.task.batch_features(rows)[:, 0],
        seed=parts.run.training.seed,
        logical_batch=run_plan.plan.logical_batch,
        preflight_units=parts.run.training.preflight_units,
    )


def save(session: Session) -> None:
    """Writes a checkpoint of everything that the next step depends on, on every rank."""
    # These differ from rank to rank; all else is the same on all of them, so rank 0 writes it alone.
    of_ranks = session.ranks.gather(
        lambda: {"randomness": random_state.capture(), "micro_batches": session.batcher.state_dict()}
    )

    def write() -> None:
        state = {
            "model": session.model.state_dict(),
            "trainable": list(session.optimization.trainable),
            "best": session.best,
            "optimization": session.optimization.state_dict(),
            "progress": asdict(session.progress),
            "metrics_lines": session.metrics.lines,
            "logical_batch": session.plan.logical_batch,
            **of_ranks[0],
            "other_ranks": list(of_ranks[1:]),
        }
        session.checkpoints.save(state, step=session.progress.step)

    session.ranks.on_rank0(write)


def restore(session: Session, state: Mapping[str, Any]) -> None:
    """Continues from a checkpoint's state, bit by bit."""
    session.model.load_state_dict(state["model"])
    # The plan is the one for the parameters that are trained at first: the next step makes another where these differ.
    session.optimization.set_trainable(state["trainable"])
    session.best = state["best"] if session.ranks.is_first else {}
    session.optimization.load_state_dict(state["optimization"])
    session.reserve.expect(session.planner.explorer.optimizer_memory(), held_bytes=session.optimization.state_bytes)
    session.progress = Progress(**state["progress"])
    of_ranks = [state, *state["other_ranks"]]
    if len(of_ranks) == session.ranks.size:
        own = of_ranks[session.ranks.rank]
        session.batcher.load_state_dict(own["micro_batches"])
        random_state.restore(own["randomness"])
    elif session.ranks.is_first:
        random_state.restore(state["randomness"])
    else:
        # Of a rank that the run did not have: its randomness begins here.
        rank, step = session.ranks.rank, session.progress.step
        random_state.seed_rank(seed=session.training.seed, rank=rank, step=step)
    rewind_metrics(session, state["metrics_lines"])


def rewind_metrics(session: Session, lines: int) -> None:
    """Keeps the first lines of the metrics: what followed the checkpoint is written again."""
    if session.ranks.is_first:
        session.metrics.rewind(lines)


def load_checkpoint(parts: Parts) -> dict[str, Any] | None:
    """Reads the last checkpoint on every rank; None where there is none."""
    checkpoints = Checkpoints(parts.folder.checkpoints_path)
    saved = parts.ranks.on_every_rank(lambda: checkpoints.load(parts.reporter))
    steps = parts.ranks.gather(lambda: None if saved is None else saved["progress"]["step"])
    if len(set(steps)) > 1:
        raise CheckpointError(
            "Every rank goes on from the same checkpoint",
            value=f"they see those of steps {', '.join(map(str, steps))}",
            remedy="All nodes must share the run folder; if they do, resume once they see the same files",
        )
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
        return _with_lower_factor(plan, factor)

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
        plain: dict[str, Any] = json.loads(path.read_text())
        return RunPlan.from_plain(plain)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "A run goes on by the plan in its folder, which this version cannot read",
            value=f"{path}: {type(error).__name__} {error}",
            remedy="Go on with the version that began the run, or train anew",
        ) from error


def _with_lower_factor(plan: RunPlan, factor: FactorRule) -> RunPlan:
    """Splits the same logical batch finer where the attempt before ran out of memory and lowered the factor."""
    choice = factor.known
    old = plan.plan.safety_factor
    if not factor.after_oom or choice is None or old is None or choice.factor >= old:
        return plan
    rules = replace(plan.plan.rules, safe_limit=choice.factor * plan.plan.rules.tuned_limit)
    return replace(plan, plan=replace(plan.plan, rules=rules, safety_factor=choice.factor), factor_reason=choice.reason)
