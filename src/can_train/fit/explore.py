"""Finds the largest batches that fit on a device: probes and trials of training, evaluation and other work.

Shapes: R samples, F features.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import CanTrainError, DoesNotFitError, OutOfMemoryDetails, TaskError
from can_train.fit.batch_dependence import ON_META, SPLIT, UNKNOWN, BatchDependence, measure_batch_dependence
from can_train.fit.compiled import FEW, SAMPLES, WeightsOutside, outermost_calls
from can_train.fit.cost_model import (
    AGREED,
    OUT_OF_ROOM,
    OUT_OF_TIME,
    UNWANTED,
    CostModel,
    DeviceLimits,
    ProbeFit,
    ProbeReading,
    SearchResult,
    fit_to_probes,
)
from can_train.fit.optimizer import make_optimizer, only_trained
from can_train.fit.optimizer_memory import OptimizerMemory, measure_optimizer
from can_train.fit.packing import BatchCosts, batch_totals
from can_train.fit.pass_state import PythonState, Snapshot, modules_of
from can_train.fit.precision import Precision
from can_train.fit.random_state import capture_generators, restore_generators, step_generator
from can_train.fit.repetitions import Repetitions
from can_train.fit.rescue import allocate_ballast
from can_train.fit.rungs import SPLIT_ALONE, ModuleCost, Rung, computed_on, measure_modules, rung_of
from can_train.fit.search import (
    SEARCH_SECONDS,
    SEARCH_SHARE,
    Peak,
    RecordedLine,
    RecordedPhase,
    SearchBounds,
    confirm_limit,
    confirm_recorded,
    find_phase_limit,
    pack_worst_case,
)
from can_train.io.units import size_text
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.catalogue import cards_that_hold, predicted_room
from can_train.memory.cuda_workspaces import AMPERE
from can_train.memory.meters import AbsentGpuMeter, CpuMeter, is_on_meta
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.memory.sharded_tensors import largest_shard, shard_of
from can_train.task import Phase

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from can_train.config.settings import TrainingSettings
    from can_train.fit.compiled import CompiledModel
    from can_train.fit.factor_rule import EarlierSearch, RememberedLimit, RememberedLimits
    from can_train.fit.micro_batcher import Losses
    from can_train.fit.sharding import Shards
    from can_train.memory.meters import Meter
    from can_train.task import BatchTask, Feature, LogicalBatch

Positions = NDArray[np.int64]
Upper = Callable[[BatchCosts], float]
"""Returns the largest cost worth trying, given the priced samples."""

# Multiples of the first probes' size. Probes grow until two rounds agree: in smaller ones, memory that does not grow
# with the batch (workspaces, gradients of weights) hides the memory that does.
ROUNDS: Final = (1, 2, 4, 8, 16, 32, 64)
# More multiples, for weights so large and samples so cheap that gradients still hide the line: hundreds of samples of a
# wide multilayer perceptron take less memory than its weights.
LATER_ROUNDS: Final = (128, 256, 512, 1024)
SMALLEST_PROBE: Final = 4  # Samples of a first probe; with fewer, the shape of one sample would decide
# Cost of the largest probe in units of the gradients' size: a line fitted below that bends where activations outgrow
# the gradients, later the less it bends.
_BEYOND_GRADIENTS: Final = 4.0
# Multiple of such a cost that probes without a line grow to beyond `ROUNDS`, and beyond `_PROBE_SECONDS`: a bend there
# shows in three sizes of batches after it.
_WORTH_GROWING: Final = 8.0
_PROBE_SECONDS: Final = 10.0  # Most probes take less than one; long recurrences on a processor take many
# Cost of the largest probe in units of the most that a kernel takes: its sums are a part of the cost. The critic of a
# WGAN-GP in bf16, recorded for an H100, grows evenly from 13 times as much on.
_BEYOND_KERNELS: Final = 16.0
_SIZES_OF_A_LINE: Final = 2  # Of one size alone, nobody knows how much is there without a batch
# Largest probe in units of the largest batch that is worth trying, where smaller ones do not lie on a line.
_MOST_WANTED: Final = 4.0
_MOST_BISECTIONS: Final = 8  # That look for the largest sample that fits, to a 256th of the samples
PROBE_SHARE: Final = 0.5  # Share of the capacity that probes stay below: they should be tiny


@dataclass(frozen=True, kw_only=True)
class ProbeBounds:
    """Largest size of probes, and sizes that they outgrow: small batches hide the line that holds for batches that fill
    a device; in bytes.
    """

    capacity_bytes: float  # Of the device
    # Size of the weights' gradients, which decide the peak of batches that cost less, at the end of a backward pass.
    gradient_bytes: float = 0.0
    kernel_bytes: float = 0.0  # The most that a kernel takes beside its results, which grows with small batches only
    first_round: int = 1  # Multiple of the first probes' size, about
    most_distinct: int = sys.maxsize  # Samples that differ in a probe; a larger probe repeats them
    # Cost of the largest batch that is worth trying, by a cost model: beyond it no line is needed
    wanted: Callable[[CostModel], float] = lambda model: math.inf
    has_time: Callable[[], bool] = lambda: True  # Tells whether larger probes than show a line may be run
    allows: Callable[[int], bool] = lambda samples: True  # Tells whether there is time for a probe of so many samples

    @property
    def line_shows(self) -> float:
        """The least cost at which memory grows in a line: kernels' own memory and gradients no longer hide it."""
        return max(_BEYOND_GRADIENTS * self.gradient_bytes, _BEYOND_KERNELS * self.kernel_bytes)


def fit_by_probes(
    measure: Callable[[Positions], int],
    features: Sequence[Feature],
    counts: NDArray[np.float64],
    bounds: ProbeBounds,
) -> ProbeFit:
    """Runs small batches at the extremes of the data, larger ones until two sizes agree on a line, and fits it.

    Args:
        measure: Runs one batch of samples, given by their positions in `counts`, and returns its peak in bytes.
        features: F of them.
        counts: [R, F] of every sample.
        bounds: How large probes are.

    Raises:
        DoesNotFitError: Not even a single sample fits.
    """
    readings: list[ProbeReading] = []
    sizes: set[int] = set()  # That were read
    in_time = True
    capacity_bytes, are_uniform = bounds.capacity_bytes, not np.ptp(counts, axis=0).any()
    fitting = np.arange(len(counts))  # Without samples that do not fit by themselves, once some are known

    def probes(size: int) -> list[Positions]:
        distinct = min(size, bounds.most_distinct)
        extremes = [fitting[each] for each in extreme_samples(counts[fitting], distinct)]
        chosen = [np.resize(each, len(each) * size // distinct) for each in extremes]
        peaks = sorted(peak for _, peak in readings)
        # Where other samples, as many of them, took the same and fewer took less, a size need not be read twice.
        agree = are_uniform and any(one == other > peaks[0] for one, other in pairwise(peaks))
        return chosen[-1:] if agree else chosen

    def read(positions: Positions) -> bool:
        """Runs a batch and adds to the readings; returns whether it fitted."""
        with CatchOutOfMemory() as caught:
            readings.append((batch_totals(features, counts[positions]), float(measure(positions))))
            sizes.add(len(positions))
        return not caught.message

    def run_round(size: int, *, whole: bool = False) -> bool:
        """Runs the probes of one size, all of them if `whole`, else until one does not fit; returns whether all fit."""
        nonlocal in_time
        complete = True
        for positions in probes(size):
            # Two sizes are read however long they take: of one alone, nobody knows how much is there without a batch.
            in_time = len(sizes) < _SIZES_OF_A_LINE or bounds.allows(len(positions))
            if not in_time:
                return False
            complete = read(positions) and complete
            if not (complete or whole):
                break
        return complete

    for multiple in (multiple for multiple in ROUNDS + LATER_ROUNDS if 2 * multiple > bounds.first_round):
        is_first = not readings
        complete = run_round(SMALLEST_PROBE * multiple)
        if not readings:
            run_round(SMALLEST_PROBE // 2)
            try:
                # Any of them may be huge.
                if not run_round(1, whole=True) and in_time and readings:
                    fitting = _fitting_alone(counts, lambda position: read(np.array([position])))
            except Exception:
                # BatchNorm cannot train on one.
                if not readings:
                    raise
            # Of batches of samples that fit, those of small ones tell padding from lengths.
            if readings:
                run_round(SMALLEST_PROBE, whole=True)
        elif not complete and len(sizes) < _SIZES_OF_A_LINE:
            # No single samples: BatchNorm cannot train on one.
            run_round(SMALLEST_PROBE // 2)
        if not readings:
            raise DoesNotFitError(
                "At least one training sample must fit on the device",
                value=f"a batch of one sample needs more than the {size_text(capacity_bytes)} of the device",
                remedy=_smaller_model(capacity_bytes),
            )
        model = fit_to_probes(features, readings, bounds.kernel_bytes)
        smallest, largest = min(peak for _, peak in readings), max(peak for _, peak in readings)
        cost, wanted = max(largest - model.base_bytes, 0.0), bounds.wanted(model)
        costliest = max(float(totals @ np.asarray(model.coefficients)) for totals, _ in readings)
        lies_on_line = model.relative_residual <= AGREED
        covers = costliest >= wanted * (1.0 if lies_on_line else _MOST_WANTED)
        # Peaks that do not grow at all agree on nothing: the memory that grows is still hidden.
        agreed = largest > smallest and lies_on_line and cost >= min(bounds.line_shows, wanted)
        # The first round shows a line alone where it is large, with more batches than the line has coefficients.
        is_enough = not is_first or (bounds.first_round > 1 and len(readings) > len(features) + 1)
        is_full = largest > PROBE_SHARE * capacity_bytes
        if not complete or (is_enough and (agreed or covers or is_full)):
            break
        is_last = multiple >= ROUNDS[-1] or not bounds.has_time()
        if is_last and cost >= _WORTH_GROWING * min(bounds.line_shows, wanted):
            break
    if cost < bounds.line_shows or not model.grows:
        ended = OUT_OF_ROOM if not model.grows and (is_full or not complete) else ""
        model = replace(model, hidden=UNWANTED if covers else ended if in_time else OUT_OF_TIME)
    # Of equal peaks, the largest batch's.
    peak, cost = max((peak, float(totals @ np.asarray(model.coefficients))) for totals, peak in readings)
    return ProbeFit(model=model, largest_cost=cost, largest_peak=peak)


def _fitting_alone(counts: NDArray[np.float64], fits: Callable[[int], bool]) -> Positions:
    """Returns the positions of the samples that are no larger than one that fits by itself, from the features
    [R, F] of all: it is found by bisection, and the smallest fits.
    """
    largest = np.maximum(counts.max(axis=0), 1.0)
    order = np.argsort((counts / largest).sum(axis=1), kind="stable")
    least, most = 0, len(order) - 1
    for _ in range(_MOST_BISECTIONS):
        if most - least <= 1:
            break
        middle = (least + most) // 2
        least, most = (middle, most) if fits(int(order[middle])) else (least, middle)
    return order[: least + 1]


def extreme_samples(counts: NDArray[np.float64], size: int) -> list[Positions]:
    """Chooses the samples of one round's probes: positions [size] in counts [R, F], one array a probe, of the largest
    and the smallest in each feature, the largest and smallest ratio of each pair of features, the smallest and largest
    in turn, the first ones in order, and twice as many from the end. Too few samples are repeated.
    """
    keys = [counts[:, f] for f in range(counts.shape[1]) if np.ptp(counts[:, f]) > 0]
    # Extreme ratios tell features apart that grow together in ordinary batches (nodes and edges).
    ratios = [a / np.maximum(b, 1.0) for i, a in enumerate(keys) for b in keys[:i]]
    probes: dict[tuple[int, ...], Positions] = {}
    if keys:
        # Where samples are padded to the longest of their batch and the features do not say so, only this one shows it.
        order = np.argsort(keys[0], kind="stable")
        mixed = np.stack([order, order[::-1]], axis=1).ravel()
        probes[tuple(sorted(mixed[:size].tolist()))] = np.resize(mixed[:size], size)
    # The largest come last: where one runs out of memory, the others of its round have been read.
    for key in reversed(keys + ratios):
        order = np.argsort(key, kind="stable")
        for ranked in (order, order[::-1]):
            probe = np.resize(ranked[:size], size)
            # Two keys may choose the same samples.
            probes.setdefault(tuple(sorted(probe.tolist())), probe)
    everything = np.arange(len(counts))
    # Other samples with the same features: only they show whether the features explain everything.
    return [*probes.values(), np.resize(everything, size), np.resize(everything[::-1], 2 * size)]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A kind of work on batches of samples, whose memory is to be found out."""

    run: Callable[[NDArray[np.int64]], None]  # Runs a batch of some rows
    rows: NDArray[np.int64]  # [R] the samples that batches are made of
    counts: NDArray[np.float64]  # [R, F] their features
    features: Sequence[Feature]  # Counts that the memory of a batch grows with
    resident: Sequence[Tensor]  # Tensors that are on the device meanwhile
    gradient_bytes: int = 0  # Size of the weights' gradients, where the work computes them
    steps_per_trial: int = 1  # Times that a batch is run in a trial

    def peak(self, meter: Meter, positions: Positions, *, steps: int = 1) -> Peak:
        """Runs the batch of the samples at some positions, several times, and returns the peak."""
        while True:
            meter.reset_peak()
            try:
                for _ in range(steps):
                    with meter.measuring(self.resident):
                        self.run(self.rows[positions])
            except Exception:
                # A program may refuse random numbers, or run out of memory with them.
                if not meter.take_values():
                    raise
            else:
                if not meter.take_values():
                    return Peak(meter.peak_bytes(), meter.peak_reserved_bytes())


Record = Callable[[Workload, Positions], "int | None"]
"""Returns the peak of a batch in bytes, or None where it cannot be recorded."""
# Share of the time of a search that the search of training may take. Evaluation runs forward alone, in about a third
# of the time.
_TRAINING_SHARE: Final = 0.75
_LEFT_FOR_TRIALS: Final = 0.2  # Share of that time that probes leave


@dataclass(kw_only=True)
class SearchTime:
    """The time that finding the limits of a device may take, and has taken."""

    clock: Callable[[], float]
    seconds: float = SEARCH_SECONDS
    epoch_share: float = SEARCH_SHARE  # Of the seconds of an epoch with every sample, where that is more
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def allows(self, seconds: float, *, epoch_seconds: float, share: float) -> bool:
        """Whether a trial of some seconds would end within a share of the time."""
        self.seconds = max(self.seconds, self.epoch_share * epoch_seconds)
        return self.clock() - self.started + seconds <= share * self.seconds


@dataclass(frozen=True, kw_only=True)
class Search:
    """How the limit of some work is searched for."""

    verify: bool = True  # Whether limits are tried; otherwise they are predicted, for a device that need not be at hand
    on_trial: Callable[[float], object] = lambda cost: None  # Called before each trial with its cost in bytes
    # By default as much as it takes.
    time: SearchTime = field(default_factory=lambda: SearchTime(clock=lambda: 0.0, seconds=math.inf))
    time_share: float = 1.0  # The part of that time that this search may take
    looks_beyond: bool = False  # Whether the line is to hold for larger batches than are tried
    record: Record | None = None  # Measures a batch on a device that is not at hand; None: probes alone predict it
    known: RememberedLimit | None = None  # An earlier run's limit, to be confirmed first; None: there is none
    recorded: RecordedLine | None = None  # A recorded line, to be confirmed in place of probes; None: there is none
    on_refused: Callable[[str], object] = lambda reason: None  # Called where a trial does not confirm it

    def allows_probe(self, samples: int, sample_seconds: float, dataset_size: int) -> bool:
        """Whether there is time for a probe of some samples; some is left for trials."""
        seconds, epoch_seconds = samples * sample_seconds, dataset_size * sample_seconds
        return self.time.allows(seconds, epoch_seconds=epoch_seconds, share=self.time_share - _LEFT_FOR_TRIALS)


def resident_bytes(work: Workload, meter: Meter) -> int:
    """Returns the bytes that are on the device while nothing runs."""
    return replace(work, run=lambda rows: None).peak(meter, np.arange(0)).allocated


def probe(
    work: Workload,
    meter: Meter,
    bounds: ProbeBounds | None = None,
    *,
    wanted: Callable[[CostModel], float] = lambda model: math.inf,
    search: Search | None = None,
) -> ProbeFit:
    """Fits the cost model of some work; raises DoesNotFitError where not even a sample fits.

    Args:
        work: The work.
        meter: Measures it.
        bounds: Largest size of probes; None: they go on until the line shows, up to `wanted` and within the time of
            `search`.
        wanted: Cost of the largest batch that is worth trying, by a cost model.
        search: The search that the probes are a part of; None: they take as long as they take.
    """
    slack_bytes, largest, largest_seconds, sample_seconds = 0, 0, 0.0, 0.0

    def measure(positions: Positions) -> int:
        nonlocal slack_bytes, largest, largest_seconds, sample_seconds
        meter.release(collect=False)
        started = meter.seconds()
        peak = work.peak(meter, positions)
        seconds = meter.seconds() - started
        sample_seconds = seconds / len(positions)
        if peak.allocated >= largest:
            largest, largest_seconds = peak.allocated, seconds
        # Fragmentation grows little with the batch; of the largest probe's, a last page that must fit whole is added.
        slack_bytes = max(slack_bytes, peak.reserved - peak.allocated + page_bytes) if peak.reserved else 0
        return peak.allocated

    page_bytes = read_allocator_settings().large_page_bytes
    end = meter.seconds() + _PROBE_SECONDS
    bounds = bounds or ProbeBounds(
        capacity_bytes=meter.capacity_bytes,
        gradient_bytes=work.gradient_bytes,
        kernel_bytes=meter.kernel_bytes,
        wanted=wanted,
        has_time=lambda: meter.seconds() < end,
        allows=lambda samples: search is None or search.allows_probe(samples, sample_seconds, len(work.rows)),
    )
    fit = fit_by_probes(measure, work.features, work.counts, bounds)
    return replace(fit, slack_bytes=float(slack_bytes), largest_seconds=largest_seconds)


@dataclass(kw_only=True)
class _Trials:
    """Runs the batches of a search."""

    work: Workload
    meter: Meter
    costs: BatchCosts
    search: Search
    seconds_per_byte: float  # Of cost, as the last batch took; a larger one takes no longer for its cost

    def run(self, positions: Positions) -> Peak:
        return self._timed(positions, self.work.steps_per_trial)

    def run_once(self, positions: Positions) -> Peak:
        return self._timed(positions, 1)

    def warm_up(self, positions: Positions) -> None:
        positions = positions if len(positions) else np.argmin(self.costs.each(), keepdims=True)
        # The first run takes longer: kernels are loaded.
        self.work.peak(self.meter, positions)
        self._measure(positions, 1)

    def resident_bytes(self) -> int:
        return resident_bytes(self.work, self.meter)

    def _timed(self, positions: Positions, steps: int) -> Peak:
        self.search.on_trial(self.costs.chosen(positions).total)
        return self._measure(positions, steps)

    def _measure(self, positions: Positions, steps: int) -> Peak:
        cost = self.costs.chosen(positions).total
        self.meter.release()
        started = self.meter.seconds()
        peak = self.work.peak(self.meter, positions, steps=steps)
        self.seconds_per_byte = (self.meter.seconds() - started) / steps / max(cost, 1.0)
        return peak

    def has_time(self, cost: float) -> bool:
        seconds = self.work.steps_per_trial * self.seconds_per_byte * cost
        epoch_seconds = self.seconds_per_byte * float(self.costs.each().sum())
        return self.search.time.allows(seconds, epoch_seconds=epoch_seconds, share=self.search.time_share)


def find_limit(work: Workload, meter: Meter, upper: Upper, search: Search) -> SearchResult:
    """Fits the cost model of some work, and searches for the largest batch that fits, up to the cost `upper`."""
    if search.recorded is not None and search.known is None:
        outcome = _confirm_recorded(work, meter, upper, search, search.recorded)
        if isinstance(outcome, SearchResult):
            return outcome
        search.on_refused(outcome)
    wanted = (lambda model: math.inf) if search.looks_beyond else partial(_wanted, work.counts, upper)
    fit = probe(work, meter, wanted=wanted, search=search)
    costs = BatchCosts.priced(fit.model, work.counts)
    # Where the features cost nothing, any batch is as good as any other, and a trial of one sample ends the search.
    highest = upper(costs) if any(fit.model.coefficients) else 1.0
    if not search.verify:
        limit = SearchResult(model=fit.model, tuned_limit=highest, capped=True, mean_totals=costs.mean_counts())
        if search.record is not None:
            batch = _batch_to_record(costs, min(highest, limit.cost_within(predicted_room(meter.capacity_bytes))), fit)
            cost = costs.chosen(batch).total
            # A batch that costs nothing has no ratio.
            if cost > 0 and (peak := search.record(work, batch)) is not None:
                ratio = (peak - fit.model.base_bytes) / cost
                limit = replace(limit, measured_ratio=max(ratio, _SMALLEST_RATIO))
        return limit.predicted_within(predicted_room(meter.capacity_bytes))
    pace = fit.largest_seconds / max(fit.largest_cost, 1.0)
    trials = _Trials(work=work, meter=meter, costs=costs, search=search, seconds_per_byte=pace)
    if search.known is not None:
        # A whole run has kept to that limit: running its batch once is enough.
        confirmed = confirm_limit(fit, trials.run_once, costs, search.known, upper=highest)
        if confirmed is not None:
            return confirmed
    bounds = SearchBounds(upper=highest, capacity_bytes=meter.capacity_bytes, has_time=trials.has_time)
    return find_phase_limit(fit, trials.run, costs, bounds)


def _wanted(counts: NDArray[np.float64], upper: Upper, model: CostModel) -> float:
    return upper(BatchCosts.priced(model, counts))


def _confirm_recorded(
    work: Workload, meter: Meter, upper: Upper, search: Search, line: RecordedLine
) -> SearchResult | str:
    if line.model.features != tuple(work.features):
        return "it was recorded of other features"
    costs = BatchCosts.priced(line.model, work.counts)
    trials = _Trials(work=work, meter=meter, costs=costs, search=search, seconds_per_byte=0.0)
    bounds = SearchBounds(upper=upper(costs), capacity_bytes=meter.capacity_bytes)
    outcome: SearchResult | str = "a trial of the recorded size ran out of memory"
    with CatchOutOfMemory():
        outcome = confirm_recorded(line, trials, costs, bounds)
    meter.release()
    return outcome


# Most bytes of cost, and most samples, of a batch that is recorded: its operations take no memory, but its samples are
# read and joined.
_RECORDED_BYTES: Final = 2**30
_RECORDED_SAMPLES: Final = 1024
_SMALLEST_RATIO: Final = 0.01  # Of a recorded peak ÷ the probes' prediction: a cost stays a positive number


def _batch_to_record(costs: BatchCosts, limit: float, fit: ProbeFit) -> Positions:
    """Chooses the samples of a batch up to a limit, and no cheaper than the largest probe: weights may hide the memory
    of a cheaper one.
    """
    batch = pack_worst_case(costs, max(min(limit, _RECORDED_BYTES), fit.largest_cost))[:_RECORDED_SAMPLES]
    batch = batch if len(batch) else np.arange(1)
    repeats = min(fit.largest_cost / max(costs.chosen(batch).total, 1.0), _RECORDED_SAMPLES / len(batch))
    return np.resize(batch, math.ceil(len(batch) * max(repeats, 1.0)))


# Samples of a batch that is timed, where they fit; the share of the capacity that they may take; and the runs: only
# the quickest counts: the others waited for other processes.
_TIMED_SAMPLES: Final = 64
_TIMED_SHARE: Final = 0.5
_TIMED_RUNS: Final = 5
# Share of the samples, from the smallest, up to which samples are compared whole and in parts: the largest may be many
# times as large. Where memory runs out, samples below the middle are.
_COMPARED_UP_TO: Final = (0.95, 0.5)
_OUTLIER: Final = 1.5  # Size of the largest sample, in sizes of those compared, from which it is compared, too
_OF_OUTLIER: Final = (2, 2)  # Samples of the parts, of which the second ones are the largest


def seconds_per_sample(work: Workload, model: CostModel, meter: Meter) -> float:
    """Times a warm batch that takes half of the device at most; raises DoesNotFitError where no sample fits."""
    costs = work.counts @ np.asarray(model.coefficients)
    room = _TIMED_SHARE * meter.capacity_bytes - model.base_bytes
    rows = np.resize(work.rows, int(np.clip(room / max(costs.mean(), 1.0), 1, _TIMED_SAMPLES)))

    seconds = []
    with CatchOutOfMemory():
        # The first run warms the device up.
        for _ in range(1 + _TIMED_RUNS):
            started = time.perf_counter()
            work.run(rows)
            if meter.device.type == "cuda":
                # Kernels run on after their launch has returned.
                torch.cuda.synchronize(meter.device)
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:]) / len(rows)
    meter.release()
    raise DoesNotFitError("A sample must fit on the device", value=f"one needs {size_text(costs.mean())}",
                          remedy="Choose a larger device, or a smaller model by its settings (--set)")  # fmt: skip


@contextmanager
def left_as_it_was(model: nn.Module, meter: Meter) -> Iterator[list[Tensor]]:
    """Sets gradients aside for the block, and restores buffers, random generators and gradients after it.

    Yields:
        Copies of the buffers: a step of training, and a part of an evaluation, hold such copies too.
    """
    parameters = [*model.parameters()]
    snapshot, gradients = Snapshot(model, meter.device), [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield snapshot.copies
    finally:
        snapshot.restore()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        meter.release()
        meter.reset_peak()


@dataclass(kw_only=True)
class Explorer:
    """Runs batches of a task to measure their memory."""

    task: BatchTask
    model: nn.Module  # Its model, on the meter's device; left as it is
    training: TrainingSettings
    meter: Meter
    rows: NDArray[np.int64]  # [R] the training samples
    verify: bool = True  # Whether limits are tried; otherwise they are predicted, for a device that need not be at hand
    reference_tensors: Sequence[Tensor] = ()  # Tensors of reference models that are on the device
    phase: Phase = field(default_factory=Phase)  # Whose parameters are trained; the task is as it is in it
    other_phases: Sequence[Explorer] = ()  # Whose optimizers have state, too
    others_state_bytes: int = 0  # The part of their state that is on the device meanwhile
    search_seconds: float = math.inf  # That a search of limits may take in any case
    epoch_share: float = SEARCH_SHARE  # The share of an epoch with every sample that it may take where that is more
    record: Record | None = None  # Measures a batch on a device that is not at hand; None: probes alone predict it
    rung: Rung = SPLIT_ALONE  # That steps are computed on
    alone: bool = False  # Whether each step is a single micro-batch, so that no gradients are there before it
    shards: Shards | None = None  # The model's shards on the ranks of a run; None: each rank has the whole model
    on_refused: Callable[[str], object] = lambda reason: None  # Called where a trial does not confirm recorded lines
    # By rung, the most bytes of saved tensors of a batch that left for the host, and the rows of the batch.
    left_most: dict[Rung, tuple[int, NDArray[np.int64]]] = field(default_factory=dict, init=False)
    # By the sizes and types of the parameters that were trained then.
    _optimizers: dict[tuple[object, ...], OptimizerMemory] = field(default_factory=dict, init=False)

    @cached_property
    def _counts(self) -> NDArray[np.float64]:
        return self.task.batch_features(self.rows)

    @cached_property
    def _repetitions(self) -> Repetitions:
        # In place of a GPU that is not at hand, the results of products are drawn.
        return Repetitions(compares=not self.is_on_meta and not isinstance(self.meter, AbsentGpuMeter))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        # Not cached: parameters may be frozen or thawed between two calls.
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def _precision(self) -> Precision:
        return Precision.named(self.training.precision)

    def explore(
        self,
        upper: Upper,
        *,
        held_bytes: int = 0,
        on_trial: Callable[[float], object] = lambda cost: None,
        earlier: EarlierSearch | None = None,
        recorded: RecordedPhase | None = None,
    ) -> DeviceLimits:
        """Fits the cost models of training and evaluation, and searches for their limits, or confirms the limits of an
        earlier run; `held_bytes` of the optimizers' state are on the device already. Raises DoesNotFitError where the
        model does not fit, or no sample beside it.
        """
        time = SearchTime(clock=self.meter.seconds, seconds=self.search_seconds, epoch_share=self.epoch_share)
        search = Search(
            verify=self.verify, record=self.record, on_trial=on_trial, time=time, time_share=_TRAINING_SHARE,
            recorded=recorded.training if recorded else None, on_refused=self.on_refused,
        )  # fmt: skip
        known = self.remembered(earlier)
        if known is not None and (known.climbed or rung_of(known) != self.rung):
            known = None
        with self._trained_alone() as buffer_copies:
            # Otherwise the first step would tell, which the next rung may have room for. On a GPU that is not at hand,
            # the whole model is explored for its shards, too.
            optimizer_peak, is_here = self.optimizer_peak_bytes(), not isinstance(self.meter, AbsentGpuMeter)
            if is_here and optimizer_peak > self.meter.capacity_bytes:
                raise model_does_not_fit(optimizer_peak, self.meter.capacity_bytes)
            optimizer, held, work = self._mid_run(buffer_copies, held_bytes)
            training = find_limit(work, self.meter, upper, replace(search, known=known.training if known else None))
            # Evaluation runs without gradients.
            del work
            # Evaluation gains nothing from parts larger than training's.
            needed = min(training.tuned_limit / max(upper(BatchCosts.priced(training.model, self._counts)), 1.0), 1.0)
            part, work = (lambda costs: needed * upper(costs)), self._work(self._evaluate, held)
            search = replace(search, time_share=1.0, known=known.evaluation if known else None,
                             recorded=recorded.evaluation if recorded else None)  # fmt: skip
            with self._evaluating():
                evaluation = find_limit(work, self.meter, part, search)
        return DeviceLimits(
            earlier_run=earlier.run_id if earlier is not None and (training.confirmed or evaluation.confirmed) else "",
            device_key=self.meter.key,
            capacity_bytes=self.meter.capacity_bytes,
            training=training,
            evaluation=evaluation,
            optimizer_peak_bytes=optimizer_peak,
            gradient_bytes=0 if self.alone else optimizer.parameter_bytes,
            is_alone=self.alone,
        )

    def record_lines(self, fit: Callable[[Workload], RecordedLine]) -> RecordedPhase:
        """Records training and evaluation on a device that is not at hand."""
        with self._trained_alone() as buffer_copies:
            _, held, work = self._mid_run(buffer_copies)
            training = fit(work)
            # Evaluation runs without gradients.
            del work
            with self._evaluating():
                return RecordedPhase(training=training, evaluation=fit(self._work(self._evaluate, held)))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def remembered(self, earlier: EarlierSearch | None) -> RememberedLimits | None:
        """Returns the phase's limits of an earlier run that had this device's memory, and this version of PyTorch."""
        if earlier is None or not earlier.is_of(self.meter.capacity_bytes, torch.__version__):
            return None
        return earlier.phases.get(self.phase.name)

    def step_cost(self) -> tuple[CostModel, float]:
        """Returns the cost model of training and a step's seconds per sample; raises DoesNotFitError."""
        with self._trained_alone() as buffer_copies:
            _, _, work = self._mid_run(buffer_copies)
            model = probe(work, self.meter).model
            return model, seconds_per_sample(work, model, self.meter)

    @contextmanager
    def worst_case(self, training: SearchResult, cost: float) -> Iterator[tuple[Callable[[], None], Sequence[Tensor]]]:
        """Yields a function that runs a worst-case batch of training, and the tensors that are resident meanwhile."""
        with self._trained_alone() as buffer_copies:
            _, _, work = self._mid_run(buffer_copies)
            batch = pack_worst_case(BatchCosts.priced(training.model, self._counts), cost)
            yield (lambda: work.run(self.rows[batch]) if len(batch) else None), work.resident

    def evaluation_fits(self, row: int, *, beside_state: bool, held_bytes: int = 0) -> bool:
        """Evaluates one sample, beside the optimizer's state if training goes on; tells whether it fits."""
        generators = capture_generators()
        try:
            with CatchOutOfMemory() as caught:
                self._peak_alone(row, evaluates=True, beside_state=beside_state, held_bytes=held_bytes)
        # A task may refuse a single sample, which an evaluation need not have.
        except Exception:  # noqa: BLE001
            return True
        finally:
            restore_generators(generators)
        self.meter.release()
        return not caught.message

    def _peak_alone(self, row: int, *, evaluates: bool, beside_state: bool = True, held_bytes: int = 0) -> int:
        """Returns the peak of one sample, in training or in evaluation."""
        with self._trained_alone() as buffer_copies:
            held, work = buffer_copies, None
            if beside_state:
                _, held, work = self._mid_run(buffer_copies, held_bytes)
            if work is None or evaluates:
                # Evaluation runs without gradients.
                work = self._work(self._evaluate, held)
            with self._evaluating() if evaluates else nullcontext():
                return replace(work, rows=np.array([row])).peak(self.meter, np.arange(1)).allocated

    def peak_on_host(self, row: int, *, evaluates: bool = False, beside_state: bool = True) -> int | None:
        """Measures one sample, in training or in evaluation, on the host, for a device that it does not fit on; None
        where the model is not on the host, or the sample fails there.
        """
        if self.meter.device.type != "cpu" or self.is_on_meta or self.shards is not None:
            return None
        on_host, generators = copy(self), capture_generators()
        on_host.meter = CpuMeter(cuda=None if self.meter.is_host else AMPERE)
        peak: int | None = None
        # The error that is told must not be another one.
        with suppress(Exception), self.meter.host():
            peak = on_host._peak_alone(row, evaluates=evaluates, beside_state=beside_state)
        restore_generators(generators)
        return peak

    def optimizer_memory(self) -> OptimizerMemory:
        """Measures, on the host, the memory of the phase's optimizer for the parameters that are trained now."""
        return self._optimizer_memory(offloaded=self.rung.offload_optimizer)

    def count_others_state(self) -> None:
        """Counts the state of the other phases' optimizers on the rung in force; to be called outside of a phase."""
        offloaded = self.rung.offload_optimizer
        states = (one._optimizer_memory(offloaded=offloaded).state_bytes for one in self.other_phases)
        self.others_state_bytes = sum(states)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all phases' optimizers that are on the device."""
        return self.optimizer_memory().state_bytes + self.others_state_bytes

    @property
    def host_state_bytes(self) -> int:
        """Bytes of the state of all phases' optimizers that wait on the host of one rank."""
        ranks = self.rung.ranks if self.shards is None else 1
        phases = (self, *self.other_phases)
        return sum(one._optimizer_memory(offloaded=True, ranks=ranks).host_bytes for one in phases)

    def saved_by_shards(self) -> tuple[int, int]:
        """Returns how much less the state of all phases' optimizers, and the phase's optimizer step beside it, take on
        the device where the ranks of the rung in force share the model.
        """
        saved = []
        for one in (self, *self.other_phases):
            whole = one._optimizer_memory(offloaded=self.rung.offload_optimizer)
            shard = one._optimizer_memory(offloaded=self.rung.offload_optimizer, ranks=self.rung.ranks)
            saved.append((whole.state_bytes - shard.state_bytes, whole.transient_bytes - shard.transient_bytes))
        return sum(state for state, _ in saved), saved[0][1]

    def make_optimizer(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Makes the phase's optimizer for some parameters."""
        return make_optimizer(list(parameters), self.training, self.training.lr, self.meter.device)

    def _optimizer_memory(self, *, offloaded: bool, ranks: int = 1) -> OptimizerMemory:
        training = self.training
        with self.meter.host(), only_trained(self.model, self.phase):
            parameters: Sequence[Tensor] = self._parameters
            if ranks > 1:
                parameters = [largest_shard(one, ranks) for one in parameters]
            trained = (offloaded, *((shard_of(one).shape, one.dtype) for one in parameters))
            if trained in self._optimizers:
                return self._optimizers[trained]
            try:
                self._optimizers[trained] = measure_optimizer(parameters, self.make_optimizer, offloaded=offloaded)
            except CanTrainError:
                raise
            # An optimizer may be anybody's code.
            except Exception as error:
                rule = f"{training.optimizer} failed in a step on the CPU, where its memory is measured"
                raise TaskError(rule, error) from error
            return self._optimizers[trained]

    @property
    def is_on_meta(self) -> bool:
        """Whether the model has no values, so that no batch can be computed."""
        return is_on_meta(self.model)

    def batch_dependence(self) -> BatchDependence:
        """Measures whether samples of a batch influence each other's gradient."""
        if self.is_on_meta:
            return ON_META
        order = np.argsort(self._counts[:, 0], kind="stable")
        sizes, ranked = self._counts[order, 0], self.rows[order]
        # Samples of many sizes: a loss may depend on the padding, which samples of one size lack. Those above the first
        # quarter have some of every feature.
        first, *ends = (int(share * (len(ranked) - 1)) for share in (0.25, *_COMPARED_UP_TO))
        tried = (self._dependence_of(ranked[np.linspace(first, end, sum(SPLIT)).astype(int)], SPLIT) for end in ends)
        measured = next(filter(None, tried), UNKNOWN)
        if not measured.terms and sizes[-1] > _OUTLIER * sizes[ends[0]]:
            # Few of them, since the largest sample may take long.
            longest = self._dependence_of(ranked[[first, ends[-1], -1, -1]], _OF_OUTLIER)
            measured = replace(longest, faults={}) if longest is not None and longest.terms else measured
        return measured

    def _dependence_of(self, rows: NDArray[np.int64], sizes: Sequence[int]) -> BatchDependence | None:
        """Compares samples whole and in parts of some sizes; None: memory ran out."""
        batch = self._batch(rows, coupled=True)
        # Processors take up to 80 times as long in half precision, and less of a dependence is round-off in single.
        precision = replace(self._precision, autocast=None) if self.meter.device.type == "cpu" else self._precision

        def losses(start: int, stop: int) -> Losses:
            with precision.context(self.meter.device):
                return batch.losses(self.model, start, stop)

        on_rung = computed_on(self.rung, self.model, repetitions=self._repetitions)
        with CatchOutOfMemory(), only_trained(self.model, self.phase), on_rung:
            return measure_batch_dependence(
                self.model.train(), losses, batch.denominators, half=precision.autocast is not None, sizes=sizes
            )
        self.meter.release()
        return None

    def module_costs(self, names: Sequence[str], row: int) -> tuple[list[ModuleCost], float]:
        """Measures how much modules save of a sample for the backward pass, and their time; returns also the seconds
        of the whole forward pass. Nothing is measured where memory runs out.
        """
        if self.is_on_meta:
            return [], 0.0
        try:
            return self._module_costs(names, row, samples=1)
        except Exception:  # noqa: BLE001 - whatever a task raises of a single sample
            # Batch normalization of pooled features takes none.
            costs, seconds = self._module_costs(names, row, samples=2)
            half = [replace(cost, saved_bytes=cost.saved_bytes // 2, seconds=cost.seconds / 2) for cost in costs]
            return half, seconds / 2

    def _module_costs(self, names: Sequence[str], row: int, *, samples: int) -> tuple[list[ModuleCost], float]:
        """Measures as `module_costs` does, of a batch with a sample several times."""
        rows = np.full(samples, row)

        def forward() -> Losses:
            return self._losses(self._batch(rows, coupled=True), 0, samples)

        # What stands in for a GPU that is not at hand draws the results of products, which takes no time.
        is_here = not isinstance(self.meter, AbsentGpuMeter)
        span = self.meter.measuring(self._resident) if is_here else nullcontext()
        with CatchOutOfMemory(), self._trained_alone(), span:
            try:
                measure_modules(self.model, names, forward, self.meter.seconds)  # The first pass takes longer
                return measure_modules(self.model, names, forward, self.meter.seconds)
            finally:
                self._reset_shards()
        self.meter.release()
        return [], 0.0

    @property
    def _resident(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers(), *self.reference_tensors]

    def check_outputs(self) -> None:
        """Lets the task check the form of all that it computes of a few samples beside the loss."""
        if self.is_on_meta:
            return
        rows, snapshot = self.task.validation_rows[: sum(SPLIT)], Snapshot(self.model, self.meter.device)
        self.model.eval()
        try:
            with CatchOutOfMemory(), torch.no_grad(), self._precision.context(self.meter.device):
                self.task.check_outputs(self.model, rows, self.meter.device, self._precision.dtype)
        finally:
            self.model.train()
            snapshot.restore()
            self._reset_shards()

    def called_modules(self) -> tuple[list[nn.Module], list[nn.Parameter]]:
        """Returns the modules that the loss of a few samples calls, from outside of any other, and the weights that it
        computes with outside of them.
        """
        step = partial(self._train_step, self.rows[: sum(SPLIT)])
        with self._trained_alone():
            called = outermost_calls(self.model, step)
            with WeightsOutside(called) as outside:
                step()
            return called, [one for one in self.model.parameters() if id(one) in outside.seen]

    def compile(self, compiled: CompiledModel) -> None:
        """Compiles the modules that training calls, for training and evaluation.

        The samples are always the same: a compiler may choose other kernels, which round differently, for the batch
        that a module is first called with, and that depends on limits and on where a run was resumed.
        """
        largest = next((samples for samples in SAMPLES if self._compile_for(compiled, samples)), 0)
        if largest > FEW:
            self._compile_for(compiled, FEW)

    def _compile_for(self, compiled: CompiledModel, samples: int) -> bool:
        """Compiles for the first samples; returns whether they fit."""
        rows = np.resize(self.rows, samples)
        with CatchOutOfMemory() as caught, self._trained_alone():
            compiled.compile_called(partial(self._train_step, rows))
            rung, self.rung = self.rung, compiled.on_rung(self.rung)
            try:
                # PyTorch tells a view of a larger tensor from a whole one, and its beginning from a later part.
                for start, stop in ((samples // 2, samples), (0, samples // 2), (0, samples)):
                    compiled.attempt(partial(self._train_step, rows, start, stop))
                self.model.eval()
                compiled.attempt(partial(self._evaluate, rows))
            finally:
                self.rung = rung
                self.model.train()
        self.meter.release()
        return not caught.message

    @contextmanager
    def _trained_alone(self) -> Iterator[list[Tensor]]:
        """Freezes other phases' parameters, and leaves the model as it was; yields copies of its buffers."""
        with left_as_it_was(self.model, self.meter) as buffer_copies, only_trained(self.model, self.phase):
            yield buffer_copies

    def _mid_run(
        self, buffer_copies: Sequence[Tensor], held_bytes: int = 0
    ) -> tuple[OptimizerMemory, list[Tensor], Workload]:
        """Allocates as much as the optimizer's state and the gradients so far take in the middle of a run. Returns the
        optimizer's memory, the tensors on the device apart from gradients, and the work of training, which alone holds
        the gradients.
        """
        optimizer = self.optimizer_memory()
        missing = max(optimizer.state_bytes + self.others_state_bytes - held_bytes, 0)
        state = allocate_ballast(missing, optimizer.tensor_bytes, self.meter.device, stays=True)
        with CatchOutOfMemory():
            if state is not None:
                gradients = [] if self.alone else [torch.zeros_like(parameter) for parameter in self._parameters]
                work = self._work(self._train_step, [*state, *gradients, *buffer_copies])
                return optimizer, [*state, *buffer_copies], replace(work, gradient_bytes=optimizer.parameter_bytes)
        foreign_bytes = self.meter.foreign_bytes()
        raise model_does_not_fit(self._bytes_without_batch(optimizer), self.meter.capacity_bytes, foreign_bytes)

    def optimizer_peak_bytes(self) -> int:
        """Returns the peak of an optimizer's step on the rung in force."""
        optimizer = self.optimizer_memory()
        return self._bytes_without_batch(optimizer) + optimizer.transient_bytes

    def _bytes_without_batch(self, optimizer: OptimizerMemory) -> int:
        # A step holds copies of the buffers.
        buffers = [*self.model.buffers()] * 2
        weights = map(shard_of, self.model.parameters())
        model = sum(tensor.nbytes for tensor in [*weights, *buffers, *self.reference_tensors])
        return model + optimizer.parameter_bytes + optimizer.state_bytes + self.others_state_bytes

    def _work(self, run: Callable[[NDArray[np.int64]], None], resident: Sequence[Tensor]) -> Workload:
        return Workload(
            run=run,
            rows=self.rows,
            counts=self._counts,
            features=self.task.memory_features,
            steps_per_trial=self.training.find_batch_size_steps_per_trial,
            resident=[*self._resident, *resident],
        )

    def _train_step(self, rows: NDArray[np.int64], start: int = 0, stop: int | None = None) -> None:
        """Runs forward and backward of a batch, or of a part of it; drops the gradients, also where it fails."""
        # Each part of a batch holds copies of the buffers, beside the step's.
        held, left = Snapshot(self.model, self.meter.device), list[int]()
        before = PythonState(modules_of(self.model), ()).without_results()
        try:
            with computed_on(self.rung, self.model, left.append, repetitions=self._repetitions):
                batch = self._batch(rows, coupled=True)
                losses = self._losses(batch, start, len(rows) if stop is None else stop)
                weighted_loss(losses, self.task.loss_weights).backward()
            if stop is None and left and sum(left) > self.left_most.get(self.rung, (0,))[0]:
                self.left_most[self.rung] = sum(left), rows
        except BaseException:
            # Modules may collect losses in a list, which would keep the failed pass's tensors.
            before.restore()
            raise
        finally:
            del held
            self._reset_shards()
            for parameter in self._parameters:
                parameter.grad = None

    def _evaluate(self, rows: NDArray[np.int64]) -> None:
        try:
            with torch.no_grad():
                self._losses(self._batch(rows, coupled=False), 0, len(rows))
        finally:
            self._reset_shards()

    def _reset_shards(self) -> None:
        """Frees the weights that a pass has gathered, also one that has failed."""
        if self.shards is not None:
            self.shards.reset()

    def _batch(self, rows: NDArray[np.int64], *, coupled: bool) -> LogicalBatch:
        generator = step_generator(seed=self.training.seed, step=0) if coupled else None
        return self.task.logical_batch(rows, self.meter.device, self._precision.dtype, generator)

    def _losses(self, batch: LogicalBatch, start: int, stop: int) -> Losses:
        with self._precision.context(self.meter.device):
            return batch.losses(self.model, start, stop)


def weighted_loss(losses: Losses, weights: Mapping[str, float]) -> Tensor:
    """Returns the loss of a whole batch: the weighted sum of its terms, each over its own denominator."""
    parts = [weights.get(term, 1.0) * total / _divisor(own) for term, (total, own) in losses.items()]
    total: Tensor = sum(parts[1:], start=parts[0])
    return total


def _divisor(denominator: float | Tensor) -> float | Tensor:
    """Returns a denominator, and 1 in place of 0. On a GPU its value is not read: the GPU of a recording has none."""
    if isinstance(denominator, Tensor) and denominator.device.type != "cpu":
        return torch.where(denominator == 0, 1.0, denominator)
    return float(denominator) or 1.0


MODEL_MUST_FIT: Final = "Weights, gradients and optimizer state must fit on the device"
TOO_LITTLE_FOR_PAGES: Final = ", too little for the whole pages in which the allocator takes memory"
"""End of an error's value where the bytes that are needed are fewer than those that the device has."""


def model_does_not_fit(need_bytes: int, capacity_bytes: int, foreign_bytes: int = 0) -> DoesNotFitError:
    """Makes the error for a model that leaves no room for a batch; other processes hold `foreign_bytes`."""
    found = f"they need {size_text(need_bytes)}, the device has {size_text(capacity_bytes)}"
    if foreign_bytes > 0:
        found += f", of which other processes hold {size_text(foreign_bytes)}"
    elif need_bytes <= capacity_bytes:
        found += TOO_LITTLE_FOR_PAGES
    return DoesNotFitError(
        MODEL_MUST_FIT,
        value=found,
        remedy=_smaller_model(max(need_bytes, capacity_bytes)),
        details=OutOfMemoryDetails(need_bytes=need_bytes),
    )


def _smaller_model(need_bytes: float) -> str:
    return f"Choose a smaller model by its settings (--set), or a larger device ({cards_that_hold(need_bytes)})"


def others_of(explorers: Sequence[Explorer]) -> list[list[Explorer]]:
    """Returns for the explorer of each phase the explorers of the other phases."""
    return [[one for one in explorers if one is not explorer] for explorer in explorers]
