"""Puts together everything one attempt trains with: fresh, or as the last checkpoint left it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from can_train.config.resolved import ResolvedRun
from can_train.engine.micro_batcher import MicroBatcher
from can_train.engine.ranks import Ranks
from can_train.engine.rescue import RescueSettings
from can_train.engine.reserve import OptimizerReserve
from can_train.errors import CheckpointError
from can_train.memory.meters import Meter
from can_train.memory.monitor import MemoryMonitor
from can_train.reporter import Reporter
from can_train.training import loop, randomness
from can_train.training.checkpoints import Checkpoints
from can_train.training.companions import CompanionPlan, Companions, keep, kept
from can_train.training.epochs import Epochs, rows_by_epoch
from can_train.training.factor_rule import FactorRule
from can_train.training.folders import cache_folder
from can_train.training.frozen_plan import settle_plans
from can_train.training.loading import fresh_model
from can_train.training.optimization import Precision, make_optimization
from can_train.training.planning import Planner, RunPlan
from can_train.training.report import companion_lines, plan_lines
from can_train.training.run_folder import MetricsLog, RunFolder
from can_train.training.signals import StopRequests
from can_train.training.starting import start_from
from can_train.training.state import Session
from can_train.training.task import Task


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
    model = ranks.each(lambda: _model(given, begins=saved is None))
    # The same seed may give other bits on another processor.
    ranks.broadcast([*model.parameters(), *model.buffers()])
    companions = Companions(
        task=given.task,
        training=run.training,
        meter=given.meter,
        reporter=given.reporter,
        cache=cache_folder(run.paths),
        ranks=ranks,
    )
    asked, beside = _ask(given, companions, model)
    planner = Planner(
        run=run, task=given.task, model=model, meter=given.meter, reporter=given.reporter, ranks=ranks.size,
        beside=beside,
    )  # fmt: skip
    plans = _plans(given, planner, factor, asked)
    randomness.seed_rank(seed=run.training.seed, rank=ranks.rank, step=0)
    session = _put_together(given, planner, plans, steps_done=0 if saved is None else saved["progress"]["step"])
    session.companions, session.asked = companions, tuple(asked)
    if saved is None:
        session.rewind_metrics(0)
    else:
        loop.restore(session, saved)
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
        reserve=OptimizerReserve(planner.optimizer_memory(), meter, retries=run.training.oom_retries),
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


def _ask(given: Parts, companions: Companions, model: nn.Module) -> tuple[list[CompanionPlan], list[Tensor]]:
    """Asks the task's companions, from where an earlier attempt did or rank 0 decides; returns what stays beside."""
    path, training = given.folder.companions_path, given.run.training
    # The way that is taken fits on every rank; what is done once serves the share of one.
    least_bytes = min(given.ranks.together(lambda: given.meter.capacity_bytes))
    samples = -(-len(given.task.train_rows) * training.epochs // given.ranks.size)

    def decide() -> list[CompanionPlan]:
        plans = kept(path, given.task)
        if plans is None:
            plans = [plan.on(least_bytes, samples=samples) for plan in companions.decide(model)]
        return plans

    told, beside = companions.listen(given.ranks.first(decide))
    if told:
        given.ranks.first(lambda: keep(path, told))
    return told, beside


def _plans(given: Parts, planner: Planner, factor: FactorRule, asked: Sequence[CompanionPlan]) -> list[RunPlan]:
    """Settles every rank's plan; shows rank 0's."""
    plans = settle_plans(planner, given.ranks, factor, given.folder.plan_path)
    plan = plans[given.ranks.rank]
    lines = plan_lines(plan, given.meter.key, given.meter.capacity_bytes) + companion_lines(asked)
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
    saved = given.ranks.each(lambda: checkpoints.load(given.reporter))
    steps = given.ranks.together(lambda: None if saved is None else saved["progress"]["step"])
    if len(set(steps)) > 1:
        raise CheckpointError(
            "Every rank goes on from the same checkpoint",
            value=f"they see those of steps {', '.join(map(str, steps))}",
            remedy="All nodes must share the run folder; if they do, resume once they see the same files",
        )
    return saved
