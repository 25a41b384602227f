"""Plans a run for devices that need not be at hand, without training and without writing anything.

`report.py` writes the plans as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from can_train.config.compose import from_plain
from can_train.config.resolved import PathSettings, ResolvedRun, state_dir
from can_train.config.settings import ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings
from can_train.config.task_settings import TaskSettings, describe
from can_train.errors import DOES_NOT_FIT, ConfigError, DoesNotFitError, check_kinds, errors_of_steps
from can_train.factors.store import factor_rule, read_factor_rule
from can_train.fit.explore import model_does_not_fit
from can_train.fit.factor_rule import PROVISIONAL, FactorRule
from can_train.fit.planner import Planner, Planners, on_no_rung
from can_train.fit.random_state import capture_generators, restore_generators
from can_train.fit.run_plan import RunPlan
from can_train.fit.rungs import SPLIT_ALONE, Rung
from can_train.fit.sharding import fits_whole, sharded_weights, unshardable_because
from can_train.io.units import size_text
from can_train.memory import catalogue, meters
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.catalogue import UsableMemory
from can_train.memory.simulated.allocator import reserved_for
from can_train.reporter import Reporter, SilentReporter
from can_train.training.chosen_weights import average_tensors
from can_train.training.limit_recorder import AbsentRun
from can_train.training.loading import fresh_model, load_task, nothing_left_behind, sample_task
from can_train.training.reference_models import ReferenceModelPlan
from can_train.training.sample_task import Task, TaskContext

if TYPE_CHECKING:
    from can_train.fit.cost_model import DeviceLimits
    from can_train.task import BatchTask
    from can_train.training.explain import Explanation

# Share of an allocator's memory that is in use where it is badly fragmented; on the simulated GPU it was at least 0.83.
_LITTLE_IN_USE: Final = 0.7

# Batches that are tried for a small GPU: its room is then known to 2 % of itself.
_TRIALS: Final = 4


def find_targets(run: ResolvedRun, names: Sequence[str], reporter: Reporter) -> list[UsableMemory]:
    """Returns the devices to plan for: the named ones, or the run's own device where none is named.

    Args:
        run: The resolved run.
        names: Names of GPUs, in the spelling of the catalogue, a driver or a scheduler; the whole memory of a GPU that
            the catalogue does not have, `16GiB`; simulated GPUs, `sim:2GiB`; devices here, `cuda:0`; several of a kind,
            `2xrtx-4090`.
        reporter: Receives notices of measurements that cannot be read.

    Raises:
        ConfigError: A name or a size is not understood.
        DeviceError: The run's device cannot be used.
    """
    # The same card in two spellings is one target.
    targets = {target.label: target for name in names for target in [_named_target(run, name, reporter)]}
    return [*targets.values()] or [_device_target(run.device, reporter)]


def _named_target(run: ResolvedRun, name: str, reporter: Reporter) -> UsableMemory:
    count, one = catalogue.split_count(name)
    if one.partition(":")[0] in ("auto", "cpu", "cuda", "sim"):
        return replace(_device_target(one, reporter), count=count)
    card = catalogue.target_card(one)
    constants = catalogue.read_gpu_constants(state_dir(run.paths), card.key, reporter)
    return replace(catalogue.usable(card, constants), count=count)


def _device_target(device: str, reporter: Reporter) -> UsableMemory:
    meter = meters.open_meter(device)
    others: tuple[catalogue.MemoryUse, ...] = ()
    if isinstance(meter, meters.SimulatedMeter):
        size, name, source = meter.total_bytes, meter.name, "simulated"
        if refused := size - meter.gpu.allocator.allowed_bytes:
            others = (catalogue.MemoryUse("per_process_memory_fraction", refused),)
        for notice in meter.notices:
            reporter.notice(notice)
    else:
        size, name, source = meter.total_bytes, meter.name, "as this machine has it now"
        others = (catalogue.MemoryUse("in use already", meter.total_bytes - meter.capacity_bytes),)
    return UsableMemory(key=meter.key, name=name, total_bytes=size, subtracted=others, source=source)


_CAVEATS: Final = {catalogue.ROCM: catalogue.ROCM_CAVEAT, catalogue.UNKNOWN: catalogue.UNKNOWN_CAVEAT}
"""What is not known of GPUs of some generations."""


@dataclass(frozen=True, kw_only=True)
class CardPlan:
    """The plan for one device. The phase with the highest peak gives the figures of a task with several phases; all are
    None where the training does not fit, and the peak's where nothing predicts it.
    """

    target: UsableMemory  # The device
    plan: RunPlan | None  # The plan; None where the training does not fit
    error: DoesNotFitError | None  # Why it does not; None where it fits
    num_samples: int  # Training samples, estimated where only a part of the data was read
    sample_note: str  # Which part was read, as a sentence; empty where all was
    reference_models: tuple[ReferenceModelPlan, ...] = ()  # How reference models would be consulted

    @property
    def name(self) -> str:
        """The device's key: `h100-80gb`, or `2xh100-80gb` for two of them."""
        return self.target.label

    @property
    def fits(self) -> bool:
        """Whether the training fits."""
        return self.plan is not None

    @property
    def batch(self) -> int | None:
        """Samples that an optimizer step sees."""
        return None if self.plan is None else self.plan.fullest.phase_plan.logical_batch

    @property
    def micro_batches(self) -> tuple[int, int] | None:
        """The fewest and the most micro-batches of a step."""
        if self.plan is None:
            return None
        parts = [phase.phase_plan for phase in self.plan.phases]
        return min(each.fewest_parts for each in parts), max(each.most_parts for each in parts)

    @property
    def binding_limit(self) -> str | None:
        """The limit that decided the batch: `requested`, `preset`, `memory`, `dataset` or `min_steps`."""
        return None if self.plan is None else self.plan.fullest.phase_plan.binding_limit

    @property
    def peak_bytes(self) -> float | None:
        """The predicted peak of a step."""
        return None if self.plan is None else self.plan.fullest.predicted_peak_bytes

    @property
    def interval_bytes(self) -> tuple[float, float] | None:
        """The interval around `peak_bytes`."""
        fullest = None if self.plan is None else self.plan.fullest
        if fullest is None or fullest.limits is None or fullest.predicted_peak_bytes is None:
            return None
        return fullest.limits.peak_interval(fullest.predicted_peak_bytes, fullest.phase_plan.largest_cost)

    @property
    def whole_batch_peak_bytes(self) -> float | None:
        """The predicted peak of a step whose batch is not split, whether that fits or not."""
        peaks = [] if self.plan is None else [phase.whole_batch_peak_bytes for phase in self.plan.phases]
        return max((peak for peak in peaks if peak is not None), default=None)

    @property
    def largest_batch(self) -> int | None:
        """Samples of the largest batch that the device is predicted to hold at once, however many the data set has."""
        sizes = [] if self.plan is None else [phase.room_samples for phase in self.plan.phases]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def is_recorded(self) -> bool:
        """Whether batches that were recorded as CUDA would run them have corrected the prediction."""
        limits = None if self.plan is None else self.plan.limits
        return limits is not None and limits.recorded

    @property
    def _is_gpu(self) -> bool:
        return self.target.resident_threads > 0 or self.target.generation == catalogue.ROCM

    @property
    def warnings(self) -> list[str]:
        """Sentences for the user."""
        caveats = [caveat] if (caveat := _CAVEATS.get(self.target.generation)) and self._is_gpu else []
        if self.plan is None:
            return caveats
        notices = [*caveats, *self.plan.all_notices]
        if any(plan.costs for plan in self.reference_models) and not self.target.key.startswith("cpu-"):
            note = "Samples per second were measured on this machine's CPU; the run measures them on its device"
            notices.append(note)
        return notices


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The plans of a run for some devices: the figures of `can-train --dry-run`."""

    key: str  # The configuration's name in the factor store
    config: Mapping[str, Any]  # All settings, as plain values
    cards: tuple[CardPlan, ...]  # At least one

    @property
    def fits(self) -> bool:
        """Whether the training fits at least one of the devices."""
        return any(card.fits for card in self.cards)

    @property
    def on_host_bytes(self) -> int:
        """Most bytes of a rank that wait in the memory of the host, on any of the devices."""
        phases = [phase for card in self.cards if card.plan for phase in card.plan.phases]
        return max((phase.on_host_bytes for phase in phases), default=0)

    @property
    def error(self) -> DoesNotFitError:
        """The error of a training that fits none of the devices."""
        first = self.cards[0].error
        if first is not None and len(self.cards) == 1:
            first.exit_code = DOES_NOT_FIT
            return first
        names = ", ".join(card.name for card in self.cards)
        remedy = f"Named alone, a device says why: --target-gpu {self.cards[0].name}"
        error = DoesNotFitError("The training fits none of the devices", value=names, remedy=remedy)
        error.exit_code = DOES_NOT_FIT
        return error

    def __getitem__(self, name: str) -> CardPlan:
        return next(card for card in self.cards if card.name == name)

    def to_plain(self) -> dict[str, Any]:
        """Returns the values of `can-train --dry-run --json`."""
        from can_train.training.report import dry_json

        return dry_json(self.config, self.key, self.cards)


def host_target(memory_mib: int) -> UsableMemory:
    """Returns the host of a job as the device to plan for."""
    total_bytes = memory_mib * 2**20
    key = f"cpu-{max(1, round(total_bytes / catalogue.GIB))}gb"
    return UsableMemory(key=key, name="CPU", total_bytes=total_bytes, subtracted=(), source="as the job asks for")


def dry_plans(
    run: ResolvedRun,
    targets: Sequence[UsableMemory],
    reporter: Reporter,
    *,
    sampled: BatchTask | None = None,
    ranks: int = 1,
) -> Plans:
    """Plans a run for each of the targets, at least one.

    Args:
        run: The resolved run.
        targets: Devices.
        reporter: Receives notices and progress.
        sampled: Its task with a sample of the data; None: the task is made.
        ranks: Processes that train it together.
    """
    # On a login node's many cores, tiny batches wait for threads longer than they compute.
    torch.set_num_threads(1)
    task = sample_task(run, reporter) if sampled is None else sampled
    cards = plans_of_sample(run, task, targets, reporter, ranks=ranks)
    return Plans(key=run.key, config=run.config, cards=tuple(cards))


@errors_of_steps()
def explain_run(
    run: ResolvedRun, gpus: Sequence[str], reporter: Reporter, *, plan: RunPlan | None = None, changes: bool = True
) -> list[Explanation]:
    """Explains the largest micro-batch of a run on each of the GPUs, or on its device where none is named.

    Args:
        run: The resolved run.
        gpus: Names of GPUs.
        reporter: Receives notices.
        plan: The plan that a run was trained by, on its device; None: it is planned for each device.
        changes: Whether changes that may shrink the peak are recorded, each as long as the step itself.
    """
    from can_train.training.explain import explain

    torch.set_num_threads(1)
    with nothing_left_behind():
        targets = find_targets(run, gpus, reporter)
        task = sample_task(run, reporter)
        explained = []
        for target in targets:
            if plan is not None:
                explained.append(explain(run, task, target, plan, (), changes=changes))
                continue
            (dry,) = dry_plans(run, [target], reporter).cards
            notices = (
                []
                if dry.error is None
                else [f"It does not fit: {dry.error.rule}: {dry.error.value}. One sample is explained"]
            )
            explanation = explain(run, task, target, dry.plan, notices, changes=changes)
            is_asked = dry.plan is not None and dry.plan.fullest.rung_is_asked
            explained.append(replace(explanation, whole_batch_peak_bytes=dry.whole_batch_peak_bytes,
                                     largest_batch=dry.largest_batch, fits=dry.fits,
                                     rung_is_asked=is_asked))  # fmt: skip
        return explained


@dataclass(frozen=True, kw_only=True)
class _RunOfTask(ResolvedRun):
    """The run of a task that is at hand, so that nothing is imported by its name."""

    described: TaskSettings

    @property
    def task_settings(self) -> TaskSettings:
        return self.described

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "described"}


def plans_of_task(
    task: BatchTask | type[Task], names: Sequence[str], training: TrainingSettings | None, reporter: Reporter
) -> Plans:
    """Plans a task that is at hand, without presets, for named devices.

    Args:
        task: A class, whose data are sampled; or a task with its data.
        names: Devices, as `find_targets` takes them.
        training: Settings of the training; None: the defaults of the class.
        reporter: Receives notices and progress.
    """
    cls = task if isinstance(task, type) else type(task)
    described = describe(cls) if issubclass(cls, Task) else TaskSettings()
    model = described.default_model or next(iter(described.models))
    mode = described.models[model].modes[0]
    context = task.context if isinstance(task, Task) else TaskContext(
        settings=described.settings(), dataset=described.dataset(), model_name=model,
        model=described.models[model].settings(), mode=described.modes[mode](name=mode),
    )  # fmt: skip
    run = _RunOfTask(
        task=f"{cls.__module__}:{cls.__name__}", model_name=context.model_name or model, size="", device="auto",
        settings=context.settings, dataset=context.dataset, model=context.model, mode=context.mode,
        cluster=ClusterSettings(), training=training or TrainingSettings(**described.training),
        factor=FactorSettings(), monitor=MonitorSettings(), paths=PathSettings(), described=described,
    )  # fmt: skip
    with nothing_left_behind():
        sampled = None if isinstance(task, type) else task
        return dry_plans(run, find_targets(run, names, reporter), reporter, sampled=sampled)


@errors_of_steps()
def plans_of_sample(
    run: ResolvedRun, sampled: BatchTask, targets: Sequence[UsableMemory], reporter: Reporter, *, ranks: int = 1
) -> list[CardPlan]:
    """Plans a run for each of the targets from a task that has read a sample of its data."""
    # Of each generation of GPUs the largest target is explored once; the others hold less, which is predicted.
    by_size = sorted(targets, key=lambda target: target.capacity_bytes)
    largest = {_kind(target): target for target in by_size}
    absent = AbsentRun.of_sample(run, sampled, by_size[-1], reporter)
    # Targets of one generation that consult reference models alike share the probes.
    explored: dict[tuple[object, ...], _ExploredRun] = {}
    plans = []
    for target in targets:
        here = absent.placed_on(target)
        number = target.count if target.count > 1 else ranks
        kind = (_kind(target), number, *(plan.placement for plan in here))
        if kind not in explored:
            explored[kind] = _ExploredRun(absent.planners(largest[_kind(target)], here, ranks=number))
        plan, error = explored[kind].plan_for(target)
        plans.append(CardPlan(target=target, plan=plan, error=error, num_samples=len(absent.planner.task.train_rows),
                             sample_note=sampled.sample_note, reference_models=here))  # fmt: skip
    return plans


def _kind(target: UsableMemory) -> tuple[str, bool]:
    """Returns the generation of a device, whose kernels decide the memory of a batch, and whether it is in the
    catalogue of GPUs.
    """
    return target.generation, target.resident_threads > 0


class _ExploredRun:
    """A run whose memory was explored by probes, for plans on several targets."""

    def __init__(self, planners: Planners) -> None:
        self._planners = planners
        self._phases = [_ExploredPhase(planner) for planner in planners.phases]

    def plan_for(self, target: UsableMemory) -> tuple[RunPlan | None, DoesNotFitError | None]:
        """Resolves the plan for a target, or returns the reason why there is none."""
        rule = factor_rule(self._planners.first.run, target.key, self._planners.first.reporter)
        may_shard = all(phase.may_shard(target) for phase in self._phases)
        if may_shard and not all(phase.fits_whole(target) for phase in self._phases):
            return self._plan(target, rule, on_shards=True)
        plan, error = self._plan(target, rule, on_shards=False)
        if error is None or not may_shard:
            return plan, error
        plan, on_shards = self._plan(target, rule, on_shards=True)
        if on_shards is None:
            return plan, None
        return None, on_no_rung({SPLIT_ALONE: error, Rung(ranks=self._planners.first.ranks): on_shards})

    def _plan(
        self, target: UsableMemory, rule: FactorRule, *, on_shards: bool
    ) -> tuple[RunPlan | None, DoesNotFitError | None]:
        try:
            plans = [phase.plan_for(target, rule, on_shards=on_shards) for phase in self._phases]
            return self._planners.place_data(self._planners.joined(plans, rule), rule), None
        except DoesNotFitError as error:
            return None, error


class _ExploredPhase:
    """One phase of it."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        # Its measurements are made now: later, the task may be bound to the outputs of another placement.
        planner.check()
        self._request = planner.request()
        self._explored: dict[Rung, DeviceLimits | DoesNotFitError] = {}
        self._shares: dict[tuple[Rung, bool], float] = {}  # Allocated ÷ reserved bytes
        if not planner.explorer.is_on_meta:
            with suppress(DoesNotFitError):
                self._limits()

    def plan_for(self, target: UsableMemory, rule: FactorRule, *, on_shards: bool) -> RunPlan:
        """Resolves the phase's plan for a target on the first rung that fits; raises DoesNotFitError."""
        planner, rungs = self._planner, self._planner.rungs
        # On every rung the weights are on the device, where a single one of 1 MiB takes a page of 20 MiB.
        sizes = [tensor.nbytes for tensor in (*planner.model.parameters(), *planner.model.buffers())]
        has_pages = not (on_shards or target.key.startswith("cpu-"))
        page_bytes = reserved_for(sizes, read_allocator_settings()) if has_pages else 0
        if page_bytes > target.capacity_bytes >= sum(sizes):
            raise DoesNotFitError(
                "The weights of the model must fit on the device",
                value=f"they take {size_text(sum(sizes))}, {size_text(page_bytes)} in pages of the allocator, "
                f"the device has {size_text(target.capacity_bytes)}",
                remedy="Choose a smaller model by its settings (--set), or a larger device",
            )
        if on_shards:
            planner.rungs = tuple(replace(rung, ranks=planner.ranks) for rung in rungs)
        try:
            return planner.on_first_rung(lambda: self._plan_on_rung(target, rule))
        finally:
            planner.rungs = rungs

    def may_shard(self, target: UsableMemory) -> bool:
        """Tells whether a model may be shared out; raises ConfigError where it must and cannot."""
        planner, training = self._planner, self._planner.training
        if training.fit == "shard" and planner.ranks == 1:
            raise ConfigError("training.fit=shard plans for several GPUs", value=target.label,
                              remedy=f"Name their number: --target-gpu 2x{target.key}")  # fmt: skip
        refusal = unshardable_because(training)
        if training.fit == "shard" and refusal is not None:
            raise refusal
        return planner.ranks > 1 and training.fit in ("auto", "shard") and refusal is None

    def fits_whole(self, target: UsableMemory) -> bool:
        """Tells whether each device has room for the whole model, its gradients and its optimizer's state."""
        training = self._planner.training
        return training.fit != "shard" and fits_whole(self._planner.model, training, target.capacity_bytes)

    def _plan_on_rung(self, target: UsableMemory, rule: FactorRule) -> RunPlan:
        capacity, explorer = target.capacity_bytes, self._planner.explorer
        is_sharded = explorer.rung.ranks > 1
        # Before anything is recorded, which takes a large model half a minute.
        if (need_bytes := self._optimizer_peak_bytes()) > capacity:
            raise model_does_not_fit(need_bytes, capacity)
        explored = self._limits()
        limits = explored.predicted_on(target.key, capacity, _LITTLE_IN_USE * capacity)
        # Whatever the fragmentation, a capped batch fits.
        is_roomy = limits.training.capped or is_sharded
        room = catalogue.predicted_room(capacity) if is_roomy else self._room(capacity)
        limits = explored.predicted_on(target.key, capacity, room)
        return self._planner.resolve(self._request, limits, rule)

    def _optimizer_peak_bytes(self) -> int:
        """Returns the peak of an optimizer's step on the rung in force."""
        explorer = self._planner.explorer
        # On this rung, which need not have been explored yet.
        explorer.count_others_state()
        need_bytes, ranks = explorer.optimizer_peak_bytes(), explorer.rung.ranks
        if ranks == 1:
            return need_bytes
        return need_bytes - sharded_weights(explorer.model, ranks).saved_bytes - sum(explorer.saved_by_shards())

    def _limits(self) -> DeviceLimits:
        """Returns the limits on the rung in force, which are measured once."""
        ranks = self._planner.explorer.rung.ranks
        rung = replace(self._planner.explorer.rung, ranks=1)
        if rung not in self._explored:
            try:
                self._explored[rung] = self._planner.explore(self._request, PROVISIONAL)
            except DoesNotFitError as error:
                self._explored[rung] = error
        explored = self._explored[rung]
        if isinstance(explored, DoesNotFitError):
            raise explored
        if self._planner.explorer.alone:
            return explored.alone()
        return explored if ranks == 1 else self._shared_out(explored, ranks)

    def _shared_out(self, limits: DeviceLimits, ranks: int) -> DeviceLimits:
        explorer = self._planner.explorer
        state_bytes, step_bytes = explorer.saved_by_shards()
        return limits.on_shards(
            sharded_weights(explorer.model, ranks), saved_state_bytes=state_bytes, saved_step_bytes=step_bytes
        )

    def _room(self, capacity_bytes: int) -> float:
        """Returns how much may be allocated before the allocator needs to reserve more than a capacity."""
        room = catalogue.predicted_room(capacity_bytes)
        training, explorer = self._limits().training, self._planner.explorer
        if explorer.is_on_meta:
            return room
        if training.cost_within(room) > meters.FRAGMENTATION_PROBE_BYTES:
            way = explorer.rung, explorer.alone
            if way not in self._shares:
                with explorer.worst_case(training, meters.FRAGMENTATION_PROBE_BYTES) as (run, resident):
                    allocated, reserved = meters.simulate_peak(run, resident)
                self._shares[way] = allocated / max(reserved, 1)
            return min(room, self._shares[way] * capacity_bytes)
        # Pages take a share of a small GPU that depends on its size: the room is searched by halves.
        low, high = _LITTLE_IN_USE * room, room
        for _ in range(_TRIALS):
            middle = (low + high) / 2
            with explorer.worst_case(training, max(training.cost_within(middle), 0.0)) as batch:
                low, high = (middle, high) if meters.simulate_fit(*batch, capacity_bytes) else (low, middle)
        return low


def get_effective_safety_factor(config: ResolvedRun | Mapping[str, Any]) -> float:
    """Returns the safety factor that a run of this configuration would use here and now.

    For a first run it follows from the device's limits: data is prepared and the device is tried, as in the run.

    Args:
        config: A resolved run, or the plain values of its `config.yaml`.

    Raises:
        CanTrainError: The configuration, the device or the state folder is at fault; there is no silent fallback.
    """
    check_kinds("a resolved run, or the values of its config.yaml", (ResolvedRun, Mapping),
                "Read them: yaml.safe_load(Path(\"runs/RUN/config.yaml\").read_text())", config=config)  # fmt: skip
    run = config if isinstance(config, ResolvedRun) else from_plain(config)
    meter = meters.open_meter(run.device)
    rule = read_factor_rule(run, meter.key)
    if rule.decided is not None:
        return rule.decided.value
    reporter = SilentReporter()
    # Random generators stay as they were.
    task, generators = load_task(run, reporter), capture_generators()
    with meter.active():
        model = fresh_model(run, task, meter)
        planner = Planner(run=run, task=task, model=model, meter=meter, reporter=reporter,
                          reference_tensors=average_tensors(model, run.training))  # fmt: skip
        plan = Planners.of_phases(planner).make(rule)
    restore_generators(generators)
    return (plan.fixed_size or plan).factor.value
