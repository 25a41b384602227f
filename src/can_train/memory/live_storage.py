"""Counts the bytes of live tensor storages while it is active: the CPU's stand-in for an allocator's peak counter. A
dispatch mode sees every operation of forward, backward and optimizer alike.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

ALLOCATION_QUANTUM: Final = 512
"""Bytes that an allocation is rounded up to, as CUDA's caching allocator does: figures then compare across devices."""


class LiveStorage(TorchDispatchMode):
    """Tracks live and peak bytes of every storage that operations make, and refuses to go over a limit.

    Args:
        limit_bytes: Largest live bytes; an operation that exceeds it raises `torch.OutOfMemoryError`.
        resident: Tensors alive before the mode is entered (parameters, gradients, optimizer state).
    """

    def __init__(self, limit_bytes: int, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        for tensor in resident:
            self._see(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation, then counts the storages of its results."""
        result = func(*args, **(kwargs or {}))
        grown = sum(self._see(tensor) for tensor in tree_iter(result) if isinstance(tensor, Tensor))
        if grown and self.live_bytes > self.limit_bytes:
            # The result must die before the error travels, or the bytes it reports are still held by this frame.
            result = None
            raise torch.OutOfMemoryError(
                f"CPU out of memory. Tried to allocate {grown / 2**20:.2f} MiB; "
                f"{self.live_bytes / 2**20:.2f} MiB would be live, {self.limit_bytes / 2**20:.2f} MiB is the limit."
            )
        return result

    def _see(self, tensor: Tensor) -> int:
        """Counts a tensor's storage if it is new or has been resized; returns the bytes added."""
        if tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        key = id(storage)
        size = -(-storage.nbytes() // ALLOCATION_QUANTUM) * ALLOCATION_QUANTUM
        known = self._sizes.get(key)
        if known is not None and known[0]() is storage:
            added = size - known[1]
            self._sizes[key] = (known[0], size)
        else:
            added = size - self._forget(key)
            self._sizes[key] = (weakref.ref(storage, self._freed(key)), size)
        self.live_bytes += added
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return added

    def _forget(self, key: int) -> int:
        """Drops an entry whose storage is gone (its id was reused); returns its bytes."""
        known = self._sizes.pop(key, None)
        return known[1] if known is not None else 0

    def _freed(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        # The callback must not keep the mode alive: storages often outlive it.
        mode = weakref.ref(self)

        def callback(dead: weakref.ref[torch.UntypedStorage]) -> None:
            tracker = mode()
            if tracker is not None and key in tracker._sizes and tracker._sizes[key][0] is dead:
                tracker.live_bytes -= tracker._forget(key)

        return callback
