"""Number formats of models, real and complex."""

import pytest
import torch
from torch import Tensor, nn

from can_train.fit.collate import to_device
from can_train.fit.precision import _MOST_LOOKS, HalfGradients, are_finite, convert

CPU = torch.device("cpu")


class Spectral(nn.Module):
    """A filter with complex weights, a complex buffer and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.cfloat))
        self.real = nn.Linear(2, 1)
        self.register_buffer("rotation", torch.polar(torch.ones(6), torch.arange(6.0)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize(
    ("dtype", "complex_dtype"), [(torch.float32, torch.complex64), (torch.float64, torch.complex128)]
)
def test_complex_weights_and_buffers_stay_complex(dtype: torch.dtype, complex_dtype: torch.dtype) -> None:
    model = Spectral()
    weight, rotation = model.weight.detach().clone(), model.get_buffer("rotation").clone()
    assert convert(model, dtype, CPU) is model
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == {
        "weight": complex_dtype, "rotation": complex_dtype, "count": torch.int64,
        "real.weight": dtype, "real.bias": dtype,
    }  # fmt: skip
    assert torch.equal(model.weight.detach(), weight.to(complex_dtype))
    assert torch.equal(model.get_buffer("rotation"), rotation.to(complex_dtype))


def test_complex_inputs_have_the_precision_of_the_run() -> None:
    batch = {"x": torch.zeros(2, dtype=torch.complex64), "y": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int32)}
    sent = to_device(batch, CPU, torch.float64)
    assert [part.dtype for part in sent.values()] == [torch.complex128, torch.float64, torch.int32]


@pytest.mark.parametrize(
    ("gradient", "is_half"),
    [(torch.arange(8.0) / 3, False), ((torch.arange(8.0) / 3).half().float(), True), (torch.ones(8), None),
     (torch.zeros(8), None)],
    ids=["float32", "float16", "few bits", "zeros"],
)  # fmt: skip
def test_a_gradient_tells_its_format_or_is_not_looked_at_for_ever(gradient: Tensor, is_half: bool | None) -> None:
    halves, parameter = HalfGradients(), nn.Parameter(torch.zeros(8))
    parameter.grad = gradient
    for look in range(_MOST_LOOKS):
        assert (parameter in halves._is_half) == (look > 0 and is_half is not None)
        halves._look(parameter)
    assert halves._is_half[parameter] == bool(is_half)


def test_infinite_gradients_tell_nothing_however_often_they_are_seen() -> None:
    halves, parameter = HalfGradients(), nn.Parameter(torch.zeros(8))
    parameter.grad = torch.full((8,), torch.inf)
    for _ in range(_MOST_LOOKS + 1):
        halves._look(parameter)
    parameter.grad = (torch.arange(8.0) / 3).half().float()
    halves._look(parameter)
    assert halves._is_half[parameter]


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_gradients_are_finite_where_all_their_numbers_are(value: float) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([value]), (2,), check_invariants=True)
    assert are_finite([])
    assert are_finite([torch.ones(0)])
    for odd in (torch.tensor([value, 0.0]), sparse):
        assert are_finite([torch.ones(3), torch.ones(0), odd]) == (value == 1)
