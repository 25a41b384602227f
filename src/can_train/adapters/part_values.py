"""The parts of a batch, and the values of the whole batch, made of the values of its parts: outputs of a step, logged
numbers, attributes of a module.

Rows stand one after the other, means are averaged, counts are added up. The kind of a value is seen where its parts
leave no doubt, or where a few samples were computed whole and in two parts. Arithmetic only.
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
_MEAN: Final = "mean"

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


def _kind(whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> str:
    """Returns the kind of a number or a tensor; empty: another one, or it cannot be told."""
    value, values = torch.as_tensor(whole), [torch.as_tensor(part) for part in parts]
    if value.dim() and [len(value), *map(len, values)] == [sum(sizes), *sizes]:
        return _ROWS
    if any(one.shape != value.shape for one in values):
        return ""
    is_same = all(torch.equal(one, value) for one in values)
    is_count = torch.allclose(sum(values[1:], start=values[0]).double(), value.double())
    if is_same == is_count:
        # Zeros tell nothing.
        return "" if is_same or not value.is_floating_point() else _MEAN
    return _SAME if is_same else _COUNT


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
            return self._tensor(values, kind, grows)
        if isinstance(first, bool) or not isinstance(first, int | float):
            return first
        return self.mean(values, kind) if isinstance(first, float) else self.count(values, kind, grows=grows)

    def _tensor(self, values: Sequence[Tensor], kind: str, grows: bool) -> Tensor:
        first, lengths = values[0], [len(value) for value in values if value.dim()]
        if lengths and kind in ("", _ROWS) and (lengths == list(self.sizes) or len(set(lengths)) > 1):
            return torch.cat(list(values))
        if first.is_floating_point():
            combined: Tensor = self.mean(values, kind)
            return combined
        if first.dtype == torch.bool:
            return torch.stack(list(values)).all(0)
        return torch.as_tensor(self.count(values, kind, grows=grows))

    def mean(self, values: Sequence[Any], kind: str = "") -> Any:
        """Returns the weighted mean of numbers or tensors; their sum, where they are known to add up."""
        if kind == _COUNT:
            return sum(values[1:], start=values[0])
        return weighted_mean(values, self.weights)

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
