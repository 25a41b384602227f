"""Samples of a task whose tensors live on the device: each tensor of a sample is a row of a column."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from can_train.fit.collate import Column, ColumnRow, leaves, replace_leaves, whole_leaves
from can_train.training.read_ahead import is_plain

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


def size_of(task: Any, total: int, *, in_memory: bool) -> int:
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
