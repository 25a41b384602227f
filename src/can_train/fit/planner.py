"""Makes a run's plan: gathers what the device holds, what the samples cost and what was asked for. The decision itself
is a pure function in `policy`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import ResolvedRun
from can_train.config.settings import TrainingSettings
from can_train.errors import DoesNotFitError, OutOfMemoryDetails
from can_train.fit import random_state
from can_train.fit.batch_dependence import BatchDependence
from can_train.fit.cost_model import EXPLAINED, DeviceLimits, PhaseLimit
from can_train.fit.epochs import epoch_shares, planned_orders
from can_train.fit.explore import Explorer
from can_train.fit.factor_rule import ANY_PEAK, UNUSED, Aim, FactorChoice, FactorRule
from can_train.fit.optimizer import OptimizerMemory
from can_train.fit.packing import ROUNDING, BatchCosts, PartLimit, SplitRules
from can_train.fit.plan import Plan, PlanRequest, resolve_mode, resolve_plan, search_upper
from can_train.fit.search import Peak
from can_train.io.units import size_text
from can_train.memory.catalogue import cards_that_hold
from can_train.memory.meters import Meter
from can_train.reporter import Reporter
from can_train.task import Task

_MIB: Final = 2**20


_NAMED: Final = 5
"""Oversize samples that a message names."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run with what it rests on.

    Attributes:
        plan: The decision.
        limits: What the device holds; None where nobody searched.
        factor_reason: Where the safety factor comes from, in words.
        aim: The peak that it goes for.
        skipped: Rows of training samples that are left out because they do not fit.
        ranks: Processes that share the logical batch.
        notices: What else the user should know, as sentences.
    """

    plan: Plan
    limits: DeviceLimits | None
    factor_reason: str = ""
    aim: Aim = ANY_PEAK
    skipped: tuple[int, ...] = ()
    ranks: int = 1
    notices: tuple[str, ...] = ()

    def shares_with(self, other: "RunPlan") -> bool:
        """Tells whether two ranks' plans are of the same samples and the same logical batch."""
        return self.plan.logical_batch == other.plan.logical_batch and self.skipped == other.skipped

    @property
    def factor(self) -> FactorChoice:
        """The safety factor in force."""
        return FactorChoice(self.plan.safety_factor or UNUSED.factor, self.factor_reason)

    def training_costs(self, task: Task, rows: NDArray[np.int64]) -> BatchCosts:
        """Prices a batch of training; without a cost model a sample costs its share of the features."""
        return _prices(task, rows, None if self.limits is None else self.limits.training)

    def evaluation_costs(self, task: Task, rows: NDArray[np.int64]) -> BatchCosts:
        """Prices a batch of evaluation."""
        return _prices(task, rows, None if self.limits is None else self.limits.evaluation)

    @property
    def evaluation_limit(self) -> PartLimit:
        """What a part of an evaluation may hold: its share of the limit, and no more memory than a step takes."""
        if self.limits is None:
            return PartLimit(samples=self.plan.largest_micro_batch)
        evaluation = self.limits.evaluation
        share = (self.plan.safety_factor or 1.0) * evaluation.tuned_limit
        return PartLimit(cost=min(share, evaluation.cost_within(self._step_peak_bytes(self.limits))))

    @property
    def predicted_peak_bytes(self) -> float | None:
        """Peak of a step, which evaluation stays below; None without a cost model."""
        return None if self.limits is None else self._step_peak_bytes(self.limits)

    def _step_peak_bytes(self, limits: DeviceLimits) -> float:
        return limits.step_peak_bytes(self.plan.largest_cost, self.plan.largest_later_cost)

    def used(self, largest_cost: float) -> float | None:
        """A micro-batch's cost ÷ tuned limit; None where that limit was not searched for, or not reached: such a run
        says nothing of what a share of it leads to.
        """
        if self.limits is None or self.plan.safety_factor is None or self.limits.training.capped:
            return None
        return largest_cost / self.limits.training.tuned_limit

    def to_plain(self) -> dict[str, Any]:
        """Returns strict JSON: an infinite limit is null."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RunPlan":
        """Reads what `to_plain` made."""
        limits = plain["limits"]
        rules: dict[str, Any] = {
            name: np.inf if value is None else value for name, value in plain["plan"]["rules"].items()
        }
        notices, steps = tuple(plain["plan"]["notices"]), plain["plan"]["steps_per_epoch"]
        # Runs that began when all epochs were alike do not say these.
        alike = {"fewest_steps_per_epoch": steps, "mean_steps_per_epoch": float(steps)}
        return cls(
            plan=Plan(**{**alike, **plain["plan"], "rules": SplitRules(**rules), "notices": notices}),
            limits=None if limits is None else DeviceLimits.from_plain(limits),
            factor_reason=plain["factor_reason"],
            aim=Aim(**plain["aim"]),
            skipped=tuple(plain["skipped"]),
            # Runs that began when there was one only do not say so.
            ranks=plain.get("ranks", 1),
            notices=tuple(plain["notices"]),
        )


def plan_request(training: TrainingSettings, *, ranks: int = 1) -> PlanRequest:
    """Writes down what the settings ask of a plan that some ranks share."""
    requested = training.batch_size * training.gradient_accumulation_steps
    return PlanRequest(
        mode=resolve_mode(training.find_batch_size, batch_size_given=training.batch_size > 0),
        requested_batch=requested or None,
        preset_batch=training.lr_batch_size * (1 if training.batch_size else training.gradient_accumulation_steps),
        loader_batch=training.batch_size or training.lr_batch_size,
        min_steps_per_epoch=training.min_steps_per_epoch,
        micro_batch_size=training.micro_batch_size,
        lr_scale=training.lr_scale,  # type: ignore[arg-type]  # checked against the same names by the settings
        rules=SplitRules(
            floor=training.min_micro_batch_size,
            equal=training.accumulation == "divisor",
            threshold=training.accumulation_threshold,
            target=training.target_mib * _MIB,
            max_splits=training.accumulation_max_splits,
        ),
        ranks=ranks,
        preflight_threshold=training.preflight_units,
    )


@dataclass(kw_only=True)
class Planner:
    """Makes the plan of one run on one device.

    Attributes:
        run: The resolved run.
        task: Whose samples.
        model: On the meter's device; left as it is.
        meter: Of the device.
        reporter: Where trials are shown.
        verify: Whether limits are tried on the device; else they are predicted.
        batch dependence: What is known of how samples of a batch influence each other; None: it is measured when asked for.
        ranks: Processes that train the run; a plan made here takes all of them for alike.
        beside: Tensors on the device that training does not change: a reference model's.
    """

    run: ResolvedRun
    task: Task
    model: nn.Module
    meter: Meter
    reporter: Reporter
    verify: bool = True
    batch_dependence: BatchDependence | None = None
    ranks: int = 1
    beside: Sequence[Tensor] = ()

    def make(self, factor: FactorRule) -> RunPlan:
        """Explores the device where the plan depends on it, and resolves the plan.

        Args:
            factor: How the safety factor is decided.

        Raises:
            DoesNotFitError: Not even one sample fits, or some do not and may not be skipped.
        """
        request = self.request()
        if not request.needs_costs:
            return self._resolved(request, None, (), factor)
        return self.resolve(request, self.explore(request, factor.provisional), factor)

    def request(self) -> PlanRequest:
        """Writes down what is asked of the plan."""
        shares = epoch_shares(self.task, (), epochs=self.run.training.epochs)
        return replace(plan_request(self.run.training, ranks=self.ranks), epoch_shares=shares)

    def resolve(self, request: PlanRequest, limits: DeviceLimits, factor: FactorRule) -> RunPlan:
        """Resolves the plan, given what the device holds.

        Raises:
            DoesNotFitError: Some samples do not fit and may not be skipped.
        """
        return self._resolved(request, limits, self._oversize(limits.training), factor)

    def make_again(self, frozen: RunPlan, factor: FactorRule, *, held_bytes: int = 0) -> RunPlan:
        """Keeps a plan's logical batch and finds out how it must be cut on this device, or for what is trained by now.

        Args:
            frozen: The plan made before.
            factor: How the safety factor is decided.
            held_bytes: Optimizer state that is on the device already.

        Raises:
            DoesNotFitError: Some samples do not fit here.
        """
        limits = self.explore(self._same_batch(frozen), factor.provisional, held_bytes=held_bytes)
        over = set(self._oversize(limits.training, skip=False)) - set(frozen.skipped)
        assert not over, "samples that do not fit raise"
        return self._again(frozen, limits, factor)

    def common(self, plans: Sequence[RunPlan], own: RunPlan, factor: FactorRule) -> RunPlan:
        """Takes the logical batch that every rank can hold its share of, and leaves out what is too large for any.

        Args:
            plans: What each rank has decided for itself.
            own: This rank's.
            factor: How the safety factor is decided.
        """
        least = min(plans, key=lambda plan: plan.plan.logical_batch)
        agreed = replace(least, skipped=tuple(sorted({row for plan in plans for row in plan.skipped})))
        if own.limits is None or own.shares_with(agreed):
            return own
        return self._again(agreed, own.limits, factor)

    def _same_batch(self, frozen: RunPlan) -> PlanRequest:
        request = self.request()
        batch = frozen.plan.logical_batch
        return replace(request, mode="opt", requested_batch=batch, lr_scale="none", micro_batch_size=0)

    def _again(self, frozen: RunPlan, limits: DeviceLimits, factor: FactorRule) -> RunPlan:
        again = self._resolved(self._same_batch(frozen), limits, frozen.skipped, factor)
        kept = {name: getattr(frozen.plan, name) for name in ("binding_limit", "lr_factor")}
        return replace(again, plan=replace(again.plan, **kept))

    def measured_batch_dependence(self) -> BatchDependence:
        """Measures, once, how samples of a batch influence each other."""
        if self.batch_dependence is None:
            self.batch_dependence = self._explorer(lambda cost: None).batch_dependence()
        return self.batch_dependence

    def simulate_peak(self, limits: DeviceLimits, cost: float) -> Peak:
        """Measures, on the host, what a GPU's allocator would hold for a batch of a cost."""
        return self._explorer(lambda cost: None).simulate_peak(limits.training, cost)

    def simulate_fit(self, limits: DeviceLimits, cost: float, capacity_bytes: int) -> bool:
        """Tries, on the host, whether a batch of a cost would run on a GPU of a capacity."""
        return self._explorer(lambda cost: None).simulate_fit(limits.training, cost, capacity_bytes)

    def optimizer_memory(self) -> OptimizerMemory:
        """Measures, on the host, what the optimizer takes of the parameters trained by now."""
        return self._explorer(lambda cost: None).optimizer_memory()

    def explore(self, request: PlanRequest, factor: float, *, held_bytes: int = 0) -> DeviceLimits:
        """Finds out what the device holds; leaves generators as they were."""
        generators = random_state.capture()
        with self.reporter.stage("finding the batch size", unit="trials") as stage:
            limits = self._explorer(lambda cost: stage.advance(1, mib=round(cost / _MIB, 1))).explore(
                lambda costs: search_upper(request, costs, factor=factor), held_bytes=held_bytes
            )
        random_state.restore(generators)
        return limits

    def _resolved(
        self, request: PlanRequest, limits: DeviceLimits | None, skipped: tuple[int, ...], rule: FactorRule
    ) -> RunPlan:
        phase = None if limits is None else limits.training
        training = self.run.training
        orders = planned_orders(self.task, skipped, seed=training.seed, epochs=training.epochs)
        order, *beside = (_prices(self.task, one, phase) for one in orders)
        decided = rule.decide(limits if request.searches else None)
        plan = resolve_plan(
            replace(request, epoch_shares=epoch_shares(self.task, skipped, epochs=training.epochs)),
            order,
            tuned_limit=phase.tuned_limit if phase is not None and request.searches else None,
            factor=decided.choice.factor,
            beside=beside,
        )
        return RunPlan(
            plan=plan,
            limits=limits,
            factor_reason=decided.choice.reason,
            aim=decided.aim,
            skipped=skipped,
            ranks=self.ranks,
            notices=tuple(self._notices(plan, limits, skipped)),
        )

    def _notices(self, plan: Plan, limits: DeviceLimits | None, skipped: Sequence[int]) -> list[str]:
        said = [*self.task.notices()]
        said += self.measured_batch_dependence().sentences(split=plan.most_parts > 1)
        if limits is not None:
            said += [text for name in ("training", "evaluation") for text in _unexplained(name, getattr(limits, name))]
        if skipped:
            said.append(f"oversize=skip leaves {len(skipped)} of {len(self.task.train_rows)} training samples out")
        return said

    def _explorer(self, tried: Any) -> Explorer:
        return Explorer(
            task=self.task, model=self.model, training=self.run.training, meter=self.meter,
            rows=self.task.train_rows, tried=tried, verify=self.verify, beside=self.beside,
        )  # fmt: skip

    def _oversize(self, phase: PhaseLimit, *, skip: bool | None = None) -> tuple[int, ...]:
        """Finds the samples that do not fit by themselves.

        Raises:
            DoesNotFitError: There are some, and `oversize` does not say to skip them.
        """
        if phase.capped:
            return ()
        rows = self.task.train_rows
        each = _prices(self.task, rows, phase).each()
        over = np.flatnonzero(each > phase.tuned_limit * (1 + ROUNDING))
        over = over[np.argsort(-each[over], kind="stable")]
        may_skip = self.run.training.oversize == "skip" if skip is None else skip
        if len(over) == 0 or may_skip:
            return tuple(int(row) for row in np.sort(rows[over]))
        named = ", ".join(self.task.describe(int(row)) for row in rows[over[:_NAMED]])
        more = f" and {len(over) - _NAMED} more" if len(over) > _NAMED else ""
        need = phase.peak_bytes(float(each[over[0]]))
        raise DoesNotFitError(
            f"Every training sample must fit on the device by itself, and {len(over)} of {len(rows)} do not",
            value=f"{named}{more}; they need up to {size_text(need)} of {size_text(self.meter.capacity_bytes)}",
            remedy=f"--oversize skip leaves them out; cards that would hold them: {cards_that_hold(need)}",
            details=OutOfMemoryDetails(need_bytes=round(need)),
        )


def still_fits(plan: RunPlan, meter: Meter) -> bool:
    """Tells whether a plan made earlier holds on this device."""
    if plan.limits is None:
        return True
    peak = plan.predicted_peak_bytes
    return plan.limits.device_key == meter.key and peak is not None and peak <= meter.capacity_bytes


def _prices(task: Task, rows: NDArray[np.int64], phase: PhaseLimit | None) -> BatchCosts:
    counts = task.batch_features(rows)
    if phase is not None and any(phase.model.coefficients):
        return phase.costs(counts)
    # In units of the mean sample, so that the solver sees uniform data as uniform.
    means = np.maximum(counts.mean(axis=0), 1e-9) * counts.shape[1]
    return BatchCosts(counts, task.features, 1 / means)


def _unexplained(what: str, phase: PhaseLimit) -> list[str]:
    """Says where the features do not account for the memory that was seen."""
    names = ", ".join(feature.name for feature in phase.model.features)
    if not phase.model.explains:
        rest = "sizes rest on trials" if phase.trials else "a training tries what is only predicted here"
        off = f"the probes lie up to {phase.model.relative_residual:.0%} off"
        return [f"The memory of {what} does not follow its features ({names}): {off}; {rest}"]
    if abs(phase.measured_ratio - 1) > EXPLAINED:
        measured = f"{phase.measured_ratio:.1%} of what the probes predicted"
        return [f"A full batch of {what} measured {measured} from its features ({names}); sizes rest on that trial"]
    return []


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
