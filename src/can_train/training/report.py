"""Plans as text: aligned lines, rows of a table, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from can_train.fit.factor_rule import NO_AIM, STATIC
from can_train.io.units import count_range, counted, size_text

if TYPE_CHECKING:
    from can_train.fit.cost_model import DeviceLimits, SearchResult
    from can_train.fit.run_plan import RunPlan
    from can_train.fit.step_time import MicroBatchChoice
    from can_train.training.dry_run import CardPlan
    from can_train.training.reference_models import ReferenceModelPlan

_REASONS: Final = {
    "requested": "as asked for",
    "preset": "the preset's batch",
    "memory": "as large as fits",
    "dataset": "the whole data set",
    "min_steps": "a larger one would leave too few steps an epoch",
}

_SHOWN_SHARE: Final = 1e-4  # of a mean sample's cost; of less, a coefficient is noise of the fit
_PADDING: Final = {0: "", 1: " (padded)", 2: " (padded, squared)"}

_PLACEMENTS: Final = {
    "device": "on the device",
    "cache": "outputs are read from disk",
    "offload": "on the host, which computes its outputs",
}

RECORDED: Final = "The prediction is corrected by batches recorded as CUDA would run them."
_FACTOR: Final = "factor"
_LARGEST_PARTS: Final = 5  # that a plan and an out-of-memory error name
_RUNG: Final = "fits by"
_COLUMNS: Final = (
    "device", "usable", _FACTOR, "batch", "micro-batches", _RUNG, "steps", "predicted peak", "decided by"
)  # fmt: skip


def plan_summary(run_plan: RunPlan, device_key: str, capacity_bytes: int) -> list[str]:
    """Writes the main facts of a plan: batch, micro-batches and memory, a sentence each."""
    plan, peak = run_plan.phase_plan, run_plan.fullest.predicted_peak_bytes
    steps = count_range(plan.fewest_steps_per_epoch, plan.steps_per_epoch)
    unit = "step" if plan.steps_per_epoch == 1 else "steps"
    batch = f"{counted(plan.logical_batch // plan.batches_per_step, 'sample')}"
    reason = _REASONS[plan.binding_limit]
    if plan.batches_per_step == 1:
        batch = f"{batch} a step ({reason})"
    else:
        batch = f"{batch} a batch ({reason}), {plan.batches_per_step} batches a step"
    lines = [f"Plan: {batch}, {steps} {unit} an epoch."]
    if plan.lr_factor != 1:
        lines.append(f"The learning rate is the preset's × {plan.lr_factor:.3g}, because the batch is another one.")
    lines += map(_parts_text, run_plan.phases)
    choices = [phase.micro_batch for phase in run_plan.phases if phase.micro_batch is not None]
    lines += [_fastest_text(choice) for choice in choices if not choice.is_largest]
    lines += dict.fromkeys(_rung_text(phase) for phase in run_plan.phases if phase.rung)
    lines += dict.fromkeys(_tried_rung_text(phase) for phase in run_plan.phases if phase.tries_other_rung)
    if plan.safety_factor is not None and run_plan.factor.reason == STATIC:
        lines.append(f"The safety factor is {plan.safety_factor:g}, as set: nothing is learned.")
    if peak is not None:
        share = f"{peak / capacity_bytes:.0%} of the {size_text(capacity_bytes)} of {device_key}"
        limits = run_plan.fullest.limits
        lines.append(f"Memory is predicted to peak at {size_text(peak)}, {share}.")
        if limits is not None and limits.recorded:
            lines.append(RECORDED)
    return lines


def _parts_text(run_plan: RunPlan) -> str:
    """Says in how many micro-batches a step is computed, or a phase of it."""
    plan = run_plan.phase_plan
    owner = f"The share of each of {run_plan.ranks} processes" if run_plan.ranks > 1 else "A step"
    if run_plan.phase:
        owner = f"Phase {run_plan.phase}: {owner[0].lower()}{owner[1:]}"
    if plan.most_parts == 1:
        return f"{owner} is computed at once, in one micro-batch."
    parts = f"{count_range(plan.fewest_parts, plan.most_parts)} micro-batches"
    splits = f" (accumulation_splits {plan.rules.splits})" if plan.rules.splits > 1 else ""
    return f"{owner} is computed in {parts} of up to {counted(plan.largest_micro_batch, 'sample')}{splits}."


def _fastest_text(choice: MicroBatchChoice) -> str:
    """Says why micro-batches are not the largest of the first rung that fits."""
    tried = f"measured in {counted(choice.timed_steps, 'step')} of {counted(choice.timed_runs, 'run')}"
    sizes = f"{choice.samples:.3g} samples on average against {choice.largest_samples:.3g} that fit"
    if choice.is_other_rung:
        sizes = f"{choice.samples:.3g} samples on average, against {choice.largest_samples:.3g} by {choice.first_rung}"
        return f"Larger micro-batches by {choice.rung} are faster: {sizes}, {choice.gain:.0%} less time ({tried})."
    return f"Smaller micro-batches are faster: {sizes}, {choice.gain:.0%} less time ({tried})."


def _tried_rung_text(run_plan: RunPlan) -> str:
    """Says why some steps are computed on another rung."""
    assert run_plan.other_rung is not None, "some steps try it"
    assert run_plan.micro_batch is not None, "some steps try it"
    rung, choice = run_plan.other_rung.rung, run_plan.micro_batch
    trials = [trial for trial in choice.trials if trial.rung == rung.timed_as]
    steps, most = counted(sum(trial.steps for trial in trials), "step"), max(trial.samples for trial in trials)
    sizes = f"micro-batches of up to {most:.3g} samples"
    return f"To learn which is faster, {steps} of the run try {sizes}, where {rung.describe()}."


def _trials_text(choice: MicroBatchChoice) -> str:
    """Says which size of micro-batches was chosen, and which sizes some steps try."""
    size, largest = f"{choice.samples:.3g} samples on average", f"the largest that fit, {choice.largest_samples:.3g}"
    if choice.is_other_rung:
        size = f"{size} ({choice.rung})"
        largest += f" ({choice.first_rung})"
    if choice.is_largest:
        chosen = f"{size}: no other size was measured to be faster" if choice.timed_runs else f"{size}, {largest}"
    else:
        chosen = f"{size}: {choice.gain:.1%} ± {choice.deviation:.1%} less time than {largest}"
    steps = sum(trial.steps for trial in choice.trials)
    sizes = ", ".join(f"{trial.samples:.3g}{'' if trial.rung == choice.rung else f' ({trial.rung})'}"
                      for trial in choice.trials)  # fmt: skip
    return f"{chosen}; {counted(steps, 'step')} of the run try {sizes}" if steps else chosen


def _rung_text(run_plan: RunPlan) -> str:
    """Says how far a step goes to fit, beyond splitting."""
    effects = []
    if run_plan.state_on_host_bytes:
        effects.append(f"{size_text(run_plan.state_on_host_bytes)} are copied to the device and back in each step")
    if run_plan.rung_saves_bytes:
        effects.append(f"a sample takes up to {size_text(run_plan.rung_saves_bytes)} less")
    if run_plan.rung_longer:
        effects.append(f"a step about {run_plan.rung_longer:.0%} longer")
    if run_plan.on_host_bytes:
        effects.append(f"the host needs {size_text(run_plan.on_host_bytes)} for it")
    told = f": {', '.join(effects)}" if effects else ""
    choice = run_plan.micro_batch
    reason = "So that it fits"
    if choice is not None and choice.is_other_rung:
        reason = "So that it is faster"
    elif run_plan.rung_is_asked:
        reason = "As asked for"
    return f"{reason}, {run_plan.rung.describe()}{told}."


def plan_details(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Writes the basis of a plan, phase by phase: names and texts; none where nothing was measured."""
    lines = []
    for phase in run_plan.phases:
        plan, limits, peak = phase.phase_plan, phase.limits, phase.predicted_peak_bytes
        if limits is None or peak is None:
            continue
        lines += [("phase", phase.phase)] if phase.phase else []
        lines.append(("memory", _cost_model_text(limits.training)))
        if phase.micro_batch:
            lines.append(("micro-batch", _trials_text(phase.micro_batch)))
        if phase.rung:
            name = "faster by" if phase.micro_batch is not None and phase.micro_batch.is_other_rung else "fits by"
            lines.append((name, f"{phase.rung.name}: {phase.rung.describe()}"))
        if plan.safety_factor is not None:
            lines.append(("tuned limit", _tuned_limit_text(limits)))
            lines.append(("safety factor", f"{plan.safety_factor:.4g}: {phase.factor.reason}"))
            if (aim := phase.factor.aim) != NO_AIM:
                reason = f": {aim.reason}" if aim.reason else ""
                lines.append(("target", f"a peak of {aim.share:.1%} of what is usable{reason}"))
        share = peak / limits.capacity_bytes
        least, most = (end / limits.capacity_bytes for end in limits.peak_interval(peak, plan.largest_cost))
        ends = f"{share - least:.1%}", f"{most - share:.1%}"
        around = f"± {ends[1]}" if ends[0] == ends[1] else f"({least:.1%} to {most:.1%})"
        lines.append(("predicted peak", f"{size_text(peak)}, {share:.1%} {around} of what is usable"))
    if (data := run_plan.data).num_bytes:
        where = "live on the device" if data.on_device else "stay on the host"
        lines.append(("data", f"{size_text(data.num_bytes)} {where}: {data.reason}"))
    return lines


def detail_lines(run_plan: RunPlan, reference_models: Sequence[ReferenceModelPlan] = ()) -> list[str]:
    """Writes the basis of a plan as aligned lines, below it where reference models run: each one's run, then the
    measured cost of each placement.
    """
    lines = [f"  {name:<14} {text}" for name, text in plan_details(run_plan)]
    for plan in reference_models:
        once = "" if plan.peak_bytes is None else f" (run once, with a peak of {size_text(plan.peak_bytes)})"
        lines.append(f"  {plan.role:<14} {plan.name}, {_PLACEMENTS[plan.placement]}{once}")
        for cost in plan.costs:
            memory = f"{size_text(cost.base_bytes)} + {cost.sample_bytes / 1024:.4g} KiB per sample"
            speed = f"{1 / cost.step_seconds:,.0f} samples/s"
            filled = f" after {cost.once_seconds:.1f} s once" if cost.once_seconds else ""
            disk = f", {cost.disk_bytes / 2**20:.3g} MiB on disk" if cost.disk_bytes else ""
            lines.append(f"    {cost.placement:<12} {memory}, {speed}{filled}{disk}")
    return lines


def dry_lines(dry: CardPlan, *, details: bool, parts: Sequence[str] = ()) -> list[str]:
    """Writes the plan of a training that fits as lines, those after `data_line`, with its warnings below; `parts` are
    the lines of the largest parts of its peak.
    """
    assert dry.plan is not None, "what does not fit has an error in place of a plan"
    target = dry.target
    lines = plan_summary(dry.plan, target.label, target.capacity_bytes)
    if details:
        lines += [
            f"  device         {target.name}, {size_text(target.total_bytes)}: {target.source}",
            *(f"    less         {size_text(use.num_bytes)} {use.what}" for use in target.subtracted),
            *detail_lines(dry.plan, dry.reference_models),
            *(f"  {line}" for line in parts),
        ]
    return [*lines, *(f"note: {text}" for text in dry.warnings)]


def data_line(key: str, num_samples: int, note: str) -> str:
    """Writes the first line of a plan: how much data there is, and how that is known."""
    samples = "sample" if num_samples == 1 else "samples"
    return f"{key}: {num_samples:,} training {samples}" + (f", {note}" if note else "")


def dry_table(plans: Sequence[CardPlan], *, details: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Writes the plans for several devices as a table; returns its headings and its rows."""
    rows = []
    for dry in plans:
        usable = size_text(dry.target.capacity_bytes)
        if dry.plan is None:
            rows.append((dry.target.label, usable, *("–",) * (len(_COLUMNS) - 3), "does not fit"))
            continue
        plan, peak = dry.plan.fullest.phase_plan, dry.plan.fullest.predicted_peak_bytes
        parts = [phase.phase_plan for phase in dry.plan.phases]
        rows.append((
            dry.target.label,
            usable,
            "–" if plan.safety_factor is None else f"{plan.safety_factor:.3f}",
            str(plan.logical_batch),
            count_range(min(each.fewest_parts for each in parts), max(each.most_parts for each in parts), "-"),
            dry.plan.fullest.rung.name,
            count_range(plan.fewest_steps_per_epoch, plan.steps_per_epoch, "-"),
            "–" if peak is None else f"{peak / dry.target.capacity_bytes:.1%}",
            plan.binding_limit,
        ))  # fmt: skip
    is_split = not any(dry.plan is not None and dry.plan.fullest.rung for dry in plans)
    hidden = {*(() if details else (_FACTOR,)), *((_RUNG,) if is_split else ())}
    shown = [index for index, name in enumerate(_COLUMNS) if name not in hidden]
    return tuple(_COLUMNS[index] for index in shown), [tuple(row[index] for index in shown) for row in rows]


def dry_json(config: Mapping[str, Any], key: str, plans: Sequence[CardPlan]) -> dict[str, Any]:
    """Makes plain values of plans; sizes are bytes, peaks also shares of the capacity."""
    first, objects = plans[0], []
    for dry in plans:
        target, error = dry.target, dry.error
        objects.append({
            "target": {
                "key": target.key,
                "count": target.count,
                "name": target.name,
                "total_bytes": target.total_bytes,
                "subtracted": [{"what": use.what, "bytes": use.num_bytes} for use in target.subtracted],
                "capacity_bytes": target.capacity_bytes,
                "source": target.source,
            },
            "fits": dry.fits,
            "error": None if error is None else {"rule": error.rule, "value": error.value, "remedy": error.remedy},
            "warnings": dry.warnings,
            "reference_models": [asdict(plan) for plan in dry.reference_models],
        })  # fmt: skip
        if dry.plan is not None:
            objects[-1] |= _plan_json(dry.plan) | {"data": asdict(dry.plan.data)}
            if dry.plan.later:
                objects[-1]["phases"] = [{"phase": phase.phase, **_plan_json(phase)} for phase in dry.plan.phases]
    data = {"num_train_samples": first.num_samples, "is_estimate": bool(first.sample_note), "note": first.sample_note}
    return {"config_key": key, "data": data, "plans": objects, "config": dict(config)}


def _plan_json(run_plan: RunPlan) -> dict[str, Any]:
    plan, limits, peak = run_plan.phase_plan, run_plan.limits, run_plan.predicted_peak_bytes
    searched = plan.safety_factor is not None
    decision = {
        "logical_batch": plan.logical_batch,
        "binding_limit": plan.binding_limit,
        "steps_per_epoch": plan.steps_per_epoch,
        "fewest_steps_per_epoch": plan.fewest_steps_per_epoch,
        "micro_batches": {
            "fewest": plan.fewest_parts,
            "most": plan.most_parts,
            "largest_samples": plan.largest_micro_batch,
            "largest_cost_bytes": round(plan.largest_cost),
            "accumulation_splits": plan.rules.splits,
        },
        "largest_batch": run_plan.room_samples,
        "fastest": None if run_plan.micro_batch is None else _choice_json(run_plan.micro_batch),
        "rung": {
            "name": run_plan.rung.name,
            "recompute": list(run_plan.rung.recompute),
            "offload": run_plan.rung.offload,
            "offload_optimizer": run_plan.rung.offload_optimizer,
            "state_on_host_bytes": run_plan.state_on_host_bytes or None,
            "saved_on_host_bytes": run_plan.saved_on_host_bytes or None,
            "ranks": run_plan.rung.ranks,
            "saves_bytes": run_plan.rung_saves_bytes or None,
            "longer": run_plan.rung_longer or None,
        },
        "lr_factor": plan.lr_factor,
        "safety_factor": plan.safety_factor,
        "safety_factor_reason": run_plan.factor.reason if searched else "",
        "target_peak_pct": run_plan.factor.aim.share if searched and run_plan.factor.aim != NO_AIM else None,
        "target_reason": run_plan.factor.aim.reason,
    }
    if limits is None or peak is None:
        unknown = (
            "cost_model", "tuned_limit_bytes", "safe_limit_bytes", "predicted_peak_bytes", "whole_batch_peak_bytes",
        )  # fmt: skip
        return {**decision, **dict.fromkeys(unknown)}
    model = limits.training.model
    coefficients = zip(model.features, model.coefficients, strict=True)
    return {
        **decision,
        "cost_model": {
            "base_bytes": round(model.base_bytes),
            "bytes_per_unit": {feature.name: coefficient for feature, coefficient in coefficients},
            "relative_error": model.relative_residual,
            "explains": model.explains,
        },
        "tuned_limit_bytes": round(limits.training.tuned_limit) if searched else None,
        "tuned_limit_is_capped": limits.training.capped,
        "tuned_limit_confirmed_from": limits.earlier_run if limits.training.confirmed else None,
        "untried_bytes": round(limits.training.untried) or None,
        "safe_limit_bytes": round(plan.rules.safe_limit) if searched else None,
        "predicted_peak_bytes": round(peak),
        "predicted_peak_interval_bytes": [round(end) for end in limits.peak_interval(peak, plan.largest_cost)],
        "predicted_peak_pct": peak / limits.capacity_bytes,
        "whole_batch_peak_bytes": round(run_plan.whole_batch_peak_bytes or 0),
        "is_recorded": limits.recorded,
        "optimizer_peak_bytes": limits.optimizer_peak_bytes,
    }


def _choice_json(choice: MicroBatchChoice) -> dict[str, Any]:
    return {
        "samples": choice.samples,
        "largest_samples": choice.largest_samples,
        "is_largest": choice.is_largest,
        "rung": choice.rung,
        "first_rung": choice.first_rung,
        "gain": choice.gain,
        "gain_deviation": choice.deviation,
        "predicted_seconds_per_sample": choice.seconds,
        "timed_steps": choice.timed_steps,
        "timed_runs": choice.timed_runs,
        "trials": [{"samples": trial.samples, "rung": trial.rung, "steps": trial.steps} for trial in choice.trials],
    }


def part_lines(plain: Mapping[str, Any]) -> list[str]:
    """Writes the largest parts of an explanation, as `Explanation.to_plain` has it, as lines."""
    largest = plain["parts"][:_LARGEST_PARTS]
    sizes = [size_text(part["num_bytes"]) for part in largest]
    width = max(map(len, sizes), default=0)
    samples, peak = counted(plain["samples"], "sample"), size_text(plain["peak_bytes"])
    whole = " with the whole model" if plain.get("ranks", 1) > 1 else ""
    return [
        f"The costliest micro-batch ({samples}{whole}) peaks at {peak}. Its largest parts:",
        *(f"  {size:>{width}}  {_part_text(part)}" for size, part in zip(sizes, largest, strict=True)),
        *_rung_lines(plain.get("rungs", {})),
    ]


def _rung_lines(peaks: Mapping[str, float]) -> list[str]:
    sizes = [size_text(peak) for peak in peaks.values()]
    width = max(map(len, sizes), default=0)
    lines = [f"  {size:>{width}}  {name}" for name, size in zip(peaks, sizes, strict=True)]
    heading = "On the other rungs of --fit auto its tensors are predicted to take (pages of the allocator add to it):"
    return [heading, *lines] if lines else []


def _part_text(part: Mapping[str, Any]) -> str:
    made_by = " ".join(filter(None, (part["module"], part["operation"])))
    return f"{part['kind']}: {made_by}" if made_by else str(part["kind"])


def _cost_model_text(limit: SearchResult) -> str:
    model, shares = limit.model, limit.mean_shares
    if not model.grows:
        return f"{size_text(model.base_bytes)}, whatever the batch of a probe"
    terms = [
        f" {'−' if coefficient < 0 else '+'} {abs(coefficient) / 1024:.4g} KiB · {feature.name}"
        + _PADDING.get(feature.padding, f" (max^{feature.padding})")
        for feature, coefficient, share in zip(model.features, model.coefficients, shares, strict=True)
        if abs(share) > _SHOWN_SHARE * sum(shares)
    ]
    return "".join([size_text(model.base_bytes), *terms]) + f" (probes lie within {model.relative_residual:.1%})"


def _tuned_limit_text(limits: DeviceLimits) -> str:
    training = limits.training
    more = "; more was not needed" if training.capped else ""
    if training.untried:
        larger = training.text(training.untried) if training.model.grows else "a larger one"
        more = f"; {larger} was not tried for lack of time"
    if not training.trials and not training.ooms:
        return f"a batch of {training.text(training.tuned_limit)} is predicted to fit{more}"
    if training.confirmed:
        source = f"the tuned limit of run {limits.earlier_run}, confirmed by one trial"
        return f"a batch of {training.text(training.tuned_limit)} fits ({source}{more})"
    if training.recorded_share:
        source = f"recorded, confirmed by one trial: {training.recorded_share:.1%} of the recorded peak"
        return f"a batch of {training.text(training.tuned_limit)} fits ({source}{more})"
    ran_out = f", {training.ooms} ran out of memory" if training.ooms else ""
    return f"a batch of {training.text(training.tuned_limit)} fits ({counted(training.trials, 'trial')}{ran_out}{more})"
