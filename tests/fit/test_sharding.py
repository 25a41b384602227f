"""The arithmetic of a model that ranks share, and which of its modules are gathered one by one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from can_train.config.settings import TrainingSettings
from can_train.fit.cost_model import DeviceLimits, ShardedWeights
from can_train.fit.sharding import blocks_of, fits_whole, sharded_weights
from fakes.device_limits import limits


class Block(nn.Sequential):
    """A block, as those of a transformer."""


def deep(width: int = 6, blocks: int = 3, device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        parts = [Block(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks)]
        return nn.Sequential(nn.Linear(5, width), *parts, nn.Linear(width, 1))


def test_shards_are_filled_up_to_equal_sizes() -> None:
    sizes = sharded_weights(deep(), 4)
    # Rows of 6 are shared out as 2, 2, 2 and 0; one output unit as 1, 0, 0 and 0.
    block = 2 * (2 * 6 + 2) * 4
    root = (2 * 5 + 2 + 1 * 6 + 1) * 4
    assert sizes.weight_shard_bytes == sizes.trained_shard_bytes == 3 * block + root
    assert sizes.block_bytes == (4 * block,) * 3
    assert sizes.root_bytes == 4 * root
    assert sizes.weight_bytes == sum(one.nbytes for one in deep().parameters())


def test_a_model_of_seven_billion_weights_is_sized_without_memory() -> None:
    sizes = sharded_weights(deep(width=10_444, blocks=32, device="meta"), 8)
    assert sizes.weight_bytes > 27e9
    assert sizes.weight_shard_bytes == pytest.approx(sizes.weight_bytes / 8, rel=1e-3)
    assert len(sizes.block_bytes) == 32


def test_frozen_weights_are_sharded_without_gradients() -> None:
    model = deep()
    model[0].requires_grad_(requires_grad=False)
    sizes = sharded_weights(model, 2)
    assert sizes.weight_bytes - sizes.trained_bytes == (5 * 6 + 6) * 4


def test_blocks_that_share_weights_with_the_rest_are_no_blocks() -> None:
    model = deep()
    assert blocks_of(model) == [*model[1:4]]
    model[1][0].weight = model[2][0].weight
    assert blocks_of(model) == [model[3]]


@pytest.mark.parametrize("ranks", [2, 8])
def test_limits_on_shards_are_less_weights_gradients_and_state(ranks: int) -> None:
    whole, sizes = limits(0.9, 1.0), sharded_weights(deep(width=512, blocks=8), ranks)
    state_bytes = 2 * sizes.trained_bytes
    shared = whole.on_shards(sizes, saved_state_bytes=state_bytes - state_bytes // ranks, saved_step_bytes=0)
    saved = whole.training.model.base_bytes - shared.training.model.base_bytes
    gathered = sizes.gathered_bytes(sample_cost(whole))
    assert saved == pytest.approx(4 * sizes.weight_bytes * (1 - 1 / ranks) - gathered, rel=2e-3)
    assert whole.optimizer_peak_bytes - shared.optimizer_peak_bytes == pytest.approx(saved + gathered)
    assert shared.gradient_bytes == sizes.trained_shard_bytes


def test_gradients_that_decide_the_peaks_of_small_batches_are_shards_too() -> None:
    whole, sizes = limits(0.9, 1.0), sharded_weights(deep(width=512, blocks=8), 4)
    cost, gradients = sample_cost(whole), sizes.trained_bytes - sizes.trained_shard_bytes
    line = whole.training.model.peak_bytes(cost)
    points = ((cost, line + gradients + 1000), (3 * cost, line + 2 * cost))
    model = replace(whole.training.model, below=points)
    small = replace(whole, training=replace(whole.training, model=model))
    shared = (one.on_shards(sizes, saved_state_bytes=0, saved_step_bytes=0).training.model for one in (small, whole))
    assert next(shared).peak_bytes(cost) - next(shared).peak_bytes(cost) == pytest.approx(1000)


def sample_cost(limits: DeviceLimits) -> float:
    (mean,), (coefficient,) = limits.training.mean_totals, limits.training.model.coefficients
    return mean * coefficient


def test_a_pass_gathers_two_blocks_beside_the_root_and_more_for_small_samples() -> None:
    sizes = ShardedWeights(ranks=2, weight_bytes=0, weight_shard_bytes=0, trained_bytes=0, trained_shard_bytes=0,
                           root_bytes=10, block_bytes=(20, 30, 25))  # fmt: skip
    assert sizes.gathered_bytes(1000) == 10 + 55
    assert sizes.gathered_bytes(30) == 10 + 55 + 45


def test_a_model_fits_whole_where_its_weights_gradients_and_state_do() -> None:
    model = deep(width=512, blocks=4)
    weights = sum(one.nbytes for one in model.parameters())
    assert not fits_whole(model, TrainingSettings(), 4 * weights)
    assert fits_whole(model, TrainingSettings(), 5 * weights)
    assert fits_whole(model, TrainingSettings(optimizer="sgd"), 3.5 * weights)
