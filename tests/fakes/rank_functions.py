"""Functions that each rank runs in the tests of `Ranks`: gradients of shares, buffers, failures."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from can_train.errors import DoesNotFitError
from can_train.fit.micro_batcher import BatchResult, Losses, MicroBatcher, check_denominators, combine_shares
from can_train.fit.packing import BatchCosts, SplitRules, share_out
from can_train.training.distributed import Ranks, check_alike
from fakes.ragged import OBJECTIVES, Objective, Ragged, RaggedNet


def gradients(ranks: Ranks, folder: Path, *, samples: int, mutant: str = "", parts: int = 1) -> None:
    """Computes the gradient of every objective together; rank 0 writes it down. Rank r cuts its share into at least
    r · (`parts` − 1) micro-batches.
    """
    found, micro_batches = {}, {}
    for name, objective in OBJECTIVES.items():
        torch.manual_seed(0)
        model, data = RaggedNet().to(torch.float64), Ragged.draw(samples, torch.float64)
        if mutant == "own noise":
            order = np.random.default_rng(ranks.rank)
            data.noise, data.alpha = (values[order.permutation(len(values))] for values in (data.noise, data.alpha))
        result = _run_share(ranks, model, data, objective, own_means=mutant == "own denominators", parts=parts)
        shares = ranks.gather(lambda result=result: result)
        check_denominators(combine_shares(shares), objective.denominators(data), size=samples)
        ranks.reduce_gradients(list(model.parameters()))
        scale = 1 / ranks.size if mutant == "mean" else 1.0
        found[name] = torch.cat([scale * p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[f"{name} means"] = torch.tensor(list(combine_shares(shares).means.values()))
        micro_batches[name] = [len(share.micro_batches) for share in shares]
    if ranks.is_first:
        torch.save((found, micro_batches), folder / "gradients.pt")
    ranks.close()


def _run_share(
    ranks: Ranks, model: RaggedNet, data: Ragged, objective: Objective, *, own_means: bool, parts: int
) -> BatchResult:
    costs = BatchCosts.of_samples(data.sizes)
    stops = [0, *np.cumsum(share_out(costs, ranks.size)).tolist()]
    start, stop = stops[ranks.rank], stops[ranks.rank + 1]

    def losses_of(a: int, b: int) -> Losses:
        return objective.losses(model, data, start + a, start + b)

    denominators = objective.denominators(data)
    if own_means and stop > start:
        denominators = {term: own for term, (_, own) in losses_of(0, stop - start).items()}
    limit = costs.cost(start, stop) / max(1, ranks.rank * (parts - 1))
    batcher = MicroBatcher(model, rules=SplitRules(safe_limit=limit))
    return batcher.add_share(losses_of, costs.part(start, stop), denominators=denominators)


def lost_share(ranks: Ranks, folder: Path) -> None:
    """Every rank takes the first half, so that the second is computed by nobody."""
    shares = ranks.gather(lambda: BatchResult(denominators={"error": 1.0}))
    check_denominators(combine_shares(shares), {"error": 4.0}, size=4)


def unlike_data(ranks: Ranks, folder: Path) -> None:
    """Of three ranks, the last one has other data; one part is none on rank 1."""
    data = {"samples": 5, "digest": None if ranks.rank == 1 else "a", "shape": (2, 3 + ranks.rank // 2)}
    check_alike(ranks, lambda: data, "The ranks of a run must read the same data", "Seed them")


def some_gradients(ranks: Ranks, folder: Path) -> None:
    """Of five parameters, all ranks have a gradient of one, rank 1 of another, nobody of the third. Ranks 0 and 1 have
    a sparse gradient of the fourth, and all ranks one of the fifth, which is dense on rank 2 only.
    """
    parameters = [nn.Parameter(torch.zeros(600, 1000)), nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(1)),
                  nn.Parameter(torch.zeros(9, 2)), nn.Parameter(torch.zeros(4, 2))]  # fmt: skip
    for table, with_gradient in ((parameters[3], (0, 1)), (parameters[4], (0, 1, 2))):
        if ranks.rank in with_gradient:
            rows = torch.tensor([[1, 1, 2 + ranks.rank % 2]])
            gradient = torch.sparse_coo_tensor(rows, torch.ones(3, 2), table.shape, check_invariants=True)
            table.grad = gradient.to_dense() if ranks.rank == 2 else gradient
    parameters[0].grad = torch.full((600, 1000), 1.0 + ranks.rank)
    if ranks.rank == 1:
        # Not as it would lie in memory by itself.
        parameters[1].grad = torch.arange(6.0).reshape(2, 3).T
    ranks.reduce_gradients(parameters)
    torch.save([parameter.grad for parameter in parameters], folder / f"grads-{ranks.rank}.pt")
    ranks.close()


class Cached(nn.Module):
    """Statistics that all ranks have, and a cache that each makes as it needs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("count", torch.tensor(10 + rank))
        self.register_buffer("cache", torch.full((1 + rank,), float(rank)) if rank else None)


def buffers(ranks: Ranks, folder: Path) -> None:
    model = Cached(ranks.rank)
    ranks.broadcast_buffers(model)
    torch.save(dict(model.named_buffers()), folder / f"buffers-{ranks.rank}.pt")
    ranks.close()


def exchanged(ranks: Ranks, folder: Path) -> None:
    """Writes down what the small exchanges return."""
    order: list[str] = ranks.gather(lambda: f"rank {ranks.rank}")
    path = folder / "turns.txt"

    def take_turn() -> int:
        time.sleep(0.2 * (ranks.size - ranks.rank))
        with path.open("a") as file:
            file.write("first\n" if ranks.is_first else "other\n")
        return ranks.rank

    results = (order, ranks.on_rank0(lambda: ranks.rank), ranks.on_every_rank(lambda: ranks.rank), ranks.sharing_host())
    torch.save((*results, ranks.on_rank0_first(take_turn)), folder / f"exchanged-{ranks.rank}.pt")
    ranks.close()


def fail(ranks: Ranks, folder: Path, *, how: str) -> None:
    """Something happens to rank 1; the others go on to the next exchange."""

    def work() -> None:
        if ranks.rank == 1:
            _fail(how)

    ranks.gather(work)
    ranks.gather(lambda: None)


def _fail(how: str) -> None:
    if how == "does not fit":
        raise DoesNotFitError("It must fit", remedy="", value="1 GiB")
    if how == "bug":
        raise ValueError("a bug")
    if how == "leaves":
        raise SystemExit(143)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_signal(ranks: Ranks, folder: Path) -> None:
    """Rank 0 waits for rank 1, which comes when it has heard that a signal ended rank 0."""
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(143)))
    (folder / f"ready-{ranks.rank}").touch()
    if ranks.rank == 1:
        while not (folder / "ended").exists():
            time.sleep(0.01)
    ranks.gather(lambda: None)


def objects(ranks: Ranks, folder: Path) -> None:
    """Exchanges objects around the length of a message, which one rank alone has."""
    for length in (0, 1, *range(4000, 4100), 100_000):
        texts = ["x" * length if rank == 1 else "y" for rank in range(ranks.size)]
        assert ranks.exchange((ranks.rank, texts[ranks.rank])) == list(enumerate(texts))
    ranks.close()
