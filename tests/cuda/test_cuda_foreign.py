"""Memory that a second process takes and gives back."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.memory.meters import CudaMeter, open_meter

MIB = 2**20
GIB = 2**30
SAMPLES = 16
RETURN_S = 20.0
"""Seconds within which the driver has given a dead process's memory back."""

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]

HOLD = """
import sys, torch
block = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.readline()
"""


Take = Callable[[int], subprocess.Popen[str]]


@pytest.fixture
def meter() -> CudaMeter:
    torch.cuda.empty_cache()
    # With can-train's settings: otherwise cuBLAS may keep a workspace in the middle of a large cached segment.
    meter = open_meter("cuda")
    assert isinstance(meter, CudaMeter)
    return meter


@pytest.fixture
def take() -> Iterator[Take]:
    """Starts processes that hold some bytes of the GPU until their input ends."""
    started: list[subprocess.Popen[str]] = []

    def start(size: int) -> subprocess.Popen[str]:
        other = subprocess.Popen(
            [sys.executable, "-P", "-c", HOLD, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(other)
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        return other

    yield start
    for other in started:
        leave(other)


def leave(other: subprocess.Popen[str]) -> None:
    if other.poll() is None:
        other.communicate("\n")
    for pipe in (other.stdin, other.stdout):
        if pipe is not None:
            pipe.close()


def wait_until(condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + RETURN_S
    while not condition() and time.monotonic() < ends:
        time.sleep(0.1)
    return condition()


def test_what_another_process_takes_is_seen_and_so_is_its_return(meter: CudaMeter, take: Take) -> None:
    assert meter.foreign_bytes() < 64 * MIB
    other = take(2 * GIB)
    assert meter.foreign_bytes() >= 2 * GIB
    leave(other)
    assert wait_until(lambda: meter.foreign_bytes() < 64 * MIB)


def test_an_out_of_memory_that_another_process_causes_is_rescued(meter: CudaMeter, take: Take) -> None:
    model = nn.Linear(4, 1).to(meter.device)
    x = torch.ones(SAMPLES, 4, device=meter.device)

    def losses_of(start: int, stop: int) -> Losses:
        torch.empty((stop - start) * 256 * MIB, dtype=torch.uint8, device=meter.device)
        return {"loss": (model(x[start:stop]).sum(), float(stop - start))}

    batcher = MicroBatcher(model, meter=meter)
    assert batcher.run(losses_of, SAMPLES).micro_batches == (SAMPLES,)
    meter.release()
    # Kernels that this process loaded meanwhile are memory that it no longer has, too.
    before = meter.foreign_bytes()
    # The other process's context takes part of what is left, so that 4 GiB cannot be had.
    other = take(meter.available_bytes() - 3 * GIB)
    squeezed = batcher.run(losses_of, SAMPLES)
    assert squeezed.ooms_rescued >= 1
    assert sum(squeezed.micro_batches) == SAMPLES
    leave(other)
    assert wait_until(lambda: meter.foreign_bytes() < before + 64 * MIB)
    assert MicroBatcher(model, meter=meter).run(losses_of, SAMPLES).ooms_rescued == 0
