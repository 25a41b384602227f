"""Sees the tensor storages that operations make and that die, while it is active: a dispatch mode sees every operation
of forward, backward and optimizer alike. What their bytes mean is decided by its subclasses.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

ALLOCATION_QUANTUM: Final = 512
"""Bytes that an allocation is rounded up to, as CUDA's caching allocator does: figures then compare across devices."""

_HOST: Final = -1
"""Size of a storage that is the host's."""


class StorageWatch(TorchDispatchMode):
    """Reports the birth, growth and death of storages.

    Subclasses implement `_allocated` and `_freed`. An out-of-memory that `_allocated` raises leaves the operation as
    its failure: its results die, and what of them was already counted is reported as freed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._on_host = False

    @contextmanager
    def host(self) -> Iterator[None]:
        """Tensors made inside are host memory: they count nothing, then or later."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that no operation has shown yet (parameters, say)."""
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation, then looks at the storages of its results."""
        result = func(*args, **(kwargs or {}))
        leaf = None
        try:
            if isinstance(result, Tensor):
                self._see(result)
            else:
                for leaf in tree_iter(result):
                    if isinstance(leaf, Tensor):
                        self._see(leaf)
        except torch.OutOfMemoryError:
            # The results must die before the error travels, or the bytes it reports are still held by this frame.
            result = leaf = None
            raise
        return result

    def _allocated(self, key: int, size: int) -> None:
        """A storage of `size` bytes came to life, rounded up; 0 never comes."""
        raise AssertionError("a subclass counts")

    def _freed(self, key: int, size: int) -> None:
        """The storage `key` died."""
        raise AssertionError("a subclass counts")

    def _see(self, tensor: Tensor) -> None:
        """Counts a tensor's storage if it is new or has been resized."""
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._sizes.get(key)
        if known is not None and known[0]() is storage:
            self._resize(key, known, storage.nbytes())
            return
        self._forget(key)
        size = _HOST if self._on_host else _rounded(storage.nbytes())
        if size > 0:
            self._allocated(key, size)
        self._sizes[key] = (weakref.ref(storage, self._death(key)), size)

    def _resize(self, key: int, known: tuple[weakref.ref[torch.UntypedStorage], int], num_bytes: int) -> None:
        reference, old = known
        size = _rounded(num_bytes)
        if old in (size, _HOST):
            return
        if old:
            self._freed(key, old)
        self._sizes[key] = (reference, 0)
        if size:
            self._allocated(key, size)
        self._sizes[key] = (reference, size)

    def _forget(self, key: int) -> None:
        """Drops an entry whose storage is gone."""
        known = self._sizes.pop(key, None)
        if known is not None and known[1] > 0:
            self._freed(key, known[1])

    def _death(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        # The callback must not keep the mode alive: storages often outlive it.
        mode = weakref.ref(self)

        def callback(dead: weakref.ref[torch.UntypedStorage]) -> None:
            watch = mode()
            if watch is not None and key in watch._sizes and watch._sizes[key][0] is dead:
                watch._forget(key)

        return callback


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALLOCATION_QUANTUM) * ALLOCATION_QUANTUM
