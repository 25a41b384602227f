"""`MicroBatcher` with limits that a loop of one's own found or chose."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from can_train import (
    Feature,
    MemoryMonitor,
    MicroBatcher,
    find_max_size,
    predict_peak,
    simulated_gpu,
    solve_accumulation,
)
from can_train.errors import ArgumentError, DeviceError, DoesNotFitError
from can_train.fit.micro_batcher import Losses
from can_train.memory.meters import SimulatedMeter
from can_train.memory.out_of_memory import is_out_of_memory

MIB = 2**20
WIDTH = 256
SAMPLES = 40_000
X = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.randint(2, 60, (20_000,), generator=torch.Generator().manual_seed(0)).sort(descending=True).values


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def over(model: nn.Module) -> Any:
    return lambda start, stop: {"loss": (model(X[start:stop]).square().sum(), stop - start)}


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def whole_gradient() -> Tensor:
    model = wide()
    MicroBatcher(model).run(over(model), SAMPLES)
    return gradient(model)


def test_a_number_of_samples_is_a_limit() -> None:
    model = wide()
    assert MicroBatcher(model, limits=15_000).run(over(model), SAMPLES).micro_batches == (13_334, 13_333, 13_333)


def test_what_find_max_size_returned_is_a_limit() -> None:
    model = wide()

    def trial(size: int) -> int:
        tried = wide()
        with simulated_gpu("64MiB", tried) as gpu:
            over(tried)(0, size)["loss"][0].backward()
        return gpu.peak_bytes()

    found = find_max_size(trial, upper=SAMPLES, capacity=64 * MIB)
    batcher = MicroBatcher(model, meter="sim:64MiB", limits=found)
    result = batcher.run(over(model), SAMPLES)
    assert len(result.micro_batches) == -(-SAMPLES // found.size) > 1
    assert result.ooms_rescued == 0
    torch.testing.assert_close(gradient(model), whole_gradient())


def test_what_predict_peak_returned_is_a_limit() -> None:
    model = wide()
    found = predict_peak(model, SAMPLES, loss_of=lambda rows: over(model)(0, len(rows))["loss"][0])
    batcher = MicroBatcher(model, meter="sim:64MiB", limits=found)
    result = batcher.run(over(model), SAMPLES)
    assert len(result.micro_batches) > 1
    assert result.ooms_rescued == 0
    torch.testing.assert_close(gradient(model), whole_gradient())
    # Less of the device makes more parts of it.
    smaller = MicroBatcher(wide(), meter="sim:48MiB", limits=found).run(over(model), SAMPLES)
    assert len(smaller.micro_batches) > len(result.micro_batches)


def padded_loss(model: nn.Module, lengths: Tensor) -> Tensor:
    hidden = model(torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64))
    return (torch.softmax(hidden @ hidden.transpose(1, 2), dim=2) @ hidden).square().sum()


def test_a_prediction_prices_the_counts_it_was_given() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32))
    counts = {Feature("tokens", padding=1): LENGTHS, Feature("pairs", padding=2): LENGTHS}
    found = predict_peak(model, counts, loss_of=lambda rows: padded_loss(model, LENGTHS[rows]))
    batcher = MicroBatcher(model, meter="sim:192MiB", limits=found)
    # The loss counts padding, so that the gradient depends on the longest sample: no subject here.
    batcher.compares = False

    def losses_of(start: int, stop: int) -> Losses:
        return {"loss": (padded_loss(model, LENGTHS[start:stop]), stop - start)}

    result = batcher.run(losses_of, counts)
    # Costs are bytes. Of shorter samples, more fit.
    assert 96 * MIB < result.largest_cost < 192 * MIB
    assert result.micro_batches[0] < max(result.micro_batches)
    # Two features in place of three, and the same ones in another order.
    for other in (LENGTHS, dict(reversed(counts.items()))):
        with pytest.raises(ArgumentError, match="Give each sample's tokens, pairs"):
            batcher.run(losses_of, other)


def test_a_prediction_that_does_not_hold_is_no_limit() -> None:
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32))
    found = predict_peak(model, LENGTHS, loss_of=lambda rows: padded_loss(model, LENGTHS[rows]))
    assert not found.explains
    with pytest.raises(ArgumentError, match="features explain the memory"):
        MicroBatcher(model, meter="sim:8MiB", limits=found)


def test_a_model_that_is_predicted_not_to_fit_is_told() -> None:
    model = wide()
    found = predict_peak(model, 8, loss_of=lambda rows: over(model)(0, len(rows))["loss"][0])
    with pytest.raises(DoesNotFitError, match="optimizer state must fit"):
        MicroBatcher(model, meter="sim:1MiB", limits=found)


@pytest.mark.parametrize("limits", [0, -1, np.int64(0)])
def test_a_limit_is_at_least_one_sample(limits: Any) -> None:
    with pytest.raises(ArgumentError, match=r"A micro-batch holds at least one sample: limits=.*\nGive limits=1"):
        MicroBatcher(wide(), limits=limits)


@pytest.mark.parametrize("limits", [True, 2.5, "8", [8], {"samples": 8}, object()])
def test_a_limit_that_is_none_is_refused(limits: Any) -> None:
    with pytest.raises(ArgumentError, match=r"limits bound a micro-batch: .*\nGive limits=64"):
        MicroBatcher(wide(), limits=limits)


def test_limits_are_whole_numbers_of_any_library() -> None:
    model = wide()
    assert MicroBatcher(model, limits=np.int64(4)).run(over(model), 8).micro_batches == (4, 4)
    splits: list[Any] = [np.full(2, 4), torch.full((2,), 4), [np.int32(4)] * 2, iter((4, 4))]
    for split in splits:
        result = MicroBatcher(model, limits=lambda size, split=split: split).run(over(model), 8)
        assert result.micro_batches == (4, 4)
        assert {type(size) for size in result.micro_batches} == {int}


def test_a_search_that_found_nothing_is_no_limit() -> None:
    def trial(size: int) -> None:
        raise MemoryError

    with pytest.raises(ArgumentError, match="at least one sample"):
        MicroBatcher(wide(), limits=find_max_size(trial))


def test_a_split_of_ones_own_is_run_as_it_is() -> None:
    model = wide()
    batcher = MicroBatcher(model, limits=lambda size: solve_accumulation(size, 40, divisor=True))
    assert batcher.run(over(model), 100).micro_batches == (25, 25, 25, 25)
    uneven = MicroBatcher(model, limits=lambda size: (size - 1, 1))
    assert uneven.run(over(model), 10).micro_batches == (9, 1)


def test_a_part_of_ones_own_split_that_runs_out_of_memory_is_split_alone() -> None:
    def fails_above(most: int, split: Sequence[int]) -> tuple[int, ...]:
        model = wide()
        batcher = MicroBatcher(model, limits=lambda size: split)
        losses_of = over(model)

        def limited(start: int, stop: int) -> Losses:
            if stop - start > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return losses_of(start, stop)  # type: ignore[no-any-return]

        return batcher.run(limited, sum(split)).micro_batches

    assert fails_above(8, (3, 16, 2, 5)) == (3, 8, 8, 2, 5)
    # What did not fit before is not tried again.
    assert fails_above(8, (3, 16, 2, 12)) == (3, 8, 8, 2, 6, 6)


@pytest.mark.parametrize(
    "split",
    [(), (3,), (5, 5, 1), (11, -1), (10, 0), (5.0, 5.0), 4, None, "ab", torch.tensor(10), np.full((2, 5), 1)],
    ids=str,
)
def test_a_split_that_is_not_the_batch_is_refused(split: Any) -> None:
    model = wide()
    with pytest.raises(ArgumentError, match=r"add up to the batch: [^\n]* of 10 samples\.\nReturn all sizes: limits="):
        MicroBatcher(model, limits=lambda size: split).run(over(model), 10)


def test_limits_hold_in_evaluation_too() -> None:
    seen: list[int] = []
    MicroBatcher(wide(), limits=4).evaluate(lambda start, stop: seen.append(stop - start), 10)
    assert seen == [4, 3, 3]


def test_a_simulated_gpu_is_a_meter_by_name() -> None:
    model = wide()
    batcher = MicroBatcher(model, meter="sim:64MiB")
    result = batcher.run(over(model), SAMPLES)
    assert result.ooms_rescued > 0
    torch.testing.assert_close(gradient(model), whole_gradient())
    monitor = MemoryMonitor(meter="sim:64MiB", total_steps=1)
    with monitor.step(model):
        over(model)(0, 100)["loss"][0].backward()
    assert monitor.peak_bytes > 2 * WIDTH * WIDTH * 4


def test_a_simulated_gpu_holds_what_was_made_before_and_in_the_block() -> None:
    model = wide()
    size = sum(parameter.nbytes for parameter in model.parameters())
    with simulated_gpu("sim:1GiB", model) as gpu:
        assert size <= gpu.allocated_bytes() < size + 4096
        kept = torch.zeros(MIB)
        assert gpu.peak_bytes() >= size + 4 * MIB
    del kept
    assert gpu.allocated_bytes() < size + 4096


def test_what_does_not_fit_on_a_simulated_gpu_raises_as_on_a_real_one() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\.") as caught, simulated_gpu("2MiB"):
        torch.zeros(MIB)
    assert is_out_of_memory(caught.value)
    with pytest.raises(DeviceError, match="sim:<size>"), simulated_gpu("much"):
        pass


def test_a_batcher_on_the_simulated_gpu_of_a_block_rescues_there() -> None:
    model = wide()
    with simulated_gpu("64MiB", model) as gpu:
        result = MicroBatcher(model, meter=gpu).run(over(model), SAMPLES)
    assert isinstance(gpu, SimulatedMeter)
    assert result.ooms_rescued > 0
    assert gpu.peak_bytes() <= gpu.capacity_bytes


def test_means_are_read_from_the_device_when_they_are_looked_at() -> None:
    model = wide().requires_grad_()
    result = MicroBatcher(model, limits=20_000).run(over(model), SAMPLES)
    with torch.no_grad():
        expected = float(model(X).square().sum() / SAMPLES)
    assert not result.means._read  # type: ignore[attr-defined]
    assert dict(result.means) == pytest.approx({"loss": expected})
    assert result.means._read  # type: ignore[attr-defined]
    assert result.loss == pytest.approx(expected)
    assert repr(result.means) == repr(dict(result.means))
    assert len(result.means) == 1
    assert np.isfinite(list(result.means.values())).all()
