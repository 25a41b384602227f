"""Operators on the CPU that take what CUDA's take: against the CPU's own values, the kernels' formulas, and what is
recorded on a fake GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence

from can_train.memory import cuda_operators
from can_train.memory.cuda_dispatch import record_on_cuda
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library
from can_train.memory.cuda_operators import CUDA_OPERATORS
from can_train.memory.cuda_workspaces import AMPERE, CUDNN, TENSORS, Capability, sum_bytes
from can_train.memory.simulated.allocator import MIN_BLOCK_BYTES, CachingAllocator
from can_train.memory.simulated.gpu import LiveStorageTracker

TURING: Capability = (7, 5)
HALF = torch.float16
MIB = 2**20


@contextmanager
def counted(*resident: Tensor, cuda: Capability | None = AMPERE) -> Iterator[LiveStorageTracker]:
    tracker = LiveStorageTracker(2**40, resident, cuda=cuda)
    with tracker:
        yield tracker


def rounded(*sizes: int) -> int:
    return sum(-(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for size in sizes)


def left_alive(run: Callable[[], object], *resident: Tensor, cuda: Capability = AMPERE) -> int:
    """Bytes that the results of a forward pass keep alive beside what was there."""
    with counted(*resident, cuda=cuda) as tracker:
        before = tracker.live_bytes
        made = run()
        alive = tracker.live_bytes - before
        del made
    return alive


def values_and_gradients(run: Callable[..., object], inputs: list[Tensor], cuda: Capability | None) -> list[Tensor]:
    leaves = [one.clone().requires_grad_(one.is_floating_point()) for one in inputs]
    torch.manual_seed(7)
    with counted(*leaves, cuda=cuda) if cuda else nullcontext():
        made = run(*leaves)
        results = [one for one in (made if isinstance(made, tuple) else (made,)) if isinstance(one, Tensor)]
        sum(one.double().sin().sum() for one in results).backward()
    return [*(one.detach() for one in results), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def heads(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


QUERY = (2, 4, 48, 16)
attention = F.scaled_dot_product_attention


def padded_sequences(x: Tensor) -> nn.utils.rnn.PackedSequence:
    return pack_padded_sequence(x, torch.tensor([12, 9, 5]))


class Packed(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(padded_sequences(x))[0].data


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def last_of(layer: nn.RNNBase, x: Tensor) -> Tensor:
    return layer(x)[0]


LAYERS = {
    "LSTM of two layers": lambda: partial(last_of, seeded(lambda: nn.LSTM(8, 16, num_layers=2, dropout=0.2))),
    "GRU of two directions": lambda: partial(last_of, seeded(lambda: nn.GRU(8, 16, bidirectional=True))),
    "Elman network": lambda: partial(last_of, seeded(lambda: nn.RNN(8, 16))),
    "packed sequences": lambda: seeded(lambda: Packed(nn.LSTM(8, 16))),
    "LSTM cell": lambda: lambda x: seeded(lambda: nn.LSTMCell(8, 16))(x[0]),
    "GRU cell": lambda: lambda x: seeded(lambda: nn.GRUCell(8, 16))(x[0]),
    "dropout": lambda: lambda x: F.dropout(x, 0.3),
    "softmax": lambda: lambda x: F.softmax(x.half(), dim=-1, dtype=torch.float32),
    "RMS norm": lambda: seeded(lambda: nn.RMSNorm(8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_the_cpu_computes(name: str) -> None:
    run, inputs = LAYERS[name](), heads((12, 3, 8))
    for ours, own in zip(
        values_and_gradients(run, inputs, AMPERE), values_and_gradients(run, inputs, None), strict=True
    ):
        torch.testing.assert_close(ours, own)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"dropout_p": 0.3}),
        (torch.float32, {"is_causal": True}),
        (torch.float32, {"attn_mask": torch.ones(48, 48).tril().bool()}),
        (torch.float32, {"attn_mask": torch.linspace(-1, 1, 48 * 48).view(48, 48), "scale": 0.5}),
        (torch.bfloat16, {}),
        (torch.float64, {}),
    ],
    ids=["efficient", "dropout", "causal", "a mask", "a bias", "flash", "math"],
)
def test_attention_computes_what_the_cpu_computes(dtype: torch.dtype, options: dict[str, object]) -> None:
    run = partial(attention, **options)
    inputs = heads(QUERY, QUERY, QUERY, dtype=dtype)
    for ours, own in zip(
        values_and_gradients(run, inputs, AMPERE), values_and_gradients(run, inputs, None), strict=True
    ):
        torch.testing.assert_close(ours, own)


def test_fewer_keys_than_queries_and_odd_widths_are_attended_to() -> None:
    query, key = (2, 4, 48, 12), (2, 2, 48, 12)
    inputs = heads(query, key, key, dtype=torch.bfloat16)
    run = partial(attention, enable_gqa=True)
    for ours, own in zip(
        values_and_gradients(run, inputs, AMPERE), values_and_gradients(run, inputs, None), strict=True
    ):
        torch.testing.assert_close(ours, own)


ROWS, SUMS = 2 * 4 * 48 * 16, 2 * 4 * 48
SCORES = 2 * 4 * 48 * 48


@pytest.mark.parametrize(
    ("dtype", "cuda", "options", "expected"),
    [
        (torch.float16, AMPERE, {"dropout_p": 0.1}, rounded(ROWS * 2, SUMS * 4)),
        # The sums of memory-efficient attention are those of a multiple of 32 queries.
        (torch.float32, AMPERE, {"dropout_p": 0.1}, rounded(ROWS * 4, 2 * 4 * 64 * 4)),
        (torch.float16, TURING, {}, rounded(ROWS * 2, 2 * 4 * 64 * 4)),
    ],
    ids=["flash", "efficient", "flash needs Ampere"],
)
def test_fused_attention_keeps_sums_and_no_scores(
    dtype: torch.dtype, cuda: Capability, options: dict[str, float], expected: int
) -> None:
    inputs = [one.requires_grad_() for one in heads(QUERY, QUERY, QUERY, dtype=dtype)]
    assert left_alive(lambda: attention(*inputs, **options), *inputs, cuda=cuda) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16 before Ampere"])
def test_attention_without_a_fused_kernel_keeps_scores(dtype: torch.dtype) -> None:
    inputs = [one.requires_grad_() for one in heads(QUERY, QUERY, QUERY, dtype=dtype)]
    assert left_alive(lambda: attention(*inputs), *inputs, cuda=TURING) > SCORES * dtype.itemsize


def test_a_kernel_that_the_user_turns_off_is_not_taken() -> None:
    inputs = [one.requires_grad_() for one in heads(QUERY, QUERY, QUERY)]
    with sdpa_kernel(SDPBackend.MATH):
        assert left_alive(lambda: attention(*inputs), *inputs) > SCORES * 4


def test_flash_attention_sums_gradients_in_single_precision() -> None:
    inputs = [one.requires_grad_() for one in heads(QUERY, QUERY, QUERY, dtype=HALF)]
    with counted(*inputs) as tracker:
        attended = attention(*inputs)
        before, gradient = tracker.live_bytes, torch.ones_like(attended)
        tracker.reset_peak()
        attended.backward(gradient)
    # Three gradients, and for 128 rows a sum and 32 numbers each.
    assert tracker.peak_bytes - before == rounded(*[ROWS * 2] * 4, 2 * 4 * 128 * 33 * 4)


UNITS = 12 * 3 * 16


@pytest.mark.parametrize(
    ("make", "kept", "results"),
    [(nn.LSTM, 5, 3), (nn.GRU, 6, 2), (nn.RNN, 1, 2)],
)
def test_recurrent_layers_keep_numbers_for_each_step_sample_and_unit(
    make: Callable[[int, int], nn.Module], kept: int, results: int
) -> None:
    layer, x = make(8, 16), torch.randn(12, 3, 8)
    states = (results - 1) * [3 * 16 * 4]
    # The reserve, the result, the last states and the first ones.
    expected = rounded(kept * UNITS * 4, UNITS * 4, *states, *states)
    assert left_alive(lambda: layer(x), x, *layer.parameters()) == expected
    with torch.no_grad():
        without = rounded(UNITS * 4, *states)
        assert left_alive(lambda: layer(x), x, *layer.parameters()) == without


# Seen in the allocator's history on an H100 with torch 2.11: layers, hidden units, samples, and MiB that are kept, and
# that are taken while it runs; 32 steps of 256 inputs.
SEEN_OF_LSTMS = [(1, 256, 64, 10.0, 22.7), (2, 256, 16, 5.5, 23.3), (2, 256, 256, 88.0, 73.0), (4, 256, 16, 11.5, 43.7),
                 (2, 1024, 16, 22.0, 79.8)]  # fmt: skip


@pytest.mark.parametrize(("layers", "hidden", "samples", "kept", "running"), SEEN_OF_LSTMS)
def test_an_lstm_takes_what_was_seen_on_a_gpu(
    layers: int, hidden: int, samples: int, kept: float, running: float
) -> None:
    layer = nn.LSTM(256, hidden, num_layers=layers)
    x = torch.randn(32, samples, 256)
    states = 4 * layers * samples * hidden * 4
    others = sum(one.nbytes for one in (x, *layer.parameters())) + 4 * 32 * samples * hidden + states
    with counted(x, *layer.parameters()) as tracker:
        result = layer(x)
        assert tracker.live_bytes - others == pytest.approx(kept * MIB, rel=0.01)
    # A copy of the weights, and 8 MiB of each layer, are left out.
    left_out = 8 * layers * MIB + sum(one.nbytes for one in layer.parameters())
    assert tracker.peak_bytes - others == pytest.approx((kept + running) * MIB - left_out, rel=0.1)
    del result


# Seen on an H100 in the history of its allocator: rows and columns of a matrix whose rows are summed, and MiB.
SEEN_OF_SUMS = [(2048, 256, 4), (8192, 256, 16), (32768, 256, 64), (2048, 768, 12), (8192, 768, 48), (32768, 768, 132),
                (2048, 1024, 16), (8192, 1024, 64), (32768, 1024, 132), (32768, 512, 128)]  # fmt: skip
H100_THREADS = 132 * 2048


@pytest.mark.parametrize(("rows", "columns", "mebibytes"), SEEN_OF_SUMS)
def test_blocks_that_share_a_sum_leave_their_parts_in_memory(rows: int, columns: int, mebibytes: int) -> None:
    x = torch.empty(rows, columns, device="meta")
    assert sum_bytes(x, [0], resident_threads=H100_THREADS) == mebibytes * MIB
    assert sum_bytes(x.view(rows // 64, 64, columns), [0, 1], resident_threads=H100_THREADS) == mebibytes * MIB
    assert sum_bytes(x.half(), [0], resident_threads=H100_THREADS) == mebibytes * MIB  # added up in single precision


def test_sums_along_rows_leave_little() -> None:
    x = torch.empty(32768, 1024, device="meta")
    assert sum_bytes(x, [1], resident_threads=H100_THREADS) == 0
    assert sum_bytes(x, [], resident_threads=H100_THREADS) < 64 * 1024
    images = torch.empty(64, 32, 64, 64, device="meta")
    assert sum_bytes(images, [0, 2, 3], resident_threads=H100_THREADS) < MIB
    last = images.to(memory_format=torch.channels_last)
    assert sum_bytes(last, [0, 2, 3], resident_threads=H100_THREADS) > 2 * MIB


def test_a_sum_of_more_numbers_than_32_bits_index_is_taken_in_halves() -> None:
    small, large = (torch.empty(rows, 4096, device="meta") for rows in (2**16, 2**20))
    for x in (small, large):
        assert 0 < sum_bytes(x, [0], resident_threads=H100_THREADS) <= 512 * H100_THREADS


@pytest.mark.parametrize(("make", "kept"), [(nn.LSTMCell, 4), (nn.GRUCell, 5)])
def test_cells_keep_their_gates(make: Callable[[int, int], nn.Module], kept: int) -> None:
    cell, x, state = make(8, 16), torch.randn(32, 8), torch.randn(32, 16)
    states = (state, state) if make is nn.LSTMCell else state
    results = 2 if make is nn.LSTMCell else 1
    resident = [x, state, *cell.parameters()]
    assert left_alive(lambda: cell(x, states), *resident) == rounded(*[32 * 16 * 4] * results, kept * 32 * 16 * 4)


def test_rms_norm_keeps_a_number_a_row() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    assert left_alive(lambda: F.rms_norm(x, (64,)), x) == rounded(32 * 64 * 4, 32 * 4)


def test_softmax_of_half_precision_makes_no_copy_in_single() -> None:
    x = torch.randn(32, 1024).half().requires_grad_()
    with counted(x) as tracker:
        F.log_softmax(x, dim=-1, dtype=torch.float32)
    assert tracker.peak_bytes == rounded(x.nbytes, 2 * x.nbytes)


def test_operators_that_autocast_casts_on_cuda_are_cast() -> None:
    # The others cast nothing that takes memory, or have kernels of the same name on both devices.
    left_out = {"einsum", "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"}
    left_out |= {"_scaled_dot_product_flash_attention", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}
    left_out |= {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
    names = {str(schema).partition("(")[0] for schema in torch._C._jit_get_all_schemas()}
    on_cuda = {name for name in names if is_cast(name, "AutocastCUDA") and not is_cast(name, "AutocastCPU")}
    found = {operator.name() for operator in cuda_operators._autocast_kernels()}
    assert {name.removeprefix("aten::") for name in on_cuda - found} == left_out


def is_cast(name: str, key: str) -> bool:
    try:
        return name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    except RuntimeError:
        return False


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.layer_norm(x, (8,)), torch.float32),
        (lambda x: F.softmax(x, dim=-1), torch.float32),
        (lambda x: F.softmax(x, dim=-1, dtype=torch.bfloat16), torch.bfloat16),
        (lambda x: x.sum(), torch.float32),
        (lambda x: x.square(), torch.float32),
        (lambda x: x.mv(x[0]), torch.bfloat16),
        (
            lambda x: torch.zeros(8, 8).bfloat16().scatter_add(0, torch.zeros(8, 8, dtype=torch.int64), x),
            torch.bfloat16,
        ),
        (lambda x: torch.zeros(8, 8).scatter_add(0, torch.zeros(8, 8, dtype=torch.int64), x), torch.float32),
        (lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.int64)), torch.float32),
        (F.gelu, torch.bfloat16),
    ],
    ids=["fp32", "into fp32", "a type of one's own", "sum", "power", "half", "all half", "widest", "loss", "as it is"],
)
def test_autocast_chooses_the_types_of_cuda(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    with counted(x), torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(x).dtype is dtype


def test_the_cpu_has_its_own_operators_again_when_the_last_span_ends() -> None:
    x = torch.ones(8, 8, dtype=torch.bfloat16)

    def normalized() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.layer_norm(x, (8,)).dtype

    with counted(x):
        with counted(x):
            assert normalized() is torch.float32
        assert normalized() is torch.float32
    assert normalized() is torch.bfloat16
    with pytest.raises(ZeroDivisionError), counted(x):
        raise ZeroDivisionError
    assert normalized() is torch.bfloat16
    assert CUDA_OPERATORS.kernels == {}


@pytest.mark.parametrize("name", ["LSTM cell", "GRU cell", "softmax", "RMS norm", "dropout"])
def test_gradients_that_cuda_differentiates_again_are_differentiated_again(name: str) -> None:
    run = LAYERS[name]()

    def penalty(x: Tensor) -> Tensor:
        made = run(x)
        (gradient,) = torch.autograd.grad(
            (made[0] if isinstance(made, tuple) else made).float().sin().sum(), x, create_graph=True
        )
        return gradient.square()

    inputs = heads((12, 3, 8))
    for ours, own in zip(
        values_and_gradients(penalty, inputs, AMPERE), values_and_gradients(penalty, inputs, None), strict=True
    ):
        # Gradients of half precision are rounded.
        torch.testing.assert_close(ours, own, rtol=2e-3 if name == "softmax" else 1e-5, atol=1e-5)


def test_gradients_of_fused_attention_have_none_as_on_cuda() -> None:
    inputs = [one.requires_grad_() for one in heads(QUERY, QUERY, QUERY)]
    with counted(*inputs):
        (gradient,) = torch.autograd.grad(attention(*inputs).sin().sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


def test_a_backward_pass_may_be_repeated_where_the_graph_is_kept() -> None:
    inputs = [one.requires_grad_() for one in heads(QUERY, QUERY, QUERY)]
    with counted(*inputs) as tracker:
        attended = attention(*inputs).sum()
        first = torch.autograd.grad(attended, inputs, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(attended, inputs)))
        del first
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(attended, inputs)
        # All that is left is the sum.
        assert tracker.live_bytes == rounded(*[ROWS * 4] * 3, 4)


class OwnBatch(nn.Module):
    """A model with its batch, which is on the device from the start."""

    def __init__(self, network: nn.Module, batch: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("batch", batch)

    def forward(self) -> Tensor:
        found = self.network(self.batch)
        found = found[0] if isinstance(found, tuple) else found
        return F.cross_entropy(found.flatten(0, -2), torch.zeros(found[..., 0].numel(), dtype=torch.int64))


class Aggregated(nn.Module):
    """Attention over the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(16, 32)

    def forward(self, nodes: Tensor) -> Tensor:
        hidden = self.weights(nodes)
        edges = torch.arange(1024).to(nodes.device)
        source, target = edges % len(nodes), 7 * edges % len(nodes)
        scores = F.leaky_relu((hidden[source] * hidden[target]).sum(-1)).exp()
        sums = torch.zeros(len(nodes), dtype=scores.dtype, device=nodes.device).scatter_add(0, target, scores)
        messages = hidden[source] * (scores / sums[target])[:, None]
        summed = torch.zeros_like(hidden, dtype=messages.dtype).index_add(0, target, messages)
        return F.layer_norm(summed, (32,))


NETWORKS = {
    "transformer": lambda: OwnBatch(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(4, 96, 64)),
    "LSTM": lambda: OwnBatch(nn.LSTM(32, 64, num_layers=2, dropout=0.1), torch.randn(24, 8, 32)),
    "GRU": lambda: OwnBatch(nn.GRU(32, 64, bidirectional=True), torch.randn(24, 8, 32)),
    # Of few channels, for which cuDNN takes no workspace: the simulated GPU has none.
    "convolutions": lambda: OwnBatch(
        nn.Sequential(
            nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2), nn.Dropout(0.1), nn.Conv2d(16, 16, 1),
            nn.GroupNorm(4, 16), nn.GELU(),
        ),
        torch.randn(4, 4, 32, 32),
    ),
    "graph": lambda: OwnBatch(Aggregated(), torch.randn(200, 16)),
    "RMS norm": lambda: OwnBatch(nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64), nn.SiLU()), torch.randn(128, 64)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_counted_is_what_a_gpu_would_allocate(
    name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")
    # Left out of what is counted, since simulated GPUs may be smaller.
    monkeypatch.setattr(cuda_operators, "recurrent_bytes", lambda weights, runs: 0)
    model = NETWORKS[name]()

    def step(device: str) -> None:
        with torch.autocast(device, dtype=dtype) if dtype else nullcontext():
            loss = model()
        loss.backward()

    allocator = CachingAllocator(2**40)
    record_on_cuda(model, partial(step, "cuda"), generation="ampere").replay(allocator, (TENSORS, CUDNN))
    with counted(*model.parameters(), *model.buffers()) as tracker:
        step("cpu")
    # Fakes place small tensors differently: indices, seeds and single numbers.
    assert tracker.peak_bytes == pytest.approx(allocator.peak_allocated_bytes, rel=0.02)
