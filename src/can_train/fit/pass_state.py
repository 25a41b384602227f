"""The state that a pass begins with: random generators, buffers and Python objects, which are read before a
micro-batch, and restored bit by bit for another try of it; and the modules and leaves that a pass runs through.
"""

from __future__ import annotations

import ctypes
import operator
import random
import struct
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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
_DEEPEST_HELD: Final = 4  # Objects inside of each other that a function is looked through for
_MOST_COPIED_BYTES: Final = 2**26  # Of small tensors that a function holds, all together
_MOST_BYTES_IN_MODULES: Final = 2**24  # Of a tensor that a module keeps, such as the counts of a metric
# Values without a state of their own.
_PLAIN: Final = (int, float, complex, str, bytes, type(None), type, ModuleType, torch.device, torch.dtype, np.generic,
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
    """State of the objects that a function holds: of its closure and its globals, of the object that it is a method
    of, and of objects inside of those. A call of the function can be undone as far as it changed numbers, lists and
    dictionaries, generators, modules (their buffers and attributes, metrics among them), small tensors and plain
    objects. Weights and their gradients are no such state.

    Args:
        function: The function.
        model: A model; its modules' attributes are state, too.
        device: The device of the generator.

    Attributes:
        modules: The modules that the function holds, and the model.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module, device: torch.device) -> None:
        self._known: dict[int, tuple[Any, bool]] = {}  # Objects, which keep their ids, and whether their state is known
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._objects: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._arrays: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._bytes = 0  # Of copies of tensors and arrays
        self.modules: list[nn.Module] = []
        self._visit(model, 0)
        self._visit(function, 0)
        self._of_modules = [Snapshot(module, device) for module in self.modules]

    def _visit(self, value: Any, depth: int) -> bool:
        """Reads the state of an object; returns whether all of it can be put back."""
        if (known := self._known.get(id(value))) is not None:
            return known[1]
        # Until it has been read: it may hold itself.
        self._known[id(value)] = value, True
        if len(self._known) > _MOST_ITEMS_IN_ALL:
            return False
        understood = self._read(value, depth)
        self._known[id(value)] = value, understood
        return understood

    def _visit_all(self, values: Iterable[Any], depth: int) -> bool:
        # None is left out after the first whose state is not known.
        return min([self._visit(value, depth) for value in values], default=True)

    def _read(self, value: Any, depth: int) -> bool:
        if isinstance(value, _PLAIN):
            return True
        if isinstance(value, Tensor):
            self._read_tensor(value, _MOST_HELD_BYTES)
            return True
        if isinstance(value, nn.Module):
            self.modules.append(value)
            for part in modules_of(value):
                for name in vars(part).keys() - _OF_EVERY_MODULE:
                    if isinstance(attribute := vars(part)[name], Tensor):
                        self._read_tensor(attribute, _MOST_BYTES_IN_MODULES)
                    else:
                        self._visit(attribute, depth + 1)
            return True
        if isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_HELD_BYTES and value.flags.writeable and self._has_room(value.nbytes):
                self._arrays.append((value, value.copy()))
            return True
        if type(value) in _STATES:
            self._containers.append((value, _STATES[type(value)].read(value)))
        if depth >= _DEEPEST_HELD:
            return type(value) in _STATES
        if isinstance(value, (*_SEQUENCES, tuple)):
            items = value.values() if isinstance(value, dict) else value
            return len(value) > _MOST_ITEMS or self._visit_all(items, depth + 1)
        if isinstance(value, partial):
            return self._visit_all((value.func, *value.args, *value.keywords.values()), depth)
        if isinstance(value, MethodType):
            return self._visit_all((value.__self__, value.__func__), depth)
        if isinstance(value, FunctionType):
            return self._read_function(value, depth)
        return type(value) in _STATES or self._read_object(value, depth)

    def _read_tensor(self, tensor: Tensor, most_bytes: int) -> None:
        is_weight = tensor.requires_grad or tensor.is_inference()
        if is_weight or tensor.layout is not torch.strided or tensor.is_meta:
            return
        if tensor.nbytes <= most_bytes and self._has_room(tensor.nbytes):
            self._tensors.append((tensor, tensor._version, tensor.clone()))

    def _has_room(self, size_bytes: int) -> bool:
        """Counts the bytes of a copy, and tells whether it may be made: functions may hold whole data sets."""
        self._bytes += size_bytes
        return self._bytes <= _MOST_COPIED_BYTES

    def _read_function(self, function: FunctionType, depth: int) -> bool:
        if _is_of_library(function.__module__):
            return True
        names = dict.fromkeys(_names_in(function.__code__))
        held = {name: function.__globals__[name] for name in names if name in function.__globals__}
        known = {name: value for name, value in held.items() if self._visit(value, depth + 1)}
        self._globals.append((function.__globals__, known))
        for cell in function.__closure__ or ():
            # The cell of a name that has no value yet is empty.
            with suppress(ValueError):
                if self._visit(contents := cell.cell_contents, depth + 1):
                    self._cells.append((cell, contents))
        return self._visit_all(function.__defaults__ or (), depth + 1)

    def _read_object(self, value: Any, depth: int) -> bool:
        if _is_of_library(type(value).__module__) or not hasattr(value, "__dict__"):
            return False
        owner = vars(value)
        parts: tuple[list[Any], ...] = (self._objects, self._containers, self._tensors, self._arrays)
        lengths = [len(part) for part in parts]
        understood = self._visit_all(owner.values(), depth + 1)
        # The place in an iterator or in a file cannot be put back, nor may numbers and lists beside it then.
        if any(hasattr(type(one), name) for one in (value, *owner.values()) for name in ("__next__", "read")):
            for part, length in zip(parts, lengths, strict=True):
                del part[length:]
            return False
        if understood:
            self._objects.append((owner, dict(owner)))
        return understood

    def restore(self) -> None:
        """Puts the state back. An object that cannot be written to is left as it is."""
        for snapshot in self._of_modules:
            with suppress(Exception):
                snapshot.restore()
        for tensor, version, value in self._tensors:
            if tensor._version != version:
                with suppress(Exception), torch.no_grad():
                    written_back(tensor, value)
        for array, numbers in self._arrays:
            if array.shape == numbers.shape:
                with suppress(Exception):
                    array[...] = numbers
        for held, contents in self._containers:
            with suppress(Exception):
                _STATES[type(held)].write(held, contents)
        for cell, contents in self._cells:
            cell.cell_contents = contents
        for owner, values in self._globals:
            owner.update({name: value for name, value in values.items() if owner.get(name) is not value})
        for owner, values in self._objects:
            # One by one: another thread may look at the object meanwhile.
            for name in owner.keys() - values.keys():
                del owner[name]
            owner.update({name: value for name, value in values.items() if owner.get(name, _FORGOTTEN) is not value})


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function, and in functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_of_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
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

    def visit(module: nn.Module) -> None:
        if id(module) not in modules:
            modules[id(module)] = module
            for child in module._modules.values():
                if child is not None:
                    visit(child)

    visit(model)
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
