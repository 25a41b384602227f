"""What a CUDA GPU would allocate: recorded on tensors without values, and counted against the kernels' formulas."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from can_train.memory.allocation_trace import AllocationTrace
from can_train.memory.cuda_dispatch import record_on_cuda
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library
from can_train.memory.cuda_workspaces import CUBLAS, CUDNN, TENSORS
from can_train.memory.simulated.allocator import MIN_BLOCK_BYTES, PLAIN, CachingAllocator

MIB = 2**20


def available() -> bool:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        # Aloud: pytest prints the reason of a skip.
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")
    return True


@pytest.fixture(autouse=True)
def needs_dispatch(request: pytest.FixtureRequest) -> None:
    if "without_dispatch" not in request.fixturenames:
        available()


@pytest.fixture
def without_dispatch() -> None:
    """Marks a test that needs no library."""


def recorded(run: Callable[[], object], model: nn.Module | None = None, generation: str = "ampere") -> AllocationTrace:
    return record_on_cuda(model or nn.Identity(), run, generation=generation)


def peak(recording: AllocationTrace, *kinds: str) -> int:
    allocator = CachingAllocator(2**50)
    assert recording.replay(allocator, kinds or (TENSORS,))
    return allocator.peak_allocated_bytes


def sizes(recording: AllocationTrace) -> list[int]:
    """Bytes of the tensors, in the order in which they are made."""
    return [size for number, size in recording.events if size and number not in recording.workspaces]


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)


def attend(dtype: torch.dtype, *, mask: bool = False, dropout: float = 0.1, width: int = 64) -> Callable[[], object]:
    def run() -> None:
        query, key, value = (on_gpu(2, 4, 128, width, dtype=dtype) for _ in range(3))
        bias = torch.zeros(2, 1, 128, 128, dtype=dtype, device="cuda") if mask else None
        F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)

    return run


SCORES = 2 * 4 * 128 * 128
"""Scores of the attention above, one for each pair of positions and head."""


def test_dropout_keeps_a_mask_of_a_byte_an_element() -> None:
    found = sizes(recorded(lambda: F.dropout(on_gpu(1000, 10), 0.2)))
    assert found == [40_000, 40_000, 10_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_with_dropout_keeps_sums_and_no_scores(dtype: torch.dtype) -> None:
    found = sizes(recorded(attend(dtype)))
    each = 2 * 4 * 128 * 64 * dtype.itemsize
    assert found[:3] == [each] * 3  # queries, keys and values
    result, sums, *state = sorted(found[3:], reverse=True)
    assert (result, sums) == (each, 2 * 4 * 128 * 4)  # a sum for each query, in single precision
    assert sum(state) <= 32  # of the generator


def test_the_efficient_kernel_takes_a_mask_and_no_copy_of_it_for_each_head() -> None:
    found = sizes(recorded(attend(torch.float16, mask=True)))
    assert sorted(found, reverse=True)[:5] == [2 * 4 * 128 * 64 * 2] * 4 + [2 * 128 * 128 * 2]


@pytest.mark.parametrize(
    ("dtype", "width", "generation"),
    [(torch.float64, 64, "ampere"), (torch.bfloat16, 64, "turing"), (torch.float32, 63, "ampere")],
    ids=["fp64", "bf16 before Ampere", "an odd width"],
)
def test_attention_without_a_fused_kernel_makes_scores(dtype: torch.dtype, width: int, generation: str) -> None:
    assert SCORES * dtype.itemsize in sizes(recorded(attend(dtype, width=width), generation=generation))


def test_kernels_that_the_user_turns_off_are_not_chosen() -> None:
    def run() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            attend(torch.float32)()

    assert max(sizes(recorded(run))) == SCORES * 4


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x @ x, torch.float16),
        (lambda x: F.softmax(x, dim=1), torch.float32),
        (lambda x: F.layer_norm(x, (32,)), torch.float32),
        (F.gelu, torch.float16),
        (lambda x: x.square().sum(), torch.float32),
    ],
    ids=["matmul", "softmax", "layer norm", "gelu", "sum"],
)
def test_autocast_follows_the_list_of_cuda(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def run() -> None:
        half = on_gpu(32, 32, dtype=torch.float16)
        with torch.autocast("cuda", dtype=torch.float16):
            assert function(half).dtype is dtype

    recorded(run)


@pytest.mark.parametrize("layer", ["attention", "lstm", "linear"])
def test_inference_mode_runs_the_same_kernels(layer: str) -> None:
    models = {"attention": Attending, "lstm": lambda: nn.LSTM(64, 64), "linear": lambda: nn.Linear(64, 64)}

    def run_without(gradients: Callable[[], AbstractContextManager[object]]) -> list[int]:
        model = models[layer]()

        def run() -> None:
            torch.cuda.synchronize()
            with gradients():
                model(torch.zeros(2, 128, 64, device="cuda"))

        return sizes(recorded(run, model))

    assert run_without(torch.inference_mode) == run_without(torch.no_grad)


class Attending(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        query = x.unflatten(2, (4, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, query, query)


def test_operators_that_cuda_fuses_keep_no_temporaries() -> None:
    def run() -> None:
        F.silu(on_gpu(1000)).sum().backward()

    # The input, its result, the sum, and in the backward pass the sum's gradient and the input's.
    assert [size for size in sizes(recorded(run)) if size >= 4000] == [4000, 4000, 4000]


def test_each_thread_of_a_training_step_has_a_workspace_of_cublas() -> None:
    model = nn.Linear(10, 10)
    found = recorded(lambda: model(on_gpu(10, 10)).sum().backward(), model)
    kinds = list(found.workspaces.values())
    assert kinds == [CUBLAS, CUBLAS]


@pytest.mark.parametrize(("generation", "mebibytes"), [("ampere", 8.125), ("hopper", 32)])
def test_workspaces_of_cublas_are_those_of_the_card(
    generation: str, mebibytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = recorded(lambda: on_gpu(8, 8) @ on_gpu(8, 8), generation=generation)
    assert peak(found, CUBLAS) == mebibytes * MIB


def test_a_workspace_of_cublas_that_the_user_sizes_is_that_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert peak(recorded(lambda: on_gpu(8, 8) @ on_gpu(8, 8)), CUBLAS) == 16 * 8 * 1024


def test_the_gradient_of_a_bias_takes_what_the_blocks_of_its_sum_share() -> None:
    def taken(resident_threads: int, *, bias: bool = True) -> list[int]:
        layer = nn.Linear(16, 1024, bias=bias)
        run = lambda: layer(torch.empty(32768, 16)).square().sum().backward()  # noqa: E731
        return sizes(record_on_cuda(layer, run, generation="ampere", resident_threads=resident_threads))

    a100, h100 = 108 * 2048, 132 * 2048
    assert 108 * MIB in taken(a100)
    assert 132 * MIB in taken(h100)
    assert 108 * MIB not in taken(a100, bias=False)


@pytest.mark.parametrize(
    ("layers", "hidden", "seen"),
    [(1, 256, 13812096), (2, 256, 24445312), (3, 256, 35144064), (4, 256, 45810048), (2, 512, 37880192),
     (2, 1024, 83624320)],
)  # fmt: skip
def test_a_recurrent_network_works_with_what_an_h100_was_seen_to_allocate(layers: int, hidden: int, seen: int) -> None:
    network = nn.LSTM(256, hidden, layers)
    found = record_on_cuda(network, lambda: network(torch.empty(32, 16, 256))[0].sum().backward(), generation="hopper")
    workspaces = [size for number, size in found.events if size and found.workspaces.get(number) == CUDNN]
    assert workspaces[0] == workspaces[-1] == pytest.approx(seen, rel=0.02)


@pytest.mark.parametrize(("releases", "reserved"), [(False, 70), (True, 40)])
def test_a_cache_that_a_program_releases_is_not_reserved_any_more(releases: bool, reserved: int) -> None:
    def run() -> None:
        torch.empty(30, MIB, dtype=torch.uint8, device="cuda")
        if releases:
            torch.cuda.empty_cache()
        torch.empty(40, MIB, dtype=torch.uint8, device="cuda")

    allocator = CachingAllocator(2**50, settings=PLAIN)
    recorded(run).replay(allocator)
    assert allocator.peak_reserved_bytes == reserved * MIB


def test_a_backward_pass_in_two_threads_is_recorded() -> None:
    critic = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def step() -> None:
        # What is on the host is derived by another thread than what is on the GPU.
        given = torch.empty(8, 16, requires_grad=True)
        (slope,) = torch.autograd.grad(critic(given * 2 + 1).sum(), given, create_graph=True)
        (slope.square().sum() + critic(given).sum()).backward()

    def steps() -> None:
        for _ in range(30):
            step()

    sequence = sizes(record_on_cuda(critic, steps, generation="ampere"))
    assert sequence


def convolve(channels: int, *, groups: int = 1, trains: bool = True) -> Callable[[], object]:
    def run() -> None:
        image, filters = on_gpu(4, channels, 32, 32), on_gpu(channels, channels // groups, 3, 3)
        with torch.set_grad_enabled(trains):
            found = F.conv2d(image, filters, padding=1, groups=groups).sum()
        if trains:
            found.backward()

    return run


def workspaces(found: AllocationTrace) -> list[int]:
    return [size for number, size in found.events if size and found.workspaces.get(number) == CUDNN]


@pytest.mark.parametrize(("channels", "filled", "copies_forward"), [(16, 16, 1), (18, 20, 2), (152, 152, 1)])
def test_a_dense_convolution_takes_copies_of_images_whose_channels_are_filled_up(
    channels: int, filled: int, copies_forward: int
) -> None:
    image, filters = 4 * filled * 32 * 32 * 4, filled * filled * 9 * 4
    forward = copies_forward * image + filters
    assert workspaces(recorded(convolve(channels, trains=False))) == [forward]
    gradients = [2 * image + 2 * filters, 2 * image + filters + 2 * MIB]
    assert workspaces(recorded(convolve(channels))) == [forward, *gradients]


def test_a_convolution_of_few_channels_takes_no_workspace() -> None:
    assert workspaces(recorded(convolve(4))) == []


def test_gradients_of_a_grouped_convolution_take_no_workspace() -> None:
    assert peak(recorded(convolve(16, groups=16)), CUDNN) == 0


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def test_a_model_on_meta_takes_what_it_takes_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = small()
        data = torch.zeros(1000, 64)
        found.append(peak(recorded(lambda m=model, x=data: m(x).square().sum().backward(), model)))
    weights = sum(-(-one.nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for one in small().parameters())
    assert found[0] == found[1] > weights + 1000 * 256 * 4


def test_nothing_of_the_fake_gpu_reaches_the_caller() -> None:
    model, data = small(), torch.ones(3, 64)
    # Autograd's threads are started once in a process: here without any for a GPU.
    model(data).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    recorded(lambda: model(data).sum().backward(), model)
    assert not torch.cuda.is_available()
    assert not model._forward_pre_hooks
    assert all(not parameter.is_meta and parameter.device.type == "cpu" for parameter in model.parameters())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")


def test_lengths_may_decide_shapes_and_activations_may_not() -> None:
    lengths, words = torch.tensor([3, 5, 2]), nn.Embedding(10, 8)

    def padded() -> None:
        assert words(torch.zeros(3, int(lengths[torch.arange(2)].max()), dtype=torch.int64)).shape == (3, 5, 8)

    recorded(padded, words)
    with pytest.raises(NoCudaDispatchError, match="without values"):
        recorded(lambda: words(lengths).sum().item(), words)


def test_whole_numbers_on_the_gpu_may_decide_shapes() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("known", torch.tensor([2, 5, 7]))

        def forward(self, given: Tensor) -> Tensor:
            assert given.device.type == "cuda"
            assert given[given != 3].tolist() == [1, 2, 7]
            assert given[torch.isin(given, self.known)].shape == (2,)
            given[0] += 4
            assert int(given.max()) == int(given[3]) == 7
            assert torch.arange(4, device="cuda")[given > 4].tolist() == [0, 3]
            # An activation has no value, and what it is written into has none from then on.
            given[1] = torch.rand(5, device="cuda").argmax()
            return given[given > 4]

    model = Graph()
    with pytest.raises(NoCudaDispatchError, match="DynamicOutputShape"):
        recorded(lambda: model(torch.tensor([1, 2, 3, 7])), model)


def test_tensors_of_numbers_of_python_are_made_on_the_gpu() -> None:
    def run() -> None:
        assert torch.tensor([3, 4], device="cuda").tolist() == [3, 4]
        assert torch.tensor([], dtype=torch.float16, device="cuda").device.type == "cuda"
        assert torch.full((2,), 5).tolist() == [5, 5]

    assert sizes(recorded(run)) == [16]


def test_a_known_mask_chooses_as_many_rows_as_it_has_and_takes_their_positions_meanwhile() -> None:
    class Chosen(nn.Module):
        def forward(self, features: Tensor, mask: Tensor) -> Tensor:
            features = features * 1.0
            assert features.masked_select(mask.unsqueeze(1)).shape == (3 * 50,)
            features[mask] = torch.zeros(50, device="cuda")
            return features[mask].square().sum()

    model, mask = Chosen(), torch.arange(100) < 3
    found = sizes(recorded(lambda: model(on_gpu(100, 50), mask).backward(), model))
    # The positions of what masked_select, the assignment and the choice read, the last two again in the backward pass.
    assert found.count(3 * 50 * 2 * 8) == 1
    assert found.count(3 * 8) == 4


def test_positions_are_freed_once_nothing_reads_them() -> None:
    def run() -> None:
        mask = torch.ones(1000, dtype=torch.bool, device="cuda")
        for _ in range(3):
            assert mask.nonzero().shape == (1000, 1)

    rounded = 16 * MIN_BLOCK_BYTES  # of 1000 positions of 8 bytes
    assert peak(recorded(run)) == 2 * MIN_BLOCK_BYTES + rounded


def test_a_copy_on_the_host_of_whole_numbers_has_their_values() -> None:
    class Lengths(nn.Module):
        def forward(self, mask: Tensor) -> list[int]:
            return mask.sum(1).cpu().tolist()

    model = Lengths()

    def run() -> None:
        assert model(torch.ones(2, 3, dtype=torch.bool)) == [3, 3]

    recorded(run, model)


@pytest.mark.parametrize("batch_first", [False, True])
def test_sequences_of_known_lengths_are_packed(batch_first: bool) -> None:
    lengths = torch.tensor([5, 3, 3, 1])
    shape = (4, 5, 8) if batch_first else (5, 4, 8)

    def run(device: str) -> tuple[tuple[int, ...], list[int]]:
        padded = torch.zeros(shape, device=device, requires_grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(padded, lengths, batch_first=batch_first)
        unpacked, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=batch_first)
        unpacked.square().sum().backward()
        return tuple(packed.data.shape), packed.batch_sizes.tolist()

    def compare() -> None:
        assert run("cuda") == expected

    expected = run("cpu")
    found = sizes(recorded(compare))
    assert 12 * 8 * 4 in found


def test_packed_sequences_without_order_run_through_a_recurrent_network() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.GRU(8, 16, batch_first=True)

        def forward(self, padded: Tensor, mask: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(padded, mask.sum(1).cpu(), True, enforce_sorted=False)
            states, _ = nn.utils.rnn.pad_packed_sequence(self.read(packed)[0], batch_first=True)
            assert states.shape == (2, 4, 16)
            return states.sum()

    model, mask = Reader(), torch.tensor([[True, False, False, False], [True] * 4])
    recorded(lambda: model(torch.zeros(2, 4, 8), mask).backward(), model)


def test_a_ctc_loss_keeps_a_number_for_each_step_and_place_between_labels() -> None:
    log_probs, targets = (10, 2, 5), torch.ones(2, 3, dtype=torch.int64)

    def run() -> None:
        lengths = torch.full((2,), 10), torch.tensor([3, 2])
        F.ctc_loss(on_gpu(*log_probs).log_softmax(2), targets, *lengths).backward()

    # For the backward pass, and again while it runs.
    assert sizes(recorded(run)).count(2 * 10 * (2 * 3 + 1) * 4) == 2


def test_generators_of_the_host_draw_whole_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    recorded(lambda: torch.zeros(int(torch.randint(2**40, (), generator=generator)) % 7))


def test_an_error_of_the_program_and_a_process_that_dies_are_told() -> None:
    with pytest.raises(NoCudaDispatchError, match="ZeroDivisionError"):
        recorded(lambda: 1 // 0)
    with pytest.raises(NoCudaDispatchError, match="has died"):
        recorded(lambda: __import__("os")._exit(3))


def test_a_process_that_hangs_is_given_up() -> None:
    with pytest.raises(NoCudaDispatchError, match="nothing was heard"):
        record_on_cuda(nn.Identity(), lambda: time.sleep(60), generation="ampere", timeout_s=0.5)


def test_a_parent_that_is_killed_takes_the_recording_with_it(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from torch import nn\n"
        "from can_train.memory.cuda_dispatch import record_on_cuda\n"
        "def hang():\n"
        "    open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "record_on_cuda(nn.Identity(), hang, generation='ampere')\n"
    )
    told = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", code, str(told)]) as parent:
        wait_until(lambda: told.exists() and told.read_text() != "")
        child = psutil.Process(int(told.read_text()))
        parent.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_replay_tells_what_does_not_fit_and_passes_over_a_workspace_of_cudnn(without_dispatch: None) -> None:
    found = AllocationTrace(events=[(0, 4 * MIB), (1, 40 * MIB), (1, 0)], workspaces={1: CUDNN})
    assert found.replay(CachingAllocator(20 * MIB))
    assert not AllocationTrace(events=found.events, workspaces={}).replay(CachingAllocator(20 * MIB))


def test_where_pytorch_sees_a_gpu_it_says_how_to_hide_it(
    without_dispatch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(NoCudaDispatchError, match="CUDA_VISIBLE_DEVICES= ") as caught:
        compiled_library()
    assert caught.value.rule == "CUDA's dispatch is recorded where PyTorch sees no GPU"


def test_without_a_compiler_it_says_what_is_missing(tmp_path: Path, without_dispatch: None) -> None:
    if sys.platform != "linux" or torch.cuda.is_available() or torch.version.hip:
        pytest.skip("another reason comes first here")
    with pytest.raises(NoCudaDispatchError, match=r"no C\+\+ compiler"):
        compiled_library({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)})


def test_a_compiler_that_fails_leaves_no_library_behind(tmp_path: Path, without_dispatch: None) -> None:
    if sys.platform != "linux" or torch.cuda.is_available() or torch.version.hip:
        pytest.skip("another reason comes first here")
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'out of ideas' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(NoCudaDispatchError, match="out of ideas"):
        compiled_library({"XDG_CACHE_HOME": str(tmp_path), "CXX": str(broken)})
    assert not list(tmp_path.rglob("*.so"))


def caching_in(folder: Path) -> dict[str, str]:
    """Variables of a cache in a folder, with a compiler that takes no time."""
    compiler = folder / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf compiled > "$2"\n')
    compiler.chmod(0o755)
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "CXX": str(compiler)}


OPEN_TO_OTHERS = {
    "the file is writable": lambda file: file.chmod(0o666),
    "the folder is writable": lambda file: (file.parent.chmod(0o777), file.chmod(0o666)),
    "a folder above is writable": lambda file: (file.parents[1].chmod(0o777), file.chmod(0o600)),
    "the file is a link": lambda file: file.symlink_to(file.rename(file.with_name("other"))),
    "the folder is a link": lambda file: file.parent.symlink_to(file.parent.rename(file.parents[1] / "other")),
    "the file is another user's": lambda file: os.chown(file, 12345, 12345),
    "the folder is another user's": lambda file: os.chown(file.parent, 12345, 12345),
}  # fmt: skip
"""What lets another user replace a library in the cache."""


@pytest.mark.parametrize("way", OPEN_TO_OTHERS)
def test_a_library_that_another_user_may_have_put_there_is_not_loaded(tmp_path: Path, way: str) -> None:
    if way.endswith("user's") and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    variables = caching_in(tmp_path)
    cached = compiled_library(variables)
    assert cached.parent == tmp_path / "cache" / "can-train"
    cached.write_text("not compiled here")
    assert compiled_library(variables).read_text() == "not compiled here"  # which its owner may well have done
    OPEN_TO_OTHERS[way](cached)
    library = compiled_library(variables)
    assert library.read_text() == "compiled"
    assert (library.stat().st_uid, stat.S_IMODE(library.stat().st_mode)) == (os.geteuid(), 0o700)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


def test_a_process_with_threads_can_record() -> None:
    code = (
        "import threading, torch\n"
        "from torch import nn\n"
        "from can_train.memory.cuda_dispatch import record_on_cuda\n"
        "torch.set_num_threads(2)\n"
        "torch.ones(2000, 2000) @ torch.ones(2000, 2000)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print(len(record_on_cuda(nn.Linear(4, 4), lambda: None, generation='ampere').events))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.strip() == "2"
