import pytest
import torch
from torch import Tensor

from can_train.fit import repetitions
from can_train.fit.repetitions import Repetitions
from can_train.fit.rungs import Rung


def test_repetitions_are_compared_in_passes_whose_number_is_a_power_of_two() -> None:
    comparing, rung, compared = Repetitions(), Rung(recompute=("a",)), []
    for _ in range(9):
        with comparing.counted(rung):
            compared.append(comparing.is_compared)
    assert [number for number, is_compared in enumerate(compared, start=1) if is_compared] == [1, 2, 4, 8]
    with comparing.counted(Rung(recompute=("b",))):
        assert comparing.is_compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (300,), (30, 40), (5, 6, 7)])
def test_sums_of_saved_tensors_tell_values_apart_but_not_the_order_of_adding(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))

    def is_near(other: Tensor) -> bool:
        return all(map(repetitions._Sums.is_near, repetitions._sums_of(x), repetitions._sums_of(other)))

    assert is_near(x.clone())
    rounded = torch.finfo(dtype).eps * torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert is_near(x * (1 + rounded))
    assert not is_near(x * 1.1)
    assert not x.dim() or not is_near(x.flip(0))
