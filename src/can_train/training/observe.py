"""What a run leaves to later ones: an observation of each attempt. A failure to write one never stops a training."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from can_train.config.resolved import ResolvedRun, state_dir
from can_train.errors import DoesNotFitError, OutOfMemoryDetails, StateError
from can_train.factors.observations import Device, Observation, Outcome, Started, write_observation, write_started
from can_train.factors.resolve import memory_fingerprint, policy_options, store_of
from can_train.factors.store import next_time
from can_train.fit.cost_model import DeviceLimits
from can_train.io.processes import this_host
from can_train.memory.out_of_memory import is_out_of_memory
from can_train.training.distributed import RankFailedError, RankGoneError
from can_train.training.run_folder import RunFolder

if TYPE_CHECKING:
    from can_train.training.session import Session

# Fields that an observation shares with `Started`.
_IDENTITY: Final = ("run_id", "attempt", "rank", "key", "device", "start_time")


@dataclass(kw_only=True)
class Attempt:
    """Context manager that records one attempt of a run: on entry that it began, on exit how it ended and what memory
    it took. An out-of-memory leaves the block as `DoesNotFitError`.
    """

    run: ResolvedRun
    folder: RunFolder
    session: Session

    def __enter__(self) -> Attempt:
        meter, self._ooms_before = self.session.meter, self.session.batcher.ooms_rescued
        self._started = Started(
            run_id=self.folder.run_id,
            attempt=self.session.ranks.on_rank0(lambda: self.folder.attempts.current),
            rank=self.session.ranks.rank,
            key=self.run.key,
            device=Device(key=meter.key, name=meter.name, total_bytes=meter.total_bytes, driver=meter.driver),
            start_time=next_time(state_dir(self.run.paths)),
            host=this_host(),
            pid=os.getpid(),
        )
        self._try_to_write(lambda: write_started(state_dir(self.run.paths), self._started))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outcome = "rescued" if error is None and self._ooms else _outcome(error)
        self._try_to_write(lambda: self._record(outcome))
        if outcome == "oom" and not isinstance(error, DoesNotFitError):
            raise self._does_not_fit() from error

    @property
    def _ooms(self) -> int:
        """Out-of-memories of this attempt; the batcher of a resumed run also counts those before it."""
        return self.session.batcher.ooms_rescued - self._ooms_before

    def _record(self, outcome: Outcome) -> None:
        write_observation(state_dir(self.run.paths), self._observation(outcome))
        store_of(self.run).refresh_export()

    def _observation(self, outcome: Outcome) -> Observation:
        session, plan, meter = self.session, self.session.plan, self.session.meter
        limits, predicted = session.run_plan.limits, session.run_plan.predicted_peak_bytes
        searched = limits is not None and plan.safety_factor is not None
        return Observation(
            **{name: getattr(self._started, name) for name in _IDENTITY},
            size=self.run.size,
            end_time=next_time(state_dir(self.run.paths)),
            outcome=outcome,
            factor=session.run_plan.factor.factor,
            factor_reason=session.run_plan.factor.reason,
            capacity_bytes=meter.capacity_bytes,
            peak_allocated_bytes=session.monitor.peak_bytes or None,
            peak_reserved_bytes=session.monitor.peak_reserved_bytes or None,
            predicted_peak_bytes=None if predicted is None else round(predicted),
            **_predictions(limits if searched else None),
            tuned_limit=round(limits.training.tuned_limit) if limits is not None and searched else None,
            safe_limit=round(plan.rules.safe_limit) if searched else None,
            used=session.run_plan.used(session.largest_cost or plan.largest_cost),
            logical_batch=plan.logical_batch,
            largest_micro_batch=session.largest_micro_batch or plan.largest_micro_batch,
            binding_limit=plan.binding_limit,
            **_after_out_of_memory(session),
            # One in evaluation, or while other processes held the memory, shows nothing of the plan's limit.
            ooms_rescued=0 if session.batcher.oom_cost is None else self._ooms,
            allocator_retries=meter.retries(),
            foreign_bytes=session.foreign_bytes,
            torch_version=torch.__version__,
            fingerprint=memory_fingerprint(self.run),
            policy={"name": self.run.factor.policy, "options": policy_options(self.run)},
        )  # fmt: skip

    def _does_not_fit(self) -> DoesNotFitError:
        step, largest = self.session.progress.step, self.session.plan.largest_micro_batch
        return DoesNotFitError(
            "Memory ran out where nothing could be undone (an optimizer step, or code outside the micro-batches)",
            value=f"step {step}, micro-batches of up to {largest} samples",
            remedy=f"The run goes on from its last checkpoint: can-train resume {self.folder.run_id}",
            details=OutOfMemoryDetails(should_fit=True),
        )

    def _try_to_write(self, write: Callable[[], object]) -> None:
        if not self.run.training.use_adaptive_batch_size_factor:
            return
        try:
            write()
        except (StateError, ValueError) as error:
            self.session.reporter.notice(f"This run teaches nothing. {error}")


def _predictions(limits: DeviceLimits | None) -> dict[str, Any]:
    if limits is None or limits.training.capped:
        return {}
    training = limits.training
    full = training.peak_bytes(training.tuned_limit)
    return {"predicted_base_bytes": round(training.model.base_bytes), "predicted_full_bytes": round(full)}


def _after_out_of_memory(session: Session) -> dict[str, Any]:
    if session.batcher.oom_cost is None:
        return {}
    used, cost = session.run_plan.used, session.cost_after_rescue
    return {
        "oom_used": used(session.batcher.oom_cost),
        "used_after_rescue": used(cost) if cost else None,
        "peak_bytes_after_rescue": session.peak_bytes_after_rescue if cost else None,
    }


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return "ok"
    # A failure of another rank says nothing of the device here.
    if isinstance(error, SystemExit | KeyboardInterrupt | RankFailedError | RankGoneError):
        return "interrupted"
    return "oom" if isinstance(error, DoesNotFitError) or is_out_of_memory(error) else "error"
