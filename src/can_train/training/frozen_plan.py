"""The plan that a run goes by: resolved once, frozen in the run's folder, and taken up again by every later attempt.
The ranks of a run have one logical batch between them, and each its own limits.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from can_train.engine.ranks import Ranks
from can_train.errors import CheckpointError
from can_train.state.atomic import write_json_atomic
from can_train.state.factor_store import FactorChoice
from can_train.training.factor_rule import FactorRule
from can_train.training.planning import Planner, RunPlan, still_fits


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
    frozen = ranks.together(lambda: _frozen_plan(path))
    settled = _settled(planner, ranks, factor, frozen)
    own = settled[ranks.rank]
    if own != frozen[ranks.rank]:
        # All of them, or an attempt that is killed here leaves some: the next one makes the others again.
        write_json_atomic(path, own.to_plain())
    elif factor.after_oom and factor.known is not None:
        own = _within(own, factor.known)
    return ranks.together(lambda: own)


def _settled(planner: Planner, ranks: Ranks, factor: FactorRule, frozen: Sequence[RunPlan | None]) -> list[RunPlan]:
    """Takes up each rank's plan, or makes it; rank 0's decides the logical batch."""
    first = frozen[0]
    if first is None:
        plans = ranks.together(lambda: planner.make(factor))
        return ranks.together(lambda: planner.common(plans, plans[ranks.rank], factor))
    return ranks.together(lambda: _taken_up(planner, factor, first, frozen[ranks.rank]))


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
