"""A simulated GPU: tensors live on the CPU, and a model of CUDA's allocator counts what they would take."""

import os
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from can_train.errors import ConfigError, DeviceError
from can_train.io.units import parse_size
from can_train.memory.allocator import Block, CachingAllocator, no_contention, segment_bytes

Lease = TypeVar("Lease")


_SPARSE_PARTS: Final[Mapping[torch.layout, tuple[str, ...]]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""A sparse tensor has no storage of its own: these methods give the dense tensors that it is made of."""


class _TrackedStorage(weakref.ref[UntypedStorage], Generic[Lease]):
    """A storage that is followed: its size in bytes, and what was taken for it; None for memory outside the device."""

    __slots__ = ("key", "lease", "size")
    key: int
    lease: Lease | None
    size: int


class StorageTracker(TorchDispatchMode, Generic[Lease]):
    """Counts the storages that operations make while it is active, until they die, then or later.

    Only memory on the CPU counts. A view of a storage that was made elsewhere, unseen and not given to
    `seed_resident`, is a view of memory outside the device: it takes nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = False
        self._lives: dict[int, _TrackedStorage[Lease]] = {}
        # Garbage may be collected at any moment, also while the books are being changed: the dead wait here until the
        # next operation or reading. A bound method of the deque does not keep the mode alive.
        self._dead: deque[_TrackedStorage[Lease]] = deque()

    @contextmanager
    def host(self) -> Iterator[None]:
        """Makes what operations make inside the block memory outside the device: it takes nothing, then or later.

        Whatever is on the device already stays there. `seed_resident` moves a tensor from outside to it.
        """
        before, self._outside = self._outside, True
        try:
            yield
        finally:
            self._outside = before

    @abstractmethod
    def _take(self, size: int) -> Lease:
        """Finds room for a storage of `size` bytes, or raises `torch.OutOfMemoryError`."""

    @abstractmethod
    def _give(self, lease: Lease) -> None:
        """Takes back the room of a storage that has died."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation, then counts the storages of its results."""
        if torch.is_inference_mode_enabled():
            # Only there do composite operations (an LSTM, attention) arrive whole: taken apart, their temporaries show.
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        message = self._count(result, func, args)
        if message:
            # The error's traceback holds this frame: the result would live as long as the error.
            del result
            raise torch.OutOfMemoryError(message)
        return result

    def seed_resident(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made before the mode was entered, or outside the device, from now on.

        Raises:
            torch.OutOfMemoryError: There is no room for one of them.
        """
        self._settle()
        for tensor in tensors:
            for storage in _storages(tensor):
                life = self._life(storage)
                if life is None or life.lease is None:
                    self._begin(storage, outside=False)

    def _settle(self) -> None:
        """Takes back the room of what has died since the last operation or reading."""
        while self._dead:
            life = self._dead.popleft()
            if self._lives.get(life.key) is life:
                del self._lives[life.key]
            if life.lease is not None:
                self._give(life.lease)

    def _count(self, result: Any, func: Any, args: tuple[Any, ...]) -> str:
        """Counts the storages of an operation's results; says what did not fit, and nothing if all did."""
        self._settle()
        try:
            for tensor in (result,) if isinstance(result, Tensor) else tree_iter(result):
                if isinstance(tensor, Tensor):
                    for storage in _storages(tensor):
                        life = self._life(storage)
                        if life is None:
                            self._begin(storage, outside=self._outside or _is_view(func, args, storage))
                        elif life.lease is not None and life.size != storage.nbytes():
                            self._resize(life, storage.nbytes())
        except torch.OutOfMemoryError as error:
            return str(error)
        return ""

    def _life(self, storage: UntypedStorage) -> _TrackedStorage[Lease] | None:
        life = self._lives.get(id(storage))
        # The storage that had this id may be among the dead still.
        return life if life is not None and life() is storage else None

    def _begin(self, storage: UntypedStorage, *, outside: bool) -> None:
        size = storage.nbytes()
        if size == 0:
            return
        lease = None if outside else self._take(size)
        life: _TrackedStorage[Lease] = _TrackedStorage(storage, self._dead.append)
        life.key, life.size, life.lease = id(storage), size, lease
        self._lives[life.key] = life

    def _resize(self, life: _TrackedStorage[Lease], size: int) -> None:
        """Moves a storage to a room of its new size; while it is copied it has both."""
        old = life.lease
        assert old is not None, "memory outside has no room to give back"
        if size:
            life.lease = self._take(size)
            life.size = size
        else:
            del self._lives[life.key]
        self._give(old)


def _storages(tensor: Tensor) -> tuple[UntypedStorage, ...]:
    """The storages of a tensor on the CPU; a meta tensor's takes no memory."""
    if not tensor.is_cpu:
        return ()
    if tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    return tuple(getattr(tensor, part)().untyped_storage() for part in _SPARSE_PARTS.get(tensor.layout, ()))


def _is_view(func: Any, args: tuple[Any, ...], storage: UntypedStorage) -> bool:
    """Tells whether a storage that was not seen before is the one of the tensor that a view was taken of.

    Some operations are declared views and copy where they must (`reshape`); `lift_fresh` is one too, and is how
    `torch.tensor` shows what it has just made.
    """
    if not func.is_view or func is torch.ops.aten.lift_fresh.default:
        return False
    viewed = args[0]
    return isinstance(viewed, Tensor) and viewed.layout is torch.strided and viewed.untyped_storage() is storage


ALLOCATION_QUANTUM: Final = 512
"""Bytes that an allocation is rounded up to, as CUDA's caching allocator does: figures then compare across devices."""


class LiveStorageTracker(StorageTracker[int]):
    """Tracks live and peak bytes of every storage that operations make, and refuses to go over a limit.

    Args:
        limit_bytes: Largest live bytes; an operation that exceeds it raises `torch.OutOfMemoryError`.
        resident: Tensors alive before the mode is entered (parameters, gradients, optimizer state).

    Attributes:
        peak_bytes: The most that was live or asked for at once.
    """

    def __init__(self, limit_bytes: int, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._live_bytes = 0
        self.seed_resident(resident)

    @property
    def live_bytes(self) -> int:
        """Bytes that are live now."""
        self._settle()
        return self._live_bytes

    def forget_peak(self) -> None:
        """Starts the peak anew, from what is live."""
        self.peak_bytes = self.live_bytes

    def _take(self, size: int) -> int:
        rounded = -(-size // ALLOCATION_QUANTUM) * ALLOCATION_QUANTUM
        wanted = self._live_bytes + rounded
        self.peak_bytes = max(self.peak_bytes, wanted)
        if wanted > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"CPU out of memory. Tried to allocate {rounded / 2**20:.2f} MiB; "
                f"{wanted / 2**20:.2f} MiB would be live, {self.limit_bytes / 2**20:.2f} MiB is the limit."
            )
        self._live_bytes = wanted
        return rounded

    def _give(self, lease: int) -> None:
        self._live_bytes -= lease


FOREIGN: Final = "CAN_TRAIN_SIM_FOREIGN"
"""Variable that names the file. It holds a size, `200MiB`; none, or an empty one, means that nobody else is there."""


def simulated_contention(environment: Mapping[str, str] = os.environ) -> Callable[[], int]:
    """Returns what tells, whenever it is asked, how many bytes other processes hold of the simulated GPU."""
    path = environment.get(FOREIGN)
    return (lambda: _held_bytes(Path(path))) if path else no_contention


def _held_bytes(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return 0
    try:
        return parse_size(text) if text else 0
    except ConfigError as error:
        raise DeviceError(f"The file that {FOREIGN} names holds a size", value=f"{path}: {text[:50]!r}") from error


class SimulatedGpu(StorageTracker[Block]):
    """Counts what operations make while it is active as memory of a GPU; may be entered once for a whole run.

    What an operation takes inside (a library's workspace, temporaries of a fused kernel) does not show, nor what
    scratch memory a CUDA kernel would need that the CPU's does not.

    Args:
        capacity_bytes: Memory of the GPU that PyTorch's allocator may have.
        expandable: Whether the allocator's segments expand (`expandable_segments:True`).
        resident: Tensors that are on it from the start.
        contention: Tells what other processes hold of it.

    Raises:
        torch.OutOfMemoryError: `resident` does not fit.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        expandable: bool = True,
        resident: Iterable[Tensor] = (),
        contention: Callable[[], int] = no_contention,
    ) -> None:
        super().__init__()
        self._allocator = CachingAllocator(capacity_bytes, expandable=expandable, contention=contention)
        self.seed_resident(resident)

    @property
    def allocator(self) -> CachingAllocator:
        """The allocator, all that has died until now given back to it."""
        self._settle()
        return self._allocator

    def _take(self, size: int) -> Block:
        block = self._allocator.malloc(size)
        if block is None:
            raise torch.OutOfMemoryError(_out_of_memory(self._allocator, segment_bytes(size)))
        return block

    def _give(self, lease: Block) -> None:
        self._allocator.free(lease)


def _out_of_memory(allocator: CachingAllocator, tried_bytes: int) -> str:
    """Words the error as c10/cuda/CUDACachingAllocator.cpp does: people and their tools search for its text."""
    unallocated = allocator.reserved_bytes - allocator.allocated_bytes
    return (
        f"CUDA out of memory. Tried to allocate {_format_size(tried_bytes)}. GPU 0 has a total capacity of "
        f"{_format_size(allocator.capacity_bytes)} of which {_format_size(allocator.free_bytes)} is free. "
        f"{_processes(allocator)}Of the allocated memory {_format_size(allocator.allocated_bytes)} is allocated by "
        f"PyTorch, and {_format_size(unallocated)} is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _processes(allocator: CachingAllocator) -> str:
    others = f"Process 0 has {_format_size(allocator.foreign_bytes)} memory in use. " if allocator.foreign_bytes else ""
    own = _format_size(allocator.reserved_bytes)
    return f"{others}Including non-PyTorch memory, this process has {own} memory in use. "


def _format_size(size: int) -> str:
    """Writes a size as c10's `format_size` does."""
    if size <= 1024:
        return f"{size} bytes"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if size <= 1024 ** (power + 1):
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size / 1024**3:.2f} GiB"
