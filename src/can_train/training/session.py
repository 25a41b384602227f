"""Holds a run to what it began with: a log that grows, or a teacher that is trained on meanwhile, would change the run
between two steps without a word.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import ResolvedRun, cache_folder
from can_train.config.settings import TrainingSettings
from can_train.errors import CheckpointError, RunError
from can_train.fit import random_state
from can_train.fit.epochs import Epochs, rows_by_epoch
from can_train.fit.factor_rule import FactorChoice, FactorRule
from can_train.fit.micro_batcher import BatchResult, MicroBatcher
from can_train.fit.optimizer import Optimization, Precision, make_optimization
from can_train.fit.packing import BatchCosts, share_out
from can_train.fit.plan import Plan
from can_train.fit.planner import Planner, RunPlan, still_fits
from can_train.fit.rescue import RescueSettings
from can_train.fit.reserve import OptimizerReserve
from can_train.io.atomic import write_json_atomic
from can_train.memory.meters import Meter
from can_train.memory.monitor import LeakWatch, MemoryMonitor
from can_train.reporter import Reporter
from can_train.task import Task, TaskInEpoch
from can_train.training.attempts import StopRequests
from can_train.training.checkpoint import Checkpoints
from can_train.training.distributed import Ranks
from can_train.training.loading import fresh_model, start_from
from can_train.training.reference_models import ReferenceModelPlan, ReferenceModels, keep, kept
from can_train.training.report import plan_lines, reference_model_lines
from can_train.training.run_folder import MetricsLog, RunFolder

BUILT_ON: Final = "built_on.json"
"""In a run's folder: the digests of its data and of each reference model, by role."""


_DATA: Final = "data"


def check_inputs_unchanged(folder: RunFolder, task: Task) -> None:
    """Writes down what a run is trained on; in a later attempt, makes sure that it is the same.

    Raises:
        RunError: It is another by now.
    """
    path = folder.path / BUILT_ON
    now = {reference_model.role: reference_model.digest for reference_model in task.reference_models()}
    if data := task.data_digest():
        now[_DATA] = data
    try:
        before = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        write_json_atomic(path, now)
        return
    # A reference model's digest is also of what it is asked about, so other data are said alone.
    changed = [role for role, digest in now.items() if before.get(role, digest) != digest]
    if _DATA in changed:
        raise RunError("A run goes on with the data that it began with", value="its logs have other contents by now",
                       remedy="Bring back what was there, or train anew")  # fmt: skip
    others = ", ".join(f"the {one.role.replace('_', ' ')} {one.name}" for one in task.reference_models()
                       if one.role in changed)  # fmt: skip
    if others:
        raise RunError("A run goes on with the models that it began with",
                       value=f"{others} has other weights by now, or is asked about other windows",
                       remedy="Bring back what was there, or train anew")  # fmt: skip


def settle_plans(planner: Planner, ranks: Ranks, factor: FactorRule, first_path: Path) -> list[RunPlan]:
    """Reads the plans that an earlier attempt froze, or resolves and freezes them.

    Args:
        planner: Of this rank.
        ranks: Those that train the run.
        factor: How the safety factor of a plan that is made here is decided.
        first_path: Where rank 0's plan is; the others' are beside it.

    Returns:
        Every rank's plan.

    Raises:
        DoesNotFitError: Not even one sample fits here.
        CheckpointError: The plan is not one that this version wrote.
        RankFailedError: Another rank has no plan.
    """
    path = first_path if ranks.is_first else first_path.with_name(f"{first_path.stem}-rank-{ranks.rank}.json")
    frozen = ranks.gather(lambda: _frozen_plan(path))
    settled = _settled(planner, ranks, factor, frozen)

    def freeze() -> RunPlan:
        own = settled[ranks.rank]
        if own != frozen[ranks.rank]:
            # An attempt that is killed here leaves some of them: the next one makes the others again.
            write_json_atomic(path, own.to_plain())
        elif factor.after_oom and factor.known is not None:
            return _within(own, factor.known)
        return own

    return ranks.gather(freeze)


def _settled(planner: Planner, ranks: Ranks, factor: FactorRule, frozen: Sequence[RunPlan | None]) -> list[RunPlan]:
    """Takes up each rank's plan, or makes it; rank 0's decides the logical batch."""
    first = frozen[0]
    if first is None:
        plans = ranks.gather(lambda: planner.make(factor))
        return ranks.gather(lambda: planner.common(plans, plans[ranks.rank], factor))
    return ranks.gather(lambda: _taken_up(planner, factor, first, frozen[ranks.rank]))


def _taken_up(planner: Planner, factor: FactorRule, first: RunPlan, own: RunPlan | None) -> RunPlan:
    same_ranks = first.ranks == planner.ranks
    if not same_ranks:
        now = f"{planner.ranks} processes in place of {first.ranks}"
        planner.reporter.notice(f"The run goes on with {now}: its batch is kept, limits and micro-batches start anew")
    if own is not None and same_ranks and own.shares_with(first):
        if still_fits(own, planner.meter):
            return own
        planner.reporter.notice("The plan was made for another device: its batch is kept, and cut as this one needs")
    return planner.make(factor) if first.limits is None else planner.make_again(first, factor)


def _frozen_plan(path: Path) -> RunPlan | None:
    """Reads a plan that was frozen; None where none was.

    Raises:
        CheckpointError: It is not one that this version wrote.
    """
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


def _within(frozen: RunPlan, choice: FactorChoice) -> RunPlan:
    """Keeps the logical batch and cuts it finer: the attempt before ran out of memory and lowered the factor."""
    if frozen.plan.safety_factor is None or choice.factor >= frozen.plan.safety_factor:
        return frozen
    rules = replace(frozen.plan.rules, safe_limit=choice.factor * frozen.plan.rules.tuned_limit)
    plan = replace(frozen.plan, rules=rules, safety_factor=choice.factor)
    return replace(frozen, plan=plan, factor_reason=choice.reason)


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
        reference models: Finished models that the task asks; None: nobody knows of any.
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
    reference_models: ReferenceModels | None = None
    asked: tuple[ReferenceModelPlan, ...] = ()
    stop_signal: int | None = None
    ooms_elsewhere: int = 0
    trainable: tuple[bool, ...] | None = None
    leak_watch: LeakWatch = field(default_factory=LeakWatch)
    largest_cost: float = 0.0
    cost_after_rescue: float = 0.0
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
            self.cost_after_rescue = max(self.cost_after_rescue, result.cost_after_rescue)

    def note_rescue(self) -> None:
        """Tells what runs from now on apart from what ran before: memory has run out, and is free again."""
        self.monitor.rescued()
        self.cost_after_rescue = 0.0
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
                plans = self.ranks.gather(lambda: self._again(rule, held_bytes))
                self.run_plan, self.shared_plan = plans[self.ranks.rank], plans[0]
                self.batcher.use(self.plan.rules, self.run_plan.limits)
                # In bytes of another tuned limit.
                self.largest_cost = self.cost_after_rescue = 0.0
            self.reserve.expect(self.planner.explorer.optimizer_memory(), held_bytes=held_bytes)
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
    def peak_bytes_after_rescue(self) -> int:
        """Peak of what ran after the last out-of-memory, `cost_after_rescue` in it; 0 where nothing that was counted did."""
        return self.monitor.peak_bytes_after_rescue if self.cost_after_rescue else 0


def save(session: Session) -> None:
    """Writes a checkpoint of everything that the next step depends on, on every rank.

    Raises:
        CheckpointError: It could not be written.
        RankFailedError: Rank 0 could not write it.
    """
    of_ranks = session.ranks.gather(
        lambda: {"randomness": random_state.capture(), "micro_batches": session.batcher.state_dict()}
    )
    session.ranks.on_rank0(lambda: session.checkpoints.save(_state(session, of_ranks), step=session.progress.step))


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


def restore(session: Session, state: Mapping[str, Any]) -> None:
    """Continues from a checkpoint's state, bit by bit."""
    session.model.load_state_dict(state["model"])
    session.best = state["best"] if session.ranks.is_first else {}
    session.optimization.load_state_dict(state["optimization"])
    session.reserve.expect(session.planner.explorer.optimizer_memory(), held_bytes=session.optimization.state_bytes)
    session.progress = Progress(**state["progress"])
    of_ranks = [state, *state.get("other_ranks", ())]
    if len(of_ranks) == session.ranks.size:
        own = of_ranks[session.ranks.rank]
        session.batcher.load_state_dict(own["micro_batches"])
        random_state.restore(own["randomness"])
    elif session.ranks.is_first:
        random_state.restore(state["randomness"])
    else:
        rank, step = session.ranks.rank, session.progress.step
        random_state.seed_rank(seed=session.training.seed, rank=rank, step=step)
    session.rewind_metrics(state["metrics_lines"])


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


def make_session(given: Parts, factor: FactorRule) -> Session:
    """Builds the model, resolves or reads the plan, and restores the last checkpoint.

    Args:
        given: What the attempt is made with.
        factor: How the safety factor of a plan that is made here is decided.

    Raises:
        DoesNotFitError: Not even one sample fits.
        CheckpointError: No checkpoint of the run is whole.
        RankFailedError: So it is on another rank.
    """
    run, ranks = given.run, given.ranks
    saved = _saved(given)
    model = ranks.on_every_rank(lambda: _model(given, begins=saved is None))
    # The same seed may give other bits on another processor.
    ranks.broadcast([*model.parameters(), *model.buffers()])
    reference_models = ReferenceModels(
        task=given.task,
        training=run.training,
        meter=given.meter,
        reporter=given.reporter,
        cache=cache_folder(run.paths),
        ranks=ranks,
    )
    asked, beside = _ask(given, reference_models, model)
    planner = Planner(
        run=run, task=given.task, model=model, meter=given.meter, reporter=given.reporter, ranks=ranks.size,
        reference_tensors=beside,
    )  # fmt: skip
    plans = _plans(given, planner, factor, asked)
    random_state.seed_rank(seed=run.training.seed, rank=ranks.rank, step=0)
    session = _put_together(given, planner, plans, steps_done=0 if saved is None else saved["progress"]["step"])
    session.reference_models, session.asked = reference_models, tuple(asked)
    if saved is None:
        session.rewind_metrics(0)
    else:
        restore(session, saved)
        given.reporter.notice(f"Continuing at step {session.progress.step}")
    return session


def _put_together(given: Parts, planner: Planner, plans: list[RunPlan], *, steps_done: int) -> Session:
    """Makes what trains by a plan, as it is before the first step."""
    run, meter, model, plan = given.run, given.meter, planner.model, plans[given.ranks.rank]
    epochs = _epochs(given, plan)
    optimization = make_optimization(
        model,
        run.training,
        lr=run.training.lr * plan.plan.lr_factor,
        total_steps=epochs.total_steps(run.training.epochs),
        device=meter.device,
    )
    return Session(
        task=given.task,
        model=model,
        optimization=optimization,
        precision=Precision.named(run.training.precision),
        training=run.training,
        run_plan=plan,
        shared_plan=plans[0],
        epochs=epochs,
        meter=meter,
        monitor=_monitor(given, epochs, steps_done=steps_done),
        batcher=_batcher(given, plan, model),
        planner=planner,
        reserve=OptimizerReserve(planner.explorer.optimizer_memory(), meter, retries=run.training.oom_retries),
        checkpoints=Checkpoints(given.folder.checkpoints_path),
        metrics=MetricsLog(given.folder.metrics_path),
        stops=given.stops,
        reporter=given.reporter,
        ranks=given.ranks,
    )


def _model(given: Parts, *, begins: bool) -> nn.Module:
    """Makes the model; in a run that begins, with the weights that it is to start from."""
    model = fresh_model(given.run, given.task, given.meter)
    if begins and given.run.training.start_from:
        start_from(model, Path(given.run.training.start_from))
    return model


def _epochs(given: Parts, plan: RunPlan) -> Epochs:
    return Epochs(
        rows_by_epoch(given.task, plan.skipped, epochs=given.run.training.epochs),
        lambda rows: given.task.batch_features(rows)[:, 0],
        seed=given.run.training.seed,
        logical_batch=plan.plan.logical_batch,
        preflight_units=given.run.training.preflight_units,
    )


def _batcher(given: Parts, plan: RunPlan, model: nn.Module) -> MicroBatcher:
    training = given.run.training
    rescue = RescueSettings(
        adaptive=training.adaptive_micro_batch,
        factor=training.backoff_factor,
        floor=training.min_micro_batch_size,
        retries=training.oom_retries,
        regrow=training.regrow,
    )
    return MicroBatcher(model, meter=given.meter, rules=plan.plan.rules, rescue=rescue, limits=plan.limits)


def _monitor(given: Parts, epochs: Epochs, *, steps_done: int) -> MemoryMonitor:
    settings = given.run.monitor
    total_steps = epochs.total_steps(given.run.training.epochs) - steps_done
    return MemoryMonitor(meter=given.meter, interval=settings.interval, warmup=settings.warmup, total_steps=total_steps)


def _ask(
    given: Parts, reference_models: ReferenceModels, model: nn.Module
) -> tuple[list[ReferenceModelPlan], list[Tensor]]:
    """Asks the task's reference models, from where an earlier attempt did or rank 0 decides; returns what stays beside."""
    path, training = given.folder.reference_models_path, given.run.training
    # The way that is taken fits on every rank; what is done once serves the share of one.
    least_bytes = min(given.ranks.gather(lambda: given.meter.capacity_bytes))
    samples = -(-len(given.task.train_rows) * training.epochs // given.ranks.size)

    def decide() -> list[ReferenceModelPlan]:
        plans = kept(path, given.task)
        if plans is None:
            plans = [plan.on(least_bytes, samples=samples) for plan in reference_models.decide(model)]
        return plans

    told, beside = reference_models.bind_outputs(given.ranks.on_rank0(decide))
    if told:
        given.ranks.on_rank0(lambda: keep(path, told))
    return told, beside


def _plans(given: Parts, planner: Planner, factor: FactorRule, asked: Sequence[ReferenceModelPlan]) -> list[RunPlan]:
    """Settles every rank's plan; shows rank 0's."""
    plans = settle_plans(planner, given.ranks, factor, given.folder.plan_path)
    plan = plans[given.ranks.rank]
    lines = plan_lines(plan, given.meter.key, given.meter.capacity_bytes) + reference_model_lines(asked)
    given.reporter.notice("\n".join(lines))
    for notice in (*plan.plan.notices, *plan.notices):
        given.reporter.notice(notice)
    return plans


def _saved(given: Parts) -> dict[str, Any] | None:
    """Reads the last checkpoint; None where there is none.

    Raises:
        CheckpointError: None of them is whole, or the ranks do not see the same one.
    """
    checkpoints = Checkpoints(given.folder.checkpoints_path)
    saved = given.ranks.on_every_rank(lambda: checkpoints.load(given.reporter))
    steps = given.ranks.gather(lambda: None if saved is None else saved["progress"]["step"])
    if len(set(steps)) > 1:
        raise CheckpointError(
            "Every rank goes on from the same checkpoint",
            value=f"they see those of steps {', '.join(map(str, steps))}",
            remedy="All nodes must share the run folder; if they do, resume once they see the same files",
        )
    return saved
