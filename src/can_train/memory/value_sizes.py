"""Sizes that depend on values: of results such as `nonzero`, and numbers that a program reads from tensors (`item`).

Tensors without values have none of them. Real steps of two numbers of samples show them, and a step of any number takes
them in proportion, by the line of the program that asks.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

_aten: Final = torch.ops.aten
INDEXING: Final = frozenset(
    {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
)
_NONZERO: Final = "nonzero"
_VALUE_TAGS: Final = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# Operators of PyTorch, which say by tags that results depend on values; other libraries' may not (torchvision's nms).
_TAGGED: Final = ("aten", "prim", "prims")
# Their results have the sizes of lengths, or of a rank, and not of the values that they compute with.
_BY_LENGTHS: Final = frozenset({"_ctc_loss", "linalg_lstsq"})
_INTO_NUMBERS: Final = ("tolist", "numpy")  # methods of tensors
# Files of PyTorch and of this package: the line that asks is outside of them.
_INSIDE: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_BACKWARD: Final = (
    "_engine_run_backward"  # the function of PyTorch that backward passes run in, where they have a frame
)
_NOISE: Final = 3.0  # standard deviations of a count, within which two counts are in proportion

Site = tuple[str, int, str]
"""File and line of a program, and the operation; without a line in a backward pass."""


@dataclass(frozen=True)
class Use:
    """The result of one operation."""

    numel: int  # of the tensor that it reads
    value: Any = None  # a number that it returns; None where it returns tensors
    shapes: Sequence[tuple[int, ...]] = ()
    dtypes: Sequence[torch.dtype] = ()


Uses = Mapping[Site, Sequence[Use]]


def site_of(func: Any) -> Site:
    """Returns the line that runs an operation now."""
    name = func._schema.name.rpartition("::")[2]
    name = _NONZERO if func in INDEXING or func is _aten.masked_select.default else name
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        if frame.f_code.co_name == _BACKWARD:
            return "", 0, name
        frame = frame.f_back  # type: ignore[assignment]
    return ("", 0, name) if frame is None else (frame.f_code.co_filename, frame.f_lineno, name)


class ValueSizes:
    """The sizes of a step, from the uses in two smaller steps.

    Args:
        smaller: Uses in a step of `samples[0]` samples.
        larger: Uses in a step of `samples[1]` samples, at least as many.
        samples: Of both steps.
        num_samples: Of the step that takes the sizes.
    """

    def __init__(self, smaller: Uses, larger: Uses, samples: tuple[int, int], num_samples: int) -> None:
        self._smaller, self._larger = smaller, larger
        self._samples, self.num_samples = samples, num_samples
        self._num_asked: Counter[Site] = Counter()
        self._positions = WeakIdKeyDictionary()  # masks to their version and their use

    @property
    def largest_step(self) -> int:
        """Samples of the larger step."""
        return self._samples[1]

    def use(self, func: Any, source: Tensor) -> Use | None:
        """Returns the use of an operation that reads a tensor now; None where no smaller step had it."""
        known = self._positions.get(source) if func is _aten.nonzero.default else None
        if known is not None and known[0] == _version(source):
            return known[1]  # type: ignore[no-any-return]
        found = self._next(site_of(func), source.numel())
        if func is _aten.nonzero.default and found is not None:
            self._positions[source] = _version(source), found
        return found

    def _next(self, site: Site, numel: int) -> Use | None:
        smaller, larger = self._smaller.get(site, ()), self._larger.get(site, ())
        if not larger:
            return None
        index = self._num_asked[site]
        self._num_asked[site] += 1
        if len(smaller) == len(larger):
            first, found = smaller[index % len(smaller)], larger[index % len(larger)]
        else:
            # In a loop over samples, the operations are more, and not their results. One line may be in several loops.
            first, found = _like(larger, numel, index)
        if first.numel != found.numel or len(smaller) != len(larger):
            places = first.numel, found.numel, numel
        else:
            places = *self._samples, self.num_samples
        if found.value is not None:
            return Use(numel, value=_number(first.value, found.value, places))
        shapes = []
        for before, after in zip(first.shapes, found.shapes, strict=True):
            sizes = [_count(*pair, places) for pair in zip(before, after, strict=True)]
            if site[2] == _NONZERO:
                # No more are chosen than there are.
                sizes = [min(sizes[0], numel), *after[1:]]
            elif places[0] == places[1]:
                sizes[1:] = after[1:]
            shapes.append(tuple(sizes))
        return Use(numel, shapes=shapes, dtypes=found.dtypes)


def _like(uses: Sequence[Use], numel: int, index: int) -> tuple[Use, Use]:
    """Returns a use of a tensor about as large as a given one, the uses of equally large tensors in turn. A use of
    another size with the same result comes before it, if there is one: the result does not depend on the size then.
    """
    nearest = min((use.numel for use in uses), key=lambda other: abs(math.log((other + 1) / (numel + 1))))
    alike = [use for use in uses if use.numel == nearest]
    found = alike[index % len(alike)]
    same = (use for use in uses if use.numel != nearest and (use.value, use.shapes) == (found.value, found.shapes))
    return next(same, found), found


def _number(first: Any, second: Any, places: tuple[int, int, int]) -> Any:
    if isinstance(second, bool) or not isinstance(second, int) or min(first, second) < 0:
        return second
    return _count(first, second, places)


def _count(first: int, second: int, places: tuple[int, int, int]) -> int:
    """Returns a count at the third place, from the counts at the first two."""
    x1, x2, x = places
    if first == second and x1 != x2:
        return second
    if x1 == x2 or abs(second * x1 - first * x2) <= _NOISE * math.sqrt(first * x2**2 + second * x1**2):
        return round(second * x / x2) if x2 else second
    return max(0, round(second + (second - first) * (x - x2) / (x2 - x1)))


@contextmanager
def reading_sizes() -> Iterator[dict[Site, list[Use]]]:
    """Yields the uses in the block, on real tensors, as they come."""
    uses: dict[Site, list[Use]] = {}
    reader = _Reader(uses)
    with reader, _Lists(reader.add_number):
        yield uses


class _Reader(TorchDispatchMode):
    def __init__(self, uses: dict[Site, list[Use]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uses = uses
        self._versions = WeakIdKeyDictionary()  # of masks whose positions were asked for

    def add_number(self, value: Any) -> None:
        self._uses.setdefault(site_of(_aten._local_scalar_dense.default), []).append(Use(1, value=value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled():
            # Only there do composite operations (`item`, `where`) arrive whole.
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func in INDEXING:
            for index in args[1]:
                if index is not None and index.dtype is torch.bool:
                    self._add_positions(index, int(index.count_nonzero()))
        result = func(*args, **(kwargs or {}))
        if func is _aten.nonzero.default:
            self._add_positions(args[0], len(result))
        elif func is _aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            self._add(func, Use(math.prod(shape), shapes=[(len(result), len(shape))], dtypes=[torch.int64]))
        elif func not in INDEXING and (_VALUE_TAGS & set(func.tags) or func.namespace not in _TAGGED):
            self._add(func, _use_of(args, result))
        return result

    def _add_positions(self, mask: Tensor, count: int) -> None:
        if self._versions.get(mask) != _version(mask):
            self._versions[mask] = _version(mask)
            use = Use(mask.numel(), shapes=[(count, mask.dim())], dtypes=[torch.int64])
            self._add(_aten.nonzero.default, use)

    def _add(self, func: Any, use: Use) -> None:
        self._uses.setdefault(site_of(func), []).append(use)


def deciding_tensors(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Returns the arguments of an operation whose values decide the size of its result, or a number that it returns."""
    if func in INDEXING:
        return [index for index in args[1] if index is not None and index.dtype in _MASKS]
    if func is _aten.masked_select.default:
        return [args[1]]
    return [value for value in tree_iter(args) if isinstance(value, Tensor)] if _reads_values(func) else []


_MASKS: Final = (torch.bool, torch.uint8)


@cache
def _reads_values(func: Any) -> bool:
    if func.namespace not in _TAGGED:
        return True
    return bool(_VALUE_TAGS & set(func.tags)) and func.overloadpacket.__name__ not in _BY_LENGTHS


@contextmanager
def watching_numbers(on_read: Callable[[Tensor], object]) -> Iterator[None]:
    """Calls a function with each tensor of the block that becomes a list or an array, which no operation makes."""
    # With a mode of functions, `nn.MultiheadAttention` would take another way.
    with ExitStack() as stack:
        for name in _INTO_NUMBERS:
            own, method = Tensor.__dict__.get(name), getattr(Tensor, name)
            setattr(Tensor, name, _watched(method, on_read))
            stack.callback(*(delattr, Tensor, name) if own is None else (setattr, Tensor, name, own))
        yield


def _watched(method: Callable[..., Any], on_read: Callable[[Tensor], object]) -> Callable[..., Any]:
    @wraps(method)
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        on_read(tensor)
        return method(tensor, *args, **kwargs)

    return read


def _version(tensor: Tensor) -> int:
    # Tensors of inference mode count no changes.
    return 0 if tensor.is_inference() else tensor._version


def _use_of(args: tuple[Any, ...], result: Any) -> Use:
    numel = next((value.numel() for value in tree_iter(args) if isinstance(value, Tensor)), 1)
    tensors = [value for value in tree_iter(result) if isinstance(value, Tensor)]
    if not tensors:
        return Use(numel, value=result)
    return Use(numel, shapes=[tuple(each.shape) for each in tensors], dtypes=[each.dtype for each in tensors])


class _Lists(TorchFunctionMode):
    """Reads lists of numbers, which no operation makes of real tensors."""

    def __init__(self, add_number: Callable[[Any], None]) -> None:
        super().__init__()
        self._add_number = add_number

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.tolist:
            for number in tree_iter(result):
                self._add_number(number)
        return result
