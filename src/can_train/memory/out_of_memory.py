"""Decides whether an error means that memory ran out, on whichever device and behind whichever wrapper."""

import errno
import math
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from traceback import clear_frames
from types import TracebackType
from typing import Final, Self

from can_train.errors import CanTrainError

# Wordings of a failed allocation, each with the source file that writes it.
_PATTERNS: Final = (
    (r"(?:^|: )(?:CUDA|HIP|XPU|NPU) out of memory\b", "c10/cuda/CUDACachingAllocator.cpp and its ports"),
    (r"(?:^|: )MPS backend out of memory\b", "aten/src/ATen/mps/MPSAllocator.mm"),
    (r"^Invalid buffer size: [\d.]+ [KMG]i?B\b", "aten/src/ATen/mps/MPSAllocator.mm, for a tensor above any buffer"),
    (r"\bkIOGPUCommandBufferCallbackErrorOutOfMemory\b", "Metal's error of a command buffer"),
    (r"\b(?:CUDA|HIP)(?: driver)? error: out of memory\b", "c10/cuda/CUDAException.cpp, c10/cuda/driver_api.h"),
    (r"\b(?:cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY)\b", "cuda.h, driver_types.h; CuPy, RMM and Thrust"),
    (r"\bhipError(?:OutOfMemory|MemoryAllocation)\b", "hip_runtime_api.h"),
    (r"\bcuda runtime error \(2\) ?: out of memory\b", "THC/THCGeneral.cpp, before torch 1.8"),
    (r"\bTriton Error \[(?:CUDA|HIP)\]: out of memory\b", "triton, third_party/nvidia/backend/driver.c"),
    (r"\bCUDNN_STATUS_ALLOC_FAILED\b", "aten/src/ATen/cudnn/Exceptions.h"),
    (r"\bCUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED\b", "cudnn_graph.h, from cuDNN 9"),
    (r"\bUnable to find a valid cuDNN algorithm to run convolution\b", "Conv_v7.cpp: hides its own out-of-memory"),
    (r"\b(?:CU|HIP)(?:BLAS|SPARSE|SOLVER)_STATUS_ALLOC_FAILED\b", "aten/src/ATen/cuda/Exceptions.h"),
    (r"\bCUSPARSE_STATUS_INSUFFICIENT_RESOURCES\b", "cusparse.h: the workspace of a sparse product"),
    (r"\bcublas runtime error : resource allocation failed\b", "THC/THCGeneral.cpp, before torch 1.8"),
    (r"\b(?:CU|HIP)FFT_ALLOC_FAILED\b", "aten/src/ATen/native/cuda/CuFFTUtils.h"),
    (r"\bmiopenStatusAllocFailed\b", "aten/src/ATen/miopen/Exceptions.h"),
    (r"\b(?:C[Uu][Dd][Aa]|HIP) failure (?:\d+ )?'out of memory'", "NCCL, RCCL: src/include/checks.h, as last error"),
    (r"\bFailed to (?:CUDA|HIP) (?:calloc|malloc|host alloc)\b", "NCCL, src/include/alloc.h, quoted as its last error"),
    (r"\b(?:UR|PI|ZE)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b", "Unified Runtime and Level Zero"),
    (r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b", "c10/core/impl/alloc_cpu.cpp"),
    (r"\bposix_memalign\(&data, gAlignment, nbytes\) == 0\. 12 vs 0", "c10/core/CPUAllocator.cpp, before torch 1.2"),
    (r"\$ Torch: not enough memory: you tried to allocate\b", "TH/THGeneral.cpp, before torch 1.2"),
    (r"^std::bad_alloc$", "the C++ library, translated in torch/csrc/Exceptions.h"),
)  # fmt: skip

# Left out, because they name other faults as often: `*_STATUS_NOT_INITIALIZED`, `CUFFT_INTERNAL_ERROR`, `unable to find
# an engine`, `OUT_OF_RESOURCES` (Triton means the shared memory of one kernel), and the shared memory of a data loader:
# a smaller batch does not help there.
_OUT_OF_MEMORY: Final = re.compile("|".join(f"(?:{pattern})" for pattern, _ in _PATTERNS), re.MULTILINE)

# The wordings among them that mean the host's memory.
_HOST: Final = re.compile(
    r"\bDefaultCPUAllocator: |\bposix_memalign\(|\$ Torch: not enough memory: |^std::bad_alloc$|_OUT_OF_HOST_MEMORY\b",
    re.MULTILINE,
)

# Pause before the first retry of a single sample or an optimizer step, which cannot be split; it doubles with each
# retry. Another process may free memory.
FIRST_WAIT_S: Final = 0.1
# The text of CUDA's allocator about the device's memory, as it was when memory ran out.
_SIZE: Final = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_OBTAINABLE: Final = re.compile(
    rf"of which {_SIZE} is free\..* {_SIZE} is allocated by PyTorch,.* {_SIZE} is reserved by PyTorch but unallocated",
    re.DOTALL,
)
_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_HALF_DIGIT: Final = 0.005  # of a number with two decimals
_TRIED: Final = re.compile(r".*?Tried to allocate [\d.]+ (?:[KMGTP]iB|bytes)")
_LONGEST: Final = 160  # characters that are quoted of a message that does not say how much it tried to allocate


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error, or an error in its chain of causes and contexts, is a failed allocation.

    `torch.OutOfMemoryError` and `MemoryError` are recognised by class, an `OSError` by its number `ENOMEM`; runtime
    errors of CUDA, HIP, XPU, MPS, cuDNN, cuBLAS, cuSPARSE, cuSOLVER, cuFFT, NCCL and the CPU allocator by message, also
    inside a compiler's wrapper. A `CanTrainError` never counts, with any cause: somebody has handled the out-of-memory
    already.
    """
    if isinstance(error, CanTrainError) or not isinstance(error, Exception):
        return False
    # An error of torch's class exists only where torch is imported already, so this module need not import it.
    torch = sys.modules.get("torch")
    classes = (MemoryError, torch.OutOfMemoryError) if torch else (MemoryError,)
    # Torch and its libraries raise RuntimeError; a KeyError or ValueError only quotes such a message.
    return any(
        isinstance(link, classes)
        or _is_refused_by_system(link)
        or (isinstance(link, RuntimeError) and _OUT_OF_MEMORY.search(str(link)))
        for link in error_chain(error)
    )


def is_host_memory(error: BaseException) -> bool:
    """Tells whether an out-of-memory error is about the host's memory."""
    return any(
        isinstance(link, MemoryError) or _is_refused_by_system(link) or _HOST.search(str(link)) is not None
        for link in error_chain(error)
    )


def _is_refused_by_system(error: BaseException) -> bool:
    """Tells whether the system refused memory: to a mapped file, or to a new process."""
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def headline(error: BaseException) -> str:
    """Returns the first line of an out-of-memory error, up to how much it tried to allocate."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    tried = _TRIED.match(line)
    return tried[0] if tried else line[:_LONGEST]


def obtainable_bytes(error: BaseException) -> float:
    """Returns the most bytes that this process could have had when memory ran out: its reserved bytes, and the free
    bytes of the device, as the error's text has them with two decimals. Infinite where the text does not have them.
    """
    match = next((match for link in error_chain(error) if (match := _OBTAINABLE.search(str(link)))), None)
    if match is None:
        return math.inf
    numbers, units = match.groups()[::2], match.groups()[1::2]
    return sum((float(number) + _HALF_DIGIT) * _UNITS[unit] for number, unit in zip(numbers, units, strict=True))


class CatchOutOfMemory(AbstractContextManager["CatchOutOfMemory"]):
    """A block that an out-of-memory error ends without being raised further.

    After the block, nothing that the failed work had allocated is held any more. Code that tries again must stand after
    the block, not in an `except` clause, where the error keeps every tensor of the failed pass alive.
    """

    message = ""  # headline of the error; empty where none was caught

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.message = headline(error)
        # Somebody may keep the error (a logger, the autograd engine), and its frames would keep their tensors. A
        # suppressed context (`raise ... from None`) is not printed, but it has frames too.
        forget_frames(error)
        return True


def forget_frames(error: BaseException) -> None:
    """Lets go of everything that the frames of an error, of its causes and contexts hold."""
    for link in error_chain(error, suppressed=True):
        clear_frames(link.__traceback__)
        link.__traceback__ = None


def error_chain(error: BaseException, *, suppressed: bool = False) -> Iterator[BaseException]:
    """Yields the error and its causes and contexts, as a traceback prints them; each once, as chains may have loops."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        context = link.__context__ if suppressed or not link.__suppress_context__ else None
        link = link.__cause__ or context


def without_others(foreign_bytes: int, otherwise: str) -> str:
    """Words the remedy for missing memory: wait for other processes where they hold some, else `otherwise`."""
    if foreign_bytes > 0:
        held = f"Other processes hold {foreign_bytes / 2**20:,.1f} MiB (nvidia-smi)"
        return f"{held}: try again without them, or {otherwise}"
    return otherwise[0].upper() + otherwise[1:]
