"""The state that a pass begins with: random generators, buffers and Python objects, which are read before a
micro-batch, and restored bit by bit for another try of it; and the modules and leaves that a pass runs through.
"""

from __future__ import annotations

import copyreg
import ctypes
import operator
import random
import struct
import sys
import threading
from argparse import Namespace
from array import array
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from can_train.memory.out_of_memory import is_out_of_memory

# Of a list or dictionary that a module hands on. What is larger or deeper is looked up, and has no state of a pass.
_MOST_ITEMS: Final = 1000
_MOST_ITEMS_IN_ALL: Final = 10_000
_DEEPEST: Final = 2
_MOST_HELD_BYTES: Final = 2**16  # A larger tensor, which only the module keeps, is not kept for its sake
_MT19937_BYTES: Final = 4 * (624 + 1)  # 624 words of state, and the position in them
_COMPARED_BYTES: Final = 4 * (16 + 1)  # The position and the 16 words next to it: they differ wherever two states do


class HostGenerators:
    """Python's and numpy's global generators, as they are now; `since` is an earlier reading, whose states are shared
    where they have not changed.
    """

    # Read for every micro-batch: `capture_generators` converts to types that can be saved, which takes longer.

    def __init__(self, *, since: HostGenerators | None = None) -> None:
        # Reading a whole state takes longer than all the rest: an earlier one is shared where no word has changed.
        self._python_words = _python_words()
        is_same = since is not None and self._python_words[0] and self._python_words == since._python_words
        self._python: Any = since._python if since is not None and is_same else random.getstate()
        self._numpy_words = _numpy_words()
        # No word changes when a second normal number is used that was drawn with an earlier one, where the state holds
        # such a number.
        if since is not None and self._numpy_words and self._numpy_words == since._numpy_words and not since._numpy[3]:
            self._numpy: Any = since._numpy
        else:
            self._numpy = np.random.get_state(legacy=True)  # noqa: NPY002 - models may draw from the global generator

    def is_shared_with(self, since: HostGenerators) -> bool:
        """Tells whether nothing was drawn since an earlier reading, which this reading was given."""
        return self._python is since._python and self._numpy is since._numpy

    def restore(self) -> None:
        """Restores them, bit by bit."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002


class Generators:
    """The generators of the host and of a device, as they are now; `since` is an earlier reading, whose states are
    shared where they have not changed.
    """

    def __init__(self, device: torch.device, *, since: Generators | None = None) -> None:
        self._device = device
        self._of_host: HostGenerators = HostGenerators(since=None if since is None else since._of_host)
        self._torch = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Restores them, bit by bit."""
        self._of_host.restore()
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class _Attributes(NamedTuple):
    """The attributes of a module."""

    owner: dict[str, Any]  # The module's own dictionary
    values: dict[str, Any]  # A copy of it, whole: choosing among the attributes takes longer
    containers: Sequence[Any]  # Attributes whose contents are state, too
    tensors: Sequence[str]  # Names of the attributes that are tensors


class PythonState:
    """Attributes of modules, and the contents of lists, dictionaries, sets and generators among them and among the
    arguments of a pass, as they are now.

    Args:
        parts: The modules.
        arguments: The arguments.
        since: An earlier state: of modules whose attributes are the same objects by now, less is looked through.
        keeps_large: Whether lists and dictionaries with large tensors are state.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        arguments: Sequence[Any],
        *,
        since: PythonState | None = None,
        keeps_large: bool = True,
    ) -> None:
        self._parts, self._keeps_large = parts, keeps_large
        self._attributes: list[_Attributes]
        if since is not None and since._parts is parts:
            self._attributes = [_attributes_of(known.owner, known) for known in since._attributes]
        else:
            # PyTorch's own modules have no state beside their buffers.
            owners = [vars(part) for part in parts if not type(part).__module__.startswith("torch.")]
            self._attributes = [_attributes_of(owner) for owner in owners]
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._items = 0  # of all containers
        for each in self._attributes:
            if each.containers:
                self._read(each.containers)
        self._read([value for value in arguments if type(value) in _STATES])

    def _read(self, values: Sequence[Any], depth: int = 0) -> None:
        for value in values:
            kind = type(value)
            if id(value) in self._contents:
                continue
            if kind not in _SEQUENCES:
                self._contents[id(value)] = value, _STATES[kind].read(value)
                continue
            self._items += len(value)
            if len(value) > _MOST_ITEMS or self._items > _MOST_ITEMS_IN_ALL:
                continue
            items = value.values() if isinstance(value, dict) else value
            if not self._keeps_large and any(isinstance(item, Tensor) and _is_large(item) for item in items):
                # As a list of feature maps: each pass makes others.
                continue
            self._contents[id(value)] = value, _STATES[kind].read(value)
            if depth < _DEEPEST and (nested := [item for item in items if type(item) in _STATES]):
                self._read(nested, depth + 1)

    def without_results(self) -> PythonState:
        """Returns the state without the graphs of earlier passes, and without their large tensors, which would stay on
        the device: the results of a pass that has failed are cut off from its graph in their place.
        """
        for each in self._attributes:
            for name in each.tensors:
                value = each.values[name]
                if _is_large(value):
                    each.values[name] = _CUT_OFF
                elif _is_result(value):
                    each.values[name] = value.detach()
        return self

    def for_since(self) -> None:
        """Lets go of tensors and contents: the state is only an earlier one from now on."""
        for each in self._attributes:
            each.values.update(dict.fromkeys(each.tensors, _FORGOTTEN))
        self._contents.clear()

    def forget_results(self) -> None:
        """Forgets tensors of an earlier pass that this pass has replaced, as modules do that keep their last result for
        somebody to look at: they would stay on the device until the backward pass.
        """
        for owner, values, _, tensors in self._attributes:
            for name in tensors:
                if _is_result(values[name]) and owner.get(name) is not values[name]:
                    values[name] = _FORGOTTEN

    def now(self) -> PythonState:
        """Returns the state that the same modules and objects have now."""
        state = PythonState((), ())
        state._attributes = [each._replace(values=each.owner.copy()) for each in self._attributes]
        state._contents = {key: (held, _STATES[type(held)].read(held)) for key, (held, _) in self._contents.items()}
        return state

    def restore(self) -> None:
        """Puts the state back."""
        for owner, values, *_ in self._attributes:
            for name in owner.keys() - values.keys() - _OF_EVERY_MODULE:
                # Code that was put there is no state: a compiled call, or a wrapped one.
                if not callable(owner[name]) or isinstance(owner[name], Tensor):
                    del owner[name]
            for name in values.keys() - _OF_EVERY_MODULE:
                if (value := values[name]) is _CUT_OFF:
                    result = owner.get(name)
                    if isinstance(result, Tensor) and result.grad_fn is not None:
                        owner[name] = result.detach()
                elif value is not _FORGOTTEN:
                    owner[name] = value
        for held, contents in self._contents.values():
            _STATES[type(held)].write(held, contents)


def _attributes_of(owner: dict[str, Any], known: _Attributes | None = None) -> _Attributes:
    values = owner.copy()
    if known is not None and _are_same(values.values(), known.values.values()):
        return _Attributes(owner, values, known.containers, known.tensors)
    containers = [value for name, value in values.items() if type(value) in _STATES and name not in _OF_EVERY_MODULE]
    return _Attributes(owner, values, containers, [name for name, value in values.items() if isinstance(value, Tensor)])


def _is_large(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes > _MOST_HELD_BYTES


def _is_result(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _are_same(held: Collection[Any], contents: Collection[Any]) -> bool:
    return len(held) == len(contents) and all(map(operator.is_, held, contents))


# Nothing is written where nothing has changed: another thread may read meanwhile.


def _write_list(held: list[Any], contents: list[Any]) -> None:
    if not _are_same(held, contents):
        held[:] = contents


def _write_dict(held: dict[Any, Any], contents: dict[Any, Any]) -> None:
    if not (_are_same(held, contents) and _are_same(held.values(), contents.values())):
        held.clear()
        held.update(contents)


def _write_set(held: set[Any], contents: set[Any]) -> None:
    if held != contents:
        held.clear()
        held.update(contents)


def _write_deque(held: deque[Any], contents: list[Any]) -> None:
    if not _are_same(held, contents):
        held.clear()
        held.extend(contents)


def _write_bits(held: np.random.Generator, state: Any) -> None:
    held.bit_generator.state = state


@dataclass(frozen=True)
class _Kind:
    """Reads and writes the state of objects of one type."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


_SEQUENCES: Final = (list, dict, OrderedDict, defaultdict, set, deque)
_STATES: Final[dict[type, _Kind]] = {
    list: _Kind(list, _write_list),
    **dict.fromkeys((dict, OrderedDict, defaultdict), _Kind(dict, _write_dict)),
    set: _Kind(set, _write_set),
    deque: _Kind(list, _write_deque),
    torch.Generator: _Kind(torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _Kind(random.Random.getstate, random.Random.setstate),
    np.random.Generator: _Kind(lambda held: deepcopy(held.bit_generator.state), _write_bits),
    np.random.RandomState: _Kind(np.random.RandomState.get_state, np.random.RandomState.set_state),
}
_GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
# Classes whose methods read and write the contents of containers, also of derived ones.
_CONTAINERS: Final = (OrderedDict, dict, list, set, deque)
_ARRAYS: Final = (np.ndarray, bytearray, array)
_OPEN: Final = (SimpleNamespace, Namespace, UserDict, UserList)  # Of Python's own, but with attributes of their user
_OF_THREADS: Final = frozenset({"_thread", "threading", "_queue", "queue", "concurrent", "multiprocessing"})
# Modules whose threads run none of the user's functions: of a progress bar and of a notebook. Cells run elsewhere.
_RUN_OWN_CODE: Final = frozenset({
    "tqdm._monitor", "IPython.core.history", "ipykernel.control", "ipykernel.heartbeat", "ipykernel.iostream",
    "ipykernel.parentpoller", "ipykernel.shellchannel",
})  # fmt: skip
_OF_HEAP: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: Python's own classes do not have it
_DEEPEST_HELD: Final = 6  # Objects inside of each other that a function is looked through for
_MOST_COPIED_BYTES: Final = 2**26  # Of small tensors that a function holds, all together
_MOST_BYTES_IN_MODULES: Final = 2**24  # Of a tensor that a module keeps, such as the counts of a metric
# Values without a state of their own.
_PLAIN: Final = (int, float, complex, str, bytes, type(None), ModuleType, torch.device, torch.dtype, np.generic,
                 BuiltinFunctionType)  # fmt: skip
_LIBRARIES: Final = frozenset({"torch", "numpy", "can_train"})  # Beside Python's own: their objects have no such state
_OF_EVERY_MODULE: Final = frozenset({*vars(nn.Module()), "forward", "_compiled_call_impl"})
_FORGOTTEN: Final = object()
_CUT_OFF: Final = object()


class Snapshot:
    """The generators of the host and of a device, and a model's buffers and attributes, as they are now; `since` is an
    earlier one of the same model, which shares everything that has not changed.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, since: Snapshot | None = None) -> None:
        earlier = None if since is None else since._generators
        self._generators: Generators = Generators(device, since=earlier)
        self._modules: list[nn.Module] = modules_of(model) if since is None else since._modules
        # Modules may collect losses in a list: those of a failed pass are no losses of the next one.
        python_then = None if since is None else since._python
        self._python: PythonState = PythonState(self._modules, (), since=python_then, keeps_large=False)
        self._python.without_results()
        # A module may replace a buffer rather than write into it, so module and name are kept beside the tensor. A
        # buffer that is None may be made in the first pass.
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in self._modules
            for name, buffer in module._buffers.items()
        ]
        self._has_buffers = True

    @property
    def copies(self) -> list[Tensor]:
        """Copies of the buffers, which take memory on the model's device."""
        return [value for *_, value in self._buffers if value is not None]

    def release(self) -> None:
        """Frees the copies of the buffers; the rest is for `since`."""
        self._buffers.clear()
        self._python.for_since()
        self._has_buffers = False

    def restore(self) -> None:
        """Restores everything, bit by bit."""
        self._generators.restore()
        self._python.restore()
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = None if buffer is None or value is None else written_back(buffer, value)
        known = {(id(module), name) for module, name, *_ in self._buffers}
        # A pass may have registered buffers: the next one must find none.
        for module in self._modules if self._has_buffers else ():
            for name in [name for name, _ in module._buffers.items() if (id(module), name) not in known]:
                delattr(module, name)


class HeldState:
    """State of objects, and of functions: of their closures and globals, of the objects that they are methods of, and
    of objects inside of those. Calls of the functions can be undone as far as they changed attributes of objects and
    classes, lists, dictionaries and sets, generators, modules (their buffers and attributes, metrics among them), and
    tensors and arrays that are not large. Gradients are no such state, and weights only where they are not trained.

    An object is left alone, with all that is in it, where it holds an iterator or a file, whose place cannot be put
    back; while other threads run, also where it holds a lock, a thread or a queue.

    Args:
        held: The functions and objects.
        model: A model; its modules' attributes are state, too.
        device: The device of the generator.
        left_out: Objects that are not looked into.

    Attributes:
        modules: The modules that are held, and the model.
        is_whole: Whether all that was met can be put back, and after `restore`, whether it was. Large tensors and
            arrays are data, and need not be.
        has_moved: Whether, after `restore`, trained weights or large tensors have changed, which are not put back.
    """

    def __init__(
        self, held: Iterable[Any], model: nn.Module, device: torch.device, *, left_out: Iterable[Any] = ()
    ) -> None:
        self._known: dict[int, Any] = {id(one): one for one in left_out}  # Objects, which keep their ids
        self._puts: list[Callable[[], object]] = []  # Each puts back a single object
        self._bytes = 0  # Of copies of tensors and arrays
        own = threading.current_thread()
        self._others_run = any(thread is not own and _may_change_objects(thread) for thread in threading.enumerate())
        self.modules: list[nn.Module] = []
        self.is_whole, self.has_moved = True, False
        try:
            self._read_all((model, *held), device)
        except BaseException:
            self._forget()
            raise

    def _read_all(self, held: Iterable[Any], device: torch.device) -> None:
        self._visit_all(held, 0)
        inner = {id(part) for module in self.modules for part in modules_of(module) if part is not module}
        outer = [module for module in self.modules if id(module) not in inner]
        # Last, since the copies of weights that are not trained may take all room.
        self._visit_all((parameter for module in outer for parameter in parameters_of(module)), 0)
        self._puts += [Snapshot(module, device).restore for module in outer]

    def _visit_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            # An object may be anybody's, and fail where it is looked at.
            try:
                self._visit(value, depth)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.is_whole = False

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._known:
            return
        if depth > _DEEPEST_HELD or len(self._known) >= _MOST_ITEMS_IN_ALL:
            self.is_whole &= _is_of_library(type(value))
            return
        # Before it has been read: it may hold itself.
        self._known[id(value)] = value
        if isinstance(value, Tensor):
            self._read_tensor(value)
        elif isinstance(value, nn.Module):
            self._read_module(value, depth)
        elif isinstance(value, Dataset):
            return
        elif isinstance(value, _ARRAYS):
            self._read_array(value)
        elif isinstance(value, FunctionType):
            self._read_function(value, depth)
        elif isinstance(value, MethodType):
            self._visit_all((value.__self__, value.__func__), depth)
        elif isinstance(value, partial):
            self._visit_all((value.func, *value.args, *value.keywords.values()), depth)
        elif type(value) in _GENERATORS:
            kind = _STATES[type(value)]
            self._puts.append(partial(kind.write, value, kind.read(value)))
        elif self._is_alone(value):
            self.is_whole = False
        elif isinstance(value, type):
            self._read_class(value, depth)
        else:
            self._read_object(value, depth)

    def _is_alone(self, value: Any) -> bool:
        """Tells whether an object has a place that cannot be put back, or may belong to other threads."""
        kind = type(value)
        if isinstance(value, (nn.Module, Dataset, type)) or _root_of(kind) == "can_train":
            return False
        if any(hasattr(kind, name) for name in ("__next__", "read")):
            return True
        return self._others_run and (isinstance(value, threading.Thread) or _root_of(kind) in _OF_THREADS)

    def _has_room(self, size_bytes: int) -> bool:
        """Counts the bytes of a copy where it may be made: functions may hold whole data sets."""
        if size_bytes > _MOST_BYTES_IN_MODULES or self._bytes + size_bytes > _MOST_COPIED_BYTES:
            return False
        self._bytes += size_bytes
        return True

    def _read_tensor(self, tensor: Tensor) -> None:
        if tensor.is_inference() or tensor.layout is not torch.strided or tensor.is_meta or is_lazy(tensor):
            return
        copied = not tensor.requires_grad and self._has_room(tensor.nbytes)
        self._puts.append(partial(self._put_tensor, tensor, _version_of(tensor), tensor.clone() if copied else None))

    def _put_tensor(self, tensor: Tensor, version: tuple[int, int], value: Tensor | None) -> None:
        if value is None:
            self.has_moved |= _version_of(tensor) != version
            self.is_whole &= not self.has_moved
        # Writing through `.data` moves no version.
        elif tensor.shape != value.shape or not torch.equal(tensor, value):
            with torch.no_grad():
                written_back(tensor, value)

    def _read_array(self, array: Any) -> None:
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            return
        if self._has_room(memoryview(array).nbytes if not isinstance(array, np.ndarray) else array.nbytes):
            self._puts.append(partial(self._put_array, array, copy(array)))

    def _put_array(self, array: Any, numbers: Any) -> None:
        if not isinstance(array, np.ndarray):
            if array != numbers:
                array[:] = numbers
        elif array.shape != numbers.shape:
            self.is_whole = False
        # Of objects, the bytes are their addresses.
        elif array.tobytes() != numbers.tobytes():
            array[...] = numbers

    def _read_module(self, module: nn.Module, depth: int) -> None:
        self.modules.append(module)
        for part in modules_of(module):
            own = vars(part)
            self._visit_all([own[name] for name in own.keys() - _OF_EVERY_MODULE], depth + 1)
            self._visit_all([type(part)], depth + 1)

    def _read_function(self, function: FunctionType, depth: int) -> None:
        if _is_of_library(function):
            return
        owner, names = function.__globals__, dict.fromkeys(_names_in(function.__code__))
        held = {name: owner[name] for name in names if name in owner}
        self._puts.append(partial(self._put_names, held, lambda: owner, owner.__setitem__, None))
        self._visit_all(held.values(), depth + 1)
        for cell in function.__closure__ or ():
            # The cell of a name that has no value yet is empty.
            with suppress(ValueError):
                held = {"cell_contents": cell.cell_contents}
                now = partial(lambda cell: {"cell_contents": cell.cell_contents}, cell)
                self._puts.append(partial(self._put_names, held, now, partial(setattr, cell), None))
                self._visit_all(held.values(), depth + 1)
        self._visit_all(function.__defaults__ or (), depth + 1)

    def _read_class(self, kind: type, depth: int) -> None:
        if _is_of_library(kind):
            return
        now = partial(_values_in, kind)
        self._read_names(now, partial(type.__setattr__, kind), partial(type.__delattr__, kind), depth)
        self._visit_all(kind.__bases__, depth)

    def _read_object(self, value: Any, depth: int) -> None:
        kind, base = type(value), next((base for base in _CONTAINERS if isinstance(value, base)), None)
        if base is not None:
            items = _items_of(base, value)
            self._puts.append(partial(self._put_items, base, value, items))
            self._visit_all(items if len(items) <= _MOST_ITEMS else (), depth + 1)
        elif isinstance(value, tuple):
            self._visit_all(value if len(value) <= _MOST_ITEMS else (), depth + 1)
        if _is_of_library(kind) and not isinstance(value, _OPEN):
            return
        owner, slots = getattr(value, "__dict__", None), copyreg._slotnames(kind)  # type: ignore[attr-defined]
        if isinstance(owner, dict):
            self._read_names(lambda: owner, owner.__setitem__, owner.__delitem__, depth)
        elif (
            base is None and not isinstance(value, tuple) and not any("__slots__" in vars(one) for one in kind.__mro__)
        ):
            # Of an extension, which keeps its state to itself.
            self.is_whole = False
        if slots:
            now = lambda: {name: getattr(value, name) for name in slots if hasattr(value, name)}  # noqa: E731
            self._read_names(now, partial(object.__setattr__, value), partial(object.__delattr__, value), depth)
        self._visit_all([kind], depth)

    def _read_names(
        self,
        now: Callable[[], Mapping[str, Any]],
        put: Callable[[str, Any], object],
        remove: Callable[[str], object],
        depth: int,
    ) -> None:
        """Reads the attributes of an object; `now` returns them."""
        held = dict(now())
        if any(map(self._is_alone, held.values())):
            self.is_whole = False
            return
        self._puts.append(partial(self._put_names, held, now, put, remove))
        self._visit_all(held.values(), depth + 1)

    def _put_names(
        self,
        held: Mapping[str, Any],
        now: Callable[[], Mapping[str, Any]],
        put: Callable[[str, Any], object],
        remove: Callable[[str], object] | None,
    ) -> None:
        values = dict(now())
        if remove is not None:
            for name in values.keys() - held.keys():
                if not self._is_alone(values[name]):
                    self._try(partial(remove, name))
        for name, value in held.items():
            other = values.get(name, _FORGOTTEN)
            if other is not value and not self._is_alone(value) and not self._is_alone(other):
                self._try(partial(put, name, value))

    def _put_items(self, base: Any, held: Any, items: list[Any]) -> None:
        now = _items_of(base, held)
        if _are_same(now, items):
            return
        if (
            self._others_run
            and len(now) > len(items)
            and (_are_same(now[: len(items)], items) or _are_same(now[len(now) - len(items) :], items))
        ):
            # Another thread may have added the items, as one that reads ahead.
            self.is_whole = False
        elif base is list:
            list.__setitem__(held, slice(None), items)
        else:
            base.clear(held)
            if issubclass(base, dict):
                for key, value in zip(items[::2], items[1::2], strict=True):
                    base.__setitem__(held, key, value)
            else:
                (set.update if base is set else deque.extend)(held, items)

    def _try(self, put: Callable[[], object]) -> None:
        try:
            put()
        except Exception:  # noqa: BLE001 - a loop must not end for it
            self.is_whole = False

    def restore(self) -> None:
        """Puts the state back. An object that cannot be written to is left as it is."""
        for put in self._puts:
            self._try(put)
        self._forget()

    def _forget(self) -> None:
        """Frees the copies: they refer to this object, and would take memory until the next garbage collection."""
        self._puts.clear()
        self._known.clear()


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function, and in functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _may_change_objects(thread: threading.Thread) -> bool:
    """Tells whether a thread may run functions of the user: not the threads of PyTorch, whose backward passes run in
    threads that Python has not started.
    """
    # A class that is derived from Thread has no target, but a `run` of its own.
    code = getattr(thread, "_target", None) or type(thread)
    is_own = _root_of(code) in ("torch", "can_train") or getattr(code, "__module__", "") in _RUN_OWN_CODE
    return not isinstance(thread, threading._DummyThread) and not is_own


def _items_of(base: Any, held: Any) -> list[Any]:
    """Returns the items of a container of this class, or of one derived from it; keys and values of a dictionary."""
    return [one for pair in base.items(held) for one in pair] if issubclass(base, dict) else list(base.__iter__(held))


def _values_in(kind: type) -> dict[str, Any]:
    """Returns the attributes of a class that are no methods."""
    named = ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
    return {name: value for name, value in named if not hasattr(type(value), "__get__")}


def _version_of(tensor: Tensor) -> tuple[int, int]:
    """Returns numbers that change where a tensor is written to, or takes other memory."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # Of a class that keeps its numbers in other tensors
        return tensor._version, 0


def _root_of(held: Any) -> str:
    return str(getattr(held, "__module__", "")).partition(".")[0]


def _is_of_library(held: Any) -> bool:
    """Tells whether a class or a function is Python's own, or of a library that has no state of a loop."""
    root = _root_of(held)
    if root == "builtins":
        # Classes of extensions in Rust say that they are Python's own.
        return not getattr(held, "__flags__", 0) & _OF_HEAP
    return root in _LIBRARIES or root in sys.stdlib_module_names


def written_back(buffer: Tensor, value: Tensor) -> Tensor:
    """Gives a buffer its earlier value, and the shape of that value where a pass has resized it; returns the buffer."""
    if buffer.shape != value.shape:
        buffer.resize_(value.shape)
    # Numbers of an expanded tensor share memory, which PyTorch refuses to write several numbers to.
    distinct = buffer
    for dim, stride in enumerate(buffer.stride() if buffer.layout is torch.strided else ()):
        if stride == 0 and buffer.shape[dim] > 1:
            distinct, value = distinct.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    distinct.copy_(value)
    return buffer


def buffer_shapes(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Returns the shapes of the buffers of a model by name; None of a buffer that is None."""
    # Buffers of a scripted module cannot be iterated over in another way.
    return {
        f"{path}.{name}".lstrip("."): None if buffer is None else tuple(buffer.shape)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
    }


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], made: Collection[str] = ()) -> None:
    """Loads the weights and buffers of a model into a new one.

    Args:
        model: The new model, which no pass has run through.
        weights: The weights and buffers, by name.
        made: Names of buffers that modules have registered or resized in a pass. Buffers that are None in the new
            model need no name here.

    Raises:
        RuntimeError: The model has other weights.
    """
    with suppress(StopIteration):
        device = next(model.parameters()).device
        for name, value in weights.items():
            path, _, leaf = name.rpartition(".")
            try:
                module = model.get_submodule(path)
            except AttributeError:
                continue
            buffer = module._buffers[leaf] if leaf in module._buffers else None  # noqa: SIM401 - a scripted module's have no `get`
            if buffer is not None and name in made and buffer.shape != value.shape:
                buffer.resize_(value.shape)
            elif buffer is None and (leaf in module._buffers or (name in made and not hasattr(module, leaf))):
                module.register_buffer(leaf, torch.empty_like(value, device=device))
    model.load_state_dict(weights)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model in the order of `model.modules()`, which takes ten times as long."""
    modules: dict[int, nn.Module] = {}
    left = [model]
    while left:
        module = left.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            left += [child for child in reversed(module._modules.values()) if child is not None]
    return list(modules.values())


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a model in the order of `model.parameters()`, as quickly."""
    parameters = [parameter for module in modules_of(model) for parameter in module._parameters.values()]
    return list({id(parameter): parameter for parameter in parameters if parameter is not None}.values())


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that a backward pass from a loss gives gradients to."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Of nodes, only those that accumulate a gradient have this.
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]


def _python_words() -> tuple[bytes, float | None]:
    """Returns words of Python's global generator that change with every number that is drawn, and its second normal
    number; no words where they cannot be read from memory.
    """
    generator: Any = random._inst  # The generator behind the module's functions
    return _python_memory(generator).tobytes(), generator.gauss_next


# A view is read several times faster than `ctypes.string_at`, whose code has left the processor's caches by each step.
@lru_cache(maxsize=1)
def _python_memory(generator: Any) -> memoryview:
    """Returns the memory of a generator's position and of the words behind it, as long as it lives; none where Python
    keeps them elsewhere.
    """
    offset, kind = object.__basicsize__, type(generator)
    if kind is not random.Random or kind.__basicsize__ < offset + _MT19937_BYTES:
        return memoryview(b"")
    known = random.Random(1)
    *words, position = known.getstate()[1]
    in_memory = ctypes.string_at(id(known) + offset, _MT19937_BYTES)
    if in_memory != struct.pack("=625I", position, *words):
        return memoryview(b"")
    return _memory_at(id(generator) + offset)[:_COMPARED_BYTES]


def _numpy_words() -> bytes:
    """Returns words of numpy's global generator that change with every number that is drawn; empty for a generator
    other than numpy's own.
    """
    return _numpy_memory(np.random.mtrand.get_bit_generator()).tobytes()


@lru_cache(maxsize=1)
def _numpy_memory(generator: Any) -> memoryview:
    if not isinstance(generator, np.random.MT19937):
        return memoryview(b"")
    # The position is behind the words.
    return _memory_at(int(generator.ctypes.state_address))[-_COMPARED_BYTES:]


def _memory_at(address: int) -> memoryview:
    """Returns the memory of a Mersenne Twister at an address."""
    return memoryview((ctypes.c_char * _MT19937_BYTES).from_address(address)).cast("B")
