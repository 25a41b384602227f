"""Repetitions of modules in the backward pass: each begins with the state that the first pass began with, and the
tensors that it saves are compared with those of the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointError, checkpoint

from can_train.fit.pass_state import HostGenerators, PythonState
from can_train.memory.out_of_memory import error_chain

if TYPE_CHECKING:
    from can_train.fit.rungs import Rung

NOT_REPEATABLE: Final = (
    "Modules are not computed again: they compute or save something else the second time, or overwrite inputs"
)
CHANGED_INPUT: Final = "modified by an inplace operation"  # In PyTorch's error
# Kernels that add up in any order round differently each time. Relative to the sums of absolute values, in units of the
# last bit; in half precision, as a share.
_ROUNDED_BITS: Final = 64
_HALF_TOLERANCE: Final = 0.03
_SEED: Final = 2  # Elements of the state of a generator that a kernel saves
_SUMMED: Final = (
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def is_not_repeatable(error: BaseException) -> bool:
    """Tells whether a backward pass failed because a module that was computed again saved other tensors, or other
    values, or because it had overwritten its input.
    """
    return any(
        isinstance(link, (CheckpointError, _OtherValuesError)) or CHANGED_INPUT in str(link)
        for link in error_chain(error)
    )


def forward_again(
    owners: Sequence[nn.Module], repetitions: Repetitions, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Runs a forward pass that the backward pass runs again, from the same state."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    given = *args, *kwargs.values()
    state = StateBefore(owners, repetitions, given)
    objects = [None if isinstance(value, Tensor) else value for value in given]
    # A dictionary with results of this pass would refer to the graph, and the graph to the dictionary: nothing would
    # free a pass that has failed.
    repetitions.after_pass += [objects.clear, state.forget]
    # By position: a module may name its arguments as PyTorch names those of `checkpoint`, which also notices only of
    # tensors by position that they were overwritten.
    tensors = [value if isinstance(value, Tensor) else None for value in given]
    call = partial(_called_by_name, forward, tuple(kwargs), objects)
    return checkpoint(call, *tensors, use_reentrant=False, context_fn=state.contexts)


def _called_by_name(
    forward: Callable[..., Any], names: Sequence[str], objects: Sequence[Any], /, *tensors: Tensor | None
) -> Any:
    """Calls a function with tensors, and objects in the places between them; the last arguments have names."""
    given = [value if tensor is None else tensor for tensor, value in zip(tensors, objects, strict=True)]
    by_position = len(given) - len(names)
    return forward(*given[:by_position], **dict(zip(names, given[by_position:], strict=True)))


class Repetitions:
    """Compares modules that are computed again with their first pass, and remembers the buffers that `.data` changes.

    The gradient is a function of the tensors that the first pass would have saved, so these are compared: in passes 1,
    2, 4, 8 and so on of a rung, since comparing makes the host wait.

    Args:
        compares: Whether the tensors have values that can be compared.
    """

    def __init__(self, *, compares: bool = True) -> None:
        self._compares = compares
        self._passes: dict[tuple[str, ...], int] = {}  # By the modules that are computed again
        self.is_compared = False  # Whether the pass that is under way is
        self.changed: set[tuple[nn.Module, str]] = set()  # Buffers that passes change without counting a version
        self.after_pass: list[Callable[[], object]] = []  # Called after the pass that is under way

    @contextmanager
    def counted(self, rung: Rung) -> Iterator[None]:
        """Counts a pass on a rung, which is computed in the block."""
        number = self._passes.get(rung.recompute, 0) + 1
        self.is_compared = self._compares and not number & (number - 1)
        try:
            yield
            self._passes[rung.recompute] = number
        finally:
            for let_go in self.after_pass:
                let_go()
            self.after_pass.clear()


class StateBefore(AbstractContextManager[None]):
    """The state before a forward pass of modules: whether they train, Python's and numpy's generators, attributes, the
    contents of lists and dictionaries that the pass can reach, the buffers that it changes, as BatchNorm's does, and
    the modes that PyTorch's functions are called in. As a context, it puts the state back for each repetition of the
    pass.
    """

    def __init__(self, modules: Sequence[nn.Module], repetitions: Repetitions, arguments: Sequence[Any] = ()) -> None:
        parts = [part for module in modules for part in module.modules()]
        self._repetitions = repetitions
        self._training = [(part, part.training) for part in parts]
        # `checkpoint` restores PyTorch's own generators.
        self._generators: HostGenerators | None = HostGenerators()
        self._python = PythonState(parts, arguments)
        self._modes = _get_current_function_mode_stack()
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._undo = ExitStack()  # Of the repetition that is under way

    def forget(self) -> None:
        """Lets go of the objects whose state is known: their passes are over."""
        self._python = PythonState((), ())

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns the contexts of the forward pass and of its repetitions."""
        return self._watched(), self

    @contextmanager
    def _watched(self) -> Iterator[None]:
        held = [
            (part, key, value, value.detach().clone(), value._version)
            for part, _ in self._training
            for key, value in part._buffers.items()
            if value is not None
        ]
        # Kernels of BatchNorm change its statistics, after they have saved them, without counting a version.
        statistics = {id(value.untyped_storage()) for part, _, value, *_ in held if isinstance(part, _NormBase)}
        with _compared(statistics) if self._repetitions.is_compared else nullcontext():
            yield
        if self._generators is not None and HostGenerators(since=self._generators).is_shared_with(self._generators):
            self._generators = None
        self._python.forget_results()
        for part, key, value, copy, _ in held if self._repetitions.is_compared else ():
            if not torch.equal(value, copy):
                self._repetitions.changed.add((part, key))
        self._buffers = [
            (part, key, copy)
            for part, key, value, copy, version in held
            if isinstance(part, _NormBase)
            or part._buffers[key] is not value
            or value._version != version
            or (part, key) in self._repetitions.changed
        ]

    def __enter__(self) -> None:
        """Puts the state back."""
        undo = self._undo = ExitStack()
        if self._generators is not None:
            undo.callback(HostGenerators().restore)
            self._generators.restore()
        undo.callback(self._python.now().restore)
        self._python.restore()
        # A backward pass may run outside of them.
        there = _get_current_function_mode_stack()
        for mode in self._modes:
            if mode not in there:
                TorchFunctionMode.__enter__(mode)
                undo.callback(TorchFunctionMode.__exit__, mode, None, None, None)
        for part, training in self._training:
            undo.callback(setattr, part, "training", part.training)
            part.training = training
        for part, key, value in self._buffers:
            undo.callback(part._buffers.__setitem__, key, part._buffers[key])
            # The repetition changes it.
            part._buffers[key] = value.clone()

    def __exit__(self, *error: object) -> None:
        """Returns to the state that was there at the repetition."""
        self._undo.close()


class _OtherValuesError(RuntimeError):
    """A module that was computed again saved other values than in its first pass."""


def _compared(left_out: Collection[int]) -> AbstractContextManager[None]:
    """Opens a span whose saved tensors are compared with those that the backward pass gets in their place; tensors of
    storages with some ids are left out.
    """
    # PyTorch has it from 2.8 on.
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    outside = None if top_hooks is None else top_hooks(True)
    if outside is None:
        return nullcontext()
    # No class with methods: an object that refers to itself would keep the pass's tensors after it.
    pack_outside, unpack_outside = outside

    def pack(tensor: Tensor) -> tuple[Any, list[_Sums]]:
        is_left_out = tensor.layout is torch.strided and id(tensor.untyped_storage()) in left_out
        return pack_outside(tensor), [] if is_left_out else _sums_of(tensor)

    def unpack(packed: tuple[Any, list[_Sums]]) -> Tensor:
        saved, sums = packed
        tensor: Tensor = unpack_outside(saved)
        if sums and not all(map(_Sums.is_near, sums, _sums_of(tensor))):
            raise _OtherValuesError(f"Other values of a tensor of shape {[*tensor.shape]}")
        return tensor

    return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Sums of a tensor over all of its dimensions but one."""

    values: NDArray[Any]  # On the host, where NumPy compares a few numbers sooner than PyTorch
    sizes: NDArray[Any] | None = None  # Sums of the absolute values; None: of whole numbers
    tolerance: float = 0.0  # Of these

    def is_near(self, other: _Sums) -> bool:
        """Tells whether the sums are equal, but for the order in which a kernel adds up."""
        if self.sizes is None or other.sizes is None:
            return np.array_equal(self.values, other.values)
        # Infinite sums have no difference.
        with np.errstate(all="ignore"):
            near = self.tolerance * (self.sizes + self.sizes.mean())
            pairs = (self.values, other.values), (self.sizes, other.sizes)
            return all(
                bool(np.all((np.abs(one - again) <= near) | (one == again) | (np.isnan(one) & np.isnan(again))))
                for one, again in pairs
            )


@torch.no_grad()
def _sums_of(tensor: Tensor) -> list[_Sums]:
    """Adds a tensor up, on the device, without memory beside the sums; none of types without sums."""
    kind = tensor.device.type
    is_plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor) and not tensor.is_meta
    # Kernels do not fill all that they save: seeds of dropout without dropout, and bytes of their own.
    is_filled = tensor.dtype in _SUMMED and not (tensor.dtype is torch.int64 and tensor.numel() <= _SEED)
    if not is_plain or not is_filled or not tensor.numel():
        return []
    is_half = torch.is_autocast_enabled(kind) or tensor.dtype.itemsize == 2
    with _disable_current_modes(), torch.autocast(kind, enabled=False):
        values = physical(tensor.detach())
        values = torch.view_as_real(values) if values.is_complex() else values
        values = values if values.dim() else values.view(1)
        kept = {0, values.dim() - 1}
        if not values.is_floating_point():
            return [_Sums(values=_sum_but(values, dim, torch.int64).numpy(force=True)) for dim in kept]
        dtype = torch.float32 if values.dtype.itemsize == 2 else values.dtype
        tolerance = _HALF_TOLERANCE if is_half else _ROUNDED_BITS * torch.finfo(dtype).eps
        return [
            _Sums(
                values=_sum_but(values, dim, dtype).numpy(force=True),
                sizes=_size_but(values, dim, dtype).numpy(force=True),
                tolerance=tolerance,
            )
            for dim in kept
        ]


def _sum_but(values: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    others = [one for one in range(values.dim()) if one != dim]
    return values.sum(others, dtype=dtype) if others else values.to(dtype, copy=True)


def _size_but(values: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    others = [one for one in range(values.dim()) if one != dim]
    return torch.linalg.vector_norm(values, 1, others, dtype=dtype) if others else values.to(dtype).abs()


def physical(tensor: Tensor) -> Tensor:
    """Returns a tensor with the values that its storage has, where PyTorch conjugates or negates them when it reads."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor
