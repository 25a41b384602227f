"""Functions that each rank runs with `MicroBatcher` in its own loop, as in docs/python.md.

Shapes: N samples of a batch, F inputs.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from can_train import MicroBatcher
from can_train.fit.packing import SplitRules
from can_train.training.distributed import Ranks

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


def wrap_in_ddp(ranks: Ranks, folder: Path) -> None:
    MicroBatcher(DistributedDataParallel(make_model()))


def wrap_in_fsdp(ranks: Ranks, folder: Path) -> None:
    MicroBatcher(fully_shard(make_model(), mesh=init_device_mesh("cpu", (2,))))


def use_sync_batch_norm(ranks: Ranks, folder: Path) -> None:
    MicroBatcher(torch.nn.Sequential(make_model(), torch.nn.SyncBatchNorm(1)))
