"""A call of a model as a function of tensors alone: the call that a task makes is recorded, and the tensors in its
arguments and in its result become inputs and outputs with names.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from keyword import iskeyword
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from can_train.errors import ConfigError, DataError, unknown_name
from can_train.fit.pass_state import Snapshot

BATCH: Final = "batch"
_PLAIN: Final = (type(None), bool, int, float, str, torch.dtype, torch.device)  # arguments that are part of the program
_OUTPUT: Final = "output"


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a model or of a part of it.

    Attributes:
        part: Name of the called part; empty: the model itself.
        samples: Number of samples that the call is about.
    """

    part: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    samples: int

    def inputs(self) -> dict[str, Tensor]:
        """Returns the tensors in the arguments, by name."""
        return dict(zip(self._names, [tensor for _, tensor in self._leaves()], strict=True))

    @property
    def _names(self) -> list[str]:
        return _short_names([path for path, _ in self._leaves()], "input")

    def _leaves(self) -> list[tuple[tuple[str, ...], Tensor]]:
        return [*_tensors(self._named(), ())]

    def _named(self) -> dict[str, Any]:
        """Returns the arguments by the names of the parameters of `forward`."""
        bound = inspect.signature(self.module.forward).bind(*self.args, **self.kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            # `**inputs` are named by themselves.
            is_keywords = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            named |= value if is_keywords else {name: value}
        return named

    def constants(self) -> dict[str, Any]:
        """Returns the arguments that are no tensors, by name: they are part of an exported program."""
        return {"_".join(path): value for path, value in _constants(self._named(), ())}


class TensorCall(nn.Module):
    """A call whose arguments are tensors, and whose result is a tuple of tensors.

    Args:
        call: The call.
        names: Names of its inputs that are arguments; others stay as they are.

    Attributes:
        output_names: Names of the results, once the module has been called.
    """

    def __init__(self, call: Call, names: Sequence[str]) -> None:
        super().__init__()
        self.called = call.module
        self._call, self._names = call, names
        self.output_names: list[str] = []
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]

        def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
            return self.compute(tensors)

        # torch.export names the inputs of a program after the parameters.
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def compute(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Calls the module with other tensors in the places of the named ones."""
        remaining = iter({**self._call.inputs(), **dict(zip(self._names, tensors, strict=True))}.values())
        args, kwargs = (_with_tensors(value, remaining) for value in (self._call.args, dict(self._call.kwargs)))
        leaves = [*_tensors(self.called(*args, **kwargs), (_OUTPUT,))]
        self.output_names = _short_names([path for path, _ in leaves], _OUTPUT)
        return tuple(tensor for _, tensor in leaves)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Opens a block that calls a model as it is written; restores its buffers and the random generators after it: a
    model may change them in each call.

    Without gradients PyTorch has a faster path of attention, which writes zeros where a sequence is padded; programs do
    not.
    """
    first = next(chain(model.parameters(), model.buffers()), None)
    snapshot = Snapshot(model, torch.device("cpu") if first is None else first.device)
    attention = torch.backends.mha
    has_fast_path = attention.get_fastpath_enabled()
    attention.set_fastpath_enabled(False)
    try:
        yield
    finally:
        attention.set_fastpath_enabled(has_fast_path)
        snapshot.restore()


def record_call(model: nn.Module, use: Callable[[], None], part: str | None, samples: int) -> Call:
    """Records a call of a model, or of a part of it.

    Args:
        model: In evaluation mode.
        use: Calls the model or parts of it.
        part: Name of the part; None: the model itself, else the first of the outermost parts that are called.
        samples: Number of samples that `use` is about.

    Raises:
        ConfigError: There is no such part, or neither the model nor a part is called.
    """
    names, calls, handles = {module: name for name, module in model.named_modules()}, list[Call](), list[Any]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # The model may change its inputs.
        args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        calls.append(Call(names[module], module, args, kwargs, samples))

    if part is not None and part not in names.values():
        raise unknown_name("part of the model", part, filter(None, names.values()))
    try:
        for module in names:
            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        with torch.no_grad(), unchanged(model):
            use()
    finally:
        for handle in handles:
            handle.remove()
    chosen = [call for call in calls if part is None or call.part == part]
    if not chosen:
        raise ConfigError(f"{part or type(model).__name__} is not called where the task uses its model",
                          value=", ".join(dict.fromkeys(call.part for call in calls)) or "no part is called",
                          remedy="Call it in Task.call_model")  # fmt: skip
    return min(chosen, key=lambda call: call.part.count(".") + bool(call.part))


def check_alike(calls: Sequence[Call]) -> None:
    """Makes sure that calls for several batches differ in their tensors alone.

    Raises:
        DataError: They differ in a number, or in the names or dimensions of their tensors.
    """
    first, remedy = calls[0], "Pass it as a tensor, or call the model alike for all batches in Task.call_model"
    name = first.part or type(first.module).__name__
    if not first.inputs():
        raise DataError(f"{name} is called without a tensor", value=", ".join(map(repr, first.args))[:60],
                        remedy="Pass tensors to it in Task.call_model")  # fmt: skip
    for call in calls[1:]:
        shapes = [{key: value.ndim for key, value in each.inputs().items()} for each in (first, call)]
        if shapes[0] != shapes[1] or call.part != first.part:
            raise DataError(f"{name} is called with other tensors for another batch",
                            value=f"{', '.join(shapes[0])}; {', '.join(shapes[1])}", remedy=remedy)  # fmt: skip
        before, now = first.constants(), call.constants()
        differing = [key for key in before if key not in now or before[key] != now[key]]
        if differing:
            raise DataError(f"{name} is called with a number that depends on the batch",
                            value=f"{differing[0]} is {before[differing[0]]!r} and {now.get(differing[0])!r}",
                            remedy=remedy)  # fmt: skip


def axis_names(calls: Sequence[Call]) -> dict[str, dict[int, str]]:
    """Names the dimensions of inputs that differ between batches; dimensions that always agree have one name.

    Returns:
        By input, the name of each such dimension: `batch` where it is the number of samples.
    """
    sizes = {(name, axis): tuple(call.inputs()[name].shape[axis] for call in calls)
             for name, tensor in calls[0].inputs().items() for axis in range(tensor.ndim)}  # fmt: skip
    by_size = {tuple(call.samples for call in calls): BATCH}
    dynamic = {place: size for place, size in sizes.items() if len(set(size)) > 1}
    named: dict[str, dict[int, str]] = {}
    for (name, axis), size in dynamic.items():
        is_alone = [each not in by_size for other, each in dynamic.items() if other[0] == name].count(True) == 1
        new = f"{name}_rows" if axis == 0 else f"{name}_length" if is_alone else f"{name}_{axis}"
        named.setdefault(name, {})[axis] = by_size.setdefault(size, new)
    return named


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    for name, inner in _members(value):
        yield from _tensors(inner, (*path, name))


def _constants(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    members = [*_members(value)]
    for name, inner in members:
        yield from _constants(inner, (*path, name))
    if isinstance(value, _PLAIN):
        yield path, value
    elif not (isinstance(value, Tensor | Mapping | tuple | list) or members):
        raise DataError(f"A model is exported with tensors, and {'.'.join(path)} is none", value=type(value).__name__,
                        remedy="Pass tensors in tuples, lists, dicts or dataclasses in Task.call_model")  # fmt: skip


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    # The outputs of transformers are dicts and dataclasses: as dicts they lack the outputs that are None.
    if isinstance(value, Mapping):
        yield from ((str(name), inner) for name, inner in value.items())
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        yield from ((str(name), inner) for name, inner in zip(names, value, strict=True))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((each.name, getattr(value, each.name)) for each in fields(value))
    elif hasattr(value, "num_graphs") and hasattr(value, "to_dict"):
        # A batch of torch_geometric.
        yield from value.to_dict().items()


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns a copy of a value with other tensors in place of its own."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        members = {name: _with_tensors(inner, tensors) for name, inner in value.items()}
        if type(value) is dict:
            return members
        # A copy of the class, where it takes values by name (transformers' BatchEncoding).
        other: Any = copy(value)
        other.update(members)
        return other
    if isinstance(value, tuple | list):
        parts = [_with_tensors(inner, tensors) for inner in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: _with_tensors(getattr(value, each.name), tensors) for each in fields(value)}
        return replace(value, **changed)
    if hasattr(value, "num_graphs") and hasattr(value, "to_dict"):
        graphs: Any = copy(value)
        for name, inner in value.to_dict().items():
            graphs[name] = _with_tensors(inner, tensors)
        return graphs
    return value


def _short_names(paths: Sequence[tuple[str, ...]], kind: str) -> list[str]:
    """Returns a name for each path: its last word, or more of its words where others end alike."""
    names: list[str] = []
    for path in paths:
        words = [re.sub(r"\W+", "_", word) for word in path]
        ends = ["_".join(words[-length:]) for length in range(1, len(words) + 1)]
        others = [other for other in paths if other is not path]
        unique = [end for length, end in enumerate(ends, 1) if not end[:1].isdigit()
                  and not any(other[-length:] == path[-length:] for other in others)]  # fmt: skip
        name = unique[0] if unique else ends[-1]
        name = name if name.isidentifier() and not iskeyword(name) else f"{kind}_{name}"
        while name in names:
            name += "_"
        names.append(name)
    return names
