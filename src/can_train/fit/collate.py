"""Makes batches of samples, moves them to a device, and takes samples out of them again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from can_train.errors import DataError
from can_train.memory.meters import send


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
    if isinstance(batch, Tensor):
        return send(batch, device, dtype if batch.is_floating_point() else batch.dtype)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        members = [to_device(value, device, dtype) for value in batch]
        return type(batch)(*members) if hasattr(batch, "_fields") else type(batch)(members)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{one.name: to_device(getattr(batch, one.name), device, dtype)
                                 for one in fields(batch)})  # fmt: skip
    # An object of the task's own may know by itself how to move (torch_geometric's batches do).
    return batch.to(device) if hasattr(batch, "to") else batch


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
