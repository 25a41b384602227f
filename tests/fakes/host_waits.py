"""Counts where the host would wait for a GPU, on a machine without one."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from traceback import extract_stack
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that need a number on the host, or whose result has a size that only the device knows.
_WAITING: Final = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
                   "unique_consecutive"}  # fmt: skip
_TO_HOST: Final = {"cpu", "tolist", "numpy", "__array__"}
_BY_MASK: Final = {"index", "index_put", "index_put_"}


class HostWaits(TorchDispatchMode):
    """Takes given tensors, those that are sent to a `torch.device`, and all that is computed from them, for tensors of
    a GPU. Counts, by place, the operators and methods that would make the host wait for that GPU.

    Attributes:
        waits: Number of waits by "file:line".
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        # The tensors are kept, so that no other storage takes the address of one of them.
        self._on_device: dict[int, Any] = {}
        self._methods = _ToHost(self)
        self.add(tensors)

    def add(self, values: Any) -> None:
        """Takes all tensors in some values for tensors of the GPU."""
        for tensor in _tensors_in(values):
            self._on_device[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def holds(self, values: Any) -> bool:
        """Tells whether any tensor in some values is of the GPU."""
        return any(tensor.untyped_storage()._cdata in self._on_device for tensor in _tensors_in(values))

    def count(self) -> None:
        """Counts a wait of the innermost line that is neither PyTorch's nor a test's."""
        frames = [frame for frame in extract_stack() if "/can_train" in frame.filename]
        self.waits[f"{frames[-1].filename.split('/src/')[-1]}:{frames[-1].name}" if frames else "?"] += 1

    def __enter__(self) -> Self:
        self._methods.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._methods.__exit__(kind, error, traceback)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        on_device = self.holds((args, kwargs))
        if on_device and _waits(func.overloadpacket.__name__, args, kwargs):
            self.count()
        result = func(*args, **kwargs)
        if on_device:
            self.add(result)
        return result


class _ToHost(TorchFunctionMode):
    """Counts the methods that bring a tensor to the host, which on the CPU call no operator, and sees what is sent to
    the device.
    """

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        to_host = name in _TO_HOST or (name == "to" and "cpu" in args[1:] and not kwargs.get("non_blocking"))
        if to_host and self._waits.holds(args[:1]):
            self._waits.count()
        result = func(*args, **kwargs)
        if any(isinstance(value, torch.device) for value in (*args[1:], *kwargs.values())):
            self._waits.add(result)
        return result


def _tensors_in(values: Any) -> Iterable[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from _tensors_in([getattr(leaf, name) for name in leaf.__dataclass_fields__])


def _waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    by_mask = name in _BY_MASK and any(getattr(index, "dtype", None) in (torch.bool, torch.uint8) for index in args[1])
    return by_mask or name in _WAITING
