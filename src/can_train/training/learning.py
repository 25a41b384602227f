"""What a run takes from earlier ones and leaves to later ones: the safety factor in force, and one observation an
attempt. Learning that fails never stops a training.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch

from can_train.config.compose import from_plain
from can_train.config.resolved import ResolvedRun
from can_train.config.task_settings import load_task_settings
from can_train.errors import DoesNotFitError, StateError
from can_train.memory.meters import Meter, open_meter
from can_train.memory.out_of_memory import is_out_of_memory
from can_train.policy.experience import experience_factor
from can_train.policy.policies import make_policy
from can_train.reporter import Reporter
from can_train.state.documents import utc_now
from can_train.state.factor_store import FactorChoice, FactorStore
from can_train.state.observations import Device, Observation, Started, write_observation, write_started
from can_train.training.folders import state_dir
from can_train.training.run_folder import RunFolder
from can_train.training.state import Session


def get_effective_safety_factor(config: ResolvedRun | Mapping[str, Any]) -> float:
    """Returns the safety factor that a run of this configuration would use here and now.

    Args:
        config: A resolved run, or the plain values of its `config.yaml`.

    Raises:
        CanTrainError: The configuration, the device or the state folder is at fault; nothing falls back silently.
    """
    run = config if isinstance(config, ResolvedRun) else from_plain(config)
    return _effective(run, open_meter(run.device)).factor


def factor_for(run: ResolvedRun, meter: Meter, reporter: Reporter) -> FactorChoice:
    """Chooses the safety factor of a run; where the store cannot be read, the first run's, with a notice."""
    try:
        return _effective(run, meter)
    except StateError as error:
        reporter.notice(f"What earlier runs taught cannot be read. {error}")
        return _prior(run)


def _effective(run: ResolvedRun, meter: Meter) -> FactorChoice:
    if not run.training.use_adaptive_batch_size_factor:
        return FactorChoice(run.training.graph_memory_safety_factor, "static, nothing is learned")
    return _store(run).known(run.key, meter.key, _fingerprint(run)).choice or _prior(run)


def _store(run: ResolvedRun) -> FactorStore:
    return FactorStore(state_dir(run.paths), make_policy(run.factor.policy, _policy_options(run)))


def _fingerprint(run: ResolvedRun) -> dict[str, Any]:
    training = run.training
    return {"model": asdict(run.model), "precision": training.precision, "optimizer": training.optimizer}


def _policy_options(run: ResolvedRun) -> dict[str, float]:
    factor = run.factor
    return {"target": factor.target, "momentum": factor.momentum, "oom_cut": factor.oom_cut, "minimum": factor.min,
            "maximum": factor.max}  # fmt: skip


def _prior(run: ResolvedRun) -> FactorChoice:
    table = load_task_settings(run.task).experience(run.dataset.name, run.mode.name)
    return FactorChoice(*experience_factor(*table))


@dataclass(kw_only=True)
class Attempt:
    """Records one attempt of a run: that it began, and on leaving the block how it ended and what memory it took.

    An out-of-memory leaves the block as `DoesNotFitError`.
    """

    run: ResolvedRun
    folder: RunFolder
    session: Session
    factor: FactorChoice

    def __enter__(self) -> "Attempt":
        meter = self.session.meter
        self._started = Started(
            run_id=self.folder.run_id,
            attempt=self.folder.begin_attempt(utc_now()),
            key=self.run.key,
            device=Device(key=meter.key, name=meter.name, total_bytes=meter.total_bytes, driver=meter.driver),
            start_time=utc_now(),
        )
        self._unless_it_fails(lambda: write_started(state_dir(self.run.paths), self._started))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outcome = _outcome(error)
        if outcome == "ok" and self.session.batcher.ooms:
            outcome = "rescued"
        self._unless_it_fails(lambda: self._record(outcome))
        if outcome == "oom" and not isinstance(error, DoesNotFitError):
            raise self._does_not_fit() from error

    def _record(self, outcome: str) -> None:
        write_observation(state_dir(self.run.paths), self._observation(outcome))
        _store(self.run).refresh_export()

    def _observation(self, outcome: str) -> Observation:
        session, plan, meter = self.session, self.session.plan, self.session.meter
        limits, predicted = session.run_plan.limits, session.run_plan.predicted_peak_bytes
        searched = limits is not None and plan.safety_factor is not None
        return Observation(
            **{name: getattr(self._started, name) for name in ("run_id", "attempt", "key", "device", "start_time")},
            size=self.run.size,
            end_time=utc_now(),
            outcome=outcome,
            factor=self.factor.factor,
            factor_reason=self.factor.reason,
            capacity_bytes=meter.capacity_bytes,
            peak_allocated_bytes=session.peak_bytes or None,
            peak_reserved_bytes=session.peak_reserved_bytes or None,
            predicted_peak_bytes=None if predicted is None else round(predicted),
            tuned_limit=round(limits.training.tuned_limit) if limits is not None and searched else None,
            safe_limit=round(plan.rules.safe_limit) if searched else None,
            used=session.run_plan.used(session.largest_cost or plan.largest_cost),
            logical_batch=plan.logical_batch,
            largest_micro_batch=session.largest_micro_batch or plan.largest_micro_batch,
            binding_limit=plan.binding_limit,
            ooms_rescued=session.batcher.ooms,
            allocator_retries=meter.retries(),
            foreign_bytes=session.foreign_bytes,
            torch_version=torch.__version__,
            fingerprint=_fingerprint(self.run),
            policy={"name": self.run.factor.policy, "options": _policy_options(self.run)},
        )  # fmt: skip

    def _does_not_fit(self) -> DoesNotFitError:
        step, largest = self.session.progress.step, self.session.plan.largest_micro_batch
        return DoesNotFitError(
            "Memory ran out where nothing could be undone (an optimizer step, or code outside the micro-batches)",
            value=f"step {step}, micro-batches of up to {largest} samples",
            remedy=f"The run goes on from its last checkpoint: can-train resume {self.folder.run_id}",
        )

    def _unless_it_fails(self, write: Callable[[], object]) -> None:
        if not self.run.training.use_adaptive_batch_size_factor:
            return
        try:
            write()
        except StateError as error:
            self.session.reporter.notice(f"This run teaches nothing. {error}")


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "interrupted"
    return "oom" if isinstance(error, DoesNotFitError) or is_out_of_memory(error) else "error"
