import errno
import math
import mmap
import subprocess
import sys

import pytest
import torch

from can_train.errors import DoesNotFitError
from can_train.memory.out_of_memory import (
    CatchOutOfMemory,
    headline,
    is_host_memory,
    is_out_of_memory,
    obtainable_bytes,
    without_others,
)

REAL = {
    "pytorch 16417": "CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB "
    "already allocated; 9.28 GiB free; 4.68 MiB cached)",
    "pytorch 59778": "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB "
    "already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)",
    "FramePack 369": "CUDA out of memory. Tried to allocate 30.29 GiB. GPU 0 has a total capacity of 10.74 GiB of "
    "which 3.69 GiB is free. Including non-PyTorch memory, this process has 6.68 GiB memory in use.",
    "nccl 1284": "CUDA out of memory. Tried to allocate more than 1EB memory.",
    "yolov5 4463, data parallel": "Caught RuntimeError in replica 0 on device 0.\nOriginal Traceback (most recent call "
    'last):\n  File "parallel_apply.py", line 61, in _worker\nRuntimeError: CUDA out of memory. Tried'
    " to allocate 20 MiB",
    "nunchaku 144": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "expandable segments": "CUDA driver error: out of memory",
    "3D Gaussian splatting": "std::bad_alloc: cudaErrorMemoryAllocation: out of memory",
    "neural-motifs 58": "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25",
    "TheRock 1054": "HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 GiB of which "
    "15.09 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch",
    "hip": "HIP error: out of memory\nHIP kernel errors might be asynchronously reported at some other API call",
    "hip, name alone": "Failed to allocate memory: hipErrorOutOfMemory",
    "iree 18864": "RESOURCE_EXHAUSTED; HIP driver error 'hipErrorOutOfMemory' (2): out of memory",
    "hip, older name": "hipErrorMemoryAllocation",
    "cuda, name alone": "cudaMallocAsync failed: cudaErrorMemoryAllocation",
    "driver, name alone": "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "torch-xpu-ops 1324": "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB.",
    "torch-xpu-ops 1598": "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "intel-extension-for-pytorch": "Native API failed. Native API returns: -6 (PI_ERROR_OUT_OF_HOST_MEMORY)",
    "ComfyUI 7440": "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: "
    "27.20 GiB). Tried to allocate 292.50 MiB on private pool.",
    "pinokio 941": "MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max allowed: "
    "18.13 GB). Tried to allocate 256 bytes on shared pool.",
    "pytorch 141909": "Invalid buffer size: 19.45 GB",
    "ComfyUI-SUPIR 151": "Invalid buffer size: 19.38 GiB",
    "Metal": "Execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "pytorch 20123": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN 9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "marqo 101": "Unable to find a valid cuDNN algorithm to run convolution",
    "Qwen3 873": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "TheRock 1708": "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "pytorch 24838": "cublas runtime error : resource allocation failed at /opt/conda/conda-bld/pytorch_1556653099582/"
    "work/aten/src/THC/THCGeneral.cpp:228",
    "cuSOLVER": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuSPARSE": "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpMM( handle, opa, opb)`",
    "pytorch 6511": "cuFFT error: CUFFT_ALLOC_FAILED",
    "MIOpen": "miopen error: miopenStatusAllocFailed",
    "Triton": "Triton Error [CUDA]: out of memory",
    "nccl 1235": "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version 2.19.3\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
    "nccl, newer": "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.26.2\nLast error:\n"
    "Cuda failure 2 'out of memory'",
    "rccl": "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version 2.21.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nHIP failure 'out of memory'",
    "nccl, calloc": "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async "
    "2432 bytes",
    "mxfold2 20": "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)",
    "MKLpy 27": "[enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 5077901088 bytes.",
    "pytorch 20618": "[enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
    "torch 1.0": "$ Torch: not enough memory: you tried to allocate 4GB. Buy new RAM!",
    "libstdc++": "std::bad_alloc",
}

MENTIONS = {
    "illegal access": "CUDA error: an illegal memory access was encountered",
    "misaligned": "CUDA error: misaligned address\nCUDA kernel errors might be asynchronously reported",
    "assertion": "CUDA error: device-side assert triggered",
    "advice": "Loss is nan. Lower the learning rate; if you then see CUDA out of memory errors, lower the batch size",
    "shared location": "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
    "single memory location. Please clone() the tensor before performing the operation.",
    "loader, shared memory": "DataLoader worker (pid(s) 4242) exited unexpectedly. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit.",
    "shared memory object": "unable to open shared memory object </torch_27_1> in read-write mode: Too many open files",
    "kernel resources": "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block "
    "sizes or `num_stages` may help.",
    "pinning": "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    "memory format": "required rank 4 tensor to use channels_last memory format",
    "not initialised": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "no engine": "GET was unable to find an engine to execute this computation",
    "no engine, benchmark": "FIND was unable to find an engine to execute this computation",
    "hip, other": "hipErrorIllegalAddress",
    "FFT": "cuFFT error: CUFFT_INTERNAL_ERROR",
    "device lost": "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "NCCL": "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled cuda error\nLast error:\n"
    "Cuda failure 'invalid argument'",
    "buffer without memory": "Invalid buffer size: 0",
    "RCCL": "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled cuda error\nLast error:\n"
    "HIP failure 'invalid argument'",
    "setting": "Unrecognized key 'max_split_size' in CUDA caching allocator config",
}


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    error.__suppress_context__ = True
    return error


def with_context(error: BaseException, context: Exception) -> BaseException:
    error.__context__ = context
    return error


@pytest.mark.parametrize("message", REAL.values(), ids=REAL.keys())
def test_real_messages_are_recognised(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize("message", MENTIONS.values(), ids=MENTIONS.keys())
def test_messages_that_merely_mention_memory_are_refused(message: str) -> None:
    assert not is_out_of_memory(RuntimeError(message))


def test_the_lists_are_as_long_as_promised() -> None:
    assert len(REAL) >= 25
    assert len(MENTIONS) >= 10


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("any text"), torch.cuda.OutOfMemoryError(), MemoryError()])
def test_classes_count_whatever_the_text(error: BaseException) -> None:
    assert is_out_of_memory(error)


def test_a_real_failure_of_the_cpu_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_refusal_of_the_system_to_map_memory_is_recognised() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        mmap.mmap(-1, 2**62)
    wrapped = with_cause(RuntimeError("a sample could not be read"), caught.value)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(wrapped)
    assert is_host_memory(wrapped)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError("Cannot allocate memory")])
def test_other_refusals_of_the_system_are_not_one(error: OSError) -> None:
    assert not is_out_of_memory(error)
    assert not is_host_memory(error)


def test_an_error_that_only_quotes_a_message_is_refused() -> None:
    assert not is_out_of_memory(KeyError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(ValueError("CUDA out of memory. Tried to allocate 2 GiB"))


def test_an_error_raised_from_an_out_of_memory_is_one() -> None:
    assert is_out_of_memory(with_cause(RuntimeError("backend='inductor' raised:"), torch.OutOfMemoryError()))


def test_an_error_raised_while_handling_an_out_of_memory_is_one() -> None:
    assert is_out_of_memory(with_context(ValueError("while cleaning up"), MemoryError()))


def test_an_error_that_denies_its_context_is_not_one() -> None:
    error = with_context(ValueError("unrelated"), MemoryError())
    error.__suppress_context__ = True
    assert not is_out_of_memory(error)


def test_a_stop_request_during_an_out_of_memory_is_not_one() -> None:
    assert not is_out_of_memory(with_context(KeyboardInterrupt(), MemoryError()))


def test_the_verdict_that_nothing_fits_is_not_one() -> None:
    assert not is_out_of_memory(with_cause(DoesNotFitError("One sample must fit", remedy=""), MemoryError()))


def test_a_chain_that_loops_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_the_module_does_not_import_torch() -> None:
    module = "can_train.memory.out_of_memory"
    code = f"import sys, {module} as m; print(m.is_out_of_memory(MemoryError()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize(
    ("message", "headline_of_it"),
    [
        (
            "CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has a total capacity of 40.00 MiB of which",
            "CUDA out of memory. Tried to allocate 12.00 MiB",
        ),
        ("CUDA error: out of memory\nCUDA kernel errors might be", "CUDA error: out of memory"),
        ("", "OutOfMemoryError"),
        ("x" * 1000, "x" * 160),
    ],
)
def test_the_headline_is_what_was_asked_for(message: str, headline_of_it: str) -> None:
    assert headline(torch.OutOfMemoryError(message)) == headline_of_it


def test_a_block_ends_quietly_at_an_out_of_memory_and_at_nothing_else() -> None:
    after = []
    with CatchOutOfMemory():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    after.append("went on")
    with pytest.raises(ValueError, match="shapes differ"), CatchOutOfMemory():
        raise ValueError("shapes differ")
    assert after == ["went on"]


@pytest.mark.parametrize(
    ("foreign_mib", "remedy"),
    [(0, "Take less"), (12, "Other processes hold 12.0 MiB (nvidia-smi): try again without them, or take less")],
)
def test_other_processes_are_blamed_only_where_they_hold_memory(foreign_mib: int, remedy: str) -> None:
    assert without_others(foreign_mib * 2**20, "take less") == remedy


CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.50 GiB is "
    "free. Process 12 has 60.00 GiB memory in use. Process 7 has 17.60 GiB memory in use. Of the allocated memory "
    "16.00 GiB is allocated by PyTorch, with 32.00 MiB allocated in private pools (e.g., CUDA Graphs), and 512.00 MiB "
    "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
)


def test_what_could_be_had_when_memory_ran_out_is_read_from_the_text() -> None:
    wrapped = RuntimeError("a compiler's")
    wrapped.__cause__ = torch.OutOfMemoryError(CUDA_TEXT)
    for error in (torch.OutOfMemoryError(CUDA_TEXT), wrapped):
        # The text is rounded: it may have been some MiB more, and never less.
        assert 18 * 2**30 <= obtainable_bytes(error) <= 18 * 2**30 + 2**24
    assert obtainable_bytes(MemoryError()) == math.inf
