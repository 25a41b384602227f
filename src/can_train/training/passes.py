"""One kind of work on batches (a training step's forward and backward, an evaluation, a question to a companion): what
its batches cost, how large they may be, and how long they take. What the work is, is the caller's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from can_train.engine.phase_finder import Peak, Room, find_phase_limit, predict_phase_limit
from can_train.errors import DoesNotFitError
from can_train.memory.blocks import LARGE_PAGE_BYTES
from can_train.memory.meters import Meter
from can_train.memory.out_of_memory import OutOfMemoryEndsQuietly
from can_train.memory.probes import Probed, fit_by_probes
from can_train.policy.cards import predicted_room
from can_train.policy.cost_model import CostModel
from can_train.policy.device_limits import PhaseLimit
from can_train.policy.features import Feature
from can_train.policy.packing import BatchCosts

Upper = Callable[[BatchCosts], float]
"""From the priced samples to the largest cost worth trying."""

Run = Callable[[NDArray[np.int64]], None]
"""Runs a batch of some rows."""

_TIMED_SAMPLES: Final = 64
"""Samples of a batch that is timed, where they fit."""

_TIMED_SHARE: Final = 0.5
"""Share of the capacity that they may take."""

_TIMED_RUNS: Final = 5
"""Runs of which the quickest counts: the others waited for something else."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A kind of work.

    Attributes:
        run: Does it for a batch of some rows.
        rows: [R] the samples that batches are made of.
        counts: [R, F] what each of them has of the features.
        features: What its memory grows with.
        resident: Tensors that are on the device beside it.
        gradient_bytes: What the gradients of the weights take, where it makes some.
    """

    run: Run
    rows: NDArray[np.int64]
    counts: NDArray[np.float64]
    features: Sequence[Feature]
    resident: Sequence[Tensor]
    gradient_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Trials:
    """How batches are tried.

    Attributes:
        verify: Whether limits are tried; else they are what the probes predict, of a device that need not be there.
        steps: Times that a batch is run in a trial.
        tried: Called before each trial beside the probes, with the cost in bytes that it has.
    """

    verify: bool
    steps: int
    tried: Callable[[float], None]


def find_limit(work: Pass, meter: Meter, upper: Upper, trials: Trials) -> PhaseLimit:
    """Fits the cost model of a kind of work, and searches for the largest batch that fits.

    Args:
        work: The work.
        meter: Of the device.
        upper: Largest cost worth trying.
        trials: How to try.
    """
    probed, slack = probe(work, meter)
    capacity, model = meter.capacity_bytes, probed.model
    costs = BatchCosts(work.counts, model.features, model.coefficients)
    highest = _worthwhile(upper(costs), model)
    if not trials.verify:
        return predict_phase_limit(probed, costs, upper=highest, room_bytes=predicted_room(capacity))

    def trial(positions: NDArray[np.int64]) -> Peak:
        trials.tried(costs.chosen(positions).cost(0, len(positions)))
        meter.release()
        return _peak(work, meter, positions, trials.steps)

    room = Room(capacity_bytes=capacity, slack_bytes=slack)
    return find_phase_limit(probed, trial, costs, upper=highest, room=room)


def probe(work: Pass, meter: Meter) -> tuple[Probed, int]:
    """Fits the cost model, and sees what the allocator holds beyond what is in use.

    That grows little with the batch: gaps between blocks, and a last page that must fit whole.
    """
    slack = 0

    def measure(positions: NDArray[np.int64]) -> int:
        nonlocal slack
        meter.release(collect=False)
        seen = _peak(work, meter, positions, 1)
        slack = max(slack, seen.reserved - seen.allocated + LARGE_PAGE_BYTES) if seen.reserved else 0
        return seen.allocated

    probed = fit_by_probes(
        measure,
        work.features,
        work.counts,
        capacity_bytes=meter.capacity_bytes,
        gradient_bytes=work.gradient_bytes,
    )
    return probed, slack


def seconds_a_sample(work: Pass, model: CostModel, meter: Meter) -> float:
    """Returns how long a batch takes for each of its samples, once one has been run.

    Args:
        work: The work.
        model: What its batches cost.
        meter: Of the device; what is timed takes half of it at most.

    Raises:
        DoesNotFitError: Not even a sample fits.
    """
    costs = work.counts @ np.asarray(model.coefficients)
    room = _TIMED_SHARE * meter.capacity_bytes - model.base_bytes
    rows = np.resize(work.rows, int(np.clip(room / max(costs.mean(), 1.0), 1, _TIMED_SAMPLES)))
    taken = []
    with OutOfMemoryEndsQuietly():
        work.run(rows)
        for _ in range(_TIMED_RUNS):
            _wait_for(meter.device)
            started = time.perf_counter()
            work.run(rows)
            _wait_for(meter.device)
            taken.append(time.perf_counter() - started)
        return min(taken) / len(rows)
    meter.release()
    raise DoesNotFitError("A sample must fit on the device", value=f"one needs {costs.mean() / 2**20:.1f} MiB")


def _peak(work: Pass, meter: Meter, positions: NDArray[np.int64], steps: int) -> Peak:
    meter.reset_peak()
    for _ in range(steps):
        with meter.measuring(work.resident):
            work.run(work.rows[positions])
    return Peak(meter.peak_bytes(), meter.peak_reserved_bytes())


def _worthwhile(upper: float, model: CostModel) -> float:
    """Where the features cost nothing, any batch is as good as any other, and a trial of one sample ends the search."""
    return upper if any(model.coefficients) else 1.0


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
