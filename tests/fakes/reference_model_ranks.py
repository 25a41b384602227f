"""Functions that each rank runs in the tests of reference models: the ranks request outputs together. The outputs may
differ between ranks, and one rank may fail.
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
from fakes.line_fit import LineBatch, Notices, fixed, line_parts
from fakes.small_reference_models import ReferenceLineTask, SmallReferenceModel

SLOW_S = 0.02
ROUNDING = 1e-6


class RankReferenceModel(SmallReferenceModel):
    """A reference model with one output row per sample.

    Args:
        rank: Rank of this process.
        rounding: Size of the noise in the outputs; the noise differs between ranks.
        fault: A rank and its fault: `kill`, `no memory`, or `slow`: the model is slow on the device of this rank,
            and on the host of the other ranks.
    """

    def __init__(
        self, *, rank: int, rounding: float, fault: tuple[int, str], placements: Sequence[str], numbers: int
    ) -> None:
        torch.manual_seed(0)
        super().__init__(placements=placements, values_per_row=1)
        self.model.extra = nn.Linear(1, numbers).requires_grad_(False)
        self.rank, self.rounding = rank, rounding
        self.how = fault[1] if fault[0] == rank else ""
        self.slow_on_device, self.slow_on_host = (fault[1] == "slow" and mine for mine in (self.how, not self.how))

    def lengths(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]]:
        return {"word": np.ones(len(rows), dtype=np.int64)}

    def outputs(
        self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, Tensor]:
        self.num_requested += len(rows)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        if self.slow_on_host if model is self.model else self.slow_on_device:
            time.sleep(SLOW_S)
        each = torch.from_numpy(np.sin(rows.astype(np.float64) % 9)).to(device, dtype)[:, None]
        noise = torch.from_numpy(np.cos(rows.astype(np.float64) * (1 + self.rank))).to(device, dtype)[:, None]
        return {"word": model(each) + self.rounding * noise}


class DistilledLineTask(ReferenceLineTask):
    """Points on a line; the outputs of the reference model are the targets."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> "DistilledLineBatch":
        return DistilledLineBatch(self._x[rows].to(device, dtype), rows, self.outputs_of_role)


class DistilledLineBatch(LineBatch):
    """Some points, and the outputs that are their targets."""

    def __init__(self, x: Tensor, rows: NDArray[np.int64], outputs_of_role: Mapping[str, Any]) -> None:
        super().__init__(x, 10**9)
        self._rows = rows
        self._outputs_of_role = outputs_of_role

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        aims = self._outputs_of_role["oracle"](self._rows[start:stop])["word"][:, :1].to(self._x.dtype)
        return {"error": ((model(self._x[start:stop]) - aims).square().sum(), float(stop - start))}


class LargestFirstTask(DistilledLineTask):
    """A curriculum: the first epochs have the points with the largest outputs."""

    def bind_outputs(self, role: str, answers: Any) -> None:
        super().bind_outputs(role, answers)
        outputs = answers(self.train_rows)["word"][:, 0].cpu().numpy()
        self.largest_first = self.train_rows[np.argsort(-outputs, kind="stable")]

    def in_epoch(self, epoch: int, epochs: int) -> SimpleNamespace:
        size = len(self.train_rows) * (epoch + 1) // epochs
        return SimpleNamespace(train_rows=np.sort(self.largest_first[:size]), logical_batch=self.logical_batch)


def train_with_reference_model(
    ranks: Ranks,
    folder: Path,
    *,
    fault: tuple[int, str] = (0, ""),
    placements: Sequence[str] = ("cache",),
    capacities_mib: Sequence[int] = (),
    numbers: int = 1,
    own_cache: bool = False,
    largest_first: bool = False,
) -> None:
    """Requests the outputs of a reference model and trains, as a run does.

    Args:
        ranks: The ranks of the training.
        folder: Folder of the run; each rank writes its results to `rank-<rank>.pt`.
        fault: A rank, and its fault when it requests outputs.
        placements: Placements of the reference model that the plan may choose.
        capacities_mib: Capacity of each rank's simulated GPU; none: the CPU.
        numbers: Output width of the reference model's extra layer.
        own_cache: Whether each rank has a cache of its own; the outputs of the ranks then differ by rounding.
        largest_first: Whether the outputs decide which points an epoch has.
    """
    oracle = RankReferenceModel(
        rank=ranks.rank, rounding=ROUNDING if own_cache else 0.0, fault=fault, placements=placements,
        numbers=numbers,
    )  # fmt: skip
    task = (LargestFirstTask if largest_first else DistilledLineTask)(oracle)
    state = folder / (f"state-{ranks.rank}" if own_cache else "state")
    settings = {"paths.state_dir": str(state), "training.precision": "fp64", "training.scheduler": "constant",
                "training.batch_size": 20, "training.micro_batch_size": 20, "training.epochs": 4}  # fmt: skip
    parts = replace(ranks.on_rank0_first(lambda: line_parts(folder, task, settings=settings)), ranks=ranks)
    if capacities_mib:
        parts = replace(parts, meter=open_meter(f"sim:{capacities_mib[ranks.rank]}MiB"))
    with parts.meter.active():
        session = make_session(parts, fixed(0.5))
        num_requested = oracle.num_requested
        training_loop.train(session)
    assert isinstance(parts.reporter, Notices)
    results = {
        "weights": torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()]),
        "num_requested": num_requested,
        "plans": [asdict(plan) for plan in session.reference_models.plans],
        "step": session.progress.step,
        "notices": parts.reporter.texts,
    }
    torch.save(results, folder / f"rank-{ranks.rank}.pt")
    ranks.close()
