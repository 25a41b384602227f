import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from can_train.memory.cuda_workspaces import AMPERE
from can_train.memory.out_of_memory import is_out_of_memory
from can_train.memory.simulated.gpu import LiveStorageTracker

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


def masks_of(drop: Callable[[torch.Tensor], torch.Tensor], *, as_cuda: bool = True) -> tuple[int, int]:
    """Returns what a forward pass leaves alive and the peak of both passes, in bytes an element."""
    elements = 2**16
    x = torch.randn(elements, requires_grad=True)
    tracker = LiveStorageTracker(10**9, [x], cuda=AMPERE if as_cuda else None)
    with tracker:
        dropped = drop(x)
        alive = tracker.live_bytes
        dropped.sum().backward()
    return alive // elements, tracker.peak_bytes // elements


def test_a_mask_of_dropout_is_counted_as_what_cudas_kernel_keeps() -> None:
    # `native_dropout` is what CUDA runs; the CPU has it too, but does not run it.
    assert masks_of(lambda x: F.dropout(x, 0.2)) == masks_of(lambda x: torch.native_dropout(x, 0.2, True)[0])
    assert masks_of(lambda x: F.dropout(x, 0.2))[0] == FLOAT_BYTES + 1 + FLOAT_BYTES
    assert masks_of(lambda x: F.dropout(x, 0.2), as_cuda=False)[0] == 3 * FLOAT_BYTES


def test_a_mask_of_the_default_probability_is_counted_too() -> None:
    # An operator's arguments that are its defaults do not arrive, and 0.5 is the default of the noise.
    assert masks_of(lambda x: F.dropout(x, 0.5)) == masks_of(lambda x: F.dropout(x, 0.2))


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x * 1, 0.2, inplace=True),
        lambda x: x * torch.empty_like(x).bernoulli_(0.8),
        lambda x: x * torch.empty_like(x).bernoulli_(0.8).div_(0.5),
        lambda x: F.dropout1d(x[:, None, None].expand(-1, 1, 2), 0.2),
    ],
    ids=["in place", "unscaled noise", "noise of another scale", "whole channels"],
)
def test_noise_that_cuda_keeps_as_it_is_counts_whole(drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert masks_of(drop) == masks_of(drop, as_cuda=False)


def test_a_mask_that_is_freed_gives_back_what_it_took() -> None:
    tracker = LiveStorageTracker(10**9)
    with tracker, torch.no_grad():
        x = floats(64)
        dropped = F.dropout(x, 0.2)
        assert tracker.live_bytes == 128 * KIB
        del x, dropped
    assert tracker.live_bytes == 0
