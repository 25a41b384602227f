"""A task as small as a task can be, for tests of what trains: a straight line through points."""

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun
from can_train.fit.factor_rule import Aim, FactorRule, SafetyFactor
from can_train.memory.meters import CpuMeter
from can_train.reporter import SilentReporter
from can_train.runs.attempts import StopRequests
from can_train.runs.run_folder import RunFolder
from can_train.task import BatchTask, Feature
from can_train.training.session import Parts, Session
from can_train.training.train import make_session, train

SAMPLES = 60


class LineBatch:
    """Squared errors of some points."""

    def __init__(self, x: Tensor, fail_above: int) -> None:
        self._x = x
        self._fail_above = fail_above
        self.denominators: Mapping[str, float] = {"error": float(len(x))}

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        if stop - start > self._fail_above:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        x = self._x[start:stop]
        return {"error": ((model(x) - 3 * x[:, :1]).square().sum(), float(stop - start))}


class LineTask(BatchTask):
    """Points on a line; a batch of more than `fail_above` samples runs out of memory."""

    def __init__(self, *, fail_above: int = 10**9) -> None:
        self.train_rows = np.arange(SAMPLES)
        self.validation_rows = np.arange(SAMPLES, SAMPLES + 10)
        self.loss_weights: Mapping[str, float] = {"error": 1.0}
        self.fail_above = fail_above
        self.memory_features = (Feature("positions"), Feature("points"))
        self._x = torch.randn(SAMPLES + 10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def describe(self, row: int) -> str:
        return f"point {row}"

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.stack([rows + 1.0, np.ones(len(rows))], axis=1)

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        return LineBatch(self._x[rows].to(device, dtype), self.fail_above)

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        scores: Tensor = model(self._x[rows].to(device, dtype))
        return scores

    def judge(self, score: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> Mapping[str, Any]:
        return {"mean": float(score(self.validation_rows).mean())}


class StoppedTask(LineTask):
    """Sends this process a SIGTERM while it prepares training batch `after`, counted from 1 (0: never); fix the
    micro-batch, since a search prepares batches too. Planning prepares one to see whether samples are coupled.
    """

    def __init__(self, *, after: int) -> None:
        super().__init__()
        self._left = after + 1 if after else 0

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        is_training = generator is not None
        self._left -= is_training
        if is_training and self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().logical_batch(rows, device, dtype, generator)


class Notices(SilentReporter):
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def fixed(factor: float) -> FactorRule:
    """A safety factor that was decided before."""
    return FactorRule(decided=SafetyFactor(factor, "for a test"), aim=Aim(0.9))


def line_parts(
    folder: Any, task: LineTask | None = None, *, settings: Mapping[str, Any] = {}, **training: Any
) -> Parts:
    """Makes everything a session needs, under a temporary folder."""
    run = line_run(folder, settings=settings, **training)
    existing = list((folder / "runs").glob("*"))
    created = RunFolder(existing[0]) if existing else RunFolder.create(folder / "runs", run.key, run.config)
    return Parts(
        run=run, folder=created, task=task or LineTask(), meter=CpuMeter(), reporter=Notices(), stops=StopRequests()
    )


def train_line(folder: Any, task: LineTask | None = None, **training: Any) -> Session:
    """Trains to the end, or from the folder's checkpoint on; a signal ends it as it ends a run."""
    parts = line_parts(folder, task, **training)
    session = make_session(parts, fixed(0.5))
    with parts.stops.installed():
        train(session)
    return session


def line_run(folder: Any, *, settings: Mapping[str, Any] = {}, **training: Any) -> ResolvedRun:
    """Resolves a run with some training settings; its first factor is that of the table, which data do not change."""
    values: dict[str, Any] = {"factor.prior": "table"}
    values |= {f"training.{name}": value for name, value in ({"epochs": 2} | training).items()}
    paths = {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state")}
    return resolve(RunRequest(model="gat", dataset="synthetic", values=values | paths | settings))
