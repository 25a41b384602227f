import pytest
import torch
from torch import nn

from can_train.memory.meters import CpuMeter, gpu_key

GIB = 2**30
FLOAT_BYTES = 4


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H100 PCIe", 79.6, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090-24gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, "a100-mig-1g-10gb"),
        ("NVIDIA", 8.0, "gpu-8gb"),
    ],
)
def test_a_kind_of_gpu_has_one_key(name: str, gib: float, key: str) -> None:
    assert gpu_key(name, int(gib * GIB)) == key


def test_a_key_does_not_depend_on_what_the_driver_keeps_for_itself() -> None:
    keys = {gpu_key("NVIDIA A100-SXM4-40GB", int(gib * GIB)) for gib in (39.39, 39.59, 40.0)}
    assert keys == {"a100-40gb"}


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
