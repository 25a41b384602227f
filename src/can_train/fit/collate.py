"""Makes batches of samples, moves them to a device, and takes samples out of them again. The tensors of the samples may
live on the device beforehand: each is a row of a column then.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial, reduce
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from can_train.errors import DataError
from can_train.fit.packing import members
from can_train.fit.precision import number_format
from can_train.memory.cuda_operators import on_host
from can_train.memory.meters import send, send_positions


def leaves(sample: Any) -> Iterator[Tensor]:
    """Yields the tensors and arrays of a sample, in order; of a nested tensor, which has no shape, its tensors."""
    for tensor in whole_leaves(sample):
        yield from tensor.unbind() if tensor.is_nested else (tensor,)


def has_numbers(value: Any) -> bool:
    """Tells whether an object is a tensor or an array of numbers: an array of text, of times or of objects is none."""
    return isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")


def is_plain(value: Any) -> bool:
    """Tells whether a tensor or an array may be stacked with others."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and has_numbers(value) and value.dtype.isnative
    is_dense = value.layout is torch.strided and not value.is_nested and value.device.type == "cpu"
    return is_dense and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())


def _as_tensor(numbers: Tensor | NDArray[Any]) -> Tensor:
    """Returns numbers as a tensor, which shares the memory of an array where PyTorch reads numbers as they are there:
    no reversed axes, no other order of bytes, no more than 64 bits for a number.
    """
    if isinstance(numbers, Tensor):
        return numbers
    kind, bits = numbers.dtype.kind, 8 * numbers.dtype.itemsize
    widest = {"f": (64, np.float64), "c": (128, np.complex128)}.get(kind)
    if widest is not None and bits > widest[0]:
        numbers = numbers.astype(widest[1])
    elif not numbers.dtype.isnative:
        numbers = numbers.astype(numbers.dtype.newbyteorder("="))
    if any(stride < 0 for stride in numbers.strides):
        numbers = numbers.copy()
    if numbers.flags.writeable:
        return torch.from_numpy(numbers)
    _warn_of_read_only_arrays()
    return torch.from_numpy(numbers)


@cache
def _warn_of_read_only_arrays() -> None:
    """Has PyTorch give its only warning of memory that must not be written to, as of a mapped file, and hides it:
    samples are only read.
    """
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.from_numpy(array)


def whole_leaves(sample: Any) -> Iterator[Tensor]:
    """Yields the tensors and arrays of a sample, in order, as `replace_leaves` replaces them."""
    if has_numbers(sample):
        yield _as_tensor(sample)
    elif isinstance(sample, Mapping):
        for value in sample.values():
            yield from whole_leaves(value)
    elif isinstance(sample, tuple | list):
        for value in sample:
            yield from whole_leaves(value)
    elif is_dataclass(sample) and not isinstance(sample, type):
        for one in fields(sample):
            yield from whole_leaves(getattr(sample, one.name))


def replace_leaves(sample: Any, others: Iterator[Any]) -> Any:
    """Returns a sample with other objects in place of its tensors and arrays, in their order."""
    if has_numbers(sample):
        return next(others)
    if isinstance(sample, Mapping):
        return {name: replace_leaves(value, others) for name, value in sample.items()}
    if isinstance(sample, tuple | list):
        members = [replace_leaves(value, others) for value in sample]
        return type(sample)(*members) if hasattr(sample, "_fields") else type(sample)(members)
    if is_dataclass(sample) and not isinstance(sample, type):
        return replace(sample, **{one.name: replace_leaves(getattr(sample, one.name), others)
                                  for one in fields(sample)})  # fmt: skip
    return sample


class Column:
    """One tensor of each sample of a task, on the device.

    Args:
        read: Reads the tensor of a sample on the host, by the sample's row.

    Attributes:
        data: [R, …] where all tensors have one shape; else the lines of all tensors, [L, …], and a line of zeros. None:
            they have left the device, and each tensor is read.
    """

    def __init__(self, read: Callable[[int], Tensor]) -> None:
        self._read = read
        self._ptr: NDArray[np.int64] | None = None  # [R + 1] bounds of the tensors' lines; None: they have one shape
        self._length = 0  # of a tensor, where all have one shape
        self.data: Tensor | None = None

    def joined_on_host(self, tensors: Sequence[Tensor]) -> NDArray[Any]:
        """Joins the tensors of all samples into an array; `data` is a copy of it."""
        first = tensors[0]
        if len({tensor.shape for tensor in tensors}) == 1:
            self._length = len(first) if first.ndim else 0
            return torch.stack([*tensors]).numpy()
        self._ptr = np.cumsum([0, *map(len, tensors)])
        return torch.cat([*tensors, first.new_zeros(1, *first.shape[1:])]).numpy()

    def length(self, row: int) -> int:
        """Returns the number of lines of a sample's tensor."""
        return self._length if self._ptr is None else int(self._ptr[row + 1] - self._ptr[row])

    def stacked(self, rows: Sequence[int]) -> Tensor:
        """Returns the tensors of some samples as `pad_and_stack` does."""
        if self.data is None:
            stacked: Tensor = pad_and_stack([self._read(row) for row in rows])
            return stacked
        if self._ptr is None:
            return self._lines(np.asarray(rows))
        lines = members(self._ptr, np.asarray(rows))
        there = np.arange(lines.sizes.max()) < lines.sizes[:, None]
        # What is beyond a sample's end is the line of zeros.
        positions = np.full(there.shape, len(self.data) - 1)
        positions[there] = lines.positions
        return self._lines(positions.ravel()).reshape(*there.shape, *self.data.shape[1:])

    def joined(self, rows: Sequence[int]) -> Tensor:
        """Returns the lines of some samples' tensors in succession, as `torch.cat` does."""
        if self.data is None:
            return torch.cat([self._read(row) for row in rows])
        if self._ptr is None:
            return self._lines(np.asarray(rows)).flatten(0, 1)
        return self._lines(members(self._ptr, np.asarray(rows)).positions)

    def _lines(self, positions: NDArray[np.int64]) -> Tensor:
        assert self.data is not None, "only lines on the device are gathered"
        (sent,) = send_positions((positions,), self.data.device)
        return self.data.index_select(0, sent)


class ColumnRow:
    """Stands for the tensor of one sample, which is a part of a column; `len` is the tensor's."""

    __slots__ = ("column", "row")

    def __init__(self, column: Column, row: int) -> None:
        self.column, self.row = column, row

    def __len__(self) -> int:
        return self.column.length(self.row)


_NO_ARRAYS: Final = (torch.bfloat16, torch.complex32)  # Numpy does not have them
_LOOK: Final = 64  # Samples of a data set that is read from a disk that stand for the others


class ResidentSamples:
    """The samples of a task, with rows of columns in place of their tensors while these are on the device.

    Args:
        task: Reads the samples; `sample(row)` returns one.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._columns: list[Column] = []
        self._samples: list[Any] = []
        self.is_there = False

    def arrays(self, samples: Iterable[Any]) -> dict[str, NDArray[Any]]:
        """Returns the tensors of all samples, given in the order of their rows, as an array for each tensor of a
        sample; none where samples are not built alike.
        """
        self._samples, tensors, outlines = [], list[list[Tensor]](), set[Any]()
        for row, sample in enumerate(samples):
            outlines.add(_outline(sample))
            if len(outlines) > 1 or None in outlines:
                self._samples = []
                return {}
            own = [*leaves(sample)]
            if not row:
                tensors = [[] for _ in own]
                self._columns = [Column(self._reader(number)) for number in range(len(own))]
            for kept, tensor in zip(tensors, own, strict=True):
                kept.append(tensor)
            self._samples.append(replace_leaves(sample, iter([ColumnRow(column, row) for column in self._columns])))
        return {f"tensor {number}": column.joined_on_host(tensors[number])
                for number, column in enumerate(self._columns)}  # fmt: skip

    def bind(self, data: Mapping[str, Tensor]) -> None:
        """Receives the arrays as tensors on the device; without them, tensors are read from the task again."""
        self.is_there = bool(data)
        for number, column in enumerate(self._columns):
            column.data = data.get(f"tensor {number}")

    def take(self, rows: Sequence[int]) -> list[Any]:
        """Returns samples with rows of columns in place of their tensors."""
        return [self._samples[row] for row in rows]

    def _reader(self, number: int) -> Any:
        return lambda row: [*leaves(self._task.sample(row))][number]


def bytes_of_samples(task: Any, total: int, *, in_memory: bool) -> int:
    """Returns the bytes of the tensors of all samples of a task; 0 where samples are not built alike."""
    looked = np.unique(np.linspace(0, total - 1, min(total, _LOOK)).astype(np.int64)).tolist()
    samples = [task.sample(row) for row in looked]
    if len({_outline(sample) for sample in samples}) != 1 or _outline(samples[0]) is None:
        return 0
    shapes = {tuple(tensor.shape for tensor in leaves(sample)) for sample in samples}
    if len(shapes) == 1 or not in_memory:
        return round(total * sum(map(_bytes, samples)) / len(samples))
    return sum(_bytes(task.sample(row)) for row in range(total))


def _bytes(sample: Any) -> int:
    return sum(tensor.nbytes for tensor in leaves(sample))


def _outline(sample: Any) -> Any:
    """Returns how a sample is built, without the lengths of its tensors; None where a tensor is no plain one, or there
    is none.
    """
    tensors = [*whole_leaves(sample)]
    if not tensors or not all(is_plain(tensor) and tensor.dtype not in _NO_ARRAYS for tensor in tensors):
        return None
    return tuple((tensor.dtype, tensor.ndim, tuple(tensor.shape[1:])) for tensor in tensors), _built(sample)


def _built(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _built(member)) for name, member in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_built, value))
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(_built(getattr(value, one.name)) for one in fields(value))
    return type(value)


def join(tensors: Sequence[Any]) -> Tensor:
    """Concatenates the tensors of samples along their first dimension, on the device where they live there."""
    first = tensors[0]
    return (
        first.column.joined([each.row for each in tensors]) if isinstance(first, ColumnRow) else torch.cat([*tensors])
    )


def pad_and_stack(samples: Sequence[Any]) -> Any:
    """Makes a batch of samples that are built alike.

    Tensors are stacked along a new first dimension; where they differ in their first dimension they are padded with
    zeros at the end, to the longest. Numbers become a tensor (integers int64, others fp64), text and anything else a
    list. Of tuples, lists, dicts and dataclasses each member is collated by itself.

    >>> pad_and_stack([(torch.tensor([1, 2]), 0), (torch.tensor([3]), 1)])
    (tensor([[1, 2],
            [3, 0]]), tensor([0, 1]))

    Raises:
        DataError: Tensors differ in more than their length, or samples in their keys, their lengths or their types.
    """
    return _stacked(samples, "sample")


# Numbers, the narrowest first: samples with 1 and with 2.5 are floating-point numbers.
_NUMBERS: Final = ((bool, bool | np.bool_), (int, bool | np.bool_ | int | np.integer),
                   (float, bool | np.bool_ | int | np.integer | float | np.floating))  # fmt: skip
_ALIKE: Final = "Samples of a batch must be built alike where Task.collate is not written"
_OWN_COLLATE: Final = "Write Task.collate, which makes a batch of samples"


def _stacked(samples: Sequence[Any], place: str) -> Any:
    """Collates the parts of samples that are at the same `place` in each: `sample['boxes'][0]`."""
    first = samples[0]
    if isinstance(first, ColumnRow):
        return first.column.stacked([sample.row for sample in samples])
    if isinstance(first, Tensor | np.ndarray):
        _check_kinds(samples, Tensor | np.ndarray, place)
        return (
            _stacked_tensors(list(map(_as_tensor, samples)), place) if all(map(has_numbers, samples)) else list(samples)
        )
    for kind, kinds in _NUMBERS:
        if all(isinstance(sample, kinds) for sample in samples):
            # As PyTorch's own collation does: fp32 rounds 0.1 and 16777217.0, which fp64 trains on.
            return torch.tensor([kind(sample) for sample in samples], dtype=torch.float64 if kind is float else None)
    if isinstance(first, _NUMBERS[-1][1]):
        _check_kinds(samples, _NUMBERS[-1][1], place)
    if isinstance(first, Mapping):
        _check_kinds(samples, Mapping, place)
        _check_keys(samples, place)
        return {name: _stacked([sample[name] for sample in samples], f"{place}[{name!r}]") for name in first}
    if isinstance(first, tuple | list):
        _check_kinds(samples, tuple | list, place)
        _check_lengths(samples, place)
        members = [_stacked(values, f"{place}[{number}]") for number, values in enumerate(zip(*samples, strict=True))]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    if is_dataclass(first) and not isinstance(first, type):
        _check_kinds(samples, type(first), place)
        return replace(first, **{one.name: _stacked([getattr(sample, one.name) for sample in samples],
                                                    f"{place}.{one.name}") for one in fields(first)})  # fmt: skip
    return list(samples)


def _stacked_tensors(tensors: Sequence[Tensor], place: str) -> Tensor:
    if any(tensor.is_nested for tensor in tensors):
        raise DataError("Nested tensors make a batch in ways of their own", value=f"{place} is a nested tensor",
                        remedy=_OWN_COLLATE)  # fmt: skip
    # `pad_sequence` gives all tensors the format of the first one, which cuts fractions off.
    widest = reduce(_wider, [tensor.dtype for tensor in tensors])
    tensors = [tensor.to(widest) for tensor in tensors]
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(tensors)
    if len({tensor.shape[1:] for tensor in tensors}) == 1 and all(tensor.ndim for tensor in tensors):
        return pad_sequence(tensors, batch_first=True)
    shapes = ", ".join(str(tuple(shape)) for shape in sorted({tensor.shape for tensor in tensors})[:3])
    raise DataError("Samples of a batch differ in their first dimension at most", value=f"{place} has shapes {shapes}",
                    remedy=_OWN_COLLATE)  # fmt: skip


def _wider(first: torch.dtype, other: torch.dtype) -> torch.dtype:
    try:
        return torch.promote_types(first, other)
    except RuntimeError:
        # PyTorch has no wider format of uint16, uint32 and uint64 beside others.
        return torch.int64 if not (first.is_floating_point or other.is_floating_point) else torch.float64


def _check_kinds(samples: Sequence[Any], kinds: Any, place: str) -> None:
    for number, sample in enumerate(samples):
        if not isinstance(sample, kinds):
            first, other = type(samples[0]).__name__, "None" if sample is None else type(sample).__name__
            value = f"the type of {place} is {first} in sample 0 of the batch, and {other} in sample {number}"
            raise DataError(_ALIKE, value=value, remedy=_OWN_COLLATE)


def _check_keys(samples: Sequence[Mapping[Any, Any]], place: str) -> None:
    for number, sample in enumerate(samples):
        if sample.keys() != samples[0].keys():
            key = next(iter(sample.keys() ^ samples[0].keys()))
            having, lacking = (0, number) if key in samples[0] else (number, 0)
            value = f"{place}[{key!r}] is there in sample {having} of the batch, and not in sample {lacking}"
            raise DataError(_ALIKE, value=value, remedy=_OWN_COLLATE)


def _check_lengths(samples: Sequence[Sequence[Any]], place: str) -> None:
    for number, sample in enumerate(samples):
        if len(sample) != len(samples[0]):
            value = f"{place} has {len(samples[0])} members in sample 0 of the batch, and {len(sample)} in sample"
            raise DataError(_ALIKE, value=f"{value} {number}", remedy=f"{_OWN_COLLATE}; a tensor would be padded")


def to_device(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Moves the tensors of a batch to a device, floating-point ones in a number format."""

    def formatted(part: Any) -> Any:
        return part.to(number_format(part, dtype)) if isinstance(part, Tensor) else part

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor):
            return send(part, device, number_format(part, dtype))
        # An object of the task's own may know by itself how to move (torch_geometric's batches do).
        part = part.to(device) if hasattr(part, "to") else part
        return part.apply(formatted) if hasattr(part, "num_nodes") and hasattr(part, "apply") else part

    return _with_parts(batch, moved)


def host_copies(values: Any) -> Any:
    """Copies the tensors of some values to the host, without their graphs."""
    # Also those that are on the CPU: a slice keeps the whole tensor alive, and a simulated device counts it.
    with on_host():
        return _with_parts(
            values, lambda part: part.detach().to("cpu", copy=True) if isinstance(part, Tensor) else part
        )


def _with_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a batch with other tensors and objects in the place of those that its containers hold."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _with_parts(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        members = [_with_parts(value, change) for value in batch]
        return type(batch)(*members) if hasattr(batch, "_fields") else type(batch)(members)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{one.name: _with_parts(getattr(batch, one.name), change) for one in fields(batch)})
    return change(batch)


Rows = slice | NDArray[np.int64]  # of a batch: which samples

# A list of few tensors holds columns, each with a row for each sample, as PyTorch's default collation makes lists of:
# two images of each sample, token IDs and their mask. A long list holds samples.
_FEW: Final = 4
_MOST_COLUMNS: Final = 32
_SHOWN_SIZES: Final = 5  # sizes that an error lists
_OWN_SELECT: Final = "Give functions of your own that know them: LoopSettings(select=..., counts=...)"


def samples_in(batch: Any) -> int:
    """Returns the number of samples of a collated batch: the first dimension that its tensors have in common, or the
    length of its lists, where these hold a tensor for each sample.

    >>> x, y = torch.zeros(50, 3), torch.zeros(50)
    >>> samples_in((x, y)), samples_in((list(x), list(y))), samples_in({"x": x, "sizes": list(y)})
    (50, 50, 50)

    Raises:
        DataError: They have none, or different ones; or a tensor has no rows that could be taken out.
    """
    return int(batch.num_graphs) if hasattr(batch, "num_graphs") else _read(batch)[0]


def numbers_in(batch: Any) -> NDArray[np.float64]:
    """Returns [R], the numbers that the tensors of a batch hold for each of its samples; raises as `samples_in`."""
    samples, is_listed = _read(batch)
    each, shared = np.zeros(samples), 0
    for column in _columns(batch, is_listed):
        if isinstance(column, Tensor):
            shared += column.numel()
        else:
            each += [sum(leaf.numel() for leaf in leaves(sample)) for sample in column]
    return each + shared / samples


def select_samples(batch: Any, rows: Rows) -> Any:
    """Returns the batch of some samples of a collated batch. Tensors, arrays and lists that have a row for each sample
    are cut, and so is a batch of torch_geometric; numbers, text and tensors without dimensions stay as they are.

    >>> select_samples({"x": torch.arange(4), "scale": 2.0}, slice(1, 3))
    {'x': tensor([1, 2]), 'scale': 2.0}
    """
    if hasattr(batch, "num_graphs"):
        return type(batch).from_data_list(batch.index_select(rows))
    samples, is_listed = _read(batch)
    if is_listed and _is_long(batch):
        return _taken(batch, rows)
    return _select(batch, rows, samples, is_listed)


def _read(batch: Any) -> tuple[int, bool]:
    """Returns the number of samples of a batch, and whether its lists hold a tensor for each sample."""
    by_column = {len(column) for column in _columns(batch, False) if column.dim()}
    lengths = [len(column) for column in _columns(batch, True) if not isinstance(column, Tensor) or column.dim()]
    has_lists, has_long, has_numbers = _lists_of(batch)
    # Several columns that agree show that lists hold samples; a long list shows it alone.
    can_be_listed = has_lists and len(set(lengths)) == 1 and (len(lengths) > 1 or has_long)
    # No column is a single number.
    if can_be_listed and (len(by_column) != 1 or has_long or has_numbers):
        return lengths[0], True
    if len(by_column) == 1 and can_be_listed and lengths[0] > _FEW:
        raise DataError("A list of tensors holds samples, or columns with a row for each of them",
                        value=f"a list of {lengths[0]} may hold either", remedy=_OWN_SELECT)  # fmt: skip
    if len(by_column) != 1:
        sizes = sorted(by_column | set(lengths))
        listed = ", ".join(map(str, sizes[:_SHOWN_SIZES])) + (", …" if len(sizes) > _SHOWN_SIZES else "")
        found = f"tensors of {listed}" if sizes else f"no tensor in a {type(batch).__name__}"
        raise DataError("The tensors of a batch have a row for each sample", value=found, remedy=_OWN_SELECT)
    return by_column.pop(), False


def _columns(value: Any, is_listed: bool, *, is_batch: bool = True) -> Iterator[Any]:
    """Yields the tensors of a batch, or of a part of it, in whose first dimension its samples are; with `is_listed`,
    lists that hold a tensor for each sample in place of these.
    """
    if is_listed and _is_list(value) and (_is_long(value) or not is_batch):
        yield value
    elif has_numbers(value):
        yield _with_rows(_as_tensor(value))
    else:
        for member in _members(value):
            yield from _columns(member, is_listed, is_batch=False)


def _lists_of(batch: Any) -> tuple[bool, bool, bool]:
    """Tells whether a batch has lists that may hold samples, a long one among them, and one with single numbers."""
    lists = [column for column in _columns(batch, True) if not isinstance(column, Tensor)]
    numbers = (isinstance(member, Tensor) and not member.dim() for column in lists for member in column)
    return bool(lists), any(map(_is_long, lists)), any(numbers)


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple | list):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, one.name) for one in fields(value))


def _is_list(value: Any) -> bool:
    """Tells whether a value is a list that holds tensors alone, or containers of them."""
    return isinstance(value, tuple | list) and not hasattr(value, "_fields") and bool(value) and all(
        any(True for _ in leaves(member)) for member in value)  # fmt: skip


def _is_long(value: Any) -> bool:
    """Tells whether a list has too many tensors for columns. Samples have one type; columns and labels may differ."""
    if not isinstance(value, tuple | list) or len(value) <= _MOST_COLUMNS or not _is_list(value):
        return False
    return len({member.dtype for member in value if isinstance(member, Tensor)}) <= 1


def _with_rows(tensor: Tensor) -> Tensor:
    """Returns a tensor of a batch; raises DataError where its rows cannot be taken out."""
    kind = "nested" if tensor.is_nested else "" if tensor.layout is torch.strided else str(tensor.layout)
    if kind:
        raise DataError("Rows are taken out of dense tensors", value=f"a tensor is {kind.removeprefix('torch.')}",
                        remedy=_OWN_SELECT)  # fmt: skip
    return tensor


def _taken(values: Any, rows: Rows) -> Any:
    """Returns some members of a list or tuple."""
    return values[rows] if isinstance(rows, slice) else type(values)(values[row] for row in rows)


def _select(value: Any, rows: Rows, samples: int, is_listed: bool, *, is_batch: bool = True) -> Any:
    select = partial(_select, rows=rows, samples=samples, is_listed=is_listed, is_batch=False)
    if isinstance(value, Tensor | np.ndarray):
        return value[rows] if value.ndim else value
    if isinstance(value, Mapping):
        # Of the same class where that takes a dict (transformers' BatchEncoding does).
        return type(value)({name: select(one) for name, one in value.items()})  # type: ignore[call-arg]
    is_column = is_listed and not is_batch and _is_list(value)
    if is_column or (isinstance(value, list) and len(value) == samples and not any(True for _ in leaves(value))):
        return _taken(value, rows)
    if isinstance(value, tuple | list):
        members = [select(one) for one in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: select(getattr(value, one.name)) for one in fields(value)})
    return value
