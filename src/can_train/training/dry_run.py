"""Plans a run without a trial: for the device at hand, or for GPUs that are not. Tiny batches are run on the host, to
see what they cost; what would fit is predicted. Writes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from can_train.config.resolved import ResolvedRun
from can_train.errors import DoesNotFitError
from can_train.memory.meters import TargetMeter
from can_train.policy.cards import GIB, Usable, cards_that_hold, predicted_room
from can_train.policy.device_limits import DeviceLimits
from can_train.reporter import Reporter
from can_train.training.effective_factor import factor_rule
from can_train.training.factor_rule import PROVISIONAL
from can_train.training.loading import fresh_model, sample_task
from can_train.training.planning import Planner, RunPlan, plan_request

_LITTLE_IN_USE: Final = 0.7
"""Share of an allocator's memory that is in use where there are many gaps; the simulated GPU had 0.83 and more."""


@dataclass(frozen=True, kw_only=True)
class DryPlan:
    """What would be done on one device.

    Attributes:
        target: The device.
        plan: The plan; None where the training does not fit.
        error: Why not; None where it fits.
        num_samples: Training samples, estimated where only a part was read.
        sample_note: Says which part was read; empty where all was.
    """

    target: Usable
    plan: RunPlan | None
    error: DoesNotFitError | None
    num_samples: int
    sample_note: str


def dry_plans(run: ResolvedRun, targets: Sequence[Usable], reporter: Reporter) -> list[DryPlan]:
    """Plans a run for each of the targets.

    Args:
        run: The resolved run.
        targets: At least one.
        reporter: Where progress goes.

    Raises:
        CanTrainError: The data cannot be read.
    """
    # On one thread: on a login node's many, tiny batches wait for threads longer than they compute.
    torch.set_num_threads(1)
    task = sample_task(run, reporter)
    # A sample stands for the whole: an epoch has as many of its like as there are estimated to be.
    task.train_rows = np.resize(task.train_rows, task.estimated_train_rows)
    largest = TargetMeter(max(targets, key=lambda target: target.capacity_bytes))
    planner = Planner(run=run, task=task, model=fresh_model(run, task, largest), meter=largest, reporter=reporter,
                      verify=False)  # fmt: skip
    request = plan_request(run.training)
    limits = planner.explore(request, PROVISIONAL)
    share = _share_in_use(planner, limits, targets)
    planner.measured_coupling()
    plans = []
    for target in targets:
        here = _on(target, limits, share)
        plan, error = _planned(replace(planner, meter=TargetMeter(target)), here)
        plans.append(
            DryPlan(
                target=target,
                plan=plan,
                error=error,
                num_samples=len(task.train_rows),
                sample_note=task.sample_note,
            )
        )
    return plans


def _share_in_use(planner: Planner, limits: DeviceLimits, targets: Sequence[Usable]) -> float:
    """Measures the allocator's gaps where they may decide: where the batch needs most of a GPU."""
    if all(_on(target, limits, _LITTLE_IN_USE).training.capped for target in targets):
        return 1.0
    return planner.share_in_use(limits)


def _on(target: Usable, limits: DeviceLimits, share: float) -> DeviceLimits:
    """Says what is predicted of a target whose allocator has no more than a share of its memory in use."""
    room = min(share * target.capacity_bytes, predicted_room(target.capacity_bytes))
    return limits.predicted_on(target.key, target.capacity_bytes, room)


def _planned(planner: Planner, limits: DeviceLimits) -> tuple[RunPlan | None, DoesNotFitError | None]:
    """Resolves the plan for one target, or says why there is none."""
    rule = factor_rule(planner.run, limits.device_key, planner.reporter)
    try:
        _check_optimizer(limits)
        return planner.resolve(plan_request(planner.run.training), limits, rule), None
    except DoesNotFitError as error:
        return None, error


def _check_optimizer(limits: DeviceLimits) -> None:
    need, capacity = limits.optimizer_peak_bytes, limits.capacity_bytes
    if need > capacity:
        raise DoesNotFitError(
            "Weights, gradients and optimizer state must fit on the device",
            value=f"they need {need / GIB:.2f} GiB of {capacity / GIB:.2f}",
            remedy=f"Choose a smaller model (--size student), or a larger device ({cards_that_hold(need)})",
        )
