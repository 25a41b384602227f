"""What a run says of its plan, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from can_train.fit.cost_model import CostModel, DeviceLimits
from can_train.fit.factor_rule import NO_AIM
from can_train.io.units import size_text

if TYPE_CHECKING:
    from can_train.fit.planner import RunPlan
    from can_train.training.reference_models import PlacementCost, ReferenceModelPlan

_WHY: Final = {
    "requested": "as asked for",
    "memory": "memory decides",
    "dataset": "the data set has no more",
    "min_steps": "a larger one would leave too few steps an epoch",
}


def plan_lines(run_plan: RunPlan, device_key: str, capacity_bytes: int) -> list[str]:
    """Writes a plan as aligned lines."""
    plan = run_plan.plan
    steps = spread(plan.fewest_steps_per_epoch, plan.steps_per_epoch)
    unit = "step" if plan.steps_per_epoch == 1 else "steps"
    parts = spread(plan.fewest_parts, plan.most_parts)
    lines = [
        f"plan for {device_key} ({size_text(capacity_bytes)} usable):",
        f"  logical batch  {plan.logical_batch} ({_WHY[plan.binding_limit]}), {steps} {unit} an epoch",
        f"  micro-batches  {parts} a step, of up to {_counted(plan.largest_micro_batch, 'sample')}",
    ]
    if run_plan.ranks > 1:
        lines.append(f"  processes      {run_plan.ranks}, each with a share of every batch; rank 0's is shown")
    if plan.lr_factor != 1:
        lines.append(f"  learning rate  × {plan.lr_factor:.3g}, as the batch is not the preset's")
    limits, peak = run_plan.limits, run_plan.predicted_peak_bytes
    if limits is None or peak is None:
        return lines
    lines.append(f"  memory         {_memory(limits.training.model)}")
    if plan.safety_factor is not None:
        lines.append(f"  tuned limit    {_tuned(limits)}")
        lines.append(f"  safety factor  {plan.safety_factor:.4g}: {run_plan.factor_reason}")
    if plan.safety_factor is not None and run_plan.aim != NO_AIM:
        lines.append(f"  target         {_target(run_plan)}")
    share = peak / limits.capacity_bytes
    width = _half_width(run_plan) / limits.capacity_bytes
    lines.append(f"  predicted peak {size_text(peak)}, {share:.1%} ± {width:.1%} of what is usable")
    return lines


def reference_model_lines(asked: Sequence[ReferenceModelPlan]) -> list[str]:
    """Writes how reference models are asked as aligned lines: each one's run, then what each way costs that was measured."""
    lines = []
    for plan in asked:
        lines.append(f"  {plan.role:<14} {plan.name}, {_ANSWERED[plan.placement]}{_asked_once(plan)}")
        lines += [f"    {cost.placement:<12} {_placement(cost)}" for cost in plan.costs]
    return lines


_ANSWERED: Final = {
    "device": "kept on the device",
    "cache": "its answers are read from disk",
    "offload": "kept on the host, where it computes",
}


def _asked_once(plan: ReferenceModelPlan) -> str:
    return "" if plan.peak_bytes is None else f" (asked once, with a peak of {size_text(plan.peak_bytes)})"


def _placement(cost: PlacementCost) -> str:
    memory = f"{size_text(cost.base_bytes)} + {cost.sample_bytes / 1024:.4g} KiB a sample"
    speed = f"{1 / cost.step_seconds:,.0f} samples/s"
    once = f" after {cost.once_seconds:.1f} s once" if cost.once_seconds else ""
    return f"{memory}, {speed}{once}" + (f", {cost.disk_bytes / 2**20:.3g} MiB on disk" if cost.disk_bytes else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def spread(fewest: int, most: int, between: str = " to ") -> str:
    """Writes a count that is not always the same; once, where it is."""
    return f"{most}" if fewest == most else f"{fewest}{between}{most}"


def _memory(model: CostModel) -> str:
    terms = [
        f"{coefficient / 1024:.4g} KiB · {feature.name}" + _PADDED.get(feature.padding, f" (max^{feature.padding})")
        for feature, coefficient in zip(model.features, model.coefficients, strict=True)
        if coefficient > 0
    ]
    error = f" (probes lie within {model.relative_residual:.1%})"
    return " + ".join([size_text(model.base_bytes), *terms]) + error


_PADDED: Final = {0: "", 1: " (padded)", 2: " (padded, squared)"}


def _target(run_plan: RunPlan) -> str:
    aim = run_plan.aim
    return f"a peak of {aim.share:.1%} of what is usable" + (f": {aim.reason}" if aim.reason else "")


def _tuned(limits: DeviceLimits) -> str:
    training = limits.training
    more = "; more was not needed" if training.capped else ""
    if not training.trials and not training.ooms:
        return f"{size_text(training.tuned_limit)} of batch is predicted to fit{more}"
    ran_out = f", {training.ooms} ran out of memory" if training.ooms else ""
    return f"{size_text(training.tuned_limit)} of batch fits ({_counted(training.trials, 'trial')}{ran_out}{more})"


def _half_width(run_plan: RunPlan) -> float:
    """Half-width of the peak's interval, the features sharing the cost as they do in the costliest probe."""
    assert run_plan.limits is not None, "a predicted peak has a cost model"
    return run_plan.limits.training.half_width(run_plan.plan.largest_cost)
