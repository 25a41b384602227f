"""Measures the memory that CUDA takes in addition to tensors: the context and the libraries' kernels outside PyTorch's
allocator, and the libraries' workspaces inside it. Run it in a process that has not used CUDA yet: each library is
loaded only once.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

SIDE: Final = 2048
"""Rows and columns of the matrices. The LSTM is a quarter as wide."""

Step = tuple[str, Callable[[Tensor], Any], tuple[int, ...], torch.dtype]
"""Its name, the computation, and the shape and type of its input."""


def measure_constants(device: torch.device) -> dict[str, Any]:
    """Uses one library after another and measures memory after each.

    Returns:
        `steps`, a dictionary for each step. In bytes: `outside_bytes`, used on the GPU outside this process's allocator
        so far (this includes other processes, so there should be none); `reserved_bytes`, held by the allocator;
        `transient_bytes`, the step's peak without its input and result; `kept_bytes`, memory that the step
        left allocated, for example a workspace.
    """
    steps = [_step(name, compute, torch.zeros(shape, device=device, dtype=dtype))
             for name, compute, shape, dtype in _libraries(device)]  # fmt: skip
    return {"steps": steps}


@torch.no_grad()
def _step(name: str, compute: Callable[[Tensor], Any], x: Tensor) -> dict[str, Any]:
    device = x.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # The result is dropped at once, so that kept_bytes does not count it.
    result_bytes = sum(leaf.nbytes for leaf in tree_leaves(compute(x)))
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    return {
        "after": name,
        "outside_bytes": total_bytes - free_bytes - reserved_bytes,
        "reserved_bytes": reserved_bytes,
        "transient_bytes": torch.cuda.max_memory_allocated(device) - before - result_bytes,
        "kept_bytes": torch.cuda.memory_allocated(device) - before,
    }


def _libraries(device: torch.device) -> Iterator[Step]:
    """Yields the steps one by one, because moving a layer to the GPU may already load kernels."""
    single, half = torch.float32, torch.bfloat16
    yield "context", lambda x: (), (0,), single
    yield "first kernel", lambda x: x + 1, (1,), single
    yield "cuBLAS, fp32", lambda x: x @ x, (SIDE, SIDE), single
    yield "cuBLAS, bf16", lambda x: x @ x, (SIDE, SIDE), half
    yield "cuBLASLt, linear layer", nn.Linear(SIDE, SIDE).to(device, half), (SIDE, SIDE), half
    yield "cuDNN, convolution", nn.Conv2d(64, 64, 3, padding=1).to(device), (16, 64, 64, 64), single
    yield "cuDNN, LSTM", nn.LSTM(SIDE // 4, SIDE // 4, batch_first=True).to(device), (16, 64, SIDE // 4), single
    yield "attention", lambda x: F.scaled_dot_product_attention(x, x, x), (4, 8, 512, 64), half
