"""The plan of a run: the plan of each phase with the limits, the safety factor and the rung that it rests on; and the
plan's sentences about its limits and about options that have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from can_train.fit.cost_model import EXPLAINED, UNWANTED, DeviceLimits, SearchResult
from can_train.fit.factor_rule import UNUSED, SafetyFactor
from can_train.fit.packing import ROUNDING, BatchCosts, MicroBatchLimit, SplitRules
from can_train.fit.plan import PhasePlan
from can_train.fit.precision import has_images
from can_train.fit.rungs import SPLIT_ALONE, Rung
from can_train.fit.search import SEARCH_SECONDS, SEARCH_SHARE
from can_train.fit.step_time import MicroBatchChoice
from can_train.io.units import size_text
from can_train.memory.catalogue import UNKNOWN
from can_train.memory.cuda_workspaces import AMPERE, Capability, capability_of
from can_train.memory.meters import AbsentGpuMeter, Meter, SimulatedMeter

if TYPE_CHECKING:
    from torch import nn

    from can_train.config.settings import TrainingSettings
    from can_train.task import BatchTask

Rows = NDArray[np.int64]
_UNKNOWN_BUDGET: Final = 0.5  # Share of the activations that compiled code keeps where no module was measured
_SMALL_SHARE: Final = 0.01  # of the device; of less memory no notice says how well it was predicted
_PADDED_SHARE: Final = 0.02  # Share of a mean sample's cost below which padded lengths do not matter: noise of a fit


@dataclass(frozen=True, kw_only=True)
class PredictedLimit:
    """The prediction for micro-batches whose size was given, so that nothing was searched for."""

    tuned_limit: float  # Largest cost that is predicted to fit, in bytes
    capped: bool  # Whether more was not looked for
    base_bytes: float  # Predicted peak without a micro-batch
    full_bytes: float  # Predicted peak of one at the tuned limit
    largest_cost: float  # Of the plan's micro-batches, in bytes
    factor: SafetyFactor  # Share of the tuned limit that a search would have allowed


@dataclass(frozen=True, kw_only=True)
class DataPlacement:
    """Where the data of a run are, which batches can be gathered from."""

    num_bytes: int = 0  # Their size; 0: the task's batches are made on the host
    on_device: bool = False
    reason: str = ""  # Why they are there, as a clause


@dataclass(frozen=True, kw_only=True)
class OtherRung:
    """A rung beside a plan's own, which some steps try because it may be faster."""

    rung: Rung
    limits: DeviceLimits
    factor: float  # The safety factor on it

    def rules(self, plan: PhasePlan) -> SplitRules:
        """Returns rules that cut the plan's batches on this rung."""
        tuned = self.limits.training.tuned_limit
        rules = self.limits.beside_gradients(plan.rules)
        return replace(rules, safe_limit=self.factor * tuned, tuned_limit=tuned)

    def cost_on(self, own: DeviceLimits, cost: float) -> float:
        """Returns the cost of a micro-batch on the plan's own rung that has the peak of one of `cost` on this rung."""
        return max(own.training.cost_within(self.limits.training.peak_bytes(cost)), 0.0)

    def beside(self, num_bytes: int) -> OtherRung:
        """Returns the rung beside other tensors on the device; negative: without them."""
        return replace(self, limits=self.limits.beside(num_bytes))


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run with its basis."""

    phase_plan: PhasePlan  # `plan` in files
    limits: DeviceLimits | None  # Limits of the device; None without a search
    factor: SafetyFactor = UNUSED  # The safety factor in force
    skipped: tuple[int, ...] = ()  # Rows of training samples that are left out because they do not fit
    ranks: int = 1  # Processes that share the logical batch
    notices: tuple[str, ...] = ()  # Further sentences for the user
    phase: str = ""  # Name of the phase that it is for; empty where there is one only
    later: tuple[RunPlan, ...] = ()  # The plans of the phases after the first
    fixed_size: PredictedLimit | None = None  # Prediction for micro-batches whose size was given
    data: DataPlacement = DataPlacement()  # Of the run, in the plan of its first phase; the limits include the data
    room_samples: int | None = None  # Predicted to fit at once on all devices; None without a search
    rung: Rung = SPLIT_ALONE  # That steps are computed on
    rung_is_asked: bool = False  # The settings name the rung or its modules; else it is the first on which a step fits
    rung_saves_bytes: int = 0  # Bytes that the largest sample saves less for the backward pass; 0: not known
    state_on_host_bytes: int = 0  # Of all optimizers' state that waits on the host between steps
    saved_on_host_bytes: int = 0  # Most that the saved tensors of a micro-batch take of the host
    micro_batch: MicroBatchChoice | None = None  # The size that is the fastest; None: it is not looked for
    rung_longer: float = 0.0  # Predicted share of a step's time that computing modules again adds
    other_rung: OtherRung | None = None  # That some steps try; the first rung that fits, where a further one is faster

    @property
    def phases(self) -> tuple[RunPlan, ...]:
        """The plans of all phases, in their order."""
        return (self, *self.later)

    @property
    def on_host_bytes(self) -> int:
        """Bytes of the device's tensors that wait in the memory of the host."""
        return self.state_on_host_bytes + self.saved_on_host_bytes

    @property
    def memory_budget(self) -> float:
        """Share of a sample's activations that the rung keeps for the backward pass, where modules are computed again:
        the budget of a compiler that chooses by itself which ones these are.
        """
        if not self.rung.recompute:
            return 1.0
        if not self.rung_saves_bytes:
            return _UNKNOWN_BUDGET
        kept_bytes = self.phase_plan.largest_cost / self.phase_plan.largest_micro_batch
        return kept_bytes / (kept_bytes + self.rung_saves_bytes)

    @property
    def tries_other_rung(self) -> bool:
        """Whether some steps are computed on another rung."""
        other, choice = self.other_rung, self.micro_batch
        return other is not None and choice is not None and any(
            trial.rung == other.rung.timed_as for trial in choice.trials
        )  # fmt: skip

    @property
    def fullest(self) -> RunPlan:
        """The plan of the phase with the highest predicted peak: later runs learn from it."""
        return max(self.phases, key=lambda plan: plan.predicted_peak_bytes or 0.0)

    @property
    def all_notices(self) -> tuple[str, ...]:
        """The notices of all phases, which have most of them in common, each once."""
        return tuple(
            dict.fromkeys(text for phase in self.phases for text in (*phase.phase_plan.notices, *phase.notices))
        )

    def shares_with(self, other: RunPlan) -> bool:
        """Tells whether two ranks' plans are for the same samples and the same logical batch."""
        return self.phase_plan.logical_batch == other.phase_plan.logical_batch and self.skipped == other.skipped

    def training_costs(self, task: BatchTask, rows: Rows) -> BatchCosts:
        """Prices a batch of training; without a cost model a sample costs its share of the features."""
        return price(task, rows, None if self.limits is None else self.limits.training)

    def evaluation_costs(self, task: BatchTask, rows: Rows) -> BatchCosts:
        """Prices a batch of evaluation."""
        return price(task, rows, None if self.limits is None else self.limits.evaluation)

    @property
    def evaluation_limit(self) -> MicroBatchLimit:
        """The limit of a part of an evaluation: its safe limit, and no more memory than a step takes."""
        if self.limits is None or self.predicted_peak_bytes is None:
            return MicroBatchLimit(samples=self.phase_plan.largest_micro_batch)
        evaluation = self.limits.evaluation
        safe_limit = (self.phase_plan.safety_factor or 1.0) * evaluation.tuned_limit
        return MicroBatchLimit(cost=min(safe_limit, evaluation.cost_within(self.predicted_peak_bytes)))

    @property
    def predicted_peak_bytes(self) -> float | None:
        """Peak of a step, which evaluation stays below; None without a cost model."""
        if self.limits is None:
            return None
        return self.limits.step_peak_bytes(self.phase_plan.largest_cost, self.phase_plan.largest_later_cost)

    @property
    def whole_batch_peak_bytes(self) -> float | None:
        """Peak of a step whose logical batch is not split, on each rank its share; None without a cost model."""
        return None if self.limits is None else self.limits.step_peak_bytes(self.phase_plan.batch_cost, 0.0)

    def without_data(self, reason: str) -> RunPlan:
        """Returns the plan with the data back on the host, for a reason."""
        if not self.data.on_device:
            return self
        first, *later = (phase._beside(-self.data.num_bytes) for phase in self.phases)
        return replace(first, later=tuple(later), data=replace(self.data, on_device=False, reason=reason))

    def _beside(self, num_bytes: int) -> RunPlan:
        if self.limits is None:
            return self
        other = None if self.other_rung is None else self.other_rung.beside(num_bytes)
        return replace(self, limits=self.limits.beside(num_bytes), other_rung=other)

    def to_plain(self) -> dict[str, Any]:
        """Returns strict JSON values: an infinite limit is null."""
        # Costs may be numpy's floats.
        plain = msgspec.json.decode(msgspec.json.encode(replace(self, later=()), enc_hook=float))
        return {"plan": plain.pop("phase_plan"), **plain, "later": [phase.to_plain() for phase in self.later]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RunPlan:
        """Reads values that `to_plain` made; raises KeyError, TypeError or ValueError where they are not a plan."""
        rules = {name: np.inf if value is None else value for name, value in plain["plan"]["rules"].items()}
        later = tuple(cls.from_plain(phase) for phase in plain["later"])
        first = msgspec.convert({**plain, "phase_plan": {**plain["plan"], "rules": rules}, "later": ()}, cls)
        return replace(first, later=later)


def still_fits(plan: RunPlan, meter: Meter) -> bool:
    """Tells whether a plan made earlier holds on this device."""
    return all(
        phase.limits is None
        or (phase.limits.device_key == meter.key and (phase.predicted_peak_bytes or 0.0) <= meter.capacity_bytes)
        for phase in plan.phases
    )


def price(task: BatchTask, rows: Rows, phase: SearchResult | None) -> BatchCosts:
    """Prices a batch; without a cost model a sample costs its share of the features."""
    counts = task.batch_features(rows)
    if phase is not None and any(phase.model.coefficients):
        return BatchCosts.priced(phase.model, counts)
    # In units of the mean sample, so that the solver sees uniform data as uniform. A rank's share may have none.
    means = np.maximum(counts.sum(axis=0) / max(len(counts), 1), 1e-9) * counts.shape[1]
    return BatchCosts(counts, task.memory_features, 1 / means)


def too_large_notices(plan: PhasePlan, limits: DeviceLimits, training: TrainingSettings) -> list[str]:
    """Warns where the user's options make micro-batches too large."""
    fits = limits.training.tuned_limit + (plan.rules.gradient_cost if plan.most_parts == 1 else 0)
    if limits.training.capped or plan.largest_cost <= fits * (1 + ROUNDING):
        return []
    need, there = size_text(limits.training.peak_bytes(plan.largest_cost)), size_text(limits.capacity_bytes)
    needs = f"one of {plan.largest_micro_batch} samples is predicted to need {need} ({there} usable)"
    if training.micro_batch_size:
        option = f"micro_batch_size={training.micro_batch_size} is more than fits"
    elif training.min_micro_batch_size > 1:
        option = f"min_micro_batch_size={training.min_micro_batch_size} forbids micro-batches that fit"
    else:
        option = "The micro-batches are more than fits"
    can_split = training.adaptive_micro_batch and plan.largest_micro_batch > training.min_micro_batch_size
    outcome = "it will run out of memory and be split" if can_split else "the run will fail for lack of memory"
    return [f"{option}: {needs}; {outcome}"]


def limits_notices(limits: DeviceLimits) -> Iterator[str]:
    """Says where the features do not account for the measured memory, where samples take the same memory whatever
    their padded lengths, and where a search ended for lack of time.
    """
    phases = (("training", limits.training), ("evaluation", limits.evaluation))
    for mode, phase in phases:
        names = ", ".join(dict.fromkeys(feature.name for feature in phase.model.features))
        if phase.model.hidden not in ("", UNWANTED):
            basis = "sizes rest on trials" if phase.trials else "sizes rest on small batches"
            yield f"How the memory of {mode} grows with batches was not seen: {phase.model.hidden}; {basis}"
            continue
        # Of a hundredth of the device, the allocator's rounding is a large part, and no size depends on it.
        if phase.peak_bytes(phase.tuned_limit) < _SMALL_SHARE * limits.capacity_bytes:
            continue
        if not phase.model.explains:
            basis = "sizes rest on trials" if phase.trials else "a run tries the sizes that are only predicted here"
            residual = f"the probes lie up to {phase.model.relative_residual:.0%} off"
            yield f"The memory of {mode} does not follow its features ({names}): {residual}; {basis}"
        elif phase.model.grows and not limits.recorded and abs(phase.measured_ratio - 1) > EXPLAINED:
            took = f"{phase.measured_ratio:.1%} of the memory predicted from small batches ({names})"
            # Of the samples alone: weights and state are in both peaks.
            yield f"The samples of a full batch of {mode} took {took}; the sizes rest on the full batch"
    features, shares = limits.training.model.features, limits.training.mean_shares
    padded = dict.fromkeys(feature.name for feature in features if feature.padding)
    of_lengths = sum(share for feature, share in zip(features, shares, strict=True) if feature.name in padded)
    if padded and of_lengths <= _PADDED_SHARE * sum(shares):
        names = ", ".join(padded)
        fixed = f"Memory does not grow with the lengths of samples ({names}): they seem to be padded to a fixed length"
        yield f"{fixed}; padded to the longest of the samples that are collated, short ones would take less"
    for mode, phase in phases:
        if phase.untried and phase.capped:
            predicted = "is predicted to fit in half of the device" if phase.model.explains else "was probed"
            tried = f"The largest batch of {mode} that {'was tried' if phase.trials else predicted}"
            more = f"a search keeps to {SEARCH_SHARE:.0%} of an epoch or {SEARCH_SECONDS:g} s"
            larger = f"one of {phase.text(phase.untried)}" if phase.model.grows else "a larger one"
            takes = f"takes {phase.text(phase.tuned_limit)}"
            yield f"{tried} {takes}; {larger} was not tried for lack of time ({more})"


def format_notices(training: TrainingSettings, model: nn.Module, meter: Meter) -> Iterator[str]:
    """Says where TF32 or the format of images has no effect, and how TF32 changes products."""
    if training.channels_last and not has_images(model):
        yield "training.channels_last has no effect: no weight has four dimensions, as those of convolutions of images"
    if not training.tf32:
        return
    without = "training.tf32 has no effect"
    if training.precision == "fp64":
        yield f"{without} in fp64"
    elif meter.is_host or isinstance(meter, SimulatedMeter):
        yield f"{without} on a {'processor' if meter.is_host else 'simulated GPU'}"
    elif _capability(meter) < AMPERE:
        yield f"{without} on {meter.name}: NVIDIA GPUs have it from Ampere on"
    else:
        yield "training.tf32: products of single precision are computed with 10 of their 23 bits after the point"


def _capability(meter: Meter) -> Capability:
    if isinstance(meter, AbsentGpuMeter):
        generation = meter.target.generation
        return AMPERE if generation == UNKNOWN else capability_of(generation)
    return torch.cuda.get_device_capability(meter.device)
