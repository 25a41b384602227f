"""Inputs arrive on a GPU while it computes, and their memory is not used again before the GPU has read it."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from can_train.memory.meters import CudaMeter, copy_stream, open_meter, send, send_positions

MIB = 2**20

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]


def keep_busy(times: int = 200) -> torch.Tensor:
    """Gives the GPU work for tens of milliseconds at least."""
    square = torch.randn(2048, 2048, device="cuda") / 2048
    for _ in range(times):
        square = square @ square
    return square


@pytest.mark.parametrize("size", [1000, 8 * MIB], ids=["small", "large"])
def test_what_is_sent_arrives_before_it_is_used(size: int) -> None:
    parts = [torch.full((size // 4,), float(number)) for number in range(20)]
    sums = []
    for part in parts:
        keep_busy(20)
        # The tensor is let go of while the GPU has yet to add it up.
        sums.append(send(part, torch.device("cuda", 0), torch.float64).sum())
    assert torch.stack(sums).tolist() == [number * (size // 4) for number in range(20)]


def test_a_large_tensor_arrives_while_the_gpu_computes() -> None:
    device = torch.device("cuda", 0)
    send(torch.zeros(8 * MIB), device)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    host = torch.arange(8 * MIB, dtype=torch.float32)
    keep_busy()
    busy.record()
    sent = send(host, device)
    copy_stream(device).synchronize()
    assert not busy.query()
    assert torch.equal(sent.cpu(), host)


def test_positions_arrive_as_they_are() -> None:
    parts = [np.arange(5), np.zeros(0, dtype=np.int64), np.array([2**31 - 1])]
    sent = send_positions(parts, torch.device("cuda", 0))
    assert [part.tolist() for part in sent] == [part.tolist() for part in parts]


def test_the_host_is_at_most_one_micro_batch_ahead() -> None:
    meter = open_meter("cuda")
    assert isinstance(meter, CudaMeter)
    ends = []
    for _ in range(5):
        meter.begin_part()
        # All but the last one are computed.
        assert all(end.query() for end in ends[:-1])
        keep_busy()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    torch.cuda.synchronize()
    assert all(one.elapsed_time(other) > 0 for one, other in pairwise(ends))
