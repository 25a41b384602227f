"""Predicts the limits of a GPU that is not there, for a plan: small batches on the CPU show how memory grows, and
recorded allocations of CUDA correct it for a card of the catalogue.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Final, TypeVar

import numpy as np
from torch import nn

from can_train.fit.cost_model import DeviceLimits
from can_train.fit.explore import (
    PROBE_SHARE,
    SMALLEST_PROBE,
    Explorer,
    Positions,
    ProbeBounds,
    Upper,
    Workload,
    left_as_it_was,
    probe,
    resident_bytes,
)
from can_train.fit.packing import BatchCosts
from can_train.fit.peak_prediction import NOT_RECORDED, SPREADS, operations_of
from can_train.fit.search import RecordedLine, RecordedPhase, pack_worst_case, room_for_trial
from can_train.memory.catalogue import ROCM, UsableMemory
from can_train.memory.cuda_dispatch import RecordedGpu, compute_on_cuda, compute_on_simulated
from can_train.memory.cuda_library import NoCudaDispatchError, ValuesNeededError
from can_train.memory.cuda_workspaces import SUM_BYTES_PER_THREAD, generations_like
from can_train.memory.meters import AbsentGpuMeter, CpuMeter, is_on_meta
from can_train.memory.value_sizes import Uses, ValueSizes, reading_sizes

_LEAST_READ: Final = 2  # Samples of the first step that shows sizes: normalization fails on one
_READ_S: Final = 4.0  # Of steps that show sizes, after which no larger one is run
# Cost in bytes that the smallest of the recorded batches have, unless fewer samples are wanted: memory is as fragmented
# then as in a large batch.
_RECORDED_COST: Final = 256 * 2**20
_FIRST_SAMPLES: Final = (4, 32)  # of two batches that show about how much a sample costs
_MOST_RECORDED: Final = 4096  # samples of a batch: its operations take no memory, but its samples are read and joined
_DISTINCT_SHARE: Final = 0.25  # of the data, in one batch: all batches would have the same samples

Result = TypeVar("Result")


def predict_limits(explorer: Explorer, upper: Upper) -> DeviceLimits:
    """Predicts the limits of the device that an explorer's meter stands for, up to the cost `upper`, from small batches
    on the CPU. For an NVIDIA GPU a batch of training and one of evaluation are then recorded as CUDA would run them,
    and correct the prediction as the trials of a search do. The limits say whether they were, or why not.

    Raises:
        DoesNotFitError: The model does not fit, or no sample beside it.
    """
    recorded, peaks, failures, read = copy(explorer), [], [], []
    card = explorer.meter.target if isinstance(explorer.meter, AbsentGpuMeter) else None
    if card is None or not card.resident_threads:
        limits = explorer.explore(upper)
        return replace(limits, spread=NOT_RECORDED) if card is not None and card.generation == ROCM else limits

    def record(work: Workload, positions: Positions) -> int | None:
        def measure(gpu: RecordedGpu) -> tuple[int, bool]:
            # In a child process: the explorer's work runs on the GPU.
            recorded.meter = gpu
            return work.peak(gpu, positions).allocated, gpu.depends_on_generation

        compute = partial(compute_on_cuda, recorded.model, measure, resident_threads=card.resident_threads)
        try:
            try:
                found = on_generations(card.generation, compute, differs=itemgetter(1))
            except ValuesNeededError:
                sizes = read_sizes(
                    recorded.model, lambda samples: work.run(work.rows[positions[:samples]]), len(positions)
                )
                if sizes is None:
                    raise
                compute = partial(compute, sizes=sizes)
                found = on_generations(card.generation, compute, differs=itemgetter(1))
                read.append(sizes.largest_step)
            peak = max(allocated for allocated, _ in found.values())
        except NoCudaDispatchError as error:
            sentences = filter(None, (f"{error.rule}: {error.value}", error.remedy))
            failures.append("; ".join(f"{sentence[0].lower()}{sentence[1:]}" for sentence in sentences))
            recorded.record = None
            return None
        peaks.append(peak)
        return peak

    recorded.record = record
    limits = recorded.explore(upper)
    is_recorded = bool(peaks) and not failures
    return replace(
        limits,
        recorded=is_recorded,
        not_recorded_because=failures[0] if failures else "",
        samples_of_sizes=min(read, default=0),
        spread=SPREADS[operations_of(explorer.model)] if is_recorded else NOT_RECORDED,
    )


def predict_without_values(explorer: Explorer, upper: Upper) -> DeviceLimits:
    """Predicts the limits of an NVIDIA GPU that is not at hand, up to the cost `upper`, for a model on meta, from
    recorded batches alone: the model has no memory, and nothing is computed. The caller checks whether weights and
    optimizer state fit.

    Raises:
        NoCudaDispatchError: The task cannot be recorded.
    """
    target = _recorded_target(explorer)

    def compute(gpu: RecordedGpu) -> DeviceLimits:
        # The limits hold for devices that share the model out, too.
        recorded = _on_recorded(explorer, gpu, sys.maxsize)
        recorded.record = lambda work, positions: work.peak(gpu, positions).allocated
        return recorded.explore(upper)

    compute_on = partial(compute_on_cuda, explorer.model, compute, resident_threads=target.resident_threads)
    found = on_generations(target.generation, compute_on).values()
    limits = max(found, key=lambda limits: limits.training.peak_bytes(limits.training.tuned_limit))
    spread = SPREADS[operations_of(explorer.model)]
    return replace(limits, capacity_bytes=target.capacity_bytes, recorded=True, spread=spread)


def record_phase(explorer: Explorer, wanted_samples: float) -> RecordedPhase:
    """Records the lines of training and evaluation as the device would run them that an explorer's meter stands for.

    Args:
        explorer: Its meter is an `AbsentGpuMeter` of an NVIDIA GPU or of a simulated one.
        wanted_samples: Samples of the largest batch that is worth trying.

    Raises:
        NoCudaDispatchError: The task cannot be recorded.
    """
    target = _recorded_target(explorer)

    def compute(gpu: RecordedGpu) -> RecordedPhase:
        recorded = _on_recorded(explorer, gpu, target.capacity_bytes)
        return recorded.record_lines(partial(_record_line, gpu, wanted_samples))

    if not target.resident_threads:
        return compute_on_simulated(explorer.model, compute)
    return compute_on_cuda(
        explorer.model, compute, generation=target.generation, resident_threads=target.resident_threads
    )


def _recorded_target(explorer: Explorer) -> UsableMemory:
    assert isinstance(explorer.meter, AbsentGpuMeter), "only a device that is not at hand is recorded"
    return explorer.meter.target


def _on_recorded(explorer: Explorer, gpu: RecordedGpu, capacity_bytes: int) -> Explorer:
    """Returns a copy of an explorer that measures on a recorded GPU."""
    target, recorded = _recorded_target(explorer), copy(explorer)
    gpu.key, gpu.capacity_bytes = target.key, capacity_bytes
    gpu.kernel_bytes = target.resident_threads * SUM_BYTES_PER_THREAD
    recorded.meter = gpu
    return recorded


def _record_line(gpu: RecordedGpu, wanted_samples: float, work: Workload) -> RecordedLine:
    few, more = (work.peak(gpu, np.resize(np.arange(len(work.rows)), size)).allocated for size in _FIRST_SAMPLES)
    sample_bytes = max((more - few) / (_FIRST_SAMPLES[1] - _FIRST_SAMPLES[0]), 1.0)
    bounds = ProbeBounds(
        capacity_bytes=gpu.capacity_bytes,
        gradient_bytes=work.gradient_bytes,
        kernel_bytes=gpu.kernel_bytes,
        most_distinct=max(int(_DISTINCT_SHARE * len(work.rows)), SMALLEST_PROBE),
        wanted=lambda model: wanted_samples * float(work.counts.mean(axis=0) @ np.asarray(model.coefficients)),
    )
    samples = min(max(_RECORDED_COST, bounds.line_shows), PROBE_SHARE * gpu.capacity_bytes) / sample_bytes
    first_round = max(int(min(samples, wanted_samples, _MOST_RECORDED) / SMALLEST_PROBE), 1)
    fit = probe(work, gpu, replace(bounds, first_round=first_round))
    costs, mean_totals = BatchCosts.priced(fit.model, work.counts), work.counts.mean(axis=0)
    line = RecordedLine(model=fit.model, resident_bytes=resident_bytes(work, gpu), room_share=1.0)
    room = room_for_trial(line, fit.model, tuple(costs.mean_counts()), gpu.capacity_bytes)
    batch = pack_worst_case(costs, min(room, wanted_samples * float(mean_totals @ np.asarray(fit.model.coefficients))))
    positions = batch[:_MOST_RECORDED] if len(batch) else np.arange(1)
    return replace(line, room_share=gpu.room_share(lambda: work.run(work.rows[positions])))


def on_generations(
    generation: str, record: Callable[..., Result], *, differs: Callable[[Result], bool] = lambda _: True
) -> dict[str, Result]:
    """Returns what is recorded on each generation that a GPU may be of, or on the first alone where its result does not
    differ on others; raises NoCudaDispatchError where nothing can be recorded on the first.
    """
    results: dict[str, Result] = {}
    for like in generations_like(generation):
        try:
            results[like] = record(generation=like)
        except NoCudaDispatchError:
            # An old generation may lack what a program needs.
            if not results:
                raise
        if not all(map(differs, results.values())):
            break
    return results


def read_sizes(model: nn.Module, run: Callable[[int], None], num_samples: int) -> ValueSizes | None:
    """Runs batches of few samples on the CPU, each of twice as many as the one before, and returns sizes that depend on
    values; None where the model has no values, or no batch runs. Forward passes do: backward passes use their masks.
    """
    if is_on_meta(model):
        return None
    read: list[tuple[int, Uses]] = []
    # Where no batch runs, the probes that follow say why.
    with left_as_it_was(model, CpuMeter()), suppress(Exception):
        samples, seconds = min(_LEAST_READ, num_samples), 0.0
        while not read or (read[-1][0] < num_samples and (len(read) == 1 or seconds < _READ_S)):
            started = time.process_time()
            with reading_sizes() as uses:
                run(samples)
            seconds += time.process_time() - started
            read.append((samples, uses))
            samples = min(2 * samples, num_samples)
    if not read:
        return None
    (first, smaller), (second, larger) = read[-2:] if len(read) > 1 else 2 * read
    return ValueSizes(smaller, larger, (first, second), num_samples)
