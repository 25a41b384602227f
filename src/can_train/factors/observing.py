"""Records an attempt in the factor store: the one place that fills in an observation, for runs and for the loops of
other frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from can_train.errors import DoesNotFitError, RankGoneError, StateError
from can_train.factors.observations import Device, Observation, Outcome, next_time, write_record
from can_train.memory.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from can_train.factors.store import FactorStore
    from can_train.fit.cost_model import SearchResult
    from can_train.fit.engine import Engine
    from can_train.fit.factor_rule import RememberedLimits, SafetyFactor
    from can_train.fit.run_plan import PredictedLimit, RunPlan
    from can_train.memory.meters import Meter


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """The plan of an attempt, as far as its memory goes; costs in bytes above base."""

    factor: SafetyFactor
    limit: SearchResult | None  # Of training, as a search found it; None without a search
    # Cost that `used` is a share of; None where a search stopped before memory ended it, since such a run does not show
    # where a share of its limit leads.
    whole_limit: float | None
    safe_limit: float
    predicted_peak_bytes: float | None
    logical_batch: int  # Samples
    largest_micro_batch: int  # Samples of the largest one that was planned
    largest_cost: float  # Of the costliest one that was planned
    binding_limit: str  # What decided the logical batch
    fixed_size: PredictedLimit | None = None  # Prediction for micro-batches whose size was given
    remembered: Mapping[str, RememberedLimits] = field(default_factory=dict)  # For later runs, by the phase's name

    @classmethod
    def of_plan(cls, run_plan: RunPlan, remembered: Mapping[str, RememberedLimits]) -> PlannedMemory:
        """Returns the figures of a run's plan for its fullest phase."""
        plan = run_plan.phase_plan
        is_searched = run_plan.limits is not None and plan.safety_factor is not None
        limit = run_plan.limits.training if run_plan.limits is not None and is_searched else None
        return cls(
            factor=run_plan.factor,
            limit=limit,
            whole_limit=None if limit is None or limit.capped else limit.tuned_limit,
            safe_limit=plan.rules.safe_limit,
            predicted_peak_bytes=run_plan.predicted_peak_bytes,
            logical_batch=plan.logical_batch,
            largest_micro_batch=plan.largest_micro_batch,
            largest_cost=min(plan.largest_cost, plan.rules.safe_limit),
            binding_limit=plan.binding_limit,
            fixed_size=run_plan.fixed_size,
            remembered=remembered,
        )

    def used(self, cost: float) -> float | None:
        """Returns the share of the tuned limit that a cost is; None where that limit is not known."""
        return None if self.whole_limit is None else cost / self.whole_limit


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """An attempt, by the fields that its records begin with."""

    run_id: str
    attempt: int
    rank: int
    key: str  # Configuration key
    device: Device
    start_time: str


def device_of(meter: Meter) -> Device:
    """Returns the record of a meter's device."""
    return Device(key=meter.key, name=meter.name, total_bytes=meter.total_bytes, driver=meter.driver)


def outcome_of(error: BaseException) -> Outcome:
    """Returns how an attempt ended that ended with an error."""
    if isinstance(error, DoesNotFitError) or is_out_of_memory(error):
        return "oom"
    # The failure of another rank says nothing of the device here.
    return "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit | RankGoneError) else "error"


def make_observation(
    begun: AttemptRecord,
    engines: Sequence[Engine],
    planned: PlannedMemory,
    outcome: Outcome,
    ooms: int,
    **settings: Any,
) -> Observation:
    """Makes the observation of an attempt that has ended.

    Args:
        begun: The attempt.
        engines: The engine of each phase; first the phase that filled the device most.
        planned: The plan that it trained by.
        outcome: How it ended.
        ooms: Out-of-memories that were rescued in the attempt.
        settings: Further fields: `end_time`, `size`, `fingerprint`, `times`, `policy`.
    """
    engine, limit = engines[0], planned.limit
    monitor, oom_cost = engine.monitor, engine.batcher.oom_cost
    cost_after_oom = 0.0 if oom_cost is None else engine.cost_after_rescue
    # A capped search does not know where a share of its limit leads.
    line = None if limit is None or limit.capped else limit
    predicted = planned.predicted_peak_bytes
    observed = Observation(
        **vars(begun),
        outcome=outcome,
        factor=planned.factor.value,
        factor_reason=planned.factor.reason,
        capacity_bytes=engine.meter.capacity_bytes,
        peak_allocated_bytes=monitor.peak_bytes or None,
        peak_reserved_bytes=monitor.peak_reserved_bytes or None,
        predicted_peak_bytes=None if predicted is None else round(predicted),
        predicted_base_bytes=None if line is None else round(line.model.base_bytes),
        predicted_full_bytes=None if line is None else round(line.peak_bytes(line.tuned_limit)),
        tuned_limit=None if limit is None else round(limit.tuned_limit),
        safe_limit=None if limit is None else round(planned.safe_limit),
        used=planned.used(engine.largest_cost or planned.largest_cost),
        logical_batch=planned.logical_batch,
        largest_micro_batch=max(engine.largest_micro_batch for engine in engines) or planned.largest_micro_batch,
        binding_limit=planned.binding_limit,
        limits=dict(planned.remembered),
        oom_used=None if oom_cost is None else planned.used(oom_cost),
        used_after_rescue=planned.used(cost_after_oom) if cost_after_oom else None,
        peak_bytes_after_rescue=engine.peak_bytes_after_rescue if cost_after_oom else None,
        # One in evaluation, or while other processes held the memory, shows nothing of the plan's limit.
        ooms_rescued=0 if oom_cost is None else ooms,
        allocator_retries=engine.meter.retries(),
        foreign_bytes=max(engine.batcher.foreign_bytes for engine in engines),
        torch_version=torch.__version__,
        **settings,
    )
    fixed = planned.fixed_size
    if fixed is None or oom_cost is None:
        return observed
    # Micro-batches whose size was given ran out of memory: the prediction for them is recorded.
    largest = fixed.largest_cost / max(fixed.tuned_limit, 1.0)
    oom_used = oom_cost / planned.largest_cost * largest
    # A limit that was not searched to its end does not tell of which share a cost is.
    shares: dict[str, Any] = {} if fixed.capped else {"used": largest, "oom_used": oom_used,
                                      "predicted_base_bytes": round(fixed.base_bytes),
                                      "predicted_full_bytes": round(fixed.full_bytes)}  # fmt: skip
    factor = fixed.factor
    return replace(observed, factor=factor.value, factor_reason=factor.reason, tuned_limit=round(fixed.tuned_limit),
                   safe_limit=round(factor.value * fixed.tuned_limit), **shares)  # fmt: skip


def write_observation(store: FactorStore, make: Callable[[str], Observation], notice: Callable[[str], object]) -> bool:
    """Writes the observation that `make` returns for its end time, and renews the export.

    Returns:
        Whether the observation was written: a failure to write it, or the export, of which `notice` is given a
        sentence, never stops a training.
    """
    try:
        write_record(store.state, make(next_time(store.state)))
    except (StateError, ValueError) as error:
        notice(f"This run teaches nothing. {error}")
        return False
    try:
        store.refresh_export()
    except StateError as error:
        notice(f"What this run taught is recorded, but {store.db_path.name} is out of date. {error}")
    return True
