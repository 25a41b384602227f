"""A simulated GPU: tensors live on the CPU, and a model of CUDA's allocator counts the memory that they would take.
For predictions, products are drawn at random: they take the same memory, and nearly none of the time.
"""

import weakref
from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Generic, Self, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch._C import DispatchKey
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter, tree_map_only

from can_train.memory.cuda_operators import CUDA_OPERATORS, DeviceMode, composite
from can_train.memory.cuda_workspaces import AMPERE, Capability
from can_train.memory.sharded_tensors import shard_of
from can_train.memory.simulated.allocator import (
    EXPANDABLE,
    MIN_BLOCK_BYTES,
    AllocatorSettings,
    Block,
    CachingAllocator,
    no_contention,
    segment_bytes,
)
from can_train.memory.value_sizes import deciding_tensors

Allocation = TypeVar("Allocation")

_aten: Final = torch.ops.aten
_SHARDED: Final = "torch.distributed."  # Where the classes of tensors are that stand for shards
_SMALL_PRODUCT: Final = 2**16  # numbers of the operands, up to which a product takes less time than to make its shape
_DRAWN: Final = 2**16  # random numbers, which results without values repeat


@cache
def _drawn(dtype: torch.dtype) -> Tensor:
    """Returns random numbers of the standard normal distribution; the process's generator stays as it is."""
    return torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).to(dtype)


def _draw(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype)
    flat, numbers = made.as_strided((made.numel(),), (1,)), _drawn(dtype)
    whole = len(flat) - len(flat) % _DRAWN
    flat[:whole].view(-1, _DRAWN).copy_(numbers)
    flat[whole:].copy_(numbers[: len(flat) - whole])
    return made


def _draw_matrices(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Makes the product of the last two matrices, or batches of matrices, at random."""
    first, second = args[-2:]
    size = (*first.shape[:-1], second.shape[-1])
    return _draw(size, torch.empty(size, device="meta").stride(), first.dtype)


def _draw_like_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Makes results at random whose shapes the operation computes on meta tensors, which takes Python a millisecond."""
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return tree_map_only(Tensor, lambda shape: _draw(shape.size(), shape.stride(), shape.dtype), func(*args, **kwargs))


def _drop_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the inputs with a mask that drops none: its random numbers take longer than anything but products."""
    kept = args[0].clone()
    return (kept, torch.ones_like(kept, dtype=torch.bool)) if func is _aten.native_dropout.default else kept


Shortcut = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
# Products of matrices, convolutions, and layers that consist of products: nearly all of the time of a step. In half
# precision many processors have only a slow reference kernel for the gradient of a convolution's weights, which takes
# 80 times as long as in single.
_OF_PRODUCTS: Final[Mapping[Any, Shortcut]] = {
    **dict.fromkeys((_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default), _draw_matrices),
    _aten.convolution.default: _draw_like_meta,
    _aten.convolution_backward.default: _draw_like_meta,
    _aten._transformer_encoder_layer_fwd.default: _draw_like_meta,
    _aten._native_multi_head_attention.default: _draw_like_meta,
}
# These are replaced at any size: the backward operation reads what the forward operation has saved.
_IN_PAIRS: Final[Mapping[Any, Shortcut]] = {
    _aten.native_dropout.default: _drop_nothing,
    _aten.native_dropout_backward.default: _drop_nothing,
    _aten.mkldnn_rnn_layer.default: _draw_like_meta,
    _aten.mkldnn_rnn_layer_backward.default: _draw_like_meta,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _draw_like_meta,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _draw_like_meta,
}


def _shortcut(func: Any, args: tuple[Any, ...]) -> Shortcut | None:
    """Returns a quicker way to results that take the same memory; None where there is none."""
    if func not in _OF_PRODUCTS:
        return _IN_PAIRS.get(func)
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    is_dense = all(tensor.is_cpu and tensor.is_floating_point() and tensor.layout is torch.strided
                   and not tensor.is_nested for tensor in tensors)  # fmt: skip
    is_large = sum(tensor.numel() for tensor in tensors) > _SMALL_PRODUCT
    return _OF_PRODUCTS[func] if is_dense and is_large else None


@cache
def _composition(func: Any) -> Callable[..., Any] | None:
    """Returns the operations that an operation consists of on every device; None where it is a single one."""
    is_composed = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), DispatchKey.CompositeImplicitAutograd)
    return composite(func) if is_composed else None


class _TrackedStorage(weakref.ref[UntypedStorage], Generic[Allocation]):
    """A storage, its size in bytes, and its allocation; None for memory outside the device."""

    __slots__ = ("allocation", "is_drawn", "key", "size")
    key: int
    allocation: Allocation | None
    size: int
    is_drawn: bool  # Whether its numbers follow from random numbers that stand for a result


class _HostStorage(weakref.ref[UntypedStorage]):
    """A storage on the host that has left the device."""

    __slots__ = ("key", "size")
    key: int
    size: int


class StorageTracker(DeviceMode, Generic[Allocation]):
    """Counts the storages that operations make while it is active, until they die, then or later.

    Only memory on the CPU counts. A view of a storage that was made elsewhere, unseen and not given to
    `seed_resident`, is a view of memory outside the device: it takes nothing.
    """

    def __init__(self, *, cuda: Capability | None, computes: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = cuda  # of the GPU whose operators run; None: the CPU's own do
        self._computes = computes  # whether large products have values; if not, random numbers are in their place
        self.has_read_drawn = False  # Whether such numbers decided a size, or were read by the program
        self._has_drawn = False
        self._outside = False
        self._offloads = False
        self.peak_host_bytes = 0  # The most bytes of copies that have left the device at once
        self._host_bytes = 0
        self._on_host: dict[int, _HostStorage] = {}
        self._dead_on_host: deque[_HostStorage] = deque()
        self._tracked: dict[int, _TrackedStorage[Allocation]] = {}
        # Garbage may be collected at any moment, also while the books are being changed, so dead storages wait here
        # until the next operation or reading. A bound method of the deque does not keep the mode alive.
        self._dead: deque[_TrackedStorage[Allocation]] = deque()

    def __enter__(self) -> Self:
        """Counts from now on."""
        if self._cuda is not None:
            CUDA_OPERATORS.open(self._cuda)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Leaves the operations that follow alone."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._cuda is not None:
            CUDA_OPERATORS.close()

    @contextmanager
    def host(self) -> Iterator[None]:
        """Keeps tensors that are made inside the block outside the device, until `seed_resident` moves them there."""
        before, self._outside = self._outside, True
        try:
            yield
        finally:
            self._outside = before

    @contextmanager
    def offloading(self) -> Iterator[None]:
        """Counts tensors that are made inside the block as memory of the host, for as long as they live."""
        before, self._offloads = self._offloads, True
        try:
            with self.host():
                yield
        finally:
            self._offloads = before

    @property
    def host_bytes(self) -> int:
        """Bytes of copies that have left the device."""
        while self._dead_on_host:
            dead = self._dead_on_host.popleft()
            self._host_bytes -= dead.size
            if self._on_host.get(dead.key) is dead:
                del self._on_host[dead.key]
        return self._host_bytes

    def _has_left(self, storage: UntypedStorage) -> bool:
        known = self._on_host.get(id(storage))
        return known is not None and known() is storage

    def _count_on_host(self, tensor: Tensor) -> None:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        tracked = self._find(storage)
        if not self._has_left(storage) and (tracked is None or tracked.allocation is None):
            counted = _HostStorage(storage, self._dead_on_host.append)
            counted.key, counted.size = id(storage), storage.nbytes()
            self._on_host[counted.key] = counted
            self._host_bytes += counted.size
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    @abstractmethod
    def _allocate(self, size: int) -> Allocation:
        """Finds room for a storage of `size` bytes, or raises `torch.OutOfMemoryError`."""

    @abstractmethod
    def _free(self, allocation: Allocation) -> None:
        """Takes back the room of a storage."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation, then counts the storages of its results."""
        if types and any(kind.__module__.startswith(_SHARDED) for kind in types):
            # Its operations on shards come one by one, each for itself.
            return NotImplemented
        if torch.is_inference_mode_enabled():
            # Only there do composite operations (an LSTM, attention) arrive whole: taken apart, their temporaries show.
            composed = CUDA_OPERATORS.kernels.get(func) or _composition(func)
            if composed is not None:
                with self:
                    return composed(*args, **(kwargs or {}))
        return self._run_counted(func, args, kwargs or {})

    def _run_counted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operation as it is, then counts the storages of its results."""
        shortcut = None if self._computes else _shortcut(func, args)
        is_drawn = shortcut is not None
        if is_drawn:
            self._has_drawn = True
        elif self._has_drawn and not self.has_read_drawn:
            is_drawn = self._are_drawn(args)
            self.has_read_drawn = is_drawn and self._are_drawn(deciding_tensors(func, args))
        result = func(*args, **kwargs) if shortcut is None else shortcut(func, args, kwargs)
        self.free_dead()
        # A view is where the tensor is that it is of.
        if self._offloads and isinstance(result, Tensor) and not func.is_view:
            self._count_on_host(result)
        try:
            # Most operations return one tensor, and `tree_iter` is slow.
            for tensor in (result,) if isinstance(result, Tensor) else tree_iter(result):
                for storage in self._storages(tensor) if isinstance(tensor, Tensor) else ():
                    tracked = self._find(storage)
                    if tracked is None:
                        tracked = self._track(storage, outside=self._outside or _is_view(func, args, storage))
                    elif tracked.allocation is not None and tracked.size != storage.nbytes():
                        self._resize(tracked, storage.nbytes())
                    if is_drawn and tracked is not None:
                        tracked.is_drawn = True
        except torch.OutOfMemoryError as error:
            failure = str(error)
        else:
            return result
        # The error's traceback holds this frame: the result would live as long as the error.
        del result, tensor, storage, tracked
        raise torch.OutOfMemoryError(failure)

    def _are_drawn(self, values: Iterable[Any]) -> bool:
        """Tells whether some of the arguments of an operation follow from drawn numbers."""
        for value in values:
            if isinstance(value, Tensor):
                for storage in self._storages(value):
                    tracked = self._find(storage)
                    if tracked is not None and tracked.is_drawn:
                        return True
            elif isinstance(value, list | tuple) and self._are_drawn(value):
                return True
        return False

    def note_read(self, tensor: Tensor) -> None:
        """Notes that the program reads the numbers of a tensor."""
        self.has_read_drawn = self.has_read_drawn or (self._has_drawn and self._are_drawn([tensor]))

    def seed_resident(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made before the mode was entered, or outside the device, from now on; tensors that
        have left the device stay on the host.
        """
        self.free_dead()
        for tensor in tensors:
            for storage in self._storages(tensor):
                tracked = self._find(storage)
                if self._has_left(storage):
                    continue
                if tracked is None or tracked.allocation is None:
                    self._track(storage, outside=False)

    def look_again(self, tensors: Iterable[Tensor]) -> None:
        """Counts storages that were resized by no operation."""
        self.free_dead()
        for tensor in tensors:
            for storage in self._storages(tensor):
                tracked = self._find(storage)
                if tracked is None:
                    self._track(storage, outside=self._outside)
                elif tracked.allocation is not None and tracked.size != storage.nbytes():
                    self._resize(tracked, storage.nbytes())

    def arrive(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the device of a tensor that is on the host; a tensor that is there already as it is."""
        return tensor if self._outside or self.holds(tensor) else tensor.clone()

    def holds(self, tensor: Tensor) -> bool:
        """Tells whether a tensor takes memory of the device."""
        tracked = [self._find(storage) for storage in self._storages(tensor)]
        return all(storage is not None and storage.allocation is not None for storage in tracked)

    def free_dead(self) -> None:
        """Takes back the room of the storages that have died since the last operation or reading."""
        while self._dead:
            tracked = self._dead.popleft()
            # A new storage may have the id of one that has died: its entry stays.
            if self._tracked.get(tracked.key) is tracked:
                del self._tracked[tracked.key]
            if tracked.allocation is not None:
                self._free(tracked.allocation)

    def _storages(self, tensor: Tensor) -> tuple[UntypedStorage, ...]:
        """Returns the storages of a tensor that take memory of the device."""
        tensor = shard_of(tensor)
        # Meta tensors take no memory.
        return storages_of(tensor) if tensor.is_cpu else ()

    def _find(self, storage: UntypedStorage) -> _TrackedStorage[Allocation] | None:
        tracked = self._tracked.get(id(storage))
        # The entry may belong to a dead storage that had this id.
        return tracked if tracked is not None and tracked() is storage else None

    def _track(self, storage: UntypedStorage, *, outside: bool) -> _TrackedStorage[Allocation] | None:
        """Counts a storage; returns None where it is empty."""
        size = storage.nbytes()
        if size == 0:
            return None
        allocation = None if outside else self._allocate(size)
        tracked: _TrackedStorage[Allocation] = _TrackedStorage(storage, self._dead.append)
        tracked.key, tracked.size, tracked.allocation = id(storage), size, allocation
        tracked.is_drawn = False
        self._tracked[tracked.key] = tracked
        return tracked

    def _resize(self, tracked: _TrackedStorage[Allocation], size: int) -> None:
        """Moves a storage to a room of its new size; while it is copied, it takes both."""
        old = tracked.allocation
        assert old is not None, "memory outside the device has no room to give back"
        if size:
            tracked.allocation = self._allocate(size)
            tracked.size = size
        else:
            del self._tracked[tracked.key]
        self._free(old)


def look_again(tensors: Sequence[Tensor]) -> None:
    """Has the simulated GPU count storages again that were resized without an operation, as `fully_shard` does."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, StorageTracker):
            mode.look_again(tensors)


# Methods that return the dense tensors a sparse tensor is made of: it has no storage of its own.
_SPARSE_PARTS: Final[Mapping[torch.layout, tuple[str, ...]]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: Tensor) -> tuple[UntypedStorage, ...]:
    """Returns the storage of a tensor, or those of the dense tensors that a sparse tensor is made of."""
    if tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    return tuple(getattr(tensor, part)().untyped_storage() for part in _SPARSE_PARTS.get(tensor.layout, ()))


def _is_view(func: Any, args: tuple[Any, ...], storage: UntypedStorage) -> bool:
    """Tells whether an operation has returned a view of its first argument, whose storage was not seen before."""
    # `torch.tensor` returns its new tensor through `lift_fresh`, which is declared a view.
    if not func.is_view or func is torch.ops.aten.lift_fresh.default:
        return False
    # Some operations are declared views and copy where they must (`reshape`), so the storages are compared.
    viewed = args[0]
    return isinstance(viewed, Tensor) and viewed.layout is torch.strided and viewed.untyped_storage() is storage


class LiveStorageTracker(StorageTracker[int]):
    """Tracks the live and peak bytes of every storage that operations make, and refuses to exceed a limit.

    Sizes are rounded up as CUDA's caching allocator rounds them, so that figures compare across devices. `resident` are
    the tensors alive before the mode is entered (parameters, gradients, optimizer state); `cuda` is the capability of
    the GPU whose operators run, None for the CPU's own. Without `computes`, large products are random numbers.
    """

    def __init__(
        self,
        limit_bytes: int,
        resident: Iterable[Tensor] = (),
        *,
        cuda: Capability | None = AMPERE,
        computes: bool = True,
    ) -> None:
        super().__init__(cuda=cuda, computes=computes)
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0  # the most that was live or asked for at once
        self._live_bytes = 0
        self.seed_resident(resident)

    @property
    def live_bytes(self) -> int:
        """Bytes that are live now."""
        self.free_dead()
        return self._live_bytes

    def reset_peak(self) -> None:
        """Starts the peak again from the live bytes."""
        self.peak_bytes = self.live_bytes

    def _allocate(self, size: int) -> int:
        rounded = -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        wanted = self._live_bytes + rounded
        self.peak_bytes = max(self.peak_bytes, wanted)
        if wanted > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"CPU out of memory. Tried to allocate {rounded / 2**20:.2f} MiB; "
                f"{wanted / 2**20:.2f} MiB would be live, {self.limit_bytes / 2**20:.2f} MiB is the limit."
            )
        self._live_bytes = wanted
        return rounded

    def _free(self, allocation: int) -> None:
        self._live_bytes -= allocation


class SimulatedGpu(StorageTracker[Block]):
    """Counts tensors that operations make while it is active as memory of a GPU; may be entered once for a whole run.

    Memory inside an operation (a library's workspace, temporaries of a fused kernel) does not show, nor does scratch
    memory that a CUDA kernel would need and the CPU's does not. Making it raises `torch.OutOfMemoryError` where
    `resident`, the tensors that are on it from the start, do not fit.
    """

    def __init__(
        self,
        capacity_bytes: int,
        settings: AllocatorSettings = EXPANDABLE,
        *,
        resident: Iterable[Tensor] = (),
        contention: Callable[[], int] = no_contention,
        computes: bool = True,
    ) -> None:
        super().__init__(cuda=AMPERE, computes=computes)
        self._allocator = CachingAllocator(capacity_bytes, settings, contention)
        self.seed_resident(resident)

    @property
    def allocator(self) -> CachingAllocator:
        """The allocator; every storage that has died until now is freed first."""
        self.free_dead()
        return self._allocator

    def _allocate(self, size: int) -> Block:
        block = self._allocator.malloc(size)
        if block is None:
            raise torch.OutOfMemoryError(_out_of_memory(self._allocator, segment_bytes(size, self._allocator.settings)))
        return block

    def _free(self, allocation: Block) -> None:
        self._allocator.free(allocation)


def _out_of_memory(allocator: CachingAllocator, tried_bytes: int) -> str:
    """Words the error as c10/cuda/CUDACachingAllocator.cpp does: people and their tools search for its text."""
    foreign, reserved, allocated = allocator.foreign_bytes, allocator.reserved_bytes, allocator.allocated_bytes
    settings = allocator.settings
    allowed = f"{_format_size(allocator.allowed_bytes)} allowed; " if settings.memory_fraction < 1 else ""
    process = f"Process 0 has {_format_size(foreign)} memory in use. " if foreign else ""
    return (
        f"CUDA out of memory. Tried to allocate {_format_size(tried_bytes)}. GPU 0 has a total capacity of "
        f"{_format_size(allocator.capacity_bytes)} of which {_format_size(allocator.free_bytes)} is free. "
        f"{process}Including non-PyTorch memory, this process has {_format_size(reserved)} memory in use. "
        f"{allowed}"
        f"Of the allocated memory {_format_size(allocated)} is allocated by PyTorch, and "
        f"{_format_size(reserved - allocated)} is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _format_size(size: int) -> str:
    """Writes a size as c10's `format_size` does."""
    power = bisect_left((2**10, 2**20, 2**30), size)
    return f"{size / 1024**power:.2f} {('KiB', 'MiB', 'GiB')[power - 1]}" if power else f"{size} bytes"
