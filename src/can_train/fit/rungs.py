"""Rungs: how far a training step goes to fit on its device. On every rung the gradient is the same.

On rung 0 batches are split. On rung 1 chosen modules are computed again in the backward pass, in place of keeping their
activations. On rung 2 the tensors that are still saved for the backward pass wait in the memory of the host. On rung 3
the state of the optimizer waits there between its steps (`offloaded_state.py`).
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from can_train.errors import ConfigError, first_sentence, nearest_first
from can_train.fit.repetitions import CHANGED_INPUT, Repetitions, StateBefore, forward_again, physical
from can_train.io.units import counted
from can_train.memory.cuda_operators import is_on_device, offloading, on_host
from can_train.memory.host import HOST_SHARE, room_bytes
from can_train.memory.meters import copy_stream
from can_train.memory.out_of_memory import error_chain
from can_train.memory.sharded_tensors import shard_of

if TYPE_CHECKING:
    from can_train.fit.factor_rule import RememberedLimits

OFFLOADED_LEAST_BYTES: Final = 4096  # Smaller tensors stay on the device: a copy costs more time than it saves memory
# Copies to the host that may be under way. The device keeps the tensors until then, on every device alike, so that a
# prediction on a simulated GPU holds.
_COPIES_AHEAD: Final = 2
_LEAST_SEGMENTED: Final = 4  # Modules of a sequence that is recomputed in segments
_SWITCHES: Final = ("activation", "gradient")  # Kinds of checkpointing, as transformers 5 and 4 name their switch
_KNAPSACK_UNITS: Final = 1000  # Parts of the room for activations: units of packing modules
_LEAST_SECONDS: Final = 1e-9
_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """How the activations of a step, and the state of its optimizer, are kept.

    Attributes:
        recompute: Names of the modules that the backward pass computes again; `net[0:4]` are four modules of a
            sequence. A model that checkpoints itself, as models of `transformers` do, does so by its own switch.
        offload: Whether saved tensors wait in the memory of the host.
        offload_optimizer: Whether the optimizer's state waits there.
        ranks: Ranks that weights, gradients and optimizer state are sharded over; 1: each rank has all of them.
    """

    recompute: tuple[str, ...] = ()
    offload: bool = False
    offload_optimizer: bool = False
    ranks: int = 1

    def __bool__(self) -> bool:
        """Whether anything is computed otherwise than by splitting alone."""
        return self != SPLIT_ALONE

    def goes_further(self, other: Rung) -> bool:
        """Whether a step takes less memory on this rung than on another one, in one way at least, and more in none."""
        ways, others = self._ways, other._ways
        return ways != others and all(way >= of_other for way, of_other in zip(ways, others, strict=True))

    @property
    def _ways(self) -> tuple[int, int, int]:
        return len(self.recompute), self.offload, self.offload_optimizer

    @property
    def name(self) -> str:
        """The rung's name, as in `--fit`."""
        if self.ranks > 1:
            return "shard"
        if self.offload_optimizer:
            return "offload-all" if self.offload else "offload-optimizer"
        if self.offload:
            return "offload"
        return "recompute" if self.recompute else "split"

    @property
    def timed_as(self) -> str:
        """The rung in records of times, which differ with the number of modules that are computed again."""
        return f"{self.name}, {counted(len(self.recompute), 'module')}" if self.recompute else self.name

    def describe(self) -> str:
        """Writes the differences from a plain step, as a clause."""
        parts = []
        if self.ranks > 1:
            parts.append(f"weights, gradients and optimizer state are sharded over {self.ranks} ranks")
        if self.recompute:
            verb = "are" if len(self.recompute) > 1 else "is"
            parts.append(f"{_named(self.recompute)} {verb} computed again in the backward pass")
        if self.offload:
            parts.append("saved tensors wait on the host")
        if self.offload_optimizer:
            parts.append("the optimizer's state waits on the host")
        return _listed(parts) or "batches are split"


def _listed(parts: Sequence[str]) -> str:
    return ", and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])


SPLIT_ALONE: Final = Rung()


def rung_of(remembered: RememberedLimits) -> Rung:
    """Returns the rung that an earlier run found its limits on."""
    return Rung(recompute=remembered.recompute, offload=remembered.offload, ranks=remembered.ranks,
                offload_optimizer=remembered.offload_optimizer)  # fmt: skip


def _named(names: Sequence[str]) -> str:
    """Names modules by their lists: `12 modules (layers.*)`."""
    lists: dict[str, list[str]] = defaultdict(list)
    for name in names:
        head, _, last = name.rpartition(".")
        lists[f"{head}.*".removeprefix(".") if last.isdecimal() else name].append(name)
    return ", ".join(
        f"{len(inside)} modules ({pattern})" if len(inside) > 1 else inside[0] or "the model"
        for pattern, inside in lists.items()
    )


def rungs_of(  # noqa: PLR0913 - the model, the settings, and what the device and the optimizer allow
    model: nn.Module,
    fit: str,
    patterns: Sequence[str] = (),
    *,
    is_host: bool = False,
    ranks: int = 1,
    state_can_leave: bool = False,
) -> tuple[Rung, ...]:
    """Returns the rungs that a model may be computed on, in order of trial.

    Args:
        model: The model.
        fit: The setting, one of `CHOICES["fit"]`.
        patterns: Modules to recompute, by name or pattern; without any, all that can be.
        is_host: Whether the device is the host itself, where nothing can be offloaded.
        ranks: Ranks that weights, gradients and optimizer state are sharded over.
        state_can_leave: Whether the optimizer's state may wait on the host.

    Raises:
        ConfigError: A pattern names no module.
    """
    if ranks > 1:
        alone = rungs_of(model, fit, patterns, is_host=is_host, state_can_leave=state_can_leave)
        return tuple(replace(rung, ranks=ranks) for rung in alone)
    if fit in ("split", "off"):
        return (SPLIT_ALONE,)
    names = _matching(model, patterns) if patterns else tuple(candidates(model))
    recompute = Rung(recompute=names)
    if fit == "recompute":
        return (recompute,)
    rungs = (SPLIT_ALONE, *([recompute] if names else []))
    if is_host:
        return rungs if fit == "auto" else (SPLIT_ALONE,)
    rungs = (*rungs, Rung(recompute=names, offload=True))
    # The state is copied once a step, however many micro-batches it has: most steps lose more time on rung 2.
    without_state = [replace(rung, offload_optimizer=True) for rung in rungs] if state_can_leave else []
    rungs = (*rungs, *without_state)
    # A rung that is named computes as the plan would on it.
    return rungs if fit == "auto" else tuple(rung for rung in rungs if rung.name == fit)


def _matching(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = ", ".join(nearest_first(pattern, names)[:5])
            raise ConfigError("training.recompute names modules of the model", value=repr(pattern),
                              remedy=f"It has {near}" if near else "It has none")  # fmt: skip
        for name in matched:
            chosen |= dict.fromkeys(_called(model.get_submodule(name), name))
    # A module inside another one would be computed again twice.
    return tuple(name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen))


def _called(module: nn.Module, name: str) -> list[str]:
    """Returns the names of the modules inside a module that nobody calls, as a list of modules; else its own name."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [name]
    return [inner for key, child in module.named_children() for inner in _called(child, f"{name}.{key}")]


def candidates(model: nn.Module, *, by_switch: bool = True) -> Iterator[str]:
    """Yields the names of the modules that are worth recomputing: the outermost repeated blocks, models that have a
    switch of their own, and parts of long sequences; where there is none of these, modules with parts of their own.
    Without `by_switch`, the blocks of models that have a switch are named in place of these models.
    """
    yield from _candidates(model, "", by_switch=by_switch)


def _candidates(module: nn.Module, name: str, *, by_switch: bool) -> Iterator[str]:
    if by_switch and has_switch(module):
        yield name
        return
    kinds: dict[type[nn.Module], int] = defaultdict(int)
    for child in module.children():
        kinds[type(child)] += 1
    if _is_plain_sequence(module):
        yield from _segments(module, name)
        return
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        has_parts = any(True for _ in child.children()) or isinstance(child, nn.RNNBase)
        if not has_parts:
            continue
        is_repeated = kinds[type(child)] > 1 and not isinstance(child, _CONTAINERS)
        inside = [] if is_repeated else [*_candidates(child, path, by_switch=by_switch)]
        if inside or not _is_watched(child):
            yield from inside or [path]


def _is_plain_sequence(module: Any) -> bool:
    """Whether a module calls modules without parts, one after the other, with the result of the one before."""
    if type(module).forward is not nn.Sequential.forward or len(module) < _LEAST_SEGMENTED:
        return False
    return not any([*child.children()] for child in module)


def _segments(module: Any, name: str) -> Iterator[str]:
    """Cuts a sequence of N modules into about √N segments, whose inputs and one segment take the least memory."""
    # A module that stands in it twice counts twice.
    number = len(module)
    length, start = math.ceil(math.sqrt(number)), 0
    while start < number:
        stop = min(start + length, number)
        # A segment whose first module works in place would overwrite the input that it is computed again from.
        while stop < number and getattr(module[stop], "inplace", False):
            stop += 1
        yield f"{name}[{start}:{stop}]"
        start = stop


def _is_watched(module: nn.Module) -> bool:
    """Tells whether a user's hook is called with the outputs of a part: it would be called twice."""
    return any(part._forward_hooks for part in module.modules() if part is not module)


def has_switch(module: nn.Module) -> bool:
    """Whether a module checkpoints parts of itself when it is told to, as the models of `transformers` do."""
    return bool(getattr(module, "supports_gradient_checkpointing", False)) and any(
        callable(getattr(module, f"{kind}_checkpointing_enable", None)) for kind in _SWITCHES
    )


@contextmanager
def computed_on(
    rung: Rung,
    model: nn.Module,
    on_left: Callable[[int], object] = int,
    *,
    repetitions: Repetitions | None = None,
) -> Iterator[None]:
    """Computes the forward and backward passes in the block on a rung; the model is as it was after it.

    Args:
        rung: The rung.
        model: The model.
        on_left: Called with the bytes of each tensor that leaves for the host.
        repetitions: Compares modules that are computed again with their first pass; None: in this block.
    """
    repetitions = repetitions or Repetitions()
    segments: dict[str, list[slice]] = defaultdict(list)
    for name in rung.recompute:
        path, segment = _place_of(name)
        segments[path] += [] if segment is None else [segment]
    with ExitStack() as stack:
        if rung.offload:
            stack.enter_context(OffloadedActivations(model, on_left))
        for path, parts in segments.items():
            stack.enter_context(_recomputed(model.get_submodule(path), parts, repetitions))
        if segments or rung.offload:
            stack.enter_context(_without_functorch())
        with repetitions.counted(rung) if segments else nullcontext():
            yield


@contextmanager
def _without_functorch() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        rule = "Modules are not computed again, and tensors do not wait on the host, in a loss that calls torch.func"
        remedy = "Take torch.autograd.grad in its place, or let batches be split alone: --fit split, or fit='split'"
        raise ConfigError(rule, value=first_sentence(error), remedy=remedy) from error


def _place_of(name: str) -> tuple[str, slice | None]:
    """Returns the path of a module, and the segment of it that a name like `net[0:4]` means."""
    path, _, bounds = name.partition("[")
    start, _, stop = bounds.rstrip("]").partition(":")
    return path, slice(int(start), int(stop)) if bounds else None


def _recomputed(module: Any, segments: Sequence[slice], repetitions: Repetitions) -> AbstractContextManager[None]:
    if segments:
        return _forward_replaced(module, partial(_forward_in_segments, [*module], segments, repetitions))
    if has_switch(module):
        return _switched_on(module, repetitions)
    return _forward_replaced(module, partial(forward_again, [module], repetitions, module.forward))


@dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """A module that may be computed again: the bytes that it saves for the backward pass, and its time."""

    name: str
    saved_bytes: int
    seconds: float


def kept_modules(costs: Sequence[ModuleCost], room_bytes: float) -> set[str]:
    """Chooses the modules that need not be computed again: together they save no more than `room_bytes` for the
    backward pass, and computing them again would take the longest.
    """
    if room_bytes <= 0:
        return set()
    unit = room_bytes / _KNAPSACK_UNITS
    sizes = [math.ceil(cost.saved_bytes / unit) for cost in costs]
    best, chosen = np.zeros(_KNAPSACK_UNITS + 1), np.zeros((len(costs), _KNAPSACK_UNITS + 1), dtype=bool)
    for number, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        if size <= _KNAPSACK_UNITS:
            # Of modules that take no time that could be measured, those that save less stay.
            with_it = best[: len(best) - size] + max(cost.seconds, _LEAST_SECONDS)
            chosen[number, size:] = with_it > best[size:]
            best[size:] = np.maximum(best[size:], with_it)
    kept, room = set(), _KNAPSACK_UNITS
    for number in reversed(range(len(costs))):
        if chosen[number, room]:
            kept.add(costs[number].name)
            room -= sizes[number]
    return kept


def measure_modules(
    model: nn.Module, names: Sequence[str], forward: Callable[[], object], clock: Callable[[], float]
) -> tuple[list[ModuleCost], float]:
    """Runs a forward pass that saves nothing, and notes how much each module would have saved, and its time.

    Args:
        model: The model.
        names: Modules, as in `Rung.recompute`.
        forward: Runs the forward pass on the samples that are to be measured, and returns the loss.
        clock: Returns seconds, once the device has done its work.

    Returns:
        The costs of the modules, and the seconds of the whole pass.
    """
    try:
        return _measured_modules(model, names, forward, clock, keeps=False)
    except Exception as error:
        if not any(isinstance(link, _NothingKeptError) for link in error_chain(error)):
            raise
    # The loss has a backward pass of its own, as a penalty on a gradient has.
    return _measured_modules(model, names, forward, clock, keeps=True)


class _NothingKeptError(RuntimeError):
    """A backward pass asks for a tensor that was not kept."""


def _measured_modules(
    model: nn.Module, names: Sequence[str], forward: Callable[[], object], clock: Callable[[], float], *, keeps: bool
) -> tuple[list[ModuleCost], float]:
    storages = _Storages()
    measured = [_Measured(name, modules_of_segment(model, name), clock, storages) for name in names]
    resident = _resident_storages(model)
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        is_counted = tensor.layout is torch.strided and id(tensor.untyped_storage()) not in resident
        entry = _Saved()
        if is_counted and is_on_device(tensor):
            entry.storage, entry.num_bytes = storages.number(tensor), tensor.untyped_storage().nbytes()
            entry.inside = next((one.name for one in measured if one.is_running), None)
            saved.append(weakref.ref(entry))
        if keeps:
            with on_host():
                entry.device, entry.copy = tensor.device, tensor.detach().to("cpu", copy=True)
        return entry

    def unpack(entry: _Saved) -> Tensor:
        if entry.copy is None:
            raise _NothingKeptError
        return entry.copy.to(entry.device, copy=True)

    started = clock()
    with ExitStack() as stack:
        for one in measured:
            stack.enter_context(one.watched())
        stack.enter_context(saved_tensors_hooks(pack, unpack))
        # Operations may make nodes of a graph that they drop. As long as the loss is there, so is all that it needs.
        loss = forward()
        alive = [entry for reference in saved if (entry := reference()) is not None]
        costs = [one.cost(alive) for one in measured]
        del loss
    return costs, clock() - started


def _resident_storages(model: nn.Module) -> set[int]:
    tensors = (*map(shard_of, model.parameters()), *model.buffers(), *gathered_weights(model))
    return {id(tensor.untyped_storage()) for tensor in tensors}


def gathered_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights that a pass gathers from the shards of all ranks; between passes their storages are empty."""
    for module in model.modules():
        for one in sharded_parameters(module):
            # PyTorch makes it when the module is gathered for the first time.
            if hasattr(one, "_unsharded_param"):
                yield one._unsharded_param


def sharded_parameters(module: Any) -> list[Any]:
    """Returns PyTorch's objects for the parameters of a module that `fully_shard` was called with, in the order of the
    module's collectives; none for any other module.
    """
    if not hasattr(module, "_get_fsdp_state"):
        return []
    return [one for group in module._get_fsdp_state()._fsdp_param_groups for one in group.fsdp_params]


def modules_of_segment(model: nn.Module, name: str) -> list[nn.Module]:
    """Returns the module of a name, or the modules of a segment like `net[0:4]`."""
    path, segment = _place_of(name)
    module: Any = model.get_submodule(path)
    return [module] if segment is None else [*module][segment]


class _Storages:
    """Numbers storages. Their ids are given out again: a reference tells whether a storage is the same one."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._numbers = count()

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self._seen.get(id(storage))
        if known is None or known[0]() is not storage:
            known = self._seen[id(storage)] = weakref.ref(storage), next(self._numbers)
        return known[1]


@dataclass(eq=False)
class _Saved:
    """Stands for a tensor that a node of the graph would have saved, for as long as the node is there."""

    storage: int = -1
    num_bytes: int = 0
    inside: str | None = None  # Name of the module that saved it
    copy: Tensor | None = None  # On the host
    device: torch.device | None = None  # Of the tensor


class _Measured:
    """A module, or modules in a row, whose forward pass is watched."""

    def __init__(
        self, name: str, modules: Sequence[nn.Module], clock: Callable[[], float], storages: _Storages
    ) -> None:
        self.name, self._modules, self._clock, self._storages = name, modules, clock, storages
        self._seconds, self._started, self._depth = 0.0, 0.0, 0
        self._inputs: dict[int, int] = {}  # Bytes of each storage

    @property
    def is_running(self) -> bool:
        return self._depth > 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        hooks = [
            self._modules[0].register_forward_pre_hook(self._enter, with_kwargs=True),
            self._modules[-1].register_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        self._started = self._clock()
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._inputs[self._storages.number(tensor)] = tensor.untyped_storage().nbytes()

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        self._seconds += self._clock() - self._started

    def cost(self, alive: Sequence[_Saved]) -> ModuleCost:
        """Returns the bytes that are saved inside, less the inputs that computing again has to keep instead."""
        elsewhere = {one.storage for one in alive}
        inside = {one.storage: one.num_bytes for one in alive if one.inside == self.name}
        saved_bytes = sum(size for storage, size in inside.items() if storage not in self._inputs)
        kept_bytes = sum(size for storage, size in self._inputs.items() if storage not in elsewhere)
        return ModuleCost(name=self.name, saved_bytes=max(saved_bytes - kept_bytes, 0), seconds=self._seconds)


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            # Undoing a step may have removed it.
            module.__dict__.pop("forward", None)
        else:
            module.forward = before


@contextmanager
def _switched_on(module: Any, repetitions: Repetitions) -> Iterator[None]:
    kind = next(kind for kind in _SWITCHES if hasattr(module, f"{kind}_checkpointing_enable"))
    if getattr(module, f"is_{kind}_checkpointing"):
        yield
        return
    # Buffers are the model's own concern: it does not tell which of its parts a pass is of.
    settings = {"use_reentrant": False, "context_fn": lambda: StateBefore([], repetitions).contexts()}
    getattr(module, f"{kind}_checkpointing_enable")(**{f"{kind}_checkpointing_kwargs": settings})
    try:
        yield
    finally:
        getattr(module, f"{kind}_checkpointing_disable")()


def _forward_in_segments(
    modules: Sequence[nn.Module],
    segments: Sequence[slice],
    repetitions: Repetitions,
    /,
    input: Any,  # noqa: A002 - as in `nn.Sequential`
) -> Any:
    """Calls the modules of a sequence one after the other; the backward pass computes the segments again."""
    given, done = input, 0
    for segment in segments:
        given = _in_turn(modules[done : segment.start], given)
        given = forward_again(modules[segment], repetitions, partial(_in_turn, modules[segment]), given)
        done = segment.stop
    return _in_turn(modules[done:], given)


def _in_turn(modules: Sequence[nn.Module], given: Any) -> Any:
    for module in modules:
        given = module(given)
    return given


class OffloadedActivations(saved_tensors_hooks):
    """Keeps the tensors that are saved for the backward pass of a block in the memory of the host.

    On a GPU the copies run on a stream of their own, from and to pinned memory. The backward pass asks for the tensors
    in the reverse order, so that the next one is fetched while the device computes with the last one.
    """

    def __init__(self, model: nn.Module, on_left: Callable[[int], object] = int) -> None:
        super().__init__(self._pack, self._unpack)
        self._on_left = on_left
        # Without room on the host, tensors stay on the device.
        self._room_bytes = room_bytes(HOST_SHARE)
        # They are on the device in any case.
        self._resident = _resident_storages(model)
        self._packed: list[weakref.ref[_OffloadedStorage]] = []
        self._by_storage: dict[tuple[int, int, torch.dtype], weakref.ref[_OffloadedStorage]] = {}
        self._leaving: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._next: tuple[_OffloadedStorage, Tensor] | None = None

    def __exit__(self, *error: object) -> None:
        """Lets go of the tensors whose copies were under way."""
        super().__exit__(*error)
        self._let_go(0)
        self._by_storage.clear()
        self._packed.clear()
        self._next = None

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int] | tuple[_OffloadedStorage, _View]:
        if not self._can_leave(tensor):
            # The tensor itself would refer to the node that saves it, and that node to the tensor.
            return tensor.detach(), tensor._version
        view = _View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.is_conj(),
                     tensor.is_neg())  # fmt: skip
        tensor = physical(tensor.detach())
        whole = _whole_storage(tensor)
        is_shared = whole.nbytes <= 2 * tensor.nbytes
        if not is_shared:
            # A small view of a large tensor leaves alone.
            whole = tensor.contiguous().view(-1)
            view = replace(view, stride=torch.empty(tensor.shape, device="meta").stride(), offset=0)
        return self._offloaded(whole, tensor, is_shared=is_shared), view

    def _can_leave(self, tensor: Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.nbytes >= OFFLOADED_LEAST_BYTES
            and tensor.nbytes <= self._room_bytes
            and is_on_device(tensor)
            and not is_traceable_wrapper_subclass(tensor)
            and id(tensor.untyped_storage()) not in self._resident
        )

    def _offloaded(self, whole: Tensor, tensor: Tensor, *, is_shared: bool) -> _OffloadedStorage:
        """Returns the copy of a storage on the host, which views of the same storage have in common."""
        storage = tensor.untyped_storage()
        # An operation in place may change a tensor between two times that it is saved.
        key = id(storage), tensor._version, tensor.dtype
        known = self._by_storage.get(key)
        entry = known() if known is not None and is_shared else None
        if entry is not None and entry.source() is storage:
            return entry
        entry = _OffloadedStorage(self._leave(whole), whole.device, weakref.ref(storage), len(self._packed))
        self._packed.append(weakref.ref(entry))
        if is_shared:
            # The copy of a small view has no elements of other views.
            self._by_storage[key] = weakref.ref(entry)
        return entry

    def _leave(self, whole: Tensor) -> Tensor:
        """Copies a tensor to the host, while the device goes on."""
        self._room_bytes -= whole.nbytes
        self._on_left(whole.nbytes)
        stream = self._stream(whole)
        if stream is None:
            with offloading():
                copy, event = whole.detach().to("cpu", copy=True), None
        else:
            copy = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            stream.wait_stream(torch.cuda.current_stream(whole.device))
            with torch.cuda.stream(stream):
                copy.copy_(whole.detach(), non_blocking=True)
                event = stream.record_event()
        self._leaving.append((whole, event))
        self._let_go(_COPIES_AHEAD)
        return copy

    def _let_go(self, left: int) -> None:
        """Lets go of all tensors but the last ones; the device goes on once it has copied them."""
        while len(self._leaving) > left:
            whole, copied = self._leaving.popleft()
            if copied is not None:
                torch.cuda.current_stream(whole.device).wait_event(copied)

    def _unpack(self, packed: tuple[Tensor, int] | tuple[_OffloadedStorage, _View]) -> Tensor:
        offloaded, view = packed
        if isinstance(offloaded, Tensor):
            # PyTorch does not compare the versions of tensors that hooks save.
            if offloaded._version != view:
                shape = [*offloaded.shape]
                raise RuntimeError(f"A tensor of shape {shape} that was saved for backward has been {CHANGED_INPUT}")
            return offloaded
        self._let_go(0)
        assert isinstance(view, _View), "a storage has a view"
        return view.of(self._fetched(offloaded))

    def _fetched(self, entry: _OffloadedStorage) -> Tensor:
        """Returns a storage on the device, and begins to fetch the storage that was saved before it."""
        whole = entry.on_device()
        if whole is None:
            ready, self._next = self._next, None
            whole = ready[1] if ready is not None and ready[0] is entry else self._fetch(entry)
            self._await(whole, entry)
            entry.keep(whole)
            if entry.position and (before := self._packed[entry.position - 1]()) is not None:
                self._next = before, self._fetch(before)
        return whole

    def _fetch(self, entry: _OffloadedStorage) -> Tensor:
        whole = torch.empty_like(entry.copy, device=entry.device, pin_memory=False)
        stream = self._stream(whole)
        if stream is None:
            return whole.copy_(entry.copy)
        # Kernels that the device was given before may still use its memory.
        stream.wait_stream(torch.cuda.current_stream(whole.device))
        with torch.cuda.stream(stream):
            whole.copy_(entry.copy, non_blocking=True)
            entry.fetched = stream.record_event()
        return whole

    @staticmethod
    def _await(whole: Tensor, entry: _OffloadedStorage) -> None:
        if entry.fetched is not None:
            torch.cuda.current_stream(whole.device).wait_event(entry.fetched)

    @staticmethod
    def _stream(tensor: Tensor) -> torch.cuda.Stream | None:
        """Returns the stream of copies; None where there is no GPU behind a tensor."""
        is_gpu = tensor.device.type == "cuda" and torch.cuda.is_initialized()
        return copy_stream(tensor.device) if is_gpu else None


@dataclass(frozen=True)
class _View:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # In elements
    # PyTorch conjugates or negates the elements of such a view when they are read: the storage has other values.
    is_conj: bool
    is_neg: bool

    def of(self, whole: Tensor) -> Tensor:
        """Returns the view of a storage, whose elements `whole` has."""
        view = whole.as_strided(self.shape, self.stride, self.offset)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class _OffloadedStorage:
    """A storage whose copy is on the host."""

    def __init__(self, copy: Tensor, device: torch.device, source: weakref.ref[UntypedStorage], position: int) -> None:
        self.copy, self.device, self.source, self.position = copy, device, source, position
        self.fetched: torch.cuda.Event | None = None
        self._on_device: weakref.ref[Tensor] | None = None

    def on_device(self) -> Tensor | None:
        """Returns the storage where it is on the device, because a view of it is in use there."""
        return None if self._on_device is None else self._on_device()

    def keep(self, whole: Tensor) -> None:
        """Remembers the storage on the device for as long as a view of it is in use."""
        self._on_device = weakref.ref(whole)


def _whole_storage(tensor: Tensor) -> Tensor:
    """Returns all elements of the storage of a tensor, as one dimension."""
    numel = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((numel,), (1,), 0)
