"""Makes a run's plan: explores the device, prices the samples, and has `plan.py` decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.errors import ConfigError, DoesNotFitError, OutOfMemoryDetails
from can_train.fit.batch_dependence import UNKNOWN as UNKNOWN_DEPENDENCE
from can_train.fit.compiled import SAVED_SHARE, compile_notices, compiles_on
from can_train.fit.cost_model import DeviceLimits, SearchResult
from can_train.fit.epochs import epoch_shares, epochs_differ, planned_orders
from can_train.fit.explore import MODEL_MUST_FIT, TOO_LITTLE_FOR_PAGES, Explorer, others_of
from can_train.fit.factor_rule import NO_AIM, PROVISIONAL, Aim, EarlierSearch, FactorRule
from can_train.fit.offloaded_state import refusal
from can_train.fit.optimizer import make_optimizer, phase_parameters, phase_training
from can_train.fit.packing import ROUNDING, BatchCosts, SplitRules
from can_train.fit.plan import PhasePlan, PlanRequest, resolve_plan, search_upper, size_candidates, spare_room
from can_train.fit.random_state import capture_generators, restore_generators
from can_train.fit.repetitions import NOT_REPEATABLE, is_not_repeatable
from can_train.fit.rescue import Ladder, without_recomputation
from can_train.fit.run_plan import (
    DataPlacement,
    OtherRung,
    PredictedLimit,
    RunPlan,
    format_notices,
    limits_notices,
    price,
    too_large_notices,
)
from can_train.fit.rungs import ModuleCost, Rung, kept_modules, rung_of, rungs_of
from can_train.fit.search import NO_RECORDING, SEARCH_SECONDS, SEARCH_SHARE, RecordedPhase, Recording
from can_train.fit.step_time import (
    MicroBatchChoice,
    SizeCandidate,
    choose_size,
    is_known_slower,
    is_larger_size,
)
from can_train.io.units import counted, size_text
from can_train.memory.catalogue import cards_that_hold, predicted_room
from can_train.memory.host import HOST_SHARE, processes_here, room_bytes
from can_train.memory.meters import AbsentGpuMeter, CpuMeter, Meter
from can_train.memory.out_of_memory import CatchOutOfMemory, forget_frames
from can_train.task import Phase

if TYPE_CHECKING:
    from torch import Tensor, nn

    from can_train.config.resolved import ResolvedRun
    from can_train.config.settings import TrainingSettings
    from can_train.fit.batch_dependence import BatchDependence
    from can_train.fit.sharding import Shards
    from can_train.fit.step_time import Times
    from can_train.reporter import Reporter
    from can_train.task import BatchTask

Rows = NDArray[np.int64]
_MIB: Final = 2**20
PROBED: Final = "Probes on the device show how memory grows"  # where nothing recorded does, for a reason
_NAMED: Final = 5  # Oversize samples that a message names
# Share of the room that a sample may take where only some modules are computed again: the bytes that these save do not
# count the memory of kernels.
_FILLED: Final = 0.9
_VALIDATION_MUST_FIT: Final = "Every validation sample must fit on the device by itself"
_TEST_MUST_FIT: Final = "Every test sample must fit on the device by itself"
_LESS: Final = 0.6  # Share of the room that is tried where more did not fit
_DECIDES: Final = 0.02  # Share of the device below which gradients do not decide what fits
_PASSES: Final = 3.0  # Time of a step in units of its forward pass


def plan_request(training: TrainingSettings, *, ranks: int = 1) -> PlanRequest:
    """Translates the settings into a request for a plan that some ranks share."""
    steps = training.gradient_accumulation_steps
    return PlanRequest(
        mode="opt" if training.find_batch_size == "auto" else training.find_batch_size,  # type: ignore[arg-type]
        requested_batch=training.batch_size * steps or None,
        preset_batch=training.lr_batch_size * (1 if training.batch_size else steps),
        loader_batch=training.batch_size or training.lr_batch_size,
        batches_per_step=steps,
        min_steps_per_epoch=training.min_steps_per_epoch,
        bucketed=training.order == "bucketed",
        micro_batch_size=training.micro_batch_size,
        # Both are checked against the same names by the settings.
        lr_scale=training.lr_scale,  # type: ignore[arg-type]
        rules=SplitRules(
            floor=training.min_micro_batch_size,
            equal=training.accumulation == "divisor",
            threshold=training.accumulation_threshold,
            splits=training.splits,
            target=training.target_mib * _MIB,
            max_splits=training.accumulation_max_splits,
        ),
        ranks=ranks,
        preflight_threshold=training.preflight_units,
    )


@dataclass(kw_only=True)
class Planner:
    """Makes the plan of one run on one device."""

    run: ResolvedRun
    task: BatchTask
    model: nn.Module  # On the meter's device; left as it is
    meter: Meter
    reporter: Reporter
    verify: bool = True  # Whether limits are tried on the device; otherwise they are predicted
    ranks: int = 1  # Processes that train the run; a plan made here assumes that all of them are alike
    reference_tensors: Sequence[Tensor] = ()  # Tensors of reference models that are on the device
    phase: Phase = field(default_factory=Phase)  # That is planned; the task is as it is in it
    other_phases: Sequence[Explorer] = ()  # Whose optimizers have state, too
    state_leaves: bool = False  # Whether the state of all optimizers waits on the host, because another phase needs it
    search_seconds: float = SEARCH_SECONDS  # That a search of limits may take, however short an epoch is
    recording: Recording = NO_RECORDING  # What was recorded of the task, in place of probes
    shards: Shards | None = None  # The model's shards on the ranks; None: each rank has the whole model
    _measured: dict[str, ModuleCost] = field(default_factory=dict, init=False)  # By the names of the modules
    _forward_seconds: float = field(default=0.0, init=False)  # Of the sample that they were measured with
    _other_rung: OtherRung | None = field(default=None, init=False)  # Beside the explorer's, because it may be faster

    @cached_property
    def training(self) -> TrainingSettings:
        """The phase's training settings."""
        return phase_training(self.run.training, self.phase)

    @cached_property
    def explorer(self) -> Explorer:
        """Measures the task's memory on the device."""
        return Explorer(
            task=self.task,
            model=self.model,
            training=self.training,
            meter=self.meter,
            rows=self.task.train_rows,
            verify=self.verify,
            reference_tensors=self.reference_tensors,
            phase=self.phase,
            other_phases=self.other_phases,
            # Each rank trains a share of an epoch. Their clocks differ, so do their limits, as their devices' limits
            # may: they agree on the plans that are made of them.
            search_seconds=self.search_seconds,
            epoch_share=SEARCH_SHARE / self.ranks,
            rung=self.rungs[0],
            shards=self.shards,
            on_refused=lambda reason: self.reporter.detail(f"{PROBED}: {reason}"),
        )

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs that the model may be computed on, in order of trial."""
        training, ranks = self.training, 1 if self.shards is None else self.shards.size
        # On shards, a step goes as far to fit as it would go without them.
        fit = "auto" if training.fit == "shard" else training.fit
        return rungs_of(self.model, fit, training.recompute, is_host=self.meter.is_host, ranks=ranks,
                        state_can_leave=self._state_can_leave())  # fmt: skip

    def _state_can_leave(self) -> bool:
        fit = self.training.fit
        if self.meter.is_host or fit not in ("auto", "shard", "offload-optimizer", "offload-all"):
            return False
        make = partial(make_optimizer, training=self.training, lr=self.training.lr, device=self.meter.device)
        reason = refusal(make)
        if reason and fit not in ("auto", "shard"):
            rule = f"training.fit={fit} keeps the state of an optimizer on the host"
            raise ConfigError(rule, value=f"{self.training.optimizer}: {reason}", remedy="Give --fit auto")
        return not reason

    @property
    def _recorded(self) -> RecordedPhase | None:
        """The phase's recorded lines, which are of the first rung."""
        is_recorded = self.explorer.rung == self.rungs[0] and not self.explorer.alone
        return self.recording.phases.get(self.phase.name) if is_recorded else None

    @cached_property
    def batch_dependence(self) -> BatchDependence:
        """How samples of a batch influence each other; measured once, on the first rung where a few samples fit."""
        own = self.explorer.rung
        further = [rung for rung in self.rungs
                   if rung.goes_further(own) and rung.offload_optimizer == own.offload_optimizer]  # fmt: skip
        try:
            for rung in (own, *further):
                self.explorer.rung = rung
                measured = self.explorer.batch_dependence()
                if measured is not UNKNOWN_DEPENDENCE:
                    return measured
        except Exception as error:
            if not is_not_repeatable(error):
                raise
        finally:
            self.explorer.rung = own
        return UNKNOWN_DEPENDENCE

    def check(self) -> None:
        """Checks on a few samples, before anything is explored, that the loss trains the sum that it should, and the
        form of the task's other results.

        Raises:
            ConfigError: No parameter is trained.
            DataError: A mean is in the place of a sum, the loss has no gradient, or a metric is of a wrong type.
        """
        if not any(parameter.requires_grad for _, parameter in phase_parameters(self.model, self.phase)):
            remedy = "Freeze fewer parts, or leave requires_grad of some parameters as it is"
            raise ConfigError("No parameter of the model is trained", value="all of them are frozen", remedy=remedy)
        self.check_loss(self.batch_dependence)
        self.explorer.check_outputs()

    def check_loss(self, dependence: BatchDependence) -> None:
        """Raises DataError where a comparison shows that the loss trains something else than a sum of its samples."""
        loss = self.phase.loss or getattr(self.task, "loss", None)
        dependence.check(f"{type(self.task).__name__}.{getattr(loss, '__name__', 'loss')}")

    def request(self) -> PlanRequest:
        """Translates the settings into a request."""
        shares = epoch_shares(self.task, (), seed=self.training.seed, epochs=self.training.epochs)
        return replace(plan_request(self.training, ranks=self.ranks), epoch_shares=shares)

    def make(self, factor: FactorRule) -> RunPlan:
        """Explores the device where the plan depends on it, and resolves the plan.

        Raises:
            DoesNotFitError: Not even one sample fits, or some do not and may not be skipped.
        """
        self.check()
        request, self._other_rung = self.request(), None
        # A target for the memory of micro-batches needs costs in bytes too.
        if request.searches or request.rules.target < np.inf:
            plan = self.on_first_rung(
                lambda: self.resolve(
                    request,
                    self.explore(request, factor.provisional, earlier=factor.earlier, recorded=self._recorded),
                    factor,
                ),
                earlier=factor.earlier,
            )
            if request.searches:
                return self._with_faster_rung(plan, factor)
            return replace(plan, fixed_size=_fixed_size(plan, factor))
        plan = replace(self._resolved(request, None, (), factor), rung_is_asked=self._rung_is_asked)
        is_fixed = request.micro_batch_size > 0 or request.rules.floor > 1
        # On a processor memory is the host's: the limit is not a fixed one, and probes cost seconds.
        if not is_fixed or isinstance(self.meter, CpuMeter):
            return plan
        # Nothing was searched for: whether micro-batches fit whose size was given is predicted.
        try:
            limits = replace(self, verify=False).explore(request, factor.provisional)
        except DoesNotFitError as error:
            return replace(plan, notices=(*plan.notices, f"{error.rule}: {error.value}"))
        predicted = self._resolved(request, limits, (), factor).phase_plan
        notices = (*plan.notices, *too_large_notices(predicted, limits, self.training))
        fixed_size = _fixed_size(replace(plan, phase_plan=predicted, limits=limits), factor)
        return replace(plan, fixed_size=fixed_size, notices=notices)

    @property
    def _rung_is_asked(self) -> bool:
        return self.training.fit not in ("auto", "split", "off") or bool(self.training.recompute)

    def resolve(self, request: PlanRequest, limits: DeviceLimits, factor: FactorRule) -> RunPlan:
        """Resolves the plan; raises DoesNotFitError where samples do not fit and may not be skipped."""
        oversize = self._oversize(limits.training)
        if len(oversize) and self.training.oversize != "skip":
            raise self._oversize_error(oversize, limits)
        notices = self._check_evaluated(limits)
        plan = self._resolved(request, limits, tuple(np.sort(oversize).tolist()), factor)
        return replace(plan, notices=(*plan.notices, *notices))

    def replan_same_batch(self, frozen: RunPlan, factor: FactorRule, *, held_bytes: int = 0) -> RunPlan:
        """Keeps a plan's logical batch and plans anew how it is cut, on this device and for the parameters trained now.

        `held_bytes` of optimizer state are on the device already. Raises DoesNotFitError where samples do not fit here.
        """

        def plan() -> RunPlan:
            limits = self.explore(self._same_batch(frozen), factor.provisional, held_bytes=held_bytes)
            oversize = self._oversize(limits.training)
            oversize = oversize[~np.isin(oversize, frozen.skipped)]
            # Not even oversize=skip leaves them out now: the samples of a run stay the same.
            if len(oversize):
                raise self._oversize_error(oversize, limits)
            notices = self._check_evaluated(limits, held_bytes=held_bytes)
            made = self._again(frozen, limits, factor)
            return replace(made, notices=(*made.notices, *notices))

        return self.on_first_rung(plan)

    def on_first_rung(self, plan: Callable[[], RunPlan], *, earlier: EarlierSearch | None = None) -> RunPlan:
        """Plans on the first rung that fits all samples, or on the rung of an earlier run on this device; raises
        DoesNotFitError where there is none.
        """
        failures: dict[Rung, DoesNotFitError] = {}
        is_free = self.training.fit in ("auto", "shard")
        known = self.explorer.remembered(earlier) if is_free else None
        if known is not None and known.ranks != self.rungs[0].ranks:
            known = None
        left = [*(self.rungs if known is None else Ladder(self.rungs).on(rung_of(known)).rungs)]
        if self.state_leaves:
            left = [rung for rung in left if rung.offload_optimizer] or left
        while left:
            self.explorer.rung = rung = left.pop(0)
            try:
                self._check_host(rung)
                made = self._in_parts_or_alone(plan)
            except DoesNotFitError as error:
                # The frames of its traceback hold tensors, which the next rung has no room for.
                error.__traceback__ = error.__context__ = None
                failures[rung] = error
                self.meter.release()
                if error.rule.startswith((MODEL_MUST_FIT, _VALIDATION_MUST_FIT)):
                    left = [one for one in left if one.offload_optimizer and not rung.offload_optimizer]
                continue
            except Exception as error:
                if not rung.recompute or not is_not_repeatable(error):
                    raise
                left = self._without_recomputation(error, left)
                continue
            is_chosen = known is None and self.training.fit != "recompute" and not self.training.recompute
            if is_chosen and rung.recompute and not rung.offload:
                made = self._with_fewest_modules(made, plan)
            return replace(self._with_effect(made), rung_is_asked=self._rung_is_asked)
        raise on_no_rung(failures)

    def _in_parts_or_alone(self, plan: Callable[[], RunPlan]) -> RunPlan:
        """Plans on the rung in force; where no sample fits beside the gradients of earlier micro-batches, without
        these, if then no batch is split.
        """
        explorer = self.explorer
        explorer.alone = False
        try:
            return plan()
        except DoesNotFitError as error:
            if not self._may_be_alone or error.rule.startswith((MODEL_MUST_FIT, _VALIDATION_MUST_FIT)):
                raise
            forget_frames(error)
            in_parts = error
        self.meter.release()
        explorer.alone = True
        with suppress(DoesNotFitError):
            made = plan()
            # Batches are left whole on these limits, also those that do not fit.
            if made.phase_plan.largest_cost <= made.phase_plan.rules.safe_limit * (1 + ROUNDING):
                return made
        explorer.alone = False
        raise in_parts

    @property
    def _may_be_alone(self) -> bool:
        """Whether gradients are large enough to decide whether a batch fits; the user may give the number of parts."""
        training, rung = self.training, self.explorer.rung
        if training.splits > 1 or rung or training.find_batch_size == "max":
            return False
        # The meter of a device that is not at hand is the largest one's of several.
        least = 0.0 if isinstance(self.meter, AbsentGpuMeter) else _DECIDES * self.meter.capacity_bytes
        return self.explorer.optimizer_memory().parameter_bytes >= least

    def _without_recomputation(self, error: Exception, left: Sequence[Rung]) -> list[Rung]:
        """Returns the rungs that are left, without recomputation: some module cannot be computed again."""
        training = self.training
        if training.fit == "recompute" or training.recompute:
            remedy = "Name others with --recompute, or leave it out and give --fit offload"
            raise ConfigError(NOT_REPEATABLE, value=self.explorer.rung.describe(), remedy=remedy) from error
        forget_frames(error)
        self.meter.release()
        self.reporter.notice(NOT_REPEATABLE)
        self.rungs = without_recomputation(self.rungs)
        return [rung for rung in without_recomputation(left) if rung != self.rungs[0]]

    def _check_host(self, rung: Rung) -> None:
        """Checks that the optimizer's state fits into the memory of the host, where it is to wait there."""
        if not rung.offload_optimizer or isinstance(self.meter, AbsentGpuMeter):
            return
        need_bytes, available, processes = self.explorer.host_state_bytes, room_bytes(HOST_SHARE), processes_here()
        if need_bytes > available:
            each = f" by each of {processes} processes" if processes > 1 else ""
            raise DoesNotFitError(
                "The optimizer's state must fit into the memory of the host, where it is to wait",
                value=f"it takes {size_text(need_bytes)}, {size_text(available)} may be used{each}",
                remedy="Ask for more memory of the host (--mem), or take --optimizer sgd, which needs less",
                details=OutOfMemoryDetails(of_host=True),
            )

    def _with_faster_rung(self, made: RunPlan, factor: FactorRule) -> RunPlan:
        """Lets some steps try a rung beyond the first one that fits, where it makes larger micro-batches fit; plans on
        it where earlier runs have measured that it is faster.
        """
        rung = self._rung_to_try(made, factor)
        if rung is None:
            return made
        self.explorer.rung = rung
        try:
            limits = self.explore(self._same_batch(made), factor.provisional)
        except DoesNotFitError:
            return made
        except Exception as error:
            if not is_not_repeatable(error):
                raise
            forget_frames(error)
            return made
        finally:
            self.explorer.rung = made.rung
            self.meter.release()
        assert made.limits is not None, "there is no choice without limits"
        if len(self._oversize(limits.training)) > len(made.skipped):
            return made
        self._other_rung = OtherRung(rung=rung, limits=limits, factor=factor.decide(limits).value)
        tried = self._again(made, made.limits, factor)
        choice = tried.micro_batch
        if choice is None or not choice.is_other_rung:
            return self._with_effect(tried)
        self.explorer.rung = rung
        self._other_rung = OtherRung(rung=made.rung, limits=made.limits, factor=made.factor.value)
        return self._with_effect(self._again(made, limits, factor))

    def _rung_to_try(self, made: RunPlan, factor: FactorRule) -> Rung | None:
        """Returns a rung that may be faster than the rung of a plan, since larger micro-batches fit on it."""
        choice, names = made.micro_batch, max((rung.recompute for rung in self.rungs), key=len)
        rung = replace(made.rung, recompute=names)
        is_cut = choice is not None and choice.largest_samples * made.ranks < made.phase_plan.logical_batch
        if choice is None or not is_cut or not rung.goes_further(made.rung) or rung.offload or self.shards is not None:
            return None
        runs, reference = self._times(factor), (choice.first_rung, choice.largest_samples)
        is_measured = any(size.rung == rung.timed_as for run in runs for size in run)
        # Nothing is tried where no device is, or where a run is short.
        can_try = bool(choice.trials) and not isinstance(self.meter, AbsentGpuMeter)
        if not (is_measured or can_try) or is_known_slower(rung.timed_as, reference, runs):
            return None
        return rung

    def _times(self, factor: FactorRule) -> list[Times]:
        return [times.get(self.phase.name, ()) for times in factor.times or ()]

    def _with_fewest_modules(self, made: RunPlan, plan: Callable[[], RunPlan]) -> RunPlan:
        """Plans that no more modules are computed again than the largest sample needs; `made` has all of them."""
        assert made.limits is not None, "only a search fails on the rung before"
        names = made.rung.recompute
        costs, _ = self._module_costs(made.limits.training, names)
        room = _FILLED * predicted_room(made.limits.capacity_bytes)
        spare = room - made.limits.training.peak_bytes(self._largest_sample(made.limits.training)[1])
        # The tensors of the last module are there when the backward pass begins, whether it is computed again or not;
        # but beside a loss that takes more than the module. Of a small device, pages of the allocator may leave less
        # room.
        last_is_free = [*costs[:-1], *(replace(cost, saved_bytes=0) for cost in costs[-1:])]
        tried = [kept_modules(last_is_free, spare), kept_modules(costs, spare), kept_modules(costs, _LESS * spare)]
        for number, kept in enumerate(tried):
            if not kept or kept in tried[:number]:
                continue
            self.explorer.rung = replace(made.rung, recompute=tuple(name for name in names if name not in kept))
            with suppress(DoesNotFitError):
                return plan()
        self.explorer.rung = made.rung
        return made

    def _with_effect(self, plan: RunPlan) -> RunPlan:
        """Adds to a plan how much its rung saves, and how much longer a step takes."""
        if not plan.rung.recompute or plan.limits is None:
            return plan
        costs, forward_seconds = self._module_costs(plan.limits.training, plan.rung.recompute)
        saved_bytes, seconds = sum(cost.saved_bytes for cost in costs), sum(cost.seconds for cost in costs)
        # A backward pass takes about twice as long as the forward pass.
        longer = seconds / (_PASSES * forward_seconds) if forward_seconds > 0 else 0.0
        plan = replace(plan, rung_saves_bytes=saved_bytes, rung_longer=longer)
        if self.training.compile == "off" or not compiles_on(self.meter):
            return plan
        told = f"the compiler chooses what is computed again, and keeps {plan.memory_budget:.0%} of the activations"
        return replace(plan, notices=(*plan.notices, f"training.compile={self.training.compile}: {told}"))

    def _module_costs(self, phase: SearchResult, names: Sequence[str]) -> tuple[list[ModuleCost], float]:
        """Measures modules on the largest sample, once."""
        missing = [name for name in names if name not in self._measured]
        if missing:
            row, _ = self._largest_sample(phase)
            costs, self._forward_seconds = self.explorer.module_costs(missing, row)
            self._measured |= {cost.name: cost for cost in costs}
        return [self._measured[name] for name in names if name in self._measured], self._forward_seconds

    def _largest_sample(self, phase: SearchResult) -> tuple[int, float]:
        """Returns the row of the sample that costs most, and its cost."""
        rows = self._counted_rows
        each = price(self.task, rows, phase).each()
        return int(rows[np.argmax(each)]), float(each.max())

    def common(self, plans: Sequence[RunPlan], ours: RunPlan, factor: FactorRule) -> RunPlan:
        """Plans the smallest logical batch of all ranks' plans, without the samples that any of them leaves out."""
        smallest = min(plans, key=lambda plan: plan.phase_plan.logical_batch)
        agreed = replace(smallest, skipped=tuple(sorted({row for plan in plans for row in plan.skipped})))
        if ours.limits is None or ours.shares_with(agreed):
            return ours
        return self._again(agreed, ours.limits, factor)

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of the data that batches can be gathered from; estimated where the task holds a sample of them."""
        rows, size = self.task.train_rows, self.task.resident_bytes()
        # A plan repeats the rows of a sample.
        return round(size * len(rows) / max(len(np.unique(rows)), 1)) if size else 0

    def beside_data(self, plan: RunPlan, factor: FactorRule) -> RunPlan:
        """Plans the same batch with the data on the device; raises DoesNotFitError."""
        assert plan.limits is not None, "limits decide how a batch is cut"
        limits = plan.limits.beside(self.data_bytes)
        need, least = limits.optimizer_peak_bytes, min(limits.training.tuned_limit, limits.evaluation.tuned_limit)
        if need > predicted_room(limits.capacity_bytes) or least <= 0:
            raise self._data_error(need, limits.capacity_bytes)
        oversize = self._oversize(limits.training)
        if len(oversize[~np.isin(oversize, plan.skipped)]):
            raise self._data_error(limits.training.peak_bytes(limits.training.tuned_limit), limits.capacity_bytes)
        return self._again(plan, limits, factor, beside_bytes=self.data_bytes)

    def fits_beside_data(self, plan: RunPlan) -> bool:
        """Runs the costliest micro-batch of a plan beside as much memory as the data take; tells whether it fits."""
        if not self.verify or isinstance(self.meter, AbsentGpuMeter):
            return True
        generators = capture_generators()
        fits = self._runs_beside_data(plan)
        restore_generators(generators)
        self.meter.release()
        self.meter.reset_peak()
        return fits

    def _runs_beside_data(self, plan: RunPlan) -> bool:
        assert plan.limits is not None, "only a plan with limits is cut by its cost"
        with CatchOutOfMemory():
            held = torch.empty(self.data_bytes, dtype=torch.uint8, device=self.meter.device)
            # Gradients are beside it: one that is alone in its step takes as much as one of the safe limit.
            cost = min(plan.phase_plan.largest_cost, plan.phase_plan.rules.safe_limit)
            with self.explorer.worst_case(plan.limits.training, cost) as (run, resident):
                for _ in range(self.training.find_batch_size_steps_per_trial):
                    with self.meter.measuring([*resident, held]):
                        run()
            return True
        return False

    def _data_error(self, need_bytes: float, capacity_bytes: int) -> DoesNotFitError:
        return DoesNotFitError(
            "The data must fit on the device beside a training step (training.data_on_device=on)",
            value=f"they take {size_text(self.data_bytes)} of {size_text(capacity_bytes)}",
            remedy="Give --data-on-device auto",
            details=OutOfMemoryDetails(need_bytes=round(need_bytes)),
        )

    def explore(
        self,
        request: PlanRequest,
        factor: float,
        *,
        held_bytes: int = 0,
        earlier: EarlierSearch | None = None,
        recorded: RecordedPhase | None = None,
    ) -> DeviceLimits:
        """Finds the limits of the device, or confirms recorded ones or an earlier run's; leaves random generators as
        they were.
        """
        generators = capture_generators()
        self.explorer.count_others_state()
        with self.reporter.stage("finding what fits in memory", unit="trials") as stage:

            def upper(costs: BatchCosts) -> float:
                return search_upper(request, costs, factor=factor)

            if isinstance(self.meter, AbsentGpuMeter):
                # No training needs the recorder of CUDA's dispatch.
                from can_train.fit.recorded_limits import predict_limits, predict_without_values

                if self.explorer.is_on_meta:
                    limits = predict_without_values(self.explorer, upper)
                else:
                    limits = predict_limits(self.explorer, upper)
            else:
                limits = self.explorer.explore(
                    upper, held_bytes=held_bytes, on_trial=lambda _: stage.advance(1), earlier=earlier,
                    recorded=recorded,
                )  # fmt: skip
        restore_generators(generators)
        is_compiled = self.training.compile != "off" and compiles_on(self.meter) and not self.meter.is_host
        return replace(limits, saved_share=SAVED_SHARE) if is_compiled else limits

    def record(self) -> RecordedPhase:
        """Records the lines of a device that is not at hand; raises NoCudaDispatchError where it cannot."""
        # No training needs the recorder of CUDA's dispatch.
        from can_train.fit.recorded_limits import record_phase

        samples = price(self.task, self.task.train_rows, None)
        self.explorer.count_others_state()
        return record_phase(self.explorer, search_upper(self.request(), samples, factor=PROVISIONAL))

    def _same_batch(self, frozen: RunPlan) -> PlanRequest:
        batch = frozen.phase_plan.logical_batch
        return replace(self.request(), mode="opt", requested_batch=batch, lr_scale="none", micro_batch_size=0,
                       batches_per_step=frozen.phase_plan.batches_per_step)  # fmt: skip

    def _again(self, frozen: RunPlan, limits: DeviceLimits, factor: FactorRule, *, beside_bytes: int = 0) -> RunPlan:
        """Plans the same batch under limits; the limits include `beside_bytes` of other tensors on the device."""
        request, before = self._same_batch(frozen), frozen.phase_plan
        again = self._resolved(request, limits, frozen.skipped, factor, beside_bytes=beside_bytes)
        phase_plan = replace(again.phase_plan, binding_limit=before.binding_limit, lr_factor=before.lr_factor)
        return replace(again, phase_plan=phase_plan)

    def _resolved(
        self,
        request: PlanRequest,
        limits: DeviceLimits | None,
        skipped: tuple[int, ...],
        rule: FactorRule,
        *,
        beside_bytes: int = 0,
    ) -> RunPlan:
        phase, training = None if limits is None else limits.training, self.training
        orders = planned_orders(self.task, skipped, seed=training.seed, epochs=training.epochs)
        order = price(self.task, next(orders), phase)
        # Samples that cost the same cost so in any order; epochs that differ have other numbers of them.
        is_uniform = order.is_uniform
        alike = is_uniform and not epochs_differ(self.task, training.epochs)
        other_epochs = [] if alike else [price(self.task, rows, phase) for rows in orders]
        # Buffers of shards come and go with other ranks.
        needs_no_margin = is_uniform and self.explorer.rung.ranks == 1
        decided = rule.decide(limits if request.searches else None, is_uniform=needs_no_margin)
        shares = epoch_shares(self.task, skipped, seed=training.seed, epochs=training.epochs)
        rules = request.rules if limits is None else limits.beside_gradients(request.rules)
        request = replace(request, epoch_shares=shares, rules=rules)
        resolve = partial(
            resolve_plan,
            order=order,
            tuned_limit=phase.tuned_limit if phase is not None and request.searches else None,
            factor=decided.value,
            other_epochs=other_epochs,
        )
        plan, other = resolve(request), None
        if self._other_rung is not None and limits is not None:
            other = self._other_rung.beside(beside_bytes)
        others = [] if other is None else self._candidates_on(other, request, skipped)
        if choice := self._choose_size(request, plan, order, rule, others):
            plan = _with_choice(plan, choice, resolve(replace(request, rules=choice.in_rules(request.rules))))
            if other is not None and limits is not None:
                plan = _with_other_rung(plan, choice, other, limits)
        notices = [*self.task.notices(), *self.meter.notices]
        if training.compile != "off":
            notices += compile_notices(training.compile, self.meter)
        notices += format_notices(training, self.model, self.meter)
        if training.order == "bucketed":
            notices.append(
                "training.order=bucketed: batches hold samples of about the same size, which changes training"
            )
        is_split = plan.most_parts > 1 or (choice is not None and bool(choice.trials))
        notices += self.batch_dependence.sentences(split=is_split, ranks=self.ranks)
        samples, on_host = None, self.explorer.host_state_bytes if self.explorer.rung.offload_optimizer else 0
        if limits is not None:
            if limits.not_recorded_because:
                notices.append(f"Small batches on the CPU alone predict the memory: {limits.not_recorded_because}")
            if limits.recorded and limits.samples_of_sizes:
                step = counted(limits.samples_of_sizes, "sample")
                notices.append(f"Some sizes depend on values: recorded batches have the sizes of {step}, in proportion")
            if request.searches and not limits.training.model.hidden:
                samples = int(self.ranks * _room(limits, plan, decided.aim) / max(order.total / len(order), 1e-9))
                notices += spare_room(request, plan.logical_batch, len(order), samples)
            notices += too_large_notices(plan, limits, training)
            notices += limits_notices(limits)
        if skipped:
            notices.append(f"oversize=skip leaves {len(skipped)} of {len(self.task.train_rows)} training samples out")
        return RunPlan(phase_plan=plan, limits=limits, factor=decided, skipped=skipped, ranks=self.ranks,
                       notices=tuple(notices), phase=self.phase.name, room_samples=samples,
                       rung=self.explorer.rung, state_on_host_bytes=on_host, micro_batch=choice, other_rung=other,
                       saved_on_host_bytes=self._saved_on_host(plan.largest_cost, phase))  # fmt: skip

    def _choose_size(
        self,
        request: PlanRequest,
        plan: PhasePlan,
        order: BatchCosts,
        rule: FactorRule,
        others: Sequence[SizeCandidate],
    ) -> MicroBatchChoice | None:
        """Chooses the fastest size of micro-batches that fit, of the rung in force and of `others` on another rung;
        None where the largest are to be taken.
        """
        training, rules = self.training, request.rules
        # The user's own options decide how batches are cut.
        is_free = request.searches and rules.splits == 1 and not (rules.equal or rules.threshold)
        is_free = is_free and rules.target == np.inf and training.compile == "off"
        wanted = training.micro_batch
        if wanted == "auto":
            # On a processor the same line gives the same bits, run after run. The time of a simulation says nothing of
            # a GPU.
            is_gpu = not self.meter.is_host and not self.meter.key.startswith("sim-")
            wanted = "fastest" if is_gpu and not training.deterministic else "largest"
        if rule.times is None or wanted == "largest" or not is_free:
            return None
        # No smaller micro-batch fits beside the gradients of another.
        if self.explorer.alone:
            return None
        # A choice by time may not change the gradient.
        if self.batch_dependence.terms or not self.batch_dependence.measured:
            return None
        rung, other = self.explorer.rung, self._other_rung
        candidates = size_candidates(request, plan, order, rung=rung.timed_as)
        if others and other is not None:
            candidates = _both_rungs(candidates, others, is_further=rung.goes_further(other.rung))
        steps = int(plan.mean_steps_per_epoch * training.epochs)
        choice = choose_size(candidates, self._times(rule), total_steps=steps)
        return replace(choice, sample_cost=float(order.each().mean()))

    def _candidates_on(self, other: OtherRung, request: PlanRequest, skipped: tuple[int, ...]) -> list[SizeCandidate]:
        """Returns the sizes that micro-batches may have on another rung."""
        training, phase = self.training, other.limits.training
        rows = next(planned_orders(self.task, skipped, seed=training.seed, epochs=training.epochs))
        order = price(self.task, rows, phase)
        request = replace(request, rules=other.limits.beside_gradients(request.rules))
        plan = resolve_plan(request, order, tuned_limit=phase.tuned_limit, factor=other.factor)
        return size_candidates(request, plan, order, rung=other.rung.timed_as)

    def _saved_on_host(self, cost: float, phase: SearchResult | None) -> int:
        """Returns the bytes of saved tensors of a micro-batch that wait on the host, in proportion to its cost."""
        if phase is None or self.explorer.rung not in self.explorer.left_most:
            return 0
        left_bytes, rows = self.explorer.left_most[self.explorer.rung]
        return round(left_bytes * cost / max(price(self.task, rows, phase).total, 1.0))

    @property
    def _counted_rows(self) -> Rows:
        """The training samples that are counted: the first ones of a stream stand for the others."""
        rows = self.task.train_rows
        return np.unique(rows) if self.task.in_order else rows

    def _oversize(self, phase: SearchResult) -> Rows:
        """Returns the rows of the samples that do not fit by themselves, the costliest first."""
        rows = self._counted_rows
        each = price(self.task, rows, phase).each()
        ranked = np.argsort(-each, kind="stable")
        # A search that ended below the limit was up to a batch with every sample in it.
        limit = np.inf if phase.capped else phase.tuned_limit * (1 + ROUNDING)
        return rows[ranked[each[ranked] > limit]]

    def _check_evaluated(self, limits: DeviceLimits, *, held_bytes: int = 0) -> list[str]:
        """Raises DoesNotFitError where validation samples do not fit by themselves; returns a notice about test samples
        that do not: they decide nothing in training, and a trained run is judged on another device. `held_bytes` of the
        optimizers' state are on the device already.
        """
        if self.explorer.rung.ranks > 1:
            # A pass on shards needs all ranks.
            return []
        if (error := self._misfit(limits, self.task.validation_rows, _VALIDATION_MUST_FIT, held_bytes)) is not None:
            raise error
        error = None if held_bytes else self._misfit(limits, self.task.tested_rows, _TEST_MUST_FIT, 0)
        judged = "The run is trained all the same; can-train resume RUN --device cpu then judges it"
        return [] if error is None else [f"{error.rule}: {error.value}. {judged}"]

    def _misfit(self, limits: DeviceLimits, rows: Rows, rule: str, held_bytes: int) -> DoesNotFitError | None:
        """Returns the error that names the samples of a set that do not fit by themselves; None where all fit."""
        phase, beside_state = limits.evaluation, rule == _VALIDATION_MUST_FIT
        if not len(rows):
            return None
        each = price(self.task, rows, phase).each()
        ranked = np.argsort(-each, kind="stable")
        rows, each = rows[ranked], each[ranked]
        # Training samples fit, and so does the largest part that was evaluated.
        known = min(float(price(self.task, self._counted_rows, phase).each().max()), phase.tuned_limit)
        num_unknown = int((each > known * (1 + ROUNDING)).sum())
        state_bytes = 0 if beside_state else self.explorer.state_bytes
        if not num_unknown:
            return None
        measure = partial(self.explorer.peak_on_host, evaluates=True, beside_state=beside_state)
        room = predicted_room(limits.capacity_bytes)
        if self.verify and not isinstance(self.meter, AbsentGpuMeter):
            fits = partial(self.explorer.evaluation_fits, beside_state=beside_state, held_bytes=held_bytes)
            num_oversize = _first_that_fits(rows[:num_unknown], fits)
        elif phase.model.explains:
            num_oversize = int((each[:num_unknown] > phase.cost_within(room + state_bytes)).sum())
        else:
            num_oversize = _first_that_fits(rows[:num_unknown], lambda row: (measure(row) or 0) <= room)
        if not num_oversize:
            return None
        cost = float(each[0])
        predicted = None if phase.is_far(cost) else phase.peak_bytes(cost) - state_bytes
        need, needed = self._need(predicted, phase, limits, lambda: measure(int(rows[0])))
        return DoesNotFitError(
            f"{rule}, and {num_oversize} of {len(rows)} do not",
            value=f"{self._named(rows[:num_oversize])}; they need {needed}",
            remedy=f"Take a device that holds them ({cards_that_hold(need)}), choose a smaller model by its "
            "settings (--set), or leave them out of the data",
            details=OutOfMemoryDetails(need_bytes=round(need), in_evaluation=True),
        )

    def _named(self, rows: Rows) -> str:
        more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
        return ", ".join(self.task.describe(int(row)) for row in rows[:_NAMED]) + more

    def _oversize_error(self, oversize: Rows, limits: DeviceLimits) -> DoesNotFitError:
        phase = limits.training
        predicted = phase.peak_bytes(price(self.task, oversize[:1], phase).total)
        need, needed = self._need(predicted, phase, limits, lambda: self.explorer.peak_on_host(int(oversize[0])))
        num_samples = len(self._counted_rows)
        leave_out = "Leave them out in the stream" if self.task.in_order else "--oversize skip leaves them out"
        return DoesNotFitError(
            f"Every training sample must fit on the device by itself, and {len(oversize)} of {num_samples} do not",
            value=f"{self._named(oversize)}; they need {needed}",
            remedy=f"{leave_out}; cards that would hold them: {cards_that_hold(need)}",
            details=OutOfMemoryDetails(need_bytes=round(need)),
        )

    def _need(
        self, predicted: float | None, phase: SearchResult, limits: DeviceLimits, measure: Callable[[], int | None]
    ) -> tuple[float, str]:
        """Returns the peak of a sample that does not fit, and a clause that says it: as predicted, or as measured where
        nothing predicts it (None), or the prediction does not explain it.
        """
        capacity_bytes, capacity = limits.capacity_bytes, size_text(limits.capacity_bytes)
        need: float | None = predicted
        if predicted is None or not phase.model.explains or predicted <= capacity_bytes:
            measured = measure()
            need = measured if measured is not None or not phase.model.explains else predicted
        if need is None:
            return capacity_bytes + 1, f"more than the {capacity} of the device"
        pages = TOO_LITTLE_FOR_PAGES if need <= capacity_bytes else ""
        return need, f"up to {size_text(need)} of {capacity}{pages}"


@dataclass(frozen=True)
class Planners:
    """The planners of a run's phases, in their order; together they make one plan, with one logical batch."""

    phases: tuple[Planner, ...]

    @classmethod
    def of_phases(cls, planner: Planner) -> Planners:
        """Makes a planner for each phase of a task; each leaves room for the other phases' optimizers."""
        phases = planner.task.phases()
        if len(phases) == 1 and phases[0].loss is None and not phases[0].parameters:
            return cls((replace(planner, phase=phases[0]),))
        alone = [replace(planner, task=planner.task.in_phase(phase), phase=phase) for phase in phases]
        explorers = [planner.explorer for planner in alone]
        seconds = planner.search_seconds / len(phases)
        return cls(tuple(replace(planner, other_phases=others, search_seconds=seconds)
                         for planner, others in zip(alone, others_of(explorers), strict=True)))  # fmt: skip

    @property
    def first(self) -> Planner:
        """The first phase's; all have the same run, model and device."""
        return self.phases[0]

    def make(self, factor: FactorRule) -> RunPlan:
        """Makes the plan; raises as `Planner.make` does."""
        plan = self.joined(self.on_common_rungs([partial(planner.make, factor) for planner in self.phases]), factor)
        return self.place_data(plan, factor)

    def on_common_rungs(self, plans_of: Sequence[Callable[[], RunPlan]]) -> list[RunPlan]:
        """Plans each phase by its function; where one needs the memory of all optimizers' states, all states wait on
        the host.
        """
        plans = [plan() for plan in plans_of]
        if len({made.rung.offload_optimizer for made in plans}) == 1:
            return plans
        for planner in self.phases:
            planner.state_leaves = True
        try:
            return [plan() for plan in plans_of]
        finally:
            for planner in self.phases:
                planner.state_leaves = False

    def place_data(self, plan: RunPlan, factor: FactorRule) -> RunPlan:
        """Decides whether the data live on the device, and plans the same batch beside them.

        Raises:
            DoesNotFitError: `training.data_on_device=on`, and they do not fit.
        """
        planner, setting = self.first, self.first.training.data_on_device
        if not planner.data_bytes:
            return plan
        key = planner.meter.key if plan.limits is None else plan.limits.device_key
        if setting == "off" or key.startswith("cpu-"):
            why = f"training.data_on_device={setting}" if setting == "off" else "the device is the host"
            return self._placed(plan, on_device=False, reason=why)
        if not all(phase.limits and phase.phase_plan.safety_factor is not None for phase in plan.phases):
            return self._place_unsearched(plan)
        try:
            beside = [each.beside_data(phase, factor) for each, phase in zip(self.phases, plan.phases, strict=True)]
        except DoesNotFitError:
            if setting == "on":
                raise
            return self._placed(plan, on_device=False, reason="they do not fit beside a step")
        both, reason = [*zip(plan.phases, beside, strict=True)], "training.data_on_device=on"
        if setting != "on":
            if not all(_is_cut_alike(phase, other) for phase, other in both):
                return self._placed(plan, on_device=False, reason="micro-batches would become smaller")
            beside, reason = [_within(*phases) for phases in both], "micro-batches stay as large"
            # On a small device the pages of the allocator may be in the way of memory that is there in total.
            if not all(each.fits_beside_data(phase) for each, phase in zip(self.phases, beside, strict=True)):
                return self._placed(plan, on_device=False, reason="a step was tried and does not fit")
        return self._placed(replace(beside[0], later=tuple(beside[1:])), on_device=True, reason=reason)

    def _place_unsearched(self, plan: RunPlan) -> RunPlan:
        """Decides for micro-batches whose size was given, by the peak that is predicted of them."""
        planner = self.first
        if planner.training.data_on_device == "on":
            return self._placed(plan, on_device=True, reason="training.data_on_device=on")
        sizes, room_bytes = [phase.fixed_size for phase in plan.phases], predicted_room(planner.meter.capacity_bytes)
        if not all(sizes):
            return self._placed(plan, on_device=False, reason="nothing predicts the memory of a step")
        peak = max(size.base_bytes + size.largest_cost for size in sizes if size is not None)
        if peak + planner.data_bytes > room_bytes:
            return self._placed(plan, on_device=False, reason="they do not fit beside a step")
        return self._placed(plan, on_device=True, reason="they fit beside micro-batches of the given size")

    def _placed(self, plan: RunPlan, *, on_device: bool, reason: str) -> RunPlan:
        return replace(plan, data=DataPlacement(num_bytes=self.first.data_bytes, on_device=on_device, reason=reason))

    def joined(self, plans: Sequence[RunPlan], factor: FactorRule) -> RunPlan:
        """Joins the plans of all phases: with the smallest of their logical batches, and the samples that all keep."""
        agreed = [planner.common(plans, plan, factor) for planner, plan in zip(self.phases, plans, strict=True)]
        return replace(agreed[0], later=tuple(agreed[1:]))

    def replan_same_batch(self, frozen: RunPlan, factor: FactorRule, *, held_bytes: int = 0) -> RunPlan:
        """Plans anew how a plan's logical batch is cut; `held_bytes` of all optimizers' state are there already."""
        first, *later = self.on_common_rungs(
            [partial(planner.replan_same_batch, phase, factor, held_bytes=held_bytes)
             for planner, phase in zip(self.phases, frozen.phases, strict=True)]
        )  # fmt: skip
        return replace(first, later=tuple(later), data=frozen.data)

    def common(self, plans: Sequence[RunPlan], ours: RunPlan, factor: FactorRule) -> RunPlan:
        """Plans the smallest logical batch of all ranks' plans, without the samples that any of them leaves out."""
        first, *later = (planner.common([plan.phases[number] for plan in plans], ours.phases[number], factor)
                         for number, planner in enumerate(self.phases))  # fmt: skip
        return replace(first, later=tuple(later), data=ours.data)


def _first_that_fits(rows: Rows, fits: Callable[[int], bool]) -> int:
    """Returns the place of the first sample that fits, by halves; samples are in order, the costliest first."""
    if fits(int(rows[0])):
        return 0
    least, most = 1, len(rows)
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(int(rows[middle])) else (middle + 1, most)
    return most


def on_no_rung(failures: Mapping[Rung, DoesNotFitError]) -> DoesNotFitError:
    """Returns the error of the first rung, with how much the further ones would take."""
    (_, first), *others = failures.items()
    on_host = next((error for _, error in others if error.details.of_host), None)
    if on_host is not None:
        # More memory of the host helps: a job is submitted again with more of it.
        on_host.value += f". On the device: {first.rule[0].lower()}{first.rule[1:]}, {first.value}"
        return on_host
    # Weights and the optimizer's state take as much on all of them.
    further = [(rung, error) for rung, error in others if error.rule == first.rule and error.value != first.value]
    # Of rungs with the same name, the last one goes furthest. The cost model of a rung tells the memory roughly: an
    # explanation beside the error may have recorded it.
    needs = {
        rung.name: f"about {size_text(error.details.need_bytes)} with --fit {rung.name}"
        for rung, error in further
        if error.details.need_bytes is not None
    }
    if needs:
        first.value += f"; {', '.join(needs.values())}"
    elif first.rule == MODEL_MUST_FIT and others:
        last, error = others[-1]
        first.value += f"; with --fit {last.name} {error.value}"
    elif others and first.details.need_bytes is None:
        first.value += f", also with --fit {' and '.join(dict.fromkeys(rung.name for rung, _ in others))}"
    return first


def _is_cut_alike(plan: RunPlan, beside: RunPlan) -> bool:
    """Tells whether micro-batches, and parts of an evaluation, are as large beside the data as without them."""
    before, after = plan.phase_plan, beside.phase_plan
    sizes = [(after.largest_cost, before.largest_cost), (beside.evaluation_limit.cost, plan.evaluation_limit.cost)]
    return after.most_parts == before.most_parts and all(new >= old * (1 - ROUNDING) for new, old in sizes)


def _within(plan: RunPlan, beside: RunPlan) -> RunPlan:
    """Returns a plan with the limits of another, within which it is cut alike."""
    rules, safety_factor = beside.phase_plan.rules, beside.phase_plan.safety_factor
    phase_plan = replace(plan.phase_plan, rules=rules, safety_factor=safety_factor)
    return replace(plan, limits=beside.limits, factor=beside.factor, phase_plan=phase_plan)


def _with_choice(largest: PhasePlan, choice: MicroBatchChoice, chosen: PhasePlan) -> PhasePlan:
    """Returns the plan of the chosen size, with the costs of the largest micro-batches if some steps try them."""
    if all(trial.cost <= choice.cost for trial in choice.trials):
        return chosen
    return replace(chosen, largest_cost=largest.largest_cost, largest_later_cost=largest.largest_later_cost)


def _with_other_rung(plan: PhasePlan, choice: MicroBatchChoice, other: OtherRung, own: DeviceLimits) -> PhasePlan:
    """Returns the plan with the peaks of steps that try another rung, as costs on the plan's own rung."""
    tried = [trial for trial in choice.trials if trial.rung == other.rung.timed_as]
    cost = other.cost_on(own, max((trial.cost for trial in tried), default=0.0))
    if not own.training.capped:
        # Both rungs fill the same share of the device.
        cost = min(cost, plan.rules.safe_limit)
    if not tried or cost <= plan.largest_cost:
        return plan
    has_later = any(trial.samples < plan.logical_batch for trial in tried)
    return replace(plan, largest_cost=cost, largest_later_cost=cost if has_later else plan.largest_later_cost)


def _both_rungs(
    own: Sequence[SizeCandidate], others: Sequence[SizeCandidate], *, is_further: bool
) -> list[SizeCandidate]:
    """Returns the sizes of two rungs: first the sizes of the first rung that fits, then the sizes of the further rung,
    which is slower where its micro-batches are no larger. `is_further` tells whether it is the own rung.
    """
    first, further = (others, own) if is_further else (own, others)
    return [*first, *(one for one in further if is_larger_size(one.samples, first[0].samples))]


def _fixed_size(plan: RunPlan, factor: FactorRule) -> PredictedLimit:
    assert plan.limits is not None, "a prediction is made of limits"
    training = plan.limits.training
    return PredictedLimit(tuned_limit=training.tuned_limit, capped=training.capped,
                          base_bytes=training.model.base_bytes, full_bytes=training.peak_bytes(training.tuned_limit),
                          largest_cost=plan.phase_plan.largest_cost, factor=factor.decide(plan.limits))  # fmt: skip


def _room(limits: DeviceLimits, plan: PhasePlan, aim: Aim) -> float:
    """Returns the largest cost of a micro-batch; predicted where the search stopped below it."""
    if not limits.training.capped:
        return plan.rules.safe_limit
    fits = limits.training.cost_within(aim.share * limits.capacity_bytes)
    return fits * (plan.safety_factor or 1.0) if aim == NO_AIM else fits
