"""Puts together everything one attempt trains with: fresh, or as the last checkpoint left it."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from can_train.config.resolved import ResolvedRun
from can_train.memory.meters import Meter
from can_train.policy.accumulation import solve_accumulation
from can_train.policy.plan import Plan
from can_train.reporter import Reporter
from can_train.state.atomic import write_json_atomic
from can_train.state.factor_store import FactorChoice
from can_train.training import loop, randomness
from can_train.training.checkpoints import Checkpoints
from can_train.training.loop import Session
from can_train.training.optimization import Precision, make_optimization
from can_train.training.planning import Trial, make_plan, plan_request
from can_train.training.report import plan_lines
from can_train.training.run_folder import MetricsLog, RunFolder
from can_train.training.signals import StopRequests
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


def make_session(given: Parts, factor: FactorChoice) -> Session:
    """Builds the model, resolves or reads the plan, and restores the last checkpoint.

    Raises:
        DoesNotFitError: Not even one sample fits.
        CheckpointError: No checkpoint of the run is whole.
    """
    run, meter = given.run, given.meter
    checkpoints = Checkpoints(given.folder.checkpoints_path)
    saved = checkpoints.load(given.reporter)
    precision = Precision.named(run.training.precision)
    # Preparing data may or may not have drawn random numbers (a cache): weights start from here.
    randomness.seed_everything(run.training.seed)
    model = given.task.build_model().to(meter.device, precision.dtype)
    plan = _plan(given, factor, model)
    optimization = make_optimization(
        model,
        run.training,
        lr=run.training.lr * plan.lr_factor,
        steps_per_epoch=plan.steps_per_epoch,
        device=meter.device,
    )
    session = Session(
        task=given.task,
        model=model,
        optimization=optimization,
        precision=precision,
        training=run.training,
        plan=plan,
        meter=meter,
        checkpoints=checkpoints,
        metrics=MetricsLog(given.folder.metrics_path),
        stops=given.stops,
        reporter=given.reporter,
    )
    if saved is not None:
        loop.restore(session, saved)
        given.reporter.notice(f"Continuing at step {session.progress.step}")
    else:
        session.metrics.rewind(0)
    return session


def _plan(given: Parts, factor: FactorChoice, model: nn.Module) -> Plan:
    """Reads the plan that an earlier attempt froze, or resolves and freezes one; shows it."""
    plan = _frozen_plan(given.folder.plan_path)
    if plan is None:
        plan = _searched_plan(given, factor, model)
        write_json_atomic(given.folder.plan_path, asdict(plan))
    elif plan.safety_factor is not None and factor.factor < plan.safety_factor:
        plan = _within(plan, factor.factor, divisor=given.run.training.accumulation == "divisor")
    given.reporter.notice("\n".join(plan_lines(plan, given.meter, factor)))
    for notice in plan.notices:
        given.reporter.notice(notice)
    return plan


def _searched_plan(given: Parts, factor: FactorChoice, model: nn.Module) -> Plan:
    """Resolves a plan, its trials shown as a stage; leaves generators and meter as they were."""
    request = plan_request(given.run, factor=factor.factor, dataset_size=len(given.task.train_rows))
    trial = Trial(given.run, given.task, model, given.meter)
    generators = randomness.capture()
    with given.reporter.stage("finding the batch size", unit="trials") as stage:

        def shown(size: int) -> int:
            stage.advance(1, size=size)
            return trial(size)

        plan = make_plan(request, shown, given.meter.capacity_bytes)
    randomness.restore(generators)
    given.meter.release()
    given.meter.reset_peak()
    return plan


def _frozen_plan(path: Path) -> Plan | None:
    try:
        plain: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    lists = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
    return Plan(**{**plain, **lists})


def _within(plan: Plan, factor: float, *, divisor: bool) -> Plan:
    """Keeps the logical batch and cuts it finer: an earlier attempt ran out of memory and lowered the factor."""
    assert plan.tuned_limit is not None, "a plan with a safety factor has searched"
    safe_limit = max(1, math.floor(factor * plan.tuned_limit))
    micro_batches = solve_accumulation(plan.logical_batch, safe_limit, divisor=divisor)
    return replace(plan, safe_limit=safe_limit, safety_factor=factor, micro_batches=micro_batches)
