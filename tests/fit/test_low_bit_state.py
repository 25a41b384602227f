"""The state of bitsandbytes' optimizers in predictions."""

import pytest
import torch
from torch import Tensor, nn

from can_train import predict_peak
from can_train.fit import optimizer_memory
from can_train.fit.optimizer_memory import LowBitOptimizer
from can_train.fit.peak_prediction import PeakPrediction
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library

ROWS, WIDTH = 200, 600
TOKENS = torch.zeros(ROWS, dtype=torch.long)
MAPS = 2 * 256 * 4


def model() -> nn.Module:
    """An embedding of 120,000 values, a matrix of 360,000, one of 60,000, and two vectors of 600 and 100."""
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 100))


def predicted(optimizer: object, *, target: str | None = None) -> PeakPrediction:
    network = model()

    def loss_of(rows: object) -> Tensor:
        return network(TOKENS[rows]).sum()  # type: ignore[index]

    return predict_peak(network, 4, loss_of=loss_of, optimizer=optimizer, target=target)  # type: ignore[arg-type]


def narrow(values: int) -> int:
    """Bytes of one state of 8 bits: a byte for a value, and the largest value of each block of 256."""
    return values + 4 * -(-values // 256)


STATES = {
    "AdamW8bit": 2 * (narrow(120_000) + narrow(360_000) + narrow(60_000) + 4 * 700) + MAPS,
    "bitsandbytes.optim.Lion8bit": narrow(120_000) + narrow(360_000) + narrow(60_000) + 4 * 700 + MAPS,
    # transformers' Trainer has embeddings in 32 bits.
    "adamw_8bit": 2 * (4 * 120_000 + narrow(360_000) + narrow(60_000) + 4 * 700) + MAPS,
    "adamw_bnb_8bit": 2 * (4 * 120_000 + narrow(360_000) + narrow(60_000) + 4 * 700) + MAPS,
    # From 100,000 values on, states are in managed memory, and their largest values are not.
    "paged_adamw_8bit": 2 * (narrow(360_000) - 360_000 + narrow(60_000) + 4 * 700) + MAPS,
    "PagedAdamW8bit": 2 * (narrow(480_000) - 480_000 + 4 + narrow(60_000) + 4 * 700) + MAPS,
    "paged_lion_32bit": 4 * (60_000 + 700),
}


@pytest.mark.parametrize(("name", "num_bytes"), STATES.items())
def test_the_state_has_the_bytes_of_bitsandbytes_layout(name: str, num_bytes: int) -> None:
    network = model()
    layout = LowBitOptimizer.named(name, network)
    assert layout is not None
    optimizer = layout(list(network.parameters()))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.clone() for parameter in network.parameters()]
    for _ in range(2):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, network.parameters(), strict=True))
    state = [tensor for states in optimizer.state.values() for tensor in states.values()]
    assert sum(tensor.nbytes for tensor in state) + (MAPS if layout.bits == 8 else 0) == num_bytes


def test_a_step_that_the_optimizer_decides_takes_its_state_more() -> None:
    plain = predicted(lambda parameters: torch.optim.SGD(parameters, foreach=False)).peak_bytes
    assert predicted("AdamW8bit").peak_bytes - plain == pytest.approx(STATES["AdamW8bit"], rel=0.02)


def test_another_size_of_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_memory, "_BLOCK", 64)
    with pytest.raises(AssertionError):
        test_the_state_has_the_bytes_of_bitsandbytes_layout("AdamW8bit", STATES["AdamW8bit"])


def test_managed_memory_widens_what_the_driver_may_show() -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")
    paged, resident = (predicted(name, target="t4") for name in ("PagedAdamW8bit", "AdamW8bit"))
    managed = 2 * 480_000
    assert paged.context.most_bytes - resident.context.most_bytes == managed
    assert paged.peak_bytes < resident.peak_bytes - 0.9 * managed
    assert any("of the state are in managed memory" in told for told in paged.assumptions)
    # Blocks of 2,048 values, before version 0.44, have fewer largest values.
    assert 0 < resident.tensors.num_bytes - resident.tensors.least_bytes < 0.02 * 2 * 540_000
    assert not paged.notices


@pytest.mark.parametrize("name", ["adamw", "torch.optim.AdamW", "adamw8", "lamb_8bit", "adamw_16bit"])
def test_other_names_are_no_low_bit_optimizers(name: str) -> None:
    assert LowBitOptimizer.named(name, model()) is None
