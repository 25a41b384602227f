"""The parts of a batch, and the values of the whole batch, made of the values of its parts: outputs of a step, logged
numbers, attributes of a module.

Rows stand one after the other, along any dimension, means are averaged, totals and counts are added up, and of maxima
the largest is taken. Some samples are computed whole and in two parts: that rules out kinds that a value is not of. A
value that no kind makes, such as the square root of a mean, is averaged, and noted. Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

# First names of places whose numbers are more probably counts of steps than of samples.
ATTRIBUTE: Final = "attribute"
ROW: Final = "row of a logger"
_OF_OBJECT: Final = 3  # Length of the place of an attribute; entries of its containers have longer ones
_ROWS: Final = "rows"
_APART: Final = "apart"  # Tensors whose shapes differ so that they do not follow each other
_ADDED: Final = "added up"  # Changes since the value that the parts began with
_SUM: Final = "sum"  # Of values that the step has set anew
_MEAN: Final = "mean"  # Weighted as the loss is
_SAMPLE_MEAN: Final = "mean over samples"
_MOST: Final = "largest"
_LEAST: Final = "smallest"
_TOLERANCE: Final = 1e-3  # Relative: sums of single precision, and products of half precision
_CLOSER: Final = 10.0  # A kind that is so many times closer to the whole rules the other kinds out
_ROUND_OFFS: Final = 4.0  # Units of the last place that tell no kind from another
_NEARER: Final = 0.25  # Distance of a total ÷ distance of a mean, below which an inexact value is probably a total

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


class UnjoinableError(Exception):
    """The tensors of parts do not make up the batch's tensor; has the reason, as a clause."""


@dataclass(frozen=True)
class _Seen:
    """A value of a few samples, and of their two parts. Each began with the value `earlier`; None: with none."""

    whole: Any
    parts: Sequence[Any]
    sizes: Sequence[int]
    earlier: Any

    def possible(self, weights: Sequence[float]) -> tuple[str, ...]:
        """Returns the kinds that make the whole of its parts, weighted as in the loss; empty: none does."""
        distances = self._distances(weights)
        size, best = _largest(self.whole, *self.parts), min(distances.values())
        round_off = _ROUND_OFFS * _last_place(self.whole)
        if best > max(_TOLERANCE, round_off) * size:
            return ()
        bound = max(_CLOSER * best, round_off * size)
        return tuple(kind for kind, distance in distances.items() if distance <= bound)

    def is_nearer_to_total(self, weights: Sequence[float]) -> bool:
        """Tells whether the whole is far nearer to a total of its parts than to a mean, though it is neither: they may
        have other random numbers.
        """
        distances = self._distances(weights)
        return distances[_ADDED] < _NEARER * distances[_MEAN]

    def _distances(self, weights: Sequence[float]) -> dict[str, float]:
        earlier = _as_numbers(self.earlier) if isinstance(self.earlier, Tensor) else self.earlier
        candidates = _candidates([_as_numbers(part) for part in self.parts], earlier, weights, self.sizes)
        whole = _as_numbers(self.whole)
        return {kind: _largest(made() - whole) for kind, made in candidates.items()}


@dataclass
class Kinds:
    """The kinds of values that were computed whole and in two parts."""

    by_place: dict[Place, tuple[str, ...]] = field(default_factory=dict)  # That are possible, the most probable first
    row_dims: dict[Place, int] = field(default_factory=dict)  # Dimensions that rows lie along
    _seen: dict[Place, _Seen] = field(default_factory=dict)  # Values that are not judged yet
    _averaged: dict[str, None] = field(default_factory=dict)  # Names of values that a mean was made of, though none is
    _guessed: dict[str, None] = field(default_factory=dict)  # Names of values whose kind is not certain
    _told: set[str] = field(default_factory=set)

    def average(self, place: Place) -> None:
        """Notes a value that is averaged though the batch's value is no mean of its parts' values."""
        self._averaged[_name(place)] = None

    def guess(self, place: Place) -> None:
        """Notes a value that may be of another kind than the kind that was taken."""
        self._guessed[_name(place)] = None

    def newly_averaged(self) -> list[str]:
        """Returns the names of averaged values that are no means, each once."""
        return self._untold(self._averaged)

    def newly_guessed(self) -> list[str]:
        """Returns the names of values whose kind is not certain, each once."""
        return self._untold(self._guessed)

    def _untold(self, noted: Iterable[str]) -> list[str]:
        names = [name for name in noted if name not in self._told]
        self._told.update(names)
        return names

    def judge(self, weights: Sequence[float] | None = None, *, is_random: bool = False) -> None:
        """Judges the values that were seen, by the weights of their parts in the loss; None: by their sizes. Kinds that
        the value of earlier samples was not of stay ruled out. `is_random`: whole and parts have other random numbers.
        """
        for place, seen in self._seen.items():
            of_loss = seen.sizes if weights is None or not sum(weights) else weights
            possible, earlier = seen.possible(of_loss), self.by_place.get(place, ())
            if not possible and place[:1] == (ATTRIBUTE,) and seen.is_nearer_to_total(of_loss):
                possible = (_ADDED,)
                self.guess(place)
            elif not possible and is_random:
                possible = earlier or (_MEAN,)
            self.by_place[place] = tuple(kind for kind in earlier if kind in possible) or possible
        self._seen.clear()

    def forget(self) -> None:
        """Forgets the values that are not judged yet."""
        self._seen.clear()

    def learn(self, place: Place, whole: Any, parts: Sequence[Any], sizes: Sequence[int], earlier: Any = None) -> None:
        """Sees a value of a few samples, and of their two parts of `sizes`, for `judge`. Each began with the value
        `earlier`; None: with none.
        """
        if isinstance(whole, Mapping):
            for name, value in whole.items():
                if all(isinstance(part, Mapping) and name in part for part in parts):
                    self.learn((*place, name), value, [part[name] for part in parts], sizes)
        elif isinstance(whole, tuple | list):
            if all(isinstance(part, tuple | list) and len(part) == len(whole) for part in parts):
                for position, value in enumerate(whole):
                    of_parts = [part[position] for part in parts]
                    self.learn((*place, position), value, of_parts, sizes, _member(earlier, position))
        elif all(isinstance(value, Tensor | int | float) for value in (whole, *parts)):
            self._learn_numbers(place, _Seen(whole, parts, sizes, earlier))

    def of(self, place: Place) -> tuple[str, ...] | None:
        """Returns the kinds that a value may be of; None: nothing is known of it. A new entry of a container is of the
        kind of the container's other entries.
        """
        if place in self.by_place or place[:1] != (ATTRIBUTE,) or len(place) <= _OF_OBJECT:
            return self.by_place.get(place)
        peers = [kinds for other, kinds in self.by_place.items() if other[:-1] == place[:-1]]
        return tuple(kind for kind in peers[0] if all(kind in kinds for kinds in peers)) or None if peers else None

    def is_of_batch(self, place: Place) -> bool:
        """Tells whether a tensor is known to describe a batch as a whole, and to have no rows of its samples."""
        return self.by_place.get(place, (_ROWS,)) not in ((_ROWS,), (_APART,))

    def learn_entries(
        self, place: Place, whole: Sequence[Any], parts: Sequence[Sequence[Any]], sizes: Sequence[int]
    ) -> None:
        """Sees the entries that a few samples, and their two parts, have appended to a list."""
        if not whole and not any(parts):
            # A step that appends nothing tells nothing.
            return
        if len(whole) == sum(map(len, parts)):
            self.by_place[place] = (_ROWS,)
        elif all(len(part) == len(whole) for part in parts):
            self.by_place[place] = ()
            self.learn(place, list(whole), parts, sizes)

    def _learn_numbers(self, place: Place, seen: _Seen) -> None:
        whole, *parts = (torch.as_tensor(value) for value in (seen.whole, *seen.parts))
        differing = _differing([whole.shape, *(part.shape for part in parts)])
        if differing is None or differing:
            rows = None if differing is None else [sum(part.shape[dim] for part in parts) for dim in differing]
            follow = differing is not None and rows == [whole.shape[differing[0]]]
            self.by_place[place] = (_ROWS,) if follow else (_APART,)
            if differing is not None and follow:
                self.row_dims[place] = differing[0]
            return
        # Zeros tell nothing, nor do numbers that are not finite.
        is_number = whole.dtype != torch.bool and bool(_largest(whole, *parts))
        if is_number and all(value.isfinite().all() for value in (whole, *parts)):
            self._seen[place] = seen


def _differing(shapes: Sequence[torch.Size]) -> list[int] | None:
    """Returns the dimensions in which shapes differ; None where they have other numbers of dimensions."""
    if len(set(map(len, shapes))) > 1:
        return None
    return [dim for dim, lengths in enumerate(zip(*shapes, strict=True)) if len(set(lengths)) > 1]


def _member(values: Any, position: int) -> Any:
    """Returns a member of a tuple; None where there is none."""
    return values[position] if isinstance(values, tuple) and position < len(values) else None


def _candidates(
    values: Sequence[Any], earlier: Any, weights: Sequence[float], sizes: Sequence[int]
) -> dict[str, Callable[[], Any]]:
    """Returns functions that make the batch's number of its parts' numbers, by kind, the most probable kind first."""
    candidates: dict[str, Callable[[], Any]] = {_ADDED: partial(_added, values, earlier)}
    if is_change(earlier, values[0]):
        candidates[_SUM] = partial(_added, values, None)
    return {
        **candidates,
        _MEAN: partial(weighted_mean, values, weights),
        _SAMPLE_MEAN: partial(weighted_mean, values, sizes),
        _MOST: partial(_extreme, values, largest=True),
        _LEAST: partial(_extreme, values, largest=False),
    }


def is_change(earlier: Any, value: Any) -> bool:
    """Tells whether a number is a change of an earlier one; from infinity there is none."""
    if isinstance(earlier, Tensor):
        is_alike = isinstance(value, Tensor) and value.shape == earlier.shape and value.dtype == earlier.dtype
        return is_alike and earlier.dtype != torch.bool and bool(earlier.isfinite().all())
    # A total may begin with 0, and go on with tensors.
    is_number = isinstance(earlier, int | float) and isinstance(value, Tensor | int | float)
    return is_number and not isinstance(earlier, bool) and not isinstance(value, bool) and math.isfinite(earlier)


def _added(values: Sequence[Any], earlier: Any) -> Any:
    """Adds up the changes from an earlier number; where there is none, the numbers."""
    if is_change(earlier, values[0]):
        return earlier + sum(value - earlier for value in values)
    return sum(values[1:], start=values[0])


def _extreme(values: Sequence[Any], *, largest: bool) -> Any:
    if not isinstance(values[0], Tensor):
        return max(values) if largest else min(values)
    stacked = torch.stack(list(values))
    return stacked.amax(0) if largest else stacked.amin(0)


def _as_numbers(value: Any) -> Tensor:
    """Returns numbers that can be compared, on the host."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()


def _largest(*values: Any) -> float:
    """Returns the largest absolute number."""
    return max((float(numbers.abs().max()) for numbers in map(_as_numbers, values) if numbers.numel()), default=0.0)


def _last_place(value: Any) -> float:
    """Returns the relative distance of a number from the next one."""
    dtype = value.dtype if isinstance(value, Tensor) else torch.float64
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _listed(shapes: Sequence[torch.Size]) -> str:
    """Lists shapes, each once."""
    return f"shapes {' and '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}"


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

    def of(self, positions: Sequence[int]) -> Combination:
        """Returns the combination of some of the parts."""
        return replace(self, sizes=[self.sizes[position] for position in positions],
                       weights=[self.weights[position] for position in positions])  # fmt: skip

    def combine(self, values: Sequence[Any], place: Place = (), earlier: Any = None) -> Any:
        """Combines the values of the parts into the batch's. Each part began with the value `earlier`; None: none."""
        first = values[0]
        if len(values) == 1 or first is None:
            return values[-1]
        if isinstance(first, Mapping):
            return {name: self.combine([value[name] for value in values], (*place, name)) for name in first}
        if isinstance(first, tuple | list):
            lengths = [len(value) for value in values]
            if len(set(lengths)) > 1 or (isinstance(first, list) and lengths == list(self.sizes)):
                return type(first)(entry for value in values for entry in value)
            members = [
                self.combine(entries, (*place, position), _member(earlier, position))
                for position, entries in enumerate(zip(*values, strict=True))
            ]  # fmt: skip
            return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
        if isinstance(first, Tensor):
            if (dim := self._row_dim(values, place)) is not None:
                return torch.cat(list(values), dim)
            if first.dtype == torch.bool:
                return torch.stack(list(values)).all(0)
        elif isinstance(first, bool) or not isinstance(first, int | float):
            return first
        return self.number(values, place, earlier)

    def _row_dim(self, values: Sequence[Tensor], place: Place) -> int | None:
        """Returns the dimension along which the rows of tensors follow each other; None where they have no rows.

        Raises:
            UnjoinableError: The tensors differ otherwise, or may follow each other along several dimensions.
        """
        shapes, kinds = [value.shape for value in values], self.kinds.by_place.get(place)
        differing = _differing(shapes)
        dim = differing[0] if differing else 0
        if kinds == (_ROWS,):
            dim = self.kinds.row_dims.get(place, 0)
            is_joined = differing in ([], [dim]) and bool(shapes[0])
        elif not differing:
            is_joined = differing is not None and kinds != (_APART,)
            dims = () if kinds is not None or not is_joined else self._possible_dims(shapes[0], place)
            dim = dims[0] if dims else -1
            if len(dims) > 1:
                raise UnjoinableError(f"{_name(place)} of its parts may be joined along dimensions "
                                      f"{' and '.join(map(str, dims))} ({_listed(shapes)})")  # fmt: skip
        else:
            # Rows along the first dimension need not be samples: masked positions are not.
            are_samples = dim == 0 or [shape[dim] for shape in shapes] == list(self.sizes)
            is_joined = kinds is None and len(differing) == 1 and are_samples
        if not is_joined:
            raise UnjoinableError(f"{_name(place)} of its parts cannot be joined ({_listed(shapes)})")
        return dim if dim >= 0 else None

    def _possible_dims(self, shape: torch.Size, place: Place) -> Sequence[int]:
        """Returns the dimensions of equal tensors that may have the samples, where nothing was compared."""
        is_kept = place[:1] == (ATTRIBUTE,)
        # A buffer has the same shape before the batch.
        if len(set(self.sizes)) > 1 or (is_kept and place[1] < 0):
            return ()
        dims = [dim for dim, length in enumerate(shape) if length == self.sizes[0]]
        # A single sample is a row, as PyTorch has them, though dimensions of one number are usual.
        return dims[:1] if self.sizes[0] == 1 and not is_kept else dims

    def entries(self, new: Sequence[Sequence[Any]], place: Place) -> list[Any]:
        """Combines the entries that the parts have appended to a list: one after the other, or each with its peers."""
        lengths, kinds = [len(entries) for entries in new], self.kinds.by_place.get(place)
        are_of_samples = kinds is None and lengths[0] > 1 and lengths == list(self.sizes)
        if kinds == (_ROWS,) or are_of_samples or len(set(lengths)) > 1:
            return [entry for entries in new for entry in entries]
        return [self.combine(peers, (*place, position)) for position, peers in enumerate(zip(*new, strict=True))]

    def number(self, values: Sequence[Any], place: Place = (), earlier: Any = None) -> Any:
        """Returns the batch's number or tensor. Notes a value that no kind makes, and a value that a step keeps whose
        possible kinds differ.
        """
        kinds, candidates = self.kinds.of(place), _candidates(values, earlier, self.weights, self.sizes)
        is_kept = place[:1] == (ATTRIBUTE,)
        if kinds is None or kinds == (_ROWS,):
            return self._guess_of(values, place, earlier) if is_kept else self._unknown(values, place)
        if not kinds:
            self.kinds.average(place)
            return self._of_kind(_MEAN, values, candidates)
        kind = kinds[0] if kinds[0] in candidates else _ADDED
        if kind == _ADDED and _LEAST in kinds:
            # A count does not fall.
            kind = _LEAST
        is_best = kind == _MEAN and _leaves_some(values, earlier)
        if is_kept and (is_best or self._is_doubtful(kind, kinds, values, candidates)):
            self.kinds.guess(place)
        return self._of_kind(kind, values, candidates)

    def _is_doubtful(
        self, kind: str, kinds: Sequence[str], values: Sequence[Any], candidates: Mapping[str, Callable[[], Any]]
    ) -> bool:
        """Tells whether a kind that is possible, too, makes another number of the parts' numbers."""
        rivals = [rival for rival in kinds if rival in candidates and {kind, rival} != {_MEAN, _SAMPLE_MEAN}]
        if kind == _ADDED and _are_whole(values):
            # Samples that add nothing to a count are usual. They leave a maximum possible, too.
            rivals = [rival for rival in rivals if rival not in (_MOST, _LEAST)]
        made = self._of_kind(kind, values, candidates)
        return any(not _is_close(self._of_kind(rival, values, candidates), made) for rival in rivals if rival != kind)

    def _of_kind(self, kind: str, values: Sequence[Any], candidates: Mapping[str, Callable[[], Any]]) -> Any:
        first = values[0]
        if kind not in (_MEAN, _SAMPLE_MEAN) or _is_fraction(first):
            return candidates[kind]()
        if _are_equal(values):
            return first
        mean = weighted_mean([torch.as_tensor(value) for value in values],
                             self.weights if kind == _MEAN else self.sizes)  # fmt: skip
        return mean.round().to(first.dtype) if isinstance(first, Tensor) else type(first)(round(float(mean)))

    def _unknown(self, values: Sequence[Any], place: Place) -> Any:
        """Returns the batch's number where nothing is known of it."""
        if _is_fraction(values[0]):
            if isinstance(values[0], Tensor) and values[0].dim() and not _are_equal(values):
                self.kinds.guess(place)
            return weighted_mean(values, self.weights)
        return self.count(values, grows=place[:1] != (ROW,))

    def _guess_of(self, values: Sequence[Any], place: Place, earlier: Any) -> Any:
        """Returns the batch's number, which a step keeps, where nothing is known of it: counts of samples, and whole
        numbers that differ, are added up; other numbers are averaged, and numbers that are equal stay.
        """
        changes = [value - earlier for value in values] if is_change(earlier, values[0]) else values
        if self._are_sizes(changes) or sum(not _are_equal((change, 0)) for change in changes) == 1:
            return _added(values, earlier)
        is_step = _are_equal([*changes, 1])
        if self._are_sizes(values) and not is_step:
            return _added(values, None)
        if not _are_equal(values) or (is_step and max(self.sizes) == 1):
            # With one sample in each part, a count of samples is a count of steps.
            self.kinds.guess(place)
        if _are_equal(values):
            return values[0]
        return weighted_mean(values, self.weights) if _is_fraction(values[0]) else _added(values, earlier)

    def _are_sizes(self, values: Sequence[Any]) -> bool:
        return max(self.sizes) > 1 and all(_are_equal(pair) for pair in zip(values, self.sizes, strict=True))

    def count(self, values: Sequence[Any], *, grows: bool = True) -> Any:
        """Adds counts up. A number that the samples do not change, such as a count of steps, stays as it is; `grows`:
        equal numbers that are the sizes of the parts are counts of their samples.
        """
        if _are_equal(values) and not (grows and _are_equal((values[0], self.sizes[0]))):
            return values[0]
        return sum(values[1:], start=values[0])


def _leaves_some(values: Sequence[Any], earlier: Any) -> bool:
    """Tells whether some parts, and not all, have left a number as it was: it may be the best of all steps."""
    if not is_change(earlier, values[0]):
        return False
    return len({_are_equal((value, earlier)) for value in values}) > 1


def _are_whole(values: Sequence[Any]) -> bool:
    """Tells whether all numbers are whole."""
    return all(_largest(_as_numbers(value).frac()) == 0 for value in values)


def _is_fraction(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)


def _is_close(value: Any, whole: Any) -> bool:
    tolerance = max(_TOLERANCE, _ROUND_OFFS * _last_place(whole))
    return _largest(_as_numbers(value) - _as_numbers(whole)) <= tolerance * _largest(whole)


def _are_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if any(isinstance(value, Tensor) for value in values):
        return all(torch.equal(torch.as_tensor(value), torch.as_tensor(first)) for value in values)
    return all(value == first for value in values)


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Returns the weighted mean of numbers or tensors."""
    return sum(value * (weight / sum(weights)) for value, weight in zip(values, weights, strict=True))
