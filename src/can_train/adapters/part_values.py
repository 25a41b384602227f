"""The parts of a batch, and the values of the whole batch, made of the values of its parts: outputs of a step, logged
numbers, attributes of a module.

Rows stand one after the other, means are averaged, counts are added up. The kind of a value is seen where its parts
leave no doubt, or where a few samples were computed whole and in two parts. A value that none of these make, such as
the square root of a mean, is averaged, and noted. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

# First names of places whose numbers are more probably counts of steps than of samples.
ATTRIBUTE: Final = "attribute"
ROW: Final = "row of a logger"
_ROWS: Final = "rows"
_COUNT: Final = "count"
_SAME: Final = "same"
_MEAN: Final = "mean"  # Weighted as the loss is
_SAMPLE_MEAN: Final = "mean over samples"
_MOST: Final = "largest"
_LEAST: Final = "smallest"
_OTHER: Final = "other"
_MEAN_TOLERANCE: Final = 1e-3  # Relative: sums of single precision, and products of half precision

Place = tuple[Any, ...]  # Of a value: the names and positions that lead to it


@dataclass(frozen=True, kw_only=True)
class Part:
    """Samples start:stop of a collated batch."""

    batch: Any
    start: int
    stop: int
    samples: int  # of the whole batch
    is_trial: bool = False  # Whether nothing of it may stay

    @property
    def share(self) -> float:
        """Samples of the part ÷ samples of the batch."""
        return (self.stop - self.start) / self.samples

    @property
    def is_whole(self) -> bool:
        """Whether the part is the batch."""
        return self.stop - self.start == self.samples

    @property
    def is_last(self) -> bool:
        """Whether the batch ends with it."""
        return self.stop == self.samples


class SplitRefusedError(Exception):
    """Ends the parts of a batch that is not split, or is computed again in another way."""


@dataclass
class Kinds:
    """The kinds of values that were computed whole and in two parts."""

    by_place: dict[Place, str] = field(default_factory=dict)
    # Values that may be means, with the values and sizes of their parts.
    _means: dict[Place, tuple[Any, Sequence[Any], Sequence[int]]] = field(default_factory=dict)
    _averaged: dict[str, None] = field(default_factory=dict)  # Names of values that a mean was made of, though none is
    _told: set[str] = field(default_factory=set)

    def average(self, place: Place) -> None:
        """Notes a value that is averaged though the batch's value is no mean of its parts' values."""
        self._averaged[_name(place)] = None

    def newly_averaged(self) -> list[str]:
        """Returns the names of averaged values that are no means, each once."""
        names = [name for name in self._averaged if name not in self._told]
        self._told.update(names)
        return names

    def judge_means(self, weights: Sequence[float] | None = None) -> None:
        """Judges the values that may be means by the weights of their parts in the loss; None: their sizes."""
        for place, (whole, parts, sizes) in self._means.items():
            of_loss, stacked = sizes if weights is None or not sum(weights) else weights, torch.stack(list(parts))
            candidates = {_MEAN: weighted_mean(parts, of_loss), _SAMPLE_MEAN: weighted_mean(parts, sizes),
                          _MOST: stacked.amax(0), _LEAST: stacked.amin(0)}  # fmt: skip
            close = (kind for kind, value in candidates.items() if _is_close(value, whole))
            self.by_place[place] = next(close, _OTHER)
        self._means.clear()

    def learn(self, place: Place, whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> None:
        """Sees a value of a few samples, and of their two parts of `sizes`."""
        if isinstance(whole, Mapping):
            for name, value in whole.items():
                if all(isinstance(part, Mapping) and name in part for part in parts):
                    self.learn((*place, name), value, [part[name] for part in parts], sizes)
        elif isinstance(whole, tuple | list):
            if all(len(part) == len(whole) for part in parts):
                for position, value in enumerate(whole):
                    self.learn((*place, position), value, [part[position] for part in parts], sizes)
        elif isinstance(whole, Tensor | int | float) and (kind := _kind(whole, parts, sizes)):
            self.by_place[place] = kind
            if kind == _MEAN:
                self._means[place] = _as_numbers(whole), list(map(_as_numbers, parts)), sizes


def _kind(whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> str:
    """Returns the kind of a number or a tensor; empty: another one, or it cannot be told."""
    value, values = torch.as_tensor(whole), [torch.as_tensor(part) for part in parts]
    if value.dim() and [len(value), *map(len, values)] == [sum(sizes), *sizes]:
        return _ROWS
    if any(one.shape != value.shape for one in values):
        return ""
    is_same = all(torch.equal(one, value) for one in values)
    is_count = torch.allclose(sum(values[1:], start=values[0]).double(), value.double(), atol=0.0)
    if is_same == is_count:
        # Zeros tell nothing. Whether it is a mean is judged once the weights of the parts are known.
        return "" if is_same or value.dtype == torch.bool else _MEAN
    return _SAME if is_same else _COUNT


def _as_numbers(value: Any) -> Tensor:
    """Returns numbers that can be compared: small ones, on the host."""
    return torch.as_tensor(value).detach().to("cpu", torch.float64)


def _is_close(value: Tensor, whole: Tensor) -> bool:
    if not whole.numel():
        return True
    distance, size = (value - whole).abs().max(), whole.abs().max()
    # Numbers that are not finite tell nothing.
    return not bool(distance > _MEAN_TOLERANCE * size)


def _name(place: Place) -> str:
    """Names the value at a place: the last of its names."""
    names = [str(part) for step in place[1:] for part in (step if isinstance(step, tuple) else (step,))
             if isinstance(part, str)]  # fmt: skip
    return repr(names[-1]) if names else "the output"


def whole_and_parts(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the span of the samples that were computed whole, and the spans of its parts; or nothing."""
    known = list(spans)
    for middle, stop in known:
        if middle and (0, stop) in known and (0, middle) in known:
            return (0, stop), (0, middle), (middle, stop)
    return ()


@dataclass(frozen=True)
class Combination:
    """How the parts of one batch make it up.

    Attributes:
        sizes: Samples of each part.
        weights: Weight of each part's mean in the batch's.
        kinds: Kinds that are known.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    kinds: Kinds = field(default_factory=Kinds)

    def combine(self, values: Sequence[Any], place: Place = ()) -> Any:
        """Combines the values of the parts into the batch's."""
        first, kind = values[0], self.kinds.by_place.get(place, "")
        grows = place[:1] not in ((ATTRIBUTE,), (ROW,))
        if len(values) == 1 or first is None:
            return values[-1]
        if isinstance(first, Mapping):
            return {name: self.combine([value[name] for value in values], (*place, name)) for name in first}
        if isinstance(first, tuple | list):
            if isinstance(first, list) and [len(value) for value in values] == list(self.sizes):
                return [entry for value in values for entry in value]
            members = [
                self.combine(entries, (*place, position))
                for position, entries in enumerate(zip(*values, strict=True))
            ]  # fmt: skip
            return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
        if isinstance(first, Tensor):
            return self._tensor(values, kind, place, grows)
        if isinstance(first, bool) or not isinstance(first, int | float):
            return first
        if isinstance(first, float):
            return self.mean(values, kind, place)
        return self._whole_number(values, kind, place, grows=grows)

    def _whole_number(self, values: Sequence[Any], kind: str, place: Place, *, grows: bool) -> Any:
        if kind not in (_MEAN, _SAMPLE_MEAN, _MOST, _LEAST, _OTHER):
            return self.count(values, kind, grows=grows)
        combined = self.mean([torch.as_tensor(value) for value in values], kind, place)
        first = values[0]
        return combined.round().to(first.dtype) if isinstance(first, Tensor) else type(first)(round(float(combined)))

    def _tensor(self, values: Sequence[Tensor], kind: str, place: Place, grows: bool) -> Tensor:
        first, lengths = values[0], [len(value) for value in values if value.dim()]
        if lengths and kind in ("", _ROWS) and (lengths == list(self.sizes) or len(set(lengths)) > 1):
            return torch.cat(list(values))
        if first.is_floating_point():
            combined: Tensor = self.mean(values, kind, place)
            return combined
        if first.dtype == torch.bool:
            return torch.stack(list(values)).all(0)
        return torch.as_tensor(self._whole_number(values, kind, place, grows=grows))

    def mean(self, values: Sequence[Any], kind: str = "", place: Place = ()) -> Any:
        """Returns the weighted mean of numbers or tensors; their sum, the largest or the smallest, where these are
        known to make the batch's. A value that is known to be something else is noted.
        """
        if kind == _COUNT:
            return sum(values[1:], start=values[0])
        if kind in (_MOST, _LEAST):
            extreme = torch.stack([torch.as_tensor(value) for value in values])
            found = extreme.amax(0) if kind == _MOST else extreme.amin(0)
            return found if isinstance(values[0], Tensor) else float(found)
        if kind == _OTHER:
            self.kinds.average(place)
        return weighted_mean(values, self.sizes if kind == _SAMPLE_MEAN else self.weights)

    def count(self, values: Sequence[Any], kind: str = "", *, grows: bool = True) -> Any:
        """Adds counts up. A number that the samples do not change, such as a count of steps, stays as it is; `grows`:
        where nothing is known, equal numbers that are the sizes of the parts are counts of their samples.
        """
        is_of_samples = grows and not kind and _are_equal((values[0], self.sizes[0]))
        if kind != _COUNT and _are_equal(values) and not is_of_samples:
            return values[0]
        return sum(values[1:], start=values[0])


def _are_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if any(isinstance(value, Tensor) for value in values):
        return all(torch.equal(torch.as_tensor(value), torch.as_tensor(first)) for value in values)
    return all(value == first for value in values)


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Returns the weighted mean of numbers or tensors."""
    return sum(value * (weight / sum(weights)) for value, weight in zip(values, weights, strict=True))
