"""Operators that keep or take other memory on CUDA than on the CPU: dropout, attention, recurrent layers, RMS norm, and
operators that autocast computes in single precision. While they are replaced, tensors on the CPU take as much memory as
CUDA's would.

Shapes: N batch, H heads, L queries, S keys, E and V width of a head; T steps, I inputs.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter, tree_map_only

from can_train.memory.cuda_workspaces import AMPERE, CUDNN, Capability, flash_backward_bytes

_aten: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)
Kernels = dict[OpOverload, Callable[..., Any]]


class DeviceMode(TorchDispatchMode):
    """A dispatch mode that counts the memory that tensors take of a device."""

    @abstractmethod
    def host(self) -> AbstractContextManager[None]:
        """Opens a span whose new tensors take nothing of the device."""

    @abstractmethod
    def offloading(self) -> AbstractContextManager[None]:
        """Opens a span whose new tensors take memory of the host, which is counted."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Tells whether a tensor takes memory of the device."""

    def library(self, name: str) -> AbstractContextManager[None]:
        """Opens a span whose new tensors are a library's memory, as `CUDNN`; memory of tensors where none is named."""
        return nullcontext()

    def kernel(self, name: str) -> AbstractContextManager[None]:
        """Opens a span whose new tensors one kernel of the device makes."""
        return nullcontext()


def _modes() -> list[DeviceMode]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, DeviceMode)]


@contextmanager
def _everywhere(span: Callable[[DeviceMode], AbstractContextManager[None]]) -> Iterator[None]:
    """Opens a span of every device that is counted."""
    with ExitStack() as stack:
        for mode in _modes():
            stack.enter_context(span(mode))
        yield


def on_host() -> AbstractContextManager[None]:
    """Opens a span whose new tensors are outside every device that is counted."""
    return _everywhere(lambda mode: mode.host())


def offloading() -> AbstractContextManager[None]:
    """Opens a span whose new tensors are copies that have left every device that is counted, for the host."""
    return _everywhere(lambda mode: mode.offloading())


def is_on_device(tensor: Tensor) -> bool:
    """Tells whether a tensor takes memory of a GPU, or of the devices that are counted."""
    modes = _modes()
    return any(mode.holds(tensor) for mode in modes) if modes else tensor.device.type != "cpu"


def _in_kernel(name: str) -> AbstractContextManager[None]:
    return _everywhere(lambda mode: mode.kernel(name))


_SAVE_ON_CPU: Final = save_on_cpu.__init__


def _save_on_host(self: save_on_cpu, pin_memory: bool = False, device_type: str = "cuda") -> None:
    """Initializes a `save_on_cpu` whose tensors leave the devices that are counted, whose tensors are on the CPU."""

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if not is_on_device(tensor):
            return tensor
        with offloading():
            return tensor.device, tensor.detach().to("cpu", copy=True)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return torch.empty_like(host, device=device).copy_(host)

    super(save_on_cpu, self).__init__(pack, unpack)


@dataclass(eq=False)
class CudaOperators:
    """Replaces the operators of tensors on the CPU, from `open` to `close`, in the whole process.

    Where several spans overlap, the first one's capability holds.
    """

    kernels: Kernels = field(default_factory=dict, init=False)
    _libraries: list[Library] = field(default_factory=list, init=False)
    _num_open: int = field(default=0, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def open(self, capability: Capability) -> None:
        """Replaces the operators by a GPU's."""
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self.kernels = {
                    _aten.dropout.default: _dropout,
                    _aten.scaled_dot_product_attention.default: partial(_attention, capability),
                    _aten.softmax.int: partial(_softmax, _aten.softmax.int),
                    _aten.log_softmax.int: partial(_softmax, _aten.log_softmax.int),
                    **recurrent_kernels(has_values=True),
                }
                # Versions of PyTorch without this operator take RMS norm apart on CUDA, too.
                if hasattr(_aten, "_fused_rms_norm"):
                    self.kernels[_aten.rms_norm.default] = _rms_norm
                self._libraries = [register("AutogradCPU", self.kernels), register("AutocastCPU", _autocast_kernels())]
                save_on_cpu.__init__ = _save_on_host  # type: ignore[method-assign]

    def close(self) -> None:
        """Brings the CPU's own operators back when the last span ends."""
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                self.kernels = {}
                save_on_cpu.__init__ = _SAVE_ON_CPU  # type: ignore[method-assign]
                for library in self._libraries:
                    library._destroy()


# PyTorch has one table of operators a process, so their replacements are the process's, too.
CUDA_OPERATORS: Final = CudaOperators()


def register(key: str, kernels: Kernels) -> Library:
    """Registers kernels under a dispatch key for as long as the library lives."""
    library = Library("aten", "IMPL", key)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator, kernel in kernels.items():
            library.impl(operator, kernel)
    return library


def _name(operator: OpOverload) -> str:
    return operator._schema.name.removeprefix("aten::")


def composite(operator: OpOverload) -> Callable[..., Any]:
    """Returns the composition of an operator on devices without a kernel of their own for it."""
    return partial(operator._op_dk, DispatchKey.CompositeImplicitAutograd)


@dataclass(frozen=True, kw_only=True)
class FusedKernel:
    """A kernel of CUDA's, and the memory that it takes in addition to its inputs and results."""

    name: str
    compute: Callable[..., Sequence[Tensor]]  # makes the results from the inputs, outside the device
    kept_bytes: int = 0  # saved for the backward pass
    is_repeatable: bool = False  # whether it may be computed again, to be differentiated twice
    forward_bytes: int = 0  # workspace while it runs
    backward_bytes: int = 0  # workspace while its backward kernel runs
    library: str = ""  # that the workspaces belong to; empty: PyTorch


class _Fused(torch.autograd.Function):
    """Runs a fused kernel: it is computed on the host, and its memory is taken of the device."""

    @staticmethod
    def forward(ctx: Any, kernel: FusedKernel, needs_gradients: bool, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Computes the results, copies them to the device, and saves tensors for the backward pass."""
        with on_host():
            # Copies: the device's own memory is free as soon as autograd lets go of it.
            copies = [
                None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad)
                for tensor in inputs
            ]
            with torch.set_grad_enabled(needs_gradients):
                computed = kernel.compute(*copies)
        device = next(tensor.device for tensor in inputs if tensor is not None)
        with _in_kernel(kernel.name):
            results = tuple(tensor.detach().clone() for tensor in computed)
            with _everywhere(lambda mode: mode.library(kernel.library)):
                workspace = torch.empty(kernel.forward_bytes, dtype=torch.uint8, device=device)
            # PyTorch saves it like a result. It is no workspace: the backward pass cannot do without it.
            kept = torch.empty(kernel.kept_bytes if needs_gradients else 0, dtype=torch.uint8, device=device)
        del workspace
        ctx.kernel, ctx.graph = kernel, (copies, computed)
        ctx.save_for_backward(*inputs, *results, kept)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Computes the gradients of the inputs."""
        saved = ctx.saved_tensors
        copies, computed = ctx.graph
        places = [place for place, tensor in enumerate(copies) if tensor is not None and tensor.requires_grad]
        trained = [copies[place] for place in places]
        pairs = [
            (result, gradient)
            for result, gradient in zip(computed, gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        with on_host():
            if pairs:
                results, given = zip(*pairs, strict=True)
                input_gradients = torch.autograd.grad(results, trained, given, retain_graph=True, allow_unused=True)
            else:
                # The results were computed from shapes alone.
                input_gradients = tuple(torch.empty_like(tensor) for tensor in trained)
        result: list[Tensor | None] = [None] * len(copies)
        with _in_kernel(f"{ctx.kernel.name}_backward"):
            for place, gradient in zip(places, input_gradients, strict=True):
                result[place] = None if gradient is None else gradient.clone()
            with _everywhere(lambda mode: mode.library(ctx.kernel.library)):
                torch.empty(ctx.kernel.backward_bytes, dtype=torch.uint8, device=saved[-1].device)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.graph = None
        return (None, None, *result)


class _FusedTwice(_Fused):
    """Runs a fused kernel whose gradients have gradients, as a penalty on them needs."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Computes the gradients of the inputs."""
        if not torch.is_grad_enabled():
            once: tuple[Any, ...] = _Fused.backward(ctx, *gradients)
            return once
        inputs = ctx.saved_tensors[: len(ctx.graph[0])]
        trained = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        computed = ctx.kernel.compute(*inputs)
        input_gradients = iter(torch.autograd.grad(computed, trained, gradients, create_graph=True))
        needs = [tensor is not None and tensor.requires_grad for tensor in inputs]
        return (None, None, *(next(input_gradients) if needed else None for needed in needs))


def run_fused(kernel: FusedKernel, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Runs a kernel so that its memory counts as CUDA's; returns its results."""
    needs_gradients = torch.is_grad_enabled() and any(item is not None and item.requires_grad for item in inputs)
    runner = _FusedTwice if kernel.is_repeatable else _Fused
    results: tuple[Tensor, ...] = runner.apply(kernel, needs_gradients, *inputs)  # type: ignore[no-untyped-call]
    return results


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and inputs.numel():
        # CUDA's mask has a byte an element; the CPU's has the inputs' type.
        return _aten.native_dropout.default(inputs, p, train)[0]  # type: ignore[no-any-return]
    return composite(_aten.dropout.default)(inputs, p, train)  # type: ignore[no-any-return]


def _softmax(operator: OpOverload, inputs: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if inputs.dtype in _HALF and dtype is torch.float32:
        result: Tensor = _WideSoftmax.apply(inputs, operator, dim)  # type: ignore[no-untyped-call]
    else:
        result = composite(operator)(inputs, dim, dtype)
    return result


class _WideSoftmax(torch.autograd.Function):
    """Softmax of half precision, or its logarithm, in single. CUDA's kernel reads one and writes the other, without a
    copy of the inputs. Source: ATen/native/SoftMax.cpp, `half_to_float`.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, operator: OpOverload, dim: int) -> Tensor:
        """Computes it on the host, and keeps the result."""
        with on_host():
            computed: Tensor = composite(operator)(inputs, dim, torch.float32)
        with _in_kernel(_name(operator)):
            result = computed.clone()
        ctx.save_for_backward(result)
        ctx.dtype, ctx.operator, ctx.dim = inputs.dtype, operator, dim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Computes the gradient of the inputs, by operations that can be differentiated again."""
        (result,) = ctx.saved_tensors
        with on_host():
            if ctx.operator is _aten.log_softmax.int:
                wide = gradient - result.exp() * gradient.sum(ctx.dim, keepdim=True)
            else:
                wide = result * (gradient - (result * gradient).sum(ctx.dim, keepdim=True))
        return wide.to(ctx.dtype), None, None


def _rms_norm(
    inputs: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    def compute(inputs: Tensor, weight: Tensor | None) -> Sequence[Tensor]:
        return (composite(_aten.rms_norm.default)(inputs, normalized_shape, weight, eps),)

    rows = inputs.shape[: inputs.dim() - len(normalized_shape)].numel()
    kernel = FusedKernel(name="rms_norm", compute=compute, kept_bytes=rows * torch.float32.itemsize, is_repeatable=True)
    return run_fused(kernel, inputs, weight)[0]


_ATTENTION: Final = "scaled_dot_product_attention"
_EFFICIENT_ROWS: Final = 32  # queries that the sums of memory-efficient attention are rounded up to


@dataclass
class AttentionCall:
    """Arguments of `scaled_dot_product_attention`, in its order: [N, H, L, E] queries, [N, H, S, E] keys, [N, H, S, V]
    values.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def backend(self, capability: Capability) -> SDPBackend:
        """Returns the kernel that CUDA chooses on a card.

        Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`, and attention.cpp.
        """
        query, key, value = self.query, self.key, self.value
        if query.dim() != 4:
            return SDPBackend.MATH
        widest = 192 if capability in ((8, 6), (8, 9)) else 256
        suits_flash = (
            capability >= AMPERE
            and query.dtype in _HALF
            and self.attn_mask is None
            and query.size(-1) == key.size(-1) == value.size(-1) <= widest
            and (query.size(-2) == key.size(-2) or not self.is_causal)
        )
        if suits_flash and torch.backends.cuda.flash_sdp_enabled():
            return SDPBackend.FLASH_ATTENTION
        # `minimum_gemm_alignment`: 16 bytes where tensor cores multiply.
        with_cores = capability >= AMPERE or (capability >= (7, 0) and query.dtype in _HALF)
        alignment = 16 // query.element_size() if with_cores else 1
        suits_efficient = (
            query.dtype is not torch.float64
            and (query.dtype is not torch.bfloat16 or capability >= AMPERE)
            and query.size(1) == key.size(1) == value.size(1)
            and query.size(-1) % alignment == value.size(-1) % alignment == 0
        )
        if suits_efficient and torch.backends.cuda.mem_efficient_sdp_enabled():
            return SDPBackend.EFFICIENT_ATTENTION
        return SDPBackend.MATH

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values as flash attention takes them, their widths a multiple of 8."""
        width = self.query.size(-1)
        query, key, value = (
            F.pad(item, (0, -width % 8)) if width % 8 else item for item in (self.query, self.key, self.value)
        )
        return query, key, value

    @property
    def factor(self) -> float:
        """Multiplier of the scores."""
        return float(self.query.size(-1) ** -0.5) if self.scale is None else self.scale

    def bias(self) -> Tensor | None:
        """Returns the mask as memory-efficient attention takes it: added to the scores, its rows padded to a multiple
        of 8.
        """
        if (mask := self.attn_mask) is None:
            return None
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, float("-inf")).to(self.query.dtype)
        mask = mask.to(self.query.dtype)
        columns = self.key.size(-2)
        if columns % 8:
            mask = F.pad(mask.expand(*mask.shape[:-1], columns), (0, -columns % 8))[..., :columns]
        return mask.expand(*self.query.shape[:-1], columns)

    def composed(self, *, is_flash: bool = False) -> Callable[..., Sequence[Tensor]]:
        """Returns a function that computes attention with any kernel there is. The result's [N, L, H, V] lie one after
        the other; flash attention's result lies in memory like the queries.

        The function refers to no tensor: a graph would keep the tensor that is computed again in its backward pass.
        """
        attention = partial(
            composite(_aten.scaled_dot_product_attention.default),
            dropout_p=self.dropout_p, is_causal=self.is_causal, scale=self.factor, enable_gqa=self.enable_gqa,
        )  # fmt: skip

        def compute(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Sequence[Tensor]:
            attended = attention(query, key, value, bias).transpose(1, 2).contiguous()
            if is_flash:
                attended = torch.empty_like(query.transpose(1, 2)).copy_(attended)
            return (attended.transpose(1, 2),)

        return compute


def _attention(capability: Capability, *args: Any, **kwargs: Any) -> Tensor:
    call = AttentionCall(*args, **kwargs)
    backend = call.backend(capability)
    batch, heads, queries, width = (1, *call.query.shape)[-4:]
    sums = batch * heads * torch.float32.itemsize
    if backend is SDPBackend.FLASH_ATTENTION:
        backward_bytes = flash_backward_bytes(call.padded()[0])
        kernel = FusedKernel(
            name=_ATTENTION,
            compute=call.composed(is_flash=True),
            kept_bytes=sums * queries,
            backward_bytes=backward_bytes,
        )
        return run_fused(kernel, *call.padded())[0][..., :width]
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        rows = -(-queries // _EFFICIENT_ROWS) * _EFFICIENT_ROWS
        kernel = FusedKernel(
            name=_ATTENTION, compute=call.composed(), kept_bytes=sums * rows, backward_bytes=sums * queries
        )
        return run_fused(kernel, call.query, call.key, call.value, call.bias())[0]
    return composed_attention(*args, **kwargs)


def composed_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Composes attention of matrix products."""
    with sdpa_kernel(SDPBackend.MATH):
        attended: Tensor = composite(_aten.scaled_dot_product_attention.default)(*args, **kwargs)
        return attended


# Memory of cuDNN 9.19 for recurrent layers as measured on an H100, in numbers for each step, sample and hidden unit:
# saved by each layer (the last layer saves a number less), and workspace while it runs. Other cards and versions are
# assumed to need the same.
_KEPT: Final = {"lstm": 6, "gru": 7, "rnn_tanh": 2, "rnn_relu": 2}
_RUNNING: Final = {"lstm": 6, "gru": 5, "rnn_tanh": 5, "rnn_relu": 5}
_RUN_BYTES: Final = 8 * 2**20


def recurrent_kernels(*, has_values: bool) -> Kernels:
    """Returns the kernels of recurrent layers and cells, whose results have values or are tensors without values."""
    layers = [getattr(getattr(_aten, name), overload) for name in _KEPT for overload in ("input", "data")]
    return {
        **{operator: partial(_recurrent, operator, has_values) for operator in layers},
        **{
            operator: partial(_cell, operator, has_values)
            for operator in (_aten.lstm_cell.default, _aten.gru_cell.default)
        },
    }


def _recurrent(operator: OpOverload, has_values: bool, *args: Any) -> tuple[Tensor, ...]:
    """Runs the layers of a recurrent network as cuDNN does, at once."""
    is_packed = operator._overloadname == "data"
    name = _name(operator)
    inputs, states, weights = args[0], args[1 + is_packed], args[2 + is_packed]
    lengths, options = args[1 : 1 + is_packed], args[3 + is_packed :]
    is_lstm = isinstance(states, list | tuple)
    states = list(states) if is_lstm else [states]
    _, layers, dropout, train, bidirectional = options[:5]
    batch_first = not is_packed and options[5]

    def compute(inputs: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
        if not has_values:
            width = tensors[0].size(-1) * (1 + bidirectional)
            made = (torch.empty_like(state) for state in tensors[: len(states)])
            return (inputs.new_empty(*inputs.shape[:-1], width), *made)
        # The CPU's library lacks half precision for some of them.
        with torch.autocast("cpu", enabled=False):
            wide = [tensor.float() if tensor.dtype in _HALF else tensor for tensor in (inputs, *tensors)]
            first, parameters = wide[1 : 1 + len(states)], wide[1 + len(states) :]
            results = composite(operator)(wide[0], *lengths, first if is_lstm else first[0], parameters, *options)
            return [result.to(inputs.dtype) for result in results]

    tensors = _as_autocast(inputs, *states, *weights)
    each = inputs.shape[:-1].numel() * states[-1].size(-1) * (1 + bidirectional)
    size = tensors[0].element_size() * each
    workspace = (_RUNNING[name] + bool(train and dropout and layers > 1)) * size
    if not has_values:
        # Of any batch, and more than some simulated GPUs have.
        workspace += recurrent_bytes(tensors[1 + len(states) :], layers * (1 + bidirectional))
    # cuDNN's steps come first, so tensors whose samples come first are copied: the input, and the result's gradient.
    workspace += tensors[0].nbytes * batch_first
    kernel = FusedKernel(
        name=name,
        compute=compute,
        kept_bytes=(_KEPT[name] * layers - 1) * size * train,
        forward_bytes=workspace,
        backward_bytes=workspace + size * batch_first,
        library=CUDNN,
    )
    return run_fused(kernel, *tensors)


def recurrent_bytes(weights: Sequence[Tensor], runs: int) -> int:
    """Returns the bytes that cuDNN takes for a recurrent network in addition, at any batch: a copy of the weights, and
    a constant, as measured on an H100, for each of the `runs` (layers times directions).
    """
    return sum(weight.nbytes for weight in weights) + runs * _RUN_BYTES


def _cell(operator: OpOverload, has_values: bool, *args: Any) -> tuple[Tensor, ...] | Tensor:
    """Runs a step of an LSTM or a GRU, which CUDA fuses after the two matrix products."""
    inputs, states, weights, state_weights, *biases = args
    is_lstm = operator is _aten.lstm_cell.default
    bias, state_bias = biases or (None, None)
    gates = F.linear(inputs, weights, bias)
    state_gates = F.linear(states[0] if is_lstm else states, state_weights, state_bias)
    (state,) = _as_autocast(states[1] if is_lstm else states)
    if is_lstm:
        gates = state_gates + gates
    else:
        # The gates that reset and keep, and both parts of the new state, before the second part is reset.
        width = gates.size(1) // 3
        summed = state_gates[:, : 2 * width] + gates[:, : 2 * width]
        gates = torch.cat([summed, gates[:, 2 * width :], state_gates[:, 2 * width :]], dim=1)
        del summed
    del state_gates

    def compute(state: Tensor, gates: Tensor) -> Sequence[Tensor]:
        if not has_values:
            return [torch.empty_like(state) for _ in range(1 + is_lstm)]
        if is_lstm:
            into, forget, new, out = gates.chunk(4, dim=1)
            cell = forget.sigmoid() * state + into.sigmoid() * new.tanh()
            return out.sigmoid() * cell.tanh(), cell
        reset, keep, new, state_new = gates.chunk(4, dim=1)
        new = (new + reset.sigmoid() * state_new).tanh()
        return ((state - new) * keep.sigmoid() + new,)

    # A GRU keeps a copy of its state beside four gates. Source: aten/src/ATen/native/cuda/RNN.cu, `workspace`.
    kept_bytes = 0 if is_lstm else state.nbytes
    kernel = FusedKernel(name=_name(operator), compute=compute, kept_bytes=kept_bytes, is_repeatable=True)
    results = run_fused(kernel, state, gates)
    return results if is_lstm else results[0]


def _as_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Casts tensors as autocast does for recurrent layers."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


# Operators that CUDA's autocast computes in single precision and the CPU's in half. Source: ATen/autocast_mode.h,
# AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_PROMOTE. Of those that only the CPU's computes in single
# precision, some (padding, pooling in 3-D, Fourier transforms) have no kernel for half.
_IN_FP32: Final = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "softplus", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "norm.Scalar",
    "norm.ScalarOpt_dim",
)  # fmt: skip
_INTO_FP32: Final = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
_IN_WIDEST: Final = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add",
)  # fmt: skip
_IN_HALF: Final = ("addmv", "addr", "mv", "linalg_multi_dot", "chain_matmul")


def _autocast_kernels() -> Kernels:
    # The loss is composed of operators that have their own places in CUDA's lists.
    kernels: Kernels = {_aten.cross_entropy_loss.default: composite(_aten.cross_entropy_loss.default)}
    for names in (_IN_FP32, _INTO_FP32, _IN_WIDEST, _IN_HALF):
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(_aten, packet, None), overload or "default", None)
            # Older versions of PyTorch lack some.
            if operator is None:
                continue
            if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "AutocastCPU"):
                kernels[operator] = partial(_run_autocast, operator, names)
    return kernels


def _run_autocast(operator: OpOverload, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Runs an operator of one of the lists with the arguments that CUDA's autocast would give it."""

    def is_eligible(tensor: Tensor) -> bool:
        return tensor.is_cpu and tensor.is_floating_point() and tensor.dtype is not torch.float64

    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        if names is _INTO_FP32:
            # These make results of single precision from inputs of half precision, by an argument.
            is_chosen = any(isinstance(argument, torch.dtype) for argument in (*args, *kwargs.values()))
            is_wide = not is_chosen and is_eligible(args[0])
            return operator(*args, **(kwargs | {"dtype": torch.float32} if is_wide else kwargs))
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        is_widest = names is _IN_WIDEST and any(tensor.dtype is torch.float32 for tensor in tensors)
        dtype = torch.float32 if names is _IN_FP32 or is_widest else torch.get_autocast_dtype("cpu")
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.to(dtype) if is_eligible(tensor) else tensor, (args, kwargs)
        )
        # Nothing but the arguments may hold the tensors that were cast: they are freed as CUDA frees them.
        del tensors
        return operator(*args, **kwargs)
