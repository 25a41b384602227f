"""Makes batches of samples, moves them to a device, and takes samples out of them again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from can_train.errors import DataError
from can_train.fit.packing import members
from can_train.memory.meters import send, send_positions


def leaves(sample: Any) -> Iterator[Tensor]:
    """Yields the tensors and arrays of a sample, in order."""
    if isinstance(sample, Tensor):
        yield sample
    elif isinstance(sample, np.ndarray):
        yield torch.from_numpy(sample)
    elif isinstance(sample, Mapping):
        for value in sample.values():
            yield from leaves(value)
    elif isinstance(sample, tuple | list):
        for value in sample:
            yield from leaves(value)
    elif is_dataclass(sample) and not isinstance(sample, type):
        for one in fields(sample):
            yield from leaves(getattr(sample, one.name))


def replace_leaves(sample: Any, others: Iterator[Any]) -> Any:
    """Returns a sample with other objects in place of its tensors and arrays, in their order."""
    if isinstance(sample, Tensor | np.ndarray):
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


def join(tensors: Sequence[Any]) -> Tensor:
    """Concatenates the tensors of samples along their first dimension, on the device where they live there."""
    first = tensors[0]
    return (
        first.column.joined([each.row for each in tensors]) if isinstance(first, ColumnRow) else torch.cat([*tensors])
    )


def pad_and_stack(samples: Sequence[Any]) -> Any:
    """Makes a batch of samples that are built alike.

    Tensors are stacked along a new first dimension; where they differ in their first dimension they are padded with
    zeros at the end, to the longest. Numbers become a tensor, text and anything else a list. Of tuples, lists, dicts
    and dataclasses each member is collated by itself.

    >>> pad_and_stack([(torch.tensor([1, 2]), 0), (torch.tensor([3]), 1)])
    (tensor([[1, 2],
            [3, 0]]), tensor([0, 1]))

    Raises:
        DataError: Tensors differ in more than their length.
    """
    first = samples[0]
    if isinstance(first, ColumnRow):
        return first.column.stacked([sample.row for sample in samples])
    if isinstance(first, np.ndarray):
        return pad_and_stack([torch.from_numpy(sample) for sample in samples])
    if isinstance(first, Tensor):
        if len({sample.shape for sample in samples}) == 1:
            return torch.stack(list(samples))
        if len({sample.shape[1:] for sample in samples}) == 1 and first.ndim:
            return pad_sequence(list(samples), batch_first=True)
        shapes = ", ".join(str(tuple(shape)) for shape in sorted({sample.shape for sample in samples})[:3])
        raise DataError("Samples of a batch differ in their first dimension at most", value=f"shapes {shapes}",
                        remedy="Write Task.collate, which makes a batch of samples")  # fmt: skip
    for kind, of_numpy in ((bool, np.bool_), (int, np.integer), (float, np.floating)):
        if isinstance(first, kind | of_numpy):
            return torch.tensor([kind(sample) for sample in samples])
    if isinstance(first, Mapping):
        return {name: pad_and_stack([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple | list):
        members = [pad_and_stack(list(values)) for values in zip(*samples, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{one.name: pad_and_stack([getattr(sample, one.name) for sample in samples])
                                 for one in fields(first)})  # fmt: skip
    return list(samples)


def to_device(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Moves the tensors of a batch to a device, floating-point ones in a number format."""

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor):
            return send(part, device, dtype if part.is_floating_point() else part.dtype)
        # An object of the task's own may know by itself how to move (torch_geometric's batches do).
        return part.to(device) if hasattr(part, "to") else part

    return _with_parts(batch, moved)


def cloned(batch: Any) -> Any:
    """Copies the tensors of a batch, and objects that can copy themselves (torch_geometric's batches can)."""
    return _with_parts(batch, lambda part: part.clone() if hasattr(part, "clone") else part)


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


def samples_in(batch: Any) -> int:
    """Returns the number of samples of a collated batch: the first dimension that its tensors have in common.

    Raises:
        DataError: They have none, or different ones.
    """
    if hasattr(batch, "num_graphs"):
        return int(batch.num_graphs)
    sizes = {len(leaf) for leaf in leaves(batch) if leaf.dim()}
    if len(sizes) != 1:
        found = (
            f"tensors of {', '.join(map(str, sorted(sizes)))}" if sizes else f"no tensor in a {type(batch).__name__}"
        )
        raise DataError("The tensors of a batch have a row for each sample", value=found, remedy=_OWN_SELECT)
    return sizes.pop()


def select_samples(batch: Any, rows: Rows) -> Any:
    """Returns the batch of some samples of a collated batch. Tensors, arrays and lists that have a row for each sample
    are cut, and so is a batch of torch_geometric; numbers, text and tensors without dimensions stay as they are.

    >>> select_samples({"x": torch.arange(4), "scale": 2.0}, slice(1, 3))
    {'x': tensor([1, 2]), 'scale': 2.0}
    """
    if hasattr(batch, "num_graphs"):
        return type(batch).from_data_list(batch.index_select(rows))
    return _select(batch, rows, samples_in(batch))


_OWN_SELECT: Final = "Give a function of your own that takes samples out of a batch (select=)"


def _select(value: Any, rows: Rows, samples: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value[rows] if value.ndim else value
    if isinstance(value, Mapping):
        # Of the same class where that takes a dict (transformers' BatchEncoding does).
        return type(value)({name: _select(one, rows, samples) for name, one in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list) and len(value) == samples and not any(True for _ in leaves(value)):
        return value[rows] if isinstance(rows, slice) else [value[row] for row in rows]
    if isinstance(value, tuple | list):
        members = [_select(one, rows, samples) for one in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _select(getattr(value, one.name), rows, samples) for one in fields(value)})
    return value
