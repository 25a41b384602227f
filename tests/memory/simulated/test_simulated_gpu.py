import copy
import gc
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.memory.out_of_memory import is_out_of_memory
from can_train.memory.simulated.allocator import AllocatorSettings
from can_train.memory.simulated.gpu import SimulatedGpu

MIB = 2**20
GIB = 2**30
FLOATS_PER_MIB = MIB // 4


def mebibytes(count: float) -> Tensor:
    return torch.empty(int(count * FLOATS_PER_MIB))


def allocated(gpu: SimulatedGpu) -> float:
    return gpu.allocator.allocated_bytes / MIB


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Checks an error, then drops it with all that its traceback holds."""
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate ") as caught:
        yield
    assert is_out_of_memory(caught.value)
    del caught
    gc.collect()


# What is made, what dies


def test_storages_count_from_their_making_to_their_death() -> None:
    with SimulatedGpu(GIB) as gpu:
        kept = mebibytes(8)
        dropped = mebibytes(4)
        assert allocated(gpu) == 12
        del dropped
        assert (allocated(gpu), gpu.allocator.peak_allocated_bytes) == (8, 12 * MIB)
    del kept
    assert allocated(gpu) == 0


def test_views_and_in_place_operations_take_nothing() -> None:
    with SimulatedGpu(GIB) as gpu:
        whole = mebibytes(8)
        whole[:100].view(10, 10).t().add_(1)
        whole.reshape(-1, 64).mul_(2).detach()
        assert gpu.allocator.peak_allocated_bytes == 8 * MIB


def test_a_storage_that_is_resized_has_both_sizes_for_a_moment() -> None:
    with SimulatedGpu(GIB) as gpu:
        tensor = mebibytes(4)
        tensor.resize_(6 * FLOATS_PER_MIB)
        assert (allocated(gpu), gpu.allocator.peak_allocated_bytes) == (6, 10 * MIB)
        tensor.untyped_storage().resize_(0)
        tensor.detach()
        assert allocated(gpu) == 0
        tensor.resize_(7 * FLOATS_PER_MIB)
        assert allocated(gpu) == 7


def test_nothing_counts_before_the_gpu_is_entered_but_what_is_given_to_it() -> None:
    model = nn.Linear(512, 512, bias=False)
    unseen = mebibytes(4)
    gpu = SimulatedGpu(GIB, resident=model.parameters())
    assert allocated(gpu) == 1
    gpu.seed_resident([unseen, unseen[1:], model.weight])
    assert allocated(gpu) == 5
    del model, unseen
    assert allocated(gpu) == 0


def test_what_is_resident_must_fit() -> None:
    with out_of_memory():
        SimulatedGpu(20 * MIB, resident=[mebibytes(21)])


def test_tensors_from_python_numbers_and_from_arrays_count() -> None:
    with SimulatedGpu(GIB) as gpu:
        first = torch.tensor([1.0] * FLOATS_PER_MIB)
        second = torch.from_numpy(first.numpy().copy())
        assert allocated(gpu) == 2
        del first, second


def test_a_gpu_may_be_entered_again_and_counts_on() -> None:
    gpu = SimulatedGpu(GIB)
    with gpu:
        first = mebibytes(2)
    outside = mebibytes(2)
    with gpu:
        second = mebibytes(2)
        assert allocated(gpu) == 4
    del first, second, outside


def test_garbage_that_dies_while_an_operation_is_counted_is_given_back_after_it() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.tensor = mebibytes(1)
            self.itself = self

    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with SimulatedGpu(GIB) as gpu:
            for _ in range(50):
                Cycle()
                mebibytes(1)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert allocated(gpu) == 0


# Host memory


def test_what_is_made_on_the_host_counts_nothing_then_or_later() -> None:
    with SimulatedGpu(40 * MIB) as gpu:
        on_gpu = mebibytes(2)
        with gpu.host():
            copied = mebibytes(64)
            listed = torch.from_numpy(copied.clone().numpy())
            on_gpu_still = on_gpu[:10]
        for view in (copied[3:5], listed[3:5], copied.view(64, -1), copied.t(), on_gpu_still.add_(1)):
            view.detach()
        copied.resize_(65 * FLOATS_PER_MIB)
        assert gpu.allocator.peak_allocated_bytes == 2 * MIB
        moved = copied[:FLOATS_PER_MIB].clone()
        assert allocated(gpu) == 3
        del moved


def test_host_blocks_nest() -> None:
    with SimulatedGpu(GIB) as gpu:
        with gpu.host():
            with gpu.host():
                first = mebibytes(1)
            second = mebibytes(1)
        third = mebibytes(1)
        assert allocated(gpu) == 1
        del first, second, third


def test_a_host_tensor_that_is_given_to_the_gpu_counts_from_then() -> None:
    with SimulatedGpu(GIB) as gpu:
        with gpu.host():
            model = nn.Linear(512, 512, bias=False)
        assert allocated(gpu) == 0
        gpu.seed_resident(model.parameters())
        model.weight.detach()
        assert allocated(gpu) == 1
        del model
        assert allocated(gpu) == 0


@pytest.mark.parametrize("inference", [False, True])
def test_a_view_of_a_tensor_made_before_is_a_view_of_the_host(*, inference: bool) -> None:
    dataset = mebibytes(64)
    with SimulatedGpu(20 * MIB) as gpu, torch.inference_mode(inference):
        batch = dataset[:FLOATS_PER_MIB].reshape(-1, 64)
        assert allocated(gpu) == 0
        copied = batch.t().reshape(-1)
        assert allocated(gpu) == 1
        del copied


# Out of memory


def step(reached: list[str]) -> None:
    """Trains 4 MiB of weights for a step; every phase needs more memory than the one before."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    reached.append("model")
    loss = model(torch.ones(256, 512)).square().sum()
    reached.append("forward")
    loss.backward()
    reached.append("backward")
    optimizer.step()
    reached.append("optimizer")


def gradient_penalty(reached: list[str]) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Softplus(), nn.Linear(512, 512))
    inputs = torch.ones(512, 512, requires_grad=True)
    reached.append("model")
    output = model(inputs).square().sum()
    reached.append("forward")
    (gradient,) = torch.autograd.grad(output, inputs, create_graph=True)
    reached.append("backward")
    gradient.square().sum().backward()
    reached.append("double backward")


def reserved_by_phase(work: Callable[[list[str]], None]) -> dict[str, int]:
    """Runs work in plenty of memory; returns the reserved peak at the end of every phase."""

    class Phases(list[str]):
        def append(self, phase: str) -> None:
            at_end[phase] = gpu.allocator.peak_reserved_bytes

    at_end: dict[str, int] = {}
    with SimulatedGpu(GIB) as gpu:
        work(Phases())
    return at_end


@pytest.mark.parametrize(
    ("work", "phases"),
    [
        (step, ["model", "forward", "backward", "optimizer"]),
        (gradient_penalty, ["model", "forward", "backward", "double backward"]),
    ],
)
def test_memory_can_run_out_in_every_phase(work: Callable[[list[str]], None], phases: list[str]) -> None:
    at_end = reserved_by_phase(work)
    assert list(at_end) == phases
    for number, enough_until_then in enumerate(list(at_end.values())[:-1], start=1):
        reached: list[str] = []
        gpu = SimulatedGpu(enough_until_then)
        with out_of_memory(), gpu:
            work(reached)
        assert reached == phases[:number]
        assert allocated(gpu) == 0


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("work", [step, gradient_penalty])
def test_work_fits_in_what_it_reserved_and_not_in_a_page_less(
    *, work: Callable[[list[str]], None], expandable: bool
) -> None:
    with SimulatedGpu(GIB, settings=AllocatorSettings(expandable_segments=expandable)) as gpu:
        work([])
    reserved = gpu.allocator.peak_reserved_bytes
    with SimulatedGpu(reserved, settings=AllocatorSettings(expandable_segments=expandable)) as tight:
        work([])
    assert tight.allocator.num_alloc_retries == 0
    with out_of_memory(), SimulatedGpu(reserved - 2 * MIB, settings=AllocatorSettings(expandable_segments=expandable)):
        work([])


def test_the_error_reads_as_cudas_does() -> None:
    with SimulatedGpu(128 * MIB) as gpu:
        gpu.allocator.foreign_bytes = 32 * MIB
        held = mebibytes(30.5)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            mebibytes(57)
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 58.00 MiB. GPU 0 has a total capacity of 128.00 MiB of which 56.00 MiB "
        "is free. Process 0 has 32.00 MiB memory in use. Including non-PyTorch memory, this process has 40.00 MiB "
        "memory in use. Of the allocated memory 30.50 MiB is allocated by PyTorch, and 9.50 MiB is reserved by PyTorch "
        "but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF="
    )
    del held


@pytest.mark.parametrize(
    ("capacity", "amount"),
    [(1024, "1024 bytes"), (1025, "1.00 KiB"), (3 * 512 * 1024, "1.50 MiB"), (GIB + 1, "1.00 GiB")],
)
def test_amounts_are_written_as_cudas_are(capacity: int, amount: str) -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match=rf"total capacity of {re.escape(amount)} of"),
        SimulatedGpu(capacity),
    ):
        mebibytes(2000)


def test_what_did_not_fit_is_not_held_even_while_the_error_lives() -> None:
    with SimulatedGpu(60 * MIB) as gpu:
        kept = mebibytes(20)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            kept.repeat(3)
        assert caught.value.__traceback__ is not None
        assert caught.value.__context__ is None
        assert allocated(gpu) == 20
        assert torch.cat([kept, kept]).numel() == 2 * kept.numel()


def test_of_several_results_none_is_held_when_the_last_does_not_fit() -> None:
    with SimulatedGpu(60 * MIB) as gpu:
        kept = mebibytes(25)
        with out_of_memory():
            torch.sort(kept)
        assert allocated(gpu) == 25


def test_memory_that_others_take_makes_a_step_fail_until_they_give_it_back() -> None:
    reserved = max(reserved_by_phase(step).values())
    gpu = SimulatedGpu(reserved)
    with gpu:
        step([])
        gpu.allocator.release_cached()
        gpu.allocator.foreign_bytes = 2 * MIB
        with out_of_memory():
            step([])
        gpu.allocator.foreign_bytes = 0
        step([])
    assert gpu.allocator.num_alloc_retries > 0


def test_a_retry_is_counted_when_the_cache_had_to_be_released() -> None:
    with SimulatedGpu(60 * MIB) as gpu:
        for size in (0.5, 60, 0.5, 60):
            mebibytes(size)
    # The small pool's page was in the way of the first, the large pool's of the second, and so on.
    assert gpu.allocator.num_alloc_retries == 3


# Everything that training does


def lstm() -> tuple[nn.Module, Tensor]:
    return nn.LSTM(16, 32, num_layers=2), torch.randn(10, 4, 16)


def attention() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(4, 10, 32)


def convolution() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)), torch.randn(2, 3, 16, 16)


def train(make: Callable[[], tuple[nn.Module, Tensor]], optimizer: dict[str, bool]) -> list[Tensor]:
    torch.manual_seed(0)
    model, inputs = make()
    steps = torch.optim.AdamW(model.parameters(), lr=0.1, **optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        result = model(inputs)
        loss = (result[0] if isinstance(result, tuple) else result).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(steps)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()
    saved = io.BytesIO()
    torch.save({"model": copy.deepcopy(model).state_dict(), "optimizer": steps.state_dict()}, saved)
    saved.seek(0)
    model.load_state_dict(torch.load(saved)["model"])
    model.eval()
    with torch.inference_mode():
        output = model(inputs)
    return [*model.state_dict().values(), output[0] if isinstance(output, tuple) else output]


@pytest.mark.parametrize("optimizer", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("make", [lstm, attention, convolution])
def test_training_is_the_same_on_it_and_leaves_nothing(
    make: Callable[[], tuple[nn.Module, Tensor]], optimizer: dict[str, bool]
) -> None:
    expected = train(make, optimizer)
    gpu = SimulatedGpu(GIB)
    with gpu:
        trained = train(make, optimizer)
    assert all(torch.equal(*pair) for pair in zip(expected, trained, strict=True))
    size = sum(-(-tensor.nbytes // 512) * 512 for tensor in trained)
    gc.collect()
    assert gpu.allocator.allocated_bytes == size
    del trained
    gc.collect()
    assert gpu.allocator.allocated_bytes == 0


@pytest.mark.parametrize("make", [lstm, attention])
def test_evaluation_shows_the_temporaries_of_composite_operations(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    def peak(context: torch.no_grad | torch.inference_mode) -> int:
        with SimulatedGpu(GIB) as gpu:
            model, inputs = make()
            gpu.allocator.reset_peaks()
            with context:
                model(inputs)
            return gpu.allocator.peak_allocated_bytes

    assert peak(torch.inference_mode()) == pytest.approx(peak(torch.no_grad()), rel=0.1)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_tensors_without_a_storage_of_their_own_are_let_pass() -> None:
    with SimulatedGpu(GIB) as gpu:
        torch.empty(GIB, device="meta").add_(1)
        pairs = torch.eye(256).to_sparse()
        rows = torch.eye(256).to_sparse_csr()
        # Two indices and a value each; the second keeps both too, and 257 offsets (2,056 bytes, rounded up).
        assert gpu.allocator.allocated_bytes == 2 * (2 * 256 * 8 + 256 * 4) + 2560
        (pairs @ torch.ones(256, 2)).sum()
        del pairs, rows
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        nested.to_padded_tensor(0.0)


@given(st.lists(st.tuples(st.integers(1, 2**22), st.booleans()), max_size=20))
@settings(deadline=None)
def test_the_books_are_those_of_the_live_tensors(makings: list[tuple[int, bool]]) -> None:
    with SimulatedGpu(GIB) as gpu:
        live = []
        for size, keep in makings:
            tensor = torch.empty(size, dtype=torch.uint8)
            if keep:
                live.append(tensor)
            del tensor
        assert gpu.allocator.allocated_bytes == sum(-(-tensor.nbytes // 512) * 512 for tensor in live)


@pytest.mark.parametrize("expandable", [False, True])
def test_dropout_takes_what_cudas_kernel_takes(*, expandable: bool) -> None:
    readings = []
    for drop in (lambda x: F.dropout(x, 0.2), lambda x: torch.native_dropout(x, 0.2, True)[0]):
        with SimulatedGpu(GIB, settings=AllocatorSettings(expandable_segments=expandable)) as gpu:
            x = mebibytes(40).requires_grad_()
            drop(x).sum().backward()
            readings.append((gpu.allocator.peak_allocated_bytes, gpu.allocator.peak_reserved_bytes))
    assert readings[0] == readings[1]
