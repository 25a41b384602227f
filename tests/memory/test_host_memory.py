"""Tensors that leave a device are memory of the host: they are counted there, and no longer on the device."""

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from can_train.fit.prediction import predict_peak
from can_train.fit.rungs import Rung, computed_on
from can_train.memory.cuda_operators import offloading
from can_train.memory.meters import simulated_gpu

MIB: Final = 2**20
LAYERS: Final = 8


class Deep(nn.Module):
    """Its layers save 1 MiB each, on the CPU or on the device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(LAYERS)])
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "device":
            return self.layers(x)
        with save_on_cpu(pin_memory=self.kind == "pinned"):
            return self.layers(x)


def trained(kind: str) -> tuple[int, int, list[Tensor | None]]:
    """Trains a step; returns the peaks of the device and of the host, and the gradients."""
    model = Deep(kind)
    with simulated_gpu("64MiB", model) as meter:
        model(torch.ones(4096, 64)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert meter.gpu.host_bytes == 0
        return meter.peak_bytes(), meter.gpu.peak_host_bytes, gradients


@pytest.mark.parametrize("kind", ["cpu", "pinned"])
def test_what_a_user_saves_on_the_cpu_leaves_the_device(kind: str) -> None:
    (on_device, nothing, expected), (peak, on_host, gradients) = trained("device"), trained(kind)
    assert on_device >= LAYERS * MIB
    assert nothing == 0
    assert peak <= 6 * MIB
    assert LAYERS * MIB <= on_host <= (2 * LAYERS + 1) * MIB
    assert all(map(torch.equal, gradients, expected))  # type: ignore[arg-type]


def test_offloaded_activations_are_counted_on_the_host() -> None:
    model = Deep("device")
    with simulated_gpu("64MiB", model) as meter, computed_on(Rung(offload=True), model):
        loss = model(torch.ones(4096, 64)).square().mean()
        assert LAYERS * MIB <= meter.gpu.host_bytes <= (LAYERS + 2) * MIB
        loss.backward()
    del loss
    assert meter.gpu.host_bytes == 0


def test_the_cpu_saves_as_ever_without_a_simulated_gpu() -> None:
    before: Any = save_on_cpu.__init__
    with simulated_gpu("64MiB"):
        assert save_on_cpu.__init__ is not before
    assert save_on_cpu.__init__ is before


def test_a_tensor_that_has_left_is_not_counted_on_the_device_again() -> None:
    with simulated_gpu("64MiB") as meter:
        with offloading():
            left = torch.empty(MIB, dtype=torch.uint8)
        with meter.measuring([left]):
            assert meter.allocated_bytes() == 0
        assert meter.gpu.host_bytes == MIB


@pytest.mark.parametrize("target", [None, "a100-40gb"])
def test_a_predicted_peak_is_without_tensors_that_are_saved_on_the_cpu(target: str | None) -> None:
    x = torch.ones(4096, 64)

    def peak(kind: str) -> float:
        model = Deep(kind)
        loss_of = lambda rows: model(x[rows]).square().sum()  # noqa: E731
        return predict_peak(model, 4096, loss_of=loss_of, optimizer="sgd", target=target).peak_bytes

    assert peak("device") - peak("cpu") >= (LAYERS - 4) * MIB
