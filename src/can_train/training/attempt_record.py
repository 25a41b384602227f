"""Records an attempt of a run for later runs to learn from: that it began, how it ended, how much memory it took, and
which limits were found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from can_train.errors import RUN_FAILED, CanTrainError, DoesNotFitError, OutOfMemoryDetails, StateError, from_os_error
from can_train.factors.observations import Observation, Started, next_time, write_record
from can_train.factors.observations import Outcome as AttemptOutcome
from can_train.factors.observing import (
    AttemptRecord,
    PlannedMemory,
    device_of,
    make_observation,
    outcome_of,
    write_observation,
)
from can_train.factors.store import FactorStore, memory_fingerprint, policy_options, store_of
from can_train.fit.cost_model import DeviceLimits, SearchResult
from can_train.fit.factor_rule import RememberedLimit, RememberedLimits
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.rescue import fatal_out_of_memory
from can_train.fit.run_plan import RunPlan
from can_train.fit.step_time import TimedSize
from can_train.io.records import this_host
from can_train.io.units import size_text
from can_train.memory.out_of_memory import obtainable_bytes
from can_train.training.distributed import RankFailedError

if TYPE_CHECKING:
    from can_train.training.session import Session


@contextmanager
def recording_observation(session: Session, *, may_go_on: bool = False) -> Iterator[None]:
    """Records the block as an attempt, for later runs to learn from: that it began, how it ended and how much memory it
    took. An out-of-memory leaves the block as `DoesNotFitError`.

    Args:
        session: The session of the attempt.
        may_go_on: Whether the caller records the end (`Session.record_end`) of an attempt that may go on as shards.
    """
    store = store_of(session.run)
    # The batcher of a resumed run also counts earlier attempts'.
    ooms_before = session.ooms_rescued
    begun, started = _record_begin(session, store)
    outcome: AttemptOutcome = "error"
    try:
        with fatal_out_of_memory(partial(_fatal_in_step, session)):
            yield
        outcome = "rescued" if session.ooms_rescued > ooms_before else "ok"
    except BaseException as error:
        outcome = outcome_of_attempt(error)
        if isinstance(error, DoesNotFitError) and not error.details.of_host and session.leak.held_bytes:
            _tell_leak(session, error)
        if isinstance(error, CanTrainError):
            error.exit_code = RUN_FAILED
        # A full disk, a file system that has gone: a job and the log need the remedy, too.
        if isinstance(error, OSError):
            error.filename = error.filename or str(session.folder.path)
            if (told := from_os_error(error)) is not None:
                told.exit_code = RUN_FAILED
                told.remedy += f"; the run goes on with can-train resume {session.folder.run_id}"
                raise told from error
        raise
    finally:
        # The rest of the record is for the report alone: the error, if there is one, says more.
        with suppress(OSError):
            session.steps.flush()
        if session.training.use_adaptive_batch_size_factor:
            ooms = session.ooms_rescued - ooms_before
            observation = _observation(session, begun, outcome, ooms)
            session.record_end = partial(_record_end, store, observation, started, session.reporter.notice)
            if not (may_go_on and session.may_go_on_as_shards):
                session.record_end(outcome)


def outcome_of_attempt(error: BaseException) -> AttemptOutcome:
    """Returns how an attempt ended by the error that ended it; one that another rank ended was interrupted."""
    return "interrupted" if isinstance(error, RankFailedError) else outcome_of(error)


def _record_end(
    store: FactorStore,
    observation: Observation,
    started: Path | None,
    notice: Callable[[str], object],
    outcome: AttemptOutcome,
) -> None:
    is_written = write_observation(
        store, lambda end_time: replace(observation, outcome=outcome, end_time=end_time), notice
    )
    # The observation says the same: else half of the files that are listed for years would say nothing.
    if is_written and started is not None:
        started.unlink(missing_ok=True)


def _record_begin(session: Session, store: FactorStore) -> tuple[AttemptRecord, Path | None]:
    """Records that an attempt has begun; returns it with the record's file, or None where it was not written."""
    attempt = session.ranks.on_rank0(lambda: session.folder.attempts.current)
    begun = AttemptRecord(run_id=session.folder.run_id, attempt=attempt, rank=session.ranks.rank, key=session.run.key,
                          device=device_of(session.meter), start_time=next_time(store.state))  # fmt: skip
    if session.training.use_adaptive_batch_size_factor:
        try:
            return begun, write_record(store.state, Started(**vars(begun), host=this_host(), pid=os.getpid()))
        except (StateError, ValueError) as error:
            session.reporter.notice(f"This run teaches nothing. {error}")
    return begun, None


def _fatal_in_step(session: Session, error: BaseException) -> DoesNotFitError:
    meter, details = session.meter, OutOfMemoryDetails(should_fit=True)
    obtainable = min(obtainable_bytes(error), meter.available_bytes())
    session.foreign_bytes = max(round(meter.capacity_bytes - obtainable), 0)
    step, resume = session.progress.step, f"can-train resume {session.folder.run_id}"
    if not session.in_optimizer_step:
        largest = session.engine.run_plan.phase_plan.largest_micro_batch
        return DoesNotFitError(
            "Memory ran out where nothing could be undone, in code outside the micro-batches",
            value=f"step {step}, micro-batches of up to {largest} samples",
            remedy=f"The run goes on from its last checkpoint: {resume}",
            details=details,
        )
    engine, smaller = session.engine, "take --optimizer sgd, which needs less, or a larger device"
    state_bytes, planned_bytes = (
        engine.optimization.device_state_bytes, engine.planner.explorer.optimizer_memory().state_bytes
    )  # fmt: skip
    state = f"its state takes {size_text(state_bytes)} by now, {size_text(planned_bytes)} were planned"
    if session.leave_state_next_time():
        remedy = f"The run goes on from its last checkpoint, with that state on the host: {resume}. Or {smaller}"
    else:
        on_host = engine.batcher.ladder.rung.offload_optimizer or meter.is_host
        remedy = smaller[0].upper() + smaller[1:] if on_host else f"Train with --fit offload-optimizer, or {smaller}"
    return DoesNotFitError("Memory ran out in the optimizer's step, which cannot be undone",
                           value=f"step {step}, {state}", remedy=remedy, details=details)  # fmt: skip


def _tell_leak(session: Session, error: DoesNotFitError) -> None:
    """Says first in an error that memory is held from step to step: no other remedy helps for long."""
    leak = session.leak
    held = f"{size_text(leak.held_bytes)} of {size_text(session.meter.capacity_bytes)}, more with each step since step"
    error.value = f"{held} {leak.first_step}; {error.rule[0].lower()}{error.rule[1:]}: {error.value}"
    error.rule = "Something holds memory from step to step that no plan counts"
    error.remedy = (
        "Look for tensors that outlive their step: a list of losses without detach(), a cache. A larger device, or "
        f"can-train resume {session.folder.run_id}, only delays the end"
    )
    # A process that goes on from the checkpoint has that memory again.
    error.details = replace(error.details, held_bytes=leak.held_bytes, one_sample=False, should_fit=True, cards="")


def _observation(session: Session, begun: AttemptRecord, outcome: AttemptOutcome, ooms: int) -> Observation:
    """Returns what the attempt teaches, without its end time."""
    run, fullest = session.run, session.fullest
    planned = PlannedMemory.of_plan(fullest.run_plan, _found_limits(session))
    engines = [fullest, *(engine for engine in session.engines if engine is not fullest)]
    made = make_observation(begun, engines, planned, outcome, ooms, end_time=begun.start_time, size=run.size,
                            fingerprint=memory_fingerprint(run), times=_times(session),
                            policy={"name": run.factor.policy, "options": policy_options(run)},
                            oom_elsewhere=outcome == "oom" and not session.ran_out_in_training,
                            leaked_bytes=session.leak.held_bytes)  # fmt: skip
    return replace(made, foreign_bytes=max(made.foreign_bytes, session.foreign_bytes))


def _times(session: Session) -> dict[str, list[TimedSize]]:
    """Returns the times of micro-batches by the names of the phases; none where no other size was tried."""
    times = {engine.phase.name: engine.timer.sizes() for engine in session.engines}
    return {name: sizes for name, sizes in times.items() if sizes}


def _found_limits(session: Session) -> dict[str, RememberedLimits]:
    """Returns the limits of all phases, for a later plan to confirm; none where any search was cut short."""
    # A search runs while the data are on the host.
    plans = session.own_plan.without_data("a later search runs without them").phases
    phases = [phase for plan in plans if plan.limits for phase in (plan.limits.training, plan.limits.evaluation)]
    if session.is_thawed or not all(phase.trials and not phase.untried for phase in phases):
        return {}
    return {plan.phase: _remembered(plan, plan.limits, engine.batcher)
            for plan, engine in zip(plans, session.engines, strict=True) if plan.limits}  # fmt: skip


def _remembered(plan: RunPlan, limits: DeviceLimits, batcher: MicroBatcher) -> RememberedLimits:
    """Returns the limits of a phase, and the rung that a later run begins on, which is the rung in force at the end."""

    def known(phase: SearchResult) -> RememberedLimit:
        return RememberedLimit(tuned_limit=phase.tuned_limit, capped=phase.capped, base_bytes=phase.model.base_bytes,
                          measured_ratio=phase.measured_ratio)  # fmt: skip

    rung, first = batcher.ladder.rung, plan.other_rung
    if first is not None and rung == plan.rung and rung.goes_further(first.rung):
        # The rung was chosen for its time: a later run compares it anew with the first one that fits.
        limits, rung = first.limits, first.rung
        return RememberedLimits(training=known(limits.training), evaluation=known(limits.evaluation), **asdict(rung))
    return RememberedLimits(training=known(limits.training), evaluation=known(limits.evaluation),
                            climbed=rung != plan.rung, **asdict(rung))  # fmt: skip
