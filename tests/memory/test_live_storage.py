import gc

import pytest
import torch
from torch import nn

from can_train.memory.out_of_memory import is_out_of_memory
from can_train.memory.simulated_gpu import LiveStorageTracker

KIB = 1024
FLOAT_BYTES = 4


def floats(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB // FLOAT_BYTES)


def test_live_and_peak_bytes_are_those_of_the_storages() -> None:
    tracker = LiveStorageTracker(10**9)
    with tracker:
        kept = floats(8)
        dropped = floats(4)
        del dropped
        assert (tracker.live_bytes, tracker.peak_bytes) == (8 * KIB, 12 * KIB)
        del kept
    assert tracker.live_bytes == 0


def test_views_and_in_place_operations_take_nothing() -> None:
    with LiveStorageTracker(10**9) as tracker:
        whole = floats(8)
        part = whole[:100].view(10, 10).t()
        part.add_(1)
        assert tracker.peak_bytes == 8 * KIB


def test_sizes_are_rounded_up_as_the_allocator_does() -> None:
    with LiveStorageTracker(10**9) as tracker:
        one = torch.empty(1)
        assert tracker.live_bytes == 512
        del one


def test_resident_tensors_count_from_the_start() -> None:
    resident = floats(16)
    tracker = LiveStorageTracker(10**9, [resident, resident[1:]])
    assert tracker.live_bytes == 16 * KIB
    del resident
    gc.collect()
    assert tracker.live_bytes == 0


def test_a_matrix_products_gradients_are_counted() -> None:
    weight = torch.randn(256, 256, requires_grad=True)
    x = torch.randn(256, 256)
    size = 256 * 256 * FLOAT_BYTES
    tracker = LiveStorageTracker(10**9, [weight, x])
    with tracker:
        (x @ weight).sum().backward()
    assert tracker.live_bytes == 3 * size
    # Weight and input, the product's gradient (an expanded scalar takes nothing), the weight's: no more at once.
    assert 3 * size <= tracker.peak_bytes <= 5 * size


@pytest.mark.parametrize(("models", "reached"), [(2.5, []), (4.5, ["forward"])])
def test_more_than_the_limit_is_an_out_of_memory_in_forward_and_backward(models: float, reached: list[str]) -> None:
    model = nn.Linear(512, 512)
    passed = []

    def step() -> None:
        loss = model(torch.ones(512, 512)).square().sum()
        passed.append("forward")
        loss.backward()

    limit = int(models * 512 * 512 * FLOAT_BYTES)
    with pytest.raises(torch.OutOfMemoryError) as caught, LiveStorageTracker(limit, model.parameters()):
        step()
    assert passed == reached
    assert is_out_of_memory(caught.value)


def test_more_than_the_limit_is_an_out_of_memory_in_the_optimizer() -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    limit = int(2.5 * 512 * 512 * FLOAT_BYTES)
    with pytest.raises(torch.OutOfMemoryError), LiveStorageTracker(limit, [*model.parameters(), *gradients]):
        optimizer.step()


def test_what_did_not_fit_is_not_held() -> None:
    tracker = LiveStorageTracker(20 * KIB)
    with tracker:
        with pytest.raises(torch.OutOfMemoryError):
            floats(24)
        gc.collect()
        assert tracker.live_bytes == 0
        assert floats(16).numel() == 4 * KIB
