"""The state that a step of somebody else's loop may change before memory runs out: generators, buffers, gradients,
`requires_grad`, hooks, and attributes of the user's classes. It is read before every step, in microseconds. Attributes
that the parts of a batch have changed are joined to those of the whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from itertools import islice, pairwise
from operator import is_
from types import FunctionType, MethodType, NoneType
from typing import Any, Final
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from can_train.adapters.part_values import ATTRIBUTE, Combination, Kinds, Place, is_change, whole_and_parts
from can_train.fit.collate import leaves
from can_train.fit.pass_state import Generators, written_back
from can_train.fit.rescue import add_to_gradients

# Parts of a module that are restored by other means than its attributes, or that no step changes.
_MODULE_PARTS: Final = frozenset(vars(nn.Module())) - {"training"}
# And of a metric of torchmetrics: how it was made.
_METRIC_PARTS: Final = _MODULE_PARTS | {"_defaults", "_persistent", "_reductions"}
_HOOKS: Final = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FRAMEWORKS: Final = ("torch", "lightning", "pytorch_lightning", "transformers", "accelerate", "can_train", "builtins")
_COPIED_NUMBERS: Final = 2**16  # Numbers of the largest plain tensor whose values are copied before each step
_DEVICE_BYTES: Final = 2**24  # A larger buffer is copied to the host, once, and again only after it has changed
_LONGEST: Final = 1000  # Entries of the longest container that is copied; a longer one only loses its new entries
_WALKED: Final = 16  # Entries of the longest container whose entries are looked at: longer ones are lists of results
_CONSTANTS: Final = frozenset({NoneType, bool, int, float, str, torch.device, torch.dtype, FunctionType, MethodType})
_LISTED_READS: Final = 50  # Reads after which the modules are listed again
_MISSING: Final = object()  # In place of an attribute that is not there
CHANGED: Final = "it has changed the parameters"  # Clause of a step that cannot be undone
_LOGGED: Final = "_ResultMetric"  # Lightning's class of a logged value, which changes no tensor in place
_NUMERIC: Final = "iuf"  # Kinds of NumPy's formats that are numbers
_DEPTH: Final = 3  # Levels of containers in containers, and of the user's objects in objects


class StepState:
    """Reads the state of a module, and of objects of its loop, before a step, and restores it.

    Args:
        model: The module.
        device: Its device, whose generator is restored, too.
        objects: Returns further objects whose attributes a step changes, such as the values that a loop has logged.
        holds_gradients: Whether gradients that the step clears are restored. If not, their memory is free once they are
            cleared, as it is without this class.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        objects: Callable[[], Iterable[Any]] = lambda: (),
        *,
        holds_gradients: bool = True,
    ) -> None:
        self._model, self._device, self._objects = model, device, objects
        self._holds_gradients = holds_gradients
        self._generators: Generators | None = None
        self._buffers: list[Tensor | None] = []
        self._versions: list[int] = []
        self._copies: list[Tensor | None] = []
        self._places: list[tuple[nn.Module, str]] = []
        self._uncounted: list[tuple[list[Tensor], list[Tensor]]] = []  # Copies of buffers, and the buffers
        self._reads = 0
        self._modules: list[nn.Module] = []
        self._attributes: list[Attributes] = []
        self._owners: list[Any] = []  # Of the attributes
        self._is_before_backward = False  # Whether the step has run no backward pass yet
        self._parameters: list[nn.Parameter] = []
        self._parameter_copies: list[Tensor | None] = []  # On the host; empty: there are none
        self._optimizers: list[_OptimizerState] = []

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of the module, as the state was read with them."""
        return self._parameters

    def read(self) -> None:
        """Reads the state as it is now."""
        # A step may make modules, the first step above all.
        if not self._modules or self._reads % _LISTED_READS == 1:
            self._list_modules()
        self._reads += 1
        self._generators = Generators(self._device, since=self._generators)
        self._read_buffers()
        # Lazy layers that the step makes stay: they have no version before.
        versions = [-1] * len(self._parameters) if self._has_lazy else versions_of(self._parameters)
        self._parameter_versions = versions
        self.forget_copies()
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self.read_gradients()
        self._is_before_backward = True
        self._next_hook = RemovableHandle.next_id
        self.read_attributes()

    def copy_parameters(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Copies the parameters, and the state of optimizers, to the host: `restore` puts them back then."""
        self._parameter_copies = [_host_copy(parameter) for parameter in self._parameters]
        self._optimizers = [_OptimizerState(optimizer) for optimizer in optimizers]

    def forget_copies(self) -> None:
        """Frees the copies of the parameters."""
        self._parameter_copies, self._optimizers = [], []

    @property
    def has_copies(self) -> bool:
        """Whether `restore` puts changed parameters back."""
        return bool(self._parameter_copies)

    def parameters_changed(self) -> bool:
        """Tells whether parameters have changed since the state was read. Changes through `parameter.data`, which
        PyTorch does not count, are seen where the parameters were copied.
        """
        if self._parameter_copies:
            pairs = zip(self._parameters, self._parameter_copies, strict=True)
            return any(copied is not None and not _are_same(parameter, copied) for parameter, copied in pairs)
        return self._counts_changes()

    def _counts_changes(self) -> bool:
        """Tells whether PyTorch has counted changes of parameters."""
        versions = zip(self._parameter_versions, versions_of(self._parameters), strict=True)
        # Lazy layers that the step has made stay: they have no version before.
        return any(earlier >= 0 and earlier != version for earlier, version in versions)

    def read_gradients(self) -> None:
        """Reads the gradients as they are now."""
        self._keep_gradients([parameter.grad for parameter in self._parameters])

    def _keep_gradients(self, gradients: list[Tensor | None]) -> None:
        self._gradient_versions = versions_of(gradients)
        self._gradients: list[Any] = gradients  # Tensors, or weak references to them
        if not self._holds_gradients:
            self._gradients = [None if gradient is None else ref(gradient) for gradient in gradients]

    def read_attributes(self) -> None:
        """Reads the attributes as they are now."""
        owners, earlier = [*self._with_attributes, *self._objects()], self._attributes
        if len(owners) == len(self._owners) and all(map(is_, owners, self._owners)):
            self._attributes = [Attributes(one.owner, since=one) for one in earlier]
        else:
            by_owner = {id(attributes.owner): attributes for attributes in earlier}
            self._attributes = [Attributes(owner, since=by_owner.get(id(owner))) for owner in owners]
        self._owners = owners

    def restore(self) -> str:
        """Restores the state that was read.

        Returns:
            A clause that names something that could not be restored; empty where everything was.
        """
        assert self._generators is not None, "a state is read before it is restored"
        self._generators.restore()
        for parameter, flag in zip(self._parameters, self._flags, strict=True):
            parameter.requires_grad_(flag)
        self._remove_new_hooks()
        self.restore_attributes(metrics=True)
        self._restore_buffers()
        is_changed = False
        entries = zip(self._parameters, self._gradients, self._gradient_versions, strict=True)
        for parameter, gradient, version in entries:
            if isinstance(gradient, ref) and (gradient := gradient()) is not None:
                # As the weak references of torch.utils.weak do.
                gradient._fix_weakref()  # type: ignore[attr-defined]  # which refers to a tensor
            # The step has added to a gradient in place, outside of the backward pass that sets gradients aside.
            is_changed |= gradient is not None and _version(gradient) != version
            parameter.grad = gradient
        # The step may have made or replaced modules.
        self._modules = []
        if self._parameter_copies:
            self._put_parameters_back()
        elif self._counts_changes():
            return CHANGED
        return "it has added to gradients of earlier batches" if is_changed else ""

    def _put_parameters_back(self) -> None:
        with torch.no_grad():
            for parameter, copied in zip(self._parameters, self._parameter_copies, strict=True):
                if copied is not None and not _are_same(parameter, copied):
                    parameter.copy_(copied)
        for state in self._optimizers:
            state.restore()

    def restore_attributes(self, *, metrics: bool = False) -> None:
        """Restores the attributes alone, and of metrics where that is asked for: each part of a batch begins with the
        attributes that the batch began with, while metrics go on.
        """
        with torch.no_grad():
            for _, (module, name), tensor, version, copied in self._own_buffers():
                if _version(tensor) != version or version < 0:
                    written_back(tensor, copied)
                module._buffers[name] = tensor
        for attributes in self._attributes:
            if metrics or not hasattr(attributes.owner, "metric_state"):
                attributes.restore()

    def read_metrics(self) -> list[Attributes]:
        """Reads the states of torchmetrics' metrics as they are now."""
        return [Attributes(owner) for owner in self._with_attributes if hasattr(owner, "metric_state")]

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """Sets gradients of earlier batches aside for a backward pass, and adds its gradients to them afterwards, as
        autograd does. Where the pass fails they are as they were.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        if self._is_before_backward and self._holds_gradients:
            # The step has cleared what it clears.
            self._keep_gradients(gradients)
        self._is_before_backward = False
        entries = zip(self._parameters, gradients, strict=True)
        aside = [(parameter, gradient) for parameter, gradient in entries if gradient is not None]
        for parameter, _ in aside:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, earlier in aside:
                parameter.grad = earlier
            raise
        add_to_gradients(aside)

    def changes(self) -> Changes:
        """Returns what has changed in the attributes of the user's objects, in the containers among them and in their
        buffers since the state was read. Places begin with the position of the owner.
        """
        changes = Changes()
        for position, attributes in enumerate(self._attributes[: len(self._with_attributes)]):
            if hasattr(attributes.owner, "metric_state"):
                continue
            owner = attributes.owner
            for name, value in vars(owner).items():
                if name not in _MODULE_PARTS:
                    earlier = attributes.values.get(name, getattr(type(owner), name, None))
                    attributes.note(changes, (position, name), (owner, earlier, value))
        for position, (module, name), tensor, version, copied in self._own_buffers():
            value = module._buffers[name]
            is_same = value is tensor and value.is_floating_point() and _version(value) == version
            if value is None or is_same or value.shape != copied.shape:
                continue
            if not torch.equal(value, copied.to(value.device)):
                changes.numbers[-1 - position, name] = (module, copied.to(value.device), value.clone())
                if value.dim():
                    changes.lasting.add((-1 - position, name))
        return changes

    def _own_buffers(self) -> Iterator[tuple[int, tuple[nn.Module, str], Tensor, int, Tensor]]:
        """Yields the buffers of numbers of the user's modules: position, place, buffer, version, copy."""
        entries = zip(self._places, self._buffers, self._versions, self._copies, strict=True)
        for position, (place, tensor, version, copied) in enumerate(entries):
            if tensor is None or copied is None or tensor.dtype == torch.bool:
                continue
            if not type(place[0]).__module__.startswith("torch."):
                yield position, place, tensor, version, copied

    def kept_rows(self, kinds: Kinds, rows: slice, samples: int) -> list[tuple[Any, Any, Any]]:
        """Returns the attributes, and entries of containers, that held a row for each of so many samples when the state
        was read, as the hidden state of the batch before does: owner, name, and the value with some rows alone.
        """
        taken: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
        for place, dim in kinds.row_dims.items():
            if place[0] != ATTRIBUTE or not 0 <= place[1] < len(self._with_attributes):
                continue
            owner, name, value = self._attributes[place[1]].at(place[2:])
            _, _, earlier = taken.get((id(owner), name), (owner, name, value))
            member = value[place[-1]] if isinstance(value, tuple) else value
            if not isinstance(member, Tensor) or member.dim() <= dim or member.shape[dim] != samples:
                continue
            # As a state of that size would lie in memory, which cuDNN demands.
            part: Any = member.narrow(dim, rows.start, rows.stop - rows.start).clone(
                memory_format=torch.contiguous_format
            )
            if isinstance(earlier, tuple):
                part = (*earlier[: place[-1]], part, *earlier[place[-1] + 1 :])
            taken[id(owner), name] = owner, name, part
        return list(taken.values())

    def largest_hoard(self) -> str:
        """Names the container that keeps the most tensors on the device, as a clause; empty where there is none."""
        hoards = [(sum(1 for _ in leaves(value)), name, value) for attributes in self._attributes
                  for name, value in vars(attributes.owner).items()
                  if name not in _MODULE_PARTS and isinstance(value, list | dict | deque)]  # fmt: skip
        tensors, name, value = max(hoards, key=lambda hoard: hoard[0], default=(0, "", ()))
        if not tensors:
            return ""
        has_graph = any(tensor.grad_fn is not None for tensor in leaves(value))
        return f"{name!r} keeps {tensors} tensors{' with the graphs of their steps' if has_graph else ''}"

    def _list_modules(self) -> None:
        self._modules = list(self._model.modules())
        self._with_buffers = [module for module in self._modules if module._buffers]
        self._parameters = list(self._model.parameters())
        self._has_lazy = any(map(is_lazy, self._parameters))
        package = type(self._model).__module__.partition(".")[0]
        self._with_attributes: list[Any] = []
        for module in self._modules:
            if not type(module).__module__.startswith("torch."):
                self._with_attributes.append(module)
                if package not in _FRAMEWORKS:
                    self._with_attributes += _objects_in(module, package, _DEPTH)

    def _read_buffers(self) -> None:
        """Copies the buffers that may have changed since they were read last."""
        tensors = [tensor for module in self._with_buffers for tensor in module._buffers.values()]
        if not tensors and not self._buffers:
            return
        versions = versions_of(tensors)
        if len(tensors) != len(self._buffers) or not all(map(is_, tensors, self._buffers)):
            self._copy_buffers(tensors)
        else:
            pairs = [
                (copied, tensor)
                for copied, tensor, version, earlier in zip(
                    self._copies, tensors, versions, self._versions, strict=True
                )
                if version != earlier and copied is not None and tensor is not None
            ]
            if any(copied.shape != tensor.shape for copied, tensor in pairs):
                self._copy_buffers(tensors)
                pairs = []
            with torch.no_grad():
                for copies, uncounted in self._uncounted:
                    torch._foreach_copy_(copies, uncounted)
                if pairs:
                    torch._foreach_copy_([copied for copied, _ in pairs], [tensor for _, tensor in pairs])
        self._buffers, self._versions = tensors, versions

    def _copy_buffers(self, tensors: Sequence[Tensor | None]) -> None:
        """Copies all buffers for the first time, or after buffers were added, replaced or resized."""
        self._places = [(module, name) for module in self._with_buffers for name in module._buffers]
        self._copies = [None if tensor is None or is_lazy(tensor) else _copied(tensor) for tensor in tensors]
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor, copied in zip(tensors, self._copies, strict=True):
            if tensor is not None and copied is not None and _is_uncounted(tensor):
                # In one kernel each.
                copies, uncounted = groups.setdefault((tensor.device, tensor.dtype), ([], []))
                copies.append(copied)
                uncounted.append(tensor)
        self._uncounted = list(groups.values())

    def _restore_buffers(self) -> None:
        entries = zip(self._places, self._buffers, self._versions, self._copies, strict=True)
        with torch.no_grad():
            for (module, name), tensor, version, copied in entries:
                module._buffers[name] = tensor
                if tensor is None or copied is None:
                    continue
                if _is_uncounted(tensor) or tensor._version != version:
                    written_back(tensor, copied)

    def _remove_new_hooks(self) -> None:
        for module in self._model.modules():
            for name in _HOOKS:
                _remove_from(vars(module).get(name), self._next_hook)
        for parameter in self._parameters:
            for name in _TENSOR_HOOKS:
                _remove_from(getattr(parameter, name, None), self._next_hook)


class Attributes:
    """The attributes of one object, with copies of the containers and small tensors among them; `skip` are names of
    attributes that do not belong to the state. `since` has the attributes as they were earlier, and shares the copies
    of tensors that have not changed.
    """

    _kept: AbstractSet[str]
    _copied_names: list[str]
    # fmt: off
    __slots__ = ("_containers", "_copied_names", "_earlier", "_kept", "_kinds", "_names", "_tensors", "owner", "values")
    # fmt: on

    def __init__(self, owner: Any, skip: AbstractSet[str] = frozenset(), *, since: Attributes | None = None) -> None:
        self.owner = owner
        self.values = vars(owner).copy()
        self._containers: dict[int, tuple[Any, Any]] = {}  # Container and its entries, or their number, by its id
        # Tensor, its version, and its copy, by its id; or an array.
        self._tensors: dict[int, tuple[Any, int, Any]] = {}
        self._earlier = {} if since is None else since._tensors
        # Looking at each attribute takes longer than comparing all names and classes with the earlier ones.
        self._names, self._kinds = list(self.values), list(map(type, self.values.values()))
        if since is not None and self._names == since._names and self._kinds == since._kinds:
            self._kept, self._copied_names = since._kept, since._copied_names
        else:
            self._kept = _kept_of(owner, self.values) | skip
            # A class is hashable, though a metaclass may hide it from mypy.
            kinds: Any = self._kinds
            self._copied_names = [
                name
                for name, kind in zip(self._names, kinds, strict=True)
                if kind not in _CONSTANTS and _is_copied(kind) and name not in self._kept
            ]
            if type(owner).__name__ == _LOGGED:
                self._copied_names = []
        if isinstance(owner, dict):
            self._containers[id(owner)] = owner, dict(owner)
        for name in self._copied_names:
            self._add(self.values[name], _DEPTH)
        self._earlier = {}

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if value.numel() <= _COPIED_NUMBERS and not isinstance(value, nn.Parameter):
                self._tensors[id(value)] = self._copied(value)
        elif isinstance(value, np.ndarray):
            if value.size <= _COPIED_NUMBERS and value.flags.writeable and _is_number(value):
                self._tensors[id(value)] = value, -1, value.copy()
        elif depth and isinstance(value, list | deque | dict | set):
            if len(value) <= _LONGEST:
                # `copy.copy` of a class derived from dict takes ten times as long.
                self._containers[id(value)] = value, dict(value) if isinstance(value, dict) else list(value)
            elif isinstance(value, list | dict):
                # Such as a vocabulary. Copying it in each step would take longer than the step.
                self._containers[id(value)] = value, len(value)
            for entry in () if len(value) > _WALKED else value.values() if isinstance(value, dict) else value:
                self._add(entry, depth - 1)

    def _copied(self, tensor: Tensor) -> tuple[Tensor, int, Tensor]:
        version = _version(tensor)
        kept = self._earlier.get(id(tensor))
        if kept is not None and kept[0] is tensor and kept[1] == version >= 0:
            return kept
        return tensor, version, tensor.detach().clone()

    def note(self, changes: Changes, place: Place, state: tuple[Any, Any, Any], depth: int = _DEPTH) -> None:
        """Adds the changes at a place to `changes`; `state` is the owner of the value there, the value before, and the
        value.
        """
        owner, earlier, value = state
        if _is_number(value):
            if self._has_changed(earlier, value):
                changes.numbers[place] = (owner, self._before(earlier), _detached(value))
                if value is earlier and value.ndim:
                    changes.lasting.add(place)
            return
        if not depth or not isinstance(value, list | deque | dict | set):
            return
        if isinstance(value, dict):
            before = self._entries_of(earlier if isinstance(earlier, dict) else None, {})
        else:
            # A new list has the entries of this batch.
            before = self._entries_of(value, []) if value is earlier else []
        if before is None:
            return
        known = before if isinstance(before, int) else len(before)
        if isinstance(value, dict):
            is_long = isinstance(before, int)
            for name, entry in islice(value.items(), known if is_long else 0, None):
                before_entry = None if is_long else before.get(name)
                self.note(changes, (*place, name), (value, before_entry, entry), depth - 1)
            return
        if isinstance(value, list):
            new = value[known:]
            for position, entries in enumerate(() if isinstance(before, int) else zip(before, value, strict=False)):
                self.note(changes, (*place, position), (value, *entries), depth - 1)
        elif isinstance(value, deque):
            new = _newest(value, before)
        else:
            new = list(value.difference(before))
        if new:
            changes.appended[place] = (owner, value, new)

    def _has_changed(self, earlier: Any, value: Any) -> bool:
        """Tells whether a value is another than an earlier one, or was changed in place."""
        if value is not earlier:
            return True
        tensor, version, copied = self._tensors.get(id(value), (None, 0, None))
        if tensor is not value or tensor is None:
            return False
        return not np.array_equal(value, copied) if isinstance(value, np.ndarray) else _version(tensor) != version

    def _before(self, value: Any) -> Any:
        """Returns a value as it was when it was read: the copy of a tensor that may have been changed in place."""
        tensor, _, copied = self._tensors.get(id(value), (None, 0, None))
        return copied if tensor is value and tensor is not None else value

    def _entries_of(self, container: Any, new: Any) -> Any:
        """Returns the entries of a container when it was read, or their number where there were many; None where it was
        not looked at; and `new` where there was none.
        """
        if container is None:
            return new
        known, entries = self._containers.get(id(container), (None, None))
        return entries if known is container else None

    def at(self, path: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Returns the owner, the name and the earlier value of an attribute, or of a container's entry. A path is the
        attribute's name, and keys of containers; the last key may be a position in a tuple.
        """
        owner, name, value = self.owner, path[0], self.values.get(path[0])
        for key in path[1:]:
            if isinstance(value, tuple):
                break
            entries = self._entries_of(value, {})
            is_there = key in entries if isinstance(entries, dict) else isinstance(entries, list) and key < len(entries)
            owner, name, value = value, key, entries[key] if is_there else None
        return owner, name, value

    def restore(self) -> None:
        """Restores them."""
        state = vars(self.owner)
        for name in state.keys() - self.values.keys() - self._kept:
            del state[name]
        state.update((name, value) for name, value in self.values.items() if name not in self._kept)
        for container, earlier in self._containers.values():
            if isinstance(earlier, int):
                while len(container) > earlier:
                    container.popitem() if isinstance(container, dict) else container.pop()
                continue
            container.clear()
            container.extend(earlier) if isinstance(container, list | deque) else container.update(earlier)
        for tensor, version, values in self._tensors.values():
            if isinstance(tensor, np.ndarray):
                np.copyto(tensor, values)
            elif _version(tensor) != version or version < 0:
                tensor.detach().copy_(values)


class _OptimizerState:
    """The state of an optimizer and the settings of its groups, with copies on the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._entries = [
            (parameter, {name: (value, _host_copy(value) if isinstance(value, Tensor) else deepcopy(value))
                         for name, value in state.items()})
            for parameter, state in optimizer.state.items()
        ]  # fmt: skip
        self._groups = [{name: deepcopy(value) for name, value in group.items() if name != "params"}
                        for group in optimizer.param_groups]  # fmt: skip

    def restore(self) -> None:
        """Restores them."""
        self._optimizer.state.clear()
        for parameter, entries in self._entries:
            state = self._optimizer.state[parameter] = {}
            for name, (value, copied) in entries.items():
                if isinstance(value, Tensor) and copied is not None:
                    value.copy_(copied)
                state[name] = value if isinstance(value, Tensor) else copied
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings)


def _kept_of(owner: Any, values: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of attributes that do not belong to the state of an object."""
    kept = _METRIC_PARTS if "_reductions" in values else _MODULE_PARTS
    # Lightning's collection of logged values is a dict with attributes, and refers to the batch.
    return kept | {"batch"} if isinstance(owner, dict) else kept


@dataclass(frozen=True)
class Changes:
    """What a part of a batch has changed.

    Attributes:
        numbers: Numbers, tensors and tuples of them, by their places: owner, earlier value, value.
        appended: Lists, deques and sets with new entries, by their places: owner, container, new entries.
        lasting: Places of tensors and arrays with dimensions that were changed in place, and of buffers: later steps
            may need them, as they need a queue of earlier outputs.
    """

    numbers: dict[Place, tuple[Any, Any, Any]] = field(default_factory=dict)
    appended: dict[Place, tuple[Any, Any, list[Any]]] = field(default_factory=dict)
    lasting: set[Place] = field(default_factory=set)


class PartStates:
    """The attributes and metrics that the parts of a batch begin and end with."""

    def __init__(self, state: StepState, samples: int) -> None:
        self._state, self._samples = state, samples
        self._metrics: dict[int, list[Attributes]] = {}  # Before each part, by its first sample
        self._changes: dict[tuple[int, int], Changes] = {}

    def begin(self, start: int, *, metrics_too: bool = True) -> None:
        """Restores the attributes that the batch began with, and the metrics that an earlier try of the part has
        updated.
        """
        self._state.restore_attributes()
        if start in self._metrics:
            for metric in self._metrics[start]:
                metric.restore()
        elif metrics_too:
            self._metrics[start] = self._state.read_metrics()

    def take_rows(self, start: int, stop: int, kinds: Kinds) -> None:
        """Gives attributes that have a row for each sample the rows of the part, which begins."""
        for owner, name, value in self._state.kept_rows(kinds, slice(start, stop), self._samples):
            if isinstance(owner, dict | list):
                owner[name] = value
            else:
                setattr(owner, name, value)

    def end(self, start: int, stop: int) -> None:
        """Notes what the part has changed."""
        self._changes[start, stop] = self._state.changes()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The samples that were computed whole, and their two parts; empty: none were."""
        return whole_and_parts(self._changes)

    def learn(self, kinds: Kinds) -> None:
        """Learns from samples that were computed whole and in two parts, which kinds of values these are."""
        if not (spans := self.spans):
            return
        sizes, changes = [stop - start for start, stop in spans[1:]], [self._changes[span] for span in spans]
        for place in _places(one.appended for one in changes):
            new = [one.appended[place][2] if place in one.appended else [] for one in changes]
            kinds.learn_entries(("list", *place), new[0], new[1:], sizes)
        for place in _places(one.numbers for one in changes):
            records = [one.numbers.get(place) for one in changes]
            _, earlier, value = next(record for record in records if record)
            # A count of something that a part does not have.
            unchanged = 0 * value if earlier is None and not isinstance(value, tuple) else earlier
            values = [record[2] if record else unchanged for record in records]
            whole, *of_parts, earlier = map(_as_tensor, (*values, earlier))
            kinds.learn((ATTRIBUTE, *place), whole, of_parts, sizes, earlier)

    def not_made(self, kinds: Kinds) -> str:
        """Names a tensor, which later steps may need, that no arithmetic makes of its parts; empty: there is none."""
        places = _places(dict.fromkeys(one.lasting) for one in self._changes.values())
        return next((repr(place[-1]) for place in places if kinds.by_place.get((ATTRIBUTE, *place)) == ()), "")

    def join(self, weights: Mapping[int, float], kinds: Kinds) -> None:
        """Gives attributes, and the entries of containers, the values of the whole batch; `weights` has the parts'
        weights in the batch, by their first samples. Raises UnjoinableError where tensors cannot be joined.
        """
        if len(weights) < 2:
            return
        spans = list(pairwise([*weights, self._samples]))
        sizes, changes = [stop - start for start, stop in spans], [self._changes[span] for span in spans]
        combination = Combination(sizes, list(weights.values()), kinds)
        for place in _places(one.appended for one in changes):
            records = [one.appended.get(place) for one in changes]
            owner, container, _ = next(record for record in reversed(records) if record)
            new = [record[2] if record else [] for record in records]
            _set_entries(container, len((records[-1] or (None, None, []))[2]), combination, new, place)
            _set_changed(owner, place[-1], container)
        for place in _places(one.numbers for one in changes):
            self._join_number(place, [one.numbers.get(place) for one in changes], combination)

    def _join_number(
        self, place: Place, records: Sequence[tuple[Any, Any, Any] | None], combination: Combination
    ) -> None:
        owner, before, last = next(record for record in reversed(records) if record)
        earlier, value = _as_tensor(before), _as_tensor(last)
        known = [position for position, record in enumerate(records) if record or is_change(earlier, value)]
        values = [earlier if (record := records[position]) is None else _as_tensor(record[2]) for position in known]
        joined = combination.of(known).combine(values, (ATTRIBUTE, *place), earlier)
        if isinstance(last, np.ndarray | np.generic) and isinstance(joined, Tensor):
            numbers = joined.numpy().astype(last.dtype)
            joined = numbers if isinstance(last, np.ndarray) else numbers[()]
        _set_changed(owner, place[-1], joined)


def _places(by_place: Iterable[Mapping[Place, Any]]) -> list[Place]:
    """Returns the places of all mappings, each once."""
    return list(dict.fromkeys(place for one in by_place for place in one))


def _set_entries(
    container: Any, number: int, combination: Combination, new: Sequence[Sequence[Any]], place: Place
) -> None:
    """Replaces the last `number` entries of a list or deque by the entries of the whole batch; a set has all entries
    of the parts.
    """
    if isinstance(container, set):
        container.update(*new)
        return
    for _ in range(number):
        container.pop()
    container.extend(combination.entries(new, ("list", *place)))


def _set_changed(owner: Any, name: Any, value: Any) -> None:
    """Sets an attribute, or an entry, to its value after the whole batch; a tensor that was changed in place stays
    itself.
    """
    if isinstance(owner, dict):
        current = owner.get(name, _MISSING)
    elif isinstance(owner, list):
        if name >= len(owner):
            return
        current = owner[name]
    else:
        current = getattr(owner, name, _MISSING)
    if current is value:
        return
    if isinstance(current, Tensor) and isinstance(value, Tensor) and current.shape == value.shape:
        with torch.no_grad():
            current.copy_(value)
    elif isinstance(current, np.ndarray) and isinstance(value, np.ndarray) and current.shape == value.shape:
        np.copyto(current, value)
    elif isinstance(owner, dict | list):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _newest(values: deque[Any], earlier: Sequence[Any]) -> list[Any]:
    """Returns the entries that were appended to a deque, which may have dropped its oldest ones meanwhile."""
    entries = list(values)
    most = min(len(entries), len(earlier))
    # None of them may be left.
    return next(entries[kept:] for kept in range(most, -1, -1)
                if all(map(is_, entries[:kept], earlier[len(earlier) - kept :])))  # fmt: skip


def _is_number(value: Any) -> bool:
    """Tells whether an attribute is a number, a tensor, an array, or a tuple of tensors, as the state of an LSTM is."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(entry, Tensor) for entry in value)
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in _NUMERIC
    return isinstance(value, Tensor | int | float) and not isinstance(value, bool | nn.Parameter)


def _detached(value: Any) -> Any:
    """Returns a value as it is now, without its graph."""
    if isinstance(value, tuple):
        return tuple(entry.detach().clone() for entry in value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if isinstance(value, Tensor) else value


def _as_tensor(value: Any) -> Any:
    """Returns an array, or a number, of NumPy as a tensor, other values as they are."""
    if isinstance(value, float) or not isinstance(value, np.ndarray | np.generic):
        return value
    return torch.from_numpy(np.asarray(value).astype(np.int64 if value.dtype.kind in "iu" else np.float64))


def _is_uncounted(tensor: Tensor) -> bool:
    """Tells whether a buffer may change though PyTorch does not count it: the kernels of batch norms write running
    statistics so. Inference tensors count no change.
    """
    return tensor.is_inference() or (tensor.is_floating_point() and tensor.numel() <= _COPIED_NUMBERS)


def _host_copy(tensor: Tensor) -> Tensor | None:
    """Copies a tensor to the host; None where its class has no such copy."""
    with suppress(RuntimeError, NotImplementedError):
        return None if is_lazy(tensor) else tensor.detach().to("cpu", copy=True)
    return None


def _are_same(tensor: Tensor, copied: Tensor) -> bool:
    """Tells whether a tensor has the numbers of its copy; where they cannot be compared, it is taken to have them."""
    with suppress(RuntimeError, NotImplementedError):
        numbers = tensor.detach().to("cpu")
        return torch.equal(numbers, copied) or bool(((numbers == copied) | (numbers.isnan() & copied.isnan())).all())
    return True


def _copied(tensor: Tensor) -> Tensor:
    to_host = tensor.nbytes > _DEVICE_BYTES
    return tensor.detach().to("cpu", copy=True) if to_host else tensor.detach().clone()


def _objects_in(owner: Any, package: str, depth: int) -> Iterator[Any]:
    """Yields the objects of the user's own classes among the attributes of an object."""
    for value in vars(owner).values():
        is_of_user = type(value).__module__.partition(".")[0] == package and hasattr(value, "__dict__")
        if is_of_user and not isinstance(value, nn.Module | type):
            yield value
            if depth > 1:
                yield from _objects_in(value, package, depth - 1)


def _remove_from(hooks: Any, first: int) -> None:
    for number in [number for number in hooks or () if isinstance(number, int) and number >= first]:
        del hooks[number]


@lru_cache
def _is_copied(kind: type) -> bool:
    """Tells whether values of a class may change in place."""
    return issubclass(kind, Tensor | np.ndarray | list | deque | dict | set)


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Returns the counts of changes in place of some tensors."""
    try:
        return [-1 if tensor is None else tensor._version for tensor in tensors]
    except (RuntimeError, ValueError):
        # Inference tensors count none, nor do the parameters of lazy modules.
        return [_version(tensor) for tensor in tensors]


def _version(tensor: Tensor | None) -> int:
    """Returns the count of a tensor's changes in place; -1 where PyTorch counts none."""
    return -1 if tensor is None or is_lazy(tensor) or tensor.is_inference() else tensor._version


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object for the block."""
    earlier = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if earlier is not _MISSING:
            setattr(owner, name, earlier)
        elif name in vars(owner):
            delattr(owner, name)


@contextmanager
def replaced_method(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of one object for the block, in its class: the object can be copied and pickled meanwhile."""
    native = getattr(type(owner), name)

    @wraps(native)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return value(*arguments, **options) if self is owner else native(self, *arguments, **options)

    with replaced(type(owner), name, method):
        yield
