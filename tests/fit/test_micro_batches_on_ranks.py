"""`MicroBatcher` in a loop of one's own on several ranks, as docs/python.md shows it.

Shapes: N samples of a batch, F inputs.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from can_train import MicroBatcher
from can_train.errors import ArgumentError
from can_train.fit.packing import SplitRules
from can_train.training.distributed import Ranks
from fakes.several_ranks import error_text, run_ranks

SIZES = {0: 11, 1: 5}
"""Samples of each rank's share."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def inputs() -> Tensor:
    return torch.randn(sum(SIZES.values()), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def share_a_batch(ranks: Ranks, folder: Path, fails_above: int) -> None:
    """Rank 0 has twice the samples, and memory for fewer of them at once."""
    start = sum(SIZES[rank] for rank in range(ranks.rank))
    share, model = inputs()[start : start + SIZES[ranks.rank]], make_model()
    limit = fails_above if ranks.is_first else 100
    batcher = MicroBatcher(model, rules=SplitRules(samples=0 if ranks.is_first else 2))

    def losses_of(first: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        if stop - first > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"loss": (model(share[first:stop]).square().sum(), float(stop - first))}

    whole = torch.tensor(float(len(share)))
    dist.all_reduce(whole)
    result = batcher.run_share(losses_of, len(share), denominators={"loss": float(whole)})
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    torch.save({"gradient": gradient(model), "parts": list(result.micro_batches)}, folder / f"{ranks.rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("fails_above", [100, 3])
def test_ranks_that_cut_differently_have_the_gradient_of_the_whole_batch(tmp_path: Path, fails_above: int) -> None:
    codes = run_ranks(2, share_a_batch, tmp_path, fails_above=fails_above)
    assert codes == [0, 0], error_text(tmp_path, 0)
    model = make_model()
    model(inputs()).square().mean().backward()
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in SIZES]
    assert len(saved[0]["parts"]) != len(saved[1]["parts"])
    for one in saved:
        assert (one["gradient"] - gradient(model)).norm() <= 1e-12 * gradient(model).norm()


def wrap(ranks: Ranks, folder: Path) -> None:
    with pytest.raises(ArgumentError, match="run_share"):
        MicroBatcher(DistributedDataParallel(make_model()))
    with pytest.raises(ArgumentError, match="whole model on each rank"):
        MicroBatcher(fully_shard(make_model(), mesh=init_device_mesh("cpu", (2,))))


@pytest.mark.slow
def test_a_model_whose_ranks_wait_for_each_other_in_every_pass_is_refused(tmp_path: Path) -> None:
    assert run_ranks(2, wrap, tmp_path) == [0, 0]
