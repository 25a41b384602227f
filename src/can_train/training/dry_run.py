"""Plans a run without a trial: for the device at hand, or for GPUs that are not. Tiny batches are run on the host, to
see what they cost; what would fit is predicted. Writes nothing.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch

from can_train.config.resolved import ResolvedRun
from can_train.errors import DoesNotFitError
from can_train.memory.gaps import GAP_PROBE_BYTES
from can_train.memory.meters import TargetMeter
from can_train.policy.cards import Usable, predicted_room
from can_train.policy.device_limits import DeviceLimits
from can_train.reporter import Reporter
from can_train.training.companions import CompanionPlan, Companions
from can_train.training.effective_factor import factor_rule
from can_train.training.exploring import model_does_not_fit
from can_train.training.factor_rule import PROVISIONAL
from can_train.training.folders import cache_folder
from can_train.training.loading import fresh_model, sample_task
from can_train.training.planning import Planner, RunPlan

_LITTLE_IN_USE: Final = 0.7
"""Share of an allocator's memory that is in use where there are many gaps; the simulated GPU had 0.83 and more."""

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
        asked: How companions would be asked.
    """

    target: Usable
    plan: RunPlan | None
    error: DoesNotFitError | None
    num_samples: int
    sample_note: str
    asked: tuple[CompanionPlan, ...] = ()


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
    largest = TargetMeter(max(targets, key=lambda target: target.capacity_bytes))
    planner = Planner(run=run, task=task, model=fresh_model(run, task, largest), meter=largest, reporter=reporter,
                      verify=False)  # fmt: skip
    companions = Companions(
        task=task, training=run.training, meter=largest, reporter=reporter, cache=cache_folder(run.paths), verify=False
    )
    asked = companions.decide(planner.model)
    ways: dict[tuple[str, ...], _Way] = {}
    plans = []
    for target in targets:
        samples = len(task.train_rows) * run.training.epochs
        here = tuple(plan.on(target.capacity_bytes, samples=samples) for plan in asked)
        placed = tuple(plan.placement for plan in here)
        if placed not in ways:
            ways[placed] = _Way(replace(planner, beside=companions.rehearse(here)))
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
    """Plans for all targets on which companions are asked alike."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._gaps = _Gaps(planner, planner.explore(planner.request(), PROVISIONAL))
        planner.measured_coupling()

    def planned(self, target: Usable) -> tuple[RunPlan | None, DoesNotFitError | None]:
        """Resolves the plan for a target, or says why there is none."""
        return _planned(replace(self._planner, meter=TargetMeter(target)), self._gaps.on(target))


class _Gaps:
    """Measures the allocator's gaps where they may decide."""

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
        if self._limits.training.cost_within(room) <= GAP_PROBE_BYTES:
            return self._tried_room(room, capacity_bytes)
        if self._share is None:
            held = self._planner.held_by(self._limits, GAP_PROBE_BYTES)
            self._share = held.allocated / max(held.reserved, 1)
        return min(room, self._share * capacity_bytes)

    def _tried_room(self, room: float, capacity_bytes: int) -> float:
        """Halves its way to the room of a small GPU, of which pages take a share that depends on its size."""
        low, high = _LITTLE_IN_USE * room, room
        for _ in range(_TRIALS):
            middle = (low + high) / 2
            if self._planner.fits(self._limits, max(self._limits.training.cost_within(middle), 0.0), capacity_bytes):
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
