"""Plans a run for devices that need not be at hand, without training and without writing anything.

`report.py` writes the plans as text.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from can_train.config.compose import from_plain
from can_train.config.resolved import ResolvedRun, cache_folder, state_dir
from can_train.errors import ConfigError, DoesNotFitError
from can_train.factors.store import factor_rule, read_factor_rule
from can_train.fit.explore import model_does_not_fit
from can_train.fit.factor_rule import PROVISIONAL, FactorRule
from can_train.fit.optimizer import capture_generators, restore_generators
from can_train.fit.planner import Planner, Planners, RunPlan
from can_train.io.units import parse_size, size_text
from can_train.memory import catalogue, meters
from can_train.memory.catalogue import UsableMemory
from can_train.reporter import Reporter, SilentReporter
from can_train.training.chosen_weights import average_tensors
from can_train.training.loading import fresh_model, load_task, sample_task
from can_train.training.reference_models import ReferenceModelPlan, ReferenceModels

if TYPE_CHECKING:
    from can_train.task import BatchTask

# Share of an allocator's memory that is in use where it is badly fragmented; on the simulated GPU it was at least 0.83.
_LITTLE_IN_USE: Final = 0.7

# Batches that are tried for a small GPU: its room is then known to 2 % of itself.
_TRIALS: Final = 4
# Where torch puts compiled code; where it is not set, torch makes a folder and sets it.
_TORCH_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"


def find_targets(run: ResolvedRun, gpus: Sequence[str], memory: str | None, reporter: Reporter) -> list[UsableMemory]:
    """Returns the devices to plan for: the named GPUs, or the run's own device where none is named.

    Args:
        run: The resolved run.
        gpus: Names of GPUs, in the spelling of the catalogue, a driver or a scheduler.
        memory: Whole memory of a GPU that the catalogue does not have; None: there is no such GPU.
        reporter: Receives notices of measurements that cannot be read.

    Raises:
        ConfigError: A name or a size is not understood.
        DeviceError: The run's device cannot be used.
    """
    cards = [catalogue.find_card(name) for name in gpus]
    if memory:
        card = catalogue.other_card(parse_size(memory))
        reserved = sum(use.num_bytes for use in catalogue.usable(card).subtracted)
        if reserved >= card.total_bytes:
            rule = f"--target-memory is the whole memory of a GPU, of which a training cannot use {size_text(reserved)}"
            remedy = "Give a larger one: 16GiB; or give what a training can use: --device sim:512MiB"
            raise ConfigError(rule, value=memory, remedy=remedy)
        cards.append(card)
    state = state_dir(run.paths)
    targets = [catalogue.usable(card, catalogue.read_gpu_constants(state, card.key, reporter)) for card in cards]
    if targets:
        # The same card in two spellings is one target.
        return list({target.key: target for target in targets}.values())
    meter = meters.open_meter(run.device)
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
    return [UsableMemory(key=meter.key, name=name, total_bytes=size, subtracted=others, source=source)]


_CAVEATS: Final = {catalogue.ROCM: catalogue.ROCM_CAVEAT, catalogue.UNKNOWN: catalogue.UNKNOWN_CAVEAT}
"""What is not known of GPUs of some generations."""


@dataclass(frozen=True, kw_only=True)
class DryPlan:
    """The plan for one device."""

    target: UsableMemory  # The device
    plan: RunPlan | None  # The plan; None where the training does not fit
    error: DoesNotFitError | None  # Why it does not; None where it fits
    num_samples: int  # Training samples, estimated where only a part of the data was read
    sample_note: str  # Which part was read, as a sentence; empty where all was
    reference_models: tuple[ReferenceModelPlan, ...] = ()  # How reference models would be consulted

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


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Gives libraries a temporary folder of their own and removes it.

    torch_geometric leaves the source of each kind of layer in it, torch an empty cache.
    """
    with TemporaryDirectory(prefix="can-train-", ignore_cleanup_errors=True) as folder:
        before, had_cache = tempfile.tempdir, _TORCH_CACHE in os.environ
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            if not had_cache:
                os.environ.pop(_TORCH_CACHE, None)


def host_target(memory_mib: int) -> UsableMemory:
    """Returns the host of a job as the device to plan for."""
    total_bytes = memory_mib * 2**20
    key = f"cpu-{max(1, round(total_bytes / catalogue.GIB))}gb"
    return UsableMemory(key=key, name="CPU", total_bytes=total_bytes, subtracted=(), source="as the job asks for")


def dry_plans(
    run: ResolvedRun, targets: Sequence[UsableMemory], reporter: Reporter, *, ranks: int = 1
) -> list[DryPlan]:
    """Plans a run, which some processes train together, for each of the targets, at least one."""
    # On a login node's many cores, tiny batches wait for threads longer than they compute.
    torch.set_num_threads(1)
    return plans_of_sample(run, sample_task(run, reporter), targets, reporter, ranks=ranks)


def plans_of_sample(
    run: ResolvedRun, sampled: BatchTask, targets: Sequence[UsableMemory], reporter: Reporter, *, ranks: int = 1
) -> list[DryPlan]:
    """Plans a run for each of the targets from a task that has read a sample of its data."""
    # A copy: planning gives the task rows and outputs of reference models that differ from a training's.
    task = copy(sampled)
    # The sample is repeated to the length of the data set, so that an epoch has as many steps as in training.
    task.train_rows = np.resize(sampled.train_rows, sampled.estimated_train_rows or len(sampled.train_rows))
    # Of each generation of GPUs the largest target is explored once; the others hold less, which is predicted.
    largest = {_kind(target): target for target in sorted(targets, key=lambda target: target.capacity_bytes)}
    meter = meters.AbsentGpuMeter(max(targets, key=lambda target: target.capacity_bytes))
    model, num_samples = fresh_model(run, task, meter), len(task.train_rows)
    planner = Planner(run=run, task=task, model=model, meter=meter, reporter=reporter, verify=False, ranks=ranks)
    references = ReferenceModels(task=task, training=run.training, meter=meter, reporter=reporter,
                                 cache=cache_folder(run.paths), verify=False)  # fmt: skip
    decided = references.decide(model)
    # Targets of one generation that consult reference models alike share the probes.
    explored: dict[tuple[object, ...], _ExploredRun] = {}
    plans = []
    for target in targets:
        here = tuple(plan.on(target.capacity_bytes, samples=num_samples * run.training.epochs) for plan in decided)
        kind = (_kind(target), *(plan.placement for plan in here))
        if kind not in explored:
            on_largest = replace(
                planner,
                meter=meters.AbsentGpuMeter(largest[_kind(target)]),
                reference_tensors=[*references.bind_placeholders(here), *average_tensors(model, run.training)],
            )
            explored[kind] = _ExploredRun(Planners.of_phases(on_largest))
        plan, error = explored[kind].plan_for(target)
        plans.append(DryPlan(target=target, plan=plan, error=error, num_samples=num_samples,
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
        try:
            plan = self._planners.joined([phase.plan_for(target, rule) for phase in self._phases], rule)
            return self._planners.place_data(plan, rule), None
        except DoesNotFitError as error:
            return None, error


class _ExploredPhase:
    """One phase of it."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        # Its measurements are made now: later, the task may be bound to the outputs of another placement.
        planner.check()
        self._request = planner.request()
        self._limits = planner.explore(self._request, PROVISIONAL)
        self._share: float | None = None

    def plan_for(self, target: UsableMemory, rule: FactorRule) -> RunPlan:
        """Resolves the phase's plan for a target; raises DoesNotFitError."""
        capacity = target.capacity_bytes
        limits = self._limits.predicted_on(target.key, capacity, _LITTLE_IN_USE * capacity)
        # Whatever the fragmentation, a capped batch fits.
        room = catalogue.predicted_room(capacity) if limits.training.capped else self._room(capacity)
        limits = self._limits.predicted_on(target.key, capacity, room)
        if limits.optimizer_peak_bytes > limits.capacity_bytes:
            raise model_does_not_fit(limits.optimizer_peak_bytes, limits.capacity_bytes)
        return self._planner.resolve(self._request, limits, rule)

    def _room(self, capacity_bytes: int) -> float:
        """Returns how much may be allocated before the allocator needs to reserve more than a capacity."""
        room = catalogue.predicted_room(capacity_bytes)
        training, explorer = self._limits.training, self._planner.explorer
        if training.cost_within(room) > meters.FRAGMENTATION_PROBE_BYTES:
            if self._share is None:
                with explorer.worst_case(training, meters.FRAGMENTATION_PROBE_BYTES) as (run, resident):
                    allocated, reserved = meters.simulate_peak(run, resident)
                self._share = allocated / max(reserved, 1)
            return min(room, self._share * capacity_bytes)
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
