"""The time that a sample takes in micro-batches of different sizes and on different rungs: measured while a run
trains, learned over the runs of a configuration on a kind of device, and the fastest size and rung that follow.

Sizes are compared within a run, each measured step with the steps around it: clocks, cards and other processes differ
from run to run, and change slowly within a run. Pure functions of records, but for the timer. No numpy, since
`can-train factors` replays the choices.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from can_train.io.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from can_train.fit.packing import BatchCosts, SplitRules
    from can_train.memory.meters import Meter

EXPLORED_EVERY: Final = 50  # Of so many steps, one at most tries another size: 2 %
EXTRA_SHARE: Final = 1 / EXPLORED_EVERY  # Share of a run's time that trials may take longer, at worst
SLOWER: Final = 0.02  # A chosen size may be slower than the largest by this share, at `_SIGMAS`
# Change of the time of a sample, in logarithms, that is expected from a size to one twice as large.
_PER_OCTAVE: Final = 0.25
# Change of the time of a sample that is expected of a further rung: computing a model again takes one more forward pass
# at most, a third of a step. This prediction is far less certain than `SLOWER`: it orders trials, and decides nothing.
_AGAIN: Final = math.log(4 / 3)
_AGAIN_SPREAD: Final = 0.15
_AGAIN_PER_OCTAVE: Final = 0.1  # Change of it from a size to one twice as large
_SIGMAS: Final = 3.0  # Standard deviations: the best of many noisy sizes looks better than it is
_NOISE: Final = 0.1  # Spread of single steps that is assumed before any was measured, with a weight of some steps
_NOISE_STEPS: Final = 4
_DIFFERENCE: Final = 0.004  # Spread from run to run of a size's time relative to another's
# Steps of a trial: the first one of a size may pay for what is done once (kernels that are chosen, memory that grows).
_TRIAL_STEPS: Final = 3
_MOST_STEPS: Final = 240  # Of a size in one run
_LEAST_GAIN: Final = 0.00001  # Expected gain, as a share of the time, below which a size is not tried any more
_STRIDE, _SHIFTS = 7, 17  # Trial number n, from 1, is (7 n - 4) mod 17 steps later than step 50 n
_WINDOW: Final = 8  # Steps before and after an explored one that it is compared with
_LEAST_WINDOW: Final = 4  # Fewer do not count
_SAME: Final = 0.02  # Sizes that differ by less are one size
_CLIP: Final = 3.0  # Standard deviations beyond which a step counts as one that far off


SPLIT: Final = "split"  # The rung that splits batches, and does nothing more


@dataclass(frozen=True, kw_only=True)
class TimedSize:
    """The steps of an attempt whose micro-batches had about one size."""

    samples: float  # Of a micro-batch, on average
    steps: int  # Steps that were timed
    seconds: float  # Of a sample, the median
    # Mean logarithm of the time of a sample, less the mean of the steps around; 0 for the attempt's own size.
    log_ratio: float = 0.0
    spread: float = 0.0  # Standard deviation of single steps
    rung: str = SPLIT


Times = Sequence[TimedSize]
"""The sizes of one attempt; the first is its own size, which the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class SizeCandidate:
    """A size that micro-batches may have."""

    cost: float  # Limit of a micro-batch, in bytes above base
    samples: float  # Of a micro-batch under this limit, on average
    rung: str = SPLIT


@dataclass(frozen=True, kw_only=True)
class SizeTrial:
    """A size that some steps of a run try."""

    cost: float
    samples: float
    steps: int
    rung: str = SPLIT


@dataclass(frozen=True, kw_only=True)
class MicroBatchChoice:
    """The size of micro-batches that a plan takes, with its rung, and the sizes that some of its steps try."""

    samples: float  # Of a micro-batch, on average
    cost: float  # Limit of a micro-batch, in bytes above base; the largest that is safe where nothing was faster
    largest_samples: float  # Of the largest micro-batches that are safe, on the first rung that fits
    sample_cost: float = 1.0  # Of the mean sample
    gain: float = 0.0  # Share of the largest size's time that it is predicted to save
    deviation: float = 0.0  # Standard deviation of the gain
    seconds: float | None = None  # Predicted time of a sample; None: nothing was measured
    timed_steps: int = 0  # Steps of earlier runs that tried other sizes
    timed_runs: int = 0
    trials: tuple[SizeTrial, ...] = ()
    rung: str = SPLIT
    first_rung: str = SPLIT  # The first rung that fits

    @property
    def is_largest(self) -> bool:
        """Whether neither a smaller size nor another rung was chosen."""
        return self.samples == self.largest_samples and not self.is_other_rung

    @property
    def is_other_rung(self) -> bool:
        """Whether a rung was chosen for its time, beyond the first one that fits."""
        return self.rung != self.first_rung

    def in_rules(self, rules: SplitRules) -> SplitRules:
        """Returns rules that cut batches into micro-batches of the size."""
        return rules if self.is_largest else replace(rules, fastest=self.cost)

    @property
    def schedule(self) -> list[SizeTrial]:
        """The trials in their order, a step each."""
        rounds = max((trial.steps for trial in self.trials), default=0)
        return [trial for number in range(rounds) for trial in self.trials if number < trial.steps]


def is_same_size(one: float, other: float) -> bool:
    """Tells whether two sizes, in samples, are one to the model of time."""
    return abs(one - other) <= _SAME * max(one, other)


def is_larger_size(one: float, other: float) -> bool:
    """Tells whether a size, in samples, is larger than another one to the model of time."""
    return one > other and not is_same_size(one, other)


def explored_number(step: int) -> int | None:
    """Returns the number of the trial that a step, counted from 0, may be, from 0; None: it is none.

    >>> [explored_number(step) for step in (0, 49, 52, 109)]
    [None, None, 0, 1]
    """
    number, rest = divmod(step + 1, EXPLORED_EVERY)
    # Each some steps later than the last: at equal distances, all could be the shorter last batches of epochs.
    return number - 1 if number and rest == (_STRIDE * number - 4) % _SHIFTS else None


Size = tuple[str, float]
"""A rung, and the samples of a micro-batch on it, on average."""


class TimeModel:
    """The time of a sample against the size of a micro-batch and its rung, as logarithms.

    Between sizes the time may change as a random walk along the logarithm of the size: a smooth law is interpolated,
    and a cliff, where a cache is full, is followed. A further rung follows the same walk, at a distance. Measured are
    differences between sizes of the same run.
    """

    def __init__(self, sizes: Iterable[Size], runs: Sequence[Times] = (), *, first_rung: str = SPLIT) -> None:
        measured = [(size.rung, size.samples) for run in runs for size in run]
        self._nodes: list[Size] = []
        for rung, samples in sorted({*sizes, *measured}):
            if not self._nodes or self._nodes[-1][0] != rung or samples > self._nodes[-1][1] * (1 + _SAME):
                self._nodes.append((rung, samples))
        self.noise = _noise(runs)
        self._means = [0.0 if rung == first_rung else _AGAIN for rung, _ in self._nodes]
        # Covariance of the walk, from the smallest size on, whose own level is not known and does not matter.
        least = min((samples for _, samples in self._nodes), default=1.0)
        levels = [(rung, math.log2(samples / least)) for rung, samples in self._nodes]
        self._covariance = [[_covariance(one, other, first_rung) for other in levels] for one in levels]
        self._measured = {self._node(*size) for size in measured}
        for run in runs:
            for size in run[1:]:
                variance = max(self.noise, size.spread) ** 2 / max(size.steps, 1) + _DIFFERENCE**2
                one, other = self._node(size.rung, size.samples), self._node(run[0].rung, run[0].samples)
                self._learn(one, other, size.log_ratio, variance)

    def _node(self, rung: str, samples: float) -> int:
        nodes = [node for node, (of_node, _) in enumerate(self._nodes) if of_node == rung]
        return min(nodes, key=lambda node: abs(math.log(self._nodes[node][1] / samples)))

    def _learn(self, one: int, other: int, difference: float, variance: float) -> None:
        """Adds a measured difference of two sizes, as a Kalman filter does."""
        if one == other:
            return
        matrix = self._covariance
        column = [row[one] - row[other] for row in matrix]
        total = column[one] - column[other] + variance
        error = difference - (self._means[one] - self._means[other])
        self._means = [mean + entry * error / total for mean, entry in zip(self._means, column, strict=True)]
        self._covariance = [[entry - left * right / total for entry, right in zip(row, column, strict=True)]
                            for row, left in zip(matrix, column, strict=True)]  # fmt: skip

    def has_measured(self, size: Size) -> bool:
        """Whether any run has tried a size."""
        return self._node(*size) in self._measured

    def expect(self, size: Size, reference: Size, steps: float) -> None:
        """Counts steps to come of a size: they make it better known, whatever their time will be."""
        one, other = self._node(*size), self._node(*reference)
        mean = self._means[one] - self._means[other]
        self._learn(one, other, mean, self.noise**2 / steps + _DIFFERENCE**2)

    def ratio(self, size: Size, reference: Size) -> tuple[float, float]:
        """Returns the logarithm of a size's time ÷ another size's, and its standard deviation."""
        one, other, matrix = self._node(*size), self._node(*reference), self._covariance
        variance = matrix[one][one] + matrix[other][other] - 2 * matrix[one][other]
        return self._means[one] - self._means[other], math.sqrt(max(variance, 0.0))

    def worst_ratio(self, size: Size, reference: Size) -> float:
        """Returns the time of a sample ÷ another size's that must be reckoned with. A size that was not measured takes
        as much longer than a larger one that was as it has more micro-batches.
        """
        node = self._node(*size)
        if node in self._measured:
            return math.exp(self.ratio(size, reference)[0])
        rung, samples = self._nodes[node]
        larger = [one for one in self._measured if self._nodes[one][0] == rung and one > node]
        if not larger and rung != reference[0]:
            # The first steps of a rung are not split further than the reference's.
            return math.exp(max(self._means[node] - self._means[self._node(*reference)], 0.0))
        known = min((self._nodes[one] for one in larger), default=reference)
        return math.exp(self.ratio(known, reference)[0]) * max(known[1] / samples, 1.0)


def _covariance(one: tuple[str, float], other: tuple[str, float], first_rung: str) -> float:
    """Returns the covariance of two nodes, each a rung and a logarithm of a size."""
    level = min(one[1], other[1])
    of_rung = _AGAIN_SPREAD**2 + _AGAIN_PER_OCTAVE**2 * level if one[0] == other[0] != first_rung else 0.0
    return _PER_OCTAVE**2 * level + of_rung


def _noise(runs: Sequence[Times]) -> float:
    degrees, total = float(_NOISE_STEPS), _NOISE_STEPS * _NOISE
    for run in runs:
        for size in run[1:]:
            degrees += max(size.steps - 1, 0)
            # Not the squares: another process may have made a single step many times as long.
            total += max(size.steps - 1, 0) * size.spread
    return total / degrees


def choose_size(candidates: Sequence[SizeCandidate], runs: Sequence[Times], *, total_steps: int) -> MicroBatchChoice:
    """Chooses the size of micro-batches, and its rung, that earlier runs have shown to be the fastest, and the sizes
    that are tried.

    Another size than the largest is chosen if its time is known well enough: it is not slower than the largest by more
    than 2 %, at three standard deviations. What no run has shown is tried, and not believed.

    Args:
        candidates: Sizes that fit, the largest first: sizes of the first rung that fits, then sizes of a further rung.
        runs: Times of earlier attempts; times on other rungs are left out.
        total_steps: Steps of the run.
    """
    largest, sizes = candidates[0], [(one.rung, one.samples) for one in candidates]
    rungs = {one.rung for one in candidates}
    runs = [[size for size in run if size.rung in rungs] for run in runs if run and run[0].rung in rungs]
    model, reference = TimeModel(sizes, runs, first_rung=largest.rung), sizes[0]
    chosen, gain, deviation = largest, 0.0, 0.0
    for one, size in zip(candidates[1:], sizes[1:], strict=True):
        ratio, spread = model.ratio(size, reference)
        if ratio + _SIGMAS * spread <= math.log1p(SLOWER) and ratio < -gain:
            chosen, gain, deviation = one, -ratio, spread
    seconds = None
    if runs:
        own = runs[-1][0]
        seconds = own.seconds * math.exp(model.ratio((chosen.rung, chosen.samples), (own.rung, own.samples))[0])
    return MicroBatchChoice(
        samples=chosen.samples, cost=chosen.cost, largest_samples=largest.samples, gain=-math.expm1(-gain),
        deviation=deviation, seconds=seconds, timed_steps=sum(size.steps for run in runs for size in run[1:]),
        timed_runs=len(runs), trials=_trials(model, candidates, chosen, total_steps),
        rung=chosen.rung, first_rung=largest.rung,
    )  # fmt: skip


def is_known_slower(rung: str, than: Size, runs: Sequence[Times]) -> bool:
    """Tells whether runs have shown that every size that was tried on a rung takes longer than a size of the first."""
    runs = [[size for size in run if size.rung in (rung, than[0])] for run in runs if run and run[0].rung == than[0]]
    tried = {(size.rung, size.samples) for run in runs for size in run if size.rung == rung}
    model = TimeModel([than], runs, first_rung=than[0])
    ratios = [model.ratio(size, than) for size in tried]
    return bool(ratios) and all(ratio > _SIGMAS * spread for ratio, spread in ratios)


def _trials(
    model: TimeModel, candidates: Sequence[SizeCandidate], chosen: SizeCandidate, total_steps: int
) -> tuple[SizeTrial, ...]:
    """Distributes the steps that a run may try other sizes in: to the sizes with the largest expected gain."""
    left, extra_left = total_steps // EXPLORED_EVERY, EXTRA_SHARE * total_steps
    steps: defaultdict[int, int] = defaultdict(int)
    others, reference = [one for one in candidates if one is not chosen], (chosen.rung, chosen.samples)
    sizes = [(one.rung, one.samples) for one in others]
    extras = [max(model.worst_ratio(size, reference) - 1.0, 0.0) for size in sizes]
    if chosen is not candidates[0] and (count := min(_TRIAL_STEPS, left)) * (1 + extras[0]) <= left:
        # The largest, whatever is known: it shows a device or a PyTorch that changed.
        steps[0], left, extra_left = count, left - count, extra_left - count * extras[0]
    # Each size once, from the largest on: a size that none has shown may lie on the other side of a cliff.
    for number in sorted(range(len(others)), key=lambda number: -others[number].samples):
        size, extra = sizes[number], extras[number]
        if not model.has_measured(size) and _TRIAL_STEPS * (1 + extra) <= min(left, extra_left):
            steps[number] += _TRIAL_STEPS
            left, extra_left = left - _TRIAL_STEPS, extra_left - _TRIAL_STEPS * extra
            model.expect(size, reference, _TRIAL_STEPS)
    while left > 0:
        count = min(_TRIAL_STEPS, left)
        values = [
            _expected_gain(*model.ratio(size, reference)) / (1 + extra)
            if steps[number] < _MOST_STEPS and count * extra <= extra_left else 0.0
            for number, (size, extra) in enumerate(zip(sizes, extras, strict=True))
        ]  # fmt: skip
        best = max(range(len(others)), key=values.__getitem__, default=None)
        if best is None or values[best] < _LEAST_GAIN:
            break
        steps[best] += count
        left, extra_left = left - count, extra_left - count * extras[best]
        model.expect(sizes[best], reference, count)
    return tuple(SizeTrial(cost=one.cost, samples=one.samples, steps=steps[number], rung=one.rung)
                 for number, one in enumerate(others) if steps[number])  # fmt: skip


def _expected_gain(ratio: float, deviation: float) -> float:
    """Returns the mean of the time that is saved where a size turns out to be faster, as a share."""
    if deviation <= 0:
        return max(-ratio, 0.0)
    z = -ratio / deviation
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return deviation * (z * 0.5 * math.erfc(-z / math.sqrt(2)) + density)


@dataclass
class _TimedStep:
    seconds: float = 0.0
    units: float = 0.0  # Mean samples
    samples: int = 0
    micro_batches: int = 0
    trial: SizeTrial | None = None


@dataclass(kw_only=True)
class StepTimer:
    """Times steps of a phase without waiting for the device, and summarizes them for the store.

    Attributes:
        meter: Of the device.
        choice: The plan's; None: nothing is timed.
    """

    meter: Meter
    choice: MicroBatchChoice | None
    _schedule: list[SizeTrial] = field(default_factory=list)
    _steps: dict[int, _TimedStep] = field(default_factory=dict)
    _pending: deque[tuple[int, object, object]] = field(default_factory=deque)
    _spoilt: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._schedule = [] if self.choice is None else self.choice.schedule

    def stop(self) -> None:
        """Tries and times no further steps: other parameters are trained from now on."""
        self._schedule = []

    def trial(self, step: int) -> SizeTrial | None:
        """Returns the size that a step, counted from 0, tries; None: the plan's."""
        number = explored_number(step)
        return self._schedule[number] if number is not None and number < len(self._schedule) else None

    def is_near_trial(self, step: int) -> bool:
        """Tells whether a step is a trial, or one that a trial is compared with."""
        if not self._schedule:
            return False
        return any(self.trial(near) is not None for near in range(max(step - _WINDOW, 0), step + _WINDOW + 1))

    @contextmanager
    def timing(self, step: int, costs: BatchCosts) -> Iterator[None]:
        """Times a block of a step, which computes samples of these costs; blocks of the same step add up."""
        if self.choice is None or not self.is_near_trial(step):
            yield
            return
        begun = self.meter.moment()
        yield
        self._pending.append((step, begun, self.meter.moment()))
        timed = self._steps.setdefault(step, _TimedStep(trial=self.trial(step)))
        timed.units += float(costs.each().sum()) / self.choice.sample_cost

    def count(self, step: int, micro_batches: Sequence[int], *, is_typical: bool) -> None:
        """Counts the micro-batches of a step. A step that is not typical (memory ran out or was measured, the batch is
        shorter than others) teaches nothing.
        """
        # The device has computed the step before the last one: the host is at most one micro-batch ahead.
        while self._pending and self._pending[0][0] < step - 1:
            self._read()
        if (timed := self._steps.get(step)) is None:
            return
        timed.samples += sum(micro_batches)
        timed.micro_batches += len(micro_batches)
        if not is_typical:
            self._spoilt.add(step)

    def _read(self) -> None:
        step, begun, ended = self._pending.popleft()
        self._steps[step].seconds += self.meter.seconds_between(begun, ended)

    def sizes(self) -> list[TimedSize]:
        """Summarizes the steps so far, the plan's own size first; empty where no trial was timed."""
        while self._pending:
            self._read()
        steps = {number: step for number, step in self._steps.items()
                 if number not in self._spoilt and step.units and step.micro_batches and step.seconds > 0}  # fmt: skip
        own = [step for step in steps.values() if step.trial is None]
        by_size: defaultdict[SizeTrial, list[tuple[float, _TimedStep]]] = defaultdict(list)
        for number, step in sorted(steps.items()):
            if step.trial is not None and (around := _around(steps, number)):
                by_size[step.trial].append((math.log(step.seconds / step.units) - _median(around), step))
        if not own or not by_size:
            return []
        rung = SPLIT if self.choice is None else self.choice.rung
        return [_timed_size([(0.0, step) for step in own], rung),
                *(_timed_size(each[1:] if len(each) > 1 else each, trial.rung)
                  for trial, each in by_size.items())]  # fmt: skip

    def sentences(self) -> list[str]:
        """Says how long a sample took in each size that was tried, against the plan's."""
        sizes = self.sizes()
        return [
            f"In micro-batches of {size.samples:.3g} samples{'' if size.rung == sizes[0].rung else f' ({size.rung})'}, "
            f"a sample took {abs(math.expm1(size.log_ratio)):.0%} "
            f"{'less' if size.log_ratio < 0 else 'more'} time than in those of {sizes[0].samples:.3g} "
            f"({counted(size.steps, 'step')})"
            for size in sizes[1:]
        ]


def _around(steps: Mapping[int, _TimedStep], number: int) -> list[float]:
    """Returns the logarithms of the time of a sample in the plan's own steps around a trial; empty: too few."""
    near = (steps.get(one) for one in range(number - _WINDOW, number + _WINDOW + 1))
    logs = [math.log(step.seconds / step.units) for step in near if step is not None and step.trial is None]
    return logs if len(logs) >= _LEAST_WINDOW else []


def _timed_size(timed: Sequence[tuple[float, _TimedStep]], rung: str) -> TimedSize:
    ratios, steps = [ratio for ratio, _ in timed], [step for _, step in timed]
    mean, spread = _robust(ratios)
    return TimedSize(
        samples=sum(step.samples for step in steps) / sum(step.micro_batches for step in steps),
        steps=len(steps), seconds=_median([step.seconds / step.units for step in steps]), log_ratio=mean,
        spread=spread, rung=rung,
    )  # fmt: skip


def _robust(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and standard deviation of values, with those far from the median moved nearer."""
    middle = _median(values)
    scale = 1.4826 * _median([abs(value - middle) for value in values])
    bound = _CLIP * scale if scale > 0 and len(values) > _LEAST_WINDOW else math.inf
    clipped = [min(max(value, middle - bound), middle + bound) for value in values]
    mean = math.fsum(clipped) / len(clipped)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in clipped) / max(len(clipped) - 1, 1))


def _median(values: Sequence[float]) -> float:
    # Not the statistics module, whose import takes a tenth of the command line's start.
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
