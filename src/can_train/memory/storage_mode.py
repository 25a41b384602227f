"""Follows the storages of tensors through their lives: a dispatch mode sees every operation of forward, backward and
optimizer alike. What a storage takes, and when there is no room for it, is decided by the modes built on this one.
"""

import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Lease = TypeVar("Lease")

_SPARSE_PARTS: Final[Mapping[torch.layout, tuple[str, ...]]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""A sparse tensor has no storage of its own: these methods give the dense tensors that it is made of."""


class _Life(weakref.ref[UntypedStorage], Generic[Lease]):
    """A storage that is followed: its size in bytes, and what was taken for it; None for memory outside the device."""

    __slots__ = ("key", "lease", "size")
    key: int
    lease: Lease | None
    size: int


class StorageMode(TorchDispatchMode, Generic[Lease]):
    """Counts the storages that operations make while it is active, until they die, then or later.

    Only memory on the CPU counts. A view of a storage that was made elsewhere, unseen and not given to
    `seed_resident`, is a view of memory outside the device: it takes nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = False
        self._lives: dict[int, _Life[Lease]] = {}
        # Garbage may be collected at any moment, also while the books are being changed: the dead wait here until the
        # next operation or reading. A bound method of the deque does not keep the mode alive.
        self._dead: deque[_Life[Lease]] = deque()

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
        shortage = self._count(result, func, args)
        if shortage:
            # The error's traceback holds this frame: the result would live as long as the error.
            del result
            raise torch.OutOfMemoryError(shortage)
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

    def _life(self, storage: UntypedStorage) -> _Life[Lease] | None:
        life = self._lives.get(id(storage))
        # The storage that had this id may be among the dead still.
        return life if life is not None and life() is storage else None

    def _begin(self, storage: UntypedStorage, *, outside: bool) -> None:
        size = storage.nbytes()
        if size == 0:
            return
        lease = None if outside else self._take(size)
        life: _Life[Lease] = _Life(storage, self._dead.append)
        life.key, life.size, life.lease = id(storage), size, lease
        self._lives[life.key] = life

    def _resize(self, life: _Life[Lease], size: int) -> None:
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
