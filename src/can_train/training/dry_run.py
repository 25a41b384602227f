"""Plans a run without a trial, and says what it found."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch

from can_train.config.compose import from_plain
from can_train.config.resolved import ResolvedRun, cache_folder, state_dir
from can_train.errors import ConfigError, DoesNotFitError
from can_train.factors.resolve import _rule, factor_rule
from can_train.fit import random_state
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.explore import model_does_not_fit
from can_train.fit.factor_rule import ANY_PEAK, PROVISIONAL, FactorRule
from can_train.fit.planner import Planner, RunPlan
from can_train.io.units import parse_size, size_text
from can_train.memory.catalogue import (
    Card,
    Taken,
    Usable,
    find_card,
    other_card,
    predicted_room,
    read_gpu_constants,
    usable,
)
from can_train.memory.meters import (
    FRAGMENTATION_PROBE_BYTES,
    AbsentGpuMeter,
    Meter,
    is_simulated,
    open_meter,
    simulated_bytes,
)
from can_train.reporter import Reporter, SilentReporter
from can_train.training.loading import fresh_model, load_task, sample_task
from can_train.training.reference_models import ReferenceModelPlan, ReferenceModels
from can_train.training.report import plan_lines, reference_model_lines, spread

HERE = "as this machine has it now"
"""Source of the figures of a device that is at hand."""


def find_targets(run: ResolvedRun, gpus: Sequence[str], memory: str | None, reporter: Reporter) -> list[Usable]:
    """Finds what is planned for.

    Args:
        run: The resolved run.
        gpus: Names of GPUs, as the catalogue, a driver or a scheduler spells them.
        memory: Whole memory of a GPU that the catalogue does not have; None: there is none such.
        reporter: Is told of measurements that cannot be read.

    Returns:
        The GPUs that were named, else the run's own device.

    Raises:
        ConfigError: A name or a size is not understood.
        DeviceError: The run's device cannot be used.
    """
    cards = [find_card(name) for name in gpus] + ([_other_card(memory)] if memory else [])
    targets = [usable(card, read_gpu_constants(state_dir(run.paths), card.key, reporter)) for card in cards]
    # One card by two spellings is one target.
    return list({target.key: target for target in targets}.values()) or [_device_here(run.device)]


def _other_card(memory: str) -> Card:
    card = other_card(parse_size(memory))
    kept = sum(taken.num_bytes for taken in usable(card).taken)
    if kept >= card.total_bytes:
        raise ConfigError(
            f"--target-memory is the whole memory of a GPU, of which {size_text(kept)} never reach a training",
            value=memory,
            remedy="Give a larger one: 16GiB; --device sim:512MiB is what a training can use",
        )
    return card


def _device_here(device: str) -> Usable:
    if is_simulated(device):
        # Without its meter, which replays an allocator.
        size = simulated_bytes(device)
        return Usable(key=open_meter(device).key, name="Simulated GPU", total_bytes=size, taken=(), source="simulated")
    meter = open_meter(device)
    others = Taken("in use already", meter.total_bytes - meter.capacity_bytes)
    return Usable(key=meter.key, name=meter.name, total_bytes=meter.total_bytes, taken=(others,), source=HERE)


_LITTLE_IN_USE: Final = 0.7
"""Share of an allocator's memory that is in use where it is badly fragmented; the simulated GPU had 0.83 and more."""


_TRIALS: Final = 4
"""Batches that are tried for a small GPU: the room is then known to 2 % of it."""


_TORCH_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch puts what it compiles; it makes a folder of its own where nothing is set."""


@dataclass(frozen=True, kw_only=True)
class DryPlan:
    """What would be done on one device.

    Attributes:
        target: The device.
        plan: The plan; None where the training does not fit.
        error: Why not; None where it fits.
        num_samples: Training samples, estimated where only a part was read.
        sample_note: Says which part was read; empty where all was.
        asked: How reference models would be asked.
    """

    target: Usable
    plan: RunPlan | None
    error: DoesNotFitError | None
    num_samples: int
    sample_note: str
    asked: tuple[ReferenceModelPlan, ...] = ()


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Gives libraries a temporary folder of their own and removes it: torch_geometric leaves the source of each kind of
    layer there, torch an empty cache.
    """
    with TemporaryDirectory(prefix="can-train-", ignore_cleanup_errors=True) as folder:
        before, had_cache = tempfile.tempdir, _TORCH_CACHE in os.environ
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            # Torch sets it to the folder it made.
            if not had_cache:
                os.environ.pop(_TORCH_CACHE, None)


def dry_plans(run: ResolvedRun, targets: Sequence[Usable], reporter: Reporter) -> list[DryPlan]:
    """Plans a run for each of the targets.

    Args:
        run: The resolved run.
        targets: At least one.
        reporter: Where progress goes.

    Raises:
        CanTrainError: The data cannot be read.
    """
    # On one thread: on a login node's many, tiny batches wait for threads longer than they compute.
    torch.set_num_threads(1)
    task = sample_task(run, reporter)
    # A sample stands for the whole: an epoch has as many of its like as there are estimated to be.
    task.train_rows = np.resize(task.train_rows, task.estimated_train_rows)
    largest = AbsentGpuMeter(max(targets, key=lambda target: target.capacity_bytes))
    planner = Planner(run=run, task=task, model=fresh_model(run, task, largest), meter=largest, reporter=reporter,
                      verify=False)  # fmt: skip
    reference_models = ReferenceModels(
        task=task, training=run.training, meter=largest, reporter=reporter, cache=cache_folder(run.paths), verify=False
    )
    asked = reference_models.decide(planner.model)
    ways: dict[tuple[str, ...], _Way] = {}
    plans = []
    for target in targets:
        samples = len(task.train_rows) * run.training.epochs
        here = tuple(plan.on(target.capacity_bytes, samples=samples) for plan in asked)
        placed = tuple(plan.placement for plan in here)
        if placed not in ways:
            ways[placed] = _Way(replace(planner, beside=reference_models.rehearse(here)))
        plan, error = ways[placed].planned(target)
        plans.append(
            DryPlan(
                target=target,
                plan=plan,
                error=error,
                num_samples=len(task.train_rows),
                sample_note=task.sample_note,
                asked=here,
            )
        )
    return plans


class _Way:
    """Plans for all targets on which reference models are asked alike."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._fragmentation = _Fragmentation(planner, planner.explore(planner.request(), PROVISIONAL))
        planner.measured_batch_dependence()

    def planned(self, target: Usable) -> tuple[RunPlan | None, DoesNotFitError | None]:
        """Resolves the plan for a target, or says why there is none."""
        return _planned(replace(self._planner, meter=AbsentGpuMeter(target)), self._fragmentation.on(target))


class _Fragmentation:
    """Measures the allocator's fragmentation where it may decide."""

    def __init__(self, planner: Planner, limits: DeviceLimits) -> None:
        self._planner = planner
        self._limits = limits
        self._share: float | None = None

    def on(self, target: Usable) -> DeviceLimits:
        """Says what is predicted of a target."""
        if self._within(target, _LITTLE_IN_USE * target.capacity_bytes).training.capped:
            return self._within(target, predicted_room(target.capacity_bytes))
        return self._within(target, self._room(target.capacity_bytes))

    def _within(self, target: Usable, room_bytes: float) -> DeviceLimits:
        return self._limits.predicted_on(target.key, target.capacity_bytes, room_bytes)

    def _room(self, capacity_bytes: int) -> float:
        """Returns what may be in use before the allocator holds more than a capacity."""
        room = predicted_room(capacity_bytes)
        if self._limits.training.cost_within(room) <= FRAGMENTATION_PROBE_BYTES:
            return self._tried_room(room, capacity_bytes)
        if self._share is None:
            peak = self._planner.simulate_peak(self._limits, FRAGMENTATION_PROBE_BYTES)
            self._share = peak.allocated / max(peak.reserved, 1)
        return min(room, self._share * capacity_bytes)

    def _tried_room(self, room: float, capacity_bytes: int) -> float:
        """Halves its way to the room of a small GPU, of which pages take a share that depends on its size."""
        low, high = _LITTLE_IN_USE * room, room
        for _ in range(_TRIALS):
            middle = (low + high) / 2
            if self._planner.simulate_fit(
                self._limits, max(self._limits.training.cost_within(middle), 0.0), capacity_bytes
            ):
                low = middle
            else:
                high = middle
        return low


def _planned(planner: Planner, limits: DeviceLimits) -> tuple[RunPlan | None, DoesNotFitError | None]:
    """Resolves the plan for one target, or says why there is none."""
    rule = factor_rule(planner.run, limits.device_key, planner.reporter)
    try:
        if limits.optimizer_peak_bytes > limits.capacity_bytes:
            raise model_does_not_fit(limits.optimizer_peak_bytes, limits.capacity_bytes)
        return planner.resolve(planner.request(), limits, rule), None
    except DoesNotFitError as error:
        return None, error


COLUMNS = ("device", "usable", "factor", "batch", "micro-batches", "steps", "predicted peak", "binding limit")
"""Headings of the table over several devices."""


def dry_lines(key: str, dry: DryPlan) -> list[str]:
    """Writes a plan as aligned lines, its warnings below.

    Args:
        key: Configuration key.
        dry: The plan.

    Raises:
        DoesNotFitError: The training does not fit on the device.
    """
    if dry.plan is None:
        raise dry.error or AssertionError("a target without a plan has a reason")
    head, *lines = plan_lines(dry.plan, dry.target.key, dry.target.capacity_bytes)
    notes = [f"note: {text}" for text in warnings_of(dry)]
    return [head, f"  key            {key}", *_device_lines(dry), *lines, *reference_model_lines(dry.asked), *notes]


def warnings_of(dry: DryPlan) -> list[str]:
    """Lists what the user should know, as sentences."""
    if dry.plan is None:
        return []
    peak = dry.plan.predicted_peak_bytes or 0.0
    beyond = ["The predicted peak is more than what is usable: memory would run out"]
    too_much = beyond if peak > dry.target.capacity_bytes else []
    timed = any(asked.costs for asked in dry.asked) and not dry.target.key.startswith("cpu-")
    here = ["Samples a second were measured on this machine's processors; the run measures them on its device"]
    return [*too_much, *dry.plan.plan.notices, *dry.plan.notices, *(here if timed else [])]


def data_text(dry: DryPlan) -> str:
    """Says how much data there is, and how that is known."""
    return f"{dry.num_samples:,} training samples" + (f", {dry.sample_note}" if dry.sample_note else "")


def dry_row(dry: DryPlan) -> tuple[str, ...]:
    """Writes a plan as a row of the table over several devices."""
    usable = size_text(dry.target.capacity_bytes)
    if dry.plan is None:
        return (dry.target.key, usable, "–", "–", "–", "–", "–", "does not fit")
    plan = dry.plan.plan
    factor = "–" if plan.safety_factor is None else f"{plan.safety_factor:.3f}"
    parts = spread(plan.fewest_parts, plan.most_parts, "-")
    steps = spread(plan.fewest_steps_per_epoch, plan.steps_per_epoch, "-")
    peak = dry.plan.predicted_peak_bytes
    share = "–" if peak is None else f"{peak / dry.target.capacity_bytes:.1%}"
    figures = (str(plan.logical_batch), parts, steps, share, plan.binding_limit)
    return (dry.target.key, usable, factor, *figures)


def dry_json(config: Mapping[str, Any], key: str, plans: Sequence[DryPlan]) -> dict[str, Any]:
    """Makes plain values of a dry run; sizes are bytes, peaks also shares of the capacity."""
    first = plans[0]
    data = {"num_train_samples": first.num_samples, "is_estimate": bool(first.sample_note), "note": first.sample_note}
    return {"config_key": key, "data": data, "plans": [_plan_json(dry) for dry in plans], "config": dict(config)}


def _device_lines(dry: DryPlan) -> list[str]:
    target = dry.target
    lines = [f"  device         {target.name}, {size_text(target.total_bytes)}: {target.source}"]
    lines += [f"    less         {size_text(taken.num_bytes)} {taken.what}" for taken in target.taken]
    return [*lines, f"  data           {data_text(dry)}"]


def _plan_json(dry: DryPlan) -> dict[str, Any]:
    return {
        "target": {
            "key": dry.target.key,
            "name": dry.target.name,
            "total_bytes": dry.target.total_bytes,
            "subtracted": [{"what": taken.what, "bytes": taken.num_bytes} for taken in dry.target.taken],
            "capacity_bytes": dry.target.capacity_bytes,
            "source": dry.target.source,
        },
        "fits": dry.plan is not None,
        "error": None if dry.error is None else _error_json(dry.error),
        "warnings": warnings_of(dry),
        "reference_models": [asdict(plan) for plan in dry.asked],
        **({} if dry.plan is None else {**_decision_json(dry.plan), **_memory_json(dry.plan)}),
    }


def _error_json(error: DoesNotFitError) -> dict[str, Any]:
    return {"rule": error.rule, "value": error.value, "remedy": error.remedy}


def _decision_json(run_plan: RunPlan) -> dict[str, Any]:
    plan, searched = run_plan.plan, run_plan.plan.safety_factor is not None
    return {
        "logical_batch": plan.logical_batch,
        "binding_limit": plan.binding_limit,
        "steps_per_epoch": plan.steps_per_epoch,
        "fewest_steps_per_epoch": plan.fewest_steps_per_epoch,
        "micro_batches": {
            "fewest": plan.fewest_parts,
            "most": plan.most_parts,
            "largest_samples": plan.largest_micro_batch,
            "largest_cost_bytes": round(plan.largest_cost),
        },
        "lr_factor": plan.lr_factor,
        "safety_factor": plan.safety_factor,
        "safety_factor_reason": run_plan.factor_reason if searched else "",
        "target_peak_pct": run_plan.aim.share if searched and run_plan.aim != ANY_PEAK else None,
        "target_reason": run_plan.aim.why,
    }


def _memory_json(run_plan: RunPlan) -> dict[str, Any]:
    limits, peak = run_plan.limits, run_plan.predicted_peak_bytes
    if limits is None or peak is None:
        return {"cost_model": None, "tuned_limit_bytes": None, "safe_limit_bytes": None, "predicted_peak_bytes": None}
    half_width = limits.training.half_width(run_plan.plan.largest_cost)
    searched = run_plan.plan.safety_factor is not None
    return {
        "cost_model": _model_json(limits),
        "tuned_limit_bytes": round(limits.training.tuned_limit) if searched else None,
        "tuned_limit_is_capped": limits.training.capped,
        "safe_limit_bytes": round(run_plan.plan.rules.safe_limit) if searched else None,
        "predicted_peak_bytes": round(peak),
        "predicted_peak_interval_bytes": [round(peak - half_width), round(peak + half_width)],
        "predicted_peak_pct": peak / limits.capacity_bytes,
        "optimizer_peak_bytes": limits.optimizer_peak_bytes,
    }


def _model_json(limits: DeviceLimits) -> dict[str, Any]:
    model = limits.training.model
    return {
        "base_bytes": round(model.base_bytes),
        "bytes_per_unit": {
            feature.name: coefficient for feature, coefficient in zip(model.features, model.coefficients, strict=True)
        },
        "relative_error": model.relative_residual,
        "explains": model.explains,
    }


def get_effective_safety_factor(config: ResolvedRun | Mapping[str, Any]) -> float:
    """Returns the safety factor that a run of this configuration would use here and now.

    Where it follows from what the device holds (a first run), data is prepared and the device is tried, as the run
    would.

    Args:
        config: A resolved run, or the plain values of its `config.yaml`.

    Raises:
        CanTrainError: The configuration, the device or the state folder is at fault; nothing falls back silently.
    """
    run = config if isinstance(config, ResolvedRun) else from_plain(config)
    meter = open_meter(run.device)
    rule = _rule(run, meter.key)
    if rule.known is not None:
        return rule.known.factor
    return _plan_of(run, meter, rule).factor.factor


def _plan_of(run: ResolvedRun, meter: Meter, rule: FactorRule) -> RunPlan:
    """Makes the plan that a run would make now; generators stay as they were."""
    task, generators = load_task(run, SilentReporter()), random_state.capture()
    with meter.active():
        model = fresh_model(run, task, meter)
        plan = Planner(run=run, task=task, model=model, meter=meter, reporter=SilentReporter()).make(rule)
    random_state.restore(generators)
    return plan
