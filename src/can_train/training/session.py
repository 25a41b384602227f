"""Puts together everything one attempt trains with: fresh, or as the last checkpoint left it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from can_train.config.resolved import ResolvedRun
from can_train.engine.micro_batcher import MicroBatcher
from can_train.engine.rescue import RescueSettings
from can_train.engine.reserve import OptimizerReserve
from can_train.errors import CheckpointError
from can_train.memory.meters import Meter
from can_train.memory.monitor import MemoryMonitor
from can_train.reporter import Reporter
from can_train.state.atomic import write_json_atomic
from can_train.state.factor_store import FactorChoice
from can_train.training import loop
from can_train.training.checkpoints import Checkpoints
from can_train.training.epochs import Epochs
from can_train.training.factor_rule import FactorRule
from can_train.training.loading import fresh_model
from can_train.training.optimization import Precision, make_optimization
from can_train.training.planning import Planner, RunPlan, still_fits
from can_train.training.report import plan_lines
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


def make_session(given: Parts, factor: FactorRule) -> Session:
    """Builds the model, resolves or reads the plan, and restores the last checkpoint.

    Args:
        given: What the attempt is made with.
        factor: How the safety factor of a plan that is made here is decided.

    Raises:
        DoesNotFitError: Not even one sample fits.
        CheckpointError: No checkpoint of the run is whole.
    """
    run, meter = given.run, given.meter
    checkpoints = Checkpoints(given.folder.checkpoints_path)
    saved = checkpoints.load(given.reporter)
    precision = Precision.named(run.training.precision)
    model = _model(given, begins=saved is None)
    planner = Planner(run=run, task=given.task, model=model, meter=meter, reporter=given.reporter)
    plan = _plan(given, planner, factor)
    epochs = _epochs(given, plan)
    optimization = make_optimization(
        model,
        run.training,
        lr=run.training.lr * plan.plan.lr_factor,
        total_steps=epochs.total_steps(run.training.epochs),
        device=meter.device,
    )
    session = Session(
        task=given.task,
        model=model,
        optimization=optimization,
        precision=precision,
        training=run.training,
        run_plan=plan,
        epochs=epochs,
        meter=meter,
        monitor=_monitor(given, epochs, steps_done=0 if saved is None else saved["progress"]["step"]),
        batcher=_batcher(given, plan, model),
        planner=planner,
        reserve=OptimizerReserve(planner.optimizer_memory(), meter, retries=run.training.oom_retries),
        checkpoints=checkpoints,
        metrics=MetricsLog(given.folder.metrics_path),
        stops=given.stops,
        reporter=given.reporter,
    )
    if saved is None:
        session.metrics.rewind(0)
    else:
        loop.restore(session, saved)
        given.reporter.notice(f"Continuing at step {session.progress.step}")
    return session


def _model(given: Parts, *, begins: bool) -> nn.Module:
    """Makes the model; in a run that begins, with the weights that it is to start from."""
    model = fresh_model(given.run, given.task, given.meter)
    if begins and given.run.training.start_from:
        start_from(model, Path(given.run.training.start_from))
    return model


def _epochs(given: Parts, plan: RunPlan) -> Epochs:
    rows = plan.train_rows(given.task)
    return Epochs(
        rows,
        given.task.batch_features(rows)[:, 0],
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


def _plan(given: Parts, planner: Planner, factor: FactorRule) -> RunPlan:
    """Reads the plan that an earlier attempt froze, or resolves and freezes one; shows it."""
    path = given.folder.plan_path
    plan = _frozen_plan(path)
    if plan is None:
        plan = planner.make(factor)
        write_json_atomic(path, plan.to_plain())
    elif not still_fits(plan, given.meter):
        given.reporter.notice("The plan was made for another device: its batch is kept, and cut as this one needs")
        plan = planner.make_again(plan, factor)
        write_json_atomic(path, plan.to_plain())
    elif factor.after_oom and factor.known is not None:
        plan = _within(plan, factor.known)
    given.reporter.notice("\n".join(plan_lines(plan, given.meter.key, given.meter.capacity_bytes)))
    for notice in (*plan.plan.notices, *plan.notices):
        given.reporter.notice(notice)
    return plan


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
