"""How the loss of a batch follows from the losses of its parts: as their sum, or as their mean over samples or labels.
Which way holds is measured with a few samples.

Shapes: R samples, k views of each sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from can_train.fit.batch_dependence import ROUNDINGS, DrawnNumbers, NoDropout, rounded_otherwise, tolerance_of
from can_train.memory.out_of_memory import CatchOutOfMemory

_IGNORED_LABEL: Final = -100  # Label that a loss leaves out, in PyTorch and transformers
_ROUND_OFF: Final = 1e-9  # Difference of two weights that is round-off
# A loss has less round-off than a gradient, and is less sensitive: a constant term hides a change.
_FEWER_OPERATIONS: Final = 50
_TF32_TOLERANCE: Final = 1e-2  # Relative difference of gradients that TF32's ten bits may make
_SPLIT: Final = (3, 8)  # Share of them in the first of two unequal parts, as a fraction

Rows = NDArray[np.int64]
Numbers = list[NDArray[np.float64]]  # A loss, or numbers of the gradients of the parameters


@dataclass(frozen=True)
class Way:
    """A way how losses of parts make up the loss of their batch.

    Attributes:
        labels: Name of the labels that the loss is the mean over; empty: of other items.
        but_first: Whether the first label of each sample does not count: a language model predicts the next word.
        is_sum: Whether the losses are added up, since each is divided by the number of items in the whole batch.
    """

    labels: str = ""
    but_first: bool = False
    is_sum: bool = False

    @property
    def sentence(self) -> str:
        """The way as a sentence."""
        if self.is_sum:
            return "The losses of its parts are added up, as if they were divided by the items of the whole batch"
        return f"The losses of its parts are averaged over their {self.labels or 'samples'}"


SUM: Final = Way(is_sum=True)
SAMPLES: Final = Way()


class Items:
    """The items of a batch that its loss may be the mean over: its labels or its samples.

    Args:
        batch: A collated batch of R samples, in k views each.
        names: Names that labels may have, the likeliest first.
        samples: R.
        shifts_labels: Whether a language model most probably leaves the first label of each sample out.
    """

    def __init__(self, batch: Any, names: Sequence[str], samples: int, *, shifts_labels: bool) -> None:
        self.samples = samples
        self._labels = {}
        for name in dict.fromkeys(names) if isinstance(batch, Mapping) else ():
            labels = batch.get(name)
            # Numbers are targets of a regression: each sample has as many.
            is_counted = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim()
            if is_counted and len(labels) % samples == 0:
                self._labels[name] = labels
        self._counts: dict[Way, Rows] = {}  # Of each sample, [R], by way
        self.means: list[Way] = []
        for name, labels in self._labels.items():
            by_label = [Way(name), Way(name, but_first=True)][: labels.dim()]
            self.means += reversed(by_label) if shifts_labels else by_label
        self.means.append(SAMPLES)

    def weight(self, way: Way, rows: slice | Rows, among: slice | Rows = slice(None)) -> float:
        """Returns the weight of the loss of some samples in the loss of more samples: by default, of all."""
        if way.is_sum:
            return 1.0
        counts = self._counted(way)
        part, whole = counts[rows], counts[among]
        return float(part.sum() / whole.sum()) if whole.any() else len(part) / len(whole)

    def telling(self, most: int) -> Rows:
        """Chooses at most so many samples that tell the ways apart: some with the rarest labels, since classes may have
        weights, and otherwise from those with the fewest labels to those with the most.
        """
        counts = self._counted(self.means[0])
        order = np.argsort(counts, kind="stable")
        order = order[np.count_nonzero(counts == 0) :] if np.count_nonzero(counts) > 1 else order
        size = min(most, len(order))
        spread = order[np.linspace(0, len(order) - 1, size).round().astype(np.int64)]
        ends = spread[[0, -1]].tolist() if size and counts[spread[0]] < counts[spread[-1]] else []
        chosen = list(dict.fromkeys([*ends, *self._with_rare_labels(size), *spread.tolist()]))[:size]
        return np.array(sorted(chosen, key=lambda row: counts[row]), dtype=np.int64)

    def _with_rare_labels(self, most: int) -> list[int]:
        """Chooses at most so many samples that have all labels of the batch, those with the rarest first. Where samples
        have several labels, half as many are chosen: their numbers of labels tell ways apart, too.
        """
        chosen = dict[int, None]()
        for labels in self._labels.values():
            of_rows = labels.flatten(1) if labels.dim() > 1 else labels[:, None]
            values, places, times = np.unique(of_rows.cpu().numpy(), return_inverse=True, return_counts=True)
            # [rows, labels of each], as positions among the values.
            places = places.reshape(of_rows.shape)
            seen = values == _IGNORED_LABEL
            for value in np.argsort(times, kind="stable"):
                if len(chosen) >= (most if labels.dim() == 1 else most // 2):
                    break
                if not seen[value]:
                    row = int(np.argmax((places == value).any(1)))
                    chosen[row % self.samples] = None
                    seen[places[row]] = True
        return list(chosen)

    def agree(self, ways: Sequence[Way], rows: slice | Rows) -> bool:
        """Tells whether some samples have the same weight in each of the ways."""
        weights = [self.weight(way, rows) for way in ways]
        return max(weights) - min(weights) <= _ROUND_OFF

    def _counted(self, way: Way) -> Rows:
        if way not in self._counts:
            self._counts[way] = np.ones(self.samples, dtype=np.int64)
            if way.labels in self._labels:
                labels = self._labels[way.labels]
                labels = labels[:, 1:] if way.but_first else labels
                # The views of a sample are stacked: R rows of the first, R rows of the second.
                by_row = labels.ne(_IGNORED_LABEL).flatten(1).sum(1) if labels.dim() > 1 else labels.ne(_IGNORED_LABEL)
                self._counts[way] = by_row.view(-1, self.samples).sum(0).cpu().numpy()
        return self._counts[way]


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """The result of a comparison of a few samples, computed whole and in two parts.

    Attributes:
        ways: The ways that hold, the likeliest first; empty: none holds, or nothing is known.
        difference: Relative L2 difference of the way that comes nearest; not finite: it could not be computed.
        through: Names of the normalising layers that are the only reason why no way holds.
        is_known: Whether anything could be measured.
        draws: Whether the step draws random numbers beside dropout; samples were then compared with the same ones.
        failure: Why the samples could not be computed, where that was not their memory.
        of: The quantity that was compared: gradient or loss.
    """

    ways: tuple[Way, ...] = ()
    difference: float = math.nan
    through: tuple[str, ...] = ()
    is_known: bool = True
    draws: bool = False
    failure: str = ""
    of: str = "gradient"


@dataclass(kw_only=True)
class Comparison:
    """Compares a few samples, computed whole, with two parts of them.

    Attributes:
        compute: Returns the gradients of some samples, or their loss.
        seeded: Sets the generators to the state that they began with.
        model: The module that is trained.
        is_of_losses: Whether losses are compared, in place of gradients.
        is_on_gpu: Whether single precision may be TF32, as convolutions are by default.
        formats: Number formats that anything was computed in.
    """

    compute: Callable[[Rows], Numbers]
    seeded: Callable[[], object]
    model: nn.Module
    is_of_losses: bool = False
    is_on_gpu: bool = False
    formats: set[torch.dtype] = field(default_factory=set)
    _numbers: DrawnNumbers | None = field(default=None, init=False)  # Of the samples, in a part as in the whole

    def result(self, items: Items, ways: Sequence[Way], rows: Rows) -> ComparisonResult:
        """Finds out which ways hold for two or more samples."""
        layers = tuple(name for name, module in self.model.named_modules() if _normalises(module))
        differences = self._differences_through(layers, items, ways, rows)
        holding = self._holding(differences)
        draws = not holding and self._draws(rows)
        if draws:
            # Other numbers in a part than in the whole hide how its loss adds up.
            self._numbers = DrawnNumbers(len(rows))
            if self._draws(rows):
                return ComparisonResult(is_known=False, draws=True)
            differences = self._differences_through(layers, items, ways, rows)
            if not self._has_numbers(rows):
                return ComparisonResult(is_known=False, draws=True)
            holding = self._holding(differences)
        elif not holding and min(differences.values()) <= ROUNDINGS * self._change_by_rounding(rows):
            # The gradient of a student that is still its teacher is nothing but round-off.
            return ComparisonResult(ways=tuple(ways), difference=0.0)
        if holding:
            return ComparisonResult(ways=holding, difference=differences[holding[0]], draws=draws)
        without = differences
        if layers:
            with _NoBatchNorm():
                without = self._differences(items, ways, rows)
        if holding := self._holding(without):
            return ComparisonResult(ways=holding, difference=differences[holding[0]], through=layers, draws=draws)
        nearest = min(differences.values())
        nearest = nearest if math.isfinite(nearest) else min(without.values())
        return ComparisonResult(difference=nearest, draws=draws)

    def _differences_through(
        self, layers: Sequence[str], items: Items, ways: Sequence[Way], rows: Rows
    ) -> dict[Way, float]:
        """Returns the differences; infinite ones where a normalising layer cannot compute a part."""
        try:
            return self._differences(items, ways, rows)
        except ValueError:
            # A part of one sample has no variance.
            if not layers:
                raise
            return dict.fromkeys(ways, math.inf)

    def _holding(self, differences: Mapping[Way, float]) -> tuple[Way, ...]:
        return tuple(way for way, difference in differences.items() if difference <= self._tolerance)

    @property
    def _tolerance(self) -> float:
        """Largest difference that is round-off in the coarsest format."""
        formats = {next(self.model.parameters()).dtype, *self.formats}
        tolerance = max(tolerance_of(dtype, half=False) for dtype in formats if dtype.is_floating_point)
        if self.is_of_losses:
            return tolerance / _FEWER_OPERATIONS
        # The gradient of a part's mean is rounded otherwise than its share in the whole batch's gradient.
        return max(tolerance, _TF32_TOLERANCE) if self.is_on_gpu and torch.float32 in formats else tolerance

    def _differences(self, items: Items, ways: Sequence[Way], rows: Rows) -> dict[Way, float]:
        first = max(len(rows) * _SPLIT[0] // _SPLIT[1], min(2, len(rows) - 1))
        parts = [rows[:first], rows[first:]]
        with self._repeatable(), _Formats(self.formats):
            whole = self._computed(rows)
            of_parts = [self._computed(parts[0]), self._computed(parts[1], first)]
        if self._numbers is not None and self._numbers.fall_back():
            return self._differences(items, ways, rows)
        differences = {}
        for way in ways:
            weights = [items.weight(way, part, rows) for part in parts]
            differences[way] = _relative_difference(whole, of_parts, weights)
        return differences

    def _computed(self, rows: Rows, start: int = 0) -> Numbers:
        """Computes samples of those that are compared, from number `start` on."""
        self.seeded()
        if self._numbers is not None:
            self._numbers.begin(start, start + len(rows))
        return self.compute(rows)

    def _draws(self, rows: Rows) -> bool:
        """Tells whether the samples have other numbers with other random numbers."""
        with self._repeatable():
            first = self._computed(rows)
            if self._numbers is not None:
                self._numbers.begin(0, len(rows), again=True)
            second = self.compute(rows)
        return _relative_difference(first, [second], [1.0]) > self._tolerance

    def _change_by_rounding(self, rows: Rows) -> float:
        """Returns the relative difference that comes from another rounding of the weights; 0 where memory runs out."""
        with CatchOutOfMemory(), self._repeatable():
            whole = self._computed(rows)
            with rounded_otherwise([parameter for parameter in self.model.parameters() if parameter.requires_grad]):
                again = self._computed(rows)
            change = _relative_difference(whole, [again], [1.0])
            return change if math.isfinite(change) else 0.0
        return 0.0

    def _has_numbers(self, rows: Rows) -> bool:
        """Tells whether the samples have finite numbers that are not all 0: where all are masked, each way holds."""
        with self._repeatable():
            numbers = self._computed(rows)
        size = sum(float(np.square(own).sum()) for own in numbers)
        return 0 < size < math.inf

    def _repeatable(self) -> NoDropout:
        return NoDropout(self.model, self._numbers)


def _relative_difference(whole: Numbers, parts: Sequence[Numbers], weights: Sequence[float]) -> float:
    """Returns the L2 difference of a weighted sum from the whole, divided by the whole's L2 norm."""
    difference = size = 0.0
    for place, numbers in enumerate(whole):
        # The mean over no labels is not a number, and has no weight.
        weighted = [weight * part[place] for part, weight in zip(parts, weights, strict=True) if weight]
        difference += float(np.square(sum(weighted) - numbers).sum())
        size += float(np.square(numbers).sum())
    if not math.isfinite(difference + size):
        return math.inf
    return math.sqrt(difference / size) if size else math.inf if difference else 0.0


def _normalises(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and not isinstance(
        module, nn.modules.instancenorm._InstanceNorm
    )


class _Formats(TorchFunctionMode):
    """Notes the number formats of all results: a loss, or a step of a model, may be computed in a coarser one."""

    def __init__(self, formats: set[torch.dtype]) -> None:
        super().__init__()
        self._formats = formats

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._formats.add(result.dtype)
        return result


class _NoBatchNorm(TorchFunctionMode):
    """Leaves normalisation over the batch out, wherever it is called."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "batch_norm":
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)
