from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from can_train.errors import ArgumentError, DeviceError
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.catalogue import UsableMemory, find_card, other_card, usable
from can_train.memory.host import available_bytes
from can_train.memory.meters import (
    AbsentGpuMeter,
    CpuMeter,
    Meter,
    SimulatedMeter,
    meter_of,
    nvidia_driver_version,
    open_meter,
    resolve_device,
    simulated_gpu,
)
from can_train.memory.monitor import MemoryMonitor
from can_train.memory.simulated.allocator import EXPANDABLE

MIB = 2**20
GIB = 2**30
FLOAT_BYTES = 4


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), nn.Linear(2, 2).weight.device])
def test_a_device_is_given_by_name_or_as_a_torch_device(device: Any) -> None:
    assert isinstance(meter_of(device, "auto"), CpuMeter)
    assert isinstance(meter_of(None, device), CpuMeter)
    assert isinstance(MemoryMonitor(device).meter, CpuMeter)
    assert isinstance(MemoryMonitor(meter=device).meter, CpuMeter)


@pytest.mark.parametrize("device", [3, True, object(), torch.ones(3), nn.Linear(2, 2), torch.float16, None])
def test_what_is_no_device_is_refused_in_words(device: Any) -> None:
    for use in (
        MemoryMonitor,
        lambda device: meter_of(device, device),
        lambda device: simulated_gpu(device).__enter__(),
    ):
        with pytest.raises(ArgumentError, match=r"A device is its name, or a torch\.device: [^\n]*\nGive \""):
            use(device)


@pytest.mark.parametrize("resident", [3, "model", {"weight": 1}, None])
def test_what_has_no_tensors_is_not_on_a_simulated_gpu(resident: Any) -> None:
    with (
        pytest.raises(ArgumentError, match="Models, optimizers and lists of tensors"),
        simulated_gpu("64MiB", resident),
    ):
        pass


def test_a_meter_refuses_more_than_its_capacity_and_goes_on_afterwards() -> None:
    meter = CpuMeter()
    meter.capacity_bytes = 4096
    with pytest.raises(torch.OutOfMemoryError, match="CPU out of memory"), meter.measuring([]):
        torch.zeros(4096)
    assert meter.peak_bytes() == 4096 * FLOAT_BYTES
    meter.release()
    meter.reset_peak()
    with meter.measuring([]):
        torch.zeros(128)
    assert meter.peak_bytes() == 512


def test_what_is_resident_is_part_of_the_peak() -> None:
    meter = CpuMeter()
    model = nn.Linear(256, 256, bias=False)
    with meter.measuring(model.parameters()):
        model(torch.ones(1, 256))
    assert meter.peak_bytes() == 256 * 256 * FLOAT_BYTES + 2 * 256 * FLOAT_BYTES


def test_the_peak_of_a_span_that_failed_counts() -> None:
    meter = CpuMeter()

    def fail() -> None:
        with meter.measuring([]):
            torch.zeros(1024)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert meter.peak_bytes() == 1024 * FLOAT_BYTES


def test_the_cpu_reserves_nothing_and_shares_with_nobody() -> None:
    meter = open_meter("cpu")
    with meter.active(), meter.host(), meter.measuring([]):
        kept = torch.zeros(1024)
    assert isinstance(meter, CpuMeter)
    assert meter.peak_bytes() == kept.nbytes
    assert (meter.peak_reserved_bytes(), meter.allocated_bytes(), meter.retries(), meter.foreign_bytes()) == (
        0,
        0,
        0,
        0,
    )
    assert meter.available_bytes() == meter.capacity_bytes


@pytest.mark.parametrize(
    ("text", "key", "size"),
    [
        ("sim:2GiB", "sim-2gib", 2 * GIB),
        ("sim:2048MiB", "sim-2gib", 2 * GIB),
        ("sim:128mib", "sim-128mib", 128 * MIB),
        ("sim:1.5GiB", "sim-1536mib", 1536 * MIB),
    ],
)
def test_a_simulated_gpu_has_the_memory_that_it_is_given(text: str, key: str, size: int) -> None:
    meter = open_meter(text)
    assert isinstance(meter, SimulatedMeter)
    assert (meter.name, meter.key, meter.driver, meter.device.type) == ("Simulated GPU", key, "", "cpu")
    assert meter.total_bytes == meter.capacity_bytes == meter.available_bytes() == size


@pytest.fixture
def simulated() -> SimulatedMeter:
    return SimulatedMeter(60 * MIB, settings=EXPANDABLE)


def mebibytes(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8)


def test_a_simulated_gpu_is_read_through_its_allocator(simulated: SimulatedMeter) -> None:
    with simulated.active():
        kept = mebibytes(15)
        mebibytes(30)
        assert (simulated.allocated_bytes(), simulated.peak_bytes()) == (15 * MIB, 45 * MIB)
        assert simulated.peak_reserved_bytes() == 60 * MIB
        simulated.release()
        simulated.reset_peak()
        assert (simulated.peak_bytes(), simulated.peak_reserved_bytes()) == (15 * MIB, 20 * MIB)
        assert simulated.retries() == 0
    del kept
    assert simulated.allocated_bytes() == 0


def test_nothing_counts_where_a_simulated_gpu_is_not_active(simulated: SimulatedMeter) -> None:
    kept = mebibytes(50)
    with simulated.active(), simulated.host():
        copied = mebibytes(50)
    assert (simulated.allocated_bytes(), simulated.peak_bytes()) == (0, 0)
    del kept, copied


def test_a_measured_span_is_active_and_holds_what_is_resident(simulated: SimulatedMeter) -> None:
    resident = mebibytes(5)
    for _ in range(2):
        with simulated.measuring([resident]):
            mebibytes(10)
    mebibytes(20)
    assert (simulated.peak_bytes(), simulated.allocated_bytes()) == (15 * MIB, 5 * MIB)


def test_a_simulated_gpu_that_is_active_stays_so_after_a_span_in_it(simulated: SimulatedMeter) -> None:
    with simulated.active():
        with simulated.measuring([]), simulated.active():
            mebibytes(10)
        mebibytes(20)
    assert simulated.peak_bytes() == 20 * MIB


def test_what_others_take_of_a_simulated_gpu_is_seen(simulated: SimulatedMeter) -> None:
    with simulated.active():
        kept = mebibytes(15)
        simulated.gpu.allocator.foreign_bytes = 10 * MIB
        assert (simulated.available_bytes(), simulated.foreign_bytes()) == (50 * MIB, 10 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
            mebibytes(40)
        assert simulated.retries() == 1
        simulated.gpu.allocator.foreign_bytes = 0
        mebibytes(40)
    del kept


TARGET = usable(find_card("h100"))


def test_a_target_has_the_sizes_of_its_gpu_and_nobody_on_it() -> None:
    meter = AbsentGpuMeter(TARGET)
    assert (meter.key, meter.name, meter.driver, meter.device.type) == ("h100-80gb", "H100", "", "cpu")
    assert (meter.total_bytes, meter.capacity_bytes) == (TARGET.total_bytes, TARGET.capacity_bytes)
    assert meter.available_bytes() == meter.free_bytes() == meter.capacity_bytes
    assert meter.foreign_bytes() == meter.peak_reserved_bytes() == 0


@pytest.mark.parametrize("target", [TARGET, usable(other_card(MIB))])
def test_what_is_measured_for_a_target_has_the_memory_of_the_host(target: UsableMemory) -> None:
    meter = AbsentGpuMeter(target)
    for size in (10, 5):
        with meter.measuring([]):
            mebibytes(size)
    assert meter.peak_bytes() == 10 * MIB
    meter.host_bytes = 7 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="CPU out of memory"), meter.measuring([]):
        mebibytes(10)
    meter.release()
    meter.reset_peak()
    assert meter.peak_bytes() == 0


@pytest.mark.parametrize("meter", [CpuMeter(), AbsentGpuMeter(TARGET), SimulatedMeter(GIB)])
def test_all_meters_are_of_one_shape(meter: Meter) -> None:
    with meter.active(), meter.measuring([]):
        torch.zeros(128)
    assert meter.peak_bytes() == 512
    assert meter.capacity_bytes == meter.available_bytes() + meter.foreign_bytes()


class Failing(torch.autograd.Function):
    """The identity; its gradient needs more than there is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        mebibytes(100)
        return gradient


@pytest.mark.parametrize("without_gradients", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_release_takes_back_what_a_failed_backward_has_left(
    simulated: SimulatedMeter, without_gradients: Callable[[], AbstractContextManager[None]]
) -> None:
    weight = nn.Parameter(torch.ones(2**20))
    with simulated.active():
        # The last branch is the first to run backward: those of the others wait in the engine.
        kept = weight.exp().sum()
        with pytest.raises(torch.OutOfMemoryError):
            (kept + Failing.apply(weight.exp()).sum()).backward()
        del kept
        with without_gradients():
            simulated.release()
        assert simulated.allocated_bytes() == 0


def test_a_peak_can_be_read_and_reset_inside_a_measured_span() -> None:
    meter = CpuMeter()
    with meter.measuring([]):
        kept = mebibytes(5)
        mebibytes(20)
        assert meter.peak_bytes() == 25 * MIB
        meter.reset_peak()
        assert meter.peak_bytes() == kept.nbytes
        mebibytes(10)
    assert meter.peak_bytes() == 15 * MIB


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU that torch can use")


def test_the_cpu_is_the_cpu() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@without_gpu
def test_auto_is_the_cpu_where_no_gpu_is() -> None:
    assert resolve_device("auto", environment={"SLURM_GPUS_ON_NODE": "0"}) == torch.device("cpu")


@without_gpu
@pytest.mark.parametrize("name", ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"])
def test_a_gpu_that_was_allocated_and_cannot_be_used_is_an_error_with_a_remedy(name: str) -> None:
    with pytest.raises(DeviceError, match=rf"torch cannot use it: {name}=2.*\n.*--device cpu"):
        resolve_device("auto", environment={name: "2"})


@without_gpu
@pytest.mark.parametrize("name", ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS"])
def test_gpu_number_0_is_a_gpu(name: str) -> None:
    with pytest.raises(DeviceError, match=rf"{name}=0"):
        resolve_device("auto", environment={name: "0"})


@without_gpu
@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_JOB_GPUS": ""}, *({"CUDA_VISIBLE_DEVICES": nothing} for nothing in ("", "NoDevFiles", "none"))],
)
def test_a_job_without_gpus_trains_on_the_cpu(environment: dict[str, str]) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} | environment
    assert resolve_device("auto", environment=hidden) == torch.device("cpu")


@without_gpu
def test_cuda_without_a_gpu_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DeviceError, match=r"sees no CUDA GPU.*\n.*CUDA"):
        resolve_device("cuda:1")


@pytest.mark.parametrize("text", ["cuda:256", "cuda:999999999"])
def test_a_gpu_that_is_not_there_is_no_other_gpu(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match=f"There is no such GPU: {text}"):
        resolve_device(text)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("gpu", "cpu, auto, cuda, cuda:1, sim:2GiB"),
        ("cuda:x", "cuda:1, cuda, auto, cpu, sim:2GiB"),
        ("sin:2GiB", "sim:2GiB, auto, cpu, cuda, cuda:1"),
        ("", "auto, cpu, cuda, cuda:1, sim:2GiB"),
        ("mps", "auto, cpu, cuda, cuda:1, sim:2GiB"),
        ("CPU", "auto, cpu, cuda, cuda:1, sim:2GiB"),
    ],
)
def test_an_unknown_device_lists_the_known_ones_nearest_first(text: str, valid: str) -> None:
    with pytest.raises(DeviceError, match=rf"Unknown device.*\nValid: {valid}\."):
        resolve_device(text)


@pytest.mark.parametrize("text", ["sim", "sim:", "sim:huge", "sim:0MiB", "sim:-1GiB", "sim:2", "sim:2GiB:1"])
def test_a_simulated_gpu_needs_a_size(text: str) -> None:
    with pytest.raises(DeviceError, match=rf"sim:<size>, cannot be read: '{text}'\.\n.*sim:2GiB"):
        resolve_device(text)


def test_tensors_of_a_simulated_gpu_are_the_cpus() -> None:
    assert resolve_device("sim:512MiB") == torch.device("cpu")


def test_the_cpus_capacity_is_what_the_host_can_still_give() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total
    meter = open_meter("cpu")
    assert meter.key == f"cpu-{round(psutil.virtual_memory().total / 2**30)}gb"
    assert 0 < meter.capacity_bytes <= meter.total_bytes


def test_the_cpu_meter_keeps_the_largest_peak_until_it_is_reset() -> None:
    meter = CpuMeter()
    for size in (1000, 100):
        with meter.measuring([]):
            torch.zeros(size * 128)
    assert meter.peak_bytes() == 1000 * 512
    meter.reset_peak()
    assert meter.peak_bytes() == 0


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
    ],
)
def test_segments_expand_unless_the_user_has_other_settings(environment: dict[str, str]) -> None:
    assert read_allocator_settings(environment).expandable_segments


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["", "expandable_segments:False", "max_split_size_mb:64", "backend:cudaMallocAsync"])
def test_settings_of_the_users_own_are_left_as_they_are(name: str, value: str) -> None:
    assert not read_allocator_settings({name: value}).expandable_segments


def test_a_driver_has_a_version_or_there_is_none() -> None:
    version = nvidia_driver_version()
    assert version == "" or version[0].isdigit()


class _Recurrent(nn.Module):
    """Reads rows of images by two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(48, 64, 2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(2))[0]  # type: ignore[no-any-return]


def _attending(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(48, 4, 192, dropout=dropout, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.TransformerEncoder(layer, 2))


NETWORKS = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.Flatten(), nn.Linear(32 * 48, 64)
    ),
    "recurrent": _Recurrent,
    "attention": lambda: _attending(0.0),
    "dropout": lambda: _attending(0.1),
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("autocast", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_products_of_a_gpu_that_is_not_there_take_their_memory_uncomputed(
    name: str, autocast: torch.dtype, trains: bool
) -> None:
    network = NETWORKS[name]().train(trains)

    def peak(meter: CpuMeter, *, computes: bool) -> tuple[int, Tensor]:
        meter._computes = computes
        with (
            meter.measuring(network.parameters()),
            torch.inference_mode(not trains),
            torch.autocast("cpu", autocast, enabled=autocast is not torch.float32),
        ):
            # As many numbers as products have that are not computed.
            results = network(torch.ones(64, 16, 6, 8))
            if trains:
                results.float().square().mean().backward()
        network.zero_grad()
        return meter.peak_bytes(), results.detach()

    drawn_bytes, drawn = peak(AbsentGpuMeter(TARGET), computes=False)
    computed_bytes, computed = peak(AbsentGpuMeter(TARGET), computes=True)
    assert drawn_bytes == computed_bytes
    assert (drawn.shape, drawn.stride(), drawn.dtype) == (computed.shape, computed.stride(), computed.dtype)
    # Samples that are alike have unlike results only where these are drawn, or where dropout draws.
    assert torch.equal(computed[0], computed[1]) or name == "dropout" or (name, trains) == ("recurrent", True)
    assert not torch.equal(drawn[0], drawn[1])
    assert drawn.isfinite().all()


def test_a_gpu_that_is_not_there_computes_no_products_and_a_processor_computes_them() -> None:
    weights, inputs = torch.ones(512, 512), torch.ones(2, 512)
    with CpuMeter().measuring([]):
        assert torch.equal(inputs @ weights, torch.full((2, 512), 512.0))
    with AbsentGpuMeter(TARGET).measuring([]):
        assert not torch.equal(inputs @ weights, torch.full((2, 512), 512.0))
