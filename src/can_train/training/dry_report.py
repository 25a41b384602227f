"""What a dry run says, as text and as plain values: every figure of the plan by name."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from can_train.errors import DoesNotFitError
from can_train.policy.device_limits import DeviceLimits
from can_train.policy.first_factor import ANY_PEAK
from can_train.policy.sizes import size_text
from can_train.training.dry_run import DryPlan
from can_train.training.planning import RunPlan
from can_train.training.report import companion_lines, plan_lines, spread

COLUMNS = ("device", "usable", "factor", "batch", "micro-batches", "steps", "predicted peak", "binding limit")
"""Headings of the table over several devices."""


def dry_lines(key: str, dry: DryPlan) -> list[str]:
    """Writes a plan as aligned lines, its warnings below.

    Args:
        key: Configuration key.
        dry: The plan.

    Raises:
        DoesNotFitError: The training does not fit on the device.
    """
    if dry.plan is None:
        raise dry.error or AssertionError("a target without a plan has a reason")
    head, *lines = plan_lines(dry.plan, dry.target.key, dry.target.capacity_bytes)
    notes = [f"note: {text}" for text in warnings_of(dry)]
    return [head, f"  key            {key}", *_device_lines(dry), *lines, *companion_lines(dry.asked), *notes]


def warnings_of(dry: DryPlan) -> list[str]:
    """Lists what the user should know, as sentences."""
    if dry.plan is None:
        return []
    peak = dry.plan.predicted_peak_bytes or 0.0
    beyond = ["The predicted peak is more than what is usable: memory would run out"]
    too_much = beyond if peak > dry.target.capacity_bytes else []
    timed = any(asked.costs for asked in dry.asked) and not dry.target.key.startswith("cpu-")
    here = ["Samples a second were measured on this machine's processors; the run measures them on its device"]
    return [*too_much, *dry.plan.plan.notices, *dry.plan.notices, *(here if timed else [])]


def data_text(dry: DryPlan) -> str:
    """Says how much data there is, and how that is known."""
    return f"{dry.num_samples:,} training samples" + (f", {dry.sample_note}" if dry.sample_note else "")


def dry_row(dry: DryPlan) -> tuple[str, ...]:
    """Writes a plan as a row of the table over several devices."""
    usable = size_text(dry.target.capacity_bytes)
    if dry.plan is None:
        return (dry.target.key, usable, "–", "–", "–", "–", "–", "does not fit")
    plan = dry.plan.plan
    factor = "–" if plan.safety_factor is None else f"{plan.safety_factor:.3f}"
    parts = spread(plan.fewest_parts, plan.most_parts, "-")
    steps = spread(plan.fewest_steps_per_epoch, plan.steps_per_epoch, "-")
    peak = dry.plan.predicted_peak_bytes
    share = "–" if peak is None else f"{peak / dry.target.capacity_bytes:.1%}"
    figures = (str(plan.logical_batch), parts, steps, share, plan.binding_limit)
    return (dry.target.key, usable, factor, *figures)


def dry_json(config: Mapping[str, Any], key: str, plans: Sequence[DryPlan]) -> dict[str, Any]:
    """Makes plain values of a dry run; sizes are bytes, peaks also shares of the capacity."""
    first = plans[0]
    data = {"num_train_samples": first.num_samples, "is_estimate": bool(first.sample_note), "note": first.sample_note}
    return {"config_key": key, "data": data, "plans": [_plan_json(dry) for dry in plans], "config": dict(config)}


def _device_lines(dry: DryPlan) -> list[str]:
    target = dry.target
    lines = [f"  device         {target.name}, {size_text(target.total_bytes)}: {target.source}"]
    lines += [f"    less         {size_text(taken.num_bytes)} {taken.what}" for taken in target.taken]
    return [*lines, f"  data           {data_text(dry)}"]


def _plan_json(dry: DryPlan) -> dict[str, Any]:
    return {
        "target": {
            "key": dry.target.key,
            "name": dry.target.name,
            "total_bytes": dry.target.total_bytes,
            "subtracted": [{"what": taken.what, "bytes": taken.num_bytes} for taken in dry.target.taken],
            "capacity_bytes": dry.target.capacity_bytes,
            "source": dry.target.source,
        },
        "fits": dry.plan is not None,
        "error": None if dry.error is None else _error_json(dry.error),
        "warnings": warnings_of(dry),
        "companions": [asdict(plan) for plan in dry.asked],
        **({} if dry.plan is None else {**_decision_json(dry.plan), **_memory_json(dry.plan)}),
    }


def _error_json(error: DoesNotFitError) -> dict[str, Any]:
    return {"rule": error.rule, "value": error.value, "remedy": error.remedy}


def _decision_json(run_plan: RunPlan) -> dict[str, Any]:
    plan, searched = run_plan.plan, run_plan.plan.safety_factor is not None
    return {
        "logical_batch": plan.logical_batch,
        "binding_limit": plan.binding_limit,
        "steps_per_epoch": plan.steps_per_epoch,
        "fewest_steps_per_epoch": plan.fewest_steps_per_epoch,
        "micro_batches": {
            "fewest": plan.fewest_parts,
            "most": plan.most_parts,
            "largest_samples": plan.largest_micro_batch,
            "largest_cost_bytes": round(plan.largest_cost),
        },
        "lr_factor": plan.lr_factor,
        "safety_factor": plan.safety_factor,
        "safety_factor_reason": run_plan.factor_reason if searched else "",
        "target_peak_pct": run_plan.aim.share if searched and run_plan.aim != ANY_PEAK else None,
        "target_reason": run_plan.aim.why,
    }


def _memory_json(run_plan: RunPlan) -> dict[str, Any]:
    limits, peak = run_plan.limits, run_plan.predicted_peak_bytes
    if limits is None or peak is None:
        return {"cost_model": None, "tuned_limit_bytes": None, "safe_limit_bytes": None, "predicted_peak_bytes": None}
    half_width = limits.training.half_width(run_plan.plan.largest_cost)
    searched = run_plan.plan.safety_factor is not None
    return {
        "cost_model": _model_json(limits),
        "tuned_limit_bytes": round(limits.training.tuned_limit) if searched else None,
        "tuned_limit_is_capped": limits.training.capped,
        "safe_limit_bytes": round(run_plan.plan.rules.safe_limit) if searched else None,
        "predicted_peak_bytes": round(peak),
        "predicted_peak_interval_bytes": [round(peak - half_width), round(peak + half_width)],
        "predicted_peak_pct": peak / limits.capacity_bytes,
        "optimizer_peak_bytes": limits.optimizer_peak_bytes,
    }


def _model_json(limits: DeviceLimits) -> dict[str, Any]:
    model = limits.training.model
    return {
        "base_bytes": round(model.base_bytes),
        "bytes_per_unit": {
            feature.name: coefficient for feature, coefficient in zip(model.features, model.coefficients, strict=True)
        },
        "relative_error": model.relative_residual,
        "explains": model.explains,
    }
