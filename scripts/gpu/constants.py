"""What CUDA takes beside tensors: the context and the libraries' kernels outside PyTorch's allocator, the libraries'
workspaces inside it. The libraries are used one by one, in a process that has used none before.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

SIDE: Final = 2048
"""Side of the matrices; the recurrent layer has a quarter of it."""

Step = tuple[str, Callable[[Tensor], Any], tuple[int, ...], torch.dtype]
"""Name, what is computed, and shape and type of its input."""


def measure_constants(device: torch.device) -> dict[str, Any]:
    """Uses one library after another, and reads the driver and the allocator after each.

    Returns:
        For each step, in bytes: what is used of the GPU outside this process's allocator, so far (other processes'
        memory counts, so there should be none); what the allocator has reserved; what the step needed of it at most
        beside input and result; and how much of that it left allocated, a workspace that is kept.
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
    # Only the size is kept of the result.
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
    """Makes each step when it is its turn: a layer that goes to the GPU may load kernels."""
    single, half = torch.float32, torch.bfloat16
    yield "context", lambda x: (), (0,), single
    yield "first kernel", lambda x: x + 1, (1,), single
    yield "cuBLAS, fp32", lambda x: x @ x, (SIDE, SIDE), single
    yield "cuBLAS, bf16", lambda x: x @ x, (SIDE, SIDE), half
    yield "cuBLASLt, linear layer", nn.Linear(SIDE, SIDE).to(device, half), (SIDE, SIDE), half
    yield "cuDNN, convolution", nn.Conv2d(64, 64, 3, padding=1).to(device), (16, 64, 64, 64), single
    yield "cuDNN, LSTM", nn.LSTM(SIDE // 4, SIDE // 4, batch_first=True).to(device), (16, 64, SIDE // 4), single
    yield "attention", lambda x: F.scaled_dot_product_attention(x, x, x), (4, 8, 512, 64), half
