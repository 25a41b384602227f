"""Compares the gradient of a batch that two ranks share with the gradient of the whole batch: in a loop with
`DistributedDataParallel`, where each rank cuts its share as its GPU needs, and in the loop of docs/python.md.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from bench.harness import Benchmark, Table
from can_train import MicroBatcher

BENCHMARK: Final = Benchmark(__name__, packages=("torch",), quick="without DDP")
SHARE: Final = 12
"""Samples of each rank in a batch."""

FEATURES: Final = 16

EXACT: Final = 1e-12
"""Largest relative error of a gradient that counts as the batch's, in float64."""


class Case(NamedTuple):
    """A row: the parts of each rank in its two batches."""

    name: str
    parts: tuple[Sequence[int], Sequence[int]]  # Number of parts in each batch, by rank
    wrapped: bool  # Whether the model is wrapped in DDP
    fails: bool = False  # Whether memory runs out on rank 0


CASES: Final = (
    Case("DDP, both ranks cut alike", ((2, 2), (2, 2)), wrapped=True),
    Case("DDP, each rank cuts as it needs", ((1, 2), (2, 1)), wrapped=True),
    Case("MicroBatcher, each rank cuts as it needs", ((1, 2), (2, 1)), wrapped=False),
    Case("DDP, an out-of-memory on one rank", ((1, 2), (1, 2)), wrapped=True, fails=True),
    Case("MicroBatcher, an out-of-memory on one rank", ((1, 2), (1, 2)), wrapped=False, fails=True),
)


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if a gradient of ours is not exact."""
    options = BENCHMARK.parser().parse_args()
    table, missed = Table("loop", "parts of the first batch", "error"), []
    for case in [case for case in CASES if not (options.quick and case.wrapped)]:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(work, (case, folder), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
            gradient = torch.load(Path(folder) / "gradient.pt", weights_only=True)
        error = float((gradient - whole_gradient()).norm() / whole_gradient().norm())
        if not case.wrapped and error > EXACT:
            missed.append(f"{case.name}: {error:.1e}")
        first = [str(parts[0] + (case.fails and rank == 0)) for rank, parts in enumerate(case.parts)]
        table.add(case.name, " and ".join(first), f"{error:.1%}" if error > EXACT else f"{error:.0e}")
    BENCHMARK.finish(options, missed, table=table)


def make_model() -> nn.Module:
    """Makes the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def samples(batch: int) -> Tensor:
    """Returns [2 · SHARE, FEATURES] samples of one batch, of both ranks."""
    return torch.randn(2 * SHARE, FEATURES, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)


def gradient_of(model: nn.Module) -> Tensor:
    """Returns all gradients in one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def whole_gradient() -> Tensor:
    """Returns the gradient of the first batch, computed at once."""
    model, x = make_model(), samples(0)
    (model(x).square().sum() / len(x)).backward()
    return gradient_of(model)


def work(rank: int, case: Case, folder: str) -> None:
    """Computes both batches on one rank, and writes the first one's gradient."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = make_model()
    loop = wrapped_loop(model) if case.wrapped else bare_loop(model)
    for batch, parts in enumerate(case.parts[rank]):
        share = samples(batch)[rank * SHARE : (rank + 1) * SHARE]
        # The second batch makes up for the first, so that both ranks communicate equally often.
        fails = case.fails and (rank == 0) == (batch == 0)
        loop(share, parts, fails)
        if rank == 0 and batch == 0:
            torch.save(gradient_of(model), f"{folder}/gradient.pt")
        model.zero_grad()
    dist.destroy_process_group()


def wrapped_loop(model: nn.Module) -> Callable[[Tensor, int, bool], None]:
    """Returns a loop with DDP, which averages gradients in each backward pass."""
    wrapped = DistributedDataParallel(model)

    def loop(share: Tensor, parts: int, fails: bool) -> None:
        for part in share.chunk(parts):
            # A part that ran out of memory in the forward pass is split.
            for piece in part.chunk(2) if fails else (part,):
                (wrapped(piece).square().sum() / SHARE).backward()
            fails = False

    return loop


def bare_loop(model: nn.Module) -> Callable[[Tensor, int, bool], None]:
    """Returns the loop of docs/python.md, which adds gradients up once a batch."""

    def loop(share: Tensor, parts: int, fails: bool) -> None:
        most = SHARE // 2 if fails else SHARE

        def losses_of(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
            if stop - start > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return {"loss": (model(share[start:stop]).square().sum(), stop - start)}

        batcher = MicroBatcher(model, limits=-(-SHARE // parts))
        batcher.compares = False
        batcher.run_share(losses_of, SHARE, denominators={"loss": 2 * SHARE})
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)

    return loop
