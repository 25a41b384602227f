"""What ranks do in the tests of reference models: they ask an oracle together, and it may say something else to one
of them, or something may happen to one.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.memory.meters import open_meter
from can_train.training import train as training_loop
from can_train.training.distributed import Ranks
from can_train.training.train import make_session
from fakes.asking_worlds import AskingTask, Oracle
from fakes.line_fit import LineBatch, Notices, fixed, line_parts

SLOW_S = 0.02
ROUNDING = 1e-6


class FirmOracle(Oracle):
    """Says something of every sample.

    Args:
        rank: Who asks.
        rounding: By how much it says something else to each rank.
        trouble: The rank that something happens to, and what: `kill`, `no memory`; `slow`: on its device the oracle is
            slow, on the host it is to the other ranks.
    """

    def __init__(
        self, *, rank: int, rounding: float, trouble: tuple[int, str], placements: Sequence[str], numbers: int
    ) -> None:
        torch.manual_seed(0)
        super().__init__(placements=placements, hunger=1)
        self.model.extra = nn.Linear(1, numbers).requires_grad_(False)
        self.rank, self.rounding = rank, rounding
        self.how = trouble[1] if trouble[0] == rank else ""
        self.slow_on_device, self.slow_on_host = (trouble[1] == "slow" and mine for mine in (self.how, not self.how))

    def lengths(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]]:
        return {"word": np.ones(len(rows), dtype=np.int64)}

    def outputs(
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        self.asked += len(rows)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        if self.slow_on_host if model is self.model else self.slow_on_device:
            time.sleep(SLOW_S)
        each = torch.from_numpy(np.sin(rows.astype(np.float64) % 9)).to(device, dtype)[:, None]
        noise = torch.from_numpy(np.cos(rows.astype(np.float64) * (1 + self.rank))).to(device, dtype)[:, None]
        return {"word": model(each) + self.rounding * noise}


class TaughtTask(AskingTask):
    """Points of which the oracle knows where they lie."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> "TaughtBatch":
        return TaughtBatch(self._x[rows].to(device, dtype), rows, self.told)


class TaughtBatch(LineBatch):
    """Some of them."""

    def __init__(self, x: Tensor, rows: NDArray[np.int64], told: Mapping[str, Any]) -> None:
        super().__init__(x, 10**9)
        self._rows = rows
        self._told = told

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        aims = self._told["oracle"](self._rows[start:stop])["word"][:, :1].to(self._x.dtype)
        return {"error": ((model(self._x[start:stop]) - aims).square().sum(), float(stop - start))}


class SteeredTask(TaughtTask):
    """Points of which the first epochs have those that the oracle finds largest."""

    def bind_outputs(self, role: str, answers: Any) -> None:
        super().bind_outputs(role, answers)
        said = answers(self.train_rows)["word"][:, 0].cpu().numpy()
        self.largest_first = self.train_rows[np.argsort(-said, kind="stable")]

    def in_epoch(self, epoch: int, epochs: int) -> SimpleNamespace:
        size = len(self.train_rows) * (epoch + 1) // epochs
        return SimpleNamespace(train_rows=np.sort(self.largest_first[:size]), logical_batch=self.logical_batch)


def ask_together(
    ranks: Ranks,
    folder: Path,
    *,
    trouble: tuple[int, str] = (0, ""),
    placements: Sequence[str] = ("cache",),
    capacities_mib: Sequence[int] = (),
    numbers: int = 1,
    own_cache: bool = False,
    steered: bool = False,
) -> None:
    """Asks an oracle and trains, as a run does.

    Args:
        ranks: Who trains.
        folder: Of the run; what each rank came to is in its `rank-<rank>.pt`.
        trouble: The rank that something happens to when it asks, and what.
        placements: Where answers may come from.
        capacities_mib: Of each rank's simulated GPU; none: the CPU.
        numbers: Weights of the oracle.
        own_cache: Whether no rank sees the answers that another one has written down; each is told others, a bit.
        steered: Whether the answers decide what is trained on.
    """
    oracle = FirmOracle(
        rank=ranks.rank, rounding=ROUNDING if own_cache else 0.0, trouble=trouble, placements=placements,
        numbers=numbers,
    )  # fmt: skip
    task = (SteeredTask if steered else TaughtTask)(oracle)
    state = folder / (f"state-{ranks.rank}" if own_cache else "state")
    settings = {"paths.state_dir": str(state), "training.precision": "fp64", "training.scheduler": "constant",
                "training.batch_size": 20, "training.micro_batch_size": 20, "training.epochs": 4}  # fmt: skip
    parts = replace(ranks.on_rank0_first(lambda: line_parts(folder, task, settings=settings)), ranks=ranks)
    if capacities_mib:
        parts = replace(parts, meter=open_meter(f"sim:{capacities_mib[ranks.rank]}MiB"))
    with parts.meter.active():
        session = make_session(parts, fixed(0.5))
        asked = oracle.asked
        training_loop.train(session)
    assert isinstance(parts.reporter, Notices)
    told = {
        "weights": torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()]),
        "asked": asked,
        "plans": [asdict(plan) for plan in session.reference_models.plans],
        "step": session.progress.step,
        "notices": parts.reporter.texts,
    }
    torch.save(told, folder / f"rank-{ranks.rank}.pt")
    ranks.close()
