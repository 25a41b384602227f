"""Records the allocations of a program in their order, each with its label: what it is for, and the module and the
operation that made it. A model of PyTorch's allocator replays them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

from can_train.memory.cuda_workspaces import CUBLAS, CUDNN, TENSORS, Capability
from can_train.memory.simulated.allocator import AllocatorSettings, CachingAllocator
from can_train.memory.simulated.gpu import StorageTracker

if TYPE_CHECKING:
    from can_train.memory.simulated.allocator import Block

CACHE_RELEASED: Final = -1
"""In place of an allocation's number: the cache is given back to the driver (`torch.cuda.empty_cache`)."""

WEIGHTS: Final = "weights"
GRADIENTS: Final = "gradients"
OPTIMIZER_STATE: Final = "optimizer state"
SAVED: Final = "saved activations"  # made in a forward pass, and alive when its backward pass begins
TEMPORARIES: Final = "temporaries"
WORKSPACES: Final = "workspaces"
BATCH: Final = "the batch's data"
DATA: Final = "data on the device"  # that live there from the first step to the last
ROUNDING: Final = "allocator rounding"
# Of a peak that small batches predict, whose allocations are not known.
FIXED: Final = "whatever the batch"
GROWING: Final = "growing with the batch"
KINDS: Final = (WEIGHTS, GRADIENTS, OPTIMIZER_STATE, SAVED, TEMPORARIES, WORKSPACES, BATCH, DATA, ROUNDING)
OUTSIDE: Final = "(outside modules)"

_UNLIMITED: Final = 2**50
_NO_TASK: Final = -1  # of autograd's engine: no backward pass runs


class Label(NamedTuple):
    """The use of an allocation."""

    kind: str
    module: str = ""  # dotted name; the class of the model for itself, and of a module that is not in it
    operation: str = ""  # of PyTorch, `mm`; the name of a parameter for its weights, gradient and optimizer state


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Bytes of a peak of one kind that one operation of a module made."""

    kind: str
    module: str
    operation: str
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class AllocationTrace:
    """The allocations of a program on a CUDA GPU, in order."""

    # (number of an allocation, its bytes); (the same number, 0) when it is freed; (CACHE_RELEASED, 0)
    events: Sequence[tuple[int, int]]
    workspaces: Mapping[int, str]  # number of an allocation to `CUBLAS` or `CUDNN`; all others are tensors
    labels: Mapping[int, Label] = field(default_factory=dict)  # by number
    assuming: Sequence[str] = ()  # classes of optimizers that read numbers of tensors without values

    def replay(
        self,
        allocator: CachingAllocator,
        kinds: Sequence[str] = (TENSORS, CUBLAS, CUDNN),
        blocks: dict[int, Block] | None = None,
    ) -> bool:
        """Repeats the allocations of these kinds with an allocator; returns whether all of them fitted. `blocks` of an
        earlier part of the program are added to, and freed where this part frees them.

        A workspace of cuDNN that does not fit is passed over: PyTorch then takes an algorithm that needs none.
        """
        blocks = {} if blocks is None else blocks
        for number, size in self.events:
            if number == CACHE_RELEASED:
                allocator.release_cached()
                continue
            kind = self.workspaces.get(number, TENSORS)
            if kind not in kinds:
                continue
            if not size:
                if (block := blocks.pop(number, None)) is not None:
                    allocator.free(block)
            elif (block := allocator.malloc(size)) is not None:
                blocks[number] = block
            elif kind != CUDNN:
                return False
        return True

    def parts(self, settings: AllocatorSettings) -> tuple[MemoryPart, ...]:
        """Returns the parts of the peak of allocated bytes, largest first. Their sum is the peak, to the byte."""
        sizes: Counter[Label] = Counter()
        allocated = 0
        for number, size, block_bytes in self._at_peak(settings):
            sizes[self.labels[number]] += size
            allocated += block_bytes
        sizes[Label(ROUNDING)] += allocated - sizes.total()
        ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
        return tuple(
            MemoryPart(kind=label.kind, module=label.module, operation=label.operation, num_bytes=size)
            for label, size in ordered
            if size
        )

    def _at_peak(self, settings: AllocatorSettings) -> Iterator[tuple[int, int, int]]:
        """Yields number, bytes, and bytes of the block of each allocation that is alive at the peak."""
        allocator, blocks = CachingAllocator(_UNLIMITED, settings=settings), dict[int, "Block"]()
        sizes: dict[int, tuple[int, int]] = {}
        peak, end = 0, 0
        for index, (number, size) in enumerate(self.events):
            if size:
                block = allocator.malloc(size)
                assert block is not None, "the device has no limit"
                blocks[number], sizes[number] = block, (size, block.size)
                if allocator.allocated_bytes > peak:
                    peak, end = allocator.allocated_bytes, index + 1
            elif number in blocks:
                allocator.free(blocks.pop(number))
        freed = {number for number, size in self.events[:end] if not size}
        for number, size in self.events[:end]:
            if size and number not in freed:
                yield number, *sizes[number]


class _Made(NamedTuple):
    """Where an allocation was made."""

    phase: str
    module: str
    operation: Any  # an operator of PyTorch, or a kernel's name
    keeps: bool  # whether autograd may keep it: no backward pass, or one whose graph is kept


_FORWARD: Final = "forward"
_RECOMPUTED: Final = "recomputed"  # a forward pass inside a backward pass
_BACKWARD: Final = "backward"
_OPTIMIZER: Final = "optimizer"
_MOVED: Final = "moved"  # to the device


class Labels:
    """Follows which module is computed, and which optimizer steps, and labels allocations.

    In a backward pass it is the module whose forward pass made the node of autograd's graph. Nodes are known by their
    sequence numbers, which each thread counts by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {
            id(module): name.replace("_orig_mod.", "").removesuffix("_orig_mod") or type(model).__name__
            for name, module in model.named_modules()
        }
        self._parameters: dict[int, tuple[str, str]] = {}  # module and leaf of the name
        self._model = model
        # By thread: modules that are computed, innermost last, with the backward pass that they run in.
        self._stacks: dict[int, list[tuple[str, int]]] = {}
        self._nodes: dict[tuple[int, int], tuple[str, str]] = {}  # thread and sequence number to module and operation
        self._optimizers: list[str] = []  # that step now
        self._in_graph = ""  # module whose operation a compiled graph computes now
        self._last_task = _NO_TASK
        self._backward_starts: list[int] = []  # numbers of events
        self._made: dict[int, _Made] = {}
        self._marks: dict[int, Label] = {}

    def _read_parameters(self, model: nn.Module) -> None:
        for module in model.modules():
            for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    self._parameters.setdefault(id(tensor), (self._names[id(module)], leaf))

    def _name_weights(self, model: nn.Module, number_of: Callable[[Tensor], Iterable[int]]) -> None:
        self._read_parameters(model)
        for tensor in [*model.parameters(), *model.buffers()]:
            self._mark(WEIGHTS, number_of(tensor), self._parameters[id(tensor)])

    def add(self, beside: nn.Module, number_of: Callable[[Tensor], Iterable[int]]) -> None:
        """Adds a module beside the model, whose submodules are named after its class."""
        for name, module in beside.named_modules(prefix=type(beside).__name__):
            self._names.setdefault(id(module), name)
        self._name_weights(beside, number_of)

    @contextmanager
    def following(self, number_of: Callable[[Tensor], Iterable[int]]) -> Iterator[None]:
        """Follows modules and optimizers during the block; `number_of` returns the allocations of a tensor."""
        self._name_weights(self._model, number_of)

        def before(optimizer: Optimizer, *_: Any) -> None:
            self._optimizers.append(type(optimizer).__name__)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._mark(GRADIENTS, number_of(parameter.grad), self._named(parameter, optimizer))

        def after(optimizer: Optimizer, *_: Any) -> None:
            self._optimizers.pop()
            for parameter, state in optimizer.state.items():
                for tensor in tree_iter(state):
                    if isinstance(tensor, Tensor):
                        self._mark(OPTIMIZER_STATE, number_of(tensor), self._named(parameter, optimizer))

        def accumulated(parameter: Tensor) -> None:
            # A part of a batch has a gradient of its own, which no optimizer sees.
            if parameter.grad is not None and id(parameter) in self._parameters:
                self._mark(GRADIENTS, number_of(parameter.grad), self._parameters[id(parameter)])

        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad and parameter.is_leaf]
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(before),
                register_optimizer_step_post_hook(after),
                *(parameter.register_post_accumulate_grad_hook(accumulated) for parameter in trained),
            ):
                stack.callback(handle.remove)
            yield

    def _named(self, parameter: Any, optimizer: Optimizer) -> tuple[str, str]:
        return self._parameters.get(id(parameter), (type(optimizer).__name__, ""))

    def _mark(self, kind: str, numbers: Iterable[int], named: tuple[str, str]) -> None:
        for number in numbers:
            # A gradient that the optimizer keeps, or a tied weight, stays the first of them.
            self._marks.setdefault(number, Label(kind, *named))

    @property
    def optimizer(self) -> str:
        """The class of the optimizer that steps now; empty where none does."""
        return self._optimizers[-1] if self._optimizers else ""

    def in_graph(self, modules: Sequence[int]) -> None:
        """Follows the operations of a compiled graph, which calls no modules; `modules` are the ids of the modules that
        an operation is of, innermost last.
        """
        self._in_graph = next((self._names[each] for each in reversed(modules) if each in self._names), "")

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        name = self._names.get(id(module)) or type(module).__name__
        self._stacks.setdefault(get_ident(), []).append((name, torch._C._current_graph_task_id()))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._stacks[get_ident()].pop()

    def note(self, operation: Any) -> None:
        """Notes the node that autograd has just made for an operation."""
        if torch.is_grad_enabled():
            thread, number = get_ident(), torch._C._autograd._get_sequence_nr() - 1
            if (thread, number) not in self._nodes:
                self._nodes[thread, number] = (self._where()[1], operation._schema.name.rpartition("::")[2])

    def made(self, number: int, event: int, operation: Any, *, is_moved: bool) -> None:
        """Labels an allocation that an operation has made now; `event` is its place."""
        phase, module = self._where()
        module = self._in_graph or module
        if (task := torch._C._current_graph_task_id()) > self._last_task:
            self._last_task = task
            self._backward_starts.append(event)
        keeps = phase in (_FORWARD, _RECOMPUTED) or (phase == _BACKWARD and torch.is_grad_enabled())
        is_moved = is_moved and phase == _FORWARD
        self._made[number] = _Made(_MOVED if is_moved else phase, module, operation, keeps)

    def _where(self) -> tuple[str, str]:
        """Returns phase and module."""
        if self._optimizers:
            return _OPTIMIZER, self._optimizers[-1]
        task, stack = torch._C._current_graph_task_id(), self._stacks.get(get_ident())
        if stack and stack[-1][1] == task:
            return _FORWARD if task == _NO_TASK else _RECOMPUTED, stack[-1][0]
        if task == _NO_TASK:
            return _FORWARD, OUTSIDE
        return _BACKWARD, self._module_of(torch._C._current_autograd_node())

    def _module_of(self, node: Any) -> str:
        """Returns the module whose forward pass made a node."""
        if node is None:
            return OUTSIDE
        if (variable := getattr(node, "variable", None)) is not None:
            return self._parameters.get(id(variable), (OUTSIDE, ""))[0]
        number = node._sequence_nr()
        nodes = [made for thread in (*self._stacks, get_ident()) if (made := self._nodes.get((thread, number)))]
        if len(nodes) > 1:
            # Threads count alike, and only the operation tells their nodes apart.
            name = node.name().lower()
            nodes.sort(key=lambda made: not name.startswith(made[1].replace("_", "")))
        return nodes[0][0] if nodes else OUTSIDE

    def of(self, events: Sequence[tuple[int, int]]) -> dict[int, Label]:
        """Returns the labels of all allocations, by number."""
        freed = {number: index for index, (number, size) in enumerate(events) if not size}
        return {
            number: self._marks.get(number) or self._label(made, number, freed.get(number, len(events)))
            for number, made in self._made.items()
        }

    def _label(self, made: _Made, event: int, freed: int) -> Label:
        operation = made.operation or ""
        if not isinstance(operation, str):
            operation = operation._schema.name.rpartition("::")[2]
        kind = TEMPORARIES
        if made.phase == _MOVED:
            kind = BATCH
        elif made.keeps:
            following = bisect_right(self._backward_starts, event)
            survives = following < len(self._backward_starts) and freed > self._backward_starts[following]
            kind = SAVED if survives or made.phase == _RECOMPUTED else TEMPORARIES
        return Label(kind, made.module, operation)


class AllocationRecorder(StorageTracker[int]):
    """Records the allocations of storages, with labels."""

    def __init__(self, model: nn.Module, *, cuda: Capability | None, computes: bool = True) -> None:
        super().__init__(cuda=cuda, computes=computes)
        self.events: list[tuple[int, int]] = []
        self.workspaces: dict[int, str] = {}
        self._assuming: set[str] = set()
        self._labels = Labels(model)
        self._operation: Any = None
        self._is_moved = False
        self._kernel = ""  # that makes tensors now

    @property
    def trace(self) -> AllocationTrace:
        """The allocations so far."""
        self.free_dead()
        labels = self._labels.of(self.events)
        for number, library in self.workspaces.items():
            # cuBLAS keeps its own for all products.
            named = labels[number]._replace(kind=WORKSPACES)
            labels[number] = named if library != CUBLAS else Label(WORKSPACES, operation="cuBLAS")
        return AllocationTrace(
            events=self.events, workspaces=self.workspaces, labels=labels, assuming=sorted(self._assuming)
        )

    @contextmanager
    def following(self) -> Iterator[None]:
        """Labels allocations during the block."""
        with self._labels.following(self._numbers_of):
            yield

    def add_weights(self, beside: nn.Module) -> None:
        """Counts the weights and buffers of a module beside the model from now on."""
        self.seed_resident([*beside.parameters(), *beside.buffers()])
        self._labels.add(beside, self._numbers_of)

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        """Labels the tensors that are made inside the block as a kernel's."""
        before, self._kernel = self._kernel, name
        try:
            yield
        finally:
            self._kernel = before

    def in_graph(self, operation: Any, modules: Sequence[int]) -> None:
        """Labels the allocations that follow as a compiled graph's, by `Labels.in_graph`."""
        self._operation, self._is_moved = operation, False
        self._labels.in_graph(modules)

    def _numbers_of(self, tensor: Tensor) -> Iterator[int]:
        for storage in self._storages(tensor):
            if (tracked := self._find(storage)) is not None and tracked.allocation is not None:
                yield tracked.allocation

    def _run_counted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._labels.note(func)
        self._operation = self._kernel or func
        inputs = [value for value in args if isinstance(value, Tensor)]
        is_outside = bool(inputs) and not any(True for value in inputs for _ in self._numbers_of(value))
        # A kernel's results are computed on the host.
        self._is_moved = is_outside and not self._kernel
        return super()._run_counted(func, args, kwargs)

    def _allocate(self, size: int) -> int:
        number = len(self.events)
        self.events.append((number, size))
        self._labels.made(number, number, self._operation, is_moved=self._is_moved)
        return number

    def _free(self, allocation: int) -> None:
        self.events.append((allocation, 0))

    def put_on_gpu(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made outside the GPU as its own from now on."""
        self.seed_resident(tensors)

    def release_cached(self) -> None:
        """Gives the cache back to the driver."""
        self.free_dead()
        self.events.append((CACHE_RELEASED, 0))
