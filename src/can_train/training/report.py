"""What a run says of its plan, as text."""

from typing import Final

from can_train.memory.meters import Meter
from can_train.policy.plan import Plan
from can_train.state.factor_store import FactorChoice

_WHY: Final = {
    "requested": "as asked for",
    "memory": "memory decides",
    "dataset": "the data set has no more",
    "min_steps": "a larger one would leave too few steps an epoch",
}


def plan_lines(plan: Plan, meter: Meter, factor: FactorChoice) -> list[str]:
    """Writes a plan as aligned lines."""
    sizes = "–".join(dict.fromkeys(str(size) for size in (plan.micro_batches[-1], plan.micro_batches[0])))
    lines = [
        f"plan for {meter.key} ({meter.capacity_bytes / 2**30:.1f} GiB usable):",
        f"  logical batch  {plan.logical_batch} ({_WHY[plan.binding_limit]}), {plan.steps_per_epoch} steps an epoch",
        f"  micro-batches  {len(plan.micro_batches)} of {sizes}, limit {plan.safe_limit}",
    ]
    if plan.tuned_limit is not None:
        more = " (more was not needed)" if plan.search_capped else ""
        lines.append(f"  largest tried  {plan.tuned_limit} fits{more}")
        lines.append(f"  safety factor  {factor.factor:.4g}: {factor.reason}")
    return lines
