"""What the meter says of CUDA is what CUDA says of itself."""

import time
from collections.abc import Iterator

import pytest
import torch

from can_train.memory.meters import CudaMeter, open_meter

MIB = 2**20
GIB = 2**30

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]


@pytest.fixture
def meter() -> Iterator[CudaMeter]:
    torch.cuda.empty_cache()
    # With can-train's settings: otherwise cuBLAS may keep a workspace in the middle of a large cached segment.
    meter = open_meter("cuda")
    assert isinstance(meter, CudaMeter)
    yield meter
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_readings_are_the_allocators(meter: CudaMeter) -> None:
    meter.reset_peak()
    before = meter.allocated_bytes()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=meter.device)
    assert meter.allocated_bytes() - before == block.nbytes
    assert meter.allocated_bytes() == torch.cuda.memory_allocated()
    del block
    assert meter.peak_bytes() - before == 64 * MIB
    assert meter.peak_bytes() == torch.cuda.max_memory_allocated()
    assert meter.peak_reserved_bytes() == torch.cuda.max_memory_reserved() >= meter.peak_bytes()
    meter.reset_peak()
    assert meter.peak_bytes() == before


def test_a_kernel_takes_no_more_than_the_meter_tells(meter: CudaMeter) -> None:
    rows = torch.zeros(2**18, 256, device=meter.device)
    meter.reset_peak()
    before = meter.peak_bytes()
    rows.sum(0)
    assert meter.kernel_bytes / 2 < meter.peak_bytes() - before <= 1.01 * meter.kernel_bytes


def test_what_is_cached_is_available_and_nobody_elses(meter: CudaMeter) -> None:
    block = torch.empty(256 * MIB, dtype=torch.uint8, device=meter.device)
    del block
    assert torch.cuda.memory_reserved() >= 256 * MIB
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert meter.total_bytes == total_bytes
    assert meter.available_bytes() == min(free_bytes + torch.cuda.memory_reserved(), meter.capacity_bytes)


def test_release_gives_the_cache_back_to_the_driver(meter: CudaMeter) -> None:
    block = torch.empty(512 * MIB, dtype=torch.uint8, device=meter.device)
    held, _ = torch.cuda.mem_get_info()
    del block
    meter.release()
    free, _ = torch.cuda.mem_get_info()
    # Its first and its last page of 20 MiB may be in use by others.
    assert free - held >= (512 - 2 * 20) * MIB
    assert torch.cuda.memory_reserved() < 512 * MIB


def test_a_release_of_the_cache_for_an_allocation_is_counted(meter: CudaMeter) -> None:
    torch.cuda.set_per_process_memory_fraction(GIB / meter.total_bytes)
    before = meter.retries()
    block = torch.empty(800 * MIB, dtype=torch.uint8, device=meter.device)
    del block
    # Small blocks have pages of their own, for which the large block's must go.
    small = [torch.empty(MIB // 2, dtype=torch.uint8, device=meter.device) for _ in range(600)]
    assert len(small) == 600
    assert meter.retries() == before + 1


@pytest.mark.skipif(
    not hasattr(torch.cuda, "get_per_process_memory_fraction"), reason="this torch does not tell its memory fraction"
)
def test_the_capacity_is_what_the_process_may_use(meter: CudaMeter) -> None:
    torch.cuda.set_per_process_memory_fraction(GIB / meter.total_bytes)
    limited = CudaMeter(meter.device)
    assert GIB - MIB <= limited.capacity_bytes <= GIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(GIB + MIB, dtype=torch.uint8, device=meter.device)
    assert limited.available_bytes() <= limited.capacity_bytes


def test_without_a_limit_the_capacity_is_what_is_free(meter: CudaMeter) -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert meter.capacity_bytes <= total_bytes
    assert meter.capacity_bytes >= free_bytes - 64 * MIB


def test_the_driver_and_the_card_are_named(meter: CudaMeter) -> None:
    assert meter.name == torch.cuda.get_device_name(0)
    assert meter.key.endswith("gb")


def test_the_time_between_moments_is_the_devices(meter: CudaMeter) -> None:
    factor = torch.ones(4096, 4096, device=meter.device)
    _ = factor @ factor
    torch.cuda.synchronize()
    begun, host = meter.moment(), time.perf_counter()
    for _ in range(50):
        _ = factor @ factor
    ended, queued = meter.moment(), time.perf_counter() - host
    measured = meter.seconds_between(begun, ended)
    # Two events do not wait for the products between them.
    assert queued < measured <= time.perf_counter() - host
