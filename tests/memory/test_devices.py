import pytest
import torch

from can_train.errors import DeviceError
from can_train.memory.devices import available_bytes, resolve_device, total_bytes
from can_train.memory.meters import CpuMeter, open_meter

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
@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_GPUS": ""}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_a_job_without_gpus_trains_on_the_cpu(environment: dict[str, str]) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} | environment
    assert resolve_device("auto", environment=hidden) == torch.device("cpu")


@without_gpu
def test_cuda_without_a_gpu_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DeviceError, match=r"sees no CUDA GPU.*\n.*CUDA"):
        resolve_device("cuda:1")


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
    with pytest.raises(DeviceError, match=rf"written sim:<size>: '{text}'\.\n.*sim:2GiB"):
        resolve_device(text)


def test_tensors_of_a_simulated_gpu_are_the_cpus() -> None:
    assert resolve_device("sim:512MiB") == torch.device("cpu")


def test_the_cpus_capacity_is_what_the_host_can_still_give() -> None:
    assert 0 < available_bytes() <= total_bytes()
    meter = open_meter("cpu")
    assert meter.key == f"cpu-{round(total_bytes() / 2**30)}gb"
    assert 0 < meter.capacity_bytes <= meter.total_bytes


def test_the_cpu_meter_keeps_the_largest_peak_until_it_is_reset() -> None:
    meter = CpuMeter()
    for size in (1000, 100):
        with meter.measuring([]):
            torch.zeros(size * 128)
    assert meter.peak_bytes() == 1000 * 512
    meter.reset_peak()
    assert meter.peak_bytes() == 0
