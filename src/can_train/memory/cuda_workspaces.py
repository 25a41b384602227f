"""Memory that CUDA's kernels and libraries take for a short time, by the kernels' formulas: cuBLAS, cuDNN, sums, flash
attention.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_aten: Final = torch.ops.aten
CUDNN: Final = "cuDNN workspaces"
Capability = tuple[int, int]
"""Compute capability of a GPU."""
AMPERE: Final[Capability] = (8, 0)
_CAPABILITIES: Final[Mapping[str, Capability]] = {
    "pascal": (6, 0),
    "volta": (7, 0),
    "turing": (7, 5),
    "ampere": AMPERE,
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
}  # the lowest of each generation's cards in the catalogue
_OLDEST: Final[Capability] = (6, 0)
# Generations whose kernels take different memory: Volta's take as much as Turing's, and Blackwell's as Hopper's.
_DIFFERENT: Final = ("hopper", "ada", "ampere", "turing", "pascal")


def capability_of(generation: str) -> Capability:
    """Returns the compute capability of a generation of the catalogue; where it is unknown, that of the oldest, whose
    attention takes most.
    """
    return _CAPABILITIES.get(generation, _OLDEST)


def generations_like(generation: str) -> tuple[str, ...]:
    """Returns the generations that a GPU may be of: its own, or all that differ where it is unknown."""
    return (generation,) if generation in _CAPABILITIES else _DIFFERENT


def kernel_bytes(func: Any, args: tuple[Any, ...], result: Any, *, resident_threads: int) -> Iterator[int]:
    """Yields the bytes that PyTorch's kernels take for an operation in addition to its results, one after the other."""
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        yield flash_backward_bytes(args[1])
    elif func in (_aten.sum.dim_IntList, _aten.mean.dim) and args[1] and is_on_gpu(result):
        yield sum_bytes(args[0], args[1], resident_threads=resident_threads)
    elif func is _aten.convolution_backward.default and is_on_gpu(result[2]):
        # The gradient of the bias.
        yield sum_bytes(args[0], (0, *range(2, args[0].dim())), resident_threads=resident_threads)


_FLASH_ROWS: Final = 128  # queries that flash attention's backward kernel works on at once
_FLASH_WIDTHS: Final = (32, 64)  # it rounds widths up to multiples of 32 (to at most 128), or of 64 (wider)


def flash_backward_bytes(query: Tensor) -> int:
    """Returns the bytes of flash attention's backward kernel, in single precision, in addition to the gradients.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`: `softmax_d` and `dq_accum`.
    """
    batch, heads, queries, width = query.shape
    rows = -(-queries // _FLASH_ROWS) * _FLASH_ROWS
    unit = _FLASH_WIDTHS[width > 128]
    return batch * heads * rows * (1 + -(-width // unit) * unit) * torch.float32.itemsize


# Numbers of a block of threads in a reduction. Source: aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig`.
_BLOCK_THREADS: Final = 512
_WARP_THREADS: Final = 32
_VECTOR: Final = 4  # numbers that a thread loads at once
_LONG_SUM: Final = 128  # in sums of at least so many numbers, a thread loads several numbers of one result
_FEW_VALUES: Final = 16  # that a thread adds up, where the GPU is not full
_MANY_VALUES: Final = 256  # at least so many values a thread let blocks share a sum
_INDEXED_BYTES: Final = 2**31 - 1  # larger tensors are halved
SUM_BYTES_PER_THREAD: Final = 512
"""The most that a sum over rows takes for each thread that a GPU runs at once, where it has rows for all of them: an
H100 takes 132 MiB."""


def sum_bytes(source: Tensor, dims: Sequence[int], *, resident_threads: int) -> int:
    """Returns the bytes of a sum over dimensions in addition to its result: the partial sums that blocks of threads
    write to the GPU's memory, where several blocks share a number of the result. The gradient of a bias is such a sum.

    Source: aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig` and `global_memory_size`.
    """
    reduced, kept = _axes_of_sum(source, dims)
    num_inputs, num_outputs = (math.prod(size for _, size in axes) for axes in (reduced, kept))
    if num_inputs <= 1 or not num_outputs:
        return 0
    along_inputs = not kept or reduced[0][0] < kept[0][0]
    width, height, vector = _block_of_sum(reduced, kept, along_inputs)
    num_threads = width * height
    values = -(-num_inputs // (width if along_inputs else 1))
    if values < min(height * _FEW_VALUES, _MANY_VALUES):
        return 0
    values = -(-values // height)
    grid = -(-(num_outputs // vector) // (1 if along_inputs else width))
    most = resident_threads // num_threads
    if values < _MANY_VALUES or grid > most:
        return 0
    shares = max(min(-(-most // grid), -(-values // _FEW_VALUES)), -(-values // _MANY_VALUES))
    parts = num_outputs * shares * (1 if along_inputs else width * vector)
    return parts * max(source.element_size(), torch.float32.itemsize) if shares > 1 else 0


def _axes_of_sum(source: Tensor, dims: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns strides and sizes of the axes that are summed over, and of the axes that stay, smallest strides first;
    neighbouring axes that are contiguous in memory are merged.
    """
    summed = {dim % max(source.dim(), 1) for dim in dims} or set(range(source.dim()))
    layout = source.stride(), source.shape
    axes = [[stride, size, dim in summed] for dim, (stride, size) in enumerate(zip(*layout, strict=True))]
    while source.element_size() * (1 + sum(stride * (size - 1) for stride, size, _ in axes)) > _INDEXED_BYTES:
        longest = max(axes, key=lambda axis: axis[0] * (axis[1] - 1))
        longest[1] = -(-longest[1] // 2)
    merged: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for stride, size, is_summed in sorted(axes):
        kind = merged[not is_summed]
        if kind and size != 1 and kind[-1][0] * kind[-1][1] == stride:
            kind[-1] = (kind[-1][0], kind[-1][1] * size)
        elif size != 1:
            kind.append((stride, size))
    return merged


def _block_of_sum(
    reduced: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]], along_inputs: bool
) -> tuple[int, int, int]:
    """Returns the threads of a block along the fastest axis and across it, and the numbers that each loads at once
    where they belong to different results.
    """
    across, along = (
        math.prod(size for _, size in axes) for axes in ((kept, reduced) if along_inputs else (reduced, kept))
    )
    vector = 1
    if along_inputs and reduced[0][0] == 1 and along >= _LONG_SUM and len(reduced) == 1:
        along //= _VECTOR
    elif not along_inputs and kept[0][0] == 1:
        vector = math.gcd(_VECTOR, kept[0][1], *(stride for stride, _ in (*kept[1:], *reduced)))
        along //= vector
    most = _BLOCK_THREADS // vector
    along, across = (min(1 << (max(count, 1).bit_length() - 1), most) for count in (along, across))
    width = min(along, _WARP_THREADS)
    height = min(across, most // width)
    return min(along, most // height), height, vector


TENSORS: Final = "tensors"
CUBLAS: Final = "cuBLAS workspaces"
# Workspace of cuBLAS for each thread that multiplies matrices: `:4096:2:16:8`, and 32 MiB from Hopper on.
# Source: aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`.
_CUBLAS_BYTES: Final = (4096 * 2 + 16 * 8) * 1024
_CUBLAS_BYTES_HOPPER: Final = 32 * 2**20
_FILLED: Final = 4  # channels are filled up to multiples of 16 bytes
_LEAST_CHANNELS: Final = 8  # colours are too few for tensor cores
_FILTER_GRADIENT_BYTES: Final = 2 * 2**20  # of cuDNN's workspace for the gradient of filters, beyond its copies


def cudnn_bytes(func: Any, args: tuple[Any, ...], result: Any) -> Iterator[int]:
    """Yields the workspaces that cuDNN takes for a dense convolution of 3 × 3 in single precision, one after the other.

    Tensor cores compute it in TF32, from images whose channels come last, in fours. PyTorch's come first, so cuDNN
    copies images and filters: in the forward pass the input, and the output where channels are filled up; for each of
    the two gradients both images. Two copies of the filters for the gradient of the input, and a little more for the
    filters' own gradient, agree best with every second published peak of generated CNNs (scripts/bench/prediction
    measured): they decide whether a workspace fits where an earlier workspace was.
    """
    if func is _aten.convolution.default:
        source, weight, groups, images = args[0], args[1], args[8], [args[0], result]
    elif func is _aten.convolution_backward.default:
        source, weight, groups, images = args[1], args[2], args[9], [args[0], args[1]]
    else:
        return
    is_dense = groups == 1 and weight.shape[2:] == (3, 3) and min(weight.shape[:2]) >= _LEAST_CHANNELS
    if not is_dense or source.dtype is not torch.float32:
        return
    filters, of_images = _filled_bytes(weight, 0, 1), [_filled_bytes(image, 1) for image in images]
    if func is _aten.convolution.default:
        is_filled_up = any(channels % _FILLED for channels in weight.shape[:2])
        yield filters + sum(of_images if is_filled_up else of_images[:1])
        return
    if is_on_gpu(result[0]):
        yield 2 * filters + sum(of_images)
    if is_on_gpu(result[1]):
        yield filters + sum(of_images) + _FILTER_GRADIENT_BYTES


def _filled_bytes(tensor: Tensor, *dims: int) -> int:
    """Returns the bytes of a tensor whose channels, in these dimensions, are filled up."""
    size = tensor.element_size()
    for dim, length in enumerate(tensor.shape):
        size *= -(-length // _FILLED) * _FILLED if dim in dims else length
    return size


def cublas_bytes(capability: Capability, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the bytes of cuBLAS's workspace for a thread: by default, or as the user's variable says, `:4096:8`."""
    pairs = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    chosen = sum(int(size) * int(count) for size, count in pairs) * 1024
    return chosen or (_CUBLAS_BYTES if capability < (9, 0) else _CUBLAS_BYTES_HOPPER)


def is_on_gpu(value: Any) -> bool:
    """Whether a value is a fake tensor on CUDA."""
    return isinstance(value, FakeTensor) and value.device.type == "cuda"
